"""Files that a verb will write: refused before the work, not after it."""

import argparse
import os
from pathlib import Path

from dllm_jax.cli.errors import UsageError


def check_output(name: str, flag: str = "--output") -> None:
    """Refuse, before the work, a file that could not be written after it."""
    path = Path(name)
    reason = None
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {str(path.parent)!r}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission is denied"
    if reason:
        raise UsageError(f"{flag} {name!r} cannot be written: {reason}; give another path")


def check_plot(args: argparse.Namespace) -> None:
    """Refuse a plot that could not be written."""
    if args.plot is None:
        return
    check_output(args.plot, "--plot")
    if Path(args.plot).suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--plot {args.plot!r} must end in .svg, .png or .pdf; rename it")
