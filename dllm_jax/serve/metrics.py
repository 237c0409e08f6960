"""Counters, gauges and histograms in Prometheus' text form.

Data flow: the engine's `Counts`, ended requests and HTTP answers -> one registry in the front ->
`GET /metrics`. Names are `dllm_*`; some are repeated under vLLM's names, which its bench client,
routers and dashboards read.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from dllm_jax.serve.pipe import Counts, Facts, Usage
from dllm_jax.structured.drafts import READ

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LENGTHS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
BUCKETS = {
    "dllm_time_to_first_block_seconds": _FIRST,
    "dllm_queue_seconds": _FIRST,
    "dllm_e2e_request_latency_seconds": (*_FIRST, 60.0, 120.0),
    "dllm_inter_block_seconds": _FIRST[:9],
    "dllm_time_per_token_seconds": (
        *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
    ),
    "dllm_request_prompt_tokens": _LENGTHS,
    "dllm_request_generation_tokens": _LENGTHS,
    "dllm_tokens_per_forward": (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128),
    "dllm_grammar_compile_seconds": _FIRST,
    "dllm_grammar_states": (16, 64, 128, 256, 512, 1024, 2048, 4096),
    "dllm_step_seconds": (
        *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
        *(0.01, 0.025, 0.05, 0.1, 0.25),
    ),
}
HELP = {
    "dllm_num_requests_running": "Texts that hold a slot.",
    "dllm_num_requests_waiting": "Texts that wait for a slot.",
    "dllm_kv_cache_usage_ratio": "Share of the page pool that is held.",
    "dllm_weight_version": "Version of the weights, 0 at the start.",
    "dllm_kv_cache_pages": "Pages of the pool.",
    "dllm_kv_cache_pages_held": "Pages of the pool that are held.",
    "dllm_device_memory_bytes": "Bytes in use on a device of this process that counts them.",
    "dllm_device_memory_limit_bytes": "Bytes that this process may use of it.",
    "dllm_streams_open": "Open SSE streams.",
    "dllm_state": "1 for the state of the server.",
    "dllm_build_info": "Versions and model.",
    "dllm_prompt_tokens_total": "Prompt tokens taken in.",
    "dllm_generation_tokens_total": "Visible tokens written.",
    "dllm_nfe_total": "Forwards after prefill, summed over texts.",
    "dllm_prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "dllm_prefix_cache_hits_total": "Prompt tokens found there.",
    "dllm_num_preemptions_total": "Texts that lost their slot.",
    "dllm_recompiles_total": "Programs compiled after the start.",
    "dllm_draft_tokens_proposed_total": "Drafts judged, of texts that ended.",
    "dllm_draft_tokens_accepted_total": "Drafts accepted, of texts that ended.",
    "dllm_device_failures_total": "Device failures the engine recovered from.",
    "dllm_request_faults_total": "Exceptions in the engine that ended one request each.",
    "dllm_engine_failures_total": "Engine processes that ended.",
    "dllm_engine_restarts_total": "Engine processes that were replaced.",
    "dllm_log_lines_dropped_total": "Lines that standard error had no room for.",
    "dllm_grammar_cache_queries_total": "Constraints looked up among the compiled ones.",
    "dllm_grammar_cache_hits_total": "Constraints found there.",
    "dllm_grammar_stages_total": "Stages that texts with calls went on to.",
    "dllm_grammar_compile_seconds": "Compiling a constraint.",
    "dllm_grammar_states": "States of a constraint's automaton.",
    "dllm_tool_requests_total": "Requests that offered tools, by route and choice.",
    "dllm_tool_calls_total": "Calls in answers, by route and end.",
    "dllm_tool_relaxed_total": "Keywords of tools' schemas that were held in part, by name.",
    "dllm_reasoning_tokens_total": "Tokens of thoughts.",
    "dllm_key_refused_total": "Requests over a limit of their key, by its name.",
    "dllm_request_success_total": "Texts that ended, by reason.",
    "dllm_http_requests_total": "Answers by route and status.",
    "dllm_decisions_total": "Questions answered by /v1/decisions.",
    "dllm_decision_forwards_total": "Forwards that answered them.",
    "dllm_disconnects_total": "Clients that left before their answer ended.",
    "dllm_denoise_frames_total": "Denoise frames by fate.",
    "dllm_time_to_first_block_seconds": "From acceptance to the first committed block.",
    "dllm_queue_seconds": "From acceptance to a slot.",
    "dllm_e2e_request_latency_seconds": "From acceptance to the end.",
    "dllm_inter_block_seconds": "Between pieces of a streamed text.",
    "dllm_time_per_token_seconds": "From a slot to the end, a visible token.",
    "dllm_request_prompt_tokens": "Prompt tokens of a prompt that ended.",
    "dllm_request_generation_tokens": "Visible tokens of a prompt's texts.",
    "dllm_tokens_per_forward": "Visible tokens a forward of a prompt's texts.",
    "dllm_step_seconds": "A decode step, mean of a turn of the engine's loop.",
    "vllm:num_requests_running": "As dllm_num_requests_running.",
    "vllm:num_requests_waiting": "As dllm_num_requests_waiting.",
    "vllm:kv_cache_usage_perc": "As dllm_kv_cache_usage_ratio.",
    "vllm:diffusion_num_denoising_steps_total": "Forwards and one commit a block, as vLLM counts.",
    "vllm:diffusion_num_canvas_positions_total": "Block size times the denoising steps.",
    "vllm:diffusion_num_committed_tokens_total": "Visible tokens written.",
    "vllm:spec_decode_num_drafts_total": "Rounds in which drafts were judged.",
    "vllm:spec_decode_num_draft_tokens_total": "As dllm_draft_tokens_proposed_total.",
    "vllm:spec_decode_num_accepted_tokens_total": "As dllm_draft_tokens_accepted_total.",
}
# Counter -> field of `Counts`.
_LIVE = {
    "dllm_prompt_tokens_total": "prompt_tokens",
    "dllm_generation_tokens_total": "generated_tokens",
    "dllm_nfe_total": "nfe",
    "dllm_prefix_cache_queries_total": "prefix_queries",
    "dllm_prefix_cache_hits_total": "prefix_hits",
    "dllm_num_preemptions_total": "num_preemptions",
    "dllm_recompiles_total": "num_late_compiles",
    "dllm_draft_tokens_proposed_total": "draft_tokens_proposed",
    "dllm_draft_tokens_accepted_total": "draft_tokens_accepted",
    "dllm_device_failures_total": "num_failures",
    "dllm_request_faults_total": "num_faults",
    "dllm_grammar_cache_queries_total": "grammar_queries",
    "dllm_grammar_cache_hits_total": "grammar_hits",
    "dllm_grammar_stages_total": "grammar_stages",
}
_ROUNDS = "draft_rounds"
STATES = ("starting", "ready", "paused", "asleep", "draining", "failed")
FINISHES = ("stop", "length", "nfe", "repetition", "abort", "error")

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts of values by bucket."""

    def __init__(self, bounds: Iterable[float]):
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: Labels) -> Iterable[str]:
        """Cumulative buckets, sum and count."""
        total = 0
        for bound, count in zip((*self.bounds, None), self._counts, strict=True):
            total += count
            le = "+Inf" if bound is None else f"{bound:g}"
            yield f"{name}_bucket{_braces((*labels, ('le', le)))} {total}"
        yield f"{name}_sum{_braces(labels)} {self._sum:.9g}"
        yield f"{name}_count{_braces(labels)} {total}"


class Metrics:
    """The registry of a server.

    Args:
        model: The `model` label.
        vllm_names: Repeat some under vLLM's names.
    """

    def __init__(self, model: str, version: str, vllm_names: bool = True):
        self._label: Labels = (("model", model),)
        self._version, self._vllm_names = version, vllm_names
        self._facts: Facts | None = None
        self._counts = Counts()
        self._totals = dict.fromkeys((*_LIVE.values(), _ROUNDS), 0)
        self._before = dict(self._totals)  # of the engines before
        self._counters: dict[tuple[str, Labels], int] = {}
        self._histograms = {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
        self.streams_open = 0
        for reason in FINISHES:
            self.count("dllm_request_success_total", 0, finish_reason=reason)
        for fate in ("sent", "merged"):
            self.count("dllm_denoise_frames_total", 0, fate=fate)
        for name in (
            "decisions",
            "decision_forwards",
            "disconnects",
            "engine_failures",
            "engine_restarts",
            "reasoning_tokens",
        ):
            self.count(f"dllm_{name}_total", 0)

    def count(self, name: str, more: int = 1, **labels: str) -> None:
        """Add to a counter."""
        key = name, tuple(labels.items())
        self._counters[key] = self._counters.get(key, 0) + more

    def counted(self, name: str, **labels: str) -> int:
        """The value of a counter."""
        return self._counters.get((name, tuple(labels.items())), 0)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._histograms[name].observe(value)

    def refused(self, key: str, limit: str) -> None:
        """A request was over a limit of its key."""
        self.count("dllm_key_refused_total", key=key, limit=limit)

    def turns(self, route: str, whole: int, cut: int, thought_tokens: int) -> None:
        """A request whose answer may have calls and thoughts has ended."""
        for end, number in (("whole", whole), ("cut", cut)):
            self.count("dllm_tool_calls_total", number, route=route, end=end)
        self.count("dllm_reasoning_tokens_total", thought_tokens)

    def relaxed(self, notes: Iterable[str]) -> None:
        """What a constraint's notes say of tools: the keyword of each, or "other"."""
        for note in notes:
            word, *_ = re.split(r"\W", note.partition(": ")[0].rpartition(".")[2])
            self.count("dllm_tool_relaxed_total", keyword=word if word in READ else "other")

    def describe(self, facts: Facts) -> None:
        """Keep the facts that the engine sent when it was ready."""
        self._facts = facts

    def update(self, new: Counts) -> None:
        """The engine's counts; a new engine's begin at zero again."""
        if new.prompt_tokens < self._counts.prompt_tokens:
            self._before = dict(self._add_up())
        steps = self._histograms["dllm_step_seconds"]
        for ran, seconds in new.steps:
            steps.observe(seconds / ran, ran)
        for _, seconds, states in new.compiled:
            self.observe("dllm_grammar_compile_seconds", seconds)
            if states:
                self.observe("dllm_grammar_states", states)
        self._counts = new

    def _add_up(self) -> dict[str, int]:
        """Totals over all engines. A text that a stop string shortens lowers no reported total."""
        for name, before in self._before.items():
            total = before + getattr(self._counts, name)
            self._totals[name] = max(self._totals[name], total)
        return self._totals

    def ended(self, usage: Usage) -> None:
        """A prompt has ended."""
        of = self._histograms
        if usage.ttfb_s is not None:
            of["dllm_time_to_first_block_seconds"].observe(usage.ttfb_s)
        if usage.queue_s is not None:
            of["dllm_queue_seconds"].observe(usage.queue_s)
        of["dllm_e2e_request_latency_seconds"].observe(usage.e2e_s)
        of["dllm_request_prompt_tokens"].observe(usage.prompt_tokens)
        of["dllm_request_generation_tokens"].observe(usage.written)
        if usage.written:
            seconds = usage.e2e_s - (usage.queue_s or 0.0)
            of["dllm_time_per_token_seconds"].observe(seconds / usage.written)
        if usage.nfe:
            of["dllm_tokens_per_forward"].observe(usage.written / usage.nfe)

    def text(self, state: str) -> str:
        """Everything, as Prometheus reads it."""
        lines: list[str] = []
        for name, kind, values in self._families(state):
            lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_braces(labels)} {value:.12g}" for labels, value in values]
        for name, histogram in self._histograms.items():
            lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} histogram"]
            lines += histogram.lines(name, self._label)
        return "\n".join(lines) + "\n"

    def _families(self, state: str) -> Iterable[tuple[str, str, list[tuple[Labels, float]]]]:
        counts, label = self._counts, self._label
        self._add_up()
        usage = counts.num_pages_held / counts.num_pages if counts.num_pages else 0.0
        gauges = {
            "dllm_num_requests_running": counts.num_running,
            "dllm_num_requests_waiting": counts.num_waiting,
            "dllm_kv_cache_usage_ratio": usage,
            "dllm_weight_version": counts.weight_version,
            "dllm_kv_cache_pages": counts.num_pages,
            "dllm_kv_cache_pages_held": counts.num_pages_held,
            "dllm_streams_open": self.streams_open,
        }
        if self._vllm_names:
            gauges["vllm:num_requests_running"] = counts.num_running
            gauges["vllm:num_requests_waiting"] = counts.num_waiting
            gauges["vllm:kv_cache_usage_perc"] = usage
        for name, value in gauges.items():
            yield name, "gauge", [(label, float(value))]
        for place, name in enumerate(
            ("dllm_device_memory_bytes", "dllm_device_memory_limit_bytes")
        ):
            values = [
                ((*label, ("device", str(number))), float(one[place]))
                for number, one in enumerate(counts.devices)
            ]
            yield name, "gauge", values
        states = [((*label, ("state", one)), float(one == state)) for one in STATES]
        yield "dllm_state", "gauge", states
        if self._facts is not None:
            facts = self._facts
            fields = {"jax": facts.jax, "strategy": facts.strategy, "dtype": facts.dtype}
            about = (("version", self._version), *fields.items())
            yield "dllm_build_info", "gauge", [((*label, *about), 1.0)]
        for name, field in _LIVE.items():
            yield name, "counter", [(label, float(self._totals[field]))]
        by_name: dict[str, list[tuple[Labels, float]]] = {}
        for (name, labels), value in self._counters.items():
            by_name.setdefault(name, []).append(((*label, *labels), float(value)))
        for name, values in by_name.items():
            yield name, "counter", values
        for name, value in self._of_vllm().items():
            yield name, "counter", [(label, value)]

    def _of_vllm(self) -> Mapping[str, float]:
        """Metrics that vLLM's bench client reads; none for a causal strategy."""
        facts, totals = self._facts, self._totals
        if not self._vllm_names or facts is None or facts.causal:
            return {}
        if facts.drafts:
            return {
                "vllm:spec_decode_num_drafts_total": totals[_ROUNDS],
                "vllm:spec_decode_num_draft_tokens_total": totals["draft_tokens_proposed"],
                "vllm:spec_decode_num_accepted_tokens_total": totals["draft_tokens_accepted"],
            }
        # vLLM counts a commit for each block; its client takes them off again.
        size, tokens = facts.block_size, totals["generated_tokens"]
        steps = totals["nfe"] + tokens / size
        return {
            "vllm:diffusion_num_denoising_steps_total": steps,
            "vllm:diffusion_num_canvas_positions_total": steps * size,
            "vllm:diffusion_num_committed_tokens_total": tokens,
        }


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
