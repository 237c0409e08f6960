"""Block diffusion of a small SDAR on the word problems: config, task, run."""

import dataclasses
import os
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from dllm_jax.models import dense
from dllm_jax.training import loop, objective, run_folder, scoring, stream
from dllm_jax.training.export import rounded
from dllm_jax.training.tokenizer import MASK_ID

TINY_SDAR = dense.DenseConfig(
    vocab_size=768,
    hidden_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=1024,
    rope_theta=1e4,
    max_position=512,
    mask_token_id=MASK_ID,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(loop.RunConfig):
    """A run of block diffusion.

    Attributes:
        head_temperature: Divisor of the head after the run. Cross entropy calibrates the
            probability of each token separately, but a block's tokens are accepted together, and
            several at 0.95 are often inconsistent. With softer probabilities an accept threshold
            of 0.9 accepts what 0.99 and more accepted before; greedy choices do not change.
    """

    kind: str = "sdar"
    model: dense.DenseConfig = TINY_SDAR
    data: stream.StreamConfig = dataclasses.field(default_factory=stream.StreamConfig)
    noise: objective.NoiseConfig = dataclasses.field(default_factory=objective.NoiseConfig)
    head_temperature: float = 2.25


def train(config: TrainConfig, out_dir: str | os.PathLike[str], **how: Any) -> dict[str, Any]:
    """Train, or continue the run in `out_dir`; `how` are keywords of `loop.run`.

    Returns:
        The result of `loop.run`, and the `tokenizer`.

    Raises:
        FloatingPointError: If the loss is not finite.
        ValueError: If `out_dir` holds something else, or a run whose config differs in more than
            its length, its evaluations, log and checkpoints, and the head's temperature.
    """
    folder = run_folder.claim(out_dir, config)
    tokenizer, is_digit = stream.tokenizer_for(config.model.vocab_size)
    dtype = jnp.dtype(config.compute_dtype)

    def loss(params: Any, frozen: Any, batch: dict, key: Array) -> tuple[Array, dict[str, Array]]:
        del frozen
        tokens, digits = batch["tokens"].astype(jnp.int32), jnp.asarray(is_digit)
        noise = objective.draw_noise(
            key, config.noise, tokens, batch["prompt_len"], batch["length"], digits
        )
        return objective.loss(params, config.model, tokens, noise, digits, dtype)

    def score(params: Any, rows: NamedSharding) -> list[dict]:
        del rows  # decodes on one device, in seconds
        model = rounded(params, config.model, config.compute_dtype, "sdar")
        return [
            scoring.score_blocks(
                model,
                tokenizer,
                half,
                num_problems=config.eval_problems,
                buffer=buffer,
                family=config.data.family,
            )
            for half in scoring.halves_of(config.data.family)
            for buffer in (1, 4)
        ]

    task = loop.Task(
        init=lambda key: dense.init_params(key, config.model, jnp.float32),
        loss=loss,
        batches=lambda first, workers: stream.batches(config.data, tokenizer, first, workers),
        score=score,
    )
    return loop.run(config, task, folder, **how) | {"tokenizer": tokenizer}
