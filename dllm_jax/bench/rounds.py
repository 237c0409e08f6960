"""The time of a round of drafts, by part: the drafter's pass, the target's pass, and the host.

A strategy that drafts may switch drafts off, so a step has no single time. Each width is timed in
the bare loop, forced by `break_even`, and weighted by how often it was chosen. A separate program
times the drafter's pass alone and stores nothing. The rest of a round is the target's:
verification, and the writes to both caches.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.bench import measure, roofline
from dllm_jax.engine.engine import Engine
from dllm_jax.engine.requests import DraftMetrics
from dllm_jax.runner.timing import begin
from dllm_jax.strategies.dflash import DRAFT

FEW_PASSES, MANY_PASSES = 4, 20


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Bare times of the rounds of one compiled bucket, in milliseconds.

    Attributes:
        rows: Slots.
        widths: Cells that the target judges, ascending.
        shares: Fraction of the rounds with each width.
        width_ms: A round of each width.
        pass_ms: The drafter's pass alone.
    """

    rows: int
    widths: tuple[int, ...]
    shares: Sequence[float]
    width_ms: Sequence[float]
    pass_ms: float

    @property
    def bare_ms(self) -> float:
        """The mean time of a round, weighted by how often each width was chosen."""
        return sum(share * ms for share, ms in zip(self.shares, self.width_ms, strict=True))

    @property
    def draft_ms(self) -> float:
        """The drafter's part of `bare_ms`; none if nothing was drafted."""
        return self.pass_ms * sum(self.shares[self.widths[0] == 1 :])

    def floor_ms(self, engine: Engine, context: float) -> float | None:
        """The least time of a round; None if the device's rates are unknown."""
        made, kind = engine.runner.programs, jax.devices()[0].device_kind
        size = made.strategy.block_size - 1
        draft = roofline.floor_ms(made.aux[DRAFT], self.rows, size, context, kind)
        found = 0.0
        for width, share in zip(self.widths, self.shares, strict=True):
            judged = roofline.floor_ms(made.model, self.rows, width, context, kind)
            if judged is None or draft is None:
                return None
            found += share * (judged + (draft if width > 1 else 0.0))
        return found

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "widths": list(self.widths),
            "shares": list(self.shares),
            "width_ms": list(self.width_ms),
            "draft_pass_ms": self.pass_ms,
        }


def time_rounds(
    engine: Engine,
    rows: int,
    columns: int,
    context: int,
    steps: int,
    repeats: int,
    shares: Sequence[float],
) -> Rounds:
    """Time the rounds of a bucket; the engine is idle, and its free pages are borrowed."""
    return Rounds(
        rows,
        engine.runner.programs.strategy.choices,
        shares,
        _width_ms(engine, rows, columns, context, steps, repeats),
        pass_ms(engine, rows, columns, context, repeats),
    )


def round_figures(
    rounds: Mapping[measure.Decode, Rounds],
    steps: Mapping[measure.Decode, int],
    step_ms: float | None,
) -> dict[str, Any]:
    """The time of a step by part, for the report.

    Args:
        steps: Number of steps, by bucket.
        step_ms: Wall time of a step; None if it has no meaning.
    """
    total = max(sum(steps.values()), 1)
    draft_ms = sum(steps[bucket] * one.draft_ms for bucket, one in rounds.items()) / total
    bare_ms = sum(steps[bucket] * one.bare_ms for bucket, one in rounds.items()) / total
    return {
        "draft_ms": draft_ms,
        "verify_ms": bare_ms - draft_ms,
        "host_ms": None if step_ms is None else step_ms - bare_ms,
        "round_programs": [
            {"rows": bucket[0], "pages": bucket[1], "steps": steps[bucket], **one.figures()}
            for bucket, one in sorted(rounds.items())
        ],
    }


def width_shares(widths: Sequence[int], nfe: int, drafted: DraftMetrics | None) -> list[float]:
    """The fraction of the steps with each width.

    Args:
        widths: One, or 1, which drafts nothing, and the whole block.
        nfe: Steps in all.
        drafted: The drafting counters of these steps.
    """
    if len(widths) == 1:
        return [1.0]
    share = 0.0 if drafted is None else drafted.rounds / max(nfe, 1)
    return [1.0 - share, share]


def _width_ms(
    engine: Engine, rows: int, columns: int, context: int, steps: int, repeats: int
) -> list[float]:
    """Milliseconds of a bare round of each width that the strategy may choose."""
    how = (rows, columns, context, steps, repeats)
    return [
        measure.decode_step_ms(engine, *how, {"break_even": 0.0 if width > 1 else math.inf})
        for width in engine.runner.programs.strategy.choices
    ]


def pass_ms(engine: Engine, rows: int, columns: int, context: int, repeats: int = 5) -> float:
    """Milliseconds of the drafter's pass over a whole block, read out; nothing is stored.

    Args:
        engine: Idle; its free pages are borrowed.
    """
    with measure.borrowed(engine, rows, columns, context) as (sequences, table):
        device, slots = engine.runner, np.arange(rows, dtype=np.int32)
        for slot, sequence in enumerate(sequences):
            device.admit(slot, sequence.placement)
            begin(device, slot, sequence.placement.prompt_len, table[slot])

        def spend(count: int) -> float:
            device.wait()
            began = time.perf_counter()
            passes = _passes(device.programs, device.state, slots, table, np.int32(count))
            jax.block_until_ready(passes)
            return time.perf_counter() - began

        spend(FEW_PASSES)  # compiles
        found = [
            (spend(MANY_PASSES) - spend(FEW_PASSES)) / (MANY_PASSES - FEW_PASSES) * 1e3
            for _ in range(repeats)
        ]
    return statistics.median(found)


@jax.jit
def _passes(programs, state, rows, pages, count):
    """Passes of the drafter over slots; each starts with the first token of the previous one."""
    some = jax.tree.map(lambda leaf: leaf[rows], state.replace(pools=None))
    some = some.replace(pools=state.pools, page_table=pages)
    draft, size = programs.forward().aux[DRAFT], programs.strategy.block_size - 1
    tokens = some.buffer.tokens
    cell = jnp.broadcast_to(jnp.arange(size + 1, dtype=jnp.int32), tokens.shape)

    def one(_, tokens):
        masked = jnp.where(cell == 0, tokens, draft.mask_id)
        out = draft(some, inputs=masked, live=cell < size, width=size)
        return jnp.roll(out.predict(where=cell > 0, width=size - 1).token, -1, axis=2)

    return jax.lax.fori_loop(0, count, one, tokens)
