"""Proves the objective of DiffusionGemma's training says what its decoder will see.

The two passes over a row give the numbers of the paged forward that decoding runs, for a prompt
below and above the window; a canvas sees no text of its own and none after it; both losses reach
the weights that they should; and a run learns and exports a folder that decodes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.models import dense, gemma
from dllm_jax.strategies import load_strategy
from dllm_jax.training import diffusion_gemma, export, optimizer, report, stream
from dllm_jax.training.tokenizer import EOS_ID

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("promotion")]

CFG = dataclasses.replace(
    diffusion_gemma.TINY_GEMMA,
    hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=48, expert_size=16,
    global_head_dim=32, global_rotary_dim=16, window=6, canvas_length=8,
)  # fmt: skip
RUN = diffusion_gemma.TrainConfig(
    model=CFG,
    data=stream.StreamConfig(
        batch_size=8, lengths=(64, 64), room=1, example_share=0.0, family="sums"
    ),
    num_steps=30,
    log_every=5,
)
T = 24


@pytest.fixture(scope="module")
def params():
    drawn = dense.random_params(jax.random.key(1), gemma.param_shapes(CFG, jnp.float32))
    # branches that matter, and a factor for each mode
    drawn = jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 1 else leaf, drawn)
    layers = [{**layer, "mode_scale": jnp.array([0.7, 1.3])} for layer in drawn["layers"]]
    return {**drawn, "layers": layers}


def rows_of(params, ids):
    return gemma.embed(params, CFG, ids)


def tokens(rows=3, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(3, 768, (rows, T)), jnp.int32)


@jax.jit
def logits_of(params, text, shown, expected, start):
    """Logits of a canvas as training computes them."""
    _, cache = diffusion_gemma.encode(params, CFG, rows_of(params, text))
    return diffusion_gemma.denoise(params, CFG, rows_of(params, shown), expected, start, cache)


def whole_logits(params, text, start, shown, expected):
    """Logits of a canvas from one dense pass over [text before it ; canvas]."""
    from dllm_jax.models import reference

    ids = jnp.concatenate([text[:start], shown])
    n, canvas = len(ids), jnp.arange(len(ids)) >= start
    mixed = gemma.condition(params, CFG, rows_of(params, shown)[None], expected[None])
    x = jnp.concatenate([rows_of(params, text[:start])[None], mixed], 1)
    row, column = jnp.arange(n)[:, None], jnp.arange(n)[None]

    def attend(layer, q, k, v):
        view = gemma.layer_view(CFG, layer)
        window = n + 1 if view.window is None else view.window
        from_ = jnp.where(canvas[:, None], start, row)
        causal = (column <= row) & (row - column < window)
        behind = (column < start) & (from_ - column < window)
        sees = jnp.where(canvas[:, None], behind | canvas[None], causal)
        return reference.attention(q, k, v, sees[None], view.scale)

    mode = jnp.where(canvas, gemma.DECODER, gemma.ENCODER)[None]
    hidden, _ = gemma.trunk(params, CFG, x, jnp.arange(n)[None], attend, mode=mode)
    return gemma.unembed(params, CFG, hidden)[0, start:]


@pytest.mark.slow
def test_a_noised_canvas_reads_as_one_dense_pass_over_what_it_sees(params):
    text, start = tokens(), jnp.array([2, 6, 15])
    shown = tokens(seed=1)[:, : CFG.canvas_length]
    expected = jax.random.normal(jax.random.key(2), (3, CFG.canvas_length, CFG.hidden_size))
    got = logits_of(params, text, shown, expected, start)
    dense_pass = jax.jit(whole_logits, static_argnums=2)
    for i in (0, 2):
        want = dense_pass(params, text[i], int(start[i]), shown[i], expected[i])
        np.testing.assert_allclose(got[i], want, atol=2e-4)
    assert float(jnp.std(got)) > 0.1


@pytest.mark.slow
def test_the_encoder_is_the_causal_model_of_the_text(params):
    text = tokens()
    got, _ = diffusion_gemma.encode(params, CFG, rows_of(params, text))
    model = export.as_model(params, CFG, "diffusion_gemma")
    np.testing.assert_allclose(got, model.logits(text, "causal"), atol=2e-4)


def test_a_canvas_does_not_see_its_own_text_or_what_follows(params):
    text, start = tokens(), jnp.array([2, 6, 15])
    shown = tokens(seed=1)[:, : CFG.canvas_length]
    none = jnp.zeros((3, CFG.canvas_length, CFG.hidden_size))

    def logits(text):
        return logits_of(params, text, shown, none, start)

    behind = jnp.arange(T)[None] >= start[:, None]
    other = jnp.where(behind, (text + 5) % 768, text)
    np.testing.assert_array_equal(logits(text), logits(other))
    before = text.at[:, 1].add(1)
    assert (np.abs(logits(text) - logits(before)).max(axis=(1, 2)) > 1e-4).all()


def drawn(rows=4000, **noise):
    text = jnp.full((rows, T), 7, jnp.int32)
    prompt_len = jnp.full((rows,), 5)
    length = jnp.full((rows,), 5 + 11)  # two canvases of 8
    return diffusion_gemma.draw_canvas(
        jax.random.key(0), CFG, diffusion_gemma.NoiseConfig(**noise), text, prompt_len, length
    )


def test_canvases_and_noise_have_the_shares_of_the_recipe():
    canvas = drawn(conditioned_share=0.25)
    assert sorted(set(np.asarray(canvas.start).tolist())) == [5, 13]
    assert abs(float((canvas.start == 5).mean()) - 0.5) < 0.03
    changed = np.asarray(canvas.shown != canvas.truth).mean(axis=1)
    assert abs(changed.mean() - 0.5) < 0.02
    assert np.abs(np.histogram(changed, bins=4, range=(0, 1))[0] / 4000 - 0.25).max() < 0.1
    assert abs(float(canvas.conditioned.mean()) - 0.25) < 0.03
    assert 0.4 <= float(canvas.heat.min()) < float(canvas.heat.max()) <= 0.8
    noise = np.asarray(canvas.shown)[np.asarray(canvas.shown != canvas.truth)]
    assert noise.min() < 10
    assert noise.max() > 757


def test_behind_the_end_of_a_row_stands_the_end_of_sequence():
    text = jnp.full((1, T), 7, jnp.int32)
    canvas = diffusion_gemma.draw_canvas(
        jax.random.key(0),
        CFG,
        diffusion_gemma.NoiseConfig(),
        text,
        jnp.array([T - 3]),
        jnp.array([T]),
    )
    assert canvas.truth.tolist() == [[7] * 3 + [EOS_ID] * 5]


@pytest.mark.slow
def test_the_gradient_flows_from_the_canvas_into_the_encoder(params):
    text, prompt_len, length = tokens(), jnp.array([4, 6, 9]), jnp.array([20, 22, 24])
    canvas = diffusion_gemma.draw_canvas(
        jax.random.key(3), CFG, diffusion_gemma.NoiseConfig(), text, prompt_len, length
    )

    def of_canvas(params):
        total, metrics = diffusion_gemma.loss(params, CFG, text, prompt_len, length, canvas)
        return total - metrics["next_loss"]

    gradient = jax.jit(jax.grad(of_canvas))(params)
    encoder, decoder = np.abs(gradient["layers"][0]["mode_scale"])
    assert encoder > 1e-5
    assert decoder > 1e-5
    assert float(jnp.abs(gradient["condition_down"]).max()) > 1e-6


@pytest.mark.slow
def test_muon_takes_each_expert_and_each_projection_as_a_matrix_of_its_own(params):
    layer = {name: leaf for name, leaf in params["layers"][2].items() if leaf.ndim > 1}
    done = optimizer.orthogonalize({"layers": [layer]})["layers"][0]
    assert jax.tree.map(jnp.shape, done) == jax.tree.map(jnp.shape, layer)
    for name in ("experts_gate_up", "experts_down", "wqk"):
        parts = optimizer._split(name, layer[name])
        np.testing.assert_array_equal(optimizer._join(name, layer[name], parts), layer[name])
    gate = np.asarray(done["experts_gate_up"][1, :, 0], np.float64)  # [32, 16]: its columns
    values = np.linalg.svd(gate, compute_uv=False)
    assert values.min() > 0.5
    assert values.max() < 1.5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("canvas")
    run = diffusion_gemma.train(RUN, out, num_workers=0, say=lambda _: None)
    export.save_canvas(
        run["params"], CFG, run["tokenizer"], out / "model", {"max_denoising_steps": 3}
    )
    return out, run


@pytest.mark.slow
def test_a_small_canvas_model_learns(trained):
    steps, _ = report.read_log(trained[0] / "metrics.jsonl")
    assert steps[0]["loss"] > 8  # two of log 768
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]


@pytest.mark.slow
def test_what_is_exported_decodes_with_its_own_numbers(trained):
    with pytest.warns(UserWarning, match="stop ids 1, 50, 106 are not used: the tokenizer has"):
        model = dj.load(trained[0] / "model")
    assert model.config == CFG
    assert dict(model.defaults.numbers) == {"max_denoising_steps": 3.0}
    assert isinstance(load_strategy(model.defaults.strategy), dj.strategies.DiffusionGemma)
    out = dj.generate(model, [[3, 40, 50, 4]], max_tokens=12, temperature=0.0, ignore_eos=True)
    assert int(out.length[0]) == 12
    assert int(out.nfe[0]) <= 6
