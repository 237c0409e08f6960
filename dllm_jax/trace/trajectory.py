"""`record`: one prompt decoded step by step, with a record of every step on the host.

The tokens are those of `generate`. A recorded step is a separate program, so that recording does
not change other programs.

Data flow: `generate.start` -> `recorded_step` for each step -> NumPy -> `Trajectory` <-> JSON.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dllm_jax.api import generate
from dllm_jax.api.drafts import bind_draft
from dllm_jax.api.strategy import resolve_strategy
from dllm_jax.loading.load import load
from dllm_jax.loading.model import Model
from dllm_jax.loading.tokenizer import encode
from dllm_jax.runner import decode
from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.resolve import settings
from dllm_jax.strategies.core.state import ERROR, FINISH_REASONS, RUNNING, STUCK
from dllm_jax.strategies.testing.recording import NOT_READ, recorded_step

VERSION = 1


class TrajectoryError(ValueError):
    """The text is not a trajectory, or has another version."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The K blocks of S cells that are decoded at a time.

    Attributes:
        start: Absolute position of the first cell = number of tokens in the cache.
        status: State of each block: 0 not open, 1 active, 2 about to enter the cache [K].
        tokens: Token ids, -1 for a hole [K S].
    """

    start: int
    status: np.ndarray
    tokens: np.ndarray


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step; cells are those of the window before the slide, [K S].

    Attributes:
        before: The window after the slide of the previous step.
        after: The window with the tokens of this step; it then slides by `commit_len`.
        predicted: The model's prediction, -1 for none.
        confidence: Probability of the prediction, as the strategy computes it; NaN for none.
        entropy: Entropy of the distribution in nats, NaN for none.
        accepted: Holes that were filled.
        edited: Filled cells that got another token.
        commit_len: Tokens that were committed.
        settled_len: Leading cells that cannot change any more.
        nfe: Forwards spent.
    """

    before: Window
    after: Window
    predicted: np.ndarray
    confidence: np.ndarray
    entropy: np.ndarray
    accepted: np.ndarray
    edited: np.ndarray
    commit_len: int
    settled_len: int
    nfe: int


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The steps in which one text was decoded.

    Attributes:
        prompt: Ids of the prompt.
        tokens: Ids of the text, as `generate` emits them.
        limit: First absolute position that may not be emitted.
        finish_reason: Reason for the end (`dllm_jax.strategies.core.state.FINISH_REASONS`).
        model: The source of the model.
        strategy: Name of the strategy.
        settings: Fields of the strategy, by name.
        steps: One record for each decode step, in order.
        error: Message if it ended with "error", else None.
    """

    prompt: list[int]
    tokens: list[int]
    limit: int
    finish_reason: str
    model: str
    strategy: str
    settings: Mapping[str, Any]
    steps: list[Step]
    error: str | None = None

    @property
    def nfe(self) -> int:
        """Forwards after prefill."""
        return sum(step.nfe for step in self.steps)

    def to_json(self) -> str:
        """One JSON object; NaN is null. `from_json` reads it."""
        fields = dataclasses.asdict(self) | {"nfe": self.nfe, "version": VERSION}
        return json.dumps(_plain(fields), allow_nan=False, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> "Trajectory":
        """Read the output of `to_json`.

        Raises:
            TrajectoryError: The text is no trajectory, or of another version.
        """
        try:
            facts = json.loads(text)
            version = facts.pop("version")
            if version != VERSION:
                raise TrajectoryError(
                    f"this trajectory has {version=}, and this program reads {VERSION}; record it "
                    "again"
                )
            del facts["nfe"]
            steps = [_step(one) for one in facts.pop("steps")]
            return Trajectory(**facts, steps=steps)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, TrajectoryError):
                raise
            raise TrajectoryError(
                f"this is no trajectory ({type(error).__name__}: {error}); give what to_json wrote"
            ) from error


def record(
    model: Model | str,
    prompt: str | Sequence[int],
    strategy: Any = None,
    *,
    attention_implementation: str | None = None,
    **request: Any,
) -> Trajectory:
    """Decode one prompt and keep a record of every step.

    Slower than `generate`, because each step is fetched separately.

    Args:
        model: A `Model` or what `load` takes.
        prompt: Token ids, or a text, which is encoded without a chat template.
        strategy: A value, name, import path or step function; None is the family's default.
        request: `generate`'s further keywords: `max_tokens`, `temperature`, `key`, ...

    Raises:
        ValueError: As `generate`, or a text for a model without a tokenizer.

    Example:
        trajectory = dj.record("builtin:tiny-sdar", "2 + 2 =", max_tokens=32)
        [int(step.accepted.sum()) for step in trajectory.steps]
    """
    model = load(model) if isinstance(model, str) else model
    ids = _ids(model, prompt)
    draft = request.pop("draft", None)
    chosen = resolve_strategy(model, strategy, draft)
    session = generate.start(
        model,
        [ids],
        bind_draft(chosen, draft, model),
        attention_implementation=attention_implementation,
        **request,
    )
    state, steps = session.state, []
    while int(state.finish[0]) == RUNNING:
        state, one = _recorded(
            model, session.strategy, session.aux, state, attention_implementation
        )
        steps.append(_from_device(jax.tree.map(lambda leaf: leaf[0], jax.device_get(one))))
    length, finish = int(state.output_len[0]), int(state.finish[0])
    return Trajectory(
        prompt=list(map(int, ids)),
        tokens=np.asarray(state.output)[0, :length].tolist(),
        limit=int(state.buffer.limit[0]),
        finish_reason=FINISH_REASONS[finish] or "",
        model=model.source,
        strategy=chosen.name,
        settings=_settings(chosen),
        steps=steps,
        error=_error(chosen, finish, int(state.buffer.start[0])),
    )


def _error(strategy: Any, finish: int, position: int) -> str | None:
    if finish == STUCK:
        return driver.stuck_text(strategy, position)
    return "the model gave a value that is not finite" if finish == ERROR else None


@functools.partial(jax.jit, static_argnames=("implementation",), donate_argnames=("state",))
def _recorded(model, strategy, aux, state, implementation):
    def body(model, strategy, aux, state):
        forward = ModelForward(model, aux=aux, implementation=implementation)
        spec = decode.slot_spec(strategy, model, state.finish.shape[0])
        return recorded_step(strategy, forward, state, spec)

    return decode.per_device(
        body,
        model,
        strategy,
        aux,
        (state,),
        lambda split: (decode.state_specs(split),),
        lambda split: (decode.state_specs(split), decode.row_specs(split)),
    )


def _ids(model: Model, prompt: str | Sequence[int]) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    if model.tokenizer is None:
        raise ValueError(
            f"model {model.source!r} has no tokenizer to read text with; give a list of token ids"
        )
    return encode(model.tokenizer, prompt)


def _settings(strategy: Any) -> dict[str, Any]:
    """Fields of a strategy that are numbers, strings or None."""
    found = {}
    for name in settings(strategy):
        value = getattr(strategy, name)
        if np.ndim(value) == 0 and hasattr(value, "item"):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            found[name] = value
    return found


# --- arrays of the device, objects of the host, JSON -------------------------------------------


def _from_device(one: Any) -> Step:
    """A `StepRecord` of one row, in NumPy."""

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
    )


def _plain(value: Any) -> Any:
    """Convert to lists, numbers, strings and None."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _step(facts: Mapping[str, Any]) -> Step:
    def window(name: str) -> Window:
        one = facts[name]
        return Window(one["start"], *(np.asarray(one[key], np.int32) for key in _WINDOW))

    def cells(name: str, kind: Any) -> np.ndarray:
        return np.asarray(facts[name], kind)

    return Step(
        before=window("before"),
        after=window("after"),
        predicted=cells("predicted", np.int32),
        confidence=cells("confidence", np.float32),
        entropy=cells("entropy", np.float32),
        accepted=cells("accepted", bool),
        edited=cells("edited", bool),
        commit_len=facts["commit_len"],
        settled_len=facts["settled_len"],
        nfe=facts["nfe"],
    )


_WINDOW = ("status", "tokens")
