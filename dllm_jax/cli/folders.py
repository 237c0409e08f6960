"""Folders behind `builtin:NAME`, for verbs that take checkpoint folders."""

from pathlib import Path

import dllm_jax
from dllm_jax.cli.errors import UsageError

BUILTIN = Path(dllm_jax.__file__).parent / "builtin"


def builtin_names() -> tuple[str, ...]:
    """Models that ship with the package."""
    return tuple(sorted(path.parent.name for path in BUILTIN.glob("*/config.json")))


def checkpoint_folder(source: str) -> Path:
    """The folder of a checkpoint source.

    Raises:
        UsageError: No source at all, or one without files.
        ValueError: `builtin:` with a name that is not there.
    """
    if not source:
        raise UsageError("SRC is empty; give a folder or builtin:NAME")
    if source.startswith("random:"):
        raise UsageError(
            f"{source!r} has no files: its weights are drawn when it is loaded; "
            "give a folder or builtin:NAME"
        )
    if not source.startswith("builtin:"):
        return Path(source)
    name = source.removeprefix("builtin:")
    if name not in builtin_names():
        known = ", ".join(builtin_names()) or "none"
        raise ValueError(f"{source!r} is no built-in model; known are {known}")
    return BUILTIN / name
