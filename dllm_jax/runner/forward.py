"""A model as strategies see it: `Forward` of the contract over parameters, pages and a kernel.

One `ModelForward` lives for one trace. A call runs the network over the window's live cells and
returns a `WindowOutput`, from which predictions and the deferred store are taken.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dllm_jax.kernels.kv_write import fp8
from dllm_jax.kernels.layer import LayerOps
from dllm_jax.kernels.paged_attention import WindowMask, paged_attention
from dllm_jax.loading.model import Model
from dllm_jax.models.head import Head, Unembed
from dllm_jax.models.sharding import first_of, total
from dllm_jax.runner.cache import page_slots, write_rows
from dllm_jax.runner.expectation import read_expected
from dllm_jax.runner.readout import (
    by_row,
    is_plain,
    read_classes,
    read_ids,
    read_soft,
    read_stats,
    reads_ids,
)
from dllm_jax.strategies.core import blocks, constraint
from dllm_jax.strategies.core.protocol import (
    Conditioned,
    Inputs,
    Soft,
    Taps,
    TokenMix,
    TokenStats,
)
from dllm_jax.strategies.core.sampling import Shard, drawn_law
from dllm_jax.strategies.core.state import ERROR, NO_TOKEN, RUNNING, DecodeState, Sampling

TARGET = "target"  # name of the main model's pool
# Back ends whose rounding of a row does not follow the number of rows, and never another.
ONE_ROUNDING = LayerOps.by("mosaic", one_rounding=True)
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
        visible: Bool[Array, "B K K"] | None = None,
        causal: bool | Bool[Array, " B"] | Bool[Array, "B K"] = False,
        context_len: Int[Array, " B"] | None = None,
        mode: Int[Array, " B"] | Int[Array, "B K"] | int | None = None,
        hidden_layers: tuple[int, ...] = (),
        width: int | None = None,
        stores: bool = True,
    ) -> "WindowOutput":
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
        first: Array | int = 0
        if width is not None:
            # Past the narrowed rows nothing is fresh, what is cached there stays visible; rows
            # past the window's end belong to no cell.
            first, live = _narrowed_cells(live, width)
            edges = edges.at[:, 1].min(edges[:, 0] + width)
            cell = edges[:, :1] + jnp.arange(width, dtype=jnp.int32)[None]
        positions = buffer.start[:, None] + cell
        if isinstance(inputs, Taps):
            return self._tapped(state, inputs, positions, live, first)
        mask = WindowMask(
            cell=cell,
            start=buffer.start,
            live=edges,
            context_len=buffer.start if context_len is None else context_len,
            visible=visible,
            causal=_by_row_or_block(causal, B),
            block_size=S,
            context_is_before=context_len is None,
        )
        fresh: list[tuple[Array, Array]] = []

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

        x = self._embed_inputs(state, inputs, first, cell.shape[1])
        if mode is not None and not arch.takes_mode:
            raise ValueError(f"{mode=}: this model has one mode; leave mode out")
        mode = _by_row_or_block(0 if mode is None else mode, B)
        if mode.ndim > 1:
            mode = jnp.take_along_axis(mode, jnp.minimum(cell // S, K - 1), axis=1)
        more: dict[str, Any] = {"mode": mode} if arch.takes_mode else {}
        if arch.takes_live:
            more["live"] = _between(cell, edges)
        if arch.takes_ops:
            more["ops"] = LayerOps(axis=self.axis, attends_in_groups=self.axis is None)
            if self.one_rounding:
                more["ops"] = ONE_ROUNDING
            if self.model.exchange is not None:
                more["peers"] = self.model.exchange.peers
        rows, taps = arch.trunk(
            self.model.params, self.model.config, x, positions, attend, hidden_layers, **more
        )
        kept = tuple(fresh) if stores else ()
        return _window_output(self, state, kept, live, rows, taps, first)

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
        sampling = greedy(axes[0]) if sampling is None else sampling
        keys = None if keys is None else keys.reshape(-1)
        stats = read_stats(
            self.unembed,
            hidden.reshape(-1, width),
            sampling,
            keys,
            forbidden=self.forbidden,
            shard=self.shard,
            one_rounding=self.one_rounding,
        )
        seen = None if first_of is None else constraint.view(first_of)
        if seen is not None:
            stats = self._planned_first(seen, hidden, sampling, keys, stats)
        return jax.tree.map(lambda leaf: leaf.reshape(*axes, *leaf.shape[1:]), stats)

    def _planned_first(
        self,
        seen: constraint.View,
        hidden: Float[Array, "B D"],
        sampling: Sampling,
        keys: PRNGKeyArray | None,
        stats: TokenStats,
    ) -> TokenStats:
        """Statistics [B] with the tokens that the windows' first cells take in their grammars."""
        read = read_classes(
            self.unembed,
            hidden,
            seen,
            sampling,
            keys,
            forbidden=self.forbidden,
            shard=self.shard,
        )
        kind = seen.kind.at[:, 0].set(constraint.HOLE)
        W = kind.shape[1]
        padded = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, W - 1), (0, 0))), read)
        first = jnp.broadcast_to((jnp.arange(W) == 0)[None], kind.shape)
        draw = None
        if keys is not None:
            every = jnp.broadcast_to(keys[:, None], kind.shape)
            draw = constraint.Draw(sampling.temperature > 0, every)
        planned = constraint.plan(seen.replace(kind=kind), padded, first, draw)
        token, score = planned.token[:, 0], planned.confidence[:, 0]
        return _with_plan(stats, token, score, seen.bound, seen.grammar.by_mass)

    @property
    def unembed(self) -> Callable[[Array], Array]:
        """Hidden rows [... D] to float32 logits [... V]; a `Head` where the network has one.

        Where devices share the vocabulary, logits are of a device's own ids; see `whole`.
        """
        params, cfg, unembed = self.model.params, self.model.config, self.model.arch.unembed
        if isinstance(unembed, Unembed):
            return unembed.head(params, cfg)
        return functools.partial(unembed, params, cfg)

    @property
    def tied_head(self) -> Head:
        """The head, if its weights are the embedding's."""
        head = self.unembed
        if not isinstance(head, Head) or head.embed_scale is None:
            raise ValueError(
                f"model {self.pool!r} has a head that is not its embedding, of which predict reads "
                "no expectation; use out.soft()"
            )
        return head

    def drawn_law(
        self, hidden: Float[Array, "B *X D"], sampling: Sampling
    ) -> Float[Array, "B *X V"]:
        """The law that hidden rows are drawn from, as logits; see the protocol."""
        *axes, width = hidden.shape
        per_row = math.prod(axes[1:])
        logits = self.whole(self.unembed(hidden.reshape(-1, width)))
        never = self.forbidden(jnp.arange(logits.shape[-1], dtype=jnp.int32))
        law = drawn_law(
            jnp.where(never, -jnp.inf, logits),
            temperature=jnp.repeat(sampling.temperature, per_row),
            top_k=jnp.repeat(sampling.top_k, per_row),
            top_p=jnp.repeat(sampling.top_p, per_row),
        )
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

    def forbidden(self, ids: Any, allow: tuple[int, ...] = ()) -> Any:
        """Ids never predicted; see `Model.forbidden`."""
        return self.model.forbidden(ids, allow)

    def _embed_inputs(
        self, state: DecodeState, inputs: Any, first: Int[Array, " B"] | int, size: int
    ) -> Float[Array, "B T D"]:
        """Input rows of the `size` cells from `first` on."""
        buffer = state.buffer
        B, K, S = buffer.tokens.shape

        def narrow(cells: Array) -> Array:
            return _narrowed(cells.reshape(B, K * S, *cells.shape[3:]), first, size)

        if isinstance(inputs, Conditioned):
            return self._conditioned(*map(narrow, (inputs.ids, inputs.expected, inputs.on)))
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
        return narrow(rows)

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
        first: Int[Array, " B"] | int,
    ) -> "WindowOutput":
        arch, B = self.model.arch, positions.shape[0]
        if arch.context_kv is None:
            raise ValueError(f"model {self.pool!r} takes no tapped features; give it token inputs")
        vectors = taps.vectors.reshape(B, -1, taps.vectors.shape[-1])
        vectors = _narrowed(vectors, first, positions.shape[1])
        fresh = arch.context_kv(self.model.params, self.model.config, vectors, positions)
        return _window_output(self, state, tuple(fresh), live, vectors, (), first)


def _by_row_or_block(value: Any, num_rows: int) -> Array:
    """One value a row [B], or one for each of its blocks [B K]."""
    value = jnp.asarray(value)
    return value if value.ndim > 1 else jnp.broadcast_to(value, (num_rows,))


def _narrowed_cells(
    where: Bool[Array, "B K S"] | np.ndarray, width: int
) -> tuple[Int[Array, " B"] | int, Bool[Array, "B K S"] | np.ndarray]:
    """The first of the cells `where`, and those less than `width` behind it.

    If they are known while tracing and the same in all rows, both results are NumPy's. Narrowing is
    then a slice and widening a pad, which XLA fuses.
    """
    flat = where.reshape(len(where), -1)
    cell = np.arange(flat.shape[1], dtype=np.int32)[None]
    if isinstance(flat, np.ndarray) and (flat == flat[:1]).all() and flat[0].sum() >= width:
        start = int(flat[0].argmax())
        return start, (flat & (cell < start + width)).reshape(where.shape)
    first = jnp.argmax(flat, axis=1).astype(jnp.int32)
    return first, (flat & (cell < first[:, None] + width)).reshape(where.shape)


def _narrowed(rows: Float[Array, "B W ..."], first: Int[Array, " B"] | int, width: int) -> Array:
    """The rows of so many cells from `first` on; any row for those past the window."""
    if isinstance(first, int):
        return rows if width == rows.shape[1] else rows[:, first : first + width]
    cell = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    cell = jnp.minimum(cell, rows.shape[1] - 1)
    if rows.ndim == 2:  # keys, say
        return rows[jnp.arange(len(rows))[:, None], cell]
    return jnp.take_along_axis(rows, cell[:, :, None], axis=1)


def _widened(rows: Array, first: Int[Array, " B"] | int, size: int) -> Array:
    """Rows [B T ...] of the cells from `first` on as [B size ...], zero elsewhere.

    A gather, which XLA fuses with its reader; a scatter would be a kernel and a fill of its own.
    """
    if isinstance(first, int):
        behind = size - first - rows.shape[1]
        if size == rows.shape[1]:
            return rows
        return jnp.pad(rows, ((0, 0), (first, behind), *((0, 0),) * (rows.ndim - 2)))
    place = jnp.arange(size, dtype=jnp.int32)[None] - first[:, None]
    place = place.reshape(*place.shape, *(1,) * (rows.ndim - 2))
    held = (place >= 0) & (place < rows.shape[1])
    place = jnp.clip(place, 0, rows.shape[1] - 1)
    return jnp.where(held, jnp.take_along_axis(rows, place, axis=1), jnp.zeros((), rows.dtype))


def _window_output(
    forward: ModelForward,
    state: DecodeState,
    fresh: tuple[tuple[Array, Array], ...],
    live: Bool[Array, "B K S"] | np.ndarray,
    rows: Float[Array, "B T D"],
    taps: tuple[Float[Array, "B T D"], ...],
    first: Int[Array, " B"] | int,
) -> "WindowOutput":
    """Computed rows as rows of the window; a narrow pass fills the cells from `first` on."""
    B, K, S = live.shape
    rows, taps, fresh = jax.tree.map(lambda leaf: _widened(leaf, first, K * S), (rows, taps, fresh))

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
        seen=constraint.view(state),
    )


class WindowOutput(struct.PyTreeNode):
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
    forward: ModelForward = struct.field(pytree_node=False)
    seen: constraint.View | None = None

    def predict(
        self,
        where: Bool[Array, "B K S"] | np.ndarray | None = None,
        sampling: Sampling | None = None,
        keys: PRNGKeyArray | None = None,
        confidence: Literal["drawn", "raw"] = "drawn",
        penalty: tuple[Int[Array, "B K S"], Float[Array, "B K S"]] | None = None,
        num_top: int = 0,
        guide: tuple[Any, float] | None = None,
        width: int | None = None,
        soft: bool = False,
        fixed: Bool[Array, "B K S"] | None = None,
        behind: Int[Array, "B K S"] | None = None,
        allow: tuple[int, ...] = (),
    ) -> TokenStats:
        """Statistics aligned with the cells; see the protocol."""
        B, K, S = self.live.shape
        where = self._predicted() if where is None else where & self._predicted()
        first: Array | int = 0
        if width is not None:
            first, where = _narrowed_cells(where, width)
        T = K * S if width is None else width

        def read(leaf: Array) -> Array:
            """The values of the cells that are read out, flattened."""
            flat = leaf.reshape(B, K * S, *leaf.shape[3:])
            return _narrowed(flat, first, T).reshape(B * T, *flat.shape[2:])

        rows = read(self._aligned())
        sampling = greedy(B) if sampling is None else sampling
        cell_keys, keys = keys, None if keys is None else read(keys)
        forbidden = functools.partial(self.forward.forbidden, allow=allow)
        if penalty is not None:
            penalty = read(penalty[0]), read(penalty[1])
        of_rows = {
            "forbidden": forbidden,
            "penalty": penalty,
            "confidence": confidence,
            "guide": None if guide is None else (read(guide[0]._aligned()), guide[1]),
            "shard": self.forward.shard,
        }
        unembed = self.forward.unembed

        def as_cells(leaf: Array) -> Array:
            rows = leaf.reshape(B, T, *leaf.shape[1:])
            return _widened(rows, first, K * S).reshape(B, K, S, *leaf.shape[1:])

        def widened(leaves: Any) -> Any:
            return jax.tree.map(lambda leaf: _widened(leaf, first, K * S), leaves)

        seen = self.seen
        wanted: Any = where
        if seen is not None:
            wanted = jnp.broadcast_to(where, (B, K, S)).reshape(B, K * S)
            if fixed is not None:
                is_free = (seen.kind == constraint.KNOWN) & ~fixed.reshape(B, K * S)
                seen = seen.replace(kind=jnp.where(is_free, constraint.HOLE, seen.kind))

        def planned(
            seen: constraint.View, keys: Array | None, cell_keys: Array | None
        ) -> constraint.Plan:
            classes = widened(read_classes(unembed, rows, seen, sampling, keys, **of_rows))
            draw = None
            if cell_keys is not None:
                draw = constraint.Draw(sampling.temperature > 0, cell_keys.reshape(B, K * S))
            if behind is None:
                return constraint.plan(seen, classes, wanted, draw)
            return constraint.plan_each(seen, classes, wanted, behind.reshape(B, K * S), draw)

        def in_one_pass(
            seen: constraint.View,
        ) -> tuple[TokenStats, constraint.Plan, constraint.Plan]:
            """Both by kernels; also the plan of tokens that are not drawn."""
            how = {"forbidden": forbidden, "penalty": penalty, "num_top": num_top}
            head = cast(Head, unembed)

            def alike() -> tuple[TokenStats, constraint.Plan]:
                stats, ids = read_ids(head, rows, seen.grammar, **how)
                return stats, constraint.plan_of_ids(seen, widened(ids), wanted)

            # A slot's path must not depend on its neighbours: each has its own way in both.
            plain = is_plain(sampling)
            mine = plain & ~(seen.bound & seen.grammar.by_mass)

            def mixed() -> tuple[TokenStats, constraint.Plan, constraint.Plan]:
                stats, likeliest = alike()
                drawn = read_stats(
                    lambda rows: head(rows), rows, sampling, keys, num_top=num_top, **of_rows
                )
                stats = by_row(jnp.repeat(plain, T), stats, drawn)
                others = seen.replace(bound=seen.bound & ~mine)
                plan = by_row(mine, likeliest, planned(others, keys, cell_keys))
                return stats, plan, likeliest

            def one() -> tuple[TokenStats, constraint.Plan, constraint.Plan]:
                stats, plan = alike()
                return stats, plan, plan

            return jax.lax.cond(jnp.all(mine), one, mixed)

        plan = likeliest = None
        if soft:
            if penalty is not None or guide is not None or confidence != "drawn" or num_top > 1:
                raise ValueError(
                    "soft=True reads the law drawn from and its likeliest token alone; leave "
                    "penalty, guide, confidence and num_top above 1 out"
                )
            head = self.forward.tied_head
            how = {"forbidden": forbidden, "num_top": num_top, "shard": self.forward.shard}
            stats = read_expected(head, rows, sampling, keys, **how)
        elif (
            seen is None
            or behind is not None
            or guide is not None
            or self.forward.shard is not None
            or not reads_ids(unembed, rows, num_top)
        ):
            how = of_rows | {"num_top": num_top, "one_rounding": self.forward.one_rounding}
            stats = read_stats(unembed, rows, sampling, keys, **how)
        else:
            stats, plan, likeliest = in_one_pass(seen)
        stats = jax.tree.map(as_cells, stats)
        expected = stats.soft
        if seen is not None:
            plan = planned(seen, keys, cell_keys) if plan is None else plan
            bound = seen.bound[:, None, None]
            if fixed is not None and num_top:
                likeliest = planned(seen, None, None) if likeliest is None else likeliest
                likeliest = likeliest.token.reshape(B, K, S)
                takes = bound & (likeliest >= 0) & (stats.token != NO_TOKEN)
                top = jnp.where(takes, likeliest, stats.top_ids[..., 0])
                stats = stats.replace(top_ids=stats.top_ids.at[..., 0].set(top))
            token, score = plan.token.reshape(B, K, S), plan.confidence.reshape(B, K, S)
            by_mass = seen.grammar.by_mass[:, None, None]
            stats = _with_plan(stats, token, score, bound, by_mass)
        return stats.replace(
            token=jnp.where(where, stats.token, 0),
            confidence=jnp.where(where, stats.confidence, -jnp.inf),
            entropy=jnp.where(where, stats.entropy, jnp.inf),
            soft=None if expected is None else jnp.where(where[..., None], expected, 0.0),
        )

    def soft(self, temperature: float | Float[Array, "B 1 1"] = 1.0) -> Float[Array, "B K S D"]:
        """Expected embedding under the tempered law of each cell."""
        B, K, S = self.live.shape
        forward = self.forward
        per_cell = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (B, K, S)).reshape(-1)
        size = forward.vocab_size if forward.shard is None else len(forward.model.params["embed"])
        every = forward._own_rows(jnp.arange(size, dtype=jnp.int32))
        rows = read_soft(
            forward.unembed,
            every,
            self._aligned().reshape(B * K * S, -1),
            per_cell,
            forward.forbidden,
            forward.shard,
        )
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
        slots = page_slots(
            state.page_table,
            cells(self.positions),
            stored & running[:, None] & sound,
            num_pages,
            page_size,
        )
        lost = jnp.any(stored & ~sound, axis=1) & running
        fresh = jax.tree.map(lambda leaf: leaf[:, span], self.fresh)
        state = state.replace(
            pools={**state.pools, name: write_rows(pool, fresh, slots)},
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

    def _predicted(self) -> Bool[Array, "B K S"] | np.ndarray:
        """Cells that a row predicts."""
        if not self.forward.model.config.shift:
            return self.live
        B, K, S = self.live.shape
        flat = self.live.reshape(B, K * S)
        xp = np if isinstance(flat, np.ndarray) else jnp
        left = xp.concatenate([xp.ones_like(flat[:, :1]), flat[:, :-1]], axis=1)
        return left.reshape(B, K, S)


def _with_plan(
    stats: TokenStats, token: Array, score: Array, bound: Array, by_mass: Array
) -> TokenStats:
    """Statistics with the plan's tokens, where it has one that the readout does not."""
    takes = bound & (token >= 0) & ((token != stats.token) | by_mass) & (stats.token != NO_TOKEN)
    return stats.replace(
        token=jnp.where(takes, token, stats.token),
        confidence=jnp.where(takes, jnp.exp(score), stats.confidence),
    )


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
