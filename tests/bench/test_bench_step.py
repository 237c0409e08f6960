"""Proves `dllm-jax bench step`: its steps are the work of the shape it names, done by the model, in
the loop and in `LLM.generate` alike; floors equal those the issue's bars were drawn after; the same
row is printed, written, and drawn under the roof; what cannot be meant is refused before it runs.
"""

import contextlib
import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dllm_jax as dj
from dllm_jax.bench import measure, roofline, step
from dllm_jax.bench.plot import draw_roofline
from dllm_jax.bench.step import Shape
from dllm_jax.cli import bench_step, main
from dllm_jax.loading.model import Model
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import parse_config
from dllm_jax.models.published import PUBLISHED
from dllm_jax.models.quantization import with_quantized_head
from dllm_jax.strategies import AR, MultiBD
from tests.oracles.checkpoints import write_tiny

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_compile_cache")]

H200 = "NVIDIA H200"


def published(name):
    """A published model whose weights are but their shapes."""
    parsed = parse_config(PUBLISHED[name], name=name)
    arch = arch_of(parsed.config)
    shapes = arch.param_shapes(parsed.config, jnp.bfloat16)
    return Model(shapes, parsed.config, arch, parsed.defaults, source=name)


@pytest.mark.slow
def test_a_step_is_measured_proved_profiled_and_drawn(random_folder, tmp_path, capsys):
    out, png = tmp_path / "step.json", tmp_path / "roofline.png"
    argv = ["--model", str(random_folder), "--shapes", "2x1", "--context", "67", "--steps", "8"]
    argv += ["--repeats", "1", "--profile", "--plot", str(png), "--output", str(out)]
    assert main(["bench", "step", *argv]) == 0
    layout, reported = json.loads(out.read_text()), capsys.readouterr().out
    (row,) = layout["rows"]
    assert (layout["command"], layout["mode"]) == ("bench step", "fixed")
    assert {"device", "jax", "dllm_jax", "commit", "config", "dtype"} <= set(layout)
    # 67 tokens are 8 whole blocks of 8; 8 forwards of 2 slots, and a token each.
    assert (row["shape"], row["context"], row["steps"], row["nfe"]) == ("2x1x8", 64, 8, 16)
    assert row["occupancy"] == 1
    assert row["visible_tokens"] == 16
    assert row["tokens_per_forward"] == 1
    assert row["mean_context"] == 64 + 8 / 2
    assert row["prefill_nfe"] == 0  # the prompts are in the prefix cache: only steps are timed
    assert row["late_compiles"] == 0
    assert row["step_ms"] == pytest.approx(row["wall_s"] / 8 * 1e3)
    assert row["host_overhead"] == pytest.approx(1 - row["bare_step_ms"] / row["step_ms"])
    assert row["readout"]["first_token_matches_dense"]
    assert row["readout"]["head_in_program"]
    assert row["floor_ms"] is None
    kinds = row["profile"]["kinds"]
    assert {"gemm", "attention", "readout", "cache", "glue"} <= set(kinds)
    assert sum(kind["share"] for kind in kinds.values()) == pytest.approx(1)
    assert row["profile"]["steps"] == step.PROFILE_STEPS
    # Two layers: qkv, out, gate and up, down, however XLA cuts them, and never fewer.
    assert kinds["gemm"]["launches"] >= 8
    assert png.read_bytes().startswith(b"\x89PNG")
    assert f"{row['bare_step_ms']:.3f} [" in reported
    assert f"{row['step_ms']:.3f} [" in reported
    low, high = row["long_run_step_ms_range"]
    assert 0 < low <= row["long_run_step_ms"] <= high
    assert f"in the long run: bare {row['long_run_step_ms']:.3f} [" in reported
    assert "no floor known for this device" in reported
    assert "XLA's operations on the CPU" in reported


BARS = [  # issue 6: the floors its bars were drawn after
    ("JetLM/SDAR-1.7B-Chat", (1, 1, 32), 512, 0.83),
    ("JetLM/SDAR-1.7B-Chat", (1, 4, 32), 512, 0.90),
    ("JetLM/SDAR-1.7B-Chat", (8, 4, 32), 512, 5.22),
    ("JetLM/SDAR-1.7B-Chat", (32, 4, 32), 512, 20.9),
    ("JetLM/SDAR-8B-Chat", (1, 4, 32), 512, 3.75),
    ("JetLM/SDAR-1.7B-Chat", (1, 1, 32), 8192, 1.04),
]


@pytest.mark.parametrize(("name", "shape", "context", "floor"), BARS)
def test_the_floor_in_turn_is_the_one_of_the_bars(name, shape, context, floor):
    model = published(name)
    parts = roofline.parts_ms(roofline.step_parts(model, *shape, context), H200)
    assert set(parts) == {"dense", "attention", "head", "activations"}
    assert sum(parts.values()) == pytest.approx(floor, rel=0.01)
    slots, blocks, size = shape
    # Parts that cannot overlap take no less than ones that can.
    assert sum(parts.values()) > roofline.floor_ms(model, slots, blocks * size, context, H200)


@pytest.mark.parametrize(("slots", "floor"), [(1, 13.2), (4, 20.9), (16, 55.7)])
def test_the_floor_of_a_canvas_is_the_one_of_its_bars(slots, floor):
    """Issue 26's, at a context of 1.5 k: the expectation is one more product with the head."""
    model = published("google/diffusiongemma-26B-A4B-it")
    parts = roofline.parts_ms(roofline.step_parts(model, slots, 1, 256, 1536, True), H200)
    assert sum(parts.values()) == pytest.approx(floor, rel=0.02)
    assert parts["expected"] == parts["head"]
    assert roofline.experts_read(model, 256) == pytest.approx(128, abs=1e-4)


def test_a_canvas_and_its_head_in_8_bits_are_multiplied_at_twice_the_rate():
    """And the expectation, from the embedding, is not."""
    model = published("google/diffusiongemma-26B-A4B-it")
    work = 16, 1, 256, 1536, True
    plain = roofline.parts_ms(roofline.step_parts(model, *work), H200)
    small = model.replace(params=jax.eval_shape(with_quantized_head, model.params))
    small = roofline.parts_ms(roofline.step_parts(small, *work), H200)
    assert small == pytest.approx(plain | {"head": plain["head"] / 2})


def test_the_floor_in_turn_counts_experts():
    model = published("inclusionAI/LLaDA2.0-mini")
    parts = roofline.parts_ms(roofline.step_parts(model, 8, 4, 32, 512), H200)
    # All of 256 experts are hit by 1,024 cells: 19 layers x 256 x 3 x 2048 x 512 x 2 B / 4.3 TB/s.
    assert parts["experts"] == pytest.approx(19 * 256 * 3 * 2048 * 512 * 2 / 4.3e12 * 1e3)
    assert roofline.parts_ms(roofline.step_parts(model, 8, 4, 32, 512), "cpu") is None


def test_the_floor_is_that_of_the_shapes():
    model = published("JetLM/SDAR-1.7B-Chat")
    alone = roofline.floor_ms(model, 1, 32, 0, H200)
    assert alone == pytest.approx(0.80, abs=0.01)  # weights once, at 4.3 TB/s
    # 28 layers x 8 heads x 128 x 2 (K and V) x 2 bytes a token of context.
    with_context = roofline.floor_ms(model, 1, 32, 1000, H200)
    assert with_context - alone == pytest.approx(114_688 * 1000 / 4.3e12 * 1e3)
    # At 128 slots of 128 cells operations decide: 2 x 1.7 G x 16384 at 790 TFLOP/s.
    assert roofline.floor_ms(model, 128, 128, 0, H200) == pytest.approx(72, rel=0.03)
    assert roofline.floor_ms(model, 1, 32, 0, "cpu") is None


def test_the_floor_counts_the_experts_that_are_hit():
    model = published("inclusionAI/LLaDA2.0-mini")
    # 0.29 ms of weights that every step reads, 7.12 of experts, of which 32 cells that choose 8 of
    # 256 hit 64 %, and 4096 all.
    assert roofline.floor_ms(model, 1, 32, 0, H200) == pytest.approx(4.83, rel=0.02)
    # 1.1 G weights a cell, at 790 TFLOP/s: there operations decide.
    assert roofline.floor_ms(model, 32, 128, 0, H200) == pytest.approx(11.5, rel=0.02)


def test_devices_that_share_a_model_share_its_floor_and_tell_each_other_sums():
    alone = published("JetLM/SDAR-8B-Chat")
    several = alone.replace(split=SimpleNamespace(num_parts=4))
    work = 1, 4, 32, 512
    whole = roofline.parts_ms(roofline.step_parts(alone, *work), H200)
    parts = roofline.parts_ms(roofline.step_parts(several, *work), H200)
    assert parts["dense"] == pytest.approx(whole["dense"] / 4)
    assert parts["activations"] == whole["activations"]  # not split
    floors = [roofline.floor_ms(model, 1, 128, 512, H200) for model in (alone, several)]
    assert floors[1] == pytest.approx(floors[0] / 4)
    reported = roofline.reductions_ms(several, 128, H200)
    # 73 sums of 128 rows of 4,096 in bfloat16, of which 3/2 cross at 450 GB/s.
    assert reported == {"sums": 73, "bytes": 1 << 20, "ms": pytest.approx(73 * 1.5 * 2**20 / 450e6)}
    assert roofline.reductions_ms(alone, 128, H200) is None


@pytest.mark.slow
def test_a_step_of_several_devices_says_its_reductions(random_folder, capsys):
    argv = ["--model", str(random_folder), "--shapes", "1x1", "--context", "16", "--steps", "8"]
    assert main(["bench", "step", *argv, "--repeats", "1", "--tp", "2"]) == 0
    reported = capsys.readouterr().out
    layers = dj.load(random_folder).config.num_layers
    found = re.search(r"2 devices add (\d+) times [\d,]+ bytes; (\d+) reductions", reported)
    # Of the readout one, and one more between the two thresholds of rows that are drawn, whose
    # searches are loops of one each.
    assert found is not None
    assert [int(number) for number in found.groups()] == [2 * layers + 1, 2 * layers + 5]


def test_the_row_of_a_known_device_says_how_far_the_floor_is(monkeypatch):
    monkeypatch.setattr(step, "device_kind", lambda: H200)
    model = published("JetLM/SDAR-1.7B-Chat")
    found = {"step_ms": 2.0, "bare_step_ms": 1.6, "mean_context": 512}
    strategy = MultiBD(block_size=32, buffer_size=1)
    row = found | step._floors(model, 1, strategy, found)
    assert row["host_overhead"] == pytest.approx(0.2)
    assert row["bare_over_floor_in_turn"] == pytest.approx(1.6 / 0.834, rel=1e-2)
    assert row["step_over_floor"] == pytest.approx(2.0 / 0.814, rel=1e-2)
    row |= {"shape": "1x1x32", "context": 512, "bare_step_ms_range": [1.5, 1.7]}
    row |= {"step_ms_range": [1.9, 2.1]}
    row |= {"long_run_step_ms": 1.7, "long_run_step_ms_range": [1.6, 1.8]}
    reported = "\n".join(bench_step.row_lines(row))
    assert "1.600 [1.50 1.70]" in reported
    assert "0.814    0.834  x1.92, x2.40" in reported
    assert "dense 0.656" in reported


def test_the_long_run_counts_behind_its_seconds(monkeypatch):
    now, ran = [5.0], []

    def spend(count):
        now[0] += 0.01 * count
        ran.append(count)
        return 0.01 * count, count

    monkeypatch.setattr(measure, "_bare_loop", lambda *_: contextlib.nullcontext(spend))
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = measure.decode_step_samples(None, 1, 1, 8, steps=6, repeats=2, after_s=0.25)
    few = measure.FEW_STEPS
    assert ran == [few, *[few + 6] * 3, *[few, few + 6] * 2]
    assert found == pytest.approx([10.0, 10.0])


def test_points_lie_under_the_roof_at_their_intensity(tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    rows = [
        {"shape": "1x1x32", "bytes": 4.3e9, "operations": 8.6e9, "bare_step_ms": 2.0}
        | {"step_ms": 4.0, "bare_over_floor_in_turn": 2.0},
        {"shape": "32x4x32", "bytes": 1e9, "operations": 1e12, "bare_step_ms": 2.0}
        | {"step_ms": 2.5, "bare_over_floor_in_turn": 1.5},
    ]
    draw_roofline(rows, H200, tmp_path / "known.png")
    bare, generate, roof = pyplot.gcf().axes[0].get_lines()
    assert bare.get_xydata().tolist() == [[2.0, 4.3], [1000.0, 500.0]]  # TFLOP/s
    assert generate.get_xydata().tolist() == [[2.0, 2.15], [1000.0, 400.0]]
    (low, y_low), (ridge, y_ridge), (_, y_high) = roof.get_xydata()
    assert y_low == pytest.approx(4.3 * low)
    assert (ridge, y_ridge, y_high) == pytest.approx((790 / 4.3, 790, 790))
    draw_roofline(rows, "cpu", tmp_path / "unknown.png")
    axes = pyplot.gcf().axes[0]
    assert len(axes.get_lines()) == 2
    assert "no roof" in axes.get_title()
    monkeypatch.undo()
    pyplot.close("all")


def test_shapes_are_read_and_take_the_models_blocks():
    assert Shape.parse("8x4") == Shape(8, 4, None)
    assert Shape.parse("1x2x16") == Shape(1, 2, 16)
    model = SimpleNamespace(
        config=SimpleNamespace(mask_token_id=3, shift=True),
        defaults=SimpleNamespace(block_size=8, family="x"),
    )
    strategy = step.step_strategy(model, Shape(1, 4))
    assert (strategy.block_size, strategy.buffer_size) == (8, 4)
    assert strategy.accept_threshold >= 1  # nothing is surer: one token a step
    model.config.mask_token_id = -1
    assert isinstance(step.step_strategy(model, Shape(2, 1)), AR)


REFUSED = {
    "--shapes 1": "'1' is no shape; write slots x blocks",
    "--shapes 1x0": "'1x0' is no shape",
    "--shapes 1x1,axb": "'axb' is no shape",
    "--shapes 1x4096x32": "buffer_size=4096 must be a whole number in [1, 256]",
    "--steps 4": "value=4 must be a whole number in [8, 2147483647]",
    "--plot /no/such/file.png": "'/no/such/file.png' cannot be written",
    "--context 100000": "context=100000 and the text behind it need",
    "--context 200 --steps 64": "context=200 and the text behind it need 352 positions, the model",
    "--steps 1000": "lower --context, --steps or the blocks",
    "--strategy ar": "unknown argument '--strategy'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_meant_is_refused_in_one_line(words, random_folder, fails):
    argv = ["bench", "step", "--model", str(random_folder), *words.split()]
    assert REFUSED[words] in fails(2, *argv)


def measured(monkeypatch, *argv):
    """What `bench step` would measure: shape, context, steps of each row."""
    asked = []

    def note(model, shape, context, *, steps, draft, **_):
        strategy = step.step_strategy(model, shape, draft)
        asked.append((str(shape), step.context_len(model, strategy, context, steps, draft), steps))
        return {"bytes": None}

    monkeypatch.setattr(step, "measure_step", note)
    assert main(["bench", "step", "--json", *argv]) == 0
    return asked


def test_defaults_fit_the_model(random_folder, tmp_path, monkeypatch):
    """256 positions; blocks of 8. A text of 64 steps takes 2 (64 + 4) cells and two windows."""
    argv = ["--model", str(random_folder)]
    left = (256 - 2 * (64 + 4) - 2 * 32) // 8 * 8
    assert measured(monkeypatch, *argv) == [("1x1", left, 64), ("1x4", left, 64)]
    assert measured(monkeypatch, *argv, "--shapes", "2x1x4", "--steps", "9") == [
        ("2x1x4", (256 - 2 * 13 - 8) // 4 * 4, 9)
    ]
    assert measured(monkeypatch, *argv, "--context", "160", "--shapes", "1x2") == [
        ("1x2", 160, (256 - 160 - 2 * 16) // 2 - 4)
    ], "what the user said stays, the rest gives way"
    write_tiny("qwen3", tmp_path / "causal")
    assert [shape for shape, *_ in measured(monkeypatch, "--model", str(tmp_path / "causal"))] == [
        "1x1"
    ]


def test_defaults_of_a_round_fit_the_built_in_pair(monkeypatch, tmp_path, capsys, fails):
    """512 positions; a round may write its window of 17 cells."""
    argv = ["--model", "builtin:tiny-qwen3", "--draft", "builtin:tiny-qwen3-dflash"]
    steps = (512 - 512 // 8 - 2 * 17) // 17 - 4
    context = (512 - 17 * (steps + 4) - 2 * 17) // 17 * 17
    assert measured(monkeypatch, *argv) == [("1x1", context, steps)]
    assert (context, steps) == (68, 20)
    capsys.readouterr()
    for more, reported in (
        (["--plot", str(tmp_path / "roof.png")], "--plot: the work of a round of drafts is not kn"),
        (["--shapes", "1x1x99"], "width=99 must be in [1, 16]"),
        (["--steps", "64"], "need 1207 positions, the model has 512; lower --context, --steps or"),
    ):
        assert reported in fails(2, "bench", "step", *argv, *more)


def test_a_large_model_is_measured_as_ever():
    model: Any = SimpleNamespace(config=SimpleNamespace(max_position=32768))
    assert step.usual_sizes(model, [MultiBD(block_size=32, buffer_size=4)]) == (512, 64)


def test_steps_that_are_not_the_models_do_not_count(random_folder, monkeypatch):
    monkeypatch.setattr(measure, "first_token_is_the_models", lambda llm: False)
    llm = SimpleNamespace(engine=None, strategy=None)
    llm.model = SimpleNamespace(config=SimpleNamespace(vocab_size=97), split=None)
    program = "%dot.1 = f32[8,97]{1,0} dot(%a, %b)"
    outputs = [SimpleNamespace(metrics=SimpleNamespace(nfe=8, prefill_nfe=0), error=None)]
    outputs[0].outputs = [SimpleNamespace(token_ids=[1, 2])]
    outputs[0].prompt_token_ids = [0] * 8
    ran = SimpleNamespace(outputs=outputs, walls_s=[1.0], passes={}, steps={(1, 1): 8})
    ran.counts = {"num_steps": 8}
    monkeypatch.setattr(step, "run", lambda *args, **kwargs: ran)
    with pytest.raises(ValueError, match="not the readout's own"):
        step._generated(llm, [None], 8, 1, program)
    ran.counts = {"num_steps": 40}  # the request shared its steps with nobody
    with pytest.raises(ValueError, match="did not do the requested work"):
        step._generated(llm, [None], 8, 1, program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape"),
    [("qwen3", "2x1"), ("dream", "2x2x4"), ("llada2", "1x2x4"), ("fast_dllm_v2", "1x1x4")],
)
def test_every_kind_of_network_is_measured(family, shape, tmp_path):
    model = dj.load(str(write_tiny(family, tmp_path / "model")))
    row = step.measure_step(model, Shape.parse(shape), 64, steps=8, repeats=1, with_profile=True)
    assert row["steps"] == 8
    assert row["readout"]["first_token_matches_dense"]
    assert row["step_ms"] > 0
    assert ("experts" in row["profile"]["kinds"]) == (family == "llada2")
