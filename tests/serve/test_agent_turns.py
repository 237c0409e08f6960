"""Proves the three routes' answers with calls, whole and streamed, without a server or a model.

Texts of bytes are fed in portions to the form of each route; what it sends is put together again as
clients do it. Bodies as agents send them are read.
"""

import json
import random

import msgspec
import pytest

from dllm_jax.loading import tool_forms
from dllm_jax.serve import generating, messages, responses, wire
from dllm_jax.serve.conversations import NO_TEXT, placed
from dllm_jax.serve.pipe import Delta, Usage
from dllm_jax.serve.refusals import INVALID, Refusal
from dllm_jax.serve.stream import internal_error
from dllm_jax.serve.turns import ChatForm, Texts
from dllm_jax.structured import Tool, Tools, Turn

USAGE = Usage(9, 4, 3, 1, 0, 8, 0.1, 0.2, 0.3)
HELD = Tools((Tool("f", "{}"), Tool("g", "{}")), thinks=True)
CALLS = [("f", '{"a": "é}"}'), ("g", "{}")]
TEXT = "<think>\nhm\n</think>\n\nNöw.\n" + "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {said}}}\n</tool_call>' for name, said in CALLS
)
GIVEN = (True, "m", "fp", 9)


def texts():
    return Texts(lambda: Turn(HELD, [bytes([i]) for i in range(256)], {}))


IN_SPACE = responses.Offered([], {"g": "space"}, set(), [])
FORMS = {
    "chat": lambda: ChatForm(*GIVEN, texts=texts(), is_certain=False, shows_thoughts=True),
    "messages": lambda: messages.MessagesForm("m", 9, texts(), []),
    "responses": lambda: responses.ResponsesForm("m", 9, texts(), {}, IN_SPACE),
}


def deltas(text, finish, seed):
    draw, data, found = random.Random(seed), text.encode(), []
    while data:
        size = draw.choice((1, 3, 9, 60))
        found.append(Delta(1, 0, "", 0, ids=[*data[:size]]))
        data = data[size:]
    return [*found, Delta(1, 0, "", len(text), finish=finish)]


def streamed(form, text, finish="stop", seed=0):
    """The events of a stream: names and contents."""
    sent = [*form.opened(0)]
    for delta in deltas(text, finish, seed):
        for piece in form.texts.feed(delta):
            sent += form.said(0, piece)
        if delta.finish is not None:
            sent += form.ended(delta)
    sent.append(form.closed(len(text), [USAGE], True))
    events = b"".join(sent).decode().removesuffix("data: [DONE]\n\n").strip().split("\n\n")
    return [json.loads(one.rpartition("data: ")[2]) for one in events]


def whole(form, text, finish="stop"):
    one = Delta(1, 0, "", len(text), finish=finish, ids=[*text.encode()])
    return json.loads(msgspec.json.encode(form.whole([one], [USAGE])))


@pytest.mark.parametrize("size", [1, 2, 7, 500])
def test_prose_alone_has_log_probabilities(size):
    """Of marks, thoughts and calls there are none, however the tokens arrive."""
    form = FORMS["chat"]()
    form.has_logprobs = True
    data = TEXT.encode() + b" "  # after a call nothing is prose
    said = []
    for at in range(0, len(data), size):
        ids = [*data[at : at + size]]
        entries = [{"bytes": [byte], "logprob": -1.0, "top_logprobs": []} for byte in ids]
        finish = "stop" if at + size >= len(data) else None
        delta = Delta(1, 0, "", 0, finish=finish, ids=ids, logprobs=entries)
        said += [entry for piece in form.texts.feed(delta) for entry in piece.logprobs]
    assert bytes(entry["bytes"][0] for entry in said).decode() == "Nöw."


@pytest.mark.parametrize("seed", range(20))
def test_chat(seed):
    *chunks, last = streamed(FORMS["chat"](), TEXT, seed=seed)
    choices = [chunk["choices"][0] for chunk in chunks]
    parts = [choice["delta"] for choice in choices]
    assert "".join(part.get("content") or "" for part in parts) == "Nöw."
    assert "".join(part.get("reasoning_content") or "" for part in parts) == "hm"
    calls = {}
    for part in parts:
        for call in part.get("tool_calls", ()):
            if call["index"] not in calls:
                assert call["function"]["arguments"] == ""
                calls[call["index"]] = call
            else:
                assert {"id", "type"}.isdisjoint(call)
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    functions = [(one["function"]["name"], one["function"]["arguments"]) for one in calls.values()]
    assert functions == CALLS
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert last["usage"]["completion_tokens"] == len(TEXT)
    (choice,) = whole(FORMS["chat"](), TEXT)["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Nöw.", "hm")
    assert [tuple(one["function"].values()) for one in message["tool_calls"]] == CALLS
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("seed", range(20))
def test_messages(seed):
    events = streamed(FORMS["messages"](), TEXT, seed=seed)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks, is_open = [], None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert is_open is None
            is_open = event["index"]
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_stop":
            is_open = None
        else:
            delta = event["delta"]
            name = str(delta["type"]).removesuffix("_delta").removeprefix("input_")
            blocks[-1][name] += delta["partial_json" if name == "json" else name]
        assert event["index"] == len(blocks) - 1
    found = [(one["name"], one["json"]) for one in blocks if one["type"] == "tool_use"]
    assert found == CALLS
    assert [one["type"] for one in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("hm", "Nöw.")
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["input_tokens"] == 5
    said = whole(FORMS["messages"](), TEXT)
    assert [one["type"] for one in said["content"]] == [one["type"] for one in blocks]
    assert [one["input"] for one in said["content"][2:]] == [{"a": "é}"}, {}]


@pytest.mark.parametrize("seed", range(20))
def test_responses(seed):
    events = streamed(FORMS["responses"](), TEXT, seed=seed)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    final = events[-1]["response"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert final["output"] == done
    assert [one["type"] for one in done] == ["reasoning", "message", *["function_call"] * 2]
    assert [(one["name"], one["arguments"]) for one in done[2:]] == CALLS
    assert [one.get("namespace") for one in done[2:]] == [None, "space"]
    for place, item in enumerate(done):
        own = [e for e in events if e.get("output_index") == place and "delta" in e]
        text = item.get("arguments") or item["content"][0]["text"]
        assert "".join(e["delta"] for e in own) == text
        assert {e["item_id"] for e in own} == {item["id"]}
    assert (final["status"], final["store"]) == ("completed", False)
    said = whole(FORMS["responses"](), TEXT)
    assert [one["type"] for one in said["output"]] == [one["type"] for one in done]


def test_thoughts_go_out_and_come_back_as_encrypted_content():
    """A client that stores nothing sends them so; another server's are dropped."""
    fields = {"include": ["reasoning.encrypted_content"]}
    form = responses.ResponsesForm("m", 9, texts(), fields, IN_SPACE)
    thoughts, *_ = whole(form, TEXT)["output"]
    assert thoughts["content"][0]["text"] == "hm"
    said = {"type": "message", "role": "assistant", "content": "Yes."}
    for content, wanted in (
        (thoughts["encrypted_content"], "hm"),
        ("gAAA", None),
        ("dllm.!", None),
    ):
        item = {"type": "reasoning", "summary": [], "encrypted_content": content}
        body, *_ = responses.chat_of({"input": [item, said]})
        assert [turn.reasoning_content or None for turn in body.messages] == [wanted]
    assert "encrypted_content" not in whole(FORMS["responses"](), TEXT)["output"][0]


@pytest.mark.parametrize("seed", range(5))
def test_a_custom_tool_has_a_text(seed):
    tools = [{"type": "custom", "name": "patch"}]
    tools.append(tools[0] | {"name": "lark", "format": {"type": "grammar", "syntax": "lark"}})
    rule = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    tools.append(tools[0] | {"name": "as", "format": rule})
    used = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+x"}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    choice = {"type": "custom", "name": "patch"}
    body, offered, _ = responses.chat_of(
        {"input": [used, result], "tools": tools, "tool_choice": choice}
    )
    assert (offered.customs, offered.left_out) == ({"patch", "as"}, ["lark"])
    assert generating.offered(body.tools, body.tool_choice) is not None
    assert [turn.role for turn in body.messages] == ["assistant", "tool"]
    held = Tools((Tool("patch", "{}"),))
    texts = Texts(lambda: Turn(held, [bytes([i]) for i in range(256)], {}))
    form = responses.ResponsesForm("m", 9, texts, {}, offered)
    said = '<tool_call>\n{"name": "patch", "arguments": {"input": "+é\\n}"}}\n</tool_call>'
    events = streamed(form, said, seed=seed)
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "+é\n}")
    assert [event["delta"] for event in events if "delta" in event] == ["+é\n}"]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("status", [400, 500])
def test_a_stream_that_fails_says_so_in_the_form_of_its_route(name, status):
    failure = Refusal("too large", status=400) if status == 400 else internal_error("id7")
    said = FORMS[name]().failed(failure, "id7").decode()
    event = json.loads(said.partition("data: ")[2].partition("\n")[0])
    error = event["response"]["error"] if name == "responses" else event["error"]
    assert ("too large" if status == 400 else "id7") in error["message"]
    kind = error["code"] if name == "responses" else error["type"]
    assert kind in (("server_error", "api_error") if status == 500 else ("invalid_value", INVALID))
    kinds = {"chat": None, "messages": "error", "responses": "response.failed"}
    assert event.get("type") == kinds[name]
    assert said.startswith("data: " if name == "chat" else f"event: {kinds[name]}\n")
    assert said.endswith("data: [DONE]\n\n") is (name == "chat")


@pytest.mark.parametrize("name", FORMS)
def test_notes_on_schemas_are_in_the_answer(name):
    form, usage = FORMS[name](), msgspec.structs.replace(USAGE, notes=["tools[0]: a note"])
    said = form.whole([Delta(1, 0, "", 3, finish="stop", ids=[*TEXT.encode()])], [usage])
    assert said["dllm"]["notes"] == ["tools[0]: a note"]


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_is_cut_is_not_delivered(name):
    cut = TEXT[: TEXT.index("</tool_call>") - 4]
    said, events = whole(FORMS[name](), cut, "length"), streamed(FORMS[name](), cut, "length")
    if name == "chat":
        assert "tool_calls" not in said["choices"][0]["message"]
        assert said["choices"][0]["finish_reason"] == "length"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    elif name == "messages":
        assert [one["type"] for one in said["content"]] == ["thinking", "text"]
        assert said["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"
    else:
        assert said["status"] == events[-1]["response"]["status"] == "incomplete"
        assert "function_call" not in json.dumps([said["output"], events[-1]["response"]["output"]])


TOOL = {"name": "f", "description": "F", "input_schema": {"type": "object"}}


def test_what_a_coding_agent_sends_to_messages():
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, use]},
        {"role": "user", "content": [{"type": "text", "text": "Again."}, result]},
        {"role": "system", "content": "The date."},
    ]
    body, left_out, origins = messages.chat_of(
        {
            "model": "m",
            "max_tokens": 5,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: 1"},
                {"type": "text", "text": "Be brief."},
            ],
            "messages": said,
            "tools": [TOOL | {"cache_control": {}}, {"type": "web_search_20250305", "name": "w"}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "context_management": {"edits": []},
            "metadata": {"user_id": "u"},
        }
    )
    roles = [(turn.role, turn.content) for turn in body.messages]
    assert roles == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", ""),
        ("tool", "error"),
        ("user", "Again."),
        ("system", "The date."),
    ]
    assert body.messages[2].tool_calls is not None
    assert (body.tool_choice, body.parallel_tool_calls, left_out) == ("required", False, ["w"])
    assert (body.reasoning_effort, body.thinking_token_budget) == ("high", 1024)
    assert origins == [-1, 0, 1, 2, 2, 3]


def parts(text, kind="input_text"):
    return [{"type": kind, "text": text}]


def test_what_a_coding_agent_sends_to_responses():
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc"}
    picture = parts("", "input_image")
    body, offered, origins = responses.chat_of(
        {
            "instructions": "Be brief.",
            "input": [
                {"type": "message", "role": "developer", "content": parts("D")},
                {"role": "user", "content": "Hi"},
                {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
                {"type": "message", "role": "assistant", "content": parts("A", "output_text")},
                item,
                item | {"call_id": "d"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
                {"type": "function_call_output", "call_id": "d", "output": picture},
                {"type": "function_call_output", "name": "goal", "output": "G"},
            ],
            "tools": [
                {"type": "function", "name": "f", "strict": False},
                {"type": "web_search"},
                {"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "g"}]},
            ],
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "client_metadata": {"a": "b"},
        }
    )  # fmt: skip
    assert [turn.role for turn in body.messages] == [
        *("system", "developer", "user", "assistant", "tool", "tool", "user")
    ]
    assert body.messages[5].content == NO_TEXT
    assert origins == [-1, 0, 1, 2, 6, 7, 8]
    assert [one["id"] for one in body.messages[3].tool_calls or ()] == ["c", "d"]
    assert (offered.left_out, offered.spaces) == (["web_search"], {"g": "s"})
    assert len(body.tools or ()) == 2


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (messages.chat_of, {"messages": []}, "messages"),
        (messages.chat_of, {"messages": [{"role": "x"}]}, "messages[0].role"),
        (
            messages.chat_of,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        (
            messages.chat_of,
            {"messages": [{"role": "assistant", "content": "Once"}]},
            "messages[0]",
        ),
        (messages.chat_of, {"mcp_servers": [1], "messages": []}, "mcp_servers"),
        (
            messages.chat_of,
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": []}},
            "tool_choice",
        ),
        (responses.chat_of, {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        (responses.chat_of, {"input": "x", "background": True}, "background"),
        (responses.chat_of, {"input": [{"type": "item_reference"}]}, "input[0].type"),
        (responses.chat_of, {"input": 3}, "input"),
    ],
)
def test_what_is_not_supported_is_refused_by_path(read, fields, param):
    with pytest.raises(Refusal) as raised:
        read(fields)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("others", "said", "own"),
    [
        ("messages", "messages[2].tool_call_id", "messages[1].tool_use_id"),
        ("messages", "messages[0]", "first"),
        ("messages", "tools[0].function.parameters", "tools[0].input_schema"),
        ("input", "messages[2].tool_calls[1].tool_call_id", "input[1].call_id"),
        ("input", "tools[0].function.parameters", "tools[0].parameters"),
        ("input", "messages", "input"),
    ],
)
def test_a_refusal_names_the_routes_own_fields(others, said, own):
    error = placed(Refusal(f"{said} is none", param=said), [-1, 0, 1], "first", others)
    assert error.param == own
    assert error.message == f"{own if said != 'messages' else said} is none"


def test_the_chat_route_reads_tools_and_turns():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = wire.read(
        msgspec.json.encode(
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
                    {
                        "role": "tool",
                        "tool_call_id": "c",
                        "content": [{"type": "text", "text": "1"}],
                    },
                ],
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
            }
        ),
        wire.Chat,
    )
    assert [turn.role for turn in body.messages] == ["user", "assistant", "tool"]
    assert generating.offered(body.tools, body.tool_choice) is not None


class _Text:
    """A text side whose template has thoughts."""

    chat_template = "{{ enable_thinking }}</think>"
    form = tool_forms.ToolForm("hermes", True)

    def prompt(self, turns, fields, offer=None):
        self.fields = fields
        held = ((), "none") if offer is None else (offer.tools, offer.choice)
        return [1], Tools(*held, thinks=self.form.thinks)


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        ({}, None),
        ({"reasoning_effort": "low"}, None),
        ({"thinking_token_budget": 7}, 7),
        ({"tools": 1}, None),
        ({"tools": 1, "reasoning_effort": "low"}, 512),
        ({"tools": 1, "reasoning_effort": "xhigh"}, None),
        ({"tools": 1, "reasoning_effort": "high", "thinking_token_budget": 0}, 0),
        ({"tools": 1, "reasoning_effort": "low", "tool_choice": "none"}, None),
    ],
)
def test_budgets_of_thoughts(asked, budget):
    given = {"messages": [{"role": "user", "content": "?"}], **asked}
    if "tools" in asked:
        given["tools"] = [{"type": "function", "function": {"name": "f"}}]
    text = _Text()
    _, tools = generating.read_chat(text, msgspec.convert(given, wire.Chat))
    assert tools.budget == budget
    effort = asked.get("reasoning_effort")
    assert text.fields == ({} if effort is None else {"enable_thinking": True})
    text.form = tool_forms.NO_FORM
    assert generating.read_chat(text, msgspec.convert(given, wire.Chat))[1].budget is None


def test_an_answer_of_a_schema_beside_tools():
    schema = {"type": "object"}
    given = {
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    _, tools = generating.read_chat(_Text(), msgspec.convert(given, wire.Chat))
    assert tools.answer == (json.dumps(schema), "flexible")
    for more in ({"tool_choice": "required"}, {"structured_outputs": {"regex": "a"}}):
        asked = msgspec.convert({**given, **more}, wire.Chat)
        with pytest.raises(Refusal, match="with tools") as raised:
            generating.read_chat(_Text(), asked)
        name = "response_format" if "tool_choice" in more else "structured_outputs"
        assert (raised.value.status, raised.value.param) == (400, name)
