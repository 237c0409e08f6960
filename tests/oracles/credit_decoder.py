"""Credit decoding as lists: an unbounded decoder with a dictionary of credits for each position.

The truth that `examples/credit_decoding.py` is compared with, over the blocks of `list_decoder`.
Written from the paper's rules (arXiv 2510.06133: credits of the whole vocabulary, fused as logits)
and from what the example says it does otherwise.

All numbers are float64, the example's float32: `undecided` counts comparisons closer than that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracles.list_decoder import ACTIVE, Asked, Block, Result, write

CLOSE = 1e-5


@dataclass(frozen=True)
class Rules:
    """The numbers of the strategy; `accounts` None keeps the credits of the whole vocabulary."""

    accept: float
    decay: float
    power: float
    weight: float
    add: float
    semi: float
    accounts: int | None = None


@dataclass
class Credited(Result):
    """How a request went; the counts say what a test has really seen."""

    turned: int = 0  # holes whose token is another one than the likeliest
    gained: int = 0  # holes taken that the plain law would have left
    evicted: int = 0


@dataclass
class Account:
    """What one position has been paid for: slots of (id, credit), as many as there may be."""

    slots: list[tuple[int, float]] = field(default_factory=list)

    def credit(self, token: int) -> float:
        return sum(credit for owner, credit in self.slots if owner == token)


def credit_decode(
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    rules: Rules,
    **limits: Any,
) -> Credited:
    """Decodes one request greedily from a script."""
    asked, result = Asked(prompt=prompt, **limits), Credited()
    accounts: dict[int, Account] = {}

    def forward(row: tuple[Any, Any], live: list[Block]) -> tuple[int, set[int]]:
        said, sure = row
        writes: list[tuple[Block, int, int]] = []
        for slot, block in enumerate(live):
            if block.status != ACTIVE:
                continue
            fused: dict[int, tuple[int, float]] = {}
            grounds = {}
            for offset in block.holes():
                position = block.start + offset
                law = _law(int(said[position]), sure[position], asked)
                account = accounts.setdefault(position, Account())
                _pay(account, law, rules, result)
                winner, p = fused[offset] = _fuse(account, law, rules, result)
                grounds[offset] = [
                    (law[i], account.credit(i) if rules.weight else 0.0)
                    for i in _by_probability(law)
                ]
                result.turned += winner != _by_probability(law)[0]
                result.gained += p >= rules.accept > max(law.values())
                result.undecided += abs(p - rules.accept) < CLOSE
            taken = [offset for offset, (_, p) in fused.items() if p >= rules.accept]
            previous = live[slot - 1] if slot else None
            may_force = previous is None or previous.progress() >= np.float32(rules.semi)
            if fused and not taken and may_force:
                best = max(p for _, p in fused.values())
                first = next(offset for offset, (_, p) in fused.items() if p == best)
                # Holes tie for certain where the same numbers are added in the same order.
                result.undecided += any(
                    best - p < CLOSE and grounds[offset] != grounds[first]
                    for offset, (_, p) in fused.items()
                )
                taken = [first]
            writes += [(block, offset, fused[offset][0]) for offset in taken]
        return write(writes, live)

    script = zip(token, prob, strict=True)
    return asked.decode(
        result, script, Block, lambda last: last.progress() >= np.float32(rules.add), forward
    )


def _law(token: int, prob: float, asked: Asked) -> dict[int, float]:
    """This token with `prob`, the rest evenly on the others but the mask, as float32 has them."""
    p = np.float32(prob)
    other = (np.float32(1) - p) / np.float32(asked.vocab_size - 2)
    law = {i: float(p if i == token else other) for i in range(asked.vocab_size)}
    return law | {asked.mask_id: 0.0 if token != asked.mask_id else float(p)}


def _by_probability(law: dict[int, float]) -> list[int]:
    return sorted(law, key=lambda i: (-law[i], i))


def _pay(account: Account, law: dict[int, float], rules: Rules, result: Credited) -> None:
    account.slots = [(owner, credit * rules.decay) for owner, credit in account.slots]
    winner = _by_probability(law)[0]
    pay = law[winner] ** rules.power
    for slot, (owner, credit) in enumerate(account.slots):
        if owner == winner:
            account.slots[slot] = (owner, credit + pay)
            return
    if rules.accounts is None or len(account.slots) < rules.accounts:
        account.slots.append((winner, pay))
        return
    credits = [credit for _, credit in account.slots]
    result.undecided += any(0 < credit - min(credits) < CLOSE for credit in credits)
    account.slots[credits.index(min(credits))] = (winner, pay)
    result.evicted += 1


def _fuse(
    account: Account, law: dict[int, float], rules: Rules, result: Credited
) -> tuple[int, float]:
    """The likeliest token after fusion and its probability."""
    logits = {i: math.log(p) if p > 0 else -math.inf for i, p in law.items()}
    known = _by_probability(law)[: rules.accounts]
    for i in known:
        logits[i] += rules.weight * math.log(1 + account.credit(i))
    total = sum(math.exp(logit) for logit in logits.values())
    best = max(known, key=lambda i: (logits[i], law[i], -i))
    ahead = [logits[best] - logits[i] for i in known if i != best and logits[i] > -math.inf]
    result.undecided += any(0 < gap < CLOSE for gap in ahead)
    return best, math.exp(logits[best]) / total
