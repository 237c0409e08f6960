"""What compiling a constraint may cost, and how far its states are from an end."""

import time

import numpy as np

UNREACHABLE = 1 << 30  # distance of a state from which no text ends
MOST_STATES = 20_000
MOST_S = 2.0  # of this thread's own time, so that a loaded host refuses nothing that others take
MOST_NESTED = 2  # levels of values that a schema leaves free, and of schemas within themselves


class TooLarge(ValueError):
    """Fewer levels of nesting may do."""


class Budget:
    """Time and states of one compilation, from now on.

    Attributes:
        nesting: How deep values nest that a schema leaves free, and how often one stands within
            itself.
        notes: Keywords that say nothing of a text, by their paths.
    """

    def __init__(self) -> None:
        self.nesting = MOST_NESTED
        self.notes: dict[str, None] = {}
        self._began, self._num_checks = time.thread_time(), 0

    def check(self, states: int = 0) -> None:
        """Go on or not.

        Raises:
            ValueError: There are too many states, or it took too long.
        """
        if states > MOST_STATES:
            raise TooLarge(
                f"the constraint needs more than {MOST_STATES} states; shorten its repetitions"
            )
        self._num_checks += 1  # reading the time may take longer than what is checked
        if self._num_checks % 16 == 0 and time.thread_time() - self._began > MOST_S:
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
