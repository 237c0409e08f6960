"""The routed experts of a mixture-of-experts layer as one operation."""

from .api import expert_ffn

__all__ = ["expert_ffn"]
