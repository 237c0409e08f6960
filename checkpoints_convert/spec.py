"""How checkpoint tensors fill parameter leaves: rules as data, one direction stated, both used.

A rule says which slice of which leaf a tensor is, and in which axis order. Reading assigns to that
slice, writing reads it, so import and export cannot disagree. Nothing here knows a tensor name of
a family, opens a file or imports jax.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Index = tuple[Any, ...]

_LAYER = "{i}"
_SHOWN = 10  # names shown of a long list


class ConversionError(ValueError):
    """A checkpoint that cannot be read; `problems` holds every reason."""

    def __init__(self, source: str, problems: Iterable[str]):
        self.source = source
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            text = f"{source}: {self.problems[0]}"
        else:
            lines = "".join(f"\n  {i}. {p}" for i, p in enumerate(self.problems, 1))
            text = f"{source}: {len(self.problems)} problems{lines}"
        super().__init__(text)


@dataclasses.dataclass(frozen=True)
class Part:
    """A slice of a leaf seen in the axis order of the stored tensor.

    Attributes:
        axes: Order of the slice's axes in which its elements lie in the file.
        rows: How many of those axes together form the tensor's first dimension; the others form
            its second. A vector has one axis.
        index: Selects the slice of the leaf; empty for the whole leaf.
    """

    axes: tuple[int, ...]
    rows: int = 1
    index: Index = ()

    def view(self, leaf: Array) -> Array:
        """The slice, writable if the leaf is: its elements in C order are the stored tensor."""
        return leaf[self.index].transpose(self.axes)

    def shape(self, leaf_shape: Shape) -> Shape:
        """Shape of the stored tensor that fills this part of a leaf of `leaf_shape`."""
        # An array of that shape without memory.
        empty = np.broadcast_to(np.uint8(0), leaf_shape)  # pyright: ignore[reportUnknownMemberType]
        view = self.view(empty).shape
        if len(view) == 1:
            return view
        return math.prod(view[: self.rows]), math.prod(view[self.rows :])


@dataclasses.dataclass(frozen=True)
class Rule:
    """Tensor `pattern` fills `part` of the leaf at `path`; `{i}` stands for the layer number."""

    pattern: str
    path: str
    part: Part


@dataclasses.dataclass(frozen=True)
class Placement:
    """One rule for one layer: the tensor's name and shape, and where it goes."""

    name: str
    path: tuple[str | int, ...]
    shape: Shape
    part: Part


def placements(rules: Sequence[Rule], shapes: Any) -> tuple[Placement, ...]:
    """Every tensor a parameter tree needs, in the order of the rules, layer by layer.

    Args:
        rules: The table of a family. A rule whose leaf the tree lacks asks for nothing.
        shapes: Tree of anything with a `shape`, as `param_shapes` gives it.
    """

    def expand(rule: Rule, layer: int) -> Iterator[Placement]:
        path = tuple(layer if key == _LAYER else key for key in rule.path.split("."))
        leaf = find(shapes, path)
        if leaf is not None:
            name = rule.pattern.replace(_LAYER, str(layer))
            yield Placement(name, path, rule.part.shape(tuple(leaf.shape)), rule.part)

    def expand_all() -> Iterator[Placement]:
        for rule in rules:
            if _LAYER not in rule.path:
                yield from expand(rule, 0)
        for layer in range(len(shapes["layers"])):
            for rule in rules:
                if _LAYER in rule.path:
                    yield from expand(rule, layer)

    return tuple(expand_all())


def is_known(rules: Sequence[Rule], name: str) -> bool:
    """Whether some rule has `name` for some layer, in the model or past its end."""
    return any(
        re.fullmatch(re.escape(rule.pattern).replace(re.escape(_LAYER), r"\d+"), name)
        for rule in rules
    )


def find(tree: Any, path: Sequence[str | int]) -> Any:
    """The leaf at `path`, None where the tree has none."""
    for key in path:
        if isinstance(key, str) and key not in tree:
            return None
        tree = tree[key]
    return tree


def listed(names: Iterable[str]) -> str:
    """Names for an error message: all of a few, the first of many."""
    names = list(names)
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
