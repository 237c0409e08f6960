"""Flags that several verbs share, their types, and what is made of them.

Nothing here runs a model.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

from dllm_jax.cli.errors import UsageError

DTYPES = ("auto", "bfloat16", "float32", "float16")
# flag -> field of the strategy
THRESHOLDS = ("accept_threshold", "add_block_threshold", "semi_complete_threshold")


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `low` (and at most `high`)."""
    bound = f">= {low}" if high is None else f"in [{low}, {high}]"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number; give one {bound}"
            ) from None
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(
                f"{value} is too {_side(value, low)}; give one {bound}"
            )
        return value

    return parse


def number(low: float, high: float, open_low: bool = False) -> Callable[[str], float]:
    """An argparse type: a number in [low, high], or (low, high]."""
    bound = f"{'>' if open_low else '>='} {low:g}" + (
        "" if math.isinf(high) else f" and <= {high:g}"
    )

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number; give one {bound}") from None
        if math.isnan(value) or not low <= value <= high or (open_low and value == low):
            raise argparse.ArgumentTypeError(f"{text} is out of range; give one {bound}")
        return value

    return parse


def _side(value: int, low: int) -> str:
    return "small" if value < low else "large"


def token_ids(text: str) -> tuple[int, ...]:
    """An argparse type: token ids separated by commas."""
    try:
        ids = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        ids = ()
    if not ids or min(ids) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids; write e.g. 3,17")
    return ids


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
    """--model, --dtype."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="builtin:tiny-sdar",
        metavar="SRC",
        help="a folder (Hugging Face or converted), a hub id, builtin:NAME, or random:HUB_ID for "
        "random weights of a published shape (default: %(default)s)",
    )
    group.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="of the weights (default: the checkpoint's)"
    )


def add_strategy_flags(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """--strategy, sizes and thresholds."""
    group = parser.add_argument_group("strategy")
    spec = "a name (ar, block_diffusion, multi_bd), pkg.module:Name or path/to/file.py:name"
    if several:
        group.add_argument(
            "--strategy",
            action="append",
            metavar="SPEC[,KEY=VALUE...]",
            help=f"{spec}; repeat it to compare on the same problems "
            "(default: block_diffusion and multi_bd)",
        )
    else:
        group.add_argument("--strategy", metavar="SPEC", help=f"{spec} (default: the model's)")
    group.add_argument("--block-size", type=whole(1), metavar="S", help="tokens of a block")
    group.add_argument("--buffer-size", type=whole(1), metavar="K", help="blocks in the window")
    for name in THRESHOLDS:
        group.add_argument(f"--{name.replace('_', '-')}", type=number(0, math.inf), metavar="P")
    group.add_argument(
        "--set",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any field of the strategy",
    )


def strategy_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy fields that the flags set; a field set twice is an error."""
    fields = {
        name: getattr(args, name)
        for name in ("block_size", "buffer_size", *THRESHOLDS)
        if getattr(args, name) is not None
    }
    for key, value in args.set:
        if key in fields and fields[key] != value:
            raise UsageError(f"--set {key}={value}: {key} is already {fields[key]}; give it once")
        fields[key] = value
    return fields


def resolve_strategy(model: Any, spec: str | None, fields: dict[str, Any]) -> Any:
    """`spec` as a strategy value, with the numbers of the model's family, then `fields`.

    Raises:
        UsageError: Unknown strategy or field, or a value out of range.
    """
    from dllm_jax.generation import family_strategy
    from strategies import load_strategy

    try:
        if spec is not None and ":" in spec:
            strategy = load_strategy(spec)
            _check_kinds(strategy, fields)
            return load_strategy(strategy, **fields)
        name = spec or model.defaults.strategy
        _check_kinds(load_strategy(name), fields)
        return family_strategy(model, name, **fields)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_kinds(strategy: Any, fields: dict[str, Any]) -> None:
    """A number must stay a number: `--set accept_threshold=high` fails here, not on the device."""
    from strategies.protocol import knob_ranges

    for name, value in fields.items():
        is_number = name in knob_ranges(strategy) or name in ("block_size", "buffer_size")
        if is_number and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UsageError(f"{name}={value!r} is no number; give one")


def check_strategy(spec: str | None) -> None:
    """Fail early, before a model is loaded, if `spec` names no strategy."""
    from strategies import load_strategy

    if spec is None:
        return
    try:
        load_strategy(spec)
    except ValueError as error:
        raise UsageError(str(error)) from error
