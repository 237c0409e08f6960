"""The routed experts of a mixture-of-experts layer as one operation."""

from pallas_kernels.expert_ffn.api import expert_ffn

__all__ = ["expert_ffn"]
