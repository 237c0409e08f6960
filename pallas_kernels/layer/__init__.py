"""What a layer computes beside its attention, as few operations."""

from .api import LayerOps, add_rms_norm, gated_matmul, qkv_matmul, rotate_qkv, split_matmul
from .fp8 import Fp8Matrix, Fp8Rows

__all__ = [
    "Fp8Matrix",
    "Fp8Rows",
    "LayerOps",
    "add_rms_norm",
    "gated_matmul",
    "qkv_matmul",
    "rotate_qkv",
    "split_matmul",
]
