"""Proves `serve --config FILE` (issue 50, item 6): any flag from YAML or TOML, and the command line
wins. Everything wrong in a file is one line that names it all, before the port opens.
"""

import re
from pathlib import Path

import pytest

from dllm_jax.cli.entry import parse
from dllm_jax.serve.text import TextSide
from dllm_jax.serve.wire import Turn
from tests.serve.scripted import make

DOCS = Path(__file__).resolve().parents[2] / "docs" / "http.md"
TOML = """
model = "random:JetLM/SDAR-1.7B-Chat"
port = 8080
no_warm_up = true
open-metrics = false
warm-up-constraints = false
api-key = ["one", "two"]
set = ["remasking=static", "block_size=8"]
memory-utilization = 0.5
log-format = "json"
"""


def test_flags_of_a_file_are_those_of_the_command_line(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    words = "--model random:JetLM/SDAR-1.7B-Chat --port 8080 --no-warm-up --log-format json"
    words += " --no-warm-up-constraints --api-key one --api-key two --memory-utilization 0.5"
    words += " --set remasking=static --set block_size=8"
    read = vars(parse(["serve", "--config", str(tmp_path / "a.toml")]))
    assert read | {"config": None} == vars(parse(["serve", *words.split()]))
    won = parse(["serve", "builtin:tiny-sdar", "--config", str(tmp_path / "a.toml"), "--port", "9"])
    assert (won.source, won.port, won.log_format) == ("builtin:tiny-sdar", 9, "json")


def test_the_file_of_the_page_is_read(tmp_path):
    (text,) = re.findall(r"```text\n(model: .*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    (tmp_path / "a.yaml").write_text(text)
    args = parse(["serve", "--config", str(tmp_path / "a.yaml")])
    assert (args.model, args.port, args.max_num_seqs) == ("builtin:tiny-sdar", 8080, 16)
    assert args.allowed_origin == ["https://example.org"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.yaml",
            "prot: 1\nmax-num-seqs: 0\nlog-format: xml\nno-warm-up: 3\nport: [1]\nhost: {a: 1}",
            (
                "'prot' is no flag, did you mean 'port'?",
                "max-num-seqs: value=0 must be",
                "log-format: 'xml' must be one of text, json, none",
                "no-warm-up: '3' must be true or false",
                "port: '[1]' must be a text or a number",
                "host: ",
            ),
        ),
        ("a.yaml", "- port", ("must hold flags",)),
        ("a.yaml", "a: [", ("is no YAML",)),
        ("a.yaml", "!!python/object/apply:os.getcwd []", ("is no YAML",)),
        ("a.yaml", "port: !!bool x", ("is no YAML: KeyError",)),
        ("a.yaml", "port: 2020-13-45", ("is no YAML: month",)),
        ("a.toml", "port", ("is no TOML",)),
        ("a.json", "{}", ("must end in .yaml",)),
    ],
)
def test_all_that_is_wrong_in_a_file_is_told_in_one_line(tmp_path, fails, name, text, said):
    (tmp_path / name).write_text(text)
    line = fails(2, "serve", "--config", str(tmp_path / name))
    assert [one for one in said if one not in line] == []


def test_a_template_from_a_file_is_what_chats_are_written_in(tmp_path, fails):
    facts = make({}, lambda *_: None).facts
    facts.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    text = TextSide(facts)
    try:
        turns = [Turn(role="user", content=one) for one in ("one", "two")]
        ids, _ = text.prompt(turns, None)
        assert text.tokenizer.decode(ids).replace(" ", "") == "[one][two]"
    finally:
        text.close()
    (tmp_path / "broken").write_text("{% for m in %}")
    assert "is no Jinja" in fails(2, "serve", "--chat-template", str(tmp_path / "broken"))
