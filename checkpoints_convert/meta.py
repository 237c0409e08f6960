"""`meta.json` of a converted folder: what it says, and whether the folder keeps to it.

Written when a checkpoint is converted and read by `inspect`, so nothing here needs Orbax.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import jax

from checkpoints_convert.dtypes import as_dtype
from checkpoints_convert.report import FORMAT, META, Report
from checkpoints_convert.tokenizer_files import present, read_json
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import config_from_json, defaults_from_json

PARAMS = "params"  # the folder of the weights
_VERSION = 2


def write_meta(report: Report, dtype: str, folder: Path) -> None:
    """Say in a converted folder what is in it.

    Args:
        report: On the checkpoint it was made from.
        dtype: Type of the weights.
    """
    config, defaults = report.require_ok()
    meta = {
        "format": FORMAT,
        "version": _VERSION,
        "family": report.family,
        "config": dataclasses.asdict(config),
        "defaults": dataclasses.asdict(defaults),
        "dtype": dtype,
        "source": report.source,
        "digests": {name: _digest(report.folder / name) for name in report.files},
        "tokenizer_files": list(report.tokenizer_files),
    }
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def describe(folder: Path, source: str) -> Report:
    """The report on a converted folder, from its `meta.json` and the sizes of its files."""
    report = Report(source=source, folder=folder, kind="converted")
    try:
        meta = read_json(folder / META)
        if meta.get("format") != FORMAT or meta.get("version") != _VERSION:
            raise ValueError(
                f"{META} is of format {meta.get('format')!r} version {meta.get('version')!r}, "
                f"not {FORMAT!r} version {_VERSION}; convert the checkpoint again"
            )
        config = config_from_json(meta["family"], meta["config"])
        defaults = defaults_from_json(meta["defaults"])
        dtype = as_dtype(meta["dtype"])
    except KeyError as error:
        return dataclasses.replace(report, problems=(f"{META} lacks {error}; convert it again",))
    except (AttributeError, TypeError, ValueError) as error:
        return dataclasses.replace(report, problems=(str(error),))
    shapes = leaf_shapes(arch_of(config).param_shapes(config, dtype))
    return dataclasses.replace(
        report,
        family=meta["family"],
        config=config,
        defaults=defaults,
        dtype=meta["dtype"],
        num_tensors=len(shapes),
        num_params=sum(math.prod(leaf.shape) for leaf in shapes.values()),
        num_bytes=sum(_bytes(leaf) for leaf in shapes.values()),
        shapes={name: tuple(leaf.shape) for name, leaf in shapes.items()},
        files=(META,),
        tokenizer_files=present(folder),
        problems=tuple(
            problem
            for name, leaf in shapes.items()
            for problem in _damage(folder / PARAMS / name, _bytes(leaf))
        ),
    )


def leaf_shapes(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names of their folders: keys and indices joined by points."""
    util: Any = jax.tree_util  # only partly typed
    leaves = util.tree_leaves_with_path(tree)
    return {util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _damage(leaf: Path, want: int) -> list[str]:
    """What is wrong with the files of one leaf: Orbax reads zeros in place of missing data."""
    problems: list[str] = []
    files = leaf.iterdir() if leaf.is_dir() else ()
    have = sum(path.stat().st_size for path in files if not path.name.startswith("."))
    if have != want:
        problems.append(
            f"{PARAMS}/{leaf.name} holds {have} bytes instead of {want}; "
            "convert the checkpoint again"
        )
    # Read here as well: Orbax, stopped half-way by one bad leaf, leaves its other reads
    # running into a closed event loop.
    with contextlib.suppress(FileNotFoundError):
        try:
            read_json(leaf / ".zarray")
        except ValueError as error:
            problems.append(f"{PARAMS}/{leaf.name}: {error}")
    return problems


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
