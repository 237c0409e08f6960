"""Check, from shapes alone, that a table fills every element of every leaf once.

Each placement's part is a box in its leaf. The boxes' edges cut the leaf into cells; it is filled
once if every cell lies in one box.
"""

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dllm_jax.convert.rules import Part, Placement, Shape, find, listed

_Box = tuple[tuple[int, int], ...]


def unaccounted(places: Iterable[Placement], shapes: Mapping[str, Any]) -> list[str]:
    """The problems of the placements of a tree of shapes, in words; empty if there are none.

    Args:
        shapes: Tree of dicts and one list, its leaves anything with a `shape`.
    """
    parts: dict[tuple[str | int, ...], list[Part]] = {path: [] for path in _paths(shapes)}
    rows: dict[str, list[tuple[int, int]]] = {}
    for place in places:
        parts[place.path].append(place.part)
        rows.setdefault(place.name, []).append((place.start, place.start + place.shape[0]))
    wrong = [
        ".".join(map(str, path))
        for path, boxes in parts.items()
        if not _fills(boxes, tuple(find(shapes, path).shape))
    ]
    problems = [f"leaves that tensors do not fill once: {listed(wrong)}"] if wrong else []
    torn = [name for name, spans in rows.items() if not _follow(spans)]
    return problems + ([f"tensors whose rows are not used once: {listed(torn)}"] if torn else [])


def _paths(tree: Any, above: tuple[str | int, ...] = ()) -> Iterable[tuple[str | int, ...]]:
    """The path of every leaf."""
    if hasattr(tree, "shape"):
        yield above
        return
    keys: Any = tree if hasattr(tree, "keys") else range(len(tree))
    for key in keys:
        yield from _paths(tree[key], (*above, key))


def _fills(parts: list[Part], shape: Shape) -> bool:
    """Whether the parts cover a leaf of `shape`, each element once and in some order of axes."""
    boxes = [_box(part, shape) for part in parts]
    edges = [
        sorted({edge for box in boxes for edge in box[axis]} | {0, size})
        for axis, size in enumerate(shape)
    ]
    cells = np.zeros([len(cuts) - 1 for cuts in edges], np.int32)
    for box in boxes:
        cells[
            tuple(
                slice(bisect.bisect_left(cuts, low), bisect.bisect_left(cuts, high))
                for cuts, (low, high) in zip(edges, box, strict=True)
            )
        ] += 1
    return bool((cells == 1).all())


def _box(part: Part, shape: Shape) -> _Box:
    """The range of each axis of a leaf that a part takes."""
    whole = (slice(None),) * (len(shape) - len(part.index))
    box: list[tuple[int, int]] = []
    for size, index in zip(shape, (*part.index, *whole), strict=True):
        taken: Any = range(size)[index]
        box.append((taken, taken + 1) if isinstance(taken, int) else (taken.start, taken.stop))
    kept = sum(isinstance(index, slice) for index in (*part.index, *whole))
    if sorted(part.axes) != list(range(kept)):
        raise ValueError(f"{part} must name each of the {kept} axes of its slice once")
    return tuple(box)


def _follow(spans: list[tuple[int, int]]) -> bool:
    """Whether ranges of rows follow each other from row 0 on."""
    stops = [0, *(stop for _, stop in sorted(spans))]
    return all(start == stop for (start, _), stop in zip(sorted(spans), stops, strict=False))
