"""`dllm-jax train [KIND]`: a small model from nothing, or a drafter for any target."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.flags import Flag, Group, flag
from dllm_jax.cli.interrupt import Interrupt


def layer_ids(text: str) -> tuple[int, ...]:
    """An argparse type: layers of a model, counted from 0 and separated by commas."""
    try:
        ids = tuple(int(part) for part in text.split(","))
    except ValueError:
        ids = ()
    if not ids or min(ids) < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of layers, counted from 0; write e.g. 1,9,17"
        )
    return ids


def family(text: str) -> str:
    """An argparse type: a family of word problems."""
    from dllm_jax.tasks.problems import half_of

    try:
        half_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


KINDS = ("sdar", "ar", "dflash", "diffusion_gemma", "sft")
_ALL, _OWN, _DRAFT, _SFT = KINDS, ("sdar", "ar", "diffusion_gemma"), ("dflash",), ("sft",)
_NEW = (*_OWN, *_DRAFT)  # models from nothing
_METAVARS = {
    "--target": "SRC",
    "--prompts": "FILE",
    "--problem-family": "NAME",
    "--family": "SPEC",
    "--dtype": "NAME",
    "--model": "SRC",
    "--data": "FILE",
    "--objective": "NAME",
    "--target-layer-ids": "ID,...",
}
# flag, type, kinds, help; a flag that is not given keeps the default of its recipe
OPTIONS = (
    ("--steps", flags.whole(1), _ALL, "length of the run"),
    ("--budget-seconds", flags.number(0, 1e9, True), _ALL, "length in seconds, instead of --steps"),
    ("--max-seconds", flags.number(0, 1e9, True), _ALL, "stop this call, to be continued"),
    ("--model", str, _SFT, "the masked model that is fine-tuned: all that dj.load takes"),
    ("--data", str, _SFT, '.jsonl with "messages", or with "prompt" and "completion"'),
    ("--objective", ("block", "full"), _SFT, "block or full; none: as the model was trained"),
    ("--lora-rank", flags.whole(0), _SFT, "rank of each matrix's update; 0: all weights change"),
    ("--batch-size", flags.whole(1), _ALL, "sequences a step"),
    ("--seed", flags.whole(0, 2**31 - 1), _ALL, "of data, noise and weights"),
    ("--muon-lr", flags.number(0, 10, True), _NEW, "peak learning rate of the layers' matrices"),
    ("--adam-lr", flags.number(0, 10, True), _ALL, "peak learning rate of everything else"),
    (
        "--dtype",
        ("bfloat16", "float32"),
        _ALL,
        "of products, bfloat16 or float32, which is faster on a CPU",
    ),
    ("--problem-family", family, _OWN, "the only family of word problems; sums is the easiest"),
    ("--family", str, _ALL, "of --model or --target, FILE:NAME; before: --problem-family"),
    ("--layers", flags.whole(1), _NEW, "layers of the model"),
    ("--hidden-size", flags.whole(1), _OWN, "width of the model"),
    ("--ffn-size", flags.whole(1), _NEW, "width of its feed-forward part"),
    ("--workers", flags.whole(0), _NEW, "processes that make data; 0: none"),
    ("--head-temperature", flags.number(0, 100, True), ("sdar",), "what divides the head at last"),
    ("--evals", flags.whole(0), _NEW, "evaluations during the run"),
    ("--eval-problems", flags.whole(1), _NEW, "held-out problems a half, each of those"),
    ("--final-problems", flags.whole(1), _NEW, "held-out problems a half, at the end"),
    ("--log-every", flags.whole(1), _ALL, "steps between lines of the log"),
    ("--target", str, _DRAFT, "what is drafted for: all that --model takes"),
    ("--prompts", str, _DRAFT, 'file of prompts, one a line or .jsonl with "prompt"'),
    ("--target-layer-ids", layer_ids, _DRAFT, "layers of the target that are read, from 0: 1,9,17"),
    ("--mask-token-id", flags.whole(0), _DRAFT, "a token that no text uses"),
    ("--block-size", flags.whole(2), _DRAFT, "tokens of a block, the anchor counted"),
    ("--anchors", flags.whole(1), _DRAFT, "blocks of each text and step"),
    ("--gamma", flags.number(0, 1e6, True), _DRAFT, "decay of the loss along a block"),
    ("--row-tokens", flags.whole(3), _ALL, "tokens of a row; longer texts are left out or cut"),
    ("--num-responses", flags.whole(1), _DRAFT, "answers to learn from, in whole batches"),
    ("--response-batch", flags.whole(1), _DRAFT, "prompts it answers at a time"),
    ("--response-tokens", flags.whole(2), _DRAFT, "tokens of its longest answer"),
    ("--response-seconds", flags.number(0, 1e9, True), _DRAFT, "answer no longer, in one call"),
    ("--greedy-share", flags.number(0, 1), _DRAFT, "share of answers at temperature 0"),
)
# Defaults of flags, for help texts: the usual one, then those of kinds that differ.
DEFAULTS = {
    "--steps": "20000, dflash 5000, diffusion_gemma 1000, sft 1000",
    "--model": "builtin:tiny-sdar",
    "--lora-rank": "16",
    "--batch-size": "256, dflash 64, diffusion_gemma 16, sft 8",
    "--seed": "0",
    "--muon-lr": "0.02",
    "--adam-lr": "0.003, sft 0.0001",
    "--dtype": "bfloat16, diffusion_gemma float32",
    "--problem-family": "all, diffusion_gemma sums",
    "--layers": "3, ar 6, dflash 2",
    "--hidden-size": "256, diffusion_gemma 128",
    "--ffn-size": "1024, ar 768, dflash the target's, diffusion_gemma 256",
    "--workers": "2",
    "--head-temperature": "2.25",
    "--evals": "4, ar 2, dflash 2, diffusion_gemma 0",
    "--eval-problems": "512",
    "--final-problems": "2048",
    "--log-every": "50",
    "--target-layer-ids": "3 of them, evenly",
    "--mask-token-id": "the tokenizer's mask, else the first row past its tokens",
    "--block-size": "16",
    "--anchors": "16",
    "--gamma": "the published one of the block size",
    "--row-tokens": "176 or 256, ar 208, dflash 208, diffusion_gemma 64, sft 512",
    "--num-responses": "32768",
    "--response-batch": "1024",
    "--response-tokens": "160",
    "--greedy-share": "0.5",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = "A run found in the folder is continued. Curves are drawn to FOLDER/curves.png."
    kind = flag(
        "kind KIND",
        "sdar: a block-diffusion model of word problems (the default); ar: a causal one, a target "
        "for drafters; dflash: a drafter for --target; diffusion_gemma: canvases of sums; sft: "
        "fine-tuning of --model on --data",
        KINDS,
        nargs="?",
    )
    folder = flag("--output --out FOLDER", "folder of the run", required=True)
    flags.add(parser, Group("", kind, folder, *(_row(*option) for option in OPTIONS)))


def _row(name: str, kind: Any, kinds: tuple[str, ...], about: str) -> Flag:
    only = "" if kinds == _ALL else f"{', '.join(kinds)}; "
    about = f"{about} ({only}default: {DEFAULTS.get(name, 'none')})"
    return flag(f"{name} {_METAVARS.get(name, 'N')}", about, kind)


def _either(args: argparse.Namespace) -> str:
    """The family of word problems that --family names where no model is loaded."""
    if args.problem_family is not None:
        raise UsageError("--family is the old spelling of --problem-family here; give one of them")
    try:
        return family(args.family)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"argument --family: {error}") from None


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Train, or continue, or say how to continue."""
    kind = args.kind or "sdar"
    if kind in _OWN and args.family is not None:  # its spelling until 2026-11
        args.problem_family, args.family = _either(args), None
    given = {}
    for option, _, kinds, _ in OPTIONS:
        name = option.removeprefix("--").replace("-", "_")
        if (value := getattr(args, name)) is None:
            continue
        if kind not in kinds:
            raise UsageError(
                f"{option} is not of `train {kind}`; leave it out, or train {' or '.join(kinds)}"
            )
        given[name] = value
    if kind == "dflash" and args.target is None:
        raise UsageError("train dflash needs a --target: give what --model takes")
    if kind == "sft" and args.data is None:
        raise UsageError("train sft needs --data: give a .jsonl file of texts")
    from dllm_jax.training.command import main
    from dllm_jax.training.run_folder import latest_step

    def tell() -> str:
        step = latest_step(args.output)
        if step is None:
            return (
                f"interrupted; {args.output} holds no checkpoint yet; the same command begins anew"
            )
        return (
            f"interrupted; {args.output} holds step {step}; the same command continues from there"
        )

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        with stop.held():
            yield
        stop.check()

    stop.tell = tell
    stop.forced = ()  # a checkpoint may take longer than the usual grace
    main(kind, args.output, given, held=held)
    return 0
