"""What the engine runs on the device: five programs over one donated state, dispatched in order.

`admit` puts a fresh request into its slot, `prefill` computes one piece of its prefix, `decode`
gathers a bucket of slots, steps them and scatters them back, `restore` puts a harvested slot back,
`copy_page` makes a private copy. Slot leaves are kept at `max_num_seqs`, pools never move, and the
page table is an argument: the host owns it.

Nothing here schedules: the host loop (`engine`) says what to run and reads `Harvest`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dllm_jax import decode
from dllm_jax.facts import DeviceFailure, Facts, Placement
from dllm_jax.forward import ModelForward
from dllm_jax.intake import STOP_WIDTH
from dllm_jax.model import Model
from strategies import driver
from strategies.protocol import SlotSpec
from strategies.state import (
    EMPTY,
    ERROR,
    FINISH_REASONS,
    RUNNING,
    DecodeState,
    Limits,
    Sampling,
)

# Columns of a harvested row before its new tokens.
_START, _FINISH, _NFE, _LENGTH, _FROM, _STEPS = range(6)
_HEAD = 6


class Programs(struct.PyTreeNode):
    """Everything the programs are made from but the state: weights are leaves, the rest static."""

    model: Model
    aux: dict[str, Model]
    strategy: Any
    spec: SlotSpec = struct.field(pytree_node=False)
    kept: int = struct.field(pytree_node=False)
    max_output: int = struct.field(pytree_node=False)
    most_new: int = struct.field(pytree_node=False)
    implementation: str | None = struct.field(pytree_node=False)

    def forward(self) -> ModelForward:
        """The model as the strategy sees it."""
        return ModelForward(self.model, aux=self.aux, implementation=self.implementation)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A dispatched decode: what it returns is still being computed."""

    packed: Array


class Harvest:
    """What a decode chunk says of its rows, on the host.

    Attributes:
        start: First position of each window = tokens in the cache.
        finish: Codes of `strategies.state`.
        nfe: Forwards after prefill.
        length: Tokens emitted so far, and before this chunk (`before`).
        steps: Decode steps the chunk ran.
    """

    def __init__(self, packed: np.ndarray, device: "Device"):
        self._packed, self._device = packed, device
        head = packed[:, :_HEAD].T.tolist()
        self.start: list[int] = head[_START]
        self.finish: list[int] = head[_FINISH]
        self.nfe: list[int] = head[_NFE]
        self.length: list[int] = head[_LENGTH]
        self.before: list[int] = head[_FROM]
        self.steps: int = head[_STEPS][0]

    def new_tokens(self, row: int) -> list[int]:
        """Tokens of positions `before` to `length` of the output."""
        count = self.length[row] - self.before[row]
        return self._packed[row, _HEAD : _HEAD + count].tolist()

    def saved(self, row: int) -> np.ndarray:
        """The slot as `Device.restore` takes it; a copy."""
        return self._packed[row, _HEAD + self._device.most_new :].copy()

    def window(self, row: int, length: int) -> tuple[int | None, ...]:
        """Cells behind the first `length` output tokens, None for a hole."""
        slot = self._device.unpack(self._packed[row, _HEAD + self._device.most_new :])
        return provisional(slot, length)


def provisional(slot: Mapping[str, Any], length: int) -> tuple[int | None, ...]:
    """The open cells of a harvested slot behind `length` tokens of output."""
    buffer = slot["buffer"]
    tokens, filled = buffer.tokens.reshape(-1), buffer.filled.reshape(-1)
    first = int(buffer.prompt_len) + length - int(buffer.start)
    is_open = np.repeat(buffer.status != 0, buffer.tokens.shape[-1])
    end = min(len(tokens), int(buffer.limit) - int(buffer.start))
    return tuple(
        int(tokens[i]) if filled[i] else None for i in range(max(first, 0), end) if is_open[i]
    )


class Device:
    """The state on the device and the programs over it.

    Args:
        model: Weights and network.
        strategy: Bare (`split_knobs`).
        aux: Models the strategy needs beside it.
        facts: Sizes; every program is compiled for a bucket of them.
        implementation: Attention back end, None for the best.
    """

    def __init__(
        self,
        model: Model,
        strategy: Any,
        aux: Mapping[str, Model],
        facts: Facts,
        implementation: str | None = None,
    ):
        self.facts = facts
        self._knobs = tuple(sorted(facts.knobs))
        self.most_new = min(facts.max_steps_per_chunk * facts.window, facts.max_model_len)
        self._programs = Programs(
            model=model,
            aux=dict(aux),
            strategy=strategy,
            spec=decode.slot_spec(strategy, model, facts.num_slots),
            kept=decode.boundary_size(strategy, model),
            max_output=facts.max_model_len,
            most_new=self.most_new,
            implementation=implementation,
        )
        self.cost: Any = None  # predicted seconds of programs, once they were timed
        self.compiled: set[tuple[Any, ...]] = set()  # buckets that have run
        self.num_late_compiles = 0
        self._warm = False
        shapes = jax.eval_shape(
            functools.partial(_new_state, num_pages=1, page_size=1, knobs=self._knobs),
            self._programs,
        )
        self._layout = _layout(_kept_part(shapes))
        self.state: DecodeState | None = None
        self.reset()

    # --- the state ----------------------------------------------------------------------------

    def reset(self) -> None:
        """A state with every slot empty and a new pool."""
        self.state = None  # the old pools go before new ones come
        facts = self.facts
        with _failures():
            self.state = _new_state_jit(
                self._programs,
                num_pages=facts.num_pages,
                page_size=facts.page_size,
                knobs=self._knobs,
            )

    def _run(self, key: tuple[Any, ...], program: Callable[..., Any], *args: Any, **static: Any):
        """Run a program over the state; the state it returns replaces the donated one."""
        if key not in self.compiled:
            self.compiled.add(key)
            self.num_late_compiles += self._warm
        state, self.state = self.state, None
        with _failures():
            out = program(self._programs, state, *args, **static)
        self.state, rest = out
        return rest

    # --- requests -----------------------------------------------------------------------------

    def admit(self, slot: int, placement: Placement) -> None:
        """Put a fresh request into a slot; it does not decode until its prefill is done."""
        ints, floats = self._numbers(placement)
        self._run(("admit",), _admit, np.int32(slot), ints, floats, knobs=self._knobs)

    def restore(
        self, slot: int, placement: Placement, saved: np.ndarray, tokens: Sequence[int]
    ) -> None:
        """Put a harvested slot back, with what it had emitted; its pages hold its prefix again."""
        ints, floats = self._numbers(placement)
        output = np.zeros((self._programs.max_output,), np.int32)
        output[: len(tokens)] = tokens
        self._run(
            ("restore",),
            _restore,
            np.int32(slot),
            ints,
            floats,
            saved[None],
            output,
            knobs=self._knobs,
            layout=self._layout,
        )

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        first: int,
        end: int,
        live_end: int,
        last: bool,
        pages: np.ndarray,
        size: int,
        kind: decode.PassKind,
    ) -> Array:
        """Compute and store one piece of a prefix.

        Args:
            tokens: Ids from position `first` on, at most `size`.
            end: First position not stored; `live_end`: first not computed.
            last: Nothing of the prefix is left: the slot decodes from now on.
            pages: The slot's row of the page table, one of the page buckets wide.

        Returns:
            The boundary row after the pass [D], on the device.
        """
        ids = np.zeros((1, size), np.int32)
        ids[0, : len(tokens)] = tokens
        numbers = np.array([slot, first, end, live_end, last], np.int32)
        key = ("prefill", size, len(pages), kind)
        return self._run(key, _prefill, ids, numbers, pages[None], kind=kind)

    def begin(self, slot: int, boundary: Any = None) -> None:
        """Let a slot decode whose prefix needs no computing.

        Args:
            boundary: The row before its window, from `prefill` of the same prefix.
        """
        if boundary is None:
            boundary = np.zeros((self._programs.kept,), self._programs.spec.dtype)
        self._run(("begin",), _begin, np.int32(slot), boundary)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every pool."""
        self._run(("copy",), _copy_page, np.int32(source), np.int32(target))

    # --- decoding -----------------------------------------------------------------------------

    def decode(
        self, rows: np.ndarray, num_active: int, pages: np.ndarray, num_steps: int, early: bool
    ) -> Chunk:
        """Dispatch steps of some slots.

        Args:
            rows: Distinct slots, one of the slot buckets wide; the first `num_active` decode.
            pages: Their rows of the page table, one of the page buckets wide.
            num_steps: Steps at most.
            early: Stop as soon as one of them ends.
        """
        numbers = np.array([num_active, num_steps, early], np.int32)
        packed = self._run(
            ("decode", *pages.shape), _decode, rows, numbers, pages, layout=self._layout
        )
        packed.copy_to_host_async()
        return Chunk(packed)

    def harvest(self, chunk: Chunk) -> Harvest:
        """Wait for a chunk and read it."""
        with _failures():
            return Harvest(np.asarray(chunk.packed), self)

    def unpack(self, saved: np.ndarray) -> dict[str, Any]:
        """A saved slot as named leaves: `buffer` (one row, no slot axis), `finish`, `carry`, ..."""
        leaves = []
        for offset, size, shape, dtype in self._layout.leaves:
            part = saved[offset : offset + size]
            leaves.append(_from_words(part, dtype).reshape(shape))
        return jax.tree.unflatten(self._layout.tree, leaves)

    # --- before the first request -------------------------------------------------------------

    def warm_up(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compile every bucket by running it on empty slots.

        Args:
            progress: Called with what was compiled, how many are done, and of how many.
        """
        facts = self.facts
        kinds = (
            {decode.PASS_KINDS[facts.prompt_mode]} if facts.prompt_mode != "in_window" else set()
        )
        if facts.is_full and not facts.soft_commits:
            kinds.add("blocks")
        work: list[tuple[str, Callable[[], Any]]] = []
        empty = Placement(
            tail=(),
            prompt_len=1,
            limit=1,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            stop_ids=(),
            max_nfe=1,
            max_run=1,
            knobs=facts.knob_values,
            seed=0,
            fold=0,
        )
        saved = np.zeros((self._layout.size,), np.int32)
        work.append(("admit", lambda: self.admit(0, empty)))
        work.append(("restore", lambda: self.restore(0, empty, saved, ())))
        work.append(("begin", lambda: self.begin(0)))
        work.append(("copy", lambda: self.copy_page(0, 0)))
        for columns in facts.page_buckets:
            table = np.full((facts.num_slots, columns), -1, np.int32)
            for kind in sorted(kinds):
                for size in facts.prefill_buckets:
                    work.append(
                        (
                            f"prefill {size} tokens, {columns} pages",
                            functools.partial(
                                self.prefill, 0, (), 0, 0, 0, False, table[0], size, kind
                            ),
                        )
                    )
            for rows in facts.slot_buckets:
                slots = np.arange(rows, dtype=np.int32)
                work.append(
                    (
                        f"decode {rows} slots, {columns} pages",
                        functools.partial(self.decode, slots, 0, table[:rows], 1, False),
                    )
                )
        for done, (name, run) in enumerate(work):
            run()
            if progress:
                progress(name, done + 1, len(work))
        self.wait()
        self._warm = True

    def wait(self) -> None:
        """Until all that was dispatched is done."""
        with _failures():
            jax.block_until_ready(self.state)

    # --- host numbers -------------------------------------------------------------------------

    def _numbers(self, p: Placement) -> tuple[np.ndarray, np.ndarray]:
        """A placement as two arrays: one transfer each, one program for all."""
        W = self.facts.window
        ints = np.zeros((8 + STOP_WIDTH + 2 * W,), np.int32)
        seed = np.array([p.seed], np.uint32).view(np.int32)[0]
        ints[:8] = (
            p.prompt_len,
            p.limit,
            p.top_k,
            p.max_nfe,
            p.max_run,
            seed,
            p.fold,
            len(p.suffix),
        )
        ints[8 : 8 + STOP_WIDTH] = -1
        ints[8 : 8 + len(p.stop_ids)] = p.stop_ids
        ints[8 + STOP_WIDTH : 8 + STOP_WIDTH + len(p.tail)] = p.tail
        ints[8 + STOP_WIDTH + W : 8 + STOP_WIDTH + W + len(p.suffix)] = p.suffix
        floats = np.array(
            [p.temperature, p.top_p, *(p.knobs[name] for name in self._knobs)], np.float32
        )
        return ints, floats


class _failures:
    """Turn what JAX raises when a program fails into `DeviceFailure`."""

    def __enter__(self):
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise DeviceFailure(str(error)) from error


# --- programs ---------------------------------------------------------------------------------


class _Asked(struct.PyTreeNode):
    """What of a request stays the same while it runs, one row."""

    sampling: Sampling
    limits: Limits
    knobs: dict[str, Array]
    keys: Array


def _asked(ints: Int[Array, " X"], floats: Float[Array, " Y"], knobs: tuple[str, ...]) -> _Asked:
    seed = jax.lax.bitcast_convert_type(ints[5], jnp.uint32)
    key = jax.random.fold_in(jax.random.key(seed), ints[6])
    return _Asked(
        sampling=Sampling(temperature=floats[:1], top_k=ints[2:3], top_p=floats[1:2]),
        limits=Limits(
            stop_ids=ints[8 : 8 + STOP_WIDTH][None], max_nfe=ints[3:4], max_run=ints[4:5]
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
    W = K * S
    tail, suffix = ints[8 + STOP_WIDTH :][:W][None], ints[8 + STOP_WIDTH + W :][:W][None]
    buffer = driver.admit_window(
        programs.strategy.needs, tail, ints[:1], ints[1:2], K, S, suffix=(suffix, ints[7:8])
    )
    asked = _asked(ints, floats, knobs)
    return decode.new_slots(
        programs.strategy, spec, programs.kept, asked, buffer, programs.max_output
    )


def _new_state(
    programs: Programs, num_pages: int, page_size: int, knobs: tuple[str, ...]
) -> DecodeState:
    W = programs.spec.num_blocks * programs.spec.block_size
    ints = jnp.zeros((8 + STOP_WIDTH + 2 * W,), jnp.int32)
    one = _fresh(programs, ints, jnp.zeros((2 + len(knobs),), jnp.float32), knobs)
    one = one.replace(finish=jnp.full_like(one.finish, EMPTY))
    slots = jax.tree.map(lambda leaf: jnp.repeat(leaf, programs.spec.num_slots, axis=0), one)
    pools = decode.new_pools(programs.strategy, programs.model, programs.aux, num_pages, page_size)
    return slots.replace(pools=pools)


_new_state_jit = jax.jit(_new_state, static_argnames=("num_pages", "page_size", "knobs"))


def _rows(state: DecodeState, rows: Int[Array, " R"]) -> DecodeState:
    """Some slots of the state, pools included."""
    taken = jax.tree.map(lambda leaf: leaf[rows], state.replace(pools=None))
    return taken.replace(pools=state.pools)


def _put_rows(state: DecodeState, rows: Int[Array, " R"], new: DecodeState) -> DecodeState:
    """The state with some slots, and the pools, of `new`."""
    put = jax.tree.map(
        lambda leaf, row: leaf.at[rows].set(row),
        state.replace(pools=None),
        new.replace(pools=None, rows=None, page_table=None),
    )
    return put.replace(pools=new.pools)


@functools.partial(jax.jit, static_argnames=("knobs",), donate_argnames=("state",))
def _admit(programs, state, slot, ints, floats, knobs):
    fresh = _fresh(programs, ints, floats, knobs)
    # Nothing decodes it before its prefill is done.
    fresh = fresh.replace(finish=jnp.full_like(fresh.finish, EMPTY), pools=state.pools)
    return _put_rows(state, slot[None], fresh), None


@functools.partial(jax.jit, static_argnames=("knobs", "layout"), donate_argnames=("state",))
def _restore(programs, state, slot, ints, floats, saved, output, knobs, layout):
    old = _rows(state, slot[None])
    slot_leaves = _unpacked(saved, layout)
    # Recomputing its prefix may have met a value that is not finite.
    finish = jnp.where(old.finish == ERROR, ERROR, slot_leaves["finish"])
    asked = _asked(ints, floats, knobs)
    new = old.replace(
        **{**slot_leaves, "finish": finish},
        sampling=asked.sampling,
        limits=asked.limits,
        knobs=asked.knobs,
        keys=asked.keys,
        output=output[None],
    )
    return _put_rows(state, slot[None], new), None


@functools.partial(jax.jit, static_argnames=("kind",), donate_argnames=("state",))
def _prefill(programs, state, tokens, numbers, pages, kind):
    slot, first, end, live_end, last = (numbers[i : i + 1] for i in range(5))
    row = _rows(state, slot)
    broken = row.finish == ERROR
    row = row.replace(finish=jnp.full_like(row.finish, RUNNING), page_table=pages)
    done = decode.prefill_pass(
        programs.strategy,
        programs.forward(),
        row,
        tokens,
        first,
        end,
        live_end,
        last > 0,
        kind,
    )
    broken |= done.finish == ERROR
    finish = jnp.where(broken, ERROR, jnp.where(last > 0, RUNNING, EMPTY)).astype(jnp.int32)
    return _put_rows(state, slot, done.replace(finish=finish)), done.boundary[0]


@functools.partial(jax.jit, donate_argnames=("state",))
def _begin(programs, state, slot, boundary):
    row = _rows(state, slot[None])
    row = row.replace(
        finish=jnp.full_like(row.finish, RUNNING),
        boundary=boundary[None],
        rows=jnp.zeros((1, 0, programs.kept), programs.spec.dtype),
    )
    done = decode.absorb_nothing(programs.strategy, programs.forward(), row)
    return _put_rows(state, slot[None], done), None


@functools.partial(jax.jit, donate_argnames=("state",))
def _copy_page(programs, state, source, target):
    pools = jax.tree.map(lambda pages: pages.at[target].set(pages[source]), state.pools)
    return state.replace(pools=pools), None


@functools.partial(jax.jit, static_argnames=("layout",), donate_argnames=("state",))
def _decode(programs, state, rows, numbers, pages, layout):
    num_active, num_steps, early = numbers[0], numbers[1], numbers[2] > 0
    R = rows.shape[0]
    spec = dataclasses.replace(programs.spec, num_slots=R)
    W = spec.num_blocks * spec.block_size
    forward = programs.forward()
    bucket = _rows(state, rows)
    active = jnp.arange(R) < num_active
    idle_finish = bucket.finish
    bucket = bucket.replace(
        # Rows that fill the bucket up are other requests in their prefill, or nobody.
        finish=jnp.where(active, bucket.finish, EMPTY),
        page_table=pages,
        rows=jnp.zeros((R, W, programs.kept), spec.dtype),
    )
    began = bucket.finish == RUNNING
    before = bucket.output_len

    def go_on(carry: tuple[Array, DecodeState]) -> Array:
        step, now = carry
        ended = jnp.any(began & (now.finish != RUNNING))
        return (step < num_steps) & driver.any_running(now) & ~(early & ended)

    def one(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        step, now = carry
        return step + 1, driver.decode_step(programs.strategy, forward, now, spec)[0]

    steps, bucket = jax.lax.while_loop(go_on, one, (jnp.int32(0), bucket))
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
        [jnp.stack(head, axis=1), new_tokens, _packed(_kept_part(bucket), layout)], axis=1
    )
    return _put_rows(state, rows, bucket), packed


# --- slots as words -----------------------------------------------------------------------------
# One transfer a chunk: every leaf of a slot that changes while it decodes, as 32-bit words.


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each leaf of a slot stands among its words."""

    tree: Any
    leaves: tuple[tuple[int, int, tuple[int, ...], str], ...]  # offset, words, shape, dtype
    size: int


def _kept_part(state: DecodeState) -> dict[str, Any]:
    """What a slot needs to go on but what its request says and what it has emitted."""
    return {
        "buffer": state.buffer,
        "finish": state.finish,
        "carry": state.carry,
        "boundary": state.boundary,
        "output_len": state.output_len,
    }


def _layout(part: Any) -> Layout:
    leaves, tree = jax.tree.flatten(part)
    placed, offset = [], 0
    for leaf in leaves:
        shape = tuple(leaf.shape[1:])
        size = math.prod(shape)
        placed.append((offset, size, shape, str(leaf.dtype)))
        offset += size
    return Layout(tree, tuple(placed), offset)


def _packed(part: Any, layout: Layout) -> Int[Array, "R X"]:
    words = []
    for leaf in jax.tree.leaves(part):
        flat = leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
        if jnp.issubdtype(flat.dtype, jnp.floating):
            flat = jax.lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.int32)
        words.append(flat.astype(jnp.int32))
    return jnp.concatenate(words, axis=1)


def _unpacked(words: Int[Array, "R X"], layout: Layout) -> Any:
    leaves = []
    for offset, size, shape, dtype in layout.leaves:
        flat = words[:, offset : offset + size]
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            flat = jax.lax.bitcast_convert_type(flat, jnp.float32)
        leaves.append(flat.astype(dtype).reshape(len(words), *shape))
    return jax.tree.unflatten(layout.tree, leaves)


def _from_words(words: np.ndarray, dtype: str) -> np.ndarray:
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return words.view(np.float32)
    return words.astype(dtype)


def finish_reason(code: int) -> str | None:
    """The word for a finish code, None while it runs."""
    return FINISH_REASONS[code]
