"""From a source string to a `Model`, with a folder's weights or random ones.

Data flow: source -> folder (`sources`) or published config -> weights on the host, an adapter
merged in -> weights on the device, leaf by leaf. `checkpoints_convert` reads the files.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dllm_jax.convert import tokenizer_files
from dllm_jax.loading import checkpoints
from dllm_jax.loading.jax_settings import enable_async_dispatch
from dllm_jax.loading.leaves import one_by_one, random_leaf
from dllm_jax.loading.model import Model, TokenizerSource
from dllm_jax.loading.sources import LoadError, find_adapter, find_folder, find_tokenizer, join
from dllm_jax.models import kv_cache
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.families import parse_config
from dllm_jax.models.family import Family, FamilyDefaults
from dllm_jax.models.head import Unembed
from dllm_jax.models.kv_cache import KVCacheDType
from dllm_jax.models.published import PUBLISHED
from dllm_jax.models.quantization import (
    QUANTIZATIONS,
    Quantization,
    quantized,
    trimmed,
    unsupported,
    with_quantized_head,
)
from dllm_jax.models.sharding import Split, as_split
from dllm_jax.strategies.core.checks import short_repr
from dllm_jax.strategies.core.resolve import load_object

_DTYPES = ("auto", "bfloat16", "float32", "float16")


def load(
    src: str | os.PathLike[str],
    dtype: str = "auto",
    revision: str | None = None,
    lora: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    quantization: Quantization | None = None,
    mesh: Mesh | Split | None = None,
    kv_cache_dtype: KVCacheDType = "auto",
    quantize_head: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    family: Family | str | None = None,
) -> Model:
    """Load a model.

    Args:
        src: A Hugging Face folder, a converted folder, `builtin:NAME`, `random:NAME` (a published
            config, random weights made on the device, no tokenizer) or a hub id `org/name`. A
            folder of that name wins over the hub.
        dtype: Type of the weights. "auto" is the checkpoint's on an accelerator and float32 on
            CPU, where XLA only emulates bfloat16.
        revision: Branch, tag or commit of `src`; for hub ids only.
        lora: A LoRA adapter to merge into the weights: a PEFT folder or a hub id.
        progress: Called with bytes read and bytes in all, while a folder is read.
        quantization: "fp8" rounds the matrices of the layers, and of experts, to 8 bits (e4m3, a
            scale for each output), one after another, and rows before their products; embedding,
            head, norms and routers stay. "none" has all weights in `dtype`. None rounds the
            matrices that the folder stores in 4 or 8 bits, and no others. A head that the folder
            stores in e4m3, with a scale for each id, is held so but for "none".
        mesh: Devices that share the weights: a mesh of one axis, or a `Split` of another one.
        kv_cache_dtype: As in `with_kv_cache`.
        quantize_head: Round the head to 8 bits as well, a scale for each id. Rows in front of it
            stay as they are; DiffusionGemma's, of which it reads a law, are rounded too.
        tokenizer: A folder or a hub id whose tokenizer and chat template are taken in place of
            those of `src`. The ids of its masks and ends stay those of `src`.
        family: The family of a folder that is of none of ours: a `Family`, "pkg.mod:NAME" or
            "path/to/file.py:NAME". docs/add_a_model.md has one.

    Returns:
        The model, weights on the default device or on those of the mesh.

    Raises:
        LoadError: If a source names no model, or an argument is not supported.
        ConversionError: If the files of a checkpoint are wrong, with every problem.
    """
    enable_async_dispatch()
    split = None if mesh is None else as_split(mesh)
    source = os.fspath(src)
    _check_kv_cache(kv_cache_dtype)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise LoadError(
            f"dtype={short_repr(dtype)} is not supported; use one of {', '.join(_DTYPES)}"
        )
    if not isinstance(quantization, str | None) or quantization not in (None, *QUANTIZATIONS):
        raise LoadError(
            f"quantization={short_repr(quantization)} is not supported; use one of "
            f"{', '.join(QUANTIZATIONS)}"
        )
    if source.startswith("random:"):
        for name, value in (("revision", revision), ("lora", lora), ("family", family)):
            if value is not None:
                raise LoadError(
                    f"{name}={short_repr(value)}: the weights of {source!r} are drawn; leave it out"
                )
        model = _random(source, dtype, quantization, split, tokenizer)
        return _in_8_bits(model, kv_cache_dtype, quantize_head)
    adapter = None if lora is None else find_adapter(lora)  # small: an error in it comes first
    folder = find_folder(source, revision)
    foreign = None if family is None else load_family(family)
    model = _from_folder(
        folder, source, dtype, adapter, progress, quantization, split, tokenizer, foreign
    )
    return _in_8_bits(model, kv_cache_dtype, quantize_head)


def load_family(family: Any) -> Family:
    """The family that `load(family=)` names.

    Raises:
        LoadError: `family` is not a family, or its file cannot be run.
    """
    found = family
    if isinstance(family, str):
        try:
            found = load_object(family, "family")
        except ValueError as error:
            raise LoadError(str(error)) from error
    if not isinstance(found, Family):
        raise LoadError(
            f"family={short_repr(family)} is of type {type(found).__name__}; give a Family "
            "(dllm_jax.models.family_table), pkg.module:NAME or path/to/file.py:NAME"
        )
    return found


def _without_weights(
    source: str,
    config: DenseConfig,
    defaults: FamilyDefaults,
    texts: Path | None,
    tokenizer: str | os.PathLike[str] | None,
    split: Split | None,
) -> Model:
    """A model that has no weights yet.

    Args:
        texts: The folder of its own tokenizer.
        tokenizer: Another one, which is taken instead.
    """
    if tokenizer is not None:
        texts = find_tokenizer(tokenizer)
        last = max(tokenizer_files.read_parts(texts).texts)
        if last >= config.vocab_size:
            raise LoadError(
                f"tokenizer={short_repr(os.fspath(tokenizer))} has id {last}, {source!r} has "
                f"ids below {config.vocab_size}; give the tokenizer of its family"
            )
        defaults = dataclasses.replace(defaults, vocab_limit=last + 1)
    model = Model(
        params=None,
        config=config,
        arch=arch_of(config),
        defaults=defaults,
        source=source,
        tokenizer_source=texts and TokenizerSource(tokenizer_files.digest(texts), texts),
    )
    if split is not None:
        _require_shareable(model)
    return model


def _in_8_bits(model: Model, kv_cache_dtype: KVCacheDType, quantize_head: bool) -> Model:
    """The model with the cache type, and with its head in 8 bits if that is asked for."""
    model = with_kv_cache(model, kv_cache_dtype)
    if not quantize_head:
        return model
    reason = unsupported(model.config)
    if reason or not isinstance(model.arch.unembed, Unembed):
        reason = reason or "its head is a function of its own"
        raise LoadError(f"quantize_head=True of {model.source!r}: {reason}; leave it out")
    return model.replace(params=with_quantized_head(model.params, model.split))


def with_kv_cache(model: Model, kv_cache_dtype: KVCacheDType | None) -> Model:
    """The model with its keys and values cached in another type.

    Args:
        kv_cache_dtype: "fp8", or "fp8_e4m3": every key and value is rounded to 8 bits when it is
            made, with a scale for each head that follows from the weights. "auto" and None: as the
            model has it.

    Raises:
        LoadError: It is not supported, for this model or at all.
    """
    _check_kv_cache(kv_cache_dtype)
    if kv_cache_dtype in ("auto", None) or model.kv_scales is not None:
        return model
    if reason := kv_cache.unsupported(model.config):
        raise LoadError(
            f"kv_cache_dtype={short_repr(kv_cache_dtype)} of {model.source!r}: {reason}; leave it "
            "out"
        )
    return model.replace(kv_scales=kv_cache.kv_scales(model.params, model.split))


def _check_kv_cache(kv_cache_dtype: Any) -> None:
    known = (None, *kv_cache.KV_CACHE_DTYPES)
    if not isinstance(kv_cache_dtype, str | None) or kv_cache_dtype not in known:
        raise LoadError(
            f"kv_cache_dtype={short_repr(kv_cache_dtype)} is not supported; use one of "
            f"{', '.join(kv_cache.KV_CACHE_DTYPES)}"
        )


def _from_folder(
    folder: Path,
    source: str,
    dtype: str,
    adapter: Path | None,
    progress: Callable[[int, int], None] | None,
    quantization: Quantization | None,
    split: Split | None,
    tokenizer: str | os.PathLike[str] | None,
    family: Family | None,
) -> Model:
    target = "float32" if dtype == "auto" and jax.default_backend() == "cpu" else dtype
    report = checkpoints.inspect(folder, lora=adapter, family=family)
    is_small, further = _chosen(source, report, quantization)
    config, defaults = report.require_ok()
    texts = folder if tokenizer_files.has_tokenizer(folder) else None
    model = _without_weights(source, config, defaults, texts, tokenizer, split)
    keep, cut = one_by_one(config, is_small, split), split and split.rows
    # A CPU has nothing to overlap, and would compile a program for each shape.
    as_stored = split is None and jax.default_backend() != "cpu"
    how = {"keep": keep, "cut": cut, "passes": is_small, "as_stored": as_stored}
    params = checkpoints.read_params(report, target, progress, **how)
    for note in (*report.notes, *further):
        warnings.warn(f"{source}: {note}", stacklevel=3)
    return model.replace(params=params, split=split)


def place(model: Model, split: Split) -> Model:
    """A model whose weights the devices of a split share.

    Args:
        model: On one device, on the host, or on the same split already.

    Raises:
        ValueError: Its network cannot be split, or it is on other devices.
    """
    if model.split == split:
        return model
    if model.split is not None:
        raise ValueError(
            f"{model.source!r} is split over {model.split.mesh}, not over {split.mesh}; load it "
            "with one mesh"
        )
    _require_shareable(model)
    params = split.place(trimmed(model.params), model.config)
    placed = model.replace(params=params, split=split, kv_scales=None)
    return with_kv_cache(placed, model.kv_cache_dtype)


def _require_shareable(model: Model) -> None:
    """Refuse a network that several devices cannot share."""
    if not model.arch.takes_ops or not isinstance(model.arch.unembed, Unembed):
        raise ValueError(
            f"a {model.defaults.family} model cannot be split over devices: its layers do not add "
            "up parts of a sum; use one device (tensor_parallel_size=1)"
        )


def _chosen(
    source: str, report: checkpoints.Report, quantization: Quantization | None
) -> tuple[Callable[[Any], bool], list[str]]:
    """The leaves that are held in 8 bits, by key path, and a note on them."""
    config, _ = report.require_ok()
    if quantization == "fp8":
        _require_supported(source, config)
        return lambda _: True, []
    scheme = report.scheme
    if quantization == "none" or scheme is None:
        return lambda _: False, []
    stored = f"matrices of {scheme.bits} bits ({scheme.name})"
    if reason := unsupported(config):
        return lambda _: False, [f"{stored} are held in 16: {reason}"]
    small = report.small

    def is_small(path: Any) -> bool:
        return tuple(getattr(key, "key", getattr(key, "idx", key)) for key in path) in small

    four = f'{stored} are held in 8, as fp8; quantization="none" (--quantization none) has 16'
    return is_small, [four] if scheme.bits == 4 else []


def _require_supported(source: str, config: Any) -> None:
    if reason := unsupported(config):
        raise LoadError(f"quantization='fp8' of {source!r}: {reason}; leave it out")


def _random(
    source: str,
    dtype: str,
    quantization: Quantization | None,
    split: Split | None,
    tokenizer: str | os.PathLike[str] | None,
) -> Model:
    name = source.removeprefix("random:")
    if name not in PUBLISHED:
        raise LoadError(f"{source!r} is no published config; known are {join(sorted(PUBLISHED))}")
    parsed = parse_config(PUBLISHED[name], name=name)
    if quantization == "fp8":
        _require_supported(source, parsed.config)
    kind = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model = _without_weights(source, parsed.config, parsed.defaults, None, tokenizer, split)
    shapes = model.arch.param_shapes(parsed.config, kind if dtype == "auto" else dtype)
    leaves, tree = jax.tree.flatten_with_path(shapes)

    def drawn(index: int, path: tuple[Any, ...], leaf: Any) -> Any:
        drawn = random_leaf(index, path, leaf)
        if split is not None:
            drawn = jax.block_until_ready(split.put(path, drawn, parsed.config))
        return quantized(path, drawn, split) if quantization == "fp8" else drawn

    params = jax.tree.unflatten(tree, [drawn(i, *leaf) for i, leaf in enumerate(leaves)])
    return model.replace(params=params, split=split)
