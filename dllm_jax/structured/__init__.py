"""What a text must be: constraints as users give them, compiled to automata over tokens."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .automaton import TokenAutomaton, closed
from .regex import byte_automaton, literal
from .schema import schema_pattern
from .tokens import token_bytes

__all__ = [
    "Choice",
    "Constraint",
    "JsonSchema",
    "Regex",
    "TokenAutomaton",
    "compile",
    "from_fields",
]


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Base of what a text can be held to."""

    @property
    def pattern(self) -> str:
        """A regular expression of the texts."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Regex(Constraint):
    r"""A text that a regular expression matches as a whole; classes as `\d` are of ASCII."""

    regex: str

    @property
    def pattern(self) -> str:
        """The expression itself."""
        return self.regex


@dataclasses.dataclass(frozen=True)
class Choice(Constraint):
    """One of several texts."""

    choices: tuple[str, ...]

    def __init__(self, choices: Sequence[str]):
        if isinstance(choices, str) or not choices or not all(isinstance(c, str) for c in choices):
            raise ValueError(f"choices={choices!r:.200} are no texts; give a list of at least one")
        object.__setattr__(self, "choices", tuple(choices))

    @property
    def pattern(self) -> str:
        """The texts as an expression."""
        return "|".join(map(literal, self.choices))


@dataclasses.dataclass(frozen=True)
class JsonSchema(Constraint):
    """JSON text of a schema, with any white space between its parts."""

    schema: Any = dataclasses.field(hash=False)

    @property
    def pattern(self) -> str:
        """The instances as an expression."""
        return schema_pattern(self.schema)


def from_fields(fields: Mapping[str, Any]) -> Constraint:
    """A constraint from one pair: regex, choice or json and its value."""
    ((name, value),) = fields.items()
    return {"regex": Regex, "choice": Choice, "json": JsonSchema}[name](value)


def compile(
    constraint: Constraint, tokenizer: Any, stop_ids: Sequence[int], never: np.ndarray
) -> TokenAutomaton:
    """The automaton of a constraint over a tokenizer's ids.

    Args:
        stop_ids: Ids that end a text.
        never: Further ids that may not be written.

    Raises:
        ValueError: It cannot be compiled, or is too large.
    """
    table, accepting = byte_automaton(constraint.pattern)
    return closed(table, accepting, token_bytes(tokenizer), stop_ids, never)
