"""The engine's half of a decode step, pure: admit, count, settle, finish, emit, freeze, slide.

`dj.generate`, `LLM` and scripted runs share it, so that a strategy behaves the same under all of
them. One step is `propose`, which calls `strategy.step`, then `advance` (docs/contract.md).
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from . import blocks, grammar_walk
from .forward import Forward
from .knobs import bind_knobs
from .needs import Needs
from .protocol import SlotSpec
from .recording import Recorder, noted
from .state import (
    ACTIVE,
    DUMMY,
    ERROR,
    LENGTH,
    NFE,
    NO_TOKEN,
    REPETITION,
    RUNNING,
    STOP,
    STUCK,
    BlockBuffer,
    Carry,
    DecodeState,
    StepInfo,
    select_rows,
)

# Steps so far, the choice of the next one, the state. The choice is carried: computed twice it may
# round differently, and its loop would end before its first step.
_Stretch = tuple[Array, Array, DecodeState]


def admit_window(
    needs: Needs,
    spec: SlotSpec,
    tail: Int[Array, "B W"],
    prompt_len: Int[Array, " B"],
    limit: Int[Array, " B"],
    given: Int[Array, "B W"] | None = None,
) -> BlockBuffer:
    """The window of fresh requests: the prompt's part that is not prefilled, then DUMMY blocks.

    With `in_window` prompts every block with a given position, or one before the limit, is ACTIVE
    from the start.

    Args:
        tail: The prompt's ids from the window's first position on (`prompt_tail`), any id after
            the prompt.
        given: Ids of cells after the prompt, -1 elsewhere: of `in_window` prompts, or `pins`.
    """
    B, K, S = spec.num_slots, spec.num_blocks, spec.block_size
    start = needs.prompt.prefill_len(prompt_len, S)
    position = start[:, None] + jnp.arange(K * S, dtype=jnp.int32)[None]
    tokens = tail
    filled = position < prompt_len[:, None]
    end = prompt_len
    if needs.prompt.in_window:
        end = limit
    if given is not None:
        held = given >= 0
        tokens, filled = jnp.where(held, given, tokens), filled | held
        end = jnp.maximum(end, jnp.max(jnp.where(held, position + 1, 0), axis=1))
    tokens = jnp.where(filled, tokens, 0).reshape(B, K, S)
    in_use = (position < end[:, None]).reshape(B, K, S)[:, :, 0]
    return BlockBuffer(
        tokens=tokens,
        filled=filled.reshape(B, K, S),
        status=jnp.where(in_use, ACTIVE, DUMMY).astype(jnp.int32),
        start=start,
        prompt_len=prompt_len,
        limit=limit,
        block_steps=jnp.zeros((B, K), jnp.int32),
        nfe=jnp.zeros((B,), jnp.int32),
        idle=jnp.zeros((B,), jnp.int32),
    )


def prompt_tail(
    needs: Needs, spec: SlotSpec, prompt: Int[Array, "B T"], prompt_len: Int[Array, " B"]
) -> Int[Array, "B W"]:
    """Ids of right-padded prompts at the window's positions; any id after the prompt."""
    start = needs.prompt.prefill_len(prompt_len, spec.block_size)
    cell = jnp.arange(spec.num_blocks * spec.block_size, dtype=jnp.int32)[None]
    index = jnp.minimum(start[:, None] + cell, prompt.shape[1] - 1)
    return jnp.take_along_axis(prompt, index, axis=1)


def broadcast_carry(carry: Carry, spec: SlotSpec) -> Carry:
    """An `init` value at full shape: the same constant in every slot, block and cell."""
    B, K, S = spec.num_slots, spec.num_blocks, spec.block_size

    def grow(leaves: dict[str, Array], axes: tuple[int, ...]) -> dict[str, Array]:
        return {k: jnp.broadcast_to(v, (*axes, *v.shape[len(axes) :])) for k, v in leaves.items()}

    return Carry(
        tokens=grow(carry.tokens, (B, K * S)),
        blocks=grow(carry.blocks, (B, K)),
        slot=grow(carry.slot, (B,)),
        lasting=grow(carry.lasting, (B,)),
    )


def new_slots(
    strategy: Any,
    spec: SlotSpec,
    settings: Mapping[str, Any],
    buffer: BlockBuffer,
    max_output: int,
    kept: int = 0,
) -> DecodeState:
    """Everything of fresh requests but pools, pages and transient rows.

    Args:
        settings: `sampling`, `limits`, `knobs` and `keys`.
        buffer: Their windows.
        kept: Width of the boundary row.
    """
    B = spec.num_slots
    return DecodeState(
        **settings,
        buffer=buffer,
        finish=jnp.full((B,), RUNNING, jnp.int32),
        carry=broadcast_carry(strategy.init(spec), spec),
        boundary=jnp.zeros((B, kept), spec.dtype),
        rows=None,  # type: ignore[arg-type]
        page_table=None,  # type: ignore[arg-type]
        pools=None,
        output=jnp.zeros((B, max_output), jnp.int32),
        output_len=jnp.zeros((B,), jnp.int32),
    )


def decode_step(
    strategy: Any, forward: Forward, state: DecodeState, spec: SlotSpec
) -> tuple[DecodeState, StepInfo]:
    """One whole step of every running slot: the strategy's half, then the engine's.

    Finished rows stay bit for bit as they are; their `info` is zero. A row that meets a value
    that is not finite ends with ERROR and what it had before the step.
    """
    recorder = None if state.written is None else Recorder(forward)
    proposed = propose(strategy, cast(Forward, recorder or forward), state)
    return advance(strategy, state, *proposed, spec, recorder)


def decode_while(
    go_on: Callable[[Int[Array, ""], DecodeState], Bool[Array, ""]],
    strategy: Any,
    forward: Forward,
    state: DecodeState,
    spec: SlotSpec,
) -> tuple[Int[Array, ""], DecodeState]:
    """Steps while `go_on(steps, state)`, and their number.

    Where a strategy chooses between passes (`Strategy.makes_choices`), each has a loop of its own
    that runs for as long as it is chosen. The steps are those of `decode_step`, without a branch
    whose passes must all have the same output. The loops stand one after another, and one whose
    choice is not made ends at once: within a `switch`, jaxlib 0.10 would copy the pools.
    """
    if not strategy.makes_choices:

        def one(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
            steps, now = carry
            return steps + 1, decode_step(strategy, forward, now, spec)[0]

        return jax.lax.while_loop(lambda carry: go_on(*carry), one, (jnp.int32(0), state))

    def chosen(now: DecodeState) -> Int[Array, ""]:
        return bind_knobs(strategy, now.knobs).choice(now)

    def stretch(index: int, carry: _Stretch) -> _Stretch:
        fixed = strategy.chosen(index)

        def one(carry: _Stretch) -> _Stretch:
            steps, _, now = carry
            now = decode_step(fixed, forward, now, spec)[0]
            return steps + 1, chosen(now), now

        def same(carry: _Stretch) -> Array:
            return go_on(carry[0], carry[2]) & (carry[1] == index)

        return jax.lax.while_loop(same, one, carry)

    def every(carry: _Stretch) -> _Stretch:
        for index in range(len(strategy.choices)):
            carry = stretch(index, carry)
        return carry

    start = (jnp.int32(0), chosen(state), state)
    steps, _, state = jax.lax.while_loop(lambda carry: go_on(carry[0], carry[2]), every, start)
    return steps, state


def propose(strategy: Any, forward: Forward, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """The strategy's half of a step, with its knobs bound."""
    return _checked(strategy, bind_knobs(strategy, state.knobs).step(forward, state))


def advance(
    strategy: Any,
    state: DecodeState,
    stepped: DecodeState,
    info: StepInfo,
    spec: SlotSpec,
    recorder: Recorder | None = None,
) -> tuple[DecodeState, StepInfo]:
    """The engine's half: the state that follows from `state` and the strategy's `stepped`.

    Args:
        recorder: What the model said, where the state keeps it.
    """
    running = state.finish == RUNNING
    # A broken row stays as it was before this step.
    broken = running & is_broken(stepped)
    taken = running & ~broken
    held, path = state.constraint, None
    if held is not None:
        if strategy.needs.fills_holes:
            path = grammar_walk.walk(stepped)
        else:
            stepped, path = grammar_walk.conform(state, stepped)
    if recorder is not None:
        stepped = noted(strategy, recorder, state, stepped)
    info = jax.tree.map(lambda leaf: jnp.where(running, leaf, 0), info)
    fresh = broadcast_carry(strategy.init(spec), spec)
    counted = count(state, stepped, info)
    window = spec.num_blocks * spec.block_size
    patience = bind_knobs(strategy, state.knobs).patience(window)
    advanced = slide(finish(counted, info, taken, patience), info, fresh)
    # `finish` does not change the output of other rows; a select would copy all of it.
    selected = select_rows(taken, advanced.replace(output=None), state.replace(output=None))
    ended = jnp.where(broken, ERROR, selected.finish)
    selected = selected.replace(output=advanced.output, finish=ended)
    if held is not None and path is not None:  # what commits is on the path
        at = jnp.take_along_axis(path, info.commit_len[:, None], axis=1)[:, 0]
        at = jnp.where(taken, at, held.at)
        selected = selected.replace(constraint=held.replace(at=at))
    return selected, info


def is_broken(state: DecodeState) -> Bool[Array, " B"]:
    """Rows with a value that is not finite, in a row to store or in a readout."""
    no_token = jnp.any(state.buffer.filled & (state.buffer.tokens == NO_TOKEN), axis=(1, 2))
    return (state.finish == ERROR) | no_token


def _checked(strategy: Any, returned: Any) -> tuple[DecodeState, StepInfo]:
    """The state and info that a step returned, checked at trace time."""
    if isinstance(returned, tuple) and len(returned) == 2:
        state, info = returned
        if isinstance(state, DecodeState) and isinstance(info, StepInfo):
            return state, info
    raise ValueError(
        f"the step of {strategy.name} returned {type(returned).__name__}, not "
        "(DecodeState, StepInfo); end it with `return blocks.finish_step(state, accept)` or a "
        "pair of your own"
    )


def count(before: DecodeState, stepped: DecodeState, info: StepInfo) -> DecodeState:
    """Add the forwards of this step, and count the steps since something changed."""
    old, new = before.buffer, stepped.buffer
    changed = (old.tokens != new.tokens) | (old.filled != new.filled)
    moved = jnp.any(changed, axis=(1, 2)) | (info.commit_len > 0)
    idle = jnp.where(moved, 0, old.idle + 1)
    return stepped.replace(buffer=new.replace(nfe=new.nfe + info.nfe, idle=idle))


def finish(
    state: DecodeState,
    info: StepInfo,
    taken: Bool[Array, " B"],
    patience: int | Int[Array, " B"],
) -> DecodeState:
    """Emit what is settled and decide which rows are done.

    Only rows `taken` emit.

    A row ends, in this order of precedence: with the first settled stop id that the request did not
    bring (which is not emitted), when every position before its limit is settled, when it has spent
    `max_nfe` forwards, when its text ends in a run of `max_run` equal tokens, or when `patience`
    steps in a row changed nothing.
    """
    buffer, limits = state.buffer, state.limits
    B = buffer.start.shape[0]
    cell = jnp.arange(buffer.tokens.shape[1] * buffer.tokens.shape[2], dtype=jnp.int32)[None]
    position = buffer.start[:, None] + cell
    tokens = buffer.tokens.reshape(B, -1)
    settled_end = jnp.minimum(buffer.start + info.settled_len, buffer.limit)
    emitted = (position >= buffer.prompt_len[:, None]) & (position < settled_end[:, None])
    written_stops = blocks.is_stop(state, buffer.tokens) & ~blocks.is_given(state)
    stops = (position < settled_end[:, None]) & written_stops.reshape(B, -1)
    far = jnp.iinfo(jnp.int32).max
    first_stop = jnp.min(jnp.where(stops, position, far), axis=1)
    stopped = first_stop < far
    end = jnp.maximum(jnp.minimum(settled_end, first_stop), buffer.prompt_len)

    output_len = jnp.maximum(state.output_len, end - buffer.prompt_len)
    column = position - buffer.prompt_len[:, None]
    wanted = emitted & (position < end[:, None]) & taken[:, None]
    # A dropped write needs a column past the array: negative ones would wrap.
    column = jnp.where(wanted, column, state.output.shape[1])
    output = state.output.at[jnp.arange(B)[:, None], column].set(tokens, mode="drop")

    reasons = (
        (stopped, STOP),
        (settled_end >= buffer.limit, LENGTH),
        (buffer.nfe >= limits.max_nfe, NFE),
        (_trailing_run(output, output_len) >= limits.max_run, REPETITION),
        (buffer.idle >= patience, STUCK),
    )
    reason = jnp.full((B,), RUNNING, jnp.int32)
    for ended, code in reversed(reasons):
        reason = jnp.where(ended, code, reason)
    return state.replace(output=output, output_len=output_len, finish=reason)


def _trailing_run(output: Int[Array, "B O"], length: Int[Array, " B"]) -> Int[Array, " B"]:
    """Length of the run of equal tokens that ends the first `length` of each row."""
    index = jnp.arange(output.shape[1])[None]
    last = jnp.take_along_axis(output, jnp.maximum(length - 1, 0)[:, None], axis=1)
    differs = (output != last) & (index < length[:, None])
    return length - 1 - jnp.max(jnp.where(differs, index, -1), axis=1)


def slide(state: DecodeState, info: StepInfo, fresh: Carry) -> DecodeState:
    """Move the window past the committed tokens; new cells hold first values.

    The state of blocks moves by whole blocks; a window that advances by less keeps it.
    """
    buffer = state.buffer
    B, K, S = buffer.tokens.shape
    by_token, by_block = info.commit_len, info.commit_len // S

    def along(leaf: Array, by: Array, fill: Array) -> Array:
        size = leaf.shape[1]
        index = jnp.arange(size)[None] + by[:, None]
        tail = (1,) * (leaf.ndim - 2)
        moved = jnp.take_along_axis(
            leaf, jnp.minimum(index, size - 1).reshape(B, size, *tail), axis=1
        )
        return jnp.where((index < size).reshape(B, size, *tail), moved, fill)

    def cells(leaf: Array, fill: Any) -> Array:
        return along(leaf.reshape(B, K * S), by_token, jnp.asarray(fill, leaf.dtype)).reshape(
            B, K, S
        )

    moved = buffer.replace(
        tokens=cells(buffer.tokens, 0),
        filled=cells(buffer.filled, False),
        status=along(buffer.status, by_block, jnp.int32(DUMMY)),
        block_steps=along(buffer.block_steps, by_block, jnp.int32(0)),
        start=buffer.start + by_token,
    )
    carry = state.carry.replace(
        tokens={k: along(v, by_token, fresh.tokens[k]) for k, v in state.carry.tokens.items()},
        blocks={k: along(v, by_block, fresh.blocks[k]) for k, v in state.carry.blocks.items()},
    )
    boundary = next_boundary(state.boundary, state.rows, by_token)
    return state.replace(buffer=moved, carry=carry, boundary=boundary)


def next_boundary(boundary: Array, rows: Array, by: Int[Array, " B"]) -> Array:
    """Raw hidden row of the last token before the window once it has moved `by` tokens.

    Both have no width where no boundary is kept.
    """
    joined = jnp.concatenate([boundary[:, None], rows], axis=1)
    return jnp.take_along_axis(joined, by[:, None, None], axis=1)[:, 0]


def stuck_text(strategy: Any, position: int | str) -> str:
    """Why a request ended as STUCK with its window at `position`, and what to do."""
    return (
        f"{strategy.name} changed nothing for too many steps (Strategy.patience) in the block at "
        f"position {position}; let it fill its surest hole where it fills no other: "
        "sampling.forced_top1"
    )


def any_running(state: DecodeState) -> Bool[Array, ""]:
    """Whether some slot still decodes."""
    return jnp.any(state.finish == RUNNING)
