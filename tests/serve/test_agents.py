"""Proves the three routes over HTTP with a scripted model that calls tools, as agents use them.

The numbers are those of docs/traps.md, "Agents". A step of the script settles 64 tokens, so that
thoughts, prose and calls land together.
"""

import http.client
import json

import pytest

from tests.serve import scripted as script
from tests.serve.driving import CHAT, scripted, within

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMES = ("weather", "weather_at")


def _call(name, **arguments):
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


CALLS = [("weather", {"city": "Oslo"}), ("weather_at", {"city": '}"{[ {"'})]
TURN = "<think>\nI look.\n</think>\n\nLook:\n" + "\n".join(_call(n, **a) for n, a in CALLS)
REPLIES = [TURN, _call("weather", city="Rome"), _call("weather", city="Bonn"), TURN, "Done."]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    settings = {"replies": REPLIES, "chat_template": script.THINKS, "a_step": 64, "plain": "{}"}
    with scripted(tmp_path_factory.mktemp("agents"), settings=settings) as one:
        yield one


def _fields(path, talk):
    """A request of a route."""
    functions = [{"name": name, "description": "Weather"} for name in NAMES]
    if path == MESSAGES:
        tools = [one | {"input_schema": SCHEMA, "cache_control": {}} for one in functions]
        return {"messages": talk, "max_tokens": 900, "tools": tools}
    if path == RESPONSES:
        tools = [{"type": "function", "parameters": SCHEMA, **one} for one in functions]
        return {"input": talk, "tools": tools}
    tools = [{"type": "function", "function": one | {"parameters": SCHEMA}} for one in functions]
    return {"messages": talk, "tools": tools}


def _turn(path, answer):
    """Prose and calls with their ids of an answer, and its items as they go back."""
    if path == MESSAGES:
        blocks = answer["content"]
        calls = [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        return text, calls, [{"role": "assistant", "content": blocks}]
    if path == RESPONSES:
        items = answer["output"]
        calls = [one for one in items if one["type"] == "function_call"]
        texts = [
            part["text"] for one in items if one["type"] == "message" for part in one["content"]
        ]
        made = [(one["call_id"], one["name"], json.loads(one["arguments"])) for one in calls]
        return "".join(texts), made, items
    (choice,) = answer["choices"]
    message = choice["message"]
    functions = [(one["id"], one["function"]) for one in message.get("tool_calls", ())]
    calls = [(name, one["name"], json.loads(one["arguments"])) for name, one in functions]
    return message["content"] or "", calls, [message]


def _results(path, calls):
    if path == MESSAGES:
        kind = {"type": "tool_result", "content": [{"type": "text", "text": "21"}]}
        return [{"role": "user", "content": [kind | {"tool_use_id": one[0]} for one in calls]}]
    if path == RESPONSES:
        kind = {"type": "function_call_output", "output": "21"}
        return [kind | {"call_id": one[0]} for one in calls]
    return [{"role": "tool", "tool_call_id": one[0], "content": "21"} for one in calls]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_five_turns(server, path):
    talk, texts, called = [{"role": "user", "content": "Go."}], [], []
    for _ in range(5):
        status, answer, _ = server.post(path, _fields(path, talk))
        assert status == 200, answer
        text, calls, items = _turn(path, answer)
        texts.append(text)
        called += [one[1:] for one in calls]
        talk += [*items, *_results(path, calls)] if calls else []
    assert called == [*CALLS, ("weather", {"city": "Rome"}), ("weather", {"city": "Bonn"}), *CALLS]
    assert [text.strip() for text in texts] == ["Look:", "", "", "Look:", "Done."]


def _sends(server, path, body):
    """The pieces of a stream as they were sent: a chunk of HTTP is one."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = json.dumps(body | {"stream": True}).encode()
    connection.request("POST", path, data, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    found, line = [], answer.fp.readline()
    while size := int(line, 16):
        found.append(answer.fp.read(size).decode())
        answer.fp.readline()
        line = answer.fp.readline()
    connection.close()
    return found


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_what_lands_together_is_one_send(server, path):
    """A5: no event is cut or lost, none of a call comes after the next call has begun."""
    sends = _sends(server, path, _fields(path, [{"role": "user", "content": "Go."}]))
    assert all(one.endswith("\n\n") for one in sends)
    num_steps = -(-len(TURN) // 64)  # a token is a character at least
    assert len(sends) <= num_steps + 1
    events = [one for send in sends for one in send.strip().split("\n\n")]
    assert max(send.count("\n\n") for send in sends) > 3
    if path == CHAT:
        assert events.pop() == "data: [DONE]"
    parsed = [json.loads(one.partition("data: ")[2]) for one in events]
    if path != CHAT:  # A14
        assert [one.partition("\n")[0] for one in events] == [f"event: {p['type']}" for p in parsed]
    places = [one.get("index", one.get("output_index")) for one in parsed]
    if path == CHAT:
        deltas = [one["choices"][0]["delta"] for one in parsed if one["choices"]]
        places = [call["index"] for one in deltas for call in one.get("tool_calls", ())]
        firsts = [call for one in deltas for call in one.get("tool_calls", ()) if "id" in call]
        assert [call["function"]["name"] for call in firsts] == [name for name, _ in CALLS]  # A2
    known = [one for one in places if one is not None]
    assert known == sorted(known)


def test_the_beginning_and_the_totals_of_messages(server):
    """A15, A22."""
    body = _fields(MESSAGES, [{"role": "user", "content": "Go."}])
    sends = "".join(_sends(server, MESSAGES, body)).strip().split("\n\n")
    first, *_, last, _ = (json.loads(one.partition("data: ")[2]) for one in sends)
    message, count = first["message"], server.post(f"{MESSAGES}/count_tokens", body)[1]
    assert {"id", "type", "role", "content", "model", "stop_reason", "usage"} <= set(message)
    cached = last["usage"]["cache_read_input_tokens"]
    assert last["usage"]["input_tokens"] + cached == count["input_tokens"]
    assert last["delta"]["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens"] == 0 < last["usage"]["output_tokens"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_call_that_a_limit_cuts_is_no_call(server, path):
    """A19."""
    limit = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}[path]
    body = _fields(path, [{"role": "user", "content": "Go."}]) | {limit: 64}
    _, calls, _ = _turn(path, server.post(path, body)[1])
    assert calls == []
    assert within(lambda: server.metric("dllm_tool_calls_total") > 0)
    text = server.get("/metrics")[1].decode()
    assert f'route="{path}",end="cut"' in text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"model": "nowhere"}, 404, "not_found_error"),
        ({"temperature": "hot"}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "mad"}}, 400, "invalid_request_error"),
        ({"tools": [{}]}, 400, "invalid_request_error"),
    ],
)
def test_errors_have_the_form_of_their_route(server, path, change, status, kind):
    body = _fields(path, [{"role": "user", "content": "Go."}]) | change
    got, told, headers = server.post(path, body | {"stream": True})
    assert (got, told["error"]["type"]) == (status, kind)
    if path == MESSAGES:
        assert (told["type"], told["request_id"]) == ("error", headers["x-request-id"])
        assert next(iter(change)) in told["error"]["message"]
    else:
        assert told["error"]["param"].startswith(next(iter(change)))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}),
    ],
)
def test_the_form_of_the_answer_beside_a_named_tool_is_refused(server, path, fields):
    """A24; alone it is taken."""
    body = _fields(path, [{"role": "user", "content": "Go."}])
    tools = body.pop("tools")
    assert server.post(path, body | fields)[0] == 200
    one = {"type": "tool" if path == MESSAGES else "function", "name": "weather"}
    status, told, _ = server.post(path, body | fields | {"tools": tools, "tool_choice": one})
    assert status == 400
    assert "tools" in told["error"]["message"]


def test_what_clients_probe(server):
    assert server.request("HEAD", "/")[0] == 200
    status, model, _ = server.get("/v1/models/scripted")
    assert (status, model["id"], model["dllm"]["tools"]) == (200, "scripted", "hermes")
    assert server.get("/v1/models/other")[0] == 404
