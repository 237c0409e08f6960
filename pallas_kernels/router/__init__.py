"""From rows to the experts that they go to."""

from .api import choose_experts

__all__ = ["choose_experts"]
