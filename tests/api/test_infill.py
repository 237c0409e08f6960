"""Proves that `LLM.infill` and `generate --suffix` write what stands in the holes of a text.

Truth: the contract's dense run over the whole text, which knows neither requests nor windows.
"""

import dataclasses
import json
import runpy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import Request, SamplingParams
from dllm_jax.api import snapshot
from dllm_jax.api.infill import infill_request
from dllm_jax.cli import main
from dllm_jax.strategies import FullSequence
from dllm_jax.strategies.core import blocks
from tests.api.test_snapshot import break_device
from tests.contract import dense, harness
from tests.contract.cases import case
from tests.contract.dense_full_sequence import decode_full_sequence

pytestmark = pytest.mark.long

STRATEGY = FullSequence(0.6, block_size=8, buffer_size=4)  # a window of 32
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
MASK = "<|mask|>"


@pytest.fixture(scope="module")
def llm(model):
    return make_llm(model)


def make_llm(model, strategy=STRATEGY, **sizes):
    """Of the sizes that the command line and `replay` have here: few programs."""
    sizes = {"max_num_seqs": 1, "max_model_len": 32, "page_size": 16, "num_pages": 3} | sizes
    return dj.LLM(model, strategy, config=dj.EngineConfig(**sizes), warm_up=False)


def truth(model, prompt, holes, suffix, stops=()):
    """Tokens from the first hole to the last, or to a written stop id, and forwards."""
    asked = harness.Request(tuple(prompt), holes, suffix=tuple(suffix), stops=stops)
    done = decode_full_sequence(dense.Net(model), asked, "low_confidence", 0.6)
    return done.tokens, done.nfe


def ids(model, text):
    return model.tokenizer(text)["input_ids"]


def ends(output):
    return output.outputs[0].token_ids, output.metrics.nfe


def test_suffix_is_seen_and_stays(model, llm):
    found = []
    for suffix in ([9, 8, 7, 6], [20, 21, 22, 23]):
        (output,) = llm.infill([30, 31, 32], suffix, PARAMS)
        assert ends(output) == truth(model, [30, 31, 32], 5, suffix)
        assert output.prompt_token_ids == [30, 31, 32]
        assert output.outputs[0].finish_reason == "length"
        found.append(output.outputs[0].token_ids)
    assert found[0] != found[1]


def test_text_with_mask_tokens_has_holes_there(model, llm):
    text = f"Ann has {MASK}{MASK} pens and {MASK} books."
    (output,) = llm.infill(text, params=dataclasses.replace(PARAMS, max_tokens=30))
    before, behind = ids(model, "Ann has "), ids(model, " books.")
    inner = ids(model, " pens and ")
    want, nfe = truth(model, before, 2, [*inner, -1, *behind])
    assert ends(output) == (want, nfe)
    assert want[2:-1] == inner
    assert output.prompt == text
    assert output.prompt_token_ids == before
    assert output.metrics.tokens_per_forward == 3 / nfe
    first, *_, last = text.split(MASK)
    whole = model.tokenizer.decode([*before, *want, *behind], skip_special_tokens=True)
    assert first + output.outputs[0].text + last == whole


def test_masks_count_beside_a_suffix_and_as_ids(model, llm):
    mask = model.config.mask_token_id
    (output,) = llm.infill([40, mask, 41], [42, mask, 43], PARAMS)
    assert ends(output) == truth(model, [40], 1, [41, *[-1] * 5, 42, -1, 43])
    (output,) = llm.infill([mask, 41, mask], params=PARAMS)  # nothing before the first hole
    assert ends(output) == truth(model, [], 1, [41, -1])
    assert output.prompt_token_ids == []


def test_several_texts_come_back_in_order_and_a_refused_one_alone_fails(model, llm):
    prefixes = [[30, 31], "Ann", [5] * 40, [33]]
    outputs = llm.infill(prefixes, [9, 8], PARAMS)
    wanted = [truth(model, p, 5, [9, 8]) for p in ([30, 31], ids(model, "Ann"), [33])]
    assert [ends(outputs[i]) for i in (0, 1, 3)] == wanted
    assert outputs[2].outputs[0].finish_reason == "error"
    assert "are 47 tokens, the window has 32; use buffer_size=6 or" in outputs[2].error
    outputs = llm.infill([[30], [31]], [[9], [8, 7]], [PARAMS, dataclasses.replace(PARAMS, n=2)])
    assert [ends(one)[0] for one in outputs] == [
        truth(model, [30], 5, [9])[0],
        truth(model, [31], 5, [8, 7])[0],
    ]


def test_only_a_written_stop_id_ends_the_text(model, llm):
    asked = [30], 2, [9, -1, -1, 8]
    want, _ = truth(model, *asked)
    assert 9 not in (want[0], want[1], want[3], want[4])
    mask = model.config.mask_token_id
    text = [30, mask, mask, 9, mask, mask, 8]
    (given,) = llm.infill(text, params=dataclasses.replace(PARAMS, stop_token_ids=(9,)))
    assert (given.outputs[0].token_ids, given.outputs[0].finish_reason) == (want, "length")
    stops = (want[3],)
    (written,) = llm.infill(text, params=dataclasses.replace(PARAMS, stop_token_ids=stops))
    assert ends(written) == truth(model, *asked, stops=stops)
    assert written.outputs[0].finish_reason == "stop"
    assert len(written.outputs[0].token_ids) <= 3


def test_what_a_request_brought_is_never_written_over_nor_a_stop():
    given = (-1, -1, 9, -1, 8)
    asked = harness.Request((30, 31, 32), 2, suffix=given[2:], stops=(9,))
    _, state, _ = harness.fresh_state(STRATEGY, case("full_sequence").model, {}, [asked] * 4, 8, 0)
    cells = np.asarray(state.buffer.filled[0]).ravel()[:8]
    assert cells.tolist() == [True, True, True, *(token >= 0 for token in given)]
    everywhere = jnp.ones(state.buffer.filled.shape, bool)
    written = blocks.write(state, jnp.full_like(state.buffer.tokens, 7), everywhere)
    assert written.buffer.tokens[0].ravel()[:8].tolist() == [30, 31, 32, 7, 7, 9, 7, 8]
    assert not blocks.has_stop(written).any()
    written = blocks.write(state, jnp.full_like(state.buffer.tokens, 9), everywhere)
    assert blocks.has_stop(written).all()


def test_window_shows_what_is_given_between_holes(model, llm):
    engine = llm.engine
    request = Request(
        prompt_token_ids=[30], params=PARAMS, suffix_token_ids=[9, -1, 8], denoise=True, stream=True
    )
    want, nfe = truth(model, [30], 5, [9, -1, 8])
    engine.add(request)
    shown = []
    while engine.has_work:
        shown += [one.outputs[0] for one in engine.step()]
    assert len(shown) == nfe
    for one in shown[:-1]:
        cells = (*one.token_ids, *one.window)
        assert len(cells) == 7
        assert cells[5] == 9
        assert all(cell in (None, token) for cell, token in zip(cells, want, strict=True))


def test_text_with_holes_is_replayed(model, tmp_path, monkeypatch, capsys):
    suffix = [9, -1, -1, 8, 7]
    request = Request(prompt_token_ids=[30, 31], params=PARAMS, suffix_token_ids=suffix)
    # A greedy accept threshold of one hole more a forward leaves something to replay.
    llm = make_llm(model, max_steps_per_chunk=1)
    llm.engine.save_snapshot = snapshot.snapshot_saver(model, STRATEGY, llm.config, tmp_path)
    break_device(llm, 1, monkeypatch)
    llm.engine.add(request)
    while llm.engine.has_work:
        outputs = llm.engine.step()
    assert outputs[0].outputs[0].finish_reason == "error"
    (path,) = tmp_path.iterdir()
    assert main(["replay", str(path), "--json", "--strategy", TOY]) == 0
    *steps, last = map(json.loads, capsys.readouterr().out.splitlines())
    want, nfe = truth(model, [30, 31], 5, suffix)
    assert (last["token_ids"], steps[-1]["nfe"]) == (want, nfe)
    assert steps[0]["nfe"] == 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda llm: llm.infill([5, 6]),
            f"the text has no hole; write {MASK} for each token to fill in, or give a suffix",
        ),
        (
            lambda llm: llm.infill([5] * 20, [6] * 20, PARAMS),
            "prefix, holes and suffix are 45 tokens, the window has 32; use buffer_size=6 or lower",
        ),
        (lambda llm: llm.infill("a", ["b", "c"]), "2 suffixes for 1 prefixes; give one, or one a"),
        (lambda llm: llm.infill([3, 9999], [5], PARAMS), "holds id 9999, outside the vocabulary"),
        (
            lambda llm: llm.infill(
                f"a {MASK} b {MASK}", params=dataclasses.replace(PARAMS, stop="b")
            ),
            "may also be found in what is given between holes; use stop_token_ids",
        ),
    ],
)
def test_wrong_call_is_one_line(llm, call, said):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        call(llm)
    assert said in str(caught.value)
    assert not llm.engine.has_work


# --- the command line -----------------------------------------------------------------------------

TOY = "tests.api.test_infill:STRATEGY"
SAME = ("--max-model-len", "32", "--page-size", "16", "--max-tokens", "4")


@pytest.fixture
def command(random_folder, no_compile_cache, capsys):
    """Runs `generate` on the random model with the toy; status, lines, and what went wrong."""

    def run(*argv):
        status = main(["generate", *argv, "--model", str(random_folder), "--strategy", TOY])
        reported = capsys.readouterr()
        return status, reported.out.splitlines(), reported.err

    return run


def test_command_writes_between_prompt_and_suffix(model, llm, command, tmp_path):
    prompt = f"Bo has {MASK} pens, "
    (tmp_path / "prompts").write_text(prompt)
    asked = ("--prompt-file", str(tmp_path / "prompts"), "--suffix", " books.", "--json")
    status, (text,), _ = command(*asked, *SAME)
    (want,) = llm.infill(prompt, " books.", SamplingParams(max_tokens=4))
    line = json.loads(text)
    assert status == 0
    assert (line["prompt"], line["suffix"]) == (prompt, " books.")
    assert (line["token_ids"], line["text"]) == (ends(want)[0], want.outputs[0].text)
    assert line["metrics"]["tokens_per_forward"] == want.metrics.tokens_per_forward


def test_command_draws_the_suffix_behind_the_window(model, llm, command):
    asked = ("--suffix", " of\nit", "--watch", "--watch-delay", "0")
    status, lines, _ = command(f"Bo has {MASK} pens, ", *asked, *SAME)
    (want,) = llm.infill(f"Bo has {MASK} pens, ", " of\nit", SamplingParams(max_tokens=4))
    frames = [line for line in lines if line.startswith("forward ")]
    assert status == 0
    assert len(frames) == want.metrics.nfe - 1
    for frame in frames:
        _, cells, behind = frame.split("|")
        assert behind == " of⏎it"
        assert " pens, " in cells
    assert "·" in frames[0]
    assert "".join(want.outputs[0].text.split()) in "".join("".join(lines).split())
    assert f"{want.metrics.tokens_per_forward:.2f} tokens per forward" in lines[-1]


@pytest.mark.parametrize(
    ("argv", "strategy", "status", "said"),
    [
        (
            ("x", "--suffix", "y"),
            ("--strategy", "edit"),
            2,
            "Edit does not see what stands behind the text; give ",
        ),
        (("x", "--suffix", "y"), ("--strategy", "ar"), 2, "give --strategy full_sequence"),
        (("--suffix", "y"), (), 2, "--suffix goes behind a prompt; give PROMPT, - or"),
        (("x", "--suffix", ""), (), 2, "--suffix is empty; give what stands behind the text"),
        (
            ("x", "--suffix", "y", "--buffer-size", "1", "--max-tokens", "20"),
            ("--strategy", TOY),
            1,
            "are 22 tokens, the window has 8; use buffer_size=3 or lower max_tokens",
        ),
        (
            ("x", "--suffix", "y", "--max-tokens", "300"),
            ("--strategy", TOY),
            1,
            "takes 256; shorten them or lower max_tokens",
        ),
    ],
)
def test_command_that_cannot_infill_says_why(fails, random_folder, argv, strategy, status, said):
    assert said in fails(status, "generate", *argv, "--model", str(random_folder), *strategy)


@pytest.mark.slow
def test_example_fills_its_holes(capsys):
    path = Path(__file__).resolve().parents[2] / "examples" / "infill.py"
    sizes = {"strategy": "full_sequence", "buffer_size": 4, "max_num_seqs": 1}
    runpy.run_path(str(path))["main"](dj.LLM(**sizes, warm_up=False))
    between, holes, speed = capsys.readouterr().out.splitlines()
    assert "the days[ Ben keeps 37 - 29 = 8 dollars.] In all" in between
    assert holes.endswith(
        "= [8 dollars. In all of the days together that makes 8 * 5 = 40] dollars."
    )
    assert speed == "1.00 tokens per forward"


def test_remedies_follow_model_and_strategy(model):
    with pytest.raises(ValueError, match=r'Edit does not see .* use strategy="full_sequence"'):
        make_llm(model, "edit").infill("a", "b")
    request = dj.Request(prompt_token_ids=[5])
    for changed, said in (
        ({"tokenizer_source": None}, "has no hole; give token ids with 1 as holes, or a suffix"),
        (mask(model, 600), "no hole; its tokenizer has no mask token: give token ids with 600 as"),
        (mask(model, -1), "the model has no mask token, so give a suffix"),
    ):
        with pytest.raises(ValueError, match=said):
            infill_request(model.replace(**changed), STRATEGY, request, 0, [])


def mask(model, token):
    return {"config": dataclasses.replace(model.config, mask_token_id=token)}
