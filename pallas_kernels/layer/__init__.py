"""What a layer computes beside its attention, as few operations."""

from .api import (
    LayerOps,
    add_rms_norm,
    gated_matmul,
    norm_rotate,
    qkv_matmul,
    rotate_qkv,
    sandwich_norm,
    split_matmul,
)
from .fp8 import Fp8Matrix, Fp8Rows

__all__ = [
    "Fp8Matrix",
    "Fp8Rows",
    "LayerOps",
    "add_rms_norm",
    "gated_matmul",
    "norm_rotate",
    "qkv_matmul",
    "rotate_qkv",
    "sandwich_norm",
    "split_matmul",
]
