"""Whether a batch of drafted requests drafts next, as lists in float64.

The rule: docs/adr/0011-drafts-switch-off.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GAIN, RAISING, PROBE = 0.1, 25, 1 / 256


@dataclass
class Row:
    """One request: the mean length of its rounds, steps without drafts, tokens it has room for."""

    length: float
    idle: int = 0
    room: int = 1000
    break_even: float = 1.25

    def see(self, right: int, width: int) -> None:
        """A round of this width had this many right drafts."""
        self.idle = 0 if width > 1 else self.idle + 1
        if width > 1 and right < self.room:
            self.length += GAIN * (right + 1 - self.length)


def needs(row: Row, width: int, slots: int) -> float:
    """Tokens that a round with drafts must emit for the row."""
    return row.break_even * min(1 + slots / RAISING, width / 2)


def gain(rows: Sequence[Row], width: int, slots: int) -> float:
    """Expected tokens of the running rows above what they need."""
    return sum(min(row.length, row.room) - needs(row, width, slots) for row in rows)


def pays(rows: Sequence[Row], width: int, slots: int) -> bool:
    """Whether the next round drafts."""
    is_due = any(PROBE * row.idle >= needs(row, width, slots) - 1 for row in rows)
    return gain(rows, width, slots) >= 0 or is_due
