"""Proves the other two kinds of training, small: a causal target, then a drafter for it.

Losses fall; the answers a drafter learns from are the target's own; an interrupted run, in the
answers or in the steps, ends as the uninterrupted one; what is exported loads as target and draft
and together they write what the target writes alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.models import dense
from dllm_jax.training import ar, dflash, export, loop, report, responses, stream

# A minute an interpreter, and the loop changes seldom.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("promotion")]

DATA = stream.StreamConfig(batch_size=8, lengths=(176, 176), room=1, hard_share=0.0)
AR = ar.TrainConfig(
    model=dense.DenseConfig(
        vocab_size=768, hidden_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        ffn_size=64, rope_theta=1e4, max_position=256, shift=True,
    ),
    data=DATA,
    num_steps=40,
    log_every=5,
    evals=0,
    compute_dtype="float32",
)  # fmt: skip
DRAFT = dflash.TrainConfig(
    num_layers=1,
    block_size=8,
    anchors=4,
    batch_size=8,
    num_responses=16,
    response_batch=8,
    response_tokens=48,
    row_tokens=128,
    num_steps=30,
    log_every=5,
    evals=0,
    compute_dtype="float32",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder of a trained target, and its run's folder."""
    out = tmp_path_factory.mktemp("ar")
    run = ar.train(AR, out, num_workers=0, say=lambda _: None)
    export.save_causal(run["params"], AR.model, run["tokenizer"], out / "model")
    return out


@pytest.fixture(scope="module")
def drafted(target, tmp_path_factory):
    """The folder and the result of a run that trained a draft."""
    out = tmp_path_factory.mktemp("dflash")
    config = dataclasses.replace(DRAFT, target=str(target / "model"))
    run = dflash.train(config, out, num_workers=0, say=lambda _: None)
    export.save_draft(run["params"], run["model_config"], run["target"], out / "model")
    return config, out, run


def test_a_causal_target_learns(target) -> None:
    steps, _ = report.read_log(target / "metrics.jsonl")
    assert steps[0]["loss"] > 5.5  # log 768 is 6.6
    assert steps[-1]["loss"] < 4.5


def test_a_draft_learns_from_the_answers_of_its_target(target, drafted) -> None:
    _, out, run = drafted
    steps, _ = report.read_log(out / "metrics.jsonl")
    assert steps[-1]["loss"] < 0.85 * steps[0]["loss"]
    model, rows = dj.load(target / "model"), run["answers"]
    greedy = 0  # the first four of each batch of eight
    prompt_len, length = rows["prompt_len"][greedy], rows["length"][greedy]
    prompt = rows["tokens"][greedy, :prompt_len].tolist()
    alone = dj.generate(model, [prompt], "ar", max_tokens=48)
    said = rows["tokens"][greedy, prompt_len:length].tolist()
    count = min(len(said), int(alone.length[0]))
    assert count > 3
    assert said[:count] == alone.tokens[0, :count].tolist()


def test_an_interrupted_run_ends_as_the_uninterrupted_one(drafted, tmp_path, monkeypatch) -> None:
    config, out, whole = drafted

    class Enough(Exception):
        pass

    def limited(module, name: str, calls: int) -> None:
        real, seen = getattr(module, name), []

        def stop(*args, **kwargs):
            seen.append(args)
            if len(seen) > calls:
                raise Enough
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, stop)

    often = dataclasses.replace(config, checkpoint_seconds=-1.0)
    for module, name, calls in (
        (responses, "_rows", 1),
        (loop, "learning_rate_factor", 7),
    ):
        with monkeypatch.context() as monkeypatch:
            limited(module, name, calls)
            with pytest.raises(Enough):
                dflash.train(often, tmp_path, num_workers=0, say=lambda _: None)
    lines: list[str] = []
    run = dflash.train(config, tmp_path, num_workers=0, say=lines.append)
    assert any("resumed at step 7" in line for line in lines)
    for name, values in np.load(out / responses.STORED).items():
        assert np.array_equal(values, np.load(tmp_path / responses.STORED)[name])
    for a, b in zip(jax.tree.leaves(run["params"]), jax.tree.leaves(whole["params"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_exported_drafts_for_its_target_and_changes_no_text(target, drafted) -> None:
    _, out, run = drafted
    model = dj.load(target / "model")
    draft = dj.load(out / "model", dtype="float32")
    want = jax.tree.map(
        lambda w: np.asarray(jnp.asarray(w, jnp.bfloat16).astype(jnp.float32)), run["params"]
    )
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), b), draft.params, want)
    assert all(jax.tree.leaves(same))
    rows = run["answers"]
    prompts = [
        tokens[:n].tolist() for tokens, n in zip(rows["tokens"], rows["prompt_len"], strict=True)
    ][:4]
    alone = dj.generate(model, prompts, "ar", max_tokens=40, ignore_eos=True)
    both = dj.generate(model, prompts, "dflash", draft=draft, max_tokens=40, ignore_eos=True)
    assert np.array_equal(alone.tokens, both.tokens)
    assert (both.nfe < alone.nfe).all()


def test_prompts_come_from_a_file(target, tmp_path) -> None:
    model = dj.load(target / "model")
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two", "id": 3}\n')
    plain = responses.read_prompts(model, tmp_path / "p.txt", 50)
    assert plain == responses.read_prompts(model, tmp_path / "p.jsonl", 50)
    assert plain[0] != plain[1]
    assert model.tokenizer.decode(plain[0]) == "<|user|>one<|assistant|>"
    assert next(responses.in_turn(plain, 3, 0)) == [plain[0], plain[1], plain[0]]
    assert next(responses.in_turn(plain, 3, 1)) == [plain[1], plain[0], plain[1]]
