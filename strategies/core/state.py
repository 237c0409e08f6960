"""The state of decoding: immutable pytrees of fixed shape, one row a slot.

Letters: B slots, K blocks in the window, S block size, W = K * S, D model width, C pages of a
request, O output capacity, E stop ids.

`take_slot` and `put_slot` move a request out of its slot and back, for loops of your own. The
engine moves slots as words (`dllm_jax/runner/packing.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

# Life of a block: DUMMY -> ACTIVE -> TO_CACHE; a block in the cache has left the window.
DUMMY, ACTIVE, TO_CACHE = 0, 1, 2

# Life of a slot; all but EMPTY and RUNNING are finish reasons.
EMPTY, RUNNING, STOP, LENGTH, NFE, REPETITION, ABORT, ERROR, STUCK = range(9)

FINISH_REASONS: dict[int, str | None] = {
    EMPTY: None,
    RUNNING: None,
    STOP: "stop",
    LENGTH: "length",
    NFE: "nfe",
    REPETITION: "repetition",
    ABORT: "abort",
    ERROR: "error",  # the model gave a value that is not finite
    STUCK: "error",  # the strategy changed nothing for too long
}

NO_LIMIT = 2**31 - 1  # max_nfe and max_run of a request that sets none
NO_TOKEN = -1  # what a readout that is not finite predicts


class BlockBuffer(struct.PyTreeNode):
    """The window: K consecutive blocks of S cells, the first cell at absolute position `start`.

    Attributes:
        tokens: Token ids; opaque, meaningful only where `filled`.
        filled: True where a cell holds a token; all other cells are holes.
        status: DUMMY, ACTIVE or TO_CACHE; over the window always TO_CACHE* ACTIVE* DUMMY*.
        start: Absolute position of the first cell = number of tokens in the cache.
        prompt_len: Tokens of the prompt; cells before it are never written.
        limit: First absolute position that may not be emitted.
        block_steps: Forwards a block has had while ACTIVE.
        nfe: Forwards the request has had after prefill.
        idle: Steps in a row that changed no cell and committed nothing.
    """

    tokens: Int[Array, "B K S"]
    filled: Bool[Array, "B K S"]
    status: Int[Array, "B K"]
    start: Int[Array, " B"]
    prompt_len: Int[Array, " B"]
    limit: Int[Array, " B"]
    block_steps: Int[Array, "B K"]
    nfe: Int[Array, " B"]
    idle: Int[Array, " B"]

    @property
    def positions(self) -> Int[Array, "B K S"]:
        """Absolute position of each cell."""
        _, K, S = self.tokens.shape
        return self.start[:, None, None] + jnp.arange(K * S, dtype=jnp.int32).reshape(1, K, S)


class Sampling(struct.PyTreeNode):
    """How a token is drawn: temperature 0 is greedy, top_k 0 and top_p 1 are off."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]

    @classmethod
    def greedy(cls, num_slots: int) -> "Sampling":
        """Sampling that takes the most probable token."""
        shape = (num_slots,)
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.ones(shape))

    @property
    def heat(self) -> Float[Array, " B"]:
        """The divisor of logits: the temperature, or 1 if that is 0."""
        return jnp.where(self.temperature > 0, self.temperature, 1.0)

    @property
    def cuts(self) -> Bool[Array, " B"]:
        """Whether top-k or top-p leave ids out."""
        return (self.top_k > 0) | (self.top_p < 1.0)

    @property
    def is_plain(self) -> Bool[Array, " B"]:
        """Whether the most probable token of the whole law is taken."""
        return (self.temperature <= 0) & (self.top_k <= 0) & (self.top_p >= 1.0)

    def of_rows(self, per_slot: int) -> "Sampling":
        """Of `per_slot` consecutive rows a slot."""
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, per_slot), self)


class Limits(struct.PyTreeNode):
    """When a request ends; ids of -1 pad `stop_ids`, NO_LIMIT means none.

    Attributes:
        given: Positions after the prompt whose tokens the request brought, between its holes or
            after them; stop ids there do not end it. None: no request has any.
        given_behind: `given` counts from the prompt's end, not from position 0.
    """

    stop_ids: Int[Array, "B E"]
    max_nfe: Int[Array, " B"]
    max_run: Int[Array, " B"]
    given: Bool[Array, "B W"] | None = None
    given_behind: bool = struct.field(pytree_node=False, default=False)


class Carry(struct.PyTreeNode):
    """A strategy's own leaves, by axis: `tokens` [B W ...], `blocks` [B K ...], `slot` [B ...].

    The engine slides `tokens` and `blocks` with the window and fills new cells with the values of
    `Strategy.init`. Leaves of `lasting` [B ...] belong to the slot: the next request there finds
    those of the last one, so no text may depend on them.
    """

    tokens: dict[str, Array] = struct.field(default_factory=dict)
    blocks: dict[str, Array] = struct.field(default_factory=dict)
    slot: dict[str, Array] = struct.field(default_factory=dict)
    lasting: dict[str, Array] = struct.field(default_factory=dict)


class DecodeState(struct.PyTreeNode):
    """Everything of a batch of requests on the device.

    Attributes:
        carry: The strategy's leaves.
        knobs: Thresholds by name, one value a slot.
        keys: One random key a request, never folded in place.
        boundary: Raw hidden row of position `start - 1` (zero width unless needed).
        rows: Raw hidden rows of the last store (zero width unless the boundary is kept).
        page_table: Pages of each request, -1 where there is none.
        pools: KV pools by model name; opaque to strategies, never copied, never selected.
        output: Emitted tokens; `output_len` of them count.
        constraint: Grammars of the slots (`core.constraint`); None: no slot has one.
        written: Log-probabilities of what was last written to a position, at its number modulo N
            (`core.recording` has the columns), NaN where nothing was; None: not kept.
    """

    buffer: BlockBuffer
    sampling: Sampling
    limits: Limits
    finish: Int[Array, " B"]
    carry: Carry
    knobs: dict[str, Float[Array, " B"]]
    keys: PRNGKeyArray
    boundary: Float[Array, "B D"]
    rows: Float[Array, "B W D"]
    page_table: Int[Array, "B C"]
    pools: Any
    output: Int[Array, "B O"]
    output_len: Int[Array, " B"]
    constraint: Any = None
    written: Float[Array, "B N F"] | None = None


class StepInfo(struct.PyTreeNode):
    """The outcome of one step, per slot.

    Attributes:
        commit_len: Tokens that leave the window on the left and are in the cache now.
        settled_len: Leading window cells (before the slide) that never change again.
        accepted: Newly filled cells.
        nfe: Forwards spent, at least 1.
    """

    commit_len: Int[Array, " B"]
    settled_len: Int[Array, " B"]
    accepted: Int[Array, " B"]
    nfe: Int[Array, " B"]


def slot_part(state: DecodeState) -> DecodeState:
    """The leaves that belong to requests: all but the pools, the pages and the grammars."""
    return state.replace(pools=None, page_table=None, constraint=None)


def take_slot(state: DecodeState, b: Int[Array, ""] | int) -> DecodeState:
    """Everything of the request in slot `b` except its pages, without the slot axis."""
    return jax.tree.map(lambda leaf: leaf[b], slot_part(state))


def put_slot(state: DecodeState, b: Int[Array, ""] | int, slot: DecodeState) -> DecodeState:
    """The state with the request `slot` (from `take_slot`) in slot `b`; pages are not touched."""
    moved = jax.tree.map(lambda leaf, row: leaf.at[b].set(row), slot_part(state), slot)
    return moved.replace(
        pools=state.pools, page_table=state.page_table, constraint=state.constraint
    )


def by_row(take: Bool[Array, " R"], a: Any, b: Any) -> Any:
    """A tree with rows of `a` where `take`, of `b` elsewhere."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(take.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, a, b)


def select_rows(take: Bool[Array, " B"], new: DecodeState, old: DecodeState) -> DecodeState:
    """Rows of `new` where `take`, of `old` elsewhere; the pools are always those of `new`.

    A select over a pool would copy it. So a row that is not taken must not have written to one.
    """
    picked = by_row(take, slot_part(new), slot_part(old))
    return picked.replace(pools=new.pools, page_table=new.page_table, constraint=new.constraint)
