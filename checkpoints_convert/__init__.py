"""Checkpoints in and out: Hugging Face folders to parameter trees, Orbax folders and back."""

from checkpoints_convert.conversion import convert, load_params
from checkpoints_convert.export import export_hf
from checkpoints_convert.inspection import inspect
from checkpoints_convert.planning import Plan, plan
from checkpoints_convert.report import Report
from checkpoints_convert.spec import ConversionError

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
