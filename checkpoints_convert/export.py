"""Writing a parameter tree as an ordinary Hugging Face folder: the inverse of reading one."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .copying import KeyPath
from .dtypes import STORED, all_finite, raw
from .rules import Array, Placement, Tensor, find, placements, tensor_shapes
from .scaled import E4M3, Scaled
from .schemes import FP8_DYNAMIC, KEYS
from .tensor_names import Table

WriteLeaf = Callable[[KeyPath, Any], None]

_SCALE = "_scale"  # suffix of the name of a matrix
_ALIGNMENT = 8  # bytes: the header is padded to a multiple, and its length takes as much


def write_folder(
    params: Any, shapes: Any, folder: Path, table: Table, config: Mapping[str, Any]
) -> None:
    """Write `model.safetensors` and `config.json`; other files of the folder are unchanged.

    Each file is written under a temporary name and renamed, the weights first. An interrupted
    export leaves the complete old file or the complete new one.

    Args:
        params: The network's tree, on any device.
        shapes: Shapes and stored types of the tree.
        folder: Target folder, created if it is missing.
        table: The tensor names to write.
        config: The entries of `config.json`.
    """
    places = placements(table.rules_for(), shapes)
    folder.mkdir(parents=True, exist_ok=True)
    with _replaced(folder / "model.safetensors") as path, _leaves(path, places, shapes) as write:
        for leaf in dict.fromkeys(place.path for place in places):
            write(leaf, find(params, leaf))
    with _replaced(folder / "config.json") as path:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def fp8_folder(
    folder: Path,
    places: Sequence[Placement],
    shapes: Any,
    small: Container[KeyPath],
    table: Table,
    config: Mapping[str, Any],
) -> Generator[WriteLeaf, None, None]:
    """Write FP8-dynamic of compressed-tensors, leaf by leaf, in any order.

    Args:
        folder: An empty folder.
        places: The tensors; those in 8 bits must be matrices.
        shapes: Shapes and stored types of the tree in 16 bits.
        small: Leaves in 8 bits, given as `Scaled`: e4m3 with a float32 scale for each output.
        table: Names of the family. Its head is listed as 16-bit unless it is in `small`, even if it
            is tied and has no tensor.
        config: The entries of the source's `config.json`.

    Yields:
        A function to call with the key path and the value of every leaf: a NumPy array or `Scaled`.
    """
    kept = {name for name, shape in tensor_shapes(places).items() if len(shape) == 2}
    kept |= {table.lm_head, *table.kept}
    kept -= {place.name for place in places if place.path in small or place.path[-1] == "embed"}
    kept = sorted(name.removesuffix(".weight") for name in kept)
    entries = {key: value for key, value in config.items() if key not in KEYS}
    entries["quantization_config"] = {**FP8_DYNAMIC, "ignore": kept}
    text = json.dumps(entries, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    with _leaves(folder / "model.safetensors", places, shapes, small) as write:
        yield write


def tensors_of(
    places: Sequence[Placement], shapes: Any, small: Container[KeyPath] = ()
) -> list[Tensor]:
    """Name, shape and type of every tensor of a file, in file order.

    Args:
        places, shapes, small: As in `fp8_folder`.
    """
    kinds: dict[str, np.dtype[Any]] = {
        place.name: E4M3 if place.path in small else np.dtype(find(shapes, place.path).dtype)
        for place in places
    }
    held: list[Tensor] = []
    for name, shape in tensor_shapes(places).items():
        held.append((name, shape, kinds[name]))
        if kinds[name] == E4M3:
            held.append((name + _SCALE, (shape[0], 1), STORED["F32"]))
    return sorted(held, key=lambda one: (-one[2].itemsize, one[0]))  # keeps all aligned


@contextlib.contextmanager
def _leaves(
    path: Path, places: Sequence[Placement], shapes: Any, small: Container[KeyPath] = ()
) -> Generator[WriteLeaf, None, None]:
    """Write a safetensors file leaf by leaf; the library's writer would hold all tensors."""
    parts: dict[KeyPath, list[Placement]] = {}
    for place in places:
        parts.setdefault(place.path, []).append(place)
    held = tensors_of(places, shapes, small)
    kinds = {name: kind for name, _, kind in held}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    typed = {**{kind: key for key, kind in STORED.items()}, E4M3: "F8_E4M3"}
    first: dict[str, int] = {}  # first byte of each tensor
    end = 0
    for name, shape, kind in held:
        first[name], end = end, end + math.prod(shape) * kind.itemsize
        offsets = [first[name], end]
        header[name] = {"dtype": typed[kind], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:

        def write(leaf: KeyPath, value: Any) -> None:
            for place in parts[leaf]:
                for name, part, kind in _tensors(place, value, kinds[place.name]):
                    with np.errstate(over="ignore"):  # to Inf, which is refused
                        found = np.ascontiguousarray(part, kind)
                    if kind != E4M3 and not all_finite(found):
                        raise ValueError(
                            f"{name} holds NaN or Inf as {typed[kind]}, which load refuses; "
                            "give another dtype, or train again"
                        )
                    before = place.start * (found.nbytes // place.shape[0])
                    file.seek(_ALIGNMENT + len(text) + first[name] + before)
                    file.write(raw(found).data.cast("B"))

        file.write(len(text).to_bytes(_ALIGNMENT, "little") + text)
        yield write


def _tensors(
    place: Placement, leaf: Any, kind: np.dtype[Any]
) -> Iterator[tuple[str, Array, np.dtype[Any]]]:
    """Name, numbers and type of the tensor that a leaf fills, and of its scales."""
    if not isinstance(leaf, Scaled):
        yield place.name, place.part.view(np.asarray(leaf)), kind
        return
    yield place.name, leaf.form.values_of(place.part, leaf.values), kind
    yield place.name + _SCALE, leaf.form.scales_of(place.part, leaf.scales), STORED["F32"]


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
