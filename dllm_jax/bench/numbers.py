"""Turns an engine's counters into the figures of docs/benchmarks.md and records the machine."""

import dataclasses
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dllm_jax import __version__
from dllm_jax.bench import measure, roofline
from dllm_jax.bench.fixed import FixedWork, tokens_a_step
from dllm_jax.bench.rounds import Rounds, round_figures, time_rounds, width_shares
from dllm_jax.bench.workload import Work
from dllm_jax.engine.requests import DraftMetrics, RequestOutput
from dllm_jax.loading import jax_settings
from dllm_jax.strategies import DFlash
from dllm_jax.strategies.core.knobs import knob_rules
from dllm_jax.tasks.problems import is_correct

BARE_STEPS, BARE_REPEATS = 24, 3


@dataclasses.dataclass
class Ran:
    """The work of a measurement and its time.

    Attributes:
        walls_s: Wall time of each batch, from the first request added to the last one ended.
        counts: Differences of `Engine.stats` over all batches.
        waited: Whether the engine had to wait for arrivals; idle time is then no overhead.
        firsts: Tokens of each request that arrived at its `ttfb_s`, by its id.
    """

    work: list[Work]
    outputs: list[RequestOutput]
    walls_s: list[float]
    steps: Counter[measure.Decode]
    passes: Counter[measure.Prefill]
    counts: dict[str, int]
    waited: bool = False
    firsts: dict[str, int] = dataclasses.field(default_factory=dict)


def numbers(llm: Any, ran: Ran) -> dict[str, Any]:
    """All reported figures of a run, by name."""
    wall_s = sum(ran.walls_s)
    tokens = sum(_visible(output) for output in ran.outputs)
    nfe = sum(output.metrics.nfe for output in ran.outputs)
    counts = ran.counts
    found = {
        "requests": len(ran.outputs),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in ran.outputs),
        "visible_tokens": tokens,
        "nfe": nfe,
        "tokens_per_forward": tokens / max(nfe, 1),
        "prefill_nfe": sum(output.metrics.prefill_nfe for output in ran.outputs),
        "wall_s": wall_s,
        "tok_s": tokens / wall_s,
        "batch_s": percentiles(ran.walls_s) if len(ran.walls_s) > 1 else None,
        "decode_steps": counts["num_steps"],
        "ttfb_s": percentiles([o.metrics.ttfb_s for o in ran.outputs]),
        "tpot_s": percentiles([_tpot_s(o, ran.firsts) for o in ran.outputs]),
        "e2e_s": percentiles([o.metrics.e2e_s for o in ran.outputs]),
        "preemptions": counts["num_preemptions"],
        "late_compiles": counts["num_late_compiles"],
        "prefix_hits": counts["prefix_hits"],
        "prefix_queries": counts["prefix_queries"],
        "cached_tokens": sum(output.metrics.cached_tokens for output in ran.outputs),
        "finish_reasons": dict(Counter(o.outputs[0].finish_reason for o in ran.outputs)),
    }
    drafted = DraftMetrics.together(output.metrics.draft for output in ran.outputs)
    if drafted is not None:
        found["draft"] = drafted.figures()
    graded = [(o, w.problem) for o, w in zip(ran.outputs, ran.work, strict=True) if w.problem]
    if graded:
        right = sum(is_correct(output.outputs[0].text, of) for output, of in graded)
        found["accuracy"] = right / len(graded)
    return found | _overhead(llm, ran, tokens)


def _overhead(llm: Any, ran: Ran, tokens: int) -> dict[str, Any]:
    """Wall time compared with the same programs in a bare loop of the same run."""
    engine = llm.engine
    context = mean_context(ran)
    rounds = _rounds(llm, ran, context)
    step_ms = {
        bucket: rounds[bucket].bare_ms
        if rounds
        else measure.decode_step_ms(engine, *bucket, int(context), BARE_STEPS, BARE_REPEATS)
        for bucket in ran.steps
    }
    pass_ms = {
        bucket: measure.prefill_pass_ms(engine, *bucket, repeats=BARE_REPEATS)
        for bucket in ran.passes
    }
    prefill_s = sum(count * pass_ms[bucket] for bucket, count in ran.passes.items()) / 1e3
    bare_s = sum(count * step_ms[bucket] for bucket, count in ran.steps.items()) / 1e3
    decode_s = sum(ran.walls_s) - prefill_s
    steps = max(ran.counts["num_steps"], 1)
    floors = [
        (
            count,
            rounds[bucket].floor_ms(engine, context)
            if rounds
            else roofline.floor_ms(
                llm.model, bucket[0], engine.layout.window, context, device_kind()
            ),
        )
        for bucket, count in ran.steps.items()
    ]
    floor = None
    if floors and all(ms is not None for _, ms in floors):
        floor = sum(count * (ms or 0.0) for count, ms in floors) / steps
    shown_ms = decode_s / steps * 1e3
    parts = round_figures(rounds, ran.steps, None if ran.waited else shown_ms) if rounds else {}
    return parts | {
        "prefill_s": prefill_s,
        "decode_tok_s": None if ran.waited else tokens / decode_s,
        "step_ms": None if ran.waited else shown_ms,
        "bare_step_ms": bare_s / steps * 1e3,
        "floor_ms": floor,
        "step_over_floor": None if ran.waited or floor is None else shown_ms / floor,
        "host_overhead": None if ran.waited else 1 - bare_s / decode_s,
        "decode_programs": [
            {"rows": rows, "pages": columns, "steps": count, "bare_ms": step_ms[rows, columns]}
            for (rows, columns), count in sorted(ran.steps.items())
        ],
        "prefill_programs": [
            {
                "tokens": size,
                "prompts": prompts,
                "pages": columns,
                "passes": count,
                "bare_ms": pass_ms[bucket],
            }
            for bucket, count in sorted(ran.passes.items())
            for size, columns, _, prompts in [bucket]
        ],
    }


def _rounds(llm: Any, ran: Ran, context: float) -> dict[measure.Decode, Rounds]:
    """For a strategy that drafts, the timed rounds of each bucket; else empty."""
    if not isinstance(llm.strategy, DFlash):
        return {}
    nfe = sum(output.metrics.nfe for output in ran.outputs)
    drafted = DraftMetrics.together(output.metrics.draft for output in ran.outputs)
    shares = width_shares(llm.strategy.choices, nfe, drafted)
    how = (int(context), BARE_STEPS, BARE_REPEATS, shares)
    return {bucket: time_rounds(llm.engine, *bucket, *how) for bucket in ran.steps}


def mean_context(ran: Ran) -> float:
    """Tokens in the cache of a decoding request, on average over its life."""
    lengths = [len(o.prompt_token_ids) + _visible(o) / 2 for o in ran.outputs]
    return sum(lengths) / len(lengths)


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """p50, p90 and p99 of the values that are not None."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    found = np.percentile(there, (50, 90, 99))
    return {name: float(value) for name, value in zip(("p50", "p90", "p99"), found, strict=True)}


def _visible(output: RequestOutput) -> int:
    return sum(len(one.token_ids) for one in output.outputs)


def _tpot_s(output: RequestOutput, firsts: Mapping[str, int]) -> float | None:
    """Seconds a token after `ttfb_s`; None if the whole text had arrived by then."""
    metrics = output.metrics
    behind = _visible(output) - firsts.get(output.request_id, 0)
    if behind <= 0 or metrics.ttfb_s is None:
        return None
    return (metrics.e2e_s - metrics.ttfb_s) / behind


# --- where it was measured ----------------------------------------------------------------------


def setting(llm: Any) -> dict[str, Any]:
    """Model, strategy, sizes, device, versions, commit."""
    model, strategy, layout = llm.model, llm.strategy, llm.engine.layout
    return {
        "model": model.source,
        "draft_model": next((one.source for one in llm.engine.runner.programs.aux.values()), None),
        "config": dataclasses.asdict(model.config),
        "dtype": str(jax.tree.leaves(model.params)[0].dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": model.kv_cache_dtype,
        "quantized_head": model.has_quantized_head,
        "mode": "adaptive" if tokens_a_step(strategy) is None else "fixed",
        "strategy": type(strategy).__name__,
        "thresholds": {name: float(getattr(strategy, name)) for name in knob_rules(strategy)},
        "tokens_per_step": tokens_a_step(strategy),
        "block_size": layout.block_size,
        "buffer_size": strategy.buffer_size,
        "num_slots": layout.num_slots,
        "num_pages": layout.num_pages,
        "page_size": layout.page_size,
        "max_model_len": layout.max_model_len,
        "slot_buckets": layout.slot_buckets,
        "page_buckets": layout.page_buckets,
        "prefill_buckets": layout.prefill_buckets,
        "prefix_caching": layout.prefix_caching,
        **environment(),
    }


def environment() -> dict[str, Any]:
    """Device, versions and commit."""
    jax_settings.enable_async_dispatch()  # must precede the first look for devices
    return {
        "device": device_kind(),
        "num_devices": jax.device_count(),
        "dllm_jax": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "async_dispatch": os.environ.get(jax_settings.ASYNC_DISPATCH) == "1",
        "commit": commit(),
    }


def device_kind() -> str:
    """JAX's name of the device."""
    return jax.devices()[0].device_kind


def commit() -> str | None:
    """The commit of this checkout, with a "+" suffix if files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def check_outputs(outputs: Sequence[RequestOutput]) -> None:
    """Refuse to report numbers of failed requests.

    Raises:
        ValueError: A request failed.
    """
    for i, output in enumerate(outputs):
        if output.error is not None:
            raise ValueError(f"request {i} failed: {output.error}")


def check_readout(llm: Any, ran: Ran) -> dict[str, Any]:
    """Evidence that the tokens come from the model and no part of a forward was skipped.

    Raises:
        ValueError: The evidence shows the contrary.
    """
    distinct = len({token for o in ran.outputs for one in o.outputs for token in one.token_ids})
    bucket = max(ran.steps, key=lambda one: ran.steps[one])
    head = measure.head_in_program(llm.engine, *bucket)
    readout: dict[str, Any] = {"distinct_tokens": distinct, "head_in_program": head}
    if isinstance(llm.strategy, FixedWork):
        readout["first_token_matches_dense"] = measure.first_token_is_the_models(llm)
    check_own(readout)
    return readout


def check_own(readout: dict[str, Any]) -> None:
    """Refuse a run whose tokens are not the readout's own.

    Raises:
        ValueError: Some evidence shows that they are not.
    """
    if readout["distinct_tokens"] < 2 or not all(readout.values()):
        raise ValueError(f"the tokens are not the readout's own: {readout}; the run does not count")
