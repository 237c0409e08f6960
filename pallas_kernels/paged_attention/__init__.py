"""Attention of a window over its paged context and its own fresh keys."""

from pallas_kernels.paged_attention.api import WindowMask, paged_attention

__all__ = ["WindowMask", "paged_attention"]
