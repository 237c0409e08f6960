"""The choice of experts: the interface and its back ends.

Letters: T rows, D model width, E experts, k experts of a row.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float, Int

from .. import dispatch
from ..dispatch import BackEnd
from . import mosaic, reference
from .reference import Rule

Implementation = Literal["xla", "mosaic"]


def route(
    x: Float[Array, "T D"],
    router: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    live: Bool[Array, " T"] | None,
    *,
    rule: Rule,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The experts of each normed row, the best first, and their weights; float32 throughout.

    Among equal scores the lowest expert wins.

    Args:
        bias: Bias of each expert; it affects the choice but not the weights.
        live: Rows that count; others get the invalid expert E. None: all rows.
        implementation: "xla" (any device), "mosaic" (Hopper, bfloat16, jax 0.11, a multiple of 8
            rows, 64, 128 or 256 experts, groups that divide 32), or None for the faster one.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.

    Source: Qwen3-MoE (softmax); DeepSeek-AI 2024 (DeepSeek-V3), §2.1.2 (sigmoid, bias, groups).
    """
    back_ends: dict[Implementation, BackEnd] = {
        "mosaic": BackEnd(mosaic.route, mosaic.unsupported_route(x, router, rule)),
        "xla": BackEnd(reference.route),
    }
    return dispatch.run(implementation, back_ends, x, router, bias, live, rule=rule)


def choose_experts(
    x: Float[Array, "T D"],
    scale: Float[Array, " D"],
    router: Float[Array, "D E"],
    expert_scale: Float[Array, " E"],
    live: Bool[Array, " T"],
    *,
    k: int,
    eps: float,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The `k` likeliest experts of each row, by `softmax(norm(x) @ router)`, and their weights.

    Everything is computed in float32, whatever the input types: in 16 bits close scores would tie
    and change the choice. Among equal scores the lowest expert wins.

    Args:
        scale: Scale of the norm of the rows, which is also divided by the root of D.
        expert_scale: Factor of the weights of each expert.
        live: Rows that count; others get the invalid expert E.
        implementation: "xla" (any device), "mosaic" (Hopper, bfloat16, jax 0.11, a multiple of 64
            rows and 64 or 128 experts), or None for the faster one.

    Returns:
        Experts, the likeliest first, and weights: the probabilities of the chosen experts, divided
        by their sum, times `expert_scale`.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.

    Source: Gemma 4; Shazeer et al. 2017 (arXiv 1701.06538), §2.1, without noise.
    """
    back_ends: dict[Implementation, BackEnd] = {
        # us on an H200, DiffusionGemma, XLA / Mosaic, including 10 us of the timing loop: 256 rows
        # 26 / 24, 4,096 rows 120 / 65 (benchmarks/results/canvas_parts_h200.json).
        "mosaic": BackEnd(mosaic.choose_experts, mosaic.unsupported(x, router)),
        "xla": BackEnd(reference.choose_experts),
    }
    arguments = (x, scale, router, expert_scale, live)
    return dispatch.run(implementation, back_ends, *arguments, k=k, eps=eps)
