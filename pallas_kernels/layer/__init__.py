"""What stands between the matrix products and the attention of a layer, as few operations."""

from pallas_kernels.layer.api import LayerOps, add_rms_norm, rotate_qkv, split_matmul

__all__ = ["LayerOps", "add_rms_norm", "rotate_qkv", "split_matmul"]
