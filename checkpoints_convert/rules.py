"""Rules that map a stored tensor to a slice of a parameter leaf and an axis order.

Import assigns to that slice and export reads it, so the two cannot disagree.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Index = tuple[Any, ...]
Tensor = tuple[str, Shape, np.dtype[Any]]  # name, shape and type in a file

_LAYER = "{i}"
EXPERT = "{e}"
_SHOWN = 10  # most names or problems of a list that are shown


class ConversionError(ValueError):
    """A checkpoint that cannot be read; `problems` has every reason, the message the first ones.

    A wrong size in `config.json` can cause a problem for each of thousands of tensors.
    """

    def __init__(self, source: str, problems: Iterable[str]):
        self.source = source
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            text = f"{source}: {self.problems[0]}"
        else:
            shown, rest = self.problems[:_SHOWN], len(self.problems) - _SHOWN
            lines = "".join(f"\n  {i}. {p}" for i, p in enumerate(shown, 1))
            more = f"\n  and {rest} more, which inspect lists" if rest > 0 else ""
            text = f"{source}: {len(self.problems)} problems{lines}{more}"
        super().__init__(text)


@dataclasses.dataclass(frozen=True)
class Part:
    """A slice of a leaf seen in the axis order of the stored tensor.

    Attributes:
        axes: Order of the slice's axes in the file.
        groups: Number of those axes that form each dimension of the stored tensor; empty if every
            axis is a dimension.
        index: Selects the slice of the leaf; empty for the whole leaf.
    """

    axes: tuple[int, ...]
    groups: tuple[int, ...] = ()
    index: Index = ()

    def view(self, leaf: Array) -> Array:
        """A view of the slice whose elements in C order are the stored tensor."""
        return leaf[self.index].transpose(self.axes)

    def shape(self, leaf_shape: Shape) -> Shape:
        """Shape of the stored tensor that fills this part of a leaf of `leaf_shape`."""
        # An array of this shape without memory.
        empty = np.broadcast_to(np.uint8(0), leaf_shape)  # pyright: ignore[reportUnknownMemberType]
        sizes = iter(self.view(empty).shape)
        groups = self.groups or (1,) * len(self.axes)
        return tuple(math.prod(itertools.islice(sizes, count)) for count in groups)

    @property
    def order(self) -> tuple[int, ...]:
        """All axes of the leaf, in a memory order that matches the slice to the file."""
        chosen = [i for i, one in enumerate(self.index) if isinstance(one, int)]
        others = [i for i in range(len(chosen) + len(self.axes)) if i not in chosen]
        return (*chosen, *(others[i] for i in self.axes))

    def of(self, expert: int) -> "Part":
        """This part for one expert, in a leaf that holds all experts."""
        return dataclasses.replace(self, index=(expert, *self.index))


@dataclasses.dataclass(frozen=True)
class Rule:
    """Tensor `pattern` fills `part` of the leaf at `path`.

    `{i}` stands for the layer number. With `{e}` every index of the leaf's first axis has a tensor,
    and `part` applies to the slice at that index. Rules of one pattern share a tensor and take
    consecutive rows of it, in the order of the rules.
    """

    pattern: str
    path: str
    part: Part


@dataclasses.dataclass(frozen=True)
class Placement:
    """One rule for one layer (and expert): rows of a tensor, and their target.

    Attributes:
        shape: Shape of these rows; that of the whole tensor unless other placements share it.
        start: First of these rows in the tensor.
    """

    name: str
    path: tuple[str | int, ...]
    shape: Shape
    part: Part
    start: int = 0


@dataclasses.dataclass(frozen=True)
class Numbered:
    """A tensor's name parsed into its rule and the numbers in it."""

    rule: Rule
    layer: int | None
    expert: int | None


def placements(rules: Sequence[Rule], shapes: Any) -> tuple[Placement, ...]:
    """All placements that fill a parameter tree, in the order of the rules, layer by layer.

    Args:
        rules: The table of a family. A rule whose leaf is not in the tree is skipped.
        shapes: Tree of objects with a `shape`, as `param_shapes` returns it.
    """
    taken: dict[str, int] = {}  # rows of a tensor that earlier rules take

    def expand(rule: Rule, layer: int) -> Iterator[Placement]:
        path = tuple(layer if key == _LAYER else key for key in rule.path.split("."))
        leaf = find(shapes, path)
        if leaf is None:
            return
        name, whole = rule.pattern.replace(_LAYER, str(layer)), tuple(leaf.shape)
        if EXPERT not in rule.pattern:
            shape, start = rule.part.shape(whole), taken.get(name, 0)
            taken[name] = start + shape[0]
            yield Placement(name, path, shape, rule.part, start)
            return
        shape = rule.part.shape(whole[1:])
        for expert in range(whole[0]):
            yield Placement(name.replace(EXPERT, str(expert)), path, shape, rule.part.of(expert))

    def expand_all() -> Iterator[Placement]:
        for rule in rules:
            if _LAYER not in rule.path:
                yield from expand(rule, 0)
        for layer in range(len(shapes["layers"])):
            for rule in rules:
                if _LAYER in rule.path:
                    yield from expand(rule, layer)

    return tuple(expand_all())


def tensor_shapes(places: Iterable[Placement]) -> dict[str, Shape]:
    """The shape that each tensor must have for all its placements."""
    shapes: dict[str, Shape] = {}
    for place in places:
        shapes[place.name] = (place.start + place.shape[0], *place.shape[1:])
    return shapes


def numbered(rules: Iterable[Rule], name: str) -> Numbered | None:
    """The first rule that `name` matches for some layer and expert, even past the model's end."""
    for rule in rules:
        match = _regex(rule.pattern).fullmatch(name)
        if match:
            numbers = {key: int(digits) for key, digits in match.groupdict().items()}
            return Numbered(rule, numbers.get("i"), numbers.get("e"))
    return None


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    """A rule's pattern as a regular expression with the numbers as groups `i` and `e`."""
    text = re.escape(pattern)
    for key, group in ((_LAYER, "i"), (EXPERT, "e")):
        text = text.replace(re.escape(key), rf"(?P<{group}>\d+)")
    return re.compile(text)


def find(tree: Any, path: Sequence[str | int]) -> Any:
    """The leaf at `path`, or None."""
    for key in path:
        if isinstance(key, str) and key not in tree:
            return None
        tree = tree[key]
    return tree


def listed(names: Iterable[str]) -> str:
    """Names for an error message: all, or the first ones of a long list."""
    names = list(names)
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
