"""A DFlash drafter: config, shapes, arithmetic.

It fills a block of masks after a text in one pass. It sees the text only as keys and values, which
`context_kv` computes from the target's hidden states. Its input rows and logits use the target's
embedding and head, which `api.strategy` adds to its weights. Its layers are those of `dense`.

Source: arXiv 2602.06036; z-lab/dflash, and MuseGlimmerAssistantModel of transformers 5.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm_jax.kernels.layer.reference import apply_rope, matmul, rms_norm
from dllm_jax.models import dense
from dllm_jax.models.dense import DenseConfig, leaf
from dllm_jax.models.head import Head, Unembed
from dllm_jax.models.layers import rope_tables
from dllm_jax.models.view import View


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig(DenseConfig):
    """Facts of a drafter.

    Attributes:
        vocab_size: That of the target; 0 if the drafter's config does not state it.
        target_layer_ids: Layers of the target, counted from 0, after which its hidden states are
            taken, in the order in which they are joined.
        block_size: Cells of a pass in training: the anchor and the masks after it.
        windows: For each layer, the number of positions back or ahead that a row sees, including
            its own; None for all.
        causal: For each layer, whether rows of the block see only earlier rows.
        embedding_scale: Factor of the target's embedding rows.
        logit_cap: Soft cap on the magnitude of logits; None leaves them.
    """

    target_layer_ids: tuple[int, ...]
    block_size: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    embedding_scale: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self):
        super().__post_init__()
        self._check_each_layer("windows", "causal")
        if self.rotary_dim not in (None, self.head_dim):
            raise ValueError(
                f"rotary_dim={self.rotary_dim} must be head_dim={self.head_dim}: a drafter rotates "
                "whole heads, whatever its target does; leave it None"
            )

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Required `needs.hidden_layers` of a strategy: 0 is the embedding, j is after layer j."""
        return tuple(i + 1 for i in self.target_layer_ids)

    @property
    def features(self) -> int:
        """Width of the joined hidden states of one position."""
        return len(self.target_layer_ids) * self.hidden_size


def param_shapes(cfg: DFlashConfig, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Shapes of the drafter's own weights."""
    mlp = dense.mlp_shapes(cfg, dtype)
    decoder = dense.decoder_shapes(cfg, dtype, [mlp] * cfg.num_layers)
    return {
        "fc": leaf(dtype, cfg.features, cfg.hidden_size),
        "context_norm": leaf(dtype, cfg.hidden_size),
        "final_norm": decoder["final_norm"],
        "layers": decoder["layers"],
    }


def embed(params: Any, cfg: DFlashConfig, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Rows of the target's embedding, unscaled except for the drafter's own factor.

    Raises:
        ValueError: The drafter has not been given the embedding of its target.
    """
    if "embed" not in params:
        raise ValueError(
            "a drafter has no embedding of its own; give it as draft= beside the target it was "
            "trained for, or join them with dllm_jax.api.drafts.with_target"
        )
    rows = dense.embed(params, cfg, ids)
    return rows if cfg.embedding_scale == 1.0 else rows * cfg.embedding_scale


def head(params: Any, cfg: DFlashConfig) -> Head:
    """The target's head, with the drafter's own cap."""
    return dataclasses.replace(dense.head(params, cfg), cap=cfg.logit_cap)


unembed = Unembed(head)  # float32 logits; row i predicts position i


def context_kv(
    params: Any,
    cfg: DFlashConfig,
    vectors: Float[Array, "B T F"],
    positions: Int[Array, "B T"],
) -> tuple[tuple[Float[Array, "B T G H"], Float[Array, "B T G H"]], ...]:
    """The keys and values that each layer caches, computed from the target's hidden states.

    Args:
        vectors: Hidden states after `cfg.target_layer_ids`, joined in that order: F is
            `cfg.features`.
        positions: Absolute positions of the rows.

    Returns:
        Rotated keys and values of each layer. One projection and one norm of the states serve all
        layers, without the input norm of any layer. If `params` has no `context_wkv`, this computes
        the `context_weights`.
    """
    weights = params["context_wkv"] if "context_wkv" in params else context_weights(params)
    context = matmul(vectors.astype(params["fc"].dtype), params["fc"])
    context = rms_norm(context, params["context_norm"], cfg.norm_eps)
    kv = matmul(context, weights)  # [B T L G 2 H]
    layers = params["layers"]
    if cfg.qkv_bias:
        bias = jnp.stack([layer["bqkv"][:, -2:] for layer in layers])
        kv = kv + bias[None, None].astype(kv.dtype)
    k, v = kv[..., 0, :], kv[..., 1, :]
    if cfg.qk_norm:
        scale = jnp.stack([layer["k_norm"] for layer in layers])[:, None]
        k = rms_norm(k, scale, cfg.norm_eps)
    cos, sin = rope_tables(positions, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    flat = k.reshape(*k.shape[:2], -1, cfg.head_dim)
    k = apply_rope(flat, cos, sin).reshape(k.shape)
    return tuple((k[:, :, i], v[:, :, i]) for i in range(cfg.num_layers))


def context_weights(params: Any) -> Float[Array, "D L G 2 H"]:
    """Weights for the keys and values of all layers: one product instead of one a layer.

    They are slices of each layer's `wqkv`. On a GPU XLA would copy these slices in every pass, so
    decoding keeps a copy (`dllm_jax.api.drafts.with_target`).
    """
    return jnp.stack([layer["wqkv"][:, :, -2:] for layer in params["layers"]], axis=1)


def layer_view(cfg: DFlashConfig, layer: int) -> View:
    """The window of this layer, and whether it is causal."""
    return View(window=cfg.windows[layer], in_order=cfg.causal[layer])
