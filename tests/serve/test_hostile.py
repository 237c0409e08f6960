"""Proves that no request breaks the server: hostile bodies by name, and bodies of its schema.

Bodies that are no JSON are in test_wire.py, wrong kinds, hosts and paths in test_http.py.
Each answer is a documented status with at most 1 KB of error object, none is a 500, and the server
answers the next request.
"""

import json
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.driving import CHAT, PATIENCE_S, TEXT, scripted, within

pytestmark = pytest.mark.long

DECIDE = "/v1/decisions"
JSON = {"content-type": "application/json"}
LINE = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    fields = {"limits": {"request_timeout": 60, "max_waiting": 4096}, "admin_keys": ["key"]}
    fields["settings"] = {"tool_format": "hermes", "step_s": 0.001}
    with scripted(tmp_path_factory.mktemp("server"), **fields, weights_root="/nowhere") as one:
        yield one


HOSTILE = {
    "malformed": (TEXT, b'{"prompt": ', JSON, 400),
    "too_large_by_one": (TEXT, b" " * ((4 << 20) + 1), JSON, 413),
    "as_large_as_may_be": (TEXT, b" " * (4 << 20), JSON, 400),
    "nested_in_a_free_field": (
        CHAT,
        b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":'
        + b"[" * 5000
        + b"]" * 5000
        + b"}}",
        JSON,
        400,
    ),
    "encoded_path_trick": ("/page/%2e%2e%2f%2e%2e%2fapp.py", b"{}", JSON, 404),
    "question_of_a_thousand_options": (
        DECIDE,
        json.dumps(
            {
                "input": "x",
                "questions": [
                    {"type": "choice", "instructions": "x", "choices": [{"value": "a"}] * 1000}
                ],
            }
        ).encode(),
        JSON,
        400,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused(server, name):
    path, body, headers, wanted = HOSTILE[name]
    status, reported, _ = server.request("POST", path, body, headers)
    assert status == wanted
    assert {"message", "type", "param", "code"} == reported["error"].keys()
    assert len(json.dumps(reported)) <= 1024
    assert server.get("/live")[0] == 200


MANY = {
    "ids_to_decode": ("/detokenize", b'{"tokens":[1' + b",1" * 999_999 + b"]}"),
    "ids": (TEXT, b'{"prompt":[1' + b",1" * 2_000_000 + b"]}"),
    "lists": (TEXT, b'{"prompt":[[1]' + b",[1]" * 1_000_000 + b"]}"),
    "messages": (
        CHAT,
        b'{"messages":[{"role":"user","content":""}'
        + b',{"role":"user","content":""}' * 89_999
        + b"]}",
    ),
    "messages_of_a_context": (
        CHAT,
        b'{"messages":[{"role":"user","content":"a"}'
        + b',{"role":"user","content":"a"}' * 5000
        + b"]}",
    ),
    "text": (TEXT, b'{"prompt":"' + b"a" * 4_000_000 + b'"}'),
    "spaces": (TEXT, b'{"prompt":"' + b" " * 4_000_000 + b'"}'),
    "words": ("/tokenize", b'{"prompt":"' + b"a b " * 1_000_000 + b'"}'),
    "conversation": (CHAT, b'{"messages":[{"role":"user","content":"' + b"a" * 4_000_000 + b'"}]}'),
    "question": (
        DECIDE,
        b'{"questions":[{"type":"predicate","instructions":"x"}],"input":"'
        + b"a" * 4_000_000
        + b'"}',
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_item_2_bodies_of_millions_are_refused_and_hold_nobody_up(server, name):
    path, body = MANY[name]
    small = {"prompt": "Ben earns 5 dollars. " * 60}  # more than is tokenized at once
    with ThreadPoolExecutor(2) as pool:
        hostile = [pool.submit(server.request, "POST", path, body, JSON) for _ in range(2)]
        with server.open(TEXT, {"prompt": "a", "max_tokens": 4000, "stream": True}) as stream:
            last = began = time.monotonic()
            gap = 0.0
            while not all(one.done() for one in hostile):
                stream.recv(65536)
                now = time.monotonic()
                last, gap = now, max(gap, now - last)
                assert server.post("/tokenize", small)[0] == 200
        for one in hostile:
            status, reported, _ = one.result()
            assert status == 400
            assert reported["error"]["code"] in CODES
    # Alone 0.02 s. A front that is held up is so for most of the time that a body takes.
    assert gap < max(4, 0.3 * (last - began))
    memory = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    assert int(memory) * 4 // 1024 < 400


CODES = ("context_length_exceeded", "invalid_json", "invalid_value")


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}, "strict": True}
FUNCTION = {"type": "function", "function": TOOL}
ASKED = {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}
MADE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
PICTURE = [{"type": "input_image", "image_url": "data:"}]
FORMAT = {"type": "grammar", "syntax": "regex", "definition": "a+"}
BODIES = [
    (
        TEXT,
        {
            "prompt": [[1, 2]],
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": ["z"],
            "stop_token_ids": [7],
            "strategy_overrides": {"accept_threshold": 0.5},
            "logit_bias": {"9": -100},
            "priority": 1,
        },
    ),
    (TEXT, {"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": {"type": "null"}}}),
    (
        CHAT,
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ],
            "max_tokens": 4,
            "tools": [FUNCTION],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [FUNCTION]},
            },
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    (
        CHAT,
        {
            "messages": [ASKED],
            "max_tokens": 4,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "stream": True,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, MADE]},
                {"role": "user", "content": [RESULT]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}], "system": "s"}),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "x"}],
                },
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
                {"type": "custom_tool_call", "name": "p", "input": "i", "call_id": "d"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": PICTURE},
            ],
            "max_output_tokens": 4,
            "tools": [
                {"type": "function", **TOOL},
                {"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "g"}]},
                {"type": "custom", "name": "p", "format": FORMAT},
            ],
            "tool_choice": {"type": "custom", "name": "p"},
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
        },
    ),
    (
        DECIDE,
        {
            "input": [{"role": "user", "content": "x"}],
            "questions": [
                {"type": "predicate", "instructions": "x"},
                {"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": 1}]},
            ],
        },
    ),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/update_weights_from_disk", {"model_path": "a", "weight_version": 1}),
]
NESTED = json.loads("[" * 500 + "]" * 500)
WRONG = [
    None,
    True,
    -1,
    2**63,
    1e308,
    "",
    "\0<|eos|>",
    [],
    {},
    [None],
    {"type": []},
    NESTED,
    ["text"] * 40,
]


def replaced(value):
    """Copies of a JSON value with each value in it replaced by each wrong one."""
    yield from WRONG
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: new} for new in replaced(inner))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from ([*value[:i], new, *value[i + 1 :]] for new in replaced(inner))


@pytest.mark.parametrize(("path", "body"), BODIES, ids=range(len(BODIES)))
def test_no_value_in_any_place_of_a_body_is_an_internal_error(server, path, body):
    """3,000 requests, 8 at a time; nothing is held after them."""
    headers = {"authorization": "Bearer key"} if path.startswith("/update") else None

    def one(made):
        status, reported, _ = server.post(path, made, headers)
        assert status < 500, (made, reported)
        assert status == 200 or len(json.dumps(reported)) <= 1024, made
        assert b"server_error" not in bytes(str(reported), "utf-8"), made

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, replaced(body)))
    assert within(lambda: server.metric("dllm_kv_cache_pages_held") == 0)
    assert not server.lines("error")


def test_headers_are_not_injected(server):
    sent = f"{LINE}x-request-id: a\r\n b: c\r\ncontent-length: 15\r\n\r\n" + '{"prompt": "x"}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        sock.sendall(sent.encode())
        head = sock.recv(65536).split(b"\r\n\r\n")[0].lower()
    assert b"\r\nb: c" not in head
    reported = server.get("/version", {"x-request-id": "a%0d%0ab: c"})[2]
    assert uuid.UUID(reported["x-request-id"])


def values():
    """Any JSON, of small size."""
    leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
    leaves |= st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=6,
    )


def valid(schema, parts):
    """Values of a JSON schema of ours, mostly."""
    if "$ref" in schema:
        return valid(parts[schema["$ref"].rsplit("/", 1)[1]], parts)
    for kind in ("anyOf", "oneOf"):
        if kind in schema:
            return st.one_of(*(valid(one, parts) for one in schema[kind]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields = {name: valid(one, parts) for name, one in schema["properties"].items()}
        needed = {name: fields.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(needed, optional=fields)
    if kind == "array":
        low, high = schema.get("minItems", 0), min(schema.get("maxItems", 3), 3)
        return st.lists(
            valid(schema.get("items", {}), parts), min_size=low, max_size=max(low, high)
        )
    if kind == "string":
        return st.text(min_size=schema.get("minLength", 0), max_size=12)
    if kind == "integer":
        low, high = schema.get("minimum", -5), schema.get("maximum", 2**31 - 1)
        return st.integers(low, max(low, min(high, 64))) | st.integers(low, high)
    if kind == "number":
        return st.floats(schema.get("minimum", 0), schema.get("maximum", 2), allow_nan=False)
    return {"boolean": st.booleans(), "null": st.none()}.get(kind, values())


ROUTES = (CHAT, TEXT, DECIDE, "/tokenize", "/detokenize")


@pytest.mark.slow("/v1/chat/completions")
@pytest.mark.parametrize("path", ROUTES)
def test_bodies_of_the_schema_have_documented_answers(server, path):
    document = server.get("/openapi.json")[1]
    parts = document["components"]["schemas"]
    route = document["paths"][path]["post"]
    shape = route["requestBody"]["content"]["application/json"]["schema"]
    well_formed = valid(shape, parts)
    names = st.sampled_from(list(parts[shape["$ref"].rsplit("/", 1)[1]]["properties"]))
    broken = st.builds(lambda body, name, any_: {**body, name: any_}, well_formed, names, values())
    seen = {}

    # Few random ids are text: most bodies of /detokenize are refused.
    most = 200 if path == "/detokenize" else 60

    @settings(
        max_examples=most, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(well_formed | broken)
    def run(body):
        # Long texts of the script would only take time.
        if isinstance(body.get("max_tokens"), int | None) and path in (CHAT, TEXT):
            body = {**body, "max_tokens": 8, "max_completion_tokens": None}
        status, reported, _ = server.post(path, body)
        seen[status] = seen.get(status, 0) + 1
        assert str(status) in route["responses"], (status, body)
        assert status < 500, (body, reported)
        if status != 200:
            assert len(json.dumps(reported)) <= 1024

    run()
    assert seen.get(200, 0) > 5
    assert seen.get(400, 0) > 5
