"""The weight types we read and write: their names, NumPy types and how to test them for NaN."""

from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.spec import Array

# safetensors' name -> NumPy type, for every type that weights may have.
STORED: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Exponent bits of each type, and the unsigned integer that overlays it: all ones mean NaN or Inf.
_EXPONENT = {
    STORED["BF16"]: (np.uint16, 0x7F80),
    STORED["F16"]: (np.uint16, 0x7C00),
    STORED["F32"]: (np.uint32, 0x7F800000),
}


def as_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type called `name`.

    Raises:
        ValueError: For a name that is no weight type.
    """
    if name not in _NAMES:
        raise ValueError(f"dtype={name!r} is not supported; use one of {', '.join(_NAMES)}")
    return STORED[_NAMES[name]]


def all_finite(x: Array) -> bool:
    """Whether a contiguous array holds neither NaN nor Inf (on the bits: bf16 has no fast test)."""
    kind, exponent = _EXPONENT[x.dtype]
    return not bool(((x.view(kind) & kind(exponent)) == exponent).any())


def raw(x: Array) -> Array:
    """The same memory as unsigned integers, which NumPy copies faster than bfloat16."""
    return x.view(_EXPONENT[x.dtype][0])
