"""Checks for the author of a family; `dllm_jax.loading.family_checks` has the code."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dllm_jax.loading.family_checks import check_family

__all__ = ["check_family"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no public name {name!r}")
    return getattr(importlib.import_module("dllm_jax.loading.family_checks"), name)
