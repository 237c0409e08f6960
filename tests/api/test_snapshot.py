"""Proves that a request which a device failure ended can be run again from its snapshot.

A run is killed in the middle by two failures of the device in a row; what is replayed from the
folder it left must give the tokens of a run that nothing happened to. Everything that can be wrong
with a folder is one error that names it.
"""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api import snapshot
from dllm_jax.api.resume import resume
from dllm_jax.cli import main
from dllm_jax.engine.layout import DeviceFailure
from dllm_jax.engine.requests import SamplingParams
from dllm_jax.strategies.core.needs import Needs
from dllm_jax.strategies.core.resolve import as_strategy, load_strategy
from dllm_jax.strategies.multi_bd import MultiBD

pytestmark = pytest.mark.long

PROMPT, OTHER = list(range(40, 61)), list(range(60, 77))
PARAMS = SamplingParams(max_tokens=40, temperature=0.9, seed=7)
STRATEGY = MultiBD(block_size=8, buffer_size=2, accept_threshold=0.02)


def half_step(forward, state):
    """A step function at module level, to be found again by its name."""
    return STRATEGY.step(forward, state)


def make_llm(model, folder, strategy=STRATEGY):
    config = dj.EngineConfig(max_num_seqs=2, max_model_len=128, slot_buckets=(2,))
    llm = dj.LLM(model, strategy, config=config, warm_up=False)
    llm.engine.save_snapshot = snapshot.snapshot_saver(model, strategy, llm.config, folder)
    return llm


def break_device(llm, after, monkeypatch):
    """Let every fetch, of one step each, fail once `after` of them have worked."""
    monkeypatch.setattr("dllm_jax.engine.engine.num_steps", lambda *_, **__: 1)
    fetch, left = llm.engine.runner.fetch, [after]

    def failing(chunk):
        if left[0] == 0:
            raise DeviceFailure("RESOURCE_EXHAUSTED: Out of memory\ntable of allocations")
        left[0] -= 1
        return fetch(chunk)

    monkeypatch.setattr(llm.engine.runner, "fetch", failing)


@pytest.fixture(scope="module")
def killed(model, tmp_path_factory):
    """The folder of a run killed in its middle, its outputs, and the tokens it would have had."""
    folder = tmp_path_factory.mktemp("snapshots")
    whole = make_llm(model, folder).generate([PROMPT, OTHER], PARAMS, use_tqdm=False)
    with pytest.MonkeyPatch.context() as patch:
        llm = make_llm(model, folder)
        break_device(llm, 6, patch)
        broken = llm.generate([PROMPT, OTHER], PARAMS, use_tqdm=False)
    (path,) = folder.iterdir()
    return path, broken, [one.outputs[0].token_ids for one in whole]


def test_failure_ends_requests_with_one_line_that_says_where(killed):
    path, broken, whole = killed
    for output, tokens in zip(broken, whole, strict=True):
        one = output.outputs[0]
        assert one.finish_reason == "error"
        assert one.token_ids == tokens[: len(one.token_ids)]
        assert output.error == (
            "the device failed twice (RESOURCE_EXHAUSTED: Out of memory); saved: "
            f"`dllm-jax replay {path}` runs it again"
        )
    # The middle, or the test proves nothing.
    assert 0 < len(broken[0].outputs[0].token_ids) < len(whole[0])


@pytest.mark.parametrize("which", [0, 1])
def test_replay_gives_the_tokens_of_an_undisturbed_run(killed, capsys, which):
    path, broken, whole = killed
    assert main(["replay", str(path), "--sample", str(which), "--json"]) == 0
    *steps, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["token_ids"] == whole[which]
    before = broken[which].outputs[0].token_ids
    assert sum((step["new_token_ids"] for step in steps), before) == whole[which]
    # It goes on where it was, one forward a line.
    first = snapshot.load_snapshot(path).texts[which].nfe
    assert first > 0
    assert [step["nfe"] for step in steps] == list(range(first + 1, first + 1 + len(steps)))
    assert {status for step in steps for status in step["blocks"]} >= {"active", "to cache"}
    assert steps[-1]["finish_reason"] == last["finish_reason"] == "length"


def test_replay_prints_a_line_a_forward_and_stops_after_steps(model, killed, capsys):
    path, broken, whole = killed
    assert main(["replay", str(path), "--steps", "2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    settled = broken[0].outputs[0].token_ids
    assert head.startswith("text 0 of 2 (request 0, sample 0): 21 prompt tokens, ")
    assert f"{len(settled)} settled after" in head
    forwards = [line for line in lines if line.startswith("forward ")]
    assert len(forwards) == 2
    assert all("active" in line for line in forwards)
    assert lines[-1].endswith(" tokens, running")
    assert main(["replay", str(path), "--watch", "--watch-delay", "0"]) == 0
    out = capsys.readouterr().out
    text = model.tokenizer.decode(whole[0], skip_special_tokens=True)
    assert out.endswith(f"\n{text}\n\n40 tokens, length\n")


def test_replay_that_fails_again_ends_as_the_first_time(model, killed, monkeypatch):
    path, _, _ = killed
    engine, request_id = resume(snapshot.load_snapshot(path), 0, model)

    def failing(chunk):
        raise DeviceFailure("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(engine.runner, "fetch", failing)
    while engine.has_work:
        outputs = engine.step()
    assert outputs[-1].request_id == request_id
    assert outputs[-1].error == "the device failed twice (RESOURCE_EXHAUSTED)"


def test_text_of_weights_in_16_bits_is_not_resumed_in_8(killed, random_folder):
    found = snapshot.load_snapshot(killed[0])
    small = dj.load(random_folder, quantization="fp8")
    with pytest.raises(snapshot.SnapshotError, match="it differs in its quantization"):
        resume(found, 0, small)
    assert found.model.pop("quantization") is None  # as older versions wrote it
    with pytest.raises(snapshot.SnapshotError, match="it differs in its quantization"):
        resume(found, 0, small)


def test_text_that_never_decoded_is_run_from_its_prompt(model, tmp_path, capsys, monkeypatch):
    llm = make_llm(model, tmp_path)
    break_device(llm, 0, monkeypatch)
    (broken,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert broken.outputs[0].token_ids == []
    (path,) = tmp_path.iterdir()
    assert main(["replay", str(path), "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    (whole,) = make_llm(model, tmp_path).generate([PROMPT], PARAMS, use_tqdm=False)
    assert last["token_ids"] == whole.outputs[0].token_ids


@pytest.mark.slow
def test_text_whose_slot_does_not_say_all_is_run_from_its_prompt(
    model, tmp_path, capsys, monkeypatch
):
    strategy = STRATEGY.replace(needs=Needs(soft_commits=True))
    llm = make_llm(model, tmp_path, strategy)
    (whole,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    break_device(llm, 12, monkeypatch)
    (broken,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert len(broken.outputs[0].token_ids) > 0
    (path,) = tmp_path.iterdir()
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\nit starts over: its slot does not say all of it\nforward   1 |" in out
    assert out.endswith(f"\n{whole.outputs[0].text}\n\n40 tokens, length\n")


def test_snapshot_that_cannot_be_written_is_said_and_no_more(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    llm = make_llm(model, tmp_path / "file")
    break_device(llm, 3, monkeypatch)
    (broken,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert broken.outputs[0].finish_reason == "error"
    assert "; it could not be saved (NotADirectoryError: " in broken.error
    assert not llm.engine.has_work


def test_folder_is_read_without_pickle_and_says_what_it_holds(killed):
    path, broken, _ = killed
    found = snapshot.load_snapshot(path)
    assert [text.prompt for text in found.texts] == [PROMPT, OTHER]
    assert [text.tokens for text in found.texts] == [
        output.outputs[0].token_ids for output in broken
    ]
    assert found.texts[0].params == PARAMS
    assert found.config.max_model_len == 128
    assert snapshot.saved_strategy(found) == STRATEGY
    with np.load(path / "slots.npz", allow_pickle=False) as slots:
        assert {slots[name].dtype for name in slots} == {np.dtype(np.int32)}


def damage(path, tmp_path, change):
    folder = tmp_path / "copy"
    shutil.copytree(path, folder)
    layout = json.loads((folder / "snapshot.json").read_text())
    change(layout, folder)
    (folder / "snapshot.json").write_text(json.dumps(layout))
    return folder


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda layout, folder: layout.update(version=99), "has version 99, this program reads 5"),
        (lambda layout, folder: layout.pop("texts"), "is damaged (KeyError: 'texts')"),
        (lambda layout, folder: (folder / "slots.npz").write_bytes(b"PK"), "is damaged ("),
        (
            lambda layout, folder: np.savez(folder / "slots.npz", **{"0": np.zeros(3, np.int32)}),
            "a slot of the snapshot has 3 words, one of this model and strategy has",
        ),
        (
            lambda layout, folder: np.savez(folder / "slots.npz", **{"0": np.zeros(3)}),
            "is damaged (ValueError: a slot is float64(3,))",
        ),
        (
            lambda layout, folder: np.savez_compressed(
                folder / "slots.npz", **{"0": np.zeros(1 << 20, np.int32)}
            ),
            "0.npy in slots.npz is compressed",
        ),
        (
            lambda layout, folder: (
                (folder / "slots.npz").unlink() or os.mkfifo(folder / "slots.npz")
            ),
            "slots.npz is no regular file",
        ),
        (
            lambda layout, folder: layout["texts"][0].update(start=2**60),
            "is behind the",
        ),
        (
            lambda layout, folder: layout["texts"][0]["placement"].update(limit=2**60),
            "it cannot be replayed",
        ),
        (
            lambda layout, folder: layout["strategy"]["fields"].update(
                needs={"function": "os:system"}
            ),
            "names 'os:system', which is not part of dllm-jax",
        ),
        (
            lambda layout, folder: layout["strategy"].update(spec="no_such.module:Thing"),
            "names 'no_such.module:Thing', which is not part of dllm-jax",
        ),
        (
            lambda layout, folder: layout["model"].update(weights="0"),
            "it differs in its weights; give the same one by --model",
        ),
    ],
)
def test_damaged_snapshot_is_one_line(killed, tmp_path, fails, change, reported):
    assert reported in fails(1, "replay", str(damage(killed[0], tmp_path, change)))


HOSTILE = [None, -1, 10**30, "x", [], {}, 1e308, [10**9], True, ["\n" * 9]]


def leaves(value, path=()):
    """Paths of all values, objects and lists included."""
    yield path
    if isinstance(value, list):
        value = dict(enumerate(value[:2]))
    for key, one in value.items() if isinstance(value, dict) else ():
        yield from leaves(one, (*path, key))


def test_a6_a_hostile_value_anywhere_is_one_line(model, killed, tmp_path):
    layout = json.loads((killed[0] / "snapshot.json").read_text())
    said = []
    for number, path in enumerate(list(leaves(layout))[1:]):
        for hostile in (HOSTILE[number % len(HOSTILE)], HOSTILE[(3 * number + 1) % len(HOSTILE)]):
            changed = json.loads(json.dumps(layout))
            at = changed
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = hostile
            folder = tmp_path / "changed"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(killed[0], folder)
            (folder / "snapshot.json").write_text(json.dumps(changed))
            try:
                resume(snapshot.load_snapshot(folder), 0, model)
            except ValueError as error:
                said.append(str(error))
    assert len(said) > 50
    assert [one for one in said if "\n" in one or len(one) > 1000] == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda layout: layout["config"].update(prefill_buckets=[10**9]), "prefill_buckets"),
        (lambda layout: layout["config"].update(prefill_buckets=[10**6]), "prefill_buckets"),
        (lambda layout: layout["config"].update(page_size="x"), "config.page_size"),
        (lambda layout: layout["strategy"]["fields"].update(block_size=10**9), "block_size"),
        (lambda layout: layout["strategy"]["fields"].update(block_size=True), "block_size=True"),
        (
            lambda layout: layout["strategy"]["fields"]["needs"]["needs"].update(aux="\n" * 2000),
            "strategy.fields.needs.aux",
        ),
        (lambda layout: layout.update(version="\n" * 2000), "version"),
        (lambda layout: layout["model"].pop("weights"), "model.weights"),
        (lambda layout: layout.update(strategy=[]), "strategy=[]"),
        (lambda layout: layout["texts"][0]["placement"].update(knobs={}), "placement.knobs"),
        (lambda layout: layout["texts"][0]["placement"].update(seed=-1), "placement.seed"),
        (lambda layout: layout["texts"][0]["placement"].update(tail=[10**12]), "placement.tail"),
        (lambda layout: layout["texts"][0].update(tokens=[10**12] * 40), "texts[0].tokens"),
        (lambda layout: layout["texts"][0].update(prompt=["a"]), "texts[0].prompt"),
        (lambda layout: layout["texts"][0]["params"].update(top_p={}), "params.top_p"),
    ],
)
def test_a6_a_hostile_field_is_named(model, killed, tmp_path, change, named):
    folder = damage(killed[0], tmp_path, lambda layout, _: change(layout))
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the parameter is its text)
        resume(snapshot.load_snapshot(folder), 0, model)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a6_a_text_that_is_not_there(model, killed):
    found = snapshot.load_snapshot(killed[0])
    for which in (-1, 2):
        with pytest.raises(snapshot.SnapshotError, match="holds 2 texts"):
            resume(found, which, model)


def test_a5_nobody_else_may_read_a_snapshot(killed):
    modes = {one.name: one.stat().st_mode & 0o777 for one in killed[0].iterdir()}
    assert modes == {"snapshot.json": 0o600, "slots.npz": 0o600}
    assert killed[0].stat().st_mode & 0o777 == 0o700


def test_path_and_sample_that_are_not_there(killed, tmp_path, fails):
    path = str(killed[0])
    assert "is no snapshot: there is no snapshot.json in it" in fails(1, "replay", str(tmp_path))
    assert "--sample 2: the snapshot holds 2 texts" in fails(2, "replay", path, "--sample", "2")
    said = fails(1, "replay", path, "--model", "builtin:tiny-sdar")
    assert "'builtin:tiny-sdar' is not the snapshot's" in said


def test_strategy_is_found_again_by_its_name(tmp_path):
    def round_trip(strategy, given=None):
        layout = json.loads(json.dumps(snapshot._strategy_facts(strategy)))
        found = snapshot.Snapshot(tmp_path, {}, layout, dj.EngineConfig(), [])
        if given:
            with pytest.raises(snapshot.SnapshotError, match="give it by --strategy"):
                snapshot.saved_strategy(found)
        return layout, snapshot.saved_strategy(found, given)

    needs = Needs("whole_causal", hidden_layers=(1, 2))
    made = as_strategy(half_step, 8, 2, needs)
    layout, again = round_trip(made, f"{half_step.__module__}:half_step")
    assert again == made
    assert layout["spec"].endswith("test_snapshot:half_step")
    (tmp_path / "mine.py").write_text(
        "from dllm_jax.strategies.multi_bd import MultiBD\nMine = MultiBD\n"
    )
    layout, again = round_trip(STRATEGY.replace(accept_threshold=np.float32(0.5)))
    assert layout["spec"] == "dllm_jax.strategies.multi_bd:MultiBD"
    assert again.accept_threshold == 0.5
    (tmp_path / "own.py").write_text(
        "import strategies\n"
        "def step(forward, state):\n"
        "    return strategies.AR().step(forward, state)\n"
    )
    made = load_strategy(f"{tmp_path / 'own.py'}:step", block_size=4)
    layout, again = round_trip(made, f"{tmp_path / 'own.py'}:step")
    assert layout["spec"] == f"{tmp_path / 'own.py'}:step"
    assert (again.fn.__name__, again.block_size) == ("step", 4)


def test_strategy_without_a_name_is_refused():
    with pytest.raises(snapshot.SnapshotError, match="keep it at the top level of a module"):
        snapshot._strategy_facts(as_strategy(lambda forward, state: None))
    with pytest.raises(snapshot.SnapshotError, match="accept_threshold=array"):
        snapshot._strategy_facts(dataclasses.replace(STRATEGY, accept_threshold=np.zeros(3)))
