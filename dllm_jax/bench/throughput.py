"""Throughput: many requests at once, or as they arrive, through `LLM`; latency: one batch again.

Data flow: work -> `LLM.generate` (or the engine's steps, where requests arrive over time) ->
`Ran` -> `numbers`.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from dllm_jax.bench.measure import recording
from dllm_jax.bench.numbers import Ran, check_outputs, check_readout, numbers, setting
from dllm_jax.bench.workload import Work
from dllm_jax.engine.requests import Request, RequestOutput

LONGEST_NAP_S = 0.01  # while nothing has arrived
COUNTED = (
    "num_steps",
    "num_preemptions",
    "num_late_compiles",
    "prefix_hits",
    "prefix_queries",
    "prefix_evictions",
)


def measure_batches(
    llm: Any, batches: Sequence[Sequence[Work]], use_tqdm: bool = True
) -> dict[str, Any]:
    """Run batches one after another and report them together.

    Args:
        llm: A warm `LLM`; its strategy determines the mode (`fixed.FixedWork` or any other).
        batches: One for throughput; repeats of the same shape for latency.

    Returns:
        The object of docs/benchmarks.md.

    Raises:
        ValueError: A request failed, or the tokens do not come from the readout.
    """
    ran = run(llm, batches, use_tqdm)
    check_outputs(ran.outputs)
    return {**setting(llm), **numbers(llm, ran), "readout": check_readout(llm, ran)}


def run(llm: Any, batches: Sequence[Sequence[Work]], use_tqdm: bool = True) -> Ran:
    """Run batches one after another, and count."""
    engine = llm.engine
    outputs: list[RequestOutput] = []
    walls_s = []
    before = engine.stats()
    with recording(engine) as ran:
        for batch in batches:
            began = time.perf_counter()
            outputs += serve(llm, batch, use_tqdm)
            walls_s.append(time.perf_counter() - began)
    after = engine.stats()
    return Ran(
        work=[one for batch in batches for one in batch],
        outputs=outputs,
        walls_s=walls_s,
        # Drop buckets without steps: they were dispatched before the last request's end was known.
        steps=Counter({bucket: count for bucket, count in ran.steps.items() if count}),
        passes=ran.passes,
        counts={name: getattr(after, name) - getattr(before, name) for name in COUNTED},
        waited=any(one.arrival_s for batch in batches for one in batch),
        firsts=ran.firsts,
    )


def serve(llm: Any, work: Sequence[Work], use_tqdm: bool = True) -> list[RequestOutput]:
    """Outputs in the order of the work; each request is added at its arrival time."""
    if not any(one.arrival_s for one in work):
        return llm.generate(
            [one.prompt for one in work], [one.params for one in work], use_tqdm=use_tqdm
        )
    from tqdm import tqdm

    engine = llm.engine
    coming = deque(sorted(range(len(work)), key=lambda i: work[i].arrival_s))
    outputs: dict[int, RequestOutput] = {}
    where: dict[str, int] = {}
    began = time.perf_counter()
    try:
        with tqdm(
            total=len(work), unit="prompt", leave=False, disable=None if use_tqdm else True
        ) as bar:
            while coming or where:
                now = time.perf_counter() - began
                while coming and work[coming[0]].arrival_s <= now:
                    one = work[coming[0]]
                    request = Request(prompt_token_ids=one.prompt, params=one.params)
                    where[engine.add(request)] = coming.popleft()
                if not where:
                    time.sleep(min(LONGEST_NAP_S, work[coming[0]].arrival_s - now))
                    continue
                for output in engine.step():
                    outputs[where.pop(output.request_id)] = output
                    bar.update()
    finally:
        for request_id in where:
            engine.abort(request_id)
    return [outputs[i] for i in range(len(work))]
