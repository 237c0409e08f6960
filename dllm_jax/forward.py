"""A model as strategies see it: `Forward` of the contract over parameters, pages and a kernel.

One `ModelForward` lives for one trace. A call runs the network over the window's live cells and
returns a `WindowOutput`, from which predictions and the deferred store are taken. Nothing here
knows what any strategy does.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dllm_jax.cache import page_slots, write_rows
from dllm_jax.model import Model
from dllm_jax.models.head import Unembed
from dllm_jax.readout import read_soft, read_stats
from pallas_kernels.layer import LayerOps
from pallas_kernels.paged_attention import WindowMask, paged_attention
from strategies import blocks
from strategies.protocol import Inputs, Soft, Taps, TokenMix, TokenStats
from strategies.sampling import drawn_law
from strategies.state import ERROR, RUNNING, DecodeState, Sampling

TARGET = "target"  # name of the main model's pool


class ModelForward:
    """See `strategies.protocol.Forward`.

    Args:
        model: The network and its weights.
        pool: Which of the state's pools is this model's.
        aux: Further models by name; they share the page table.
        implementation: Attention back end, None for the best that fits.
        reads_ahead: Take `context_len`.
    """

    def __init__(
        self,
        model: Model,
        pool: str = TARGET,
        aux: Mapping[str, Model] | None = None,
        implementation: Any = None,
        reads_ahead: bool = True,
    ):
        self.model, self.pool, self._implementation = model, pool, implementation
        self._reads_ahead = reads_ahead
        self.mask_id: int = model.config.mask_token_id
        self.vocab_size: int = model.config.vocab_size
        self.shift: bool = model.config.shift
        self.aux = {
            name: ModelForward(other, name, implementation=implementation, reads_ahead=reads_ahead)
            for name, other in (aux or {}).items()
        }

    def __call__(
        self,
        state: DecodeState,
        *,
        inputs: Inputs | None = None,
        live: Bool[Array, "B K S"] | None = None,
        visible: Bool[Array, "B K K"] | None = None,
        causal: bool | Bool[Array, " B"] = False,
        context_len: Int[Array, " B"] | None = None,
        mode: Int[Array, " B"] | int | None = None,
        hidden_layers: tuple[int, ...] = (),
        width: int | None = None,
    ) -> "WindowOutput":
        """One pass over the window; see the protocol."""
        if context_len is not None and not self._reads_ahead:
            raise ValueError(
                "the strategy gives context_len and its needs do not say why; use "
                "Needs(provisional_cache=True) where a step reads what an earlier one stored past "
                "`start`, else False"
            )
        buffer, arch = state.buffer, self.model.arch
        B, K, S = buffer.tokens.shape
        live = blocks.live_cells(state) if live is None else live
        edges = _live_edges(live.reshape(B, K * S))
        cell = jnp.broadcast_to(jnp.arange(K * S, dtype=jnp.int32), (B, K * S))
        if width is not None:
            # Past the narrowed rows nothing is fresh, what is cached there stays visible; rows
            # past the window's end belong to no cell.
            edges = edges.at[:, 1].min(edges[:, 0] + width)
            live = live & _between(cell, edges).reshape(B, K, S)
            cell = edges[:, :1] + jnp.arange(width, dtype=jnp.int32)[None]
        narrow = None if width is None else cell
        positions = buffer.start[:, None] + cell
        if isinstance(inputs, Taps):
            return self._tapped(state, inputs, positions, live, narrow)
        mask = WindowMask(
            cell=cell,
            start=buffer.start,
            live=edges,
            context_len=buffer.start if context_len is None else context_len,
            visible=visible,
            causal=jnp.broadcast_to(jnp.asarray(causal), (B,)),
            block_size=S,
        )
        fresh: list[tuple[Array, Array]] = []

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            fresh.append((k, v))
            k_pages, v_pages = state.pools[self.pool][layer]
            seen = mask
            if arch.layer_view is not None:
                window, in_order = arch.layer_view(self.model.config, layer)
                seen = mask.replace(window=window, causal=mask.causal | in_order)
            return paged_attention(
                q,
                k,
                v,
                k_pages,
                v_pages,
                state.page_table,
                seen,
                implementation=self._implementation,
            )

        x = _narrowed(self._embed_inputs(state, inputs), narrow)
        if mode is not None and not arch.takes_mode:
            raise ValueError(f"{mode=}: this model has one mode; leave mode out")
        mode = jnp.broadcast_to(jnp.asarray(0 if mode is None else mode), (B,))
        more: dict[str, Any] = {"mode": mode} if arch.takes_mode else {}
        if arch.takes_live:
            more["live"] = _between(cell, edges)
        if arch.takes_ops:
            more["ops"] = LayerOps()
        rows, taps = arch.trunk(
            self.model.params, self.model.config, x, positions, attend, hidden_layers, **more
        )
        return _window_output(self, state, tuple(fresh), live, rows, taps, narrow)

    def embed(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Embedding rows of ids."""
        return self.model.arch.embed(self.model.params, self.model.config, ids)

    def predict(
        self,
        hidden: Float[Array, "B *X D"],
        sampling: Sampling | None = None,
        keys: PRNGKeyArray | None = None,
    ) -> TokenStats:
        """Statistics [B *X] of hidden rows that belong to no cell."""
        *axes, width = hidden.shape
        sampling = greedy(axes[0]) if sampling is None else sampling
        per_row = math.prod(axes[1:])
        stats = read_stats(
            self.unembed,
            hidden.reshape(-1, width),
            jax.tree.map(lambda leaf: jnp.repeat(leaf, per_row), sampling),
            None if keys is None else keys.reshape(-1),
            forbidden=self.forbidden,
        )
        return jax.tree.map(lambda leaf: leaf.reshape(*axes, *leaf.shape[1:]), stats)

    @property
    def unembed(self) -> Callable[[Array], Array]:
        """Hidden rows [... D] to float32 logits [... V]; a `Head` where the network has one."""
        params, cfg, unembed = self.model.params, self.model.config, self.model.arch.unembed
        if isinstance(unembed, Unembed):
            return unembed.head(params, cfg)
        return functools.partial(unembed, params, cfg)

    def drawn_law(
        self, hidden: Float[Array, "B *X D"], sampling: Sampling
    ) -> Float[Array, "B *X V"]:
        """The law that hidden rows are drawn from, as logits; see the protocol."""
        *axes, width = hidden.shape
        per_row = math.prod(axes[1:])
        logits = self.unembed(hidden.reshape(-1, width))
        never = self.forbidden(jnp.arange(logits.shape[-1], dtype=jnp.int32))
        law = drawn_law(
            jnp.where(never, -jnp.inf, logits),
            temperature=jnp.repeat(sampling.temperature, per_row),
            top_k=jnp.repeat(sampling.top_k, per_row),
            top_p=jnp.repeat(sampling.top_p, per_row),
        )
        return law.reshape(*axes, law.shape[-1])

    def forbidden(self, ids: Int[Array, " V"]) -> Bool[Array, " V"]:
        """Ids never predicted: the mask, edits that are no text, rows that hold no token."""
        defaults = self.model.defaults
        never = (ids == self.mask_id) | (ids >= (defaults.vocab_limit or self.vocab_size))
        for token in defaults.forbidden_token_ids:
            never |= ids == token
        return never

    def _embed_inputs(self, state: DecodeState, inputs: Any) -> Float[Array, "B W D"]:
        buffer = state.buffer
        B, K, S = buffer.tokens.shape
        if inputs is None:
            inputs = jnp.where(buffer.filled, buffer.tokens, max(self.mask_id, 0))
        if isinstance(inputs, TokenMix):
            shown = jnp.where(buffer.filled, buffer.tokens, max(self.mask_id, 0))
            rows = jnp.where(inputs.on[..., None], self._mixture(inputs), self.embed(shown))
        elif isinstance(inputs, Soft):
            hard = self.embed(inputs.ids)
            rows = jnp.where(inputs.on[..., None], inputs.vectors.astype(hard.dtype), hard)
        else:
            rows = self.embed(jnp.asarray(inputs))
        return rows.reshape(B, K * S, -1)

    def _mixture(self, mix: TokenMix) -> Float[Array, "B K S D"]:
        base, parts = self.embed(mix.base_ids), self.embed(mix.ids)
        weight = mix.base_weight[..., None].astype(base.dtype)
        probs = mix.probs[..., None].astype(base.dtype)
        mixed = weight * base + jnp.sum(probs * parts, axis=-2)
        if not mix.renormalize:
            return mixed

        def norm(x: Array) -> Array:
            return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)

        wanted = mix.base_weight * norm(base) + jnp.sum(mix.probs * norm(parts), axis=-1)
        scale = wanted / jnp.maximum(norm(mixed), 1e-12)  # DMax, the reference's epsilon
        return (mixed.astype(jnp.float32) * scale[..., None]).astype(base.dtype)

    def _tapped(
        self,
        state: DecodeState,
        taps: Taps,
        positions: Int[Array, "B T"],
        live: Bool[Array, "B K S"],
        narrow: Int[Array, "B T"] | None,
    ) -> "WindowOutput":
        arch, B = self.model.arch, positions.shape[0]
        if arch.context_kv is None:
            raise ValueError(f"model {self.pool!r} takes no tapped features; give it token inputs")
        vectors = _narrowed(taps.vectors.reshape(B, -1, taps.vectors.shape[-1]), narrow)
        fresh = arch.context_kv(self.model.params, self.model.config, vectors, positions)
        return _window_output(self, state, tuple(fresh), live, vectors, (), narrow)


def _narrowed(rows: Float[Array, "B W D"], cell: Int[Array, "B T"] | None) -> Array:
    """The rows of the cells of a narrow pass; any row for those past the window."""
    if cell is None:
        return rows
    return jnp.take_along_axis(rows, jnp.minimum(cell, rows.shape[1] - 1)[:, :, None], axis=1)


def _widened(rows: Array, first: Int[Array, " B"], size: int) -> Array:
    """Rows [B T ...] of the cells from `first` on as [B size ...], zero elsewhere.

    A gather, which XLA computes with what it reads; a scatter is a kernel and a fill of its own.
    """
    place = jnp.arange(size, dtype=jnp.int32)[None] - first[:, None]
    place = place.reshape(*place.shape, *(1,) * (rows.ndim - 2))
    held = (place >= 0) & (place < rows.shape[1])
    place = jnp.clip(place, 0, rows.shape[1] - 1)
    return jnp.where(held, jnp.take_along_axis(rows, place, axis=1), jnp.zeros((), rows.dtype))


def _window_output(
    forward: ModelForward,
    state: DecodeState,
    fresh: tuple[tuple[Array, Array], ...],
    live: Bool[Array, "B K S"],
    rows: Float[Array, "B T D"],
    taps: tuple[Float[Array, "B T D"], ...],
    cell: Int[Array, "B T"] | None,
) -> "WindowOutput":
    """Computed rows as rows of the window: those of a narrow pass go to their `cell`."""
    B, K, S = live.shape

    if cell is not None:
        rows, taps, fresh = jax.tree.map(
            lambda leaf: _widened(leaf, cell[:, 0], K * S), (rows, taps, fresh)
        )

    def as_cells(leaf: Array) -> Array:
        return leaf.reshape(B, K, S, -1)

    return WindowOutput(
        hidden=as_cells(rows),
        taps=tuple(as_cells(tap) for tap in taps),
        fresh=fresh,
        live=live,
        positions=state.buffer.positions,
        boundary=state.boundary,
        forward=forward,
    )


class WindowOutput(struct.PyTreeNode):
    """See `strategies.protocol.ForwardOutput`.

    A pytree of window-shaped leaves whatever the width of the pass, so that passes of several
    widths may be the branches of a `lax.switch` and their output leave it.
    """

    hidden: Float[Array, "B K S D"]
    taps: tuple[Float[Array, "B K S D"], ...]
    fresh: tuple[tuple[Float[Array, "B W G H"], Float[Array, "B W G H"]], ...]
    live: Bool[Array, "B K S"]
    positions: Int[Array, "B K S"]
    boundary: Float[Array, "B D"]
    forward: ModelForward = struct.field(pytree_node=False)

    def predict(
        self,
        where: Bool[Array, "B K S"] | None = None,
        sampling: Sampling | None = None,
        keys: PRNGKeyArray | None = None,
        confidence: Literal["drawn", "raw"] = "drawn",
        forbid: Int[Array, " X"] | None = None,
        penalty: tuple[Int[Array, "B K S"], Float[Array, "B K S"]] | None = None,
        num_top: int = 0,
        guide: tuple[Any, float] | None = None,
        width: int | None = None,
    ) -> TokenStats:
        """Statistics aligned with the cells; see the protocol."""
        B, K, S = self.live.shape
        where = self._predicted() if where is None else where & self._predicted()
        first = jnp.argmax(where.reshape(B, K * S), axis=1).astype(jnp.int32)
        T = K * S if width is None else width
        sampling = greedy(B) if sampling is None else sampling

        def read(leaf: Array) -> Array:
            """Of a value a cell, those of the cells that are read out, one behind another."""
            flat = leaf.reshape(B, K * S, *leaf.shape[3:])
            if width is not None:
                cell = first[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
                flat = flat[jnp.arange(B)[:, None], jnp.minimum(cell, K * S - 1)]
            return flat.reshape(B * T, *flat.shape[2:])

        stats = read_stats(
            self.forward.unembed,
            read(self._aligned()),
            jax.tree.map(lambda leaf: jnp.repeat(leaf, T), sampling),
            None if keys is None else read(keys),
            forbidden=lambda ids: self._forbidden(ids, forbid),
            penalty=None if penalty is None else (read(penalty[0]), read(penalty[1])),
            confidence=confidence,
            num_top=num_top,
            guide=None if guide is None else (read(guide[0]._aligned()), guide[1]),
        )

        def as_cells(leaf: Array) -> Array:
            rows = leaf.reshape(B, T, *leaf.shape[1:])
            rows = rows if width is None else _widened(rows, first, K * S)
            return rows.reshape(B, K, S, *leaf.shape[1:])

        if width is not None:
            cell = jnp.arange(K * S, dtype=jnp.int32)[None] - first[:, None]
            where &= (cell < width).reshape(B, K, S)
        stats = jax.tree.map(as_cells, stats)
        return stats.replace(
            token=jnp.where(where, stats.token, 0),
            confidence=jnp.where(where, stats.confidence, -jnp.inf),
            entropy=jnp.where(where, stats.entropy, jnp.inf),
        )

    def soft(self, temperature: float | Float[Array, "B 1 1"] = 1.0) -> Float[Array, "B K S D"]:
        """Expected embedding under the tempered law of each cell."""
        B, K, S = self.live.shape
        forward = self.forward
        per_cell = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (B, K, S)).reshape(-1)
        every = forward.embed(jnp.arange(forward.vocab_size, dtype=jnp.int32))
        rows = read_soft(
            forward.unembed,
            every,
            self._aligned().reshape(B * K * S, -1),
            per_cell,
            forward.forbidden,
        )
        return rows.reshape(B, K, S, -1)

    def logits(self) -> Float[Array, "B K S V"]:
        """Everything, aligned."""
        return self.forward.unembed(self._aligned())

    def store(self, state: DecodeState, where: Bool[Array, "B K S"]) -> DecodeState:
        """Write K/V of live cells in `where` of running rows; keep the raw rows for the boundary.

        The write waits for the last hidden row, which every layer's read of the cache precedes:
        XLA then has no reason to copy a pool to protect a reader. The same test keeps rows that
        are not finite out of the cache.
        """
        sound = jnp.all(jnp.isfinite(self.hidden.astype(jnp.float32)), axis=-1)
        running = (state.finish == RUNNING)[:, None, None]
        wanted = where & self.live & running & sound
        name = self.forward.pool
        pool = state.pools[name]
        num_pages, _, page_size, _ = pool[0][0].shape
        B, K, S = wanted.shape
        slots = page_slots(
            state.page_table,
            self.positions.reshape(B, -1),
            wanted.reshape(B, -1),
            num_pages,
            page_size,
        )
        lost = jnp.any(where & self.live & ~sound, axis=(1, 2)) & (state.finish == RUNNING)
        state = state.replace(
            pools={**state.pools, name: write_rows(pool, self.fresh, slots)},
            finish=jnp.where(lost, ERROR, state.finish),
        )
        if name == TARGET and state.boundary.shape[-1]:
            state = state.replace(rows=self.hidden.reshape(B, K * S, -1))
        return state

    def _aligned(self) -> Float[Array, "B K S D"]:
        if not self.forward.model.config.shift:
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

    def _predicted(self) -> Bool[Array, "B K S"]:
        """Cells some row speaks about."""
        if not self.forward.model.config.shift:
            return self.live
        B, K, S = self.live.shape
        flat = self.live.reshape(B, K * S)
        left = jnp.concatenate([jnp.ones_like(flat[:, :1]), flat[:, :-1]], axis=1)
        return left.reshape(B, K, S)

    def _forbidden(self, ids: Array, more: Array | None) -> Array:
        out = self.forward.forbidden(ids)
        return out if more is None else out | jnp.any(ids[:, None] == more[None, :], axis=1)


def greedy(num_slots: int) -> Sampling:
    """Sampling that takes the most probable token."""
    return Sampling(
        temperature=jnp.zeros((num_slots,), jnp.float32),
        top_k=jnp.zeros((num_slots,), jnp.int32),
        top_p=jnp.ones((num_slots,), jnp.float32),
    )


def _between(cell: Int[Array, "B W"], edges: Int[Array, "B 2"]) -> Bool[Array, "B W"]:
    return (cell >= edges[:, :1]) & (cell < edges[:, 1:])


def _live_edges(live: Bool[Array, "B W"]) -> Int[Array, "B 2"]:
    """First live cell and one past the last; (0, 0) where none is."""
    W = live.shape[1]
    cell = jnp.arange(W, dtype=jnp.int32)[None]
    first = jnp.min(jnp.where(live, cell, W), axis=1)
    end = jnp.max(jnp.where(live, cell + 1, 0), axis=1)
    return jnp.stack([jnp.minimum(first, end), end], axis=1)
