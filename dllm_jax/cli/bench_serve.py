"""`dllm-jax bench serve`: a load on any OpenAI server, with vLLM's flags, and what clients see.

Data flow: command line -> the server's model and its tokenizer -> `dllm_jax.bench.serving` -> lines
or one object. JAX is not imported before the load has ended.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.files import check_output, report
from dllm_jax.cli.flags import Group, flag, number, whole
from dllm_jax.cli.prompts import read_file
from dllm_jax.cli.text import seconds

SUMMARY = "a load on an OpenAI server over HTTP: times to blocks, between them, tokens a forward"
INPUTS, OUTPUTS, MAX_TOKENS = "16:256", "16:128", 224
DATA_SETS = ("random", "custom", "problems")
_EXTRA = "in the clone, pip install -e '.[server]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench serve`; those that vLLM's has mean the same."""
    parser.epilog = (
        "Greedy unless --temperature says otherwise. A block, or chunk, is what the server sends "
        "at once. docs/benchmarks.md says how each number is counted."
    )
    flags.add(
        parser,
        Group("", flags.DEBUG),
        SERVER,
        WORK,
        Group(
            "load",
            flag(
                "--request-rate R",
                "requests a second, arriving at random (default: inf, all at the start)",
                _rate,
                math.inf,
            ),
            flag(
                "--burstiness B",
                "of arrivals: 1 is a Poisson process, less comes in bursts, inf evenly",
                _rate,
                1.0,
            ),
            flag(
                "--max-concurrency N",
                "most requests under way; others wait here (default: no limit)",
                whole(1),
            ),
            flag(
                "--goodput NAME:MS",
                "objectives of a good request: ttft (first block), tpot, e2el in milliseconds",
                _objective,
                [],
                nargs="+",
            ),
            flag("--timeout S", "after which a request has failed", flags.seconds_above_0, 600.0),
            flag("--seed N", "of prompts, lengths and arrivals", flags.seed, 0),
        ),
        Group(
            "output",
            flag(
                "--metric-percentiles P,...",
                "which are printed beside the mean (default: 50,90,99)",
                _percentiles,
                (50, 90, 99),
            ),
            flags.AS_JSON,
            flags.OUTPUT,
        ),
    )


def _rate(text: str) -> float:
    """An argparse type: a number above 0, or inf."""
    return math.inf if text.lower() == "inf" else number(0, 1e6, open_low=True)(text)


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not text.isascii() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE in printable ASCII")
    return name, value


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON object; write e.g. '{{\"top_k\": 8}}'"
        )
    return fields


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(number(0, 100)(part) for part in text.split(","))


def _objective(text: str) -> tuple[str, float]:
    from dllm_jax.bench.serving import GOODPUT

    name, colon, value = text.partition(":")
    if not colon or name not in GOODPUT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME:MS of {', '.join(GOODPUT)}; write e.g. ttft:200"
        )
    return name, number(0, 1e9)(value)


SERVER = Group(
    "server",
    flag("--base-url URL", "of the server (default: http://HOST:PORT)"),
    flag("--host", "", default="127.0.0.1"),
    flag("--port", "", whole(1, 65535), 8000),
    flag(
        "--backend",
        "openai, vllm: completions; openai-chat: one user message (default: openai for "
        "--dataset-name random, else openai-chat)",
        ("openai", "openai-chat", "vllm"),
    ),
    flag("--endpoint PATH", "(default: that of the back end)"),
    flag("--model NAME", "what requests name (default: the first of /v1/models)"),
    flag(
        "--header NAME=VALUE",
        "sent with every request, e.g. 'Authorization=Bearer KEY'; repeat it for several",
        _header,
        [],
        action="append",
    ),
    flag("--ready-check-timeout-sec S", "wait so long for /v1/models", flags.seconds, 0.0),
)
WORK = Group(
    "work",
    flag(
        "--dataset-name",
        "random: ids from --tokenizer; custom: --dataset-path; problems: word problems, which "
        "are graded (default: custom with --dataset-path, else random)",
        DATA_SETS,
    ),
    flag(
        "--dataset-path --prompt-file FILE",
        "UTF-8, one prompt a line; .jsonl: objects with 'prompt' and 'output_tokens'",
    ),
    flag(
        "--tokenizer MODEL",
        "of random prompts: a folder, hub id or builtin:NAME (default: what /v1/models calls root)",
    ),
    flag(
        "--input-len --random-input-len N[:M]",
        f"random: tokens of a prompt, log-uniform from N to M (default: {INPUTS})",
        flags.lengths,
    ),
    flag(
        "--output-len --random-output-len --custom-output-len N[:M]",
        f"max_tokens of a text (default: {OUTPUTS} of random, {MAX_TOKENS} of others)",
        flags.lengths,
    ),
    flags.NUM_PROMPTS,
    flag("--num-warmups N", "requests that do not count, before the others", whole(0), 0),
    flag("--temperature T", "", flags.temperature, 0.0),
    flag("--ignore-eos", "texts go on to --output-len tokens", bool),
    flag(
        "--extra-body JSON",
        "more fields of each request, as an object (default: none)",
        _fields,
        {},
    ),
)


def run(args: argparse.Namespace) -> int:
    """Send the load, print the lines or the object."""
    try:
        from dllm_jax.bench.client import Client
    except ModuleNotFoundError as error:
        if error.name != "h11":
            raise
        raise UsageError(f"bench serve needs the package h11; {_EXTRA}") from error
    data_set = args.dataset_name or ("custom" if args.dataset_path else "random")
    _check_flags(args, data_set)
    check_output(args.output)
    try:
        client = Client(_base_url(args), dict(args.header))
    except ValueError as error:
        raise UsageError(str(error)) from error

    async def load() -> dict[str, Any]:
        with contextlib.closing(client):
            return await _measure(args, data_set, client)

    facts = asyncio.run(load())
    from dllm_jax.bench.numbers import commit  # brings in JAX

    facts["commit"] = commit()
    report(args, facts, "\n".join(lines(facts)))
    return 0


def _base_url(args: argparse.Namespace) -> str:
    return args.base_url or f"http://{args.host}:{args.port}"


def _check_flags(args: argparse.Namespace, data_set: str) -> None:
    """Refuse flags that would be ignored, or are missing."""
    of = {"dataset_path": "custom", "tokenizer": "random", "input_len": "random"}
    for name, wanted in of.items():
        if getattr(args, name) is not None and data_set != wanted:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} goes with --dataset-name {wanted}; it is {data_set}")
    if data_set == "custom" and args.dataset_path is None:
        raise UsageError("--dataset-name custom without prompts; give --dataset-path FILE")
    if data_set == "problems" and args.output_len and args.output_len.low < args.output_len.high:
        raise UsageError(f"--output-len {args.output_len}: problems take one length; give N")


async def _measure(args: argparse.Namespace, data_set: str, client: Any) -> dict[str, Any]:
    from dllm_jax import __version__
    from dllm_jax.bench import serving
    from dllm_jax.bench.serving_work import arriving

    if args.ready_check_timeout_sec:
        await serving.wait_ready(client, args.ready_check_timeout_sec)
    entries = await serving.models(client)
    entry = next((one for one in entries if one["id"] == args.model), entries[0])
    backend = args.backend or ("openai" if data_set == "random" else "openai-chat")
    endpoint = args.endpoint or (serving.CHAT if backend == "openai-chat" else serving.TEXT)
    work = _work(args, data_set, entry, endpoint == serving.CHAT)
    if not math.isinf(args.request_rate):
        work = arriving(work, args.request_rate, args.burstiness, args.seed)
    fields = {"temperature": args.temperature, **({"ignore_eos": True} if args.ignore_eos else {})}
    load = serving.Load(
        model=args.model or entry["id"],
        endpoint=endpoint,
        fields=fields | args.extra_body,
        max_concurrency=args.max_concurrency,
        timeout_s=args.timeout,
        num_warmups=args.num_warmups,
        objectives=dict(args.goodput),
        percentiles=args.metric_percentiles,
    )
    found = await serving.measure(client, work, load)
    return {
        "command": "bench serve",
        "base_url": _base_url(args),
        "endpoint": endpoint,
        "model": load.model,
        "served": {name: entry.get(name) for name in ("root", "max_model_len", "dllm")},
        "dataset": data_set,
        "dataset_path": args.dataset_path,
        "num_prompts": len(work),
        "input_len": str(args.input_len or INPUTS) if data_set == "random" else None,
        "output_len": str(_outputs(args, data_set)),
        "request_rate": None if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": "inf" if math.isinf(args.burstiness) else args.burstiness,
        "max_concurrency": args.max_concurrency,
        "goodput": dict(args.goodput) or None,
        "fields": dict(load.fields),
        "seed": args.seed,
        **found,
        "dllm_jax": __version__,
        "python": platform.python_version(),
        "client_cpus": os.cpu_count(),
    }


def _outputs(args: argparse.Namespace, data_set: str) -> Any:
    return args.output_len or flags.lengths(OUTPUTS if data_set == "random" else str(MAX_TOKENS))


def _work(args: argparse.Namespace, data_set: str, entry: dict[str, Any], is_chat: bool) -> Any:
    from dllm_jax.bench import serving_work

    outputs = _outputs(args, data_set)
    if data_set == "problems":
        return serving_work.problem_work(args.num_prompts, outputs.high, args.seed)
    if data_set == "custom":
        text = read_file("prompt file", args.dataset_path)
        path, number = args.dataset_path, args.num_prompts
        return serving_work.file_work(path, text, number, outputs, args.seed)
    tokenizer = _tokenizer(args.tokenizer or entry.get("root") or entry["id"])
    inputs = args.input_len or flags.lengths(INPUTS)
    return serving_work.random_work(
        tokenizer, args.num_prompts, inputs, outputs, args.seed, is_chat
    )


def _tokenizer(source: str) -> Any:
    from dllm_jax.loading.sources import find_folder
    from dllm_jax.loading.tokenizer import read_tokenizer

    try:
        return read_tokenizer(find_folder(source))
    except ValueError as error:
        raise UsageError(
            f"no tokenizer for random prompts ({error}); give --tokenizer FOLDER, or prompts with "
            "--dataset-path"
        ) from error


def lines(facts: dict[str, Any]) -> list[str]:
    """The report as lines."""
    rate = facts["request_rate"]
    load = "all at the start" if rate is None else f"{rate:g} a second"
    report = [
        f"{facts['model']} at {facts['base_url']}{facts['endpoint']}",
        f"{facts['num_prompts']} requests ({facts['dataset']}), {load}, at most "
        f"{facts['most_concurrent']} at once",
        f"{facts['requests']} done, {facts['failed']} failed; {facts['prompt_tokens']} prompt "
        f"tokens ({facts['cached_tokens']} cached), {facts['visible_tokens']} visible tokens in "
        f"{facts['chunks']} chunks"
        + (f", {facts['accuracy']:.1%} right" if "accuracy" in facts else ""),
    ]
    report += [f"{number} x {problem}" for problem, number in facts["problems"].items()]
    if facts["nfe"]:
        report.append(
            f"{facts['nfe']} forwards, {facts['tokens_per_forward']:.2f} tokens per forward; "
            f"{facts['prefill_nfe']} prefill passes, {facts['preemptions']} preemptions"
        )
    peak = "" if facts["peak_tok_s"] is None else f", at most {facts['peak_tok_s']:.0f} in a second"
    report.append(
        f"{facts['wall_s']:.2f} s, {facts['tok_s']:.1f} tok/s{peak}, {facts['requests_s']:.2f} "
        "requests/s"
    )
    if facts["goodput"]:
        report.append(
            f"{facts['good_requests']} good, {facts['goodput_requests_s']:.2f} good requests/s"
        )
    for key, name in _TIMES.items():
        if facts[key]:
            shown = ", ".join(f"{p} {seconds(value)}" for p, value in facts[key].items())
            report.append(f"{name:<16} {shown}")
    if facts["tokens_per_chunk"]:
        parts = facts["tokens_per_chunk"].items()
        report.append(f"{'tokens a chunk':<16} {', '.join(f'{p} {v:.1f}' for p, v in parts)}")
    return report


_TIMES = {
    "ttfb_s": "first block",
    "inter_block_s": "between blocks",
    "tpot_s": "per token",
    "e2e_s": "request",
    "server_queue_s": "server's queue",
}
