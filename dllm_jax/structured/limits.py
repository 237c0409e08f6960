"""Limits of compiling a constraint, and the distance of its states from an end."""

import time
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

UNREACHABLE = 1 << 30  # distance of a state from which no text ends
MOST_STATES = 20_000
MOST_S = 2.0  # of this thread's own time, so that a loaded host refuses nothing that others take


class TooLarge(ValueError):
    """With less of the instances written it may do."""


class Extent(NamedTuple):
    """How much of a schema's instances is written.

    Attributes:
        nesting: How deep values nest that a schema leaves free, and how often one stands within
            itself.
        longest: Characters of a string whose length is bounded, and eight times the items of an
            array of which this holds.
        deepest: Levels of objects and arrays in which properties stand that may be left out.
        items: Items of a set of free values.
    """

    nesting: int = 2
    longest: int = 1 << 30
    deepest: int = 1 << 30
    items: int = 4


# The first that the device holds is taken: what texts seldom need goes first.
EXTENTS = (
    Extent(),
    Extent(1, items=3),
    Extent(1, 64, items=2),
    Extent(0, 64, items=2),
    Extent(0, 32, items=2),
    Extent(0, 32, 3, 1),
    Extent(0, 16, 2, 1),
    Extent(0, 16, 1, 1),
)


class Budget:
    """Time and states of one compilation, from now on.

    Attributes:
        extent: Of the instances that are written.
        notes: Keywords that say nothing of a text, by their paths, and what is not written.
        kept: What is made several times, by what it is made of.
    """

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        self.kept: dict[Hashable, Any] = {}
        self._most = MOST_STATES
        self.begin(Extent())
        self._began, self._num_checks = time.thread_time(), 0

    def begin(self, extent: Extent, most_states: int = MOST_STATES) -> None:
        """Begin anew, with so much of the instances.

        Args:
            most_states: Of an automaton before equal states are joined.
        """
        self.extent, self._most = extent, most_states
        self.notes.clear()
        self.kept.clear()

    def check(self, states: int = 0) -> None:
        """Go on or not.

        Raises:
            ValueError: There are too many states, or it took too long.
        """
        if states > self._most:
            raise TooLarge(
                f"the constraint needs more than {self._most} states; shorten its repetitions"
            )
        self._num_checks += 1  # reading the time may take longer than what is checked
        if self._num_checks % 64 == 0 and time.thread_time() - self._began > MOST_S:
            raise ValueError(
                f"the constraint takes more than {MOST_S:g} s to compile; make it simpler"
            )


def too_large(error: BaseException) -> str:
    """Why a constraint is refused whose compilation raised this."""
    return (
        f"the constraint is too deep or too large to compile ({type(error).__name__}); make it "
        "simpler"
    )


def distances(table: np.ndarray, accepting: np.ndarray, budget: Budget) -> np.ndarray:
    """Fewest steps from each state to an accepting one, in time linear in the edges.

    Args:
        table: Next state by state and letter; state 0 is dead.
    """
    count = len(table)
    backward = np.unique(table.astype(np.int64) * count + np.arange(count)[:, None])
    first = np.searchsorted(backward, np.arange(count + 1) * count)
    sources = backward % count
    found = np.where(accepting, 0, UNREACHABLE).astype(np.int32)
    level, steps = np.flatnonzero(accepting), 0
    while len(level):
        budget.check()
        steps += 1
        ranges = [sources[first[state] : first[state + 1]] for state in level]
        before = np.unique(np.concatenate(ranges))
        level = before[found[before] == UNREACHABLE]
        found[level] = steps
    return found
