"""Scripted runs and invariant checks for strategies, without a model."""

from .invariants import check_invariants
from .script import Trace, TraceStep, run_script

__all__ = ["Trace", "TraceStep", "check_invariants", "run_script"]
