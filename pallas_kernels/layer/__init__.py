"""The operations of a layer other than attention, fused into few launches."""

from .api import (
    LayerOps,
    add_rms_norm,
    gate,
    norm_rotate,
    quantize_rows,
    reduced_rms_norm,
    reduces,
    reduction,
    rotate_qkv,
    sandwich_norm,
    takes_routed,
)
from .api_products import gated_matmul, qkv_matmul, split_matmul, takes_groups
from .fp8 import Fp8Groups, Fp8Matrix, Fp8Rows, Fp8Sums
from .routed import RoutedRows

__all__ = [
    "Fp8Groups",
    "Fp8Matrix",
    "Fp8Rows",
    "Fp8Sums",
    "LayerOps",
    "RoutedRows",
    "add_rms_norm",
    "gate",
    "gated_matmul",
    "norm_rotate",
    "qkv_matmul",
    "quantize_rows",
    "reduced_rms_norm",
    "reduces",
    "reduction",
    "rotate_qkv",
    "sandwich_norm",
    "split_matmul",
    "takes_groups",
    "takes_routed",
]
