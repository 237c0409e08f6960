"""New keys and values of every layer into their pages, as one operation."""

from .api import write_rows

__all__ = ["write_rows"]
