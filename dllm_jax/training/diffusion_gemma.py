"""Uniform diffusion of a small DiffusionGemma on the word problems: config, objective, run.

The text of a row is encoded once, in token order. One canvas after its prompt or after an earlier
canvas is noised by random tokens, and denoised with the encoder's keys and values. Gradients flow
through these, and the encoder is also trained as a causal model of the text.

Source: uniform corruption, the two unweighted losses and self-conditioning in half of the rows are
from google-deepmind/gemma (`hackable_diffusion_adapter`).
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dllm_jax.models import dense, gemma, reference
from dllm_jax.strategies import DiffusionGemma
from dllm_jax.training import loop, run_folder, scoring, stream
from dllm_jax.training.export import rounded
from dllm_jax.training.tokenizer import EOS_ID

# (keys, values) of each layer
Cache = tuple[tuple[Array, Array], ...]

# Two canvases hold an answer of `sums`, so that training covers a canvas after a canvas.
TINY_GEMMA = gemma.GemmaConfig(
    vocab_size=768,
    hidden_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=256,
    rope_theta=1e4,
    tie_embeddings=True,
    max_position=512,
    num_experts=4,
    experts_per_token=2,
    expert_size=64,
    moe_layers=(True,) * 3,
    canvas_length=16,
    sliding=(True, True, False),
    window=32,
    global_num_kv_heads=1,
    global_head_dim=64,
    global_rope_theta=1e4,
    global_rotary_dim=32,
    logit_cap=30.0,
)
_GLOBAL = 3  # the last of every 3 layers is global
_LEAST_NOISE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """The noise of canvases; every choice is drawn for each row.

    Attributes:
        conditioned_share: Share of rows that are conditioned on a first pass.
        t_min, t_max: Range of temperatures of the readout of that pass, as in decoding.
    """

    conditioned_share: float = 0.5
    t_min: float = DiffusionGemma.t_min
    t_max: float = DiffusionGemma.t_max


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(loop.RunConfig):
    """A run of uniform diffusion; the defaults learn `sums` on a CPU within minutes.

    Attributes:
        max_denoising_steps: Steps of a canvas, written to the exported model.
    """

    kind: str = "diffusion_gemma"
    model: gemma.GemmaConfig = TINY_GEMMA
    data: stream.StreamConfig = dataclasses.field(
        default_factory=lambda: stream.StreamConfig(
            batch_size=16, lengths=(64, 64), room=1, example_share=0.0, family="sums"
        )
    )
    noise: NoiseConfig = dataclasses.field(default_factory=NoiseConfig)
    max_denoising_steps: int = 16
    num_steps: int = 1000
    compute_dtype: str = "float32"
    evals: int = 0


class Canvas(struct.PyTreeNode):
    """One noised canvas of each row.

    Attributes:
        start: Position of the first cell.
        truth: The text, then end-of-sequence tokens.
        shown: The noised text.
        heat: Temperature of the readout of the first pass.
        conditioned: Rows whose second pass is conditioned on the first.
    """

    start: Int[Array, " B"]
    truth: Int[Array, "B S"]
    shown: Int[Array, "B S"]
    heat: Float[Array, " B"]
    conditioned: Bool[Array, " B"]


def layers_of(num_layers: int) -> dict[str, Any]:
    """The fields of a config that set the number and the kinds of its layers."""
    sliding = tuple((i + 1) % _GLOBAL > 0 for i in range(num_layers - 1))
    return {
        "num_layers": num_layers,
        "sliding": (*sliding, False),
        "moe_layers": (True,) * num_layers,
    }


def draw_canvas(
    key: PRNGKeyArray,
    cfg: gemma.GemmaConfig,
    noise: NoiseConfig,
    tokens: Int[Array, "B T"],
    prompt_len: Int[Array, " B"],
    length: Int[Array, " B"],
) -> Canvas:
    """Draw a canvas of each row and replace a uniformly drawn share of its cells by random ids.

    Args:
        length: Tokens up to and including the first end-of-sequence token.
    """
    B, S = len(tokens), cfg.canvas_length
    which, share, where, ids, heat, conditioned = jax.random.split(key, 6)
    count = -(-(length - prompt_len) // S)
    start = prompt_len + S * jax.random.randint(which, (B,), 0, count)
    padded = jnp.pad(tokens, ((0, 0), (0, S)), constant_values=EOS_ID)
    truth = jnp.take_along_axis(padded, start[:, None] + jnp.arange(S)[None], axis=1)
    chance = jax.random.uniform(share, (B, 1), minval=_LEAST_NOISE)
    is_noise = jax.random.uniform(where, (B, S)) < chance
    return Canvas(
        start=start,
        truth=truth,
        shown=jnp.where(is_noise, jax.random.randint(ids, (B, S), 0, cfg.vocab_size), truth),
        heat=jax.random.uniform(heat, (B,), minval=noise.t_min, maxval=noise.t_max),
        conditioned=jax.random.uniform(conditioned, (B,)) < noise.conditioned_share,
    )


def encode(
    params: Any, cfg: gemma.GemmaConfig, rows: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T V"], Cache]:
    """Encode texts: logits of the next tokens, and keys and values of each layer."""
    B, T = rows.shape[:2]
    at, cache = jnp.arange(T), []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        view = gemma.layer_view(cfg, layer)
        sees = _behind(at[:, None], at[None], T if view.window is None else view.window)
        cache.append((k, v))
        return reference.attention(q, k, v, sees[None], view.scale)

    mode = jnp.full((B,), gemma.ENCODER, jnp.int32)
    positions = jnp.broadcast_to(at, (B, T))
    hidden, _ = gemma.trunk(params, cfg, rows, positions, attend, mode=mode)
    return gemma.unembed(params, cfg, hidden), tuple(cache)


def denoise(
    params: Any,
    cfg: gemma.GemmaConfig,
    rows: Float[Array, "B S D"],
    expected: Float[Array, "B S D"],
    start: Int[Array, " B"],
    cache: Cache,
) -> Float[Array, "B S V"]:
    """Logits of a canvas at `start`, which sees the text before it and all of itself."""
    B, S = rows.shape[:2]
    at = jnp.arange(cache[0][0].shape[1])[None]
    whole = jnp.ones((B, S, S), bool)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        view = gemma.layer_view(cfg, layer)
        first = start[:, None]  # all cells of a canvas see the same text
        behind = _behind(first, at, at.shape[1] + S if view.window is None else view.window)
        behind = jnp.broadcast_to((behind & (at < first))[:, None], (B, S, at.shape[1]))
        k, v = (jnp.concatenate(pair, 1) for pair in zip(cache[layer], (k, v), strict=True))
        return reference.attention(q, k, v, jnp.concatenate([behind, whole], 2), view.scale)

    mode = jnp.full((B,), gemma.DECODER, jnp.int32)
    positions = start[:, None] + jnp.arange(S)[None]
    mixed = gemma.condition(params, cfg, rows, expected)
    hidden, _ = gemma.trunk(params, cfg, mixed, positions, attend, mode=mode)
    return gemma.unembed(params, cfg, hidden)


def loss(
    params: Any,
    cfg: gemma.GemmaConfig,
    tokens: Int[Array, "B T"],
    prompt_len: Int[Array, " B"],
    length: Int[Array, " B"],
    canvas: Canvas,
    dtype: Any = jnp.float32,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Cross entropy of all cells of the canvases, plus that of the next tokens of responses."""
    table = params["embed"].astype(dtype)
    scale = jnp.asarray(gemma.head(params, cfg).embed_scale, dtype)

    def embed(weights: Array) -> Array:
        return (weights.astype(dtype) @ table) * scale

    def of_ids(ids: Array) -> Array:
        # a product with one-hot rows: the gradient of a gather is a slow scatter into few rows
        return embed(jax.nn.one_hot(ids, cfg.vocab_size, dtype=dtype))

    next_logits, cache = encode(params, cfg, of_ids(tokens))
    rows = of_ids(canvas.shown)
    first = denoise(params, cfg, rows, jnp.zeros_like(rows), canvas.start, cache)
    likely = jax.nn.softmax(jax.lax.stop_gradient(first) / canvas.heat[:, None, None], axis=-1)
    expected = jnp.where(canvas.conditioned[:, None, None], likely, 0.0)
    logits = denoise(params, cfg, rows, embed(expected), canvas.start, cache)

    cells = jnp.ones(canvas.truth.shape, bool)
    noisy = canvas.shown != canvas.truth
    at = jnp.arange(1, tokens.shape[1])[None]
    own = (at >= prompt_len[:, None]) & (at < length[:, None])
    value, _ = _judged(logits, canvas.truth, cells)
    next_value, next_accuracy = _judged(next_logits[:, :-1], tokens[:, 1:], own)
    _, accuracy = _judged(logits, canvas.truth, noisy)
    metrics = {"token_accuracy": accuracy, "next_accuracy": next_accuracy, "next_loss": next_value}
    return value + next_value, metrics


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
        del frozen
        tokens, prompt_len, length = (batch[k] for k in ("tokens", "prompt_len", "length"))
        tokens = tokens.astype(jnp.int32)
        canvas = draw_canvas(key, config.model, config.noise, tokens, prompt_len, length)
        return loss(params, config.model, tokens, prompt_len, length, canvas, dtype)

    def score(params: Any, rows: NamedSharding) -> list[dict]:
        del rows  # decodes on one device
        model = rounded(params, config.model, config.compute_dtype, "diffusion_gemma")
        return [
            result
            for half in scoring.halves_of(config.data.family)
            for result in scoring.score_canvases(
                model,
                tokenizer,
                half,
                num_problems=config.eval_problems,
                steps=config.max_denoising_steps,
                thresholds=(0.005,),
                family=config.data.family,
            )
        ]

    task = loop.Task(
        init=lambda key: dense.random_params(key, gemma.param_shapes(config.model, jnp.float32)),
        loss=task_loss,
        batches=lambda first, workers: stream.batches(config.data, tokenizer, first, workers),
        score=score,
    )
    return loop.run(config, task, folder, **how) | {"tokenizer": tokenizer}


def _behind(row: Array, key: Array, window: int) -> Array:
    """Whether keys are at or before a position, by less than `window`."""
    return (key <= row) & (row - key < window)


def _judged(logits: Array, truth: Array, where: Array) -> tuple[Array, Array]:
    """Mean cross entropy, and share of correct argmaxes, of the rows in `where`."""
    one_hot = jax.nn.one_hot(truth, logits.shape[-1], dtype=logits.dtype)
    cost = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(one_hot * logits, axis=-1)
    count = jnp.maximum(jnp.sum(where, dtype=jnp.float32), 1.0)
    hit = (jnp.argmax(logits, axis=-1) == truth) & where
    return jnp.sum(jnp.where(where, cost, 0.0)) / count, jnp.sum(hit, dtype=jnp.float32) / count
