"""`edit_indel`, and what it alone uses."""

from .edit_indel import STRATEGY, EditIndel

__all__ = ["STRATEGY", "EditIndel"]
