"""Proves that questions are answered with the softmax of the model's own logits, in one forward.

For every family, each question alone and all on one canvas: probabilities equal a softmax over
`Model.logits` of the same ids to 1e-5 in float32, whatever the padding. The texts that are read are
those which the questions say.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api import decide as module
from dllm_jax.api.decide import decide, log_probabilities, padded_size, reading_of
from dllm_jax.api.questions import Question, Read, answer, reads
from tests.oracles.checkpoints import write_tiny
from tests.oracles.tiny_configs import CONFIGS

CONTEXT = "I was charged twice."
QUESTIONS = [
    Question.predicate("Was there a double charge?", name="dup"),
    Question.choice("Which team?", ["billing", "tech", "sales"]),
    Question.score("How urgent?", ["low", "middle", "high"], name="urgency"),
]
MASK_ID = 47
OWN_MASK = {"fast_dllm_v2", "illada", "llada2", "llada2_2", "stable_diffcoder"}


@pytest.fixture(scope="module")
def tiny():
    return dj.load("builtin:tiny-sdar", dtype="float32")


def softmax(logits):
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


def wanted(model, read, number):
    """Log-probabilities by `Model.logits` of one text without padding."""
    kind = model.defaults.attention
    (logits,) = np.asarray(model.logits(np.asarray([read.ids]), kind), np.float64)
    return np.log(softmax(logits[read.rows[number]])[read.labels[number]])


def some_reads(model, how):
    """Texts of several lengths as `reads` lays them out, for models without letters."""
    draw, texts = np.random.default_rng(0), []
    is_causal = how.attention == "causal"
    for prompt_len, cells in ((5, 1), (13, 1), (8, 1), (21, 3)):
        if is_causal and cells > 1:
            continue
        ids, rows = draw.integers(0, 40, prompt_len).tolist(), []
        for _ in range(cells):
            if cells > 1:
                ids += draw.integers(0, 40, 2).tolist()
            rows.append(len(ids) - how.shift)
            ids += [] if is_causal else [how.mask_token_id]
        ids += [] if is_causal or how.end_token_id is None else [how.end_token_id]
        ids += [] if is_causal else [how.mask_token_id] * (-len(ids) % how.multiple)
        labels = [draw.choice(40, 4, replace=False).tolist() for _ in range(cells)]
        texts.append(Read(ids, prompt_len, rows, labels))
    return texts


@pytest.mark.long
@pytest.mark.slow("^(?!.*sdar$)")
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_probabilities_are_those_of_the_logits(family, tmp_path):
    stated = {} if family in OWN_MASK else {"mask_token_id": MASK_ID}
    model = dj.load(write_tiny(family, tmp_path, seed=7, **stated), dtype="float32")
    how = reading_of(model)
    texts = some_reads(model, how)
    together = log_probabilities(model, texts)
    for text, found in zip(texts, together, strict=True):
        (alone,) = log_probabilities(model, [text])
        for number in range(len(text.rows)):
            want = wanted(model, text, number)
            np.testing.assert_allclose(np.exp(found[number]), np.exp(want), rtol=0, atol=1e-5)
            np.testing.assert_allclose(np.exp(alone[number]), np.exp(want), rtol=0, atol=1e-5)
    assert np.exp(together[0][0]).std() > 1e-4  # of something


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True])
def test_questions_are_answered_in_one_forward(tiny, monkeypatch, joint):
    calls, forward = [], module.forward
    monkeypatch.setattr(module, "forward", lambda *args: calls.append(1) or forward(*args))
    answers = decide(tiny, CONTEXT, QUESTIONS, joint=joint)
    assert calls == [1]
    texts = reads(tiny, reading_of(tiny), CONTEXT, QUESTIONS, joint)
    places = [(text, number) for text in texts for number in range(len(text.rows))]
    for one, (text, number) in zip(answers, places, strict=True):
        want = np.exp(wanted(tiny, text, number))
        np.testing.assert_allclose(one.probabilities, want / want.sum(), rtol=0, atol=1e-5)
        assert one.mass == pytest.approx(want.sum(), abs=1e-5)
        assert one.confidence == pytest.approx(want.max(), abs=1e-5)


@pytest.mark.long
def test_many_questions_at_once_equal_single_ones_bit_for_bit(tiny):
    questions = [
        Question.choice(f"Which is number {i}?", ["pens", "books", "days", "dollars"][: 2 + i % 3])
        for i in range(16)
    ]
    together = decide(tiny, CONTEXT, questions)
    alone = [decide(tiny, CONTEXT, [one])[0] for one in questions]
    assert together == alone
    assert len({one.probabilities for one in together}) > 14


def test_each_text_ends_with_one_cell_for_its_letter(tiny):
    how = reading_of(tiny)
    for text in reads(tiny, how, CONTEXT, QUESTIONS):
        assert text.rows == [text.prompt_len]
        assert text.ids[text.prompt_len :] == [how.mask_token_id, how.end_token_id]
        prompt = tiny.tokenizer.decode(text.ids[: text.prompt_len])
        assert CONTEXT in prompt
        assert prompt.count("Question:") == 1


def test_a_joint_canvas_numbers_the_answers(tiny):
    (text,) = reads(tiny, reading_of(tiny), CONTEXT, QUESTIONS, True)
    filled = list(text.ids)
    for row, labels in zip(text.rows, text.labels, strict=True):
        assert filled[row] == reading_of(tiny).mask_token_id
        filled[row] = labels[1]
    canvas = tiny.tokenizer.decode(filled[text.prompt_len :], skip_special_tokens=True)
    assert canvas.replace(": ", ":") == "1:B\n2:B\n3:B"


def test_answers_have_a_value_by_kind():
    predicate, choice, score = (
        answer(q, np.log(p))
        for q, p in zip(QUESTIONS, ((0.6, 0.2), (0.1, 0.5, 0.2), (0.1, 0.1, 0.2)), strict=True)
    )
    assert predicate.value == pytest.approx(0.75)
    assert predicate.confidence == pytest.approx(0.6)
    assert choice.value == "tech"
    assert score.value == pytest.approx(1.25)
    assert score.mass == pytest.approx(0.4)


def test_what_cannot_be_asked_is_one_line(tiny):
    how = reading_of(tiny)
    cases = [
        lambda: Question.choice("x", ["only"]),
        lambda: Question.choice("x", ["o"] * 27),
        lambda: reads(tiny, how, "", []),
        lambda: reads(tiny, how, "", [QUESTIONS[0]] * 65),
        lambda: reads(SimpleNamespace(tokenizer=None, source="m"), how, "", QUESTIONS),
        lambda: padded_size([Read([1] * 5000, 1, [0], [[1]])]),
        lambda: padded_size([Read([1] * 4000, 1, [0], [[1]])] * 16),
        lambda: reads(
            tiny,
            module.Reading(attention="causal", shift=True, mask_token_id=-1, end_token_id=None),
            "",
            QUESTIONS,
            True,
        ),
    ]
    for case in cases:
        with pytest.raises(ValueError, match=r"ask |give |at most|leave |letters") as raised:
            case()
        assert "\n" not in str(raised.value)


def test_an_llm_decides_as_its_model(tiny):
    llm = dj.LLM(tiny, max_num_seqs=1, warm_up=False, progress=False)
    for joint in (False, True):
        assert llm.decide(CONTEXT, QUESTIONS, joint=joint) == decide(
            tiny, CONTEXT, QUESTIONS, joint=joint
        )
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.decide(CONTEXT, QUESTIONS)


def test_a_canvas_behind_a_cached_text_is_refused_by_name(tiny):
    canvas = tiny.replace(arch=dataclasses.replace(tiny.arch, condition=lambda *_: None))
    with pytest.raises(ValueError, match="sdar denoises a canvas"):
        decide(canvas, CONTEXT, QUESTIONS)


@pytest.mark.long
def test_padding_is_invisible_and_programs_are_few(tiny):
    how = reading_of(tiny)
    before = module.forward._cache_size()
    found = []
    for size in (1, 2, 3):
        texts = reads(tiny, how, CONTEXT * size, QUESTIONS[:size])
        found.append(log_probabilities(tiny, texts))
    assert module.forward._cache_size() - before <= 2
