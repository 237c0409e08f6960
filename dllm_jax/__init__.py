"""dllm_jax: a functional JAX engine for diffusion language models.

Only the public names live here, and each is resolved when it is first asked for: importing the
package imports no JAX, and the leaf `dllm_jax.models` can be read by `checkpoints_convert` alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import strategies
    from dllm_jax.engine import Engine
    from dllm_jax.facts import EngineConfig
    from dllm_jax.generation import GenerateOutput, generate
    from dllm_jax.llm import LLM
    from dllm_jax.loading import load
    from dllm_jax.model import Model
    from dllm_jax.requests import (
        CompletionOutput,
        Metrics,
        Request,
        RequestOutput,
        SamplingParams,
        StreamEvent,
    )
    from dllm_jax.trajectory import Trajectory, record

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "GenerateOutput",
    "Metrics",
    "Model",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
    "Trajectory",
    "generate",
    "load",
    "record",
    "strategies",
]

# public name -> the module that holds it; "" where the name is a module itself
_HOMES = {
    "LLM": "dllm_jax.llm",
    "CompletionOutput": "dllm_jax.requests",
    "Engine": "dllm_jax.engine",
    "EngineConfig": "dllm_jax.facts",
    "GenerateOutput": "dllm_jax.generation",
    "Metrics": "dllm_jax.requests",
    "Model": "dllm_jax.model",
    "Request": "dllm_jax.requests",
    "RequestOutput": "dllm_jax.requests",
    "SamplingParams": "dllm_jax.requests",
    "StreamEvent": "dllm_jax.requests",
    "Trajectory": "dllm_jax.trajectory",
    "generate": "dllm_jax.generation",
    "load": "dllm_jax.loading",
    "record": "dllm_jax.trajectory",
    "strategies": "",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'dllm_jax' has no public name {name!r}; it has {', '.join(__all__)}"
        )
    module = importlib.import_module(_HOMES[name] or name)
    value = getattr(module, name) if _HOMES[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
