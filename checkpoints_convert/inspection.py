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

from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import ConfigError, Parsed, parse_config, with_d2f_adapter

from .accounting import unaccounted
from .comparing import Asked, compare
from .lora import read_adapter
from .meta import AGAIN, PARAMS, describe
from .naming import table_of
from .quantised import quantised
from .report import META, Report
from .shards import Stored, read_shards
from .spec import Placement, placements, tensor_shapes
from .tokenizer_files import present, read_facts, read_json

# Weights that lie beside the shards and are not read: without them a model would be another.
_OUTSIDE = {
    "mask_embedding.pt": "mask_embedding.pt replaces a row of the target's embedding (MiMo), which "
    "is not supported; use a draft whose mask is a row of that"
}
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def inspect(
    src: str | os.PathLike[str],
    *,
    lora: str | os.PathLike[str] | None = None,
    allow_extra: bool = False,
) -> Report:
    """Describe a checkpoint folder and list every problem, without reading weights.

    Args:
        src: A Hugging Face folder or a converted one.
        lora: The folder of a LoRA adapter for it.
        allow_extra: Tensors of unknown name become a note instead of a problem.
    """
    folder = Path(src)
    report = Report(source=os.fspath(src), folder=folder, kind="hf")
    if not folder.is_dir():
        return dataclasses.replace(report, problems=(_not_a_folder(folder),))
    if (folder / META).is_file():
        report = describe(folder, os.fspath(src))
    elif not (folder / "config.json").is_file():
        text = "no config.json in the folder; give the folder of a Hugging Face checkpoint"
        if (folder / PARAMS).is_dir():
            text = f"no {META} beside {PARAMS}, as converted folders have; {AGAIN}"
        return dataclasses.replace(report, problems=(text,))
    else:
        report = _described(report, allow_extra)
    return report if lora is None else _with_adapter(report, Path(lora))


def _described(report: Report, allow_extra: bool) -> Report:
    """The report on a Hugging Face folder."""
    folder = report.folder
    problems: list[str] = []
    parsed = _read_config(folder, problems)
    shards = read_shards(folder)
    problems += shards.problems
    notes = [*(parsed.notes if parsed else ()), *shards.notes]
    small = quantised(shards.tensors)
    problems += small
    places: tuple[Placement, ...] = ()
    if parsed is not None and not small:
        asked = _asked(folder, parsed, shards.tensors)
        differences, remarks = compare(asked, shards.tensors, allow_extra=allow_extra)
        problems += differences + unaccounted(asked.places, asked.shapes)
        problems += [_OUTSIDE[name] for name in _OUTSIDE if (folder / name).exists()]
        notes += remarks
        places = tuple(place for place in asked.places if place.name in shards.tensors)
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


def _with_adapter(report: Report, folder: Path) -> Report:
    """The report with what an adapter changes."""
    if report.kind != "hf":
        merged = f", and {report.adapter.source} is merged into it" if report.adapter else ""
        text = f"is a converted folder{merged}: adapters are merged when a checkpoint is converted"
        text += "; give the Hugging Face folder of the base"
        return dataclasses.replace(report, problems=(*report.problems, text))
    if report.problems or report.defaults is None:
        return report
    adapter, notes = read_adapter(folder, tensor_shapes(report.placements)), list(report.notes)
    base, name = _last(adapter.base), _last(_folder_name(report.folder))
    if base and base.lower() != name.lower():
        notes.append(f"the adapter was trained on {adapter.base} and goes into {name}")
    defaults = report.defaults
    if defaults.attention == "full":
        defaults = with_d2f_adapter(defaults)
        if "d2f" not in str(folder).lower():
            notes.append("the adapter is taken for one of D2F; name the strategy if it is not")
    return dataclasses.replace(
        report,
        adapter=adapter.facts,
        factors=adapter.factors,
        defaults=defaults,
        notes=tuple(notes),
        problems=adapter.problems,
    )


def _last(name: str) -> str:
    """The last part of a path, of a hub id, or of such in the hub's cache."""
    return name.rstrip("/").rsplit("/", 1)[-1].rsplit("--", 1)[-1]


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


def _asked(folder: Path, parsed: Parsed, held: Mapping[str, Stored]) -> Asked:
    """What the config asks for, in the form that the headers show."""
    cfg, table = parsed.config, table_of(parsed.family)
    shapes = arch_of(cfg).param_shapes(cfg)
    places = placements(table.rules_for(held), shapes)
    further = read_json(folder / "config.json").get("num_nextn_predict_layers")
    further_layers = further if isinstance(further, int) and further > 0 else 0
    return Asked(cfg, table, shapes, places, further_layers)


def _folder_name(folder: Path) -> str:
    """Name of a checkpoint by its folder; the hub's cache names it two levels up."""
    folder = folder.resolve()
    return folder.parent.parent.name if folder.parent.name == "snapshots" else folder.name


def _main_dtype(tensors: Mapping[str, Stored]) -> str | None:
    counts = Counter[str]()
    for tensor in tensors.values():
        if tensor.dtype in _NAMES:
            counts[_NAMES[tensor.dtype]] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else None
