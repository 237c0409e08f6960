"""A load on any OpenAI server, measured by its clients.

Data flow: `Work` (`serving_work`) -> `measure` sends each request at its time -> a `Seen` for each
request -> `figures`. This imports no JAX, and decodes no answers before the load has ended. A
request counts only if its stream is complete and its counts agree; docs/benchmarks.md defines the
figures.
"""

import asyncio
import dataclasses
import itertools
import json
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dllm_jax.bench.client import Client, Exchange
from dllm_jax.bench.counters import scrape, server_figures
from dllm_jax.bench.serving_work import Work
from dllm_jax.tasks.problems import is_correct

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOODPUT = ("ttft", "tpot", "e2el")  # names of vLLM's objectives
READY_POLL_S = 0.5
SHOWN_CHARS = 200  # of an error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """How requests are sent.

    Attributes:
        endpoint: `/v1/chat/completions`, or another path, which gets `prompt` instead.
        fields: More fields of each body.
        max_concurrency: Most requests under way; None: no limit.
        timeout_s: Of a request.
        objectives: Milliseconds by name of `GOODPUT`; a good request is within all of them.
        percentiles: Which are reported.
    """

    model: str
    endpoint: str = CHAT
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_concurrency: int | None = None
    timeout_s: float = 600.0
    num_warmups: int = 0
    objectives: Mapping[str, float] = dataclasses.field(default_factory=dict)
    percentiles: Sequence[float] = (50, 90, 99)


@dataclasses.dataclass
class Seen:
    """One request as its client saw it; times in seconds from the start of the load.

    Attributes:
        due_s: Planned time of sending; until `sent_s` it waited for `max_concurrency`.
        arrivals: Time and number of new tokens of each chunk with any; the number is None if the
            server does not report it by chunk.
        metrics: Metrics in the answer (docs/http.md); empty from other servers.
        problem: Reason why it does not count.
    """

    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    arrivals: list[tuple[float, int | None]] = dataclasses.field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    visible_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problem: str | None = None

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def ttfb_s(self) -> float:
        """From sending to the first chunk, or to the end of an answer without chunks."""
        return (self.arrivals[0][0] if self.arrivals else self.ended_s) - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first chunk; a chunk of unknown size counts as one token."""
        if not self.arrivals:
            return None
        first = self.arrivals[0][1]
        behind = self.visible_tokens - (1 if first is None else first)
        return (self.e2e_s - self.ttfb_s) / behind if behind > 0 else None


def body_of(load: Load, work: Work, chunk_usage: bool) -> dict[str, Any]:
    """A request's body."""
    content: dict[str, Any] = {"prompt": work.prompt}
    if load.endpoint.endswith("/chat/completions"):
        content = {"messages": [{"role": "user", "content": work.prompt}]}
    options = {"include_usage": True} | ({"continuous_usage_stats": True} if chunk_usage else {})
    settings = {"max_tokens": work.max_tokens, "stream": True, "stream_options": options}
    return {"model": load.model, **content, **settings, **load.fields}


async def measure(client: Client, work: Sequence[Work], load: Load) -> dict[str, Any]:
    """Send the work and measure the answers.

    Raises:
        ValueError: The server refuses the first request, no request succeeded, or the answers claim
            more tokens than the server counted.
        OSError: The server cannot be reached.
    """
    chunk_usage = await _try_one(client, work[0], load)
    for _ in range(load.num_warmups):
        await _one(client, work[0], load, chunk_usage)
    before = await scrape(client)
    cpu_s, began = time.process_time(), time.perf_counter()
    seen, most = await _send(client, work, load, chunk_usage, began)
    cpu_s = time.process_time() - cpu_s
    after = await scrape(client)
    found = figures(work, seen, load)
    found |= {"most_concurrent": most, "chunk_usage": chunk_usage}
    found["client_cpu_share"] = cpu_s / found["wall_s"]
    return found | {"server": server_figures(found, before, after)}


async def wait_ready(client: Client, seconds: float) -> None:
    """Return once `/v1/models` is answered with 200.

    Raises:
        ValueError: The server is not ready in time.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            status, _ = await client.get("/v1/models")
            said = f"status {status}"
        except OSError as error:
            status, said = 0, str(error)
        if status == 200:
            return
        if time.monotonic() >= until:
            raise ValueError(
                f"/v1/models is not answered with 200 after {seconds:g} s ({said}); start the "
                "server, or raise --ready-check-timeout-sec"
            )
        await asyncio.sleep(READY_POLL_S)


async def models(client: Client) -> list[dict[str, Any]]:
    """The entries of `/v1/models`.

    Raises:
        ValueError: The answer has none.
    """
    status, data = await client.get("/v1/models")
    try:
        entries = json.loads(data)["data"] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        entries = []
    if not entries or not all(isinstance(one, dict) and "id" in one for one in entries):
        raise ValueError(
            f"/v1/models is answered with status {status}: {_cut(data)}; is --base-url that of an "
            "OpenAI server, and does it need --header Authorization=...?"
        )
    return entries


async def _try_one(client: Client, work: Work, load: Load) -> bool:
    """Send one request; returns whether the server reports usage by chunk.

    Raises:
        ValueError: The server refuses the request with and without usage by chunk.
    """
    work = dataclasses.replace(work, max_tokens=1)
    for chunk_usage in (True, False):
        answer = await client.post(load.endpoint, body_of(load, work, chunk_usage))
        if answer.status == 200:
            chunks = [json.loads(data) for _, data in answer.events]
            return chunk_usage and any(one.get("choices") and one.get("usage") for one in chunks)
        if answer.status not in (400, 422):
            break
    raise ValueError(f"the server refuses the work with status {answer.status}: {_reason(answer)}")


async def _send(
    client: Client, work: Sequence[Work], load: Load, chunk_usage: bool, began: float
) -> tuple[list[Seen], int]:
    """Send every request at its time; also returns the most concurrent requests."""
    seats = asyncio.Semaphore(load.max_concurrency or len(work))
    under_way = most = 0

    async def send(one: Work) -> Exchange | Seen:
        nonlocal under_way, most
        await asyncio.sleep(began + one.arrival_s - time.perf_counter())
        async with seats:
            under_way += 1
            most = max(most, under_way)
            try:
                return await _one(client, one, load, chunk_usage, began)
            finally:
                under_way -= 1

    answers = await asyncio.gather(*map(send, work))
    seen = [
        answer if isinstance(answer, Seen) else read(answer, one.arrival_s, began)
        for one, answer in zip(work, answers, strict=True)
    ]
    return seen, most


async def _one(
    client: Client, work: Work, load: Load, chunk_usage: bool, began: float = 0.0
) -> Exchange | Seen:
    """The answer, or a `Seen` with the problem if it failed."""
    sent_s = time.perf_counter() - began
    try:
        async with asyncio.timeout(load.timeout_s):
            return await client.post(load.endpoint, body_of(load, work, chunk_usage))
    except TimeoutError:
        problem = f"not whole after {load.timeout_s:g} s"
    except OSError as error:
        problem = str(error)
    return Seen(work.arrival_s, sent_s, time.perf_counter() - began, problem=problem)


def read(answer: Exchange, due_s: float, began: float) -> Seen:
    """An answer as its client saw it; `problem` is the reason why it does not count."""
    seen = Seen(due_s, answer.sent_s - began, answer.ended_s - began)
    if answer.status != 200:
        seen.problem = f"status {answer.status}: {_reason(answer)}"
        return seen
    try:
        seen.problem = _read_events(answer, seen, began)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        seen.problem = f"a chunk is not OpenAI's ({type(error).__name__}: {error})"
    return seen


def _read_events(answer: Exchange, seen: Seen, began: float) -> str | None:
    so_far, usage = 0, None
    for at, data in answer.events:
        chunk = json.loads(data)
        if chunk.get("error"):
            return f"error event: {_cut(str(chunk['error'].get('message')).encode())}"
        running = chunk.get("usage")
        seen.metrics = chunk.get("metrics") or seen.metrics
        if not chunk.get("choices"):
            usage = running or usage
            continue
        choice = chunk["choices"][0]
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        seen.finish_reason = choice.get("finish_reason") or seen.finish_reason
        new = running["completion_tokens"] - so_far if running else None
        so_far += new or 0
        if text or new:
            seen.text += text or ""
            seen.arrivals.append((at - began, new))
    if not answer.is_done:
        return "the stream ends without [DONE]"
    if usage is None:
        return "no usage in the stream"
    seen.prompt_tokens, seen.visible_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    seen.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if so_far > seen.visible_tokens:
        return f"chunks with {so_far} tokens, usage of {seen.visible_tokens}"
    if seen.visible_tokens and not seen.arrivals:
        return f"usage of {seen.visible_tokens} tokens, and nothing was received"
    return None


def figures(work: Sequence[Work], seen: Sequence[Seen], load: Load) -> dict[str, Any]:
    """All reported figures of a load, by name.

    Raises:
        ValueError: No request succeeded.
    """
    whole = [one for one in seen if one.problem is None]
    problems = Counter(one.problem for one in seen if one.problem is not None)
    if not whole:
        raise ValueError(f"none of {len(seen)} requests succeeded: {problems.most_common(1)[0][0]}")
    wall_s = max(one.ended_s for one in seen) - min(one.sent_s for one in seen)
    tokens = sum(one.visible_tokens for one in whole)
    prompts = sum(one.prompt_tokens for one in whole)
    sizes = [new for one in whole for _, new in one.arrivals if new is not None]
    chunks = sum(len(one.arrivals) for one in whole)
    with_metrics = [one for one in whole if "nfe" in one.metrics]
    nfe = sum(one.metrics["nfe"] for one in with_metrics)

    def spread(values: Sequence[float | None]) -> dict[str, float] | None:
        return percentiles(values, load.percentiles)

    found: dict[str, Any] = {
        "requests": len(whole),
        "failed": len(seen) - len(whole),
        "problems": dict(problems.most_common(8)),
        "prompt_tokens": prompts,
        "cached_tokens": sum(one.cached_tokens for one in whole),
        "visible_tokens": tokens,
        "wall_s": wall_s,
        "tok_s": tokens / wall_s,
        "total_tok_s": (tokens + prompts) / wall_s,
        "requests_s": len(whole) / wall_s,
        "peak_tok_s": peak_rate(whole),
        "chunks": chunks,
        "tokens_per_chunk": spread(sizes),
        "untold_tokens": tokens - sum(sizes) if sizes else None,
        "ttfb_s": spread([one.ttfb_s for one in whole]),
        "inter_block_s": spread([gap for one in whole for gap in gaps(one)]),
        "tpot_s": spread([one.tpot_s for one in whole]),
        "e2e_s": spread([one.e2e_s for one in whole]),
        "client_queue_s": spread([one.sent_s - one.due_s for one in whole]),
        "finish_reasons": dict(Counter(str(one.finish_reason) for one in whole)),
        "nfe": nfe if with_metrics else None,
        "tokens_per_forward": sum(o.visible_tokens for o in with_metrics) / nfe if nfe else None,
        "prefill_nfe": _total(with_metrics, "prefill_nfe"),
        "preemptions": _total(with_metrics, "num_preemptions"),
        "server_queue_s": spread(_milliseconds(with_metrics, "queue_time_ms")),
        "server_ttfb_s": spread(_milliseconds(with_metrics, "time_to_first_token_ms")),
    }
    if load.objectives:
        good = sum(is_good(one, load.objectives) for one in whole)
        found |= {"good_requests": good, "goodput_requests_s": good / wall_s}
    graded = [
        (one, sent.problem)
        for one, sent in zip(seen, work, strict=True)
        if sent.problem and one.problem is None
    ]
    if graded:
        right = sum(is_correct(one.text, problem) for one, problem in graded)
        found["accuracy"] = right / len(graded)
    return found


def is_good(one: Seen, objectives: Mapping[str, float]) -> bool:
    """Whether a request met all objectives, in milliseconds."""
    taken = {"ttft": one.ttfb_s, "tpot": one.tpot_s or 0.0, "e2el": one.e2e_s}
    return all(taken[name] * 1e3 <= most for name, most in objectives.items())


def gaps(one: Seen) -> list[float]:
    """Seconds between the chunks of a request."""
    times = [at for at, _ in one.arrivals]
    return [later - at for at, later in itertools.pairwise(times)]


def peak_rate(whole: Sequence[Seen]) -> float | None:
    """Most tokens that arrived within one second; None if chunks do not report their tokens."""
    arrivals = sorted((at, new) for one in whole for at, new in one.arrivals if new is not None)
    inside: deque[tuple[float, int]] = deque()
    total = most = 0
    for at, new in arrivals:
        inside.append((at, new))
        total += new
        while inside[0][0] <= at - 1.0:
            total -= inside.popleft()[1]
        most = max(most, total)
    return float(most) if arrivals else None


def percentiles(values: Sequence[float | None], which: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles of the values that are not None."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    found = np.percentile(there, list(which))
    names = (f"p{one:g}" for one in which)
    shown = {name: float(value) for name, value in zip(names, found, strict=True)}
    return {"mean": math.fsum(there) / len(there), **shown}


def _total(rows: Sequence[Seen], name: str) -> int | None:
    return sum(one.metrics.get(name) or 0 for one in rows) if rows else None


def _milliseconds(rows: Sequence[Seen], name: str) -> list[float | None]:
    values = [one.metrics.get(name) for one in rows]
    return [None if value is None else value / 1e3 for value in values]


def _reason(answer: Exchange) -> str:
    """The error message of an answer."""
    try:
        error = json.loads(answer.body)["error"]
        code, message = error.get("code"), str(error["message"])
        return _cut((f"{code}: {message}" if code else message).encode())
    except (ValueError, TypeError, KeyError, AttributeError):
        return _cut(answer.body)


def _cut(data: bytes) -> str:
    text = " ".join(data.decode(errors="replace").split())
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} ..."
