"""Everything an engine will run, compiled before its first request.

Data flow: layout -> a list of calls -> each lowered, one after another, and compiled, several at a
time -> each run once on empty slots, which compiles nothing.
"""

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from dllm_jax.engine.layout import NO_LIMIT, EngineLayout, PassKind, Placement
from dllm_jax.runner import packing

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Work:
    """A program of one size; `call` makes its `Call` on empty slots from a `ModelRunner`."""

    name: str
    call: Callable[[Any], Any]


def pass_kinds(layout: EngineLayout) -> tuple[PassKind, ...]:
    """The kinds of prefill passes that requests need."""
    if layout.in_window:
        return ()
    kinds: set[PassKind] = {layout.pass_kind}
    if layout.is_full and not layout.starts_over:
        kinds.add("blocks")  # text behind the prompt, where it is computed again
    return tuple(sorted(kinds))


def every_program(layout: EngineLayout, saved_size: int) -> list[Work]:
    """All programs, `largest_programs` first, which take longest to compile.

    Args:
        saved_size: Words of a saved slot.
    """
    work = []
    for columns in reversed(layout.page_buckets):
        work += [_decode(rows, columns) for rows in reversed(layout.slot_buckets)]
        for kind in pass_kinds(layout):
            work += [_prefill(size, columns, kind) for size in reversed(layout.prefill_buckets)]
    if layout.prompts_a_pass > 1:
        work.append(_short_prompts(layout))
    empty = made_up(layout, layout.page_buckets[-1], 1)
    saved = np.zeros((saved_size,), np.int32)
    work.append(Work("admit", lambda runner: runner.admit_call([(0, empty, False)])))
    if not layout.starts_over:
        work.append(Work("restore", lambda runner: runner.restore_call(0, empty, saved, ())))
    # A prompt that sees tokens in order and keeps the row before it leaves a token to compute.
    if not (layout.is_token_causal and layout.compute_at_least):
        work.append(Work("begin", lambda runner: runner.begin_call(0)))
    if layout.is_full:
        work.append(Work("copy", lambda runner: runner.copy_call(0, 0)))
    largest = {item.name for item in largest_programs(layout)}
    return sorted(work, key=lambda item: item.name not in largest)


def made_up(layout: EngineLayout, columns: int, steps: int) -> Placement:
    """A request with as much context as the pages hold, and room for steps behind it."""
    most = min(columns * layout.page_size, layout.max_model_len)
    room = steps * layout.window
    prompt_len = max(0, most - room) // layout.block_size * layout.block_size
    if layout.in_window or not prompt_len:
        prompt_len = 1
    return Placement(
        tail=(0,) * (prompt_len - layout.prefill_len(prompt_len)),
        prompt_len=prompt_len,
        limit=min(prompt_len + room, layout.max_model_len),
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        stop_ids=(),
        max_nfe=NO_LIMIT,
        max_run=NO_LIMIT,
        knobs=layout.knob_values,
        seed=0,
        fold=0,
    )


def largest_programs(layout: EngineLayout) -> list[Work]:
    """The programs that need the most memory."""
    columns = layout.page_buckets[-1]
    largest = layout.prefill_buckets[-1]
    work = [_decode(layout.slot_buckets[-1], columns)]
    work += [_prefill(largest, columns, kind) for kind in pass_kinds(layout)]
    if layout.prompts_a_pass * layout.prefill_buckets[0] > largest:
        work.append(_short_prompts(layout))
    return work


def programs_with_grammars(layout: EngineLayout, sizes: Any) -> list[Work]:
    """The decode programs of slots of which some have a grammar of these `grammars.Sizes`."""
    every = itertools.product(layout.slot_buckets, layout.page_buckets)
    return [_decode(rows, columns, sizes) for rows, columns in every]


def _decode(rows: int, columns: int, sizes: Any = None) -> Work:
    slots = np.arange(rows, dtype=np.int32)
    pages = np.full((rows, columns), -1, np.int32)
    bound = () if sizes is None else (True,)
    return Work(
        f"decode {rows} slots, {columns} pages" + (", grammars" if bound else ""),
        lambda runner: runner.decode_call(slots, 0, pages, 1, False, bound, sizes=sizes),
    )


def _prefill(size: int, columns: int, kind: PassKind, prompts: int = 1) -> Work:
    slots, pages = np.arange(prompts)[:, None], np.full((columns,), -1, np.int32)
    words = packing.piece_fields(size).pack(prompts, slot=slots, pages=pages)
    several = f"{prompts} prompts of " if prompts > 1 else ""
    return Work(
        f"prefill {several}{size} tokens, {columns} pages, {kind}",
        lambda runner: runner.prefill_call(words, size, kind),
    )


def _short_prompts(layout: EngineLayout) -> Work:
    """The pass over several short prompts."""
    (kind,) = pass_kinds(layout)
    return _prefill(layout.prefill_buckets[0], layout.page_buckets[0], kind, layout.prompts_a_pass)


def compile_ahead(
    runner: Any,
    work: Sequence[Work],
    progress: Progress | None = None,
    most_bytes: float = math.inf,
) -> int:
    """Compile programs, one a core at a time; the runner keeps them.

    Args:
        most_bytes: Stop at the first program that needs more temporary memory.

    Returns:
        The largest temporary allocation of a program, in bytes.
    """
    most, done = 0, 0
    pool = ThreadPoolExecutor(min(len(work), num_cores()), "dllm-compile")
    # Lowering holds the GIL. One at a time, so that compilation overlaps with the next lowering.
    in_python = threading.Lock()
    is_waited_for = False
    try:
        with _without_old_garbage():
            futures = {pool.submit(_compiled_bytes, runner, item, in_python): item for item in work}
            for future in as_completed(futures):
                most = max(most, future.result())
                done += 1
                if progress:
                    progress(futures[future].name, done, len(work))
                if is_waited_for := most > most_bytes:
                    break
    finally:
        pool.shutdown(wait=is_waited_for, cancel_futures=True)
    return most


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _without_old_garbage() -> Iterator[None]:
    """Keep the garbage collector from scanning existing objects again and again.

    That was a tenth of lowering for SDAR-1.7B. If objects are already frozen, leave them.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _compiled_bytes(runner: Any, work: Work, in_python: threading.Lock) -> int:
    call = work.call(runner)
    if call.name not in runner.compiled:
        with in_python:
            lowered = runner.lower(call)
        runner.compiled[call.name] = lowered.compile(call.options)
    analysis = runner.compiled[call.name].memory_analysis()
    if analysis is None:
        return 0
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.temp_size_in_bytes + max(0, fresh))


def run_each(runner: Any, work: Iterable[Work]) -> None:
    """Run programs once."""
    for item in work:
        runner.run(item.call(runner))
    runner.wait()
