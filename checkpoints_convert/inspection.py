"""Looking at a checkpoint without loading it: family, sizes and every problem there is to find.

Data flow: folder -> config and tokenizer facts -> family and shapes -> headers of the shards ->
differences. Only what needs the weights themselves (NaN, a head that is a copy of the embedding)
is left to `weights`. A converted folder is described from its own `meta.json`.
"""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from checkpoints_convert import hf_dense
from checkpoints_convert.dtypes import STORED
from checkpoints_convert.report import META, Report
from checkpoints_convert.shards import Shards, Stored, read_shards
from checkpoints_convert.spec import Placement, is_known, listed, placements
from checkpoints_convert.tokenizer_files import present, read_facts, read_json
from dllm_jax.models.dense import DenseConfig, param_shapes
from dllm_jax.models.families import ConfigError, Parsed, parse_config

_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Pieces of tensor names that only quantised checkpoints have, and the method they betray.
_QUANTISED = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".scales": "GPTQ or AWQ",
    ".weight_scale": "fp8",
    ".absmax": "bitsandbytes",
    "quant_state": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
_SMALL_TYPES = ("F8_", "F4", "F6_", "I8", "U8")


def inspect(src: str | os.PathLike[str], *, allow_extra: bool = False) -> Report:
    """Describe a checkpoint folder and list every problem, without reading weights.

    Args:
        src: A Hugging Face folder or a converted one.
        allow_extra: Tensors of unknown name become a note instead of a problem.
    """
    folder = Path(src)
    report = Report(source=os.fspath(src), folder=folder, kind="hf")
    if not folder.is_dir():
        return dataclasses.replace(report, problems=(_not_a_folder(folder),))
    if (folder / META).is_file():
        from checkpoints_convert.orbax_io import describe

        return describe(folder, os.fspath(src))
    if not (folder / "config.json").is_file():
        text = "no config.json in the folder; give the folder of a Hugging Face checkpoint"
        return dataclasses.replace(report, problems=(text,))
    problems: list[str] = []
    parsed = _read_config(folder, problems)
    shards = read_shards(folder)
    problems += shards.problems
    notes = [*(parsed.notes if parsed else ()), *shards.notes]
    quantised = _quantised(shards.tensors)
    problems += quantised
    places: tuple[Placement, ...] = ()
    if parsed is not None and not quantised:
        places = placements(hf_dense.RULES, param_shapes(parsed.config))
        places = _compare(places, shards, parsed.config, allow_extra, problems, notes)
    return dataclasses.replace(
        report,
        family=parsed.family if parsed else None,
        config=parsed.config if parsed else None,
        defaults=parsed.defaults if parsed else None,
        dtype=_main_dtype(shards.tensors),
        num_tensors=len(shards.tensors),
        num_params=sum(math.prod(t.shape) for t in shards.tensors.values()),
        num_bytes=sum((folder / name).stat().st_size for name in shards.files),
        shapes={name: t.shape for name, t in shards.tensors.items()},
        files=shards.files,
        tokenizer_files=present(folder),
        problems=tuple(problems),
        notes=tuple(notes),
        placements=places,
        stored=shards.tensors,
    )


def _not_a_folder(path: Path) -> str:
    if path.is_file():
        return "is a file; give the folder that holds config.json and the .safetensors files"
    return "does not exist; give the folder of a checkpoint"


def _read_config(folder: Path, problems: list[str]) -> Parsed | None:
    """The parsed config, or None with the reasons added to `problems`."""
    try:
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        generation_config = read_json(generation) if generation.is_file() else None
        facts = read_facts(folder)
        return parse_config(config, generation_config, facts, name=_folder_name(folder))
    except ConfigError as error:
        problems += [f"config.json: {problem}" for problem in error.problems]
    except ValueError as error:
        problems.append(str(error))
    return None


def _folder_name(folder: Path) -> str:
    """Name of a checkpoint by its folder; the hub's cache names it two levels up."""
    folder = folder.resolve()
    return folder.parent.parent.name if folder.parent.name == "snapshots" else folder.name


def _quantised(tensors: Mapping[str, Stored]) -> list[str]:
    """A problem for each method of quantisation that names or types betray."""
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        method = next((m for piece, m in _QUANTISED.items() if piece in name), None)
        if method is None and tensor.dtype.startswith(_SMALL_TYPES):
            method = "fp8" if tensor.dtype.startswith("F8_") else tensor.dtype
        if method is not None:
            found.setdefault(method, []).append(f"{name} ({tensor.dtype})")
    return [
        f"the weights are quantised ({method}), which is not supported; use the bfloat16 "
        f"checkpoint: {listed(names)}"
        for method, names in found.items()
    ]


def _compare(
    wanted: tuple[Placement, ...],
    shards: Shards,
    cfg: DenseConfig,
    allow_extra: bool,
    problems: list[str],
    notes: list[str],
) -> tuple[Placement, ...]:
    """Differences between what the config asks for and what the headers hold.

    Returns:
        The placements that can be filled.
    """
    names = {place.name for place in wanted}
    missing = [place.name for place in wanted if place.name not in shards.tensors]
    if shards.tensors and hf_dense.LM_HEAD in missing:
        missing.remove(hf_dense.LM_HEAD)
        problems.append(
            f"{hf_dense.LM_HEAD} is missing although tie_word_embeddings is false; set it to true "
            "in config.json only if the model was trained with a tied head"
        )
    if shards.tensors and missing:
        problems.append(f"{len(missing)} tensor(s) missing: {listed(missing)}")
    extra = [name for name in shards.tensors if name not in names and not _may_drop(name, cfg)]
    past_end = [name for name in extra if is_known(hf_dense.RULES, name)]
    if past_end:
        problems.append(
            f"num_hidden_layers={cfg.num_layers} but the files go on: {listed(past_end)}; "
            "correct config.json"
        )
    unknown = [name for name in extra if name not in past_end]
    if unknown:
        text = f"{len(unknown)} tensor(s) of unknown name: {listed(unknown)}"
        if allow_extra:
            notes.append(f"{text}; not read")
        else:
            problems.append(f"{text}; --allow-extra leaves them out")
    for place in wanted:
        tensor = shards.tensors.get(place.name)
        if tensor is not None:
            problems += _tensor_problems(place, tensor)
    return tuple(place for place in wanted if place.name in shards.tensors)


def _may_drop(name: str, cfg: DenseConfig) -> bool:
    """Whether an unneeded tensor is harmless; a tied head is compared when weights are read."""
    if name == hf_dense.LM_HEAD:
        return cfg.tie_embeddings
    return any(pattern.fullmatch(name) for pattern in hf_dense.IGNORED)


def _tensor_problems(place: Placement, tensor: Stored) -> list[str]:
    problems: list[str] = []
    if tensor.dtype not in STORED:
        problems.append(
            f"{place.name} has type {tensor.dtype}; weights must be {', '.join(STORED)}"
        )
    if tensor.shape != place.shape:
        if place.name == hf_dense.EMBED and tensor.shape[1:] == place.shape[1:]:
            text = (
                f"has {tensor.shape[0]} rows but vocab_size={place.shape[0]}; correct config.json"
            )
        else:
            text = f"has shape {list(tensor.shape)}, expected {list(place.shape)}"
        problems.append(f"{place.name} {text}")
    return problems


def _main_dtype(tensors: Mapping[str, Stored]) -> str | None:
    counts = Counter[str]()
    for tensor in tensors.values():
        if tensor.dtype in _NAMES:
            counts[_NAMES[tensor.dtype]] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else None
