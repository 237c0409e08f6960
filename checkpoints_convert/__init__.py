"""Checkpoints in and out: Hugging Face folders to parameter trees, Orbax folders and back.

The modules here take the model families as an argument, which `dllm_jax.loading.checkpoints` fills
in. The public functions are those of that module, imported at first use.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

__path__ = [os.path.realpath(folder) for folder in __path__]  # no link: ADR 0016

if __name__ == "checkpoints_convert":  # the same modules under the folder's name
    from dllm_jax.short_names import share_modules

    share_modules(__name__, "dllm_jax.convert")

if TYPE_CHECKING:
    from dllm_jax.loading.checkpoints import (
        ConversionError,
        Plan,
        Report,
        convert,
        export_hf,
        inspect,
        load_params,
        plan,
    )

__all__ = [
    "ConversionError",
    "Plan",
    "Report",
    "convert",
    "export_hf",
    "inspect",
    "load_params",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no public name {name!r}")
    return getattr(importlib.import_module("dllm_jax.loading.checkpoints"), name)
