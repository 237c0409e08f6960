"""The router of a mixture of experts: the experts of each row and their weights."""

from .api import choose_experts, route
from .reference import Rule

__all__ = ["Rule", "choose_experts", "route"]
