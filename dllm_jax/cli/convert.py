"""`dllm-jax convert SRC DST`: a Hugging Face folder as a converted one, tensor by tensor."""

import argparse
import time
from pathlib import Path

from dllm_jax.cli.flags import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.add_argument("src", metavar="SRC", help="a Hugging Face folder, or builtin:NAME")
    parser.add_argument("dst", metavar="DST", help="the folder to make")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=DTYPES, help="of the weights (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="replace DST if it is there")


def run(args: argparse.Namespace) -> int:
    """Convert, with a progress bar, and say how large the result is."""
    from tqdm import tqdm

    from checkpoints_convert import convert
    from dllm_jax.cli.folders import checkpoint_folder

    began = time.perf_counter()
    with tqdm(unit="B", unit_scale=True, desc="reading", leave=False, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        folder = checkpoint_folder(args.src)
        convert(folder, args.dst, dtype=args.dtype, force=args.force, progress=progress)
    size = sum(f.stat().st_size for f in Path(args.dst).rglob("*") if f.is_file())
    print(f"{args.dst}: {size / 1e6:.1f} MB in {time.perf_counter() - began:.1f} s")
    return 0
