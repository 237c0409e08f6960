"""CPU time of the host loop alone, on one core: a request's life, and a pass over 128 slots.

The device does nothing, and its fetches return prepared results.

* life: the scheduler's work for a request of 512 tokens (448 of prompt, 64 of text): admit, hash
  and look up its pages, plan its prefill, grow, publish, finish. The pool is so small that it must
  evict pages of earlier requests.
* add: `Engine.add` for it, which checks and queues it.
* pass: `Engine.step` over 128 decoding slots: plan, grow, gather the page table, dispatch, and read
  the chunk before (`Fetched` included), in which every row settled 0, 4 or 32 tokens.

    python benchmarks/bookkeeping.py --out benchmarks/results/bookkeeping.json

Prints the median and the best of the repetitions in microseconds, and writes JSON.
"""

import argparse
import gc
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from dllm_jax.engine.active import accept
from dllm_jax.engine.engine import Engine
from dllm_jax.engine.layout import EngineLayout
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.engine.scheduler import Scheduler
from dllm_jax.engine.sequence import DECODE
from dllm_jax.runner.packing import HEAD, Fetched

BARS_US = {"life": 60.0, "pass_4_tokens": 150.0}
NUM_SLOTS, BLOCK, PAGE = 128, 32, 64
PROMPT, TEXT = 448, 64
STEPS, NUM_PASSES = 8, 64  # steps of a chunk; chunks of a measurement


def make_layout(num_slots: int, num_pages: int) -> EngineLayout:
    """An engine as `sizing` makes it for a model of 4096 positions."""
    return EngineLayout(
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=PAGE,
        max_model_len=4096,
        max_steps_per_chunk=STEPS,
        block_size=BLOCK,
        window=2 * BLOCK,
        salt=b"bookkeeping",
        vocab_size=151_936,
        stop_token_ids=(151_643,),
        slot_buckets=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128),
        page_buckets=(16, 65),
        prefill_buckets=(64, 128, 256, 512, 1024),
    )


class NullDevice:
    """Does nothing; hands out prepared fetches in order."""

    num_late_compiles = num_programs = num_compiled = 0
    most_new = 8 * BLOCK

    def __init__(self, layout: EngineLayout, prepared: list[np.ndarray]):
        self.layout, self._prepared, self._next = layout, prepared, iter(prepared)

    def admit(self, *_: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def await_programs(self, _: float) -> None:
        pass

    def forget_failed_programs(self) -> None:
        pass

    def prefill(self, *_: Any) -> int:
        return 0

    def join(self, _: Any) -> None:
        pass

    def decode(self, *_: Any) -> None:
        return None

    def fetch(self, _: None) -> Fetched:
        return Fetched(next(self._next), self)  # type: ignore[arg-type]

    class cost:
        """Predicted seconds."""

        @staticmethod
        def decode_s(rows: int, columns: int) -> float:
            return 1e-3 + 1e-6 * rows * columns

        @staticmethod
        def prefill_s(size: int, columns: int, kind: str) -> float:
            return 1e-5 * size


def prepared_passes(tokens: int) -> list[np.ndarray]:
    """Harvests of 128 rows that each settle so many tokens a chunk."""
    passes = []
    width = HEAD.size + NullDevice.most_new + 256
    before = np.zeros((NUM_SLOTS,), np.int32)
    for number in range(NUM_PASSES + 1):
        # Rows are at different places of their pages, so each chunk fills one for some of them.
        length = np.arange(NUM_SLOTS) % PAGE + tokens * (number + 1)
        packed = np.full((NUM_SLOTS, width), number, np.int32)
        packed[:, : HEAD.size] = HEAD.pack(
            NUM_SLOTS,
            start=(PROMPT + length // BLOCK * BLOCK)[:, None],
            finish=1,
            nfe=STEPS * (number + 1),
            length=length[:, None],
            before=before[:, None],
            steps=STEPS,
        )
        passes.append(packed)
        before = length
    return passes


def time_passes(tokens: int) -> list[float]:
    """Microseconds of each `Engine.step` over 128 slots."""
    layout = make_layout(NUM_SLOTS, 128 * 70)
    engine = Engine(NullDevice(layout, prepared_passes(tokens)), clock=lambda: 0.0)
    rng = random.Random(tokens)
    params = SamplingParams(max_tokens=3000, ignore_eos=True)
    for _ in range(NUM_SLOTS):
        prompt = [rng.randrange(layout.vocab_size) for _ in range(PROMPT)]
        engine.add(Request(prompt_token_ids=prompt, params=params))
    while engine.stats().num_chunks_in_flight == 0 or any(
        sequence.stage != DECODE for sequence in engine.scheduler.live
    ):
        dispatched = engine._dispatch()  # the prepared fetches are for rounds of all slots
        assert dispatched
        engine._rounds.clear()
        for sequence in engine.scheduler.live:
            sequence.in_flight = 0
        if all(sequence.stage == DECODE for sequence in engine.scheduler.live):
            break
    engine._step_s = 1e-3  # as if measured
    engine.step()  # the first chunk: nothing to read
    engine.step()  # which publishes the prompts
    times = []
    for _ in range(NUM_PASSES):
        began = time.perf_counter_ns()
        engine.step()
        times.append((time.perf_counter_ns() - began) / 1e3)
    assert engine.stats().num_running == NUM_SLOTS
    return times


def time_lives(count: int) -> list[float]:
    """Microseconds of the scheduler's part of each of some requests' lives."""
    layout = make_layout(1, 64)
    scheduler = Scheduler(layout)
    rng = random.Random(0)
    times = []
    for number in range(count):
        prompt = [rng.randrange(layout.vocab_size) for _ in range(PROMPT)]
        text = [rng.randrange(layout.vocab_size) for _ in range(TEXT)]
        request = Request(
            prompt_token_ids=prompt, params=SamplingParams(max_tokens=TEXT, ignore_eos=True)
        )
        live = accept(request, str(number), number, 0.0, scheduler.layout, None, 0)
        began = time.perf_counter_ns()
        live_through(scheduler, live.sequences[0], text)
        times.append((time.perf_counter_ns() - began) / 1e3)
    return times


def live_through(scheduler: Scheduler, sequence: Any, text: list[int]) -> None:
    """Admit, compute, decode a block a chunk, and leave."""
    scheduler.add(sequence)
    scheduler.admit()
    while (piece := scheduler.next_pass(sequence, 1024)) is not None:
        sequence.done = piece.end
    sequence.stage = DECODE
    for end in range(BLOCK, TEXT + 1, BLOCK):
        scheduler.grow([sequence], 1)
        sequence.tokens[end - BLOCK :] = text[end - BLOCK : end]
        sequence.start = PROMPT + end
        if not sequence.is_sound:
            sequence.is_sound = True
            scheduler.prefixes.publish(sequence)
    scheduler.leave(sequence)


def time_adds(count: int) -> list[float]:
    """Microseconds of `Engine.add` for each of some requests."""
    layout = make_layout(1, 64)
    engine = Engine(NullDevice(layout, []), clock=lambda: 0.0)
    rng = random.Random(0)
    times = []
    for _ in range(count):
        prompt = [rng.randrange(layout.vocab_size) for _ in range(PROMPT)]
        request = Request(prompt_token_ids=prompt, params=SamplingParams(max_tokens=TEXT))
        began = time.perf_counter_ns()
        engine.add(request)
        times.append((time.perf_counter_ns() - began) / 1e3)
    return times


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Median and minimum of each, over repetitions."""
    kinds = {
        "life": lambda: time_lives(200),
        "add": lambda: time_adds(200),
        **{
            f"pass_{tokens}_tokens": lambda tokens=tokens: time_passes(tokens)
            for tokens in (0, 4, 32)
        },
    }
    results = {}
    for name, run in kinds.items():
        gc.collect()
        medians = [statistics.median(run()) for _ in range(repeats)]
        results[name] = {
            "median_us": round(statistics.median(medians), 1),
            "best_us": round(min(medians), 1),
        }
    return results


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    results = measure(args.repeats)
    print(
        f"{'':16}{'median':>9}{'best':>9}{'bar':>8}   microseconds; load {os.getloadavg()[0]:.1f}"
    )
    for name, one in results.items():
        bar = BARS_US.get(name)
        print(f"{name:16}{one['median_us']:9.1f}{one['best_us']:9.1f}{bar or '':>8}")
    if args.out:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        args.out.write_text(
            json.dumps(
                {
                    "commit": commit,
                    "python": platform.python_version(),
                    "cpu": cpu_name(),
                    "load": os.getloadavg()[0],
                    "bars_us": BARS_US,
                    "results": results,
                },
                indent=1,
            )
            + "\n"
        )


def cpu_name() -> str:
    """What the kernel calls the processor."""
    with open("/proc/cpuinfo") as lines:
        named = itertools.dropwhile(lambda line: not line.startswith("model name"), lines)
        return next(named, "unknown: ").split(":", 1)[1].strip()


if __name__ == "__main__":
    main()
