"""Next-token training of a small Qwen3 on the word problems: config, objective, run.

The result is an ordinary causal model, used as the target of drafters.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from dllm_jax.models import dense, reference
from dllm_jax.training import loop, run_folder, scoring, stream
from dllm_jax.training.export import rounded

TINY_QWEN3 = dense.DenseConfig(
    vocab_size=768,
    hidden_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=768,
    rope_theta=1e4,
    max_position=512,
    shift=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(loop.RunConfig):
    """A run of next-token training.

    Attributes:
        data: The data, with one row length, since each length is a program to compile.
        prompt_weight: Loss weight of a token of the prompt; one of the response weighs 1.
    """

    kind: str = "ar"
    model: dense.DenseConfig = TINY_QWEN3
    data: stream.StreamConfig = dataclasses.field(
        default_factory=lambda: stream.StreamConfig(lengths=(208, 208), room=1, hard_share=0.5)
    )
    prompt_weight: float = 0.1
    evals: int = 2


def loss(
    params: Any,
    cfg: dense.DenseConfig,
    tokens: Int[Array, "B T"],
    prompt_len: Int[Array, " B"],
    length: Int[Array, " B"],
    prompt_weight: float = 0.1,
    dtype: Any = jnp.bfloat16,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Cross entropy of every next token up to the first end of sequence, and accuracy.

    Args:
        length: Tokens up to and including the first end-of-sequence token.
    """
    # a product with one-hot rows: the gradient of a gather is a slow scatter into few rows
    x = jax.nn.one_hot(tokens, cfg.vocab_size, dtype=dtype) @ params["embed"].astype(dtype)
    T = tokens.shape[1]
    visible = reference.visibility("causal", T, 1)[None]
    positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)
    hidden, _ = dense.trunk(
        params, cfg, x, positions, lambda _, q, k, v: reference.attention(q, k, v, visible)
    )
    logits = dense.unembed(params, cfg, hidden)[:, :-1]
    truth, at = tokens[:, 1:], jnp.arange(1, T)[None]
    own = (at >= prompt_len[:, None]) & (at < length[:, None])
    weight = jnp.where(own, 1.0, jnp.where(at < prompt_len[:, None], prompt_weight, 0.0))
    right = jnp.sum(jax.nn.one_hot(truth, cfg.vocab_size, dtype=logits.dtype) * logits, axis=-1)
    cost = (jax.nn.logsumexp(logits, axis=-1) - right) * weight
    hit = (jnp.argmax(logits, axis=-1) == truth) & own
    count = jnp.maximum(jnp.sum(own, dtype=jnp.float32), 1.0)
    metrics = {
        "token_accuracy": jnp.sum(hit, dtype=jnp.float32) / count,
        "response_loss": jnp.sum(jnp.where(own, cost, 0.0)) / count,
    }
    return jnp.sum(cost) / jnp.maximum(jnp.sum(weight), 1.0), metrics


def train(config: TrainConfig, out_dir: str | os.PathLike[str], **how: Any) -> dict[str, Any]:
    """Train, or continue the run in `out_dir`; `how` are keywords of `loop.run`.

    Returns:
        The result of `loop.run`, and the `tokenizer`.

    Raises:
        FloatingPointError: If the loss is not finite.
        ValueError: If `out_dir` holds something else, or a run of another config (`run_folder`).
    """
    folder = run_folder.claim(out_dir, config)
    tokenizer, _ = stream.tokenizer_for(config.model.vocab_size)
    dtype = jnp.dtype(config.compute_dtype)

    def task_loss(params: Any, frozen: Any, batch: dict, key: Array) -> tuple[Array, dict]:
        del frozen, key
        tokens, prompt_len, length = (batch[k] for k in ("tokens", "prompt_len", "length"))
        return loss(
            params, config.model, tokens.astype(jnp.int32), prompt_len, length,
            config.prompt_weight, dtype,
        )  # fmt: skip

    def score(params: Any, rows: NamedSharding) -> list[dict]:
        del rows  # decodes on one device, in seconds
        model = rounded(params, config.model, config.compute_dtype)
        return scoring.score_tokens(
            model, tokenizer, num_problems=config.eval_problems, family=config.data.family
        )

    task = loop.Task(
        init=lambda key: dense.init_params(key, config.model, jnp.float32),
        loss=task_loss,
        batches=lambda first, workers: stream.batches(config.data, tokenizer, first, workers),
        score=score,
    )
    return loop.run(config, task, folder, **how) | {"tokenizer": tokenizer}
