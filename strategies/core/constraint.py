"""Grammars of slots as arrays, and the window as a grammar sees it.

A grammar is an automaton over classes of tokens. State 0 is dead, and so is what fills an array up
to its bucket; class 0 is never taken. `grammar_paths` has the paths of its states through a window,
`grammar_plan` the tokens that a strategy reads along them, and `grammar_walk` the engine's half.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from . import blocks
from .state import DecodeState

DEAD, NO_CLASS = 0, 0
NO_LABEL, FREE = 0, 1  # labels of no edge, and of the edge from the end to itself
UNREACHABLE = 1 << 30  # distance of a state from which no text ends

SKIP, KNOWN, HOLE, WRITTEN = range(4)  # what a cell is to the chain

NEVER = -1e9  # score of what cannot be
FLOOR = -80.0  # nats; a strategy may forbid the only token that fits, which then still has a score


class Grammar(struct.PyTreeNode):
    """Automata of some slots: G states, D edges of a state, C classes, P pairs, V ids.

    Attributes:
        delta: Next state by class.
        target, label: Edges of a state to distinct states, and which set of classes leads along.
        pair_label, pair_class: Labels and their classes.
        distance: Fewest tokens from a state to one in which the text may end.
        class_of: Class of each id.
        wide: Classes with many ids.
        narrow, narrow_class: Ids of the other classes and their classes; also ids besides them,
            whose class is 0 here.
        narrow_from, whole_step, codes, wide_codes, wide_among: Of the readout (`IdClasses`).
        class_rows: Places of the narrow ids, class after class in columns.
        class_from: Where each class begins among the columns, and the end of all.
        label_rows, label_from: The same of labels, of whose classes there are numbers.
        num_states, num_edges, num_wide, num_narrow: How much of the tables is the grammar's own.
        lowest: The lowest id of a class.
        end: The state after a stop id.
        by_mass: Confidence is the token's share of all tokens that the grammar has there.
        num_labels: Labels, from the bucket.
        kernels: What does the work of `grammar_paths`, `grammar_plan` and `grammar_walk` on the
            device it is on, with their results bit for bit (`kernels.grammar_path.PathKernels`);
            None: they do it.
    """

    delta: Int[Array, "B G C"]
    target: Int[Array, "B G D"]
    label: Int[Array, "B G D"]
    pair_label: Int[Array, "B P"]
    pair_class: Int[Array, "B P"]
    distance: Int[Array, "B G"]
    class_of: Int[Array, "B V"]
    wide: Int[Array, "B M"]
    narrow: Int[Array, "B N"]
    narrow_class: Int[Array, "B N"]
    narrow_from: Int[Array, "B X"]
    whole_step: Int[Array, "B X"]
    class_rows: Int[Array, "B 8 Q"]
    class_from: Int[Array, "B C1"]
    label_rows: Int[Array, "B 8 Y"]
    label_from: Int[Array, "B L1"]
    codes: Int[Array, "B V"]
    wide_codes: Int[Array, "B U"]
    wide_among: Int[Array, "B U8"]
    num_states: Int[Array, " B"]
    num_edges: Int[Array, " B"]
    num_wide: Int[Array, " B"]
    num_narrow: Int[Array, " B"]
    lowest: Int[Array, "B C"]
    end: Int[Array, " B"]
    by_mass: Bool[Array, " B"]
    num_labels: int = struct.field(pytree_node=False)
    kernels: Any = struct.field(pytree_node=False, default=None)


class View(struct.PyTreeNode):
    """The window of some slots as their grammars see it.

    Attributes:
        kind: SKIP, KNOWN, HOLE or WRITTEN.
        known: Class of the token in a cell that has one.
        room: Cells before the limit that are not in the window's live part yet.
    """

    grammar: Grammar
    at: Int[Array, " B"]
    bound: Bool[Array, " B"]
    kind: Int[Array, "B W"]
    known: Int[Array, "B W"]
    room: Int[Array, " B"]


class Constraint(struct.PyTreeNode):
    """The grammar of each slot.

    Attributes:
        at: The automaton's state at the window's first cell.
        bound: Slots with a grammar; of the others nothing counts.
    """

    grammar: Grammar
    at: Int[Array, " B"]
    bound: Bool[Array, " B"]


def view(state: DecodeState) -> View:
    """The window as it stands, of a state whose `constraint` is not None."""
    constraint: Constraint = state.constraint
    buffer = state.buffer
    B, K, S = buffer.tokens.shape
    live = blocks.live_cells(state)
    first, limit = buffer.prompt_len[:, None, None], buffer.limit[:, None, None]
    mine = live & (buffer.positions >= first) & (buffer.positions < limit)
    kind = jnp.where(mine, jnp.where(buffer.filled, KNOWN, HOLE), SKIP).reshape(B, K * S)
    tokens = jnp.clip(buffer.tokens.reshape(B, K * S), 0, constraint.grammar.class_of.shape[1] - 1)
    known = jnp.take_along_axis(constraint.grammar.class_of, tokens, axis=1).astype(jnp.int32)
    behind = buffer.start + jnp.sum(live, axis=(1, 2), dtype=jnp.int32)
    room = jnp.maximum(buffer.limit - behind, 0)
    return View(constraint.grammar, constraint.at, constraint.bound, kind, known, room)
