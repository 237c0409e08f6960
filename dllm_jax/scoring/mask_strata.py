"""The ELBO of a block as a sum over the sizes of its hidden sets, estimated with a stated error.

A block of L tokens of which the set M is hidden tells of M by `v(M) = mean over M of log p(x_i |
all but M)`. The ELBO is the sum over sizes l = 1..L of the mean of v over all sets of size l: the
chain rule of log p averaged over all orders of the tokens, so never above log p. Each size is a
stratum. A stratum whose sets fit its share of the budget is enumerated, and has no error.

LLaDA's harness draws the sizes from a grid that it rounds half to even. The sizes are then not
uniform (0.5 to 1.5 times their share for L = 8), which biases its estimate. Nothing is rounded
here.

Source: Ou et al. 2024 (arXiv 2406.03736), the any-order form of the bound; Cochran 1977, sections
2.5 and 5.3 (stratified samples without replacement from finite populations).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable

import numpy as np

SETS = 8  # of a stratum at least: fewer tell its variance too badly for an interval


@dataclasses.dataclass(frozen=True)
class Stratum:
    """Hidden sets of a run of sizes.

    Attributes:
        hidden: bool[n L], the sets whose v is read; distinct where the stratum is of one size.
        sizes: How many sizes the stratum stands for.
        population: Sets that it was drawn from; 0 for one of several sizes, drawn with repetition.
    """

    hidden: np.ndarray
    sizes: int
    population: int

    def total(self, values: np.ndarray) -> tuple[float, float, int]:
        """The stratum's term of the ELBO, its variance, and its degrees of freedom.

        Args:
            values: v of each set, in nats.
        """
        n = len(values)
        value = self.sizes * float(values.mean())
        if n == self.population:
            return value, 0.0, n
        left = 1 - n / self.population if self.population else 1.0
        return value, self.sizes**2 * float(values.var(ddof=1)) / n * left, n - 1


def combined(totals: Iterable[tuple[float, float, int]]) -> tuple[float, float, float]:
    """Sum of strata, its standard error, and half of its 95 % interval.

    Few sets of a stratum tell its variance badly, so the interval is Student's, with the degrees
    of freedom of Satterthwaite (1946).
    """
    values, variances, degrees = map(np.array, zip(*totals, strict=True))
    variance = float(variances.sum())
    if variance == 0:
        return math.fsum(values), 0.0, 0.0
    freedom = variance**2 / float((variances**2 / degrees).sum())
    return math.fsum(values), variance**0.5, _student(freedom) * variance**0.5


def _student(freedom: float) -> float:
    """The two-sided 95 % point of Student's law, to 1 % from 3 degrees of freedom on.

    Source: Abramowitz and Stegun 1964, 26.7.5.
    """
    z = 1.959964
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def strata(length: int, budget: int, rng: np.random.Generator) -> list[Stratum]:
    """Hidden sets to read for the ELBO of a block of `length` tokens.

    Args:
        budget: The most sets; each costs a row of a forward. From `2**length - 1` on, all sets are
            read and the estimate is exact. At least 2, or no error could be stated.
    """
    if budget < min(2**length - 1, SETS * length):
        return _of_runs(length, budget, rng)
    counts = {size: math.comb(length, size) for size in range(1, length + 1)}
    shares = _shares(counts, budget)
    return [
        Stratum(_sets(length, size, shares[size], rng), 1, counts[size]) for size in sorted(counts)
    ]


def _shares(counts: dict[int, int], budget: int) -> dict[int, int]:
    """Equal shares of a budget, where no size takes more than it has."""
    shares: dict[int, int] = {}
    left = sorted(counts, key=lambda size: (counts[size], size))
    while left:
        share = (budget - sum(shares.values())) // len(left)
        size = left.pop(0)
        shares[size] = min(share, counts[size])
    return shares


def _sets(length: int, size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` distinct sets of `size` of `length` cells, all of them if there are no more."""
    if count == math.comb(length, size):
        found = list(itertools.combinations(range(length), size))
    else:
        chosen: dict[tuple[int, ...], None] = {}  # keeps the order of the draws
        while len(chosen) < count:
            chosen[tuple(sorted(rng.permutation(length)[:size].tolist()))] = None
        found = list(chosen)
    hidden = np.zeros((len(found), length), bool)
    np.put_along_axis(hidden, np.array(found), values=True, axis=1)
    return hidden


def _of_runs(length: int, budget: int, rng: np.random.Generator) -> list[Stratum]:
    """`SETS` sets or more of each run of neighbouring sizes."""
    number = max(1, budget // SETS)
    edges = [length * i // number for i in range(number + 1)]
    found = []
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        count = budget // number + (i < budget % number)
        sizes = rng.integers(low + 1, high + 1, count)
        order = rng.permuted(np.broadcast_to(np.arange(length), (count, length)), axis=1)
        found.append(Stratum(order < sizes[:, None], high - low, 0))
    return found
