"""A Pallas Triton kernel for NVIDIA GPUs: the head's product, read out without writing logits.

A program is one tile of rows times one tile of ids. Its logits stay in registers; it writes a
`Part` for each row, and XLA joins the parts in one pass. Up to 128 rows are one tile, so that the
head is read from memory once. With more rows, adjacent programs share ids and read the head from
the cache.

JAX has deprecated Pallas Triton. No public type names it, so deleting this file removes it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from .head import Fp8Head
from .result import IdClasses, IdReadout, Part, TokenReadout, finish, joined, joined_maxima

_LEAST_SIDE = 16  # least size of each dimension of a Triton product
MAX_TOP = 4
_LOG2_E = 1.4426950408889634
_LEAST_DOWN = -200.0  # 2**-200 is 0 in float32, and 0 times it is 0; 0 times -inf would be NaN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tile of one program; sides are powers of two.

    Attributes:
        rows: Hidden rows.
        ids: Ids of the vocabulary.
        depth: Components of a row in one iteration.
    """

    rows: int = 128
    ids: int = 128
    depth: int = 64
    num_warps: int = 8
    num_stages: int = 3

    def fit(self, num_ids: int, width: int) -> "Tiling":
        """Shrink the tile to the vocabulary and to a depth that divides the width of the rows."""
        depth = self.depth
        while width % depth:
            depth //= 2
        ids = min(self.ids, pl.next_power_of_2(num_ids + 1) // 2)
        return dataclasses.replace(self, ids=ids, depth=depth)


def unsupported(hidden: Array, head: Array | Fp8Head, num_top: int) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    capability = getattr(jax.devices()[0], "compute_capability", "0.0")
    if isinstance(head, Fp8Head) and float(capability) < 8.9:
        return "needs an NVIDIA GPU of the Ada kind or later for a head in 8 bits"
    return unsupported_arguments(hidden, head, num_top)


def unsupported_arguments(hidden: Array, head: Array | Fp8Head, num_top: int) -> str | None:
    """Why no device can take these arguments, or None."""
    V, D = head.shape
    if not len(hidden):
        return "needs at least one row"
    kind = hidden.dtype if isinstance(head, Fp8Head) else head.dtype
    if hidden.dtype not in (jnp.bfloat16, jnp.float16) or kind != hidden.dtype:
        return (
            f"needs rows and head in bfloat16 or float16, both alike, got {hidden.dtype} and {kind}"
        )
    if D % _LEAST_SIDE or V < _LEAST_SIDE:
        return f"needs a width that is a multiple of {_LEAST_SIDE} and as many ids, got {D=}, {V=}"
    if num_top > MAX_TOP:
        return f"names at most {MAX_TOP} likeliest ids, got {num_top=}"
    return None


def choose_tiling(num_rows: int) -> Tiling:
    """The tile measured to be fastest for this number of rows; see `api.TRITON_ROWS`."""
    if num_rows <= 32:
        rows = max(_LEAST_SIDE, pl.next_power_of_2(num_rows))
        return Tiling(rows=rows, ids=128, depth=128, num_warps=4, num_stages=3)
    rows = min(128, pl.next_power_of_2(num_rows))
    # With many rows, products hide the loads: one stage less leaves room for more programs.
    return Tiling(rows=rows, ids=256, depth=64, num_stages=4 if num_rows <= 256 else 3)


def read(
    hidden: Array,
    head: Array | Fp8Head,
    forbidden: Array,
    *,
    scale: float,
    cap: float | None,
    penalty: tuple[Array, Array] | None,
    num_top: int,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> TokenReadout:
    """See `api.token_readout`; `interpret` runs the kernel as plain XLA, for tests."""
    named = _named(hidden, head, forbidden, penalty)
    run = functools.partial(_run, scale=scale, cap=cap, num_top=num_top, interpret=interpret)
    return run(named, None, tiling=_fitted(tiling, hidden, head))[0]


def read_classes(
    hidden: Array,
    head: Array | Fp8Head,
    forbidden: Array,
    classes: IdClasses,
    *,
    scale: float,
    cap: float | None,
    penalty: tuple[Array, Array] | None,
    num_top: int,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[TokenReadout, IdReadout]:
    """See `api.class_readout`; `interpret` as in `read`."""
    named = _named(hidden, head, forbidden, penalty)
    run = functools.partial(_run, scale=scale, cap=cap, num_top=num_top, interpret=interpret)
    return run(named, classes, tiling=_fitted(tiling, hidden, head))


def _fitted(tiling: Tiling | None, hidden: Array, head: Array | Fp8Head) -> Tiling:
    tiling = choose_tiling(len(hidden)) if tiling is None else tiling
    return tiling.fit(*head.shape)


def _named(
    hidden: Array, head: Array | Fp8Head, forbidden: Array, penalty: tuple[Array, Array] | None
) -> dict[str, Array]:
    rows = head.values if isinstance(head, Fp8Head) else head
    named = {"hidden": hidden, "head": rows, "forbidden": forbidden.astype(jnp.int8)}
    if isinstance(head, Fp8Head):
        named["scales"] = head.scales
    if penalty is not None:
        named["penalty_ids"], named["penalties"] = penalty
    return named


@functools.partial(jax.jit, static_argnames=("scale", "cap", "num_top", "tiling", "interpret"))
def _run(named, classes, *, scale, cap, num_top, tiling, interpret):
    """One launch, and the merge of its parts: a `TokenReadout`, and an `IdReadout` or None."""
    R, V = len(named["hidden"]), len(named["head"])
    tiles = -(-V // tiling.ids)
    shapes = {
        name: jax.ShapeDtypeStruct((R, tiles), jnp.int32 if name == "token" else jnp.float32)
        for name in Part._fields
    }
    if num_top:
        shapes["top_logits"] = jax.ShapeDtypeStruct((R, tiles, num_top), jnp.float32)
        shapes["top_ids"] = jax.ShapeDtypeStruct((R, tiles, num_top), jnp.int32)
    if classes is not None:
        named = named | {"codes": classes.codes, "num_wide": classes.num_wide}
        wide = R, classes.wide.shape[1], tiles
        shapes["narrow"] = jax.ShapeDtypeStruct((R, classes.narrow.shape[1]), jnp.float32)
        shapes["wide"] = jax.ShapeDtypeStruct(wide, jnp.float32)
        shapes["wide_token"] = jax.ShapeDtypeStruct(wide, jnp.int32)

    def body(*refs):
        _read(
            dict(zip(named, refs, strict=False)),
            dict(zip(shapes, refs[len(named) :], strict=True)),
            logit_of=functools.partial(_logit, scale=scale, cap=cap),
            num_top=num_top,
            tiling=tiling,
        )

    out = pl.pallas_call(
        body,
        out_shape=list(shapes.values()),
        grid=(-(-R // tiling.rows), tiles),
        compiler_params=pltriton.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name="token_readout",  # `dllm_jax.bench.head` searches for this name
    )(*named.values())
    parts = dict(zip(shapes, out, strict=True))
    of_ids = {n: parts.pop(n) for n in ("narrow", "wide", "wide_token") if n in parts}
    # Of equal logits `top_k` takes the first, and candidates are sorted by id.
    if num_top:
        among = parts.pop("top_logits").reshape(R, -1)
        top_logits, place = jax.lax.top_k(among, num_top)
        top_ids = jnp.take_along_axis(parts.pop("top_ids").reshape(R, -1), place, axis=1)
        top_ids = jnp.minimum(top_ids, V - 1)  # a row of NaN has no valid id
    else:
        top_logits, top_ids = jnp.zeros((R, 0), jnp.float32), jnp.zeros((R, 0), jnp.int32)
    whole = joined(Part(**parts))
    read = finish(whole, top_logits, top_ids)
    if classes is None:
        return read, None
    wide, token = joined_maxima(of_ids["wide"], of_ids["wide_token"], axis=2)
    return read, IdReadout(of_ids["narrow"], wide, token, whole.peak + jnp.log(whole.mass))


def _logit(product: Array, *, scale: float, cap: float | None) -> Array:
    logit = product if scale == 1.0 else product * scale
    return logit if cap is None else cap * jnp.tanh(logit / cap)


def _read(given, out, *, logit_of, num_top, tiling):
    """One program: a tile of rows, a tile of ids."""
    hidden, head = given["hidden"], given["head"]
    R, D = hidden.shape
    rows, ids, depth = tiling.rows, tiling.ids, tiling.depth
    tile = pl.program_id(1)
    place = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    row = jnp.minimum(place, R - 1)
    # The last tile is moved left to end at V; ids of two tiles belong to the earlier one.
    start = jnp.minimum(tile * ids, head.shape[0] - ids)
    token = start + jnp.arange(ids, dtype=jnp.int32)

    def step(i, total):
        column = i * depth
        mine = pltriton.load(hidden.at[_cells(row, column, depth)])
        theirs = pltriton.load(head.at[pl.ds(start, ids), pl.ds(column, depth)])
        return total + pltriton.dot(mine, theirs.astype(mine.dtype).T)

    def wide(values):
        return jnp.broadcast_to(values, (rows, ids))

    product = jax.lax.fori_loop(0, D // depth, step, jnp.zeros((rows, ids), jnp.float32))
    if "scales" in given:
        product *= wide(pltriton.load(given["scales"].at[pl.ds(start, ids)])[None, :])
    logit = logit_of(product)

    shared = token < tile * ids
    banned = shared | (pltriton.load(given["forbidden"].at[pl.ds(start, ids)]) != 0)
    logit = jnp.where(wide(banned[None, :]), -jnp.inf, logit)
    if "penalties" in given:
        which, amount = (pltriton.load(given[n].at[row]) for n in ("penalty_ids", "penalties"))
        logit -= jnp.where(token[None, :] == which[:, None], wide(amount[:, None]), 0.0)

    def lowest(where):
        """The lowest id of each row that satisfies `where`."""
        return jnp.min(jnp.where(where, wide(token[None, :]), jnp.iinfo(jnp.int32).max), axis=1)

    def put(name, values, *column):
        where = (place, *(_all(i, rows) for i in column))
        pltriton.store(out[name].at[where], values, mask=place < R)

    peak = jnp.max(logit, axis=1)
    put("token", lowest(logit == peak[:, None]), tile)
    put("peak", peak, tile)
    # Rows of nothing but -inf have no mass; NaN is kept for the merge.
    down = (logit - jnp.where(peak == -jnp.inf, 0.0, peak)[:, None]) * _LOG2_E
    weight = jnp.exp2(down)
    put("mass", jnp.sum(weight, axis=1), tile)
    spread = jnp.sum(weight * jnp.maximum(down, _LEAST_DOWN), axis=1)
    put("spread", spread * (1.0 / _LOG2_E), tile)
    free = wide(~shared[None, :])
    for i in range(num_top):
        among = jnp.where(free, logit, -jnp.inf)
        best = jnp.max(among, axis=1)
        one = lowest(free & (among == best[:, None]))
        put("top_logits", best, tile, i)
        put("top_ids", one, tile, i)
        free &= token[None, :] != one[:, None]
    if "codes" not in given:
        return
    code, most = _codes(given, row, start, token, tiling)
    free = jnp.broadcast_to(~shared[None, :] & (place < R)[:, None], (rows, ids))
    of_row = jnp.broadcast_to(place[:, None], (rows, ids))
    column = jnp.where(code > 0, code - 1, out["narrow"].shape[1])
    pltriton.store(out["narrow"].at[of_row, column], logit, mask=free & (code > 0))

    def one_class(i, _):
        mine = free & (code == -(i + 1))
        among = jnp.where(mine, logit, -jnp.inf)
        best = jnp.max(among, axis=1)
        put("wide", best, i, tile)
        put("wide_token", lowest(mine & (among == best[:, None])), i, tile)

    jax.lax.fori_loop(0, most, one_class, None)


def _codes(given, row, start, token, tiling):
    """Codes of a tile's ids, by row, and the largest number of wide classes of its rows."""
    (B, _), R = given["codes"].shape, given["hidden"].shape[0]
    of_slot, wide = R // B, (tiling.rows, tiling.ids)
    if B == 1 or of_slot % tiling.rows == 0:  # all rows belong to one slot
        slot = jnp.int32(0) if B == 1 else pl.program_id(0) * tiling.rows // of_slot
        code = pltriton.load(given["codes"].at[slot, pl.ds(start, tiling.ids)])
        code, most = code[None, :], pltriton.load(given["num_wide"].at[slot])
    else:
        slot = row // of_slot
        at = jnp.broadcast_to(slot[:, None], wide), jnp.broadcast_to(token[None, :], wide)
        code = pltriton.load(given["codes"].at[at])
        most = jnp.max(pltriton.load(given["num_wide"].at[slot]))
    return jnp.broadcast_to(code.astype(jnp.int32), wide), most


def _all(index: int | Array, size: int) -> Array:
    return jnp.broadcast_to(jnp.asarray(index, jnp.int32), (size,))


def _cells(row: Array, column: Array, width: int) -> tuple[Array, Array]:
    """Indices of `width` columns of the given rows, all of the tile's shape."""
    shape = (len(row), width)
    columns = column + jnp.arange(width, dtype=jnp.int32)
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(columns[None, :], shape)
