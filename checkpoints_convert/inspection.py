"""Inspection of a checkpoint without loading it: family, sizes and every problem.

Data flow: folder -> config and tokenizer facts -> family and shapes -> headers of the shards ->
differences. `weights` makes the checks that need values: NaN, and a tied head that is no copy of
the embedding. A converted folder is described from its `meta.json`.
"""

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .comparing import Asked, compare
from .config.fields import ConfigError
from .converted import AGAIN, PARAMS, describe
from .lora import read_adapter
from .networks import Networks
from .packed import Packed, matrices
from .report import META, Report
from .rules import Placement, placements, tensor_shapes
from .schemes import Scheme, read_scheme, unread_notes
from .shards import Shards, Stored, quantised, read_shards
from .tensor_names import Table
from .tokenizer_files import present, read_facts, read_json
from .weights import has_own_head

# By family: weights outside the shards that are not read, although the model depends on them.
_UNO, _MIMO = "adapter/adapter_config.json", "mask_embedding.pt"
_OUTSIDE = {
    ("sdar", _UNO): f"{_UNO} makes this Uno, whose adapter is on while it drafts and off while it "
    "judges, which is not supported; planned",
    ("dflash", _MIMO): f"{_MIMO} replaces a row of the target's embedding (MiMo), which is not "
    "supported; use a draft whose mask is a row of that",
}
_MOST_EXPERTS = 100_000  # allowed over all layers beyond those with tensors in the files
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def inspect(
    src: str | os.PathLike[str],
    networks: Networks,
    lora: str | os.PathLike[str] | None,
    allow_extra: bool,
) -> Report:
    """Describe a checkpoint folder; see `dllm_jax.loading.checkpoints.inspect`."""
    folder = Path(src)
    report = Report(source=os.fspath(src), folder=folder, kind="hf")
    if not os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        return dataclasses.replace(report, problems=(_not_a_folder(folder),))
    if (folder / META).exists():
        report = describe(folder, os.fspath(src), networks)
    elif not (folder / "config.json").exists():
        text = "no config.json in the folder; give the folder of a Hugging Face checkpoint"
        if (folder / PARAMS).is_dir():
            text = f"no {META} beside {PARAMS}, as converted folders have; {AGAIN}"
        return dataclasses.replace(report, problems=(text,))
    else:
        report = _described(report, networks, allow_extra)
    return report if lora is None else _with_adapter(report, networks, Path(lora))


def _described(report: Report, networks: Networks, allow_extra: bool) -> Report:
    """The report on a Hugging Face folder."""
    folder = report.folder
    problems: list[str] = []
    parsed = _read_config(folder, networks, problems)
    shards = read_shards(folder)
    problems += shards.problems
    notes = [*(parsed.notes if parsed else ()), *shards.notes]
    table = parsed and networks.table_of(parsed.family)
    is_tied = table and table.has_own_head and parsed.config.tie_embeddings
    if is_tied and has_own_head(folder, shards.tensors, table):
        cfg = dataclasses.replace(parsed.config, tie_embeddings=False)
        parsed = parsed._replace(config=cfg)
        notes.append(f"{table.lm_head} differs from the embedding, so it is used: not tied")
    param_shapes = parsed and functools.partial(networks.param_shapes, parsed.config)
    known = len(problems)
    scheme, packed = _unpack(folder, shards, problems, notes)
    small = quantised(shards.tensors, scheme is not None)
    problems += small if len(problems) == known else []  # skip consequences of earlier problems
    places: tuple[Placement, ...] = ()
    if param_shapes is not None and (text := _too_many(param_shapes(np.float32), shards.tensors)):
        problems.append(text)
    elif param_shapes is not None and not small:
        asked = _asked(folder, parsed, table, param_shapes(np.float32), shards.tensors)
        differences, remarks = compare(asked, shards.tensors, allow_extra=allow_extra)
        problems += differences
        problems += [
            reason
            for (family, name), reason in _OUTSIDE.items()
            if family == parsed.family and (folder / name).exists()
        ]
        notes += remarks
        places = tuple(place for place in asked.places if place.name in shards.tensors)
    return dataclasses.replace(
        report,
        family=parsed.family if parsed else None,
        table=table or None,
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
        param_shapes=param_shapes,
        placements=places,
        stored=shards.tensors,
        scheme=scheme,
        packed=packed,
        loads_small=parsed and functools.partial(networks.loads_small, parsed.config),
    )


def _unpack(
    folder: Path, shards: Shards, problems: list[str], notes: list[str]
) -> tuple[Scheme | None, dict[str, Packed]]:
    """The scheme and the packed matrices of a folder; renames them in `shards` as in 16 bits."""
    try:
        config = read_json(folder / "config.json")
        scheme = read_scheme(folder, config)
        notes += unread_notes(folder, config)
    except ValueError as error:
        if not any(str(error) in problem for problem in problems):
            problems.append(str(error))
        return None, {}
    if scheme is None:
        return None, {}
    shards.tensors, packed, wrong = matrices(folder, scheme, shards.tensors)
    problems += wrong
    if not packed and not wrong and not shards.problems:
        problems.append(
            f"the config says {scheme.name} but no tensor is named *.{scheme.values} in that form; "
            "download it again"
        )
    return scheme, packed


def _with_adapter(report: Report, networks: Networks, folder: Path) -> Report:
    """The report after an adapter is merged."""
    if report.kind != "hf":
        merged = f", and {report.adapter.source} is merged into it" if report.adapter else ""
        text = f"is a converted folder{merged}: adapters are merged when a checkpoint is converted"
        text += "; give the Hugging Face folder of the base"
        return dataclasses.replace(report, problems=(*report.problems, text))
    if report.problems or report.defaults is None:
        return report
    adapter = read_adapter(folder, tensor_shapes(report.placements))
    notes = [*report.notes, *adapter.notes]
    base, name = _last(adapter.base), _last(_folder_name(report.folder))
    if base and base.lower() != name.lower():
        notes.append(f"the adapter was trained on {adapter.base} and goes into {name}")
    defaults = report.defaults
    if defaults.attention == "full":
        defaults = networks.with_d2f_adapter(defaults)
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
    """The last part of a path, of a hub id, or of a folder name in the hub's cache."""
    return name.rstrip("/").rsplit("/", 1)[-1].rsplit("--", 1)[-1]


def _not_a_folder(path: Path) -> str:
    if os.path.isfile(path):
        return "is a file; give the folder that holds config.json and the .safetensors files"
    return "does not exist; give the folder of a checkpoint"


def _read_config(folder: Path, networks: Networks, problems: list[str]) -> Any:
    """The parsed config, or None with the reasons added to `problems`."""
    try:
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        generation_config = read_json(generation) if generation.exists() else None
        facts = read_facts(folder)
        return networks.parse_config(config, generation_config, facts, name=_folder_name(folder))
    except ConfigError as error:
        problems += [f"config.json: {problem}" for problem in error.problems]
    except ValueError as error:
        problems.append(str(error))
    return None


def _asked(
    folder: Path, parsed: Any, table: Table, shapes: Any, held: Mapping[str, Stored]
) -> Asked:
    """The tensors that the config requires, in the form found in the headers."""
    places = placements(table.rules_for(held), shapes)
    further = read_json(folder / "config.json").get("num_nextn_predict_layers")
    further_layers = further if isinstance(further, int) and further > 0 else 0
    return Asked(parsed.config, table, shapes, places, further_layers)


def _too_many(shapes: Any, held: Mapping[str, Stored]) -> str | None:
    """A problem if the config has far more experts than the files have tensors.

    Checked first, since the next step makes a name for each expert.
    """
    leaves = [layer["experts_down"] for layer in shapes["layers"] if "experts_down" in layer]
    experts = sum(leaf.shape[0] for leaf in leaves)
    if experts <= _MOST_EXPERTS + 10 * len(held):
        return None
    return (
        f"num_experts={leaves[0].shape[0]} asks for {experts} experts in all but the files hold "
        f"{len(held)} tensor(s); correct config.json"
    )


def _folder_name(folder: Path) -> str:
    """The name of a checkpoint: that of its folder, or in the hub's cache two levels up."""
    folder = folder.resolve()
    return folder.parent.parent.name if folder.parent.name == "snapshots" else folder.name


def _main_dtype(tensors: Mapping[str, Stored]) -> str | None:
    counts = Counter[str]()
    for tensor in tensors.values():
        if tensor.dtype in _NAMES:
            counts[_NAMES[tensor.dtype]] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else None
