"""Hub ids: the files of a Hugging Face repository that a model is made of, in the hub's own cache.

Data flow: id -> is the hub there? -> config, tokenizer, index -> the shards it names -> folder.
Nothing else of a repository is asked for: no code, no pickles, no pictures. Network, cache, tokens
and offline mode are `huggingface_hub`'s, and so are its environment variables; here is which files,
one bar for all, and one line for whatever goes wrong. Nothing here knows what the files hold.
"""

import contextlib
import errno
import glob
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dllm_jax.convert.tokenizer_files import TOKENIZER_FILES
from dllm_jax.loading.hub_errors import told
from dllm_jax.loading.hub_transfer import Transfer

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ONLY_SAFETENSORS = "only safetensors are read, other forms of weights can run code"
_SMALL = (CONFIG, INDEX, ADAPTER_CONFIG, *TOKENIZER_FILES)


class HubError(ValueError):
    """A repository that cannot be had; the message says value, rule and remedy in one line."""


def fetch_model(name: str, revision: str | None = None) -> Path:
    """A folder with the config, the tokenizer and the weights of a hub repository.

    What is in the cache is not fetched again, and is used where the hub cannot be reached.

    Args:
        name: `org/name`.
        revision: Branch, tag or commit; None: the main branch.

    Raises:
        HubError: Whatever went wrong.
    """
    with reaching("model", name, revision) as repository:
        folder = repository.fetch_small()
        return repository.fetch_weights(folder, indexed(folder))


def fetch_adapter(name: str, revision: str | None = None) -> Path:
    """A folder with the configuration and the weights of a LoRA adapter; else as `fetch_model`."""
    with reaching("adapter", name, revision) as repository:
        folder = repository.fetch([ADAPTER_CONFIG])
        repository.require(
            folder / ADAPTER_CONFIG,
            f"{repository} has no {ADAPTER_CONFIG}; give the repository of a LoRA adapter",
        )
        return repository.fetch_weights(folder, [ADAPTER_WEIGHTS])


class Repository:
    """A repository at one revision, and whether only the cache is asked for it."""

    def __init__(self, what: str, name: str, revision: str | None):
        self.what, self.name, self.revision = what, name, revision
        self.failure: Exception | None = None  # why the hub itself does not answer

    def __str__(self) -> str:
        at = "" if self.revision is None else f" at revision {self.revision!r}"
        return f"{self.what} {self.name!r}{at}"

    def reach(self) -> None:
        """Ask the hub for the repository; where that fails the cache may still have it.

        Raises:
            RevisionNotFoundError: The repository is there, and this is not in it.
        """
        from huggingface_hub import HfApi, constants, errors

        try:
            HfApi().model_info(
                self.name, revision=self.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        except errors.RevisionNotFoundError:
            raise
        except Exception as error:
            self.failure = error

    def fetch(self, names: Iterable[str]) -> Path:
        """The snapshot's folder, with those of these small files that it has."""
        return Path(Transfer(self.name).run(self._snapshot, _exactly(names), self.revision))

    def fetch_small(self) -> Path:
        """A model's folder, without its weights.

        Raises:
            HubError: There is no config.
        """
        folder = self.fetch(_SMALL)
        message = f"{self} has no {CONFIG}; give a repository in the Hugging Face format"
        if (folder / ADAPTER_CONFIG).is_file():
            message = f"{self} is a LoRA adapter; give its base model, and this as lora (--lora)"
        self.require(folder / CONFIG, message)
        return folder

    def fetch_weights(self, folder: Path, names: list[str] | None) -> Path:
        """The same folder with these large files, all of which must be there in the end.

        Args:
            names: None: every safetensors file.
        """
        if self.failure is None:
            files = [file for file in self.weights(folder, names) if file.will_download]
            size = sum(file.file_size or 0 for file in files)
            self._require_space(size)
            patterns = _patterns(names)  # some may be there, under another revision's name
            Transfer(self.name, size or None).run(self._snapshot, patterns, folder.name)
        self.require_weights(folder, names)
        return folder

    def weights(self, folder: Path, names: list[str] | None) -> Any:
        """What there is to say of the large files: `filename`, `file_size`, `will_download`."""
        patterns = _patterns(names)
        return Transfer(self.name).run(self._snapshot, patterns, folder.name, dry_run=True)

    def require_weights(self, folder: Path, names: list[str] | None) -> None:
        """Refuse a repository without these weights, or any."""
        first = next((path.name for path in folder.glob("*.safetensors")), "model.safetensors")
        remedy = _ONLY_SAFETENSORS
        if names and (folder / INDEX).is_file():
            remedy = f"{INDEX} names it: give a revision that is whole"
        for name in names or [first]:
            self.require(folder / name, f"{self} has no {name}; {remedy}")

    def require(self, path: Path, message: str) -> None:
        """Refuse a repository without this file."""
        if path.exists():
            return
        if self.failure is not None:
            raise FileNotFoundError(errno.ENOENT, "not in the cache", str(path))
        raise HubError(message)

    def _snapshot(
        self, counter: Any, patterns: list[str], revision: str | None, dry_run: bool = False
    ) -> Any:
        import huggingface_hub

        return huggingface_hub.snapshot_download(
            self.name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],  # a pattern's star also stands for slashes
            local_files_only=self.failure is not None,
            tqdm_class=counter,
            dry_run=dry_run,
        )

    def _require_space(self, size: int) -> None:
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
        there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        if free < size:
            raise HubError(
                f"{self} needs {size / 1e9:.1f} GB more in the cache {str(cache)!r}, where "
                f"{free / 1e9:.1f} GB are free; free some, or set HF_HOME to a folder elsewhere"
            )


@contextlib.contextmanager
def reaching(what: str, name: str, revision: str | None) -> Iterator[Repository]:
    """A repository; every failure in the body leaves as one line.

    Args:
        what: What it is to hold, as errors call it.
    """
    repository = Repository(what, name, revision)
    with _quiet():
        try:
            repository.reach()
            yield repository
        except HubError:
            raise
        except Exception as error:
            raise HubError(
                told(repository.failure or error, str(repository), name, revision or "main")
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's warnings back: they tell of retries. A level that was set stands."""
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    if level == logging.WARNING:
        set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        set_verbosity(level)


def indexed(folder: Path) -> list[str] | None:
    """The files that the index names; None without an index, or one that cannot be read."""
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None  # whoever reads the folder says what is wrong with it
    return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)


def _patterns(names: list[str] | None) -> list[str]:
    return ["*.safetensors"] if names is None else _exactly(names)


def _exactly(names: Iterable[str]) -> list[str]:
    """Patterns that match these names and no other."""
    return [glob.escape(name) for name in names]
