"""dllm_jax: a functional JAX engine for diffusion language models.

The public names, each resolved when it is first asked for, so that importing the package imports no
JAX. `dllm_jax.strategies`, `dllm_jax.kernels` and `dllm_jax.convert` are the import paths of the
folders `strategies`, `pallas_kernels` and `checkpoints_convert` (docs/adr/0016).
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dllm_jax import convert, kernels, strategies
    from dllm_jax.api.generate import GenerateOutput, generate
    from dllm_jax.api.llm import LLM
    from dllm_jax.engine.engine import Engine
    from dllm_jax.engine.layout import EngineConfig
    from dllm_jax.engine.record import Record, load_records, save_records
    from dllm_jax.engine.requests import (
        CompletionOutput,
        Metrics,
        Request,
        RequestOutput,
        SamplingParams,
        StreamEvent,
    )
    from dllm_jax.loading.load import load
    from dllm_jax.loading.model import Model
    from dllm_jax.loading.save import save
    from dllm_jax.models.sharding import Split
    from dllm_jax.structured import After, Choice, Hole, JsonSchema, Regex, Tokens
    from dllm_jax.trace.recording import record
    from dllm_jax.trace.trajectory import Trajectory

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "After",
    "Choice",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "GenerateOutput",
    "Hole",
    "JsonSchema",
    "Metrics",
    "Model",
    "Record",
    "Regex",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Split",
    "StreamEvent",
    "Tokens",
    "Trajectory",
    "convert",
    "generate",
    "kernels",
    "load",
    "load_records",
    "record",
    "save",
    "save_records",
    "strategies",
]

# module -> the public names that it holds
_HOMES = {
    "api.generate": ("GenerateOutput", "generate"),
    "api.llm": ("LLM",),
    "engine.engine": ("Engine",),
    "engine.layout": ("EngineConfig",),
    "engine.record": ("Record", "load_records", "save_records"),
    "engine.requests": (
        *("CompletionOutput", "Metrics", "Request", "RequestOutput", "SamplingParams"),
        "StreamEvent",
    ),
    "loading.load": ("load",),
    "loading.model": ("Model",),
    "loading.save": ("save",),
    "models.sharding": ("Split",),
    "structured": ("After", "Choice", "Hole", "JsonSchema", "Regex", "Tokens"),
    "trace.recording": ("record",),
    "trace.trajectory": ("Trajectory",),
}
_FOLDERS = ("convert", "kernels", "strategies")

for _folder in _FOLDERS:
    if not os.path.isdir(os.path.join(os.path.dirname(__file__), _folder)):
        raise ImportError(
            f"dllm_jax/{_folder} is a link in git and no folder here; in a clone run `git config "
            "core.symlinks true && git checkout -- dllm_jax`, or install the wheel instead"
        )


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"dllm_jax.{name}")
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(
            f"module 'dllm_jax' has no public name {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(f"dllm_jax.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
