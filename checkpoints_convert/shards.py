"""The safetensors files of a checkpoint and the tensors in their headers.

Only headers and the index are read, never weights. The index, if there is one, names the files.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .rules import Shape, listed
from .tokenizer_files import json_object, read_json

ADAPTER = "adapter_model.safetensors"  # weights of a LoRA adapter

_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5", ".npz")
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its header
# Pieces of tensor names, with the quantisation method they indicate; the first match counts.
_PIECES = {
    ".weight_scale_inv": "fp8, blockwise",
    ".weight_packed": "compressed-tensors",
    ".weight_shape": "compressed-tensors",
    ".weight_zero_point": "compressed-tensors",
    ".weight_scale": "fp8",
    ".input_scale": "fp8",
    ".g_idx": "GPTQ",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".scales": "GPTQ or AWQ",
    ".absmax": "bitsandbytes",
    "quant_state": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
_READ = ("fp8, blockwise", "fp8", "compressed-tensors", "GPTQ", "GPTQ or AWQ")  # if described
_SMALL_TYPES = ("F8_", "F4", "F6_", "I8", "U8")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor as a header describes it: its file, safetensors type name and shape.

    Attributes:
        offset: Byte of the file where its elements start.
    """

    file: str
    dtype: str
    shape: Shape
    offset: int = 0


@dataclasses.dataclass
class Shards:
    """All tensors in the headers of a folder, and the problems found."""

    files: tuple[str, ...] = ()
    tensors: dict[str, Stored] = dataclasses.field(default_factory=dict[str, Stored])
    problems: list[str] = dataclasses.field(default_factory=list[str])
    notes: list[str] = dataclasses.field(default_factory=list[str])


def read_shards(folder: Path) -> Shards:
    """Headers of every file that belongs to the checkpoint in `folder`."""
    shards = Shards()
    weight_map = _weight_map(folder, shards)
    if weight_map is None:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if ADAPTER in names:
            names.remove(ADAPTER)
            shards.notes.append(f"{ADAPTER} is not read; give its folder as lora (--lora)")
        if not names and not shards.problems:
            shards.problems.append(_no_weights(folder))
    else:
        names = sorted(set(weight_map.values()))
    shards.files = tuple(name for name in names if _is_here(folder, name, shards))
    for name in shards.files:
        read_header(folder / name, shards)
    if weight_map is not None:
        _check_index(weight_map, shards)
    return shards


def quantised(tensors: Mapping[str, Stored], is_told: bool) -> list[str]:
    """A problem for each quantisation method, recognised by the names and types of tensors.

    Args:
        is_told: The config states how matrices are stored, and `tensors` are not among them.
    """
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        method = next((m for piece, m in _PIECES.items() if piece in name), None)
        if method is None and tensor.dtype.startswith(_SMALL_TYPES):
            method = "fp8" if tensor.dtype.startswith("F8_") else tensor.dtype
        if method is not None:
            found.setdefault(method, []).append(f"{name} ({tensor.dtype})")
    problems: list[str] = []
    for method, names in found.items():
        what, remedy = "which is not supported", "use the bfloat16 checkpoint"
        if not is_told and method in _READ:
            what = "and config.json has no quantization_config, which would say how"
            remedy = f"download it again, or {remedy}"
        problems.append(f"the weights are quantised ({method}), {what}; {remedy}: {listed(names)}")
    return problems


def open_tensors(path: Path) -> Any:
    """A lazy reader of one file; opening it checks the header."""
    opener: Any = safe_open  # an untyped class of the extension module
    return opener(path, framework="numpy")


def _weight_map(folder: Path, shards: Shards) -> dict[str, str] | None:
    """The file of each tensor by the index; None if the folder has no index."""
    path = folder / _INDEX
    if not path.exists():
        return None
    try:
        index = read_json(path)
    except ValueError as error:
        shards.problems.append(str(error))
        return {}
    weight_map = json_object(index.get("weight_map"))
    if not weight_map:
        shards.problems.append(f'{_INDEX} has no "weight_map"; download it again')
        return {}
    weight_map = {name: str(file) for name, file in weight_map.items()}
    total = json_object(index.get("metadata")).get("total_size")
    have = sum(
        os.path.getsize(folder / name)
        for name in set(weight_map.values())
        if os.path.isfile(folder / name)  # Path.is_file raises for a name that is too long
    )
    if isinstance(total, int) and total > have > 0:
        shards.notes.append(f"{_INDEX} states total_size={total} bytes but its files hold {have}")
    return weight_map


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        return (
            f"only {listed(pickles)} and no .safetensors: such files can run code when they are "
            "read and are refused; get the safetensors version, or write it with save_pretrained"
        )
    return "no .safetensors file in the folder; download the weights"


def _is_here(folder: Path, name: str, shards: Shards) -> bool:
    if Path(name).name != name or "\\" in name:
        shards.problems.append(f"{_INDEX} names {name!r}, which lies outside the folder; refused")
    elif not name.endswith(".safetensors"):
        shards.problems.append(f"{_INDEX} names {name!r}; only .safetensors files are read")
    elif not os.path.isfile(folder / name):
        shards.problems.append(f"{name} is named by {_INDEX} but missing; download it again")
    else:
        return True
    return False


def read_header(path: Path, shards: Shards) -> None:
    """Add the tensors of one file to `shards`, or the reason why it cannot be read."""
    reason = _damage(path)
    if reason is None:
        try:
            tensors = _tensors(path)
        except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
            reason = f"is truncated or corrupt ({error})"
        else:
            for name, stored in tensors.items():
                first = shards.tensors.setdefault(name, stored)
                if first is not stored:
                    shards.problems.append(
                        f"{name} is in both {first.file} and {stored.file}; keep one of them"
                    )
    if reason is not None:
        shards.problems.append(f"{path.name} {reason}; download it again")


def _tensors(path: Path) -> dict[str, Stored]:
    """The entries of a header that safetensors' own reader accepts."""
    with open_tensors(path) as file, path.open("rb") as raw:
        size = int.from_bytes(raw.read(_LENGTH_BYTES), "little")
        entries = json_object(json.loads(raw.read(size)))
        start, tensors = _LENGTH_BYTES + size, dict[str, Stored]()
        for name in file.keys():  # noqa: SIM118 (the handle is no mapping)
            entry = entries[name]
            offset = start + int(entry["data_offsets"][0])
            tensors[name] = Stored(path.name, entry["dtype"], tuple(entry["shape"]), offset)
    return tensors


def _damage(path: Path) -> str | None:
    """The reason why a file is plainly wrong, clearer than safetensors' own error."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
    if not size:
        return "is empty (0 bytes)"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights (run `git lfs pull`)"
    # A header's length may begin with the same bytes, but then the header follows.
    begins_as_pickle = head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04"))
    if begins_as_pickle and head[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        return "is a pickle renamed to .safetensors, which is refused"
    header = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if size < _LENGTH_BYTES or size < _LENGTH_BYTES + header:
        needs = _LENGTH_BYTES + header
        return f"is truncated or no safetensors file: {size} bytes, its header alone needs {needs}"
    return None


def _check_index(weight_map: dict[str, str], shards: Shards) -> None:
    """Add problems if the index and the headers disagree."""
    readable = {stored.file for stored in shards.tensors.values()}
    lies = [
        f"{name} ({file})"
        for name, file in sorted(weight_map.items())
        if file in readable and shards.tensors.get(name, Stored("", "", ())).file != file
    ]
    if lies:
        shards.problems.append(f"{_INDEX} lists tensors its files do not hold: {listed(lies)}")
    unlisted = [f"{n} ({t.file})" for n, t in sorted(shards.tensors.items()) if n not in weight_map]
    if weight_map and unlisted:
        shards.problems.append(f"{_INDEX} does not list {listed(unlisted)}")
