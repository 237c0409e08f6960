"""What a program of the engine is made from, how it becomes one, and a call of it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import struct
from jax.sharding import PartitionSpec

from dllm_jax.loading.model import Model
from dllm_jax.models.sharding import Split
from dllm_jax.runner import decode as decoding
from dllm_jax.runner import packing
from dllm_jax.runner.forward import ModelForward
from dllm_jax.runner.grammars import Sizes
from dllm_jax.strategies.core.knobs import knob_rules
from dllm_jax.strategies.core.protocol import SlotSpec, Strategy
from dllm_jax.strategies.core.state import DecodeState


class Programs(struct.PyTreeNode):
    """Everything the programs are made from but the state: weights are leaves, the rest static."""

    model: Model
    aux: dict[str, Model]
    strategy: Strategy
    spec: SlotSpec = struct.field(pytree_node=False)
    kept: int = struct.field(pytree_node=False)
    max_output: int = struct.field(pytree_node=False)
    most_new: int = struct.field(pytree_node=False)
    implementation: str | None = struct.field(pytree_node=False)
    one_rounding: bool = struct.field(pytree_node=False, default=False)
    num_kept: int = struct.field(pytree_node=False, default=0)

    @property
    def window(self) -> int:
        """W, cells of a window."""
        return self.spec.num_blocks * self.spec.block_size

    @property
    def knobs(self) -> tuple[str, ...]:
        """Names of the strategy's thresholds, sorted."""
        return tuple(sorted(knob_rules(self.strategy)))

    @property
    def request_fields(self) -> packing.Fields:
        """The words of a request that goes to its slot."""
        return packing.request_fields(self.window, len(self.knobs))

    @property
    def num_fresh(self) -> int:
        """Requests that a call brings along, rows to ignore included."""
        return min(packing.ADMIT_ROWS, self.spec.num_slots)

    def forward(self) -> ModelForward:
        """The model as the strategy sees it."""
        return ModelForward(
            self.model,
            aux=self.aux,
            implementation=self.implementation,
            reads_ahead=self.strategy.needs.provisional_cache != "none",
            one_rounding=self.one_rounding,
        )


@dataclasses.dataclass(frozen=True)
class Call:
    """A program and its arguments, except for the weights and the state.

    Attributes:
        key: Tells the compiled sizes of the programs apart; the first is the act.
        args: Arrays, or futures of them.
        static: Keywords that are part of the compiled program.
        sizes: Of the slots' grammars, if the program takes them with the state.
        options: Of the compiler.
    """

    key: tuple[Any, ...]
    program: Any
    args: tuple[Any, ...]
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Sizes | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def name(self) -> tuple[str, ...]:
        """The key in words, as another process receives it."""
        return tuple(map(str, self.key))


def specs(programs: Programs, split: Split) -> Programs:
    """Where the weights lie; everything else is whole on every device."""
    return programs.replace(
        model=split.specs(programs.model),
        aux=split.specs(programs.aux),
        strategy=PartitionSpec(),
    )


def _per_device(body: Callable[..., Any]) -> Callable[..., Any]:
    """A body as a function that runs on every device of those that share the model.

    It takes and returns lists of leaves, and raw keys: a call spends 0.3 ms on the nodes of trees
    (H200). Its keyword `trees` has the trees of `Programs` and of the state.
    """

    def run(weights, slots, *args, trees, **static):
        programs, state = map(jax.tree.unflatten, trees, (weights, slots))
        state = state.replace(keys=jax.random.wrap_key_data(state.keys))
        split, bound = programs.model.split, functools.partial(body, **static)
        given = programs, state, *args
        if split is None:
            new, rest = bound(*given)
        else:
            of_state = decoding.state_specs(split)
            of_given = (specs(programs, split), of_state, *(PartitionSpec() for _ in args))
            new, rest = split.run(bound, given, of_given, (of_state, PartitionSpec()))
        return jax.tree.leaves(at_rest(new)), rest

    run.__name__, run.__doc__ = body.__name__, body.__doc__
    return run


def program(*static: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: a body as a program over a donated state.

    Args:
        static: Keywords that are part of the compiled program.
    """
    names = ("trees", *static)
    return lambda body: jax.jit(
        _per_device(body), static_argnames=names, donate_argnames=("slots",)
    )


def at_rest(state: DecodeState) -> DecodeState:
    """The state as it is kept between programs."""
    return state.replace(keys=jax.random.key_data(state.keys))
