"""A race of settings on the same problems, to the one that the full grid would choose.

The full grid, every setting on every problem, chooses the fastest setting whose accuracy is within
the margin of the reference's. A race says what it would choose after a part of its forwards. Cheap
settings answer a run of problems that grows. The reference, which takes one token a forward,
answers the first ones, and some of the others: more of those that a careful setting, the proxy, has
wrong, for there the two may differ. From what was answered follow the likely outcomes of
the full grid, as draws; a setting leaves when almost none of them chooses it, and the race ends
when almost all agree on a winner.

Data flow: `play` (which settings, which problems) -> `outcomes` -> draws -> who is left, who plays.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dllm_jax.tasks.outcomes import Outcomes, Played

FIRST = 128  # problems of the first round
GROWTH = 1.5  # factor of the number of problems from a round to the next
TIE = 0.05  # share of speed that does not matter
SHARE = 0.38  # of the full grid's forwards at most, as estimated: 0.4 in fact

# Doubt of the winner at which the race ends. It is looked at after each round, so it must be well
# below one in twenty.
_DOUBT = 0.01
_RARE = 0.01  # share of outcomes that is not worth a forward
_DRAWS = 2000


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
    table, rng = Outcomes(settings, problems, reference), np.random.default_rng(0)
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
        outlook = _outlook(table, running, margin, rng)
        grid = table.grid_forwards
        for one in running:
            if outlook.inside[one] < _RARE:
                left[one] = "inaccurate"
            elif outlook.faster[one] > 1 - _RARE:
                left[one] = "slower"
            last[one] = _entry(table, one, left.get(one))
        running = [one for one in running if one not in left]
        if outlook.doubt <= _DOUBT:
            break
        moves = _moves(table, [*running], min(round(GROWTH * size), problems))
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
    last[reference] = _entry(table, reference, None)
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


def _outlook(
    table: Outcomes, running: Sequence[int], margin: float, rng: np.random.Generator
) -> _Outlook:
    """Draws of what the full grid finds; see `_Outlook`."""
    settings, problems = table.done.shape
    speed = np.array([table.speed(one) for one in range(settings)])
    drawn, fits = np.tile(speed, (_DRAWS, 1)), np.zeros((_DRAWS, settings), bool)
    fits[:, table.reference] = True
    if running:
        size, R = int(table.done[running[0]].sum()), len(running)
        mean, covariance, of_speed = table.moments(running)
        rest = 1 / size - 1 / problems
        noise = rng.standard_normal((_DRAWS, 2 * R + 1))
        apart = mean + noise[:, :R] @ _root(covariance * rest).T
        apart += noise[:, -1:] * table.unseen(size, table.done[table.reference]) ** 0.5
        drawn[:, running] *= np.exp(noise[:, R : 2 * R] @ _root(of_speed * rest).T)
        fits[:, running] = apart >= -margin - 1e-9
    fastest = np.where(fits, drawn, 0).max(axis=1, keepdims=True)
    good = (fits & (drawn >= (1 - TIE) * fastest)).mean(axis=0)
    winner = max(range(settings), key=lambda one: (good[one], speed[one]))
    beats = (fits[:, :, None] & (drawn[:, :, None] > drawn[:, None, :])).mean(axis=0)
    return _Outlook(winner, float(1 - good[winner]), fits.mean(axis=0), beats.max(axis=0))


def _moves(table: Outcomes, running: Sequence[int], size: int) -> list[_Move]:
    """The possible next moves: more problems for the running settings, or for the reference."""
    reference = table.reference
    if table.proxy is None and running:
        table.proxy = _careful(table, running)
    if table.proxy is None:
        return []
    players = [*running] if table.proxy in running else [*running, table.proxy]
    now = int(table.done[table.proxy].sum())
    _, covariance, _ = table.moments(players)
    spread = float(np.diag(covariance).mean())
    done = table.done[reference]
    before = table.unseen(now, done)
    found = []
    if size > now:
        more = [*range(now, size)]
        cost = sum(table.mean_forwards(one) for one in players) * len(more)
        gain = spread * (1 / now - 1 / size) + before - table.unseen(now, done, size / now)
        found.append(_Move([(players, more)], size, cost, gain / cost))
    count = max(FIRST // 4, int(done.sum()) // 4)
    chosen = _of_reference(table, now, min(count, now - int(done.sum())))
    if chosen:
        after = done.copy()
        after[chosen] = True
        gain = before - table.unseen(now, after)
        cost = table.mean_forwards(reference) * len(chosen)
        found.append(_Move([([reference], chosen)], now, cost, gain / cost))
    return found


def _careful(table: Outcomes, running: Sequence[int]) -> int:
    """The fastest of those that agree with the reference, but for one problem, most often."""
    size = int(table.done[running[0]].sum())
    apart = np.abs(table.right[running, :size] - table.right[table.reference, :size]).sum(axis=1)
    near = [one for one, n in zip(running, apart, strict=True) if n <= apart.min() + 1]
    return max(near, key=table.speed)


def _of_reference(table: Outcomes, size: int, count: int) -> list[int]:
    """The problems that the reference is to answer next: by each stratum's spread."""
    done, wanted = table.done[table.reference], []
    for part in table.strata(size):
        own = part[done[part]]
        p = (table.right[table.reference, own].sum() + 0.5) / (len(own) + 1)
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


def _entry(table: Outcomes, one: int, left: str | None) -> Entry:
    """A setting as it stands."""
    return Entry(
        problems=int(table.done[one].sum()),
        accuracy=table.accuracy(one),
        speed=table.speed(one),
        difference=table.difference(one),
        speed_ci95=table.speed_interval(one),
        left=left,
    )


def _root(covariance: Float[np.ndarray, "R R"]) -> Float[np.ndarray, "R R"]:
    """A matrix whose product with its transpose is `covariance`."""
    values, vectors = np.linalg.eigh(covariance)
    return vectors * np.sqrt(np.maximum(values, 0))
