"""From a source string to a `Model`: folders, built-in models, random weights, hub ids.

Data flow: source -> folder (or published config) -> weights on the host -> weights on the device,
leaf by leaf. What the files of a checkpoint must look like is `checkpoints_convert`'s business.
"""

import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import checkpoints_convert
from checkpoints_convert import tokenizer_files
from dllm_jax.model import Model, TokenizerSource
from dllm_jax.models.architecture import DENSE
from dllm_jax.models.families import parse_config
from dllm_jax.models.published import PUBLISHED

_BUILTIN = Path(__file__).parent / "builtin"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja")
_DTYPES = ("auto", "bfloat16", "float32", "float16")
_INIT_STD = 0.02  # Qwen3's initializer_range


class LoadError(ValueError):
    """A source that names no model; the message says value, rule and remedy in one line."""


def load(
    src: str | os.PathLike[str],
    dtype: str = "auto",
    revision: str | None = None,
    lora: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Load a model.

    Args:
        src: A Hugging Face folder, a converted folder, `builtin:NAME`, `random:NAME` (a published
            config, random weights made on the device, no tokenizer) or a hub id `org/name`.
        dtype: Type of the weights. "auto" is the checkpoint's on an accelerator and float32 on
            CPU, where XLA only emulates bfloat16.
        revision: Branch, tag or commit; for hub ids only.
        lora: Not supported yet.
        progress: Called with bytes read and bytes in all, while a folder is read.

    Returns:
        The model, weights on the default device.

    Raises:
        LoadError: If the source names no model, or an argument is not supported.
        ConversionError: If the files of a checkpoint are wrong, with every problem.
    """
    source = os.fspath(src)
    if not source:
        raise LoadError(f"model {source!r} is empty; give a folder, a hub id or builtin:NAME")
    if dtype not in _DTYPES:
        raise LoadError(f"{dtype=} is not supported; use one of {', '.join(_DTYPES)}")
    if lora is not None:
        raise LoadError(f"{lora=} is not supported yet; merge the adapter into the weights first")
    is_hub = not Path(source).exists() and _HUB_ID.fullmatch(source) is not None
    if revision is not None and not is_hub:
        raise LoadError(f"{revision=} applies to hub ids only, not to {source!r}; leave it out")
    if source.startswith("random:"):
        return _random(source, dtype)
    return _from_folder(_folder(source, revision, is_hub), source, dtype, progress)


def _folder(source: str, revision: str | None, is_hub: bool) -> Path:
    """The folder a source stands for."""
    if source.startswith("builtin:"):
        known = sorted(path.parent.name for path in _BUILTIN.glob("*/config.json"))
        name = source.removeprefix("builtin:")
        if name not in known:
            raise LoadError(f"{source!r} is no built-in model; known are {_join(known)}")
        return _BUILTIN / name
    if is_hub:
        return _download(source, revision)
    if not Path(source).is_dir():
        what = "is a file" if Path(source).exists() else "does not exist"
        raise LoadError(
            f"model {source!r} {what}; give a folder with config.json and .safetensors files, "
            "a hub id org/name, builtin:NAME or random:NAME"
        )
    return Path(source)


def _join(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def _download(name: str, revision: str | None) -> Path:
    """Fetch the weights and data files of a hub repository, and none of its code."""
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(_HUB_FILES)
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise LoadError(
            f"model {name!r} is no folder here and could not be fetched from the Hugging Face hub "
            f"({reason}); check the name and the connection, or download it elsewhere and give "
            "its folder"
        ) from error
    return Path(folder)


def _from_folder(
    folder: Path, source: str, dtype: str, progress: Callable[[int, int], None] | None
) -> Model:
    target = "float32" if dtype == "auto" and jax.default_backend() == "cpu" else dtype
    params, report = checkpoints_convert.load_params(folder, target, progress)
    config, defaults = report.require_ok()
    for note in report.notes:
        warnings.warn(f"{source}: {note}", stacklevel=3)
    leaves, tree = jax.tree.flatten(params)
    del params  # so that each host leaf goes as soon as its copy is made
    for i, leaf in enumerate(leaves):
        leaves[i] = jax.block_until_ready(jnp.array(leaf))
    tokenizer = None
    if tokenizer_files.has_tokenizer(folder):
        tokenizer = TokenizerSource(tokenizer_files.digest(folder), folder)
    return Model(
        params=jax.tree.unflatten(tree, leaves),
        config=config,
        arch=DENSE,
        defaults=defaults,
        source=source,
        tokenizer_source=tokenizer,
    )


def _random(source: str, dtype: str) -> Model:
    name = source.removeprefix("random:")
    if name not in PUBLISHED:
        raise LoadError(f"{source!r} is no published config; known are {_join(sorted(PUBLISHED))}")
    parsed = parse_config(PUBLISHED[name], name=name)
    kind = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    leaves, tree = jax.tree.flatten(
        DENSE.param_shapes(parsed.config, kind if dtype == "auto" else dtype)
    )
    key = jax.random.key(0, impl="rbg")  # compiles and draws many times faster than threefry
    made = [_random_leaf(key, i, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
    return Model(
        params=jax.tree.unflatten(tree, made),
        config=parsed.config,
        arch=DENSE,
        defaults=parsed.defaults,
        source=source,
    )


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _random_leaf(key: jax.Array, index: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """One leaf, norms all ones; a compilation a shape, and memory for one leaf at a time."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return (_INIT_STD * jax.random.normal(jax.random.fold_in(key, index), shape)).astype(dtype)
