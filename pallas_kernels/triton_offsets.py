"""The sizes of arrays that Triton kernels can reach.

Pallas gives Triton offsets of 32 bits, signed and counted in elements, unless an array has more
than 2**32 bytes. In an array of 8 bits that is smaller, an offset may be past 2**31 and wrap.
"""

import math
from typing import Any

_MOST_ELEMENTS, _MOST_BYTES = 2**31, 2**32


def unsupported(array: Any) -> str | None:
    """Why no Triton kernel can address all of an array, or None."""
    size = math.prod(array.shape)
    if size > _MOST_ELEMENTS and size * array.dtype.itemsize <= _MOST_BYTES:
        return f"cannot address an array of 8 bits and 2 to 4 GiB, got {size} elements"
    return None
