"""Which width a batch of drafted requests runs next, as lists in float64.

A request is its expected chance at each place, its rounds without drafts, and the tokens it has
room for. The rule: docs/adr/0011-costs-are-data.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST, GAIN, PROBE, SHARE = 0.85, 0.25, 128, 0.005


@dataclass
class Row:
    """One request; `places` drafts at most."""

    places: int
    room: int = 1000
    idle: int = 0
    chance: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = self.chance or [FIRST] * self.places

    def expects(self, width: int) -> float:
        """Tokens of a round of this width."""
        tokens, reached = 1.0, 1.0
        for place in range(1, min(width, self.room)):
            reached *= self.chance[place - 1]
            tokens += reached
        return tokens

    def see(self, right: int, width: int) -> None:
        """A round of this width had this many right drafts."""
        self.idle = 0 if width > 1 else self.idle + 1
        for place in range(1, min(width - 1, self.room) + 1):
            if place > right + 1:
                break
            was = self.chance[place - 1]
            self.chance[place - 1] = was + GAIN * ((place <= right) - was)


def scores(rows: Sequence[Row], widths: Sequence[int], costs: Sequence[float]) -> list[float]:
    """Tokens for cost of each width."""
    return [sum(r.expects(w) for r in rows) / c for w, c in zip(widths, costs, strict=True)]


def choice(rows: Sequence[Row], widths: Sequence[int], costs: Sequence[float]) -> int:
    """The index of the width."""
    reported = scores(rows, widths, costs)
    best = reported.index(max(reported))
    can_pay = any(w / c > 1 / costs[0] for w, c in zip(widths[1:], costs[1:], strict=True))
    if best == 0 and widths[0] == 1 and can_pay:
        spared = max(row.idle for row in rows)
        # One look in this many rounds, and of what they cost a share.
        if spared >= PROBE and costs[1] - costs[0] <= SHARE * spared * costs[0]:
            return 1
    return best
