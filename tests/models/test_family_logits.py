"""Every family's logits are right, for folders loaded through the public door.

`golden/families.npz` holds what transformers says of a tiny checkpoint of each family, written anew
here with the published names; `oracles/families.py` says it in NumPy for any other seed, size and
config, and is itself held to the golden file. LLaDA2.2 has no class in transformers: its truth is
the NumPy reference, and plain top-k where its capacity excludes nothing.
"""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dllm_jax as dj
from dllm_jax.models import reference
from tests.golden.family_cases import BLOCK, CASES, LENGTH, MASKS, write_case
from tests.oracles.checkpoints import write_tiny
from tests.oracles.families import reference_logits, run, visibility
from tests.oracles.tiny_configs import CONFIGS

pytestmark = pytest.mark.usefixtures("highest_precision")

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "families.npz")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a golden case."""
    return cache(lambda name: write_case(name, tmp_path_factory.mktemp("families") / name))


@pytest.fixture(scope="module")
def model_of(folder_of):
    """The model of a golden case."""
    return cache(lambda name: dj.load(folder_of(name), dtype="float32"))


def agree(model: dj.Model, folder: Path, ids: Any, kind: str = "full", **options: Any) -> float:
    """Hold the model to the NumPy reference; returns the spread of the logits."""
    wanted = reference_logits(folder, ids, visibility(kind, len(ids), BLOCK), **options)
    logits = model.logits(np.asarray(ids)[None], kind, block_size=BLOCK)[0]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE)
    return float(wanted.std())


def some_ids(length: int = LENGTH, vocab: int = 50, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, length)


# --- transformers, the NumPy reference and the model ---------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_reference_agrees_with_transformers(folder_of, name):
    ids = GOLDEN[f"{name}/ids"]
    for kind in MASKS:
        logits = reference_logits(folder_of(name), ids, visibility(kind, LENGTH, BLOCK))
        np.testing.assert_allclose(logits, GOLDEN[f"{name}/{kind}"], rtol=0, atol=TOLERANCE)


@pytest.mark.versions("^(sdar|qwen3_tied)$")
@pytest.mark.parametrize("name", CASES)
def test_logits_agree_with_transformers(model_of, name):
    model, ids = model_of(name), GOLDEN[f"{name}/ids"]
    wanted = {kind: GOLDEN[f"{name}/{kind}"] for kind in MASKS}
    for kind in MASKS:
        logits = model.logits(ids[None], kind, block_size=BLOCK)[0]
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, wanted[kind], rtol=0, atol=TOLERANCE)
        assert wanted[kind].std() > 1  # the comparison is of something
    assert np.abs(wanted["full"] - wanted["causal"]).max() > 1000 * TOLERANCE
    assert np.abs(wanted["full"] - wanted["block_causal"]).max() > 1000 * TOLERANCE


@pytest.mark.parametrize(("name", "kind"), [("sdar", "block_causal"), ("qwen3", "causal")])
def test_attention_and_block_size_default_to_the_familys(model_of, name, kind):
    logits = model_of(name).logits(GOLDEN[f"{name}/ids"][None])[0]
    np.testing.assert_allclose(logits, GOLDEN[f"{name}/{kind}"], rtol=0, atol=TOLERANCE)


# What a config may say besides, one draw a kind of arithmetic.
DRAWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada_other_spellings": (
        "llada",
        {
            "n_kv_heads": None,
            "mlp_hidden_size": None,
            "mlp_ratio": 2,
            "embedding_size": None,
            "scale_logits": True,
            "include_qkv_bias": True,
            "weight_tying": True,
        },
    ),
    # A block's ff_out has the shape of the head.
    "llada_of_square_networks": ("llada", {"mlp_hidden_size": CONFIGS["llada"]["embedding_size"]}),
    "qwen3_with_biases": ("qwen3", {"attention_bias": True, "rms_norm_eps": 1e-3}),
    "new_rope_spelling": (
        "sdar",
        {
            "rope_theta": ...,
            "rope_scaling": ...,
            "torch_dtype": ...,
            "dtype": "float32",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "experts_in_one_layer": (
        "sdar_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4},
    ),
    "weights_not_normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "one_expert_a_row_and_one_key_head": (
        "qwen3_moe",
        {"num_experts_per_tok": 1, "norm_topk_prob": False, "num_key_value_heads": 1},
    ),
    "biases_and_two_shared_experts": (
        "llada2",
        {
            "use_qkv_bias": True,
            "use_bias": True,
            "num_shared_experts": 2,
            "first_k_dense_replace": 2,
            "rotary_dim": 4,
            "partial_rotary_factor": 0.25,
        },
    ),
    "no_groups_no_bias_nothing_shared": (
        "llada2",
        {
            "n_group": 1,
            "topk_group": 1,
            "num_shared_experts": 0,
            "moe_router_enable_expert_bias": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 0.5,
        },
    ),
    "so_many_experts_that_rows_are_sorted": (  # by `expert_ffn`, on a CPU too
        "llada2",
        {
            "num_experts": 64,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 64,
        },
    ),
    "one_sigmoid_expert_a_row": ("llada2", {"num_experts_per_tok": 1}),
    "routing_blocks": ("llada2_2", {"block_size": 5}),
    "llada_moe_with_a_shared_expert": (
        "llada_moe",
        {
            "shared_expert_intermediate_size": 16,
            "num_key_value_heads": 3,
            "moe_layer_freq": [1, 1, 1],
        },
    ),
    "a2d_untied": ("a2d_qwen3", {"tie_word_embeddings": False}),
    "other_stretching": (
        "llama31",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWS)
def test_logits_agree_with_the_reference(tmp_path, name):
    family, changes = DRAWS[name]
    folder = write_tiny(family, tmp_path / name, seed=7, **changes)
    model = dj.load(folder, dtype="float32")
    spread = [agree(model, folder, some_ids(), kind) for kind in MASKS]
    assert min(spread) > (0.1 if changes.get("scale_logits") else 1)


@pytest.mark.long
def test_residual_streams_agree_with_the_reference(folder_of, model_of):
    """Index 0 is the embedding, index j + 1 what layer j leaves: what drafters are fed with."""
    for name in ("qwen3", "llama31"):
        model, ids = model_of(name), GOLDEN[f"{name}/ids"]
        wanted = run(folder_of(name), ids, visibility("causal", LENGTH)).hidden
        visible = reference.visibility("causal", LENGTH, 1)[None]
        _, streams = model.arch.trunk(
            model.params,
            model.config,
            model.arch.embed(model.params, model.config, ids[None]),
            jnp.arange(LENGTH)[None],
            lambda _, q, k, v, seen=visible: reference.attention(q, k, v, seen),
            tuple(range(len(wanted))),
        )
        for stream, row in zip(streams, wanted, strict=True):
            np.testing.assert_allclose(stream[0], row, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("is_copy", [True, False])
def test_48_2_the_head_of_an_a2d_folder_wins_over_its_tie(tmp_path, is_copy):
    """Fine-tunes break ties and leave the entry of the config as it was."""
    folder = write_tiny("a2d_qwen3", tmp_path, seed=7, tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    ids = some_ids()
    if is_copy:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        save_file(tensors, folder / "model.safetensors")
        model = dj.load(folder, dtype="float32")
    else:
        with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the embedding, so it"):
            model = dj.load(folder, dtype="float32")
    assert model.config.tie_embeddings == is_copy
    (folder / "config.json").write_text(json.dumps(config))  # whose reader takes the head
    agree(model, folder, ids)


# --- what must matter ----------------------------------------------------------------------------


def changed(model: dj.Model, change: Any) -> dj.Model:
    """The model with `change` applied to a copy of each layer's weights."""
    layers = [dict(layer) for layer in model.params["layers"]]
    for layer in layers:
        layer.update(change(layer))
    return model.replace(params={**model.params, "layers": layers})


def difference(model: dj.Model, name: str) -> float:
    """The furthest that the model's logits lie from those of a golden case."""
    logits = model.logits(GOLDEN[f"{name}/ids"][None], "full")[0]
    return float(jnp.abs(logits - GOLDEN[f"{name}/full"]).max())


MISTAKES = {
    "gate for up": ("llada", lambda w: {"w_gate_up": w["w_gate_up"][:, :, ::-1]}),
    "norms swapped": (
        "llada",
        lambda w: {"attn_norm": w["mlp_norm"], "mlp_norm": w["attn_norm"]},
    ),
    "biases of key and value swapped": (
        "dream",
        lambda w: {"bqkv": w["bqkv"][:, np.array([0, 1, 2, 4, 3])]},
    ),
    "no biases": ("fast_dllm_v2", lambda w: {"bqkv": 0 * w["bqkv"]}),
    "norms of query and key swapped": (
        "sdar",
        lambda w: {"q_norm": w["k_norm"], "k_norm": w["q_norm"]},
    ),
    "key for value": ("sdar", lambda w: {"wqkv": w["wqkv"][:, :, np.array([0, 1, 2, 4, 3])]}),
    "query heads of other groups": (
        "sdar",
        lambda w: {
            "wqkv": jnp.concatenate([w["wqkv"][:, ::-1, :-2], w["wqkv"][:, :, -2:]], axis=2)
        },
    ),
    "pairs of the rotation": (
        "sdar",
        lambda w: {
            "wqkv": jnp.concatenate([w["wqkv"][:, :, :-2, ::-1], w["wqkv"][:, :, -2:]], axis=2)
        },
    ),
    "query heads in turn": (
        "stable_diffcoder",
        lambda w: {
            "wo": w["wo"].reshape(3, 2, *w["wo"].shape[1:]).swapaxes(0, 1).reshape(w["wo"].shape)
        },
    ),
    "experts in order of their names": (
        "llada2",
        lambda w: {
            part: w[part][np.array(sorted(range(12), key=str))]
            for part in ("experts_gate_up", "experts_down")
            if part in w
        },
    ),
    "experts' gate for up": (
        "sdar_moe",
        lambda w: {"experts_gate_up": w["experts_gate_up"][:, :, ::-1]},
    ),
    "no bias of experts": (
        "llada2",
        lambda w: {"router_bias": 0 * w["router_bias"]} if "router" in w else {},
    ),
    "no shared expert": (
        "llada2",
        lambda w: {"shared_down": 0 * w["shared_down"]} if "router" in w else {},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_golden_files_notice_a_mistake_in_the_weights(model_of, mistake):
    """A mistake that no shape betrays changes the logits by far more than the tolerance."""
    name, change = MISTAKES[mistake]
    assert difference(changed(model_of(name), change), name) > 1000 * TOLERANCE


WRONG_CONFIGS = {
    "all of a head is rotated": ("llada2", {"rotary_dim": None}),
    "frequencies not stretched": ("llama31", {"rope_scaling": None}),
    "groups are passed over": ("llada2", {"num_groups": 1, "groups_per_token": 1}),
    "weights not scaled": ("llada2", {"routed_scale": 1.0}),
    "weights not normalised": ("sdar_moe", {"norm_topk": False}),
    "sigmoid for softmax": ("sdar_moe", {"score": "sigmoid"}),
    "a capacity where there is none": ("llada2", {"expert_capacity": 5, "routing_block": 5}),
    "another theta": ("qwen3", {"rope_theta": 1e4}),
    "weights normalised": ("llada_moe", {"norm_topk": True}),
}


@pytest.mark.parametrize("mistake", WRONG_CONFIGS)
def test_golden_files_notice_a_mistake_in_the_config(model_of, mistake):
    name, changes = WRONG_CONFIGS[mistake]
    model = model_of(name)
    wrong = model.replace(config=dataclasses.replace(model.config, **changes))
    assert difference(wrong, name) > 1000 * TOLERANCE


# --- bfloat16 ------------------------------------------------------------------------------------

# Experts are chosen by scores, and bfloat16 may choose others: so every expert is chosen, or the
# biases decide alone.
ROUNDED = {
    "llada": ("llada", {}),
    "dream": ("dream", {}),
    "sdar": ("sdar", {}),
    "every expert": ("sdar_moe", {"num_experts_per_tok": 12}),
    "every sigmoid expert": ("llada2", {"num_experts_per_tok": 12, "n_group": 1, "topk_group": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_stays_close(tmp_path, name):
    """The same bfloat16 weights, activations rounded or not."""
    family, changes = ROUNDED[name]
    folder = write_tiny(family, tmp_path, seed=3, dtype="bfloat16", **changes)
    wanted = jax.nn.softmax(reference_logits(folder, some_ids(), visibility("full", LENGTH)))
    model = dj.load(folder, dtype="bfloat16")
    got = jax.nn.softmax(model.logits(some_ids()[None], "full")[0])
    worst = np.abs(got - wanted).max()
    assert 1e-5 < worst < 5e-2  # measured: 0.005 to 0.016


# --- appended texts ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a2d_qwen2", "a2d_llama", "llada_moe", "open_dcoder"])
def test_48_4_appended_texts_are_those_of_the_authors_loop(folder_of, model_of, name):
    """A block of masks after the text, the surest token first, by the NumPy reference."""
    model, text, new, size = model_of(name), list(some_ids(5, vocab=40)), 12, 4
    prompt, mask = len(text), model.config.mask_token_id
    while len(text) < prompt + new:
        begin = len(text)
        text += [mask] * size
        while holes := [i for i in range(begin, len(text)) if text[i] == mask]:
            logits = reference_logits(folder_of(name), text, visibility("full", len(text)))
            if model.config.shift:
                logits = np.concatenate([logits[:1], logits[:-1]])
            logits[:, np.asarray(model.forbidden(np.arange(logits.shape[1])))] = -np.inf
            law = np.exp(logits - logits.max(axis=1, keepdims=True))
            sure = (law / law.sum(axis=1, keepdims=True)).max(axis=1)
            best = max(holes, key=lambda i: sure[i])
            text[best] = int(law[best].argmax())
    how = {"block_length": size, "append": True, "block_size": 4, "buffer_size": 5}
    strategy = dj.strategies.FullSequence(**how)
    out = dj.generate(model, [text[:prompt]], strategy, max_tokens=new, ignore_eos=True)
    assert out.tokens[0].tolist()[:new] == text[prompt:]
    assert int(out.nfe[0]) == new
