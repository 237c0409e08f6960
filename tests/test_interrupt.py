"""The thread that watches for signals is gone when its block is, with all it held.

Where it outlived the block it could be the last to hold the engine, whose arrays then went in it
while the interpreter ended: about one `generate` in three aborted after its answer.
"""

import gc
import threading
import weakref

from dllm_jax.cli.interrupt import Interrupt


class Held:
    """Stands for the engine that a verb's `tell` reads."""

    def said(self):
        return "nothing"


def test_nothing_of_the_block_outlives_it():
    before = set(threading.enumerate())
    held = Held()
    seen = weakref.ref(held)
    with Interrupt() as stop:
        stop.tell = held.said
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) <= before
    del stop, held
    gc.collect()
    assert seen() is None
