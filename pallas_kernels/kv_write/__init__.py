"""The write of new keys and values of all layers into their pages, as one operation."""

from .api import page_slots, write_rows

__all__ = ["page_slots", "write_rows"]
