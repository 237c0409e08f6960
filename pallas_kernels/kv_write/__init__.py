"""New keys and values of every layer into their pages, as one operation."""

from pallas_kernels.kv_write.api import write_rows

__all__ = ["write_rows"]
