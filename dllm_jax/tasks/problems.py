"""Arithmetic word problems, seeded and without end: the training and test data of the tiny models.

Two halves. `plain`: eight families of worked word problems, numbers below 1000. `hard`: serial
chains and larger word problems, numbers to 9999, products and quotients worked out in parts.
`problem(half, seed, index, heldout)` is a pure function. An instance is held out by the CRC of
its family, numbers and event types, never of its wording, so no held-out calculation is ever seen
in training under other names. The response is a function of the prompt: wording varies in the
question only.
"""

import dataclasses
import random
import re
import zlib

from dllm_jax.tasks import first_family, hard_families, plain_families, words

HALVES = {"plain": plain_families.FAMILIES, "hard": hard_families.FAMILIES}
_ALL = HALVES | {"first": first_family.FAMILIES}
_HELDOUT_MODULUS = 16  # one instance in sixteen belongs to the held-out split
_ANSWER = re.compile(r"The answer is (-?\d+)")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One word problem.

    Attributes:
        question: What the user asks.
        response: The worked solution; begins with a space, ends with `The answer is N.`
        answer: The number N, as text.
        family: Which generator family wrote it.
        half: "plain" or "hard".
    """

    question: str
    response: str
    answer: str
    family: str
    half: str


def is_heldout(family: str, spec: tuple) -> bool:
    """Whether the instance (all numbers and event types of a family) is in the held-out split."""
    return zlib.crc32(repr((family, spec)).encode()) % _HELDOUT_MODULUS == 0


def half_of(family: str) -> str:
    """The argument `half` of `problem` for a family.

    Raises:
        ValueError: There is no such family.
    """
    for half, families in _ALL.items():
        if family in (one.name for one in families):
            return half
    names = ", ".join(one.name for families in _ALL.values() for one in families)
    raise ValueError(f"{family=} is no family of word problems; use one of {names}")


def problem(
    half: str, seed: int, index: int, heldout: bool = False, family: str | None = None
) -> Problem:
    """Problem `index` of the stream (half, seed, split, family).

    Args:
        half: "plain" or "hard"; "first" for the family of short sums, which is in no half.
        seed: Any integer; streams of different seeds are independent.
        heldout: True draws from the split that training never sees.
        family: Of this half, the only one to draw from; None: all of them.
    """
    if half not in _ALL:
        raise ValueError(f'{half=} is not one of "plain", "hard"')
    families = _ALL[half]
    if family is not None:
        families = [one for one in families if one.name == family]
    rng = random.Random(f"{half}/{seed}/{index}/{bool(heldout)}")
    drawn = rng.choices(families, weights=[f.weight for f in families])[0]
    spec = drawn.draw(rng)
    while is_heldout(drawn.name, spec) != heldout:
        spec = drawn.draw(rng)
    question, lines, answer = drawn.write(spec, words.Words(rng))
    response = "".join(f" {line}" for line in lines) + f" The answer is {answer}."
    return Problem(question, response, str(answer), drawn.name, half)


def extract_answer(text: str) -> str | None:
    """The number after the last "The answer is", or None."""
    found = _ANSWER.findall(text)
    return found[-1] if found else None


def is_correct(text: str, of: Problem) -> bool:
    """Whether a generated text states the right answer last."""
    return extract_answer(text) == of.answer
