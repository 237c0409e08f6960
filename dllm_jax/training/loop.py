"""The training loop: batches in, checkpoints, log and curves out; stops and resumes anywhere.

stream -> noise and loss and update in one jitted step, rows sharded over all devices -> now
and then an evaluation on held-out problems -> Orbax checkpoints. The learning rate follows the
share of the run that is done: of the steps, or of a budget of seconds. Nothing here knows how
problems are written or what the loss is.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tokenizers
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from dllm_jax.models import dense
from dllm_jax.training import data, held_out, objective, optimizer, run_folder, run_log, stream
from dllm_jax.training.run_state import TrainState, restore, save
from dllm_jax.training.tokenizer import MASK_ID, train_tokenizer

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
_TOKENIZER_PROBLEMS = 10_000  # of each half
_TOKENIZER_SEED = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run; the same config and devices give the same model.

    Attributes:
        num_steps: Length of the run, when no budget of seconds is given.
        budget_seconds: Length of the run in seconds of this loop, compilation and resumed parts
            included; the learning rate then follows the clock and the run is not repeatable.
        muon_lr: Peak learning rate of the matrices of the layers.
        adam_lr: Peak learning rate of everything else.
        warmup: Share of the run with a rising learning rate.
        flat_until: Share of the run after which it falls, linearly to 0.
        log_every: Steps between lines of the log.
        checkpoint_seconds: Seconds between checkpoints.
        eval_problems: Held-out problems per half and evaluation.
        evals: Evaluations in a run, evenly spaced, the last at its end.
        compute_dtype: Dtype of the matrix products; master weights are float32.
        head_temperature: What the head is divided by once the run is done. Cross entropy makes
            each token's probability right on its own, but a block's tokens are accepted together:
            several at 0.95 are often inconsistent. Softer probabilities let an accept threshold
            of 0.9 ask for what 0.99 and more asked for before; greedy choices do not change.
    """

    model: dense.DenseConfig = TINY_SDAR
    data: stream.StreamConfig = dataclasses.field(default_factory=stream.StreamConfig)
    noise: objective.NoiseConfig = dataclasses.field(default_factory=objective.NoiseConfig)
    seed: int = 0
    num_steps: int = 20_000
    budget_seconds: float | None = None
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: float = 0.03
    flat_until: float = 0.3
    log_every: int = 50
    checkpoint_seconds: float = 120.0
    eval_problems: int = 512
    evals: int = 4
    compute_dtype: str = "bfloat16"
    head_temperature: float = 2.25


@functools.cache
def make_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """The tokenizer of a run: a function of the generator and the vocabulary size alone."""
    drawn = (
        data.problem(half, _TOKENIZER_SEED, i)
        for i in range(_TOKENIZER_PROBLEMS)
        for half in data.HALVES
    )
    return train_tokenizer((p.question + p.response for p in drawn), vocab_size)


def learning_rate_factor(config: TrainConfig, progress: float) -> float:
    """Share of the peak learning rate when a share `progress` of the run is done."""
    rising = min(1.0, progress / config.warmup) if config.warmup else 1.0
    falling = (1.0 - progress) / (1.0 - config.flat_until)
    return max(0.0, min(rising, falling, 1.0))


def make_step(config: TrainConfig, is_digit: Array) -> tuple[Callable, Callable]:
    """The pure functions of a run: `init(key) -> state` and `step(state, batch, factor)`."""
    optimize = optimizer.make_optimizer(config.muon_lr, config.adam_lr)
    dtype = jnp.dtype(config.compute_dtype)

    def init(key: Array) -> TrainState:
        params = dense.init_params(key, config.model, jnp.float32)
        return TrainState(params, optimize.init(params), jnp.zeros((), jnp.int32))

    def step(state: TrainState, batch: dict, factor: Array) -> tuple[TrainState, dict]:
        key = jax.random.fold_in(jax.random.key(config.seed + 1), state.step)
        tokens = batch["tokens"].astype(jnp.int32)
        noise = objective.draw_noise(
            key, config.noise, tokens, batch["prompt_len"], batch["length"], is_digit
        )
        (value, metrics), gradient = jax.value_and_grad(objective.loss, has_aux=True)(
            state.params, config.model, tokens, noise, is_digit, dtype
        )
        updates, opt_state = optimize.update(gradient, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p + factor * u, state.params, updates)
        metrics = metrics | {"loss": value, "gradient_norm": _norm(gradient)}
        return TrainState(params, opt_state, state.step + 1), metrics

    return init, step


def train(
    config: TrainConfig,
    out_dir: str | pathlib.Path,
    *,
    max_seconds: float | None = None,
    num_workers: int = 2,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, or continue the run in `out_dir`, to its end or for `max_seconds`.

    Writes `checkpoints/`, `metrics.jsonl` and `config.json` under `out_dir`.

    Args:
        max_seconds: Stop cleanly, with a checkpoint, after this long in this call.
        num_workers: Processes that make data; 0 makes it in this process.

    Returns:
        `params` (float32, on the host), `step`, `seconds`, `done` (the run is complete),
        `tokenizer` and the last `metrics`.

    Raises:
        FloatingPointError: If the loss is no number any more.
        ValueError: If `out_dir` holds something else, or a run whose config differs in more than
            its length, its evaluations, log and checkpoints, and the head's temperature.
    """
    out_dir = run_folder.claim(out_dir, config)
    clock = run_log.Clock(config.num_steps, config.budget_seconds)
    tokenizer, is_digit = _make_tokenizer_for(config.model)
    init, step = make_step(config, jnp.asarray(is_digit))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    run_step = jax.jit(step, donate_argnums=0, out_shardings=whole)
    state = jax.jit(init, out_shardings=whole)(jax.random.key(config.seed))
    with (
        ocp.CheckpointManager(
            out_dir / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
        ) as saver,
        (out_dir / "metrics.jsonl").open("a", encoding="utf-8") as file,
    ):
        if saver.latest_step() is not None:
            state, clock.seconds_before = restore(saver, state, whole)
            clock.step = int(state.step)
            say(f"resumed at step {clock.step}, {clock.seconds_before:.0f} s")
        log = run_log.Log(file, say, clock)
        part, saved_at = math.floor(clock.progress() * config.evals), clock.seconds()
        with contextlib.closing(
            stream.batches(config.data, tokenizer, clock.step, num_workers)
        ) as feed:
            while clock.progress() < 1.0 and not clock.is_over(max_seconds):
                batch = jax.device_put(next(feed), rows)
                factor = np.float32(learning_rate_factor(config, clock.progress()))
                state, metrics = run_step(state, batch, factor)
                clock.step += 1
                log.add(metrics, float(factor), clock.step % config.log_every == 0)
                if math.floor(clock.progress() * config.evals) > part:
                    part = math.floor(clock.progress() * config.evals)
                    log.write_scores(_evaluate(config, state.params, tokenizer, rows))
                if clock.seconds() - saved_at > config.checkpoint_seconds:
                    save(saver, state, clock.seconds())
                    saved_at = clock.seconds()
        if saver.latest_step() != clock.step:
            save(saver, state, clock.seconds())
    return {
        "params": jax.device_get(state.params),
        "step": clock.step,
        "seconds": clock.seconds(),
        "done": clock.progress() >= 1.0,
        "tokenizer": tokenizer,
        "metrics": log.last,
    }


def _make_tokenizer_for(model: dense.DenseConfig) -> tuple[tokenizers.Tokenizer, np.ndarray]:
    tokenizer = make_tokenizer(model.vocab_size)
    if tokenizer.get_vocab_size() != model.vocab_size:
        raise ValueError(
            f"vocab_size={model.vocab_size} differs from the tokenizer's "
            f"{tokenizer.get_vocab_size()}; use at most that many"
        )
    is_digit = np.zeros(model.vocab_size, bool)
    is_digit[[tokenizer.encode(digit).ids[0] for digit in "0123456789"]] = True
    return tokenizer, is_digit


def _evaluate(
    config: TrainConfig, params: Any, tokenizer: tokenizers.Tokenizer, rows: NamedSharding
) -> list[dict]:
    return [
        held_out.score(
            params,
            config.model,
            tokenizer,
            half,
            buffer=buffer,
            num_problems=config.eval_problems,
            row_len=max(config.data.lengths),
            sharding=rows,
            dtype=jnp.dtype(config.compute_dtype),
        )
        for half in data.HALVES
        for buffer in (1, 4)
    ]


def _norm(tree: Any) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
