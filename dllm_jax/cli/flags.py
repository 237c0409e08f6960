"""Flags as rows in titled groups, the groups that several verbs share, and types of flags.

A verb lists its groups and hands them to `add`; a flag of several verbs is one row here.
"""

import argparse
import contextlib
import math
from argparse import SUPPRESS
from collections.abc import Callable
from typing import Any, NamedTuple

from dllm_jax.engine.checks import MOST
from dllm_jax.engine.rules import TYPED, Range

DTYPES = ("auto", "bfloat16", "float32", "float16")
QUANTIZATIONS = ("fp8", "none")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
ATTENTION_KINDS = ("xla", "cudnn", "mosaic")
# Fields of strategies with flags of their own.
THRESHOLDS = {
    "accept_threshold": "probability above which a token is accepted",
    "add_block_threshold": "share of the last block that is filled when the next one opens",
    "semi_complete_threshold": "share of a block that is filled when the next one must take a "
    "token in each forward",
    "edit_threshold": "probability above which a token replaces one that is written",
    "token_stability_threshold": "share of a block's tokens that stayed as they were when the next "
    "one opens",
}


def within(allowed: Range) -> Callable[[str], Any]:
    """An argparse type: a number of a range."""

    def parse(text: str) -> Any:
        value: Any = text
        with contextlib.suppress(ValueError):
            value = (int if allowed.is_whole else float)(text)
        try:
            return allowed.check("value", value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def whole(low: int, high: int = MOST) -> Callable[[str], int]:
    """An argparse type: a whole number in [low, high]."""
    return within(Range(low, high))


def number(low: float, high: float, open_low: bool = False) -> Callable[[str], float]:
    """An argparse type: a number in [low, high], or (low, high]."""
    return within(Range(low, high, is_whole=False, above_low=open_low))


def lengths(text: str) -> Any:
    """An argparse type: `512` or `16:4096`."""
    from dllm_jax.bench.workload import Lengths

    low, colon, high = text.partition(":")
    try:
        return Lengths(int(low), int(high if colon else low))
    except ValueError as error:
        reason = str(error) if "must be" in str(error) else "write e.g. 512 or 16:4096"
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}") from None


def token_ids(text: str) -> tuple[int, ...]:
    """An argparse type: token ids separated by commas."""
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r} holds no token id; write e.g. 3,17")
    return tuple(map(within(TYPED["stop_token_ids"]), parts))


def key_value(text: str) -> tuple[str, Any]:
    """An argparse type: `KEY=VALUE` of a strategy field; numbers, true, false and words."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE; write e.g. remasking=static")
    return key, literal(value)


def literal(text: str) -> Any:
    """A value as written on a command line: int, float, true/false/none, else the word."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class Flag(NamedTuple):
    """One argument of a command line, as argparse takes it."""

    names: tuple[str, ...]
    options: dict[str, Any]


def flag(usage: str, about: str, kind: Any = None, default: Any = None, **options: Any) -> Flag:
    """A row: `flag("--page-size Z", "tokens of a page", whole(1), 64)`.

    Args:
        usage: All names of the flag, or one of a positional argument, then its metavar.
        about: Its help. The default is added unless it is named here.
        kind: None: a text; bool: a switch; several words: one of these; else an argparse type.
        options: More of what `add_argument` takes.
    """
    words = usage.split()
    names = [word for word in words if word.startswith("-")] or words[:1]
    is_optional = names[0].startswith("-") and not options.get("required")
    if is_optional and kind is not bool and "default" not in about and about != SUPPRESS:
        shown = "%(default)g" if isinstance(default, float) else "%(default)s"
        about = f"{about} (default: {'none' if default in (None, [], (), {}) else shown})".lstrip()
    options["help"] = about
    if default is not None:
        options["default"] = default
    if kind is bool:
        options["action"] = "store_true"
    elif isinstance(kind, tuple):
        options["choices"] = kind
    elif kind is not None:
        options["type"] = kind
    if len(words) > len(names):
        options["metavar"] = words[-1]
    return Flag(tuple(names), options)


def as_json(what: str) -> Flag:
    """--json: `what` it prints."""
    return flag("--json", what, bool)


class Group:
    """Flags under a title of `--help`; without one they are among the usage's options.

    Args:
        exclusive: At most one of them may be given.
        defaults: Values of parsed arguments where no flag sets them.
    """

    def __init__(self, title: str, *flags: Flag, exclusive: bool = False, **defaults: Any):
        self.title, self.flags, self.exclusive, self.defaults = title, flags, exclusive, defaults

    @property
    def dests(self) -> list[str]:
        """Names of the parsed arguments."""
        return [each.names[0].lstrip("-").replace("-", "_") for each in self.flags]


def add(parser: argparse.ArgumentParser, *groups: Group) -> None:
    """Add groups of flags to a parser, in this order."""
    for group in groups:
        parser.set_defaults(**group.defaults)
        place: Any = parser.add_argument_group(group.title) if group.title else parser
        if group.exclusive:
            place = place.add_mutually_exclusive_group()
        for each in group.flags:
            place.add_argument(*each.names, **each.options)


# Kinds of flags.
seed, temperature = within(TYPED["seed"]), within(TYPED["temperature"])
share = number(0, 1, open_low=True)
seconds, seconds_above_0 = number(0, 86400), number(0, 86400, open_low=True)

DEBUG = flag("--debug", "show the traceback of a failure", bool, SUPPRESS)
INVARIANT = flag(
    "--batch-invariant",
    "a request has the same tokens bit for bit in any batch (docs/same_tokens.md)",
    bool,
)
ATTENTION = flag(
    "--attention-implementation",
    "back end of attention (default: the best there is)",
    ATTENTION_KINDS,
)
DEVICES = flag("--tensor-parallel-size --tp N", "devices that share the model", whole(1), 1)
DRAFT = Group(
    "",
    flag(
        "--draft SRC",
        "a drafter that was trained for the model: a folder, a hub id or builtin:NAME; the "
        "strategy is then dflash, where none is named",
    ),
)
SOURCE = (  # of what a model is made
    flag("--revision REV", "branch, tag or commit of a hub id (default: its main branch)"),
    flag("--lora SRC", "a LoRA adapter to merge in: a PEFT folder or a hub id"),
    flag(
        "--family SPEC",
        "the family of a folder that is of none of ours: path/to/file.py:NAME or pkg.module:NAME "
        "(default: the one its config names)",
    ),
)
MODEL = Group(
    "model",
    flag(
        "--model SRC",
        "a folder (Hugging Face or converted), a hub id, builtin:NAME (listed by `info`), or "
        "random:HUB_ID for random weights of a published shape",
        default="builtin:tiny-sdar",
    ),
    *SOURCE,
    flag(
        "--tokenizer SRC",
        "a folder or a hub id whose tokenizer and chat template are taken (default: those of "
        "the model)",
    ),
    flag(
        "--dtype",
        "of the weights (default: auto, the checkpoint's on an accelerator, float32 on CPU)",
        DTYPES,
        "auto",
    ),
    flag(
        "--quantization",
        "fp8: round the matrices of the layers to 8 bits while the model is loaded; none: "
        "weights of 16 bits (default: 8 bits for what the folder stores in 4 or 8)",
        QUANTIZATIONS,
    ),
    flag(
        "--kv-cache-dtype",
        "fp8: keys and values in 8 bits, which doubles the tokens that the cache holds "
        "(default: auto, the type of the weights)",
        KV_CACHE_DTYPES,
        "auto",
    ),
    flag("--quantize-head", "round the head to 8 bits as well (default: it keeps its type)", bool),
)
ENGINE_OF_ONE = Group(  # of a verb that decodes one text at a time; see `engine.make_llm`
    "engine",
    flag(
        "--max-model-len N",
        "tokens of prompt and text together at most (default: what is needed)",
        whole(1),
    ),
    flag(
        "--max-num-batched-tokens N",
        "prefill tokens between two decode steps at most (default: as many as take no longer "
        "than a step)",
        whole(1),
    ),
    flag("--page-size Z", "tokens of a page of the cache", whole(1), 64),
    flag(
        "--memory-utilization SHARE",
        "share of the device's memory to use, weights included (default: 0.9)",
        share,
    ),
    flag("--no-prefix-caching", "compute equal prefixes every time", bool),
    ATTENTION,
    DEVICES,
)
ENGINE = Group(
    "engine",
    flag("--max-num-seqs N", "texts decoded at once (default: 8)", whole(1)),
    *ENGINE_OF_ONE.flags,
)
CONSTRAINT = Group(  # see `engine.sampling_params`
    "what the text must be",
    flag("--regex PATTERN", "a match of this pattern as a whole (default: anything)"),
    flag("--choice A,B", "one of these texts, separated by commas (default: anything)"),
    flag("--json-schema FILE", "JSON of the schema in this file (default: anything)"),
    exclusive=True,
)


def sampling(of_seed: str, stops: bool = True) -> Group:
    """How a text is drawn and when it ends; see `engine.sampling_params`.

    Args:
        of_seed: What --seed is the seed of.
        stops: The verb takes --stop; one that does not refuses it with a reason of its own.
    """
    about_stop = "ends the text and is no part of it; repeat it for several"
    return Group(
        "sampling and limits",
        _field("--max-tokens N", "tokens of a text at most", 256),
        _field("--temperature T", "0 is greedy (default: the model family's, mostly 0)"),
        _field("--top-k K", "draw from the K surest ids (0, -1, default: all)"),
        _field(
            "--top-p P",
            "draw from the fewest ids that hold probability P (default: the model family's, "
            "mostly all)",
        ),
        flag("--stop TEXT", about_stop if stops else SUPPRESS, default=[], action="append"),
        flag(
            "--stop-token-ids ID,...",
            "ids that end the text, beside the model's own",
            token_ids,
            (),
        ),
        _field("--max-nfe N", "forwards of a text at most (default: no limit)"),
        _field("--seed N", f"{of_seed} (default: 0)"),
    )


def _field(usage: str, about: str, default: Any = None) -> Flag:
    """A row of the field of `SamplingParams` that has the flag's name, within its range."""
    name = usage.split()[0][2:].replace("-", "_")
    return flag(usage, about, within(TYPED[name]), default)


def strategy(repeat: str | None = None) -> Group:
    """--strategy, sizes and thresholds.

    Args:
        repeat: What several strategies are for, and the default; None where the verb takes one.
    """
    spec = "a name (`dllm-jax info` lists them), pkg.module:Name or path/to/file.py:name"
    which = flag("--strategy SPEC", f"{spec} (default: the model's)")
    if repeat:
        which = flag("--strategy SPEC[,KEY=VALUE...]", f"{spec}; {repeat}", action="append")
    thresholds = (
        flag(
            f"--{name.replace('_', '-')} P",
            f"{about} (default: the strategy's)",
            number(0, math.inf),
        )
        for name, about in THRESHOLDS.items()
    )
    return Group(
        "strategy",
        which,
        flag("--block-size S", "tokens of a block (default: the model's)", whole(1)),
        flag("--buffer-size K", "blocks in the window (default: the model's)", whole(1)),
        *thresholds,
        flag(
            "--set KEY=VALUE",
            "any field of the strategy, which `dllm-jax info STRATEGY` lists",
            key_value,
            [],
            action="append",
        ),
        flag(
            "--strategy-config FILE",
            "a strategy and its fields, as `dllm-jax tune --write-config` writes them; flags win "
            "over it",
        ),
        takes_strategies=repeat is not None,
    )


# A prompt of the command line, or a problem in its place.
PROMPT = flag("prompt PROMPT", "the prompt; - reads stdin", nargs="?")
RAW = flag("--raw", "no chat template", bool)
HALF = flag("--half", "which problems --seed draws (default: plain)", ("plain", "hard"))
SEED_OR_PROBLEM = "of sampling, and of the problem where no prompt is given"
# How much work, what is printed and written.
NUM_PROMPTS = flag("--num-prompts N", "requests in all", whole(1), 64)
AS_JSON = as_json("one JSON object instead of the lines")
OUTPUT = flag("--output --out FILE", "write the JSON object to FILE as well (default: no file)")
WATCH = flag("--watch", "draw the window as it denoises", bool)
WATCH_DELAY_S = 0.2
WATCH_DELAY = flag(
    "--watch-delay S",
    f"seconds between two frames of --watch (default: {WATCH_DELAY_S})",
    number(0, 60),
)
