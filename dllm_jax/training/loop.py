"""The training loop: batches in, checkpoints, log and curves out; stops and resumes anywhere.

stream -> noise and loss and update in one jitted step, rows sharded over all devices -> now
and then an evaluation on held-out problems -> Orbax checkpoints. The learning rate follows the
share of the run that is done: of the steps, or of a budget of seconds. Nothing here knows how
problems are written or what the loss is.
"""

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tokenizers
from flax import struct
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from dllm_jax.models import dense
from dllm_jax.training import data, held_out, objective, optimizer, stream
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
    """

    model: dense.DenseConfig = TINY_SDAR
    data: stream.StreamConfig = stream.StreamConfig()
    noise: objective.NoiseConfig = objective.NoiseConfig()
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


class TrainState(struct.PyTreeNode):
    """Everything on the device that a checkpoint holds."""

    params: Any
    optimizer: Any
    step: Int[Array, ""]


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
        metrics = metrics | {"loss": value, "gradient_norm": optax.global_norm(gradient)}
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
    """
    started = time.monotonic()
    out_dir = pathlib.Path(out_dir).resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    tokenizer = make_tokenizer(config.model.vocab_size)
    if tokenizer.get_vocab_size() != config.model.vocab_size:
        raise ValueError(
            f"vocab_size={config.model.vocab_size} differs from the tokenizer's "
            f"{tokenizer.get_vocab_size()}; use at most that many"
        )
    is_digit = np.zeros(config.model.vocab_size, bool)
    is_digit[[tokenizer.token_to_id(d) for d in "0123456789"]] = True
    init, step = make_step(config, jnp.asarray(is_digit))

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    run_step = jax.jit(step, donate_argnums=0, out_shardings=whole)
    state = jax.jit(init, out_shardings=whole)(jax.random.key(config.seed))
    saver = ocp.CheckpointManager(
        out_dir / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )
    seconds_before = 0.0
    if saver.latest_step() is not None:
        state, seconds_before = _restore(saver, state, whole)
        say(f"resumed at step {int(state.step)}, {seconds_before:.0f} s")
    step_id = int(state.step)

    def seconds() -> float:
        return seconds_before + time.monotonic() - started

    def progress() -> float:
        if config.budget_seconds is not None:
            return min(1.0, seconds() / config.budget_seconds)
        return min(1.0, step_id / config.num_steps)

    log = (out_dir / "metrics.jsonl").open("a", encoding="utf-8")

    def evaluate() -> None:
        for half in data.HALVES:
            for buffer in (1, 4):
                result = held_out.score(
                    state.params, config.model, tokenizer, half, buffer=buffer, sharding=rows,
                    num_problems=config.eval_problems, row_len=max(config.data.lengths),
                    batch_size=min(512, config.eval_problems),
                    dtype=jnp.dtype(config.compute_dtype),
                )  # fmt: skip
                del result["right"]
                log.write(json.dumps({"step": step_id, "eval": result}) + "\n")
                say(
                    f"{half} buffer {buffer}: {result['exact']:.3f} exact, "
                    f"{result['tokens_per_forward']:.2f} tokens per forward, "
                    f"{result['denoise_per_block']:.2f} denoise forwards a block"
                )
        log.flush()

    pending: list[dict] = []
    last = {}
    saved_at, logged_at, logged_step = seconds(), time.monotonic(), step_id
    part = math.floor(progress() * config.evals)
    feed = stream.batches(config.data, tokenizer, step_id, num_workers)
    try:
        while progress() < 1.0 and (max_seconds is None or seconds() - seconds_before < max_seconds):
            batch = jax.device_put(next(feed), rows)
            factor = np.float32(learning_rate_factor(config, progress()))
            state, metrics = run_step(state, batch, factor)
            pending.append(metrics)
            step_id += 1
            if step_id % config.log_every == 0:
                # read all but the newest few, so that the device always has work queued
                ready, pending = pending[:-5] or pending, pending[-5:]
                read = jax.device_get(ready)
                now = time.monotonic()
                last = {name: float(np.mean([m[name] for m in read])) for name in read[0]}
                speed = (step_id - logged_step) / (now - logged_at)
                logged_at, logged_step = now, step_id
                line = {"step": step_id, "seconds": seconds(), "progress": progress(), **last}
                line |= {"lr_factor": float(factor), "steps_per_second": speed}
                log.write(json.dumps(line) + "\n")
                log.flush()
                say(
                    f"step {step_id} {100 * progress():.1f} % loss {last['loss']:.4f} "
                    f"digits {last['digit_accuracy']:.4f} {speed:.1f} steps/s"
                )
                if not math.isfinite(last["loss"]):
                    raise FloatingPointError(f"loss={last['loss']} at {step_id=}; lower the rates")
            if math.floor(progress() * config.evals) > part:
                part = math.floor(progress() * config.evals)
                evaluate()
            if seconds() - saved_at > config.checkpoint_seconds:
                _save(saver, state, seconds())
                saved_at = seconds()
    finally:
        feed.close()
    if saver.latest_step() != step_id:
        _save(saver, state, seconds())
    saver.close()
    log.close()
    return {
        "params": jax.device_get(state.params),
        "step": step_id,
        "seconds": seconds(),
        "done": progress() >= 1.0,
        "tokenizer": tokenizer,
        "metrics": last,
    }


def _save(saver: ocp.CheckpointManager, state: TrainState, seconds: float) -> None:
    # optimiser states hold empty nodes that a stored tree cannot name: keep their leaves by number
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state.optimizer))}
    tree = {"params": state.params, "optimizer": leaves, "seconds": np.float64(seconds)}
    saver.save(int(state.step), args=ocp.args.StandardSave(tree))
    saver.wait_until_finished()


def _restore(
    saver: ocp.CheckpointManager, like: TrainState, sharding: NamedSharding
) -> tuple[TrainState, float]:
    step_id = saver.latest_step()
    leaves, tree = jax.tree.flatten(like.optimizer)

    def shape(leaf: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    wanted = {
        "params": jax.tree.map(shape, like.params),
        "optimizer": {str(i): shape(leaf) for i, leaf in enumerate(leaves)},
        "seconds": np.float64(0),
    }
    got = saver.restore(step_id, args=ocp.args.StandardRestore(wanted))
    opt_state = jax.tree.unflatten(tree, [got["optimizer"][str(i)] for i in range(len(leaves))])
    step = jax.device_put(jnp.asarray(step_id, jnp.int32), sharding)
    return TrainState(got["params"], opt_state, step), float(got["seconds"])
