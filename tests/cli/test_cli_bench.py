"""Proves `dllm-jax bench`: its numbers are of the work that was asked for, said once for people and
once as JSON, and whatever cannot be meant is refused in one line before the model is loaded.

The work is worked out again here: fixed work of n tokens a step takes ceil(L / n) forwards.
"""

import json
import re
from types import SimpleNamespace

import pytest

import dllm_jax as dj
from dllm_jax.bench.workload import Work
from dllm_jax.cli import bench, main
from tests.oracles.canvas_files import write_canvas
from tests.oracles.checkpoints import write_tiny

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_compile_cache")]

SMALL = ["--max-num-seqs", "2", "--max-model-len", "96"]
FIXED = ["--mode", "fixed", "--tokens-per-step", "3", "--input-len", "20", "--output-len", "31"]
ENGINE_FLAGS = (
    *("attention_implementation", "tensor_parallel_size", "max_num_seqs"),
    *("memory_utilization", "max_num_batched_tokens", "draft"),
)


def facts_of(capsys, *argv):
    assert main(["bench", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_latency_runs_the_batch_again_and_again(random_folder, capsys):
    model = ["--model", str(random_folder), *SMALL]
    facts = facts_of(capsys, "latency", *model, *FIXED, "--batch-size", "2", "--num-iters", "3")
    assert (facts["requests"], facts["visible_tokens"]) == (6, 6 * 31)
    assert (facts["batch"], facts["num_iters"]) == (2, 3)
    assert 0 < facts["batch_s"]["p50"] <= facts["batch_s"]["p99"]
    # The prompts of each batch are its own: none is found in the cache.
    assert facts["cached_tokens"] == 0
    assert facts["prefill_nfe"] >= 6
    assert facts["wall_s"] == pytest.approx(3 * facts["batch_s"]["p50"], rel=2)


@pytest.mark.slow
def test_adaptive_work_is_the_models_own(random_folder, capsys, tmp_path):
    (tmp_path / "prompts").write_text("Ann has 3 pens.\nHow many pages?\n", encoding="utf-8")
    argv = ["--prompt-file", str(tmp_path / "prompts"), "--num-prompts", "3", "--output-len", "24"]
    argv += ["--accept-threshold", "0.5", "--model", str(random_folder), *SMALL]
    facts = facts_of(capsys, "throughput", *argv, "--request-rate", "200")
    assert (facts["mode"], facts["strategy"]) == ("adaptive", "MultiBD")
    assert facts["thresholds"]["accept_threshold"] == 0.5
    assert facts["requests"] == 3
    assert facts["visible_tokens"] <= 3 * 24
    assert facts["request_rate"] == 200
    assert facts["host_overhead"] is None  # the engine waited for arrivals


REFUSED = {
    "": "the following arguments are required: WHAT",
    "speed": "invalid choice: 'speed'",
    "throughput --input-len 9:3": "lengths 9:3 must be 1 <= low <= high",
    "throughput --input-len many": "'many': write e.g. 512 or 16:4096",
    "throughput --request-rate 0": "value=0.0 must be above 0",
    "latency --request-rate 3": "unknown argument '--request-rate'",
    "throughput --mode fixed --strategy ar": "--strategy goes with --mode adaptive",
    "throughput --mode fixed --prompt-file x": "--prompt-file goes with --mode adaptive",
    "throughput --mode fixed --draft x": "--draft goes with --mode adaptive",
    "throughput --mode adaptive --tokens-per-step 2": "--tokens-per-step goes with --mode fixed",
    "throughput --mode fixed --accept-threshold 0.5": "fixed work has no thresholds",
    "throughput --tokens-per-step 99": "tokens_per_step=99 must be in [1, 48]",
    "throughput --mode fixed --buffer-size 1": "buffer_size=1 must be at least 2",
    "throughput --input-len 500 --output-len 99": "need 599 positions, there are 512",
    "throughput --out /no/such/file": "'/no/such/file' cannot be written",
    "latency --prompt-file /no/such": "prompt file '/no/such' cannot be read",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_meant_is_refused_in_one_line(words, fails):
    assert REFUSED[words] in fails((1, 2), "bench", *words.split())


def test_fixed_work_is_refused_where_nothing_is_masked(tmp_path, fails):
    folder = write_tiny("qwen3", tmp_path / "model")
    said = fails(2, "bench", "latency", "--model", str(folder))
    assert said == "fixed work fills masks, and qwen3 has no mask token; give --mode adaptive"


@pytest.mark.slow
def test_fixed_canvases_take_their_schedule(tmp_path, capsys):
    """Canvases of 12 at 5 tokens a step are 3 steps each, and 16 steps where nothing is said."""
    folder = write_canvas(tmp_path / "canvas")
    words = ["--model", str(folder), "--dtype", "float32", "--num-iters", "1"]
    words += ["--mode", "fixed", "--input-len", "9", "--output-len", "24", *SMALL[:2]]
    words += ["--max-model-len", "64"]
    facts = facts_of(capsys, "latency", *words, "--tokens-per-step", "5")
    assert (facts["mode"], facts["strategy"], facts["tokens_per_step"]) == (
        "fixed",
        "DiffusionGemma",
        4,  # the least that 3 steps take
    )
    assert facts["thresholds"]["confidence_threshold"] == 0
    assert facts["nfe"] == 2 * 3
    step = ["bench", "step", "--model", str(folder), "--dtype", "float32", "--repeats", "1"]
    assert main([*step, "--shapes", "1x3"]) == 2
    assert "one canvas beside one that is stored; use 1x1 or 1x2" in capsys.readouterr().err
    assert main([*step, "--steps", "16"]) == 2
    assert "use 17 or more" in capsys.readouterr().err
    assert main([*step, "--shapes", "2x2", "--context", "24", "--steps", "17", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["shape"], row["nfe"], row["visible_tokens"]) == ("2x2x12", 34, 24)
    assert row["experts_read"] == pytest.approx(6, abs=0.01)


@pytest.mark.parametrize(("asked", "config_len"), [(None, 128), (70, 70)])
def test_short_work_leaves_room_for_the_bare_loop(asked, config_len, monkeypatch):
    monkeypatch.setattr("dllm_jax.api.llm.LLM", lambda model, strategy, config, **kwargs: config)
    given = {"max_model_len": asked, "no_prefix_caching": False, "seed": 0, "page_size": 16}
    args = SimpleNamespace(**dict.fromkeys(ENGINE_FLAGS), **given)
    model = SimpleNamespace(config=SimpleNamespace(max_position=256))
    work = [Work([5] * 16, dj.SamplingParams(max_tokens=8))]
    strategy = dj.strategies.MultiBD(block_size=32)
    config = bench._engine(args, model, strategy, [work])
    assert config.max_model_len == config_len


def test_the_mode_follows_the_model_and_the_flags():
    def mode(**given):
        none = dict.fromkeys(("tokens_per_step", "input_len", "prompt_file", "draft"))
        args = {"model": "builtin:tiny-sdar", **none, **given}
        return bench._mode(type("Args", (), args))

    assert mode() == "adaptive"
    assert mode(model="random:JetLM/SDAR-1.7B-Chat") == "fixed"
    assert mode(tokens_per_step=4) == "fixed"
    assert mode(model="folder", prompt_file="file") == "adaptive"
    assert mode(model="folder", draft="folder") == "adaptive"


def test_lines_name_the_floor_and_the_share_that_is_right():
    percent = {"p50": 0.5, "p90": 1.0, "p99": 2.0}
    facts = {
        **dict.fromkeys(("model", "dtype", "device", "jax", "commit", "strategy"), "x"),
        **dict.fromkeys(("buffer_size", "block_size", "num_slots", "requests"), 1),
        **dict.fromkeys(("prompt_tokens", "visible_tokens", "nfe", "prefill_nfe"), 1),
        **dict.fromkeys(("cached_tokens", "preemptions"), 0),
        **{"mode": "adaptive", "accuracy": 0.875, "tokens_per_forward": 2.0, "wall_s": 3.0},
        **{"tok_s": 4.0, "decode_tok_s": 5.0, "ttfb_s": percent, "tpot_s": None, "e2e_s": percent},
        **{"step_ms": 3.0, "bare_step_ms": 2.5, "floor_ms": 1.5, "step_over_floor": 2.0},
        "host_overhead": 0.0123,
    }
    reported = "\n".join(bench.lines(facts))
    assert "87.5% right" in reported
    assert "floor 1.500 ms, x2.00; host overhead 1.2%" in reported
    assert re.search(r"first block +p50 500\.00 ms, p90 1\.000 s, p99 2\.000 s", reported)
    assert "per token" not in reported
