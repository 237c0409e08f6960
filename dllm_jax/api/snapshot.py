"""Requests on disk, to run them again step by step (`dllm-jax replay`).

A snapshot is a folder. `snapshot.json` holds the model, strategy and sizes, and for each text its
prompt, settled tokens and placement. `slots.npz` holds the slots as they were last fetched. Reading
a snapshot runs none of its content: a strategy from outside this package must be given. Keys and
values are not stored: they are computed again from the tokens, as after a preemption.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
import time
import typing
from collections import abc
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from dllm_jax.convert.json_fields import check_fields
from dllm_jax.engine.checks import short_repr
from dllm_jax.engine.layout import EngineConfig, Placement, SamplingNumbers
from dllm_jax.engine.record import stored_arrays
from dllm_jax.engine.requests import SamplingParams
from dllm_jax.engine.sequence import Sequence
from dllm_jax.loading.jax_settings import cache_folder
from dllm_jax.loading.model import Model
from dllm_jax.models.split_axes import split_axis
from dllm_jax.strategies.core.needs import Needs
from dllm_jax.strategies.core.resolve import load_strategy

VERSION = 5
FACTS, SLOTS = "snapshot.json", "slots.npz"
_HASHED = 1 << 16  # leaves of at most this many elements identify the weights


@dataclasses.dataclass(frozen=True)
class SavedText:
    """One text of a snapshot.

    Attributes:
        tokens: Settled ids.
        start: Tokens in the cache at the last fetch.
        slot: The slot at the last fetch, None before the first decode step.
    """

    request_id: str
    index: int
    prompt: list[int]
    tokens: list[int]
    start: int
    nfe: int
    params: SamplingParams
    placement: Placement
    slot: np.ndarray | None


# Its fields that are JSON as they are.
_TEXT = {
    name: kind
    for name, kind in typing.get_type_hints(SavedText).items()
    if name not in ("params", "placement", "slot")
}


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The content of a folder; `draft` is None without a drafter."""

    folder: Path
    model: Mapping[str, Any]
    strategy: Mapping[str, Any]
    config: EngineConfig
    texts: list[SavedText]
    draft: Mapping[str, Any] | None = None


class SnapshotError(ValueError):
    """A snapshot that cannot be written, read or run."""


def snapshot_folder() -> Path:
    """Where snapshots go: next to the compile cache."""
    return cache_folder().parent / "snapshots"


# --- writing ----------------------------------------------------------------------------------


def snapshot_saver(
    model: Model,
    strategy: Any,
    config: EngineConfig,
    folder: Path | None = None,
    draft: Model | None = None,
) -> Callable[[abc.Sequence[Sequence]], str]:
    """The function that saves the sequences that a device failure ended.

    Args:
        folder: The folder of all snapshots; None: `snapshot_folder()`.
        draft: The drafter of the strategy.

    Returns:
        A function that writes them and returns the snapshot's folder. The engine reports its
        exceptions.
    """

    def save(sequences: abc.Sequence[Sequence]) -> str:
        sequences = [one for one in sequences if one.placement.grammar is None]
        if not sequences:
            raise SnapshotError("texts with a constraint are not saved")
        layout = {
            "version": VERSION,
            "dllm_jax": metadata.version("dllm-jax"),
            "model": model_facts(model),
            "draft": None if draft is None else model_facts(draft),
            "strategy": _strategy_facts(strategy),
            "config": dataclasses.asdict(config),
            "texts": [_text_facts(sequence) for sequence in sequences],
        }
        slots = {
            str(i): sequence.saved[0].saved(sequence.saved[1])
            for i, sequence in enumerate(sequences)
            if sequence.saved is not None
        }
        target = _new_folder(snapshot_folder() if folder is None else folder)
        with _private(target / SLOTS) as file:
            np.savez(file, **slots)
        # Last: a folder without it is not a snapshot.
        with _private(target / FACTS) as file:
            file.write((json.dumps(layout, indent=1) + "\n").encode())
        return str(target)

    return save


def _private(path: Path) -> IO[bytes]:
    """A new file that nobody else may read: it holds prompts."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _new_folder(base: Path) -> Path:
    with contextlib.suppress(FileExistsError):  # a file in its place fails below
        base.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%dT%H-%M-%S-"), dir=base))


def model_facts(model: Model) -> dict[str, Any]:
    """The identity of a model: its source, network and weights."""
    return {
        "source": model.source,
        "dtype": str(jax.tree.leaves(model.params)[0].dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": model.kv_cache_dtype,
        "quantized_head": model.has_quantized_head,
        "tensor_parallel_size": 1 if model.split is None else model.split.num_parts,
        "config": json.loads(json.dumps(dataclasses.asdict(model.config), default=str)),
        "weights": _weights(model),
    }


def _weights(model: Model) -> str | None:
    """A digest of the small leaves; None if the device can no longer be read.

    It does not depend on the devices that share the model: leaves that are split do not count.
    """
    digest = hashlib.sha256()
    try:
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
            if leaf.size <= _HASHED and split_axis(path) is None:
                digest.update(np.asarray(leaf).tobytes())
    except jax.errors.JaxRuntimeError:
        return None
    return digest.hexdigest()


def _strategy_facts(strategy: Any) -> dict[str, Any]:
    fields = {f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy)}
    fields.pop("fn", None)
    return {
        "spec": _spec(strategy.made_of),
        "fields": {name: _field(name, value) for name, value in fields.items()},
    }


def _spec(thing: Any) -> str:
    """`module:name`, or `file.py:name` where the module cannot be imported by its name."""
    module, name = thing.__module__, thing.__qualname__
    found = sys.modules.get(module)
    if "." in name or getattr(found, name, None) is not thing:
        raise SnapshotError(
            f"the strategy is made of {module}.{name}, which cannot be imported; "
            "keep it at the top level of a module"
        )
    if module != "__main__" and not module.startswith("strategy_file_"):
        return f"{module}:{name}"
    return f"{Path(str(getattr(found, '__file__', ''))).resolve()}:{name}"


def _field(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Needs):
        return {"needs": dataclasses.asdict(value)}
    if isinstance(value, tuple):
        return {"tuple": [_field(name, one) for one in value]}
    if callable(value):
        return {"function": _spec(value)}
    if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number):
        return np.asarray(value).item()
    raise SnapshotError(f"the strategy's {name}={value!r} is no number, word or function")


def _text_facts(sequence: Sequence) -> dict[str, Any]:
    return {
        "request_id": sequence.owner.id,
        **{name: getattr(sequence, name) for name in _TEXT if name != "request_id"},
        "params": dataclasses.asdict(sequence.owner.params),
        "placement": dataclasses.asdict(sequence.placement),
    }


# --- reading ----------------------------------------------------------------------------------


def load_snapshot(path: str | Path) -> Snapshot:
    """Read the folder of a snapshot.

    Raises:
        SnapshotError: It is missing, damaged, or of another version.
    """
    folder = Path(path)
    if not (folder / FACTS).is_file():
        raise SnapshotError(
            f"{str(path)!r} is no snapshot: there is no {FACTS} in it; give the folder that the "
            "error message named"
        )
    try:
        layout = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        version = layout["version"]
        if version != VERSION:
            raise SnapshotError(
                f"snapshot {str(path)!r} has version {short_repr(version)}, this program reads "
                f"{VERSION}; use dllm-jax {short_repr(layout.get('dllm_jax'))}"
            )
        slots = _read_slots(folder / SLOTS)
        texts = [
            _saved_text(f"texts[{i}]", text, slots.get(str(i)))
            for i, text in enumerate(layout["texts"])
        ]
        check_fields("model", layout["model"], _MODEL)
        check_fields("strategy", layout["strategy"], {"spec": str, "fields": dict[str, Any]})
        if layout["draft"] is not None:
            check_fields("draft", layout["draft"], _MODEL)
        config = _of(EngineConfig, "config", layout["config"])
        return Snapshot(folder, layout["model"], layout["strategy"], config, texts, layout["draft"])
    except SnapshotError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise SnapshotError(
            f"snapshot {str(path)!r} is damaged ({said(error)}); it cannot be replayed"
        ) from error


_MODEL = {"source": str, "dtype": str, "config": dict[str, Any], "weights": str | None}


def said(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _read_slots(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ValueError(f"{path.name} is no regular file")
    with path.open("rb") as file:
        found = stored_arrays(file)
    for slot in found.values():
        if slot.ndim != 1 or slot.dtype != np.int32:
            raise ValueError(f"a slot is {slot.dtype}{slot.shape}")
    return found


def _saved_text(path: str, layout: Any, slot: np.ndarray | None) -> SavedText:
    check_fields(path, layout, _TEXT)
    known = len(layout["prompt"]) + len(layout["tokens"])
    if not 0 <= layout["start"] <= known:
        raise ValueError(f"{path}.start={layout['start']} is behind the {known} tokens of its text")
    return SavedText(
        **{name: layout[name] for name in _TEXT},
        params=_of(SamplingParams, f"{path}.params", layout["params"]),
        placement=_of(Placement, f"{path}.placement", layout["placement"]),
        slot=slot,
    )


def _of(kind: Any, path: str, fields: Any) -> Any:
    """A frozen dataclass from JSON, whose lists are tuples."""
    check_fields(path, fields, {})
    hints = typing.get_type_hints(kind)
    numbers = fields.get("sampling")
    if isinstance(numbers, list) and len(numbers) == 3:
        kinds = typing.get_type_hints(SamplingNumbers)
        drawn = dict(zip(kinds, numbers, strict=True))
        check_fields(f"{path}.sampling", drawn, kinds)
        fields = {**fields, "sampling": SamplingNumbers(**drawn)}
    check_fields(path, fields, {name: hints[name] for name in fields if name in hints})
    return kind(**_tuples(fields))


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def saved_strategy(snapshot: Snapshot, given: str | None = None) -> Any:
    """The strategy value, with its fields.

    Args:
        given: Where it is, `module:name` or `file.py:name`; needed outside this package.

    Raises:
        SnapshotError: It can no longer be imported, or has other fields.
    """
    layout = snapshot.strategy
    try:
        spec = given or _in_package(layout["spec"])
        strategy = load_strategy(spec)
        fields = {
            name: _field_value(value)
            for name, value in layout["fields"].items()
            if given is None or not (isinstance(value, dict) and "function" in value)
        }
        return strategy.replace(**fields)
    except SnapshotError:
        raise
    except Exception as error:  # whatever its fields are
        raise SnapshotError(
            f"the snapshot's strategy {layout.get('spec')!r} is not what it was ({said(error)}); "
            "run it where it was made"
        ) from error


def _field_value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "needs" in value:
        fields = value["needs"]
        hints = {**typing.get_type_hints(Needs), "prompt": str}
        path = "strategy.fields.needs"
        check_fields(path, fields, {name: hints[name] for name in fields if name in hints})
        return Needs(**_tuples(fields))
    if "tuple" in value:
        return tuple(map(_field_value, value["tuple"]))
    module, _, name = _in_package(value["function"]).rpartition(":")
    found = getattr(importlib.import_module(module), name)
    if getattr(found, "__module__", None) != module:
        raise SnapshotError(f"{value['function']!r} is not of that module; it cannot be replayed")
    return found


def _in_package(spec: str) -> str:
    """The name, if it is one of this package's strategies."""
    if not re.fullmatch(r"dllm_jax\.strategies(\.\w+)+:\w+", spec):
        raise SnapshotError(
            f"the snapshot names {spec[:200]!r}, which is not part of dllm-jax, and a snapshot "
            "runs no code; if you trust it, give it by --strategy"
        )
    return spec
