"""One family of one-line problems, which a tiny model learns on a CPU in minutes.

It belongs to neither half: the tokenizer and the shipped models do not know it.
"""

import random

from dllm_jax.tasks.words import Family, Words

_LEAST, _MOST = 10, 49  # of each number: two digits, and the sum has two as well


def _draw_sums(rng: random.Random) -> tuple:
    return rng.randint(_LEAST, _MOST), rng.randint(_LEAST, _MOST)


def _write_sums(spec: tuple, w: Words) -> tuple[str, list[str], int]:
    a, b = spec
    (who,), (x,) = w.names(1), w.things(1)
    text = w.one_of(
        f"{who} has {a} {x} and gets {b} more.", f"{who} buys {a} {x} and then {b} more."
    )
    text += f" How many {x} are there now?"
    return text, [f"{a} + {b} = {a + b}."], a + b


FAMILIES = (Family("sums", _draw_sums, _write_sums),)
