"""Proves that calls are held to their tools, and that a turn is read as it was written.

Texts of bytes go through the grammar's automaton; the built-in model writes turns with random tools
over every strategy; `json` and `jsonschema` judge the calls.
"""

import dataclasses
import json
import math
import random
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import structured
from dllm_jax.api.calls import Walk, message_of, next_stage
from dllm_jax.api.constraints import Constraints
from dllm_jax.engine.checks import Refused
from dllm_jax.engine.requests import CompletionOutput, Request
from dllm_jax.strategies.core.resolve import load_strategy
from dllm_jax.structured.limits import Budget
from dllm_jax.structured.offers import BadTool, offered
from dllm_jax.structured.regex import accepts, byte_automaton
from dllm_jax.structured.tools import Tool, Tools
from dllm_jax.structured.turn_grammar import turn_tree
from dllm_jax.structured.turn_reading import Piece, Turn, joined
from tests.structured.texts import many_tools

CITY = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
SUM = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
NONE = '{"type": "object", "maxProperties": 0}'
TOOLS = (Tool("read", CITY), Tool("read_file", SUM), Tool("now", NONE))
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def call(name, arguments):
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


READ, FILE = call("read", '{"city": "Os\\"lo }"}'), call("read_file", '{"a": -2}')
THOUGHTS = "<think>\nhm\n</think>\n\n"
TEXTS = {
    "": "auto none",
    "hello <tool_cal l": "auto none",
    READ: "auto required read",
    f"Now.\n{FILE}": "auto",
    f"\n\n{FILE}": "auto required",
    f"{READ}\n{FILE}": "auto required",
    f"{READ}\n{READ}": "auto required",
    f"{READ}{FILE}": "",
    f"{READ} done": "",
    call("now", "{}"): "auto required",
    call("now", '{"a": 1}'): "",
    call("read_file", '{"a": 1.5}'): "",
    call("rea", "{}"): "",
    f"{THOUGHTS}{FILE}": "auto required-thinks",
    f"<think>hm {READ}": "auto required-thinks",
    f"{THOUGHTS}Yes.{FILE}": "auto",
    f"hm</think>\n{FILE}": "auto required-inside",
    f"hm{FILE}": "auto required-inside",
    "hm</think>\n": "auto none ! required-inside",
    f"hm</think>Yes.{FILE}": "auto ! required-inside",
}
CHOICES = {
    "auto": Tools(TOOLS),
    "none": Tools(TOOLS, "none"),
    "required": Tools(TOOLS, "required"),
    "read": Tools(TOOLS, 0),
    "required-thinks": Tools(TOOLS, "required", thinks=True),
    "required-inside": Tools(TOOLS, "required", thinks=True, inside=True),
}
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def spelt(text, marks):
    """Letters of a text: marks that are tokens, else bytes."""
    letters = []
    while text:
        mark = next((one for one in marks if text.startswith(one)), None)
        letters += [*text[0].encode()] if mark is None else [256 + marks.index(mark)]
        text = text[1 if mark is None else len(mark) :]
    return letters


@pytest.mark.parametrize("marks", [(), MARKS])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_turn_is_prose_then_calls_of_its_tools(choice, marks):
    tools = CHOICES[choice]
    if choice in ("auto", "none"):
        tools = dataclasses.replace(tools, thinks=True)
    automaton = byte_automaton(turn_tree(tools, Budget(), marks), Budget(), 256 + len(marks))
    for text, choices in TEXTS.items():
        wanted = choice.removesuffix("-thinks") in choices.split() or choice in choices.split()
        if choice == "required-inside" and "required-inside" not in choices:
            continue  # most of it would be thoughts
        wanted &= choice not in choices.partition("!")[2]
        letters: Any = spelt(text, marks)
        assert accepts(automaton, letters) is wanted, text


def test_a_mark_spelt_by_plain_tokens_is_prose_where_it_is_a_token():
    automaton = byte_automaton(turn_tree(Tools(TOOLS), Budget(), MARKS), Budget(), 260)
    assert accepts(automaton, f"say {OPEN} twice".encode())
    turn = Turn(Tools(TOOLS), [bytes([i]) for i in range(256)], {OPEN: 300})
    assert turn.feed(f"say {OPEN}x".encode(), True) == [Piece("text", f"say {OPEN}x")]


def turn_of(thinks=True, marks=()):
    ids = {mark: 256 + i for i, mark in enumerate(marks)}
    return Turn(Tools(TOOLS, thinks=thinks), [bytes([i]) for i in range(256)], ids)


@pytest.mark.parametrize("marks", [(), MARKS])
def test_a_turn_is_read_alike_in_whatever_portions_it_comes(marks):
    draw = random.Random(0)
    said = [f"{THOUGHTS}Nöw.\n{READ}\n{FILE}", f"{READ}", "é <tool_c </think> ", f"<think>a{FILE}"]
    wanted = [
        [
            Piece("thought", "hm"),
            Piece("text", "Nöw."),
            *[Piece("call", "read"), Piece("arguments", '{"city": "Os\\"lo }"}'), Piece("end", "")],
            *[Piece("call", "read_file"), Piece("arguments", '{"a": -2}'), Piece("end", "")],
        ],
        [Piece("call", "read"), Piece("arguments", '{"city": "Os\\"lo }"}'), Piece("end", "")],
        [Piece("text", said[2].replace("</think>", "" if marks else "</think>"))],
        [
            Piece("thought", "a"),
            *[Piece("call", "read_file"), Piece("arguments", '{"a": -2}'), Piece("end", "")],
        ],
    ]
    for text, pieces in zip(said, wanted, strict=True):
        letters = spelt(text, marks)
        for _ in range(100):
            turn, found, at = turn_of(marks=marks), [], 0
            while at < len(letters):
                size = draw.choice((1, 2, 5, 40))
                found += turn.feed(letters[at : at + size])
                at += size
            assert joined(found + turn.feed([], last=True)) == pieces


def test_a_call_that_is_cut_has_no_end():
    for size in range(len(FILE)):
        found = turn_of().feed(FILE[:size].encode(), last=True)
        assert "end" not in [piece.kind for piece in found]
        assert not [piece for piece in found if piece.kind == "text" and "tool_call>" in piece.text]


def tool(name="f", **fields):
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (3, None, "tools"),
        ([3], None, "tools[0].type"),
        ([{"type": "web_search"}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([tool(name="a b")], None, "tools[0].function.name"),
        ([tool(), tool()], None, "tools[1].function.name"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters"),
        *(
            ([tool(parameters={"properties": {"a": one}})], None, "tools[0].function.parameters")
            for one in ({"minimum": math.nan}, {"enum": ["\ud800"]}, {"const": object()})
        ),
        ([tool(f"f{i}") for i in range(129)], None, "tools"),
        ([tool()], "some", "tool_choice"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, "tool_choice"),
        ([], "required", "tool_choice"),
        ([tool()], {"type": "allowed_tools", "allowed_tools": {"tools": 3}}, "tool_choice"),
    ],
)
def test_tools_and_choices_that_are_none_are_refused_by_path(tools, choice, param):
    with pytest.raises(BadTool) as raised:
        offered(tools, choice)
    assert raised.value.param == param
    assert raised.value.code == ("invalid_value" if param == "tool_choice" else "invalid_tool")
    assert str(raised.value).startswith(param)


def test_choices():
    three = [tool(name) for name in "abc"]
    assert offered([], "auto") is offered(None) is None
    for choice in ("auto", "none", "required"):
        offer = offered(three, choice, False)
        assert offer is not None
        assert (offer.choice, offer.several, len(offer.tools)) == (choice, False, 3)
    named = offered(three, {"type": "function", "name": "b"})
    assert named is not None
    assert named.choice == 1
    names = [{"type": "function", "function": {"name": "c"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    offer = offered(three, allowed)
    assert offer is not None
    assert (offer.choice, [one.name for one in offer.tools], len(offer.shown)) == (
        "required",
        ["c"],
        3,
    )


def test_a_tool_that_is_not_strict_is_relaxed_and_one_that_is_names_its_place():
    hard = {
        "type": "object",
        "properties": {"a": {"contains": {"type": "null"}}},
        "required": ["a"],
    }
    loose = Tools((Tool("now", NONE), Tool("f", json.dumps(hard))))
    budget = Budget()
    byte_automaton(turn_tree(loose, budget), budget)
    assert [note.partition(":")[0] for note in budget.notes] == ["tools[1].function.parameters"]
    strict = dataclasses.replace(loose, tools=(Tool("f", json.dumps(hard), True),))
    for stage in ("whole", "names"):
        with pytest.raises(ValueError, match=r"tools\[0\].function.parameters: .*contains"):
            turn_tree(dataclasses.replace(strict, stage=stage), Budget())


def test_an_answer_of_a_schema_beside_calls():
    held = Tools(TOOLS, answer=(SUM, "compact"))
    automaton = byte_automaton(turn_tree(held, Budget()), Budget())
    for text, is_held in ((READ, True), ('{"a":1}', True), ("a", False), ("", False)):
        assert accepts(automaton, text.encode()) is is_held
    thinks = dataclasses.replace(held, thinks=True)
    automaton = byte_automaton(turn_tree(thinks, Budget()), Budget())
    assert accepts(automaton, b'<think>hm</think>\n\n{"a":1}')
    assert not accepts(automaton, b"<think>hm</think>\n\nYes.")
    assert Tools.of(json.loads(json.dumps(held.fields))) == held
    said = json.dumps({"a": f"x {FILE}"})
    turn = Turn(held, [bytes([i]) for i in range(256)], {})
    found = [piece for byte in said.encode() for piece in turn.feed([byte])]
    assert joined(found + turn.feed([], last=True)) == [Piece("text", said)]


@pytest.mark.parametrize("is_token", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_thoughts_with_a_budget_are_left_in_as_many_tokens_as_their_mark_has(choice, is_token):
    ids = {mark: 256 + i for i, mark in enumerate(MARKS)} if is_token else {}
    words = dataclasses.replace(
        structured.spellings([*[bytes([i]) for i in range(256)], *[None] * 9]), marks=ids
    )
    for inside in (False, True):
        held = Tools(TOOLS, choice, thinks=True, inside=inside, budget=0)
        made = structured.compile(held, words, [264], np.array([], int), 1024)
        assert made.leave is not None
        state, mark = made.start, 1 if is_token else len("</think>")
        for letter in () if inside else spelt("\n<think>", [*ids]):
            assert made.leave[state] == 0 or choice == "required"
            state = made.delta[state, made.class_of[letter]]
        for letter in b"hm.":
            assert made.leave[state] == mark
            assert made.delta[state, made.class_of[264]] == 0  # no end within thoughts
            state = made.delta[state, made.class_of[letter]]
        for left, letter in zip(range(mark, 0, -1), spelt("</think>", [*ids]), strict=True):
            assert made.leave[state] == left
            state = made.delta[state, made.class_of[letter]]
        assert made.leave[state] == 0
        assert bool(made.distance[state]) is (choice == "required")


def test_a_text_goes_on_after_the_tokens_by_which_thoughts_have_ended():
    tools = Tools(TOOLS, thinks=True, inside=True, budget=3)
    params = dj.SamplingParams(max_tokens=9, constraint=tools)
    request = Request(prompt_token_ids=[7], params=params)
    walk = Walk(SimpleNamespace(**ONES.__dict__, end=4), turn_of(), 9, 3)
    text = CompletionOutput(0, "", walk.take([1, 1]), "length")
    assert next_stage(request, text, walk) is None
    text.token_ids.extend(walk.take([1]))
    for finish, more in (("stop", {}), ("length", {}), ("stop", {"stop_reason": "x"})):
        following = next_stage(
            request, dataclasses.replace(text, finish_reason=finish, **more), walk
        )
        assert (following is None) is bool(more)
    following = next_stage(request, text, walk)
    assert following is not None
    assert following.prompt_token_ids == [7, 1, 1, 1]
    assert following.params.max_tokens == 6
    assert following.params.constraint == dataclasses.replace(tools, at=3)


def test_tools_are_refused_where_a_strategy_holds_nothing_unless_none_is_called():
    for strategy in (load_strategy("edit_indel"), _rejecting()):
        constraints = Constraints(dj.load("builtin:tiny-sdar"), strategy)
        for choice in ("none", "auto", "required"):
            params = dj.SamplingParams(constraint=Tools(TOOLS, choice))
            request = Request(prompt_token_ids=[1], params=params)
            if choice == "none":
                assert constraints.missing(request) is None
                assert constraints(request) is request
                continue
            with pytest.raises(Refused, match=f"^tools: {strategy.name}") as raised:
                constraints(request)
            assert (raised.value.param, raised.value.code) == ("tools", "tools_unsupported")


def _rejecting():
    return load_strategy("dflash").replace(acceptance="rejection")


# --- with a model --------------------------------------------------------------------------------


def random_tools(draw):
    kinds = (
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-z]{2,5}$"},
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "boolean"},
        {"enum": ["red", 'qu"ote', 7, None]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    )
    made = []
    for i in range(draw.choice((1, 2, 3))):
        names = [f"{draw.choice(('id', 'é', 'a-b', 'x$'))}{j}" for j in range(draw.randint(0, 3))]
        schema = {
            "type": "object",
            "properties": {name: draw.choice(kinds) for name in names},
            "required": [name for name in names if draw.random() < 0.6],
            "additionalProperties": False,
        }
        made.append(tool(f"tool_{i}", parameters=schema))
    return made


ASK = [{"role": "user", "content": "Ann has 3 pens and buys 4. How many has she?"}]


def check_calls(output, tools):
    known = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    calls = output.message.get("tool_calls", [])
    for one in calls:
        value = json.loads(one["function"]["arguments"])
        jsonschema.Draft202012Validator(known[one["function"]["name"]]).validate(value)
    return len(calls)


def chat(llm, choice, tools, **params):
    # No room for tools in its prompt, which it was not trained on: the texts are about numbers.
    offer = offered(tools, choice, False)
    assert offer is not None
    held = Tools(offer.tools, offer.choice, offer.several)
    params = dj.SamplingParams(constraint=held, **params)
    (output,) = llm.chat(ASK, params, use_tqdm=False)
    turn = Turn(held, structured.token_bytes(llm.tokenizer), {})
    pieces = turn.feed(output.outputs[0].token_ids, last=True)
    return dataclasses.replace(output.outputs[0], message=message_of(pieces, lambda: "call_x"))


@pytest.fixture(scope="module")
def llm():
    with dj.LLM("builtin:tiny-sdar", warm_up=False, max_num_seqs=2) as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_every_call_is_valid_at_every_temperature(llm, seed):
    draw = random.Random(seed)
    for temperature in (0.0, 0.7, 1.5):
        tools = random_tools(draw)
        output = chat(llm, "required", tools, max_tokens=300, temperature=temperature, seed=seed)
        assert output.constraint_met
        assert check_calls(output, tools) == 1


@pytest.mark.long
def test_prose_under_auto_is_the_text_without_tools(llm):
    params = dj.SamplingParams(max_tokens=120)
    (plain,) = llm.chat(ASK, params, use_tqdm=False)
    output = chat(llm, "auto", random_tools(random.Random(0)), max_tokens=120)
    assert output.token_ids == plain.outputs[0].token_ids
    assert output.message == {"role": "assistant", "content": plain.outputs[0].text}


@pytest.mark.long
def test_24_tools_are_called_in_stages_alone_and_together(llm, monkeypatch):
    # The model's own template with calls. It shows no tools: their prompt would be too long.
    call = '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    call += "{{ c.function.arguments | tojson }}}\n</tool_call>"
    calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + call
    calls += "{% endfor %}{% endfor %}{# tools #}"
    template = llm.tokenizer.chat_template
    monkeypatch.setattr(llm.tokenizer, "chat_template", template + calls)
    tools, talks = many_tools(), [ASK, [{"role": "user", "content": "Ben has 9 dollars."}]]
    how = {"tool_choice": "required", "parallel_tool_calls": False, "use_tqdm": False}
    params = dj.SamplingParams(max_tokens=150)
    together = llm.chat(talks, params, tools=tools, **how)
    for talk, output in zip(talks, together, strict=True):
        (text,) = output.outputs
        assert text.finish_reason == "stop"
        assert check_calls(text, tools) == text.text.count(OPEN) == 1
        (alone,) = llm.chat(talk, params, tools=tools, **how)
        assert alone.outputs[0].token_ids == text.token_ids
    params = dj.SamplingParams(max_tokens=45)  # the arguments have no room
    ((text,),) = [one.outputs for one in llm.chat(ASK, params, tools=tools, **how)]
    assert (text.finish_reason, "tool_calls" in text.message) == ("length", False)


ONES = SimpleNamespace(  # two ones or more, then a two
    start=1,
    distance=[99, 3, 2, 1, 0],
    class_of=[0, 1, 2],
    delta=np.array([[0, 0, 0], [0, 2, 0], [0, 3, 0], [0, 3, 4], [0, 0, 0]]),
)


@pytest.mark.parametrize(("limit", "kept"), [(3, 0), (4, 3), (9, 5)])
def test_what_a_limit_forces_is_not_the_models(limit, kept):
    walk = Walk(ONES, turn_of(), limit)
    tokens = [1, 1, 1, 1, 2]
    assert len(walk.take(tokens[:2])) + len(walk.take(tokens[2:])) == kept
    assert walk.is_cut is (kept < len(tokens))
    assert walk.reason("stop") == ("length" if walk.is_cut else "stop")


@pytest.mark.parametrize("marks", [(), MARKS])
def test_a_token_is_forced_where_each_of_its_bytes_is_the_only_one(marks):
    parts = ["\n{", '"name', '": "', "read", '", "', '"city"', "}\n"]
    words = [*[bytes([i]) for i in range(256)], *[None] * 5, *[part.encode() for part in parts]]
    ids = {mark: 256 + i for i, mark in enumerate(marks)}
    known = dataclasses.replace(structured.spellings(words), marks=ids)
    made = structured.compile(Tools(TOOLS), known, [260], np.array([], int), 1024)

    def is_forced(state, token):
        for letter in words[token] or [token]:
            row = made.delta[state, made.class_of[[*range(256), 260, *ids.values()]]]
            if np.count_nonzero(row) != 1:
                return False
            state = made.delta[state, made.class_of[letter]]
        return True

    text = [f"Now.{OPEN}", *parts[:4], '", "arguments": {"city": "Os', '"}', *parts[-1:], CLOSE]
    window, wanted, state = [], [], made.start
    for part in text:
        one = [words.index(part.encode())] if part in parts else spelt(part, [*ids])
        for token in one:
            wanted += [len(window)] if is_forced(state, token) else []
            window.append(token)
            state = made.delta[state, made.class_of[token]]
    first = Walk(made, turn_of(), 90, spelt=words)
    assert first.take(window[:8]) == window[:8]
    at = SimpleNamespace(**{**vars(made), "start": first.state})
    walk = Walk(at, turn_of(), 90, spelt=words, before=first)
    assert walk.take(window[8:]) == window[8:]
    assert walk.forced == wanted
    shown = [words[i] for i in map(window.__getitem__, wanted)]
    assert shown[:3] == [b"\n{", b'"name', b'": "']
    assert b"read" not in shown  # or "now"


def test_a_text_goes_on_where_the_arguments_of_a_call_begin():
    tools = Tools(TOOLS, "required", stage="names")
    params = dj.SamplingParams(max_tokens=90, constraint=tools)
    request = Request(prompt_token_ids=[7], params=params)
    head = f'{OPEN}\n{{"name": "read_file", "arguments": '.encode()
    walk = Walk(None, turn_of(), 90)
    assert walk.turn.feed(walk.take(head[:-3])) == []
    text = CompletionOutput(0, "", [*head], "stop")
    assert next_stage(request, text, walk) is None
    walk.turn.feed(walk.take(head[-3:]))
    following = next_stage(request, text, walk)
    assert following is not None
    assert following.prompt_token_ids == [7, *head]
    assert following.params.max_tokens == 90 - len(head)
    assert following.params.constraint.stage == 1
    assert next_stage(request, dataclasses.replace(text, finish_reason="length"), walk) is None
    automaton = byte_automaton(turn_tree(following.params.constraint, Budget()), Budget())
    assert accepts(automaton, b'{"a": 5}}\n</tool_call>')
    assert accepts(
        automaton, f'{{"a": 5}}}}\n{CLOSE}\n{OPEN}\n{{"name": "now", "arguments": '.encode()
    )
    assert not accepts(automaton, b'{"city": "x"}}\n</tool_call>')
