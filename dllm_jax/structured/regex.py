"""Regular expressions to automata over bytes of UTF-8."""

import re
import time
from re import _constants as _c  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

MOST_STATES, MOST_S = 20_000, 2.0
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_CATEGORIES = {
    _c.CATEGORY_DIGIT: ((48, 57),),
    _c.CATEGORY_WORD: ((48, 57), (65, 90), (95, 95), (97, 122)),
    _c.CATEGORY_SPACE: ((9, 13), (32, 32)),
}
_NEGATED = {
    _c.CATEGORY_NOT_DIGIT: _c.CATEGORY_DIGIT,
    _c.CATEGORY_NOT_WORD: _c.CATEGORY_WORD,
    _c.CATEGORY_NOT_SPACE: _c.CATEGORY_SPACE,
}
_Ranges = list[tuple[int, int]]


def literal(text: str) -> str:
    """An expression that matches one text."""
    return re.escape(text)


class _Nfa:
    """States with edges over byte ranges, and with edges over nothing."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[int, int, int]]] = []
        self.empty: list[list[int]] = []
        self._began = time.monotonic()

    def state(self) -> int:
        self.check(len(self.edges))
        self.edges.append([])
        self.empty.append([])
        return len(self.edges) - 1

    def check(self, count: int) -> None:
        if count >= MOST_STATES:
            raise ValueError(
                f"the constraint needs more than {MOST_STATES} states; shorten its repetitions"
            )
        if time.monotonic() - self._began > MOST_S:
            raise ValueError(
                f"the constraint takes more than {MOST_S:g} s to compile; make it simpler"
            )

    def chars(self, start: int, ranges: _Ranges) -> int:
        end = self.state()
        for low, high in ranges:
            for sequence in _utf8(low, high):
                here = start
                for place, pair in enumerate(sequence):
                    onto = end if place == len(sequence) - 1 else self.state()
                    self.edges[here].append((*pair, onto))
                    here = onto
        return end

    def add(self, start: int, tree: Any) -> int:
        for op, value in tree:
            start = self._one(start, op, value)
        return start

    def _one(self, start: int, op: Any, value: Any) -> int:
        if op in (_c.LITERAL, _c.NOT_LITERAL):
            ranges = [(value, value)]
            return self.chars(start, _inverted(ranges) if op is _c.NOT_LITERAL else ranges)
        if op is _c.ANY:
            return self.chars(start, _inverted([(10, 10)]))
        if op is _c.IN:
            return self.chars(start, _of_class(value))
        if op is _c.SUBPATTERN:
            _, on, off, tree = value
            if on or off:
                raise _unsupported("a flag within")
            return self.add(start, tree)
        if op is _c.BRANCH:
            end = self.state()
            for tree in value[1]:
                first = self.state()
                self.empty[start].append(first)
                self.empty[self.add(first, tree)].append(end)
            return end
        if op in (_c.MAX_REPEAT, _c.MIN_REPEAT):
            return self._repeat(start, *value)
        if op is _c.AT:
            raise _unsupported("an anchor (the whole text is matched anyway)")
        raise _unsupported(str(op).lower())

    def _repeat(self, start: int, least: int, most: Any, tree: Any) -> int:
        for _ in range(least):
            start = self.add(start, tree)
        if most is _c.MAXREPEAT:
            loop = self.state()
            self.empty[start].append(loop)
            self.empty[self.add(loop, tree)].append(loop)
            return loop
        end = self.state()
        self.empty[start].append(end)
        for _ in range(most - least):
            start = self.add(start, tree)
            self.empty[start].append(end)
        return end


def _unsupported(what: str) -> ValueError:
    return ValueError(f"regular expression: {what} is not supported; leave it out")


def _inverted(ranges: _Ranges) -> _Ranges:
    found, first = [], 0
    for low, high in sorted(ranges):
        if low > first:
            found.append((first, low - 1))
        first = max(first, high + 1)
    if first <= _LAST:
        found.append((first, _LAST))
    return found


def _of_class(items: Any) -> _Ranges:
    ranges: _Ranges = []
    negate = False
    for op, value in items:
        if op is _c.NEGATE:
            negate = True
        elif op is _c.LITERAL:
            ranges.append((value, value))
        elif op is _c.RANGE:
            ranges.append(value)
        elif value in _CATEGORIES:
            ranges += _CATEGORIES[value]
        else:
            ranges += _inverted(list(_CATEGORIES[_NEGATED[value]]))
    return _inverted(ranges) if negate else ranges


def _utf8(low: int, high: int) -> list[list[tuple[int, int]]]:
    """Sequences of byte ranges that spell a range of characters."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            return _utf8(low, last) + _utf8(last + 1, high)
    if low <= _SURROGATES[1] and high >= _SURROGATES[0]:
        below = _utf8(low, _SURROGATES[0] - 1) if low < _SURROGATES[0] else []
        return below + (_utf8(_SURROGATES[1] + 1, high) if high > _SURROGATES[1] else [])
    for bits in (6, 12, 18):
        mask = (1 << bits) - 1
        if low >> bits != high >> bits and high > 0x7F:
            if low & mask:
                return _utf8(low, low | mask) + _utf8((low | mask) + 1, high)
            if high & mask != mask:
                return _utf8(low, (high & ~mask) - 1) + _utf8(high & ~mask, high)
    pairs = zip(chr(low).encode(), chr(high).encode(), strict=True)
    return [list(pairs)]


def byte_automaton(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """The least automaton of a pattern: next state by state and byte, and where it accepts.

    State 0 is dead and state 1 the first.

    Raises:
        ValueError: The pattern is none, uses what no automaton can, or is too large.
    """
    try:
        tree = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"regular expression: {error}; correct it") from None
    if tree.state.flags & ~re.UNICODE:
        raise _unsupported("a flag")
    nfa = _Nfa()
    start = nfa.state()
    end = nfa.add(start, tree)
    cuts = {0, 256}
    for edges in nfa.edges:
        for low, high, _ in edges:
            cuts |= {low, high + 1}
    lows = sorted(cuts)[:-1]
    by_class: list[dict[int, list[int]]] = []
    for edges in nfa.edges:
        own: dict[int, list[int]] = {}
        for low, high, onto in edges:
            for number, lowest in enumerate(lows):
                if low <= lowest <= high:
                    own.setdefault(number, []).append(onto)
        by_class.append(own)

    def closure(states: Any) -> frozenset[int]:
        seen, todo = set(states), list(states)
        while todo:
            for onto in nfa.empty[todo.pop()]:
                if onto not in seen:
                    seen.add(onto)
                    todo.append(onto)
        return frozenset(seen)

    first = closure([start])
    numbers, todo, rows = {frozenset(): 0, first: 1}, [first], {0: {}}
    while todo:
        states = todo.pop()
        nfa.check(len(numbers))
        found: dict[int, set[int]] = {}
        for state in states:
            for number, targets in by_class[state].items():
                found.setdefault(number, set()).update(targets)
        row = {}
        for number, targets in found.items():
            key = closure(targets)
            if key not in numbers:
                numbers[key] = len(numbers)
                todo.append(key)
            row[number] = numbers[key]
        rows[numbers[states]] = row
    table = np.zeros((len(numbers), len(lows)), np.int64)
    for state, row in rows.items():
        for number, onto in row.items():
            table[state, number] = onto
    accepting = np.zeros(len(numbers), bool)
    for states, number in numbers.items():
        accepting[number] = end in states
    table, accepting = _least(table, accepting)
    widths = np.diff([*lows, 256])
    return np.repeat(table, widths, axis=1), accepting


def _least(table: np.ndarray, accepting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Equal states joined (Moore); 0 stays dead and 1 the first."""
    block = accepting.astype(np.int64)
    count = 0
    while True:
        signature = np.concatenate([block[:, None], block[table]], axis=1)
        _, block = np.unique(signature, axis=0, return_inverse=True)
        block = block.reshape(-1)
        if block.max() + 1 == count:
            break
        count = block.max() + 1
    _, first = np.unique(block, return_index=True)
    if block[0] == block[1]:
        raise ValueError("the constraint matches no text; correct it")
    order = [block[0], block[1], *(b for b in range(count) if b not in (block[0], block[1]))]
    number = np.empty(count, np.int64)
    number[order] = np.arange(count)
    chosen = first[order]
    return number[block[table[chosen]]], accepting[chosen]
