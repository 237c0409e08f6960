"""Attention of a window over its paged context and its own fresh keys."""

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.mask import WindowMask

__all__ = ["WindowMask", "paged_attention"]
