"""Writing a parameter tree as an ordinary Hugging Face folder: the inverse of reading one."""

import contextlib
import json
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from checkpoints_convert import hf_dense
from checkpoints_convert.dtypes import as_dtype
from checkpoints_convert.spec import Array, find, placements
from dllm_jax.models.families import config_json


def export_hf(
    params: Any,
    cfg: Any,
    dst: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    family: str = "sdar",
    extra_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write `model.safetensors` and `config.json`; other files of the folder stay as they are.

    Each file is written beside its place and renamed into it, the weights first, so that an
    interrupted export leaves the old file or the new one and never half of one.

    Args:
        params: Tree in the form of `dllm_jax.models.dense.Params`, on any device.
        cfg: The network's `DenseConfig`.
        dst: Folder, made where it is missing.
        dtype: Type of every stored tensor.
        family: Whose `config.json` to write: "sdar" or "qwen3".
        extra_config: Further entries of `config.json`: `eos_token_id`, `pad_token_id`,
            `block_size`, and under `dllm_jax` the default strategy and its settings.

    Returns:
        The folder.
    """
    target, folder = as_dtype(dtype), Path(dst)
    tensors: dict[str, Array] = {}
    for place in placements(hf_dense.RULES, params):
        leaf = np.asarray(find(params, place.path))
        tensors[place.name] = place.part.view(leaf).astype(target, order="C").reshape(place.shape)
    folder.mkdir(parents=True, exist_ok=True)
    entries = {**config_json(family, cfg, dtype), **(extra_config or {})}
    with _replaced(folder / "model.safetensors") as path:
        save_file(tensors, path, {"format": "pt"})
    with _replaced(folder / "config.json") as path:
        path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    return folder


@contextlib.contextmanager
def _replaced(path: Path) -> Generator[Path, None, None]:
    """A path to write to; what is written takes the place of `path` if all went well."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
