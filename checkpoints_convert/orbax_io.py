"""Converted folders: an Orbax parameter tree, `meta.json` and the tokenizer's files.

    DST/params/         Orbax checkpoint, one uncompressed array a leaf
    DST/meta.json       format, family, config, defaults, dtype, source digests
    DST/tokenizer.json  and the other tokenizer files of the source

`placing` brings such a folder to its place. Orbax writes it (importing it takes a second); what it
wrote is one plain array a file, which we read as we read any other.
"""

import contextlib
import logging
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dllm_jax.models.architecture import arch_of

from .copying import Copy, Progress, copy_all
from .dtypes import as_dtype
from .meta import PARAMS, leaf_shapes, write_meta
from .report import Report
from .spec import Array, ConversionError


def save(params: Any, report: Report, folder: Path) -> None:
    """Fill an empty folder with a converted checkpoint.

    Args:
        params: NumPy arrays in the tree of the network.
        report: On the checkpoint they came from.
    """
    _write_params(params, folder.absolute() / PARAMS)
    for name in report.tokenizer_files:
        shutil.copyfile(report.folder / name, folder / name)
    write_meta(report, str(params["final_norm"].dtype), folder)


def restore(report: Report, dtype: str = "auto", progress: Progress | None = None) -> Any:
    """The parameter tree of a converted folder as NumPy arrays.

    Args:
        dtype: Type of the result; "auto" is the stored one.
        progress: Called with bytes read so far and in all, after each piece.

    Raises:
        ConversionError: With every NaN, Inf and overflow found.
    """
    cfg, _ = report.require_ok()
    stored = as_dtype(str(report.dtype))
    param_shapes = arch_of(cfg).param_shapes
    shapes = leaf_shapes(param_shapes(cfg, stored))

    def allocate(leaf: Any) -> Array:
        return np.empty(leaf.shape, leaf.dtype)

    wanted = param_shapes(cfg, stored if dtype == "auto" else as_dtype(dtype))
    tree: Any = jax.tree.map(allocate, wanted)
    leaves = leaf_shapes(tree)
    copies = [
        Copy(f"{PARAMS}/{name}", _file(report, name, leaf.ndim), 0, shapes[name].dtype, leaf)
        for name, leaf in leaves.items()
    ]
    problems = copy_all(copies, progress)
    if problems:
        raise ConversionError(report.source, problems)
    return tree


def _file(report: Report, name: str, ndim: int) -> Path:
    """The file of a leaf's one chunk."""
    return report.folder / PARAMS / name / ".".join("0" * ndim)


def _write_params(params: Any, path: Path) -> None:
    """Write with Orbax, set up for memory: left alone it copies the whole tree before it writes.

    One uncompressed file a leaf is written from our arrays; bfloat16 weights compress by a fifth
    only.
    """
    import orbax.checkpoint  # pyright: ignore[reportMissingTypeStubs]

    ocp: Any = orbax.checkpoint
    with _quiet():
        arrays = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
        registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, arrays))
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_compression=False, type_handler_registry=registry
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(params))


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
