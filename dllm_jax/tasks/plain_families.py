"""The plain half: eight families of worked word problems with numbers below 1000.

Each family draws numbers (and event types), then writes question and response. Only the question's
wording varies.
"""

import random

from dllm_jax.tasks.words import Family, Words

_R = random.Random
_Text = tuple[str, list[str], int]


def _draw_shopping(rng: _R) -> tuple:
    a, p, b, q = (rng.randint(2, 9), rng.randint(2, 40), rng.randint(2, 9), rng.randint(2, 40))
    total = a * p + b * q
    coupon = rng.choice((0, rng.randint(2, min(30, total - 1))))
    paid = total - coupon + rng.randint(1, 200)
    return a, p, b, q, coupon, paid


def _write_shopping(spec: tuple, w: Words) -> _Text:
    a, p, b, q, coupon, paid = spec
    (who,), (x, y) = w.names(1), w.things(2)
    text = w.one_of(
        f"{who} buys {a} {x} for {p} dollars each and {b} {y} for {q} dollars each.",
        f"At the shop, {who} takes {a} {x} at {p} dollars each and {b} {y} at {q} dollars each.",
    )
    if coupon:
        text += w.one_of(
            f" A coupon takes {coupon} dollars off.", f" There is a coupon for {coupon} dollars."
        )
    text += w.one_of(
        f" {who} pays with {paid} dollars. How much change does {who} get?",
        f" {who} gives the clerk {paid} dollars. How many dollars come back?",
    )
    total, due = a * p + b * q, a * p + b * q - coupon
    lines = [
        f"The price of all the {x} together is {a} * {p} = {a * p} dollars.",
        f"The price of all the {y} together is {b} * {q} = {b * q} dollars.",
        f"So the whole price is {a * p} + {b * q} = {total} dollars.",
    ]
    if coupon:
        lines.append(f"With the coupon the price is only {total} - {coupon} = {due} dollars.")
    lines.append(f"So the change that comes back is {paid} - {due} = {paid - due} dollars.")
    return text, lines, paid - due


_STOCK_EVENTS = ("sale", "delivery", "boxes", "gift", "broken", "returned")


def _draw_stock(rng: _R) -> tuple:
    n = count = rng.randint(100, 600)
    events = []
    for kind in rng.sample(_STOCK_EVENTS, rng.randint(2, 4)):
        if kind == "boxes":
            b, m = rng.randint(2, 9), rng.randint(3, 20)
            count += b * m
            events.append((kind, b, m))
        elif kind in ("delivery", "returned"):
            k = rng.randint(5, 150)
            count += k
            events.append((kind, k))
        else:
            k = rng.randint(2, max(3, min(150, count - 1)))
            count -= k
            events.append((kind, k))
    if not 0 < count < 1000:
        return _draw_stock(rng)
    return n, tuple(events)


def _write_stock(spec: tuple, w: Words) -> _Text:
    count, events = spec
    place, (x,) = w.place(), w.things(1)
    text = w.one_of(f"A {place} has {count} {x}.", f"There are {count} {x} in a {place}.")
    lines = []
    for kind, k, *size in events:
        if kind == "boxes":
            m = size[0]
            text += w.one_of(
                f" It opens {k} boxes with {m} {x} in each.",
                f" Then {k} boxes of {m} {x} are opened.",
            )
            lines.append(f"The {x} in the boxes that are opened are {k} * {m} = {k * m}.")
            lines.append(f"With the boxes there are now {count} + {k * m} = {count + k * m} {x}.")
            count += k * m
            continue
        sign = 1 if kind in ("delivery", "returned") else -1
        new = count + sign * k
        sum_text = f"{count} {'+' if sign > 0 else '-'} {k} = {new} {x}."
        if kind == "sale":
            text += w.one_of(f" It sells {k} of them.", f" Then {k} are sold.")
            lines.append(f"After the ones that are sold there are now {sum_text}")
        elif kind == "delivery":
            text += w.one_of(f" A truck brings {k} more.", f" A delivery of {k} more comes in.")
            lines.append(f"With the ones of the delivery there are now {sum_text}")
        elif kind == "gift":
            text += w.one_of(f" It gives {k} away.", f" Then {k} are given away as gifts.")
            lines.append(f"Without the ones given away there are now {sum_text}")
        elif kind == "broken":
            text += w.one_of(f" It finds {k} broken ones.", f" Then {k} break and are thrown out.")
            lines.append(f"Without the ones that are broken there are now {sum_text}")
        else:
            text += w.one_of(f" People bring {k} back.", f" Then {k} are returned.")
            lines.append(f"With the ones that are returned there are now {sum_text}")
        count = new
    text += w.one_of(f" How many {x} are there now?", f" How many {x} are left in the end?")
    return text, lines, count


def _draw_travel(rng: _R) -> tuple:
    h, v, i, u = rng.randint(2, 9), rng.randint(11, 60), rng.randint(2, 9), rng.randint(11, 60)
    done = h * v + i * u
    if done > 950:
        return _draw_travel(rng)
    return h, v, i, u, done + rng.randint(5, min(300, 999 - done))


def _write_travel(spec: tuple, w: Words) -> _Text:
    h, v, i, u, way = spec
    (who,) = w.names(1)
    text = w.one_of(
        f"{who} drives {h} hours at {v} km an hour and then {i} hours at {u} km an hour.",
        f"{who} goes {v} km an hour for {h} hours, then {u} km an hour for {i} hours.",
    )
    text += w.one_of(
        f" The whole way is {way} km. How many km are left?",
        f" How far does {who} still have to go if the trip is {way} km long?",
    )
    done = h * v + i * u
    lines = [
        f"The first part of the way that {who} goes is {h} * {v} = {h * v} km.",
        f"The second part of the way that {who} goes is {i} * {u} = {i * u} km.",
        f"So both parts of the way together are {h * v} + {i * u} = {done} km.",
        f"So the part of the way that is left is {way} - {done} = {way - done} km.",
    ]
    return text, lines, way - done


def _draw_ages(rng: _R) -> tuple:
    a, older, times = rng.randint(5, 60), rng.choice((True, False)), rng.randint(2, 6)
    d = rng.randint(2, 30) if older else rng.randint(1, a - 2)
    b = a + d if older else a - d
    if b > 99:
        return _draw_ages(rng)
    return a, older, d, times


def _write_ages(spec: tuple, w: Words) -> _Text:
    a, older, d, times = spec
    p, q, r = w.names(3)
    word = "older" if older else "younger"
    text = w.one_of(f"{p} is {a} years old.", f"{p} has lived in the town for {a} years.")
    text += w.one_of(f" {q} is {d} years {word} than {p}.", f" {d} years {word} than {p} is {q}.")
    text += w.one_of(
        f" {r} is {times} times as old as {q}. How old are the three together?",
        f" The tree of {r} is {times} times as old as {q}. What do the three ages add up to?",
    )
    b = a + d if older else a - d
    c = b * times
    lines = [
        f"The age of {q} in years is {a} {'+' if older else '-'} {d} = {b}.",
        f"The age that goes with {r} in years is {b} * {times} = {c}.",
        f"The first two ages together are {a} + {b} = {a + b} years.",
        f"So all of the three ages together are {a + b} + {c} = {a + b + c} years.",
    ]
    return text, lines, a + b + c


def _draw_machines(rng: _R) -> tuple:
    n, r, h = rng.randint(2, 9), rng.randint(2, 20), rng.randint(2, 9)
    if not (10 < n * r < 100 and n * r * h < 1000):
        return _draw_machines(rng)
    return n, r, h, rng.randint(2, min(99, n * r * h - 1))


def _write_machines(spec: tuple, w: Words) -> _Text:
    n, r, h, bad = spec
    (x,) = w.things(1)
    text = w.one_of(
        f"A factory has {n} machines. Each machine makes {r} {x} an hour.",
        f"In a factory, {n} machines make {r} {x} an hour each.",
    )
    text += w.one_of(f" They run for {h} hours.", f" The machines work {h} hours.")
    text += w.one_of(
        f" Of these {x}, {bad} are bad. How many good ones are there?",
        f" Then {bad} bad ones are thrown out. How many {x} are left?",
    )
    made = n * r * h
    lines = [
        f"In one hour all of the machines together make {n} * {r} = {n * r} {x}.",
        f"In all of the hours together they make {n * r} * {h} = {made} {x}.",
        f"Without the bad ones there are only {made} - {bad} = {made - bad} {x}.",
    ]
    return text, lines, made - bad


def _draw_savings(rng: _R) -> tuple:
    k, days, spent = rng.randint(3, 60), rng.randint(3, 12), rng.randint(3, 40)
    if days > 9 and k > 40:
        return _draw_savings(rng)
    return k + spent, spent, days, rng.choice((0, rng.randint(10, 400)))


def _write_savings(spec: tuple, w: Words) -> _Text:
    gets, spent, days, first = spec
    (who,) = w.names(1)
    text = f"{who} has {first} dollars. " if first else ""
    text += w.one_of(
        f"Each day {who} gets {gets} dollars and pays {spent} dollars.",
        f"{who} earns {gets} dollars a day and spends {spent} dollars of it.",
    )
    text += w.one_of(f" This goes on for {days} days.", f" {who} does this for {days} days.")
    text += w.one_of(
        f" How many dollars does {who} have then?", " How many dollars are there in the end?"
    )
    k = gets - spent
    lines = [
        f"On each of the days {who} keeps {gets} - {spent} = {k} dollars.",
        f"In all of the days together that makes {k} * {days} = {k * days} dollars.",
    ]
    if first:
        sum_text = f"{k * days} + {first} = {k * days + first}"
        lines.append(f"With what {who} had before, that is {sum_text} dollars.")
    return text, lines, k * days + first


def _draw_harvest(rng: _R) -> tuple:
    rows, m, p = rng.randint(3, 9), rng.randint(11, 99), rng.randint(2, 9)
    all_of = rows * m
    q = rng.randint(2, 99)
    if not 0 < all_of - q * p < 200:
        return _draw_harvest(rng)
    return rows, m, all_of - q * p, p


def _write_harvest(spec: tuple, w: Words) -> _Text:
    rows, m, bad, p = spec
    x = w.fruit()
    text = w.one_of(
        f"A farmer picks {rows} rows of {m} {x}.",
        f"In a field there are {rows} rows with {m} {x} each.",
    )
    text += w.one_of(f" {bad} of them are bad.", f" Birds eat {bad} of them.")
    text += w.one_of(
        f" The rest goes into {p} equal baskets. How many {x} are in each basket?",
        f" The others are put evenly into {p} baskets. How many {x} does one basket hold?",
    )
    left = rows * m - bad
    lines = [
        f"In all of the rows together there are {rows} * {m} = {rows * m} {x}.",
        f"Without the ones that are lost there are {rows * m} - {bad} = {left} {x}.",
        f"So the part that goes into each basket is {left} / {p} = {left // p} {x}.",
    ]
    return text, lines, left // p


def _draw_pages(rng: _R) -> tuple:
    d, r, e, s = rng.randint(2, 9), rng.randint(5, 50), rng.randint(2, 9), rng.randint(5, 50)
    done, share = d * r + e * s, rng.choice((0, rng.randint(2, 9)))
    left = share * rng.randint(2, 50) if share else rng.randint(5, 300)
    if done + left > 999:
        return _draw_pages(rng)
    return d, r, e, s, done + left, share


def _write_pages(spec: tuple, w: Words) -> _Text:
    d, r, e, s, pages, share = spec
    (who,) = w.names(1)
    text = w.one_of(f"A book has {pages} pages.", f"{who} reads a book of {pages} pages.")
    text += w.one_of(
        f" {who} reads {r} pages a day for {d} days and then {s} pages a day for {e} days.",
        f" For {d} days {who} reads {r} pages each day, then for {e} days {s} pages each day.",
    )
    if share:
        text += w.one_of(
            f" The rest takes {share} more days. How many pages a day is that?",
            f" How many pages a day are left for the last {share} days?",
        )
    else:
        text += w.one_of(" How many pages are left?", f" How many pages must {who} still read?")
    done = d * r + e * s
    left = pages - done
    lines = [
        f"In the first part of the days {who} reads {d} * {r} = {d * r} pages.",
        f"In the second part of the days {who} reads {e} * {s} = {e * s} pages.",
        f"So the two parts together are {d * r} + {e * s} = {done} pages.",
        f"So the part of the book that is left is {pages} - {done} = {left} pages.",
    ]
    if share:
        lines.append(f"So each of the last days has {left} / {share} = {left // share} pages.")
        return text, lines, left // share
    return text, lines, left


FAMILIES = (
    Family("shopping", _draw_shopping, _write_shopping),
    Family("stock", _draw_stock, _write_stock, weight=3.0),
    Family("travel", _draw_travel, _write_travel),
    Family("ages", _draw_ages, _write_ages),
    Family("machines", _draw_machines, _write_machines),
    Family("savings", _draw_savings, _write_savings),
    Family("harvest", _draw_harvest, _write_harvest, weight=1.5),  # division is the rarest step
    Family("pages", _draw_pages, _write_pages, weight=1.5),
)
