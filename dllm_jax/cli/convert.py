"""`dllm-jax convert SRC DST`: a Hugging Face folder as a converted one, tensor by tensor."""

import argparse
import time
from pathlib import Path

from dllm_jax.cli import flags
from dllm_jax.cli.interrupt import Interrupt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.add_argument(
        "src", metavar="SRC", help="a Hugging Face folder, a hub id, or builtin:NAME"
    )
    parser.add_argument("dst", metavar="DST", help="the folder to make")
    flags.add_source_flags(parser)
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=flags.DTYPES,
        help="of the weights; for 8 bits give --quantize fp8 (default: %(default)s)",
    )
    parser.add_argument(
        "--quantize",
        choices=("fp8",),
        help="write a Hugging Face folder of compressed-tensors, the matrices of its layers in 8 "
        "bits (default: a converted folder, no rounding)",
    )
    parser.add_argument(
        "--quantize-head",
        action="store_true",
        help="beside --quantize fp8: the head in 8 bits as well; refused if it is the embedding",
    )
    parser.add_argument("--force", action="store_true", help="replace DST if it is there")
    parser.add_argument(
        "--dry-run", action="store_true", help="check, tell the sizes, and write nothing"
    )


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Convert, with a progress bar, and say how large the result is."""
    from tqdm import tqdm

    from dllm_jax.cli.sources import checkpoint_folder, headers_folder
    from dllm_jax.loading.checkpoints import convert, inspect, plan
    from dllm_jax.loading.sources import find_adapter

    lora = None if args.lora is None else find_adapter(args.lora)
    eight = {"quantize": args.quantize, "quantize_head": args.quantize_head}
    how = {"force": args.force, **eight}
    if args.dry_run:
        with headers_folder(args.src, args.revision) as folder:
            convert(folder, args.dst, args.dtype, lora, **how, dry_run=True)
            print(f"{args.dst}: {plan(inspect(folder, lora=lora), args.dtype, **eight)}")
        return 0
    folder = checkpoint_folder(args.src, args.revision)
    began = time.perf_counter()
    with tqdm(unit="B", unit_scale=True, desc="reading", leave=False, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        convert(folder, args.dst, args.dtype, lora, **how, progress=progress)
    size = sum(f.stat().st_size for f in Path(args.dst).rglob("*") if f.is_file())
    print(f"{args.dst}: {size / 1e6:.1f} MB in {time.perf_counter() - began:.1f} s")
    return 0
