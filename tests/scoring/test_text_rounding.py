"""`rounding=`: whole texts with the bits of an engine that has `batch_invariant`.

On a CPU: the windows are the text, with its gradient, and what has no such bits is refused. On a
Hopper GPU: logits are those that the engine decided by, bit for bit.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.kernels import hopper
from dllm_jax.models import reference
from dllm_jax.models.dense import PLAIN
from dllm_jax.runner.reader import Reader
from dllm_jax.runner.readout import read_log_probs
from dllm_jax.scoring import one_rounding
from dllm_jax.scoring.one_rounding import Rounding, read_logits, rounding_of, rows_by
from dllm_jax.strategies import AR, BlockDiffusion
from dllm_jax.strategies.core.protocol import Readout
from dllm_jax.strategies.core.state import Sampling
from dllm_jax.training import denoising
from tests.contract import engine as toy
from tests.contract import models

RNG = np.random.default_rng(0)


def rounding(block_size, window=None, num_columns=4):
    return Rounding(
        block_size=block_size, window=window or block_size, page_size=64, num_columns=num_columns
    )


def ids_of(model, count, length):
    return jnp.asarray(RNG.integers(1, model.config.vocab_size, (count, length)), jnp.int32)


def free_experts():
    """Experts without a capacity."""
    model = models.experts()
    return model.replace(
        config=dataclasses.replace(model.config, expert_capacity=0, routing_block=1)
    )


SIZES_OF = [(models.plain, 1, 17), (free_experts, 4, 16), (models.plain, 32, 32)]


@pytest.mark.parametrize(("make", "block_size", "window"), SIZES_OF)
def test_windows_are_the_text(make, block_size, window):
    """Prompts that end in the middle of a block and of a piece, and a last block that is cut."""
    model = make()
    ids = ids_of(model, 2, 170)
    how = rounding(block_size, window)
    rows = rows_by(model, ids, how, jnp.asarray([139, 40]), None, PLAIN)
    want = model.logits(ids, block_size=block_size)
    np.testing.assert_allclose(read_logits(model, rows), want, atol=1e-4)


def test_noisy_blocks_see_clean_ones_before_them_with_the_gradient_of_xla():
    model, size = models.plain(), 8
    ids = ids_of(model, 2, 44)
    noisy = jnp.where(jnp.asarray(RNG.random((2, 44)) < 0.5), 0, ids)
    weights = jnp.asarray(RNG.normal(size=(2, 88, model.config.hidden_size)))

    def by_windows(params):
        return rows_by(model.replace(params=params), ids, rounding(size, 16), 9, noisy, PLAIN)

    def plain(params):
        both = jnp.concatenate([noisy, ids], axis=1)
        visible = jnp.broadcast_to(reference.noisy_visibility(44, size), (2, 88, 88))
        positions = jnp.broadcast_to(jnp.arange(88) % 44, both.shape)
        return reference.dense_rows(params, model.config, both, visible, model.arch, positions)

    def slope(rows):
        return jax.jit(jax.grad(lambda params: jnp.sum(rows(params) * weights)))(model.params)

    np.testing.assert_allclose(by_windows(model.params), plain(model.params), atol=1e-4)
    near = jax.tree.map(
        lambda one, other: np.abs(one - other).max() <= 1e-4 * np.abs(other).max() + 1e-6,
        slope(by_windows),
        slope(plain),
    )
    assert jax.tree.all(near)


def test_a_loss_in_windows_is_the_loss(monkeypatch):
    """A block at a time, the cells before the learnt ones as the prompt."""
    model = models.plain()
    ids = ids_of(model, 2, 40)
    learnt = jnp.arange(40)[None] >= jnp.asarray([[9], [16]])
    key = jax.random.key(3)
    asked = []

    def windows(model, ids, rounding, prompt_len, noisy):
        asked.append(prompt_len)
        return rows_by(model, ids, rounding, prompt_len, noisy, PLAIN)

    monkeypatch.setattr(one_rounding, "hidden_rows", windows)
    want, _ = denoising.block_loss(model, ids, learnt, key, block_size=8)
    got, _ = denoising.block_loss(model, ids, learnt, key, rounding=rounding(8))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert [*asked[0]] == [9, 16]


def test_what_has_no_such_bits_is_refused(monkeypatch):
    model = models.plain()
    ids = ids_of(model, 1, 8)

    def refused(match, **how):
        with pytest.raises(ValueError, match=match) as caught:
            model.logits(ids, **{"rounding": rounding(4), **how})
        assert "\n" not in str(caught.value)

    if hopper.unsupported():
        refused("rounding= needs an NVIDIA Hopper GPU; ")
    monkeypatch.setattr(hopper, "unsupported", lambda: None)
    refused("rounding= needs weights in bfloat16 ")
    refused("with rounding= the blocks are the engine's, of 4 tokens", attention="causal")
    refused("with rounding= the blocks are the engine's, of 4 tokens", block_size=8)
    monkeypatch.setattr(one_rounding, "network_rules", lambda model: ())
    refused(r"rounding=: .*; leave it out")  # a toy's sizes
    short = dataclasses.replace(rounding(4), page_size=2, num_columns=3)
    refused("a text of 8 tokens is longer than the 6 of the engine's page table", rounding=short)
    with pytest.raises(ValueError, match="noisy= needs blocks"):
        rows_by(model, ids, rounding(1), 0, ids, PLAIN)
    with pytest.raises(ValueError, match=r"rounding: only engines with batch_invariant=True "):
        rounding_of(layout := toy.make_device("multi_bd", allocate=False).layout)
    how = rounding_of(dataclasses.replace(layout, batch_invariant=True))
    assert how.block_size == layout.block_size
    assert how.page_size * how.num_columns >= layout.max_model_len


def said_by(logits, tokens):
    """Log-probabilities of tokens, and of the two likeliest, from logits as an engine has them."""
    reader = Reader(lambda rows: rows, lambda ids: ids < 0, one_rounding=True)
    ask = Readout(sampling=Sampling.greedy(len(tokens)))
    read = jax.jit(lambda *rows: read_log_probs(reader, *rows, ask, 2))(logits, tokens)
    return np.asarray(read[:, 1])


def decided(llm, prompts, params):
    """Texts, and the log-probabilities that each of their tokens was written with."""
    wishes = [Request(prompt_token_ids=ids, params=params) for ids in prompts]
    outs = [out.outputs[0] for out in toy.run(llm.engine, wishes)]
    texts = [list(out.token_ids) for out in outs]
    said = [[row[token] for row, token in zip(out.logprobs, out.token_ids)] for out in outs]  # noqa: B905
    return texts, [np.asarray(row, np.float32) for row in said]


SIZES = EngineConfig(
    max_num_seqs=4, slot_buckets=(1, 4), max_model_len=1024, batch_invariant=True, logprobs=True
)


@pytest.mark.gpu
def test_a_text_of_ar_has_the_logits_that_it_was_written_by():
    if reason := hopper.unsupported():
        pytest.skip(reason)
    model = models.of_layers(dj.load("random:Qwen/Qwen3-8B"), 2)
    prompts = [RNG.integers(1, 1000, n).tolist() for n in (20, 130, 257, 500)]
    params = SamplingParams(max_tokens=150, ignore_eos=True, logprobs=2, temperature=0.7, seed=1)
    with contextlib.closing(dj.LLM(model, AR(), config=SIZES, progress=False)) as llm:
        texts, said = decided(llm, prompts, params)
        how = llm.rounding
    logits = jax.jit(lambda model, ids: model.logits(ids, rounding=how))
    plain = jax.jit(lambda model, ids: model.logits(ids, "causal"))
    others = 0
    for prompt, text, want in zip(prompts, texts, said, strict=True):
        ids = jnp.asarray([prompt + text])
        for of, count in ((logits, len(want)), (plain, 0)):
            rows = of(model, ids)[0, len(prompt) - 1 : -1]
            equal = said_by(rows, jnp.asarray(text)) == want
            if count:
                assert equal.all(), f"{equal.sum()} of {count} are equal"
            others += int((~equal).sum())
    assert others > 100, "another rounding is another one"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["JetLM/SDAR-1.7B-Chat", "inclusionAI/LLaDA2.0-mini"])
def test_a_block_has_the_logits_that_it_was_written_by(name):
    """Cells in order, so the text says what each forward saw; the loss has XLA's gradient."""
    if reason := hopper.unsupported():
        pytest.skip(reason)
    model = models.of_layers(dj.load(f"random:{name}"), 4)
    mask, S = model.config.mask_token_id, 32
    prompts = [RNG.integers(1, 1000, n).tolist() for n in (20, 140, 260)]
    params = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=2)
    strategy = BlockDiffusion(remasking="sequential", block_size=S)
    with contextlib.closing(dj.LLM(model, strategy, config=SIZES, progress=False)) as llm:
        texts, said = decided(llm, prompts, params)
        how = llm.rounding

    @jax.jit
    def decided_by(model, ids, prompt_len, place):
        rows = one_rounding.hidden_rows(model, ids, how, prompt_len)
        return read_logits(model, rows[jnp.arange(len(ids)), place])

    for prompt, text, want in zip(prompts, texts, said, strict=True):
        whole = np.asarray(prompt + text)
        place = np.arange(len(prompt), len(whole))
        ends = (place // S + 1) * S  # a forward saw its block, holes as masks, and what is before
        seen = np.full((len(place), ends[-1]), mask)
        for row, at in zip(seen, place, strict=True):
            row[:at] = whole[:at]
        rows = decided_by(model, jnp.asarray(seen), len(prompt), jnp.asarray(place))
        equal = said_by(rows, jnp.asarray(text)) == want
        assert equal.all(), f"{equal.sum()} of {len(want)} are equal"
    small, ids = models.of_layers(model, 1), jnp.asarray([texts[0][:64]])
    learnt = jnp.arange(64)[None] >= 40

    def slope(**more):
        def loss(params):
            given = small.replace(params=params), ids, learnt, jax.random.key(0)
            return denoising.block_loss(*given, **more)[0]

        value, slopes = jax.jit(jax.value_and_grad(loss))(small.params)
        flat = [np.float32(leaf).ravel() for leaf in jax.tree.leaves(slopes)]
        return float(value), np.concatenate(flat)

    (got, of_windows), (want, plain) = slope(rounding=how), slope(block_size=S)
    assert got == pytest.approx(want, rel=0.01)
    assert of_windows @ plain > 0.99 * np.linalg.norm(of_windows) * np.linalg.norm(plain)
