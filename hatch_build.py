"""Refuses to build from a checkout whose links are no folders: the wheel could not be imported."""

import os
import runpy
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Links(BuildHookInterface):
    """Runs `dllm_jax/__init__.py`, which says what to do."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        runpy.run_path(os.path.join(self.root, "dllm_jax", "__init__.py"))
