"""`dllm-jax VERB`: parses, runs one verb, and turns every failure into one line and a status.

Data flow: argv -> the verb's parser -> the verb's `run(args, stop)` -> exit status. Verbs import
JAX and the engine inside `run`, so that `--help` and a wrong flag are answered at once.
"""

import argparse
import contextlib
import difflib
import importlib
import os
import sys
import traceback
import warnings
from typing import NoReturn

from dllm_jax.cli import flags
from dllm_jax.cli.errors import UsageError, fitted, one_line
from dllm_jax.cli.interrupt import Interrupt, Interrupted
from dllm_jax.cli.text import shown

DONE, FAILED, BAD_USAGE, SIGNALLED = 0, 1, 2, 128

VERBS = {
    "generate": "text from a prompt, shown as it settles",
    "chat": "a conversation in the terminal",
    "serve": "an OpenAI-compatible HTTP server",
    "bench": "speed: throughput, latency, one step, a server",
    "eval": "accuracy and tokens per forward on the built-in word problems",
    "tune": "the fastest thresholds within an accuracy budget, by a race",
    "convert": "a Hugging Face folder to a converted one",
    "inspect": "what a checkpoint folder holds, and every problem in it",
    "train": "train a small model from nothing, or a drafter for any target",
    "replay": "a saved snapshot of a request again, step by step",
    "trace": "a page or pictures that replay how a text was denoised",
    "info": "versions, devices, kernels, models",
    "completion": "a script that completes this command in a shell",
}

EXAMPLES = {
    "generate": (
        "--seed 7 --half hard --watch",
        '--strategy multi_bd --accept-threshold 0.95 "A shop has 365 plates. '
        'People bring 132 back. How many plates are there?"',
    ),
    "chat": ("", '--system "Answer in one sentence." --temperature 0.7'),
    "serve": ("builtin:tiny-sdar", "--model /models/SDAR-1.7B-Chat --port 8080"),
    "bench": ("throughput --num-prompts 16", "step --shapes 1x1,1x4 --json"),
    "eval": (
        "--half plain --problems 20 --no-one-token",
        "--sweep accept_threshold=0.5:0.99:8 --plot sweep.svg",
    ),
    "tune": (
        "--grid accept_threshold=0.5:0.95:4 --problems 256 --plot front.svg "
        "--write-config tuned.json",
        "--strategy multi_bd --grid accept_threshold=0.8,0.9 --data problems.jsonl --margin 2",
    ),
    "convert": (
        "/models/SDAR-1.7B-Chat /models/sdar --dtype bfloat16",
        "builtin:tiny-sdar /tmp/tiny --dry-run",
    ),
    "inspect": ("builtin:tiny-sdar", "/models/SDAR-1.7B-Chat --json"),
    "train": (
        "--out runs/first --budget-seconds 180",
        "dflash --target builtin:tiny-qwen3 --out runs/draft",
    ),
    "replay": ("snapshot", "snapshot --sample 1 --watch"),
    "trace": (
        "--seed 7 --half hard --out trace.html",
        "--strategy multi_bd --strategy block_diffusion",
    ),
    "info": ("", "multi_bd"),
    "completion": ("bash", "zsh"),
}


class _Help(argparse.HelpFormatter):
    """Help whose indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        blocks = text.split("\n\n")
        return "\n\n".join(
            block if "\n  " in block else fill(block, width, indent) for block in blocks
        )


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, raised instead of printed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, formatter_class=_Help, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` that points to `--help`."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build_parser(*only: str) -> Parser:
    """The parser of the whole command; the verbs `only` are imported."""
    parser = Parser(
        prog="dllm-jax",
        description="Diffusion language models on JAX. `dllm-jax VERB --help` tells more.",
        epilog="Exit status: 0 done, 1 failed, 2 bad usage, 130 after Ctrl-C, 143 after SIGTERM.",
    )
    parser.add_argument("--version", action="version", version=f"dllm-jax {_version()}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    for name, summary in VERBS.items():
        child = verbs.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        flags.add(child, flags.Group("", flags.DEBUG))  # --debug before the verb counts too
        if name in only:
            importlib.import_module(f"dllm_jax.cli.{name}").add_arguments(child)
            child.epilog = f"{child.epilog or ''}\n\n{_examples(name)}".strip()
    return parser


def _examples(verb: str) -> str:
    lines = (f"  dllm-jax {verb} {words}".rstrip() for words in EXAMPLES[verb])
    return "\n".join(("examples:", *lines))


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line.

    Raises:
        UsageError: The command line is not valid.
    """
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(VERBS)}"
        raise UsageError(f"verb {verb!r} is unknown; {hint}")
    parser = build_parser(*([verb] if verb else ()))
    args, unknown = parser.parse_known_args(argv)
    if args.verb is None:
        parser.print_help()
        raise SystemExit(DONE)
    if not unknown and getattr(args, "config", None) is not None:
        from dllm_jax.cli.config_file import words_of

        at = argv.index(args.verb) + 1
        args = parser.parse_args(
            [*argv[:at], *words_of(args.config, _of(parser, args)), *argv[at:]]
        )
    if unknown:
        first = unknown[0].split("=")[0]
        flags = (flag for flag in _flags(parser, args) if flag != "--help")
        close = difflib.get_close_matches(first, flags, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        if not first.startswith("-"):
            hint = "a text of several words goes in quotes; "
        raise UsageError(f"unknown argument {first!r}; {hint}see `dllm-jax {verb} --help`")
    if getattr(args, "strategy_config", None) is not None:
        from dllm_jax.cli.strategy import apply_config

        apply_config(args)
    return args


def _of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the verb."""
    (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return verbs.choices[args.verb]


def _flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """The flags of a parser and of the verbs that were chosen."""
    found: list[str] = []
    for action in parser._actions:
        found += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            found += _flags(action.choices[getattr(args, action.dest)], args)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        argv: Words after the command's name; None: those of this process. A signal then ends the
            process here, because an orderly exit would wait for the device.
    """
    if argv is None:
        _warn_in_one_line()
    status = _main(sys.argv[1:] if argv is None else argv)
    if argv is None and status > SIGNALLED:
        sys.stdout.flush()
        os._exit(status)
    return status


def _main(argv: list[str]) -> int:
    debug = "--debug" in argv
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    try:
        with Interrupt() as stop:
            try:
                args = parse(argv)
                return importlib.import_module(f"dllm_jax.cli.{args.verb}").run(args, stop)
            except KeyboardInterrupt as signalled:
                number = signalled.number if isinstance(signalled, Interrupted) else 2
                return _fail(stop.finish(), SIGNALLED + number, debug)
    except Interrupted as signalled:  # while `Interrupt` began to catch signals
        return _fail(str(signalled), SIGNALLED + signalled.number, debug)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):  # after --help and --version
            return end.code or DONE
        return _fail(one_line(end), FAILED, debug)  # code of the user ended the program
    except BrokenPipeError:  # the reader of our output left (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except UsageError as error:
        if "serve" in argv and "--log-format json" in " ".join(argv).replace("=", " "):
            with contextlib.suppress(ModuleNotFoundError):  # without the extra it is text
                return _logged(error, BAD_USAGE)
        return _fail(one_line(error), BAD_USAGE, debug)
    except Exception as error:
        return _fail(one_line(error), FAILED, debug)


def _logged(error: ValueError, status: int) -> int:
    """Report a refused command line as a line of the server's JSON log."""
    from dllm_jax.serve.logs import Log

    Log("json").line("error", "error", said=fitted(one_line(error)))
    return status


def _warn_in_one_line() -> None:
    """Print warnings of the library as `note: ...`, without a source line."""
    usual = warnings.formatwarning

    def one_note(message, category, filename, lineno, line=None):
        if category is UserWarning:
            return f"note: {shown(' '.join(str(message).split()), sys.stderr.isatty())}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = one_note


def _fail(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stdout.flush()
    shown_message = shown(message, sys.stderr.isatty())
    print(f"error: {fitted(shown_message)}", file=sys.stderr, flush=True)
    return status


def _version() -> str:
    from dllm_jax import __version__

    return __version__
