"""Everything an engine will run, compiled before its first request.

Data flow: layout -> a list of calls of the device -> each lowered, one after another, and compiled
ahead, several at a time -> each run once on empty slots, which compiles nothing any more. Which
programs there are is the device's business; here is which sizes of them.
"""

import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from dllm_jax.engine.layout import EngineLayout, PassKind, Placement

Progress = Callable[[str, int, int], None]

_TRITON = "jaxlib.mlir.dialects.tt"


@dataclasses.dataclass(frozen=True)
class Work:
    """A program of one size, and the call of the device that runs it on empty slots."""

    name: str
    run: Callable[[Any], Any]


def pass_kinds(layout: EngineLayout) -> tuple[PassKind, ...]:
    """Which prefill passes there are (`decode.PassKind`)."""
    if layout.in_window:
        return ()
    kinds = {layout.pass_kind}
    if layout.is_full and not layout.starts_over:
        kinds.add("blocks")  # text behind the prompt, where it is computed again
    return tuple(sorted(kinds))


def every_program(layout: EngineLayout, saved_size: int) -> list[Work]:
    """All of them, the largest first: they take longest to compile.

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
        knobs=layout.knob_values,
        seed=0,
        fold=0,
    )
    saved = np.zeros((saved_size,), np.int32)
    work += [
        Work("admit", lambda device: device.admit(0, empty)),
        Work("restore", lambda device: device.restore(0, empty, saved, ())),
    ]
    if not layout.is_token_causal:  # whose prompts always leave a token to compute
        work.append(Work("begin", lambda device: device.begin(0)))
    if layout.is_full:
        work.append(Work("copy", lambda device: device.copy_page(0, 0)))
    return work


def largest_programs(layout: EngineLayout) -> list[Work]:
    """Those that need the most memory."""
    columns = layout.page_buckets[-1]
    largest = layout.prefill_buckets[-1]
    work = [_decode(layout.slot_buckets[-1], columns)]
    work += [_prefill(largest, columns, kind) for kind in pass_kinds(layout)]
    if layout.prompts_a_pass * layout.prefill_buckets[0] > largest:
        work.append(_short_prompts(layout))
    return work


def _decode(rows: int, columns: int) -> Work:
    slots = np.arange(rows, dtype=np.int32)
    pages = np.full((rows, columns), -1, np.int32)
    return Work(
        f"decode {rows} slots, {columns} pages",
        lambda device: device.decode(slots, 0, pages, 1, False),
    )


def _prefill(size: int, columns: int, kind: str, slot: int = 0) -> Work:
    pages = np.full((columns,), -1, np.int32)
    return Work(
        f"prefill {size} tokens, {columns} pages, {kind}",
        lambda device: device.prefill(slot, (), 0, 0, 0, False, pages, size, kind),
    )


def _short_prompts(layout: EngineLayout) -> Work:
    """The pass that takes several prompts in."""
    count, size, columns = layout.prompts_a_pass, layout.prefill_buckets[0], layout.page_buckets[0]
    (kind,) = pass_kinds(layout)
    each = [_prefill(size, columns, kind, slot) for slot in range(count)]
    return Work(
        f"prefill {count} prompts of {size} tokens, {columns} pages, {kind}",
        lambda device: [one.run(device) for one in each],
    )


def compile_ahead(device: Any, work: Sequence[Work], progress: Progress | None = None) -> int:
    """Compile programs, as many at a time as there are cores.

    JAX keeps what is compiled this way: the call that runs it later finds it.

    Returns:
        The most bytes one of them needs beside what it is given.
    """
    _name_triton()
    _name_values_briefly()
    most, done = 0, 0
    pool = ThreadPoolExecutor(min(len(work), os.cpu_count() or 1), "dllm-compile")
    # Lowering is Python's work, of which threads do no two at once: taking turns all would end
    # together, and the compilers wait until then.
    in_python = threading.Lock()
    try:
        with _without_old_garbage():
            futures = {pool.submit(_compiled_bytes, device, one, in_python): one for one in work}
            for future in as_completed(futures):
                most = max(most, future.result())
                done += 1
                if progress:
                    progress(futures[future].name, done, len(work))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return most


def _name_triton() -> None:
    """Let MLIR find Triton's operations where it looks for those of every dialect.

    It imports that module for each operation that is made, and jaxlib has it elsewhere: Python
    searches the file system in vain some 2,500 times a program, a third of a decode program's time
    to be lowered. What is lowered is the same.
    """
    with contextlib.suppress(ImportError):
        if _TRITON not in sys.modules and importlib.util.find_spec(_TRITON) is None:
            sys.modules[_TRITON] = importlib.import_module("jaxlib.triton.dialect")


def _name_values_briefly() -> None:
    """Let Mosaic name a value of a kernel without printing the kernel.

    Its inference of layouts sorts values by name, and takes each name from the printed text of an
    operation, for which MLIR numbers all that the kernel holds: a fifth of the time in which
    SDAR-1.7B's programs are lowered. What is lowered does not depend on that order.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax.experimental.mosaic.gpu import layout_inference

        def name(self: Any) -> str:
            return f"{self.operation.name}:{self.type.name}-{self.index}"

        layout_inference.ValueSite.__str__ = name


@contextlib.contextmanager
def _without_old_garbage() -> Iterator[None]:
    """Keep the garbage collector from going through what is there already, again and again.

    A tenth of the time that SDAR-1.7B's programs take to be lowered. Who has frozen objects before
    has done so already, and they stay so.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _compiled_bytes(device: Any, work: Work, in_python: threading.Lock) -> int:
    with in_python:
        lowered = device.lower(work.run)
    if lowered is None:
        return 0
    told = lowered.compile().memory_analysis()
    if told is None:
        return 0
    fresh = told.output_size_in_bytes - told.alias_size_in_bytes
    return int(told.temp_size_in_bytes + max(0, fresh))


def run_each(device: Any, work: Iterable[Work]) -> None:
    """Run programs once."""
    for one in work:
        one.run(device)
    device.wait()
