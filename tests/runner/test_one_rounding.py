"""`batch_invariant` (issue 46, step 3): the bits of a row depend on no number of rows.

On a CPU: how sums are divided follows the matrix alone, both product kernels add up alike, prompts
are cut alike, a text that lost its slot is written again as it was, and what cannot keep the
promise is refused in one line. On a Hopper GPU: texts are equal whatever happens around them.
"""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.experimental.pallas import mosaic_gpu as plgpu

import dllm_jax as dj
from dllm_jax.engine.active import accept
from dllm_jax.engine.layout import TILE_OF_KEYS, DeviceFailure, EngineConfig
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.kernels import hopper
from dllm_jax.kernels.layer import (
    RoutedRows,
    add_rms_norm,
    mosaic,
    mosaic_few,
    mosaic_few_tiling,
    mosaic_many,
    mosaic_many_tiling,
    mosaic_norm,
    qkv_matmul,
)
from dllm_jax.kernels.paged_attention import TILE, WindowMask, whole_tile
from dllm_jax.kernels.paged_attention.mosaic import attention
from dllm_jax.kernels.paged_attention.mosaic_tiling import Tiling, choose_alike, choose_tiling
from dllm_jax.models import moe
from dllm_jax.models.dense import ONE_ROUNDING
from dllm_jax.models.families import parse_config
from dllm_jax.models.published import PUBLISHED
from dllm_jax.runner import buckets, readout
from dllm_jax.strategies import AR, DFlash, MultiBD
from dllm_jax.strategies.core import blocks
from dllm_jax.strategies.core.state import StepInfo
from dllm_jax.strategies.dflash import drafting
from tests.contract import engine as toy
from tests.contract import models
from tests.contract.cases import case
from tests.cross_lowering import H200, needs_mosaic

ROWS = (8, 32, 64, 128)
STRATEGY = MultiBD(block_size=4, buffer_size=4)


def real(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


DENSE = ["JetLM/SDAR-1.7B-Chat", "JetLM/SDAR-8B-Chat", "Qwen/Qwen3-8B", "GSAI-ML/LLaDA-8B-Base"]


@pytest.mark.parametrize("name", DENSE)
def test_sums_are_divided_by_the_matrix_alone(name):
    cfg = parse_config(PUBLISHED[name], name=name).config
    D, H = cfg.hidden_size, cfg.head_dim
    heads = (cfg.num_heads + 2 * cfg.num_kv_heads) * H
    for K, N in ((D, heads), (cfg.num_heads * H, D), (cfg.ffn_size, D)):
        w = real(K, N)
        parts = mosaic_few_tiling.segments(w)
        choose = mosaic_few_tiling.choose_tiling
        every = mosaic_few_tiling.ANY_COLUMNS
        tilings = [choose(real(rows, K), w, every, splits=parts) for rows in ROWS]
        assert {tiling.splits for tiling in tilings} == {parts}
        for rows in (256, 512, 1024, 4096):
            columns = mosaic_many_tiling.product_columns(rows, w, parts)
            assert N % columns == 0
            assert columns > 64 or rows // 128 * N // 64 <= 132, "read too much to take turns"
            assert columns <= 128 or parts == 1, "the registers hold no more"


@pytest.mark.parametrize(("tokens", "heads"), [(1600, (16, 8, 64)), (32768, (14, 2, 64))])
def test_keys_are_divided_alike_for_any_number_of_sequences_and_rows(tokens, heads):
    """Among them shapes for which more rows would have other tiles, and some contexts no parts."""
    N, G, H = heads

    def chosen(count, rows, rule=choose_alike):
        table = jax.ShapeDtypeStruct((count, tokens // 64 + 1), jnp.int32)
        return rule(real(count, rows, N, H), real(1200, G, 64, H), table)

    tilings = [chosen(count, rows) for count in (1, 4, 24, 32) for rows in (128, 512)]
    alike = {(t.keys, t.splits, t.is_cluster, t.shares_keys, t.unsplit_keys) for t in tilings}
    assert len(alike) == 1
    one = tilings[0]
    assert one.unsplit_keys == 0
    assert one.consumers == 1 or one.splits > 1, "one sequence takes more blocks"
    by_rows = [chosen(32, rows, choose_tiling) for rows in (128, 512)]
    assert by_rows[0].keys != by_rows[1].keys or by_rows[0].unsplit_keys
    assert chosen(1, 128, choose_tiling).parts > 1, "by itself one sequence is divided"


@pytest.mark.parametrize(("parts", "columns"), [(1, 64), (2, 64), (1, 128)])
def test_few_and_many_rows_are_added_up_alike(parts, columns):
    """In the interpreter: a chain of each part of the depth, and the parts in rising order."""
    keys = jax.random.split(jax.random.key(parts))
    x, w = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((128, 256), (256, 128)), strict=True)
    )
    how = {"interpret": plgpu.InterpretGPUParams()}
    many = mosaic_many.matmul(x, w, columns=128, segments=parts, **how)
    tiling = mosaic_few_tiling.choose_tiling(x, w, (columns,), splits=parts)
    few = mosaic_few.split_matmul(x, w, tiling=tiling, **how)
    few = few if parts == 1 else sum(few[1:], few[0]).astype(x.dtype)
    assert np.array_equal(np.asarray(many, np.float32), np.asarray(few, np.float32))
    halves = [x[:, i::2].astype(jnp.float32) @ w[i::2].astype(jnp.float32) for i in range(2)]
    assert np.abs(np.float32(many) - sum(halves)).max() < 0.2, "and it is the product"


class Guessing(AR):
    """`ar` of a known text: each step judges drafts, of which each slot has other wrong ones."""

    text: tuple[int, ...] = struct.field(pytree_node=False, default=())  # by position
    block_size: int = struct.field(pytree_node=False, default=17)

    def step(self, forward, state):
        tokens, position = state.buffer.tokens, state.buffer.positions
        B, _, S = tokens.shape
        cell = np.broadcast_to(np.arange(S), tokens.shape)
        slot = jnp.arange(B)[:, None, None]
        known = jnp.asarray(self.text, jnp.int32)[jnp.minimum(position, len(self.text) - 1)]
        guess = jnp.where(position * (slot + 3) % (7 + slot) == 0, 7, known)
        block = jnp.where(cell == 0, tokens, guess)
        out = forward(state, inputs=block, live=cell < S - 1, causal=True, width=S - 1)
        truth, right = drafting.match(out, state, block, S - 1)
        count = jnp.clip(state.buffer.limit - state.buffer.start - 1, 1, 1 + right)
        kept = cell < count[:, None, None]
        state = out.store(state, kept)
        state = blocks.write(state, truth, (cell > 0) & (cell <= count[:, None, None]))
        one = jnp.ones_like(count)
        return state, StepInfo(commit_len=count, settled_len=count + 1, accepted=count, nfe=one)


@pytest.mark.long
def test_a_row_has_the_same_bits_wherever_its_window_begins():
    """In the interpreter, among 1 and 17; not where tiles of keys begin at the window."""
    assert TILE == TILE_OF_KEYS
    keys = jax.random.split(jax.random.key(0), 3)
    rows = [jax.random.normal(key, (1, 256, 2, 64), jnp.bfloat16) for key in keys]
    pages = [x.reshape(4, 64, 2, 64).swapaxes(1, 2) for x in rows[1:]]
    table = jnp.arange(4, dtype=jnp.int32)[None]

    def attended(first, count, is_whole=True):
        number = lambda *x: jnp.asarray([x], jnp.int32)  # noqa: E731
        mask = WindowMask(
            cell=number(*range(count)),
            start=number(first)[0],
            live=number(0, count),
            context_len=number(first)[0],
            visible=None,
            causal=jnp.asarray([True]),
            block_size=count,
            context_is_before=True,
        )
        q, k, v = (x[:, first : first + count] for x in rows)
        if is_whole:
            k, v, mask = whole_tile(k, v, *pages, table, mask)
        how = {"tiling": Tiling(keys=64, stages=2), "interpret": plgpu.InterpretGPUParams()}
        out = attention(q, k, v, *pages, table, mask, **how)
        return np.asarray(out[0], np.float32)

    for first in (130, 185):
        window = attended(first, 17)
        for i in (0, 9, 16):
            assert np.array_equal(attended(first + i, 1)[0], window[i])
        assert not np.array_equal(attended(first, 17, is_whole=False), window)


def test_addends_of_a_norm_are_rounded_alike():
    """The shared half of experts: parts of few rows, and rows that a product of many rounded."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, results = (jax.random.normal(key, (16, 512), jnp.bfloat16) for key in keys[:2])
    parts = jax.random.normal(keys[2], (2, 16, 512), jnp.float32)
    place, weights = jnp.arange(32).reshape(16, 2) % 20, jax.random.uniform(keys[3], (16, 2))
    routed, scale = RoutedRows(results, place, weights), jnp.ones((512,), jnp.bfloat16)
    whole = (parts[0] + parts[1]).astype(jnp.bfloat16)

    def by(norm, half, **how):
        return np.float32(jnp.stack(norm(x, (routed, half), scale, 1e-6, **how)))

    how = {"interpret": plgpu.InterpretGPUParams()}
    ours = [by(mosaic_norm.add_rms_norm, half, **how) for half in (parts, whole)]
    plain = [by(add_rms_norm, half, implementation="xla") for half in (parts, whole)]
    assert np.array_equal(*ours)
    assert np.array_equal(*plain)
    assert np.abs(ours[0] - plain[0]).max() < 0.05


def test_a_few_rows_are_multiplied_among_whole_tiles(monkeypatch):
    x, w = jnp.ones((3, 256), jnp.bfloat16), jnp.ones((256, 4, 4, 64), jnp.bfloat16)
    monkeypatch.setattr(mosaic, "unsupported", lambda x: None)
    run = mosaic_few.split_matmul

    def shown(rows, w, **how):
        seen.append(len(rows))
        return run(rows, w, **how, interpret=plgpu.InterpretGPUParams())

    seen = []
    monkeypatch.setattr(mosaic_few, "split_matmul", shown)
    out = qkv_matmul(x, w, one_rounding=True, implementation="mosaic")
    assert seen == [8]
    assert out.shape[-4:] == (3, 4, 4, 64)
    assert float(jnp.sum(out, dtype=jnp.float32)) == 3 * 256 * 4 * 4 * 64


@pytest.mark.slow(unless="pallas_kernels")
@needs_mosaic
@pytest.mark.parametrize("rows", [3, 128, 2048])
def test_experts_add_up_alike_for_any_number_of_rows(on_hopper, rows):
    """LLaDA2-mini: no product by XLA, and no launch that divides a shared half by the rows."""
    cfg = parse_config(PUBLISHED["inclusionAI/LLaDA2.0-mini"], name="LLaDA2.0-mini").config
    cfg = dataclasses.replace(cfg, num_layers=1, moe_layers=(True,))
    (layer,) = moe.param_shapes(cfg)["layers"]
    x = real(1, rows, cfg.hidden_size)
    live = jax.ShapeDtypeStruct((1, rows), bool)

    def half(layer, x, live):
        how = {"cfg": cfg, "dtype": x.dtype, "ops": ONE_ROUNDING}
        out = moe._ffn(layer, x, positions=jnp.zeros(live.shape, int), live=live, **how)
        scale = jnp.ones((cfg.hidden_size,), x.dtype)
        return add_rms_norm(x, out, scale, 1e-6, implementation="mosaic")

    with jax.sharding.use_abstract_mesh(H200):
        text = jax.jit(half).trace(layer, x, live).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" not in text
    kernels = "router_scores", "router_choice", "expert_ffn_gate_up", "expert_ffn_down"
    of_its_own = "gated_matmul", "split_matmul" if rows <= 128 else "matmul"  # the shared half
    assert all(name in text for name in (*kernels, *of_its_own, "add_rms_norm"))


def test_rows_are_read_in_whole_chunks():
    seen = []

    def shown(rows):
        seen.append(len(rows["x"]))
        return {"x": rows["x"] * 2, "none": rows["none"]}

    for count, size in ((3, 16), (48, 16), (51, 32)):
        x = jnp.arange(float(count))
        out = readout._in_whole_chunks(shown, {"x": x, "none": jnp.zeros((count, 0))}, size)
        assert {*seen} == {size}
        seen.clear()
        np.testing.assert_array_equal(out["x"], 2 * x)
        assert out["none"].shape == (len(x), 0)


def test_prompts_are_cut_alike(monkeypatch):
    model = models.plain()
    monkeypatch.setattr(buckets, "_check_invariant", lambda *_: None)
    monkeypatch.setattr(buckets, "is_on_cpu", lambda model: False)
    config = EngineConfig(max_num_seqs=32, max_model_len=60, page_size=8, batch_invariant=True)
    made = buckets.make_layout(model, STRATEGY, {}, config)
    usual = dataclasses.replace(config, batch_invariant=False)
    usual = buckets.make_layout(model, STRATEGY, {}, usual)
    assert len(made.page_buckets) == 1
    assert made.unit == 128
    assert all(size % made.unit == 0 for size in made.prefill_buckets)
    assert usual.unit == 8
    assert made.starts_over
    assert made.soft_commits
    request = Request(
        prompt_token_ids=[1], params=SamplingParams(max_tokens=4, constraint=dj.Choice(["a"]))
    )
    with pytest.raises(ValueError, match="a constraint is not covered by batch_invariant=True"):
        accept(request, "0", 0, 0.0, made, None, 0)


@pytest.mark.long
def test_a_cut_where_a_tile_of_keys_begins_changes_no_bit():
    """In the interpreter, with tiles of 32 keys; a cut in the middle of one does."""
    keys = jax.random.split(jax.random.key(0), 3)
    rows = [jax.random.normal(key, (1, 64, 1, 64), jnp.bfloat16) for key in keys]
    pages = [x.swapaxes(1, 2) for x in rows[1:]]

    def attended(first, end):
        number = lambda *x: jnp.asarray([x], jnp.int32)  # noqa: E731
        mask = WindowMask(
            cell=number(*range(end - first)),
            start=number(first)[0],
            live=number(0, end - first),
            context_len=number(first)[0],
            visible=None,
            causal=jnp.asarray([False]),
            block_size=16,
            context_is_before=True,
        )
        fresh = (x[:, first:end] for x in rows)
        how = {"tiling": Tiling(keys=32, stages=2), "interpret": plgpu.InterpretGPUParams()}
        out = attention(*fresh, *pages, number(0), mask, **how)
        return np.asarray(out, np.float32)

    def cut(at):
        return np.concatenate([attended(0, at), attended(at, 64)], axis=1)

    whole = attended(0, 64)
    assert np.array_equal(whole, cut(32))
    assert not np.array_equal(whole, cut(16))


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_was_written_is_written_again_bit_for_bit(is_kept):
    """Text and cache, after a lost slot and in a second turn; not where pieces of prompts do it."""
    rules = {"soft_commits": is_kept, "starts_over": is_kept}
    first = [
        dataclasses.replace(one, max_tokens=30, suffix=()) for one in case("multi_bd").requests[:2]
    ]

    def cached(requests, engine, between=None):
        seen = toy.watch_cache(engine)
        with toy.steps_a_chunk(1):
            toy.run(engine, [toy.wish(one) for one in requests], between)
        return [seen[i] for i in sorted(seen)[-len(requests) :]]

    def equal(one, other):
        return jax.tree.all(jax.tree.map(np.array_equal, one, other))

    engine = toy.make_engine("multi_bd", **rules)  # engines share their pools: one at a time
    written = cached(first, engine)
    turns = [dataclasses.replace(first[0], prompt=(*text, 3, 1, 4)) for text, _, _ in written]
    behind = cached(turns, engine)
    lost = cached(first, toy.make_engine("multi_bd", **rules), toy.preempting())
    fresh = cached(turns, toy.make_engine("multi_bd", prefix_caching=False))
    for same, other in zip([*lost, *behind], [*written, *fresh], strict=True):
        assert same[:2] == other[:2]
        assert equal(same[2], other[2]) == is_kept


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
    monkeypatch.setattr(hopper, "unsupported", lambda: None)
    monkeypatch.setattr(buckets, "is_on_cpu", lambda model: False)
    assert refused().endswith('weights in bfloat16 (dtype="bfloat16"); change that or leave it out')
    assert "one of experts without a capacity" in refused(models.experts())
    chosen = models.experts()
    config_of = dataclasses.replace(chosen.config, expert_capacity=0)
    assert "network" not in refused(chosen.replace(config=config_of))
    by_chance = DFlash(draft_block_size=16, target_layer_ids=(0,), acceptance="rejection")
    assert 'acceptance="match"' in refused(aux={"draft": models.plain()}, strategy=by_chance)
    assert "a multiple of 16 cells, not 8" in refused(strategy=STRATEGY.replace(buffer_size=2))
    assert "one size of page_buckets" in refused(page_buckets=(2, 4))
    assert "prefill_buckets of multiples of 128" in refused(prefill_buckets=(64, 128))


def differing(pairs):
    """Texts that are not the wanted ones, by case."""
    return {
        case: [i for i, (one, other) in enumerate(zip(*pair, strict=True)) if one != other]
        for case, pair in pairs.items()
    }


def texts_of(llm, given, between=None):
    return [out.outputs[0].token_ids for out in toy.run(llm.engine, given, between)]


# LLaDA2 has a dense layer first, then experts with a shared half; LLaDA one head a KV head.
NETWORKS = [("JetLM/SDAR-1.7B-Chat", 4), ("inclusionAI/LLaDA2.0-mini", 3), (DENSE[-1], 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("network", NETWORKS, ids=["sdar", "llada2", "llada"])
def test_texts_are_equal_whatever_happens_around_them(monkeypatch, network):
    """The published widths and ids in a few layers, on two engines; every second text is drawn."""
    if reason := hopper.unsupported():
        pytest.skip(reason)
    name, count = network
    model = models.of_layers(dj.load(f"random:{name}"), count)
    sizes = {"max_num_seqs": 4, "slot_buckets": (1, 4), "max_model_len": 1024}
    config = EngineConfig(**sizes, num_pages=96, batch_invariant=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 1000, n).tolist() for n in (20, 130, 257, 384, 500, 600)]
    rules = {"max_tokens": 160, "ignore_eos": True}
    params = [SamplingParams(**rules, temperature=0.7 * (i % 2), seed=i) for i in range(6)]
    wishes = [
        Request(prompt_token_ids=ids, params=p) for ids, p in zip(prompts, params, strict=True)
    ]
    found = {}

    def engine_of(**other):
        sizes = dataclasses.replace(config, **other)
        return contextlib.closing(dj.LLM(model, "multi_bd", 32, 4, config=sizes, progress=False))

    def fail_once(engine):
        """The device fails in the middle."""
        if engine.stats().generated_tokens > 200 and not engine.stats().num_failures:
            failure = mock.Mock(side_effect=DeviceFailure("injected"))
            monkeypatch.setattr(engine.runner, "decode", failure)
        elif engine.stats().num_failures:
            monkeypatch.undo()

    with engine_of() as llm:
        want = texts_of(llm, wishes)
        longer = [a + b + [1, 2, 3] for a, b in zip(prompts, want, strict=True)]
        turns = [
            Request(prompt_token_ids=ids, params=p) for ids, p in zip(longer, params, strict=True)
        ]
        found["prefix hits of the prompts"] = texts_of(llm, wishes)
        assert llm.engine.stats().prefix_hits > 0
        found["in another order"] = texts_of(llm, wishes[::-1])[::-1]
        found["alone"] = [texts_of(llm, [one])[0] for one in wishes]
        with toy.steps_a_chunk(8):  # fewer than a block takes
            found["preempted at every block"] = texts_of(llm, wishes, toy.preempting())
        assert llm.engine.stats().num_preemptions > 30
        found["after a failure"] = texts_of(llm, wishes, fail_once)
        assert llm.engine.stats().num_failures == 1
        found_turns = texts_of(llm, turns)
    more = {"prefill_buckets": (128,), "enable_prefix_caching": False, "num_pages": 20}
    with engine_of(**more) as llm:
        found["pieces of 128 and a short pool"] = texts_of(llm, wishes)
        assert llm.engine.stats().num_preemptions > 0
        want_turns = texts_of(llm, turns)
    pairs = {case: (got, want) for case, got in found.items()}
    pairs["a second turn behind written text"] = found_turns, want_turns
    assert not any(differing(pairs).values()), f"texts that differ: {differing(pairs)}"


@pytest.mark.long
def test_guesses_change_no_text_in_float32():
    """The strategy of the test below is right."""
    llm = dj.LLM("builtin:tiny-qwen3", "ar", progress=False, dtype="float32")
    prompt = [5, 9, 12, 30, 7, 7, 100]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with contextlib.closing(llm):
        (text,) = texts_of(llm, [Request(prompt_token_ids=prompt, params=params)])
    guessing = Guessing(text=(*prompt, *text))
    llm = dj.LLM("builtin:tiny-qwen3", guessing, progress=False, dtype="float32")
    with contextlib.closing(llm):
        done = toy.run(llm.engine, [Request(prompt_token_ids=prompt, params=params)] * 4)
    assert [out.outputs[0].token_ids for out in done] == [text] * 4
    forwards = [out.metrics.nfe for out in done]
    assert max(forwards) < 40
    assert len({*forwards}) > 1, "windows begin at other positions"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*draft")  # a random drafter is seldom right
def test_drafts_change_no_bit():
    """Published widths in two layers: `ar`, its text guessed, and `dflash`; greedy and drawn."""
    if reason := hopper.unsupported():
        pytest.skip(reason)
    target, draft = (
        dj.load(f"random:{name}") for name in ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16")
    )
    target = models.of_layers(target, 2)
    sizes = {"max_num_seqs": 4, "slot_buckets": (1, 4), "max_model_len": 1024}
    config = EngineConfig(**sizes, batch_invariant=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 1000, n).tolist() for n in (20, 130, 257, 500)]
    rules = {"max_tokens": 150, "ignore_eos": True}
    params = [SamplingParams(**rules, temperature=0.7 * (i % 2), seed=i) for i in range(4)]
    wishes = [
        Request(prompt_token_ids=ids, params=p) for ids, p in zip(prompts, params, strict=True)
    ]

    def engine_of(strategy, **more):
        return contextlib.closing(dj.LLM(target, strategy, config=config, progress=False, **more))

    with engine_of(AR()) as llm:
        want = texts_of(llm, wishes)
        assert [texts_of(llm, [one])[0] for one in wishes] == want
    found = {}
    draft = draft.replace(
        config=dataclasses.replace(draft.config, target_layer_ids=(0, 1, 0, 1, 0))
    )
    for name, strategy in {"chosen": DFlash(), "whole": DFlash(width=16)}.items():
        with engine_of(strategy, draft=draft) as llm:
            found[name] = texts_of(llm, wishes), want
    with engine_of(Guessing(text=(*prompts[1], *want[1]))) as llm:
        done = toy.run(llm.engine, [wishes[1]] * 4)
        assert all(out.metrics.nfe < 100 for out in done), "guesses are accepted"
        found["guessed"] = [out.outputs[0].token_ids for out in done], [want[1]] * 4
    assert not any(differing(found).values()), f"texts that differ: {differing(found)}"
