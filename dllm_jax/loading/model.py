"""A loaded model as one value: weights as leaves, everything else static.

So a `Model` can be an argument of jit, grad and vmap.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dllm_jax.loading.tokenizer import encode, read_tokenizer
from dllm_jax.models import reference
from dllm_jax.models.architecture import Architecture
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.family import FamilyDefaults
from dllm_jax.models.kv_cache import KV_FP8
from dllm_jax.models.quantization import is_quantized, shapes_like
from dllm_jax.models.sharding import Exchange, Split, partitioned
from dllm_jax.scoring import likelihood, one_rounding
from dllm_jax.scoring.likelihood import LogLikelihood
from dllm_jax.scoring.one_rounding import Rounding


@dataclasses.dataclass(frozen=True)
class TokenizerSource:
    """Tokenizer files, and the tokenizer on first use, because importing transformers is slow.

    It compares by the digest of the files, so loading a model twice does not trace a jit twice.
    """

    digest: str
    folder: Path = dataclasses.field(compare=False)
    _read: dict[int, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def tokenizer(self, mask_token_id: int) -> Any:
        """The transformers tokenizer of the folder; never runs code that the folder brings.

        Args:
            mask_token_id: The model's mask, which decoded text leaves out; -1 for none.
        """
        if mask_token_id not in self._read:
            mask = mask_token_id if mask_token_id >= 0 else None
            self._read[mask_token_id] = read_tokenizer(self.folder, mask)
        return self._read[mask_token_id]


class Model(struct.PyTreeNode):
    """Weights, and everything needed to run them.

    Attributes:
        params: The weights, the only leaves.
        config: Facts of the network.
        arch: The network's functions.
        defaults: How the model is decoded by default.
        source: The argument of `load`.
        tokenizer_source: The tokenizer's files, None for a model without one.
        split: The devices that share the weights; None: one has them all.
        kv_scales: Of each layer, what keys and what values of each head are divided by before
            they are rounded to 8 bits; None: they are cached in the type of the weights.
        exchange: Of an engine's devices; None: XLA alone adds up what they have.
    """

    params: Any
    config: DenseConfig = struct.field(pytree_node=False)
    arch: Architecture = struct.field(pytree_node=False)
    defaults: FamilyDefaults = struct.field(pytree_node=False)
    source: str = struct.field(pytree_node=False, default="")
    tokenizer_source: TokenizerSource | None = struct.field(pytree_node=False, default=None)
    split: Split | None = struct.field(pytree_node=False, default=None)
    kv_scales: tuple[Float[Array, "2 G"], ...] | None = None
    exchange: Exchange | None = None

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        count = sum(getattr(leaf, "size", 0) for leaf in leaves)
        types = ", ".join(sorted({str(getattr(leaf, "dtype", "no dtype")) for leaf in leaves}))
        return (
            f"Model({self.source!r}, family={self.defaults.family!r}, {count:,} weights, {types})"
        )

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; None for a model without one."""
        if self.tokenizer_source is None:
            return None
        return self.tokenizer_source.tokenizer(self.config.mask_token_id)

    @property
    def quantization(self) -> Literal["fp8"] | None:
        """How the matrices of the layers are stored; None: in the type of the other weights."""
        layers = {name: leaf for name, leaf in self.params.items() if name != "lm_head"}
        leaves = jax.tree.leaves(layers, is_leaf=is_quantized)
        return "fp8" if any(map(is_quantized, leaves)) else None

    @property
    def has_quantized_head(self) -> bool:
        """Whether the head is stored in 8 bits."""
        return is_quantized(self.params.get("lm_head"))

    @property
    def kv_dtype(self) -> Any:
        """Type of the cached keys and values."""
        return jnp.dtype(self.params["embed"].dtype if self.kv_scales is None else KV_FP8)

    @property
    def kv_cache_dtype(self) -> Literal["fp8"] | None:
        """How keys and values are cached; None: in the type of the weights."""
        return None if self.kv_scales is None else "fp8"

    @property
    def shapes(self) -> Any:
        """The weights, or their shapes as one device has them: a split model's may be padded."""
        if self.split is None:
            return self.params
        cfg, dtype = self.config, self.params["final_norm"].dtype
        ids = cfg.vocab_size, cfg.hidden_size
        of_context = cfg.hidden_size, cfg.num_layers, cfg.num_kv_heads, 2, cfg.head_dim
        # Of a drafter, whose network shares its target's embedding and head.
        joined = {"embed": ids, "lm_head": ids, "context_wkv": of_context}
        shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in joined.items()}
        shapes |= self.arch.param_shapes(cfg, dtype)
        return shapes_like(self.params, {name: shapes[name] for name in self.params})

    @property
    def routing_block(self) -> int:
        """Tokens that choose their experts together (LLaDA2.2); 1 for independent routing."""
        return getattr(self.config, "routing_block", 1)

    def logits(
        self,
        token_ids: Int[Array, "B T"],
        attention: str = "block_causal",
        block_size: int | None = None,
        *,
        rounding: Rounding | None = None,
        prompt_len: int | Int[Array, " B"] = 0,
    ) -> Float[Array, "B T V"]:
        """Raw logits of whole sequences, without a cache.

        Row i belongs to input i: it predicts token i, or token i + 1 where `config.shift`. A head
        in 8 bits multiplies rows of 16; the steps of DiffusionGemma round its rows too.

        Args:
            attention: "full", "causal" or "block_causal" (blocks on the absolute grid).
            block_size: Tokens of a block; None takes the family's. Only block_causal reads it.
            rounding: `LLM.rounding`: the bits of an engine with `batch_invariant`, whose blocks are
                then those of "block_causal" (docs/same_tokens.md). They have gradients.
            prompt_len: Only with `rounding`: tokens of each text's prompt.

        Raises:
            ValueError: For an unknown attention, a block_size below 1, a length that is no
                multiple of the `routing_block`, or a network that has no such bits.
        """
        size = self.defaults.block_size if block_size is None else block_size
        if size < 1:
            raise ValueError(f"{block_size=} must be at least 1")
        ids = jnp.asarray(token_ids, jnp.int32)
        if ids.ndim != 2:
            raise ValueError(f"token_ids have shape {ids.shape}; give [batch, tokens]")
        if ids.shape[1] % self.routing_block:
            raise ValueError(
                f"token_ids are {ids.shape[1]} tokens long; blocks of {self.routing_block} choose "
                "their experts together, so give a multiple of that: fill up with the mask token"
            )
        if self.arch.condition is not None and attention != "causal":
            raise ValueError(
                f"{attention=}: {self.defaults.family} decodes a canvas behind a cached text; only "
                'its encoder has logits of whole texts: use attention="causal"'
            )
        if rounding is not None:
            if attention != "block_causal" or block_size not in (None, rounding.block_size):
                raise ValueError(
                    f"{attention=}, {block_size=}: with rounding= the blocks are the engine's, of "
                    f"{rounding.block_size} tokens; leave both out"
                )
            rows = one_rounding.hidden_rows(self, ids, rounding, prompt_len)
            return one_rounding.read_logits(self, rows)
        visible = reference.visibility(attention, ids.shape[1], size)
        mask = jnp.broadcast_to(visible, (ids.shape[0], *visible.shape))

        def logits(params: Any, ids: Array, mask: Array) -> Array:
            return reference.dense_logits(params, self.config, ids, mask, self.arch)

        return partitioned(self.split, logits, self.params, ids, mask)

    def forbidden(self, ids: Any, allow: tuple[int, ...] = ()) -> Any:
        """Ids never written: the mask, edits that are no text, rows that hold no token.

        [V] to [V], of NumPy or of JAX as `ids` are. Edits in `allow` are not among them.
        """
        defaults = self.defaults
        never = (ids == self.config.mask_token_id) | (
            ids >= (defaults.vocab_limit or self.config.vocab_size)
        )
        for token in defaults.forbidden_token_ids:
            if token not in allow:
                never |= ids == token
        return never

    @overload
    def log_likelihood(
        self,
        prompts: str | Sequence[int],
        completions: str | tuple[int, ...],
        *,
        method: likelihood.Method = "chain",
        budget: int = likelihood.BUDGET,
        block_size: int | None = None,
        seed: int = 0,
    ) -> LogLikelihood: ...

    @overload
    def log_likelihood(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        completions: list[str] | list[list[int]],
        *,
        method: likelihood.Method = "chain",
        budget: int = likelihood.BUDGET,
        block_size: int | None = None,
        seed: int = 0,
    ) -> list[LogLikelihood]: ...

    def log_likelihood(
        self,
        prompts: Any,
        completions: Any,
        *,
        method: likelihood.Method = "chain",
        budget: int = likelihood.BUDGET,
        block_size: int | None = None,
        seed: int = 0,
    ) -> Any:
        """Log-probabilities of completions after their prompts, in nats.

        "chain" is the log-probability with which `block_diffusion` with `remasking="sequential"`
        and temperature 1 writes the completion, one token a forward: it is exact, sums to one over
        all completions of a length, and reads a block for each token. "elbo" averages the chain
        rule over all orders in which a block may be filled, as papers on masked models do. It is
        never above the log-probability of a law that draws the order of each block. Up to `budget`
        blocks are read for each block of the completion, and the error of the estimate is stated.

        Completions of one prompt share its keys and values, which are computed once. The end of
        text is a token like any other: it counts where the completion holds it.

        Args:
            prompts: A text or its token ids, or one for each completion. A text gets the special
                tokens that the tokenizer puts around one, but no chat template.
            completions: A text, or its ids as a tuple, for one result; a list of texts or of lists
                of ids for a list of results. Texts are tokenised apart from their prompt.
            budget: Only of "elbo": the most hidden sets of a block. From 2**n - 1 on, the value of
                a block with n tokens of the completion is exact.
            block_size: Tokens of a block; None takes the family's. Only block models read it.
            seed: Only of "elbo": which sets are hidden, besides the tokens themselves.

        Raises:
            ValueError: For a model without log-likelihoods (DiffusionGemma), an empty completion,
                an id that the model never writes, or a pair that is too long.

        Source: Block Diffusion (arXiv 2503.09573), equation 7, for blocks; Ou et al. 2024 (arXiv
            2406.03736) for the bound as a mean over orders.
        """
        return likelihood.log_likelihood(
            self,
            prompts,
            completions,
            method=method,
            budget=budget,
            block_size=block_size,
            seed=seed,
            encode=lambda text, special: encode(self.tokenizer, text, special),
        )
