"""Calculations written out in lines, so that each digit follows from digits near it.

A product of two longer numbers is a sum of partial products, and a long quotient a sum of partial
quotients. A single `=` then needs at most one table look-up or one carry chain.
"""


def add(a: int, b: int) -> tuple[int, str]:
    """Value and text of a sum, e.g. `(12, "5+7=12")`."""
    return a + b, f"{a}+{b}={a + b}"


def subtract(a: int, b: int) -> tuple[int, str]:
    """Value and text of a difference."""
    return a - b, f"{a}-{b}={a - b}"


def multiply(a: int, b: int) -> tuple[int, str]:
    """Value and text of a product, as partial products where it is no table look-up.

    Two digits by one, and round numbers, are one line. Otherwise the second factor is split if it
    has two digits (`47*36: 47*30=1410, 47*6=282, 1410+282=1692`), else the first
    (`347*6: 300*6=1800, 47*6=282, 1800+282=2082`).
    """
    total = a * b
    if b >= 10 and b % 10:
        parts = [(a, b - b % 10), (a, b % 10)]
    elif a >= 100 and a % 100:
        parts = [(a - a % 100, b), (a % 100, b)]
    else:
        return total, f"{a}*{b}={total}"
    (p, q), (r, s) = parts
    return total, f"{a}*{b}: {p}*{q}={p * q}, {r}*{s}={r * s}, {p * q}+{r * s}={total}"


def divide(a: int, b: int) -> tuple[int, str]:
    """Value and text of an exact quotient below 1000, hundreds first.

    `936/4: 800/4=200, 136/4=34, 200+34=234`; below 100 and round: one line.
    """
    q = a // b
    high, low = q - q % 100, q % 100
    if not high or not low:
        return q, f"{a}/{b}={q}"
    return q, (f"{a}/{b}: {high * b}/{b}={high}, {low * b}/{b}={low}, {high}+{low}={q}")
