"""One family of one-line problems, which a tiny model learns on a CPU in minutes.

It belongs to neither half: the tokenizer and the shipped models do not know it. Hundreds plus a
number of two digits need no table of sums: the digits of the answer stand in the question.
"""

import random

from dllm_jax.tasks.words import Family, Words


def _draw_sums(rng: random.Random) -> tuple:
    return 100 * rng.randint(1, 9), rng.randint(10, 99)


def _write_sums(spec: tuple, w: Words) -> tuple[str, list[str], int]:
    a, b = spec
    (who,), (x,) = w.names(1), w.things(1)
    text = w.one_of(
        f"{who} has {a} {x} and gets {b} more.", f"{who} buys {a} {x} and then {b} more."
    )
    text += f" How many {x} are there now?"
    return text, [f"{a} + {b} = {a + b}."], a + b


FAMILIES = (Family("sums", _draw_sums, _write_sums),)
