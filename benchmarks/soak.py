"""Thousands of odd requests through one engine, to find growth, leaks and recompilation.

    python benchmarks/soak.py --out benchmarks/results/soak_cpu.json

Prompts have mixed lengths and kinds (random, with a shared prefix, word problems), greedy and
drawn, with stop strings, several sequences, priorities, deadlines, streams and thresholds of their
own. One in twenty is aborted at a random moment. The pool is small, so pages are evicted and
requests preempted. After each twentieth of the run the engine is drained and examined: pages held,
live Python objects, device arrays, resident memory. Over the last half they must be flat within 5
%, nothing may have been compiled, and the last quarter must be as fast as the third within 10 %, by
wall time (which other work on the machine affects) and by this process's CPU time.
"""

import argparse
import collections
import contextlib
import ctypes
import gc
import json
import os
import random
import time
from pathlib import Path

import jax

import dllm_jax as dj
from dllm_jax.bench.numbers import environment
from dllm_jax.bench.workload import encode
from dllm_jax.tasks.problems import problem

FLAT, SAME_SPEED = 0.05, 0.10
LOOKS = 20  # how often the engine is drained and looked at
IN_FLIGHT = 24
ABORTED = 0.05
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
REASONS = ("stop", "length", "nfe", "repetition", "abort")


class Load:
    """Requests without end, from a seed."""

    def __init__(self, model, seed, longest_prompt, most_tokens):
        self.rng = random.Random(seed)
        self._model, self._longest, self._most = model, longest_prompt, most_tokens
        self._prefixes = [self._ids(longest_prompt // 2) for _ in range(12)]
        self._index = 0

    def _ids(self, count):
        special = {self._model.config.mask_token_id, *self._model.defaults.stop_token_ids}
        drawn = (self.rng.randrange(self._model.defaults.vocab_limit) for _ in range(count))
        return [3 if token in special else token for token in drawn]

    def _prompt(self):
        kind = self.rng.random()
        if kind < 0.3:
            prefix = self.rng.choice(self._prefixes)
            return prefix + self._ids(self.rng.randint(0, self._longest // 2))
        if kind < 0.5 and self._model.tokenizer is not None:
            self._index += 1
            question = problem(self.rng.choice(("plain", "hard")), 9, self._index).question
            return encode(self._model, question)[: self._longest]
        return self._ids(int(self._longest ** self.rng.random()))

    def request(self):
        """The next one."""
        rng = self.rng
        params = {"max_tokens": int(self._most ** rng.random()), "ignore_eos": rng.random() < 0.3}
        if rng.random() < 0.3:
            params |= {"temperature": rng.uniform(0.2, 1.5), "seed": rng.randrange(100)}
            params |= rng.choice(({}, {"top_k": 20}, {"top_p": 0.8}))
        if rng.random() < 0.1 and self._model.tokenizer is not None:
            params["stop"] = rng.choice((".", " the", ("7", "is ")))
        if rng.random() < 0.05:
            params["n"] = rng.randint(2, 4)
        if rng.random() < 0.1:
            params["strategy_overrides"] = {"accept_threshold": rng.uniform(0.3, 1.0)}
        if rng.random() < 0.05:
            params["max_nfe"] = rng.randint(1, 6)
        if rng.random() < 0.05:
            params["max_repetition_run"] = rng.randint(2, 4)
        return dj.Request(
            prompt_token_ids=self._prompt(),
            params=dj.SamplingParams(**params),
            priority=rng.choice((0, 0, 0, 1, -1)),
            deadline_s=rng.choice((None,) * 19 + (rng.uniform(0.01, 1.0),)),
            stream=rng.random() < 0.1,
        )


class Soak:
    """One engine under a load, and what was seen of it."""

    def __init__(self, llm, load):
        self.engine, self.load = llm.engine, load
        self.live = {}  # id -> the request, until it has ended
        self.added = self.ended = self.tokens = self.texts = 0
        self.reasons = collections.Counter()
        self.looks = []

    def clear(self):
        """Count from zero; the engine must be empty."""
        self.added = self.ended = self.tokens = self.texts = 0
        self.reasons.clear()
        self.looks.clear()

    def run(self, total, say):
        """All requests, drained and looked at `LOOKS` times on the way."""
        for look in range(LOOKS):
            goal = total * (look + 1) // LOOKS
            began, cpu, ended, tokens = time.perf_counter(), time.process_time(), *self._done()
            held = self._until(goal)
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            seen = self.look() | {
                "requests": self.ended - ended,
                "tokens": self.tokens - tokens,
                "wall_s": wall_s,
                "cpu_s": cpu_s,
                "pages_held_at_work": held,
                "load_average": os.getloadavg()[0],
            }
            self.looks.append(seen)
            say(
                f"{self.ended:>6} requests, {seen['requests'] / wall_s:6.1f} a second, "
                f"{seen['objects']} objects, {seen['rss_bytes'] / 2**20:.0f} MiB, "
                f"{held:.0f} pages held at work, {seen['pages_held']} drained, "
                f"{seen['preemptions']} preemptions, load {seen['load_average']:.1f}"
            )

    def _done(self):
        return self.ended, self.tokens

    def _until(self, goal):
        """Add, step and abort until `goal` requests have ended; mean pages held."""
        held, rounds = 0, 0
        rng, engine = self.load.rng, self.engine
        while self.added < goal or self.live:
            while self.added < goal and len(self.live) < IN_FLIGHT:
                request = self.load.request()
                request_id = engine.add(request)
                assert request_id not in self.live, request_id
                self.live[request_id] = request
                self.added += 1
            self._take(engine.step())
            # In all as many aborts as there are requests times ABORTED, whatever a step ends.
            if self.live and rng.random() < ABORTED * len(self.live) / 8:
                engine.abort(rng.choice(list(self.live)))
            held, rounds = held + engine.scheduler.pool.num_held, rounds + 1
        return held / rounds

    def _take(self, outputs):
        for output in outputs:
            request = self.live[output.request_id]  # KeyError: one that has ended already
            assert output.error is None, output.error
            assert len(output.outputs) == request.params.n
            for one in output.outputs:
                assert len(one.token_ids) <= request.params.max_tokens
            if not output.finished:
                continue
            del self.live[output.request_id]
            self.ended += 1
            for one in output.outputs:
                assert one.finish_reason in REASONS, one.finish_reason
                self.reasons[one.finish_reason] += 1
                self.tokens += len(one.token_ids)
                self.texts += 1

    def look(self):
        """What is there while the engine is empty."""
        stats = self.engine.stats()
        self.engine.scheduler.pool.check([])
        gc.collect()
        give_back_freed()
        return {
            "pages_held": stats.num_pages_held,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "objects": len(gc.get_objects()),
            "device_arrays": len(jax.live_arrays()),
            "rss_bytes": resident_bytes(),
            "preemptions": stats.num_preemptions,
            "evictions": stats.prefix_evictions,
            "prefix_hits": stats.prefix_hits,
        }


def give_back_freed():
    """Let the C library return what is free, so that resident memory is what is held."""
    with contextlib.suppress(OSError, AttributeError):  # another system's
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def resident_bytes():
    """Memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def spread(values):
    """Greatest less least over the mean; 0 for a flat line."""
    mean = sum(values) / len(values)
    return (max(values) - min(values)) / mean if mean else 0.0


def verdict(looks, compiles, late_compiles):
    """What is held against the bars, by name.

    That every request ended once, with a reason and no more tokens than asked for, was checked on
    the way. "throughput_cpu" is per second of this process's CPU time: on a machine that others
    use as well, it says more than the wall.
    """
    half = looks[len(looks) // 2 :]
    third, last = half[: len(half) // 2], half[len(half) // 2 :]

    def faster(clock):
        per_s = [
            sum(one["requests"] for one in part) / sum(one[clock] for one in part)
            for part in (third, last)
        ]
        return per_s[1] / per_s[0]

    found = {
        "pages_held_drained_most": max(one["pages_held"] for one in looks),
        "pages_held_at_work_change": rate_of_change(third, last),
        "objects_spread": spread([one["objects"] for one in half]),
        "device_arrays_spread": spread([one["device_arrays"] for one in half]),
        "rss_spread": spread([one["rss_bytes"] for one in half]),
        "compilations": compiles,
        "late_compiles": late_compiles,
        "throughput_last_over_third": faster("wall_s"),
        "throughput_last_over_third_cpu": faster("cpu_s"),
    }
    pages = found["pages_held_drained_most"], found["pages_held_at_work_change"]
    found["passed"] = {
        "pages": pages[0] == 0 and abs(pages[1]) <= FLAT,
        "objects": max(found["objects_spread"], found["device_arrays_spread"]) <= FLAT,
        "rss": found["rss_spread"] <= FLAT,
        "compilations": compiles == 0 and late_compiles == 0,
        "throughput": abs(found["throughput_last_over_third"] - 1) <= SAME_SPEED,
        "throughput_cpu": abs(found["throughput_last_over_third_cpu"] - 1) <= SAME_SPEED,
    }
    return found


@contextlib.contextmanager
def compilations():
    """The compilations inside the block, as a list that grows."""
    seen = []

    def note(event, seconds, **_):
        if event == COMPILE_EVENT:
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def rate_of_change(third, last):
    """Pages held while at work, last quarter against the third."""
    means = [sum(one["pages_held_at_work"] for one in part) / len(part) for part in (third, last)]
    return means[1] / means[0] - 1


def soak(model, total, seed=0, say=print, longest_prompt=96, most_tokens=24, **sizes):
    """Run and judge; windows are small, so that the host's share of the work is large.

    Returns:
        The report: sizes, figures, whether each bar was met, and every look.
    """
    config = dj.EngineConfig(
        **{
            "max_num_seqs": 8,
            "max_model_len": 160,
            "num_pages": 20,
            "page_size": 16,
            "slot_buckets": (1, 2, 4, 8),
            "page_buckets": (11,),
            "prefill_buckets": (32, 96),
            **sizes,
        }
    )
    where = environment()  # the code that runs is the code of this moment
    strategy = dj.strategies.MultiBD(accept_threshold=0.5, block_size=8, buffer_size=2)
    llm = dj.LLM(model, strategy, config=config, progress=False)
    running = Soak(llm, Load(llm.model, seed, longest_prompt, most_tokens))
    running.run(2 * LOOKS, lambda _: None)  # what only a first run sets up
    running.clear()
    with compilations() as compiles:
        began = time.perf_counter()
        running.run(total, say)
        seconds = time.perf_counter() - began
    found = verdict(running.looks, len(compiles), llm.engine.stats().num_late_compiles)
    stats = llm.engine.stats()
    return {
        "command": "benchmarks/soak.py",
        "model": llm.model.source,
        "strategy": str(llm.strategy),
        "requests": running.ended,
        "texts": running.texts,
        "tokens": running.tokens,
        "seed": seed,
        "sizes": llm.engine.layout.__dict__ | {"salt": "", "knobs": None},
        **where,
        "seconds": seconds,
        "finish_reasons": dict(running.reasons),
        "preemptions": stats.num_preemptions,
        "prefix_hits": stats.prefix_hits,
        "prefix_evictions": stats.prefix_evictions,
        "host": {"cores": os.cpu_count(), "load_average": os.getloadavg()},
        **found,
        "looks": running.looks,
    }


def main():
    """Run, print, write; fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:tiny-sdar")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    report = soak(args.model, args.requests, args.seed, lambda line: print(line, flush=True))
    print({name: report[name] for name in report if name not in ("looks", "sizes")})
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1, default=str) + "\n")
    missed = [name for name, met in report["passed"].items() if not met]
    if missed:
        raise SystemExit(f"error: missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
