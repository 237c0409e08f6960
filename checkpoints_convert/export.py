"""Writing a parameter tree as an ordinary Hugging Face folder: the inverse of reading one."""

import contextlib
import json
import math
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .dtypes import STORED, raw
from .packed import FP8_DYNAMIC, as_fp8
from .rules import Placement, Shape, find, placements, tensor_shapes
from .tensor_names import table_of

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
    leaves: Collection[str],
    family: str,
    config: Mapping[str, Any],
) -> None:
    """Write FP8-dynamic of compressed-tensors: e4m3, and a scale for each output.

    Args:
        params: The network's tree, NumPy arrays.
        shapes: Shapes and stored types of the tree.
        folder: An empty one.
        places: The tensors, under the names of the source.
        leaves: Leaves whose matrices are rounded, those of two axes.
        family: Whose head stays, also where it is tied and no tensor of its own.
        config: The entries of the source's `config.json`.
    """
    two = {name for name, shape in tensor_shapes(places).items() if len(shape) == 2}
    small = {place.name for place in places if place.name in two and place.path[-1] in leaves}
    embeddings = {place.name for place in places if place.path[-1] == "embed"}
    kept = (two - small - embeddings) | {table_of(family).lm_head}
    kept = sorted(name.removesuffix(".weight") for name in kept)
    _write(folder / "model.safetensors", places, params, shapes, small)
    entries = {**config, "quantization_config": {**FP8_DYNAMIC, "ignore": kept}}
    text = json.dumps(entries, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _write(
    path: Path,
    places: Sequence[Placement],
    params: Any,
    shapes: Any,
    small: Collection[str] = (),
) -> None:
    """A safetensors file, tensor by tensor: its own writer would hold all of them twice.

    Args:
        small: Matrices that are rounded to 8 bits; each has its scales before it.
    """
    parts: dict[str, list[Placement]] = {}
    for place in places:
        parts.setdefault(place.name, []).append(place)
    kinds = {name: find(shapes, parts[name][0].path).dtype for name in parts}
    wholes, start = tensor_shapes(places), 0
    # So that all are aligned.
    names = sorted(parts, key=lambda name: (name in small, -kinds[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    typed = {kind: key for key, kind in STORED.items()}

    def add(name: str, dtype: str, shape: Shape, itemsize: int) -> None:
        nonlocal start
        end = start + math.prod(shape) * itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end

    for name in names:
        shape = wholes[name]
        if name in small:
            add(f"{name}_scale", "BF16", (shape[0], 1), 2)
            add(name, "F8_E4M3", shape, 1)
        else:
            add(name, typed[kinds[name]], shape, kinds[name].itemsize)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_ALIGNMENT, "little") + text)
        for name in names:
            tensor = np.empty(wholes[name], kinds[name])
            for place in parts[name]:
                part = place.part.view(np.asarray(find(params, place.path)))
                rows = tensor[place.start : place.start + place.shape[0]]
                rows.reshape(part.shape)[...] = part
            if name in small:
                values, scales = as_fp8(tensor)
                file.write(raw(scales).data.cast("B"))
                file.write(values.view(np.uint8).data.cast("B"))
            else:
                file.write(raw(tensor).data.cast("B"))


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
