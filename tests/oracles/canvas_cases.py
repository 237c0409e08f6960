"""DiffusionGemma's golden cases: tiny checkpoints and all randomness, drawn anew by NumPy.

`golden/diffusion_gemma.json` holds what transformers answered to these cases, with this randomness
put in the place of its own (`golden/make_diffusion_gemma_golden.py`).
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden" / "diffusion_gemma.json"
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)
_DAMPED = ("post_attention_layernorm.", "post_feedforward_layernorm.", "conditioning.down_proj")
SPECIAL = {"image_token_id": -1, "boi_token_id": -2, "eoi_token_id": -3}


class Draws(NamedTuple):
    """Ids of fresh and of renewed canvases, and what tokens are drawn with, by canvas, step, row.

    One of `gumbel` [C N R L V] and `uniform` [C N R L] is None; greedy cases use neither.
    """

    init: np.ndarray
    renoise: np.ndarray
    gumbel: np.ndarray | None
    uniform: np.ndarray | None


@functools.cache
def cases() -> dict[str, Any]:
    """The golden cases by name."""
    return {case["name"]: case for case in json.loads(GOLDEN.read_text())}


def config_json(case: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a case's checkpoint, as the release spells it."""
    vocab = case["text"]["vocab_size"]
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "canvas_length": case["canvas"],
        "text_config": {"model_type": "diffusion_gemma_text", **case["text"]},
        **{name: vocab + offset for name, offset in SPECIAL.items()},
    }


def weights(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a case's checkpoint by name, none of them neutral.

    A small gain damps every branch; without it a random network magnifies rounding threefold a
    step.
    """
    rng, tensors = np.random.default_rng(case["seed"]), {}
    for name, shape in sorted(_shapes(case["text"]).items()):
        if len(shape) == 1:
            value = rng.uniform(0.6, 1.4, shape)
        else:
            value = rng.normal(0, 0.9 if "embed_tokens" in name else shape[-1] ** -0.5, shape)
        gain = case["gain"] if any(part in name for part in _DAMPED) else 1.0
        tensors[name] = (value * gain).astype(np.float32)
    return tensors


def _shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    D, F, E, M = (
        c[k] for k in ("hidden_size", "intermediate_size", "num_experts", "moe_intermediate_size")
    )
    top, own = "model.decoder.", "model.decoder.self_conditioning."
    shapes: dict[str, tuple[int, ...]] = {
        f"{top}embed_tokens.weight": (c["vocab_size"], D),
        f"{top}norm.weight": (D,),
        f"{own}pre_norm.weight": (D,),
        f"{own}gate_proj.weight": (F, D),
        f"{own}up_proj.weight": (F, D),
        f"{own}down_proj.weight": (D, F),
    }
    for i, kind in enumerate(c["layer_types"]):
        slides, N = kind == "sliding_attention", c["num_attention_heads"]
        H = c["head_dim"] if slides else c["global_head_dim"]
        G = c["num_key_value_heads"] if slides else c["num_global_key_value_heads"]
        layer = {
            "self_attn.q_proj.weight": (N * H, D),
            "self_attn.k_proj.weight": (G * H, D),
            "self_attn.o_proj.weight": (D, N * H),
            "self_attn.q_norm.weight": (H,),
            "self_attn.k_norm.weight": (H,),
            "mlp.gate_proj.weight": (F, D),
            "mlp.up_proj.weight": (F, D),
            "mlp.down_proj.weight": (D, F),
            "router.proj.weight": (E, D),
            "router.scale": (D,),
            "router.per_expert_scale": (E,),
            "experts.gate_up_proj": (E, 2 * M, D),
            "experts.down_proj": (E, D, M),
            "layer_scalar": (1,),
            **{f"{norm}.weight": (D,) for norm in _NORMS},
        }
        if slides:
            layer["self_attn.v_proj.weight"] = (G * H, D)
        shapes |= {f"{top}layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes[f"model.encoder.language_model.layers.{i}.layer_scalar"] = (1,)
    return shapes


def draws(case: dict[str, Any]) -> Draws:
    """All randomness of a case; a row's does not depend on the others or on the text's length."""
    g, L, V, R = case["gen"], case["canvas"], case["text"]["vocab_size"], len(case["rows"])
    C, N = -(-g["max_new_tokens"] // L), g["max_denoising_steps"]
    init, renoise = np.zeros((C, R, L), np.int32), np.zeros((C, N, R, L), np.int32)
    gumbel, uniform = np.zeros((C, N, R, L, V), np.float32), np.zeros((C, N, R, L))
    for c, r in np.ndindex(C, R):
        init[c, r] = np.random.default_rng([case["draw_seed"], r, c]).integers(0, V, L)
        for s in range(N):
            rng = np.random.default_rng([case["draw_seed"], r, c, s])
            renoise[c, s, r] = rng.integers(0, V, L)
            uniform[c, s, r] = rng.random(L)
            if not case["greedy"]:
                gumbel[c, s, r] = rng.gumbel(size=(L, V)).astype(np.float16)
    if case["seed_canvas"] is not None:
        init[0] = case["seed_canvas"]
    return Draws(init, renoise, *((None, uniform) if case["inverse"] else (gumbel, None)))
