"""`dllm-jax bench throughput|latency|step|serve`: speed, as a few lines and as JSON.

Data flow: command line -> work and an engine for it -> `dllm_jax.bench` -> lines or one object.
docs/benchmarks.md says how each number is counted. `step` is `bench_step`'s, `serve`
`bench_serve`'s.
"""

import argparse
from typing import Any

from dllm_jax.cli import bench_serve, bench_step, flags
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.files import check_output, report
from dllm_jax.cli.flags import Group, flag, number, whole
from dllm_jax.cli.interrupt import ALL, Interrupt
from dllm_jax.cli.prompts import read_prompts
from dllm_jax.cli.text import count, seconds

INPUTS, OUTPUTS = "16:256", "16:128"
MAX_TOKENS = 224  # of adaptive work: more than the longest worked solution of the word problems
# Least room for the texts of the bare loop, in blocks. A round of drafts writes up to a block, and
# half of the room is context.
BARE_BLOCKS, BARE_ROUNDS = 4, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of measurement, each with its flags."""
    whats = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for what, summary, load in LOADS:
        child = whats.add_parser(what, help=summary, description=summary)
        child.epilog = EPILOG
        flags.add(child, *COMMON, Group("load", *load))
    for what, module in (("step", bench_step), ("serve", bench_serve)):
        child = whats.add_parser(what, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(child)


LOADS = (
    (
        "throughput",
        "many requests at once, or at a rate: tokens a second of the whole engine",
        (
            flags.NUM_PROMPTS,
            flag(
                "--request-rate R",
                "requests a second, arriving at random (default: all are there at the start)",
                number(0, 1e6, open_low=True),
            ),
        ),
    ),
    (
        "latency",
        "one batch again and again: how long it takes",
        (
            flag("--batch-size B", "requests of a batch", whole(1), 1),
            flag("--num-iters N", "batches that are timed, after one that is not", whole(1), 5),
        ),
    ),
)
EPILOG = (
    "Greedy. fixed: each step takes exactly n tokens, the surest of the model's own, from "
    "prompts of random ids: the work is known and the speed is the kernels'. adaptive: the "
    "model's own strategy on real text. step_ms is the wall time of a decode step, bare the "
    "same compiled program in a loop on the device, floor what the device needs at least."
)
COMMON = (
    Group("", flags.DEBUG),
    flags.MODEL,
    flags.strategy(),
    flags.DRAFT,
    flags.ENGINE,
    Group(
        "work",
        flag(
            "--mode",
            "what a step does, see below (default: adaptive for built-in models, with "
            "--prompt-file and with --draft, else fixed)",
            ("fixed", "adaptive"),
        ),
        flag("--tokens-per-step N", "fixed: n (default: 4, of a canvas a sixteenth)", whole(1)),
        flag(
            "--input-len N[:M]",
            f"fixed: tokens of a prompt, log-uniform from N to M (default: {INPUTS})",
            flags.lengths,
        ),
        flag(
            "--output-len N[:M]",
            f"tokens of a text (fixed: default {OUTPUTS}); adaptive: at most so many "
            f"(default {MAX_TOKENS})",
            flags.lengths,
        ),
        flag(
            "--prompt-file FILE",
            "adaptive: UTF-8, one prompt a line (default: the built-in word problems)",
        ),
        flag("--seed N", "of the work", flags.seed, 0),
    ),
    Group("output", flags.AS_JSON, flags.OUTPUT),
)


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Measure, print the lines or the object."""
    stop.forced = ALL
    if args.what == "step":
        return bench_step.run(args)
    if args.what == "serve":
        return bench_serve.run(args)
    args.mode = args.mode or _mode(args)
    _check_flags(args)
    check_output(args.output)
    chosen = strategies.load(args.strategy)

    from dllm_jax.bench.throughput import measure_batches
    from dllm_jax.cli.sources import load_model

    model = load_model(args)
    strategy = _strategy(args, model, chosen)
    batches = _batches(args, model)
    llm = _engine(args, model, strategy, batches)
    if args.what == "latency":
        from dllm_jax.bench.throughput import serve

        serve(llm, batches.pop(0), use_tqdm=False)  # what a first batch alone pays
    facts = {"command": f"bench {args.what}", **_load(args), **measure_batches(llm, batches)}
    report(args, facts, "\n".join(lines(facts)))
    return 0


def _mode(args: argparse.Namespace) -> str:
    built_in = args.model.startswith("builtin:")
    asks_fixed = args.tokens_per_step is not None or args.input_len is not None
    asks_adaptive = args.prompt_file or args.draft or (built_in and not asks_fixed)
    return "adaptive" if asks_adaptive else "fixed"


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would be ignored."""
    fixed = {"--tokens-per-step": args.tokens_per_step, "--input-len": args.input_len}
    adaptive = {
        "--prompt-file": args.prompt_file,
        "--strategy": args.strategy,
        "--draft": args.draft,
    }
    ignored = adaptive if args.mode == "fixed" else fixed
    for name, value in ignored.items():
        if value is not None:
            other = "adaptive" if args.mode == "fixed" else "fixed"
            raise UsageError(f"{name} goes with --mode {other}; the mode is {args.mode}")
    if args.mode == "fixed":
        for name in strategies.given_fields(args):
            if name not in strategies.SIZES:
                raise UsageError(f"{name} goes with --mode adaptive; fixed work has no thresholds")


def _strategy(args: argparse.Namespace, model: Any, chosen: Any) -> Any:
    fields = strategies.given_fields(args)
    if args.mode == "adaptive":
        return strategies.resolve(model, args.strategy, chosen, fields, args.draft)
    from dllm_jax.bench.fixed import FixedWork, fixed_canvas, most_tokens

    if model.arch.condition is not None:
        size = fields.get("block_size", model.defaults.block_size)
        fixed = fixed_canvas(size, args.tokens_per_step)
        return strategies.resolve(model, None, chosen, fields | fixed)
    if model.config.mask_token_id < 0:
        raise UsageError(
            f"fixed work fills masks, and {model.defaults.family} has no mask token; give "
            "--mode adaptive"
        )
    block = fields.get("block_size", model.defaults.block_size)
    buffer = fields.get("buffer_size", max(2, model.defaults.buffer_size))
    count = args.tokens_per_step or min(4, max(1, most_tokens(block, buffer)))
    try:
        return FixedWork(tokens_per_step=count, block_size=block, buffer_size=buffer)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _batches(args: argparse.Namespace, model: Any) -> list[list[Any]]:
    """The work: one batch for throughput, `--num-iters` and a warm-up batch for latency."""
    from dllm_jax.bench import workload

    latency = args.what == "latency"
    batch = args.batch_size if latency else args.num_prompts
    number = args.num_iters + 1 if latency else 1
    if args.mode == "fixed":
        inputs, outputs = (
            args.input_len or flags.lengths(INPUTS),
            args.output_len or flags.lengths(OUTPUTS),
        )
        _check_room(args, model, inputs, outputs)
        work = workload.random_work(model, batch * number, inputs, outputs, args.seed)
    else:
        most = args.output_len.high if args.output_len else MAX_TOKENS
        if args.prompt_file is not None:
            args.prompt = None
            work = workload.text_work(model, read_prompts(args), batch * number, most)
            _check_prompts(args, model, work)
        else:
            work = workload.problem_work(model, batch * number, most, args.seed)
    if not latency and args.request_rate is not None:
        work = workload.arriving(work, args.request_rate, args.seed)
    return [work[i * batch : (i + 1) * batch] for i in range(number)]


def _check_prompts(args: argparse.Namespace, model: Any, work: list[Any]) -> None:
    """Refuse a prompt that is too long before an engine is made and compiled for it."""
    longest = max(len(one.prompt) for one in work)
    most = args.max_model_len or model.config.max_position
    if longest >= most:
        raise UsageError(
            f"a prompt of {args.prompt_file!r} has {count(longest, 'token')} and there are {most} "
            "positions, prompt and text together; shorten it"
        )


def _check_room(args: argparse.Namespace, model: Any, inputs: Any, outputs: Any) -> None:
    needed = inputs.high + outputs.high
    most = args.max_model_len or model.config.max_position
    if needed > most:
        raise UsageError(
            f"--input-len {inputs} and --output-len {outputs} need {needed} positions, there are "
            f"{most}; lower one of them"
        )


def _engine(args: argparse.Namespace, model: Any, strategy: Any, batches: list[list[Any]]) -> Any:
    """A warm engine for the work."""
    from dllm_jax.api.drafts import bind_draft
    from dllm_jax.api.llm import LLM
    from dllm_jax.cli.engine import engine_config, slots

    bound = bind_draft(strategy, args.draft, model)  # the drafter sets the size of the window
    work = [one for batch in batches for one in batch]
    longest = max(len(one.prompt) + one.params.max_tokens for one in work)
    blocks = BARE_ROUNDS if bound.draft else BARE_BLOCKS
    longest = max(longest, blocks * bound.strategy.block_size)
    return LLM(
        model,
        bound.strategy,
        draft=bound.draft,
        attention_implementation=args.attention_implementation,
        tensor_parallel_size=args.tensor_parallel_size,
        seed=args.seed,
        config=engine_config(
            args,
            max_num_seqs=min(len(max(batches, key=len)), slots(args)),
            max_model_len=args.max_model_len or min(longest, model.config.max_position),
        ),
    )


def _load(args: argparse.Namespace) -> dict[str, Any]:
    """The load, as the report states it."""
    fixed = args.mode == "fixed"
    load = {
        "input_len": str(args.input_len or INPUTS) if fixed else None,
        "output_len": str(args.output_len or (OUTPUTS if fixed else MAX_TOKENS)),
        "prompt_file": args.prompt_file,
        "seed": args.seed,
    }
    if args.what == "latency":
        return load | {"batch": args.batch_size, "num_iters": args.num_iters}
    return load | {"batch": args.num_prompts, "request_rate": args.request_rate}


def lines(facts: dict[str, Any]) -> list[str]:
    """The report as lines."""
    mode = facts["mode"]
    if mode == "fixed":
        mode += f", {count(facts['tokens_per_step'], 'token')} a step"
    accuracy = facts.get("accuracy")
    draft = facts.get("draft_model")
    beside = "" if draft is None else f" with the draft {draft}"
    right = "" if accuracy is None else f", {accuracy:.1%} right"
    report = [
        f"{facts['model']}{beside} {facts['dtype']} on {facts['device']}, jax {facts['jax']}, "
        f"commit {facts['commit']}",
        f"{facts['strategy']} ({mode}), window {facts['buffer_size']} x {facts['block_size']}, "
        + count(facts["num_slots"], "slot"),
        f"{count(facts['requests'], 'request')}, {count(facts['prompt_tokens'], 'prompt token')}, "
        f"{count(facts['visible_tokens'], 'visible token')}{right}",
        f"{count(facts['nfe'], 'forward')}, {facts['tokens_per_forward']:.2f} tokens per forward; "
        f"{facts['prefill_nfe']} prefill passes, {count(facts['cached_tokens'], 'token')} from the "
        f"prefix cache, {count(facts['preemptions'], 'preemption')}",
        f"{facts['wall_s']:.2f} s, {facts['tok_s']:.1f} tok/s"
        + ("" if facts["decode_tok_s"] is None else f" (decode only {facts['decode_tok_s']:.1f})"),
    ]
    if facts.get("draft") and facts["draft"]["rounds"]:
        report.append(_drafts(facts["draft"]))
    names = {"batch_s": "batch", "ttfb_s": "first block", "tpot_s": "per token", "e2e_s": "request"}
    for key, name in names.items():
        if facts.get(key):
            shown = ", ".join(f"{p} {seconds(value)}" for p, value in facts[key].items())
            report.append(f"{name:<12} {shown}")
    if facts["step_ms"] is not None:
        floor = "no floor known for this device"
        if facts["floor_ms"] is not None:
            floor = f"floor {facts['floor_ms']:.3f} ms, x{facts['step_over_floor']:.2f}"
        report.append(
            f"{'step':<12} {facts['step_ms']:.3f} ms, bare {facts['bare_step_ms']:.3f} ms, "
            f"{floor}; {_overhead(facts['host_overhead'])}"
        )
    if facts.get("round_programs"):
        report.append(_round(facts))
    return report


def _overhead(share: float) -> str:
    """The share of a step that the bare loop does without; timings scatter, so it may be none."""
    if share < 0:
        return "host overhead below what can be measured: the bare loop was slower"
    return f"host overhead {share:.1%}"


def _round(facts: dict[str, Any]) -> str:
    """The time of a round by its parts, as a line."""
    widths: dict[int, float] = {}
    steps = sum(one["steps"] for one in facts["round_programs"])
    for one in facts["round_programs"]:
        for width, share in zip(one["widths"], one["shares"], strict=True):
            widths[width] = widths.get(width, 0.0) + share * one["steps"] / max(steps, 1)
    host = "" if facts["host_ms"] is None else f", host {facts['host_ms']:.3f} ms"
    chosen = ", ".join(f"{width}: {share:.0%}" for width, share in widths.items())
    return (
        f"{'round':<12} draft {facts['draft_ms']:.3f} ms, verify {facts['verify_ms']:.3f} ms"
        f"{host}; widths chosen {chosen}"
    )


def _drafts(draft: dict[str, Any]) -> str:
    """The acceptance of drafts, as a line."""
    shares = (f"{share:.0%}" for share in draft["accepted_per_position"] if share is not None)
    return (
        f"{'drafts':<12} {count(draft['rounds'], 'round')}, mean accepted length "
        f"{draft['mean_accepted_length']:.2f} (the target's own token counted), accepted by place "
        f"{' '.join(shares)}"
    )
