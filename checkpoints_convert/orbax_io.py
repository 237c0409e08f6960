"""Converted folders: an Orbax parameter tree, `meta.json` and the tokenizer's files.

    DST/params/         Orbax checkpoint, one uncompressed array a leaf
    DST/meta.json       format, family, config, defaults, dtype, source digests
    DST/tokenizer.json  and the other tokenizer files of the source

`placing` brings such a folder to its place. Importing this module imports Orbax, which takes a
second.
"""

# pyright: standard
# (Orbax has no type stubs, so strict checking of this file reports nothing but that.)

import asyncio
import contextlib
import copy
import logging
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from checkpoints_convert.dtypes import as_dtype
from checkpoints_convert.meta import PARAMS, write_meta
from checkpoints_convert.report import META, Report
from checkpoints_convert.spec import ConversionError
from checkpoints_convert.weights import Progress
from dllm_jax.models.architecture import arch_of


def save(params: Any, report: Report, folder: Path) -> None:
    """Fill an empty folder with a converted checkpoint.

    Args:
        params: NumPy arrays in the tree of the network.
        report: On the checkpoint they came from.
    """
    _write_params(params, folder.absolute() / PARAMS)
    for name in report.tokenizer_files:
        shutil.copyfile(report.folder / name, folder / name)
    write_meta(report, str(params["embed"].dtype), folder)


def restore(report: Report, dtype: str = "auto", progress: Progress | None = None) -> Any:
    """The parameter tree of a converted folder as NumPy arrays.

    Args:
        dtype: Type of the result; "auto" is the stored one.
        progress: Called with bytes read so far and in all, after each leaf.
    """
    cfg, _ = report.require_ok()
    stored = as_dtype(str(report.dtype))
    param_shapes = arch_of(cfg).param_shapes
    shapes = param_shapes(cfg, stored)
    targets = param_shapes(cfg, stored if dtype == "auto" else as_dtype(dtype))
    kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
    args = ocp.args.PyTreeRestore(item=shapes, restore_args=kinds)
    with _quiet(), ocp.Checkpointer(_handler(report.num_bytes, progress)) as checkpointer:
        try:
            found = checkpointer.restore((report.folder / PARAMS).absolute(), args=args)
        except (OSError, ValueError, KeyError) as error:
            reason = f"{PARAMS} cannot be read ({error}); convert the checkpoint again"
            raise ConversionError(report.source, [reason]) from error
    leaves, tree = jax.tree.flatten(found)
    del found  # so that a leaf of another type goes as soon as it is cast
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(targets), strict=True)
    for i, (wanted, target) in enumerate(pairs):
        leaves[i] = _checked(report, leaves[i], wanted).astype(target.dtype, copy=False)
    return jax.tree.unflatten(tree, leaves)


def _checked(report: Report, leaf: Any, wanted: jax.ShapeDtypeStruct) -> Any:
    if leaf.shape != wanted.shape or leaf.dtype != wanted.dtype:
        reason = (
            f"{PARAMS} holds {leaf.dtype}{list(leaf.shape)} where {META} says "
            f"{wanted.dtype}{list(wanted.shape)}; convert the checkpoint again"
        )
        raise ConversionError(report.source, [reason])
    return leaf


def _write_params(params: Any, path: Path) -> None:
    with _quiet(), ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(params))


class _LeanHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of NumPy arrays, with files mapped instead of read into buffers."""

    def __init__(self, total: int, progress: Progress | None):
        super().__init__(deepcopy_host_arrays=False)
        self._done, self._total, self._progress = 0, total, progress

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        context = ts.Context({"file_io_mode": {"mode": "memmap"}})
        read_leaves = super().deserialize

        async def read(info: Any, arg: Any) -> Any:
            info = copy.copy(info)
            info.ts_context = context
            [leaf] = await read_leaves([info], [arg])
            self._done += leaf.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)
            return leaf

        args = args or [ocp.RestoreArgs()] * len(infos)
        return await asyncio.gather(*map(read, infos, args))


def _handler(total: int = 0, progress: Progress | None = None) -> ocp.PyTreeCheckpointHandler:
    """Orbax set up for memory: left alone it copies the whole tree before it writes.

    One uncompressed file a leaf is written from our arrays and mapped when it is read; bfloat16
    weights compress by a fifth only.
    """
    lean = _LeanHandler(total, progress)
    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, lean))
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=registry
    )


@contextlib.contextmanager
def _quiet() -> Generator[None, None, None]:
    """Without Orbax's log lines, one of which warns of the absence of files nobody asked for."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
