"""The dense decoder of the Qwen3-shaped families (SDAR, plain Qwen3): config, shapes, arithmetic.

Data flow: ids -> `embed` -> `trunk` (layers, final norm) -> `unembed`. Attention is the argument
`attend`, so the same code serves training, cache-free logits and paged decoding. Nothing here
knows about pages, masks, blocks or strategies.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dllm_jax.models.layers import apply_rope, matmul, rms_norm, rope_tables, swiglu

# attend(layer, q [B T N H], k [B T G H], v [B T G H]) -> [B T N H]
Attend = Callable[[int, Array, Array, Array], Array]

_INIT_STD = 0.02  # Qwen3's initializer_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Facts of a dense decoder; everything a checkpoint's config.json says about arithmetic.

    Attributes:
        shift: True if row i of the output predicts position i + 1 (autoregressive models and
            their shifted descendants), False if it predicts position i (SDAR).
        mask_token_id: The token that stands for a hole, -1 where the model has none.
        max_position: Longest sequence the model was made for, in tokens.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_position: int = 32768
    qk_norm: bool = True
    shift: bool = False
    mask_token_id: int = -1

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}; "
                "check the checkpoint's config.json"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embedding")


class LayerParams(TypedDict):
    """Weights of one layer, input axis first. `n = N // G`: query heads of one KV head."""

    attn_norm: Float[Array, " D"]
    wqkv: Float[Array, "D G n+2 H"]  # per KV group: its n query heads, its key, its value
    q_norm: NotRequired[Float[Array, " H"]]
    k_norm: NotRequired[Float[Array, " H"]]
    wo: Float[Array, "N H D"]
    mlp_norm: Float[Array, " D"]
    w_gate_up: Float[Array, "D 2 F"]
    w_down: Float[Array, "F D"]


class Params(TypedDict):
    """All weights; `lm_head` is absent where the embedding is tied."""

    embed: Float[Array, "V D"]
    lm_head: NotRequired[Float[Array, "V D"]]
    final_norm: Float[Array, " D"]
    layers: list[LayerParams]


def param_shapes(cfg: DenseConfig, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Shapes of every weight: the one truth for init, conversion, sharding and restore."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    D, G, H, F = cfg.hidden_size, cfg.num_kv_heads, cfg.head_dim, cfg.ffn_size
    n = cfg.num_heads // G

    def layer() -> dict[str, jax.ShapeDtypeStruct]:
        norms = {"q_norm": leaf(H), "k_norm": leaf(H)} if cfg.qk_norm else {}
        return {
            "attn_norm": leaf(D),
            "wqkv": leaf(D, G, n + 2, H),
            **norms,
            "wo": leaf(cfg.num_heads, H, D),
            "mlp_norm": leaf(D),
            "w_gate_up": leaf(D, 2, F),
            "w_down": leaf(F, D),
        }

    head = {} if cfg.tie_embeddings else {"lm_head": leaf(cfg.vocab_size, D)}
    return {
        "embed": leaf(cfg.vocab_size, D),
        **head,
        "final_norm": leaf(D),
        "layers": [layer() for _ in range(cfg.num_layers)],
    }


def init_params(key: PRNGKeyArray, cfg: DenseConfig, dtype: Any = jnp.bfloat16) -> Any:
    """Random weights of the right shapes: normal(0.02) matrices, unit norms."""
    shapes, tree = jax.tree.flatten(param_shapes(cfg, dtype))
    leaves = [
        jnp.ones(s.shape, s.dtype)
        if len(s.shape) == 1
        else (_INIT_STD * jax.random.normal(jax.random.fold_in(key, i), s.shape)).astype(s.dtype)
        for i, s in enumerate(shapes)
    ]
    return jax.tree.unflatten(tree, leaves)


def embed(params: Any, cfg: DenseConfig, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Rows of the embedding; ids must lie in [0, V)."""
    del cfg
    return jnp.take(params["embed"], ids, axis=0, mode="clip")


def trunk(
    params: Any,
    cfg: DenseConfig,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: Attend,
    hidden_layers: tuple[int, ...] = (),
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], ...]]:
    """Run the layers.

    Args:
        x: Input rows, as `embed` gives them or mixed by a strategy.
        positions: Absolute positions of the rows (the prompt starts at 0).
        attend: Attention of one layer on rotated queries and keys.
        hidden_layers: Which residual streams to return; 0 is the input, j is after layer j.

    Returns:
        The rows after the final norm, and the residual streams asked for, in that order.
    """
    cos, sin = rope_tables(positions, cfg.head_dim, cfg.rope_theta)
    streams = {0: x} if 0 in hidden_layers else {}
    for i, layer in enumerate(params["layers"]):
        x = x + _attention(layer, cfg, x, cos, sin, lambda q, k, v, i=i: attend(i, q, k, v))
        normed = rms_norm(x, layer["mlp_norm"], cfg.norm_eps)
        x = x + swiglu(normed, layer["w_gate_up"], layer["w_down"])
        if i + 1 in hidden_layers:
            streams[i + 1] = x
    return rms_norm(x, params["final_norm"], cfg.norm_eps), tuple(streams[j] for j in hidden_layers)


def _attention(
    layer: Any, cfg: DenseConfig, x: Array, cos: Array, sin: Array, attend: Callable[..., Array]
) -> Array:
    n = cfg.num_heads // cfg.num_kv_heads
    fused = matmul(rms_norm(x, layer["attn_norm"], cfg.norm_eps), layer["wqkv"])
    # Queries and key of a group go through norm and rotation together: one pass, not two.
    qk, v = fused[..., : n + 1, :], fused[..., n + 1, :]
    if cfg.qk_norm:
        scale = jnp.stack([layer["q_norm"]] * n + [layer["k_norm"]])
        qk = rms_norm(qk, scale, cfg.norm_eps)
    qk = apply_rope(qk, cos[..., None, :], sin[..., None, :])
    q = qk[..., :n, :].reshape(*x.shape[:-1], cfg.num_heads, cfg.head_dim)
    out = attend(q, qk[..., n, :], v)
    return matmul(out.reshape(*x.shape[:-1], -1), layer["wo"].reshape(-1, cfg.hidden_size))


def unembed(params: Any, cfg: DenseConfig, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Logits in float32 of rows that went through the final norm."""
    head = params["embed"] if cfg.tie_embeddings else params["lm_head"]
    return jax.lax.dot_general(
        hidden,
        head.astype(hidden.dtype),
        (((hidden.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
