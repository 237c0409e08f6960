"""Grammars as arrays of the device: an automaton's edges, its classes of ids, and their sizes.

All grammars of a bucket have one shape, so that another one compiles nothing.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.kernels.token_readout import ID_STEP
from dllm_jax.strategies.core.constraint import DEAD, FREE, NO_CLASS, NO_LABEL, Constraint, Grammar

WIDE = 256  # a class with more ids is read by masked maxima


class Automaton(Protocol):
    """A closed automaton over classes of tokens; state 0 is dead and class 0 never taken."""

    @property
    def class_of(self) -> np.ndarray:
        """Class of each id."""
        ...

    @property
    def delta(self) -> np.ndarray:
        """Next state by state and class."""
        ...

    @property
    def start(self) -> int:
        """First state."""
        ...

    @property
    def end(self) -> int:
        """The state behind a stop id, which every class leads back to."""
        ...

    @property
    def distance(self) -> np.ndarray:
        """Fewest tokens from a state to one in which the text may end."""
        ...


@dataclasses.dataclass(frozen=True, order=True)
class Sizes:
    """What fits a bucket: states, edges of a state, labels, classes, their pairs, ids by kind."""

    states: int
    edges: int
    labels: int
    classes: int
    pairs: int
    wide: int
    narrow: int

    def holds(self, other: "Sizes") -> bool:
        """Whether a grammar of these sizes fits."""
        return all(a <= b for a, b in zip(*map(dataclasses.astuple, (other, self)), strict=True))

    def joined(self, other: "Sizes") -> "Sizes":
        """The least sizes that hold both."""
        return Sizes(*map(max, *map(dataclasses.astuple, (self, other))))


@dataclasses.dataclass(frozen=True, eq=False)
class Ready:
    """An automaton that fits the device: what the host walks, and its arrays there.

    Attributes:
        arrays: Unpadded, without a slot axis.
    """

    class_of: np.ndarray
    delta: np.ndarray
    start: int
    end: int
    distance: np.ndarray
    arrays: dict[str, np.ndarray]


BUCKETS = (
    Sizes(64, 16, 128, 128, 512, 8, 2048),
    Sizes(272, 24, 256, 256, 1024, 16, 4096),
    Sizes(1024, 66, 288, 384, 4096, 32, 8192),
)


def ready(automaton: Automaton, num_ids: int) -> Ready:
    """An automaton for an engine whose model has `num_ids` ids.

    Raises:
        ValueError: No bucket holds it.
    """
    class_of = np.zeros((num_ids,), np.int32)  # ids past the tokenizer's are never taken
    class_of[: len(automaton.class_of)] = automaton.class_of[:num_ids]
    given = arrays(np.asarray(automaton.delta), class_of, automaton.end, automaton.distance)
    wanted, most = sizes(given), BUCKETS[-1]
    for field in dataclasses.fields(Sizes):
        has, fits = getattr(wanted, field.name), getattr(most, field.name)
        if has > fits:
            what = _WORDS.get(field.name, field.name)
            raise ValueError(
                f"the constraint's automaton has {has} {what}, and at most {fits} fit the device; "
                "make it simpler, or shorten its repetitions"
            )
    return Ready(
        class_of,
        np.asarray(automaton.delta),
        int(automaton.start),
        int(automaton.end),
        np.asarray(automaton.distance),
        given,
    )


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
        leads = np.arange(len(row))[(row != DEAD) & (np.arange(len(row)) != NO_CLASS)]
        own = []
        for target in np.unique(row[leads]):
            label = frozenset(leads[row[leads] == target].tolist())
            own.append((int(target), numbers.setdefault(label, len(numbers) + (len(numbers) > 0))))
        edges.append(own)
    most = max(map(len, edges))
    target = np.zeros((len(delta), most), np.int32)
    label = np.zeros((len(delta), most), np.int32)
    for state, own in enumerate(edges):
        for place, (onto, number) in enumerate(own):
            target[state, place], label[state, place] = onto, number
    pairs = [(number, one) for classes, number in numbers.items() for one in sorted(classes)]
    counts = np.bincount(class_of, minlength=delta.shape[1])
    is_wide = (counts > WIDE) & (np.arange(len(counts)) != NO_CLASS)
    narrow = np.flatnonzero(~is_wide[class_of] & (class_of != NO_CLASS))
    order = np.argsort(class_of[narrow], kind="stable")
    _, first = np.unique(class_of, return_index=True)
    wide = np.flatnonzero(is_wide)
    codes = np.zeros(len(class_of), np.int32)
    codes[narrow] = np.arange(len(narrow)) + 1
    for place, number in enumerate(wide):
        codes[class_of == number] = -(place + 1)
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
        "narrow_class": class_of[narrow],
        "narrow_order": order,
        "narrow_from": np.searchsorted(narrow, np.arange(0, len(class_of) + ID_STEP, ID_STEP)),
        "class_from": np.searchsorted(class_of[narrow][order], np.arange(delta.shape[1] + 1)),
        "label_from": np.searchsorted([n for n, _ in pairs], np.arange(len(numbers) + 2)),
        "num_states": np.asarray(len(delta), np.int32),
        "num_edges": np.asarray(most, np.int32),
        "num_wide": np.asarray(len(wide), np.int32),
        "num_narrow": np.asarray(len(narrow), np.int32),
        "codes": codes,
        "lowest": lowest,
        "end": np.asarray(end, np.int32),
        "by_mass": np.asarray(False),
    }


def sizes(given: dict[str, np.ndarray]) -> Sizes:
    """What a grammar needs."""
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
        "narrow_order": ((of.narrow,), small),
        "narrow_from": ((-(-num_ids // ID_STEP) + 1,), np.int32),
        "class_from": ((C + 1,), small),
        "label_from": ((of.labels + 1,), small),
        "codes": ((num_ids,), np.int32),
        "num_states": ((), np.int32),
        "num_edges": ((), np.int32),
        "num_wide": ((), np.int32),
        "num_narrow": ((), np.int32),
        "lowest": ((C,), np.int32),
        "end": ((), np.int32),
        "by_mass": ((), np.bool_),
    }


def padded(given: Ready, to: Sizes) -> Grammar:
    """A grammar of one slot, filled up to a bucket."""
    leaves = {}
    for name, (shape, dtype) in _shapes(to, len(given.class_of)).items():
        own = given.arrays[name]
        leaves[name] = np.zeros(shape, dtype)
        leaves[name][tuple(map(slice, own.shape))] = own
    return Grammar(**leaves, num_labels=to.labels)


def num_bytes(given: Ready) -> int:
    """Bytes of a grammar on the device, in the first bucket that holds it."""
    shapes = _shapes(bucket_of(given, None), len(given.class_of)).values()
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)


def empty(num_slots: int, of: Sizes, num_ids: int, kernels: Any = None) -> Constraint:
    """No slot has a grammar; `kernels` as of `Grammar`."""
    leaves = {
        name: jnp.zeros((num_slots, *shape), dtype)
        for name, (shape, dtype) in _shapes(of, num_ids).items()
    }
    nothing = jnp.zeros((num_slots,), jnp.int32)
    grammar = Grammar(**leaves, num_labels=of.labels, kernels=kernels)
    return Constraint(grammar, nothing, nothing > 0)


def bucket_of(given: Ready, now: Sizes | None) -> Sizes:
    """The first bucket that holds a grammar and what is there already."""
    wanted = sizes(given.arrays) if now is None else sizes(given.arrays).joined(now)
    return next(bucket for bucket in BUCKETS if bucket.holds(wanted))


def grown(now: Constraint, to: Sizes) -> Constraint:
    """The grammars of all slots, filled up to a larger bucket."""
    wanted = {
        name: shape for name, (shape, _) in _shapes(to, now.grammar.class_of.shape[1]).items()
    }

    def fill(name: str) -> jax.Array:
        leaf = getattr(now.grammar, name)
        pads = zip(leaf.shape[1:], wanted[name], strict=True)
        return jnp.pad(leaf, ((0, 0), *((0, new - old) for old, new in pads)))

    if now.grammar.num_labels == to.labels and now.grammar.delta.shape[1] == to.states:
        return now
    leaves = {name: fill(name) for name in wanted}
    grammar = now.grammar.replace(**leaves, num_labels=to.labels)
    return now.replace(grammar=grammar)


def stacked(rows: list[Grammar]) -> Grammar:
    """Grammars of slots, one a row."""
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *rows)
