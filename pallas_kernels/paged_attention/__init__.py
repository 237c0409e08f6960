"""Attention of a window over its paged context and its own fresh keys."""

from .api import paged_attention
from .mask import WindowMask

__all__ = ["WindowMask", "paged_attention"]
