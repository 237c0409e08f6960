"""Hub ids: the files of a Hugging Face repository that a model consists of, in the hub's own cache.

Data flow: id -> is the hub there? -> config, tokenizer, index -> the shards it names -> folder.
Other files of a repository are not fetched. Network, cache, tokens, offline mode and environment
variables are `huggingface_hub`'s. Files are fetched one by one in the caller's thread, where the
library itself ends a transfer on Ctrl-C; hf_xet fetches the parts of a file in parallel.
"""

import contextlib
import errno
import glob
import logging
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dllm_jax.convert.schemes import MODELOPT
from dllm_jax.convert.tokenizer_files import TOKENIZER_FILES, VOCABULARIES, read_json
from dllm_jax.loading.hub_failures import described

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ONLY_SAFETENSORS = "only safetensors are read, other forms of weights can run code"
_SMALL = (CONFIG, MODELOPT, INDEX, ADAPTER_CONFIG, *TOKENIZER_FILES)
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its header
_LONGEST_HEADER = 100_000_000  # the limit of safetensors
_CHUNK = 1 << 16
_HEADERS_AT_ONCE = 8
_MOST_MESSAGE = 800  # characters


class LoadError(ValueError):
    """A source that names no model; the message says value, rule and remedy in one line.

    A longer one loses its middle: a name may have any length.
    """

    def __init__(self, message: str):
        message, half = message.replace("\n", " "), _MOST_MESSAGE // 2
        is_long = len(message) > _MOST_MESSAGE
        super().__init__(f"{message[:half]} ... {message[-half:]}" if is_long else message)


def fetch_model(name: str, revision: str | None = None) -> Path:
    """A folder with the config, the tokenizer and the weights of a hub repository.

    Files in the cache are not fetched again, and are used if the hub cannot be reached.

    Args:
        name: `org/name`.
        revision: Branch, tag or commit; None: the main branch.

    Raises:
        LoadError: For every failure.
    """
    with _reaching("model", name, revision) as repository:
        folder = repository.fetch_small()
        return repository.fetch_weights(folder, _indexed(folder))


def fetch_tokenizer(name: str) -> Path:
    """A folder with the tokenizer of a hub repository; else as `fetch_model`."""
    with _reaching("tokenizer", name) as repository:
        first = next((n for n in VOCABULARIES if n in repository.files), VOCABULARIES[0])
        message = f"{repository} has no {first}; give the repository of a fast tokenizer"
        others = [n for n in TOKENIZER_FILES if n != first]
        return repository.fetch([first, *others], message)


def fetch_adapter(name: str) -> Path:
    """A folder with the configuration and the weights of a LoRA adapter; else as `fetch_model`."""
    with _reaching("adapter", name) as repository:
        message = f"{repository} has no {ADAPTER_CONFIG}; give the repository of a LoRA adapter"
        folder = repository.fetch([ADAPTER_CONFIG], message)
        return repository.fetch_weights(folder, [ADAPTER_WEIGHTS])


def fetch_headers(name: str, revision: str | None, to: Path) -> Path:
    """A folder to inspect a model by; `load` would read the missing weights as zeros.

    Only the header of each safetensors file is read. A sparse file of the full size, which takes no
    room on the disk, stands for the rest.

    Args:
        name: `org/name`.
        to: Where the folder is made, unless the weights are in the cache already.

    Raises:
        LoadError: For every failure.
    """
    with _reaching("model", name, revision) as repository:
        folder = repository.fetch_small()
        names = _indexed(folder)
        files = [] if repository.failure else repository.weights(folder, names)
        if not any(file.will_download for file in files):
            return repository.fetch_weights(folder, names)
        made = to / name.rpartition("/")[2]  # the name may identify the kind of model
        made.mkdir()
        for path in folder.iterdir():
            (made / path.name).symlink_to(path.resolve())
        with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
            wanted = [file for file in files if not (made / file.filename).exists()]
            headers = pool.map(lambda f: _header(repository, folder.name, f.filename), wanted)
            for file, header in zip(wanted, headers, strict=True):
                with (made / file.filename).open("wb") as out:
                    out.write(header)
                    out.truncate(file.file_size)
        return made


def _header(repository: "_Repository", commit: str, file: str) -> bytes:
    """The beginning of a file, at least its header; then the connection is closed."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(repository.name, file, revision=commit)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    data = b""
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as answer:
        hf_raise_for_status(answer)
        for chunk in answer.iter_bytes(_CHUNK):
            data += chunk
            length = int.from_bytes(data[:_LENGTH_BYTES], "little")
            if len(data) >= min(_LONGEST_HEADER, _LENGTH_BYTES + length):
                break
    return data


class _Repository:
    """A repository at one revision.

    Attributes:
        commit: The hub's commit of the revision; None where the hub did not answer.
        files: Names of its files; empty where the hub did not answer.
        failure: Why the hub did not answer; only the cache is used then.
    """

    def __init__(self, what: str, name: str, revision: str | None):
        self.what, self.name, self.revision = what, name, revision
        self.commit: str | None = None
        self.files: frozenset[str] = frozenset()
        self.failure: Exception | None = None

    def __str__(self) -> str:
        at = "" if self.revision is None else f" at revision {self.revision!r}"
        return f"{self.what} {self.name!r}{at}"

    def reach(self) -> None:
        """Ask the hub for the repository; if that fails, the cache may still have it.

        Raises:
            RevisionNotFoundError: The repository exists, but not this revision.
        """
        from huggingface_hub import HfApi, constants, errors

        try:
            info = HfApi().model_info(
                self.name, revision=self.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        except errors.RevisionNotFoundError:
            raise
        except Exception as error:
            self.failure = error
        else:
            self.commit = info.sha
            self.files = frozenset(file.rfilename for file in info.siblings or ())

    def fetch(self, names: Iterable[str], missing: str) -> Path:
        """The snapshot's folder, with those of these small files that the repository has.

        Args:
            names: The first must be there.
            missing: The error without the first.
        """
        import huggingface_hub

        first, *others = names
        if self.failure is not None:
            folder = Path(
                huggingface_hub.snapshot_download(
                    self.name, revision=self.revision, local_files_only=True
                )
            )
        elif first not in self.files:
            raise LoadError(missing)
        else:
            with _bar(self.name, None) as bar:
                cached = huggingface_hub.try_to_load_from_cache(
                    self.name, first, revision=self.revision
                )
                folder = Path(cached).parent if isinstance(cached, str) else None
                if folder is None or folder.name != self.commit:
                    # By the revision's name, so that the cache can look it up without the hub.
                    folder = self._download(first, self.revision, bar).parent
                for name in (name for name in others if name in self.files):
                    self._download(name, folder.name, bar)
        self.require(folder / first, missing)
        return folder

    def fetch_small(self) -> Path:
        """A model's folder, without its weights.

        Raises:
            LoadError: There is no config.
        """
        missing = f"{self} has no {CONFIG}; give a repository in the Hugging Face format"
        if ADAPTER_CONFIG in self.files:
            missing = f"{self} is a LoRA adapter; give its base model, and this as lora (--lora)"
        return self.fetch(_SMALL, missing)

    def fetch_weights(self, folder: Path, names: list[str] | None) -> Path:
        """The same folder with these large files; all of them must be in the repository.

        Args:
            names: None: every safetensors file.
        """
        if self.failure is None:
            files = self.weights(folder, names)
            size = sum(file.file_size or 0 for file in files if file.will_download)
            self._require_space(size)
            with _bar(self.name, size or None) as bar:
                for file in files:  # also those in the cache under another revision's name
                    self._download(file.filename, folder.name, bar)
        self.require_weights(folder, names)
        return folder

    def weights(self, folder: Path, names: list[str] | None) -> Any:
        """The large files: records with `filename`, `file_size` and `will_download`."""
        import huggingface_hub

        with _bar(self.name, None) as bar:
            return huggingface_hub.snapshot_download(
                self.name,
                revision=folder.name,
                allow_patterns=["*.safetensors"] if names is None else [*map(glob.escape, names)],
                ignore_patterns=["*/*"],  # the star of a pattern also matches slashes
                tqdm_class=_counter(bar),
                dry_run=True,
            )

    def require_weights(self, folder: Path, names: list[str] | None) -> None:
        """Refuse a repository without these weights, or without any."""
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
        raise LoadError(message)

    def _download(self, name: str, revision: str | None, bar: tqdm) -> Path:
        import huggingface_hub

        return Path(
            huggingface_hub.hf_hub_download(
                self.name, name, revision=revision, tqdm_class=_counter(bar)
            )
        )

    def _require_space(self, size: int) -> None:
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
        there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        if free < size:
            raise LoadError(
                f"{self} needs {size / 1e9:.1f} GB more in the cache {str(cache)!r}, where "
                f"{free / 1e9:.1f} GB are free; free some, or set HF_HOME to a folder elsewhere"
            )


@contextlib.contextmanager
def _reaching(what: str, name: str, revision: str | None = None) -> Iterator[_Repository]:
    """A repository; every failure in the body becomes a `LoadError` of one line.

    Args:
        what: The kind of repository, for errors.
    """
    repository = _Repository(what, name, revision)
    with _quiet():
        try:
            repository.reach()
            yield repository
        except LoadError:
            raise
        except Exception as error:
            raise LoadError(
                described(repository.failure or error, str(repository), name, revision or "main")
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's warnings, which report retries; a level set by the user stays."""
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    if level == logging.WARNING:
        set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        set_verbosity(level)


def _bar(name: str, size: int | None) -> tqdm:
    """One progress bar for all files, on a terminal only.

    Args:
        size: Bytes to fetch; None: too few for a bar.
    """
    from huggingface_hub.utils import are_progress_bars_disabled

    hidden = size is None or are_progress_bars_disabled()
    return tqdm(
        total=size,
        unit="B",
        unit_scale=True,
        desc=f"fetching {name}",
        leave=False,
        disable=hidden or None,
    )


def _counter(bar: tqdm) -> Any:
    """A `tqdm_class` of hidden bars that add one file's bytes to `bar`.

    hf_xet counts each byte twice, as it arrives and as it is written.
    """
    start = bar.n

    class Counter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes and start + self.n > bar.n:
                bar.update(start + self.n - bar.n)

    return Counter


def _indexed(folder: Path) -> list[str] | None:
    """The files that the index names; None without an index, or one that cannot be read."""
    try:
        names = set(read_json(folder / INDEX)["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None  # reading the folder reports what is wrong with the index
    return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
