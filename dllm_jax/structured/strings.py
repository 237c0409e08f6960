"""Strings and numbers: what schemas say of them together."""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from .drafts import refused
from .formats import FORMATS
from .limits import Budget
from .numerals import numeral_pattern
from .patterns import ANYTHING, searched
from .regex import NoText
from .trees import Tree, both, in_json, lengths, multiples, parsed, repeated, repeats_one, shorter

MOST_DIGITS = 40
MOST_STEP = 1000
_FAR = Decimal(10) ** (MOST_DIGITS - 4)
_LONG = 256  # characters: of texts that may have more, shorter ones are enough
_ESCAPE = r'\\["\\/bfnrt]'
# Halves of surrogate pairs are no characters. Bounded strings do without these escapes: they would
# double the states of each character.
_UNICODE = r"\\u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
_PLAIN = r'[^"\\\x00-\x1f]'
CHAR, _COUNTED_CHAR = f"(?:{_PLAIN}|{_ESCAPE}|{_UNICODE})", f"(?:{_PLAIN}|{_ESCAPE})"


def lengths_of(way: Sequence[Any], low: str, high: str) -> tuple[int, int | None]:
    """Fewest and most of something, by all schemas of a way."""
    least = max((int(said.schema.get(low, 0)) for said in way), default=0)
    most = [int(said.schema[high]) for said in way if high in said.schema]
    return least, min(most, default=None)


def held(
    way: Sequence[Any], high: str, most: int | None, longest: int, budget: Budget
) -> int | None:
    """The most that is written, where the keyword of the most allows more than is held."""
    if most is None or most <= longest:
        return most
    budget.notes[f"{way[0].path}.{high} {most}: at most {longest} are written"] = None
    return longest


def patterns_of(way: Sequence[Any]) -> tuple[str, ...]:
    """The patterns of a way."""
    return tuple(said.schema["pattern"] for said in way if "pattern" in said.schema)


def string_patterns(way: Sequence[Any], is_wide: bool = False) -> list[Tree]:
    """Trees of a way's patterns, as of `searched`."""
    found = {}
    for said in way:
        if "pattern" in said.schema:
            pattern = said.schema["pattern"]
            try:
                found[pattern] = searched(pattern, is_wide)
            except ValueError as error:
                raise refused(f"{said.path}.pattern", str(error)) from None
    return [*found.values()]


def string_tree(way: Sequence[Any], budget: Budget, is_quoted: bool = True) -> Tree:
    """A tree of the characters between the quotes.

    Args:
        is_quoted: As in JSON, with escapes; else the string as it is.

    Raises:
        NoText: The lengths are not those of the pattern.
    """
    least, most = lengths_of(way, "minLength", "maxLength")
    longest = max(budget.extent.longest, least)
    most = held(way, "maxLength", most, longest, budget)
    formats = {}
    for said in way:
        name = said.schema.get("format")
        if name in FORMATS:
            formats[name] = parsed(FORMATS[name])
        elif name is not None:
            budget.notes[f"{said.path}.format {name!a:.40}"] = None
    key = patterns_of(way), (*formats,), least, most, is_quoted
    if key not in budget.kept:
        trees = [shorter(one, longest, is_counted=True) for one in string_patterns(way)]
        write = in_json if is_quoted else _as_it_is
        budget.kept[key] = _between_quotes([*trees, *formats.values()], least, most, write)
    return budget.kept[key]


def _as_it_is(tree: Tree) -> Tree:
    return tree


def _between_quotes(
    trees: list[Tree], least: int, most: int | None, write: Callable[[Tree], Tree]
) -> Tree:
    if not trees:
        if write is not in_json:
            return repeated(ANYTHING[0][1][2], least, most)
        char = CHAR if most is None and least < 2 else _COUNTED_CHAR
        return repeated(parsed(char), least, most)
    if len(trees) == 1 and (repeats := repeats_one(trees[0])):
        one, few, many = repeats
        most = many if most is None else most if many is None else min(most, many)
        least = max(least, few)
        if most is not None and most < least:
            raise NoText("the lengths are not those of the pattern")
        return write(repeated(one, least, most))
    tree = both(trees)
    if most is not None and most >= _LONG:
        tree = next(
            (
                short
                for more in (32, 16, 8, 4, 2)
                if (lengths(short := shorter(tree, more))[1] or _LONG) < _LONG
            ),
            tree,
        )
    few, many = lengths(tree)
    if few < least or (most is not None and (many is None or many > most)):
        tree = both([tree, repeated(ANYTHING[0][1][2], least, most)])
    return write(tree)


def bounds_of(
    way: Sequence[Any],
) -> tuple[Decimal | None, bool, Decimal | None, bool, list[Decimal]]:
    """The least number and whether it is outside, the greatest likewise, and the steps."""
    numbers = [
        (name, _decimal(said.schema[name], f"{said.path}.{name}"))
        for said in way
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        if name in said.schema
    ]
    low = max(
        ((one, name[0] == "e") for name, one in numbers if name.endswith("inimum")),
        default=(None, False),
    )
    high = min(
        ((one, name[0] != "e") for name, one in numbers if name.endswith("aximum")),
        default=(None, True),
    )
    steps = [one for name, one in numbers if name == "multipleOf"]
    return low[0], low[1], high[0], not high[1], steps


def _decimal(number: Any, path: str) -> Decimal:
    found = Decimal(str(number))
    if path.endswith(".multipleOf") and found <= 0:
        raise refused(path, "must be above 0")
    return found


def number_tree(way: Sequence[Any], is_whole: bool) -> Tree:
    """Numerals between bounds.

    Raises:
        NoText: No text fits.
    """
    low, is_low_out, high, is_high_out, steps = bounds_of(way)
    paths = [f"{said.path}.multipleOf" for said in way if "multipleOf" in said.schema]
    for step, path in zip(steps, paths, strict=True):
        if step != step.to_integral_value() or step > MOST_STEP:
            raise refused(path, f"is supported for whole numbers up to {MOST_STEP}; leave it out")
    # No text of that many digits is written.
    low, high = None if low is None else max(low, -_FAR), None if high is None else min(high, _FAR)
    for bound in (low, high):
        if bound is not None and len(format(bound, "f")) > MOST_DIGITS:
            raise refused(way[0].path, f"has a bound of more than {MOST_DIGITS} digits")
    step = math.lcm(*map(int, steps)) if steps else 1
    if step > MOST_STEP:
        raise refused(paths[0], f"makes a step of more than {MOST_STEP} with others; leave it out")
    found = numeral_pattern(low, high, is_low_out, is_high_out, is_whole or bool(steps))
    if found is None:
        raise NoText("no number is between the bounds")
    return parsed(found) if step == 1 else both([parsed(found), multiples(step)])
