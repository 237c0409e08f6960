"""Keys and values cached in 8 bits: their scales, what a text depends on, what is refused.

The kernels that read them are tested by tests/kernels; accuracy by benchmarks/fp8_accuracy.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.kernels.kv_write import fp8
from dllm_jax.loading.load import with_kv_cache
from dllm_jax.models import kv_cache
from dllm_jax.strategies import BlockDiffusion
from tests.oracles.fp8 import rounded

SMALL = "builtin:tiny-sdar"


@pytest.fixture(scope="module")
def plain(random_folder):
    return dj.load(random_folder)


@pytest.fixture(scope="module")
def model(random_folder):
    return dj.load(random_folder, kv_cache_dtype="fp8")


def test_a_row_is_divided_by_a_power_of_two_and_rounded():
    largest = np.asarray([448, 449, 1e-3, 0, 3e38], np.float32)
    scales = np.asarray(fp8.scales_of(jnp.asarray(largest)))
    assert (np.log2(scales) == np.round(np.log2(scales))).all()
    assert scales[:3].tolist() == [1, 2, 2.0**-18]
    assert (largest[:3] <= 448 * scales[:3]).all()
    assert np.isfinite(1 / scales).all()
    x = np.random.default_rng(0).standard_normal((3, 2, 64)).astype(np.float32)
    got = np.asarray(fp8.quantize(jnp.asarray(x), jnp.asarray([0.25, 2.0]))).astype(np.float32)
    assert np.array_equal(got[:, 0], rounded(x[:, 0] * 4))
    assert np.array_equal(got[:, 1], rounded(x[:, 1] / 2))
    wild = jnp.asarray([[[1e30, -np.inf, 1.0]]], jnp.float32)
    assert np.asarray(fp8.quantize(wild, jnp.ones(1))).astype(float).tolist() == [[[448, -448, 1]]]


@pytest.mark.long
@pytest.mark.parametrize("how", [None, "fp8"])
@pytest.mark.parametrize("source", [SMALL, "builtin:tiny-qwen3"])
def test_no_key_and_no_value_is_larger_than_its_scale_allows(source, how):
    model = dj.load(source, "float32", quantization=how)
    scales = kv_cache.kv_scales(model.params)
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 64))
    seen = []

    def attend(layer, q, k, v):
        seen.append((layer, k, v))
        return q

    positions = jnp.broadcast_to(jnp.arange(64), (2, 64))
    x = model.arch.embed(model.params, model.config, jnp.asarray(ids))
    model.arch.trunk(model.params, model.config, 100 * x, positions, attend)
    assert len(seen) == len(scales)
    for layer, *rows in seen:
        for own, row in zip(scales[layer], rows, strict=True):
            most = jnp.max(jnp.abs(row), axis=(0, 1, 3))
            assert (np.asarray(most) <= 448 * np.asarray(own)).all()
            assert (np.asarray(most) > 448 * np.asarray(own) / 2**9).all()  # nor far smaller


def engine(model, **sizes: Any):
    sizes: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_model_len": 96,
        "page_size": 8,
        "num_pages": 64,
    } | sizes
    config = dj.EngineConfig(slot_buckets=(sizes["max_num_seqs"],), **sizes)
    strategy = BlockDiffusion(block_size=8, accept_threshold=0.5)
    return dj.LLM(model, strategy, config=config, warm_up=False)


@pytest.mark.slow
def test_the_same_request_gives_the_same_tokens(plain, model):
    """Alone, in a batch, after a prefix hit, after preemption, in other pieces of the prompt.

    A key is read fresh in one case and cached in the other, so both are rounded.
    """
    rng = np.random.default_rng(2)
    prompts = [rng.integers(5, 250, n).tolist() for n in (9, 17, 30, 12)]
    how = dj.SamplingParams(max_tokens=24, ignore_eos=True)

    def decoded(llm, prompts):
        outputs = llm.generate(prompts, how, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    llm = engine(model, prefill_buckets=(32,))
    together = decoded(llm, prompts)
    assert [decoded(llm, [prompt])[0] for prompt in prompts] == together
    assert llm.engine.stats().prefix_hits > 0
    assert len({tuple(tokens) for tokens in together}) == len(prompts)
    in_pieces = engine(model, prefill_buckets=(8,), enable_prefix_caching=False)
    assert decoded(in_pieces, prompts) == together
    few_pages = engine(model, prefill_buckets=(32,), num_pages=13)
    assert decoded(few_pages, prompts) == together
    assert few_pages.engine.stats().num_preemptions > 0
    strategy = BlockDiffusion(block_size=8, accept_threshold=0.5)
    request = {"max_tokens": 24, "ignore_eos": True}
    whole = dj.generate(plain, prompts, strategy, kv_cache_dtype="fp8", **request)
    assert np.asarray(whole.tokens)[:, :24].tolist() == together
    other = dj.generate(plain, prompts, strategy, **request)
    assert np.asarray(other.tokens)[:, :24].tolist() != together


@pytest.mark.long
def test_pages_take_a_byte_a_number(plain, model):
    llm, other = engine(model), engine(plain)
    assert 4 * llm.memory.page_bytes == other.memory.page_bytes
    pools = llm.engine.runner.state.pools["target"]
    assert {leaf.dtype for leaf in jax.tree.leaves(pools)} == {jnp.dtype(fp8.DTYPE)}
    G, H = model.config.heads(0)
    for keys, values in pools:
        assert (keys.shape, values.shape) == ((64, G, 8, H), (64, G, H, 8))  # tokens side by side
    assert (model.kv_cache_dtype, plain.kv_cache_dtype) == ("fp8", None)


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", 8])
def test_other_types_are_refused(value):
    text = f"kv_cache_dtype={value!r} is not supported; use one of auto, fp8, fp8_e4m3"
    for call in (dj.load, dj.LLM):
        with pytest.raises(ValueError, match=text):
            call(SMALL, kv_cache_dtype=value)


def test_what_has_no_form_in_8_bits_is_refused_by_name(model):
    assert with_kv_cache(model, "auto") is model
    assert with_kv_cache(model, "fp8_e4m3") is model
    canvas = model.replace(config=kv_cache.GemmaConfig.__new__(kv_cache.GemmaConfig))
    with pytest.raises(ValueError, match="DiffusionGemma's cache has no form in 8 bits; leave it"):
        with_kv_cache(canvas.replace(kv_scales=None), "fp8")


def test_the_head_is_rounded_where_it_is_asked_for():
    plain = dj.load(SMALL)
    model = dj.load(SMALL, quantize_head=True)
    assert (model.has_quantized_head, plain.has_quantized_head) == (True, False)
    assert model.quantization is None
    assert np.array_equal(model.params["embed"], plain.params["embed"])
    ids = np.arange(24).reshape(1, 24)
    got, want = model.logits(ids), plain.logits(ids)
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()
    with pytest.raises(ValueError, match="quantize_head=True is for a model that is loaded here"):
        dj.LLM(plain, quantize_head=True)
