"""A model as a Hugging Face folder, which `load` and transformers read back.

Config and tokenizer are those of the folder it was loaded from, where that is at hand; else the
config is written by the family's rules.
"""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dllm_jax.convert import tokenizer_files
from dllm_jax.convert.dtypes import as_dtype
from dllm_jax.convert.export import write_folder
from dllm_jax.convert.placing import placed
from dllm_jax.loading.load import load_family
from dllm_jax.loading.model import Model
from dllm_jax.loading.sources import LoadError, find_folder
from dllm_jax.models.families import Parsed, config_json, parse_config
from dllm_jax.models.family import Family
from dllm_jax.models.family_settings import OURS
from dllm_jax.models.family_table import family_named

_GENERATION = "generation_config.json"
_NOT_KEPT = ("quantization_config", "compression_config", "dtype", "torch_dtype", "dllm_jax")


def save(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    family: Family | str | None = None,
) -> Path:
    """Write a model: weights, config and tokenizer. The folder appears whole or not at all.

    Decoding defaults that differ from those of the config are stored under "dllm_jax". Code that
    the source's folder has for transformers (`auto_map`) is copied, and never run.

    Args:
        model: On one device, its weights in 16 or 32 bits.
        folder: A new or an empty one.
        dtype: Type of the tensors: "bfloat16", "float16", "float32"; None: the weights'.
        family: As of `load`, of a model of a family from outside.

    Returns:
        The folder.

    Raises:
        ValueError: The model cannot be written, or the folder is in use.
    """
    if model.quantization or model.has_quantized_head or model.split is not None:
        raise ValueError(
            f"{model!r} is in 8 bits or on several devices; load it with quantization='none' on "
            "one device, and save that"
        )
    target = Path(folder)
    row = family_named(model.defaults.family) if family is None else load_family(family)
    kind = str(model.params["final_norm"].dtype) if dtype is None else dtype
    source = _source(model)
    config = _config(model, row, source, target.name, family is not None)
    shapes = model.arch.param_shapes(model.config, as_dtype(kind))
    with placed(target, source or Path(os.devnull), force=False) as made:
        write_folder(model.params, shapes, made, row.table, {**config, "torch_dtype": kind})
        if model.tokenizer_source is not None:
            texts = model.tokenizer_source.folder
            _copy(texts, made, tokenizer_files.present(texts))
        if source is not None:
            code = [path.name for path in source.glob("*.py")] if "auto_map" in config else []
            _copy(source, made, [name for name in (_GENERATION, *code) if (source / name).exists()])
    return target.absolute()


def _copy(source: Path, target: Path, names: Any) -> None:
    for name in names:
        shutil.copyfile(source / name, target / name)


def _source(model: Model) -> Path | None:
    """The Hugging Face folder that a model was loaded from; None without one."""
    try:
        folder = find_folder(model.source) if not model.source.startswith("random:") else None
    except LoadError:
        return None
    return folder if folder is not None and (folder / "config.json").is_file() else None


def _config(
    model: Model, row: Family, source: Path | None, name: str, is_outside: bool
) -> dict[str, Any]:
    """A `config.json` that is read back as the model's config and defaults."""
    defaults = model.defaults
    ids = {"eos_token_id": list(defaults.stop_token_ids), "pad_token_id": defaults.pad_token_id}
    mask = model.config.mask_token_id
    if mask >= 0:
        ids["mask_token_id"] = mask
    tried: list[Mapping[str, Any]] = []
    if source is not None:
        read = tokenizer_files.read_json(source / "config.json")
        kept = {key: value for key, value in read.items() if key not in _NOT_KEPT}
        tied = row.table.keys.tied
        tried += [kept, {**kept, **({"mask_token_id": mask} if mask >= 0 else {})}]
        tried += [{**one, tied: model.config.tie_embeddings} for one in tried]
    if not is_outside:
        tried.append({**config_json(row.name, model.config), **ids})
    for config in tried:
        parsed = _parsed(config, row, name)
        if parsed is None or parsed.config != model.config:
            continue
        asked, given = dataclasses.asdict(defaults), dataclasses.asdict(parsed.defaults)
        own = {key: asked[key] for key in OURS if asked[key] not in (None, given[key])}
        again = {**config, "dllm_jax": own} if own else dict(config)
        if _parsed(again, row, name) is not None:
            return again
    raise ValueError(
        f"the config of {model!r} cannot be written as one of the family {row.name!r}; use "
        "checkpoints_convert.export_hf with a config of yours"
    )


def _parsed(config: Mapping[str, Any], row: Family, name: str) -> Parsed | None:
    try:
        return parse_config(config, name=name, family=row)
    except ValueError:
        return None
