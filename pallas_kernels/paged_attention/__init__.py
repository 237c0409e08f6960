"""Attention of a window over its paged context and its own fresh keys."""

from .api import paged_attention
from .mask import TILE, WindowMask, whole_tile

__all__ = ["TILE", "WindowMask", "paged_attention", "whole_tile"]
