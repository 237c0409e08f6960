"""What a layer computes beside its attention, as few operations."""

from .api import LayerOps, add_rms_norm, gated_matmul, qkv_matmul, rotate_qkv, split_matmul

__all__ = [
    "LayerOps",
    "add_rms_norm",
    "gated_matmul",
    "qkv_matmul",
    "rotate_qkv",
    "split_matmul",
]
