"""HTTP beside `LLM.generate` on one engine: throughput, first block, a long prompt among short.

    python benchmarks/serve_http_gpu.py --out benchmarks/results/serve_http_h200.json

One engine is compiled and used twice: its process measures it in-process before it reports itself
ready, then this process asks the same prompts over HTTP, whole and streamed. The work is `fixed`
(dllm_jax.bench.fixed), weights and prompts are random, nothing is cached between requests, and a
tokenizer of as many words as the vocabulary makes text of the ids, so that texts can be compared.

Texts have `mixed` lengths, as in use. Those of one `equal` length are told beside them: in-process
all slots then start and end in the same step, and no chunk runs with a slot that has just ended.
Requests that arrive one after the other, over HTTP or not, lose that; so only the first has a bar.

`where` says what the engine did meanwhile, in each form: the programs its worker dispatched and the
seconds of that, the steps, the tokens of each, the share of the time in which the loop waited for
the device, and the share of fetches that were there already, when the device may have run dry; and
the ways to the device and back of a first block.

The file is written after each part. `--smoke` shrinks lengths so that the built-in model can run
it on a CPU:

    python benchmarks/serve_http_gpu.py --smoke --model builtin:tiny-sdar --out /tmp/http.json
"""

import argparse
import asyncio
import atexit
import hashlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LEAST_SHARE, MOST_DELAY_MS = 0.97, 3.0
SLOTS, TOKENS_PER_STEP, PAGE = 8, 4, 64
KINDS = ("mixed", "equal")
READY_S = 1e-3  # of a fetch that does not wait; a chunk takes 16 ms or more
Arrivals = tuple[list[list[float]], float, float]  # of each text; of the long prompt; of its end


def sizes(smoke: bool) -> dict[str, int]:
    """Lengths and counts."""
    if smoke:
        return {"prompt": 64, "output": 64, "mixed": 10, "equal": 8, "singles": 2, "repeats": 1} | {
            "least_output": 32,
            "most_output": 128,
            "late_repeats": 1,
            "running_output": 384,
            "pieces": 3,
            "long": 440,
            "prefill": 128,
        }
    return {"prompt": 512, "output": 256, "mixed": 40, "equal": 8, "singles": 12, "repeats": 3} | {
        "least_output": 96,
        "most_output": 512,
        "late_repeats": 2,
        "running_output": 2560,
        "pieces": 24,
        "long": 32000,
        "prefill": 1024,
    }


# --- the engine process ---------------------------------------------------------------------------


def make_engine(settings: dict[str, Any], progress: Any) -> Any:
    """The engine, measured by itself first; prompts and figures go to a file."""
    import dllm_jax as dj
    from dllm_jax.bench.fixed import FixedWork
    from dllm_jax.bench.numbers import environment
    from dllm_jax.bench.workload import Lengths, random_work
    from dllm_jax.serve.child.engine import served
    from dllm_jax.serve.child.process import yield_processor

    size, folder = settings["sizes"], Path(settings["folder"])
    began = time.perf_counter()
    model = dj.load(settings["model"])
    model = model.replace(tokenizer_source=_words(folder, model.config))
    columns = [-(-(tokens + 32) // PAGE) for tokens in _lengths(size)]
    llm = dj.LLM(
        model,
        FixedWork(tokens_per_step=TOKENS_PER_STEP),
        progress=lambda name, done, total: progress(done, total),
        config=dj.EngineConfig(
            max_num_seqs=SLOTS,
            max_model_len=max(_lengths(size)),
            slot_buckets=(SLOTS,),
            page_buckets=tuple(columns),
            prefill_buckets=(size["prefill"],),
            num_pages=SLOTS * columns[1] + columns[2] + 16,
            enable_prefix_caching=False,
        ),
    )
    yield_processor()
    start_s = time.perf_counter() - began
    recorder = Recorder(llm.engine.runner)
    atexit.register(recorder.write, folder / "where.json")

    def work(count: int, prompt: int, output: Lengths, seed: int) -> list[Any]:
        return random_work(model, count, Lengths(prompt, prompt), output, seed)

    least, most, usual = (size[name] for name in ("least_output", "most_output", "output"))
    asked = {
        "mixed": work(size["mixed"], size["prompt"], Lengths(least, most), 0),
        "equal": work(size["equal"], size["prompt"], Lengths(usual, usual), 1),
        "single": work(size["singles"] + 2, size["prompt"], Lengths(usual, usual), 2),
        "running": work(SLOTS - 1, size["prompt"], Lengths(*2 * (size["running_output"],)), 3),
        "late": work(1, size["long"], Lengths(PAGE, PAGE), 4),
    }
    prompts = {
        name: [(one.prompt, one.params.max_tokens) for one in many] for name, many in asked.items()
    }
    figures: dict[str, Any] = {}
    digests: dict[str, list[str]] = {}
    for name in KINDS:
        many = asked[name]
        llm.generate([many[0].prompt], many[0].params, use_tqdm=False)
        spans, outputs = [], []
        for _ in range(size["repeats"]):
            before = time.perf_counter()
            outputs = llm.generate(
                [one.prompt for one in many], [one.params for one in many], use_tqdm=False
            )
            spans.append((before, time.perf_counter()))
        digests[name] = [_digest(output.outputs[0].text) for output in outputs]
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        figures[name] = throughput(tokens, spans)
    first, whole = [], []
    for one in asked["single"]:
        before = time.perf_counter()
        stream = llm.stream(one.prompt, one.params)
        next(stream)
        first.append((before, time.perf_counter()))
        for _ in stream:
            pass
        whole.append(time.perf_counter() - before)
    late = [
        _among(llm.engine, asked["running"], asked["late"][0], size["pieces"])
        for _ in range(size["late_repeats"])
    ]
    figures |= {
        "first_block_ms": [1e3 * (came - sent) for sent, came in first[2:]],
        "first_spans": first[2:],
        "whole_ms": [1e3 * one for one in whole[2:]],
        "late": gaps(late),
    }
    measured = {
        "environment": environment(),
        "start_s": start_s,
        "page_buckets": llm.engine.layout.page_buckets,
        "figures": figures,
        "prompts": prompts,
        "digests": digests,
    }
    (folder / "engine.json").write_text(json.dumps(measured, default=str))
    return served(llm)


class Recorder:
    """When the runner's worker ran which program, and when the loop fetched how many steps."""

    def __init__(self, runner: Any):
        self.calls: list[tuple[float, float, str]] = []
        self.fetches: list[tuple[float, float, int]] = []
        call, fetch = runner._call, runner.fetch

        def timed(program: Any) -> Any:
            before = time.perf_counter()
            try:
                return call(program)
            finally:
                self.calls.append((before, time.perf_counter(), program.key[0]))

        def fetched(chunk: Any) -> Any:
            before = time.perf_counter()
            found = fetch(chunk)
            self.fetches.append((before, time.perf_counter(), found.steps))
            return found

        runner._call, runner.fetch = timed, fetched

    def write(self, path: Path) -> None:
        """Both lists."""
        path.write_text(json.dumps({"calls": self.calls, "fetches": self.fetches}))


def _lengths(size: dict[str, int]) -> list[int]:
    """Tokens of the longest request of each part, in ascending order."""
    short = size["prompt"] + max(size["output"], size["most_output"])
    return [short, size["prompt"] + size["running_output"], size["long"] + PAGE]


def _words(folder: Path, config: Any) -> Any:
    """A tokenizer whose words are `w0`, `w1`, ..., one an id."""
    from dllm_jax.loading.model import TokenizerSource

    mask = "<|MASK|>"
    words = {f"w{i}": i for i in range(config.vocab_size) if i != config.mask_token_id}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": config.mask_token_id, "content": mask, "special": True, **flags}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w3"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": mask}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return TokenizerSource("words", folder)


def _among(engine: Any, running: list[Any], late: Any, pieces: int) -> Arrivals:
    """Times at which running requests had new text; when the long prompt came, and when it ended.

    It comes once each of the others has had some pieces of text, and they are ended behind it.
    """
    import dllm_jax as dj
    from dllm_jax.engine.inbox import News

    arrivals: dict[str, list[float]] = {}
    news: dict[str, News] = {}
    came = ended = None
    with engine.inbox() as inbox:
        for one in running:
            request = dj.Request(prompt_token_ids=one.prompt, params=one.params, stream=True)
            name = inbox.add(request)
            arrivals[name], news[name] = [], News(every=False)
        late_id = ""
        for output in inbox:
            now = time.perf_counter()
            if output.request_id == late_id:
                if output.finished:
                    ended = now
                    break
                continue
            if any(event.text for event in news[output.request_id].of(output)):
                arrivals[output.request_id].append(now)
            if came is None and all(len(times) >= pieces for times in arrivals.values()):
                request = dj.Request(prompt_token_ids=late.prompt, params=late.params, stream=True)
                late_id, came = inbox.add(request), time.perf_counter()
    while engine.has_work:
        engine.step()
    if came is None or ended is None:
        raise ValueError("the running texts ended before the long prompt did; make them longer")
    return list(arrivals.values()), came, ended


# --- the client -----------------------------------------------------------------------------------


def throughput(tokens: int, spans: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Runs of the same work, from their beginnings and ends."""
    walls = [end - start for start, end in spans]
    return {
        "tokens": tokens,
        "walls_s": walls,
        "tok_s": tokens / statistics.median(walls),
        "spans": spans,
    }


def where(recorded: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    """What the engine did in the runs of a form (`throughput`), a run on average."""
    spans, wall = form.pop("spans"), sum(form["walls_s"])

    def within(many: list[Any]) -> list[Any]:
        return [one for one in many for start, end in spans if start <= one[0] and one[1] <= end]

    calls, fetches = within(recorded["calls"]), within(recorded["fetches"])
    steps = sum(steps for *_, steps in fetches)
    programs = {
        name: {
            "calls": sum(one == name for *_, one in calls) / len(spans),
            "seconds": sum(end - start for start, end, one in calls if one == name) / len(spans),
        }
        for name in sorted({name for *_, name in calls})
    }
    waits = [end - start for start, end, _ in fetches]
    return {
        "steps": steps / len(spans),
        "tokens_a_step": form["tokens"] * len(spans) / max(1, steps),
        "loop_waits_share": sum(waits) / wall,
        "ready_fetches_share": sum(wait < READY_S for wait in waits) / max(1, len(waits)),
        "programs": programs,
    }


def everywhere(recorded: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """`where` and `first_ways` of both sides."""
    found = {}
    for side in ("in_process", "http"):
        forms = {
            n: one for n, one in report[side].items() if isinstance(one, dict) and "spans" in one
        }
        found[side] = {name: where(recorded, one) for name, one in forms.items()}
        found[side]["first_block"] = first_ways(recorded, report[side].pop("first_spans"))
    return found


def first_ways(recorded: dict[str, Any], spans: list[tuple[float, float]]) -> dict[str, float]:
    """Median milliseconds of a first block to the device's worker, and from the fetch back."""
    calls = sorted(start for start, *_ in recorded["calls"])
    fetches = sorted(end for _, end, _ in recorded["fetches"])
    to = [min(one for one in calls if one >= sent) - sent for sent, _ in spans]
    back = [came - max(one for one in fetches if one <= came) for _, came in spans]
    return {"to_ms": 1e3 * statistics.median(to), "back_ms": 1e3 * statistics.median(back)}


def gaps(runs: list[Arrivals]) -> dict[str, Any]:
    """Milliseconds between arrivals of a request: before the long prompt came, and until its end.

    The first of each is left out: prompts are still read then.
    """
    before, after, began = [], [], []
    for arrivals, came, ended in runs:
        for times in arrivals:
            for one, next_one in itertools.pairwise(times[1:]):
                if next_one <= came:
                    before.append(1e3 * (next_one - one))
                elif next_one <= ended:
                    after.append(1e3 * (next_one - one))
                    began.append(one - came)
    measured = {"before": _spread(before), "after": _spread(after)}
    measured["late_s"] = [ended - came for _, came, ended in runs]
    if before and after:
        # A round may end no token that can be shown: some gaps are two rounds long.
        most = 1.5 * measured["after"]["p50"]
        long = [at for at, one in zip(began, after, strict=True) if one > most]
        measured["long_share_after"] = len(long) / len(after)
        measured["long_began_s"] = sorted(long)  # since the long prompt came
        names = ("mean", "p50", "p90", "p99")
        measured["rise"] = {n: measured["after"][n] / measured["before"][n] for n in names}
    return measured


def _spread(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"count": len(values)}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    named = {f"p{n}": cuts[n - 1] for n in (50, 90, 99)}
    return {"count": len(values), "mean": statistics.fmean(values), **named, "max": max(values)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def body(prompt: list[int], max_tokens: int, stream: bool) -> dict[str, Any]:
    """A request as the engine's own."""
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}


def text_of(answer: Any) -> str:
    """The text of an answer, streamed or whole."""
    if answer.status != 200:
        raise ValueError(answer.body.decode()[:300])
    if not answer.events:
        return json.loads(answer.body)["choices"][0]["text"]
    measured = [json.loads(data) for _, data in answer.events]
    return "".join(choice["text"] for one in measured for choice in one["choices"])


async def over_http(
    port: int, measured: dict[str, Any], size: dict[str, int], found: dict[str, Any]
) -> None:
    """The same work through the server; `found` is filled part by part."""
    from dllm_jax.bench.client import Client

    client = Client(f"http://127.0.0.1:{port}")
    prompts, path = measured["prompts"], "/v1/completions"
    await client.post(path, body(*prompts["mixed"][0], True))
    for kind, (name, stream) in itertools.product(KINDS, (("whole", False), ("stream", True))):
        spans, texts = [], []
        for _ in range(size["repeats"]):
            bodies = [body(*one, stream) for one in prompts[kind]]
            before = time.perf_counter()
            answers = await asyncio.gather(*(client.post(path, one) for one in bodies))
            spans.append((before, time.perf_counter()))
            texts = [text_of(answer) for answer in answers]
        same = [_digest(text) for text in texts] == measured["digests"][kind]
        form = throughput(measured["figures"][kind]["tokens"], spans)
        found[f"{kind}_{name}"] = form | {"same_texts": same}
    first, whole = [], []
    for one in prompts["single"]:
        answer = await client.post(path, body(*one, True))
        text_of(answer)
        first.append((answer.sent_s, answer.events[0][0]))
        whole.append(1e3 * (answer.ended_s - answer.sent_s))
    found["first_block_ms"] = [1e3 * (came - sent) for sent, came in first[2:]]
    found["first_spans"], found["whole_ms"] = first[2:], whole[2:]
    found["late"] = gaps(
        [await _among_http(port, prompts, size) for _ in range(size["late_repeats"])]
    )
    status, metrics = await client.get("/metrics")
    lines = metrics.decode().splitlines() if status == 200 else []
    found["late_compiles"] = [line for line in lines if line.startswith("dllm_recompiles_total")]
    client.close()


async def _among_http(port: int, prompts: Any, size: dict[str, int]) -> Arrivals:
    """`_among` through the server."""
    arrivals: list[list[float]] = [[] for _ in prompts["running"]]
    ready = asyncio.Event()

    async def run(prompt: list[int], max_tokens: int, times: list[float]) -> None:
        data = json.dumps(body(prompt, max_tokens, True)).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        try:
            writer.write(head.encode() + data)
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
                    if all(len(one) >= size["pieces"] for one in arrivals):
                        ready.set()
                elif line.startswith(b"data: [DONE]"):
                    return
        finally:
            writer.close()

    every = [
        asyncio.create_task(run(*one, times))
        for one, times in zip(prompts["running"], arrivals, strict=True)
    ]
    async with asyncio.timeout(30):
        await ready.wait()
    came = time.perf_counter()
    await run(*prompts["late"][0], [])
    ended = time.perf_counter()
    for task in every:
        task.cancel()
    await asyncio.gather(*every, return_exceptions=True)
    return arrivals, came, ended


def compared(measured: dict[str, Any], http: dict[str, Any]) -> dict[str, Any]:
    """Both sides, and the bars."""
    own = measured["figures"]
    names = [f"{kind}_{name}" for kind in KINDS for name in ("whole", "stream")]
    share = {name: http[name]["tok_s"] / own[name.split("_")[0]]["tok_s"] for name in names}
    delay = statistics.median(http["first_block_ms"]) - statistics.median(own["first_block_ms"])
    rises = {"in_process": own["late"].get("rise"), "http": http["late"].get("rise")}
    long = {"in_process": own["late"].get("long_share_after")}
    long["http"] = http["late"].get("long_share_after")
    least = min(share["mixed_whole"], share["mixed_stream"])
    return {
        "share_of_generate": share,
        "least_share": LEAST_SHARE,
        "first_block_delay_ms": delay,
        "most_delay_ms": MOST_DELAY_MS,
        "rise_by_a_long_prompt": rises,
        "gaps_of_two_rounds_beside_it": long,
        "same_texts": all(http[name]["same_texts"] for name in names),
        "holds": least >= LEAST_SHARE and delay <= MOST_DELAY_MS,
    }


def front(settings: dict[str, Any]) -> int:
    """The front process."""
    from dllm_jax.serve.pipe import Launch
    from dllm_jax.serve.server import bind, run
    from dllm_jax.serve.service import Config

    launch = Launch("serve_http_gpu:make_engine", settings, grace_s=20.0)
    config = Config(model="bench", launch=launch, version="0", log_format="json")
    return run(config, bind("127.0.0.1", 0))


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:JetLM/SDAR-1.7B-Chat")
    parser.add_argument("--smoke", action="store_true", help="tiny lengths, for a CPU")
    parser.add_argument("--within", type=float, default=150.0, help="seconds, all of it")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--front", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.front:
        return front(json.loads(args.front))
    from tests.serve.driving import Server

    began, size = time.perf_counter(), sizes(args.smoke)
    report: dict[str, Any] = {"command": "benchmarks/serve_http_gpu.py", "model": args.model}
    report |= {"sizes": size, "slots": SLOTS, "blocks": 4, "tokens_per_step": TOKENS_PER_STEP}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"model": args.model, "sizes": size, "folder": folder}
        command = [__file__, "--out", str(args.out), "--front", json.dumps(settings)]
        server = Server(command, Path(folder) / "log")
        try:
            server.wait_ready(args.within - 15)
            measured = json.loads((Path(folder) / "engine.json").read_text())
            report |= measured["environment"] | {"start_s": measured["start_s"]}
            report["commit"] = args.commit or report["commit"]
            report["page_buckets"] = measured["page_buckets"]
            report["in_process"] = measured["figures"]
            _write(args.out, report)
            left = args.within - 5 - (time.perf_counter() - began)
            http = report["http"] = {}
            asyncio.run(asyncio.wait_for(over_http(server.port, measured, size, http), left))
            report["compared"] = compared(measured, http)
        except Exception as error:
            report["failed"] = f"{type(error).__name__}: {error}"[-3000:]
            report["log"] = server.log.read_text()[-3000:]
            print(report["log"], file=sys.stderr)
        finally:
            _write(args.out, report)
            report["exit"] = server.stop()
        recorded = Path(folder) / "where.json"
        if "compared" in report and recorded.exists():
            report["where"] = everywhere(json.loads(recorded.read_text()), report)
    report["wall_s"] = time.perf_counter() - began
    _write(args.out, report)
    print(json.dumps(report.get("where"), indent=1))
    print(json.dumps(report.get("compared", report.get("failed")), indent=1))
    return 0 if report.get("compared", {}).get("holds") else 1


def _write(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
