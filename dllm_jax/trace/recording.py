"""`record`: prompts decoded step by step, with a record of every step on the host.

The tokens are those of `generate`. A recorded step is a separate program, so that recording does
not change other programs.

Data flow: `generate.start` -> `recorded_step` for each step -> NumPy -> `Trajectory`.
"""

import functools
from collections.abc import Sequence
from typing import Any, overload

import jax
import numpy as np

from dllm_jax.api import generate
from dllm_jax.api.prompts import ids_of
from dllm_jax.api.strategy import resolve_strategy
from dllm_jax.engine.checks import MOST, listed, short_repr, token_ids, whole_number
from dllm_jax.loading.model import Model
from dllm_jax.runner import decode
from dllm_jax.runner.buckets import law_of, plain_settings
from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.protocol import bind_knobs
from dllm_jax.strategies.core.state import ERROR, FINISH_REASONS, RUNNING, STUCK
from dllm_jax.strategies.testing.recording import NOT_READ, recorded_step
from dllm_jax.trace.trajectory import Step, Trajectory, Window


@overload
def record(
    model: Model | str, prompt: str | Sequence[int], strategy: Any = None, **how: Any
) -> Trajectory: ...


@overload
def record(
    model: Model | str, prompt: list[str] | list[list[int]], strategy: Any = None, **how: Any
) -> list[Trajectory]: ...


def record(
    model: Model | str,
    prompt: Any,
    strategy: Any = None,
    *,
    keep: Sequence[str] = (),
    num_top: int = 5,
    logits_at: Sequence[int] = (),
    attention_implementation: str | None = None,
    **request: Any,
) -> Any:
    """Decode one prompt, or a batch of them, and keep a record of every step.

    Slower than `generate`, because each step is fetched separately. What was written, when and how
    likely, is in `Trajectory.record`; `dj.save_records` writes such records to an `.npz` file.

    Args:
        model: A `Model` or what `load` takes.
        prompt: Token ids, or a text, which is encoded without a chat template; or a list of such.
        strategy: A value, name, import path or step function; None is the family's default.
        keep: What `Record.kept` holds of each cell that the strategy asked for, in each forward:
            "token" that was proposed, its "confidence", "entropy" and "log_prob", and "top"
            (`top_ids` and `top_log_probs` of the raw logits).
        num_top: Ids of "top".
        logits_at: Positions whose raw logits are kept, prompt included.
        request: `generate`'s further keywords: `max_tokens`, `temperature`, `key`, ...

    Returns:
        A trajectory, or for a list of prompts one for each.

    Raises:
        ValueError: As `generate`, a text for a model without a tokenizer, or an unknown `keep`.

    Example:
        trajectory = dj.record("builtin:tiny-sdar", "2 + 2 =", max_tokens=32)
        [int(step.accepted.sum()) for step in trajectory.steps]
        record = dj.record("builtin:tiny-sdar", ["2 + 2 ="], max_tokens=32, keep=["top"])[0].record
        record.position, record.step, record.log_prob, record.kept["top_ids"]
    """
    keep = (keep,) if isinstance(keep, str) else tuple(listed("keep", keep))
    if unknown := [name for name in keep if not isinstance(name, str) or name not in KEPT]:
        said = short_repr(unknown[0])
        raise ValueError(f"keep={said} is not known; use some of {', '.join(KEPT)}")
    model = generate.loaded(model)
    num_top = whole_number("num_top", num_top, 1, model.config.vocab_size)
    places = token_ids("logits_at", logits_at, MOST, "positions")
    rows, is_many = _rows(model, prompt)
    chosen = resolve_strategy(model, strategy, request.get("draft"))
    session = generate.start(
        model, rows, chosen, attention_implementation=attention_implementation, **request
    )
    state = session.state
    steps: list[list[Step]] = [[] for _ in rows]
    how = {
        "num_top": num_top if "top" in keep else 0,
        "logits_at": np.asarray(places, np.int32) if places else None,
        "implementation": attention_implementation,
    }
    while (running := np.flatnonzero(np.asarray(state.finish) == RUNNING)).size:
        one = session.strategy
        if one.makes_choices:  # as one of its passes, whose answers are not within a branch
            one = one.chosen(int(bind_knobs(one, state.knobs).choice(state)))
        state, part = _recorded(model, one, session.aux, state, **how)
        part = jax.device_get(part)
        for b in running.tolist():
            row = jax.tree.map(lambda leaf, b=b: leaf[b], part)
            steps[b].append(_from_device(row, keep, places))
    state = jax.device_get(state.replace(keys=None, pools=None, carry=None))
    found = [_trajectory(model, chosen, state, b, ids, steps[b]) for b, ids in enumerate(rows)]
    return found if is_many else found[0]


def _trajectory(
    model: Model, strategy: Any, state: Any, b: int, prompt: list[int], steps: list[Step]
) -> Trajectory:
    """The trajectory of row `b` of a state that is decoded."""
    length, finish = int(state.output_len[b]), int(state.finish[b])
    sampling = {name: leaf[b].item() for name, leaf in vars(state.sampling).items()}
    return Trajectory(
        prompt=prompt,
        tokens=np.asarray(state.output[b, :length]).tolist(),
        limit=int(state.buffer.limit[b]),
        finish_reason=FINISH_REASONS[finish] or "",
        model=model.source,
        strategy=strategy.name,
        settings=plain_settings(strategy),
        steps=steps,
        error=_error(strategy, finish, int(state.buffer.start[b])),
        law=law_of(model, strategy) | sampling,
    )


KEPT = ("token", "confidence", "entropy", "log_prob", "top")


def _error(strategy: Any, finish: int, position: int) -> str | None:
    if finish == STUCK:
        return driver.stuck_text(strategy, position)
    return "the model gave a value that is not finite" if finish == ERROR else None


@functools.partial(
    jax.jit, static_argnames=("num_top", "implementation"), donate_argnames=("state",)
)
def _recorded(model, strategy, aux, state, logits_at, num_top, implementation):
    def body(model, strategy, aux, state):
        forward = ModelForward(model, aux=aux, implementation=implementation)
        spec = decode.slot_spec(strategy, model, state.finish.shape[0])
        return recorded_step(strategy, forward, state, spec, num_top, logits_at)

    return decode.per_device(
        body,
        model,
        strategy,
        aux,
        (state,),
        lambda split: (decode.state_specs(split), decode.row_specs(split)),
    )


def _rows(model: Model, prompt: Any) -> tuple[list[list[int]], bool]:
    """The ids of each prompt, and whether a list of prompts was given."""
    prompt = prompt if isinstance(prompt, str) else listed("prompt", prompt)
    is_many = not isinstance(prompt, str) and any(
        isinstance(one, str) or (hasattr(one, "__iter__") and np.ndim(one)) for one in prompt
    )
    every = prompt if is_many else [prompt]
    return [ids_of(model, one, special=True) for one in every], is_many


def _from_device(one: Any, keep: Sequence[str], logits_at: Sequence[int]) -> Step:
    """A `StepRecord` of one row, in NumPy."""
    rows, size = one.rows, one.predicted.size
    num_top = rows.shape[-1] // 2 - 1  # two numbers, M ids, M numbers, the step
    said = {
        "position": int(one.before.start) + np.arange(size, dtype=np.int32),
        "token": one.predicted,
        "confidence": one.confidence,
        "entropy": one.entropy,
        "log_prob": rows[..., 0],
        "top_ids": rows[..., 2 : 2 + num_top],
        "top_log_probs": rows[..., 2 + num_top : -1],
    }
    names = ["position", *(name for name in said if name.startswith(tuple(keep)))] if keep else ()
    asked = ~np.isnan(one.confidence.ravel())
    kept = {name: said[name].reshape(size, *said[name].shape[2:])[asked] for name in names}
    if "top" in keep:
        kept["top_ids"] = kept["top_ids"].astype(np.int32)
    if one.logits is not None:
        known = ~np.isnan(one.logits).any(axis=1)
        kept["logits_position"] = np.asarray(logits_at, np.int32)[known]
        kept["logits"] = one.logits[known]

    def window(buffer: Any) -> Window:
        tokens = np.where(buffer.filled, buffer.tokens, NOT_READ)
        return Window(int(buffer.start), buffer.status, tokens)

    return Step(
        before=window(one.before),
        after=window(one.after),
        predicted=one.predicted,
        confidence=one.confidence,
        entropy=one.entropy,
        accepted=one.accepted,
        edited=one.edited,
        commit_len=int(one.commit_len),
        settled_len=int(one.settled_len),
        nfe=int(one.nfe),
        log_prob=rows[..., 0],
        kept=kept,
    )
