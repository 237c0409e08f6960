"""The programs of the engine: pure functions over one donated state, compiled by bucket sizes.

Slot leaves are kept at `max_num_seqs`, pools never move, and the page table is an argument: the
host owns it.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dllm_jax.engine.layout import SamplingNumbers
from dllm_jax.runner import decode as decoding
from dllm_jax.runner import packing
from dllm_jax.runner.calls import Programs, at_rest, program, specs
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.recording import nothing_written
from dllm_jax.strategies.core.state import EMPTY, ERROR, RUNNING, DecodeState, Limits, Sampling


def _part(programs: Programs, request: Int[Array, " X"], name: str) -> Array:
    """A part of `packing.request_fields`."""
    words = request[programs.request_fields.span[name]]
    if name == "knobs" or name in packing.REALS:
        return jax.lax.bitcast_convert_type(words, jnp.float32)
    return words


def _given(programs: Programs, request: Int[Array, " X"]) -> Int[Array, "1 W"] | None:
    """Ids by cell of the window that the request brings after its prompt, -1 elsewhere."""
    takes = programs.strategy.needs.takes_given
    return _part(programs, request, "given")[None] if takes else None


def _settings(programs: Programs, request: Int[Array, " X"]) -> dict[str, Any]:
    """What stays the same while a request runs, one row: leaves of `DecodeState`."""
    part = functools.partial(_part, programs, request)
    given = _given(programs, request)
    if programs.strategy.needs.starts_filled:
        given = None  # nothing is written over, and no stop id is given
    seed = jax.lax.bitcast_convert_type(part("seed"), jnp.uint32)
    values = part("knobs")
    return {
        "sampling": Sampling(**{name: part(name) for name in SamplingNumbers._fields}),
        "limits": Limits(
            stop_ids=part("stop_ids")[None],
            max_nfe=part("max_nfe"),
            max_run=part("max_run"),
            given=None if given is None else given >= 0,
            given_behind=programs.strategy.needs.pins,
        ),
        "knobs": {name: values[i, None] for i, name in enumerate(programs.knobs)},
        "keys": jax.random.fold_in(jax.random.key(seed[0]), part("fold")[0])[None],
    }


def _fresh(programs: Programs, request: Int[Array, " X"]) -> DecodeState:
    """One fresh slot, with a leading axis of 1."""
    spec = dataclasses.replace(programs.spec, num_slots=1)
    part = functools.partial(_part, programs, request)
    buffer = driver.admit_window(
        programs.strategy.needs,
        spec,
        part("tail")[None],
        part("prompt_len"),
        part("limit"),
        given=_given(programs, request),
    )
    given = _settings(programs, request), buffer, programs.max_output, programs.kept
    slot = driver.new_slots(programs.strategy, spec, *given)
    return slot.replace(written=nothing_written(1, programs.num_kept))


def new_state(programs: Programs, num_pages: int, page_size: int) -> DecodeState:
    """Every slot empty, and pools without content."""

    def own(programs: Programs) -> DecodeState:
        words = programs.request_fields
        request = jnp.zeros((words.size,), jnp.int32).at[words.span["given"]].set(-1)
        slot = _fresh(programs, request)
        slot = slot.replace(finish=jnp.full_like(slot.finish, EMPTY))
        slots = jax.tree.map(lambda leaf: jnp.repeat(leaf, programs.spec.num_slots, axis=0), slot)
        made_from = programs.strategy, programs.model, programs.aux
        pools = decoding.new_pools(*made_from, num_pages, page_size)
        return at_rest(slots.replace(pools=pools))

    split = programs.model.split
    if split is None:
        return own(programs)
    return split.run(own, (programs,), (specs(programs, split),), decoding.state_specs(split))


@functools.cache
def make_state(home: Any) -> Any:
    """`new_state` as a program, on a device that the weights are committed to (None: theirs).

    It reads none of them, so JAX would not know where.
    """
    return jax.jit(new_state, static_argnames=("num_pages", "page_size"), out_shardings=home)


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


def _put_fresh(programs, state, requests):
    """The state with fresh requests in their slots, which keep what lasts.

    Args:
        requests: [A X], `packing.request_fields`. A slot past the last marks a row to ignore; a
            row that does not decode at once waits for its prefill.
    """
    words = programs.request_fields
    slots, decodes = requests[:, words.at["slot"]], requests[:, words.at["decodes"]]
    fresh = jax.vmap(lambda one: jax.tree.map(lambda leaf: leaf[0], _fresh(programs, one)))(
        requests
    )
    lasting = {name: leaf[slots] for name, leaf in state.carry.lasting.items()}
    fresh = fresh.replace(
        finish=jnp.where(decodes > 0, RUNNING, EMPTY).astype(jnp.int32),
        carry=fresh.carry.replace(lasting=lasting),
    )
    return _put_rows(state, slots, fresh.replace(pools=state.pools))


@program()
def admit(programs, state, requests):
    """Fresh requests [A X] in their slots: see `_put_fresh`."""
    return _put_fresh(programs, state, requests), None


def _with_fresh(programs, state, given, num_rows):
    """The state with the fresh requests that a call brings along, and the call's own rows.

    Args:
        given: The rows, then fresh requests as of `_put_fresh`, flat.
    """
    shape = programs.num_fresh, programs.request_fields.size
    rows, fresh = jnp.split(given, (len(given) - math.prod(shape),))
    return _put_fresh(programs, state, fresh.reshape(shape)), rows.reshape(num_rows, -1)


@program()
def restore(programs, state, request, saved, output):
    """A fetched slot and what it had emitted, back in a slot."""
    slot = _part(programs, request, "slot")
    old = _rows(state, slot)
    own = packing.unpack(saved, packing.layout_of(packing.kept_part(old)))
    carry = own["carry"].replace(lasting=old.carry.lasting)
    # Recomputing its prefix may have met a value that is not finite.
    finish = jnp.where(old.finish == ERROR, ERROR, own["finish"])
    own |= _settings(programs, request) | {"finish": finish, "carry": carry}
    return _put_rows(state, slot, old.replace(**own, output=output[None])), None


@program("size", "kind", "num_rows")
def prefill(programs, state, given, size, kind, num_rows):
    """Fresh requests in their slots, and one prefill pass of distinct slots.

    Args:
        given: [A X], `packing.piece_fields`, and fresh requests: see `_with_fresh`.

    Returns:
        The state, and the boundary row of the first one.
    """
    state, pieces = _with_fresh(programs, state, given, num_rows)
    words = packing.piece_fields(size)
    slots, first, end, live_end, last = (pieces[:, words.at[name]] for name in packing.PIECE)
    row = _rows(state, slots)
    broken = row.finish == ERROR
    pages = pieces[:, words.span["pages"]]
    row = row.replace(finish=jnp.full_like(row.finish, RUNNING), page_table=pages)
    done = decoding.prefill_pass(
        programs.strategy,
        programs.forward(),
        row,
        pieces[:, words.span["tokens"]],
        first,
        end,
        live_end,
        last > 0,
        kind,
    )
    broken |= done.finish == ERROR
    finish = jnp.where(broken, ERROR, jnp.where(last > 0, RUNNING, EMPTY)).astype(jnp.int32)
    return _put_rows(state, slots, done.replace(finish=finish)), done.boundary[0]


@program()
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


@program()
def copy_page(programs, state, source, target):
    """One page copied in every pool."""
    pools = jax.tree.map(lambda pages: pages.at[target].set(pages[source]), state.pools)
    return state.replace(pools=pools), None


@program("num_rows")
def decode(programs, state, given, bound: Any = None, *, num_rows):
    """Fresh requests in their slots, and steps of some slots.

    Args:
        given: [R X], `packing.DECODE`: distinct slots and their rows of the page table. All rows
            agree on how many of them decode, on steps, and on whether to stop early. After them
            fresh requests: see `_with_fresh`.
        bound: Which of them have a grammar, in `state.constraint`; None: none has.

    Returns:
        The state, and a row of words a slot: `packing.HEAD`, new tokens, the slot, and with
        grammars the automaton's state; with it what stays on the device, see `packing.pack`.
    """
    grammars, state = state.constraint, state.replace(constraint=None)
    state, requests = _with_fresh(programs, state, given, num_rows)
    words = packing.DECODE
    rows, pages = requests[:, words.at["slot"]], requests[:, words.span["pages"]]
    num_active, num_steps = requests[0, words.at["num_active"]], requests[0, words.at["num_steps"]]
    early = requests[0, words.at["early"]] > 0
    R = rows.shape[0]
    spec = dataclasses.replace(programs.spec, num_slots=R)
    forward = programs.forward()
    bucket = _rows(state, rows)
    active = jnp.arange(R) < num_active
    idle_finish = bucket.finish
    bucket = bucket.replace(
        # The rows that fill up the bucket are empty slots, or requests in their prefill.
        finish=jnp.where(active, bucket.finish, EMPTY),
        # Ignore the sampling settings of inactive rows: readouts of greedy rows alone are cheap.
        sampling=jax.tree.map(
            functools.partial(jnp.where, active), bucket.sampling, Sampling.greedy(R)
        ),
        page_table=pages,
        rows=jnp.zeros((R, programs.window, programs.kept), spec.dtype),
    )
    if grammars is not None:
        bucket = _with_grammars(programs, bucket, grammars, rows, bound & active)
    began = bucket.finish == RUNNING
    before = bucket.output_len

    def go_on(step: Array, now: DecodeState) -> Array:
        ended = jnp.any(began & (now.finish != RUNNING))
        more = (step < num_steps) & driver.any_running(now) & ~(early & ended)
        if programs.most_new == programs.max_output:
            return more
        # The new tokens of a row must fit into what is fetched; those of one step always do.
        return more & ~jnp.any(now.output_len - before + programs.window > programs.most_new)

    steps, bucket = driver.decode_while(go_on, programs.strategy, forward, bucket, spec)
    bucket = bucket.replace(finish=jnp.where(active, bucket.finish, idle_finish))
    index = before[:, None] + jnp.arange(programs.most_new)[None]
    index = jnp.minimum(index, bucket.output.shape[1] - 1)
    new_tokens = jnp.take_along_axis(bucket.output, index, axis=1)
    head = {
        "start": bucket.buffer.start,
        "finish": bucket.finish,
        "nfe": bucket.buffer.nfe,
        "length": bucket.output_len,
        "before": before,
        "steps": jnp.full_like(before, steps),
    }
    head = jnp.stack([head[name] for name in packing.HEAD.at], axis=1)
    slots, far = packing.pack(packing.kept_part(bucket))
    packed = jnp.concatenate([head, new_tokens, slots], axis=1)
    if grammars is not None:
        at = bucket.constraint.at
        packed = jnp.concatenate([packed, at[:, None]], axis=1)
        grammars = grammars.replace(at=grammars.at.at[rows].set(at))
        bucket = bucket.replace(constraint=None)
    # A request's settings do not change: they need not be written back.
    kept = {name: getattr(state, name) for name in decoding.SETTINGS}
    none = dict.fromkeys(kept)
    put = _put_rows(state.replace(pools=None, **none), rows, bucket.replace(**none))
    return put.replace(**kept, constraint=grammars), (packed, far)


def _with_grammars(programs, bucket, grammars, rows, bound):
    """Slots with their grammars; a fresh one absorbs its prompt again, so that first tokens fit."""
    taken = jax.tree.map(lambda leaf: leaf[rows], grammars)
    bucket = bucket.replace(constraint=taken.replace(bound=bound))
    if not programs.strategy.absorbs:
        return bucket
    fresh = bound & (bucket.buffer.nfe == 0) & (bucket.finish == RUNNING)
    return decoding.absorb_nothing(programs.strategy, programs.forward(), bucket, fresh)
