"""`meta.json` of a converted folder: what it says, and whether the folder keeps to it.

Written when a checkpoint is converted and read by `inspect`, so nothing here needs Orbax.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import config_from_json, defaults_from_json

from .dtypes import as_dtype
from .lora import AdapterFacts
from .report import FORMAT, META, Report
from .shards import ADAPTER
from .tokenizer_files import present, read_json

PARAMS = "params"  # the folder of the weights
_VERSION = 3
_SHOWN = 5  # damaged leaves that are told one by one
AGAIN = "convert the checkpoint again"
# How Orbax stores an array that is neither cut nor compressed, apart from shape and type.
_PLAIN = {
    "zarr_format": 2,
    "order": "C",
    "compressor": None,
    "filters": None,
    "dimension_separator": ".",
}


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
        "adapter": _adapter(report),
    }
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def describe(folder: Path, source: str) -> Report:
    """The report on a converted folder, from its `meta.json` and the sizes of its files."""
    report = Report(source=source, folder=folder, kind="converted")
    try:
        meta = read_json(folder / META, AGAIN)
        if meta.get("format") != FORMAT or meta.get("version") != _VERSION:
            raise ValueError(
                f"{META} is of format {meta.get('format')!r} version {meta.get('version')!r}, "
                f"not {FORMAT!r} version {_VERSION}; convert the checkpoint again"
            )
        config = config_from_json(meta["family"], meta["config"])
        defaults = defaults_from_json(meta["defaults"])
        dtype = as_dtype(meta["dtype"])
        adapter = _adapter_facts(meta["adapter"])
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
        adapter=adapter,
        problems=tuple(_first(_damage(folder / PARAMS, shapes))),
    )


def leaf_shapes(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names of their folders: keys and indices joined by points."""
    util: Any = jax.tree_util  # only partly typed
    leaves = util.tree_leaves_with_path(tree)
    return {util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _adapter(report: Report) -> dict[str, Any] | None:
    """What to remember of the merged adapter, and the digest of its file."""
    if report.adapter is None:
        return None
    digest = _digest(Path(report.adapter.source) / ADAPTER)
    return {**dataclasses.asdict(report.adapter), "digest": digest}


def _adapter_facts(said: Any) -> AdapterFacts | None:
    if said is None:
        return None
    return AdapterFacts(**{key: value for key, value in said.items() if key != "digest"})


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _damage(params: Path, shapes: Mapping[str, Any]) -> Iterator[str]:
    """Leaves that are not stored as we store them: their files hold the arrays and no more."""
    for name, leaf in shapes.items():
        folder, want = params / name, _bytes(leaf)
        files = folder.iterdir() if folder.is_dir() else ()
        have = sum(path.stat().st_size for path in files if not path.name.startswith("."))
        if have != want:
            yield f"{PARAMS}/{name} holds {have} bytes instead of {want}; {AGAIN}"
            continue
        try:
            found = read_json(folder / ".zarray", AGAIN)
        except OSError as error:
            yield f"{PARAMS}/{name}: {error}; {AGAIN}"
            continue
        except ValueError as error:
            yield f"{PARAMS}/{name}: {error}"
            continue
        kind, plain = found.get("dtype"), {**_PLAIN, "chunks": found.get("shape")}
        said = {"<f4": "float32", "<f2": "float16"}.get(str(kind), kind)
        if said != str(leaf.dtype) or found.get("shape") != list(leaf.shape):
            yield (
                f"{PARAMS}/{name} holds {said}{found.get('shape')} where {META} says "
                f"{leaf.dtype}{list(leaf.shape)}; {AGAIN}"
            )
        elif any(found.get(key) != value for key, value in plain.items()):
            yield f"{PARAMS}/{name} is cut or compressed, which is not supported; {AGAIN}"


def _first(problems: Iterable[str]) -> Iterator[str]:
    """The first of many problems of one kind, and how many more there are."""
    problems = list(problems)
    yield from problems[:_SHOWN]
    if len(problems) > _SHOWN:
        yield f"and {len(problems) - _SHOWN} more leaves of {PARAMS}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
