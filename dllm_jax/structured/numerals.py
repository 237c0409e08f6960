"""Regular expressions of the decimal numerals within bounds, as JSON writes them.

Numbers within bounds are written without an exponent.
"""

from decimal import Decimal


def numeral_pattern(
    low: Decimal | None, high: Decimal | None, is_low_out: bool, is_high_out: bool, is_whole: bool
) -> str | None:
    """An expression of the numerals from `low` to `high`; None where there is none.

    Args:
        low, high: None: no bound.
        is_low_out, is_high_out: The bound itself is outside.
        is_whole: Integers alone.
    """
    zero = Decimal(0)
    parts = []
    if high is None or high > zero or (high == zero and not is_high_out):
        least, is_out = (zero, False) if low is None or low < zero else (low, is_low_out)
        parts.append(_positive(least, high, is_out, is_high_out, is_whole))
    if low is None or low < zero:
        least = zero if high is None or high >= zero else -high
        is_out = is_high_out if least else True  # no numeral is minus zero
        most = None if low is None else -low
        negative = _positive(least, most, is_out, is_low_out, is_whole)
        parts.append(negative and f"-(?:{negative})")
    found = [part for part in parts if part]
    return f"(?:{'|'.join(found)})" if found else None


def _positive(
    low: Decimal, high: Decimal | None, is_low_out: bool, is_high_out: bool, is_whole: bool
) -> str | None:
    """Of bounds from 0 on, without a sign."""
    head, part = _split(low)
    if is_whole:
        first = head + 1 if part or is_low_out else head
        if high is None:
            return whole(first, None)
        last, behind = _split(high)
        return whole(first, last - 1 if is_high_out and not behind else last)
    above = _headed(str(head), *_fractions(part, None, is_low_out, False))
    if high is None:
        return _joined([above, _headed(whole(head + 1, None), *_fractions(None, None))])
    last, behind = _split(high)
    if head >= last:
        own = _fractions(part, behind, is_low_out, is_high_out)
        return _headed(str(head), *own) if head == last else None
    below = _headed(str(last), *_fractions(None, behind, False, is_high_out))
    between = whole(head + 1, last - 1)
    return _joined([above, between and _headed(between, *_fractions(None, None)), below])


def whole(low: int, high: int | None) -> str | None:
    """The integers from `low` to `high`, both from 0 on."""
    if high is not None and high < low:
        return None
    size = len(str(low))
    if high is None:
        longer = f"[1-9][0-9]{{{size},}}"
        return f"(?:{_digits(str(low), '9' * size)}|{longer})"
    parts = []
    while size < len(str(high)):
        parts.append(_digits(str(low), "9" * size))
        low, size = 10**size, size + 1
    return _joined([*parts, _digits(str(low), str(high))])


def _digits(low: str, high: str) -> str:
    """An expression for the numbers from `low` to `high`, which have equally many digits."""
    if not low:
        return ""
    rest = len(low) - 1
    free = f"[0-9]{{{rest}}}" if rest else ""
    if low[0] == high[0]:
        return low[0] + _digits(low[1:], high[1:])
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return f"[{low[0]}-{high[0]}]{free}"
    parts = [low[0] + _digits(low[1:], "9" * rest)]
    first, last = int(low[0]) + 1, int(high[0]) - 1
    if first <= last:
        parts.append(f"[{first}-{last}]{free}")
    parts.append(high[0] + _digits("0" * rest, high[1:]))
    return f"(?:{'|'.join(parts)})"


def _split(number: Decimal) -> tuple[int, str]:
    """The digits before the point, and those after it without zeros at the end."""
    head, _, part = format(number, "f").partition(".")
    return int(head), part.rstrip("0")


def _headed(head: str | None, digits: str | None, may_be_none: bool) -> str | None:
    """An expression for a number: a whole part, and digits after a point if there are any."""
    if head is None or digits is None:
        return head if may_be_none else None
    return rf"{head}(?:\.(?:{digits}))?" if may_be_none else rf"{head}\.(?:{digits})"


def _fractions(
    low: str | None, high: str | None, is_low_out: bool = False, is_high_out: bool = False
) -> tuple[str | None, bool]:
    """Digits after a point between two others, and whether no digit at all is between them.

    Args:
        low, high: Digits, "" for zero; None: no bound.
    """
    if low == "" and not is_low_out:
        low = None
    if high == "":
        fits = low is None and not is_high_out
        return ("0+", True) if fits else (None, False)
    if high is None and low is None:
        return "[0-9]+", True
    if high is None and low == "":
        return "0*[1-9][0-9]*", False
    first, last = int(low[0]) if low else 0, int(high[0]) if high else 9
    parts = []
    for digit in range(first, last + 1):
        tight = low is not None and digit == first
        inner = _fractions(
            low[1:] if low is not None and tight else None,
            high[1:] if high is not None and digit == last else None,
            is_low_out,
            is_high_out,
        )
        rest, may_end = inner
        if rest is not None:
            parts.append(f"{digit}(?:{rest})?" if may_end else f"{digit}(?:{rest})")
        elif may_end:
            parts.append(str(digit))
    return _joined(parts), low is None


def _joined(parts: list[str | None]) -> str | None:
    found = [part for part in parts if part]
    return f"(?:{'|'.join(found)})" if found else None
