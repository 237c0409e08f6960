"""The engine's programs: pure functions over one donated state, compiled for buckets of sizes.

`admit` puts a fresh request into its slot, `prefill` computes one piece of its prefix, `begin` lets
it decode without one, `decode` gathers a bucket of slots, steps them and scatters them back,
`restore` puts a fetched slot back, `copy_page` makes a private copy. Slot leaves are kept at
`max_num_seqs`, pools never move, and the page table is an argument: the host owns it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dllm_jax.engine.admission import STOP_WIDTH
from dllm_jax.loading.model import Model
from dllm_jax.runner import decode as decoding
from dllm_jax.runner import packing
from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.protocol import SlotSpec, Strategy
from dllm_jax.strategies.core.state import EMPTY, ERROR, RUNNING, DecodeState, Limits, Sampling

# Columns of a fetched row before its new tokens: start, finish, nfe, output length, that length
# before the chunk, steps.
HEAD = 6
NUMBERS = 7  # words of a request before its stop ids
# What a call brings comes as one array: each takes 50 us to get to an H200.
PIECE = 5  # words of a piece of a prompt before its ids
ASKED = 4  # words of a row to decode before its pages


class Programs(struct.PyTreeNode):
    """Everything the programs are made from but the state: weights are leaves, the rest static."""

    model: Model
    aux: dict[str, Model]
    strategy: Strategy
    spec: SlotSpec = struct.field(pytree_node=False)
    kept: int = struct.field(pytree_node=False)
    max_output: int = struct.field(pytree_node=False)
    most_new: int = struct.field(pytree_node=False)
    implementation: str | None = struct.field(pytree_node=False)

    def forward(self) -> ModelForward:
        """The model as the strategy sees it."""
        return ModelForward(
            self.model,
            aux=self.aux,
            implementation=self.implementation,
            reads_ahead=self.strategy.needs.provisional_cache != "none",
        )


class _Asked(struct.PyTreeNode):
    """What of a request stays the same while it runs, one row."""

    sampling: Sampling
    limits: Limits
    knobs: dict[str, Array]
    keys: Array


def _given(programs: Programs, ints: Int[Array, " X"]) -> Int[Array, "1 W"] | None:
    """Ids by cell of the window behind the prompt, -1 elsewhere; the last words of a request."""
    if not programs.strategy.needs.prompt.in_window:
        return None
    return ints[None, -programs.spec.num_blocks * programs.spec.block_size :]


def _asked(
    programs: Programs, ints: Int[Array, " X"], floats: Float[Array, " Y"], knobs: tuple[str, ...]
) -> _Asked:
    given = _given(programs, ints)
    seed = jax.lax.bitcast_convert_type(ints[5], jnp.uint32)
    key = jax.random.fold_in(jax.random.key(seed), ints[6])
    return _Asked(
        sampling=Sampling(temperature=floats[:1], top_k=ints[2:3], top_p=floats[1:2]),
        limits=Limits(
            stop_ids=ints[NUMBERS : NUMBERS + STOP_WIDTH][None],
            max_nfe=ints[3:4],
            max_run=ints[4:5],
            given=None if given is None else given >= 0,
        ),
        knobs={name: floats[2 + i][None] for i, name in enumerate(knobs)},
        keys=key[None],
    )


def _fresh(
    programs: Programs, ints: Int[Array, " X"], floats: Float[Array, " Y"], knobs: tuple[str, ...]
) -> DecodeState:
    """One fresh slot, with a leading axis of 1."""
    spec = dataclasses.replace(programs.spec, num_slots=1)
    K, S = spec.num_blocks, spec.block_size
    tail = ints[NUMBERS + STOP_WIDTH :][: K * S][None]
    given = _given(programs, ints)
    buffer = driver.admit_window(
        programs.strategy.needs, tail, ints[:1], ints[1:2], K, S, given=given
    )
    asked = _asked(programs, ints, floats, knobs)
    return decoding.new_slots(
        programs.strategy, spec, programs.kept, asked, buffer, programs.max_output
    )


def new_state(
    programs: Programs, num_pages: int, page_size: int, knobs: tuple[str, ...]
) -> DecodeState:
    """Every slot empty, and pools without content."""
    W = programs.spec.num_blocks * programs.spec.block_size
    ints = jnp.zeros((NUMBERS + STOP_WIDTH + 2 * W,), jnp.int32).at[-W:].set(-1)
    one = _fresh(programs, ints, jnp.zeros((2 + len(knobs),), jnp.float32), knobs)
    one = one.replace(finish=jnp.full_like(one.finish, EMPTY))
    slots = jax.tree.map(lambda leaf: jnp.repeat(leaf, programs.spec.num_slots, axis=0), one)
    pools = decoding.new_pools(
        programs.strategy, programs.model, programs.aux, num_pages, page_size
    )
    return slots.replace(pools=pools)


make_state = jax.jit(new_state, static_argnames=("num_pages", "page_size", "knobs"))


def _rows(state: DecodeState, rows: Int[Array, " R"]) -> DecodeState:
    """Some slots of the state, pools included."""
    taken = jax.tree.map(lambda leaf: leaf[rows], state.replace(pools=None))
    return taken.replace(pools=state.pools)


def _put_rows(state: DecodeState, rows: Int[Array, " R"], new: DecodeState) -> DecodeState:
    """The state with some slots, and the pools, of `new`."""
    put = jax.tree.map(
        lambda leaf, row: leaf.at[rows].set(row, mode="drop"),
        state.replace(pools=None),
        new.replace(pools=None, rows=None, page_table=None),
    )
    return put.replace(pools=new.pools)


@functools.partial(jax.jit, static_argnames=("knobs",), donate_argnames=("state",))
def admit(programs, state, requests, knobs):
    """Fresh requests in their slots, which keep what lasts.

    Args:
        requests: [A X]: a slot (past the last: nobody's), whether it decodes at once or waits for
            its prefill, and the numbers of a placement, those that are no whole ones by their bits.
    """
    split = requests.shape[1] - 2 - len(knobs)
    slots, ints = requests[:, :2], requests[:, 2:split]
    floats = jax.lax.bitcast_convert_type(requests[:, split:], jnp.float32)

    def one(ints: Array, floats: Array) -> DecodeState:
        return jax.tree.map(lambda leaf: leaf[0], _fresh(programs, ints, floats, knobs))

    fresh = jax.vmap(one)(ints, floats)
    lasting = {name: leaf[slots[:, 0]] for name, leaf in state.carry.lasting.items()}
    fresh = fresh.replace(
        finish=jnp.where(slots[:, 1] > 0, RUNNING, EMPTY).astype(jnp.int32),
        carry=fresh.carry.replace(lasting=lasting),
    )
    return _put_rows(state, slots[:, 0], fresh.replace(pools=state.pools)), None


@functools.partial(jax.jit, static_argnames=("knobs", "slot_layout"), donate_argnames=("state",))
def restore(programs, state, slot, ints, floats, saved, output, knobs, slot_layout):
    """A fetched slot (`words`) and what it had emitted, back in a slot."""
    old = _rows(state, slot[None])
    slot_leaves = packing.unpack(saved, slot_layout)
    carry = slot_leaves["carry"].replace(lasting=old.carry.lasting)
    # Recomputing its prefix may have met a value that is not finite.
    finish = jnp.where(old.finish == ERROR, ERROR, slot_leaves["finish"])
    asked = _asked(programs, ints, floats, knobs)
    new = old.replace(
        **{**slot_leaves, "finish": finish, "carry": carry},
        sampling=asked.sampling,
        limits=asked.limits,
        knobs=asked.knobs,
        keys=asked.keys,
        output=output[None],
    )
    return _put_rows(state, slot[None], new), None


# For products of many rows XLA's autotuner takes its own Triton kernels now and then, by times that
# whatever else the host does disturbs: 8 slots of SDAR-1.7B took 6.5 to 7.2 ms a step by what it
# chose (benchmarks/LOG.md, "Products of many rows"; prefill of fewer than 1,024 rows: not timed).
_NO_TRITON_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}


@functools.partial(
    jax.jit,
    static_argnames=("size", "kind"),
    donate_argnames=("state",),
    compiler_options=_NO_TRITON_PRODUCTS,
)
def prefill(programs, state, pieces, size, kind):
    """One prefill pass of distinct slots.

    Args:
        pieces: [A 5+size+C]: slot, first, end, live_end, last; ids; its row of the page table.

    Returns:
        The state, and the boundary row of the first one.
    """
    slots, first, end, live_end, last = (pieces[:, i] for i in range(PIECE))
    row = _rows(state, slots)
    broken = row.finish == ERROR
    pages = pieces[:, PIECE + size :]
    row = row.replace(finish=jnp.full_like(row.finish, RUNNING), page_table=pages)
    done = decoding.prefill_pass(
        programs.strategy,
        programs.forward(),
        row,
        pieces[:, PIECE : PIECE + size],
        first,
        end,
        live_end,
        last > 0,
        kind,
    )
    broken |= done.finish == ERROR
    finish = jnp.where(broken, ERROR, jnp.where(last > 0, RUNNING, EMPTY)).astype(jnp.int32)
    return _put_rows(state, slots, done.replace(finish=finish)), done.boundary[0]


@functools.partial(jax.jit, donate_argnames=("state",))
def begin(programs, state, slot, boundary):
    """Let a slot decode, with the row before its window."""
    row = _rows(state, slot[None])
    row = row.replace(
        finish=jnp.full_like(row.finish, RUNNING),
        boundary=boundary[None],
        rows=jnp.zeros((1, 0, programs.kept), programs.spec.dtype),
    )
    done = decoding.absorb_nothing(programs.strategy, programs.forward(), row)
    return _put_rows(state, slot[None], done), None


@functools.partial(jax.jit, donate_argnames=("state",))
def copy_page(programs, state, source, target):
    """One page copied in every pool."""
    pools = jax.tree.map(lambda pages: pages.at[target].set(pages[source]), state.pools)
    return state.replace(pools=pools), None


def _decode(programs, state, asked):
    """Steps of some slots.

    Args:
        asked: [R 4+C]: distinct slots and their rows of the page table; between them, the same in
            every row, how many of them decode, steps, whether to stop early.

    Returns:
        The state, and a row of words a slot: the columns of `HEAD`, new tokens, the slot.
    """
    rows, pages = asked[:, 0], asked[:, ASKED:]
    num_active, num_steps, early = asked[0, 1], asked[0, 2], asked[0, 3] > 0
    R = rows.shape[0]
    spec = dataclasses.replace(programs.spec, num_slots=R)
    W = spec.num_blocks * spec.block_size
    forward = programs.forward()
    bucket = _rows(state, rows)
    active = jnp.arange(R) < num_active
    idle_finish = bucket.finish
    wished = bucket.sampling
    bucket = bucket.replace(
        # Rows that fill the bucket up are other requests in their prefill, or nobody.
        finish=jnp.where(active, bucket.finish, EMPTY),
        # What they ask for is nobody's wish now: where all rows are greedy, readouts are cheap.
        sampling=Sampling(
            temperature=jnp.where(active, wished.temperature, 0.0),
            top_k=jnp.where(active, wished.top_k, 0),
            top_p=jnp.where(active, wished.top_p, 1.0),
        ),
        page_table=pages,
        rows=jnp.zeros((R, W, programs.kept), spec.dtype),
    )
    began = bucket.finish == RUNNING
    before = bucket.output_len

    def go_on(step: Array, now: DecodeState) -> Array:
        ended = jnp.any(began & (now.finish != RUNNING))
        more = (step < num_steps) & driver.any_running(now) & ~(early & ended)
        if programs.most_new == programs.max_output:
            return more
        # What a row emits must fit behind `HEAD`; the first step's always does.
        return more & ~jnp.any(now.output_len - before + W > programs.most_new)

    steps, bucket = driver.decode_while(go_on, programs.strategy, forward, bucket, spec)
    bucket = bucket.replace(finish=jnp.where(active, bucket.finish, idle_finish))
    index = before[:, None] + jnp.arange(programs.most_new)[None]
    index = jnp.minimum(index, bucket.output.shape[1] - 1)
    new_tokens = jnp.take_along_axis(bucket.output, index, axis=1)
    head = (
        bucket.buffer.start,
        bucket.finish,
        bucket.buffer.nfe,
        bucket.output_len,
        before,
        jnp.full_like(before, steps),
    )
    packed = jnp.concatenate(
        [jnp.stack(head, axis=1), new_tokens, packing.pack(packing.kept_part(bucket))], axis=1
    )
    # What a request asked for does not change: it need not be written back.
    same = state.replace(pools=None, sampling=None, limits=None, knobs=None, keys=None)
    put = _put_rows(same, rows, bucket.replace(sampling=None, limits=None, knobs=None, keys=None))
    kept = {name: getattr(state, name) for name in ("sampling", "limits", "knobs", "keys")}
    return put.replace(**kept), packed


decode = jax.jit(_decode, donate_argnames=("state",))

# XLA records a step's launches in command buffers and updates them whenever a program is called
# anew: 2 to 4 ms, which few slots win back in every step (each 17 % faster on an H200) and many do
# not.
decode_many = jax.jit(
    _decode,
    donate_argnames=("state",),
    compiler_options={"xla_gpu_enable_command_buffer": "", "xla_gpu_graph_min_graph_size": 10**6}
    | _NO_TRITON_PRODUCTS,
)
