"""What the engine's loop needs: an engine, what its requests are made of, and commands."""

from collections.abc import Callable
from typing import Any, NamedTuple

from dllm_jax.api.questions import Read
from dllm_jax.engine.checks import Refused
from dllm_jax.engine.requests import Request
from dllm_jax.serve.child.side_work import Work
from dllm_jax.serve.pipe import Facts


class Served(NamedTuple):
    """An engine and what the loop needs besides it.

    Attributes:
        make_request: From prompt ids and fields to the engine's `Request`.
        read: Log-probabilities of the labels in texts, and the forwards that took; ValueError for
            texts that cannot be read. In any thread.
        missing: The work that must be done before a request can be queued, whose result is kept,
            and which returns the states of its automaton; None: none.
        devices: As `Counts.devices`.
        commands: Of an administrator (`commands.Commands`); None: there are none.
        walk: A text of a request with tools along its grammar (`api.calls.Walk`), after the walk
            of an earlier stage; None for other requests.
    """

    engine: Any
    facts: Facts
    tokenizer: Any
    make_request: Callable[[list[int], list[int] | None, dict[str, Any]], Request]
    read: Callable[[list[Read]], tuple[list[list[list[float]]], int]]
    missing: Callable[[Request], Work | None] = lambda request: None
    devices: Callable[[], list[tuple[int, int]]] = list
    commands: Any = None
    walk: Callable[[Request, Any], Any] = lambda request, before: None


class Asleep(Refused):
    """The weights are not on the device."""

    status = 503

    def __init__(self):
        super().__init__("the model sleeps; an administrator wakes it", code="asleep")
