"""Expressions as trees: what patterns are parsed to, and what schemas are put together from.

A tree is a list of nodes `(op, value)` in sequence, as the standard library's parser has them.
Seven ops are ours. `MEMBERS`: the members of an object in their order, with commas between those
that are there. `SUBSETS`: the same in any order. `BOTH` and `FIRST_ALONE` of two trees: the texts
of both, and those of the first that are none of the second. `MULTIPLES`: the numerals of a number's
multiples from 0 on. `LETTERS`: one of some letters, bytes as they are or tokens without bytes.
`FREE`: any letters without marks.
"""

import re
from collections.abc import Iterable, Sequence
from re import _constants as _c  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

LAST = 0x10FFFF
MOST_CHARS = 100_000  # of an expression; its parser takes a second for four times that number
MOST_DEEP = 64  # of its groups and repetitions
MEMBERS, SUBSETS, MULTIPLES = "members", "subsets", "multiples"
BOTH, FIRST_ALONE = "both", "first alone"
LETTERS, FREE = "letters", "free"
Tree = list[tuple[Any, Any]]
Ranges = list[tuple[int, int]]

_CATEGORIES = {
    _c.CATEGORY_DIGIT: ((48, 57),),
    _c.CATEGORY_WORD: ((48, 57), (65, 90), (95, 95), (97, 122)),
    _c.CATEGORY_SPACE: ((9, 13), (32, 32)),
}
_NEGATED = {
    _c.CATEGORY_NOT_DIGIT: _c.CATEGORY_DIGIT,
    _c.CATEGORY_NOT_WORD: _c.CATEGORY_WORD,
    _c.CATEGORY_NOT_SPACE: _c.CATEGORY_SPACE,
}


def parsed(pattern: str) -> Tree:
    """The tree of a regular expression.

    Raises:
        ValueError: The expression is invalid, or sets flags.
    """
    if not isinstance(pattern, str):
        raise ValueError(f"regular expression: {pattern!r:.60} is no text; give one")
    if len(pattern) > MOST_CHARS:
        raise ValueError(
            f"regular expression: {len(pattern)} characters; at most {MOST_CHARS} are read"
        )
    check_text(pattern, "regular expression")
    try:
        tree = _parser.parse(_CLASS.sub(_quoted, pattern))
    except (re.error, RecursionError, OverflowError) as error:
        said = ascii(str(error))[1:-1]
        raise ValueError(f"regular expression: {said:.200}; correct it") from None
    if tree.state.flags & ~re.UNICODE:
        raise unsupported("a flag")
    _check_depth(tree, MOST_DEEP)
    return list(tree)


def check_text(said: str, what: str) -> None:
    """Refuse a text that no bytes of UTF-8 spell."""
    if any(0xD800 <= ord(char) <= 0xDFFF for char in said):
        raise ValueError(f"{what}: {said!a:.60} has half of a character; write it whole")


def _quoted(match: re.Match[str]) -> str:
    """A class in which signs of Python's future classes are quoted: it warns of them."""

    def one(item: re.Match[str]) -> str:
        signs = ("\\" + char if char and char in "[&~|-" else char for char in item.groups(""))
        return "-".join(signs) if item[2] else "".join(signs)

    return (match[1] and match[1] + _ITEM.sub(one, match[2]) + "]") or match[0]


_CLASS = re.compile(r"\\.|(\[\^?\]?)((?:\\.|[^\\\]])*)\]", re.DOTALL)
_ITEM = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.DOTALL)


def _check_depth(tree: Any, left: int) -> None:
    for op, value in tree:
        if not left:
            raise ValueError(
                f"regular expression: is nested more than {MOST_DEEP} deep; flatten it"
            )
        for inner in children(op, value):
            _check_depth(inner, left - 1)


def unsupported(what: str) -> ValueError:
    """The error of an expression that no automaton can hold to."""
    return ValueError(f"regular expression: {what} is not supported; leave it out")


def text(said: str) -> Tree:
    """A text as it stands."""
    return [(_c.LITERAL, ord(char)) for char in said]


def either(trees: Sequence[Tree]) -> Tree:
    """One of several trees."""
    return trees[0] if len(trees) == 1 else [(_c.BRANCH, (None, trees))]


def repeated(tree: Tree, least: int = 0, most: int | None = None) -> Tree:
    """A tree several times in sequence."""
    return [(_c.MAX_REPEAT, (least, _c.MAXREPEAT if most is None else most, tree))]


def members(
    each: Iterable[tuple[Tree, bool]], comma: Tree, least: int = 0, most: int | None = None
) -> Tree:
    """Trees in their order, each with whether it must be there, and `comma` between them.

    Args:
        least, most: How many are there.
    """
    return [(MEMBERS, (list(each), comma, least, most))]


def any_order(trees: Sequence[Tree], comma: Tree, least: int = 0, most: int | None = None) -> Tree:
    """Trees each of which stands once at most, in any order; a few, since all subsets count."""
    return [(SUBSETS, (list(trees), comma, least, len(trees) if most is None else most))]


def both(trees: Sequence[Tree]) -> Tree:
    """The texts of all trees."""
    found, *others = trees
    for tree in others:
        found = [(BOTH, (found, tree))]
    return found


def letters(sequence: Iterable[int]) -> Tree:
    """A sequence of letters."""
    return [(LETTERS, letter) for letter in sequence]


def free(
    banned: Sequence[Sequence[int]], mark: Sequence[int] | None = None, others: Sequence[int] = ()
) -> Tree:
    """Any bytes without a sequence of `banned`, up to the first `mark`; None: to any place.

    Args:
        others: Letters that are no bytes and may also stand there.
    """
    return [(FREE, (tuple(map(tuple, banned)), mark and tuple(mark), tuple(others)))]


def multiples(step: int) -> Tree:
    """Whole multiples of a number, with their signs."""
    return [*repeated(text("-"), 0, 1), (MULTIPLES, step)]


def ranges_of(op: Any, value: Any) -> Ranges | None:
    """The characters of a node of one character; None for other nodes."""
    if op is _c.LITERAL:
        return [(value, value)]
    if op is _c.NOT_LITERAL:
        return inverted([(value, value)])
    if op is _c.ANY:
        return inverted([(10, 10)])
    return _of_class(value) if op is _c.IN else None


def inverted(ranges: Ranges) -> Ranges:
    """All other characters."""
    found, first = [], 0
    for low, high in sorted(ranges):
        if low > first:
            found.append((first, low - 1))
        first = max(first, high + 1)
    return [*found, (first, LAST)] if first <= LAST else found


def _of_class(items: Any) -> Ranges:
    ranges: Ranges = []
    negate = False
    for op, value in items:
        if op is _c.NEGATE:
            negate = True
        elif op is _c.LITERAL:
            ranges.append((value, value))
        elif op is _c.RANGE:
            ranges.append(value)
        elif value in _CATEGORIES:
            ranges += _CATEGORIES[value]
        else:
            ranges += inverted(list(_CATEGORIES[_NEGATED[value]]))
    return inverted(ranges) if negate else ranges


def children(op: Any, value: Any) -> list[Tree]:
    """The trees within a node."""
    if op is _c.BRANCH:
        return list(value[1])
    if op is _c.SUBPATTERN:
        if value[1] or value[2]:
            raise unsupported("a flag within")
        return [value[3]]
    if op in (BOTH, FIRST_ALONE):
        return list(value)
    if op in (_c.ASSERT, _c.ASSERT_NOT):
        return [value[1]]
    return [value[2]] if op in (_c.MAX_REPEAT, _c.MIN_REPEAT) else []


def in_json(tree: Tree) -> Tree:
    """The tree of a text as it is written within a JSON string.

    Quotes, backslashes and control characters are escaped; others stand as they are.
    """
    found: Tree = []
    for op, value in tree:
        ranges = ranges_of(op, value)
        if ranges is not None:
            found += _escaped(ranges)
        elif op in (_c.BRANCH, _c.SUBPATTERN):
            found += either([in_json(one) for one in children(op, value)])
        elif op in (_c.MAX_REPEAT, _c.MIN_REPEAT):
            found.append((_c.MAX_REPEAT, (value[0], value[1], in_json(value[2]))))
        elif op in (BOTH, FIRST_ALONE):
            found.append((op, tuple(map(in_json, value))))
        else:
            found.append((op, value))  # refused where the automaton is made
    return found


_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_PLAIN = [(0x20, 0x21), (0x23, 0x5B), (0x5D, LAST)]


def _escaped(ranges: Ranges) -> Tree:
    plain = [
        (_c.RANGE, (max(low, first), min(high, last)))
        for low, high in ranges
        for first, last in _PLAIN
        if max(low, first) <= min(high, last)
    ]
    special = [
        code for code in (*range(0x20), 34, 92) if any(low <= code <= high for low, high in ranges)
    ]
    trees = [[(_c.IN, plain)]] if plain else []
    trees += [text("\\" + _SHORT.get(code, f"u{code:04x}")) for code in special]
    return either(trees) if trees else [(_c.IN, [])]


def repeats_one(tree: Tree) -> tuple[Tree, int, int | None] | None:
    """The character, least and most of a tree that repeats one character; None for others."""
    if len(tree) != 1 or tree[0][0] not in (_c.MAX_REPEAT, _c.MIN_REPEAT):
        return None
    least, most, inner = tree[0][1]
    inner = list(inner)
    if len(inner) != 1 or ranges_of(*inner[0]) is None:
        return None
    return inner, least, None if most is _c.MAXREPEAT else int(most)


def shorter(tree: Tree, more: int, is_counted: bool = False) -> Tree:
    """The tree with a limit on each endless repetition: `more` above its least number.

    Args:
        is_counted: Shorten repetitions that have a limit instead, and keep endless ones.
    """
    found: Tree = []
    for op, value in tree:
        if op in (_c.MAX_REPEAT, _c.MIN_REPEAT):
            least, most, inner = value
            if (most is not _c.MAXREPEAT) is is_counted:
                most = least + more if most is _c.MAXREPEAT else min(most, max(least, more))
            found.append((_c.MAX_REPEAT, (least, most, shorter(inner, more, is_counted))))
        elif op in (_c.BRANCH, _c.SUBPATTERN):
            found += either([shorter(one, more, is_counted) for one in children(op, value)])
        elif op in (BOTH, FIRST_ALONE):
            found.append((op, (shorter(value[0], more, is_counted), value[1])))
        else:
            found.append((op, value))
    return found


_OF_FIRST = (BOTH, FIRST_ALONE)  # whose texts are some of those of their first tree


def lengths(tree: Tree) -> tuple[int, int | None]:
    """Fewest and most characters of a tree's texts."""
    low, high = 0, 0
    for op, value in tree:
        if ranges_of(op, value) is not None:
            few, many = 1, 1
        elif op is _c.AT:
            few, many = 0, 0
        else:
            inner = [lengths(one) for one in children(op, value)[: 1 if op in _OF_FIRST else None]]
            inner = inner or [(0, None)]
            few = min(one[0] for one in inner)
            many = None if any(one[1] is None for one in inner) else max(o[1] or 0 for o in inner)
            if op in (_c.MAX_REPEAT, _c.MIN_REPEAT):
                few *= value[0]
                many = None if value[1] is _c.MAXREPEAT or many is None else many * value[1]
        low, high = low + few, None if high is None or many is None else high + many
    return low, high
