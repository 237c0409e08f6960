"""`quantization="fp8"`: which weights are rounded, what stays in memory, and the same tokens.

The operations are proved in kernels/test_fp8.py; the accuracy of the built-in model is measured
here on a few problems and by benchmarks/fp8_accuracy.py on many.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.bench.roofline import weights
from dllm_jax.loading import leaves
from dllm_jax.loading import load as loading
from dllm_jax.loading.load import LoadError
from dllm_jax.loading.model import Model
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.family import FamilyDefaults
from dllm_jax.models.moe import MoEConfig
from dllm_jax.models.quantization import is_quantized, quantized
from dllm_jax.strategies import BlockDiffusion, DiffusionGemma
from dllm_jax.tasks import evaluate, summary
from tests.oracles import fp8 as oracle
from tests.oracles.canvas_files import write_canvas
from tests.oracles.draft_files import write_draft

MATRICES = {"wqkv", "wo", "w_gate_up", "w_down"}
EXPERTS = {"experts_gate_up", "experts_down"}


@pytest.fixture(scope="module")
def plain(random_folder):
    return dj.load(random_folder)


@pytest.fixture(scope="module")
def model(random_folder):
    return dj.load(random_folder, quantization="fp8")


def test_the_matrices_of_the_layers_are_rounded_and_the_others_kept(plain, model):
    assert (plain.quantization, model.quantization) == (None, "fp8")
    for name in ("embed", "final_norm"):
        assert np.array_equal(model.params[name], plain.params[name])
    for layer, before in zip(model.params["layers"], plain.params["layers"], strict=True):
        assert {name for name, leaf in layer.items() if is_quantized(leaf)} == MATRICES
        for name, leaf in layer.items():
            if name not in MATRICES:
                assert np.array_equal(leaf, before[name])
                continue
            whole = np.asarray(before[name])
            flat = whole.reshape(-1, whole.shape[-1]) if name == "wo" else whole
            values, scales = oracle.sought(np.moveaxis(flat, 0, -1))
            is_same = np.isclose(leaf.scales, scales, rtol=1e-6, atol=0)  # errors may be equal
            assert is_same.mean() > 0.98
            found = np.asarray(leaf.values).astype(np.float64)
            assert np.array_equal(found[is_same], values[is_same])


@pytest.mark.long
def test_logits_are_near_those_of_the_weights_as_they_were(plain, model):
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 250, (2, 32)))
    want, got = plain.logits(ids), model.logits(ids)
    error = np.sqrt(np.mean(np.square(got - want)) / np.var(want))
    assert 0.001 < error < 0.2


def test_one_tensor_at_a_time_is_on_the_device_beside_the_result(random_folder, monkeypatch):
    seen = []

    def watched(path, leaf, split):
        name = path[-1]
        if name in MATRICES:
            shapes = {leaf.shape for leaf in tree.values()}
            live = [a for a in jax.live_arrays() if a.dtype == leaf.dtype and a.shape in shapes]
            seen.append(len(live) - before)
        return quantized(path, leaf, split)

    plain = dj.load(random_folder)
    tree = {name: plain.params["layers"][0][name] for name in MATRICES}
    shapes = {leaf.shape for leaf in tree.values()}
    dtype = tree["wo"].dtype
    before = len([a for a in jax.live_arrays() if a.dtype == dtype and a.shape in shapes])
    monkeypatch.setattr(leaves, "quantized", watched)
    dj.load(random_folder, quantization="fp8")
    assert seen == [1] * len(MATRICES) * len(plain.params["layers"])


def test_random_models_are_rounded_leaf_by_leaf(monkeypatch):
    small = {
        "model_type": "sdar",
        "architectures": ["SDARForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "mask_token_id": 299,
    }
    monkeypatch.setitem(loading.PUBLISHED, "small", small)
    model = dj.load("random:small", quantization="fp8")
    assert model.quantization == "fp8"
    layer = model.params["layers"][0]
    assert {name for name, leaf in layer.items() if is_quantized(leaf)} == MATRICES
    read, used = weights(model.params, model.config, 1)
    sizes = [leaf.values.size for leaf in layer.values() if is_quantized(leaf)]
    others = 32 * 300 + 3 * 32 + 2 * 8
    assert read == used == sum(sizes) / 2 + others  # in weights of 16 bits


@pytest.mark.long
def test_experts_and_the_shared_one_are_rounded_and_routers_stay():
    cfg = MoEConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=64,
        num_experts=4,
        experts_per_token=2,
        expert_size=16,
        shared_size=32,
        moe_layers=(False, True),
    )
    arch = arch_of(cfg)
    shapes, tree = jax.tree.flatten_with_path(arch.param_shapes(cfg, "float32"))
    rng = np.random.default_rng(1)
    leaves = [(path, jnp.asarray(rng.normal(0, 0.2, s.shape), s.dtype)) for path, s in shapes]

    def made(how):
        params = jax.tree.unflatten(tree, [how(path, leaf) for path, leaf in leaves])
        defaults = FamilyDefaults(family="toy", strategy="multi_bd", block_size=4, vocab_limit=64)
        return Model(params=params, config=cfg, arch=arch, defaults=defaults)

    plain, model = made(lambda _, leaf: leaf), made(quantized)
    layer = model.params["layers"][1]
    names = {name for name, leaf in layer.items() if is_quantized(leaf)}
    assert names == {"wqkv", "wo", "shared_gate_up", "shared_down", *EXPERTS}
    for name in EXPERTS:
        values, scales = oracle.quantized(np.moveaxis(plain.params["layers"][1][name], 1, -1))
        assert np.array_equal(np.asarray(layer[name].values).astype(np.float64), values)
        assert np.array_equal(layer[name].scales, scales)
    sizes = {name: layer[name].values.size for name in EXPERTS}
    read, used = weights({"layers": [{name: layer[name] for name in EXPERTS}]}, cfg, 3, touched=3)
    assert (read, used) == (sum(sizes.values()) / 2 * 3 / 4, sum(sizes.values()) / 2 * 2 / 4)
    ids = jnp.asarray(rng.integers(0, 64, (1, 8)))
    want, got = plain.logits(ids), model.logits(ids)
    assert np.sqrt(np.mean(np.square(got - want)) / np.var(want)) < 0.3


@pytest.mark.slow
def test_the_same_request_gives_the_same_tokens_alone_and_in_a_batch(model):
    """And those of `dj.generate`, with a prefix hit too."""
    strategy = BlockDiffusion(block_size=8, accept_threshold=0.5)
    config = dj.EngineConfig(
        max_num_seqs=3,
        max_model_len=96,
        page_size=8,
        num_pages=64,
        slot_buckets=(3,),
        prefill_buckets=(32,),
    )
    llm = dj.LLM(model, strategy, config=config, warm_up=False)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(5, 250, n).tolist() for n in (9, 17, 30, 12)]
    how = dj.SamplingParams(max_tokens=24, ignore_eos=True)

    def decoded(prompts):
        outputs = llm.generate(prompts, how, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    together = decoded(prompts)
    assert [decoded([prompt])[0] for prompt in prompts] == together
    assert len({tuple(tokens) for tokens in together}) == len(prompts)
    whole = dj.generate(model, prompts, strategy, max_tokens=24, stop_token_ids=())
    assert np.asarray(whole.tokens)[:, :24].tolist() == together


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("int8", "quantization='int8' is not supported; use one of fp8, none"),
        (8, "quantization=8 is"),
    ],
)
def test_other_quantizations_are_refused(value, text):
    for source in ("builtin:tiny-sdar", "random:JetLM/SDAR-1.7B-Chat"):
        with pytest.raises(LoadError, match=text):
            dj.load(source, quantization=value)


@pytest.mark.slow
def test_a_canvas_model_is_rounded_but_for_its_routers_and_scales(tmp_path):
    how = {"quantization": "fp8", "quantize_head": True}
    model = dj.load(write_canvas(tmp_path / "canvas"), **how)
    rounded = {
        path[-1].key
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.params, is_leaf=is_quantized)
        if is_quantized(leaf)
    }
    conditions = {"condition_gate_up", "condition_down"}
    assert rounded == MATRICES | EXPERTS | conditions | {"wqk", "lm_head"}
    assert is_quantized(model.arch.unembed.head(model.params, model.config).weights)
    strategy = DiffusionGemma(block_size=12, max_denoising_steps=3.0)
    out = dj.generate(model, [[5, 6, 7]], strategy, max_tokens=12, stop_token_ids=())
    assert out.tokens.shape[1] >= 12


def test_networks_without_a_form_in_8_bits_are_refused_before_weights_are_read(
    tmp_path, monkeypatch
):
    folder = write_draft(tmp_path / "draft")
    monkeypatch.setattr(loading.checkpoints, "read_params", None)
    with pytest.raises(LoadError, match="a draft has no form in 8 bits"):
        dj.load(folder, quantization="fp8")


def test_a_model_that_is_loaded_takes_no_quantization(model):
    with pytest.raises(ValueError, match="quantization='fp8' is for a model that is loaded here"):
        dj.LLM(model, quantization="fp8")


@pytest.mark.slow
def test_the_built_in_model_answers_as_well_in_8_bits():
    """Few problems; benchmarks/fp8_accuracy.py has many."""
    problems = evaluate.held_out("plain", 256, seed=5)
    strategy = BlockDiffusion(block_size=32, accept_threshold=0.9)
    base, other = (
        evaluate.solve(
            dj.load("builtin:tiny-sdar", quantization=how),
            strategy,
            evaluate.ProblemSet(problems, max_tokens=160),
            batch_size=64,
        )
        for how in (None, "fp8")
    )
    difference = summary.compare(base, other)
    assert difference["exact_points"]["ci95"][1] > -0.5
    assert difference["exact_points"]["value"] > -3
    assert difference["speedup"]["value"] > 0.95
