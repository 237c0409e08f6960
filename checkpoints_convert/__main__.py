"""`python -m checkpoints_convert SRC DST [--dry-run]`: conversion without the engine's command."""

import argparse
import sys

from tqdm import tqdm

from checkpoints_convert.conversion import convert
from checkpoints_convert.inspection import inspect


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 failed, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="python -m checkpoints_convert", description=__doc__)
    parser.add_argument("src", help="a Hugging Face checkpoint folder")
    parser.add_argument("dst", nargs="?", help="the folder to make; not needed with --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="only report what is there")
    parser.add_argument("--dtype", default="bfloat16", help="auto, bfloat16, float32 or float16")
    parser.add_argument("--force", action="store_true", help="replace a converted folder")
    parser.add_argument("--allow-extra", action="store_true", help="leave unknown tensors out")
    args = parser.parse_args(argv)
    if args.dry_run:
        report = inspect(args.src, allow_extra=args.allow_extra)
        print(report)
        return 0 if report.is_ok else 1
    if args.dst is None:
        parser.error("DST is missing; give the folder to make, or --dry-run")
    try:
        with tqdm(unit="B", unit_scale=True, desc="reading") as bar:

            def advance(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            folder = convert(
                args.src,
                args.dst,
                args.dtype,
                force=args.force,
                allow_extra=args.allow_extra,
                progress=advance,
            )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
