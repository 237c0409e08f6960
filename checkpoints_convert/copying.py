"""Copying stored tensors into preallocated arrays, in pieces, by several threads.

A piece is read into a few megabytes of scratch memory, checked, cast and written to its place, so
that peak memory is little more than the result. The result does not depend on the number of
threads; progress is reported in the order of the copies.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from .dtypes import all_finite, raw
from .rules import Array, Shape

Progress = Callable[[int, int], None]
KeyPath = tuple[str | int, ...]
Keep = Callable[[KeyPath, Any], Any]
# Takes the key path and shape of a leaf; returns ranges of rows to read, or None for all at once.
Cut = Callable[[KeyPath, Shape], "list[tuple[int, int]] | None"]
_Made = tuple[int, str | None]  # bytes of a piece, and its problem

_PIECE_BYTES = 2 << 20  # fits the caches of a core
_LINE = 64  # bytes of a cache line
_MOST_BUFFERS = 1024  # buffers of one read: IOV_MAX of Linux
_MOST_THREADS = 16  # more do not read faster, since memory bandwidth is the limit


class Numbers(Protocol):
    """A source of numbers that are computed while a tensor is copied."""

    def __call__(self, start: int, count: int) -> Array:
        """`count` elements from number `start` on, in C order and float32."""
        ...


@dataclasses.dataclass(frozen=True)
class Copy:
    """One stored tensor, or rows of one, and its target.

    Attributes:
        name: Name of the tensor, for messages.
        offset: Byte of the file where the tensor starts.
        dtype: Type of the stored elements.
        target: Array to fill, in the axis order of the file.
        update: Added in float32 before the one cast to the type of `target`.
        source: Read instead of the elements of the file, which are then in another form.
    """

    name: str
    path: Path
    offset: int
    dtype: np.dtype[Any]
    target: Array
    update: Numbers | None = None
    source: Numbers | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes to be read."""
        return self.target.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A contiguous part of a copy: its elements from `start` on go to `target`."""

    copy: Copy
    start: int
    target: Array


def copy_all(copies: Iterable[Copy], progress: Progress | None = None) -> list[str]:
    """Make all copies.

    Args:
        progress: Called after each piece with the bytes read so far and in total.

    Returns:
        Messages about problems of the values, in the order of the copies.

    Raises:
        OSError: If a file cannot be read or is too short.
    """
    copies = tuple(copies)
    total, done = sum(copy.num_bytes for copy in copies), 0
    found: dict[str, None] = {}  # a set that keeps its order
    with _opened({copy.path for copy in copies}) as files:
        pieces = itertools.chain.from_iterable(map(_pieces, copies))
        scratch = _Scratch()
        jobs = (functools.partial(_make, piece, files, scratch) for piece in pieces)
        with contextlib.closing(_in_order(jobs)) as made:
            for size, problem in made:
                done += size
                if problem is not None:
                    found[problem] = None
                if progress is not None:
                    progress(done, total)
    return list(found)


def copy_tree(
    shapes: Any,
    copies_of: Callable[[KeyPath, Array, int], Iterable[Copy]],
    progress: Progress | None = None,
    keep: Keep | None = None,
    cut: Cut | None = None,
    order_of: Callable[[KeyPath], tuple[int, ...] | None] = lambda _: None,
) -> tuple[Any, list[str]]:
    """Fill a tree of arrays from files; returns it and the problems of the values.

    Args:
        shapes: A tree of shapes and types.
        copies_of: Called with the key path of a leaf, an array for it or for some of its rows, and
            the index of the first row; returns the copies that fill the array.
        progress: As in `copy_all`.
        keep: Called with the key path and the array of each leaf; its result becomes the leaf, and
            one array at a time is in memory. None: return all arrays, read in the order of the
            files.
        cut: Ranges of rows of a leaf; `keep` then gets an iterator over arrays of these rows, of
            which one at a time is in memory.
        order_of: Called with the key path of a leaf; returns its axes in memory order for `keep`.
    """
    util: Any = jax.tree_util  # only partly typed
    found, tree = util.tree_flatten_with_path(shapes)
    leaves: list[tuple[KeyPath, Any]] = [
        (tuple(getattr(key, "key", getattr(key, "idx", "")) for key in path), shape)
        for path, shape in found
    ]
    if keep is None:
        arrays = [np.empty(shape.shape, shape.dtype) for _, shape in leaves]
        copies = [
            copy
            for (path, _), array in zip(leaves, arrays, strict=True)
            for copy in copies_of(path, array, 0)
        ]
        copies.sort(key=lambda copy: (copy.path, copy.offset))
        return util.tree_unflatten(tree, arrays), copy_all(copies, progress)
    # Arrays without memory, to compute sizes.
    numpy: Any = np  # only partly typed
    empty = [numpy.broadcast_to(np.zeros((), shape.dtype), shape.shape) for _, shape in leaves]
    sizes = [
        sum(copy.num_bytes for copy in copies_of(path, array, 0))
        for (path, _), array in zip(leaves, empty, strict=True)
    ]
    kept: list[Any] = []
    problems: list[str] = []
    total, done = sum(sizes), 0

    def read(path: KeyPath, array: Array, first: int) -> list[str]:
        nonlocal done
        copies, before = [*copies_of(path, array, first)], done

        def report(now: int, _: int) -> None:
            if progress is not None:
                progress(before + now, total)

        wrong = copy_all(copies, report)
        done += sum(copy.num_bytes for copy in copies)
        return wrong

    def parts(path: KeyPath, shape: Any, spans: list[tuple[int, int]]) -> Iterator[Array]:
        for first, end in spans:
            array = np.empty((end - first, *shape.shape[1:]), shape.dtype)
            problems.extend(read(path, array, first))
            yield array
            del array

    for path, shape in leaves:
        spans = None if cut is None else cut(path, shape.shape)
        if spans is not None:
            kept.append(keep(path, parts(path, shape, spans)))
            continue
        array = _empty(shape, order_of(path))
        wrong = read(path, array, 0)
        problems += wrong
        kept.append(None if wrong else keep(path, array))
        del array
    return util.tree_unflatten(tree, kept), problems


def _empty(shape: Any, order: tuple[int, ...] | None) -> Array:
    """An uninitialised array with this memory order of axes."""
    if order is None:
        return np.empty(shape.shape, shape.dtype)
    places = sorted(range(len(order)), key=order.__getitem__)
    return np.empty([shape.shape[i] for i in order], shape.dtype).transpose(places)


@contextlib.contextmanager
def _opened(paths: Iterable[Path]) -> Generator[dict[Path, int], None, None]:
    """File descriptors by path."""
    with contextlib.ExitStack() as stack:
        yield {path: stack.enter_context(path.open("rb", buffering=0)).fileno() for path in paths}


def _in_order(jobs: Iterable[Callable[[], _Made]]) -> Generator[_Made, None, None]:
    """Results of all jobs, in order; a few jobs run at a time."""
    threads = _num_threads()
    waiting = deque[Future[_Made]]()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # on Ctrl-C too: running pieces end within milliseconds
            for future in waiting:
                future.cancel()


def _num_threads() -> int:
    try:
        available = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        available = os.cpu_count() or 1
    return min(available, _MOST_THREADS)


def _pieces(copy: Copy) -> Iterator[_Piece]:
    """Cut a copy along the first axis with steps that fit the scratch memory."""
    target, item = _merged(copy.target), copy.dtype.itemsize
    axis = 0
    while axis < target.ndim - 2 and _inner(target.shape, axis) * item > _PIECE_BYTES:
        axis += 1
    inner = _inner(target.shape, axis)
    step = max(_PIECE_BYTES // (inner * item), 1)
    start = 0
    for outer in np.ndindex(*target.shape[:axis]):
        for first in range(0, target.shape[axis], step):
            part = target[(*outer, slice(first, first + step))]
            yield _Piece(copy, start, part)
            start += part.size


def _merged(x: Array) -> Array:
    """A view of the same elements in the same order, with as few axes as possible."""
    shape = [x.shape[-1]]
    for axis in reversed(range(x.ndim - 1)):
        if x.strides[axis] == x.strides[axis + 1] * x.shape[axis + 1]:
            shape[0] *= x.shape[axis]
        else:
            shape.insert(0, x.shape[axis])
    return x.reshape(shape)


def _inner(shape: Shape, axis: int) -> int:
    """Elements of one step along an axis."""
    return math.prod(shape[axis + 1 :])


def _make(piece: _Piece, files: dict[Path, int], scratch: "_Scratch") -> _Made:
    """Read one piece into its target."""
    copy, target = piece.copy, piece.target
    item, width = copy.dtype.itemsize, target.shape[-1]
    offset = copy.offset + piece.start * item
    size = target.size * item
    is_plain = copy.update is None and copy.source is None
    if is_plain and copy.dtype == target.dtype and target.flags.c_contiguous:
        _read(files[copy.path], [raw(target).data.cast("B")], offset, copy)
        return size, None if all_finite(target) else f"{copy.name} holds NaN or Inf"
    if copy.source is None:
        rows, buffers = scratch.rows("read", target.size // width, width, copy.dtype)
        _read(files[copy.path], buffers, offset, copy)
    else:
        rows = copy.source(piece.start, target.size).reshape(-1, width)
    if not all_finite(rows):
        return size, f"{copy.name} holds NaN or Inf"
    if copy.update is not None:
        added = copy.update(piece.start, target.size)
        rows = rows.astype(np.float32) + added.reshape(rows.shape)
    if copy.update is not None or rows.dtype != target.dtype:
        cast, _ = scratch.rows("cast", target.size // width, width, target.dtype)
        with np.errstate(over="ignore"):
            cast[...] = rows
        rows = cast
    if not all_finite(rows):
        return size, f"{copy.name} does not fit {target.dtype}; use bfloat16"
    raw(target)[...] = raw(rows).reshape(target.shape)
    return size, None


def _read(file: int, buffers: list[memoryview], offset: int, copy: Copy) -> None:
    """Fill buffers one after the other from a file."""
    while buffers:
        got = os.preadv(file, buffers[:_MOST_BUFFERS], offset)
        if not got:
            raise OSError(f"{copy.path} ends within {copy.name}; download it again")
        offset += got
        filled = 0
        while filled < len(buffers) and got >= buffers[filled].nbytes:
            got -= buffers[filled].nbytes
            filled += 1
        buffers = buffers[filled:]
        if got:
            buffers[0] = buffers[0][got:]


class _Scratch(threading.local):
    """Memory of each thread for the piece it works on."""

    def __init__(self):
        self._memory: dict[str, Array] = {}

    def rows(
        self, use: str, count: int, width: int, dtype: np.dtype[Any]
    ) -> tuple[Array, list[memoryview]]:
        """An array [count, width], and its rows as buffers.

        The row stride is an odd number of cache lines. With a power of two the elements of a column
        would share a few cache sets, and writing by columns would take three times as long.
        """
        used = width * dtype.itemsize
        stride = (-(-used // _LINE) | 1) * _LINE
        memory = self._memory.get(use)
        if memory is None or memory.size < count * stride:
            memory = self._memory[use] = np.empty(count * stride, np.uint8)
        lines = memory[: count * stride].reshape(count, stride)
        view = memory.data
        buffers = [view[i * stride : i * stride + used] for i in range(count)]
        return lines[:, :used].view(dtype), buffers
