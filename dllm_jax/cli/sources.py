"""The models and checkpoints that a command line names."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dllm_jax.cli.errors import UsageError, from_user

BAR_FROM = 200_000_000  # bytes; less is read before a progress bar could be seen


def load_model(args: argparse.Namespace) -> Any:
    """The model of `--model` and the flags that go with it; turns the compile cache on."""
    from tqdm import tqdm

    import dllm_jax as dj
    from dllm_jax.loading.jax_settings import enable_compile_cache
    from dllm_jax.models.sharding import over_devices

    count = getattr(args, "tensor_parallel_size", 1)
    enable_compile_cache()
    bars: list[tqdm] = []

    def progress(done: int, total: int) -> None:
        if total <= BAR_FROM:
            return
        if not bars:
            name = f"reading {args.model}"
            bars.append(
                tqdm(total=total, unit="B", unit_scale=True, desc=name, leave=False, disable=None)
            )
        bars[0].update(done - bars[0].n)

    try:
        return dj.load(
            args.model,
            args.dtype,
            args.revision,
            args.lora,
            progress,
            args.quantization,
            mesh=None if count == 1 else over_devices(count),
            kv_cache_dtype=args.kv_cache_dtype,
            quantize_head=args.quantize_head,
            tokenizer=args.tokenizer,
            family=family_of(args),
        )
    finally:
        for bar in bars:
            bar.close()


def family_of(args: argparse.Namespace) -> Any:
    """The family of --family, None without.

    Raises:
        UsageError: --family does not name a family, or its file cannot be run.
    """
    from dllm_jax.loading.load import load_family

    return None if args.family is None else from_user("family", args.family, load_family)


def checkpoint_folder(source: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint source; the files of a hub id are fetched.

    Raises:
        UsageError: The source is empty, or has no files.
        ValueError: The source does not exist.
    """
    from dllm_jax.loading.sources import find_folder

    _require_files(source)
    return find_folder(source, revision)


@contextmanager
def headers_folder(source: str, revision: str | None = None) -> Iterator[Path]:
    """As `checkpoint_folder`, but only the headers of a hub id's weights are fetched.

    Raises:
        UsageError, ValueError: As there.
    """
    from dllm_jax.loading.sources import find_headers

    _require_files(source)
    with tempfile.TemporaryDirectory(prefix="dllm-jax-") as made:
        yield find_headers(source, revision, Path(made))


def _require_files(source: str) -> None:
    if not source:
        raise UsageError("SRC is empty; give a folder, a hub id or builtin:NAME")
    if source.startswith("random:"):
        raise UsageError(
            f"{source!r} has no files: its weights are drawn when it is loaded; "
            "give a folder, a hub id or builtin:NAME"
        )
