"""`batch_invariant` (issue 46, step 3): the bits of a row depend on no number of rows.

On a CPU: how sums are divided follows the matrix alone, both product kernels add up alike, prompts
are cut alike, and what cannot keep the promise is refused in one line. On a Hopper GPU: texts are
equal alone, in a batch and in another order.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import dllm_jax as dj
from dllm_jax.engine.admission import accept
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.engine.scheduler import Scheduler
from dllm_jax.kernels import hopper
from dllm_jax.kernels.layer import mosaic, mosaic_many
from dllm_jax.kernels.paged_attention import api as attention
from dllm_jax.kernels.paged_attention.mosaic_tiling import choose_tiling
from dllm_jax.models.families import parse_config
from dllm_jax.models.published import PUBLISHED
from dllm_jax.runner import buckets
from dllm_jax.strategies import MultiBD
from tests.contract import models

ROWS = (8, 32, 64, 128)
STRATEGY = MultiBD(block_size=4, buffer_size=4)


def real(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("name", ["JetLM/SDAR-1.7B-Chat", "JetLM/SDAR-8B-Chat", "Qwen/Qwen3-8B"])
def test_sums_are_divided_by_the_matrix_alone(name):
    cfg = parse_config(PUBLISHED[name], name=name).config
    D, H = cfg.hidden_size, cfg.head_dim
    heads = (cfg.num_heads + 2 * cfg.num_kv_heads) * H
    for K, N in ((D, heads), (cfg.num_heads * H, D), (cfg.ffn_size, D)):
        w = real(K, N)
        parts = mosaic.segments(w)
        tilings = [mosaic.choose_tiling(real(rows, K), w, splits=parts) for rows in ROWS]
        assert {tiling.splits for tiling in tilings} == {parts}
        for rows in (256, 512, 1024, 4096):
            columns = mosaic_many.product_columns(rows, w, parts)
            assert N % columns == 0
            assert columns <= 128 or parts == 1, "the registers hold no more"


def test_keys_are_divided_alike_for_any_number_of_sequences():
    pages, table = (
        real(1200, 8, 64, 128),
        lambda count: jax.ShapeDtypeStruct((count, 33), jnp.int32),
    )

    def chosen(count, sequences):
        return choose_tiling(real(count, 128, 16, 128), pages, table(count), sequences)

    assert len({chosen(count, attention.ALIKE) for count in (1, 2, 4, 8, 16, 24, 32)}) == 1
    assert chosen(1, None).parts > 1, "by itself one sequence is divided"


@pytest.mark.parametrize("parts", [1, 2])
def test_few_and_many_rows_are_added_up_alike(parts):
    """In the interpreter: a chain of each part of the depth, and the parts in rising order."""
    keys = jax.random.split(jax.random.key(parts))
    x, w = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((128, 256), (256, 128)), strict=True)
    )
    how = {"interpret": plgpu.InterpretGPUParams()}
    many = mosaic_many.matmul(x, w, columns=128, segments=parts, **how)
    tiling = mosaic.choose_tiling(x, w, splits=parts)
    few = mosaic.split_matmul(x, w, tiling=tiling, **how)
    few = few if parts == 1 else sum(few[1:], few[0]).astype(x.dtype)
    assert np.array_equal(np.asarray(many, np.float32), np.asarray(few, np.float32))
    halves = [x[:, i::2].astype(jnp.float32) @ w[i::2].astype(jnp.float32) for i in range(2)]
    assert np.abs(np.float32(many) - sum(halves)).max() < 0.2, "and it is the product"


def test_prompts_are_cut_alike(monkeypatch):
    model = models.plain()
    monkeypatch.setattr(buckets, "_check_invariant", lambda *_: None)
    monkeypatch.setattr(buckets, "is_on_cpu", lambda model: False)
    config = EngineConfig(max_num_seqs=32, max_model_len=60, page_size=8, batch_invariant=True)
    made = buckets.make_layout(model, STRATEGY, {}, config)
    usual = dataclasses.replace(config, batch_invariant=False)
    usual = buckets.make_layout(model, STRATEGY, {}, usual)
    assert len(made.page_buckets) == len(made.prefill_buckets) == made.prompts_a_pass == 1
    assert made.unit == 128
    assert usual.unit == 8
    request = Request(
        prompt_token_ids=[1], params=SamplingParams(max_tokens=4, constraint=dj.Choice(["a"]))
    )
    with pytest.raises(ValueError, match="a constraint is not covered by batch_invariant=True"):
        accept(request, "0", 0, 0.0, Scheduler(made), None, 0)


def test_what_cannot_keep_it_is_refused_in_one_line(monkeypatch):
    config = EngineConfig(batch_invariant=True, max_model_len=60, page_size=8)

    def refused(model=None, aux=None, strategy=STRATEGY, **more):
        with pytest.raises(ValueError, match=r"^batch_invariant=True needs ") as caught:
            buckets.make_layout(
                model or models.plain(), strategy, aux or {}, dataclasses.replace(config, **more)
            )
        assert "\n" not in str(caught.value)
        return str(caught.value)

    if hopper.unsupported():
        assert "an NVIDIA Hopper GPU" in refused()
    monkeypatch.setattr(buckets.hopper, "unsupported", lambda: None)
    monkeypatch.setattr(buckets, "is_on_cpu", lambda model: False)
    assert refused().endswith('weights in bfloat16 (dtype="bfloat16"); change that or leave it out')
    assert "a dense network" in refused(models.experts())
    assert "a strategy without a drafter" in refused(aux={"draft": models.plain()})
    assert "a multiple of 16 cells, not 8" in refused(strategy=STRATEGY.replace(buffer_size=2))
    assert "one size of page_buckets" in refused(prefill_buckets=(8, 16))


@pytest.mark.gpu
def test_texts_are_equal_alone_in_a_batch_and_in_another_order():
    if reason := hopper.unsupported():
        pytest.skip(reason)
    model = dj.load("random:JetLM/SDAR-1.7B-Chat")
    config = EngineConfig(max_num_seqs=8, max_model_len=1024, batch_invariant=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 1000, int(n)).tolist() for n in rng.integers(20, 600, 12)]
    params = SamplingParams(max_tokens=200, max_nfe=24, ignore_eos=True)
    with dj.LLM(model, "multi_bd", 32, 4, config=config, progress=False) as llm:

        def texts(given):
            return [out.outputs[0].token_ids for out in llm.generate(given, params, use_tqdm=False)]

        together = texts(prompts)
        assert texts(prompts[::-1])[::-1] == together
        assert [texts([prompt])[0] for prompt in prompts[:4]] == together[:4]
