"""From an automaton over bytes to one over classes of tokens, closed by stop ids."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .limits import UNREACHABLE, Budget, distances


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A closed automaton; state 0 is dead and class 0 never taken.

    Attributes:
        class_of: Class of each id.
        delta: Next state by state and class.
        start: First state.
        end: The state after a stop id.
        distance: Fewest tokens from a state to one in which the text may end.
        leave: Fewest tokens out of thoughts, of states within them; None: no thoughts are counted.
        notes: What the constraint says that nothing is held to, by its place.
        only: The one letter that may follow a state, and the state after it; -1 and 0 where several
            may, or none. None: not known.
    """

    class_of: np.ndarray
    delta: np.ndarray
    start: int
    end: int
    distance: np.ndarray
    notes: tuple[str, ...] = ()
    leave: np.ndarray | None = None
    only: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Spellings:
    """A vocabulary as a tree of bytes, level by level: a node is what some tokens begin with.

    Attributes:
        num_ids: Ids of the vocabulary.
        levels: Of each depth, the parent of each node (by its place in the level before) and its
            byte.
        ids, depths, nodes: Ids that are text, and where each ends.
        first: Ids that stand for another text at the beginning, and that text: some tokenizers
            drop a space there. None where no id does.
        marks: Ids of tokens without bytes that calls and thoughts are marked by, by their names.
    """

    num_ids: int
    levels: tuple[tuple[np.ndarray, np.ndarray], ...]
    ids: np.ndarray
    depths: np.ndarray
    nodes: np.ndarray
    first: tuple[np.ndarray, Any] | None = None  # and `Spellings`
    marks: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def with_marks(self) -> "Spellings":
        """The vocabulary in which the marks are letters after the 256 bytes, in their order."""
        if not self.marks or not self.levels:
            return self
        (parents, letters), *others = self.levels
        extra = np.arange(len(self.marks), dtype=np.int32)
        first = (
            np.append(parents, np.zeros_like(extra)),
            np.append(letters.astype(np.int32), 256 + extra),
        )
        return dataclasses.replace(
            self,
            levels=(first, *others),
            ids=np.append(self.ids, np.array([*self.marks.values()], np.int32)),
            depths=np.append(self.depths, np.zeros_like(extra)),
            nodes=np.append(self.nodes, len(parents) + extra),
        )


def spellings(spelt: Sequence[bytes | None], first: Mapping[int, bytes] | None = None) -> Spellings:
    """The tree of a vocabulary.

    Args:
        spelt: Bytes by id; None for ids that are no text.
        first: Bytes of those ids that stand for others at the beginning of a text.
    """
    if first:
        begins = spellings([first.get(i) for i in range(len(spelt))])
        return dataclasses.replace(
            spellings(spelt), first=(np.array(sorted(first), np.int32), begins)
        )
    order = sorted((i for i, one in enumerate(spelt) if one), key=lambda i: spelt[i] or b"")
    texts = [spelt[i] or b"" for i in order]
    sizes = np.array([len(one) for one in texts], np.int32)
    letters_of_all, starts = np.frombuffer(b"".join(texts), np.uint8), np.cumsum(sizes) - sizes
    nodes = np.zeros(len(texts), np.int32)
    levels = []
    rows = np.arange(len(texts))  # those that are at least so long
    before = np.zeros(len(texts), np.int64)  # their nodes of the level before
    for depth in range(int(sizes.max(initial=0))):
        longer = sizes[rows] > depth
        rows, before = rows[longer], before[longer]
        letters = letters_of_all[starts[rows] + depth]
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
    """The automaton over tokens, with the end after its stop ids.

    Raises:
        ValueError: No text of it can be spelt, or it is too large.
    """
    S = len(table)
    letter_class, columns = _equal_columns(table)
    maps = [np.zeros(S, np.int32), np.arange(S, dtype=np.int32)]  # what tokens do to the states
    known = {one.tobytes(): number for number, one in enumerate(maps)}
    steps: dict[int, int] = {}  # the map after a map and a class of bytes
    count = columns.shape[1]
    of_level = [np.ones(1, np.int64)]
    for parents, letters in words.levels:
        pairs = of_level[-1][parents] * count + letter_class[letters]
        pairs[of_level[-1][parents] == 0] = 0
        each = np.unique(pairs)
        onto = np.zeros(len(each), np.int64)
        for place, pair in enumerate(each.tolist()):
            if pair < count:  # after what is dead
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
    behind = _behind_first(words, columns, letter_class)
    if behind is not None:  # ids that do the same, but as the first of a text
        usual = np.array([one[1] for one in maps])[class_of]
        class_of = class_of * S + np.where(behind < 0, usual, behind)
    class_of[[i for i in (*map(int, never), *stop_ids) if 0 <= i < len(class_of)]] = 0
    used = np.unique(np.append(0, class_of))
    class_of = np.searchsorted(used, class_of).astype(np.int32)
    start, stop = 1, len(used)
    taken = used if behind is None else used // S
    rows = [np.stack([maps[number] for number in taken.tolist()], axis=1)]
    if behind is not None:
        start, accepting = S, np.append(accepting, accepting[1])
        rows.append((used % S)[None].astype(np.int32))
    end = len(accepting)
    delta = np.zeros((end + 1, stop + 1), np.int32)
    delta[:end, :stop] = np.concatenate(rows)
    delta[:end, 0] = 0
    delta[:end, stop] = np.where(accepting, end, 0)
    delta[end] = end
    for i in stop_ids:
        if 0 <= i < len(class_of):
            class_of[i] = stop
    distance = distances(delta, np.append(accepting, True), budget)
    if distance[start] >= UNREACHABLE:
        raise ValueError("the model's tokens spell no text of the constraint; give another")
    # What cannot end is as good as dead.
    delta[distance[delta] >= UNREACHABLE] = 0
    only = np.tile(np.array([-1, 0], np.int32), (end + 1, 1))
    forced = np.flatnonzero((np.count_nonzero(table, axis=1) == 1) & ~accepting[:S])
    letters = np.argmax(table[forced] != 0, axis=1)
    only[forced] = np.stack([letters, table[forced, letters]], axis=1)
    return TokenAutomaton(class_of, delta, start, end, distance, only=only)


def _behind_first(
    words: Spellings, columns: np.ndarray, letter_class: np.ndarray
) -> np.ndarray | None:
    """The state after each id of `words.first`, -1 of others; None without any.

    Args:
        columns: Next state by state and class of bytes.
        letter_class: Class of each byte.
    """
    if words.first is None:
        return None
    ids, tree = words.first
    behind = np.full(words.num_ids, -1, np.int64)
    behind[ids] = 1  # where nothing is left of the text
    level = np.ones(1, np.int64)
    for depth, (parents, letters) in enumerate(tree.levels):
        level = columns[level[parents], letter_class[letters]]
        here = tree.depths == depth
        behind[tree.ids[here]] = level[tree.nodes[here]]
    return behind


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
