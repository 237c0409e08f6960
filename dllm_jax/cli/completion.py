"""`dllm-jax completion SHELL`: a script by which a shell completes verbs, flags and files."""

import argparse
from collections.abc import Iterator
from typing import Any

from dllm_jax.cli.flags import Group, add, flag
from dllm_jax.cli.interrupt import Interrupt

SHELLS = ("bash", "zsh", "tcsh")
_PATHS = {"FILE", "FOLDER", "PATH", "SRC", "DST", "MODEL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        'In bash: eval "$(dllm-jax completion bash)". In zsh the script goes to a file '
        "_dllm-jax in a folder of $fpath."
    )
    add(parser, Group("", flag("shell SHELL", ", ".join(SHELLS), SHELLS)))


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Print the script."""
    import shtab

    from dllm_jax.cli.entry import VERBS, build_parser

    whole = build_parser(*VERBS)
    for parser in _parsers(whole):
        for action in parser._actions:
            if action.metavar in _PATHS:
                completed: Any = action
                completed.complete = shtab.FILE
    print(shtab.complete(whole, args.shell))
    return 0


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and, recursively, the parsers of its verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)
