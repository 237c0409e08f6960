"""The choice among an operation's back ends for one call."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

Name = TypeVar("Name", bound=str)


class BackEnd(NamedTuple):
    """One implementation of an operation, judged for the arguments of one call.

    Attributes:
        run: The function; all back ends of an operation take the same arguments.
        unsupported: Why it cannot take the arguments; None if it can.
        is_fast: Whether it is taken before every back end listed after it.
    """

    run: Callable[..., Any]
    unsupported: str | None = None
    is_fast: bool = True


def is_plain(implementation: str | None) -> bool:
    """Whether an operation is XLA's before its arguments are looked at: named, or without a GPU."""
    return implementation == "xla" or (implementation is None and jax.default_backend() != "gpu")


def choose(implementation: Name | None, back_ends: Mapping[Name, BackEnd]) -> Name:
    """The name of the back end to run.

    Args:
        implementation: A name, or None for the first back end that is supported and `is_fast`.
        back_ends: The preferred one first; the last one takes all arguments.

    Raises:
        NotImplementedError: The named back end cannot take the arguments.
        ValueError: No back end has this name.
    """
    *_, last = back_ends
    if implementation is None:
        fitting = (name for name, b in back_ends.items() if b.is_fast and not b.unsupported)
        return next(fitting, last)
    if implementation not in back_ends:
        known = ", ".join(f'"{name}"' for name in reversed(list(back_ends)))
        raise ValueError(f"{implementation=} is not one of {known}")
    if reason := back_ends[implementation].unsupported:
        raise NotImplementedError(f'implementation="{implementation}": {reason}; use "{last}"')
    return implementation


def run(
    implementation: Name | None, back_ends: Mapping[Name, BackEnd], *args: Any, **kw: Any
) -> Any:
    """Call the back end that `choose` names."""
    return back_ends[choose(implementation, back_ends)].run(*args, **kw)
