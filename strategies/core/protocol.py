"""The strategy itself: an immutable value with a pure `step` (docs/contract.md).

The types of its knobs and of the model it sees are in `knobs` and `forward`. All of them can be
imported from here.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from .forward import Conditioned as Conditioned
from .forward import Forward as Forward
from .forward import ForwardOutput as ForwardOutput
from .forward import Inputs as Inputs
from .forward import Readout as Readout
from .forward import Soft as Soft
from .forward import Taps as Taps
from .forward import TokenMix as TokenMix
from .forward import TokenStats as TokenStats
from .knobs import Knob as Knob
from .knobs import PerSlot as PerSlot
from .knobs import bind_knobs as bind_knobs
from .knobs import check_knobs as check_knobs
from .knobs import knob as knob
from .knobs import knob_rules as knob_rules
from .knobs import split_knobs as split_knobs
from .needs import Needs
from .state import Carry, DecodeState, StepInfo

PATIENCE = 64  # the least default of `Strategy.patience`, in steps


@dataclasses.dataclass(frozen=True)
class SlotSpec:
    """Static sizes a strategy's `init` may need; letters as in `core.state`."""

    num_slots: int
    num_blocks: int
    block_size: int
    vocab_size: int
    hidden_size: int
    mask_id: int
    dtype: Any


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """One piece of a prompt, already computed and stored.

    Attributes:
        forward: As in `step`.
        state: A view whose buffer is the chunk.
        out: The chunk's forward; None where there was no prefill at all.
        valid: Cells of the chunk that were stored, [B K S] of the chunk's own blocks.
        last: Rows whose prompt is complete after this chunk, [B].
    """

    forward: Forward
    state: DecodeState
    out: ForwardOutput | None
    valid: Bool[Array, "B K S"]
    last: Bool[Array, " B"]


class Strategy(struct.PyTreeNode, abc.ABC):
    """An algorithm as an immutable value: static sizes and needs, per-request knobs, a pure `step`.

    A subclass is a frozen dataclass and a pytree. Fields made by `struct.field(pytree_node=False)`
    are static, and so is the class: jit compiles a step for each class. (Left to JAX 0.10 and
    0.11, two dataclasses of equal static fields may share one compiled step.)

    Only `step` must be defined. A subclass also has the fields or properties `block_size` and
    `buffer_size`.

    Attributes:
        needs: What the strategy asks of the engine.
        choices: Values that name the passes a step is chosen from, the cheapest first.
    """

    needs = Needs()
    choices = ()

    def __init_subclass__(cls, **options: Any) -> None:
        # Not PyTreeNode's: register_dataclass would leave the class out of the static structure.
        super(struct.PyTreeNode, cls).__init_subclass__()
        dataclasses.dataclass(frozen=True, **options)(cls)
        _register(cls)

    def __post_init__(self) -> None:
        """Check the knobs. A subclass with checks of its own calls this one as well."""
        check_knobs(self)

    @abc.abstractmethod
    def step(self, forward: Forward, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """One decode step: open, forward, write, mark (docs/contract.md)."""
        ...

    def init(self, spec: SlotSpec) -> Carry:
        """The strategy's own leaves at their constant first values."""
        del spec
        return Carry()

    def absorb(self, chunk: PrefillChunk, state: DecodeState) -> DecodeState:
        """Take in a piece of the prompt that was prefilled."""
        del chunk
        return state

    def bind(self, draft_config: Any) -> Self:
        """This strategy with the settings that its draft model was trained for."""
        del draft_config
        return self

    def choice(self, state: DecodeState) -> Int[Array, ""]:
        """The index of the choice that the next step makes."""
        del state
        return jnp.int32(0)

    def chosen(self, index: int) -> Self:
        """The strategy whose every step makes the choice `index`."""
        del index
        return self

    def patience(self, window: int) -> int | Int[Array, " B"]:
        """Steps in a row that may change nothing; then the request ends with an error.

        A step changes something if it writes a cell or commits a token. A strategy whose schedule
        may wait longer than the default overrides this. No request of a shipped strategy ends so:
        all but two change something in each step or the next, and `full_sequence` and
        `diffusion_gemma` never wait longer than a block's schedule.

        Args:
            window: Cells of the window.
        """
        return max(PATIENCE, 2 * window)

    @property
    def absorbs(self) -> bool:
        """Whether the strategy has an `absorb` of its own."""
        return type(self).absorb is not Strategy.absorb

    @property
    def holds_constraints(self) -> bool:
        """Whether texts can be held to grammars."""
        return True

    @property
    def made_of(self) -> Any:
        """The class or function that defines `step`."""
        return type(self)

    @property
    def name(self) -> str:
        """The name of what the strategy is made of."""
        return getattr(self.made_of, "__name__", type(self).__name__)

    @property
    def makes_choices(self) -> bool:
        """Whether a step is one of several."""
        return len(self.choices) > 1


def _register(cls: type) -> None:
    """Make a dataclass a pytree whose static structure holds the class and its static fields."""
    fields = dataclasses.fields(cls)
    for f in fields:
        if f.name in ("block_size", "buffer_size") and f.metadata.get("pytree_node", True):
            raise TypeError(
                f"{cls.__name__}.{f.name} would be data of the step, but sizes are static; write "
                f"{f.name}: int = struct.field(pytree_node=False, default=...)"
            )
    data = [f.name for f in fields if f.metadata.get("pytree_node", True)]
    static = [f.name for f in fields if f.name not in data]
    keys = [jax.tree_util.GetAttrKey(name) for name in data]

    def flatten(value: Any) -> tuple[tuple[Any, ...], tuple[type, tuple[Any, ...]]]:
        children = tuple(getattr(value, name) for name in data)
        return children, (cls, tuple(getattr(value, name) for name in static))

    def flatten_with_keys(value: Any) -> tuple[tuple[Any, ...], Any]:
        children, structure = flatten(value)
        return tuple(zip(keys, children, strict=True)), structure

    def unflatten(structure: tuple[type, tuple[Any, ...]], children: Iterable[Any]) -> Any:
        value = object.__new__(cls)  # unchecked: a transformation may put anything there
        for name, part in zip((*data, *static), (*children, *structure[1]), strict=True):
            object.__setattr__(value, name, part)
        return value

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


StepFunction = Callable[[Forward, DecodeState], tuple[DecodeState, StepInfo]]
InitFunction = Callable[[SlotSpec], Carry]
