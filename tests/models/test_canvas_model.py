"""DiffusionGemma's network gives the oracle's numbers, in both modes, at every kind of layer.

The golden file holds float64 answers of single passes: encoder and decoder, first step and
conditioned, prompts below, at and above the window (see `golden/make_canvas_golden.py`). Bounds are
1e-4 for damped nets and 1e-3 for strong ones, of which float32 itself is up to 3e-4 off. A pass
runs through the paged cache, as decoding does, so pools of several shapes are part of it.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.kernels.kv_write import page_slots, write_rows
from dllm_jax.kernels.layer import reference as layer_ops
from dllm_jax.kernels.paged_attention import WindowMask, paged_attention
from dllm_jax.kernels.paged_attention.mask import within_reach
from dllm_jax.models import dense, gemma, quantization
from dllm_jax.models.kv_cache import new_pool
from dllm_jax.models.layers import rope_tables
from tests.golden import make_canvas_golden as made
from tests.oracles.canvas_files import SHAPES, config_of, write_canvas

GOLDEN = made.Path(made.__file__).with_name("canvas_passes.npz")
TOLERANCE = {0.4: 1e-4, 1.0: 1e-3}
PAGE = 4


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models by shape and gain, read from checkpoints in the released form."""
    made_ones = {}

    def model(shape, gain):
        if (shape, gain) not in made_ones:
            folder = tmp_path_factory.mktemp("canvas")
            made_ones[shape, gain] = dj.load(
                write_canvas(folder, shape, made.SEED, gain), dtype="float32"
            )
        return made_ones[shape, gain]

    return model


def one_pass(model, pool, x, start, *, causal, mode):
    """Rows, and keys and values, of `x` at positions from `start` on after `pool`."""
    cfg, T = model.config, x.shape[1]
    pages = pool[0][0].shape[0]
    table = jnp.arange(pages, dtype=jnp.int32)[None]
    cell = jnp.arange(T, dtype=jnp.int32)[None]
    mask = WindowMask(
        cell=cell,
        start=jnp.array([start]),
        live=jnp.array([[0, T]]),
        context_len=jnp.array([start]),
        visible=None,
        causal=jnp.array([causal]),
        block_size=T,
        context_is_before=True,
    )
    fresh = []

    def attend(layer, q, k, v):
        fresh.append((k, v))
        view = gemma.layer_view(cfg, layer)
        k_pages, v_pages = pool[layer]
        seen = mask.replace(window=view.window, by_block=view.by_block)
        return paged_attention(q, k, v, k_pages, v_pages, table, seen, scale=view.scale)

    rows, _ = gemma.trunk(
        model.params, cfg, x, start + cell, attend, mode=jnp.full((1,), mode, jnp.int32)
    )
    return rows[0], tuple(fresh)


def encode(model, pool, ids, start):
    """Encoder rows of `ids`, and the pool with their keys and values."""
    x = gemma.embed(model.params, model.config, jnp.asarray(ids)[None])
    rows, fresh = one_pass(model, pool, x, start, causal=True, mode=gemma.ENCODER)
    pages = pool[0][0].shape[0]
    positions = start + jnp.arange(len(ids), dtype=jnp.int32)[None]
    table = jnp.arange(pages, dtype=jnp.int32)[None]
    where = jnp.ones(positions.shape, bool)
    slots = page_slots(table, positions, where, pages, PAGE)
    return rows, write_rows(pool, fresh, *slots)


def decode(model, pool, canvas, expected, start):
    """Logits of a canvas after what is cached."""
    params, cfg = model.params, model.config
    rows = gemma.embed(params, cfg, jnp.asarray(canvas)[None])
    x = gemma.condition(params, cfg, rows, jnp.asarray(expected)[None])
    rows, _ = one_pass(model, pool, x, start, causal=False, mode=gemma.DECODER)
    return gemma.unembed(params, cfg, rows)


def empty_pool(model, tokens):
    return new_pool(model.config, -(-tokens // PAGE), PAGE, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("gain", made.GAINS)
@pytest.mark.parametrize("shape", SHAPES)
def test_single_passes_are_the_oracles(golden, models, shape, gain):
    model = models(shape, gain)
    for n in made.lengths(model.config.window):
        case = {
            key: golden[f"{shape}/{gain}/{n}/{key}"]
            for key in ("ids", "canvas", "expected", "encoded", "first", "conditioned")
        }
        with jax.default_matmul_precision("highest"):
            rows, pool = encode(model, empty_pool(model, n), case["ids"], 0)
            first = decode(model, pool, case["canvas"], np.zeros_like(case["expected"]), n)
            conditioned = decode(model, pool, case["canvas"], case["expected"], n)
        close = {"rtol": 0, "atol": TOLERANCE[gain], "err_msg": f"{n} tokens of prompt"}
        np.testing.assert_allclose(rows[-1], case["encoded"], **close)
        np.testing.assert_allclose(first, case["first"], **close)
        np.testing.assert_allclose(conditioned, case["conditioned"], **close)
        assert np.abs(case["first"] - case["conditioned"]).max() > 1


@pytest.mark.slow
def test_a_strong_net_keeps_to_the_oracle_over_three_canvases(golden, models):
    """Each step is given the oracle's inputs; each canvas stands on those committed before it."""
    model, size = models(made.FORCED, 1.0), SHAPES[made.FORCED][1]
    case = {k: golden[f"forced/{k}"] for k in ("prompt", "canvas", "expected", "logits", "text")}
    length, worst = len(case["prompt"]), 0.0
    with jax.default_matmul_precision("highest"):
        pool = empty_pool(model, length + made.FORCED_CANVASES * size)
        _, pool = encode(model, pool, case["prompt"], 0)
        for number, text in enumerate(case["text"]):
            for step in range(number * made.FORCED_STEPS, (number + 1) * made.FORCED_STEPS):
                got = decode(model, pool, case["canvas"][step], case["expected"][step], length)
                worst = max(worst, float(np.abs(got - case["logits"][step]).max()))
            _, pool = encode(model, pool, text, length)
            length += size
    assert worst <= TOLERANCE[1.0]


def changed(model, **config):
    return model.replace(config=dataclasses.replace(model.config, **config))


def with_layers(model, change):
    layers = [change(dict(layer)) for layer in model.params["layers"]]
    return model.replace(params={**model.params, "layers": layers})


def _one_factor(layer):
    return {**layer, "mode_scale": layer["mode_scale"][1:].repeat(2)}


def _of_other_mode(layer):
    return {**layer, "mode_scale": layer["mode_scale"][::-1]}


def _neutral(name):
    return lambda layer: {**layer, name: jnp.ones_like(layer[name])}


WRONG = {
    "a window of one more": lambda m: changed(m, window=m.config.window + 1),
    "a window of one less": lambda m: changed(m, window=m.config.window - 1),
    "one factor a layer": lambda m: with_layers(m, _one_factor),
    "the factor of the other mode": lambda m: with_layers(m, _of_other_mode),
    "no cap": lambda m: changed(m, logit_cap=None),
    "whole heads rotated": lambda m: changed(m, global_rotary_dim=None),
    "the sliding theta everywhere": lambda m: changed(m, global_rope_theta=m.config.rope_theta),
    "no scale of the router": lambda m: with_layers(m, _neutral("router_scale")),
    "no scale an expert": lambda m: with_layers(m, _neutral("expert_scale")),
}


@pytest.mark.long
@pytest.mark.slow("a window of one more")
@pytest.mark.parametrize("wrong", WRONG)
def test_golden_file_notices(golden, models, wrong):
    """A mistake that no shape betrays moves the logits by far more than the tolerance."""
    assert error_of(golden, WRONG[wrong](models("base", 0.4))) > 100 * TOLERANCE[0.4]


def error_of(golden, model):
    """How far a model's conditioned logits are from the golden ones."""
    case = {k: golden[f"base/0.4/24/{k}"] for k in ("ids", "canvas", "expected", "conditioned")}
    with jax.default_matmul_precision("highest"):
        _, pool = encode(model, empty_pool(model, 24), case["ids"], 0)
        got = decode(model, pool, case["canvas"], case["expected"], 24)
    return np.abs(got - case["conditioned"]).max()


def _view(**other):
    """The view of a layer with another rule."""
    right = gemma.layer_view
    return gemma, "layer_view", lambda cfg, layer: right(cfg, layer)._replace(**other)


def _conditioned(mixed):
    run = lambda params, cfg, rows, expected: mixed(rows, expected, cfg.norm_eps)  # noqa: E731
    return gemma, "condition", run


WRONG_FUNCTIONS = {
    "a band a row": _view(by_block=False),
    "scores scaled by the head's size": _view(scale=None),
    "conditioning skipped": _conditioned(
        lambda rows, _, eps: layer_ops.late_rms_norm(rows, None, eps)
    ),
    "rows of a canvas not normed": _conditioned(lambda rows, expected, _: rows + 0 * expected),
    "the expectation added as it is": _conditioned(
        lambda rows, expected, eps: layer_ops.late_rms_norm(rows + expected, None, eps)
    ),
    "norms of one and the scale": (
        layer_ops,
        "late_rms_norm",
        lambda x, scale, eps, right=layer_ops.late_rms_norm: right(
            x, None if scale is None else 1 + scale, eps
        ),
    ),
    "values that are not normed": (
        layer_ops,
        "late_rms_norm",
        lambda x, scale, eps, right=layer_ops.late_rms_norm: (
            x if scale is None else right(x, scale, eps)
        ),
    ),
}


@pytest.mark.long
@pytest.mark.slow("a band a row|scores scaled by the head's size")
@pytest.mark.parametrize("wrong", WRONG_FUNCTIONS)
def test_golden_file_notices_a_broken_rule(golden, models, monkeypatch, wrong):
    """As above, of mistakes in a function."""
    model = models("base", 0.4)
    monkeypatch.setattr(*WRONG_FUNCTIONS[wrong])
    for half in ("_before", "_behind"):  # whose trace is kept
        monkeypatch.setattr(gemma, half, inspect.unwrap(getattr(gemma, half)))
    assert error_of(golden, model) > 100 * TOLERANCE[0.4]


@pytest.mark.long
def test_a_commit_is_a_prefill(models):
    """Keys and values of a canvas stored after its prompt are those of one prefill of both."""
    model = models("pattern", 0.4)
    length = model.config.canvas_length
    ids = np.random.default_rng(3).integers(3, 90, 3 * length)
    with jax.default_matmul_precision("highest"):
        pool = empty_pool(model, len(ids))
        for start in range(0, len(ids), length):  # one shape: the prompt in two chunks, the canvas
            _, pool = encode(model, pool, ids[start : start + length], start)
        _, whole = encode(model, empty_pool(model, len(ids)), ids, 0)
    for mine, theirs in zip(jax.tree.leaves(pool), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


def test_pools_have_the_shape_of_their_layer(models):
    model = models("pattern", 0.4)
    shapes = [k.shape for k, v in empty_pool(model, 8) if k.shape == v.shape]
    assert shapes == [(2, 1, PAGE, 8)] * 5 + [(2, 2, PAGE, 16)]


def test_global_layers_rotate_a_quarter_from_the_middle_of_a_whole_head():
    """At head size 512 a quarter rotated: 64 of 256 pairs turn, with frequencies of 512."""
    positions = jnp.array([[3]])
    cos, sin = gemma._rotary(positions, 512, 128, 1e6)
    whole, _ = rope_tables(positions, 512, 1e6)
    np.testing.assert_array_equal(cos[0, 0, :64], whole[0, 0, :64])
    assert (np.asarray(cos[0, 0, 64:]) == 1).all()
    assert (np.asarray(sin[0, 0, 64:]) == 0).all()


def test_the_scale_of_the_embedding_is_rounded_first(models):
    """The root of 2816 is 53.07; in bfloat16 it is 53.0, and the head says the same."""
    cfg = dataclasses.replace(models("base", 0.4).config, hidden_size=2816)
    weights = {"embed": jnp.ones((1, 2816), jnp.bfloat16)}
    assert gemma.head(weights, cfg).embed_scale == 53.0
    assert float(gemma.embed(weights, cfg, jnp.array([0]))[0, 0]) == 53.0


def test_conditioning_on_nothing_is_still_a_norm(models):
    model = models("base", 1.0)
    rows = gemma.embed(model.params, model.config, jnp.arange(5)[None])
    got = gemma.condition(model.params, model.config, rows, jnp.zeros_like(rows))
    wide = np.asarray(rows, np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow
def test_whole_logits_are_the_encoders(models):
    model = models("base", 0.4)
    with pytest.raises(ValueError, match='use attention="causal"'):
        model.logits([[5, 6, 7]], "full")
    ids = np.arange(3, 24)
    with jax.default_matmul_precision("highest"):
        rows, _ = encode(model, empty_pool(model, len(ids)), ids, 0)
        want = gemma.unembed(model.params, model.config, rows)
        got = model.logits(ids[None], "causal")[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "bound", "nats"), [("bfloat16", 0.15, 0.5), ("fp8", 0.45, 1.5)])
def test_few_bits_keep_the_likeliest_tokens(golden, models, form, bound, nats):
    """Of weights rounded to 16 or to 8 bits, a damped net keeps its argmaxes and entropies."""
    model, n = models("base", 0.4), 24
    case = {k: golden[f"base/0.4/{n}/{k}"] for k in ("ids", "canvas", "expected", "conditioned")}
    rounded = {
        "bfloat16": lambda path, leaf: leaf.astype(jnp.bfloat16),
        "fp8": quantization.quantized,
    }[form]
    narrow = model.replace(params=jax.tree_util.tree_map_with_path(rounded, model.params))
    assert narrow.quantization == (None if form == "bfloat16" else form)
    dtype = narrow.params["embed"].dtype
    _, pool = encode(narrow, new_pool(model.config, 6, PAGE, dtype), case["ids"], 0)
    got = np.asarray(decode(narrow, pool, case["canvas"], case["expected"], n), np.float64)
    want = case["conditioned"]
    assert (got.argmax(-1) == want.argmax(-1)).mean() >= 0.75
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound

    def entropy(logits):
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return -(p * np.log(np.maximum(p, 1e-45))).sum(-1)

    assert np.abs(entropy(got / 0.8) - entropy(want / 0.8)).max() < nats


def visible(n, window, cells=4, causal=False):
    """What `by_block` lets rows of one block after n cached tokens see."""
    pages = -(-n // PAGE)
    mask = WindowMask(
        cell=jnp.arange(cells)[None],
        start=jnp.array([n]),
        live=jnp.array([[0, cells]]),
        context_len=jnp.array([n]),
        visible=None,
        causal=jnp.array([causal]),
        block_size=cells,
        window=window,
        by_block=True,
    )
    return np.asarray(mask.sees_context(pages * PAGE)[0, :, :n]), np.asarray(
        mask.sees_fresh(cells)[0]
    )


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_canvas_sees_itself_and_the_same_cached_keys_from_every_row(n, window):
    context, fresh = visible(n, window)
    at = np.arange(n)
    np.testing.assert_array_equal(context, np.broadcast_to(at >= n - (window - 1), (4, n)))
    assert fresh.all()
    context, fresh = visible(n, window, causal=True)
    row = n + np.arange(4)[:, None]
    np.testing.assert_array_equal(context, row - at[None] < window)
    apart = np.arange(4)[:, None] - np.arange(4)[None]
    np.testing.assert_array_equal(fresh, (apart >= 0) & (apart < window))


@pytest.mark.long
@pytest.mark.parametrize("window", [1, 2, 3, 5, 9, 30])
def test_pages_within_reach_hold_all_that_a_canvas_sees(window):
    """At every place of the canvas: what is left out is seen by no row, and counts stay."""
    cells, pages = 6, 8
    count = pages * PAGE + 1
    rows = jnp.arange(count)
    for causal in (False, True):
        mask = WindowMask(
            cell=jnp.broadcast_to(jnp.arange(cells), (count, cells)),
            start=rows,
            live=jnp.broadcast_to(jnp.array([0, cells]), (count, 2)),
            context_len=rows,
            visible=None,
            causal=jnp.full((count,), causal),
            block_size=cells,
            window=window,
            by_block=True,
            context_is_before=True,
        )
        table = jnp.broadcast_to(10 + jnp.arange(pages), (count, pages))
        near, few = within_reach(mask, table, PAGE)
        assert few.shape[1] == min(pages, max((window - 3) // PAGE + 2, 1))
        whole = np.asarray(mask.sees_context(pages * PAGE))
        seen = np.asarray(near.sees_context(few.shape[1] * PAGE))
        slots = np.asarray(few)[:, :, None] * PAGE + np.arange(PAGE)  # where each key lies
        for i in range(count):
            want = [np.flatnonzero(row) + 10 * PAGE for row in whole[i]]
            got = [slots[i].ravel()[row] for row in seen[i]]
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(*(one.sees_fresh(one.cell.shape[1]) for one in (near, mask)))
    assert within_reach(mask.replace(context_is_before=False), table, PAGE)[1] is table


@pytest.mark.long
def test_factors_of_random_weights_are_ones(models):
    """Drawn small, they would shrink the residual stream by 50 in every layer."""
    shapes = gemma.param_shapes(models("base", 0.4).config)
    drawn = dense.random_params(jax.random.key(0), shapes)
    for layer in drawn["layers"]:
        for name in ("mode_scale", "router_scale", "expert_scale", "post_ffn_norm"):
            assert (layer[name] == 1).all(), name
        assert 0 < float(jnp.std(layer["router"].astype(jnp.float32))) < 0.1


def test_config_is_the_same_in_both_spellings(models):
    from dllm_jax.models.families import parse_config

    released = config_of("groups")
    text = dict(released["text_config"])
    heads, size = text.pop("num_global_key_value_heads"), text.pop("global_head_dim")
    text["per_layer_config"] = {
        str(i): {"num_key_value_heads": heads, "head_dim": size}
        for i, kind in enumerate(text["layer_types"])
        if kind == "full_attention"
    }
    other = parse_config({**released, "text_config": text})
    assert other.config == parse_config(released).config == models("groups", 0.4).config
