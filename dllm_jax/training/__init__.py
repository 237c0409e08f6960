"""Training: the built-in models, fine-tuning, and denoising losses for loops of one's own."""

from dllm_jax.training.denoising import block_loss, full_loss

__all__ = ["block_loss", "full_loss"]
