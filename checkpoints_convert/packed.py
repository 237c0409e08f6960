"""Matrices stored in 4 or 8 bits, unpacked.

Data flow: a `Scheme` -> the tensors that belong to one matrix -> a `Packed` matrix with the name
and shape of its 16-bit form. Reading it returns rows rounded as by the packages that write these
folders, so that a folder loads like any other. Scales are checked before memory is allocated.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .rules import Array, Shape, listed
from .schemes import FP4_GROUP, Scheme
from .schemes import FP8_DYNAMIC as FP8_DYNAMIC  # what `export` writes and this file reads
from .shards import Stored

_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_np: Any = np  # `repeat` and `stack` are only partly typed
_FLOATS = ("BF16", "F16", "F32")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_MOST_SCALE = float(np.finfo(np.float32).max) / 448  # largest number in e4m3
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # nibble of each of eight columns
# Tensors of a matrix that only matter to quantised activations or a quantised cache.
_UNREAD = (
    *("input_scale", "input_global_scale", "input_zero_point", "output_scale"),
    *("q_scale", "k_scale", "v_scale"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A matrix [out, in] of fewer bits.

    Attributes:
        parts: Its tensors, by the suffixes of their names.
    """

    name: str
    shape: Shape
    scheme: Scheme
    folder: Path
    parts: Mapping[str, Stored]

    @property
    def dtype(self) -> str:
        """The 16-bit type of the unpacked matrix."""
        kind = self.parts[self.scheme.scale].dtype
        return "F16" if kind == "F16" else "BF16"

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(math.prod(p.shape) * _DTYPES[p.dtype].itemsize for p in self.parts.values())

    def read(self, start: int, count: int) -> Array:
        """`count` numbers from number `start` on, in C order and float32."""
        width = self.shape[1]
        first, last = start // width, -(-(start + count) // width)
        rows = _ROWS[self.scheme.kind](self, first, last)
        kind = _DTYPES[self.parts[self.scheme.scale].dtype]
        if kind.itemsize == 2:  # the packages compute in the type of the scales
            rows = rows.astype(kind)
        flat = rows.astype(np.float32).reshape(-1)
        return flat[start - first * width :][:count]

    def problems(self) -> Iterator[str]:
        """Problems of the values of scales, zero points, groups and the stored shape."""
        scheme = self.scheme
        for end in filter(None, (scheme.scale, scheme.whole)):
            found = self.all(end).astype(np.float32)
            name = f"{self.stem}.{end}"
            if not np.isfinite(found).all():
                yield f"{name} holds NaN or Inf; download it again"
            elif not found.all() and not (scheme.kind == "fp4" and end == scheme.scale):
                yield f"{name} holds a zero, so its weights are lost; quantise the model again"
            elif scheme.kind in ("float", "fp4") and found.min() < 0:
                yield f"{name} holds {found.min():.3g}; a scale is positive; download it again"
            elif scheme.kind == "float" and found.max() > _MOST_SCALE:
                yield f"{name} holds {found.max():.3g}: its weights overflow; download it again"
        zeros = "weight_zero_point"
        if scheme.kind == "float" and zeros in self.parts and self.all(zeros).astype(int).any():
            yield f"{self.stem}.{zeros} is not zero, which is not supported for fp8"
        for end in ("g_idx", "weight_g_idx"):
            if end in self.parts:
                found, most = self.all(end), _groups(self)
                if found.min() < 0 or found.max() >= most:
                    wrong = found.min() if found.min() < 0 else found.max()
                    text = f"{self.stem}.{end} names group {wrong} of {most}"
                    yield f"{text}; download it again"
        if "weight_shape" in self.parts:
            found = tuple(self.all("weight_shape").tolist())
            if found != self.shape:
                yield (
                    f"{self.stem}.weight_shape says {list(found)} but "
                    f"{self.stem}.{scheme.values} holds {list(self.shape)}; download it again"
                )

    @property
    def is_by_output(self) -> bool:
        """Whether it is e4m3 with one scale for each output or for the matrix."""
        return self.scheme.kind == "float" and self.scheme.block is None and _groups(self) == 1

    def scales(self, start: int, count: int) -> Array:
        """Scales of `count` outputs from number `start` on, of a matrix that `is_by_output`."""
        found = self.all(self.scheme.scale).astype(np.float32).reshape(-1)
        return _np.broadcast_to(found, self.shape[:1])[start : start + count]

    @property
    def stem(self) -> str:
        """The name of the module."""
        return self.name.removesuffix(".weight")

    def all(self, end: str) -> Array:
        """The whole part with this suffix."""
        return self.cut(end, ())

    def cut(self, end: str, index: Any) -> Array:
        """A copy of a slice of a part: the file may not be aligned to its type."""
        part = self.parts[end]
        kind = _DTYPES[part.dtype]
        shape = (*part.shape, kind.itemsize)
        found = np.memmap(self.folder / part.file, np.uint8, "r", part.offset, shape)[index]
        return np.array(found).view(kind)[..., 0]


# --- reading the scheme -------------------------------------------------------------------------


# --- grouping the tensors of a matrix -----------------------------------------------------------


def matrices(
    folder: Path, scheme: Scheme, tensors: Mapping[str, Stored]
) -> tuple[dict[str, Stored], dict[str, Packed], list[str]]:
    """The folder's tensors in their 16-bit form, the packed ones among them, and problems."""
    kinds = {"float": "F8_E4M3", "fp4": "U8"}
    kind = kinds.get(scheme.kind, "I32")
    whole, found, problems = dict(tensors), dict[str, Packed](), list[str]()
    for name, stored in tensors.items():
        stem, _, end = name.rpartition(".")
        if end != scheme.values or stored.dtype != kind or not stem:
            continue
        needed, optional = _ends(scheme)
        parts = {
            e: tensors[f"{stem}.{e}"] for e in (*needed, *optional) if f"{stem}.{e}" in tensors
        }
        packed = Packed(
            name=f"{stem}.weight",
            shape=_shape(scheme, stored.shape),
            scheme=scheme,
            folder=folder,
            parts=parts,
        )
        for each in (*parts, *_UNREAD):
            whole.pop(f"{stem}.{each}", None)
        missing = [f"{stem}.{each}" for each in needed if each not in parts]
        wrong = [f"{listed(missing)} missing beside {name}; download it again"] if missing else []
        wrong = wrong or list(_misshapen(packed))
        problems += wrong
        # List a malformed matrix as present, so that it is not also reported missing.
        whole[packed.name] = Stored(
            stored.file, packed.dtype if not missing else "BF16", packed.shape
        )
        whole[packed.name] = dataclasses.replace(whole[packed.name], offset=stored.offset)
        if not wrong:
            found[packed.name] = packed
    stray: list[str] = []
    for name in list(whole):
        stem, _, end = name.rpartition(".")
        if end == scheme.scale:
            of = tensors.get(f"{stem}.{scheme.values}") or tensors.get(f"{stem}.weight")
            stray.append(f"{name} (of {'no weight' if of is None else of.dtype})")
        if end in (*_UNREAD, scheme.scale):
            del whole[name]
    if stray:
        problems.append(
            f"scales of weights that are not in {kind}: {listed(stray)}; leave them out"
        )
    return whole, found, problems


def _ends(scheme: Scheme) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Suffixes of the tensors that a matrix must have, and of those that it may have."""
    first = (scheme.values, scheme.scale)
    if scheme.kind == "float":
        return first, ("weight_zero_point",)
    if scheme.kind == "fp4":
        return (*first, str(scheme.whole)), ()
    if scheme.kind == "int":
        zeros = () if scheme.is_symmetric else ("weight_zero_point",)
        return (*first, "weight_shape", *zeros), ("weight_g_idx",)
    return (*first, "qzeros"), ("g_idx",) if scheme.kind == "gptq" else ()


def _shape(scheme: Scheme, stored: Shape) -> Shape:
    """Unpacked shape of a packed 2-D tensor; other shapes unchanged."""
    if len(stored) != 2:
        return stored
    rows, columns = stored
    each = 32 // scheme.bits
    return {
        "float": (rows, columns),
        "fp4": (rows, 2 * columns),
        "int": (rows, columns * each),
        "gptq": (columns, rows * each),
        "awq": (columns * each, rows),
    }[scheme.kind]


def _groups(packed: Packed) -> int:
    """Number of scales of one output."""
    group = packed.scheme.group
    return 1 if group is None or group == -1 else packed.shape[1] // group


def _misshapen(packed: Packed) -> Iterator[str]:
    """Problems of parts whose shape or type does not match the stored numbers."""
    scheme, parts = packed.scheme, packed.parts
    if len(packed.shape) != 2 or not all(packed.shape):
        name = f"{packed.stem}.{scheme.values}"
        yield f"{name} has shape {list(parts[scheme.values].shape)}; a matrix has two axes"
        return
    (outputs, inputs), group = packed.shape, scheme.group
    if group is not None and group > 0 and inputs % group:
        yield f"{packed.name} has {inputs} inputs, no multiple of group_size={group}"
        return
    groups, each = _groups(packed), 32 // scheme.bits
    flat: tuple[Shape, ...] = ((outputs, groups),)
    if scheme.block is not None:
        height, width = scheme.block
        flat = ((-(-outputs // height), -(-inputs // width)),)
    elif group is None:
        flat = ((outputs, 1), (outputs,), (1,), (), (1, 1))
    floats = ("F8_E4M3",) if scheme.kind == "fp4" else _FLOATS
    wanted: dict[str, tuple[tuple[Shape, ...], tuple[str, ...]]] = {scheme.scale: (flat, floats)}
    if scheme.whole is not None:
        wanted[scheme.whole] = (((1,), ()), ("F32",))
    if scheme.kind == "float":
        wanted["weight_zero_point"] = (flat, ("F8_E4M3", "I8", *_FLOATS))
    if scheme.kind in ("gptq", "awq"):
        wanted[scheme.scale] = (((groups, outputs),), _FLOATS)
        wanted["qzeros"] = (((groups, -(-outputs // each)),), ("I32",))
        wanted["g_idx"] = (((inputs,),), ("I32",))
    if scheme.kind == "int":
        wanted["weight_shape"] = (((2,),), ("I64", "I32"))
        wanted["weight_zero_point"] = (((-(-outputs // each), groups),), ("I32",))
        wanted["weight_g_idx"] = (((inputs,),), ("I32",))
    for end, (shapes, types) in wanted.items():
        part = parts.get(end)
        if part is None:
            continue
        if part.shape not in shapes:
            text = " or ".join(str(list(shape)) for shape in shapes[:2])
            yield f"{packed.stem}.{end} has shape {list(part.shape)}, expected {text}"
        elif part.dtype not in types:
            yield f"{packed.stem}.{end} has type {part.dtype}, expected {' or '.join(types)}"


# --- unpacking ----------------------------------------------------------------------------------


def _float_rows(packed: Packed, first: int, last: int) -> Array:
    scheme, rows = packed.scheme, slice(first, last)
    values = packed.cut(scheme.values, rows).astype(np.float32)
    inputs = values.shape[1]
    if scheme.block is not None:
        height, width = scheme.block
        scales = packed.cut(scheme.scale, slice(first // height, -(-last // height)))
        of_row = np.arange(first, last) // height - first // height
        scales = scales.astype(np.float32)[of_row][:, np.arange(inputs) // width]
    elif math.prod(packed.parts[scheme.scale].shape) == 1:
        scales = packed.all(scheme.scale).astype(np.float32).reshape(1, 1)
    else:
        scales = packed.cut(scheme.scale, rows).astype(np.float32).reshape(len(values), -1)
        scales = _np.repeat(scales, inputs // scales.shape[1], axis=1)
    return values * scales


def _fp4_rows(packed: Packed, first: int, last: int) -> Array:
    scheme, rows = packed.scheme, slice(first, last)
    both = packed.cut(scheme.values, rows)
    values = _E2M1[_np.stack([both & 15, both >> 4], axis=-1)].reshape(len(both), -1)
    scales, whole = packed.cut(scheme.scale, rows), packed.all(str(scheme.whole)).reshape(())
    scales = scales.astype(np.float32)
    scales = scales / whole if scheme.is_divided else scales * whole
    return values * _np.repeat(scales, FP4_GROUP, axis=1)


def _int_rows(packed: Packed, first: int, last: int) -> Array:
    scheme, rows = packed.scheme, slice(first, last)
    values = _unpacked(packed.cut(scheme.values, rows), scheme.bits)
    if scheme.is_symmetric:
        zeros: Array = np.full((len(values), _groups(packed)), 1 << (scheme.bits - 1), np.int32)
    else:
        each = 32 // scheme.bits
        words = packed.cut("weight_zero_point", slice(first // each, -(-last // each)))
        zeros = _unpacked(words.T, scheme.bits).T[first % each :][: len(values)]
    scales = packed.cut(scheme.scale, rows).astype(np.float32).reshape(len(values), -1)
    return _of_groups(packed, "weight_g_idx", values, zeros, scales)


def _gptq_rows(packed: Packed, first: int, last: int) -> Array:
    scheme, rows = packed.scheme, np.s_[:, first:last]
    values = _unpacked(packed.cut(scheme.values, rows).T, scheme.bits)
    each = 32 // scheme.bits
    words = packed.cut("qzeros", np.s_[:, first // each : -(-last // each)])
    zeros = _unpacked(words, scheme.bits)[:, first % each :][:, : last - first].T
    if scheme.name == "GPTQ":  # GPTQ stores zero points minus one
        zeros = zeros + 1
    scales = packed.cut(scheme.scale, rows).astype(np.float32).T
    return _of_groups(packed, "g_idx", values, zeros, scales)


def _awq_rows(packed: Packed, first: int, last: int) -> Array:
    words = np.s_[:, first // 8 : -(-last // 8)]

    def columns(end: str) -> Array:
        found = _unpacked(packed.cut(end, words), 4)
        found = found.reshape(len(found), -1, 8)[..., _AWQ_ORDER].reshape(len(found), -1)
        return found[:, first % 8 :][:, : last - first].T

    scales = packed.cut(packed.scheme.scale, np.s_[:, first:last]).astype(np.float32).T
    return _of_groups(packed, "", columns("qweight"), columns("qzeros"), scales)


def _of_groups(packed: Packed, order: str, values: Array, zeros: Array, scales: Array) -> Array:
    """`(values - zeros) * scales`, with zeros and scales by groups of inputs."""
    if order in packed.parts:
        of_input = packed.all(order)
        zeros, scales = zeros[:, of_input], scales[:, of_input]
    else:
        count = values.shape[1] // scales.shape[1]
        zeros, scales = _np.repeat(zeros, count, axis=1), _np.repeat(scales, count, axis=1)
    return (values - zeros).astype(np.float32) * scales


def _unpacked(words: Array, bits: int) -> Array:
    """The unsigned numbers in 32-bit words, the lowest bits first, along the last axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    found = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & ((1 << bits) - 1)
    return found.astype(np.int32).reshape(*words.shape[:-1], -1)


_ROWS: dict[str, Callable[[Packed, int, int], Array]] = {
    "float": _float_rows,
    "fp4": _fp4_rows,
    "int": _int_rows,
    "gptq": _gptq_rows,
    "awq": _awq_rows,
}
