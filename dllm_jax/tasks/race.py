"""A race of settings on the same problems, to the one that the full grid would choose.

The full grid, every setting on every problem, chooses the fastest setting whose accuracy is within
the margin of the reference's. A race says what it would choose after a part of its forwards. Cheap
settings answer a run of problems that grows. The reference, which takes one token a forward,
answers the first ones, and some of the others: more of those that a careful setting, the proxy, has
wrong, for there the two may differ. From what was answered follow the likely outcomes of
the full grid, as draws; a setting leaves when almost none of them chooses it, and the race ends
when almost all agree on a winner.

Data flow: `play` (which settings, which problems) -> outcomes -> draws -> who is left, who plays.

Source: sampling of problems in two phases, Cochran, "Sampling techniques", 1977, chapter 12.
"""

import dataclasses
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

FIRST = 128  # problems of the first round
GROWTH = 1.5  # factor of the number of problems from a round to the next
TIE = 0.05  # share of speed that does not matter
SHARE = 0.38  # of the full grid's forwards at most, as estimated: 0.4 in fact

# Doubt of the winner at which the race ends. It is looked at after each round, so it must be well
# below one in twenty.
_DOUBT = 0.01
_RARE = 0.01  # share of outcomes that is not worth a forward
_DRAWS = 2000
_Z = NormalDist().inv_cdf(0.975)


class Played(NamedTuple):
    """Results of some settings on some problems."""

    right: Bool[np.ndarray, "C N"]
    tokens: Int[np.ndarray, "C N"]
    forwards: Int[np.ndarray, "C N"]


Play = Callable[[Sequence[int], Sequence[int]], Played]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A setting at the end of the race.

    Attributes:
        problems: Number of problems that were answered.
        accuracy, speed: Share of right answers; visible tokens over forwards.
        difference: Accuracy less the reference's, with its 95 % interval for other problems.
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
        winner: The setting that the full grid would choose, or one as fast but for `TIE`.
        doubt: How likely it is that the full grid would not.
        is_shown: The interval of its difference is within the margin, for other problems too.
        entries: One a setting.
        forwards, grid_forwards: Spent; and, estimated, of all settings on all problems.
        problems: Number of problems that some setting has seen, from the first on.
        rounds: Numbers of problems at which settings could leave.
    """

    winner: int
    doubt: float
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
    """Race `settings` against each other on up to `problems` problems, which are in random order.

    Args:
        play: Answers some problems with some settings.
        margin: Share of problems that the winner may answer wrongly beyond the reference.
        reference: The setting whose accuracy is the measure. It never leaves and may win.
        budget: Forwards at most; the round that would exceed it is not begun. None: `SHARE` of
            the full grid's.
        first: Problems of the first round.
    """
    table = _Table(settings, problems, reference)
    running = [one for one in range(settings) if one != reference]
    left: dict[int, str] = {}
    last: dict[int, Entry] = {}

    def answer(chosen: Sequence[int], where: Sequence[int]) -> None:
        if len(chosen) and len(where):
            table.add(chosen, where, play(chosen, where))

    size = min(first, problems)
    answer(range(settings), range(size))
    rounds = [size]
    while True:
        outlook = table.outlook(running, margin)
        grid = table.grid_forwards
        for one in running:
            if outlook.inside[one] < _RARE:
                left[one] = "inaccurate"
            elif outlook.faster[one] > 1 - _RARE:
                left[one] = "slower"
            last[one] = table.entry(one, left.get(one))
        running = [one for one in running if one not in left]
        if outlook.doubt <= _DOUBT:
            break
        moves = table.moves([*running], min(round(GROWTH * size), problems))
        most = SHARE * grid if budget is None else budget
        moves = [move for move in moves if table.spent + move.forwards <= most]
        if not moves:
            break
        move = max(moves, key=lambda move: move.gain)
        for chosen, where in move.plays:
            answer(chosen, where)
        if move.size > size:
            size = move.size
            rounds.append(size)
    last[reference] = table.entry(reference, None)
    winner = outlook.winner
    return Race(
        winner,
        outlook.doubt,
        bool(last[winner].difference[1] >= -margin),
        [last[one] for one in range(settings)],
        table.spent,
        round(table.grid_forwards),
        size,
        rounds,
    )


class _Outlook(NamedTuple):
    """Likely outcomes of the full grid.

    Attributes:
        winner, doubt: Who is chosen, or as fast, most often; how often not.
        inside: How often each setting is within the margin.
        faster: How often a certain setting is within the margin and faster than each. Not how
            often any is: what is faster is seldom more accurate, so they are out together.
    """

    winner: int
    doubt: float
    inside: Float[np.ndarray, " C"]
    faster: Float[np.ndarray, " C"]


class _Move(NamedTuple):
    """A possible next move: settings and the problems they would answer.

    Attributes:
        plays: Settings and problems.
        size: Problems that the running settings have seen then.
        forwards: What it costs, as expected.
        gain: Variance of a difference that it takes away, by forward.
    """

    plays: list[tuple[list[int], list[int]]]
    size: int
    forwards: float
    gain: float


class _Table:
    """Outcomes by setting and problem."""

    def __init__(self, settings: int, problems: int, reference: int):
        shape = settings, problems
        self.right, self.tokens = np.zeros(shape), np.zeros(shape)
        self.forwards = np.zeros(shape, np.int64)
        self.done = np.zeros(shape, bool)
        self.reference = reference
        self.proxy: int | None = None  # its answers make the strata of the reference's problems
        self._rng = np.random.default_rng(0)

    def add(self, settings: Sequence[int], problems: Sequence[int], played: Played) -> None:
        """Note who answered what."""
        where = np.ix_(settings, problems)
        self.right[where], self.tokens[where], self.forwards[where] = played
        self.done[where] = True

    @property
    def spent(self) -> int:
        """Forwards so far."""
        return int(self.forwards.sum())

    @property
    def grid_forwards(self) -> float:
        """Of all settings on all problems, estimated."""
        settings, problems = self.done.shape
        return sum(self.mean_forwards(one) for one in range(settings)) * problems

    def mean_forwards(self, one: int) -> float:
        """Of a problem."""
        return float(self.weights(one) @ self.forwards[one])

    def accuracy(self, one: int) -> float:
        """Share of right answers."""
        return float(self.weights(one) @ self.right[one])

    def speed(self, one: int) -> float:
        """Tokens per forward."""
        weights = self.weights(one)
        return float(weights @ self.tokens[one] / max(weights @ self.forwards[one], 1e-9))

    def strata(self, size: int) -> list[Int[np.ndarray, " X"]]:
        """The first problems by whether the proxy has them right; all together without one."""
        if self.proxy is None:
            return [np.arange(size)]
        is_right = self.right[self.proxy, :size] > 0
        return [part for part in (np.flatnonzero(is_right), np.flatnonzero(~is_right)) if len(part)]

    def weights(self, one: int) -> Float[np.ndarray, " N"]:
        """Of each problem that was answered, so that they stand for all that are seen."""
        done = self.done[one]
        if one != self.reference or self.proxy is None:
            return done / max(done.sum(), 1)
        found, size = np.zeros(len(done)), int(self.done[self.proxy].sum())
        for part in self.strata(size):
            own = part[done[part]]
            found[own] = len(part) / size / max(len(own), 1)
        return found / found.sum()

    def moments(
        self, settings: Sequence[int]
    ) -> tuple[Float[np.ndarray, " R"], Float[np.ndarray, "R R"], Float[np.ndarray, "R R"]]:
        """Accuracies less the reference's; covariances of a problem's difference and log speed."""
        size = int(self.done[settings[0]].sum()) if settings else 0
        reference = self.right[self.reference]
        weights = self.weights(self.reference)[:size]
        weights = weights / max(weights.sum(), 1e-9)
        apart = self.right[settings, :size] - reference[:size]
        mean = self.right[settings, :size].mean(axis=1) - self.accuracy(self.reference)
        centred = apart - (apart @ weights)[:, None]
        covariance = (centred * weights) @ centred.T
        # As if each pair disagreed on two more: where all agree, they may still differ.
        covariance += 2 * np.eye(len(settings)) / max((weights > 0).sum(), 1)
        tokens, forwards = self.tokens[settings, :size], self.forwards[settings, :size]
        influence = tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9)
        influence = influence - forwards / np.maximum(forwards.mean(axis=1, keepdims=True), 1e-9)
        return mean, covariance, influence @ influence.T / max(size, 1)

    def unseen(self, size: int, done: Bool[np.ndarray, " N"], growth: float = 1.0) -> float:
        """Variance of the reference's accuracy on the first `size`, for those it did not answer.

        Args:
            growth: Of each stratum, by problems that nobody has answered yet.
        """
        found = 0.0
        for part in self.strata(size):
            own = part[done[part]]
            p = (self.right[self.reference, own].sum() + 0.5) / (len(own) + 1)
            share = 1 - len(own) / (growth * len(part))
            found += (len(part) / size) ** 2 * p * (1 - p) * share / (len(own) + 1)
        return found

    def outlook(self, running: Sequence[int], margin: float) -> _Outlook:
        """Draws of what the full grid finds; see `_Outlook`."""
        settings, problems = self.done.shape
        speed = np.array([self.speed(one) for one in range(settings)])
        drawn, fits = np.tile(speed, (_DRAWS, 1)), np.zeros((_DRAWS, settings), bool)
        fits[:, self.reference] = True
        if running:
            size, R = int(self.done[running[0]].sum()), len(running)
            mean, covariance, of_speed = self.moments(running)
            rest = 1 / size - 1 / problems
            noise = self._rng.standard_normal((_DRAWS, 2 * R + 1))
            apart = mean + noise[:, :R] @ _root(covariance * rest).T
            apart += noise[:, -1:] * self.unseen(size, self.done[self.reference]) ** 0.5
            drawn[:, running] *= np.exp(noise[:, R : 2 * R] @ _root(of_speed * rest).T)
            fits[:, running] = apart >= -margin - 1e-9
        fastest = np.where(fits, drawn, 0).max(axis=1, keepdims=True)
        good = (fits & (drawn >= (1 - TIE) * fastest)).mean(axis=0)
        winner = max(range(settings), key=lambda one: (good[one], speed[one]))
        beats = (fits[:, :, None] & (drawn[:, :, None] > drawn[:, None, :])).mean(axis=0)
        return _Outlook(winner, float(1 - good[winner]), fits.mean(axis=0), beats.max(axis=0))

    def moves(self, running: Sequence[int], size: int) -> list[_Move]:
        """The possible next moves: more problems for the running settings, or for the reference."""
        reference = self.reference
        if self.proxy is None and running:
            self.proxy = self._careful(running)
        if self.proxy is None:
            return []
        players = [*running] if self.proxy in running else [*running, self.proxy]
        now = int(self.done[self.proxy].sum())
        _, covariance, _ = self.moments(players)
        spread = float(np.diag(covariance).mean())
        done = self.done[reference]
        before = self.unseen(now, done)
        found = []
        if size > now:
            more = [*range(now, size)]
            cost = sum(self.mean_forwards(one) for one in players) * len(more)
            gain = spread * (1 / now - 1 / size) + before - self.unseen(now, done, size / now)
            found.append(_Move([(players, more)], size, cost, gain / cost))
        count = max(FIRST // 4, int(done.sum()) // 4)
        chosen = self._of_reference(now, min(count, now - int(done.sum())))
        if chosen:
            after = done.copy()
            after[chosen] = True
            gain = before - self.unseen(now, after)
            cost = self.mean_forwards(reference) * len(chosen)
            found.append(_Move([([reference], chosen)], now, cost, gain / cost))
        return found

    def _careful(self, running: Sequence[int]) -> int:
        """The fastest of those that agree with the reference, but for one problem, most often."""
        size = int(self.done[running[0]].sum())
        apart = np.abs(self.right[running, :size] - self.right[self.reference, :size]).sum(axis=1)
        near = [one for one, n in zip(running, apart, strict=True) if n <= apart.min() + 1]
        return max(near, key=self.speed)

    def _of_reference(self, size: int, count: int) -> list[int]:
        """The problems that the reference is to answer next: by each stratum's spread."""
        done, wanted = self.done[self.reference], []
        for part in self.strata(size):
            own = part[done[part]]
            p = (self.right[self.reference, own].sum() + 0.5) / (len(own) + 1)
            wanted.append((part, len(own), len(part) * (p * (1 - p)) ** 0.5))
        total, weight = count + sum(n for _, n, _ in wanted), sum(w for *_, w in wanted)
        found: list[int] = []
        for part, num_done, share in sorted(wanted, key=lambda one: -one[2] / len(one[0])):
            most = min(len(part) - num_done, count - len(found))
            more = min(max(round(total * share / weight) - num_done, 0), most)
            found += part[~done[part]][:more].tolist()
            total, weight = total - num_done - more, max(weight - share, 1e-9)
        for part, *_ in wanted:  # what rounding left
            free = np.setdiff1d(part[~done[part]], found)
            found += free[: count - len(found)].tolist()
        return sorted(found)

    def entry(self, one: int, left: str | None) -> Entry:
        """A setting as it stands."""
        return Entry(
            problems=int(self.done[one].sum()),
            accuracy=self.accuracy(one),
            speed=self.speed(one),
            difference=self.difference(one),
            speed_ci95=self.speed_interval(one),
            left=left,
        )

    def difference(self, one: int, z: float = _Z) -> tuple[float, float, float]:
        """Accuracy less the reference's, and an interval for other problems of the kind.

        Where both answer all problems alike, a bootstrap would state no error. A half is added to
        each cell of the table of pairs.

        Source: Agresti and Min 2005, "Simple improved confidence intervals for comparing matched
            proportions".
        """
        if one == self.reference:
            return 0.0, 0.0, 0.0
        size = int(self.done[one].sum())
        weights = self.weights(self.reference)[:size]
        apart = self.right[one, :size] - self.right[self.reference, :size]
        more, less = (size * float(weights @ (sign * apart > 0)) for sign in (1, -1))
        value = self.accuracy(one) - self.accuracy(self.reference)
        centre = value * size / (size + 2)
        spread = (more + less + 1 - (more - less) ** 2 / (size + 2)) / (size + 2) ** 2
        half = z * (spread + self.unseen(size, self.done[self.reference])) ** 0.5
        return value, float(centre - half), float(centre + half)

    def speed_interval(self, one: int) -> tuple[float, float]:
        """By the delta method, on the scale of the logarithm."""
        done = self.done[one]
        tokens, forwards = self.tokens[one, done], self.forwards[one, done]
        influence = tokens / max(tokens.mean(), 1e-9) - forwards / max(forwards.mean(), 1e-9)
        half = _Z * float(np.std(influence)) / len(tokens) ** 0.5
        return self.speed(one) * float(np.exp(-half)), self.speed(one) * float(np.exp(half))


def _root(covariance: Float[np.ndarray, "R R"]) -> Float[np.ndarray, "R R"]:
    """A matrix whose product with its transpose is `covariance`."""
    values, vectors = np.linalg.eigh(covariance)
    return vectors * np.sqrt(np.maximum(values, 0))
