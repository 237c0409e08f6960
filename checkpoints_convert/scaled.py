"""8-bit leaves of a parameter tree, and their axes compared with the 16-bit leaf.

Files store matrices as [out, in]. An 8-bit leaf has the same order, with the inputs last and as one
axis, so that stored values are copied unchanged.
"""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from .rules import Array, Part, Shape

E4M3: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
_np: Any = np  # `argsort` and `expand_dims` are only partly typed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """The axes of an 8-bit leaf.

    Attributes:
        shape: Shape of the 16-bit leaf.
        inputs: Axes of the 16-bit leaf that a product contracts.
    """

    shape: Shape
    inputs: Shape

    @property
    def depth(self) -> int:
        """Numbers that share a scale."""
        return math.prod(self.shape[i] for i in self.inputs)

    @property
    def outputs(self) -> Shape:
        """Shape of the scales."""
        return tuple(self.shape[i] for i in self._outer)

    @property
    def _outer(self) -> Shape:
        return tuple(i for i in range(len(self.shape)) if i not in self.inputs)

    def values_of(self, part: Part, values: Array) -> Array:
        """The writable part of `values` [*outputs depth] that a tensor fills."""
        order = (*self._outer, *self.inputs)
        first = len(values) if self._outer[0] == 0 else self.shape[0]
        sizes = (first, *self.shape[1:])
        whole = values.reshape([sizes[i] for i in order])
        return part.view(whole.transpose(_np.argsort(order)))

    def scales_of(self, part: Part, scales: Array) -> Array:
        """The same for scales [*outputs], one for each row of the tensor."""
        return part.view(_np.expand_dims(scales, self.inputs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled:
    """A leaf as `values * scales[..., None]`.

    Attributes:
        values: [*outputs depth] in e4m3; an iterator over parts if a leaf is read in rows.
        scales: [*outputs] in float32.
    """

    values: Any
    scales: Array
    form: Form
