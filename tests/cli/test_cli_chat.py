"""Proves `dllm-jax chat`: each answer is the model's to the whole history, cheaply, and nothing a
user types, or the model cannot take, ends the conversation but what is meant to.

`LLM.generate` over the rendered history is the oracle. Lines come from a pipe but for the tests of
the prompt, where `input` is replaced; signals are real ones, raised at a known step.
"""

import io
import json
import shutil
import signal
from types import SimpleNamespace

import pytest

import dllm_jax as dj
from dllm_jax.api import llm as llm_module
from dllm_jax.cli import main
from dllm_jax.engine.engine import Engine

pytestmark = pytest.mark.long

FIRST = "Ann has 3 pens, 4 books and 5 cups. Carl gets 41 dollars a day."
SECOND = "How many?"
SIZES = ["--max-tokens", "12", "--page-size", "8", "--max-model-len", "192"]


@pytest.fixture
def argv(random_folder):
    return ["chat", "--model", str(random_folder), *SIZES]


@pytest.fixture
def made(monkeypatch):
    """The LLMs that a command makes."""
    found = []

    class Spy(llm_module.LLM):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(self)

    monkeypatch.setattr(llm_module, "LLM", Spy)
    return found


@pytest.fixture(scope="module")
def answer(random_folder):
    """What the model says to a history, as text."""
    llm = dj.LLM(str(random_folder), max_num_seqs=1, max_model_len=192, page_size=8, warm_up=False)

    def say(*texts, max_tokens=12):
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        (out,) = llm.chat(messages, dj.SamplingParams(max_tokens=max_tokens), use_tqdm=False)
        return out.outputs[0].text

    return say


def typed(monkeypatch, *lines):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_each_line_of_a_pipe_is_a_turn_of_one_history(argv, answer, made, capsys, monkeypatch):
    typed(monkeypatch, FIRST, "", SECOND)
    assert main(argv) == 0
    first = answer(FIRST)
    assert capsys.readouterr().out == f"{first}\n{answer(FIRST, first, SECOND)}\n"
    # The second turn found what it shares with the first one: at least that one's prompt.
    stats, tokenizer = made[0].engine.stats(), made[0].model.tokenizer
    ids = tokenizer(f"<|user|>{FIRST}<|assistant|>", add_special_tokens=False)["input_ids"]
    assert stats.num_requests == 2
    assert stats.prefix_hits >= len(ids) // 8 >= 3


def test_reset_forgets_and_exit_ends(argv, answer, capsys, monkeypatch):
    typed(monkeypatch, FIRST, "/reset", SECOND, "/exit", FIRST)
    assert main(argv) == 0
    assert capsys.readouterr().out == f"{answer(FIRST)}\n{answer(SECOND)}\n"


def test_turn_that_is_too_long_is_dropped(argv, answer, capsys, monkeypatch):
    typed(monkeypatch, FIRST, "7" * 300, SECOND)
    assert main(argv) == 0
    captured = capsys.readouterr()
    first = answer(FIRST)
    assert captured.out == f"{first}\n{answer(FIRST, first, SECOND)}\n"
    (reported,) = [line for line in captured.err.splitlines() if "dropped" in line]
    assert reported.startswith("note: the prompt has ")
    assert "the engine takes 192" in reported


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_characters_reach_a_terminal_as_text(argv, capsys, monkeypatch, is_terminal):
    """A pipe gets them as they are. What a template or tokenizer says may hold them too."""

    def follow(engine, request_ids, stop):
        error = errors.pop(0)
        for text in ("a", "a\x1b[2J"):
            one = SimpleNamespace(text=text, finish_reason="stop")
            yield SimpleNamespace(outputs=[one], error=error)

    errors, shown = [None, "bad \x1b[2J"], "\\x1b[2J" if is_terminal else "\x1b[2J"
    monkeypatch.setattr("dllm_jax.cli.engine.follow", follow)
    typed(monkeypatch, FIRST, SECOND)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"a{shown}\n")
    assert f"note: bad {shown}; this turn is dropped" in captured.err


def signal_at_step(monkeypatch, number, after):
    """Raise a signal in an engine's `after`th step, of one forward each."""
    monkeypatch.setattr("dllm_jax.engine.engine.num_steps", lambda *_, **__: 1)
    step, calls = Engine._take_step, []

    def signalled(engine):
        calls.append(1)
        if len(calls) == after:
            signal.raise_signal(number)
        return step(engine)

    monkeypatch.setattr(Engine, "_take_step", signalled)


def test_interrupt_stops_the_answer_and_keeps_what_there_is(argv, answer, capsys, monkeypatch):
    typed(monkeypatch, FIRST, SECOND)
    whole = answer(FIRST)
    signal_at_step(monkeypatch, signal.SIGINT, 8)
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "note: stopped\n" in captured.err
    first, second, end = captured.out.split("\n")
    assert 0 < len(first) < len(whole)
    assert whole.startswith(first)
    assert (second, end) == (answer(FIRST, first, SECOND), "")


def test_termination_ends_the_conversation(argv, capsys, monkeypatch):
    typed(monkeypatch, FIRST, SECOND)
    signal_at_step(monkeypatch, signal.SIGTERM, 8)
    assert main(argv) == 143
    assert capsys.readouterr().err == "error: interrupted; the conversation is over\n"


def at_the_prompt(monkeypatch, *events):
    """A terminal whose user does so: a line, a signal, or Ctrl-D (EOFError)."""
    left = list(events)

    def read(prompt):
        assert prompt == "> "
        event = left.pop(0)
        if isinstance(event, str):
            return event
        if event is EOFError:
            raise EOFError
        signal.raise_signal(event)
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    return left


def test_interrupts_at_the_prompt(argv, answer, capsys, monkeypatch):
    # One is forgiven, also after a turn; two in a row end it.
    left = at_the_prompt(
        monkeypatch, signal.SIGINT, FIRST, signal.SIGINT, "/reset", signal.SIGINT, signal.SIGINT, ""
    )
    assert main(argv) == 130
    assert left == [""]
    captured = capsys.readouterr()
    assert captured.out.count("(Ctrl-C again, or Ctrl-D, ends the conversation)") == 3
    assert f"\n{answer(FIRST)}\n" in captured.out
    assert captured.err.endswith("error: interrupted; the conversation is over\n")


def test_end_of_input_at_the_prompt(argv, capsys, monkeypatch):
    at_the_prompt(monkeypatch, EOFError)
    assert main(argv) == 0
    assert "/exit or Ctrl-D ends it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gone", "reported"),
    [
        (
            ("chat_template.jinja",),
            "has no chat template; use generate with a prompt, or give a chat_template "
            "(--chat-template)",
        ),
        (
            ("token*", "special*"),
            "has no tokenizer and no chat template; give generate token ids",
        ),
    ],
)
def test_model_that_cannot_chat_is_one_line(random_folder, tmp_path, fails, gone, reported):
    bare = tmp_path / "bare"
    shutil.copytree(random_folder, bare, ignore=shutil.ignore_patterns(*gone))
    config = bare / "tokenizer_config.json"
    if config.exists() and "chat_template" in config.read_text():
        layout = json.loads(config.read_text())
        del layout["chat_template"]
        config.write_text(json.dumps(layout))
    assert fails(1, "chat", "--model", str(bare)) == f"model '{bare}' {reported}"
