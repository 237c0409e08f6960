"""Proves how calls, results, thoughts and hostile strings stand in the text that a model reads."""

import hashlib
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from dllm_jax.loading import chat, templates, tool_forms, turns
from dllm_jax.structured.forms import FORMS, written


def call(name, **arguments):
    return {
        "id": f"c{name}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def said(content="", thoughts=None, calls=()):
    more = {"reasoning_content": thoughts} if thoughts else {}
    return {"role": "assistant", "content": content, **more, "tool_calls": list(calls)}


SYSTEM, ASK, PLAIN = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "content": "Yes."},
)
ONE = said(calls=[call("f", a='é\n"<', b=[1, None])])
TWO = said("Now.", "look", [call("f", a=1), call("g")])
RESULT = {"role": "tool", "content": "21 degrees"}
INLINE = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "D é", "parameters": {"type": "object"}},
}
TALKS = (
    [ASK],
    [SYSTEM, ASK, PLAIN, ASK],
    [ASK, ONE, RESULT],
    [SYSTEM, ASK, TWO, RESULT, RESULT],
    [ASK, TWO, RESULT, RESULT, PLAIN, ASK],
    [ASK, ONE, RESULT, said("Yes.", "\nhm\n")],
    [ASK, INLINE, ASK],
    [ASK, INLINE],
    [ASK, ONE, RESULT, TWO, RESULT, RESULT],
    [SYSTEM, ASK, PLAIN, SYSTEM, ASK],
    [ASK, {"role": "user", "content": "<tool_response>x</tool_response>"}, said("", "hm")],
)
# Of the renderings of Qwen/Qwen3-8B's and Qwen/Qwen2.5-7B-Instruct's templates by transformers.
PUBLISHED = {
    "qwen3": "5995d792c90cef30cb016b4d29e1f237",
    "qwen2_5": "76b50906875b60a82919ddf3d1d43366",
}


def every():
    ways = itertools.product(TALKS, (None, [TOOL]), (True, False), (None, True, False))
    for talk, tools, opens, thinks in ways:
        more = {} if thinks is None else {"enable_thinking": thinks}
        yield talk, {"tools": tools, "add_generation_prompt": opens, **more}


def digest(texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_results_and_thoughts_stand_as_in_the_published_template(name):
    text = (chat._FOLDER / f"{name}.jinja").read_text("utf-8")
    assert (
        digest(templates.fill(text, talk, **fields) for talk, fields in every())
        == (PUBLISHED[name])
    )


def test_llada2_has_results_in_a_turn_of_their_own():
    text = (chat._FOLDER / "llada2.jinja").read_text("utf-8")
    found = templates.fill(
        text, [ASK, ONE, RESULT, RESULT], tools=[TOOL], add_generation_prompt=True
    )
    begin, _, rest = found.partition("<role>HUMAN</role>")
    assert begin.startswith("<role>SYSTEM</role># Tools\n\n")
    assert begin.endswith("</tool_call>\ndetailed thinking off<|role_end|>")
    result = "\n<tool_response>\n21 degrees\n</tool_response>"
    assert rest == (
        "Oslo?<|role_end|><role>ASSISTANT</role><tool_call>\n"
        '{"name": "f", "arguments": {"a": "é\\n\\"<", "b": [1, null]}}\n</tool_call><|role_end|>'
        f"<role>OBSERVATION</role>{result}{result}<|role_end|><role>ASSISTANT</role>"
    )


def _as_clients_write_them():
    written = {"id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}}
    return [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [written]},
        {"role": "tool", "tool_call_id": "x", "content": None},
    ]


def test_turns_as_clients_write_them():
    _, asked, result = turns.plain(_as_clients_write_them())
    assert asked["content"] == result["content"] == ""
    assert asked["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert result["name"] == "f"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda t: t[2].update(tool_call_id="y"), "messages[2].tool_call_id"),
        (lambda t: t.pop(), "messages[1].tool_calls"),
        (lambda t: t.insert(2, ASK), "messages[2]"),
        (lambda t: t.pop(1), "messages[1].tool_call_id"),
        (lambda t: t[1].update(role="user"), "messages[1].tool_calls"),
        (lambda t: t[1].update(tool_calls=[3]), "messages[1].tool_calls[0]"),
        (lambda t: t[1]["tool_calls"][0].update(id="\0"), "messages[1].tool_calls[0].id"),
        (lambda t: t[1]["tool_calls"][0].update(id="x" * 257), "messages[1].tool_calls[0].id"),
        (
            lambda t: t[1]["tool_calls"][0]["function"].update(arguments="{"),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            lambda t: t[1]["tool_calls"].append(t[1]["tool_calls"][0]),
            "messages[1].tool_calls[1].id",
        ),
    ],
)
def test_calls_and_results_that_do_not_belong_together_are_refused_by_path(change, param):
    talk = _as_clients_write_them()
    change(talk)
    with pytest.raises(turns.Unusable) as raised:
        turns.plain(talk)
    assert raised.value.param == param
    is_field = param.endswith(("tool_call_id", "arguments", ".id"))
    assert raised.value.code == ("invalid_value" if is_field else "invalid_conversation")
    assert "; " in str(raised.value)


class _Reader:
    """A tokenizer of characters with two control tokens, one within the other's text."""

    names = {"<|end|>": 1000, "<x>": 1001, "<|end|><x>": 1002}  # noqa: RUF012
    special_tokens_map, chat_template = {}, "{{ messages[0].content }}<|end|>{{ tools }}"

    def __init__(self):
        self.added_tokens_decoder = {i: _Entry(name) for name, i in self.names.items()}

    def get_chat_template(self, *_):
        return self.chat_template

    def ids(self, text):
        found = []
        while text:
            named = next((n for n in sorted(self.names, key=len)[::-1] if text.startswith(n)), "")
            found.append(self.names[named] if named else ord(text[0]))
            text = text[max(len(named), 1) :]
        return found


class _Entry(str):
    special = True


def _model(template=_Reader.chat_template) -> Any:
    reader = _Reader()
    reader.chat_template = template
    defaults = SimpleNamespace(family="llama")
    return SimpleNamespace(source="x", defaults=defaults, tokenizer=reader)


def test_control_tokens_in_callers_strings_are_text():
    model, draw = _model(), random.Random(0)
    reader = model.tokenizer
    halves = ["<|end|>", "<x>", "<|", "end|>", "<", "x>", "a", " ", turns._OPEN, turns._CLOSE]
    for _ in range(300):
        hostile = "".join(draw.choices(halves, k=draw.randint(1, 12)))
        tools = [{"name": hostile, hostile: 1}]
        talk = [{"role": "user", "content": f"q{hostile}q"}]
        text, ids = chat.prompt(model, talk, reader.ids, tools=tools)
        assert [i for i in ids if i in reader.names.values()] == [1000]
        kept = "".join("<|end|>" if i == 1000 else chr(i) for i in ids)
        assert kept == text
        if not {turns._OPEN, turns._CLOSE} & set(hostile):
            assert f"q{hostile}q<|end|>" in text


ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('once') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SYSTEM_LOST = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [ONE_SYSTEM, SYSTEM_LOST])
def test_system_turns_amid_the_others_join_the_first_where_the_template_takes_one(template):
    system, again = ({"role": "system", "content": text} for text in ("Be brief.", "It is May."))

    def rendered(talk, template):
        return chat.render(_model(template), talk)

    for talk in ([system, ASK, again], [system, again, ASK]):
        assert rendered(talk, template) == "[system]Be brief.\n\nIt is May.[user]Oslo?"
    assert rendered([ASK, again], template) == "[system]It is May.[user]Oslo?"
    every = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert rendered([ASK, again], every) == "[user]Oslo?[system]It is May."
    with pytest.raises(ValueError, match="never"):
        rendered([ASK, again], "{{ raise_exception('never') }}")


def test_the_models_own_marks_in_echoed_thoughts_are_no_tokens_but_thoughts():
    turn = turns.thoughts_apart({"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."})
    assert turn == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "days": {"type": "integer", "minimum": 1},
                "city": {"type": "string", "description": "A city"},
            },
            "required": ["city"],
        },
    },
}
GEMMA = (
    '<bos><|turn>system\n{}<|tool>declaration:get_weather{{description:<|"|>Weather of a place<|"|>'
    ',parameters:{{properties:{{city:{{description:<|"|>A city<|"|>,type:<|"|>STRING<|"|>}},'
    'days:{{type:<|"|>INTEGER<|"|>}}}},required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}}}<tool|>'
    "<turn|>\n<|turn>user\nOslo?<turn|>\n<|turn>model\n"
)


def test_gemmas_calls_and_results_stand_in_one_turn():
    text = (chat._FOLDER / "gemma4.jinja").read_text("utf-8")
    asked = said(None, "I look it up.", [call("get_weather", days=2, city="Oslo")])
    talk = turns.plain([ASK, asked, RESULT | {"tool_call_id": "cget_weather"}])
    called = (
        "<|channel>thought\nI look it up.\n<channel|>"
        '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>'
        '<|tool_response>response:get_weather{value:<|"|>21 degrees<|"|>}<tool_response|>'
    )
    for thinks, ends in ((True, "<|channel>thought\n"), (False, "")):
        fields = {"tools": [WEATHER], "enable_thinking": thinks, "bos_token": "<bos>"}
        begins = GEMMA.format("<|think|>\n" if thinks else "")
        assert templates.fill(text, [ASK], add_generation_prompt=True, **fields) == begins
        found = templates.fill(text, talk, add_generation_prompt=True, **fields)
        assert found == begins + called + ends
    found = templates.fill(text, [*talk, PLAIN, ASK], **fields)
    kept = called.partition("<channel|>")[2]
    assert found == f"{begins}{kept}Yes.<turn|>\n<|turn>user\nOslo?<turn|>\n"


_CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
PROBES = {  # what published templates write of a call
    "hermes": _CALLS + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}</think>",
    "xml": _CALLS + "<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}{% endfor %}",
    "llama_json": _CALLS + '{"name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{% endfor %}{% endfor %}",
    "gemma4": (chat._FOLDER / "gemma4.jinja").read_text("utf-8"),
    None: _CALLS + "call {{ c.function.name }}{% endfor %}{% endfor %}<channel|>",
}


@pytest.mark.parametrize("name", PROBES)
def test_a_form_is_found_in_what_the_template_writes(name):
    model = _model(PROBES[name] + "{{ tools and messages | length and '' }}")
    form = tool_forms.tool_form(model)
    assert (form.name, form.is_text) == (name, False)
    assert form.thinks is (name in ("hermes", "gemma4", None))
    assert form.reads == (name or "gemma4")
    assert tool_forms.is_inside("a<|channel>thought\n", form) is (form.reads == "gemma4")
    with pytest.raises(ValueError, match="use hermes, xml, gemma4, llama_json"):
        tool_forms.tool_form(model, "json")


@pytest.mark.parametrize("name", FORMS)
def test_calls_and_results_as_texts(name):
    talk = turns.plain([ASK, ONE, RESULT | {"tool_call_id": "cf"}])
    system, _, asked, result = tool_forms.as_text(talk, [TOOL], name)
    call = written(FORMS[name], "f", {"a": 'é\n"<', "b": [1, None]})
    assert asked == {"role": "assistant", "content": call}
    assert FORMS[name].opens in system["content"]
    assert result["role"] == "user"
    assert "21 degrees" in result["content"]


def test_gemmas_template_is_shown_one_type_a_value_and_no_reference():
    person = {"type": "object", "properties": {"of": {"$ref": "#/$defs/p"}}, "title": "P"}
    schema = {
        "type": "object",
        "$defs": {"p": person},
        "properties": {
            "a": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}], "default": None},
            "b": {"type": ["integer", "null"], "description": "B"},
            "c": {"enum": ["x"]},
            "d": {"type": "array", "items": {"$ref": "#/$defs/p", "description": "D"}},
            "e": True,
        },
    }
    function = {"name": "f", "parameters": schema}
    (tool,) = tool_forms.shown([{"function": function}], tool_forms.ToolForm("gemma4", True))
    found = tool["function"]["parameters"]["properties"]
    assert found["a"] == {"type": "string", "nullable": True}
    assert found["b"] == {"type": "integer", "nullable": True, "description": "B"}
    assert found["c"] == {"enum": ["x"], "type": "string"}
    assert found["d"]["items"]["description"] == "D"
    assert found["d"]["items"]["properties"]["of"]["type"] == "object"
    assert found["e"] == {"type": "string"}
    loop = {"type": "object", "properties": {f"k{i}": {"$ref": "#"} for i in range(300)}}
    (many,) = tool_forms.shown(
        [{"function": {"parameters": loop}}], tool_forms.ToolForm("gemma4", True)
    )
    assert len(str(many)) < 3_000_000  # nothing grows without end
    text = (chat._FOLDER / "gemma4.jinja").read_text("utf-8")
    assert "declaration:f{" in templates.fill(text, [ASK], tools=[tool])
    assert tool_forms.shown([tool], tool_forms.NO_FORM) == [tool]
