"""Proves that chat templates render as transformers renders them, and that their limits hold."""

import json
import time
from types import SimpleNamespace

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from dllm_jax.loading import chat, templates

ASK = [{"role": "user", "content": " What is 2 + 2?\nThink. "}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi", "name": None},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes. ", "reasoning": "hm"},
    {"role": "user", "content": "é % {x} 漢"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, None]}}}]
# Every guarded construct in its ordinary use.
RICH = """{%- set ns = namespace(n=0, said=[]) -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}
{%- set ns.n = ns.n + 1 -%}{%- set ns.said = ns.said + [m.role] -%}
{{ ns.n ~ '. ' ~ m.role.ljust(12) ~ '|' * 3 ~ m.content.strip().replace('i', 'y') }}
{{ '%5d %s' % (ns.n, m.role) }} {{ '{:>8}'.format(m.role) }} {{ '%05.2f'|format(1.5) }}
{% generation %}{{ m.get('thinking', 'none') }}{{ m.content.split('</think>')[-1] }}
{%- endgeneration %}
{%- if m.name is defined %}{{ raise_exception('null') }}{% endif -%}
{%- endfor -%}
{{ tools|tojson(indent=2) if tools else '' }}{{ {'a': (1, 2), 'b': [x, 'y']}|tojson }}
{{ messages|map(attribute='role')|join(', ')|upper|center(40) }}{{ 2 ** 10 }}{{ 7 % 4 }}
{{ ns.said|length|string|indent(2) }}{{ 1700000000 }}{{ 3.14159|round(2) }}{{ dict(a=1) }}
{{ '-'.join(ns.said) }}{{ messages[-1].content|trim|tojson }}
{%- if add_generation_prompt %}>{% endif %}"""


@pytest.mark.parametrize("talk", [ASK, TALK])
@pytest.mark.parametrize(
    "reported", [{}, {"tools": TOOLS, "x": "z"}, {"add_generation_prompt": True}]
)
@pytest.mark.parametrize("name", ["rich", *sorted(p.stem for p in chat._FOLDER.glob("*.jinja"))])
def test_a_template_renders_as_transformers_renders_it(name, talk, reported):
    text = RICH if name == "rich" else (chat._FOLDER / f"{name}.jinja").read_text("utf-8")
    given = {"x": "w", "bos_token": "<s>", "eos_token": "</s>", **reported}
    talk_ = [{k: v for k, v in turn.items() if v is not None} for turn in talk]
    (wanted,), _ = render_jinja_template([talk_], chat_template=text, **given)
    assert templates.fill(text, talk, **given) == wanted


def _model(template):
    def own(*_):
        return template

    reader = SimpleNamespace(
        chat_template=template, get_chat_template=own, special_tokens_map={}, get_added_vocab=dict
    )
    family = SimpleNamespace(family="llama")
    return SimpleNamespace(source="x", defaults=family, tokenizer=reader)


_EACH = "{% for m in messages %}<{{ m.role }}>"
_PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
FORMS = {
    "texts": _EACH + "{{ m.content }}{% endfor %}",
    "texts, added": _EACH + "{{ 'said: ' + m.content }}{% endfor %}",
    "texts alone": _EACH + "{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}",
    "parts": _EACH + _PARTS + "{% endfor %}",
    "the first part": _EACH + "{{ m.content[0].text }}{% endfor %}",
    "parts by name": _EACH + "{{ m.content[0]['text'] }}{% endfor %}",
    "parts of users": _EACH + "{% if m.role != 'user' %}{{ m.content }}"
    "{% else %}" + _PARTS + "{% endif %}{% endfor %}",
    "both": _EACH + "{% if m.content is string %}{{ m.content }}{% else %}" + _PARTS + "{% endif %}"
    "{% endfor %}",
    "trimmed, in JSON": _EACH + "{{ m.content | trim | tojson }}{% endfor %}",
    "system last": "{% for m in messages[1:] %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}"
    "{% endfor %}<system>{{ messages[0].content | trim }}",
}


@pytest.mark.parametrize("given", ["texts", "parts"])
@pytest.mark.parametrize("name", FORMS)
def test_b8_a_template_shows_each_text_in_whichever_form_it_reads(name, given):
    said = [" Be brief. ", "Oslo", "<think>hm</think>Oslo", "Oslo\nyou"]
    roles = ["system", "user", "assistant", "user"]

    def content(text):
        parts = [{"type": "text", "text": line} for line in text.split("\n")]
        return text if given == "texts" else parts

    talk = [{"role": r, "content": content(s)} for r, s in zip(roles, said, strict=True)]
    text = chat.render(_model(FORMS[name]), talk)
    assert text.count("Oslo") == 3
    assert "Be brief." in text
    assert "you" in text
    assert "'type'" not in text


@pytest.mark.parametrize(
    ("template", "place"),
    [
        ("{{ messages[-1].content }}", 0),
        (_EACH + "{% if m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}", 1),
        (_EACH + "{{ m.text }}{% endfor %}", 0),
    ],
)
def test_b8_a_template_that_leaves_a_message_out_is_an_error(template, place):
    """Also where the text of the message stands there by chance."""
    talk = [{"role": role, "content": "user"} for role in ("system", "user", "assistant")]
    with pytest.raises(ValueError, match=f"leaves out the text of message {place} ") as raised:
        chat.render(_model(template), talk)
    assert "\n" not in str(raised.value)
    empty = [{"role": "system", "content": ""}, {"role": "assistant", "content": "I"}]
    if place == 1:
        assert chat.render(_model(template), empty)  # nothing is lost


@pytest.mark.parametrize(
    "said", ["Yes,", "Yes, ", [{"type": "text", "text": "Yes,"}, {"type": "x"}]]
)
@pytest.mark.parametrize("trimmed", ["", "|trim"])
def test_an_answer_that_goes_on_is_cut_as_transformers_cuts_it(said, trimmed):
    talk = [*ASK, {"role": "assistant", "content": said}]
    part = (
        "m.content" if isinstance(said, str) else "(m.content[0].text if m.role != 'user' else '')"
    )
    text = "{% for m in messages %}[{{ (" + part + ")" + trimmed + " }}]{% endfor %}"
    (wanted,), _ = render_jinja_template([talk], chat_template=text, continue_final_message=True)
    assert templates.fill(text, talk, continue_final_message=True) == wanted


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
DOUBLED = "{% for i in range(60) %}{% set ns.x = ns.x OP ns.x %}{% endfor %}{{ ns.x|length }}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP + "{% endfor %}" * 3,
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * [0] }}",
        "{{ (10**9 * 'a')|length }}",
        "{{ 10 ** (10**8) }}",
        "{% set n = 10**999 %}{{ (n ** 999999) % 7 }}",
        "{{ range(10**9)|list|length }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**9) }}",
        "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'.zfill(10**10) }}",
        "{{ ('\t' * 100000).expandtabs(10**6) }}",
        "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
        "{{ ('a' * 10**6).join(['b'] * 10**6) }}",
        "{{ ['b'] * 10**6 | join('a' * 10**6) }}",
        "{{ 'a'|center(10**10) }}",
        "{{ 'a\nb'|indent(10**10) }}",
        "{{ [1]|batch(10**10, 0)|list }}",
        "{{ 1.5|round(10**10) }}",
        "{{ [[1]]|tojson(indent=10**10) }}",
        "{{ (1).to_bytes(10**10, 'big') }}",
        "{{ strftime_now('%1000000000Y') }}",
        "{{ lipsum(n=10**9) }}",
        "{% set ns = namespace(x='a' * 9999) %}" + DOUBLED.replace("OP", "+"),
        "{% set ns = namespace(x='a' * 9999) %}" + DOUBLED.replace("OP", "~"),
        "{% set ns = namespace(x=[1]) %}" + DOUBLED.replace("ns.x OP ns.x", "[ns.x, ns.x]"),
        "{% set ns = namespace(x=[1]) %}" + DOUBLED.replace("ns.x OP ns.x", "(ns.x, ns.x)"),
        "{% set ns = namespace(x=1) %}" + DOUBLED.replace("ns.x OP ns.x", "{'a': ns.x, 'b': ns.x}"),
    ],
)
def test_a_template_that_would_not_end_is_refused(template, monkeypatch):
    """Also where one operation of C code takes all the time, or all the memory."""
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.3)
    tokenizer = SimpleNamespace(
        chat_template=template, get_chat_template=lambda *_: template, special_tokens_map={}
    )
    model = SimpleNamespace(tokenizer=tokenizer, source="m", defaults=SimpleNamespace(family="x"))
    began = time.thread_time()
    with pytest.raises(ValueError, match="the chat template of model 'm' does not take") as refused:
        chat.render(model, ASK)
    assert time.thread_time() - began < 20  # of this thread: a busy machine is no failure
    text = str(refused.value)
    assert len(text) < 1000
    assert "\n" not in text
    assert json.dumps(text)


def test_a_template_gets_no_objects_but_plain_data():
    """An object of the caller may have methods that do anything."""

    class Image:
        def save(self, path):
            raise AssertionError

    talk = [{"role": "user", "content": [{"type": "image", "image": Image()}]}]
    text = "{{ messages[0].content[0].image }}"
    assert templates.fill(text, talk) == "<Image>"
    with pytest.raises(Exception, match="begins with _"):
        templates.fill("{% set ns = namespace(__class__=1) %}", ASK)
