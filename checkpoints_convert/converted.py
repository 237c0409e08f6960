"""Converted folders: an Orbax parameter tree, `meta.json` and the tokenizer's files.

    DST/params/         Orbax checkpoint, one uncompressed array a leaf
    DST/meta.json       format, family, config, defaults, dtype, source digests
    DST/tokenizer.json  and the other tokenizer files of the source

Orbax writes the parameters. Each leaf is one plain array in one file, so reading and inspecting do
not need Orbax, whose import takes a second.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .copying import Copy, Cut, Keep, KeyPath, Progress, copy_tree
from .dtypes import as_dtype
from .lora import AdapterFacts
from .networks import Networks
from .report import FORMAT, META, Report
from .rules import Array, ConversionError
from .shards import ADAPTER
from .tokenizer_files import present, read_json

PARAMS = "params"  # the folder of the weights
_VERSION = 3
_SETTLE_S = 1.0  # wait for running writes after one has failed
_SHOWN = 5  # damaged leaves that are listed individually
AGAIN = "convert the checkpoint again"
# Orbax's header, without shape and type, of an array that is neither chunked nor compressed.
_PLAIN = {
    "zarr_format": 2,
    "order": "C",
    "compressor": None,
    "filters": None,
    "dimension_separator": ".",
}


def save(params: Any, report: Report, folder: Path) -> None:
    """Fill an empty folder with a converted checkpoint.

    Args:
        params: NumPy arrays in the tree of the network.
        report: The report on the source checkpoint.
    """
    _write_params(params, folder.absolute() / PARAMS)
    for name in report.tokenizer_files:
        shutil.copyfile(report.folder / name, folder / name)
    config, defaults = report.require_ok()
    meta = {
        "format": FORMAT,
        "version": _VERSION,
        "family": report.family,
        "config": dataclasses.asdict(config),
        "defaults": dataclasses.asdict(defaults),
        "dtype": str(params["final_norm"].dtype),
        "source": report.source,
        "digests": {name: _digest(report.folder / name) for name in report.files},
        "tokenizer_files": list(report.tokenizer_files),
        "adapter": _adapter(report),
    }
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def restore(
    report: Report,
    dtype: str = "auto",
    progress: Progress | None = None,
    keep: Keep | None = None,
    cut: Cut | None = None,
) -> Any:
    """The parameter tree of a converted folder as NumPy arrays.

    Args:
        dtype: Type of the result; "auto" is the stored one.
        progress: Called after each piece with the bytes read so far and in total.
        keep, cut: As in `copy_tree`.

    Raises:
        ConversionError: The values have NaN, Inf or overflows; lists all of them.
    """
    report.require_ok()
    stored = as_dtype(str(report.dtype))
    shapes = leaf_shapes(report.shapes_in(stored))

    def copies_of(path: KeyPath, leaf: Array, first: int) -> list[Copy]:
        name = ".".join(map(str, path))
        file, kind = _file(report, name, leaf.ndim), shapes[name].dtype
        offset = first * math.prod(leaf.shape[1:]) * kind.itemsize
        return [Copy(f"{PARAMS}/{name}", file, offset, kind, leaf)]

    wanted = report.shapes_in(stored if dtype == "auto" else as_dtype(dtype))
    tree, problems = copy_tree(wanted, copies_of, progress, keep, cut)
    if problems:
        raise ConversionError(report.source, problems)
    return tree


def describe(folder: Path, source: str, networks: Networks) -> Report:
    """Report on a converted folder, from its `meta.json` and the sizes of its files."""
    report = Report(source=source, folder=folder, kind="converted")
    try:
        meta = read_json(folder / META, AGAIN)
        if meta.get("format") != FORMAT or meta.get("version") != _VERSION:
            raise ValueError(
                f"{META} is of format {meta.get('format')!r} version {meta.get('version')!r}, "
                f"not {FORMAT!r} version {_VERSION}; convert the checkpoint again"
            )
        config = networks.config_from_json(meta["family"], meta["config"])
        defaults = networks.defaults_from_json(meta["defaults"])
        dtype = as_dtype(meta["dtype"])
        adapter = _adapter_facts(meta["adapter"])
        param_shapes = functools.partial(networks.param_shapes, config)
        shapes = leaf_shapes(param_shapes(dtype))
    except KeyError as error:
        return dataclasses.replace(report, problems=(f"{META} lacks {error}; convert it again",))
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        return dataclasses.replace(report, problems=(f"{META}: {error}",))
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
        param_shapes=param_shapes,
        problems=tuple(_first(_damage(folder / PARAMS, shapes))),
    )


def leaf_shapes(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names of their folders: keys and indices joined by dots."""
    util: Any = jax.tree_util  # only partly typed
    leaves = util.tree_leaves_with_path(tree)
    return {util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _adapter(report: Report) -> dict[str, Any] | None:
    """The facts of the merged adapter, and the digest of its file."""
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
    """Problems of leaves that are not stored as `save` does: one file with only the array."""
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
    """The first problems, and the number of the others."""
    problems = list(problems)
    yield from problems[:_SHOWN]
    if len(problems) > _SHOWN:
        yield f"and {len(problems) - _SHOWN} more leaves of {PARAMS}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file(report: Report, name: str, ndim: int) -> Path:
    """The file of the only chunk of a leaf."""
    return report.folder / PARAMS / name / ".".join("0" * ndim)


def _write_params(params: Any, path: Path) -> None:
    """Write with Orbax, one uncompressed file a leaf, without copying the arrays.

    By default Orbax copies the whole tree first and compresses, but bfloat16 weights shrink only by
    a fifth.
    """
    import orbax.checkpoint  # pyright: ignore[reportMissingTypeStubs]

    ocp: Any = orbax.checkpoint
    with quiet():
        arrays = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
        registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, arrays))
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_compression=False, type_handler_registry=registry
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(params))


@contextlib.contextmanager
def quiet() -> Generator[None, None, None]:
    """Suppress Orbax's log lines; one of them warns of missing files that are not needed.

    A failed write raises, but the others continue in the background and print a traceback each.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            try:
                yield
            except Exception:
                time.sleep(_SETTLE_S)
                raise
        print(said.getvalue(), end="", file=sys.stderr)
    finally:
        logger.setLevel(level)
