"""A race of settings on the same problems, to the fastest one within an accuracy budget.

All settings answer the first problems; those left answer half as many again, and so on. A setting
leaves when it is shown to be too inaccurate, or slower than one that was shown to be accurate
enough. The race ends when no setting that is left can be much faster than the fastest accurate one.
Accuracy is compared with the reference's problem by problem, speed setting by setting.

Data flow: `play` (which settings, which problems) -> outcomes -> bounds -> who is left. Nothing
here knows about models.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

FIRST = 64  # problems of the first round
GROWTH = 1.5  # of the problems seen, by a round
TIE = 0.05  # share of speed that is not worth further rounds

# Looks share their problems, and there are up to ten: to show that a setting is accurate takes more
# than to show that it is not, or is slower. Levels were chosen on benchmarks/results/race_table_*
# and on made-up curves (docs/tune.md); what wins is checked on other problems.
_Z = NormalDist().inv_cdf(0.975)
_Z_ACCURATE = NormalDist().inv_cdf(0.995)


class Played(NamedTuple):
    """What some settings did on some problems."""

    right: Bool[np.ndarray, "C N"]
    tokens: Int[np.ndarray, "C N"]
    forwards: Int[np.ndarray, "C N"]


Play = Callable[[Sequence[int], range], Played]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A setting at the end of the race.

    Attributes:
        problems: The first so many were answered.
        accuracy, speed: Share of right answers; visible tokens over forwards.
        difference: Accuracy less the reference's on the same problems, with its 95 % interval.
        speed_ci95: Of `speed`.
        left: Why it left: "inaccurate", "slower" or None.
    """

    problems: int
    accuracy: float
    speed: float
    difference: tuple[float, float, float]
    speed_ci95: tuple[float, float]
    left: str | None


@dataclasses.dataclass(frozen=True)
class Race:
    """The end of a race.

    Attributes:
        winner: The fastest setting that was shown to be within the budget; else the reference.
            Others that are left may be faster by a share of `TIE`.
        is_shown: Whether one was.
        entries: One a setting.
        forwards, grid_forwards: Spent; and, estimated, of all settings on all problems.
        problems: The first so many were seen by some setting.
        rounds: Numbers of problems at which settings could leave.
    """

    winner: int
    is_shown: bool
    entries: list[Entry]
    forwards: int
    grid_forwards: int
    problems: int
    rounds: list[int]


def race(
    play: Play,
    settings: int,
    problems: int,
    *,
    margin: float,
    reference: int = 0,
    budget: int | None = None,
    first: int = FIRST,
) -> Race:
    """Race `settings` against each other on up to `problems` problems.

    Args:
        play: Answers a run of problems with some settings.
        margin: Share of problems that the winner may answer wrongly beyond the reference.
        reference: The setting whose accuracy is the measure. It answers every problem and may win.
        budget: Forwards at most; the round that would exceed it is not begun.
        first: Problems of the first round; each later one adds `GROWTH - 1` of what was seen.
    """
    rounds = [first]
    while rounds[-1] < problems:
        rounds.append(round(GROWTH * rounds[-1]))
    rounds = [min(size, problems) for size in rounds]
    table = _Table(settings, problems)
    running = list(range(settings))
    left: dict[int, str] = {}
    accurate: set[int] = set()  # as some look has shown
    done, looked = 0, []
    for size in rounds:
        expected = sum(table.mean_forwards(one) for one in running) * (size - done)
        if looked and budget is not None and table.spent + expected > budget:
            break
        table.add(running, range(done, size), play(running, range(done, size)))
        done = size
        looked.append(size)
        accurate |= {one for one in running if table.difference(one, reference)[1] >= -margin}
        for one in running:
            if one == reference:
                continue
            if table.difference(one, reference, _Z)[2] < -margin:
                left[one] = "inaccurate"
            elif any(table.is_slower(one, other) for other in accurate if other != one):
                left[one] = "slower"
        running = [one for one in running if one not in left]
        accurate &= set(running)
        best = max(accurate, key=table.speed)
        if all(table.most_lead(one, best) <= TIE for one in running):
            break  # nothing is left that is worth finding out
    entries = [
        Entry(
            problems=int(table.seen[one]),
            accuracy=table.accuracy(one),
            speed=table.speed(one),
            difference=table.difference(one, reference, _Z),
            speed_ci95=table.speed_interval(one),
            left=left.get(one),
        )
        for one in range(settings)
    ]
    winner = max(accurate, key=table.speed, default=reference)
    grid = sum(table.mean_forwards(one) for one in range(settings)) * problems
    return Race(winner, bool(accurate), entries, table.spent, round(grid), done, looked)


class _Table:
    """Outcomes by setting and problem; a setting has answered the first `seen`."""

    def __init__(self, settings: int, problems: int):
        shape = settings, problems
        self.right, self.tokens = np.zeros(shape), np.zeros(shape)
        self.forwards = np.zeros(shape, np.int64)
        self.seen = np.zeros(settings, np.int64)

    def add(self, settings: Sequence[int], run: range, played: Played) -> None:
        """Note a round."""
        where = np.ix_(settings, run)
        self.right[where], self.tokens[where], self.forwards[where] = played
        self.seen[settings] = run.stop

    @property
    def spent(self) -> int:
        """Forwards so far."""
        return int(self.forwards.sum())

    def mean_forwards(self, one: int) -> float:
        """Of a problem."""
        return float(self.forwards[one].sum() / max(self.seen[one], 1))

    def accuracy(self, one: int) -> float:
        """Share of right answers."""
        return float(self.right[one, : self.seen[one]].mean())

    def speed(self, one: int) -> float:
        """Tokens per forward."""
        return float(self.tokens[one].sum() / max(self.forwards[one].sum(), 1))

    def difference(
        self, one: int, reference: int, z: float = _Z_ACCURATE
    ) -> tuple[float, float, float]:
        """Accuracy less the reference's, and an interval that is honest without a difference.

        Where both settings answer all problems alike, a bootstrap would state no error. A half is
        added to each cell of the table of pairs.

        Source: Agresti and Min 2005, "Simple improved confidence intervals for comparing matched
            proportions".
        """
        n = int(self.seen[one])
        more = float(np.sum(self.right[one, :n] > self.right[reference, :n]))
        less = float(np.sum(self.right[one, :n] < self.right[reference, :n]))
        value = (more - less) / n
        if one == reference:
            return 0.0, 0.0, 0.0
        centre = (more - less) / (n + 2)
        spread = ((more + less + 1) - (more - less) ** 2 / (n + 2)) ** 0.5 / (n + 2)
        return value, centre - z * spread, centre + z * spread

    def is_slower(self, one: int, other: int) -> bool:
        """Whether `one` is shown to have fewer tokens per forward than `other`, or just as many."""
        apart, half = self._lead(other, one)
        is_same = half == 0 and apart == 0 and other < one  # they end in the same texts
        return is_same or apart > half

    def most_lead(self, one: int, other: int) -> float:
        """The share by which `one` may be faster than `other`, at most."""
        apart, half = self._lead(one, other)
        return float(np.expm1(apart + half))

    def _lead(self, one: int, other: int) -> tuple[float, float]:
        """The logarithm of the speed less another's, and half of its 95 % interval."""
        n = int(min(self.seen[one], self.seen[other]))
        apart = float(np.log(self.speed(one)) - np.log(self.speed(other)))
        return apart, _Z * float(
            np.std(self._influence(one, n) - self._influence(other, n))
        ) / n**0.5

    def speed_interval(self, one: int) -> tuple[float, float]:
        """By the delta method, on the scale of the logarithm."""
        n = int(self.seen[one])
        half = _Z * float(np.std(self._influence(one, n))) / n**0.5
        return self.speed(one) * float(np.exp(-half)), self.speed(one) * float(np.exp(half))

    def _influence(self, one: int, n: int) -> Float[np.ndarray, " n"]:
        """What each problem adds to the logarithm of the speed."""
        tokens, forwards = self.tokens[one, :n], self.forwards[one, :n]
        return tokens / max(tokens.mean(), 1e-9) - forwards / max(forwards.mean(), 1e-9)


def aup(points: Sequence[tuple[float, float]], y_max: float) -> dict[str, Any]:
    """Accuracy under parallelism: the area under accuracy against tokens per forward.

    Points more than 5 percentage points below the slowest one count for nothing, and accuracy
    below the best known weighs less. Values compare only where `y_max` is the same.

    Args:
        points: Tokens per forward and accuracy in percent.
        y_max: The best accuracy of any method on the task, in percent.

    Source: d3LLM's `AUP_leaderboard/aup_utils.py`; it refuses such low points, here they are left
        out.
    """
    ordered = sorted(points)
    floor = ordered[0][1] - 5

    def weighed(y: float) -> float:
        return y * min(float(np.exp(-3 * (1 - y / y_max))), 1.0)

    kept = [point for point in ordered if point[1] >= floor]
    area = kept[0][0] * kept[0][1]
    for (x, y), (after, then) in itertools.pairwise(kept):
        area += (after - x) * (weighed(y) + weighed(then)) / 2
    return {
        "value": area,
        "y_max": y_max,
        "points": len(kept),
        "left_out": len(ordered) - len(kept),
    }
