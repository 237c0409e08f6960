"""The folder of a run: claimed only if it is empty or holds the same run (`config.json`)."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

CONFIG = "config.json"
# Fields that do not affect the trained weights.
_FREE = {"log_every", "checkpoint_seconds", "evals", "eval_problems", "head_temperature"}
_FREE |= {"response_seconds"}  # stored answers do not depend on it
# A run may be extended; the learning rate then continues from the smaller completed share.
_LENGTHS = {"num_steps", "budget_seconds"}


def claim(folder: str | os.PathLike[str], config: Any) -> pathlib.Path:
    """Create the folder of a run, or check that it belongs to this run, and write `config.json`.

    Args:
        config: Dataclass of the run, such as `dllm_jax.training.sdar.TrainConfig`.

    Returns:
        The folder, resolved.

    Raises:
        ValueError: If it cannot be made, holds something else, or a run of another config.
    """
    path = check(folder, config)
    with _one_line(os.fspath(folder), path):
        path.mkdir(parents=True, exist_ok=True)
        partial = path / f".{CONFIG}.partial"
        partial.write_text(_text(config), encoding="utf-8")
        partial.replace(path / CONFIG)
    return path


def check(folder: str | os.PathLike[str], config: Any) -> pathlib.Path:
    """Check a folder as `claim` does, without writing; returns it resolved.

    Raises:
        ValueError: If it holds something else, or a run of another config.
    """
    shown = os.fspath(folder)
    path = pathlib.Path(shown).resolve()
    with _one_line(shown, path):
        if path.exists() and (names := sorted(os.listdir(path))):
            _check(shown, names[0], _stored(path / CONFIG), json.loads(_text(config)))
    return path


def latest_step(folder: str | os.PathLike[str]) -> int | None:
    """The step of the newest checkpoint in the folder of a run; None if it holds none."""
    try:
        names = os.listdir(pathlib.Path(folder) / "checkpoints")
    except OSError:
        return None
    return max((int(name) for name in names if name.isdecimal()), default=None)


def _text(config: Any) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


@contextlib.contextmanager
def _one_line(shown: str, path: pathlib.Path) -> Iterator[None]:
    """Turn errors of the file system into one-line errors."""
    try:
        yield
    except OSError as error:
        reason = "it is a file" if path.is_file() else error.strerror
        raise ValueError(
            f"{shown!r} cannot be the folder of a run ({reason}); "
            "give a folder that is new, empty or this run's"
        ) from error


def _check(shown: str, found: str, stored: dict[str, Any] | None, wanted: dict[str, Any]) -> None:
    if stored is None:
        raise ValueError(
            f"{shown!r} holds {found!r} and no training run; "
            "give a folder that is new, empty or this run's"
        )
    if differences := _differences(stored, wanted):
        raise ValueError(
            f"{shown!r} holds a run of another config ({'; '.join(differences)}); "
            "continue it with its own values, or give another folder"
        )


def _stored(path: pathlib.Path) -> dict[str, Any] | None:
    """A run's config, None if the file is missing or not a run's (a model's has other names)."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_run = isinstance(stored, dict) and {"num_steps", "muon_lr"} <= set(stored)
    return stored if is_run else None


def _differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Fields that must not differ but do, with both values."""
    before, after = _flat(stored), _flat(wanted)
    found = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        is_longer = name in _LENGTHS and (old or math.inf) < (new or 0)  # None: of the other kind
        if old != new and name not in _FREE and not is_longer:
            found.append(f"{name} is {old!r} there and {new!r} here")
    return found


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
