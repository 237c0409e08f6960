"""The size of a round: decode steps, groups of rows, and prefill that fits into the same round.

A piece of prefill may cost nearly as much as the decode steps of its round, so a long prompt at
most doubles the time of a step. Where no client streams, that share holds for each waiting prompt:
the sooner all of them decode, the fewer rounds run half empty. Where one does, the share is
multiplied by the waiting prompts for each decoding text, so that few texts do not hold many prompts
up. `runner.cost` predicts seconds; without it, rounds are sized by tokens.
"""

import dataclasses
import functools
import math
from collections import abc
from typing import Any

from dllm_jax.engine.layout import NO_LIMIT, EngineLayout
from dllm_jax.engine.scheduler import Scheduler
from dllm_jax.engine.sequence import DECODE, Pass, Sequence

# How long a dispatch should last. Its steps aside, each takes some 2.5 ms on an H200 (SDAR-1.7B):
# 1.4 in the call, which looks at some 300 arrays with cold caches, and 1.1 on the way back; 3 to 5
# ms for the 900 arrays of DiffusionGemma. A request that ends does so at once, as its chunk does;
# one that is aborted leaves its slot at the chunk's end.
CHUNK_S = 0.5
CHUNK_S_WATCHED = 0.03  # a client streams, or a request that comes now could have a slot
CHUNK_S_WAITING = 0.016  # a request waits to decode: sqrt(2 ms x 64 steps x 2 ms a step)
PREFILL_ALONE = 4  # largest prefill buckets of a round without decode steps

# Work next to the decode steps of most rows, as a share of their time: prefill, and steps of
# rows with much longer contexts. Predicted costs leave out dispatches: at 0.7 the 99th percentile
# of a step on an H200 rose 1.8 to 2.2 times next to a prompt of 32,000 tokens.
BESIDE = 0.5
MINOR = 4  # a group with at most 1 / MINOR of the largest group's rows runs with it

# Rows of one dispatch, the columns of their page table, and their steps.
Group = tuple[list[Sequence], int, int]


@dataclasses.dataclass(slots=True)
class Chunk:
    """Decode steps in flight: at most `steps` for each sequence, in the tenancy of its epoch."""

    handle: Any
    sequences: list[Sequence]
    epochs: list[int]
    steps: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of programs by their sizes, as `runner.timing` measures them.

    Attributes:
        decode: One decode step, by slots and pages.
        prefill: One pass, by kind, then by tokens and pages.
    """

    decode: abc.Mapping[tuple[int, int], float]
    prefill: abc.Mapping[str, abc.Mapping[tuple[int, int], float]]

    def decode_s(self, rows: int, columns: int) -> float:
        """One decode step of a slot bucket over a page bucket."""
        return self.decode[rows, columns]

    def prefill_s(self, size: int, columns: int, kind: str) -> float:
        """One prefill pass."""
        return self.prefill[kind][size, columns]


def num_steps(
    step_s: float,
    scheduler: Scheduler,
    decoding: list[Sequence],
    cost: Cost | None,
    is_open: bool = False,
) -> int:
    """Steps of the next chunk: fewer while a request waits or may come, or a client streams.

    Args:
        step_s: Mean seconds of the last steps; 0 before the first.
        is_open: Requests may come at any time; one that finds a free slot waits for two chunks.
    """
    watched = [sequence for sequence in decoding if sequence.watched]
    denoised = [sequence for sequence in watched if sequence.owner.request.denoise]
    if denoised or not step_s:
        return 1
    wanted = CHUNK_S_WATCHED if watched or (is_open and scheduler.has_room) else CHUNK_S
    has_prefix = len(decoding) < len(scheduler.live)
    if scheduler.has_waiting or has_prefix:
        wanted = CHUNK_S_WAITING
    steps = int(wanted / step_s)
    if decoding and cost is not None and (has_prefix or len(set(scheduler.columns(decoding))) > 1):
        steps = max(steps, _steps_beside(scheduler, decoding, cost))
    return max(1, min(scheduler.layout.max_steps_per_chunk, steps))


def all_end(layout: EngineLayout, in_flight: abc.Sequence[Chunk], decoding: list[Sequence]) -> bool:
    """Whether the chunks in flight end all texts, so that another would do nothing.

    Where only a stop id may end them, the next chunk is dispatched: on an H200 it hides 0.6 ms of
    host work at each chunk, and costs 1.9 ms once if it does nothing.
    """
    if 0 in [sequence.in_flight for sequence in decoding]:
        return False
    return False not in [_ends(layout, chunk) for chunk in in_flight]


def _ends(layout: EngineLayout, chunk: Chunk) -> bool:
    """Whether a chunk must end all its texts.

    A chunk ends with its first text: it ends several only if all end in the same step.
    """
    left = _steps_left(layout, chunk.sequences[0])
    if left > chunk.steps:
        return False
    return len(chunk.sequences) == 1 or not any(
        sequence.placement.stop_ids
        or sequence.placement.max_run < NO_LIMIT
        or _steps_left(layout, sequence) != left
        for sequence in chunk.sequences
    )


def _steps_left(layout: EngineLayout, sequence: Sequence) -> int:
    """An upper bound of the steps that a text takes after its last fetch."""
    placement = sequence.placement
    left = placement.max_nfe - sequence.nfe  # a step is at least one forward
    if layout.token_a_step:
        left = min(left, placement.limit - placement.prompt_len - len(sequence.tokens))
    return left


def _steps_beside(scheduler: Scheduler, decoding: list[Sequence], cost: Cost) -> int:
    """Steps of the largest group that leave time for a step of each minor group and a prefill."""
    sized = groups(scheduler, decoding, 1, cost)
    most, wide, _ = max(sized, key=lambda group: len(group[0]))
    beside = sum(
        _step_s(scheduler, cost, rows, columns)
        for rows, columns, _ in sized
        if _is_minor(rows, most)
    )
    prefix = next((sequence for sequence in scheduler.live if sequence.stage != DECODE), None)
    piece = scheduler.next_pass(prefix, 1) if prefix else None
    if piece is not None and piece.kind != "full":
        beside += _pass_s(scheduler, cost, piece)
    step_s = _step_s(scheduler, cost, most, wide)
    return math.ceil(beside / (BESIDE * step_s)) if step_s else 1


def groups(
    scheduler: Scheduler, decoding: list[Sequence], steps: int, cost: Cost | None
) -> list[Group]:
    """Rows grouped by page bucket; neighbours are merged if one dispatch is cheaper than two.

    Short contexts then do not pay for long ones. Minor groups run the steps that fit next to those
    of the largest group, at least one; the others run all.
    """
    every = scheduler.columns(decoding)
    widths = sorted(set(every))
    if len(widths) == 1:
        return [(decoding, widths[0], steps)]
    apart = [
        ([s for s, columns in zip(decoding, every, strict=True) if columns == width], width)
        for width in widths
    ]
    if cost is None or not apart:
        return [(rows, columns, steps) for rows, columns in apart]
    step_s = functools.partial(_step_s, scheduler, cost)
    merged = apart[:1]
    for rows, columns in apart[1:]:
        before, narrow = merged[-1]
        together = step_s(before + rows, columns)
        if together <= step_s(before, narrow) + step_s(rows, columns):
            merged[-1] = (before + rows, columns)
        else:
            merged.append((rows, columns))
    most, columns = max(merged, key=lambda group: len(group[0]))
    minors = sum(_is_minor(rows, most) for rows, _ in merged)
    share = BESIDE * steps * step_s(most, columns) / max(1, minors)
    return [
        (rows, columns, _within(share, step_s(rows, columns), steps))
        if _is_minor(rows, most)
        else (rows, columns, steps)
        for rows, columns in merged
    ]


def _is_minor(rows: list[Sequence], most: list[Sequence]) -> bool:
    return MINOR * len(rows) <= len(most)


def _step_s(scheduler: Scheduler, cost: Cost, rows: list[Sequence], columns: int) -> float:
    return cost.decode_s(scheduler.slot_bucket(len(rows)), columns)


def _pass_s(scheduler: Scheduler, cost: Cost, piece: Pass) -> float:
    return cost.prefill_s(piece.size, scheduler.page_bucket(piece.end), piece.kind)


def _within(seconds: float, step_s: float, steps: int) -> int:
    """How many of the steps fit into the seconds, at least one."""
    return max(1, min(steps, int(seconds / step_s))) if step_s else steps


def _seconds_beside(
    scheduler: Scheduler, decoding: list[Sequence], steps: int, cost: Cost
) -> float:
    """Seconds left for prefill next to the decode steps of a round."""
    sized = groups(scheduler, decoding, steps, cost)
    most = max((rows for rows, _, _ in sized), key=len)
    left = 0.0
    for rows, columns, group_steps in sized:
        seconds = group_steps * _step_s(scheduler, cost, rows, columns)
        left += -seconds if _is_minor(rows, most) else BESIDE * seconds
    return left


class Budget:
    """Prefill tokens and seconds that a round may spend."""

    def __init__(
        self, scheduler: Scheduler, decoding: list[Sequence], steps: int, cost: Cost | None
    ):
        layout = scheduler.layout
        self._scheduler, self._cost = scheduler, cost
        shares = len(scheduler.live) - len(decoding)
        requests = [sequence.owner.request for sequence in scheduler.live]
        if any(request.stream or request.denoise for request in requests):
            shares = max(1, shares // len(decoding)) if decoding else 1
        largest = layout.prefill_buckets[-1]
        self._tokens = max(PREFILL_ALONE, shares) * largest
        self._seconds = math.inf
        if decoding and cost is None:
            self._tokens = shares * largest
        elif decoding and cost is not None:
            self._seconds = shares * _seconds_beside(scheduler, decoding, steps, cost)
        if layout.max_num_batched_tokens is not None:
            self._tokens = min(self._tokens, layout.max_num_batched_tokens)

    def take(self, sequence: Sequence, forced: bool) -> Pass | None:
        """The sequence's next pass, charged to the budget; None if nothing is left of either.

        Args:
            forced: Take the smallest piece whatever it costs, so that a prefix always advances.
        """
        scheduler, cost, most = self._scheduler, self._cost, self._tokens
        while (piece := scheduler.next_pass(sequence, most)) is not None:
            smallest = scheduler.layout.prefill_buckets[0]
            indivisible = piece.kind == "full" or piece.size == smallest
            price = 0.0 if cost is None else _pass_s(scheduler, cost, piece)
            fits = piece.size <= self._tokens and price <= self._seconds
            if fits or (forced and indivisible):
                self._tokens -= piece.size
                self._seconds -= price
                return piece
            if indivisible:
                return None
            most = piece.size - 1
        return None
