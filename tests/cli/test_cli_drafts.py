"""A draft goes with every verb that decodes, and with each it costs no token.

The pair is random: it drafts badly and ends the same. `generate`: test_dflash_drafts.py.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest

import dllm_jax as dj
from dllm_jax.api import snapshot
from dllm_jax.api.strategy import resolve_strategy, usual_strategy
from dllm_jax.bench.rounds import Rounds, round_figures, width_shares
from dllm_jax.cli import bench, main
from dllm_jax.cli.results import figures
from dllm_jax.engine.requests import CompletionOutput, DraftMetrics, Metrics, RequestOutput
from dllm_jax.strategies import AR, DFlash, MultiBD
from tests.api.test_snapshot import break_device
from tests.oracles.draft_files import write_draft, write_pair

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_compile_cache")]

TEMPLATE = "{% for m in messages %}w1 {{ m.content }} {% endfor %}w2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target that reads words, in its folder, and a draft of it."""
    folder = write_pair(tmp_path_factory.mktemp("pair"))
    settings = json.loads((folder / "target" / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def words(folder, *draft):
    return ["--model", str(folder / "target"), "--dtype", "float32", *draft]


def drafted(folder):
    return words(folder, "--draft", str(folder / "draft"))


# The strategy that a draft implies.


def test_a_draft_makes_dflash_the_strategy_of_ar_alone(folder):
    target = dj.load(folder / "target", dtype="float32")
    assert usual_strategy(target) == "ar"
    assert usual_strategy(target, "draft") == "dflash"
    assert resolve_strategy(target, None) == AR()
    assert resolve_strategy(target, None, "draft") == DFlash()
    assert resolve_strategy(target, "ar", "draft") == AR(), "who names one has it"
    denoiser = dj.load("builtin:tiny-sdar")
    assert isinstance(resolve_strategy(denoiser, None, "draft"), MultiBD)


def test_llm_and_generate_imply_it_too(folder):
    target = dj.load(folder / "target", dtype="float32")
    llm = dj.LLM(target, draft=folder / "draft", max_num_seqs=1, max_model_len=64, warm_up=False)
    assert llm.strategy == DFlash(5, (2, 0))
    with pytest.raises(
        ValueError, match=r"draft='.*/draft' does not fit MultiBD.*leave the dr.* out$"
    ):
        dj.generate("builtin:tiny-sdar", [[1, 2]], draft=folder / "draft")
    with pytest.raises(
        ValueError,
        match=r"not fit AR, which uses no draft; leave the draft out, or use the strategy 'df",
    ):
        dj.generate(target, [[1, 2]], "ar", draft=folder / "draft")


# What is refused.


REFUSED = {
    "generate w1": "draft: model '/no/such' does not exist",
    "chat": "draft: model '/no/such' does not exist",
    "trace w1": "draft: model '/no/such' does not exist",
    "eval --problems 1": "draft: model '/no/such' does not exist",
    "eval --strategy ar": "--draft '/no/such': none of ar drafts; add --strategy dflash",
    "bench latency --prompt-file FILE": "draft: model '/no/such' does not exist",
    "bench throughput --mode fixed": "--draft goes with --mode adaptive; the mode is fixed",
}


@pytest.mark.parametrize("verb", REFUSED)
def test_what_cannot_be_meant_is_refused_in_one_line(verb, folder, tmp_path, fails, monkeypatch):
    (tmp_path / "FILE").write_text("w1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    argv = [*verb.split(), *words(folder, "--draft", "/no/such")]
    assert REFUSED[verb] in fails((1, 2), *argv)


@pytest.mark.parametrize("verb", ["generate w1", "eval --problems 1", "trace w1"])
def test_dflash_asks_for_its_draft(verb, folder, tmp_path, fails, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = fails(1, *verb.split(), *words(folder), "--strategy", "dflash")
    assert said == "draft=None: DFlash drafts with a model of its own; give one (draft=, --draft)"


# Every verb decodes with it.


def text_of(capsys, *argv):
    assert main(list(argv)) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_trace_shows_what_each_round_settled(folder, capsys):
    argv = ["trace", "w1 w2", "--raw", "--json", "--max-tokens", "14"]
    plain = json.loads(text_of(capsys, *argv, *words(folder)))
    rounds = json.loads(text_of(capsys, *argv, *drafted(folder)))
    assert (plain["strategy"], rounds["strategy"]) == ("AR", "DFlash")
    assert rounds["tokens"] == plain["tokens"]
    assert rounds["nfe"] <= plain["nfe"]
    assert sum(step["commit_len"] for step in rounds["steps"]) == 13, "all but the last token"


@pytest.mark.slow
def test_eval_compares_it_with_ar_on_the_same_problems(folder, capsys):
    argv = ["eval", *drafted(folder), "--problems", "3", "--half", "plain", "--json"]
    facts = json.loads(text_of(capsys, *argv, "--max-tokens", "10", "--batch-size", "2"))
    assert list(facts["strategies"]) == ["ar", "dflash"], "and no run at one token a forward"
    results = facts["halves"]["plain"]["results"]
    plain, rounds = results["ar"], results["dflash"]
    assert plain["exact"] == rounds["exact"]
    assert plain["mean_tokens"] == rounds["mean_tokens"]
    assert plain["tokens_per_forward"]["value"] <= rounds["tokens_per_forward"]["value"]
    assert plain["draft"] is None
    assert plain["denoise_forwards_per_block"] is rounds["denoise_forwards_per_block"] is None
    assert check_drafts(rounds["draft"]) <= rounds["mean_forwards"] * 3


def check_drafts(draft):
    """Figures that agree with each other; how many rounds there were."""
    counts = draft["rounds_by_length"]
    assert draft["rounds"] == sum(counts) > 0
    emitted = sum(n * count for n, count in enumerate(counts, 1))
    assert draft["mean_accepted_length"] == pytest.approx(emitted / draft["rounds"])
    assert all(share is None or 0 <= share <= 1 for share in draft["accepted_per_position"])
    assert len(draft["accepted_per_position"]) == len(counts) - 1
    return draft["rounds"]


@pytest.mark.slow
def test_bench_measures_its_rounds(folder, capsys, tmp_path):
    (tmp_path / "prompts").write_text("w1 w2 w3\nw4\n", encoding="utf-8")
    argv = ["--prompt-file", str(tmp_path / "prompts"), "--output-len", "24", "--json"]
    argv += ["--num-prompts", "2"]  # the first there are: later ones know what drafts are worth
    facts = json.loads(text_of(capsys, "bench", "throughput", *drafted(folder), *argv))
    assert (facts["mode"], facts["strategy"], facts["block_size"]) == ("adaptive", "DFlash", 6)
    assert facts["requests"] == 2
    assert 2 < facts["nfe"] <= facts["visible_tokens"]
    assert check_drafts(facts["draft"]) <= facts["nfe"], "a random draft is switched off"
    reported = "\n".join(bench.lines(facts))
    assert f"drafts       {facts['draft']['rounds']} rounds, mean accepted length " in reported
    assert "(the target's own token counted), accepted by place" in reported
    assert facts["draft_model"] == str(folder / "draft")
    assert facts["draft_ms"] + facts["verify_ms"] == pytest.approx(facts["bare_step_ms"])
    assert facts["bare_step_ms"] + facts["host_ms"] == pytest.approx(facts["step_ms"])
    (program,) = facts["round_programs"]
    assert (program["rows"], program["steps"]) == (2, facts["decode_steps"])
    assert len(program["width_ms"]) == len(program["widths"]) == 2
    assert sum(program["shares"]) == pytest.approx(1)
    assert min(program["width_ms"]) > 0 < program["draft_pass_ms"]
    assert f"round        draft {facts['draft_ms']:.3f} ms, verify " in reported


def test_the_last_line_says_how_long_accepted_drafts_were():
    text = CompletionOutput(0, "", [1] * 9, "length")
    outputs = [
        RequestOutput(
            "", "", [], [text], True, Metrics(3, 1, 0, 0, 3.0, 0.5, 1.0, draft=draft), None
        )
        for draft in (DraftMetrics((2, 0, 1), (3, 3), (1, 1)), None)
    ]
    assert "6 forwards, 3.00 tokens per forward, mean accepted length 1.67, " in figures(
        outputs, 1.0, 0.0
    )
    assert "accepted" not in figures(outputs[1:], 1.0, 0.0)
    nothing = DraftMetrics((0, 0), (0,), (0,))
    assert nothing.figures()["mean_accepted_length"] is None, "JSON has no NaN"
    assert nothing.figures()["accepted_per_position"] == [None]
    assert DraftMetrics.together([None, nothing, None]) == nothing
    assert DraftMetrics.together([None]) is None


def test_rounds_by_their_width_and_what_they_take():
    """Ten steps, 3 of them without drafts; the last round could use 3 cells of 8."""
    drafted = DraftMetrics((7, *[0] * 7), (7, 7, 6, 6, 6, 6, 6), (0,) * 7)
    shares = width_shares((1, 8), 10, drafted)
    assert shares == pytest.approx([0.3, 0.7])
    assert width_shares((8,), 10, drafted) == [1.0]
    assert width_shares((1, 4), 5, None) == [1.0, 0.0]
    rounds = Rounds(2, (1, 8), shares, (1.0, 18 / 7), 0.5)
    assert rounds.bare_ms == pytest.approx(0.3 + 1.8)
    assert rounds.draft_ms == pytest.approx(0.35)
    other = Rounds(4, (1, 8), (0.0, 1.0), (2.0, 4.0), 1.0)
    reported = round_figures({(2, 1): rounds, (4, 1): other}, {(2, 1): 30, (4, 1): 10}, 5.0)
    assert reported["draft_ms"] == pytest.approx((30 * 0.35 + 10 * 1.0) / 40)
    assert reported["verify_ms"] == pytest.approx((30 * 2.1 + 10 * 4.0) / 40 - reported["draft_ms"])
    assert reported["host_ms"] == pytest.approx(5.0 - reported["draft_ms"] - reported["verify_ms"])
    assert [one["steps"] for one in reported["round_programs"]] == [30, 10]
    assert round_figures({(2, 1): rounds}, {(2, 1): 3}, None)["host_ms"] is None


def test_the_floor_of_a_round_is_that_of_both_passes(monkeypatch):
    monkeypatch.setattr(
        "dllm_jax.bench.roofline.floor_ms",
        lambda model, rows, cells, context, kind: None if kind == "cpu" else model * rows * cells,
    )
    programs = SimpleNamespace(model=10.0, aux={"draft": 1.0}, strategy=DFlash(16, (0,)))
    engine: Any = SimpleNamespace(runner=SimpleNamespace(programs=programs))
    rounds = Rounds(2, (1, 8), (0.25, 0.75), (1.0, 2.0), 0.5)
    assert rounds.floor_ms(engine, 0.0) is None
    monkeypatch.setattr("jax.devices", lambda: [SimpleNamespace(device_kind="some")])
    judged = 0.25 * 2 * 10 * 1 + 0.75 * 2 * 10 * 8
    assert rounds.floor_ms(engine, 0.0) == judged + 0.75 * 2 * 16


@pytest.mark.slow
def test_bench_measures_rounds_of_given_slots_and_widths(folder, capsys):
    argv = ["bench", "step", *drafted(folder), "--steps", "8", "--repeats", "2"]
    argv += ["--context", "60", "--shapes", "1x1,2x1x3"]
    facts = json.loads(text_of(capsys, *argv, "--json"))
    assert facts["draft_model"] == str(folder / "draft")
    assert [row["shape"] for row in facts["rows"]] == ["1x1x5", "2x1x3"]
    for row in facts["rows"]:
        assert row["strategy"] == "DFlash"
        assert (row["steps"], row["nfe"]) == (8, 8 * row["slots"])
        assert row["draft_ms"] > 0
        parts = row["draft_ms"] + row["verify_ms"] + row["host_ms"]
        assert parts == pytest.approx(row["step_ms"])
    assert main([*argv[:-1], "1x2"]) == 2
    assert "shape 1x2: drafts are judged a block at a time" in capsys.readouterr().err


# What a device failure leaves is run again with the draft.


@pytest.mark.slow
def test_replay_goes_on_with_the_draft(folder, capsys, monkeypatch, tmp_path):
    target = dj.load(folder / "target", dtype="float32")
    params = dj.SamplingParams(max_tokens=20, temperature=0.9, seed=7, ignore_eos=True)
    prompt = list(range(5, 26))

    def make_llm():
        draft = folder / "draft"
        llm = dj.LLM(target, draft=draft, warm_up=False, max_num_seqs=1, max_model_len=64)
        aux = llm.engine.runner.programs.aux["draft"]
        llm.engine.save_snapshot = snapshot.snapshot_saver(
            target, llm.strategy, llm.config, tmp_path, aux
        )
        return llm

    (whole,) = make_llm().generate([prompt], params, use_tqdm=False)
    llm = make_llm()
    break_device(llm, 6, monkeypatch)
    (broken,) = llm.generate([prompt], params, use_tqdm=False)
    monkeypatch.undo()
    monkeypatch.setattr("dllm_jax.loading.jax_settings.enable_compile_cache", lambda: None)
    reported, ids = broken.outputs[0].token_ids, whole.outputs[0].token_ids
    assert 0 < len(reported) < len(ids)
    assert reported == ids[: len(reported)]
    (path,) = tmp_path.iterdir()
    assert snapshot.load_snapshot(path).draft is not None
    last = json.loads(text_of(capsys, "replay", str(path), "--json").splitlines()[-1])
    assert last["token_ids"] == ids
    write_draft(folder / "other", seed=9)
    assert main(["replay", str(path), "--draft", str(folder / "other")]) == 1
    assert "is not the snapshot's" in (said := capsys.readouterr().err)
    assert said.endswith("it differs in its weights; give the same one by --draft\n")
