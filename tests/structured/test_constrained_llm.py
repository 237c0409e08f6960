"""Constraints of `SamplingParams`: texts are valid, whole, and in time.

Of random weights, which know no grammar, unless a test asks what a trained model says.
"""

import contextlib
import json
import re

import jsonschema
import pytest

import dllm_jax as dj
from dllm_jax import strategies
from dllm_jax.structured import After, Choice, JsonSchema, Regex
from dllm_jax.tasks.problems import problem

pytestmark = pytest.mark.long

PHONE = Regex(r"\d{3}-\d{4}")
SENTENCE = Regex(r"(Ann|Tom) has \d{1,3} (pens|books)\.")
ANSWER = Regex(r'\{"answer": [1-9]\d{0,3}, "unit": "[a-z]{3,8}"\}')
UNICODE = Regex(r"[äöü€]{2}[^a-z]?")
ANYTHING = Regex(r"(.|\n)*")
PERSON = JsonSchema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)
SMALL = (PHONE, SENTENCE, ANSWER, UNICODE, Choice(["yes", "no", "maybe so"]))
EVERY = (*SMALL, PERSON)  # the last one needs a larger bucket of automata


def _chats(count):
    return [
        [{"role": "user", "content": problem("plain", 5, i, heldout=True).question}]
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def llm(random_folder):
    sizes = {"slot_buckets": (4,), "page_buckets": (4,), "prefill_buckets": (128,)}
    config = dj.EngineConfig(max_num_seqs=4, **sizes)
    return dj.LLM(random_folder, config=config, warm_up=False)


@pytest.fixture(scope="module")
def trained():
    return dj.LLM("builtin:tiny-sdar", warm_up=False, max_num_seqs=4)


def test_the_first_text_with_a_grammar_compiles_nothing(compilations):
    """The arrays of its grammar come without a program of their own, as other texts would wait."""
    sizes = {"slot_buckets": (5,), "page_buckets": (4,), "prefill_buckets": (128,)}  # not met yet
    config = dj.EngineConfig(max_num_seqs=5, **sizes)
    llm = dj.LLM("builtin:tiny-sdar", config=config, progress=False, warm_up_constraints=True)
    llm.constraint_report(PHONE)
    compilations.clear()
    with contextlib.closing(llm):
        params = dj.SamplingParams(max_tokens=20, constraint=PHONE)
        (output,) = llm.generate([[5, 6]], params, use_tqdm=False)
        compiled = [*compilations]
    assert fits(output.outputs[0].text, PHONE)
    assert not compiled


def fits(text, constraint):
    """Whether a text is one of a constraint, by others than the compiler."""
    if isinstance(constraint, Regex):
        return re.fullmatch(constraint.regex, text, re.ASCII) is not None
    if isinstance(constraint, Choice):
        return text in constraint.choices
    jsonschema.validate(json.loads(text), constraint.schema)
    return True


def _assert_held(output, constraint):
    (text,) = output.outputs
    assert output.error is None
    assert fits(text.text, constraint)
    assert (text.finish_reason, text.constraint_met) == ("stop", True)


def _params(llm, constraint, spare, **more):
    fewest = llm.constraint_report(constraint).fewest_tokens
    return dj.SamplingParams(max_tokens=fewest + spare, constraint=constraint, **more)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "spare"), [(0.0, 0), (1.0, 3), (0.0, 40)])
def test_texts_match_and_are_whole_in_one_batch(llm, temperature, spare):
    how = {"temperature": temperature, "seed": 2}
    params = [_params(llm, one, spare, **how) for one in EVERY]
    chats = _chats(len(EVERY))
    outputs = llm.chat(chats, params)
    for output, one in zip(outputs, EVERY, strict=True):
        _assert_held(output, one)
    alone = llm.chat(chats[2], params[2])[0]
    assert alone.outputs[0].token_ids == outputs[2].outputs[0].token_ids


@pytest.mark.slow
def test_b11_a_constraint_that_allows_everything_changes_nothing(trained):
    """Also where the model is unsure, so that an early end costs it little."""
    said = ("Tell me a story about a fox.", "What is the capital of France?", "def f(x):")
    chats = _chats(1) + [[{"role": "user", "content": one}] for one in said]
    free = trained.chat(chats, dj.SamplingParams(max_tokens=64))
    held = trained.chat(chats, dj.SamplingParams(max_tokens=64, constraint=ANYTHING))
    for a, b in zip(free, held, strict=True):
        assert (a.outputs[0].token_ids, a.metrics.nfe) == (b.outputs[0].token_ids, b.metrics.nfe)
        assert b.outputs[0].constraint_met


@pytest.mark.slow
def test_texts_of_one_prompt_are_each_held(llm):
    params = _params(llm, SENTENCE, 20, n=3, temperature=1.0, seed=5)
    (output,) = llm.chat(_chats(1), params)
    assert len({one.text for one in output.outputs}) > 1
    for one in output.outputs:
        assert fits(one.text, SENTENCE)
        assert one.constraint_met


@pytest.mark.slow
def test_a_seed_says_which_text(trained):
    """Alone and in a batch, again and again; another seed, another text."""

    def drawn(seeds):
        params = [_params(trained, SENTENCE, 20, temperature=1.0, seed=seed) for seed in seeds]
        return [one.outputs[0].text for one in trained.chat(_chats(1) * len(seeds), params)]

    together = drawn([4, 5, 6, 4])
    assert len(set(together)) == 3
    assert together[3] == together[0]
    assert drawn([5]) == together[1:2]


def test_a_stream_has_the_same_text(llm):
    params = _params(llm, ANSWER, 20)
    chat = _chats(1)[0]
    streamed = "".join(event.text for event in llm.stream(llm.apply_template(chat), params))
    assert streamed == llm.chat(chat, params)[0].outputs[0].text


@pytest.mark.parametrize(
    "cut", [{"stop": '"unit"'}, {"max_nfe": 2}], ids=["stop_string", "max_nfe"]
)
def test_a_text_that_is_cut_says_so(llm, cut):
    (output,) = llm.chat(_chats(1), _params(llm, ANSWER, 20, **cut))
    assert output.outputs[0].constraint_met is False


@pytest.mark.slow
def test_the_confidence_of_a_plan_takes_fewer_forwards(trained):
    """The model would not write this by itself, so few of its tokens are sure."""
    chats = _chats(3)
    raw = trained.chat(chats, _params(trained, ANSWER, 20))
    plan = trained.chat(chats, _params(trained, ANSWER, 20, constraint_confidence="plan"))
    for output in plan:
        _assert_held(output, ANSWER)
    assert sum(one.metrics.nfe for one in plan) < sum(one.metrics.nfe for one in raw)


@pytest.mark.slow
def test_a_constraint_behind_a_marker_leaves_what_is_before_it_free(trained):
    free = trained.chat(_chats(1), dj.SamplingParams(max_tokens=60))[0].outputs[0]
    (marker,) = trained.tokenizer(".")["input_ids"]
    assert marker in free.token_ids
    params = _params(trained, After(".", PHONE), 50)
    held = trained.chat(_chats(1), params)[0].outputs[0]
    first = held.token_ids.index(marker)
    assert re.fullmatch(PHONE.regex, trained.tokenizer.decode(held.token_ids[first + 1 :]))
    assert (held.finish_reason, held.constraint_met) == ("stop", True)


@pytest.mark.slow
def test_a_text_without_a_constraint_says_nothing(llm):
    (output,) = llm.chat(_chats(1), dj.SamplingParams(max_tokens=8))
    assert output.outputs[0].constraint_met is None


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"constraint": PHONE, "max_tokens": 7}, "the shortest text of the constraint has 8"),
        ({"constraint": PHONE, "ignore_eos": True}, "ignore_eos"),
        ({"constraint": PHONE, "temperature": 1.0, "top_p": 0.9}, "top_p=0.9"),
        ({"constraint": PHONE, "temperature": 1.0, "top_k": 5}, "top_k=5"),
        ({"constraint": "yes|no"}, "Regex"),
        ({"constraint": After("</think>", PHONE)}, "is not one token"),
        ({"constraint": Regex("(")}, "regular expression"),
        ({"constraint": Regex("a(?=b)")}, "regular expression"),
        ({"constraint": Choice(["a" * 200_000])}, "20000 states"),
        ({"constraint": Regex("[ab]{3000}")}, "at most 1024 fit"),
    ],
)
def test_what_cannot_be_held_is_refused_in_one_line(llm, params, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        llm.generate(llm.apply_template(_chats(1)[0]), dj.SamplingParams(**params))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


def _assert_all_held(llm, temperature, spare):
    how = {"temperature": temperature, "seed": 2}
    params = [_params(llm, one, spare, **how) for one in SMALL]
    outputs = llm.chat(_chats(len(SMALL)), params)
    for output, one in zip(outputs, SMALL, strict=True):
        _assert_held(output, one)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_guided_texts_are_held_and_those_that_are_allowed_anyway_are_written():
    """Of the other strategies test_constrained_engine.py says so."""
    strategy, chats = strategies.FullSequence(buffer_size=5, steps=16, cfg_scale=1.0), _chats(2)
    with dj.LLM("builtin:tiny-sdar", strategy, warm_up=False, max_num_seqs=1) as llm:
        _assert_all_held(llm, 0.0, 0)
        _assert_all_held(llm, 1.0, 5)
        free = llm.chat(chats, dj.SamplingParams(max_tokens=32))
        held = llm.chat(chats, dj.SamplingParams(max_tokens=32, constraint=ANYTHING))
    for a, b in zip(free, held, strict=True):
        assert (a.outputs[0].token_ids, a.metrics.nfe) == (b.outputs[0].token_ids, b.metrics.nfe)


@pytest.mark.slow
def test_drafts_change_no_constrained_text():
    """The texts are those of `ar`, greedy and drawn, with room to spare and without."""
    model, drafter = "builtin:tiny-qwen3", "builtin:tiny-qwen3-dflash"
    with (
        dj.LLM(model, "ar", warm_up=False, max_num_seqs=1) as plain,
        dj.LLM(model, draft=drafter, warm_up=False, max_num_seqs=1) as drafting,
    ):
        for how in ((0.0, 0), (0.0, 20), (1.0, 5)):
            assert _assert_all_held(drafting, *how) == _assert_all_held(plain, *how)
