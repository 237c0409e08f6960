"""`dllm-jax generate`: text from prompts, shown as it settles, and what it cost.

Data flow: command line -> prompts -> token ids -> `decoding` -> text, frames or JSON. With no
prompt and a built-in model, `--seed` draws a held-out word problem and the answer is checked.
"""

import argparse
import json
import sys
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.errors import Interrupted, UsageError
from dllm_jax.cli.interrupt import catch_interrupt

BATCH_SIZE = 8  # prompts of a file decoded together
WATCH_DELAY = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "A prompt for a model with a chat template is sent as one user message; --raw sends it as "
        "it is. Without a prompt a built-in model gets a held-out word problem drawn by --seed; "
        "stdin is read only for PROMPT or FILE -."
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads stdin")
    parser.add_argument(
        "--prompt-file", metavar="FILE", help="UTF-8, one prompt a line (- for stdin)"
    )
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument(
        "--half", choices=("plain", "hard"), help="which problems --seed draws (default: plain)"
    )
    flags.add_model_flags(parser)
    flags.add_strategy_flags(parser)
    group = parser.add_argument_group("sampling and limits")
    group.add_argument("--max-tokens", type=flags.whole(1), default=256, metavar="N")
    group.add_argument(
        "--temperature", type=flags.number(0, 1e6), default=0.0, metavar="T", help="0 is greedy"
    )
    group.add_argument("--top-k", type=flags.whole(1), metavar="K")
    group.add_argument("--top-p", type=flags.number(0, 1, open_low=True), metavar="P")
    group.add_argument(
        "--stop-token-ids",
        type=flags.token_ids,
        default=(),
        metavar="ID,...",
        help="ids that end the text, beside the model's own",
    )
    group.add_argument("--max-nfe", type=flags.whole(1), metavar="N", help="forwards at most")
    group.add_argument(
        "--seed",
        type=flags.whole(0, 2**32 - 1),
        metavar="N",
        help="of sampling, and of the problem where no prompt is given (default: 0)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object a prompt, a line each")
    group.add_argument("--watch", action="store_true", help="draw the window as it denoises")
    group.add_argument(
        "--watch-delay",
        type=flags.number(0, 60),
        metavar="S",
        help=f"seconds between two frames of --watch (default: {WATCH_DELAY})",
    )


def run(args: argparse.Namespace) -> int:
    """Generate, print, and say what it cost."""
    _check_flags(args)
    problem = draw_problem(args)
    prompts = [problem.question] if problem else _read_prompts(args)
    if args.watch and (args.json or len(prompts) > 1):
        raise UsageError("--watch shows one prompt, as text; leave out --json or give one prompt")
    chosen = strategies.load(args.strategy)

    from dllm_jax.cli.models import load_model
    from dllm_jax.cli.prompts import encode
    from dllm_jax.compile_cache import enable_compile_cache

    enable_compile_cache()
    model = load_model(args)
    strategy = strategies.resolve(model, args.strategy, chosen, strategies.given_fields(args))
    ids = [encode(model, prompt, args.raw) for prompt in prompts]
    if problem and not args.json:
        print(f"{problem.question}\n", flush=True)
    if len(prompts) > 1 or args.json:
        return _many(args, model, strategy, prompts, ids)
    return _one(args, model, strategy, ids[0], problem)


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would be ignored."""
    if args.half and not _nothing_given(args):
        raise UsageError("--half is about problems drawn by --seed; leave out it or the prompt")
    if args.watch_delay is not None and not args.watch:
        raise UsageError("--watch-delay goes with --watch; give both or neither")


def _nothing_given(args: argparse.Namespace) -> bool:
    return args.prompt is None and args.prompt_file is None


def draw_problem(args: argparse.Namespace) -> Any:
    """A held-out problem where no prompt is given and the model can be expected to solve it."""
    if not (_nothing_given(args) and args.model.startswith("builtin:")):
        return None
    from dllm_jax.cli.prompts import stdin_waits
    from dllm_jax.training.data import problem

    if args.seed is None and stdin_waits():
        print("note: stdin is not read; give - to make it the prompt", file=sys.stderr)
    return problem(args.half or "plain", args.seed or 0, 0, heldout=True)


def _read_prompts(args: argparse.Namespace) -> list[str]:
    from dllm_jax.cli.prompts import read_prompts

    return read_prompts(args)


def options(args: argparse.Namespace, first: int, count: int) -> dict[str, Any]:
    """Keywords of `dj.generate`; request i of the command has the key `fold_in(key(seed), i)`."""
    import jax
    import jax.numpy as jnp

    index = jnp.arange(first, first + count)
    return {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "stop_token_ids": args.stop_token_ids,
        "max_nfe": args.max_nfe,
        "key": jax.vmap(lambda i: jax.random.fold_in(jax.random.key(args.seed or 0), i))(index),
    }


def _one(args: argparse.Namespace, model: Any, strategy: Any, ids: list[int], problem: Any) -> int:
    """Decode one prompt before the user's eyes; the last line is the figures."""
    from dllm_jax.cli.decoding import decode_batch, frame
    from dllm_jax.cli.text import TextStream
    from dllm_jax.cli.watch import Watch

    stream, watch, progress = TextStream(model.tokenizer), Watch(), None
    stop = catch_interrupt()
    try:
        for progress, state in decode_batch(model, [ids], strategy, options(args, 0, 1)):
            stop.check()
            row = progress.rows[0]
            if not args.watch:
                print(stream.feed(row.token_ids), end="", flush=True)
            elif row.finish_reason is None:
                watch.show(frame(state, model))
                stop.sleep(WATCH_DELAY if args.watch_delay is None else args.watch_delay)
    except KeyboardInterrupt:
        watch.clear()
        if progress is None:
            raise Interrupted("interrupted before the first token; run it again") from None
        _finish_text(stream, progress, whole=args.watch)
        print(summary(progress), flush=True)
        raise Interrupted(
            f"interrupted after {progress.rows[0].nfe} forwards; what was generated so far is "
            "shown; run it again to finish"
        ) from None
    watch.clear()
    _finish_text(stream, progress, whole=args.watch)
    if problem:
        print(_verdict(problem, stream.text))
    print(summary(progress), flush=True)
    return 0


def _finish_text(stream: Any, progress: Any, whole: bool) -> None:
    """Print what of the text is left, or all of it, and an empty line."""
    rest = stream.feed(progress.rows[0].token_ids, last=True)
    print(f"{stream.text if whole else rest}\n", flush=True)


def _many(
    args: argparse.Namespace, model: Any, strategy: Any, prompts: list[str], ids: list[list[int]]
) -> int:
    """Decode prompts in batches; results in order, a batch at a time."""
    from tqdm import tqdm

    from dllm_jax.cli.decoding import decode_batch

    done, warmed = [], set()
    with tqdm(total=len(prompts), unit="prompt", leave=False, disable=None) as bar:
        for first in range(0, len(prompts), BATCH_SIZE):
            batch, progress = ids[first : first + BATCH_SIZE], None
            try:
                wanted = options(args, first, len(batch))
                for progress, _ in decode_batch(model, batch, strategy, wanted, warmed):
                    bar.n = first + sum(row.finish_reason is not None for row in progress.rows)
                    bar.refresh()
            except KeyboardInterrupt:
                if progress is not None:
                    _print_rows(args, model, prompts[first:], progress)
                    done.append(progress)
                _print_total(args, done)
                raise Interrupted(
                    f"interrupted in prompt {first + 1} of {len(prompts)}; what was generated so "
                    "far is shown; run it again to finish"
                ) from None
            _print_rows(args, model, prompts[first:], progress)
            done.append(progress)
    _print_total(args, done)
    return 0


def _print_rows(args: argparse.Namespace, model: Any, prompts: list[str], progress: Any) -> None:
    for prompt, row in zip(prompts, progress.rows, strict=False):
        text = model.tokenizer.decode(row.token_ids, skip_special_tokens=True)
        if not args.json:
            print(f"> {prompt}\n{text}\n", flush=True)
            continue
        metrics = {
            "nfe": row.nfe,
            "prefill_nfe": progress.prefill_nfe,
            "tokens_per_forward": row.tokens_per_forward,
            "ttfb_s": row.ttfb_s,
            "e2e_s": row.e2e_s,
            "compile_s": progress.compile_s,
        }
        facts = {
            "prompt": prompt,
            "text": text,
            "token_ids": row.token_ids,
            "finish_reason": row.finish_reason or "abort",
            "metrics": metrics,
        }
        print(json.dumps(facts, ensure_ascii=False), flush=True)


def _print_total(args: argparse.Namespace, done: list[Any]) -> None:
    if not args.json and done:
        print(summary(*done), flush=True)


def summary(*batches: Any) -> str:
    """The line of figures over one or several batches."""
    rows = [row for progress in batches for row in progress.rows]
    tokens, nfe = sum(len(row.token_ids) for row in rows), sum(row.nfe for row in rows)
    decode_s = sum(progress.decode_s for progress in batches)
    prefill_s = sum(progress.prefill_s for progress in batches)
    compile_s = sum(progress.compile_s for progress in batches)
    return (
        f"{tokens} tokens, {nfe} forwards, {tokens / max(nfe, 1):.2f} tokens per forward, "
        f"{tokens / max(decode_s, 1e-9):.0f} tok/s decoding, "
        f"{tokens / max(decode_s + prefill_s, 1e-9):.0f} tok/s with prefill "
        f"(compiled and warmed up before that: {compile_s:.1f} s)"
    )


def _verdict(problem: Any, text: str) -> str:
    from dllm_jax.training.data import extract_answer, is_correct

    if is_correct(text, problem):
        return f"right: the answer is {problem.answer}"
    said = extract_answer(text)
    told = "no answer was given" if said is None else f"not {said}"
    return f"wrong: the answer is {problem.answer}, {told}"
