"""The folder that a source string names: a local folder, a built-in model or a hub id.

The files of a hub id are fetched (`hub`). JAX is not imported.
"""

import os
import re
import reprlib
from pathlib import Path

from dllm_jax.convert.tokenizer_files import has_tokenizer
from dllm_jax.loading import hub
from dllm_jax.loading.hub import LoadError

BUILTIN = Path(__file__).parents[1] / "builtin"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def builtin_names() -> list[str]:
    """The models that ship with the package."""
    return sorted(path.parent.name for path in BUILTIN.glob("*/config.json"))


def find_folder(source: str, revision: str | None = None) -> Path:
    """The folder a source stands for, fetched from the hub where it is a hub id.

    Raises:
        LoadError: If it stands for none.
    """
    if not source:
        raise LoadError(f"model {source!r} is empty; give a folder, a hub id or builtin:NAME")
    is_hub = _is_hub_id(source)
    if revision is not None and not is_hub:
        raise LoadError(
            f"revision={reprlib.repr(revision)} applies to hub ids only, not to "
            f"{source!r}; leave it out"
        )
    if is_hub:
        return hub.fetch_model(source, revision)
    if source.startswith("builtin:"):
        known = builtin_names()
        name = source.removeprefix("builtin:")
        if name not in known:
            raise LoadError(f"{source!r} is no built-in model; known are {join(known)}")
        return BUILTIN / name
    folder = Path(source)
    if not os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        what = "is a file" if os.path.exists(folder) else "does not exist"
        raise LoadError(
            f"model {source!r} {what}; give a folder with config.json and .safetensors files, "
            "a hub id org/name, builtin:NAME or random:NAME"
        )
    if (folder / hub.ADAPTER_CONFIG).is_file() and not (folder / hub.CONFIG).is_file():
        raise LoadError(
            f"model {source!r} is a LoRA adapter; give its base model, and this as lora (--lora)"
        )
    return folder


def check_local(source: str) -> None:
    """Check a source without a network: a hub id is taken as it is.

    Raises:
        LoadError: If it stands for no model.
    """
    if not source.startswith("random:") and not _is_hub_id(source):
        find_folder(source)


def find_headers(source: str, revision: str | None, to: Path) -> Path:
    """A folder to inspect: as `find_folder`, but of a hub id's weights only the headers.

    Args:
        to: Where a folder of headers is made.

    Raises:
        LoadError: As there.
    """
    if not _is_hub_id(source):
        return find_folder(source, revision)
    return hub.fetch_headers(source, revision, to)


def find_adapter(lora: str | os.PathLike[str]) -> Path:
    """The folder of a LoRA adapter, fetched from the hub where it is a hub id.

    Raises:
        LoadError: If there is none.
    """
    name = os.fspath(lora)
    if _is_hub_id(name):
        return hub.fetch_adapter(name)
    if not name or not os.path.exists(Path(name) / hub.ADAPTER_CONFIG):
        what = f"holds no {hub.ADAPTER_CONFIG}" if os.path.isdir(Path(name)) else "is no folder"
        raise LoadError(
            f"lora={name!r} {what}; give the folder of a PEFT adapter, or a hub id org/name"
        )
    return Path(name)


def find_tokenizer(tokenizer: str | os.PathLike[str]) -> Path:
    """The folder of a tokenizer, fetched from the hub where it is a hub id.

    Raises:
        LoadError: If there is none.
    """
    name = os.fspath(tokenizer)
    if name.startswith("builtin:"):
        return find_folder(name)
    if _is_hub_id(name):
        return hub.fetch_tokenizer(name)
    if not os.path.isdir(name) or not has_tokenizer(Path(name)):
        what = "holds no tokenizer.json" if os.path.isdir(name) else "is no folder"
        raise LoadError(
            f"tokenizer={reprlib.repr(name)} {what}; give the folder of a fast tokenizer, or a hub "
            "id org/name"
        )
    return Path(name)


def _is_hub_id(source: str) -> bool:
    """Whether a source is to be looked for at the hub."""
    return _HUB_ID.fullmatch(source) is not None and not os.path.exists(source)


def join(names: list[str]) -> str:
    """Names as an error lists them."""
    return ", ".join(names) if names else "none"
