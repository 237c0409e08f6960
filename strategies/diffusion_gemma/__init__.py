"""`diffusion_gemma`, and what it alone uses."""

from .diffusion_gemma import STRATEGY, DiffusionGemma

__all__ = ["STRATEGY", "DiffusionGemma"]
