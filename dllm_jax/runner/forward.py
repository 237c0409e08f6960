"""A model as strategies see it: `Forward` of the contract over parameters, pages and a kernel.

One `ModelForward` lives for one trace. A call runs the network over the window's live cells and
returns a `WindowOutput`; its other methods read hidden rows that belong to no cell.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dllm_jax.kernels.kv_write import fp8
from dllm_jax.kernels.layer import LayerOps
from dllm_jax.kernels.paged_attention import TILE, WindowMask, paged_attention, whole_tile
from dllm_jax.loading.model import Model
from dllm_jax.models.dense import ONE_ROUNDING
from dllm_jax.models.head import Unembed
from dllm_jax.models.sharding import first_of, total
from dllm_jax.runner.cells import Cells, first_cells
from dllm_jax.runner.grammar_readout import read_first
from dllm_jax.runner.reader import Reader
from dllm_jax.runner.readout import read_log_probs, read_stats
from dllm_jax.runner.window_output import TARGET, WindowOutput
from dllm_jax.strategies.core import blocks, constraint
from dllm_jax.strategies.core.draw import Shard, drawn_law
from dllm_jax.strategies.core.protocol import (
    Conditioned,
    Inputs,
    Readout,
    Soft,
    Taps,
    TokenMix,
    TokenStats,
)
from dllm_jax.strategies.core.state import DecodeState, Sampling

MOST_GATHERED = 256 << 20  # bytes of logits; a step gathers none but for rejection sampling


class ModelForward:
    """See `dllm_jax.strategies.core.protocol.Forward`.

    Args:
        model: The network and its weights.
        pool: Which of the state's pools is this model's.
        aux: Further models by name; they share the page table.
        implementation: Attention back end, None for the best that fits.
        reads_ahead: Take `context_len`.
        one_rounding: A row's bits do not depend on the number of slots (docs/adr/0035); kernels
            that cannot keep that are refused.
    """

    def __init__(
        self,
        model: Model,
        pool: str = TARGET,
        aux: Mapping[str, Model] | None = None,
        implementation: Any = None,
        reads_ahead: bool = True,
        one_rounding: bool = False,
    ):
        self.model, self.pool, self._implementation = model, pool, implementation
        self.one_rounding = one_rounding
        self._reads_ahead = reads_ahead
        self.mask_id: int = model.config.mask_token_id
        self.vocab_size: int = model.config.vocab_size
        self.shift: bool = model.config.shift
        self.axis = None if model.split is None else model.split.axis
        self.shard = None if self.axis is None else Shard(self.axis, self.vocab_size)
        self.aux = {
            name: ModelForward(other, name, implementation=implementation, reads_ahead=reads_ahead)
            for name, other in (aux or {}).items()
        }

    def __call__(
        self,
        state: DecodeState,
        *,
        inputs: Inputs | None = None,
        live: Bool[Array, "B K S"] | np.ndarray | None = None,
        visible: Bool[Array, "B K K"] | np.ndarray | None = None,
        causal: bool | Bool[Array, " B"] | Bool[Array, "B K"] = False,
        context_len: Int[Array, " B"] | None = None,
        mode: Int[Array, " B"] | Int[Array, "B K"] | int | None = None,
        hidden_layers: tuple[int, ...] = (),
        width: int | None = None,
        stores: bool = True,
    ) -> WindowOutput:
        """One pass over the window; see the protocol."""
        if context_len is not None and not self._reads_ahead:
            raise ValueError(
                "the strategy gives context_len and its needs do not say why; use "
                'Needs(provisional_cache="across_steps") where a step reads past `start` what an '
                'earlier one stored, else "same_step"'
            )
        buffer, arch = state.buffer, self.model.arch
        B, K, S = buffer.tokens.shape
        live = blocks.live_cells(state) if live is None else live
        edges = _live_edges(jnp.asarray(live).reshape(B, K * S))
        cell = jnp.broadcast_to(jnp.arange(K * S, dtype=jnp.int32), (B, K * S))
        cells, live = first_cells(live, width)
        if width is not None:
            # Past the narrowed rows nothing is fresh, what is cached there stays visible; rows
            # past the window's end belong to no cell.
            edges = edges.at[:, 1].min(edges[:, 0] + width)
            cell = edges[:, :1] + jnp.arange(width, dtype=jnp.int32)[None]
        positions = buffer.start[:, None] + cell
        if isinstance(inputs, Taps):
            return self._tapped(state, inputs, positions, live, cells)
        # Pieces of prompts begin where a tile of keys does.
        in_tile = self.one_rounding and causal is True and cell.shape[1] < TILE
        causal, size = _by_row_or_block(causal, B), S
        if isinstance(visible, np.ndarray) and visible.all() and causal.ndim == 1:
            visible, size = None, K * S  # one block, of which a kernel needs no table
        mask = WindowMask(
            cell=cell,
            start=buffer.start,
            live=edges,
            context_len=buffer.start if context_len is None else context_len,
            visible=None if visible is None else jnp.asarray(visible),
            causal=causal,
            block_size=size,
            context_is_before=context_len is None,
        )
        fresh: list[tuple[Array, Array]] = []
        x = self._embed_inputs(state, inputs, cells)
        attend = self._attention(state, mask, fresh, in_tile)
        more = self._trunk_options(mask, mode, S)
        rows, taps = arch.trunk(
            self.model.params, self.model.config, x, positions, attend, hidden_layers, **more
        )
        kept = tuple(fresh) if stores else ()
        return self._output(state, kept, live, rows, taps, cells)

    def _attention(
        self,
        state: DecodeState,
        mask: WindowMask,
        fresh: list[tuple[Array, Array]],
        in_tile: bool,
    ) -> Callable[..., Any]:
        """The trunk's attention. It appends the keys and values of each layer to `fresh`.

        Args:
            in_tile: A row's bits do not depend on the cell that the window begins with.
        """
        arch = self.model.arch

        def attend(layer: int, q: Array, k: Array, v: Array, **how: bool) -> Any:
            every = self.model.kv_scales
            scales = None if every is None else every[layer]
            if scales is not None:  # fresh ones too: a key is the same before and after a commit
                k, v = fp8.quantize(k, scales[0]), fp8.quantize(v, scales[1])
            fresh.append((k, v))
            k_pages, v_pages = state.pools[self.pool][layer]
            seen, scale = mask, None
            if arch.layer_view is not None:
                window, in_order, by_block, scale = arch.layer_view(self.model.config, layer)
                causal = mask.causal | in_order
                seen = mask.replace(window=window, causal=causal, by_block=by_block)
            if in_tile:
                k, v, seen = whole_tile(k, v, k_pages, v_pages, state.page_table, seen)
            return paged_attention(
                q,
                k,
                v,
                k_pages,
                v_pages,
                state.page_table,
                seen,
                scale=scale,
                kv_scales=scales,
                one_rounding=self.one_rounding,
                implementation="mosaic" if self.one_rounding else self._implementation,
                **how,
            )

        return attend

    def _trunk_options(self, mask: WindowMask, mode: Any, block_size: int) -> dict[str, Any]:
        """Further arguments of the trunk, of those that it takes."""
        arch, cell = self.model.arch, mask.cell
        if mode is not None and not arch.takes_mode:
            raise ValueError(f"{mode=}: this model has one mode; leave mode out")
        more: dict[str, Any] = {}
        if arch.takes_mode:
            mode = _by_row_or_block(0 if mode is None else mode, len(cell))
            if mode.ndim > 1:
                block = jnp.minimum(cell // block_size, mode.shape[1] - 1)
                mode = jnp.take_along_axis(mode, block, axis=1)
            more["mode"] = mode
        if arch.takes_live:
            first, end = mask.live[:, :1], mask.live[:, 1:]
            more["live"] = (cell >= first) & (cell < end)
        if arch.takes_ops:
            more["ops"] = LayerOps(axis=self.axis, attends_in_groups=self.axis is None)
            if self.one_rounding:
                more["ops"] = ONE_ROUNDING
            if self.model.exchange is not None:
                more["peers"] = self.model.exchange.peers
        return more

    def embed(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Embedding rows of ids."""
        if self.axis is None:
            return self._own_rows(ids)
        size = len(self.model.params["embed"])
        ids = ids - first_of(size, self.axis)
        mine = ((ids >= 0) & (ids < size))[..., None]
        rows = self._own_rows(jnp.clip(ids, 0, size - 1))
        return total(jnp.where(mine, rows, jnp.zeros_like(rows)), rows, self.axis)

    def _own_rows(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Rows of the embedding that this device has, by place."""
        return self.model.arch.embed(self.model.params, self.model.config, ids)

    def predict(
        self,
        hidden: Float[Array, "B *X D"],
        sampling: Sampling | None = None,
        keys: PRNGKeyArray | None = None,
        first_of: DecodeState | None = None,
    ) -> TokenStats:
        """Statistics [B *X] of hidden rows that belong to no cell; see the protocol."""
        *axes, width = hidden.shape
        ask = Readout(
            sampling=Sampling.greedy(axes[0]) if sampling is None else sampling,
            keys=None if keys is None else keys.reshape(-1),
        )
        stats = read_stats(self.reader(), hidden.reshape(-1, width), ask)
        if first_of is not None and first_of.constraint is not None:
            stats = read_first(self.reader(), hidden, ask, constraint.view(first_of), stats)
        return jax.tree.map(lambda leaf: leaf.reshape(*axes, *leaf.shape[1:]), stats)

    def log_probs(
        self,
        hidden: Float[Array, "R D"],
        tokens: Int[Array, " R"],
        ask: Readout,
        num_top: int = 0,
    ) -> Float[Array, "R F"]:
        """Of rows, each with a token: `ForwardOutput.log_probs`."""
        reader = self.reader(ask.allow)._replace(
            unembed=lambda rows: self.whole(self.unembed(rows)), shard=None
        )
        return read_log_probs(reader, hidden, tokens, ask, num_top)

    def reader(self, allow: tuple[int, ...] = ()) -> Reader:
        """How rows become logits; ids in `allow` may be predicted though they are no text."""
        forbidden = functools.partial(self.model.forbidden, allow=allow)
        return Reader(self.unembed, forbidden, self.shard, self.one_rounding)

    @property
    def unembed(self) -> Callable[[Array], Array]:
        """Hidden rows [... D] to float32 logits [... V]; a `Head` where the network has one.

        Where devices share the vocabulary, logits are of a device's own ids; see `whole`.
        """
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
        logits = self.whole(self.unembed(hidden.reshape(-1, width)))
        never = self.model.forbidden(jnp.arange(logits.shape[-1], dtype=jnp.int32))
        law = drawn_law(jnp.where(never, -jnp.inf, logits), sampling.of_rows(per_row))
        return law.reshape(*axes, law.shape[-1])

    def whole(self, logits: Float[Array, "... V"]) -> Float[Array, "... V"]:
        """Logits of all ids, gathered from the devices that share them."""
        if self.shard is None:
            return logits
        rows = logits.reshape(-1, logits.shape[-1])
        if 4 * len(rows) * self.vocab_size > MOST_GATHERED:
            raise ValueError(
                f"{len(rows)} rows of {self.vocab_size} logits would be gathered from all devices; "
                "decode fewer texts at once, leave acceptance='rejection' out, or use one device"
            )
        rows = jnp.moveaxis(self.shard.of_all(rows), 0, 1).reshape(len(rows), -1)
        return rows[:, : self.vocab_size].reshape(*logits.shape[:-1], self.vocab_size)

    def _embed_inputs(self, state: DecodeState, inputs: Any, cells: Cells) -> Float[Array, "B T D"]:
        """Input rows of some cells."""
        buffer = state.buffer
        if isinstance(inputs, Conditioned):
            return self._conditioned(*map(cells.narrow, (inputs.ids, inputs.expected, inputs.on)))
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
        return cells.narrow(rows)

    def _conditioned(
        self, ids: Int[Array, "B T"], expected: Float[Array, "B T D"], on: Bool[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        condition = self.model.arch.condition
        if condition is None:
            raise ValueError(
                f"model {self.pool!r} takes no expectation beside a token; give it token inputs"
            )
        plain = self.embed(ids)
        expected = expected.astype(plain.dtype)
        mixed = condition(self.model.params, self.model.config, plain, expected)
        return jnp.where(on[..., None], mixed, plain)

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
        live: Bool[Array, "B K S"] | np.ndarray,
        cells: Cells,
    ) -> WindowOutput:
        arch = self.model.arch
        if arch.context_kv is None:
            raise ValueError(f"model {self.pool!r} takes no tapped features; give it token inputs")
        vectors = cells.narrow(taps.vectors)
        fresh = arch.context_kv(self.model.params, self.model.config, vectors, positions)
        return self._output(state, tuple(fresh), live, vectors, (), cells)

    def _output(
        self,
        state: DecodeState,
        fresh: tuple[tuple[Array, Array], ...],
        live: Bool[Array, "B K S"] | np.ndarray,
        rows: Float[Array, "B T D"],
        taps: tuple[Float[Array, "B T D"], ...],
        cells: Cells,
    ) -> WindowOutput:
        """Computed rows as rows of the window; a narrow pass fills its cells."""
        rows, taps, fresh = cells.widen((rows, taps, fresh))

        def as_cells(leaf: Array) -> Array:
            return leaf.reshape(*live.shape, -1)

        return WindowOutput(
            hidden=as_cells(rows),
            taps=tuple(as_cells(tap) for tap in taps),
            fresh=fresh,
            live=live,
            positions=state.buffer.positions,
            boundary=state.boundary,
            forward=self,
            seen=None if state.constraint is None else constraint.view(state),
        )


def _by_row_or_block(value: Any, num_rows: int) -> Array:
    """One value a row [B], or one for each of its blocks [B K]."""
    value = jnp.asarray(value)
    return value if value.ndim > 1 else jnp.broadcast_to(value, (num_rows,))


def _live_edges(live: Bool[Array, "B W"]) -> Int[Array, "B 2"]:
    """First live cell and one past the last; (0, 0) where none is."""
    W = live.shape[1]
    cell = jnp.arange(W, dtype=jnp.int32)[None]
    first = jnp.min(jnp.where(live, cell, W), axis=1)
    end = jnp.max(jnp.where(live, cell + 1, 0), axis=1)
    return jnp.stack([jnp.minimum(first, end), end], axis=1)
