"""Results of a verb, and the files they go to: refused before the work, not after it."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from dllm_jax.cli.errors import UsageError


def check_output(name: str | None, flag: str = "--output", is_folder: bool = False) -> None:
    """Refuse, before the work, a path that could not be written after it; None: there is none."""
    if name is None:
        return
    path = Path(name)
    reason = None
    if path.exists() and path.is_dir() != is_folder:
        reason = "it is a file" if is_folder else "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {str(path.parent)!r}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission is denied"
    if reason:
        raise UsageError(f"{flag} {name!r} cannot be written: {reason}; give another path")


def check_plot(args: argparse.Namespace) -> None:
    """Refuse a plot that could not be written."""
    check_output(args.plot, "--plot")
    if args.plot is not None and Path(args.plot).suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--plot {args.plot!r} must end in .svg, .png or .pdf; rename it")


def write_json(name: str, facts: dict[str, Any]) -> None:
    """Write an object to a file."""
    Path(name).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def report(args: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    """Print the text, or with --json the object, which --output gets as well."""
    print(json.dumps(facts) if args.json else text, flush=True)
    if args.output is not None:
        write_json(args.output, facts)
