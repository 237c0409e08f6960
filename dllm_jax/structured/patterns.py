r"""Patterns of JSON schemas, which are ECMA-262's, to trees of the texts in which they are found.

Other programs read a pattern as Python or Rust do, whose classes hold more of Unicode. A text that
is written here is right by all of them: `\s` is what all call white space, and `\S` what none does.
Where a pattern says which texts are *not* written, it has the texts of all of them (`is_wide`).
"""

import functools
import re
import sys
from re import _constants as _c  # type: ignore[attr-defined]
from typing import Any

from .trees import (
    BOTH,
    FIRST_ALONE,
    LAST,
    Ranges,
    Tree,
    children,
    either,
    inverted,
    parsed,
    ranges_of,
    repeated,
    unsupported,
)

ANYTHING = repeated([(_c.IN, [(_c.RANGE, (0, LAST))])])
_LINE_ENDS = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SPACES = [
    *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
]
_ODD_SPACES = [(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]  # of one of the standards alone
_BEGIN = (_c.AT_BEGINNING, _c.AT_BEGINNING_STRING)
_END = (_c.AT_END, _c.AT_END_STRING)
# What both languages have but spell differently; an escape is passed over.
_SPELLING = re.compile(
    r"\\u\{([0-9a-fA-F]+)\}|\\.|\(\?<(?![=!])|\[\^\]|\{,|\$\(\?!\[\\s\\S\]\)", re.DOTALL
)


def searched(pattern: str, is_wide: bool = False) -> Tree:
    """The tree of all texts in which a pattern is found.

    Anchors may stand at the ends of the pattern and of its alternatives, and look-aheads at its
    beginning.

    Args:
        is_wide: By one of the standards; else by all of them.

    Raises:
        ValueError: The pattern is invalid, or uses a feature that no automaton has.
    """
    tree = _explicit(parsed(_SPELLING.sub(_spelt, pattern)), is_wide)
    tree = _begun(_ended(tree, is_wide), is_wide)
    _check(tree)
    return tree


def _check(tree: Tree) -> None:
    for op, value in tree:
        if op is _c.AT:
            raise unsupported("an anchor that is not at an end")
        if op in (_c.ASSERT, _c.ASSERT_NOT):
            raise unsupported("a look-around that is not at the beginning")
        for inner in children(op, value):
            _check(inner)


def _spelt(match: re.Match[str]) -> str:
    if match[1]:
        code = int(match[1], 16)
        if code > LAST:
            raise ValueError(f"regular expression: {match[0]:.20} is no character; correct it")
        return f"\\U{code:08x}"
    if match[0] in (r"\A", r"\Z", "{,"):
        raise unsupported(f"{match[0]}, which ECMA-262 has not,")
    return {"(?<": "(?P<", "[^]": r"[\s\S]", r"$(?![\s\S])": "$"}.get(match[0], match[0])


def _explicit(tree: Any, is_wide: bool) -> Tree:
    """A tree whose classes are ranges of characters."""
    found: Tree = []
    for op, value in tree:
        ranges = _ranges(op, value, is_wide)
        if ranges is not None:
            found.append((_c.IN, [(_c.RANGE, pair) for pair in ranges]))
        elif op in (_c.BRANCH, _c.SUBPATTERN):
            found += either([_explicit(one, is_wide) for one in children(op, value)])
        elif op in (_c.MAX_REPEAT, _c.MIN_REPEAT):
            found.append((_c.MAX_REPEAT, (*value[:2], _explicit(value[2], is_wide))))
        elif op in (_c.ASSERT, _c.ASSERT_NOT):
            inner = _explicit(value[1], is_wide is (op is _c.ASSERT))
            found.append((op, (value[0], inner)))
        elif op is _c.AT:
            found.append((op, value))
        else:
            raise unsupported(str(op).lower())
    return found


def _ranges(op: Any, value: Any, is_wide: bool) -> Ranges | None:
    if op is _c.ANY:
        return inverted(_LINE_ENDS[:1] if is_wide else _LINE_ENDS)
    if op is not _c.IN:
        return ranges_of(op, value)
    negate = any(kind is _c.NEGATE for kind, _ in value)
    ranges: Ranges = []
    for kind, one in value:
        if kind is _c.CATEGORY:
            ranges += _category(one, negate is not is_wide)
        elif kind is not _c.NEGATE:
            ranges += ranges_of(_c.IN, [(kind, one)]) or []
    return inverted(ranges) if negate else ranges


def _category(of: Any, is_wide: bool) -> Ranges:
    """The characters of a class: by all standards, or by one of them."""
    name = str(of).lower()
    if "_not_" in name:
        return inverted(_category(getattr(_c, name.replace("_not", "").upper()), not is_wide))
    if of is _c.CATEGORY_SPACE:
        return [*_SPACES, *(_ODD_SPACES if is_wide else [])]
    if is_wide:
        return _of_unicode(of is _c.CATEGORY_WORD)
    return ranges_of(_c.IN, [(_c.CATEGORY, of)]) or []


@functools.cache
def _of_unicode(is_word: bool) -> Ranges:
    r"""The characters of `\w` or `\d` in all of Unicode."""
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    runs = re.finditer(r"\w+" if is_word else r"\d+", every)
    return [(run.start(), run.end() - 1) for run in runs]


def _has_anchor(tree: Tree) -> bool:
    return any(
        op is _c.AT or (op is _c.BRANCH and any(map(_has_anchor, children(op, value))))
        for op, value in tree
    )


def _ended(tree: Tree, is_wide: bool) -> Tree:
    """With what may follow."""
    if not tree:
        return [*ANYTHING]
    op, value = tree[-1]
    if op is _c.AT and value in _END:  # Python's is found before a last line end too
        return [*tree[:-1], *(repeated([(_c.LITERAL, 10)], 0, 1) if is_wide else [])]
    if op is _c.BRANCH and _has_anchor(tree[-1:]):
        return [*tree[:-1], *either([_ended(list(one), is_wide) for one in children(op, value)])]
    return [*tree, *ANYTHING]


def _begun(tree: Tree, is_wide: bool) -> Tree:
    """With what may come before."""
    if not tree:
        return []
    op, value = tree[0]
    if op is _c.AT and value in _BEGIN:
        return _looked_ahead(tree[1:], is_wide)
    if op is _c.BRANCH and _has_anchor(tree[:1]):
        return [*either([_begun(list(one), is_wide) for one in children(op, value)]), *tree[1:]]
    return [*ANYTHING, *tree]


def _looked_ahead(tree: Tree, is_wide: bool) -> Tree:
    """Move look-aheads at the beginning of a text out of it, since they hold for the whole text."""
    if not tree or tree[0][0] not in (_c.ASSERT, _c.ASSERT_NOT) or tree[0][1][0] < 0:
        return tree
    op, (_, inner) = tree[0]
    inner = inner[1:] if inner and inner[0][0] is _c.AT and inner[0][1] in _BEGIN else inner
    of = BOTH if op is _c.ASSERT else FIRST_ALONE
    inner = _ended(inner, is_wide is (of == BOTH))
    return [(of, (_looked_ahead(tree[1:], is_wide), inner))]
