"""What settings answered, each some of the problems, and what follows for all of them.

The reference answers a sample of the problems that the others have seen, drawn by strata: those
that a proxy has right, and those that it has wrong.

Source: sampling of problems in two phases, Cochran, "Sampling techniques", 1977, chapter 12.
"""

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

_Z = NormalDist().inv_cdf(0.975)


class Played(NamedTuple):
    """Results of some settings on some problems."""

    right: Bool[np.ndarray, "C N"]
    tokens: Int[np.ndarray, "C N"]
    forwards: Int[np.ndarray, "C N"]


class Outcomes:
    """Outcomes by setting and problem, and what they say of all problems.

    Attributes:
        proxy: A setting whose answers make the strata of the reference's problems.
    """

    def __init__(self, settings: int, problems: int, reference: int):
        shape = settings, problems
        self.right, self.tokens = np.zeros(shape), np.zeros(shape)
        self.forwards = np.zeros(shape, np.int64)
        self.done = np.zeros(shape, bool)
        self.reference = reference
        self.proxy: int | None = None

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
