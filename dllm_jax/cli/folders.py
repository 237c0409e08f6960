"""Folders behind the sources of verbs that take a checkpoint."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dllm_jax
from dllm_jax.cli.errors import UsageError

BUILTIN = Path(dllm_jax.__file__).parent / "builtin"


def builtin_names() -> tuple[str, ...]:
    """Models that ship with the package."""
    return tuple(sorted(path.parent.name for path in BUILTIN.glob("*/config.json")))


def checkpoint_folder(source: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint source; a hub id's files are fetched.

    Raises:
        UsageError: No source at all, or one without files.
        ValueError: There is no such source.
    """
    from dllm_jax.loading.sources import find_folder

    _require_files(source)
    return find_folder(source, revision)


@contextmanager
def headers_folder(source: str, revision: str | None = None) -> Iterator[Path]:
    """A folder to inspect: as `checkpoint_folder`, but of a hub id's weights only the headers.

    Raises:
        UsageError, ValueError: As there.
    """
    from dllm_jax.loading.sources import find_headers

    _require_files(source)
    with tempfile.TemporaryDirectory(prefix="dllm-jax-") as made:
        yield find_headers(source, revision, Path(made))


def _require_files(source: str) -> None:
    if not source:
        raise UsageError("SRC is empty; give a folder, a hub id or builtin:NAME")
    if source.startswith("random:"):
        raise UsageError(
            f"{source!r} has no files: its weights are drawn when it is loaded; "
            "give a folder, a hub id or builtin:NAME"
        )
