"""A random model: what it says to each request is drawn, and its cache keeps what was shown to it.

It stands in for a model in `testing.invariants`. Its laws meet thresholds and each other
exactly. Of a forward it notes what none may ask; it knows no other rule, and no strategy.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from ..core import blocks
from ..core.protocol import (
    Conditioned,
    ForwardOutput,
    Readout,
    SlotSpec,
    Soft,
    TokenMix,
    TokenStats,
)
from ..core.state import DUMMY, RUNNING, DecodeState, Sampling

MASK, VOCAB, ROWS = 0, 8, 16
# What a cached position showed, where it was not a plain token.
NOTHING, HOLE, MIXTURE = -3, -1, -2
# What a forward may not be asked; a token that it predicts then, and what `World.fault` holds.
SEES_A_DUMMY, HAS_A_GAP, READS_NOTHING = -10, -11, -12


class World(struct.PyTreeNode):
    """The model's answers to each request and the content of its cache; replaces a pool.

    Attributes:
        token: Likeliest token by forward and position.
        prob: Its probability; the other tokens but the mask share the rest.
        cached: What each position showed when it was stored: a token, or one of the codes above.
        fault: The last thing that a stored forward may not do; 0 is none.
    """

    token: Int[Array, "B F X"]
    prob: Float[Array, "B F X"]
    cached: Int[Array, "B X"]
    fault: Int[Array, " B"]


class Forward:
    """A `core.protocol.Forward` over the world in `state.pools`, for one step.

    The i-th forward of a step reads row `nfe + i`. One of a `width` is a branch next to a full one:
    it reads the row of that one.
    """

    mask_id, vocab_size = MASK, VOCAB

    def __init__(self, state: DecodeState, shifted: bool):
        self.aux: dict[str, Any] = {}
        self._state, self.shift, self._calls = state, shifted, 0

    def __call__(
        self,
        state: DecodeState,
        *,
        inputs: Any = None,
        live: Bool[Array, "B K S"] | None = None,
        context_len: Int[Array, " B"] | None = None,
        hidden_layers: tuple[int, ...] = (),
        width: int | None = None,
        **_: Any,
    ) -> "Output":
        """One pass over the window."""
        self._calls += width is None
        buffer = state.buffer
        B, K, S = buffer.tokens.shape
        live = blocks.live_cells(state) if live is None else jnp.broadcast_to(live, (B, K, S))
        flat = live.reshape(B, -1)
        place = jnp.cumsum(flat, axis=1) - 1
        first = jnp.argmax(flat, axis=1)[:, None]
        gap = jnp.any(flat & (place != jnp.arange(K * S)[None] - first), axis=1)
        seen_dummy = jnp.any(live & (buffer.status == DUMMY)[:, :, None], axis=(1, 2))
        if width is not None:
            live = live & (place < width).reshape(B, K, S)
        position = jnp.arange(state.pools.cached.shape[1])[None]
        end = buffer.start if context_len is None else context_len
        # Fresh wins: only cached positions that are not live are read.
        fresh = jnp.zeros(state.pools.cached.shape, bool)
        fresh = fresh.at[jnp.arange(B)[:, None, None], buffer.positions].set(live, mode="drop")
        unread = (position < end[:, None]) & ~fresh & (state.pools.cached == NOTHING)
        fault = jnp.zeros((B,), jnp.int32)
        for wrong, code in (
            (jnp.any(unread, axis=1), READS_NOTHING),
            (gap, HAS_A_GAP),
            (seen_dummy, SEES_A_DUMMY),
        ):
            fault = jnp.where(wrong, code, fault)
        return Output(
            law=self._law(buffer.positions, jnp.maximum(self._calls - 1, 0)),
            positions=buffer.positions,
            live=live,
            shown=_shown(state, inputs),
            fault=fault,
            hidden=jnp.zeros((B, K, S, 0)),
            taps=tuple(jnp.zeros((B, K, S, 0)) for _ in hidden_layers),
            shifted=self.shift,
        )

    def embed(self, ids: Int[Array, "..."]) -> Float[Array, "... 0"]:
        """Rows of no width."""
        return jnp.zeros((*ids.shape, 0))

    def predict(
        self,
        hidden: Float[Array, "B *X 0"],
        sampling: Sampling | None = None,
        keys: Any = None,
        **_: Any,
    ) -> TokenStats:
        """Of rows of no cell: what is said of the position that the window starts at."""
        start = self._state.buffer.start.reshape(-1, *(1,) * (hidden.ndim - 2))
        start = jnp.broadcast_to(start, hidden.shape[:-1])
        return _stats(self._law(start, 0), Readout(sampling=sampling, keys=keys))

    def _law(self, positions: Int[Array, "B ..."], calls: Array | int) -> Float[Array, "B ... V"]:
        """Probabilities of all tokens, so that none is rounded."""
        world: Any = self._state.pools
        column = jnp.minimum(positions, world.token.shape[2] - 1)
        tail = (1,) * (positions.ndim - 1)
        slot = jnp.arange(positions.shape[0]).reshape(-1, *tail)
        row = ((self._state.buffer.nfe + calls) % ROWS).reshape(-1, *tail)
        token, prob = world.token[slot, row, column], world.prob[slot, row, column]
        ids = jnp.arange(VOCAB).reshape(*(1,) * positions.ndim, -1)
        rest = jnp.where(ids == MASK, 0.0, (1.0 - prob[..., None]) / (VOCAB - 2))
        return jnp.where(ids == token[..., None], prob[..., None], rest)


class Output(struct.PyTreeNode, ForwardOutput):
    """The output of one pass; a branch may return it."""

    law: Float[Array, "B K S V"]
    positions: Int[Array, "B K S"]
    live: Bool[Array, "B K S"]
    shown: Int[Array, "B K S"]
    fault: Int[Array, " B"]
    hidden: Float[Array, "B K S 0"]
    taps: tuple[Float[Array, "B K S 0"], ...]
    shifted: bool = struct.field(pytree_node=False)

    def read(self, ask: Readout) -> TokenStats:
        """Statistics of the cells that a row speaks about; top-k and top-p restrict nothing."""
        law = self.law
        ids = jnp.arange(VOCAB)[None, None, None]
        if ask.penalty is not None:
            away, weight = (leaf[..., None] for leaf in ask.penalty)
            law = law * jnp.where(ids == away, jnp.exp(-weight), 1.0)
            law = law / jnp.maximum(jnp.sum(law, axis=-1, keepdims=True), 1e-9)
        stats = _stats(law, ask)
        # Any cell of a wrong forward says so, and is taken at once.
        wrong = (self.fault < 0)[:, None, None]
        token = jnp.where(wrong, self.fault[:, None, None], stats.token)
        sure = jnp.where(wrong, 1.0, stats.confidence)
        answered = self._answered() if ask.where is None else ask.where & self._answered()
        stats = stats.replace(token=token, confidence=sure, soft=self.hidden if ask.soft else None)
        if ask.ids is not None:
            stats = stats.replace(id_probs=jnp.take_along_axis(law, ask.ids, axis=-1))
        return stats.only(answered)

    def soft(self, temperature: Any = 1.0) -> Float[Array, "B K S 0"]:
        """Embeddings of no width."""
        del temperature
        return self.hidden

    def logits(self) -> Float[Array, "B K S V"]:
        """Log probabilities of each cell."""
        return jnp.log(self.law)

    def store(self, state: DecodeState, where: Bool[Array, "B K S"]) -> DecodeState:
        """Note what the live cells of running rows showed."""
        world: Any = state.pools
        running = state.finish == RUNNING
        kept = where & self.live & running[:, None, None]
        position = jnp.where(kept, self.positions, world.cached.shape[1])
        slot = jnp.arange(len(running))[:, None, None]
        cached = world.cached.at[slot, position].set(self.shown, mode="drop")
        fault = jnp.where(running & (self.fault < 0), self.fault, world.fault)
        return state.replace(pools=world.replace(cached=cached, fault=fault))

    def _answered(self) -> Bool[Array, "B K S"]:
        """On shifted models the cell to the left speaks, of the first one the row before it."""
        if not self.shifted:
            return self.live
        flat = self.live.reshape(self.live.shape[0], -1)
        left = jnp.concatenate([jnp.ones_like(flat[:, :1]), flat[:, :-1]], axis=1)
        return left.reshape(self.live.shape)


def _shown(state: DecodeState, inputs: Any) -> Int[Array, "B K S"]:
    buffer = state.buffer
    plain = jnp.where(buffer.filled, buffer.tokens, HOLE)
    if inputs is None:
        return plain
    if isinstance(inputs, TokenMix):
        return jnp.where(inputs.on, MIXTURE, plain)
    if isinstance(inputs, Soft | Conditioned):
        return jnp.where(inputs.on, MIXTURE, inputs.ids)
    return jnp.asarray(inputs)


def _stats(law: Float[Array, "B ... V"], ask: Readout) -> TokenStats:
    sampling, keys = ask.sampling, ask.keys
    judged, token = law, jnp.argmax(law, axis=-1)
    if sampling is not None:
        temperature = sampling.temperature.reshape(-1, *(1,) * (law.ndim - 1))
        logits = jnp.log(law) / jnp.where(temperature > 0, temperature, 1.0)
        if keys is not None:
            noise = jax.vmap(lambda key: jax.random.gumbel(key, (VOCAB,)))(keys.reshape(-1))
            drawn = jnp.argmax(logits + noise.reshape(law.shape), axis=-1)
            token = jnp.where(temperature[..., 0] > 0, drawn, token)
        if ask.confidence == "drawn":
            judged = jnp.where(temperature > 0, jax.nn.softmax(logits, axis=-1), law)
    top_probs, top_ids = jax.lax.top_k(judged, ask.num_top)
    spread = jnp.where(judged > 0, judged * jnp.log(jnp.where(judged > 0, judged, 1.0)), 0.0)
    return TokenStats(
        token=token.astype(jnp.int32),
        confidence=jnp.take_along_axis(judged, token[..., None], axis=-1)[..., 0],
        entropy=-jnp.sum(spread, axis=-1),
        top_ids=top_ids,
        top_probs=top_probs,
    )


def slot_spec(strategy: Any, count: int) -> SlotSpec:
    """Sizes of the world for `Strategy.init`."""
    K, S = strategy.buffer_size or 1, strategy.block_size
    return SlotSpec(count, K, S, VOCAB, 0, MASK, jnp.float32)
