"""What comes back from a pass over the window: predictions of its cells, and the deferred store."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.kernels.kv_write import page_slots, write_rows
from dllm_jax.runner.cells import Cells, first_cells
from dllm_jax.runner.expectation import read_soft
from dllm_jax.runner.grammar_readout import read_planned
from dllm_jax.runner.readout import of_rows, read_rows
from dllm_jax.strategies.core import constraint
from dllm_jax.strategies.core.protocol import ForwardOutput, Readout, TokenStats
from dllm_jax.strategies.core.state import ERROR, RUNNING, DecodeState, Sampling

if TYPE_CHECKING:
    from dllm_jax.runner.forward import ModelForward

TARGET = "target"  # name of the main model's pool


class WindowOutput(struct.PyTreeNode, ForwardOutput):
    """See `dllm_jax.strategies.core.protocol.ForwardOutput`.

    All leaves have the shape of the window, whatever the width of the pass, so that passes of
    several widths can be branches of a `lax.switch`.
    """

    hidden: Float[Array, "B K S D"]
    taps: tuple[Float[Array, "B K S D"], ...]
    fresh: tuple[tuple[Float[Array, "B W G H"], Float[Array, "B W G H"]], ...]
    live: Bool[Array, "B K S"] | np.ndarray
    positions: Int[Array, "B K S"]
    boundary: Float[Array, "B D"]
    forward: "ModelForward" = struct.field(pytree_node=False)
    seen: constraint.View | None = None

    def read(self, ask: Readout) -> TokenStats:
        """Statistics aligned with the cells; see `predict` of the protocol."""
        own, cells = self._asked(ask)
        assert own.where is not None
        reader, rows = self.forward.reader(own.allow), cells.rows(self._aligned())
        if self.seen is None:
            stats = cells.scatter(read_rows(reader, rows, of_rows(own, cells)))
        else:
            stats = read_planned(reader, rows, own, cells, self.seen)
        stats = stats.only(own.where)
        if not ask.log_prob:
            return stats
        return stats.replace(log_prob=self.log_probs(stats.token, ask)[..., 0])

    def log_probs(
        self, tokens: Int[Array, "B K S"], ask: Readout, num_top: int = 0
    ) -> Float[Array, "B K S F"]:
        """Log-probabilities of given tokens, aligned with the cells; see the protocol."""
        ask, cells = self._asked(ask)
        rows, tokens = cells.rows(self._aligned()), cells.rows(tokens)
        read = self.forward.log_probs(rows, tokens, of_rows(ask, cells), num_top)
        return jnp.where(jnp.asarray(ask.where)[..., None], cells.scatter(read), jnp.nan)

    def _asked(self, ask: Readout) -> tuple[Readout, Cells]:
        """A readout with all of its arguments, and the cells that are read."""
        predicted = self._predicted()
        where = predicted if ask.where is None else ask.where & predicted
        cells, where = first_cells(where, ask.width)
        sampling = Sampling.greedy(len(where)) if ask.sampling is None else ask.sampling
        guide = None if ask.guide is None else (ask.guide[0]._aligned(), ask.guide[1])
        return ask.replace(where=where, sampling=sampling, guide=guide), cells

    def soft(self, temperature: float | Float[Array, "B 1 1"] = 1.0) -> Float[Array, "B K S D"]:
        """Expected embedding under the tempered law of each cell."""
        B, K, S = self.live.shape
        forward = self.forward
        per_cell = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (B, K, S)).reshape(-1)
        size = forward.vocab_size if forward.shard is None else len(forward.model.params["embed"])
        every = forward._own_rows(jnp.arange(size, dtype=jnp.int32))
        hidden = self._aligned().reshape(B * K * S, -1)
        rows = read_soft(forward.reader(), every, hidden, per_cell)
        return rows.reshape(B, K, S, -1)

    def logits(self) -> Float[Array, "B K S V"]:
        """Everything, aligned."""
        return self.forward.whole(self.forward.unembed(self._aligned()))

    def store(self, state: DecodeState, where: Bool[Array, "B K S"]) -> DecodeState:
        """Write K/V of live cells in `where` of running rows; keep the raw rows for the boundary.

        The write waits for the last hidden row, which every layer's read of the cache precedes:
        XLA then has no reason to copy a pool to protect a reader. The same test keeps rows that
        are not finite out of the cache.
        """
        B, K, S = self.live.shape
        span = slice(0, K * S)
        if isinstance(self.live, np.ndarray) and self.live.any():  # known: no others are written
            held = np.flatnonzero(self.live.reshape(B, -1).any(axis=0))
            span = slice(int(held[0]), int(held[-1]) + 1)

        def cells(leaf: Any) -> Array:
            return leaf.reshape(B, K * S, *leaf.shape[3:])[:, span]

        sound = jnp.all(jnp.isfinite(cells(self.hidden).astype(jnp.float32)), axis=-1)
        running = state.finish == RUNNING
        stored = cells(where & self.live)
        name = self.forward.pool
        pool = state.pools[name]
        num_pages, _, page_size, _ = pool[0][0].shape
        positions, writes = cells(self.positions), stored & running[:, None] & sound
        slots = page_slots(state.page_table, positions, writes, num_pages, page_size)
        lost = jnp.any(stored & ~sound, axis=1) & running
        fresh = jax.tree.map(lambda leaf: leaf[:, span], self.fresh)
        state = state.replace(
            pools={**state.pools, name: write_rows(pool, fresh, *slots)},
            finish=jnp.where(lost, ERROR, state.finish),
        )
        if name == TARGET and state.boundary.shape[-1]:
            state = state.replace(rows=self.hidden.reshape(B, K * S, -1))
        return state

    def _aligned(self) -> Float[Array, "B K S D"]:
        if not self.forward.shift:
            return self.hidden
        B, K, S = self.live.shape
        boundary = self.boundary
        if not boundary.shape[-1]:
            raise ValueError(
                "a shifted model predicts its first cell from the boundary row; "
                "keep it: Needs(boundary=True)"
            )
        rows = self.hidden.reshape(B, K * S, -1)
        joined = jnp.concatenate([boundary[:, None].astype(rows.dtype), rows[:, :-1]], axis=1)
        return joined.reshape(B, K, S, -1)

    def _predicted(self) -> Bool[Array, "B K S"] | np.ndarray:
        """Cells that a row predicts."""
        if not self.forward.shift:
            return self.live
        B, K, S = self.live.shape
        flat = self.live.reshape(B, K * S)
        xp = np if isinstance(flat, np.ndarray) else jnp
        left = xp.concatenate([xp.ones_like(flat[:, :1]), flat[:, :-1]], axis=1)
        return left.reshape(B, K, S)
