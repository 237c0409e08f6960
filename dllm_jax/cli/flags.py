"""Flags that several verbs share, and their types."""

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import Any

from dllm_jax.engine import checks

DTYPES = ("auto", "bfloat16", "float32", "float16")
QUANTIZATIONS = ("fp8", "none")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
ATTENTION = ("xla", "cudnn", "triton", "mosaic")
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


def whole(low: int, high: int = checks.MOST) -> Callable[[str], int]:
    """An argparse type: a whole number in [low, high]."""
    return lambda text: _checked(checks.whole_number, int, text, low, high)


def number(low: float, high: float, open_low: bool = False) -> Callable[[str], float]:
    """An argparse type: a number in [low, high], or (low, high]."""

    def parse(text: str) -> float:
        value = _checked(checks.real_number, float, text, low, high)
        if open_low and value == low:
            raise argparse.ArgumentTypeError(f"{value=} must be above {low:g}; choose a larger one")
        return value

    return parse


def _checked(check: Callable[..., Any], kind: type, text: str, low: float, high: float) -> Any:
    value: Any = text
    with contextlib.suppress(ValueError):
        value = kind(text)
    try:
        return check("value", value, low, high)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
    return tuple(map(whole(0), parts))


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


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """--model, and how it is loaded."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="builtin:tiny-sdar",
        metavar="SRC",
        help="a folder (Hugging Face or converted), a hub id, builtin:NAME (listed by `info`), or "
        "random:HUB_ID for random weights of a published shape (default: %(default)s)",
    )
    add_source_flags(group)
    group.add_argument(
        "--tokenizer",
        metavar="SRC",
        help="a folder or a hub id whose tokenizer and chat template are taken (default: those of "
        "the model)",
    )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="of the weights (default: auto, the checkpoint's on an accelerator, float32 on CPU)",
    )
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="fp8: round the matrices of the layers to 8 bits while the model is loaded; none: "
        "weights of 16 bits (default: 8 bits for what the folder stores in 4 or 8)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        help="fp8: keys and values in 8 bits, which doubles the tokens that the cache holds "
        "(default: auto, the type of the weights)",
    )
    group.add_argument(
        "--quantize-head",
        action="store_true",
        help="round the head to 8 bits as well (default: it keeps its type)",
    )


def add_source_flags(parser: Any) -> None:
    """--revision, --lora: of what a model is made."""
    parser.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a hub id (default: its main branch)",
    )
    parser.add_argument(
        "--lora",
        metavar="SRC",
        help="a LoRA adapter to merge in: a PEFT folder or a hub id (default: none)",
    )


def add_draft_flag(parser: argparse.ArgumentParser) -> None:
    """--draft: the model that a speculative strategy drafts with."""
    parser.add_argument(
        "--draft",
        metavar="SRC",
        help="a drafter that was trained for the model: a folder, a hub id or builtin:NAME; the "
        "strategy is then dflash, where none is named (default: none)",
    )


def add_attention_flag(parser: Any) -> None:
    """--attention-implementation."""
    parser.add_argument(
        "--attention-implementation",
        choices=ATTENTION,
        help="back end of attention (default: the best there is)",
    )


def add_devices_flag(parser: Any) -> None:
    """--tensor-parallel-size."""
    parser.add_argument(
        "--tensor-parallel-size",
        "--tp",
        type=whole(1),
        default=1,
        metavar="N",
        help="devices that share the model (default: 1)",
    )


def add_engine_flags(parser: argparse.ArgumentParser, several: bool = True) -> None:
    """Sizes of the engine; see `engine.make_llm`.

    Args:
        several: The verb decodes more than one text at a time.
    """
    group = parser.add_argument_group("engine")
    if several:
        group.add_argument(
            "--max-num-seqs", type=whole(1), metavar="N", help="texts decoded at once (default: 8)"
        )
    group.add_argument(
        "--max-model-len",
        type=whole(1),
        metavar="N",
        help="tokens of prompt and text together at most (default: what is needed)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=whole(1),
        metavar="N",
        help="prefill tokens between two decode steps at most (default: as many as take no longer "
        "than a step)",
    )
    group.add_argument(
        "--page-size",
        type=whole(1),
        default=64,
        metavar="Z",
        help="tokens of a page of the cache (default: %(default)s)",
    )
    group.add_argument(
        "--memory-utilization",
        type=number(0, 1, open_low=True),
        metavar="SHARE",
        help="share of the device's memory to use, weights included (default: 0.9)",
    )
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="compute equal prefixes every time"
    )
    add_attention_flag(group)
    add_devices_flag(group)


def add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    """--regex, --choice, --json-schema; see `engine.sampling_params`."""
    group = parser.add_argument_group("what the text must be").add_mutually_exclusive_group()
    group.add_argument(
        "--regex", metavar="PATTERN", help="a match of this pattern as a whole (default: anything)"
    )
    group.add_argument(
        "--choice",
        metavar="A,B",
        help="one of these texts, separated by commas (default: anything)",
    )
    group.add_argument(
        "--json-schema",
        metavar="FILE",
        help="JSON of the schema in this file (default: anything)",
    )


def add_sampling_flags(parser: argparse.ArgumentParser, seed: str, stops: bool = True) -> None:
    """How a text is drawn and when it ends; see `engine.sampling_params`.

    Args:
        seed: What --seed is the seed of.
        stops: The verb takes --stop; one that does not refuses it with a reason of its own.
    """
    group = parser.add_argument_group("sampling and limits")
    group.add_argument(
        "--max-tokens",
        type=whole(1),
        default=256,
        metavar="N",
        help="tokens of a text at most (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=number(0, 1e6),
        metavar="T",
        help="0 is greedy (default: the model family's, mostly 0)",
    )
    group.add_argument(
        "--top-k", type=whole(1), metavar="K", help="draw from the K surest ids (default: all)"
    )
    group.add_argument(
        "--top-p",
        type=number(0, 1, open_low=True),
        metavar="P",
        help="draw from the fewest ids that hold probability P (default: the model family's, "
        "mostly all)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends the text and is no part of it; repeat it for several (default: none)"
        if stops
        else argparse.SUPPRESS,
    )
    group.add_argument(
        "--stop-token-ids",
        type=token_ids,
        default=(),
        metavar="ID,...",
        help="ids that end the text, beside the model's own (default: none)",
    )
    group.add_argument(
        "--max-nfe",
        type=whole(1),
        metavar="N",
        help="forwards of a text at most (default: no limit)",
    )
    group.add_argument("--seed", type=whole(0, 2**32 - 1), metavar="N", help=seed)


def add_strategy_flags(parser: argparse.ArgumentParser, repeat: str | None = None) -> None:
    """--strategy, sizes and thresholds.

    Args:
        repeat: What several strategies are for, and the default; None where the verb takes one.
    """
    group = parser.add_argument_group("strategy")
    spec = "a name (`dllm-jax info` lists them), pkg.module:Name or path/to/file.py:name"
    parser.set_defaults(takes_strategies=repeat is not None)
    if repeat:
        group.add_argument(
            "--strategy",
            action="append",
            metavar="SPEC[,KEY=VALUE...]",
            help=f"{spec}; {repeat}",
        )
    else:
        group.add_argument("--strategy", metavar="SPEC", help=f"{spec} (default: the model's)")
    group.add_argument(
        "--block-size",
        type=whole(1),
        metavar="S",
        help="tokens of a block (default: the model's)",
    )
    group.add_argument(
        "--buffer-size",
        type=whole(1),
        metavar="K",
        help="blocks in the window (default: the model's)",
    )
    for name, about in THRESHOLDS.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=number(0, math.inf),
            metavar="P",
            help=f"{about} (default: the strategy's)",
        )
    group.add_argument(
        "--set",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any field of the strategy, which `dllm-jax info STRATEGY` lists (default: none)",
    )
    group.add_argument(
        "--strategy-config",
        metavar="FILE",
        help="a strategy and its fields, as `dllm-jax tune --out` writes them; flags win over it "
        "(default: none)",
    )
