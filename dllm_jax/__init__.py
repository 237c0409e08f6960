"""dllm_jax: a functional JAX engine for diffusion language models.

Only the public names live here, and each is resolved when it is first asked for: importing the
package imports no JAX, and the leaf `dllm_jax.models` can be read by `checkpoints_convert` alone.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import strategies
    from dllm_jax.generate import GenerateOutput, generate
    from dllm_jax.loading import Model, load

__version__ = "0.1.0"
__all__ = ["GenerateOutput", "Model", "generate", "load", "strategies"]

# public name -> the module that holds it ("" = the name is that module itself)
_HOMES = {
    "load": "dllm_jax.loading",
    "Model": "dllm_jax.loading",
    "generate": "dllm_jax.generate",
    "GenerateOutput": "dllm_jax.generate",
    "strategies": "",
}


class _Package(ModuleType):
    """Keeps `dllm_jax.generate` the function: importing the module of that name would hide it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (_HOMES.get(name) and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'dllm_jax' has no public name {name!r}; it has {__all__}")
        module = importlib.import_module(_HOMES[name] or name)
        value = getattr(module, name) if _HOMES[name] else module
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *__all__]


sys.modules[__name__].__class__ = _Package
