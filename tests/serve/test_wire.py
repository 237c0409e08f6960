"""Proves what request bodies are taken, dropped and refused, without a server.

Table 4 (fields that change nothing) is walked row by row; every refusal names its field by path.
"""

import ast
from pathlib import Path

import msgspec
import pytest

import dllm_jax
from dllm_jax.serve import params, wire
from dllm_jax.serve.neutral import ANY, IGNORED, NEUTRAL
from dllm_jax.serve.refusals import Refusal

USER = {"role": "user", "content": "hi"}
READ_BY_CHAT = set(NEUTRAL) & set(wire.Chat.__struct_fields__)


def chat(**fields):
    return wire.read(msgspec.json.encode({"messages": [USER], **fields}), wire.Chat)


def completion(**fields):
    return wire.read(msgspec.json.encode({"prompt": "hi", **fields}), wire.Completion)


def refusal(read, **fields):
    with pytest.raises(Refusal) as raised:
        read(**fields)
    return raised.value


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_fields_that_change_nothing(name):
    values = (None, {"any": 1}) if NEUTRAL[name] is ANY else (None, *NEUTRAL[name])
    for value in values:
        if NEUTRAL[name] is not ANY or name not in READ_BY_CHAT:
            assert chat(**{name: value}) == chat()
        assert completion(**{name: value}) == completion()


@pytest.mark.parametrize("name", sorted(n for n, v in NEUTRAL.items() if v is not ANY))
def test_fields_that_would_change_something_are_named(name):
    for value in ("some", 5, [1], {"type": "json_schema"}, True, False):
        if value is NEUTRAL[name] or any(
            value == one and type(value) is type(one) for one in NEUTRAL[name]
        ):
            continue
        read = completion if name in READ_BY_CHAT else chat
        found = refusal(read, **{name: value})
        assert (found.status, found.param, found.code) == (400, name, "unsupported_parameter")
        assert name in found.message


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_clients_say_for_their_own_sake_is_not_read(name):
    assert chat(**{name: "x"}) == chat(**{name: {"a": 1}}) == chat()


@pytest.mark.parametrize(
    ("read", "fields", "param", "code"),
    [
        (chat, {"tempratur": 1}, "tempratur", "unknown_parameter"),
        (chat, {"temperature": "x"}, "temperature", "invalid_value"),
        (chat, {"temperature": -1}, "temperature", "invalid_value"),
        (chat, {"top_p": 0}, "top_p", "invalid_value"),
        (chat, {"top_k": -2}, "top_k", "invalid_value"),
        (chat, {"n": 0}, "n", "invalid_value"),
        (chat, {"n": 1.0}, "n", "invalid_value"),
        (chat, {"n": True}, "n", "invalid_value"),
        (chat, {"seed": "1"}, "seed", "invalid_value"),
        (chat, {"seed": 1.5}, "seed", "invalid_value"),
        (chat, {"max_tokens": 0}, "max_tokens", "invalid_value"),
        (chat, {"max_tokens": 2**31}, "max_tokens", "invalid_value"),
        (chat, {"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        (chat, {"stop": 3}, "stop", "invalid_value"),
        (chat, {"stop": ["a", 3]}, "stop[1]", "invalid_value"),
        (chat, {"stop": [""]}, "stop[0]", "invalid_value"),
        (chat, {"stop": "x" * 257}, "stop", "invalid_value"),
        (chat, {"stop": ["x"] * 17}, "stop", "invalid_value"),
        (chat, {"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
        (chat, {"stop_token_ids": [1] * 33}, "stop_token_ids", "invalid_value"),
        (chat, {"ignore_eos": 1}, "ignore_eos", "invalid_value"),
        (chat, {"stream": "yes"}, "stream", "invalid_value"),
        (chat, {"stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        (chat, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage", None),
        (chat, {"stream_mode": "fast"}, "stream_mode", "invalid_value"),
        (chat, {"max_nfe": 0}, "max_nfe", "invalid_value"),
        (chat, {"max_repetition_run": 1}, "max_repetition_run", "invalid_value"),
        (chat, {"strategy_overrides": [1]}, "strategy_overrides", "invalid_value"),
        (chat, {"strategy_overrides": {"a": "b"}}, "strategy_overrides[*]", "invalid_value"),
        (chat, {"priority": 0.5}, "priority", "invalid_value"),
        (chat, {"model": 3}, "model", "invalid_value"),
        (chat, {"messages": []}, "messages", "invalid_value"),
        (chat, {"messages": "hi"}, "messages", "invalid_value"),
        (chat, {"messages": [3]}, "messages[0]", "invalid_value"),
        (chat, {"messages": None}, "messages", "invalid_value"),
        (chat, {"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        (chat, {"messages": [{"content": "x"}]}, "messages[0].role", "invalid_value"),
        (chat, {"messages": [USER, {**USER, "role": "x"}]}, "messages[1].role", "invalid_value"),
        (chat, {"messages": [{**USER, "content": 3}]}, "messages[0].content", "invalid_value"),
        (chat, {"messages": [{**USER, "x": 1}]}, "messages[0].x", "unknown_parameter"),
        (chat, {"messages": [{**USER, "tool_calls": [1]}]}, "messages[0].tool_calls[0]", None),
        (chat, {"messages": [{**USER, "role": "function"}]}, "messages[0].role", None),
        (
            chat,
            {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            chat,
            {"messages": [{**USER, "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "invalid_value",
        ),
        (chat, {"add_special_tokens": True}, "add_special_tokens", "unsupported_parameter"),
        (completion, {"add_special_tokens": False}, "add_special_tokens", None),
        (completion, {"prompt": []}, "prompt", "invalid_value"),
        (completion, {"prompt": 3}, "prompt", "invalid_value"),
        (completion, {"prompt": [[]]}, "prompt[0]", "invalid_value"),
        (completion, {"prompt": [[1, "x"]]}, "prompt[0][1]", "invalid_value"),
        (completion, {"prompt": [-1]}, "prompt[0]", "invalid_value"),
        (completion, {"prompt": None}, "prompt", "invalid_value"),
        (completion, {"suffix": 3}, "suffix", "invalid_value"),
        (completion, {"messages": [USER]}, "messages", "unknown_parameter"),
        (completion, {"echo": True}, "echo", "unsupported_parameter"),
        (completion, {"logprobs": 6}, "logprobs", "invalid_value"),
        (completion, {"top_logprobs": 2}, "top_logprobs", "unsupported_parameter"),
        (chat, {"logprobs": True, "top_logprobs": 20}, "top_logprobs", "invalid_value"),
        (completion, {"best_of": 2}, "best_of", "unsupported_parameter"),
    ],
)
def test_a_refusal_names_its_field(read, fields, param, code):
    found = refusal(read, **fields)
    assert found.param == param
    assert found.status == 400
    assert code in (None, found.code)
    assert len(msgspec.json.encode(found.body)) <= 1024


HOSTILE = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x"} {}',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 100_000,
    b'{"a":' * 50_000,
]


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 0), ("top_k", -2), ("n", 0), ("max_nfe", 1.5)]
)
def test_a_number_out_of_range_is_refused_in_the_same_words_as_in_python(name, value):
    with pytest.raises(ValueError, match=name) as python:
        dllm_jax.SamplingParams(**{name: value})
    with pytest.raises(Refusal) as http:
        chat(**{name: value})
    words = str(python.value).replace("[1, 4096]", "[1, 128]")  # the server's own limit of `n`
    assert (http.value.message, http.value.param) == (words, name)


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_json(body):
    with pytest.raises(Refusal) as raised:
        wire.read(body, wire.Completion)
    assert raised.value.code == "invalid_json"
    assert len(msgspec.json.encode(raised.value.body)) <= 1024


def test_numbers_too_large_and_values_too_long_are_cut():
    for fields in ({"n": 10**30}, {"logit_bias": {"1": "x" * 10_000}}, {"x" * 100_000: 1}):
        assert len(msgspec.json.encode(refusal(completion, **fields).body)) <= 1024


def test_messages_as_clients_write_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    echoed = {"refusal": None, "tool_calls": None, "audio": None, "annotations": []}
    body = chat(
        messages=[
            {"role": "developer", "content": "be short"},
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": "x", **echoed},
            USER,
        ]
    )
    assert wire.text_of(body.messages[1].content) == "a\nb"
    assert body.messages[2] == wire.Turn("assistant", "x")


def test_values_of_other_servers_clients():
    body = chat(top_k=-1, seed=-(2**63), stop=[], n=None, stop_token_ids=[])
    assert (body.top_k, body.n, params.stop_strings(body)) == (-1, None, ())
    assert chat(seed=2**63 - 1).seed == 2**63 - 1


def test_no_raw_tokenizer_encodes():
    """`encode` of a `tokenizers.Tokenizer` holds the GIL: 250 ms for 72,000 tokens."""
    for path in (Path(dllm_jax.__file__).parent / "serve").rglob("*.py"):
        assert raw_encodes(path.read_text(encoding="utf-8")) == [], path.name
    assert raw_encodes("ids = self.tokenizer.encode(text).ids") == ["self.tokenizer.encode"]


def raw_encodes(source):
    """Calls of `encode` on a tokenizer."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("encode", "encode_batch"):
            owner = ast.unparse(node.value)
            found += [f"{owner}.{node.attr}"] if "tokenizer" in owner else []
    return found


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": "{}"}}, {"json": {}}),
        ({"structured_outputs": {"json_object": True}}, {"json": {"type": "object"}}),
    ],
)
def test_what_the_text_must_be_is_read(fields, wanted):
    assert params.constraint(chat(**fields)) == params.constraint(completion(**fields)) == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_the_text_must_be_is_refused_by_its_field(fields, param):
    with pytest.raises(Refusal) as raised:
        params.constraint(chat(**fields))
    assert raised.value.param == param


HINT = {"cache_control": {"type": "ephemeral"}}
TURNS = {
    "cache_hint": {**USER, **HINT},
    "cache_hint_on_a_part": {**USER, "content": [{"type": "text", "text": "hi", **HINT}]},
    "id": {**USER, "id": "m1"},
    "echoed": {**USER, "annotations": [{"a": 1}], "refusal": "", "reasoning": "", "audio": None},
    "item": {**USER, "type": "message", "status": "completed", "id": "msg_1"},
    "part_of_an_answer": {
        "role": "user",
        "content": [{"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}],
    },
}


@pytest.mark.parametrize("name", TURNS)
def test_item_14_harmless_fields_of_messages_pass(name):
    for turns in ([TURNS[name]], [USER, {**TURNS[name], "role": "assistant"}, USER]):
        found = chat(messages=turns)
        assert [wire.text_of(turn.content) for turn in found.messages] == ["hi"] * len(turns)
        body = msgspec.json.encode({"messages": turns})
        assert wire.read(body, wire.Tokenize).messages == found.messages


def test_item_14_turns_may_be_empty():
    empty = {"role": "assistant"}
    for turn in (
        *(empty, {**empty, "content": None}, {**empty, "content": ""}, {**empty, "content": []}),
        *({**USER, "content": ""}, {**USER, "content": None}, {**USER, "content": []}),
    ):
        assert wire.text_of(chat(messages=[turn, USER]).messages[0].content) == ""


def test_item_14_fields_of_other_servers_pass():
    assert chat(cache_salt="x", **HINT) == chat()
    fields = {"add_generation_prompt": True, "continue_final_message": False, "tools": None}
    fields |= {"return_token_strs": False, "chat_template": None, "mm_processor_kwargs": None}
    for start in ({"messages": [USER], "add_special_tokens": False}, {"prompt": "a"}):
        assert wire.read(msgspec.json.encode(start | fields), wire.Tokenize)
    refused = {"messages": [USER], "add_generation_prompt": False}
    with pytest.raises(Refusal, match="add_generation_prompt=false"):
        wire.read(msgspec.json.encode(refused), wire.Tokenize)


NUMBERS = {"2**64": b"18446744073709551616", "-2**63-1": b"-9223372036854775809"}
NUMBERS |= {f"1e{n}": b"1" + b"0" * n for n in (30, 4000, 5000)}


@pytest.mark.parametrize("number", NUMBERS)
def test_item_3_integers_over_64_bits_are_refused_wherever_they_are(number):
    schema = {"type": "object", "properties": {"a": {"minItems": "N"}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    bodies = {
        "seed": {"seed": "N"},
        "logit_bias.5": {"logit_bias": {"5": "N"}},
        "metadata.a[1].b": {"metadata": {"a": [0, {"b": "N"}]}},
        "response_format.json_schema.schema.properties.a.minItems": {"response_format": form},
        "chat_template_kwargs.a": {"chat_template_kwargs": {"a": "N"}},
    }
    for param, fields in bodies.items():
        body = msgspec.json.encode({"messages": [USER], **fields})
        with pytest.raises(Refusal) as raised:
            wire.read(body.replace(b'"N"', NUMBERS[number]), wire.Chat)
        assert raised.value.status == 400
        assert raised.value.param in (param, None)
    for kept in (2**64 - 1, -(2**63)):
        assert chat(seed=kept).seed == kept
    text = msgspec.json.encode(schema).replace(b'"N"', NUMBERS[number]).decode()
    with pytest.raises(Refusal):
        params.constraint(chat(structured_outputs={"json": text}))
