"""Toy models of the contract's gate: two layers, 32 wide, 40 ids, float32, sharp enough to decide.

Four networks: the plain dense one (shifted or not), one with routed experts, one with two modes (a
gain on the input rows that differs by mode, so that a wrong mode shows), and a drafter that caches
keys and values of features it is given.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.kernels.layer.reference import apply_rope, matmul, rms_norm
from dllm_jax.loading.load import with_kv_cache
from dllm_jax.loading.model import Model
from dllm_jax.models import dense
from dllm_jax.models.architecture import DENSE, Architecture, arch_of
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.family import FamilyDefaults
from dllm_jax.models.head import Head, Unembed
from dllm_jax.models.layers import rope_tables
from dllm_jax.models.moe import MoEConfig
from dllm_jax.models.quantization import quantized, with_quantized_head

VOCAB, MASK, PADDED = 40, 38, 39  # id 39 is a row of the vocabulary that belongs to no token
DEFAULTS = FamilyDefaults(family="toy", strategy="multi_bd", block_size=4, vocab_limit=PADDED)

CONFIG = DenseConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    mask_token_id=MASK,
    max_position=512,
)
DRAFT_CONFIG = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=40)
TAPS = (1, 2)


def weights(cfg: DenseConfig, seed: int, dtype=jnp.float32):
    """Random weights whose logits have a standard deviation near 3.

    Gate and up are drawn one after the other: what these models say, and which cases that meets,
    does not depend on how weights lie in memory.
    """
    draw = np.random.default_rng(seed).normal

    def leaf(path, shape):
        if dense.is_norm(path):
            return jnp.ones(shape.shape, shape.dtype)
        in_turns = path[-1].key in ("w_gate_up", "shared_gate_up")
        size = [shape.shape[axis] for axis in (0, 2, 1, 3)] if in_turns else shape.shape
        values = 0.16 * draw(size=size)
        return jnp.asarray(values.swapaxes(1, 2) if in_turns else values, shape.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, arch_of(cfg).param_shapes(cfg, dtype))
    return params | {"lm_head": params["lm_head"] * 3}


def plain(seed: int = 1, dtype=jnp.float32, **layout) -> Model:
    """A dense model; `layout` override its configuration."""
    cfg = dataclasses.replace(CONFIG, **layout)
    return Model(params=weights(cfg, seed, dtype), config=cfg, arch=DENSE, defaults=DEFAULTS)


def experts(seed: int = 6, dtype=jnp.float32) -> Model:
    """A dense layer, then experts that the rows of an aligned block of 4 choose together."""
    cfg = MoEConfig(
        **(dataclasses.asdict(CONFIG) | {"num_layers": 3, "rotary_dim": 4}),
        moe_layers=(False, True, True),
        num_experts=12,
        experts_per_token=3,
        expert_size=16,
        shared_size=16,
        score="sigmoid",
        expert_bias=True,
        routed_scale=2.5,
        expert_capacity=4,
        routing_block=4,
    )
    params = weights(cfg, seed, dtype)
    return Model(params=params, config=cfg, arch=arch_of(cfg), defaults=DEFAULTS)


def of_layers(model: Model, count: int) -> Model:
    """A model of the first few layers of another."""
    cfg, layers = model.config, model.params["layers"][:count]
    more = {"moe_layers": cfg.moe_layers[:count]} if isinstance(cfg, MoEConfig) else {}
    cfg = dataclasses.replace(cfg, num_layers=count, **more)
    return model.replace(config=cfg, params=model.params | {"layers": layers})


def in_8_bits(model: Model) -> Model:
    """A model whose matrices, head and cache are in 8 bits."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: quantized(path, leaf, model.split), model.params
    )
    params = with_quantized_head(params, model.split)
    return with_kv_cache(model.replace(params=params), "fp8")


def causal(dtype=jnp.float32) -> Model:
    """An autoregressive model: shifted, without a mask token."""
    return plain(2, dtype, shift=True, mask_token_id=-1)


# --- two modes ------------------------------------------------------------------------------------


def _two_mode_trunk(params, cfg, x, positions, attend, hidden_layers=(), *, mode):
    """`mode` is [B], or [B T] where rows of several modes stand in one sequence."""
    gain = jnp.take(params["mode_gain"], mode, axis=0)
    x = x * gain.reshape(x.shape[0], -1, x.shape[-1])
    return dense.trunk(params, cfg, x, positions, attend, hidden_layers)


# --- conditioned ----------------------------------------------------------------------------------


def _condition(params, cfg, rows, expected):
    """The norm of what is shown and a function of what was expected, which is 0 at 0."""
    own = jnp.tanh(matmul(expected, params["condition"]))
    return rms_norm(rows + own, jnp.ones_like(rows[0, 0]), cfg.norm_eps)


def _scaled_embed(params, cfg, ids):
    return dense.embed(params, cfg, ids) * 1.5


CONDITIONED = Architecture(
    param_shapes=dense.param_shapes,
    embed=_scaled_embed,
    trunk=_two_mode_trunk,
    unembed=Unembed(lambda params, _: Head(params["embed"], 3.0, 30.0, embed_scale=1.5)),
    condition=_condition,
    takes_mode=True,
)


def conditioned(dtype=jnp.float32) -> Model:
    """A model without a mask, of an encoder (mode 0) and a decoder (mode 1) that is conditioned."""
    cfg = dataclasses.replace(CONFIG, mask_token_id=-1)
    draw = np.random.default_rng(11).normal
    gain = 1 + 0.5 * draw(size=(2, cfg.hidden_size))
    own = {"mode_gain": gain, "condition": 0.4 * draw(size=(cfg.hidden_size, cfg.hidden_size))}
    params = weights(cfg, 8, dtype) | {k: jnp.asarray(v, dtype) for k, v in own.items()}
    return Model(params=params, config=cfg, arch=CONDITIONED, defaults=DEFAULTS)


# --- a drafter ------------------------------------------------------------------------------------


def _context_kv(params, cfg, vectors, positions):
    """Keys and values of tapped features: one projection and norm, then each layer's k and v."""
    context = rms_norm(matmul(vectors, params["fc"]), params["fc_norm"], cfg.norm_eps)
    cos, sin = rope_tables(positions, cfg.head_dim, cfg.rope_theta)
    n = cfg.num_heads // cfg.num_kv_heads

    def one(layer):
        fused = matmul(context, layer["wqkv"])
        k = rms_norm(fused[..., n, :], layer["k_norm"], cfg.norm_eps)
        return apply_rope(k, cos, sin), fused[..., n + 1, :]

    return tuple(one(layer) for layer in params["layers"])


DRAFTER = Architecture(
    param_shapes=dense.param_shapes,
    embed=dense.embed,
    trunk=dense.trunk,
    unembed=dense.unembed,
    context_kv=_context_kv,
)


def drafter(target: Model) -> Model:
    """A drafter with the target's embedding and head and layers of its own."""
    dtype = target.params["embed"].dtype
    shared = {name: target.params[name] for name in ("embed", "lm_head")}
    width = len(TAPS) * CONFIG.hidden_size
    fc = np.random.default_rng(7).normal(size=(width, CONFIG.hidden_size)) * width**-0.5
    own = {"fc": jnp.asarray(fc, dtype), "fc_norm": jnp.ones((CONFIG.hidden_size,), dtype)}
    params = weights(DRAFT_CONFIG, 5, dtype) | shared | own
    return Model(params=params, config=DRAFT_CONFIG, arch=DRAFTER, defaults=DEFAULTS)
