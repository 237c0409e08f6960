"""The model as a strategy sees it: the inputs and results of a forward, and what it may ask.

It has no parameters, pages or devices. The engine's implementation is `dllm_jax/runner/forward.py`;
scripts and random models have their own.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .state import DecodeState, Sampling


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
    """Input rows of tokens and, where `on`, of the expected embeddings of their cells.

    The architecture mixes the two (`Architecture.condition`), with an expectation of 0 as well.
    Elsewhere a row is the plain embedding of its token.
    """

    ids: Int[Array, "B K S"]
    expected: Float[Array, "B K S D"]
    on: Bool[Array, "B K S"]


class Taps(struct.PyTreeNode):
    """Features that become context keys and values of an auxiliary model; only for `store`."""

    vectors: Float[Array, "B K S F"]


Inputs = Array | TokenMix | Soft | Conditioned | Taps


class TokenStats(struct.PyTreeNode):
    """The model's prediction of each cell asked for, in float32.

    Cells not asked for hold token 0, confidence -inf and entropy +inf, so that no rule takes them.

    Attributes:
        token: The token drawn (the most probable one at temperature 0; ties: the lowest id).
        confidence: Its probability.
        entropy: Of the whole distribution, in nats.
        top_ids: The `num_top` most probable ids; `top_probs` are their probabilities.
        soft: Expected embedding, 0 where not asked for; None: not computed.
        id_probs: Probabilities of the `ids` that were asked for, 0 in cells that were not; None:
            not computed.
        log_prob: Log-probability of the token under the distribution that it is drawn from, in
            nats, computed from logits; NaN where not asked for. None: not computed.
    """

    token: Int[Array, "B K S"]
    confidence: Float[Array, "B K S"]
    entropy: Float[Array, "B K S"]
    top_ids: Int[Array, "B K S M"]
    top_probs: Float[Array, "B K S M"]
    soft: Float[Array, "B K S D"] | None = None
    id_probs: Float[Array, "B K S N"] | None = None
    log_prob: Float[Array, "B K S"] | None = None

    def only(self, where: Bool[Array, "B K S"] | np.ndarray) -> "TokenStats":
        """With the values of cells not asked for in all others."""
        soft, probs = self.soft, self.id_probs
        return self.replace(
            token=jnp.where(where, self.token, 0),
            confidence=jnp.where(where, self.confidence, -jnp.inf),
            entropy=jnp.where(where, self.entropy, jnp.inf),
            soft=None if soft is None else jnp.where(where[..., None], soft, 0.0),
            id_probs=None if probs is None else jnp.where(where[..., None], probs, 0.0),
        )


class Readout(struct.PyTreeNode):
    """A request for statistics of hidden rows, with a value a cell [B K S] or a row [R].

    The fields are the arguments of `ForwardOutput.predict`. `sampling` has a value a slot, or a
    row; rows of one slot are consecutive.
    """

    where: Bool[Array, "*cells"] | np.ndarray | None = None
    sampling: Sampling | None = None
    keys: PRNGKeyArray | None = None
    confidence: Literal["drawn", "raw"] = struct.field(pytree_node=False, default="drawn")
    penalty: tuple[Int[Array, "*cells"], Float[Array, "*cells"]] | None = None
    num_top: int = struct.field(pytree_node=False, default=0)
    guide: tuple[Any, float] | None = None
    width: int | None = struct.field(pytree_node=False, default=None)
    soft: bool = struct.field(pytree_node=False, default=False)
    fixed: Bool[Array, "*cells"] | None = None
    behind: Int[Array, "*cells"] | None = None
    allow: tuple[int, ...] = struct.field(pytree_node=False, default=())
    ids: Int[Array, "*cells N"] | None = None
    log_prob: bool = struct.field(pytree_node=False, default=False)


class ForwardOutput(Protocol):
    """Result of one forward; statistics are computed when asked for.

    An implementation that inherits from it gives `read` and has `predict`.
    """

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
        fixed: Bool[Array, "B K S"] | None = None,
        behind: Int[Array, "B K S"] | None = None,
        allow: tuple[int, ...] = (),
        ids: Int[Array, "B K S N"] | None = None,
        log_prob: bool = False,
    ) -> TokenStats:
        """Statistics aligned with the cells: row i is about cell i, also on shifted models.

        The tokens of a slot with a grammar are together a text that fits it.

        Args:
            where: Cells wanted (default all).
            sampling: How to draw; None is greedy.
            keys: One key a cell, for temperatures above 0.
            confidence: "drawn": of the distribution that is drawn from, after temperature (0 counts
                as 1), top-k and top-p; "raw": before those three.
            penalty: Ids and the numbers subtracted from their logits, one a cell.
            num_top: How many of the most probable ids to return.
            guide: An output of the same cells under another input, and a scale. The distribution
                read is that of `other + (1 + scale) * (own - other)`, in logits (classifier-free
                guidance, Ho and Salimans, arXiv 2207.12598).
            width: Read out only the first `width` cells from the first of `where` on; the others
                have no prediction.
            soft: Also return the expected embedding, for models whose head is their embedding. The
                draw then uses other noise.
            fixed: Filled cells that a text of a grammar keeps (default: all that are filled). Of
                the others the likeliest text is also the first of `top_ids`.
            behind: Tokens of the window, of which each cell's own follows those before it: it fits
                a grammar as it does one token at a time, and not all together.
            allow: Ids that may be predicted though they are no text, such as LLaDA2.2's DELETE.
            ids: Ids of each cell whose probabilities are returned as `id_probs`, such as the
                likeliest of the last forward. With confidence="raw"; not with penalty, guide, soft.
            log_prob: Also return the log-probability of the token under the distribution that is
                drawn from, whatever `confidence` says; it takes one more pass over the head.
        """
        others = confidence != "raw" or soft or not (penalty is None and guide is None)
        if ids is not None and others:
            raise ValueError(
                "ids= reads probabilities of the plain law; give confidence='raw' and leave "
                "penalty, guide and soft out"
            )
        return self.read(
            Readout(
                where,
                sampling,
                keys,
                confidence,
                penalty,
                num_top,
                guide,
                width,
                soft,
                fixed,
                behind,
                allow,
                ids,
                log_prob,
            )
        )

    def read(self, ask: Readout) -> TokenStats:
        """`predict` with its arguments as a value."""
        ...

    def log_probs(
        self, tokens: Int[Array, "B K S"], ask: Readout, num_top: int = 0
    ) -> Float[Array, "B K S F"]:
        """Log-probabilities of given tokens in nats, NaN in cells that `ask` does not ask for.

        F is 2 + 2 * num_top: of the token under the distribution that `ask` draws from
        (temperature 0 counts as 1), of the token under the raw logits, the ids of the largest raw
        logits, and their log-probabilities under these. Grammars do not count. Scripts and random
        models have none.
        """
        raise ValueError("this model has no log-probabilities; run a network")

    def chose(self, tokens: Int[Array, "B K S"], ask: Readout) -> None:
        """Say which tokens a strategy took from these rows by a rule of its own, without `predict`.

        Nothing is computed, but for whoever keeps log-probabilities (`core.recording`).

        Args:
            ask: What `predict` would have been asked.
        """

    def soft(self, temperature: float | Float[Array, "B 1 1"] = 1.0) -> Float[Array, "B K S D"]:
        """Expected embedding of each cell at a temperature, aligned."""
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
    """Row i predicts cell i + 1, so a pass that begins after the window's first cell has no row
    for the first cell it runs."""

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
        visible: Bool[Array, "B K K"] | np.ndarray | None = None,
        causal: bool | Bool[Array, " B"] | Bool[Array, "B K"] = False,
        context_len: Int[Array, " B"] | None = None,
        mode: Int[Array, " B"] | Int[Array, "B K"] | int | None = None,
        hidden_layers: tuple[int, ...] = (),
        width: int | None = None,
        stores: bool = True,
    ) -> ForwardOutput:
        """One pass over the window.

        Args:
            inputs: Default: the tokens of the window, holes shown as the mask.
            live: Cells that are queries and fresh keys, one contiguous range a row (default:
                cells of blocks that are not DUMMY). A NumPy array with equal rows is known while
                tracing, so a narrow pass needs fewer operations.
            visible: Which block sees which (default: itself and those before it). A NumPy array of
                ones is known while tracing, and Hopper's attention then takes any number of blocks.
            causal: Token order as well, for a row or for the queries of a block.
            context_len: Cached prefix seen (default `start`). Where a position is both cached and
                live, the live cell is seen.
            mode: Given to the model, for a row or for a block.
            hidden_layers: Residual streams to return.
            width: Compute only the first `width` live cells of each row; the others have no
                prediction. The output is a pytree of the window's shape, so passes of several
                widths may be branches of a `lax.switch`; store outside of it (jaxlib 0.10 copies
                a pool that two branches write).
            stores: The output may be stored. False leaves the keys and values out of it, which
                branches of a `lax.switch` would copy.
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
        first_of: DecodeState | None = None,
    ) -> TokenStats:
        """Statistics `[B *X]` of hidden rows that belong to no cell of the window.

        Args:
            first_of: The rows [B D] speak about the first cell of its windows, whose token then
                fits the slot's grammar.
        """
        ...

    def drawn_law(
        self, hidden: Float[Array, "B *X D"], sampling: Sampling
    ) -> Float[Array, "B *X V"]:
        """The distribution that a token of each hidden row is drawn from, as float32 logits.

        -inf for ids that are never drawn; temperature 0 counts as 1. All logits are in memory: for
        rules that compare two distributions. Scripts and random models have none.
        """
        ...
