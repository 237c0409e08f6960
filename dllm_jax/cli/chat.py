"""`dllm-jax chat`: a conversation in the terminal, each answer shown as it settles.

Data flow: a line -> the history through the chat template -> token ids -> an engine -> the answer,
which joins the history. The prefix cache holds the history of the turn before. From a pipe each
line is a turn and only the answers are printed.
"""

import argparse
import signal
import sys
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.flags import Group, flag
from dllm_jax.cli.interrupt import Interrupt, Interrupted
from dllm_jax.cli.text import shown

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = f"{HELP}. From a pipe each line is a turn."
    flags.add(
        parser,
        Group(
            "",
            flag("--system TEXT", "a system message before the first turn"),
            flag(
                "--thinking",
                "whether the model thinks before it answers, where its chat template lets one "
                "choose (default: the template's)",
                ("on", "off"),
            ),
            flag(
                "--chat-template FILE",
                "Jinja in the place of the model's chat template (default: the model's)",
            ),
        ),
        flags.MODEL,
        flags.strategy(),
        flags.DRAFT,
        flags.sampling("of sampling"),
        flags.ENGINE_OF_ONE,
    )


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Answer until the input ends. Ctrl-C stops an answer; a second one ends the command."""
    chosen = strategies.load(args.strategy)

    from dllm_jax.cli.engine import Clock, make_llm
    from dllm_jax.cli.sources import load_model
    from dllm_jax.loading.chat import note, render

    model = load_model(args)
    fields = strategies.given_fields(args)
    strategy = strategies.resolve(model, args.strategy, chosen, fields, args.draft)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    variables = _template_kwargs(args)
    render(model, [*system, {"role": "user", "content": "?"}], **variables)  # or refuse at once
    if args.chat_template is None and (text := note(model)):
        _note(text)
    chat = Chat(args, make_llm(args, model, strategy, Clock()), system, variables, stop)
    stop.check()
    stop.tell = lambda: "interrupted; the conversation is over"
    return chat.run()


def _template_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """The variables of the chat template, from the flags."""
    from dllm_jax.cli.prompts import read_file

    variables: dict[str, Any] = {}
    if args.thinking is not None:
        variables["enable_thinking"] = args.thinking == "on"
    if args.chat_template is not None:
        variables["chat_template"] = read_file("chat template", args.chat_template)
    return variables


class Chat:
    """The conversation."""

    def __init__(
        self,
        args: argparse.Namespace,
        llm: Any,
        system: list[dict[str, str]],
        template_kwargs: dict[str, Any],
        stop: Interrupt,
    ):
        from dllm_jax.cli.engine import sampling_params

        self._llm, self._stop = llm, stop
        self._template_kwargs = template_kwargs
        self._params = sampling_params(args, llm.model, llm.strategy)
        self._system = system
        self._history = list(system)
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> int:
        """Turn by turn until the input ends."""
        if self._terminal:
            print(f"{self._llm.model.source}; {HELP}")
        while (line := self._read()) is not None:
            line = line.strip()
            if line == "/exit":
                break
            if line == "/reset":
                self._history = list(self._system)
            elif line:
                self._turn(line)
        return 0

    def _read(self) -> str | None:
        """The next line, None at the end of the input."""
        if not self._terminal:
            return sys.stdin.readline() or None
        _edit_lines()
        was_stopped = False
        while True:
            try:
                return input("> ")
            except EOFError:
                print()
                return None
            except Interrupted as signalled:
                if was_stopped or signalled.number != signal.SIGINT:
                    raise
                was_stopped = True
                self._stop.reset()
                print("\n(Ctrl-C again, or Ctrl-D, ends the conversation)")

    def _turn(self, line: str) -> None:
        """Answer a line; after a failure the conversation is as before."""
        history = [*self._history, {"role": "user", "content": line}]
        try:
            text = self._answer(history)
        except ValueError as error:  # too long, or not for this template
            _note(f"{error}; this turn is dropped, /reset forgets the others")
            return
        if text:
            self._history = [*history, {"role": "assistant", "content": text}]

    def _answer(self, messages: list[dict[str, str]]) -> str:
        """Print the answer as it settles, and return it; Ctrl-C cuts it short."""
        from dllm_jax.cli.engine import add, follow
        from dllm_jax.engine.requests import Request
        from dllm_jax.loading.chat import render
        from dllm_jax.loading.tokenizer import encode

        prompt = render(self._llm.model, messages, **self._template_kwargs)
        ids = encode(self._llm.model.tokenizer, prompt, special=False)
        request = Request(prompt_token_ids=ids, params=self._params, stream=True)
        request_ids = add(self._llm.engine, [request])
        text, reason, error = "", None, None
        try:
            for output in follow(self._llm.engine, request_ids, self._stop):
                one = output.outputs[0]
                print(shown(one.text[len(text) :]), end="", flush=True)
                text, reason, error = one.text, one.finish_reason, output.error
        except Interrupted as signalled:
            print(flush=True)
            if signalled.number != signal.SIGINT:
                raise
            self._stop.reset()
            _note("stopped")
            return text
        print(flush=True)
        if error is not None:
            raise ValueError(error)
        if reason != "stop":
            _note(f"the answer ends here by its limit ({reason})")
        return text


def _edit_lines() -> None:
    """Let `input` edit lines, where the system can."""
    try:
        import readline  # noqa: F401 (the import makes `input` editable)
    except ImportError:
        return


def _note(text: str) -> None:
    print(f"note: {shown(text, sys.stderr.isatty())}", file=sys.stderr, flush=True)
