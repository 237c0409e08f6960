"""The best path of a grammar over the window as a few small launches."""

from .api import PathKernels, choose

__all__ = ["PathKernels", "choose"]
