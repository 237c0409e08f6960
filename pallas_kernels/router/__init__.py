"""From rows to the experts that they go to."""

from .api import choose_experts, route
from .reference import Rule

__all__ = ["Rule", "choose_experts", "route"]
