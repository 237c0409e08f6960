"""The words that vary between problems: names, things, places, and sometimes an invented one.

Invented words teach the model to copy words that it never saw.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

NAMES = [
    "Anna", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivan", "Jill", "Karl", "Lena",
    "Max", "Nora", "Omar", "Pia", "Quinn", "Rosa", "Sam", "Tina",
]  # fmt: skip
THINGS = [
    "apples", "books", "cookies", "pencils", "eggs", "cards", "stamps", "shirts", "plates",
    "lamps", "balls", "cups", "toys", "flowers", "candles", "bottles",
]  # fmt: skip
FRUIT = ["apples", "pears", "plums", "melons", "carrots", "potatoes", "onions", "lemons"]
PLACES = ["shop", "store", "school", "library", "bakery", "market", "museum", "club"]
INVENTED_SHARE = 0.12  # of name, thing and place choices
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of problem: numbers first, wording second.

    Attributes:
        draw: Numbers and event types of an instance, as a plain tuple.
        write: From that tuple and a source of words: question, lines of the response, answer.
        weight: How often the family comes, relative to the others of its half.
    """

    name: str
    draw: Callable[[random.Random], tuple]
    write: Callable[[tuple, "Words"], tuple[str, list[str], int]]
    weight: float = 1.0


class Words:
    """Draws wording; each call advances the generator it was made with."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def one_of(self, *options: Any) -> Any:
        """One of several wordings of the same thing."""
        return self._rng.choice(options)

    def _pick(self, options: list[str], n: int) -> list[str]:
        chosen = self._rng.sample(options, n)
        return [self._invent() if self._rng.random() < INVENTED_SHARE else word for word in chosen]

    def _invent(self) -> str:
        return "".join(self._rng.choices(_LETTERS, k=self._rng.randint(3, 7)))

    def names(self, n: int) -> list[str]:
        """`n` different names of people."""
        return [name.capitalize() for name in self._pick(NAMES, n)]

    def things(self, n: int) -> list[str]:
        """`n` different countable things, plural."""
        return self._pick(THINGS, n)

    def fruit(self) -> str:
        """Something that grows, plural."""
        return self._pick(FRUIT, 1)[0]

    def place(self) -> str:
        """Somewhere that keeps a stock."""
        return self._pick(PLACES, 1)[0]
