"""Exceptions that end one request and no other: counted, and reported once by type and place."""

from collections.abc import Callable

MOST_REPORTED = 256  # pairs of type and place


class Faults:
    """Counts and reports exceptions in the handling of single requests.

    Args:
        report: Takes a line, once for each type and place; None: nobody reads it.

    Attributes:
        count: Requests that an exception ended.
    """

    def __init__(self, report: Callable[[str], None] | None = None):
        self.count = 0
        self._report = report
        self._reported: set[str] = set()

    def note(self, error: BaseException) -> str:
        """Count an exception; its type and place.

        The message is left out: it may hold what a client sent.
        """
        self.count += 1
        said = f"{type(error).__name__} at {_place(error)}"
        if getattr(error, "says_place", False):  # it was raised in another process
            said = str(error)
        if said not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(said)
            if self._report is not None:
                self._report(f"a request was ended by {said}; others go on (reported once)")
        return said


def _place(error: BaseException) -> str:
    """File and line where it was raised."""
    trace = error.__traceback__
    if trace is None:
        return "an unknown line"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
