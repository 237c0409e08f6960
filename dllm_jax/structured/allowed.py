"""Ids that a text may be written with: an automaton of one state that stop ids end."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from .automaton import TokenAutomaton
from .limits import UNREACHABLE

_OTHER, _ALLOWED, _STOP = 0, 1, 2  # classes of ids
_DEAD, _OPEN, _END = 0, 1, 2  # states


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A text of allowed ids: `Tokens(allowed=[5, 7])`, or `Tokens(banned=[9])`.

    Attributes:
        allowed: The ids that may be written, and the stop ids; None: all.
        banned: Ids that may not be.

    Raises:
        ValueError: They are no ids, or none are given.
    """

    allowed: tuple[int, ...] | None
    banned: tuple[int, ...]

    def __init__(self, allowed: Iterable[int] | None = None, banned: Iterable[int] = ()):
        try:
            given = None if allowed is None else tuple(sorted(set(allowed)))
            others = tuple(sorted(set(banned)))
            ids = (*(given or ()), *others)
            is_good = all(type(one) is int and one >= 0 for one in ids) and bool(ids)
        except TypeError:
            given, others, is_good = None, (), False
        if not is_good:
            raise ValueError("Tokens(...) has no lists of ids; give allowed=[5, 7] or banned=[9]")
        object.__setattr__(self, "allowed", given)
        object.__setattr__(self, "banned", others)

    def automaton(
        self, vocab_size: int, stop_ids: Sequence[int], never: np.ndarray
    ) -> TokenAutomaton:
        """The automaton over a vocabulary.

        Args:
            stop_ids: Ids that end a text, which are always allowed.
            never: Further ids that may not be written.

        Raises:
            ValueError: An id is outside the vocabulary, or nothing is left.
        """
        largest = max((*(self.allowed or ()), *self.banned))
        if largest >= vocab_size:
            raise ValueError(f"id {largest} is not in the vocabulary of {vocab_size}; leave it out")
        class_of = np.full(vocab_size, _ALLOWED if self.allowed is None else _OTHER, np.int32)
        class_of[list(self.allowed or ())] = _ALLOWED
        class_of[list(self.banned)] = _OTHER
        class_of[np.asarray(never, np.int64)] = _OTHER
        class_of[[one for one in stop_ids if 0 <= one < vocab_size]] = _STOP
        if not (class_of == _ALLOWED).any():
            raise ValueError("no id is left to write with; allow one that is not banned")
        delta = np.array([[_DEAD] * 3, [_DEAD, _OPEN, _END], [_END] * 3], np.int32)
        distance = np.array([UNREACHABLE, 0, 0], np.int32)
        return TokenAutomaton(class_of, delta, _OPEN, _END, distance)
