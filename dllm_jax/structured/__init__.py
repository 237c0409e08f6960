"""Constraints of texts as users give them, compiled to automata over tokens."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .allowed import Tokens
from .automaton import Spellings, TokenAutomaton, behind_marker, closed, spellings
from .limits import EXTENTS, MOST_STATES, UNREACHABLE, Budget, TooLarge, distances
from .logic import NoInstance
from .regex import byte_automaton
from .schema import schema_tree
from .tokens import first_bytes, token_bytes
from .tools import Tool, Tools
from .trees import Tree, check_text, either, parsed, text
from .turn_grammar import thoughts_tree, turn_tree
from .turn_reading import Piece, Turn, mark_ids

__all__ = [
    "After",
    "Budget",
    "Choice",
    "Constraint",
    "Hole",
    "JsonSchema",
    "Piece",
    "Regex",
    "Spellings",
    "Template",
    "TokenAutomaton",
    "Tokens",
    "Tool",
    "Tools",
    "Turn",
    "behind_marker",
    "compile",
    "first_bytes",
    "fitting",
    "from_fields",
    "mark_ids",
    "spellings",
    "token_bytes",
]


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Base of what a text can be held to."""

    def tree(self, budget: Budget) -> Tree:
        """The texts as an expression."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Regex(Constraint):
    r"""A text that a regular expression matches as a whole; classes as `\d` are of ASCII."""

    regex: str

    def tree(self, budget: Budget) -> Tree:
        """See `Constraint`."""
        return parsed(self.regex)


@dataclasses.dataclass(frozen=True)
class Choice(Constraint):
    """One of several texts."""

    choices: tuple[str, ...]

    def __init__(self, choices: Sequence[str]):
        if isinstance(choices, str) or not choices or not all(isinstance(c, str) for c in choices):
            raise ValueError(f"choices={choices!r:.200} are no texts; give a list of at least one")
        for one in choices:
            check_text(one, "choices")
        object.__setattr__(self, "choices", tuple(choices))

    def tree(self, budget: Budget) -> Tree:
        """See `Constraint`."""
        budget.check(sum(map(len, self.choices)) // 8)  # many begin alike
        return either([text(one) for one in self.choices])


@dataclasses.dataclass(frozen=True, init=False)
class JsonSchema(Constraint):
    """JSON text of a schema.

    Attributes:
        schema: A schema as a mapping, as JSON text, or a class with `model_json_schema`, as
            pydantic's have it.
        whitespace: "flexible": any between the parts of the text, as models write it. "compact":
            none.

    Raises:
        ValueError: The text is not JSON.
    """

    schema: Any = dataclasses.field(compare=False)
    whitespace: str
    _said: str = dataclasses.field(repr=False)

    def __init__(self, schema: Any, whitespace: str = "flexible"):
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if whitespace not in ("flexible", "compact"):
            raise ValueError(f'{whitespace=} is not known; use "flexible" or "compact"')
        try:
            said = schema if isinstance(schema, str) else json.dumps(schema)
            schema = json.loads(said, parse_int=_integer, parse_float=_float, parse_constant=_float)
            json.dumps(schema, ensure_ascii=False).encode()  # refuses halves of characters
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"JSON schema: {ascii(str(error))[1:-1]:.200}; give JSON") from None
        for name, value in (("schema", schema), ("whitespace", whitespace), ("_said", said)):
            object.__setattr__(self, name, value)

    @property
    def said(self) -> str:
        """The text that it was given as."""
        return self._said

    def __reduce__(self) -> Any:
        return JsonSchema, (self._said, self.whitespace)  # deep values do not pickle

    def tree(self, budget: Budget) -> Tree:
        """See `Constraint`."""
        return schema_tree(self.schema, budget, compact=self.whitespace == "compact")


def _integer(said: str) -> int:
    """Integers are those of 64 bits, as other programs read them."""
    if len(said) > 20 or not -(2**63) <= int(said) < 2**64:
        raise ValueError(f"{said:.40} has more than 64 bits")
    return int(said)


def _float(said: str) -> float:
    if not math.isfinite(float(said)):
        raise ValueError(f"{said:.40} is no finite number")
    return float(said)


@dataclasses.dataclass(frozen=True)
class After:
    """Any text up to a marker, after which a constraint holds: `After("</think>", JsonSchema(s))`.

    Attributes:
        marker: The text of one token of the model. A stop id may not come before it.

    Raises:
        ValueError: The marker is no text, or what follows is no constraint.
    """

    marker: str
    constraint: Constraint

    def __post_init__(self):
        if not isinstance(self.marker, str) or not self.marker:
            raise ValueError(f"After({self.marker!r:.60}, ...): the marker is no text; give one")
        if not isinstance(self.constraint, Constraint):
            raise ValueError(
                f"After(..., {self.constraint!r:.60}) is of no constraint; give a Regex, a Choice "
                "or a JsonSchema"
            )


@dataclasses.dataclass(frozen=True)
class Hole:
    """A part of a text to be written between given ones: `Hole(8)` or `Hole(Regex("[0-9]+"))`.

    Attributes:
        of: A number of tokens, or a constraint, whose texts may have any length.

    Raises:
        ValueError: `of` is neither a positive number nor a constraint.
    """

    of: int | Constraint

    def __post_init__(self):
        is_count = isinstance(self.of, int) and not isinstance(self.of, bool) and self.of > 0
        if not is_count and not isinstance(self.of, Constraint):
            raise ValueError(
                f"Hole({self.of!r:.60}) is no hole; give a number of tokens, or a Regex, a Choice "
                "or a JsonSchema"
            )


@dataclasses.dataclass(frozen=True)
class Template(Constraint):
    """A text of parts: given ones as they stand, and constraints."""

    parts: tuple[str | Constraint, ...]

    def tree(self, budget: Budget) -> Tree:
        """See `Constraint`."""
        trees = [text(one) if isinstance(one, str) else one.tree(budget) for one in self.parts]
        return [node for tree in trees for node in tree]


def from_fields(fields: Mapping[str, Any]) -> Constraint | Tools | Tokens:
    """A constraint from one pair: regex, choice, json, tools or tokens and its value."""
    ((name, value),) = fields.items()
    if name == "tokens":
        return Tokens(**value)
    kinds = {"regex": Regex, "choice": Choice, "json": JsonSchema, "tools": Tools.of}
    return kinds[name](value)


def compile(
    constraint: Constraint | Tools,
    words: Spellings,
    stop_ids: Sequence[int],
    never: np.ndarray,
    most_states: int,
) -> TokenAutomaton:
    """The automaton of a constraint over the ids of a vocabulary.

    Args:
        words: `spellings` of `token_bytes` and `first_bytes`.
        stop_ids: Ids that end a text.
        never: Further ids that may not be written.
        most_states: What the device holds; with more, nothing is done over the vocabulary.

    Raises:
        ValueError: It cannot be compiled, or is too large.
    """
    budget = Budget()
    marks = tuple(words.marks)
    if isinstance(constraint, Tools):
        words = words.with_marks()
    try:
        table, accepting = fitting(constraint, budget, most_states, marks)
    except TooLarge:
        if not isinstance(constraint, Tools) or constraint.loosest is None:
            raise
        table, accepting = fitting(constraint.loosest, budget, most_states, marks)
    made = closed(table, accepting, words, stop_ids, never, budget)
    leave = None
    if isinstance(constraint, Tools) and constraint.budget is not None and constraint.thinks:
        inner = byte_automaton(thoughts_tree(constraint, marks), Budget(), 256 + len(marks))
        leave = _leave(table, inner, made, budget)
    return dataclasses.replace(made, notes=tuple(budget.notes), leave=leave)


def _leave(table: np.ndarray, inner: Any, made: TokenAutomaton, budget: Budget) -> np.ndarray:
    """Fewest tokens out of the texts of `inner`, by state.

    Args:
        table: Over letters, of whose states those of `made` are the first ones.
        inner: An automaton over letters.
    """
    onto, ends = inner
    within, seen, todo = np.zeros(len(made.delta), bool), {(1, 1)}, [(1, 1)]
    while todo:
        state, own = todo.pop()
        within[state] |= ends[own]
        pairs = np.unique(np.stack([table[state], onto[own]], axis=1), axis=0).tolist()
        for pair in pairs:
            if pair[0] and pair[1] and (*pair,) not in seen:
                seen.add((*pair,))
                todo.append((*pair,))
    within[made.start] |= within[1]
    outside = ~within & (made.distance < UNREACHABLE)
    return np.where(outside, 0, distances(made.delta, outside, budget)).astype(np.int32)


def fitting(
    constraint: Constraint | Tools, budget: Budget, most_states: int, marks: tuple[str, ...] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """The automaton over letters, with as much of a schema's instances as the device holds.

    The largest extent that fits is sought by halves, because one that does not takes its time too.
    """
    is_one = isinstance(constraint, Regex | Choice)
    error: ValueError = TooLarge()
    found: Any = None
    low, high, at = 0, 1 if is_one else len(EXTENTS), 0
    while low < high:
        # Where less may do, what is seen to be too large need not be made.
        most = MOST_STATES if is_one else min(MOST_STATES, _JOINED * most_states)
        budget.begin(EXTENTS[at], most)
        try:
            if isinstance(constraint, Tools):
                tree, num_letters = turn_tree(constraint, budget, marks), 256 + len(marks)
            else:
                tree, num_letters = constraint.tree(budget), 256
            made = byte_automaton(tree, budget, num_letters)
            if len(made[0]) >= most_states:  # the state after a stop id is one more
                raise TooLarge(
                    f"the constraint's automaton has {len(made[0]) + 1} states, and at most "
                    f"{most_states} fit the device; make it simpler, or shorten its repetitions"
                )
            found, high = (made, EXTENTS[at], {**budget.notes}), at
        except TooLarge as too_large:
            error, low = too_large, at + 1
        except NoInstance:
            if at == 0:
                raise
            high = at  # none of what is written here
        at = (low + high) // 2
    if found is None:
        raise error
    made, extent, notes = found
    budget.begin(extent)
    budget.notes.update(notes)
    return made


_JOINED = 4  # states before equal ones are joined are seldom more, of those that are left
