"""Writing a parameter tree as an ordinary Hugging Face folder: the inverse of reading one."""

import contextlib
import json
import math
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .dtypes import STORED, raw
from .packed import FP8_DYNAMIC
from .rules import Array, Placement, Shape, find, placements, tensor_shapes
from .scaled import E4M3, Scaled
from .tensor_names import table_of

_SCALE = "_scale"  # behind the name of a matrix
_ALIGNMENT = 8  # the header's length is a multiple of it, and stored in so many bytes


def write_folder(
    params: Any, shapes: Any, folder: Path, family: str, config: Mapping[str, Any]
) -> None:
    """Write `model.safetensors` and `config.json`; other files of the folder stay as they are.

    Each file is written beside its place and renamed, the weights first. An interrupted export
    leaves the old file or the new one, never half of one.

    Args:
        params: The network's tree, on any device.
        shapes: Shapes and stored types of the tree.
        folder: Made where it is missing.
        family: Whose tensor names to write.
        config: The entries of `config.json`.
    """
    places = placements(table_of(family).rules_for(), shapes)
    folder.mkdir(parents=True, exist_ok=True)
    with _replaced(folder / "model.safetensors") as path:
        _write(path, places, params, shapes)
    with _replaced(folder / "config.json") as path:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_fp8(
    params: Any,
    shapes: Any,
    folder: Path,
    places: Sequence[Placement],
    family: str,
    config: Mapping[str, Any],
) -> None:
    """Write FP8-dynamic of compressed-tensors: e4m3, and a float32 scale for each output.

    Args:
        params: The network's tree, NumPy arrays; leaves in 8 bits are `Scaled`.
        shapes: Shapes and stored types of the tree in 16 bits.
        folder: An empty one.
        places: The tensors, under the names of the source.
        family: Whose head stays, also where it is tied and no tensor of its own.
        config: The entries of the source's `config.json`.
    """
    two = {name for name, shape in tensor_shapes(places).items() if len(shape) == 2}
    small = {place.name for place in places if isinstance(find(params, place.path), Scaled)}
    embeddings = {place.name for place in places if place.path[-1] == "embed"}
    kept = (two - small - embeddings) | {table_of(family).lm_head}
    kept = sorted(name.removesuffix(".weight") for name in kept)
    _write(folder / "model.safetensors", places, params, shapes)
    entries = {**config, "quantization_config": {**FP8_DYNAMIC, "ignore": kept}}
    text = json.dumps(entries, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _write(path: Path, places: Sequence[Placement], params: Any, shapes: Any) -> None:
    """A safetensors file, tensor by tensor: its own writer would hold all of them twice."""
    parts: dict[str, list[Placement]] = {}
    for place in places:
        parts.setdefault(place.name, []).append(place)
    typed = {**{kind: key for key, kind in STORED.items()}, E4M3: "F8_E4M3"}
    held: list[tuple[str, Shape, np.dtype[Any]]] = []
    for name, shape in tensor_shapes(places).items():
        leaf = parts[name][0].path
        if isinstance(find(params, leaf), Scaled):
            held += [(name, shape, E4M3), (name + _SCALE, (shape[0], 1), STORED["F32"])]
        else:
            held.append((name, shape, np.dtype(find(shapes, leaf).dtype)))
    held.sort(key=lambda one: (-one[2].itemsize, one[0]))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape, kind in held:
        end = start + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": typed[kind], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_ALIGNMENT, "little") + text)
        for name, shape, kind in held:
            tensor = np.empty(shape, kind)
            for place in parts.get(name) or parts[name.removesuffix(_SCALE)]:
                part = _part(find(params, place.path), place, name not in parts)
                rows = tensor[place.start : place.start + place.shape[0]]
                rows.reshape(part.shape)[...] = part
            file.write(raw(tensor).data.cast("B"))


def _part(leaf: Any, place: Placement, is_scale: bool) -> Array:
    """What a tensor, or its scale, has of a leaf."""
    if not isinstance(leaf, Scaled):
        return place.part.view(np.asarray(leaf))
    if is_scale:
        return leaf.form.scales_of(place.part, leaf.scales)
    return leaf.form.values_of(place.part, leaf.values)


@contextlib.contextmanager
def _replaced(path: Path) -> Generator[Path, None, None]:
    """A path to write to; the file replaces `path` if no exception is raised."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
