"""Knobs: numbers of a strategy that may differ from request to request.

`split_knobs` takes the fields made by `knob` out of a strategy. They travel as data, one value a
slot, and `bind_knobs` puts them back as `PerSlot`s. One compiled step serves every value.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from .checks import short_repr


@jax.tree_util.register_pytree_node_class
class PerSlot:
    """A knob's values, one a slot. Each use states the axes that they are compared along.

    With B == S a bare comparison would broadcast silently along positions, so there is none:
    use `.at_block` ([B 1]), `.at_token` ([B 1 1]) or `.values` ([B]).
    """

    def __init__(self, values: Float[Array, " B"]):
        self.values = values

    @property
    def at_block(self) -> Float[Array, "B 1"]:
        """Values to compare with [B K]."""
        return self.values[:, None]

    @property
    def at_token(self) -> Float[Array, "B 1 1"]:
        """Values to compare with [B K S]."""
        return self.values[:, None, None]

    def tree_flatten(self):
        """The values are the one child."""
        return (self.values,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        """Rebuild around the one child, whatever a transformation put there."""
        return cls(children[0])

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            "a knob has one value a slot: use knob.at_block with [B, K], knob.at_token with "
            "[B, K, S], or knob.values with [B]"
        )

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __bool__ = __float__ = __array__ = _refuse
    __jax_array__ = _refuse
    __hash__ = None  # type: ignore[assignment]


#: Type of a knob field: a float (or an array, one value a slot) to users, a PerSlot inside `step`.
Knob = Any


# What a rule compares with: a knob of the strategy, or one number for all slots.
Threshold = PerSlot | float


def at_slot(threshold: Threshold) -> Any:
    """A threshold to compare with [B]; a plain number is that of every slot."""
    return threshold.values if isinstance(threshold, PerSlot) else _scalar(threshold)


def at_block(threshold: Threshold) -> Any:
    """A threshold to compare with [B K]; a plain number is that of every slot."""
    return threshold.at_block if isinstance(threshold, PerSlot) else _scalar(threshold)


def at_token(threshold: Threshold) -> Any:
    """A threshold to compare with [B K S]; a plain number is that of every slot."""
    return threshold.at_token if isinstance(threshold, PerSlot) else _scalar(threshold)


def _scalar(threshold: Any) -> Any:
    shape = np.shape(threshold)
    if shape:
        raise ValueError(
            f"a threshold of shape {shape} does not say its axis; give a knob of the strategy, "
            "PerSlot(values) with one value a slot, or one number"
        )
    return threshold


class Rule(NamedTuple):
    """What a knob may be: a number in [low, high].

    Attributes:
        whole: Only whole numbers are legal.
        up_to: Name of another knob, whose value this one must not exceed.
    """

    low: float
    high: float
    whole: bool = False
    up_to: str | None = None


def knob(
    default: float,
    low: float = 0.0,
    high: float = float("inf"),
    whole: bool = False,
    up_to: str | None = None,
) -> Any:
    """A float field of a strategy that each request may override.

    Args:
        default: Its value when it is not set.
        low, high, whole, up_to: As of `Rule`.
    """
    return struct.field(default=default, metadata={"knob": Rule(low, high, whole, up_to)})


def knob_rules(strategy: Any) -> dict[str, Rule]:
    """The rules of a strategy's knobs, by name."""
    fields = dataclasses.fields(strategy)
    return {f.name: f.metadata["knob"] for f in fields if "knob" in f.metadata}


def split_knobs(strategy: Any) -> tuple[Any, dict[str, Any]]:
    """The strategy without its knob values, and those values by name.

    What is left is static, so one compiled step serves every value.

    Raises:
        ValueError: A value is no number, or outside its range.
    """
    check_knobs(strategy)
    values = {name: getattr(strategy, name) for name in knob_rules(strategy)}
    return strategy.replace(**dict.fromkeys(values)), values


def check_knob(name: str, value: Any, rule: Rule) -> None:
    """Raise ValueError unless knob `name` may have `value`, other knobs aside.

    Arrays and tracers, of one value a slot or a run, are known by their dtype alone.
    """
    if value is None or isinstance(value, PerSlot):  # taken out, or bound
        return
    low, high, whole, _ = rule
    kind = getattr(value, "dtype", None)
    if kind is not None and not isinstance(value, np.generic):
        if not jnp.issubdtype(kind, np.number):
            raise ValueError(f"{name} is an array of {kind}; give numbers in [{low}, {high}]")
        return
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name}={short_repr(value)} is no number; choose one in [{low}, {high}]")
    number = math.nan
    with contextlib.suppress(OverflowError):
        number = float(value)
    if not low <= number <= high:
        raise ValueError(
            f"{name}={short_repr(value)} is outside [{low}, {high}]; choose a value inside it"
        )
    if whole and number % 1:
        raise ValueError(f"{name}={short_repr(value)} is not a whole number; round it")


def check_knobs(strategy: Any, values: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError unless every knob may have its value.

    Args:
        values: By name, in place of the strategy's own.
    """
    rules = knob_rules(strategy)
    own = {name: getattr(strategy, name) for name in rules} | dict(values or {})
    for low, rule in rules.items():
        value, high = own[low], rule.up_to
        check_knob(low, value, rule)
        if high is None:
            continue
        if high not in own:
            raise ValueError(f"up_to={high!r} of {low} names no knob; use one of {', '.join(own)}")
        most = own[high]
        # Of arrays, one value a slot or a run, the values are not known.
        if isinstance(value, Real) and isinstance(most, Real) and value > most:
            raise ValueError(f"{low}={value} is above {high}={most}; lower {low} or raise {high}")


def bind_knobs(strategy: Any, knobs: Mapping[str, Float[Array, " B"]]) -> Any:
    """The strategy with each knob bound to its per-slot values (inside the jit)."""
    return strategy.replace(**{name: PerSlot(knobs[name]) for name in knob_rules(strategy)})
