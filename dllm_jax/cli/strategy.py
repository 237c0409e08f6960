"""The strategy of a command line: loaded once, its fields checked by their types.

An error in it is a `UsageError`, raised before anything is printed.
"""

import argparse
import json
import math
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax.cli.errors import UsageError, from_user
from dllm_jax.cli.flags import THRESHOLDS, key_value, literal
from dllm_jax.engine.checks import MOST

SIZES = ("block_size", "buffer_size")


def load(spec: str | None) -> Any:
    """The strategy value that `spec` names, without fields; a file is executed here and only here.

    Raises:
        UsageError: It names no strategy, or its file cannot be run.
    """
    from dllm_jax.strategies import load_strategy

    return None if spec is None else from_user("strategy", spec, load_strategy)


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy fields that the flags set; a field set twice is an error."""
    fields = {
        name: getattr(args, name)
        for name in (*SIZES, *THRESHOLDS)
        if getattr(args, name) is not None
    }
    for key, value in args.set:
        if key in fields and fields[key] != value:
            raise UsageError(
                f"--set {key}={shown(value)}: {key} is already {fields[key]}; give it once"
            )
        fields[key] = value
    return fields


def apply_config(args: argparse.Namespace) -> None:
    """Put what `--strategy-config` holds where the flags would have put it.

    Raises:
        UsageError: The file holds no strategy, or `--strategy` names another one.
    """
    path = args.strategy_config
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"--strategy-config {path!r} cannot be read: {error.strerror}; give a file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--strategy-config {path!r} is no JSON ({error}); write one with "
            "`dllm-jax tune --write-config FILE`"
        ) from None
    spec, fields = (
        (found.get("strategy"), found.get("fields")) if isinstance(found, dict) else (0, 0)
    )
    if not isinstance(spec, str) or not spec or not isinstance(fields, dict):
        raise UsageError(
            f'--strategy-config {path!r} must hold {{"strategy": NAME, "fields": {{...}}}}; write '
            "one with `dllm-jax tune --write-config FILE`"
        )
    if args.strategy not in (None, spec, [spec]):
        raise UsageError(
            f"--strategy-config {path!r} is of {spec}, and --strategy says otherwise; give one"
        )
    args.strategy = [spec] if getattr(args, "takes_strategies", False) else spec
    given = given_fields(args)
    more = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items() if k not in given}
    args.set = [*args.set, *more.items()]


def load_several(specs: Sequence[str], fields: dict[str, Any]) -> list[Any]:
    """Of each `SPEC,KEY=VALUE,...`: label, spec, strategy value, its own fields and shared ones.

    Raises:
        UsageError: As `load`, or one is given twice, or no strategy has one of `fields`.
    """
    if len(set(specs)) < len(specs):
        raise UsageError("the same --strategy is given twice; give each once")
    choices = []
    for label in specs:
        spec, own = split(label)
        choices.append((label, spec, load(spec), own))
    return share(choices, fields)


def split(text: str) -> tuple[str, dict[str, Any]]:
    """`multi_bd,buffer_size=2` -> spec, fields."""
    spec, *pairs = text.split(",")
    try:
        return spec, dict(key_value(pair) for pair in pairs)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--strategy {text}: {error}") from None


def share(choices: list[Any], fields: dict[str, Any]) -> list[Any]:
    """Choices with the shared fields that each has; a field that none has is an error."""
    takers: dict[str, list[str]] = {name: [] for name in fields}
    shared = []
    for label, spec, value, own in choices:
        has = set(settable(value))
        if spec == "block_diffusion":
            has.discard("buffer_size")  # one block at a time by definition
        mine = {name: field for name, field in fields.items() if name in has}
        check_fields(value, mine | own)
        for name in mine:
            takers[name].append(label)
        shared.append((label, spec, value, mine | own))
    for name, labels in takers.items():
        if not labels:
            raise UsageError(
                f"{name}={shown(fields[name])}: none of "
                f"{', '.join(label for label, *_ in choices)} takes {name}; leave it out"
            )
    for name, labels in takers.items():
        if len(labels) < len(choices):
            print(f"note: {name} applies to {', '.join(labels)} only", file=sys.stderr)
    return shared


def resolve(
    model: Any, spec: str | None, value: Any, fields: dict[str, Any], draft: str | None = None
) -> Any:
    """A loaded strategy with the numbers of the model's family, then `fields`, sizes all set.

    Args:
        spec: The name or path that the user gave, None for the model's own strategy.
        value: `load(spec)`.
        draft: The value of `--draft`; with one, `dflash` may replace the model's own strategy.

    Raises:
        UsageError: Unknown field, a value of another type, or one out of range.
    """
    from dllm_jax.api.drafts import refuse_draft
    from dllm_jax.api.strategy import family_strategy, resolve_strategy, usual_strategy
    from dllm_jax.strategies import load_strategy

    refuse_draft(model)
    name = spec or usual_strategy(model, draft)
    value = load(name) if value is None else value
    fields = check_fields(value, fields)
    cleared = {key: None for key, field in fields.items() if field is None}
    try:
        if ":" in name:
            value = load_strategy(value, **fields)
        else:
            value = family_strategy(model, name, **fields)
        return resolve_strategy(model, value.replace(**cleared) if cleared else value)
    except ValueError as error:
        raise UsageError(str(error)) from error


def bind_drafts(
    args: argparse.Namespace, model: Any, choices: Sequence[Any]
) -> dict[str, tuple[Any, Any]]:
    """By label the strategy of each choice, and its drafter, which is loaded once; None without.

    Args:
        choices: Of `load_several`.

    Raises:
        UsageError: As `resolve`, or none of them needs the drafter that is given.
        ValueError: Some needs one and none is given.
    """
    from dllm_jax.api.drafts import bind_draft

    found, draft = {}, args.draft
    for label, spec, value, fields in choices:
        strategy, bound = resolve(model, spec, value, fields), None
        if strategy.needs.aux:
            strategy, aux = bind_draft(strategy, draft, model)
            (bound,) = aux.values()
            draft = bound
        found[label] = strategy, bound
    if args.draft is not None and draft is args.draft:
        raise UsageError(
            f"--draft {args.draft!r}: none of {', '.join(found)} drafts; add --strategy dflash"
        )
    return found


def fit_window(model: Any, strategy: Any, fields: dict[str, Any], longest: int) -> Any:
    """The strategy with a window for the longest text, if the window holds the whole text.

    A power of two of blocks, so that the next command finds its programs. A given `buffer_size`
    stays.
    """
    if not strategy.needs.prompt.in_window or "buffer_size" in fields:
        return strategy
    size, most = 1, max(1, model.config.max_position // strategy.block_size)
    while size * strategy.block_size < longest:
        size *= 2
    return strategy.replace(buffer_size=min(size, most))


def settable(strategy: Any) -> tuple[str, ...]:
    """Fields that a command line may set."""
    from dllm_jax.strategies.core.resolve import settings

    return settings(strategy)


def describe_fields(strategy: Any, about: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Each settable field: its default, range in words, and what `about` says of it."""
    from dllm_jax.strategies.core.knobs import knob_rules

    knobs, kinds = knob_rules(strategy), _kinds(strategy)
    described = {}
    for name in settable(strategy):
        default, range_ = getattr(strategy, name), None
        if name in knobs:
            low, high = knobs[name][:2]
            range_ = f"a number in [{low:g}, {high:g}]"
            if math.isinf(high):
                range_ = f"a number from {low:g} up"
        elif name in SIZES:
            range_ = "a whole number from 1 up" + ("; none: the model's" * (default is None))
        else:
            range_ = _broken_rule(name, _NOTHING, kinds.get(name, Any)) or "any value"
        described[name] = {
            "default": default if isinstance(default, _PLAIN) else repr(default),
            "range": range_,
            "about": about.get(name) or _ABOUT_SIZES.get(name, ""),
        }
    return described


def plain(strategy: Any, spec: str) -> dict[str, Any]:
    """A strategy for a report: the name or path that was given, and its fields as JSON has them."""
    fields = {name: getattr(strategy, name) for name in settable(strategy)}
    return {
        "name": spec,
        "fields": {k: v if isinstance(v, _PLAIN) else repr(v) for k, v in fields.items()},
    }


def check_fields(strategy: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields by their types: `1,8` is a tuple where the field is one.

    Raises:
        UsageError: One would fail on the device, or be ignored: `needs=3`, `accept_threshold=high`.
    """
    from dllm_jax.strategies.core.knobs import knob_rules

    knobs = knob_rules(strategy)
    kinds = _kinds(strategy)
    read = {name: _read(value, kinds.get(name, Any)) for name, value in fields.items()}
    for name, value in fields.items():
        given = f"{name}={shown(value)}"
        if name not in settable(strategy):
            what = "has no such field"
            if hasattr(strategy, name):
                what = f"is what it is: {name} is not settable"
            raise UsageError(
                f"{given}: {type(strategy).__name__} {what}; "
                f"its fields are {', '.join(settable(strategy))}"
            )
        rule = "a number" if name in knobs and not _is(value, float) else None
        rule = rule or _broken_rule(name, read[name], kinds.get(name, Any))
        if rule:
            raise UsageError(f"{given} is not {rule}; give one")
    return read


def shown(value: Any) -> str:
    """A value as a command line writes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)


def _kinds(strategy: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(type(strategy))
    except (NameError, TypeError):  # a user's file with annotations that are only text
        return {}


def _options(kind: Any) -> tuple[Any, ...]:
    """The types that a field may have."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _read(value: Any, kind: Any) -> Any:
    """`value` as whole numbers where it reads as them and the field is a tuple, else as it is.

    `1,8` and `[1, 8]` are two numbers, 8 is one.
    """
    if _LIST not in _options(kind) or not (isinstance(value, str) or _is(value, float)):
        return value
    text = str(value)
    if text[:1] + text[-1:] in ("[]", "()"):
        text = text[1:-1]
    found = tuple(literal(part.strip()) for part in text.split(","))
    return found if all(_is(one, int) and abs(one) <= MOST for one in found) else value


def _broken_rule(name: str, value: Any, kind: Any) -> str | None:
    """The rule that `value` breaks, None if it breaks none."""
    rules = []
    for option in _options(kind):
        if typing.get_origin(option) is typing.Literal:
            choices = typing.get_args(option)
            if value in choices:
                return None
            rules.append(f"one of {', '.join(map(str, choices))}")
        elif option is int:
            low = 1 if name in SIZES else -MOST
            if _is(value, int) and low <= value <= MOST:
                return None
            bounded = name in SIZES or _is(value, int)  # the range is what is wrong
            rules.append("a whole number" + (f" in [{low}, {MOST}]" if bounded else ""))
        elif option is types.NoneType:
            if value is None:
                return None
            rules.append("none")
        elif option in _WORDS:
            if _is(value, option):
                return None
            rules.append(_WORDS[option])
        elif option == _LIST:
            if isinstance(value, tuple):
                return None
            rules.append("a list of whole numbers (e.g. 1,8)")
        else:
            return None  # a type of the strategy's own: its constructor checks it
    return " or ".join(rules)


_NOTHING = object()  # breaks every rule
_PLAIN = (int, float, str, list, tuple, types.NoneType)  # what JSON can write
_ABOUT_SIZES = {"block_size": "Tokens of a block.", "buffer_size": "Blocks in the window."}
_WORDS = {float: "a number", bool: "true or false", str: "a word"}
_LIST = tuple[int, ...]


def _is(value: Any, kind: type) -> bool:
    """Whether a literal has a type. A bool is no number; a whole number is a float too."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, int | float if kind is float else kind)
