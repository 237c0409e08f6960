"""What compiling a constraint may cost."""

import time

MOST_STATES = 20_000
MOST_S = 2.0  # of this thread's own time, so that a loaded host refuses nothing that others take


class Budget:
    """Time and states of one compilation, from now on."""

    def __init__(self) -> None:
        self._began = time.thread_time()

    def check(self, states: int = 0) -> None:
        """Go on or not.

        Raises:
            ValueError: There are too many states, or it took too long.
        """
        if states > MOST_STATES:
            raise ValueError(
                f"the constraint needs more than {MOST_STATES} states; shorten its repetitions"
            )
        if time.thread_time() - self._began > MOST_S:
            raise ValueError(
                f"the constraint takes more than {MOST_S:g} s to compile; make it simpler"
            )
