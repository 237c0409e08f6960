"""Checkpoints in and out: Hugging Face folders to parameter trees, Orbax folders and back."""

if __name__ == "checkpoints_convert":  # the same modules under the folder's name
    from dllm_jax import share_modules

    share_modules(__name__, "dllm_jax.convert")

from .conversion import convert, load_params
from .export import export_hf
from .inspection import inspect
from .planning import Plan, plan
from .report import Report
from .spec import ConversionError

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
