"""`python -m checkpoints_convert SRC DST [--dry-run]`: conversion without the engine's command."""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from . import convert, inspect, plan
from .copying import Progress


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 failed, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="python -m checkpoints_convert", description=__doc__)
    parser.add_argument("src", help="a Hugging Face checkpoint folder")
    parser.add_argument("dst", nargs="?", help="the folder to make; not needed with --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be done")
    parser.add_argument("--dtype", default="bfloat16", help="auto, bfloat16, float32 or float16")
    parser.add_argument("--lora", help="the folder of a LoRA adapter to merge")
    parser.add_argument("--force", action="store_true", help="replace a converted folder")
    parser.add_argument("--allow-extra", action="store_true", help="leave unknown tensors out")
    args = parser.parse_args(argv)
    if args.dst is None and not args.dry_run:
        parser.error("DST is missing; give the folder to make, or --dry-run")
    try:
        return _tell(args) if args.dry_run else _convert(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _tell(args: argparse.Namespace) -> int:
    """Print the report and the size of the conversion, reading only headers."""
    report = inspect(args.src, lora=args.lora, allow_extra=args.allow_extra)
    print(report)
    if not report.is_ok:
        return 1
    print(plan(report, args.dtype))
    if args.dst is not None:
        _run(args, None)
    return 0


def _convert(args: argparse.Namespace) -> int:
    """Convert, with a progress bar that counts bytes."""
    with tqdm(unit="B", unit_scale=True, desc="reading") as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        folder = _run(args, advance)
    print(f"wrote {folder}")
    return 0


def _run(args: argparse.Namespace, progress: Progress | None) -> Path:
    return convert(
        args.src,
        args.dst,
        args.dtype,
        args.lora,
        force=args.force,
        allow_extra=args.allow_extra,
        progress=progress,
        dry_run=args.dry_run,
    )


if __name__ == "__main__":
    sys.exit(main())
