"""Arguments of `LLM` that say which model is loaded and what its engine may use."""

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from dllm_jax.engine import checks
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.loading.load import load, place, with_kv_cache
from dllm_jax.loading.model import Model
from dllm_jax.models.sharding import over_devices
from dllm_jax.runner import buckets

# Keywords that `LLM` passes on as they are.
OF_LOAD = {
    name: one
    for name, one in inspect.signature(load).parameters.items()
    if name not in ("src", "dtype", "progress", "mesh")
}
OF_CONFIG = {
    name: inspect.signature(EngineConfig).parameters[name]
    for name in ("max_num_batched_tokens", "batch_invariant", "logprobs")
}

Progress = Callable[[str, int, int], None]


def engine_config(config: EngineConfig | None, sizes: Mapping[str, Any]) -> EngineConfig:
    """The configuration, from itself or from its fields.

    Raises:
        ValueError: Both are given, or a size is out of range.
    """
    if config is None:
        return EngineConfig(**sizes)
    if not isinstance(config, EngineConfig):
        raise ValueError(f"config has type {type(config).__name__}; give an EngineConfig")
    usual = EngineConfig()
    both = [name for name, size in sizes.items() if size != getattr(usual, name)]
    if both:
        raise ValueError(f"{', '.join(both)} beside config, which has these sizes; set them there")
    return config


def loaded(model: Any, **of_load: Any) -> Model:
    """The model, given or named; a name is loaded with `of_load`.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(model, str | os.PathLike):
        return load(model, **of_load)
    if not isinstance(model, Model):
        raise ValueError(
            f"model has type {type(model).__name__}; give what dj.load takes, or what it returns"
        )
    return model


def model_of(model: Any, num_devices: Any, **of_load: Any) -> Model:
    """The model, loaded or given, on `num_devices` devices.

    Raises:
        ValueError: `model` is not a model, or a given model is combined with arguments of `load`.
    """
    num_devices = checks.whole_number("tensor_parallel_size", num_devices)
    split = None if num_devices == 1 else over_devices(num_devices)
    if not isinstance(model, Model):
        return loaded(model, **of_load, mesh=split)
    kv_cache_dtype = of_load.pop("kv_cache_dtype", "auto")
    for name, value in of_load.items():
        if not (value is None or value is False or (isinstance(value, str) and value == "auto")):
            raise ValueError(
                f"{name}={checks.short_repr(value)} is for a model that is loaded here; "
                "give it to dj.load"
            )
    if model.split is not None and model.split.batch:
        raise ValueError(
            f"the model's mesh splits rows along {model.split.batch!r}, an engine does not; load "
            "it without batch=, and start a process for each replica"
        )
    return with_kv_cache(model if split is None else place(model, split), kv_cache_dtype)


def progress_of(progress: bool | Progress) -> Progress | None:
    """The callback for progress of compiling: the caller's function, or one that draws a line."""
    if callable(progress):
        return progress
    return buckets.progress_line() if progress else None
