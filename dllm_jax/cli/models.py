"""Loads the model of a command line, with a bar where that takes a while."""

import argparse
from typing import Any

BAR_FROM = 200_000_000  # bytes; less is read before a bar could be looked at


def load_model(args: argparse.Namespace) -> Any:
    """`--model` and the flags beside it, with the compile cache on from here."""
    from tqdm import tqdm

    import dllm_jax as dj
    from dllm_jax.loading.compile_cache import enable_compile_cache

    enable_compile_cache()
    bars: list[tqdm] = []

    def progress(done: int, total: int) -> None:
        if total <= BAR_FROM:
            return
        if not bars:
            told = f"reading {args.model}"
            bars.append(
                tqdm(total=total, unit="B", unit_scale=True, desc=told, leave=False, disable=None)
            )
        bars[0].update(done - bars[0].n)

    try:
        return dj.load(args.model, args.dtype, args.revision, args.lora, progress)
    finally:
        for bar in bars:
            bar.close()
