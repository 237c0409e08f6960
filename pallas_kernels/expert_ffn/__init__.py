"""The routed experts of a mixture-of-experts layer as one operation."""

from .api import expert_ffn
from .fp8 import Fp8Experts

__all__ = ["Fp8Experts", "expert_ffn"]
