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
import dataclasses
import hashlib
import json
import logging
import math
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from checkpoints_convert.dtypes import as_dtype
from checkpoints_convert.report import FORMAT, META, Report
from checkpoints_convert.spec import ConversionError
from checkpoints_convert.tokenizer_files import present, read_json
from checkpoints_convert.weights import Progress
from dllm_jax.models.dense import DenseConfig, param_shapes
from dllm_jax.models.families import FamilyDefaults

_VERSION = 1
_PARAMS = "params"


def save(params: Any, report: Report, folder: Path) -> None:
    """Fill an empty folder with a converted checkpoint.

    Args:
        params: NumPy arrays in the tree of `dllm_jax.models.dense.Params`.
        report: On the checkpoint they came from.
    """
    _write_params(params, folder.absolute() / _PARAMS)
    for name in report.tokenizer_files:
        shutil.copyfile(report.folder / name, folder / name)
    meta = _meta(params, report)
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def describe(folder: Path, source: str) -> Report:
    """The report on a converted folder, from its `meta.json`."""
    report = Report(source=source, folder=folder, kind="converted")
    try:
        meta = read_json(folder / META)
        if meta.get("format") != FORMAT or meta.get("version") != _VERSION:
            raise ValueError(
                f"{META} is of format {meta.get('format')!r} version {meta.get('version')!r}, "
                f"not {FORMAT!r} version {_VERSION}; convert the checkpoint again"
            )
        config = DenseConfig(**meta["config"])
        stops = tuple(meta["defaults"].pop("stop_token_ids"))
        defaults = FamilyDefaults(**meta["defaults"], stop_token_ids=stops)
        dtype = as_dtype(meta["dtype"])
    except KeyError as error:
        return dataclasses.replace(report, problems=(f"{META} lacks {error}; convert it again",))
    except (TypeError, ValueError) as error:
        return dataclasses.replace(report, problems=(str(error),))
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(config, dtype))
    shapes = {_name(path): tuple(leaf.shape) for path, leaf in leaves}
    size = sum(math.prod(shape) for shape in shapes.values())
    problems: list[str] = []
    for name, shape in shapes.items():
        have, want = _stored_bytes(folder / _PARAMS / name), math.prod(shape) * dtype.itemsize
        if have != want:
            problems.append(
                f"{_PARAMS}/{name} holds {have} bytes instead of {want}; "
                "convert the checkpoint again"
            )
        # Read here as well: Orbax, stopped half-way by one bad leaf, leaves its other reads
        # running into a closed event loop.
        with contextlib.suppress(FileNotFoundError):
            try:
                read_json(folder / _PARAMS / name / ".zarray")
            except ValueError as error:
                problems.append(f"{_PARAMS}/{name}: {error}")
    return dataclasses.replace(
        report,
        family=meta.get("family"),
        config=config,
        defaults=defaults,
        dtype=meta["dtype"],
        num_tensors=len(shapes),
        num_params=size,
        num_bytes=size * dtype.itemsize,
        shapes=shapes,
        files=(META,),
        tokenizer_files=present(folder),
        problems=tuple(problems),
    )


def restore(report: Report, dtype: str = "auto", progress: Progress | None = None) -> Any:
    """The parameter tree of a converted folder as NumPy arrays.

    Args:
        dtype: Type of the result; "auto" is the stored one.
        progress: Called with bytes read so far and in all, after each leaf.
    """
    cfg, _ = report.require_ok()
    stored = as_dtype(str(report.dtype))
    target = stored if dtype == "auto" else as_dtype(dtype)
    shapes = param_shapes(cfg, stored)
    kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
    args = ocp.args.PyTreeRestore(item=shapes, restore_args=kinds)
    with _quiet(), ocp.Checkpointer(_handler(report.num_bytes, progress)) as checkpointer:
        try:
            found = checkpointer.restore((report.folder / _PARAMS).absolute(), args=args)
        except (OSError, ValueError, KeyError) as error:
            reason = f"{_PARAMS} cannot be read ({error}); convert the checkpoint again"
            raise ConversionError(report.source, [reason]) from error
    leaves, tree = jax.tree.flatten(found)
    del found  # so that a leaf of another type goes as soon as it is cast
    for i, wanted in enumerate(jax.tree.leaves(shapes)):
        leaves[i] = _checked(report, leaves[i], wanted).astype(target, copy=False)
    return jax.tree.unflatten(tree, leaves)


def _stored_bytes(leaf: Path) -> int:
    """Size of a leaf's data; Orbax would read zeros in place of data that is not there."""
    files = leaf.iterdir() if leaf.is_dir() else ()
    return sum(path.stat().st_size for path in files if not path.name.startswith("."))


def _checked(report: Report, leaf: Any, wanted: jax.ShapeDtypeStruct) -> Any:
    if leaf.shape != wanted.shape or leaf.dtype != wanted.dtype:
        reason = (
            f"{_PARAMS} holds {leaf.dtype}{list(leaf.shape)} where {META} says "
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


def _meta(params: Any, report: Report) -> dict[str, Any]:
    config, defaults = report.require_ok()
    return {
        "format": FORMAT,
        "version": _VERSION,
        "family": report.family,
        "config": dataclasses.asdict(config),
        "defaults": dataclasses.asdict(defaults),
        "dtype": str(params["embed"].dtype),
        "source": report.source,
        "digests": {name: _digest(report.folder / name) for name in report.files},
        "tokenizer_files": list(report.tokenizer_files),
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _name(path: Any) -> str:
    """Name of a leaf's folder, as Orbax forms it: keys and indices joined by points."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
