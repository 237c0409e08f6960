"""`dllm-jax generate`: text from prompts, shown as it settles, and what it cost.

Data flow: command line -> prompts -> token ids -> an engine -> `results`. With no prompt and
a built-in model, `--seed` draws a held-out word problem and the answer is checked.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.flags import Group, flag
from dllm_jax.cli.interrupt import ALL, Interrupt
from dllm_jax.cli.prompts import encode, encode_suffix, read_prompts, stdin_waits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "A prompt for a model with a chat template is sent as one user message; --raw sends it as "
        "it is. Without a prompt a built-in model gets a held-out word problem drawn by --seed; "
        "stdin is read only for PROMPT or FILE -."
    )
    flags.add(
        parser,
        Group(
            "",
            flags.PROMPT,
            flag("--prompt-file FILE", "UTF-8, one prompt a line; - for stdin"),
            flags.RAW,
            flag(
                "--suffix TEXT",
                "what stands behind the text: --max-tokens tokens are written between PROMPT and "
                "it, and one for each mask token in either; no chat template is used",
            ),
            flags.HALF,
        ),
        flags.MODEL,
        flags.strategy(),
        flags.DRAFT,
        flags.sampling(flags.SEED_OR_PROBLEM),
        flags.CONSTRAINT,
        flags.ENGINE,
        Group(
            "output",
            flags.as_json("one JSON object a prompt, a line each"),
            flags.WATCH,
            flags.WATCH_DELAY,
        ),
    )


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Generate, print, and say what it cost."""
    stop.forced = ALL
    _check_flags(args)
    problem = draw_problem(args)
    prompts = [problem.question] if problem else read_prompts(args)
    if args.watch and (args.json or len(prompts) > 1):
        raise UsageError("--watch shows one prompt, as text; leave out --json or give one prompt")
    chosen = strategies.load(args.strategy)
    _check_infills(args, chosen)

    constraint = _constraint(args)
    from dllm_jax.cli.engine import Clock, add, make_llm, sampling_params
    from dllm_jax.cli.sources import load_model

    model = load_model(args)
    fields = strategies.given_fields(args)
    strategy = strategies.resolve(model, args.strategy, chosen, fields, args.draft)
    _check_infills(args, strategy)
    infills = args.suffix is not None
    ids = [encode(model, prompt, args.raw or infills, has_holes=infills) for prompt in prompts]
    suffix = encode_suffix(model, args.suffix) if infills else []
    longest = max(map(len, ids)) + len(suffix)
    strategy = strategies.fit_window(model, strategy, fields, longest + args.max_tokens)
    params = sampling_params(args, model, strategy)
    params = dataclasses.replace(params, constraint=constraint)
    requests = _requests(args, prompts, ids, params)
    if infills:
        from dllm_jax.api.infill import infill_request

        requests = [
            infill_request(model, strategy, one, args.max_tokens, suffix) for one in requests
        ]
    clock = Clock()
    llm = make_llm(args, model, strategy, clock, longest, len(ids))
    request_ids = add(llm.engine, requests)
    if problem and not args.json:
        print(f"{problem.question}\n", flush=True)
    return _show(args, llm, request_ids, _results(args, llm, clock, prompts, problem), stop)


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would be ignored."""
    if args.half and not _nothing_given(args):
        raise UsageError("--half is about problems drawn by --seed; leave out it or the prompt")
    if args.watch_delay is not None and not args.watch:
        raise UsageError("--watch-delay goes with --watch; give both or neither")
    if args.suffix is not None and _nothing_given(args):
        raise UsageError("--suffix goes behind a prompt; give PROMPT, - or --prompt-file FILE")
    if args.suffix == "":
        raise UsageError("--suffix is empty; give what stands behind the text, or leave it out")


def _check_infills(args: argparse.Namespace, strategy: Any) -> None:
    """Refuse a suffix that the strategy would not see; None is unknown so far."""
    if args.suffix is None or strategy is None:
        return
    if strategy.needs.takes_given:
        return
    raise UsageError(
        f"--suffix: {type(strategy).__name__} does not see what stands behind the text; "
        "give --strategy full_sequence"
    )


def _constraint(args: argparse.Namespace) -> Any:
    """The constraint that the flags name, or None."""
    import dllm_jax as dj

    if args.regex is not None:
        return dj.Regex(args.regex)
    if args.choice is not None:
        return dj.Choice(args.choice.split(","))
    if args.json_schema is None:
        return None
    try:
        schema = json.loads(Path(args.json_schema).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--json-schema {args.json_schema!r} cannot be read ({type(error).__name__}: {error}); "
            "give a file with a JSON schema"
        ) from None
    return dj.JsonSchema(schema)


def _nothing_given(args: argparse.Namespace) -> bool:
    return args.prompt is None and args.prompt_file is None


def draw_problem(args: argparse.Namespace) -> Any:
    """A held-out problem where no prompt is given and the model can be expected to solve it."""
    if not (_nothing_given(args) and args.model.startswith("builtin:")):
        return None
    from dllm_jax.tasks.problems import problem

    if args.seed is None and stdin_waits():
        print("note: stdin is not read; give - to make it the prompt", file=sys.stderr)
    return problem(args.half or "plain", args.seed or 0, 0, heldout=True)


def _requests(
    args: argparse.Namespace, prompts: list[str], ids: list[list[int]], params: Any
) -> list[Any]:
    """One a prompt, named by its place."""
    from dllm_jax.engine.requests import Request

    return [
        Request(
            prompt_token_ids=one,
            params=params,
            prompt=prompt,
            request_id=str(i),
            stream=len(prompts) == 1 and not args.json,
            denoise=args.watch,
        )
        for i, (prompt, one) in enumerate(zip(prompts, ids, strict=True))
    ]


def _results(
    args: argparse.Namespace, llm: Any, clock: Any, prompts: list[str], problem: Any
) -> Any:
    from dllm_jax.cli.results import OneText, Rows, Watched

    if args.json or len(prompts) > 1:
        return Rows(llm, clock, prompts, args.json, args.suffix)
    if args.watch:
        return Watched(llm, clock, problem)
    return OneText(llm, clock, problem)


def _show(
    args: argparse.Namespace, llm: Any, request_ids: list[str], results: Any, stop: Interrupt
) -> int:
    from dllm_jax.cli.engine import follow

    stop.tell = results.cut_short
    delay = flags.WATCH_DELAY_S if args.watch_delay is None else args.watch_delay
    with results:
        for output in follow(llm.engine, request_ids, stop):
            results.show(output)
            if args.watch and not output.finished:
                stop.sleep(delay)
        results.end()
    return 0
