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
from .rules import Placement, find, placements, tensor_shapes
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


def _write(path: Path, places: Sequence[Placement], params: Any, shapes: Any) -> None:
    """A safetensors file, tensor by tensor: its own writer would hold all of them twice."""
    parts: dict[str, list[Placement]] = {}
    for place in places:
        parts.setdefault(place.name, []).append(place)
    kinds = {name: find(shapes, parts[name][0].path).dtype for name in parts}
    wholes, start = tensor_shapes(places), 0
    names = sorted(parts, key=lambda name: (-kinds[name].itemsize, name))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name in names:
        end = start + math.prod(wholes[name]) * kinds[name].itemsize
        header[name] = {
            "dtype": next(key for key, kind in STORED.items() if kind == kinds[name]),
            "shape": wholes[name],
            "data_offsets": [start, end],
        }
        start = end
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
