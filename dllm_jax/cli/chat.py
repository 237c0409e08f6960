"""`dllm-jax chat`: a conversation in the terminal, each answer shown as it settles.

Data flow: a line -> the history through the chat template -> token ids -> an engine -> the answer,
which joins the history. What the history shares with the turn before is in the prefix cache. From a
pipe each line is a turn and nothing but the answers is printed.
"""

import argparse
import signal
import sys
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.errors import Interrupted
from dllm_jax.cli.interrupt import Interrupt

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = f"{HELP}. From a pipe each line is a turn."
    parser.add_argument("--system", metavar="TEXT", help="a system message before the first turn")
    parser.add_argument(
        "--thinking",
        choices=("on", "off"),
        help="whether the model thinks before it answers, where its chat template lets one choose "
        "(default: the template's)",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja in the place of the model's chat template"
    )
    flags.add_model_flags(parser)
    flags.add_strategy_flags(parser)
    flags.add_draft_flag(parser)
    flags.add_sampling_flags(parser, seed="of sampling (default: 0)")
    flags.add_engine_flags(parser, several=False)


def run(args: argparse.Namespace) -> int:
    """Answer until the input ends."""
    # A Ctrl-C stops an answer: it need not end a command that compiles. A second one does.
    with Interrupt(forced=(signal.SIGTERM,)) as stop:
        chosen = strategies.load(args.strategy)

        from dllm_jax.cli.engine import Clock, make_llm
        from dllm_jax.cli.models import load_model
        from dllm_jax.loading.chat import note, render

        model = load_model(args)
        fields = strategies.given_fields(args)
        strategy = strategies.resolve(model, args.strategy, chosen, fields, args.draft)
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        told = _template_kwargs(args)
        render(model, [*system, {"role": "user", "content": "?"}], **told)  # or refuse at once
        if args.chat_template is None and (said := note(model)):
            _note(said)
        talk = Chat(args, make_llm(args, model, strategy, Clock()), system, told, stop)
        stop.check()
        return talk.run()


def _template_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """What the chat template is told, as flags say it."""
    from dllm_jax.cli.prompts import read_file

    told: dict[str, Any] = {}
    if args.thinking is not None:
        told["enable_thinking"] = args.thinking == "on"
    if args.chat_template is not None:
        told["chat_template"] = read_file("chat template", args.chat_template)
    return told


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
                    raise signalled.saying("interrupted; the conversation is over") from None
                was_stopped = True
                self._stop.reset()
                print("\n(Ctrl-C again, or Ctrl-D, ends the conversation)")

    def _turn(self, line: str) -> None:
        """Answer a line; where that fails the conversation is as before."""
        asked = [*self._history, {"role": "user", "content": line}]
        try:
            text = self._answer(asked)
        except ValueError as error:  # too long, or not for this template
            _note(f"{error}; this turn is dropped, /reset forgets the others")
            return
        if text:
            self._history = [*asked, {"role": "assistant", "content": text}]

    def _answer(self, messages: list[dict[str, str]]) -> str:
        """Print the answer as it settles; what there is of it where Ctrl-C stops it."""
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
                print(one.text[len(text) :], end="", flush=True)
                text, reason, error = one.text, one.finish_reason, output.error
        except Interrupted as signalled:
            print(flush=True)
            if signalled.number != signal.SIGINT:
                raise signalled.saying("interrupted; the conversation is over") from None
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
        import readline  # noqa: F401 (imported for what it does to `input`)
    except ImportError:
        return


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)
