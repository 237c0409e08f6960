"""The write of new keys and values of all layers into their pages, as one operation."""

from .api import write_rows

__all__ = ["write_rows"]
