"""A DFlash drafter: config, shapes, arithmetic.

It fills a block of masks behind a text in one pass. Of the text it sees only keys and values, which
`context_kv` makes of the target's hidden states; its input rows and logits go through the target's
embedding and head, which `api.strategy` puts beside its own weights. Its layers are `dense`'s.

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
        vocab_size: The target's; 0 where the draft's own config does not say.
        target_layer_ids: Layers of the target, counted from 0, behind which its hidden states are
            taken, in the order in which they are joined.
        block_size: Cells of a pass in training: the anchor and the masks behind it.
        windows: For each layer, how many positions back or ahead a row sees, its own counted; None
            for all.
        causal: For each layer, whether rows of the block see those before them only.
        embedding_scale: Factor of the target's embedding rows.
        logit_cap: Logits are bent to lie within it either side of 0; None leaves them.
    """

    target_layer_ids: tuple[int, ...]
    block_size: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    embedding_scale: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in ("windows", "causal"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(
                    f"{name}={getattr(self, name)} must have an entry for each of the "
                    f"{self.num_layers} layers"
                )
        if self.rotary_dim not in (None, self.head_dim):
            raise ValueError(
                f"rotary_dim={self.rotary_dim} must be head_dim={self.head_dim}: a drafter rotates "
                "whole heads, whatever its target does; leave it None"
            )

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What a strategy's `needs.hidden_layers` must be: 0 is the embedding, j behind layer j."""
        return tuple(i + 1 for i in self.target_layer_ids)

    @property
    def features(self) -> int:
        """Width of the joined hidden states of one position."""
        return len(self.target_layer_ids) * self.hidden_size


def param_shapes(cfg: DFlashConfig, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Shapes of a draft's own weights."""
    mlp = dense.mlp_shapes(cfg, dtype)
    decoder = dense.decoder_shapes(cfg, dtype, [mlp] * cfg.num_layers)
    return {
        "fc": leaf(dtype, cfg.features, cfg.hidden_size),
        "context_norm": leaf(dtype, cfg.hidden_size),
        "final_norm": decoder["final_norm"],
        "layers": decoder["layers"],
    }


def embed(params: Any, cfg: DFlashConfig, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Rows of the target's embedding, raw but for the draft's own factor.

    Raises:
        ValueError: The draft has not been given its target's.
    """
    if "embed" not in params:
        raise ValueError(
            "a drafter has no embedding of its own; give it as draft= beside the target it was "
            "trained for, or join them with dllm_jax.api.drafts.with_target"
        )
    rows = dense.embed(params, cfg, ids)
    return rows if cfg.embedding_scale == 1.0 else rows * cfg.embedding_scale


def head(params: Any, cfg: DFlashConfig) -> Head:
    """The target's head, with the draft's own bend."""
    return dataclasses.replace(dense.head(params, cfg), cap=cfg.logit_cap)


unembed = Unembed(head)  # float32 logits; row i is about the input's own position i


def context_kv(
    params: Any,
    cfg: DFlashConfig,
    vectors: Float[Array, "B T F"],
    positions: Int[Array, "B T"],
) -> tuple[tuple[Float[Array, "B T G H"], Float[Array, "B T G H"]], ...]:
    """What each layer caches of the target's hidden states: keys and values, position by position.

    Args:
        vectors: Hidden states behind `cfg.target_layer_ids`, joined in that order: F is
            `cfg.features`.
        positions: Absolute positions of the rows.

    Returns:
        Rotated keys and values of each layer. The states go through one projection and one norm
        for all layers, and through no layer's own norm of its input. `params` may hold
        `context_wkv`, the `context_weights`; without, they are made here.
    """
    weights = params.get("context_wkv")
    if weights is None:
        weights = context_weights(params)
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
    """What makes keys and values of all layers of one row: one product instead of one a layer.

    They stand within each layer's `wqkv`, of which XLA would cut and write them anew in every pass
    on a GPU; so they are kept beside it while decoding (`dllm_jax.api.drafts.with_target`).
    """
    return jnp.stack([layer["wqkv"][:, :, -2:] for layer in params["layers"]], axis=1)


def layer_view(cfg: DFlashConfig, layer: int) -> View:
    """How far a row of this layer sees, and whether in token order only."""
    return View(window=cfg.windows[layer], in_order=cfg.causal[layer])
