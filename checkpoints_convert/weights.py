"""Reading weights: tensor by tensor, slice by slice, into host arrays made beforehand.

The result is allocated once, in its final form; a tensor is copied through slices of a few
megabytes, so the peak is the result and little more (the files are mapped, not read whole).
Knows nothing of families: `report` has already decided what goes where.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from checkpoints_convert.dtypes import STORED, all_finite, as_dtype, raw
from checkpoints_convert.naming import table_of
from checkpoints_convert.report import Report
from checkpoints_convert.shards import open_tensors
from checkpoints_convert.spec import Array, ConversionError, Placement, find
from dllm_jax.models.architecture import arch_of

Progress = Callable[[int, int], None]
_SLICE_BYTES = 2 << 20  # fits a cache; smaller is no faster


def read_weights(report: Report, dtype: str = "auto", progress: Progress | None = None) -> Any:
    """The parameter tree of an inspected Hugging Face folder, as NumPy arrays.

    Args:
        report: From `inspect`; must be free of problems.
        dtype: Type of every leaf; "auto" is the checkpoint's own.
        progress: Called with bytes read so far and in all, after each slice.

    Raises:
        ConversionError: With every NaN, Inf and overflow found.
    """
    cfg, _ = report.require_ok()
    target = as_dtype(report.dtype or "float32" if dtype == "auto" else dtype)

    def allocate(leaf: Any) -> Array:
        return np.empty(leaf.shape, leaf.dtype)

    tree: Any = jax.tree.map(allocate, arch_of(cfg).param_shapes(cfg, target))
    by_file: dict[str, list[Placement]] = {}
    for place in report.placements:
        by_file.setdefault(report.stored[place.name].file, []).append(place)
    total = sum(
        math.prod(place.shape) * STORED[report.stored[place.name].dtype].itemsize
        for place in report.placements
    )
    done, problems = 0, list[str]()
    for file, places in by_file.items():
        with open_tensors(report.folder / file) as handle:
            for place in places:
                bad: set[str] = set()
                leaf = find(tree, place.path)
                for size in _copy(handle.get_slice(place.name), place, leaf, bad):
                    done += size
                    if progress is not None:
                        progress(done, total)
                problems += [f"{place.name} {reason}" for reason in sorted(bad)]
    problems += _tied_head(report)
    if problems:
        raise ConversionError(report.source, problems)
    return tree


def _copy(tensor: Any, place: Placement, leaf: Array, bad: set[str]) -> Iterator[int]:
    """Copy one tensor into its part of a leaf; yields the bytes of each slice read.

    Reasons against the tensor's values are added to `bad`.
    """
    view = place.part.view(leaf)
    groups = view.shape[0]  # the file's rows are cut where the leaf's first axis moves on
    rows = place.shape[0] // groups
    group_bytes = math.prod((rows, *place.shape[1:])) * leaf.itemsize
    step = max(_SLICE_BYTES // group_bytes, 1)
    for start in range(0, groups, step):
        stop = min(start + step, groups)
        data: Array = tensor[place.start + start * rows : place.start + stop * rows]
        yield data.nbytes
        if not all_finite(data):
            bad.add("holds NaN or Inf")
        elif data.dtype != leaf.dtype:
            with np.errstate(over="ignore"):
                data = data.astype(leaf.dtype)
            if not all_finite(data):
                bad.add(f"does not fit {leaf.dtype}; use bfloat16")
        if not bad:
            part = view[start:stop]
            raw(part)[...] = raw(data).reshape(part.shape)


def _tied_head(report: Report) -> list[str]:
    """A head beside a tied embedding must be its copy; it is not read otherwise."""
    table = table_of(str(report.family))
    head, embed = (report.stored.get(name) for name in (table.lm_head, table.embed))
    wanted = {place.name for place in report.placements}
    if head is None or embed is None or table.lm_head in wanted:
        return []
    if (head.dtype, head.shape) == (embed.dtype, embed.shape):
        with (
            open_tensors(report.folder / head.file) as a,
            open_tensors(report.folder / embed.file) as b,
        ):
            left, right = a.get_slice(table.lm_head), b.get_slice(table.embed)
            rows = head.shape[0]
            step = max(_SLICE_BYTES // (head.shape[1] * 4), 1)
            slices = (slice(start, min(start + step, rows)) for start in range(0, rows, step))
            if all(bool((raw(left[s]) == raw(right[s])).all()) for s in slices):
                return []
    return [
        f"{table.keys.tied} is true but {table.lm_head} differs from {table.embed}; "
        "set it to false in config.json to keep the head"
    ]
