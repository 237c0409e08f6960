"""Everything an engine will run, compiled before its first request.

Data flow: layout -> a list of acts -> the call of each, lowered, one after another, and compiled,
several at a time -> each run once on empty slots, which compiles nothing.
"""

import dataclasses
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import jax
import numpy as np

from dllm_jax.engine.layout import EngineLayout, PassKind
from dllm_jax.runner import grammars, timing
from dllm_jax.runner.calls import Call
from dllm_jax.runner.dispatch import Dispatch
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.runner.worker import Worker, is_ending

Progress = Callable[[str, int, int], None]
_one_at_a_time = threading.Lock()  # of the threads of `compile_grammars`: requests keep a core


@dataclasses.dataclass(frozen=True)
class Work:
    """A program of one size: an act on empty slots, whose slot 0 may have a grammar."""

    name: str
    act: Callable[[Dispatch], Any]
    sizes: grammars.Sizes | None = None

    def call(self, runner: Dispatch) -> Call:
        """The program as a call."""
        (call,) = runner.calls(self.act, self.sizes)
        return call


def warm_up(
    runner: ModelRunner,
    progress: Progress | None = None,
    calibrate: bool = False,
    with_constraints: bool = False,
) -> None:
    """Compile every program, make the state if there is none, run each once on empty slots.

    Args:
        progress: Called with what was compiled, how many are done, and of how many.
        calibrate: Time them too, for `cost`; no request may be in a slot.
        with_constraints: Compile the programs of structured output too, which other requests do
            not need; else a thread does when the first such request comes.

    Raises:
        DeviceFailure: A program does not compile, or run.
        ValueError: What they need was planned and does not fit.
    """
    work, bound = every_program(runner.layout, runner.num_words), []
    if with_constraints and not runner.device.is_shared:
        bound = programs_with_grammars(runner.layout, grammars.USUAL)
    if runner.state is None:  # by the worker, which has nothing else to do
        runner.submit(runner.device.compile_reset)
    temp_bytes = compile_ahead(runner, [*work, *bound], progress)
    if runner.memory is not None:
        runner.memory = dataclasses.replace(runner.memory, temp_bytes=temp_bytes)
        runner.memory.check()
    if runner.state is None:
        runner.reset()
    if bound:
        runner.expect(grammars.USUAL)
    for item in [*work, *bound]:
        runner.run(item.call(runner))
    runner.wait()
    if calibrate:
        runner.cost = timing.calibrate(runner)
    if not runner.device.is_shared:
        runner.compile_in_background = compile_grammars
    runner.is_warm = True


def compile_grammars(runner: ModelRunner, sizes: grammars.Sizes) -> Future:
    """Compile the programs for grammars of these sizes in a thread, which holds the runner weakly.

    Returns:
        A future that ends with the last program, or with the error of the first that fails.
    """
    worker, work = Worker("dllm-compile"), programs_with_grammars(runner.layout, sizes)
    done = worker.submit(runner.memory, _compile_each, weakref.ref(runner), work, sizes)
    worker.end()
    return done


def _compile_each(
    to_runner: "weakref.ref[ModelRunner]", work: Sequence[Work], sizes: grammars.Sizes
) -> None:
    for item in [*work, None]:
        with _one_at_a_time:
            runner = to_runner()
            if runner is None or not runner.is_open or is_ending():
                return
            if item is None:
                runner.device.compile_bind(sizes)
            else:
                runner.device.compile_program(item.call(runner))
            del runner


def every_program(layout: EngineLayout, saved_size: int) -> list[Work]:
    """All programs, the largest of each kind first, which take most memory and longest to compile.

    Args:
        saved_size: Words of a saved slot.
    """
    tables, sizes = layout.page_buckets[::-1], layout.prefill_buckets[::-1]
    every = itertools.product(tables, layout.slot_buckets[::-1])
    decodes = [_decode(rows, columns) for columns, rows in every]
    every = itertools.product(tables, sizes, layout.pass_kinds)
    prefills = [_prefill(size, columns, kind) for columns, size, kind in every]
    if layout.prompts_a_pass > 1:  # they stand in the first bucket of both
        (kind,) = layout.pass_kinds
        prefills.insert(0, _prefill(sizes[-1], tables[-1], kind, layout.prompts_a_pass))
    pairs = itertools.zip_longest(decodes, prefills)
    work = [item for pair in pairs for item in pair if item is not None]
    empty = timing.made_up(layout, layout.page_buckets[-1], 1)
    saved = np.zeros((saved_size,), np.int32)
    work.append(Work("admit", lambda runner: runner.admit(0, empty)))
    if not layout.starts_over:
        work.append(Work("restore", lambda runner: runner.restore(0, empty, saved, ())))
    # A prompt that sees tokens in order and keeps the row before it leaves a token to compute.
    if not (layout.is_token_causal and layout.compute_at_least):
        work.append(Work("begin", lambda runner: runner.begin(0)))
    if layout.is_full:
        work.append(Work("copy", lambda runner: runner.copy_page(0, 0)))
    return work


def programs_with_grammars(layout: EngineLayout, sizes: grammars.Sizes) -> list[Work]:
    """The decode programs of slots of which some have a grammar of these `grammars.Sizes`."""
    every = itertools.product(layout.slot_buckets, layout.page_buckets)
    return [_decode(rows, columns, sizes) for rows, columns in every]


def _decode(rows: int, columns: int, sizes: grammars.Sizes | None = None) -> Work:
    slots = np.arange(rows, dtype=np.int32)
    pages = np.full((rows, columns), -1, np.int32)
    active = int(sizes is not None)  # slot 0 with its grammar
    return Work(
        f"decode {rows} slots, {columns} pages" + (", grammars" if active else ""),
        lambda runner: runner.decode(slots, active, pages, 1, False),
        sizes,
    )


def _prefill(size: int, columns: int, kind: PassKind, prompts: int = 1) -> Work:
    pages = np.full((columns,), -1, np.int32)

    def act(runner: Dispatch) -> None:
        for slot in range(prompts):
            runner.prefill(slot, (), 0, 0, 0, False, pages, size, kind)

    several = f"{prompts} prompts of " if prompts > 1 else ""
    return Work(f"prefill {several}{size} tokens, {columns} pages, {kind}", act)


def compile_ahead(
    runner: ModelRunner,
    work: Sequence[Work],
    progress: Progress | None = None,
    most_bytes: float = math.inf,
) -> int:
    """Compile programs, one a core at a time; the runner keeps them.

    Args:
        most_bytes: Stop at the first program that needs more temporary memory.

    Returns:
        The largest temporary allocation of a program, in bytes.

    Raises:
        DeviceFailure: One does not compile.
    """
    most = 0
    pool = ThreadPoolExecutor(min(len(work), num_cores()), "dllm-compile")
    # Lowering holds the GIL. One at a time, so that compilation overlaps with the next lowering.
    in_python = threading.Lock()
    is_waited_for, began = False, time.perf_counter()
    try:
        futures = {pool.submit(_compiled_bytes, runner, item, in_python): item for item in work}
        for done, future in enumerate(as_completed(futures), 1):
            most = max(most, future.result())
            if progress:
                progress(futures[future].name, done, len(work))
            if is_waited_for := most > most_bytes:
                break
    except jax.errors.JaxRuntimeError as error:
        raise runner.failure(error) from error
    finally:
        pool.shutdown(wait=is_waited_for, cancel_futures=True)
    runner.device.note_compiling(time.perf_counter() - began)
    return most


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _compiled_bytes(runner: ModelRunner, work: Work, in_python: threading.Lock) -> int:
    call, known = work.call(runner), runner.device.compiled
    if call.name not in known:
        with in_python:
            lowered = runner.device.lower(call)
        known[call.name] = lowered.compile(call.options)
    analysis = known[call.name].memory_analysis()
    if analysis is None:
        return 0
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.temp_size_in_bytes + max(0, fresh))
