"""From an automaton over bytes to one over classes of tokens, closed by stop ids."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from .limits import UNREACHABLE, Budget, distances


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A closed automaton; state 0 is dead and class 0 never taken.

    Attributes:
        class_of: Class of each id.
        delta: Next state by state and class.
        start: First state.
        end: The state behind a stop id.
        distance: Fewest tokens from a state to one in which the text may end.
        notes: What the constraint says that nothing is held to, by its place.
    """

    class_of: np.ndarray
    delta: np.ndarray
    start: int
    end: int
    distance: np.ndarray
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Spellings:
    """A vocabulary as a tree of bytes, level by level: a node is what some tokens begin with.

    Attributes:
        num_ids: Ids of the vocabulary.
        levels: Of each depth, the parent of each node (by its place in the level before) and its
            byte.
        ids, depths, nodes: Ids that are text, and where each ends.
    """

    num_ids: int
    levels: tuple[tuple[np.ndarray, np.ndarray], ...]
    ids: np.ndarray
    depths: np.ndarray
    nodes: np.ndarray


def spellings(spelt: Sequence[bytes | None]) -> Spellings:
    """The tree of a vocabulary.

    Args:
        spelt: Bytes by id; None for ids that are no text.
    """
    order = sorted((i for i, one in enumerate(spelt) if one), key=lambda i: spelt[i] or b"")
    texts = [spelt[i] or b"" for i in order]
    sizes = np.array([len(one) for one in texts], np.int32)
    nodes = np.zeros(len(texts), np.int32)
    levels = []
    rows = np.arange(len(texts))  # those that are at least so long
    before = np.zeros(len(texts), np.int64)  # their nodes of the level before
    for depth in range(int(sizes.max(initial=0))):
        longer = sizes[rows] > depth
        rows, before = rows[longer], before[longer]
        letters = np.fromiter((texts[i][depth] for i in rows), np.uint8, len(rows))
        is_new = np.ones(len(rows), bool)
        is_new[1:] = (before[1:] != before[:-1]) | (letters[1:] != letters[:-1])
        levels.append((before[is_new].astype(np.int32), letters[is_new]))
        before = np.cumsum(is_new) - 1
        nodes[rows] = before
    return Spellings(len(spelt), tuple(levels), np.array(order, np.int32), sizes - 1, nodes)


def closed(
    table: np.ndarray,
    accepting: np.ndarray,
    words: Spellings,
    stop_ids: Sequence[int],
    never: np.ndarray,
    budget: Budget,
) -> TokenAutomaton:
    """The automaton over tokens, with the end behind its stop ids.

    Raises:
        ValueError: No text of it can be spelt, or it is too large.
    """
    S = len(table)
    letter_class, columns = _equal_columns(table)
    maps = [np.zeros(S, np.int32), np.arange(S, dtype=np.int32)]  # what tokens do to the states
    known = {one.tobytes(): number for number, one in enumerate(maps)}
    steps: dict[int, int] = {}  # the map behind a map and a class of bytes
    count = columns.shape[1]
    of_level = [np.ones(1, np.int64)]
    for parents, letters in words.levels:
        pairs = of_level[-1][parents] * count + letter_class[letters]
        pairs[of_level[-1][parents] == 0] = 0
        each = np.unique(pairs)
        onto = np.zeros(len(each), np.int64)
        for place, pair in enumerate(each.tolist()):
            if pair < count:  # behind what is dead
                continue
            if pair not in steps:
                budget.check(len(maps))
                row = columns[maps[pair // count], pair % count]
                steps[pair] = known.setdefault(row.tobytes(), len(maps))
                if steps[pair] == len(maps):
                    maps.append(row)
            onto[place] = steps[pair]
        of_level.append(onto[np.searchsorted(each, pairs)])
    class_of = np.zeros(words.num_ids, np.int64)
    for depth, level in enumerate(of_level[1:]):
        here = words.depths == depth
        class_of[words.ids[here]] = level[words.nodes[here]]
    class_of[[i for i in (*map(int, never), *stop_ids) if 0 <= i < len(class_of)]] = 0
    used = np.unique(np.append(0, class_of))
    class_of = np.searchsorted(used, class_of).astype(np.int32)
    end, stop = S, len(used)
    delta = np.zeros((S + 1, stop + 1), np.int32)
    delta[:S, :stop] = np.stack([maps[number] for number in used], axis=1)
    delta[:S, 0] = 0
    delta[:S, stop] = np.where(accepting, end, 0)
    delta[end] = end
    for i in stop_ids:
        if 0 <= i < len(class_of):
            class_of[i] = stop
    distance = distances(delta, np.append(accepting, True), budget)
    if distance[1] >= UNREACHABLE:
        raise ValueError("the model's tokens spell no text of the constraint; give another")
    # What cannot end is as good as dead.
    delta[distance[delta] >= UNREACHABLE] = 0
    return TokenAutomaton(class_of, delta, 1, end, distance)


def behind_marker(
    automaton: TokenAutomaton, marker: int, stop_ids: Sequence[int], never: np.ndarray
) -> TokenAutomaton:
    """The automaton of any tokens but stop ids, then the marker, then a text of `automaton`.

    Args:
        marker: An id; only its first place counts.
        stop_ids, never: As of `closed`.
    """
    class_of, (states, classes) = automaton.class_of.copy(), automaton.delta.shape
    free, other, mark = states, classes, classes + 1
    is_free = np.ones(len(class_of), bool)
    is_free[[i for i in (*map(int, never), *stop_ids) if 0 <= i < len(class_of)]] = False
    delta = np.zeros((states + 1, classes + 2), np.int32)
    delta[:states, :classes] = automaton.delta
    delta[:states, mark] = automaton.delta[:, class_of[marker]]
    delta[automaton.end] = automaton.end
    class_of[is_free & (class_of == 0)] = other
    class_of[marker] = mark
    delta[free, np.unique(class_of[is_free])] = free
    delta[free, mark] = automaton.start
    distance = np.append(automaton.distance, automaton.distance[automaton.start] + 1)
    distance = distance.astype(np.int32)
    return TokenAutomaton(class_of, delta, free, automaton.end, distance, automaton.notes)


def _equal_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Classes of bytes that no state tells apart, and the table over them."""
    known: dict[bytes, int] = {}
    classes = np.array([known.setdefault(one.tobytes(), len(known)) for one in table.T.copy()])
    _, first = np.unique(classes, return_index=True)
    return classes, np.ascontiguousarray(table[:, first])
