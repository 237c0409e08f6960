"""`dllm-jax convert SRC DST`: a Hugging Face folder as a converted one, tensor by tensor."""

import argparse
import time
from pathlib import Path

from dllm_jax.cli import flags
from dllm_jax.cli.flags import Group, flag
from dllm_jax.cli.interrupt import Interrupt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    flags.add(
        parser,
        Group(
            "",
            flag("src SRC", "a Hugging Face folder, a hub id, or builtin:NAME"),
            flag("dst DST", "the folder to make"),
            *flags.SOURCE,
            flag(
                "--dtype",
                "of the weights; for 8 bits give --quantize fp8",
                flags.DTYPES,
                "bfloat16",
            ),
            flag(
                "--quantize",
                "write a Hugging Face folder of compressed-tensors, the matrices of its layers in "
                "8 bits (default: a converted folder, no rounding)",
                ("fp8",),
            ),
            flag(
                "--quantize-head",
                "beside --quantize fp8: the head in 8 bits as well; refused if it is the embedding",
                bool,
            ),
            flag("--force", "replace DST if it is there", bool),
            flag("--dry-run", "check, tell the sizes, and write nothing", bool),
        ),
    )


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Convert, with a progress bar, and say how large the result is."""
    from tqdm import tqdm

    from dllm_jax.cli.sources import checkpoint_folder, family_of, headers_folder
    from dllm_jax.loading.checkpoints import convert, inspect, plan
    from dllm_jax.loading.sources import find_adapter

    lora = None if args.lora is None else find_adapter(args.lora)
    eight = {"quantize": args.quantize, "quantize_head": args.quantize_head}
    family = family_of(args)
    how = {"force": args.force, "family": family, **eight}
    if args.dry_run:
        with headers_folder(args.src, args.revision) as folder:
            convert(folder, args.dst, args.dtype, lora, **how, dry_run=True)
            report = inspect(folder, lora=lora, family=family)
            print(f"{args.dst}: {plan(report, args.dtype, **eight)}")
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
