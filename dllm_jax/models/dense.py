"""The dense decoder of the Llama- and Qwen-shaped families: config, shapes, arithmetic.

Biases, norms of queries and keys, a tied head, partial or stretched rotary embedding and shifted
predictions are facts of the config. Data flow: ids -> `embed` -> `trunk` (layers, final norm) ->
`unembed`. Attention is the argument `attend`, so the same code serves training, cache-free logits
and paged decoding; the feed-forward half of a layer is an argument too, for `moe`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dllm_jax.kernels.layer import (
    Fp8Groups,
    Fp8Matrix,
    Fp8Rows,
    LayerOps,
    add_rms_norm,
    fp8,
    qkv_matmul,
    reduced_rms_norm,
    reduces,
    rotate_qkv,
    split_matmul,
    takes_groups,
)
from dllm_jax.kernels.layer.reference import as_row, rms_norm
from dllm_jax.models.head import Head, Unembed
from dllm_jax.models.layers import RopeScaling, gate_up_shape, rope_tables, swiglu
from dllm_jax.models.sharding import once, total

# attend(layer, q [B T N H], k [B T G H], v [B T G H]) -> [B T N H]
Attend = Callable[[int, Array, Array, Array], Array]
# ffn(weights of a layer, rows [B T D], cfg=, dtype=, ops=) -> what `add_rms_norm` adds
FeedForward = jax.tree_util.Partial
_SIZES = {
    "num_layers": 10_000,  # more are a typing mistake
    **dict.fromkeys(("hidden_size", "num_heads", "num_kv_heads"), 2**31 - 1),
    **dict.fromkeys(("head_dim", "ffn_size", "max_position"), 2**31 - 1),
}

# Every operation in plain XLA: for training, and as the reference.
PLAIN = LayerOps.by("xla")
# Back ends whose rounding of a row does not follow the number of rows, and never another.
ONE_ROUNDING = LayerOps.by("mosaic", one_rounding=True)

INIT_STD = 0.02  # Qwen3's initializer_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Facts of a dense decoder: everything in a checkpoint's config.json that affects arithmetic.

    Attributes:
        shift: True if row i of the output predicts position i + 1 (autoregressive models and
            their shifted descendants), False if it predicts position i (SDAR).
        mask_token_id: The token that stands for a hole; -1 if the model has none.
        qk_norm: Queries and keys are normed, head by head, before they are rotated.
        qkv_bias: Queries, keys and values have a bias (Qwen2).
        o_bias: The output projection of attention has a bias.
        rotary_dim: Leading components of a head that are rotated; None rotates all.
        logit_scale: Factor of the logits (LLaDA's `scale_logits`).
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
    qkv_bias: bool = False
    o_bias: bool = False
    rotary_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    logit_scale: float = 1.0
    shift: bool = False
    mask_token_id: int = -1

    def __post_init__(self):
        for name, most in _SIZES.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be in [1, {most}]; check the checkpoint's "
                    "config.json"
                )
        self._check_heads()

    def _check_heads(self, kind: str = "") -> None:
        """Refuse heads that cannot be grouped or rotated; `kind` begins the fields' names."""
        names = [f"{kind}{name}" for name in ("num_kv_heads", "head_dim", "rotary_dim")]
        num_kv_heads, size, rotary = (getattr(self, name) for name in names)
        remedy = "check the checkpoint's config.json"
        if self.num_heads % num_kv_heads:
            raise ValueError(
                f"{names[0]}={num_kv_heads} must divide num_heads={self.num_heads}; {remedy}"
            )
        if size % 2:
            raise ValueError(f"{names[1]}={size} must be even for rotary embedding; {remedy}")
        if rotary is not None and (rotary % 2 or not 0 < rotary <= size):
            raise ValueError(
                f"{names[2]}={rotary} must be even and at most {names[1]}={size}; {remedy}"
            )

    def _check_each_layer(self, *names: str) -> None:
        """Refuse fields that have not one entry for each layer."""
        for name in names:
            if (count := len(getattr(self, name))) != self.num_layers:
                raise ValueError(
                    f"{name} has {count} entries; give one for each of the {self.num_layers} layers"
                )

    def heads(self, layer: int) -> tuple[int, int]:
        """Number and size of the KV heads of a layer, which determine its share of the cache."""
        del layer
        return self.num_kv_heads, self.head_dim

    def reach(self, layer: int) -> int | None:
        """Most cached keys that a row of a layer reads; None: all."""
        del layer
        return None


def param_shapes(cfg: DenseConfig, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Shapes of every weight, used by initialisation, conversion, sharding and restore."""
    return decoder_shapes(cfg, dtype, [mlp_shapes(cfg, dtype)] * cfg.num_layers)


def mlp_shapes(cfg: DenseConfig, dtype: Any) -> dict[str, Any]:
    """Shapes of a dense layer's feed-forward weights."""
    return {
        "w_gate_up": leaf(dtype, *gate_up_shape(cfg.hidden_size, cfg.ffn_size)),
        "w_down": leaf(dtype, cfg.ffn_size, cfg.hidden_size),
    }


def leaf(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """Shape and type of one weight."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def decoder_shapes(cfg: DenseConfig, dtype: Any, ffns: list[dict[str, Any]]) -> dict[str, Any]:
    """The shapes of a decoder whose layer i has the feed-forward weights `ffns[i]`.

    The input axis of a matrix comes first. Columns of `wqkv` and `bqkv` are, for each KV head, its
    `n` query heads, its key and its value.
    """
    D, G, H = cfg.hidden_size, cfg.num_kv_heads, cfg.head_dim
    n = cfg.num_heads // G
    norms = {"q_norm": leaf(dtype, H), "k_norm": leaf(dtype, H)} if cfg.qk_norm else {}

    def layer(ffn: dict[str, Any]) -> dict[str, Any]:
        return {
            "attn_norm": leaf(dtype, D),
            "wqkv": leaf(dtype, D, G, n + 2, H),
            **({"bqkv": leaf(dtype, G, n + 2, H)} if cfg.qkv_bias else {}),
            **norms,
            "wo": leaf(dtype, cfg.num_heads, H, D),
            **({"bo": leaf(dtype, D)} if cfg.o_bias else {}),
            "mlp_norm": leaf(dtype, D),
            **ffn,
        }

    head = {} if cfg.tie_embeddings else {"lm_head": leaf(dtype, cfg.vocab_size, D)}
    return {
        "embed": leaf(dtype, cfg.vocab_size, D),
        **head,
        "final_norm": leaf(dtype, D),
        "layers": [layer(ffn) for ffn in ffns],
    }


def init_params(key: PRNGKeyArray, cfg: DenseConfig, dtype: Any = jnp.bfloat16) -> Any:
    """Random weights of the right shapes: normal(0.02), unit norms."""
    return random_params(key, param_shapes(cfg, dtype))


def random_params(key: PRNGKeyArray, shapes: Any) -> Any:
    """Random weights for a tree of shapes: normal(0.02), unit norms and scales."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    made = [
        jnp.ones(s.shape, s.dtype)
        if is_norm(path)
        else (INIT_STD * jax.random.normal(jax.random.fold_in(key, i), s.shape)).astype(s.dtype)
        for i, (path, s) in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, made)


def is_norm(path: Any) -> bool:
    """Whether the leaf at a key path of a parameter tree is a norm's scale or another factor."""
    return path[-1].key.endswith(("norm", "scale"))


def embed(params: Any, cfg: DenseConfig, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Rows of the embedding; ids must lie in [0, V)."""
    del cfg
    return jnp.take(params["embed"], ids, axis=0, mode="clip")


def mlp(layer: Any, rows: Array | Fp8Rows, *, cfg: DenseConfig, dtype: Any, ops: LayerOps) -> Array:
    """The feed-forward half of a dense layer."""
    del cfg
    return swiglu(rows, layer["w_gate_up"], layer["w_down"], ops, dtype)


_MLP = FeedForward(mlp)


def trunk(
    params: Any,
    cfg: DenseConfig,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: Attend,
    hidden_layers: tuple[int, ...] = (),
    *,
    ffn: FeedForward = _MLP,
    ops: LayerOps = PLAIN,
    peers: Array | None = None,
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], ...]]:
    """Run the layers.

    Args:
        x: Input rows: the result of `embed`, or mixed by a strategy.
        positions: Absolute positions of the rows (the prompt starts at 0).
        attend: Attention of one layer on rotated queries and keys.
        hidden_layers: Which residual streams to return; 0 is the input, j is after layer j.
        ffn: The second half of a layer, on normed rows: a module-level function, so that layers
            share its trace, with the further arrays that it takes.
        ops: Back ends of the operations of a layer, of which only "xla" has gradients, and the
            devices that share the weights.
        peers: See `sharding.total`.

    Returns:
        The rows after the final norm, and the residual streams of `hidden_layers`, in that order.
    """
    rotary_dim = cfg.head_dim if cfg.rotary_dim is None else cfg.rotary_dim
    cos, sin = rope_tables(positions, rotary_dim, cfg.rope_theta, cfg.rope_scaling)
    layers = params["layers"]
    # A layer ends with the norm of the next layer's input, or with the final norm.
    after = [*(layer["attn_norm"] for layer in layers[1:]), params["final_norm"]]
    readers = [*(layer["wqkv"] for layer in layers[1:]), None]

    streams = {0: x}
    normed = _first_norm(x, layers[0]["attn_norm"], cfg, ops)
    for i, layer in enumerate(layers):
        qkv = _before(layer, normed, cos, sin, cfg=cfg, dtype=x.dtype, ops=ops)
        out = attend(i, *qkv, **_in_groups(layer, cfg, qkv[0], ops))
        is_quantized = isinstance(readers[i], Fp8Matrix)
        how = {"cfg": cfg, "ops": ops, "is_quantized": is_quantized}
        x, normed = _behind(layer, x, out, after[i], ffn, peers, **how)
        streams[i + 1] = x
    return normed, tuple(streams[j] for j in hidden_layers)


def _first_norm(x: Array, scale: Array, cfg: DenseConfig, ops: LayerOps) -> Array:
    if not ops.one_rounding:
        return rms_norm(x, scale, cfg.norm_eps)
    if cfg.o_bias:
        raise NotImplementedError("the output of attention has a bias, which XLA adds")
    added = x, jnp.zeros_like(x), scale, cfg.norm_eps
    _, normed = add_rms_norm(*added, implementation=ops.add_rms_norm)
    assert isinstance(normed, jax.Array)
    return normed


# The code before and after attention is traced once, and lowered once for each program, for all
# layers of the same form (docs/adr/0034).
@functools.partial(jax.jit, static_argnames=("cfg", "dtype", "ops"))
def _before(
    layer: Any,
    rows: Array | Fp8Rows,
    cos: Array,
    sin: Array,
    *,
    cfg: DenseConfig,
    dtype: Any,
    ops: LayerOps,
) -> tuple[Array, Array, Array]:
    """Rotated queries and keys, and values, from normed rows."""
    return rotate_qkv(
        qkv_matmul(
            rows,
            layer["wqkv"],
            dtype=dtype,
            one_rounding=ops.one_rounding,
            implementation=ops.qkv_matmul,
        ),
        layer.get("bqkv"),
        layer.get("q_norm"),
        layer.get("k_norm"),
        cos,
        sin,
        cfg.norm_eps,
        dtype=dtype,
        implementation=ops.rotate_qkv,
    )


def _in_groups(layer: Any, cfg: DenseConfig, q: Array, ops: LayerOps) -> dict[str, bool]:
    """Arguments of attention if the product after it takes 8 bits with a scale for each head."""
    wo = layer["wo"]
    if not ops.attends_in_groups or not isinstance(wo, Fp8Matrix) or cfg.o_bias:
        return {}
    if cfg.head_dim % fp8.LINE:  # was not measured
        return {}
    rows = *q.shape[:-2], cfg.num_heads * cfg.head_dim
    return {"is_quantized": True} if takes_groups(rows, wo, cfg.head_dim, q.dtype) else {}


@functools.partial(jax.jit, static_argnames=("cfg", "ops", "is_quantized"))
def _behind(
    layer: Any,
    x: Array,
    out: Array | Fp8Groups,
    scale: Array,
    ffn: FeedForward,
    peers: Array | None,
    *,
    cfg: DenseConfig,
    ops: LayerOps,
    is_quantized: bool,
) -> tuple[Array, Array | Fp8Rows]:
    """The residual stream after a layer, and its norm; `out` is the result of attention."""

    def add(x: Array, y: Any, scale: Array, is_quantized: bool) -> tuple[Array, Any]:
        if peers is not None and reduces(x):
            return reduced_rms_norm(x, y, scale, cfg.norm_eps, peers, is_quantized=is_quantized)
        return add_rms_norm(
            x,
            y if ops.axis is None or isinstance(y, tuple) else total(y, x, ops.axis),
            scale,
            cfg.norm_eps,
            is_quantized=is_quantized,  # if an 8-bit product reads it
            implementation=ops.add_rms_norm,
        )

    values, wo = out.values if isinstance(out, Fp8Groups) else out, layer["wo"]
    rows = values.reshape(*x.shape[:-1], -1)
    wo = wo if isinstance(wo, Fp8Matrix) else wo.reshape(-1, cfg.hidden_size)
    if isinstance(out, Fp8Groups):
        out = split_matmul(Fp8Groups(rows, out.scales), wo, dtype=x.dtype)
    elif cfg.o_bias:
        out = split_matmul(rows, wo, axis=ops.axis, implementation="xla")
        out += as_row(once(layer["bo"], ops.axis), out)
    else:
        how = {"axis": ops.axis, "one_rounding": ops.one_rounding}
        out = split_matmul(rows, wo, **how, implementation=ops.split_matmul)
    x, rows = add(x, out, layer["mlp_norm"], isinstance(layer.get("w_gate_up"), Fp8Matrix))
    out = ffn(layer, rows, cfg=cfg, dtype=x.dtype, ops=ops)
    return add(x, out, scale, is_quantized)


def head(params: Any, cfg: DenseConfig) -> Head:
    """The matrix that turns normed rows into logits."""
    name = "lm_head" if "lm_head" in params else "embed"  # a tied one may have a copy in 8 bits
    return Head(params[name], scale=cfg.logit_scale)


unembed = Unembed(head)  # (params, cfg, hidden [..., D]) -> float32 logits [..., V]
