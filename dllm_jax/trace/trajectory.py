"""The steps in which a text was decoded, as values of the host and as JSON."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dllm_jax.engine.record import Record, record_of
from dllm_jax.strategies.core.recording import BEFORE_FIRST

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
        log_prob: Log-probability of the cell's token, in a hole of the prediction, under the law
            that is drawn from; NaN for none.
        kept: What `record` was asked to keep; not in JSON.
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
    log_prob: np.ndarray
    kept: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


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
        law: What `Record.law` says.
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
    law: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def nfe(self) -> int:
        """Forwards after prefill."""
        return sum(step.nfe for step in self.steps)

    @property
    def record(self) -> Record:
        """What was written, when, and how likely that was."""
        return _record_of(self)

    def to_json(self) -> str:
        """One JSON object; NaN is null. `from_json` reads it."""
        fields: dict[str, Any] = dataclasses.asdict(self) | {"nfe": self.nfe, "version": VERSION}
        for step in fields["steps"]:
            del step["kept"]
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


def _record_of(trajectory: Trajectory) -> Record:
    """The writes of a trajectory, and what was kept of its reads."""
    columns: dict[str, list[np.ndarray]] = {}

    def add(**values: np.ndarray) -> None:
        for name, column in values.items():
            columns.setdefault(name, []).append(column)

    nfe = 0
    for step in trajectory.steps:
        before, after, edited = step.before.tokens.ravel(), step.after.tokens.ravel(), step.edited
        position = step.before.start + np.arange(len(after))
        # Before its first forward a text has at most what the end of the prompt predicts.
        given = (nfe == 0) & (before >= 0) & (position >= len(trajectory.prompt))
        for where, number in ((given, BEFORE_FIRST), ((step.accepted | edited).ravel(), nfe)):
            place, token = position[where], (before if number < 0 else after)[where]
            numbers = np.full(len(place), number)
            add(position=place, step=numbers, token=token, log_prob=step.log_prob.ravel()[where])
            add(is_edit=edited.ravel()[where] & (number >= 0))
        for name, values in step.kept.items():
            add(**{f"kept.{name}": values})
            if name.endswith("position"):
                name = name.removesuffix("position")
                add(**{f"kept.{name}step": np.full(len(values), nfe, np.int32)})
        nfe += step.nfe
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return record_of(
        trajectory.prompt,
        len(trajectory.tokens),
        trajectory.finish_reason,
        trajectory.limit,
        joined,
        trajectory.law,
        {name.removeprefix("kept."): v for name, v in joined.items() if name.startswith("kept.")},
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

    cells = {name: np.asarray(facts[name], kind) for name, kind in _CELLS.items() if name in facts}
    numbers = {name: facts[name] for name in ("commit_len", "settled_len", "nfe")}
    if "log_prob" not in cells:
        cells["log_prob"] = cells["entropy"] * np.nan
    return Step(before=window("before"), after=window("after"), **cells, **numbers)


_WINDOW = ("status", "tokens")
_CELLS = {
    "predicted": np.int32,
    "confidence": np.float32,
    "entropy": np.float32,
    "log_prob": np.float32,
    "accepted": bool,
    "edited": bool,
}
