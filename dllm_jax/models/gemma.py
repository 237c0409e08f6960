"""DiffusionGemma: Gemma 4's text stack, which encodes a text and denoises a canvas after it.

Encoder (mode 0) and decoder (mode 1) share their weights except one factor a layer. Sliding and
global layers differ in heads, rotation and view; every layer has a dense half and experts.
`condition` makes the decoder's input rows from a canvas and from the expected embeddings of its
cells.

Source: google/diffusiongemma-26B-A4B-it; DiffusionGemmaForBlockDiffusion of transformers 5.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.kernels.expert_ffn import expert_ffn, routed_and_dense, takes_dense
from dllm_jax.kernels.layer import (
    Fp8Matrix,
    Fp8Rows,
    Fp8Sums,
    LayerOps,
    RoutedRows,
    fp8,
    gate,
    norm_rotate,
    quantize_rows,
    reference,
    sandwich_norm,
    takes_routed,
)
from dllm_jax.kernels.layer.reference import late_rms_norm as rms_norm
from dllm_jax.kernels.router import choose_experts
from dllm_jax.models import dense
from dllm_jax.models.dense import PLAIN, Attend, leaf
from dllm_jax.models.head import Head, Unembed
from dllm_jax.models.layers import gate_up_shape, rope_tables
from dllm_jax.models.moe import MoEConfig
from dllm_jax.models.sharding import first_of, total
from dllm_jax.models.view import View

ENCODER, DECODER = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(MoEConfig):
    """Facts of a DiffusionGemma. The plain names are those of the sliding layers.

    Attributes:
        canvas_length: Tokens that are denoised together.
        sliding: For each layer, whether it slides; the others are global.
        window: Positions that a row of a sliding layer sees, including its own; rows of a canvas
            count from its first cell.
        rotary_dim, global_rotary_dim: Components of a head that are rotated: the first ones of both
            halves; None: all. The frequencies are those of a whole head.
        logit_cap: Soft cap on the magnitude of logits; None leaves them.
    """

    canvas_length: int = 256
    sliding: tuple[bool, ...]
    window: int
    global_num_kv_heads: int
    global_head_dim: int
    global_rope_theta: float = 1e6
    global_rotary_dim: int | None = None
    logit_cap: float | None = None

    def __post_init__(self):
        super().__post_init__()
        self._check_each_layer("sliding")
        self._check_heads("global_")
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1: a row sees itself")

    def heads(self, layer: int) -> tuple[int, int]:
        """Number and size of the KV heads of a layer."""
        if self.sliding[layer]:
            return self.num_kv_heads, self.head_dim
        return self.global_num_kv_heads, self.global_head_dim

    def reach(self, layer: int) -> int | None:
        """Most cached keys that a row of a layer reads; None: all."""
        return self.window - 1 if self.sliding[layer] else None


def param_shapes(cfg: GemmaConfig, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Shapes of every weight.

    A global layer has `wqk` instead of `wqkv`: its values come from the projection of its keys.
    """
    D, E, F = cfg.hidden_size, cfg.num_experts, cfg.expert_size

    def layer(i: int) -> dict[str, Any]:
        G, H = cfg.heads(i)
        n = cfg.num_heads // G
        own = {"wqkv": (D, G, n + 2, H)} if cfg.sliding[i] else {"wqk": (D, G, n + 1, H)}
        shapes = {
            "attn_norm": (D,),
            **own,
            "q_norm": (H,),
            "k_norm": (H,),
            "wo": (cfg.num_heads, H, D),
            "post_attn_norm": (D,),
            "mlp_norm": (D,),
            "w_gate_up": gate_up_shape(D, cfg.ffn_size),
            "w_down": (cfg.ffn_size, D),
            "post_mlp_norm": (D,),
            "router_scale": (D,),
            "router": (D, E),
            "expert_scale": (E,),
            "pre_experts_norm": (D,),
            "experts_gate_up": (E, D, 2, F),
            "experts_down": (E, F, D),
            "post_experts_norm": (D,),
            "post_ffn_norm": (D,),
            "mode_scale": (2,),  # encoder, decoder
        }
        return {name: leaf(dtype, *shape) for name, shape in shapes.items()}

    return {
        "embed": leaf(dtype, cfg.vocab_size, D),
        "final_norm": leaf(dtype, D),
        "condition_norm": leaf(dtype, D),
        "condition_gate_up": leaf(dtype, *gate_up_shape(D, cfg.ffn_size)),
        "condition_down": leaf(dtype, cfg.ffn_size, D),
        "layers": [layer(i) for i in range(cfg.num_layers)],
    }


def embed(params: Any, cfg: GemmaConfig, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Scaled rows of the embedding: the encoder's input."""
    rows = dense.embed(params, cfg, ids)
    return rows * jnp.asarray(_embed_scale(cfg, rows.dtype), rows.dtype)


def condition(
    params: Any, cfg: GemmaConfig, rows: Float[Array, "... D"], expected: Float[Array, "... D"]
) -> Float[Array, "... D"]:
    """The decoder's input: `embed` rows mixed with the previous step's expected embeddings.

    Args:
        expected: In the units of `embed`; zeros before the first step. The sum is normed in any
            case, so that rows of the decoder always differ from rows of `embed`.
    """
    signal = rms_norm(expected.astype(rows.dtype), params["condition_norm"], cfg.norm_eps)
    matrices = params["condition_gate_up"], params["condition_down"]
    signal = fp8.rounded(_geglu(signal, *matrices, rows.dtype), rows.dtype)
    return rms_norm(rows + signal, None, cfg.norm_eps)


def trunk(
    params: Any,
    cfg: GemmaConfig,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: Attend,
    hidden_layers: tuple[int, ...] = (),
    *,
    mode: Int[Array, " B"] | Int[Array, "B T"] | None = None,
    live: Bool[Array, "B T"] | None = None,
    ops: LayerOps = PLAIN,
    peers: Array | None = None,
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], ...]]:
    """Run the layers; see `dense.trunk`.

    Args:
        x: Rows of `embed` in the encoder, of `condition` in the decoder.
        mode: `ENCODER` or `DECODER`, a row or a text; None: the encoder.
        live: Rows that belong to a text; others go to no expert. None: all rows.
        ops: Only `axis`, `norm_rotate`, `sandwich_norm` and `choose_experts` are used.
    """
    mode = jnp.zeros(len(x), jnp.int32) if mode is None else mode
    is_decoder = jnp.broadcast_to((mode == DECODER).reshape(len(x), -1), x.shape[:2])
    tables = {
        True: _rotary(positions, cfg.head_dim, cfg.rotary_dim, cfg.rope_theta),
        False: _rotary(
            positions, cfg.global_head_dim, cfg.global_rotary_dim, cfg.global_rope_theta
        ),
    }

    layers, streams = params["layers"], {0: x}
    firsts = [*(layer["attn_norm"] for layer in layers), params["final_norm"]]
    readers = [*(layer.get("wqkv", layer.get("wqk")) for layer in layers[1:]), None]
    rows = rms_norm(x, firsts[0], cfg.norm_eps)
    for i, layer in enumerate(layers):
        how: Any = {"cfg": cfg, "ops": ops}
        out = attend(i, *_before(layer, rows, *tables[cfg.sliding[i]], dtype=x.dtype, **how))
        how["is_quantized"] = isinstance(readers[i], Fp8Matrix)
        x, rows = _behind(layer, x, out, firsts[i + 1], (is_decoder, live, peers), **how)
        streams[i + 1] = x
    return rows, tuple(streams[j] for j in hidden_layers)


# As in `dense.py`, layers of the same form share the traces of these.
@functools.partial(jax.jit, static_argnames=("dtype", "cfg", "ops"))
def _before(
    layer: Any,
    rows: Array | Fp8Rows,
    cos: Array,
    sin: Array,
    *,
    dtype: Any,
    cfg: GemmaConfig,
    ops: LayerOps,
) -> tuple[Array, Array, Array]:
    """Rotated queries and keys, and values, from normed rows."""
    has_values = "wqkv" in layer  # otherwise values share the projection of the keys
    return norm_rotate(
        _matmul(rows, layer["wqkv" if has_values else "wqk"], dtype),
        layer["q_norm"],
        layer["k_norm"],
        cos,
        sin,
        cfg.norm_eps,
        shares_values=not has_values,
        dtype=dtype,
        implementation=ops.norm_rotate,
    )


@functools.partial(jax.jit, static_argnames=("is_quantized", "cfg", "ops"))
def _behind(
    layer: Any,
    x: Array,
    out: Array,
    scale: Array,
    given: tuple[Array, Array | None, Array | None],
    *,
    is_quantized: bool,
    cfg: GemmaConfig,
    ops: LayerOps,
) -> tuple[Array, Array | Fp8Rows]:
    """The residual stream after a layer, and its norm; `out` is the result of attention.

    Args:
        given: Rows of the decoder, `live` and `peers` of `trunk`.
        is_quantized: Round the norm to 8 bits, for an 8-bit product.
    """
    is_decoder, live, peers = given

    def sandwich(x: Array, branches: Any, following: tuple[Array, ...], **how: Any) -> Any:
        back_end = ops.sandwich_norm
        return sandwich_norm(x, branches, following, cfg.norm_eps, **how, implementation=back_end)

    wo, rows = layer["wo"], out.reshape(*x.shape[:2], -1)
    if not isinstance(wo, Fp8Matrix):
        wo = wo.reshape(-1, cfg.hidden_size)
    elif ops.axis is None:
        rows = quantize_rows(rows)
    added = _matmul(rows, wo, x.dtype, ops.axis)
    if ops.axis is not None:
        added = total(fp8.rounded(added, x.dtype), x, ops.axis, peers)
    following = layer["mlp_norm"], layer["pre_experts_norm"]
    is_small = isinstance(layer["w_gate_up"], Fp8Matrix)
    branches = ((added, layer["post_attn_norm"]),)
    x, (rows, routed) = sandwich(x, branches, following, is_quantized=is_small)
    plain, routed = _both_halves(layer, cfg, x, rows, routed, live, ops)
    if ops.axis is not None:  # one sum over the devices for both, before their norms
        assert isinstance(routed, jax.Array)
        both = jnp.stack([fp8.rounded(plain, x.dtype), routed])
        plain, routed = total(both, both, ops.axis, peers)
    x, (rows,) = sandwich(
        x,
        ((plain, layer["post_mlp_norm"]), (routed, layer["post_experts_norm"])),
        (scale,),
        outer=layer["post_ffn_norm"],
        factor=(layer["mode_scale"], is_decoder),
        is_quantized=is_quantized,
    )
    return x, rows


def head(params: Any, cfg: GemmaConfig) -> Head:
    """The matrix that turns normed rows into logits."""
    table = params["embed"]
    weights = params.get("lm_head", table)  # an 8-bit copy, if requested
    scale = _embed_scale(cfg, table.dtype)
    return Head(weights, cap=cfg.logit_cap, embed_scale=scale, table=table)


unembed = Unembed(head)


def layer_view(cfg: GemmaConfig, layer: int) -> View:
    """The view of a layer: a sliding one has a window; scores are not scaled."""
    return View(window=cfg.window if cfg.sliding[layer] else None, by_block=True, scale=1.0)


def _embed_scale(cfg: GemmaConfig, dtype: Any) -> float:
    """The root of the width, rounded to the type of the weights: 53.0 for 53.07 in bfloat16."""
    return float(np.asarray(cfg.hidden_size**0.5).astype(dtype))


def _rotary(
    positions: Int[Array, "B T"], size: int, rotated: int | None, theta: float
) -> tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]:
    """Cosine and sine for heads of `size`, of which the first `rotated // 2` pairs are rotated."""
    cos, sin = rope_tables(positions, size, theta)
    if rotated is None:
        return cos, sin
    turns = (np.arange(size // 2) < rotated // 2)[None, None]
    return jnp.where(turns, cos, 1.0), jnp.where(turns, sin, 0.0)


def _both_halves(
    layer: Any,
    cfg: GemmaConfig,
    x: Float[Array, "B T D"],
    rows: Float[Array, "B T D"] | Fp8Rows,
    routed: Float[Array, "B T D"],
    live: Bool[Array, "B T"] | None,
    ops: LayerOps,
) -> tuple[Any, Float[Array, "B T D"] | RoutedRows]:
    """The dense half and the experts of this device, on their normed rows.

    The router norms the residual stream `x` separately, in float32.
    """
    D = cfg.hidden_size
    live = jnp.ones(x.shape[:2], bool) if live is None else live
    ids, weights = choose_experts(
        x.reshape(-1, D),
        layer["router_scale"],
        layer["router"],
        layer["expert_scale"],
        live.reshape(-1),
        k=cfg.experts_per_token,
        eps=cfg.norm_eps,
        implementation=ops.choose_experts,
    )
    if ops.axis is not None:  # ids of other devices' experts become invalid
        none = ids >= cfg.num_experts
        ids = jnp.where(none, -1, ids - first_of(len(layer["experts_down"]), ops.axis))
    matrices = layer["experts_gate_up"], layer["experts_down"]
    flat, is_summed = routed.reshape(-1, D), not takes_routed(x, ops, "sandwich_norm")
    w_gate_up, w_down = layer["w_gate_up"], layer["w_down"]
    dense: Any = (rows, w_gate_up, w_down)
    if not is_summed and takes_dense(flat, ids, matrices[1], dense):
        both = routed_and_dense(flat, ids, weights, *matrices, dense, activation="gelu")
        return both[1].like(x), both[0].like(x)
    plain = _geglu(rows, w_gate_up, w_down, x.dtype, ops.axis)
    out = expert_ffn(flat, ids, weights, *matrices, activation="gelu", is_summed=is_summed)
    return plain, out.like(x) if isinstance(out, RoutedRows) else out.reshape(x.shape)


def _geglu(
    x: Float[Array, "... D"] | Fp8Rows,
    w_gate_up: Array | Fp8Matrix,
    w_down: Array | Fp8Matrix,
    dtype: Any,
    axis: str | None = None,
) -> Float[Array, "... D"] | Fp8Sums:
    """`(gelu(x Wg) * (x Wu)) Wd` (Shazeer 2020, eq. 6), gelu by tanh; `axis` as in `_matmul`."""
    # Rows that are split over devices have one scale, found across the devices.
    how: Any = {"dtype": dtype}
    if isinstance(w_down, Fp8Matrix) and axis is None:
        how |= {"is_quantized": True, "width": w_down.values.shape[-1]}
    inner = gate(_matmul(x, w_gate_up, dtype), "gelu", **how)
    return _matmul(inner, w_down, dtype, axis)


def _matmul(
    x: Float[Array, "... K"] | Fp8Rows, w: Array | Fp8Matrix, dtype: Any, axis: str | None = None
) -> Array | Fp8Sums:
    """`x @ w` over the first axis of `w`; the reader applies the scales of an 8-bit product.

    Args:
        dtype: Type of the rows, and of 8-bit sums: float32 sums of 4,096 rows take longer to write
            and read than the next launch computes.
        axis: Mesh axis whose devices each hold a part of K and add sums in float32.
    """
    if isinstance(w, Fp8Matrix):
        return fp8.product(x, w, axis, dtype if axis is None else jnp.float32)
    assert isinstance(x, jax.Array)
    return reference.matmul(x, w)
