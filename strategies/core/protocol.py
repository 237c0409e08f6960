"""What a strategy is and what it may ask for: the types of the contract (docs/contract.md).

A strategy is an immutable value with a pure `step`; knobs are its per-request numbers; `Forward`
is the model as a strategy sees it, without parameters, pages or devices.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .needs import Needs
from .state import Carry, DecodeState, Sampling, StepInfo


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


# --- knobs: numbers of a strategy that may differ per request -------------------------------


@jax.tree_util.register_pytree_node_class
class PerSlot:
    """A knob's values, one a slot, that must say which axis they go along.

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


# Type of a knob field: a float (or an array, one value a slot) to users, a PerSlot inside `step`.
Knob = Any


def knob(default: float, low: float = 0.0, high: float = float("inf"), whole: bool = False) -> Any:
    """A float field of a strategy that each request may override.

    Args:
        default: Its value when it is not set.
        low: Smallest legal value.
        high: Largest legal value.
        whole: Only whole numbers are legal.
    """
    return struct.field(default=default, metadata={"knob": (low, high), "whole": whole})


def knob_ranges(strategy: Any) -> dict[str, tuple[float, float]]:
    """Names of a strategy's knobs and their legal ranges."""
    return {
        field.name: field.metadata["knob"]
        for field in dataclasses.fields(strategy)
        if "knob" in field.metadata
    }


def whole_knobs(strategy: Any) -> frozenset[str]:
    """Names of a strategy's knobs that are whole numbers."""
    fields = dataclasses.fields(strategy)
    return frozenset(field.name for field in fields if field.metadata.get("whole"))


def split_knobs(strategy: Any) -> tuple[Any, dict[str, Any]]:
    """The strategy without its knob values, and those values by name.

    What is left is static, so one compiled step serves every value.

    Raises:
        ValueError: A concrete value is outside its range.
    """
    ranges = knob_ranges(strategy)
    values = {name: getattr(strategy, name) for name in ranges}
    for name, value in values.items():
        check_knob(strategy, name, value)
    return strategy.replace(**dict.fromkeys(ranges)), values


def check_knob(strategy: Any, name: str, value: Any) -> None:
    """Raise ValueError if `value` is a plain number that knob `name` may not have."""
    low, high = knob_ranges(strategy)[name]
    if not isinstance(value, int | float | np.number):
        return
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is outside [{low}, {high}]; choose a value inside it")
    if name in whole_knobs(strategy) and float(value) % 1:
        raise ValueError(f"{name}={value} is not a whole number; round it")


def bind_knobs(strategy: Any, knobs: Mapping[str, Float[Array, " B"]]) -> Any:
    """The strategy with each knob bound to its per-slot values (inside the jit)."""
    return strategy.replace(**{name: PerSlot(knobs[name]) for name in knob_ranges(strategy)})


# --- what a forward takes and gives ---------------------------------------------------------


class TokenMix(struct.PyTreeNode):
    """Input rows that are mixtures of embeddings: `base_weight * E[base] + sum_m p_m * E[id_m]`.

    Attributes:
        renormalize: Scale each mixture to the weighted mean of its members' norms.
        on: Cells that take the mixture; the others show their token.

    Source: DMax (arXiv 2604.08302), soft parallel decoding.
    """

    base_ids: Int[Array, "B K S"]
    base_weight: Float[Array, "B K S"]
    ids: Int[Array, "B K S M"]
    probs: Float[Array, "B K S M"]
    on: Bool[Array, "B K S"]
    renormalize: bool = struct.field(pytree_node=False, default=True)


class Soft(struct.PyTreeNode):
    """Input rows given as vectors where `on`, as embeddings of `ids` elsewhere."""

    ids: Int[Array, "B K S"]
    vectors: Float[Array, "B K S D"]
    on: Bool[Array, "B K S"]


class Conditioned(struct.PyTreeNode):
    """Input rows of tokens and, where `on`, of what was expected at their cells.

    The architecture mixes the two (`Architecture.condition`); elsewhere a row is the plain
    embedding of its token. A cell that is `on` goes through the mixing with expectation 0 too.
    """

    ids: Int[Array, "B K S"]
    expected: Float[Array, "B K S D"]
    on: Bool[Array, "B K S"]


class Taps(struct.PyTreeNode):
    """Features that become context keys and values of an auxiliary model; only to be stored."""

    vectors: Float[Array, "B K S F"]


Inputs = Array | TokenMix | Soft | Conditioned | Taps


class TokenStats(struct.PyTreeNode):
    """What the model says of each cell asked for, in float32.

    Cells not asked for hold token 0, confidence -inf and entropy +inf, so that no rule takes them.

    Attributes:
        token: The token drawn (the most probable one at temperature 0; ties: the lowest id).
        confidence: Its probability.
        entropy: Of the whole law, in nats.
        top_ids: The `num_top` most probable ids; `top_probs` are their probabilities.
        soft: Expected embedding under the same law, 0 where not asked for; None: not computed.
    """

    token: Int[Array, "B K S"]
    confidence: Float[Array, "B K S"]
    entropy: Float[Array, "B K S"]
    top_ids: Int[Array, "B K S M"]
    top_probs: Float[Array, "B K S M"]
    soft: Float[Array, "B K S D"] | None = None


class ForwardOutput(Protocol):
    """Result of one forward; everything is computed when asked for."""

    hidden: Float[Array, "B K S D"]
    """Raw hidden rows: row i belongs to the input of cell i."""

    taps: tuple[Float[Array, "B K S D"], ...]
    """Residual streams of `hidden_layers`, raw."""

    def predict(
        self,
        where: Bool[Array, "B K S"] | np.ndarray | None = None,
        sampling: Sampling | None = None,
        keys: PRNGKeyArray | None = None,
        confidence: Literal["drawn", "raw"] = "drawn",
        penalty: tuple[Int[Array, "B K S"], Float[Array, "B K S"]] | None = None,
        num_top: int = 0,
        guide: tuple["ForwardOutput", float] | None = None,
        width: int | None = None,
        soft: bool = False,
    ) -> TokenStats:
        """Statistics aligned with the cells: row i is about cell i, also on shifted models.

        Args:
            where: Cells wanted (default all); the others cost nothing to be wrong about.
            sampling: How to draw; None is greedy.
            keys: One key a cell, for temperatures above 0.
            confidence: "drawn": of the law that is drawn from, after temperature (0 counts as 1),
                top-k and top-p; "raw": before those three.
            penalty: Ids and what is subtracted from their logits, one a cell.
            num_top: How many of the most probable ids to return.
            guide: An output of the same cells under another input, and a scale: the law read is
                that of `other + (1 + scale) * (own - other)`, in logits (classifier-free guidance,
                Ho and Salimans, arXiv 2207.12598).
            width: Read out only the first `width` cells from the first of `where` on; the others
                have no prediction.
            soft: Also the expected embedding under the law drawn from, for models whose head is
                their embedding. The draw then takes other noise than without it.
        """
        ...

    def soft(self, temperature: float | Float[Array, "B 1 1"] = 1.0) -> Float[Array, "B K S D"]:
        """Expected embedding under the tempered law of each cell, aligned."""
        ...

    def logits(self) -> Float[Array, "B K S V"]:
        """All logits, aligned: for tests, and for rules that `predict` cannot express."""
        ...

    def store(self, state: DecodeState, where: Bool[Array, "B K S"]) -> DecodeState:
        """Write the K/V of the cells in `where` into the cache of `state`, at their positions."""
        ...


class Forward(Protocol):
    """The model as a strategy sees it."""

    mask_id: int
    vocab_size: int
    shift: bool
    """Row i tells cell i + 1, so a pass that begins behind the window's first cell has no row for
    the first cell it runs."""

    @property
    def aux(self) -> Mapping[str, "Forward"]:
        """The auxiliary models by name, each with a cache of its own."""
        ...

    def __call__(
        self,
        state: DecodeState,
        *,
        inputs: Inputs | None = None,
        live: Bool[Array, "B K S"] | np.ndarray | None = None,
        visible: Bool[Array, "B K K"] | None = None,
        causal: bool | Bool[Array, " B"] | Bool[Array, "B K"] = False,
        context_len: Int[Array, " B"] | None = None,
        mode: Int[Array, " B"] | Int[Array, "B K"] | int | None = None,
        hidden_layers: tuple[int, ...] = (),
        width: int | None = None,
    ) -> ForwardOutput:
        """One pass over the window.

        Args:
            inputs: Default: the tokens of the window, holes shown as the mask.
            live: Cells that are queries and fresh keys, one contiguous range a row (default:
                cells of blocks that are not DUMMY). Of a NumPy array, alike in all rows, it is
                known while tracing which rows a narrow pass computes and stores: fewer operations.
            visible: Which block sees which (default: itself and those before it).
            causal: Token order as well, for a row or for the queries of a block.
            context_len: Cached prefix seen (default `start`); where a position is both cached
                and live, the live cell wins.
            mode: Handed to the model, of a row or of a block.
            hidden_layers: Residual streams to return.
            width: Compute only the first `width` live cells of each row; the others have no
                prediction. The output is a pytree of the window's shape, so passes of several
                widths may be branches of a `lax.switch`; store outside of it (jaxlib 0.10 copies
                a pool that two branches write).
        """
        ...

    def embed(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Embedding rows of ids."""
        ...

    def predict(
        self,
        hidden: Float[Array, "B *X D"],
        sampling: Sampling | None = None,
        keys: PRNGKeyArray | None = None,
    ) -> TokenStats:
        """Statistics [B *X] of hidden rows that belong to no cell of the window."""
        ...

    def drawn_law(
        self, hidden: Float[Array, "B *X D"], sampling: Sampling
    ) -> Float[Array, "B *X V"]:
        """The law that a token of each hidden row is drawn from, as float32 logits.

        -inf for what is never drawn; temperature 0 counts as 1. All of it is in memory: for rules
        that weigh two laws against each other. Scripts and random models have none.
        """
        ...


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
        cells: For each choice, the cells of a slot that the model runs and that the auxiliary
            models run; empty where costs do not matter.
        costs: Cost of a step of each choice, in any one unit. None: the engine measures it.
    """

    needs = Needs()
    choices = ()
    cells = ()
    costs = None

    def __init_subclass__(cls, **options: Any) -> None:
        # Not PyTreeNode's: register_dataclass would leave the class out of the static structure.
        super(struct.PyTreeNode, cls).__init_subclass__()
        dataclasses.dataclass(frozen=True, **options)(cls)
        _register(cls)

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
        """This strategy with what its draft model was trained for."""
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

    @property
    def absorbs(self) -> bool:
        """Whether the strategy has an `absorb` of its own."""
        return type(self).absorb is not Strategy.absorb

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

    @property
    def weighs_costs(self) -> bool:
        """Whether a step is chosen by costs that are not known yet."""
        return self.makes_choices and bool(self.cells) and self.costs is None


def _register(cls: type) -> None:
    """Make a dataclass a pytree whose static structure holds the class and its static fields."""
    fields = dataclasses.fields(cls)
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
        return cls(
            **dict(zip(data, children, strict=True)), **dict(zip(static, structure[1], strict=True))
        )

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


StepFunction = Callable[[Forward, DecodeState], tuple[DecodeState, StepInfo]]
InitFunction = Callable[[SlotSpec], Carry]
