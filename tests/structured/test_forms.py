"""Proves that the arguments of every form are held to their schemas and read as JSON.

Texts are drawn letter by letter from the grammar of random tools, with marks as tokens and as plain
text, and read in random portions; `jsonschema` judges what comes out.
"""

import json
import random

import jsonschema
import numpy as np
import pytest

from dllm_jax import structured
from dllm_jax.api.calls import message_of
from dllm_jax.structured.forms import FORMS, MARKS, is_json, kind_of, written
from dllm_jax.structured.limits import UNREACHABLE, Budget, distances
from dllm_jax.structured.tools import Tool, Tools
from dllm_jax.structured.turn_grammar import turn_tree
from dllm_jax.structured.turn_reading import Turn, joined

WEATHER = Tool(
    "get_weather",
    '{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, '
    '"required": ["city"]}',
)
BYTES = [bytes([i]) for i in range(256)]
IDS = {mark: 256 + i for i, mark in enumerate(MARKS)}
# The raw texts of design note agents.md, section 2.
RAW = {
    "hermes": "<think>\nI look it up.\n</think>\n\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "gemma4": "<|channel>thought\nI look it up.\n<channel|><|tool_call>call:get_weather"
    '{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
    "xml": "<think>\nI look it up.\n</think>\n<tool_call>\n<function=get_weather>\n"
    "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
    "</tool_call>",
    "llama_json": '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}',
}


def letters_of(text, marks):
    found = []
    while text:
        mark = next((one for one in marks if text.startswith(one)), None)
        found += [*text[0].encode()] if mark is None else [IDS[mark]]
        text = text[1 if mark is None else len(mark) :]
    return found


def read(tools, letters, marks, draw=None):
    """The pieces of a text, in portions that `draw` chooses."""
    turn = Turn(tools, BYTES, {mark: IDS[mark] for mark in marks})
    pieces, at = [], 0
    while at < len(letters):
        size = len(letters) if draw is None else draw.choice((1, 2, 5, 40))
        pieces += turn.feed(letters[at : at + size])
        at += size
    return joined(pieces + turn.feed([], last=True))


def automaton_of(tools, marks):
    return structured.fitting(tools, Budget(), 1024, marks)


def accepts(automaton, letters):
    table, accepting = automaton
    state = 1
    for letter in letters:
        state = table[state, letter]
    return bool(accepting[state])


@pytest.mark.parametrize("marks", [(), MARKS])
@pytest.mark.parametrize("name", FORMS)
def test_the_worked_examples_are_held_and_read(name, marks):
    thinks = name != "llama_json"
    tools = Tools((WEATHER,), form=name, thinks=thinks)
    letters = letters_of(RAW[name], marks)
    for choice in ("auto", "required"):
        held = automaton_of(Tools((WEATHER,), choice, form=name, thinks=thinks), marks)
        assert accepts(held, letters)
    message = message_of(read(tools, letters, marks), lambda: "call_x")
    function = {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}
    assert message == {
        "role": "assistant",
        "content": None,
        **({"reasoning_content": "I look it up."} if thinks else {}),
        "tool_calls": [{"id": "call_x", "type": "function", "function": function}],
    }
    call = written(FORMS[name], "get_weather", {"city": "Oslo", "days": 2})
    assert RAW[name].endswith(call)


@pytest.mark.parametrize("name", FORMS)
def test_prose_and_several_calls(name):
    form = FORMS[name]
    call = written(form, "get_weather", {"city": 'a\n"é'})
    held = automaton_of(Tools((WEATHER,), form=name), ())
    twice = call + ("\n" if form.between is None else form.between) + call
    assert accepts(held, twice.encode()) is (form.between is not None)
    assert accepts(held, f"Now. {call}".encode())
    said = f"Now {{ {call[:-1]}"  # a call that begins amid prose is one where it may be
    kinds = [one.kind for one in read(Tools((WEATHER,), form=name), said.encode(), ())]
    assert kinds[0] == "text"
    assert ("call" in kinds) is form.has_prose
    several = Tools((WEATHER,), several=False, form=name)
    assert not accepts(automaton_of(several, ()), twice.encode())


VALUES = (
    *({"type": "string"}, {"type": "string", "maxLength": 6}, {"type": "string", "minLength": 2}),
    *({"type": "string", "pattern": "^[a-z]{2,5}$"}, {"type": "string", "format": "date"}),
    *({"type": "integer", "minimum": -3, "maximum": 40}, {"type": "number"}, {"type": "boolean"}),
    *({"enum": ["red", 'qu"ote', 7, None, "5", "true"]}, {"enum": ["a<b", "x\ny"]}, {"const": 1}),
    *({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "integer"]}, {}),
    *({"type": "array", "items": {"type": "string"}}, {"type": "array"}, {"type": "object"}),
    {"type": "object", "properties": {"b": {}, "A": {"const": "k"}}, "required": ["b"]},
    {"type": "object", "additionalProperties": {"type": "number"}},
    {"anyOf": [{"type": "string", "format": "date"}, {"$ref": "#/$defs/x"}]},
)


def drawn_tool(draw, number):
    names = [f"{draw.choice(('id', 'é', 'a-b', 'x$', 'Zed'))}{j}" for j in range(3)]
    names = names[: draw.randint(0, 3)]
    schema = {
        "type": "object",
        "properties": {name: draw.choice(VALUES) for name in names},
        "$defs": {"x": {"type": "array", "items": {"type": "string"}, "maxItems": 2}},
        "required": [name for name in names if draw.random() < 0.6],
        **({"additionalProperties": False} if names or draw.random() < 0.5 else {}),
    }
    return Tool("t" + "_x" * number, json.dumps(schema))  # each a beginning of the next


def drawn_text(automaton, draw):
    """A text of the automaton; some of its letters lead on the shortest way to an end."""
    table, accepting = automaton
    distance = distances(table, accepting, Budget())
    state, found = 1, []
    while True:
        onto = table[state]
        ways = np.flatnonzero((onto != 0) & (distance[onto] < UNREACHABLE))
        if accepting[state] and (not len(ways) or len(found) > 400 or draw.random() < 0.3):
            return found
        if len(found) > 400 or draw.random() < 0.25:
            ways = ways[distance[onto[ways]] == distance[onto[ways]].min()]
        found.append(int(draw.choice(ways.tolist())))
        state = onto[found[-1]]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("marks", [(), MARKS])
@pytest.mark.parametrize("name", FORMS)
def test_every_call_is_valid_in_every_form(name, marks, seed):
    draw, num_calls = random.Random(f"{name}{marks}{seed}"), 0
    tools = tuple(drawn_tool(draw, i) for i in range(2))
    known = {tool.name: json.loads(tool.schema) for tool in tools}
    for choice in ("auto", "required"):
        held = Tools(tools, choice, form=name, thinks=name != "llama_json" and seed > 0)
        automaton = automaton_of(held, marks)
        for _ in range(4):
            letters = drawn_text(automaton, draw)
            pieces = read(held, letters, marks)
            assert read(held, letters, marks, draw) == pieces
            calls = message_of(pieces, lambda: "c").get("tool_calls", [])
            for one in calls:
                value = json.loads(one["function"]["arguments"])
                schema = known[one["function"]["name"]]
                jsonschema.Draft202012Validator(schema).validate(value)
            num_calls += len(calls)
            assert calls or choice == "auto"
    assert num_calls >= 4


def test_what_a_form_cannot_write_is_left_out_or_refused_by_its_path():
    names = {"a:b": {"type": "string"}, "c": {"enum": ["x\n</parameter>\n", "y"]}}
    schema = {"type": "object", "properties": names}
    for form, is_held in (("hermes", True), ("gemma4", False), ("xml", False)):
        automaton = automaton_of(Tools((Tool("f", json.dumps(schema)),), 0, form=form), ())
        call = written(FORMS[form], "f", {"a:b": "x"})
        assert accepts(automaton, call.encode()) is is_held
        assert accepts(automaton, written(FORMS[form], "f", {"c": "y"}).encode())
    needed = json.dumps({**schema, "required": ["a:b"]})
    strict = Tools((Tool("f", needed, strict=True),), 0, form="gemma4")
    with pytest.raises(ValueError, match=r"tools\[0\].function.parameters: .*'a:b'"):
        turn_tree(strict, Budget())


def test_the_kind_of_a_value_without_quotes():
    kinds = {
        "text": ({"type": "string"}, {"enum": ["7"]}, {"type": "string", "const": "x"}),
        "json": ({"type": ["integer", "null"]}, {"enum": [7, None]}, {"type": "array"}),
        "either": ({}, True, {"type": ["string", "null"]}, {"enum": ["x", 7]}, {"$ref": "#"}),
    }
    for kind, schemas in kinds.items():
        assert [kind_of(schema) for schema in schemas] == [kind] * len(schemas)
    assert [is_json(one) for one in (" 5 ", "null", '"x"', "NaN", "x")] == [True] * 2 + [False] * 3
