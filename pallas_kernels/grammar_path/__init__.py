"""The best path of a grammar over the window, in a few small launches."""

from .api import PathKernels, choose

__all__ = ["PathKernels", "choose"]
