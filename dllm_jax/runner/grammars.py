"""Grammars as arrays of the device: an automaton's edges, its classes of ids, and their sizes.

All grammars of a bucket have one shape, so that another one compiles nothing.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from dllm_jax.kernels.token_readout import ID_STEP, packed_codes
from dllm_jax.strategies.core.constraint import DEAD, FREE, NO_CLASS, NO_LABEL, Constraint, Grammar
from dllm_jax.structured.automaton import TokenAutomaton

WIDE = 256  # a class with more ids is read by masked maxima
_MANY = 8  # of `ID_STEP` neighbouring ids: with more narrow ones, all of them are narrow
_ROW = 8  # ids of a class, or classes of a label, side by side


class Sizes(NamedTuple):
    """Sizes of a grammar or a bucket: states, edges, labels, classes, pairs, ids by kind."""

    states: int
    edges: int
    labels: int
    classes: int
    pairs: int
    wide: int
    narrow: int

    def holds(self, other: "Sizes") -> bool:
        """Whether a grammar of these sizes fits."""
        return all(map(operator.le, other, self))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Ready(TokenAutomaton):
    """An automaton that fits the device: what the host walks, and its arrays there.

    Attributes:
        class_of: Of every id of the model.
        arrays: Unpadded, without a slot axis.
    """

    arrays: dict[str, np.ndarray]


BUCKETS = (
    Sizes(64, 16, 128, 128, 512, 8, 2048),
    Sizes(272, 24, 256, 256, 1024, 16, 4096),
    Sizes(1024, 66, 288, 384, 4096, 32, 8192),
)

USUAL = BUCKETS[1]  # what is compiled before the first request: few JSON schemas fit the first


def ready(automaton: TokenAutomaton, num_ids: int) -> Ready:
    """An automaton for an engine whose model has `num_ids` ids.

    Raises:
        ValueError: No bucket holds it.
    """
    class_of = np.zeros((num_ids,), np.int32)  # ids past the tokenizer's are never taken
    class_of[: len(automaton.class_of)] = automaton.class_of[:num_ids]
    given = arrays(automaton.delta, class_of, automaton.end, automaton.distance)
    for name, has, most in zip(Sizes._fields, sizes(given), BUCKETS[-1], strict=True):
        if has > most:
            raise ValueError(
                f"the constraint's automaton has {has} {_WORDS.get(name, name)}, and at most "
                f"{most} fit the device; make it simpler, or shorten its repetitions"
            )
    fields: dict[str, Any] = vars(automaton) | {"class_of": class_of}
    return Ready(**fields, arrays=given)


_WORDS = {
    "edges": "edges of one state",
    "labels": "sets of classes",
    "pairs": "classes in all sets",
    "wide": f"classes of more than {WIDE} tokens",
    "narrow": "tokens in small classes",
}


def arrays(
    delta: np.ndarray, class_of: np.ndarray, end: int, distance: np.ndarray
) -> dict[str, np.ndarray]:
    """The unpadded arrays of a grammar, without a slot axis."""
    numbers = {frozenset(): NO_LABEL}  # of labels, in the order in which they are met
    edges: list[list[tuple[int, int]]] = []
    for state, row in enumerate(delta):
        if state == end:
            edges.append([(state, FREE)])
            continue
        leads = np.flatnonzero((row != DEAD) & (np.arange(len(row)) != NO_CLASS))
        own = []
        for target in np.unique(row[leads]):
            label = frozenset(leads[row[leads] == target].tolist())
            own.append((int(target), numbers.setdefault(label, len(numbers) + (len(numbers) > 0))))
        edges.append(own)
    most = max(map(len, edges))
    rows = [own + [(DEAD, NO_LABEL)] * (most - len(own)) for own in edges]
    target, label = np.moveaxis(np.array(rows, np.int32), -1, 0)
    pairs = [(number, one) for classes, number in numbers.items() for one in sorted(classes)]
    counts = np.bincount(class_of, minlength=delta.shape[1])
    is_wide = (counts > WIDE) & (np.arange(len(counts)) != NO_CLASS)
    is_narrow = ~is_wide[class_of] & (class_of != NO_CLASS)
    narrow, narrow_from, whole_step = _narrow(is_narrow)
    narrow_class = np.where(is_narrow[narrow], class_of[narrow], NO_CLASS)
    _, first = np.unique(class_of, return_index=True)
    wide = np.flatnonzero(is_wide)
    codes = np.zeros(len(class_of), np.int32)
    mine = np.flatnonzero(is_narrow[narrow])
    codes[narrow[mine]] = mine + 1
    for place, number in enumerate(wide):
        codes[class_of == number] = -(place + 1)
    wide_codes, wide_among = packed_codes(codes)
    by_class = [np.flatnonzero(narrow_class == one) for one in range(1, delta.shape[1])]
    class_rows, class_from = _in_rows([np.array([], int), *by_class])
    nothing, *labels = (np.array(sorted(label), int) for label in numbers)
    label_rows, label_from = _in_rows([nothing, nothing, *labels])  # of `FREE` too
    lowest = np.zeros(delta.shape[1], np.int32)
    lowest[class_of[first]] = first
    return {
        "delta": delta,
        "target": target,
        "label": label,
        "pair_label": np.array([number for number, _ in pairs], np.int32),
        "pair_class": np.array([one for _, one in pairs], np.int32),
        "distance": np.asarray(distance),
        "class_of": class_of,
        "wide": wide,
        "narrow": narrow,
        "narrow_class": narrow_class,
        "narrow_from": narrow_from,
        "whole_step": whole_step,
        "class_rows": class_rows,
        "class_from": class_from,
        "label_rows": label_rows,
        "label_from": label_from,
        "num_states": np.asarray(len(delta), np.int32),
        "num_edges": np.asarray(most, np.int32),
        "num_wide": np.asarray(len(wide), np.int32),
        "num_narrow": np.asarray(len(narrow), np.int32),
        "codes": codes,
        "wide_codes": wide_codes,
        "wide_among": wide_among,
        "lowest": lowest,
        "end": np.asarray(end, np.int32),
        "by_mass": np.asarray(False),
    }


def _narrow(is_narrow: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids that are read one by one, and `narrow_from` and `whole_step` of `IdClasses`.

    First come steps of ids with many narrow ones, whole; they are written at once.
    """
    steps = np.arange(0, len(is_narrow) + ID_STEP, ID_STEP)
    counts = np.add.reduceat(np.append(is_narrow, False), steps[:-1])
    counts[steps[1:] > len(is_narrow)] = 0  # not all of the last step are ids
    dense = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts > _MANY)]
    room = BUCKETS[-1].narrow - np.count_nonzero(is_narrow)
    dense = np.sort(dense[np.cumsum(ID_STEP - counts[dense]) <= room])
    whole_step = np.zeros(len(steps), np.int32)
    whole_step[dense] = np.arange(len(dense)) + 1
    others = is_narrow.copy()
    whole = (steps[dense, None] + np.arange(ID_STEP)).ravel()
    others[whole] = False
    others = np.flatnonzero(others)
    return (
        np.concatenate([whole, others]),
        len(whole) + np.searchsorted(others, steps),
        whole_step,
    )


def _in_rows(sets: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Sets in rows of a few, one after another, and where each begins and ends.

    Sets are filled up with their first. Rows are columns, so that neighbours are read at once.
    """
    counts = [-(-len(one) // _ROW) for one in sets]
    rows = [np.pad(one, (0, -len(one) % _ROW), "edge") for one in sets if len(one)]
    flat = np.concatenate(rows) if rows else np.zeros(0, int)
    return flat.reshape(-1, _ROW).T, np.cumsum([0, *counts])


def sizes(given: dict[str, np.ndarray]) -> Sizes:
    """The sizes of a grammar."""
    return Sizes(
        *given["target"].shape,
        labels=int(given["label"].max(initial=FREE)) + 1,
        classes=given["delta"].shape[1],
        pairs=len(given["pair_label"]),
        wide=len(given["wide"]),
        narrow=len(given["narrow"]),
    )


def _shapes(of: Sizes, num_ids: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    G, D, C = of.states, of.edges, of.classes
    small = np.int16
    return {
        "delta": ((G, C), small),
        "target": ((G, D), small),
        "label": ((G, D), small),
        "pair_label": ((of.pairs,), small),
        "pair_class": ((of.pairs,), small),
        "distance": ((G,), np.int32),
        "class_of": ((num_ids,), small),
        "wide": ((of.wide,), small),
        "narrow": ((of.narrow,), np.int32),
        "narrow_class": ((of.narrow,), small),
        "narrow_from": ((-(-num_ids // ID_STEP) + 1,), np.int32),
        "whole_step": ((-(-num_ids // ID_STEP) + 1,), np.int32),
        "class_rows": ((_ROW, C + of.narrow // _ROW), small),
        "class_from": ((C + 1,), small),
        "label_rows": ((_ROW, of.labels + of.pairs // _ROW), small),
        "label_from": ((of.labels + 1,), small),
        "codes": ((num_ids,), small),
        "wide_codes": ((-(-num_ids // 32) * 8,), np.int32),
        "wide_among": ((-(-num_ids // 32),), np.int32),
        "num_states": ((), np.int32),
        "num_edges": ((), np.int32),
        "num_wide": ((), np.int32),
        "num_narrow": ((), np.int32),
        "lowest": ((C,), np.int32),
        "end": ((), np.int32),
        "by_mass": ((), np.bool_),
    }


def blank(of: Sizes, num_ids: int, *axes: int, kernels: Any = None) -> Grammar:
    """Arrays of zeros on the host, of one slot or with leading `axes`."""
    leaves: dict[str, Any] = {
        name: np.zeros((*axes, *shape), dtype)
        for name, (shape, dtype) in _shapes(of, num_ids).items()
    }
    return Grammar(**leaves, num_labels=of.labels, kernels=kernels)


def _put(grammar: Grammar, leaves: Mapping[str, Any]) -> Grammar:
    """A blank grammar with smaller arrays in the corners of its own."""
    for name, leaf in leaves.items():
        getattr(grammar, name)[tuple(map(slice, leaf.shape))] = leaf
    return grammar


def padded(given: Ready, to: Sizes) -> Grammar:
    """A grammar of one slot, filled up to a bucket."""
    return _put(blank(to, len(given.class_of)), given.arrays)


def num_bytes(given: Ready) -> int:
    """Bytes of a grammar on the device, in the first bucket that holds it."""
    leaves = jax.tree.leaves(blank(bucket_of(given, None), len(given.class_of)))
    return sum(leaf.nbytes for leaf in leaves)


def empty(num_slots: int, of: Sizes, num_ids: int, kernels: Any = None) -> Constraint:
    """No slot has a grammar; `kernels` as of `Grammar`. On the host: nothing is compiled."""
    nothing: Any = np.zeros((num_slots,), np.int32)
    return Constraint(blank(of, num_ids, num_slots, kernels=kernels), nothing, nothing > 0)


def bucket_of(given: Ready, now: Sizes | None) -> Sizes:
    """The first bucket that holds a grammar and the sizes in use (`now`)."""
    wanted = sizes(given.arrays)
    return next(one for one in BUCKETS if one.holds(wanted) and (now is None or one.holds(now)))


def grown(now: Constraint, to: Sizes) -> Constraint:
    """The grammars of all slots, filled up to a larger bucket; on the host, as `empty`."""
    old = now.grammar
    if old.num_labels == to.labels and old.delta.shape[1] == to.states:
        return now
    num_slots, num_ids = old.class_of.shape
    new = blank(to, num_ids, num_slots, kernels=old.kernels)
    return now.replace(
        grammar=_put(new, {name: getattr(old, name) for name in _shapes(to, num_ids)})
    )


@functools.partial(jax.jit, donate_argnames=("now",))
def bind(now, slot, grammar, at):
    """A slot's grammar, and the automaton's state at its window."""
    put = jax.tree.map(lambda leaf, row: leaf.at[slot].set(row), now.grammar, grammar)
    return now.replace(grammar=put, at=now.at.at[slot].set(at))


@functools.partial(jax.jit, donate_argnames=("now",))
def move(now, slot, at):
    """The automaton's state at a slot's window."""
    return now.replace(at=now.at.at[slot].set(at))
