"""Proves the figures of `dllm-jax eval`: counts against the library and by hand, intervals against
published values, and the paired comparison on cases whose answer is known.
"""

import dataclasses
import json
import re

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.cli import main
from dllm_jax.tasks import evaluate, summary
from dllm_jax.tasks.problems import problem

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_compile_cache")]

COUNT = 5


@pytest.fixture(scope="module")
def solved(random_folder):
    model = dj.load(random_folder)
    problems = evaluate.held_out("plain", COUNT, seed=3)
    strategy = dj.strategies.BlockDiffusion(block_size=8)
    of = evaluate.ProblemSet(problems, max_tokens=20)
    return model, problems, strategy, evaluate.solve(model, strategy, of, batch_size=2)


@pytest.mark.slow
def test_counts_are_those_of_the_library(solved):
    model, problems, strategy, outcome = solved
    prompts = [model.tokenizer(f"<|user|>{p.question}<|assistant|>")["input_ids"] for p in problems]
    out = dj.generate(model, prompts, strategy, max_tokens=20)
    assert outcome.forwards.tolist() == out.nfe.tolist()
    assert outcome.tokens.tolist() == out.length.tolist()
    for i, text in enumerate(outcome.texts):
        assert text == model.tokenizer.decode(out.tokens[i, : out.length[i]].tolist())
    # one block at a time: every block but the last one visited costs exactly one commit pass
    ends = [len(ids) + int(n) for ids, n in zip(prompts, out.length, strict=True)]
    for i, (ids, end) in enumerate(zip(prompts, ends, strict=True)):
        touched = {position // 8 for position in range(len(ids), end)}
        if outcome.finish[i] == "stop":
            touched |= {end // 8}
        assert outcome.blocks is not None
        assert outcome.blocks[i] == len(touched)
        assert outcome.forwards[i] - outcome.denoise[i] == len(touched) - 1


@pytest.mark.slow
def test_a_sweep_is_the_solves_of_its_settings(solved):
    """Batches hold rows of both settings; forwards that look at a full block are no commits."""
    model, problems, _, _ = solved
    strategy = dj.strategies.Edit(block_size=8, edit_threshold=1.0)
    settings = [{"accept_threshold": 1.0}, {"accept_threshold": 0.0}]
    done, of = [], evaluate.ProblemSet(problems, max_tokens=20)
    swept = evaluate.sweep(
        model,
        strategy,
        settings,
        of,
        batch_size=4,
        progress=lambda number, _: done.append(number),
    )
    assert done == [4, 8, 10]
    for setting, outcome in zip(settings, swept, strict=True):
        alone = evaluate.solve(model, strategy.replace(**setting), of, batch_size=4)
        for name in ("right", "tokens", "forwards", "denoise", "blocks"):
            assert getattr(outcome, name).tolist() == getattr(alone, name).tolist(), name
        assert (outcome.texts, outcome.finish) == (alone.texts, alone.finish)
        assert outcome.blocks is not None
        assert (outcome.forwards - outcome.denoise).tolist() == (outcome.blocks - 1).tolist()
    slow, fast = swept
    assert fast.blocks is not None
    assert fast.denoise.tolist() == (2 * fast.blocks).tolist()  # filled at once, and looked at
    assert (slow.denoise > fast.denoise).all()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rows"), [(32, [COUNT, COUNT]), (4, [4, 4, 4])])
def test_a_batch_has_no_more_rows_than_problems(solved, monkeypatch, size, rows):
    """And what compiles the program before the clock starts takes one step."""
    model, problems, _, _ = solved
    seen, finish = [], evaluate._finish

    def watched(model, session):
        part, state = finish(model, session)
        seen.append((len(part[0]), int(part[2].max())))
        return part, state

    monkeypatch.setattr(evaluate, "_finish", watched)
    strategy = dj.strategies.BlockDiffusion(block_size=8)
    of = evaluate.ProblemSet(problems, max_tokens=20)
    evaluate.solve(model, strategy, of, batch_size=size)
    assert [count for count, _ in seen] == rows
    assert seen[0][1] == 1
    assert all(nfe > 1 for _, nfe in seen[1:])


def test_problems_are_held_out_and_repeatable():
    problems = evaluate.held_out("plain", COUNT, seed=3)
    assert problems == [problem("plain", 3, i, heldout=True) for i in range(COUNT)]


def test_summary_by_hand():
    outcome = evaluate.Outcome(
        right=np.array([True, False]),
        tokens=np.array([30, 10]),
        forwards=np.array([6, 10]),
        denoise=np.array([4, 6]),
        blocks=np.array([2, 3]),
        texts=("", ""),
        finish=("stop", "length"),
        seconds=2.0,
    )
    figures = summary.summarise(outcome)
    assert figures["exact"]["value"] == 0.5
    assert figures["tokens_per_forward"]["value"] == 40 / 16
    assert figures["tokens_per_forward_without_commits"]["value"] == 40 / 10
    assert figures["tokens_per_forward_per_request"]["value"] == (30 / 6 + 1) / 2
    assert figures["denoise_forwards_per_block"]["value"] == 10 / 5
    assert figures["mean_commit_forwards"] == 3
    assert (figures["unfinished"], figures["tok_s"]) == (1, 20)
    assert figures["tokens_per_forward"]["ci95"] == [1.0, 5.0]  # two problems: either one alone


def test_a_strategy_that_commits_by_tokens_has_no_forwards_a_block():
    from dllm_jax.cli.eval import table

    by_tokens = [dj.strategies.AR(), dj.strategies.DFlash()]
    by_blocks = [dj.strategies.BlockDiffusion(block_size=8), dj.strategies.Edit(block_size=16)]
    assert [evaluate.block_of(one) for one in (*by_tokens, *by_blocks)] == [None, None, 8, 16]
    facts = {"model": "m", "dtype": "d", "device": "x", "seed": 0}
    without = summary.summarise(dataclasses.replace(many(0), blocks=None))
    assert without["denoise_forwards_per_block"] is None
    results = {"ar": without, "multi_bd": summary.summarise(many(0))}
    content = {"results": results, "against": "ar", "comparisons": {}}
    rows = table({**facts, "halves": {"plain": content}}).splitlines()[-2:]
    assert [row.split()[-2] for row in rows] == ["-", "3.14"]


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),  # published tables of the score interval
    [(8, 10, 0.4902, 0.9433), (0, 20, 0.0, 0.1611), (50, 100, 0.4038, 0.5962)],
)
def test_wilson_interval(right, count, low, high):
    got = summary.wilson(np.arange(count) < right)
    assert got == pytest.approx([low, high], abs=1e-4)


def many(seed, speed=1.0, flip=0):
    """2,000 problems, three quarters right; `flip` of the right ones made wrong."""
    rng = np.random.default_rng(seed)
    right = rng.random(2000) < 0.75
    right[np.flatnonzero(right)[:flip]] = False
    forwards = rng.integers(5, 15, 2000)
    return evaluate.Outcome(
        right=right,
        tokens=np.full(2000, 80),
        forwards=np.maximum((forwards / speed).round().astype(int), 1),
        denoise=forwards,
        blocks=np.full(2000, 3),
        texts=("",) * 2000,
        finish=("stop",) * 2000,
        seconds=1.0,
    )


def test_pairing_narrows_the_comparison():
    base = many(0)
    worse = many(0, flip=20)
    paired = summary.compare(base, worse)["exact_points"]
    assert paired["value"] == pytest.approx(-1.0)
    assert -1.5 < paired["ci95"][0] < -1.0 < paired["ci95"][1] < -0.5
    stranger = summary.compare(base, many(1))["exact_points"]
    width = stranger["ci95"][1] - stranger["ci95"][0]
    assert width > 4 * (paired["ci95"][1] - paired["ci95"][0])


def test_speedup_is_the_quotient_of_tokens_per_forward():
    base, twice = many(0), dataclasses.replace(many(0), forwards=many(0).forwards * 2)
    figures = summary.compare(twice, base)["speedup"]
    assert figures["value"] == pytest.approx(2.0)
    assert figures["ci95"] == pytest.approx([2.0, 2.0])


def test_command_prints_the_table_and_writes_the_object(solved, random_folder, capsys, tmp_path):
    model, problems, _, outcome = solved
    argv = ["eval", "--model", str(random_folder), "--half", "plain", "--problems", str(COUNT)]
    argv += ["--seed", "3", "--batch-size", "2", "--no-one-token", "--max-tokens", "20"]
    argv += ["--output", str(tmp_path / "r"), "--record", str(tmp_path / "texts")]
    argv += ["--strategy", "block_diffusion", "--strategy", "multi_bd,buffer_size=3"]
    assert main(argv) == 0
    records = dj.load_records(tmp_path / "texts")
    assert [one.law["problem"] for one in records] == 2 * [*range(COUNT)]
    strategy = dj.strategies.MultiBD(block_size=8, buffer_size=3)
    prompts = evaluate.encode(model, problems)
    alone = dj.record(model, prompts[:1], strategy, max_tokens=20)[0].record
    for name in ("prompt_ids", "position", "step", "token"):
        np.testing.assert_array_equal(getattr(records[COUNT], name), getattr(alone, name))
    np.testing.assert_allclose(records[COUNT].log_prob, alone.log_prob, atol=1e-4)
    facts = json.loads((tmp_path / "r").read_text())
    results = facts["halves"]["plain"]["results"]
    assert list(results) == ["block_diffusion", "multi_bd,buffer_size=3"]
    assert results["block_diffusion"]["problems"] == COUNT
    assert results["block_diffusion"]["mean_forwards"] == outcome.forwards.mean()
    reported = facts["strategies"]["multi_bd,buffer_size=3"]
    assert (reported["name"], reported["fields"]["buffer_size"]) == ("multi_bd", 3)
    texts = [
        row["outputs"]["block_diffusion"]["text"] for row in facts["halves"]["plain"]["problems"]
    ]
    assert tuple(texts) == outcome.texts
    shown = capsys.readouterr().out
    speed = results["multi_bd,buffer_size=3"]["tokens_per_forward"]["value"]
    assert f"{speed:.2f} [" in shown
    assert "multi_bd,buffer_size=3 against block_diffusion" in shown


def test_shared_fields_go_where_they_fit(capsys):
    from dllm_jax.cli import strategy

    fields = {"remasking": "static", "buffer_size": 2, "block_size": 8}
    shared = strategy.load_several(["block_diffusion", "multi_bd"], fields)
    assert [fields for *_, fields in shared] == [
        {"remasking": "static", "block_size": 8},
        {"buffer_size": 2, "block_size": 8},
    ]
    assert capsys.readouterr().err == (
        "note: remasking applies to block_diffusion only\n"
        "note: buffer_size applies to multi_bd only\n"
    )


@pytest.mark.slow
def test_table_is_there_even_if_writing_fails(random_folder, capsys, monkeypatch, tmp_path):

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    argv = ["eval", "--model", str(random_folder), "--half", "plain", "--problems", "2"]
    argv += ["--strategy", "multi_bd", "--no-one-token", "--max-tokens", "4", "--batch-size", "2"]
    assert main([*argv, "--output", str(tmp_path / "r")]) == 1
    captured = capsys.readouterr()
    assert "plain: 2 held-out problems" in captured.out
    *_, last = captured.err.splitlines()
    assert re.fullmatch(r"error: \[Errno 28\] No space left on device( \(.*\))?", last)


@pytest.mark.slow
def test_problems_and_a_strategy_of_the_user_are_swept_and_drawn(random_folder, capsys, tmp_path):
    """A file of problems, a strategy file, one labelled point a setting."""
    (tmp_path / "p.jsonl").write_text('{"question": "1 + 1 = ?", "answer": 2}\n')
    mine = tmp_path / "my.py"
    mine.write_text(
        "from dllm_jax.strategies import blocks\n"
        "def my_step(forward, state):\n"
        "    state = blocks.open_next(state)\n"
        "    return blocks.denoise(forward, state, lambda stats, *_: stats.token >= 0)\n"
    )
    argv = ["eval", "--model", str(random_folder), "--data", str(tmp_path / "p.jsonl")]
    argv += ["--strategy", f"{mine}:my_step", "--strategy", "multi_bd", "--no-one-token"]
    argv += ["--sweep", "accept_threshold=0.5:0.9:2", "--plot", str(tmp_path / "out.svg")]
    argv += ["--max-tokens", "8", "--batch-size", "2", "--json"]
    assert main(argv) == 0
    facts = json.loads(capsys.readouterr().out)
    points = [f"multi_bd,accept_threshold={value}" for value in ("0.5", "0.9")]
    assert list(facts["strategies"]) == [f"{mine}:my_step", *points]
    assert facts["strategies"][points[1]]["fields"]["accept_threshold"] == 0.9
    (row,) = facts["halves"]["p.jsonl"]["problems"]
    assert list(row["outputs"]) == list(facts["strategies"])
    drawn = (tmp_path / "out.svg").read_text()
    for text in (
        "tokens per forward",
        "accuracy (%, 95",
        "Up and right is better",
        ">0.5<",
        ">0.9<",
    ):
        assert text in drawn
