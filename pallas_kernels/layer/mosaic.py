"""What the Mosaic kernels of this folder ask of the device and of their operands."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import hopper
from .fp8 import DTYPE as FP8
from .fp8 import LINE, Fp8Matrix


def unsupported(x: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels cannot take such rows here, or None."""
    if reason := hopper.unsupported() or hopper.unsupported_version():
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs a 16-bit type, got {x.dtype}"
    return None if x.size else "needs at least one row"


def unsupported_pair(x: Array, w: Array | Fp8Matrix) -> str | None:
    """Why no kernel can multiply these operands, or None."""
    if w.dtype not in (x.dtype, FP8):
        return f"needs operands of one type, got {x.dtype} and {w.dtype}"
    if isinstance(w, Fp8Matrix) and w.values.shape[-1] != w.shape[0]:
        return f"needs inputs that are whole lines of {LINE} bytes, got {w.shape[0]}"
    return None


def num_rows(x: Array | jax.ShapeDtypeStruct) -> int:
    """Number of rows, with any leading axes."""
    return x.size // x.shape[-1]
