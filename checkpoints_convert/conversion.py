"""The two ways in: a parameter tree in memory, or a converted folder on disk."""

import os
import shutil
from pathlib import Path
from typing import Any

from .copying import Progress
from .inspection import inspect
from .placing import placed, require_place
from .planning import plan
from .report import Report
from .weights import read_weights


def load_params(
    src: str | os.PathLike[str],
    dtype: str = "auto",
    progress: Progress | None = None,
    *,
    lora: str | os.PathLike[str] | None = None,
    allow_extra: bool = False,
) -> tuple[Any, Report]:
    """Read a checkpoint's weights into host memory.

    Args:
        src: A Hugging Face folder or a converted one.
        dtype: "auto" (the checkpoint's own), "bfloat16", "float32" or "float16".
        progress: Called with bytes read so far and in all, after each piece of a few megabytes.
        lora: The folder of a LoRA adapter to merge into a Hugging Face folder's weights.
        allow_extra: Leave tensors of unknown name out instead of refusing them.

    Returns:
        The parameter tree, and the report on the checkpoint.

    Raises:
        ConversionError: With every problem found.
    """
    report = inspect(src, lora=lora, allow_extra=allow_extra)
    report.require_ok()
    return _read(report, dtype, progress), report


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    dtype: str = "bfloat16",
    lora: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    allow_extra: bool = False,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Path:
    """Write a checkpoint as a converted folder: parameters in Orbax form, `meta.json`, tokenizer.

    The folder appears whole or not at all: it is made beside its place and renamed.

    Args:
        src: A Hugging Face folder.
        dst: Folder to make.
        dtype: Type of the leaves; "auto" is the checkpoint's own.
        lora: The folder of a LoRA adapter to merge into the weights.
        force: Replace an existing converted folder; anything else in its place is refused.
        allow_extra: Leave tensors of unknown name out instead of refusing them.
        progress: Called with bytes read and bytes in all.
        dry_run: Find out all that can be told without reading weights, and write nothing;
            `planning.plan` tells the sizes.

    Returns:
        The folder.

    Raises:
        ConversionError: With every problem found; nothing is written then.
        FileExistsError: If the folder is there and may not be replaced.
        OSError: If the folder cannot be written or does not fit, found out before weights are read.
        ValueError: If `dst` is `src` or holds it.
    """
    report = inspect(src, lora=lora, allow_extra=allow_extra)
    report.require_ok()
    target = Path(dst)
    require_place(target, Path(src), force=force)
    _require_space(target, plan(report, dtype).result_bytes)
    if dry_run:
        return target.absolute()
    with placed(target, Path(src), force=force) as folder:
        from . import orbax_io

        orbax_io.save(_read(report, dtype, progress), report, folder)
    return target.absolute()


def _require_space(target: Path, size: int) -> None:
    """The disk of `target` has room for the result; an old folder goes only when it is complete."""
    there = next(folder for folder in target.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < size:
        raise OSError(
            f"{str(target)!r} needs {size / 1e9:.2f} GB but {str(there)!r} has {free / 1e9:.2f} GB "
            "free; choose another destination"
        )


def _read(report: Report, dtype: str, progress: Progress | None) -> Any:
    """The weights of an inspected checkpoint without problems."""
    if report.kind == "converted":
        from . import orbax_io

        return orbax_io.restore(report, dtype, progress)
    return read_weights(report, dtype, progress)
