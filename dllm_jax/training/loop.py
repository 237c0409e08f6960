"""The training loop: batches in, checkpoints and log out; a run stops and resumes at any step.

Data flow: stream -> loss and update in one jitted step, with rows sharded over all devices -> at
intervals an evaluation -> Orbax checkpoints. The learning rate follows the completed share of the
run, in steps or in seconds of a budget. A `Task` defines what the run learns.
"""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from dllm_jax.training import optimizer, run_log
from dllm_jax.training.run_state import TrainState, restore, save

_FIRST_STEPS = 50  # least warm-up steps if the rate follows the clock


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of every training run; equal config and devices give the same model.

    Attributes:
        kind: Kind of training: a name of `dllm_jax.training.command.KINDS`.
        num_steps: Length of the run in steps, without a budget of seconds.
        budget_seconds: Length of the run in seconds of this loop, including compilation and earlier
            calls; the learning rate then follows the clock and the run is not repeatable.
        muon_lr: Peak learning rate of the matrices of the layers.
        adam_lr: Peak learning rate of everything else.
        warmup: Share of the run with a rising learning rate.
        flat_until: Share of the run after which the rate falls linearly to 0.
        log_every: Steps between lines of the log.
        checkpoint_seconds: Seconds between checkpoints.
        eval_problems: Held-out problems per half and evaluation.
        evals: Evaluations in a run, evenly spaced, the last at its end.
        compute_dtype: Dtype of the matrix products; master weights are float32.
    """

    kind: str = ""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The objective, data and evaluation of a run.

    Attributes:
        init: `key -> params`, float32.
        loss: `(params, frozen, batch, key) -> (value, metrics)`; pure.
        batches: `(first, num_workers) -> batches`, from batch number `first` on; rows lead.
        score: `(params, sharding of rows) -> results`, one dictionary for each line of the log.
        frozen: Constant arrays for `loss`, such as the weights of a target.
        start: The parameters to begin with, in place of the result of `init`.
    """

    init: Callable[[Array], Any]
    loss: Callable[[Any, Any, dict, Array], tuple[Array, dict[str, Array]]]
    batches: Callable[[int, int], Generator[dict, None, None]]
    score: Callable[[Any, NamedSharding], list[dict]]
    frozen: Any = None
    start: Any = None


def learning_rate_factor(config: RunConfig, progress: float) -> float:
    """Fraction of the peak learning rate after the share `progress` of the run."""
    rising = min(1.0, progress / config.warmup) if config.warmup else 1.0
    falling = (1.0 - progress) / (1.0 - config.flat_until)
    return max(0.0, min(rising, falling, 1.0))


def make_step(config: RunConfig, task: Task) -> tuple[Callable, Callable]:
    """The pure functions of a run: `init(key, start)` and `step(state, frozen, batch, factor)`."""
    optimize = optimizer.make_optimizer(config.muon_lr, config.adam_lr)

    def init(key: Array, start: Any = None) -> TrainState:
        params = task.init(key) if start is None else start
        return TrainState(params, optimize.init(params), jnp.zeros((), jnp.int32))

    def step(state: TrainState, frozen: Any, batch: dict, factor: Array) -> tuple[TrainState, dict]:
        key = jax.random.fold_in(jax.random.key(config.seed + 1), state.step)
        (value, metrics), gradient = jax.value_and_grad(task.loss, has_aux=True)(
            state.params, frozen, batch, key
        )
        updates, opt_state = optimize.update(gradient, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p + factor * u, state.params, updates)
        metrics = metrics | {"loss": value, "gradient_norm": _norm(gradient)}
        return TrainState(params, opt_state, state.step + 1), metrics

    return init, step


def run(
    config: RunConfig,
    task: Task,
    out_dir: pathlib.Path,
    *,
    max_seconds: float | None = None,
    num_workers: int = 2,
    say: Callable[[str], None] = print,
    held: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> dict[str, Any]:
    """Train, or continue the run in `out_dir`, to its end or for `max_seconds`.

    Writes `checkpoints/` and `metrics.jsonl` under `out_dir`. A KeyboardInterrupt leaves a
    checkpoint of the last whole step.

    Args:
        out_dir: A folder that `run_folder.claim` returned for this run.
        max_seconds: Stop with a checkpoint after this time in this call.
        num_workers: Processes that make data; 0 makes it in this process.
        held: A context that delays signals until its end.

    Returns:
        `params` (float32, on the host), `step`, `seconds`, `done` (the run is complete) and the
        last `metrics`.

    Raises:
        FloatingPointError: If the loss is not finite.
        OSError: A checkpoint cannot be written.
    """
    clock = run_log.Clock(config.num_steps, config.budget_seconds)
    init, step = make_step(config, task)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    run_step = jax.jit(step, donate_argnums=0, out_shardings=whole)
    state = jax.jit(init, out_shardings=whole)(jax.random.key(config.seed), task.start)
    frozen = jax.device_put(task.frozen, whole)
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
        try:
            with contextlib.closing(task.batches(clock.step, num_workers)) as feed:
                while clock.progress() < 1.0 and not clock.is_over(max_seconds):
                    batch = jax.device_put(next(feed), rows)
                    factor = _factor(config, clock)
                    with held():  # a step donates the previous state
                        state, metrics = run_step(state, frozen, batch, factor)
                        clock.step += 1
                        log.add(metrics, float(factor), clock.step % config.log_every == 0)
                        if clock.seconds() - saved_at > config.checkpoint_seconds:
                            save(saver, state, clock.seconds())
                            saved_at = clock.seconds()
                    if math.floor(clock.progress() * config.evals) > part:
                        part = math.floor(clock.progress() * config.evals)
                        log.write_scores(task.score(state.params, rows))
        except KeyboardInterrupt:
            # Without `held` the signal may have interrupted a step.
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                with held():
                    _save_last(saver, state, clock)
            raise
        _save_last(saver, state, clock)
    return {
        "params": jax.device_get(state.params),
        "step": clock.step,
        "seconds": clock.seconds(),
        "done": clock.progress() >= 1.0,
        "metrics": log.last,
    }


def _factor(config: RunConfig, clock: run_log.Clock) -> np.float32:
    factor = learning_rate_factor(config, clock.progress())
    if config.budget_seconds is not None:  # compiling may have taken the warm-up
        factor = min(factor, (clock.step + 1) / _FIRST_STEPS)
    return np.float32(factor)


def _save_last(saver: ocp.CheckpointManager, state: TrainState, clock: run_log.Clock) -> None:
    """Write a checkpoint unless the newest one is of this step."""
    if int(state.step) != saver.latest_step():
        save(saver, state, clock.seconds())


def _norm(tree: Any) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
