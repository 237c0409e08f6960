"""The weight types we read and write: their names, NumPy types and how to test them for NaN."""

from typing import Any

import ml_dtypes
import numpy as np

from .rules import Array
from .scaled import E4M3

# safetensors' name -> NumPy type, for every type that weights may have.
STORED: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Integer views of each type, and the least integers that are NaN or Inf: among positive values
# viewed as signed, and among negative values viewed as unsigned.
_OVERLAY = {
    STORED["BF16"]: (np.int16, 0x7F80, np.uint16, 0xFF80),
    STORED["F16"]: (np.int16, 0x7C00, np.uint16, 0xFC00),
    STORED["F32"]: (np.int32, 0x7F800000, np.uint32, 0xFF800000),
    E4M3: (np.int8, 0x7F, np.uint8, 0xFF),
}


def as_dtype(name: object) -> np.dtype[Any]:
    """The NumPy type called `name`.

    Raises:
        ValueError: `name` is no weight type.
    """
    if not isinstance(name, str) or name not in _NAMES:
        raise ValueError(f"dtype={name!r} is not supported; use one of {', '.join(_NAMES)}")
    return STORED[_NAMES[name]]


def all_finite(x: Array) -> bool:
    """Whether an array holds neither NaN nor Inf.

    Tested on the bits: bfloat16 has no fast test, and the maximum needs no temporary memory.
    """
    signed, positive, unsigned, negative = _OVERLAY[x.dtype]
    return not x.size or bool(x.view(signed).max() < positive and x.view(unsigned).max() < negative)


def raw(x: Array) -> Array:
    """The same memory as unsigned integers, which NumPy copies faster than bfloat16."""
    return x.view(_OVERLAY[x.dtype][2])
