"""What each forward of a scripted run ran, saw and stored, from inside the program.

So of branches that are taken, and of no others.
"""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest


@dataclasses.dataclass
class Ran:
    """One forward: cells [first, end); of the cache's `context` it saw what is not among them."""

    width: int | None
    first: int
    end: int
    context: int
    cached: int
    stored: int = 0


@contextmanager
def recording(package: ModuleType) -> Iterator[list[Ran]]:
    testing, ran = package.testing.script, []
    call, store = testing._ScriptedForward.__call__, testing._ScriptedOutput.store

    def note(width: int | None, live: Any, position: Any, context: Any) -> None:
        cells = position.reshape(-1)[live.reshape(-1)]
        seen = np.setdiff1d(np.arange(int(context[0])), cells)
        ran.append(Ran(width, int(cells[0]), int(cells[-1]) + 1, int(context[0]), len(seen)))

    def note_store(where: Any) -> None:
        ran[-1].stored = int(where.sum())

    def recorded(self: Any, state: Any, **options: Any) -> Any:
        context = options.get("context_len", state.buffer.start)
        see = functools.partial(note, options.get("width"))
        jax.debug.callback(see, options["live"], state.buffer.positions, context, ordered=True)
        return call(self, state, **options)

    def stored(self: Any, state: Any, where: Any) -> Any:
        jax.debug.callback(note_store, where, ordered=True)
        return store(self, state, where)

    testing._run.clear_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing._ScriptedForward, "__call__", recorded)
        patch.setattr(testing._ScriptedOutput, "store", stored)
        yield ran
    testing._run.clear_cache()
