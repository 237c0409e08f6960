"""`dflash`, and what it alone uses."""

from .dflash import DRAFT, STRATEGY, DFlash

__all__ = ["DRAFT", "STRATEGY", "DFlash"]
