"""The mixture-of-experts decoder (SDAR-MoE, Qwen3-MoE, LLaDA2): config, shapes, arithmetic.

The decoder of `dense` with another second half of its layers: routed experts and, in some models, a
shared one for every row. `route` chooses the experts of a row, and `dllm_jax.kernels.expert_ffn`
computes their products. Routing is in float32, the product with the router too: in 16 bits close
scores would tie and change the choice. Among equal scores the lowest expert wins.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.kernels import router as kernels
from dllm_jax.kernels.expert_ffn import expert_ffn, routed_and_dense, takes_dense
from dllm_jax.kernels.layer import LayerOps, RoutedRows, takes_routed
from dllm_jax.kernels.router.reference import chosen, largest, scored
from dllm_jax.models import dense
from dllm_jax.models.dense import PLAIN, Attend, DenseConfig, decoder_shapes, leaf, mlp_shapes
from dllm_jax.models.layers import gate_up_shape, swiglu
from dllm_jax.models.sharding import first_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(DenseConfig):
    """Facts of a decoder whose layers route each row to a few of many small networks.

    Attributes:
        ffn_size: Width of the layers without experts.
        expert_size: Width of one expert.
        shared_size: Width of the shared expert of all rows, 0 for none.
        moe_layers: Which layers have experts, one entry a layer.
        score: Function from logits to scores: a softmax over all experts, or a sigmoid of each.
        norm_topk: Weights of the chosen experts are divided by their sum.
        routed_scale: Factor of the weights.
        expert_bias: Experts have a bias that affects the choice but not the weight.
        num_groups: Equal groups of experts, of which a row chooses `groups_per_token`; 1: no
            groups.
        expert_capacity: Most experts that the rows of one routing block use together, 0 for no
            limit; it replaces groups.
        routing_block: Tokens of a routing block, on the absolute grid.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    moe_layers: tuple[bool, ...]
    shared_size: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk: bool = True
    routed_scale: float = 1.0
    expert_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    expert_capacity: int = 0
    routing_block: int = 1

    def __post_init__(self):
        super().__post_init__()
        E, k = self.num_experts, self.experts_per_token
        self._check_each_layer("moe_layers")
        if E % self.num_groups:
            raise ValueError(f"n_group={self.num_groups} must divide num_experts={E}")
        choice = E // self.num_groups * self.groups_per_token
        if self.expert_capacity:
            choice = min(self.expert_capacity, E)
        if not 0 < k <= choice <= E:
            raise ValueError(
                f"num_experts_per_tok={k} must be at least 1 and at most the {choice} experts that "
                f"a row may choose from, of {E}; check num_experts, n_group, topk_group and "
                "expert_capacity in the checkpoint's config.json"
            )


def param_shapes(cfg: MoEConfig, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Shapes of every weight; the experts' biases are float32 whatever the type of the rest.

    In 16 bits they would tie, and a tie changes which experts are chosen.
    """
    D, E = cfg.hidden_size, cfg.num_experts
    mlp = mlp_shapes(cfg, dtype)
    shared = {
        "shared_gate_up": leaf(dtype, *gate_up_shape(D, cfg.shared_size)),
        "shared_down": leaf(dtype, cfg.shared_size, D),
    }
    experts = {
        "router": leaf(dtype, D, E),
        **({"router_bias": leaf(jnp.float32, E)} if cfg.expert_bias else {}),
        "experts_gate_up": leaf(dtype, E, D, 2, cfg.expert_size),
        "experts_down": leaf(dtype, E, cfg.expert_size, D),
        **(shared if cfg.shared_size else {}),
    }
    return decoder_shapes(cfg, dtype, [experts if moe else mlp for moe in cfg.moe_layers])


def trunk(
    params: Any,
    cfg: MoEConfig,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: Attend,
    hidden_layers: tuple[int, ...] = (),
    *,
    live: Bool[Array, "B T"] | None = None,
    ops: LayerOps = PLAIN,
    peers: Array | None = None,
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], ...]]:
    """Run the layers; see `dense.trunk`.

    Args:
        live: Rows that belong to a text; others go to no expert and do not affect the experts of a
            routing block. None: all rows.
    """
    ffn = dense.FeedForward(_ffn, positions=positions, live=live)
    how = {"ffn": ffn, "ops": ops, "peers": peers}
    return dense.trunk(params, cfg, x, positions, attend, hidden_layers, **how)


def _ffn(
    layer: Any,
    rows: Array,
    *,
    positions: Int[Array, "B T"],
    live: Bool[Array, "B T"] | None,
    cfg: MoEConfig,
    dtype: Any,
    ops: LayerOps,
) -> Array | tuple[Array | RoutedRows, ...]:
    """Rows, or several addends that the following norm adds up."""
    if "router" not in layer:
        return dense.mlp(layer, rows, cfg=cfg, dtype=dtype, ops=ops)
    ids, weights = route(
        cfg, rows, layer["router"], layer.get("router_bias"), positions, live, ops.choose_experts
    )
    if ops.axis is not None:  # ids of other devices' experts become invalid
        none = ids >= cfg.num_experts
        ids = jnp.where(none, -1, ids - first_of(len(layer["experts_down"]), ops.axis))
    flat, is_summed = rows.reshape(-1, cfg.hidden_size), not takes_routed(rows, ops, "add_rms_norm")
    routes = ids.reshape(len(flat), -1), weights.reshape(len(flat), -1)
    given = flat, *routes, layer["experts_gate_up"], layer["experts_down"]
    # The launches of experts divide the sums of a shared half otherwise than products of its own.
    if cfg.shared_size and not is_summed and not ops.one_rounding:
        shared = None, layer["shared_gate_up"], layer["shared_down"]
        if takes_dense(flat, routes[0], given[-1], shared):
            return tuple(one.like(rows) for one in routed_and_dense(*given, shared))
    by = "mosaic" if ops.one_rounding else None
    out = expert_ffn(*given, is_summed=is_summed, implementation=by)
    if isinstance(out, RoutedRows):
        out = out.like(rows)
        if not cfg.shared_size:
            return (out,)
        return out, swiglu(rows, layer["shared_gate_up"], layer["shared_down"], ops, dtype)
    out = out.reshape(rows.shape)
    if cfg.shared_size:
        plain = dataclasses.replace(PLAIN, axis=ops.axis)
        out = out + swiglu(rows, layer["shared_gate_up"], layer["shared_down"], plain, dtype)
    return out


def route(
    cfg: MoEConfig,
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    positions: Int[Array, "B T"],
    live: Bool[Array, "B T"] | None = None,
    implementation: Literal["xla", "mosaic"] | None = None,
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """The experts of each row and their weights.

    Args:
        positions: Absolute positions; routing blocks are aligned to their grid.
        live: Rows that count; others get the invalid expert E. None: all rows.
        implementation: See `router.route`; routing blocks always use XLA.

    Source: LLaDA2.2 (routing blocks).
    """
    rule = kernels.Rule(
        k=cfg.experts_per_token,
        score=cfg.score,
        is_normed=cfg.norm_topk and (cfg.score == "softmax" or cfg.experts_per_token > 1),
        factor=cfg.routed_scale,
        groups=1 if cfg.expert_capacity else cfg.num_groups,
        kept_groups=cfg.groups_per_token,
    )
    if not cfg.expert_capacity:
        flat, live = x.reshape(-1, x.shape[-1]), None if live is None else live.reshape(-1)
        # XLA would take other numbers of rows, and add up otherwise.
        spare = -len(flat) % 8 if implementation == "mosaic" else 0
        if spare:
            flat = jnp.pad(flat, ((0, spare), (0, 0)))
            live = None if live is None else jnp.pad(live, (0, spare))
        found = kernels.route(flat, router, bias, live, rule=rule, implementation=implementation)
        ids, weights = (each[: len(flat) - spare] for each in found)
        return ids.reshape(*x.shape[:-1], -1), weights.reshape(*x.shape[:-1], -1)
    scores, choice = scored(x, router, bias, rule)
    live = jnp.ones(positions.shape, bool) if live is None else live
    choice = _within_block(choice, positions, live, cfg.routing_block, cfg.expert_capacity)
    return chosen(scores, choice, live, rule)


def _within_block(
    choice: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    block: int,
    capacity: int,
) -> Float[Array, "B T E"]:
    """`choice` with -inf outside the experts with the highest scores in the routing block."""
    number = positions // block
    number = number - number[:, :1]  # rows are consecutive, which bounds the number
    most = choice.shape[1] // block + 2

    def of_text(choice: Array, number: Array, live: Array) -> Array:
        said = jnp.where(live[:, None], choice, -jnp.inf)
        best = jax.ops.segment_max(said, number, num_segments=most)
        return largest(best, capacity)[number]

    return jnp.where(jax.vmap(of_text)(choice, number, live), choice, -jnp.inf)
