"""The routed experts of a mixture-of-experts layer as one operation."""

from .api import expert_ffn, routed_and_dense, takes_dense
from .fp8 import Fp8Experts

__all__ = ["Fp8Experts", "expert_ffn", "routed_and_dense", "takes_dense"]
