"""dllm_jax: a functional JAX engine for diffusion language models.

The public names, each resolved when it is first asked for, so that importing the package imports no
JAX. `dllm_jax.strategies`, `dllm_jax.kernels` and `dllm_jax.convert` are the import paths of the
folders `strategies`, `pallas_kernels` and `checkpoints_convert` (docs/adr/0016).
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dllm_jax import convert, kernels, strategies
    from dllm_jax.api.generate import GenerateOutput, generate
    from dllm_jax.api.llm import LLM
    from dllm_jax.engine.engine import Engine
    from dllm_jax.engine.layout import EngineConfig
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
    from dllm_jax.models.sharding import Split
    from dllm_jax.structured import After, Choice, Hole, JsonSchema, Regex
    from dllm_jax.trace.trajectory import Trajectory, record

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
    "Regex",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Split",
    "StreamEvent",
    "Trajectory",
    "convert",
    "generate",
    "kernels",
    "load",
    "record",
    "strategies",
]

# public name -> the module that holds it
_HOMES = {
    "LLM": "api.llm",
    "After": "structured",
    "Choice": "structured",
    "CompletionOutput": "engine.requests",
    "Engine": "engine.engine",
    "EngineConfig": "engine.layout",
    "GenerateOutput": "api.generate",
    "Hole": "structured",
    "JsonSchema": "structured",
    "Metrics": "engine.requests",
    "Model": "loading.model",
    "Regex": "structured",
    "Request": "engine.requests",
    "RequestOutput": "engine.requests",
    "SamplingParams": "engine.requests",
    "Split": "models.sharding",
    "StreamEvent": "engine.requests",
    "Trajectory": "trace.trajectory",
    "generate": "api.generate",
    "load": "loading.load",
    "record": "trace.trajectory",
}
_FOLDERS = ("convert", "kernels", "strategies")


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"dllm_jax.{name}")
    if name not in _HOMES:
        raise AttributeError(
            f"module 'dllm_jax' has no public name {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(f"dllm_jax.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _SameModules:
    """Finds `strategies.multi_bd` as the module `dllm_jax.strategies.multi_bd`.

    A finder and loader without the base classes of `importlib.abc`, which take 30 ms to import.
    """

    def __init__(self, name: str, target: str):
        self._prefix, self._target = f"{name}.", f"{target}."

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.startswith(self._prefix):
            loader: Any = self
            return importlib.machinery.ModuleSpec(fullname, loader)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(self._real_name(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system has replaced the module's own spec by the one that was found here.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> Any:
        """The code that `python -m checkpoints_convert` runs."""
        spec: Any = importlib.util.find_spec(self._real_name(fullname))
        return spec.loader.get_code(spec.name)

    def _real_name(self, fullname: str) -> str:
        return self._target + fullname.removeprefix(self._prefix)


def share_modules(name: str, target: str) -> None:
    """Make the top-level package `name` the package `target`, so that each module exists once.

    Called by the `__init__` of `strategies`, `pallas_kernels` and `checkpoints_convert` where they
    are imported under those names.
    """
    sys.meta_path.insert(0, _SameModules(name, target))
    sys.modules[name] = importlib.import_module(target)
