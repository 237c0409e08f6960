"""Reading the weights of an inspected Hugging Face folder into a parameter tree.

The tree is allocated once, in its final form; `copying` fills it by the placements of the report.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .copying import Copy, Cut, Keep, KeyPath, Progress, copy_tree
from .dtypes import STORED, as_dtype, raw
from .report import Report
from .rules import Array, ConversionError, Placement, Shape, find
from .scaled import E4M3, Form, Scaled
from .shards import Stored
from .tensor_names import Table

_COMPARED_BYTES = 16 << 20


def read_weights(
    report: Report,
    dtype: str = "auto",
    progress: Progress | None = None,
    keep: Keep | None = None,
    cut: Cut | None = None,
    passed: Mapping[KeyPath, Form] | None = None,
    as_stored: bool = False,
) -> Any:
    """The parameter tree of an inspected Hugging Face folder, as NumPy arrays.

    Args:
        report: The result of `inspect`; must have no problems.
        dtype: Type of the leaves; "auto" is that of the checkpoint. Some stay float32.
        progress: Called after each piece with the bytes read so far and in total.
        keep, cut: As in `copy_tree`.
        passed: Leaves of `report.by_output` to return unchanged, each as a `Scaled`.
        as_stored: `keep` gets leaves in the memory order of the file, which is faster to read.
            Leaves read in rows and `Scaled` leaves are not affected.

    Raises:
        ConversionError: The values have NaN, Inf or overflows; lists all of them.
    """
    report.require_ok()
    forms = dict(passed or {})
    problems = [text for packed in report.packed.values() for text in packed.problems()]
    if problems:
        raise ConversionError(report.source, problems)
    target = as_dtype(report.dtype or "float32" if dtype == "auto" else dtype)

    places: dict[Any, list[Placement]] = {}
    for place in report.placements:
        places.setdefault(place.path, []).append(place)

    def copies_of(path: KeyPath, leaf: Array, first: int) -> list[Copy]:
        return _copies(report, places.get(path, []), forms.get(path), leaf, first)

    def scaled(path: KeyPath, values: Any) -> Any:
        form = forms.get(path)
        if form is None:
            return values
        scales = np.empty(form.outputs, np.float32)
        for place in places[path]:
            rows = form.scales_of(place.part, scales)
            stored = report.packed[place.name].scales(place.start, place.shape[0])
            rows[...] = stored.reshape(rows.shape)
        return Scaled(values=values, scales=scales, form=form)

    def cut_of(path: KeyPath, shape: Shape) -> list[tuple[int, int]] | None:
        """Read in rows only leaves that are stored row by row."""
        rows = places.get(path, [])
        is_cut = all(_is_row(place) or _has_rows(place) for place in rows)
        return cut(path, shape) if cut and is_cut else None

    shapes = report.shapes_in(target)
    for path, form in forms.items():
        *above, last = path
        find(shapes, above)[last] = jax.ShapeDtypeStruct((*form.outputs, form.depth), E4M3)

    def kept(path: KeyPath, leaf: Any) -> Any:
        return keep(path, scaled(path, leaf)) if keep else leaf

    def order_of(path: KeyPath) -> tuple[int, ...] | None:
        is_turned = as_stored and path not in forms and path in places
        return places[path][0].part.order if is_turned else None

    tree, problems = copy_tree(shapes, copies_of, progress, keep and kept, cut_of, order_of)
    problems += _tied_head(report)
    if problems:
        raise ConversionError(report.source, problems)
    for path in forms if keep is None else ():
        *above, last = path
        parent = find(tree, above)
        parent[last] = scaled(path, parent[last])
    return tree


def _copies(
    report: Report, places: Sequence[Placement], form: Form | None, leaf: Array, first: int
) -> list[Copy]:
    """What fills a leaf, or some of its rows from `first` on."""
    found: list[Copy] = []
    for place in places:
        index = place.part.index
        if _is_row(place):
            if not first <= index[0] < first + len(leaf):
                continue
            part = dataclasses.replace(place.part, index=(index[0] - first, *index[1:]))
            place = dataclasses.replace(place, part=part)
        elif first:  # `_has_rows`
            place = dataclasses.replace(place, start=place.start + first)
        view = form.values_of(place.part, leaf) if form else place.part.view(leaf)
        found.append(_copy(report, place, view))
    return found


def _is_row(place: Placement) -> bool:
    """Whether it fills one row of its leaf's first axis, as the tensor of one expert does."""
    return bool(place.part.index) and isinstance(place.part.index[0], int)


def _has_rows(place: Placement) -> bool:
    """Whether it fills all rows of its leaf's first axis, and the file stores them in sequence."""
    part = place.part
    return (
        part.axes[0] == 0
        and part.groups[:1] in ((), (1,))
        and part.index[:1] in ((), (slice(None),))
    )


def _copy(report: Report, place: Placement, target: Array) -> Copy:
    stored = report.stored[place.name]
    is_passed = target.dtype == E4M3
    dtype = E4M3 if is_passed else STORED[stored.dtype]
    before = place.start * math.prod(stored.shape[1:])  # elements of the tensor
    factors = report.factors.get(place.name)
    packed = None if is_passed else report.packed.get(place.name)
    return Copy(
        place.name,
        report.folder / stored.file,
        stored.offset + before * dtype.itemsize,
        dtype,
        target,
        factors and (lambda start, count: factors(before + start, count)),
        packed and (lambda start, count: packed.read(before + start, count)),
    )


def _tied_head(report: Report) -> Iterator[str]:
    """A problem if the head of a tied model differs from the embedding."""
    table = report.tensors()
    wanted = {place.name for place in report.placements}
    if table.lm_head not in wanted and has_own_head(report.folder, report.stored, table):
        yield (
            f"{table.keys.tied} is true but {table.lm_head} differs from {table.embed}; "
            "set it to false in config.json to keep the head"
        )


def has_own_head(folder: Path, held: Mapping[str, Stored], table: Table) -> bool:
    """Whether a folder has a head that differs from its embedding."""
    head, embed = held.get(table.lm_head), held.get(table.embed)
    if head is None or embed is None:
        return False
    same = (head.dtype, head.shape) == (embed.dtype, embed.shape)
    return not same or not _same_values(folder, head, embed)


def _same_values(folder: Path, a: Stored, b: Stored) -> bool:
    """Whether two tensors of one type and shape are equal bit by bit."""
    dtype = STORED[a.dtype]
    step, size = _COMPARED_BYTES // dtype.itemsize, math.prod(a.shape)

    def read(stored: Stored, start: int) -> Array:
        count = min(step, size - start)
        offset = stored.offset + start * dtype.itemsize
        return raw(np.fromfile(folder / stored.file, dtype, count, offset=offset))

    return all(bool((read(a, i) == read(b, i)).all()) for i in range(0, size, step))
