"""Holes between given parts: tokens stay where they are given, and holes of constraints hold."""

import re

import pytest

import dllm_jax as dj
from dllm_jax import strategies
from dllm_jax.structured import Choice, Hole, Regex, Template
from dllm_jax.tasks.problems import problem

PROBLEM = problem("plain", 5, 3, heldout=True)
MESSAGES = [{"role": "user", "content": PROBLEM.question}]


@pytest.fixture(scope="module")
def llm():
    return dj.LLM("builtin:tiny-sdar", warm_up=False, max_num_seqs=2)


def _split(llm, text, holes):
    """A text with so many tokens punched out at some places: parts, and what was there."""
    ids = llm.tokenizer(text)["input_ids"]
    parts, gone, end = [], [], 0
    for place, count in holes:
        parts += [llm.tokenizer.decode(ids[end:place]), Hole(count)]
        gone.append(ids[place : place + count])
        end = place + count
    return [*parts, llm.tokenizer.decode(ids[end:])], ids, gone


@pytest.mark.slow
def test_blocks_fill_holes_between_given_tokens(llm):
    """The built-in model's own text, with three holes, comes back as it was."""
    (whole,) = llm.chat([MESSAGES], dj.SamplingParams(max_tokens=96))
    text = whole.outputs[0].text
    parts, ids, gone = _split(llm, text, [(6, 3), (14, 4), (24, 2)])
    (output,) = llm.infill([*MESSAGES, *parts], params=dj.SamplingParams(ignore_eos=True))
    assert output.error is None
    found = output.outputs[0].token_ids
    assert found == ids[6:26]
    assert output.outputs[0].finish_reason == "length"
    assert gone[1] == found[8:12]


@pytest.mark.long
def test_given_tokens_never_change(llm):
    given = ["Ann", Hole(3), " pens 7 and", Hole(2), " = ", Hole(1), " days."]
    (output,) = llm.infill(given, params=dj.SamplingParams(ignore_eos=True))
    tokenize = lambda text: llm.tokenizer(text)["input_ids"]  # noqa: E731
    inner = [tokenize(given[i]) for i in (2, 4)]
    found = output.outputs[0].token_ids
    first = 3
    assert found[first : first + len(inner[0])] == inner[0]
    second = first + len(inner[0]) + 2
    assert found[second : second + len(inner[1])] == inner[1]
    assert len(found) == second + len(inner[1]) + 1


@pytest.mark.slow
def test_a_constraint_holds_across_given_tokens(llm):
    digits = Regex(r"\d{2}7\d")
    seven = llm.tokenizer("7")["input_ids"]
    assert len(seven) == 1
    params = dj.SamplingParams(constraint=digits)
    (output,) = llm.infill(["It is ", Hole(2), "7", Hole(1), " days."], params=params)
    assert re.fullmatch(digits.regex, output.outputs[0].text)
    assert output.outputs[0].constraint_met
    with pytest.raises(ValueError, match="no text of the constraint has the given tokens"):
        llm.infill(["It is ", Hole(1), "7", Hole(1), " days."], params=params)


HELD = [
    " has ",
    Hole(Regex(r"\d{1,3}")),
    " pens and ",
    Hole(Choice(["no", "many"])),
    " books.",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multi_bd", "full_sequence", "ar"])
def test_holes_of_constraints_take_as_long_as_they_need(name, llm):
    model = "builtin:tiny-qwen3" if name == "ar" else "builtin:tiny-sdar"
    if name != "multi_bd":
        strategy = strategies.FullSequence(buffer_size=5) if name == "full_sequence" else name
        llm = dj.LLM(model, strategy, warm_up=False, max_num_seqs=1)
    params = dj.SamplingParams(max_tokens=40)
    (output,) = llm.infill([*MESSAGES, "Ann", *HELD], params=params)
    (text,) = output.outputs
    assert re.fullmatch(r"\d{1,3} pens and (no|many) books\.", text.text)
    assert (text.finish_reason, text.constraint_met) == ("stop", True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "params", "said"),
    [
        (["a", Hole(2), Hole(Regex("b"))], {}, "use one kind in a text"),
        (["a", Hole(Regex("b"))], {"constraint": Regex("b")}, "give it to a hole"),
        ([3, Hole(2)], {}, "is no conversation"),
        (["a", 3, Hole(2)], {}, "a part is 3"),
        (["a", Hole(200), "b"], {}, "buffer_size="),
    ],
)
def test_what_cannot_be_filled_is_refused_in_one_line(llm, parts, params, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        llm.infill(parts, params=dj.SamplingParams(**params))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("of", [0, -1, True, "a", None])
def test_what_is_no_hole_is_refused(of):
    with pytest.raises(ValueError, match="is no hole; give a number of tokens"):
        Hole(of)


def test_a_template_is_its_parts_in_sequence():
    assert Template(("a", Regex("b"))) == Template(("a", Regex("b")))
