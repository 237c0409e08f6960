"""dllm_jax: a functional JAX engine for diffusion language models.

Only the public names live here, and each is resolved when it is first asked for: importing the
package imports no JAX, and the leaf `dllm_jax.models` can be read by `checkpoints_convert` alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import strategies
    from dllm_jax.generation import GenerateOutput, generate
    from dllm_jax.loading import load
    from dllm_jax.model import Model

__version__ = "0.1.0"
__all__ = ["GenerateOutput", "Model", "generate", "load", "strategies"]

# public name -> the module that holds it; "" where the name is a module itself
_HOMES = {
    "GenerateOutput": "dllm_jax.generation",
    "Model": "dllm_jax.model",
    "generate": "dllm_jax.generation",
    "load": "dllm_jax.loading",
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
