"""The hard half: serial chains and larger word problems, numbers to 9999, parts worked out.

A chain asks for one result after another, each needed by the next, and writes them densely
(`142-111=31, *9=279, /9=31.`), so that no decoder can fill a block in at once. Division is
drawn most often, because it seldom fits.
"""

import random

from dllm_jax.tasks import arithmetic
from dllm_jax.tasks.words import Family, Words

_R = random.Random
_Text = tuple[str, list[str], int]
_LIMIT = 9999
_WORK = {
    "add": arithmetic.add,
    "remove": arithmetic.subtract,
    "times": arithmetic.multiply,
    "share": arithmetic.divide,
}
_EVENTS = (4, 8)
_STARTS = ((12, 99), (12, 99), (100, 999), (1000, 5000))
_OPERANDS = (9, 99, 99, 999, 5000)  # largest number added or taken away, drawn per event
_MAX_WORKED = 2  # steps with parts in one chain, and
_MAX_LINES = 8  # steps plus those: a sample then fits 256 tokens
_THEMES = (("A tank holds", "litres"), ("A store has", "boxes"), ("An account has", "points"))


def _draw_event(rng: _R, value: int) -> tuple[str, int] | None:
    kind = rng.choices(("add", "remove", "times", "share"), weights=(2, 2, 3, 4))[0]
    if kind == "add":
        most = _LIMIT - value
        number = rng.randint(2, min(most, rng.choice(_OPERANDS))) if most > 2 else 0
    elif kind == "remove":
        most = value - 12
        number = rng.randint(2, min(most, rng.choice(_OPERANDS))) if most > 2 else 0
    elif kind == "times":
        if value < 100 and rng.random() < 0.6:
            number = rng.randint(11, 99)
        elif 10 <= value <= 999:
            number = rng.randint(2, 9)
        else:
            number = 0
        number = number if value * number <= _LIMIT else 0
    else:
        fits = [d for d in range(2, 10) if value % d == 0 and 10 <= value // d <= 999]
        number = rng.choice(fits) if fits else 0
    return (kind, number) if number else None


def _draw_chain(rng: _R) -> tuple:
    start = value = rng.randint(*rng.choice(_STARTS))
    events: list[tuple[str, int]] = []
    for _ in range(rng.randint(*_EVENTS)):
        event = None
        while event is None:
            event = _draw_event(rng, value)
        events.append(event)
        value = _WORK[event[0]](value, event[1])[0]
    spec = (start, tuple(events))
    worked, value = 0, start
    for kind, number in events:
        value, line = _WORK[kind](value, number)
        worked += ":" in line
    fits = worked <= _MAX_WORKED and worked + len(events) <= _MAX_LINES
    return spec if fits else _draw_chain(rng)


def _ask_event(kind: str, n: int, w: Words) -> str:
    if kind == "add":
        return w.one_of(f"{n} are added", f"{n} come in")
    if kind == "remove":
        return w.one_of(f"{n} are taken away", f"{n} are lost")
    if kind == "times":
        return w.one_of(f"It grows to {n} times as much", f"There are {n} times as many then")
    return w.one_of(f"One of {n} equal parts is kept", f"Only one part of {n} is kept")


def _write_chain(spec: tuple, w: Words) -> _Text:
    value, events = spec
    opening, unit = w.one_of(*_THEMES)
    text, steps = f"{opening} {value} {unit}.", []
    for kind, number in events:
        text += f" {_ask_event(kind, number, w)}."
        before = value
        value, line = _WORK[kind](before, number)
        # the running value is written once: a step starts at its operator
        steps.append(line.removeprefix(f"{before}") if steps else line)
    text += w.one_of(f" How many {unit} are there now?", f" How many {unit} are left in the end?")
    return text, [", ".join(steps) + "."], value


def _draw_order(rng: _R) -> tuple:
    a, p, b, q = rng.randint(11, 99), rng.randint(11, 99), rng.randint(2, 9), rng.randint(101, 999)
    total = a * p + b * q
    if total > _LIMIT - 100:
        return _draw_order(rng)
    return a, p, b, q, rng.choice((0, rng.randint(10, min(900, total - 1))))


def _write_order(spec: tuple, w: Words) -> _Text:
    a, p, b, q, off = spec
    place, (x, y) = w.place(), w.things(2)
    text = w.one_of(
        f"A {place} orders {a} {x} at {p} dollars each and {b} {y} at {q} dollars each.",
        f"For a {place}, {a} {x} cost {p} dollars each and {b} {y} cost {q} dollars each.",
    )
    if off:
        text += w.one_of(
            f" A coupon takes {off} dollars off.", f" It has a coupon for {off} dollars."
        )
    text += w.one_of(" What is the whole price?", " How many dollars is that?")
    first, line1 = arithmetic.multiply(a, p)
    second, line2 = arithmetic.multiply(q, b)
    total, line3 = arithmetic.add(first, second)
    lines = [f"The {x} cost {line1}.", f"The {y} cost {line2}.", f"Together {line3}."]
    if off:
        total, line4 = arithmetic.subtract(total, off)
        lines.append(f"With the coupon {line4}.")
    return text, lines, total


def _draw_factory(rng: _R) -> tuple:
    n, r = rng.randint(11, 99), rng.randint(11, 99)
    made, p = n * r, rng.randint(2, 9)
    q = rng.randint(10, min(999, (made - 1) // p))
    if not (made <= _LIMIT and 0 < made - q * p < 3000):
        return _draw_factory(rng)
    return n, r, made - q * p, p


def _write_factory(spec: tuple, w: Words) -> _Text:
    n, r, bad, p = spec
    (x,) = w.things(1)
    text = w.one_of(
        f"A factory has {n} machines. Each machine makes {r} {x}.",
        f"In a factory, {n} machines make {r} {x} each.",
    )
    text += w.one_of(f" {bad} of them are bad.", f" Then {bad} bad ones are thrown out.")
    text += w.one_of(
        f" The rest goes into {p} equal parts. How many {x} are in each part?",
        f" The others are sold evenly to {p} people. How many {x} does each of them get?",
    )
    made, line1 = arithmetic.multiply(n, r)
    left, line2 = arithmetic.subtract(made, bad)
    each, line3 = arithmetic.divide(left, p)
    lines = [f"The machines make {line1}.", f"Without the bad ones {line2}.", f"Each gets {line3}."]
    return text, lines, each


def _draw_trip(rng: _R) -> tuple:
    h, v, i, u = rng.randint(2, 9), rng.randint(101, 600), rng.randint(2, 9), rng.randint(101, 600)
    done = h * v + i * u
    if done > 9000:
        return _draw_trip(rng)
    return h, v, i, u, done + rng.randint(50, _LIMIT - done)


def _write_trip(spec: tuple, w: Words) -> _Text:
    h, v, i, u, way = spec
    (who,) = w.names(1)
    text = w.one_of(
        f"{who} flies {h} hours at {v} km an hour and then {i} hours at {u} km an hour.",
        f"{who} goes {v} km an hour for {h} hours, then {u} km an hour for {i} hours.",
    )
    text += w.one_of(
        f" The whole way is {way} km. How many km are left?",
        f" How far does {who} still have to go if the trip is {way} km long?",
    )
    one, line1 = arithmetic.multiply(v, h)
    two, line2 = arithmetic.multiply(u, i)
    done, line3 = arithmetic.add(one, two)
    left, line4 = arithmetic.subtract(way, done)
    lines = [
        f"The first part is {line1}.",
        f"The second part is {line2}.",
        f"Together {line3}.",
        f"What is left is {line4}.",
    ]
    return text, lines, left


FAMILIES = (
    Family("chain", _draw_chain, _write_chain, weight=8.0),
    Family("order", _draw_order, _write_order, weight=0.7),
    Family("factory", _draw_factory, _write_factory, weight=1.0),
    Family("trip", _draw_trip, _write_trip, weight=0.7),
)
