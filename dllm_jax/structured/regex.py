"""Trees of expressions to automata over bytes of UTF-8."""

import functools
import itertools
from re import _constants as _c  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from .limits import Budget, distances
from .trees import (
    BOTH,
    FIRST_ALONE,
    FREE,
    LETTERS,
    MEMBERS,
    MULTIPLES,
    SUBSETS,
    Tree,
    children,
    ranges_of,
    unsupported,
)

_SURROGATES = (0xD800, 0xDFFF)


class NoText(ValueError):
    """No text is left."""


class _Nfa:
    """States with edges over byte ranges, and with edges over nothing."""

    def __init__(self, budget: Budget) -> None:
        self.edges: list[list[tuple[int, int, int]]] = []
        self.empty: list[list[int]] = []
        self._budget = budget

    def state(self) -> int:
        self._budget.check(len(self.edges) // 4)  # they are many more than the automaton's
        self.edges.append([])
        self.empty.append([])
        return len(self.edges) - 1

    def add(self, start: int, tree: Tree) -> int:
        for op, value in tree:
            start = self._one(start, op, value)
        return start

    def _one(self, start: int, op: Any, value: Any) -> int:
        ranges = ranges_of(op, value)
        if ranges is not None:
            return self._chars(start, ranges)
        if op is _c.SUBPATTERN:
            return self.add(start, children(op, value)[0])
        if op is _c.BRANCH:
            end = self.state()
            for tree in children(op, value):
                first = self.state()
                self.empty[start].append(first)
                self.empty[self.add(first, tree)].append(end)
            return end
        if op in (_c.MAX_REPEAT, _c.MIN_REPEAT):
            return self._repeat(start, *value)
        if op == MEMBERS:
            return self._members(start, *value)
        if op == SUBSETS:
            return self._subsets(start, *value)
        if op in (BOTH, FIRST_ALONE):
            return self._of_two(start, op, value)
        if op == MULTIPLES:
            return self._multiples(start, value)
        if op == LETTERS:
            end = self.state()
            self.edges[start].append((value, value, end))
            return end
        if op == FREE:
            return self._free(start, *value)
        if op is _c.AT:
            raise unsupported("an anchor within (the whole text is matched anyway)")
        raise unsupported(str(op).lower())

    def _chars(self, start: int, ranges: list[tuple[int, int]]) -> int:
        end = self.state()
        for low, high in ranges:
            for sequence in _utf8(low, high):
                here = start
                for place, pair in enumerate(sequence):
                    onto = end if place == len(sequence) - 1 else self.state()
                    self.edges[here].append((*pair, onto))
                    here = onto
        return end

    def _repeat(self, start: int, least: int, most: Any, tree: Tree) -> int:
        self._budget.check(least if most is _c.MAXREPEAT else most)
        for _ in range(least):
            self._budget.check()  # a tree of nothing adds no state
            start = self.add(start, tree)
        if most is _c.MAXREPEAT:
            loop = self.state()
            self.empty[start].append(loop)
            self.empty[self.add(loop, tree)].append(loop)
            return loop
        end = self.state()
        self.empty[start].append(end)
        for _ in range(most - least):
            self._budget.check()
            start = self.add(start, tree)
            self.empty[start].append(end)
        return end

    def _members(
        self, start: int, each: list[tuple[Tree, bool]], comma: Tree, least: int, most: int | None
    ) -> int:
        """`at` has the states after each number of members; the last one those after more."""
        last = max(least, 1) if most is None else most + 1
        at: dict[int, int] = {0: start}
        for tree, is_required in each:
            entries: dict[int, int] = {}
            for count, state in at.items():
                if most is None or count < most:
                    onto = min(count + 1, last)
                    entry = entries.setdefault(onto, self.state())
                    self.empty[self.add(state, comma) if count else state].append(entry)
            behind = {count: self.state() for count in entries}
            for count, entry in entries.items():
                self.empty[self.add(entry, tree)].append(behind[count])
            if not is_required:
                for count, state in at.items():
                    self.empty[state].append(behind.setdefault(count, self.state()))
            at = behind
        end = self.state()
        for count, state in at.items():
            if count >= least:
                self.empty[state].append(end)
        return end

    def _subsets(self, start: int, trees: list[Tree], comma: Tree, least: int, most: int) -> int:
        """A state after each set of items, whatever their order."""
        behind = [start, *(self.state() for _ in range(1, 1 << len(trees)))]
        end = self.state()
        for subset, state in enumerate(behind):
            if subset.bit_count() >= least:
                self.empty[state].append(end)
            if subset.bit_count() < most and subset < len(behind) - 1:
                entry = self.add(state, comma) if subset else state
                for place, tree in enumerate(trees):
                    if not subset >> place & 1:
                        self.empty[self.add(entry, tree)].append(behind[subset | 1 << place])
        return end

    def _multiples(self, start: int, step: int) -> int:
        """A state for each rest of the division."""
        rests, end = [self.state() for _ in range(step)], self.state()
        self.edges[start] += [(48 + d, 48 + d, rests[d % step] if d else end) for d in range(10)]
        for rest, state in enumerate(rests):
            self.edges[state] += [
                (48 + d, 48 + d, rests[(10 * rest + d) % step]) for d in range(10)
            ]
        self.empty[rests[0]].append(end)
        return end

    def _free(
        self,
        start: int,
        banned: tuple[tuple[int, ...], ...],
        mark: tuple[int, ...] | None,
        others: tuple[int, ...],
    ) -> int:
        """A state for each beginning of a mark: the longest one that the letters so far end in."""
        marks = (*banned, *([mark] if mark else []))
        begins = sorted({one[:size] for one in marks for size in range(len(one))}, key=len)
        states = {one: self.state() for one in begins or [()]}
        known = {letter for one in marks for letter in one}
        end = self.state()
        self.empty[start].append(states[()])
        for begin, state in states.items():
            for letter in known:
                said = (*begin, letter)
                cuts = [said[at:] for at in range(len(said) + 1)]
                if mark in cuts:
                    self.edges[state].append((letter, letter, end))
                elif not any(one in cuts for one in banned) and (letter < 256 or letter in others):
                    onto = next(states[cut] for cut in cuts if cut in states)
                    self.edges[state].append((letter, letter, onto))
            plain = sorted({-1, *(letter for letter in known if letter < 256), 256})
            gaps = [(low + 1, above - 1) for low, above in itertools.pairwise(plain)]
            gaps += [(one, one) for one in others if one not in known]
            self.edges[state] += [(low, high, states[()]) for low, high in gaps if low <= high]
            if mark is None:
                self.empty[state].append(end)
        return end

    def _of_two(self, start: int, op: Any, trees: tuple[Tree, Tree]) -> int:
        """The texts of two automata together, or of the first one alone."""
        kept = self._budget.kept
        if id(trees) not in kept:  # a node stands in several places, as an item of a set does
            first, second = (byte_automaton(tree, self._budget) for tree in trees)
            kept[id(trees)] = trees, product(first, second, op == BOTH, self._budget)
        _, (table, accepting) = kept[id(trees)]
        states, end = [self.state() for _ in table], self.state()
        self.empty[start].append(states[1])
        for state, row in enumerate(table):
            cuts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), 256]
            for low, above in itertools.pairwise(cuts):
                if row[low]:
                    self.edges[states[state]].append((low, above - 1, states[row[low]]))
            if accepting[state]:
                self.empty[states[state]].append(end)
        return end


@functools.lru_cache(4096)
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


def byte_automaton(
    tree: Tree, budget: Budget, num_letters: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """The least automaton of a tree: next state by state and letter, and where it accepts.

    State 0 is dead and state 1 the first.

    Args:
        num_letters: Bytes, and letters of `LETTERS` that are none.

    Raises:
        ValueError: It matches nothing, uses what no automaton can, or is too large.
    """
    nfa = _Nfa(budget)
    start = nfa.state()
    end = nfa.add(start, tree)
    closures: dict[int, frozenset[int]] = {}

    def closure(state: int) -> frozenset[int]:
        """States with edges, and the end, that are reached over nothing."""
        if state not in closures:
            seen, todo = {state}, [state]
            while todo:
                for onto in nfa.empty[todo.pop()]:
                    if onto not in seen:
                        seen.add(onto)
                        todo.append(onto)
            closures[state] = frozenset(one for one in seen if nfa.edges[one] or one == end)
        return closures[state]

    first = closure(start)
    numbers, todo = {frozenset(): 0, first: 1}, [first]
    rows = {0: np.zeros(num_letters, np.int32)}
    known: dict[tuple[int, ...], int] = {(): 0}  # the number of the states after edges
    while todo:
        states = todo.pop()
        budget.check(len(numbers))
        edges = [edge for state in states for edge in nfa.edges[state]]
        cuts = sorted({cut for low, high, _ in edges for cut in (low, high + 1)})
        place = {cut: number for number, cut in enumerate(cuts)}
        found: list[list[int]] = [[] for _ in cuts]
        for low, high, onto in edges:
            for number in range(place[low], place[high + 1]):
                found[number].append(onto)
        row = np.zeros(num_letters, np.int32)
        for (low, above), onto in zip(itertools.pairwise(cuts), found, strict=False):
            named = tuple(onto)
            if named not in known:
                key = frozenset().union(*map(closure, named))
                if key not in numbers:
                    numbers[key] = len(numbers)
                    todo.append(key)
                known[named] = numbers[key]
            row[low:above] = known[named]
        rows[numbers[states]] = row
    table = np.stack([rows[number] for number in range(len(numbers))])
    accepting = np.array([end in states for states in numbers])
    return _least(table, accepting, budget)


_NOTHING = "the constraint matches no text; correct it"


def _least(
    table: np.ndarray, accepting: np.ndarray, budget: Budget
) -> tuple[np.ndarray, np.ndarray]:
    """Equal states joined (Moore); 0 stays dead and 1 the first."""
    if len(table) == 1:  # not even a first byte
        raise NoText(_NOTHING)
    # Equal states are equally far from an end, which tells most others apart at once.
    block, count = distances(table, accepting, budget), 0
    columns = np.unique(table, axis=1)
    weights = np.random.default_rng(0).integers(1 << 63, size=columns.shape[1] + 1, dtype=np.uint64)
    while True:
        budget.check()
        signature = np.concatenate([block[:, None], block[columns]], axis=1)
        sums = signature.astype(np.uint64) @ weights  # equal rows have equal ones
        _, first, number = np.unique(sums, return_index=True, return_inverse=True)
        if (signature != signature[first[number]]).any():  # and others almost never
            _, number = np.unique(signature, axis=0, return_inverse=True)
        block = number.astype(np.int32)
        if (now := int(block.max()) + 1) == count:
            break
        count = now
    _, first = np.unique(block, return_index=True)
    if block[0] == block[1]:
        raise NoText(_NOTHING)
    order = [block[0], block[1], *(b for b in range(count) if b not in (block[0], block[1]))]
    number = np.empty(count, np.int32)
    number[order] = np.arange(count)
    chosen = first[order]
    return number[block[table[chosen]]], accepting[chosen]


def product(a: Any, b: Any, is_both: bool, budget: Budget) -> tuple[np.ndarray, np.ndarray]:
    """The automaton of the texts of two, or of those of the first that are none of the second."""
    (left, ends_left), (right, ends_right) = a, b
    numbers, todo = {(0, 0): 0, (1, 1): 1}, [(1, 1)]
    rows = {0: np.zeros(256, np.int32)}
    while todo:
        pair = x, y = todo.pop()
        budget.check(len(numbers))
        onto_x, onto_y = left[x], right[y]
        alive = (onto_x > 0) & (onto_y > 0) if is_both else onto_x > 0
        row = np.zeros(256, np.int32)
        keys, which = np.unique(onto_x.astype(np.int64) << 32 | onto_y, return_inverse=True)
        for place, key in enumerate(keys.tolist()):
            here = alive & (which == place)
            if here.any():
                onto = key >> 32, key & 0xFFFFFFFF
                if onto not in numbers:
                    numbers[onto] = len(numbers)
                    todo.append(onto)
                row[here] = numbers[onto]
        rows[numbers[pair]] = row
    table = np.stack([rows[number] for number in range(len(rows))])
    accepting = np.array([ends_left[x] and ends_right[y] == is_both for x, y in numbers])
    return _least(table, accepting, budget)


def accepts(automaton: Any, data: bytes) -> bool:
    """Whether an automaton accepts bytes."""
    table, accepting = automaton
    state = 1
    for byte in data:
        state = table[state, byte]
    return bool(accepting[state])
