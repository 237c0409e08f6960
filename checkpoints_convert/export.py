"""Writing a parameter tree as an ordinary Hugging Face folder: the inverse of reading one."""

import contextlib
import json
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from checkpoints_convert.dtypes import as_dtype
from checkpoints_convert.naming import table_of
from checkpoints_convert.spec import Array, find, placements, tensor_shapes
from dllm_jax.models.architecture import arch_of
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
        params: The network's tree, on any device.
        cfg: The network's `DenseConfig` or `MoEConfig`.
        dst: Folder, made where it is missing.
        dtype: Type of every stored tensor but those that stay float32.
        family: Whose names and `config.json` to write.
        extra_config: Further entries of `config.json`: `eos_token_id`, `pad_token_id`,
            `block_size`, and under `dllm_jax` the default strategy and its settings.

    Returns:
        The folder.
    """
    folder = Path(dst)
    shapes = arch_of(cfg).param_shapes(cfg, as_dtype(dtype))
    places = placements(table_of(family).rules_for(), shapes)
    wholes, tensors = tensor_shapes(places), dict[str, Array]()
    for place in places:
        if place.name not in tensors:
            kind = find(shapes, place.path).dtype
            tensors[place.name] = np.empty(wholes[place.name], kind)
        part = place.part.view(np.asarray(find(params, place.path)))
        rows = tensors[place.name][place.start : place.start + place.shape[0]]
        rows.reshape(part.shape)[...] = part
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
