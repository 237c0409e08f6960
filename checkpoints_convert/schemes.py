"""How the matrices of a folder are stored in 4 or 8 bits: the schemes that a config may state.

`config.json`, or ModelOpt's `hf_quant_config.json`, -> a `Scheme`, by which `packed` reads.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from . import unread
from .tokenizer_files import json_object, read_json

MODELOPT = "hf_quant_config.json"
METHODS = ("compressed-tensors", "fp8", "modelopt", "gptq", "awq")
KEYS = ("quantization_config", "compression_config")
FP4_GROUP = 16
# compressed-tensors' config of 8-bit weights with a scale for each output and dynamic 8-bit rows.
_EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_EIGHT, "strategy": "channel", "dynamic": False},
            "input_activations": {**_EIGHT, "strategy": "token", "dynamic": True},
        }
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """The storage format of the matrices of a folder.

    Attributes:
        name: Name for messages.
        values: Suffix of the name of the stored numbers.
        scale: Suffix of the name of their scales.
        group: Inputs that share a scale; None: one scale an output or one for the matrix.
        block: Outputs and inputs that share a scale.
        whole: Suffix of the name of a factor of all scales, or None.
        is_divided: Scales are divided by that factor.
        is_symmetric: Zero points are absent.
        ignored: Modules that stay in 16 bits, as the folder names them.
    """

    name: str
    kind: str  # float, int, gptq, awq or fp4
    bits: int
    values: str
    scale: str
    group: int | None = None
    block: tuple[int, int] | None = None
    whole: str | None = None
    is_divided: bool = False
    is_symmetric: bool = True
    ignored: tuple[str, ...] = ()


_FLOAT: dict[str, Any] = {"kind": "float", "bits": 8, "values": "weight", "scale": "weight_scale"}
_BLOCKWISE: dict[str, Any] = {**_FLOAT, "scale": "weight_scale_inv"}
_FP4: dict[str, Any] = {"kind": "fp4", "bits": 4, "scale": "weight_scale", "group": FP4_GROUP}
_WORDS: dict[str, Any] = {"values": "qweight", "scale": "scales", "is_symmetric": False}


def read_scheme(folder: Path, config: Mapping[str, Any]) -> Scheme | None:
    """The storage scheme of a folder's matrices; None if they are not quantised.

    Raises:
        ValueError: The scheme is not supported.
    """
    mlx = json_object(config.get("quantization") or config.get(KEYS[0]))
    if "quant_method" not in mlx and {"bits", "group_size"} <= mlx.keys():
        what = f"MLX, bits={mlx['bits']!r}, group_size={mlx['group_size']!r}"
        raise ValueError(_refusal(what, "its packing is Apple's own; use the bfloat16 checkpoint"))
    key = next((key for key in KEYS if config.get(key)), None)
    if key is not None and not isinstance(config[key], dict):
        rule = "it must be an object that says how"
        raise ValueError(_refusal(f"{key}={config[key]!r}", rule))
    said = None if key is None else json_object(config[key])
    if said is None:
        if not (folder / MODELOPT).is_file():
            return None
        said = json_object(read_json(folder / MODELOPT).get("quantization"))
        if more := list(unread.refused(said)):
            raise ValueError("; ".join(f"{MODELOPT}: {one}" for one in more))
        return _modelopt(said, said.get("exclude_modules"))
    if more := list(unread.refused(said)):
        raise ValueError("; ".join(f"{key}.{one}" for one in more))
    method = said.get("quant_method", "compressed-tensors" if "config_groups" in said else None)
    if method == "modelopt" or str(method).startswith("modelopt"):
        return _modelopt(said, said.get("ignore", said.get("exclude_modules")))
    readers = {"compressed-tensors": _compressed, "fp8": _fp8, "gptq": _gptq, "awq": _awq}
    if not isinstance(method, str) or method not in readers:
        raise ValueError(_refusal(f"quant_method={method!r}", f"use {', '.join(METHODS)}"))
    return readers[method](said)


def unread_notes(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Notes on unread entries of a folder's quantisation section, assumed to have no effect."""
    key = next((key for key in KEYS if config.get(key)), None)
    if key is not None:
        yield from unread.notes(json_object(config[key]))
    elif (folder / MODELOPT).is_file():
        yield from unread.notes(json_object(read_json(folder / MODELOPT).get("quantization")))


def _refusal(what: str, rule: str) -> str:
    text = what if len(what) < 200 else what[:200] + "…"
    return f"the weights are quantised ({text}), which is not supported; {rule}"


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(str, cast("list[Any]", value))) if isinstance(value, list) else ()


def _group(value: Any, allowed: Callable[[int], bool] = lambda n: n > 0) -> int:
    if type(value) is not int or not allowed(value):
        raise ValueError(_refusal(f"group_size={value!r}", "it must be a number of inputs"))
    return value


def _bits(value: Any, allowed: tuple[int, ...]) -> int:
    if type(value) is not int or value not in allowed:
        rule = f"use {' or '.join(map(str, allowed))} bits"
        raise ValueError(_refusal(f"{value!r} bits", rule))
    return value


def _compressed(said: Mapping[str, Any]) -> Scheme:
    groups = json_object(said.get("config_groups"))
    weights = [json_object(json_object(group).get("weights")) for group in groups.values()]
    said_of = [json_object(group).get("format") or said.get("format") for group in groups.values()]
    held = list(zip(said_of, weights, strict=True))
    if not held:
        rule = "it must be an object of groups, with the weights of each"
        raise ValueError(_refusal(f"config_groups={said.get('config_groups')!r}", rule))
    if any(one != held[0] for one in held):
        rule = "all matrices must be stored alike"
        raise ValueError(_refusal(f"{len(held)} config_groups of different weights", rule))
    format, weights = held[0]
    name, ignored = f"compressed-tensors {format}", _names(said.get("ignore"))
    strategy, kind = weights.get("strategy"), weights.get("type")
    if format in ("float-quantized", "naive-quantized") and kind == "float":
        _bits(weights.get("num_bits"), (8,))
        group = _group(weights.get("group_size")) if strategy == "group" else None
        if strategy not in ("tensor", "channel", "group", "block"):
            raise ValueError(_refusal(f"strategy={strategy!r}", "use channel, tensor or block"))
        block = _block(weights.get("block_structure")) if strategy == "block" else None
        return Scheme(name=name, **_FLOAT, group=group, block=block, ignored=ignored)
    if format == "pack-quantized" and kind in (None, "int"):
        if strategy not in ("channel", "group"):
            raise ValueError(_refusal(f"strategy={strategy!r}", "use group or channel"))
        return Scheme(
            name=name,
            kind="int",
            bits=_bits(weights.get("num_bits"), (4, 8)),
            values="weight_packed",
            scale="weight_scale",
            group=_group(weights.get("group_size")) if strategy == "group" else None,
            is_symmetric=weights.get("symmetric", True) is not False,
            ignored=ignored,
        )
    if format == "nvfp4-pack-quantized":
        _group(weights.get("group_size"), lambda n: n == FP4_GROUP)
        whole: dict[str, Any] = {"whole": "weight_global_scale", "is_divided": True}
        return Scheme(name=name, **_FP4, values="weight_packed", **whole, ignored=ignored)
    rule = "use float-quantized of floats, pack-quantized of ints, or nvfp4-pack-quantized"
    what = f"compressed-tensors format={format!r} of type={kind!r}"
    raise ValueError(_refusal(what, rule))


def _block(value: Any) -> tuple[int, int]:
    sizes = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sizes) != 2 or any(type(n) is not int or n < 1 for n in sizes):
        raise ValueError(_refusal(f"blocks of {value!r}", "give outputs and inputs, [128, 128]"))
    return sizes[0], sizes[1]


def _fp8(said: Mapping[str, Any]) -> Scheme:
    if said.get("fmt", "e4m3") != "e4m3":
        raise ValueError(_refusal(f"fp8 with fmt={said['fmt']!r}", "use e4m3"))
    size = said.get("weight_block_size")
    return Scheme(
        name="fp8" if size is None else "fp8, blockwise",
        **_BLOCKWISE,
        block=None if size is None else _block(size),
        ignored=_names(said.get("modules_to_not_convert")),
    )


def _modelopt(said: Mapping[str, Any], ignored: Any) -> Scheme:
    method = said.get("quant_algo")
    name = f"ModelOpt {method}"
    if method == "FP8":
        return Scheme(name=name, **_FLOAT, ignored=_names(ignored))
    if method == "NVFP4":
        _group(said.get("group_size", FP4_GROUP), lambda n: n == FP4_GROUP)
        return Scheme(
            name=name,
            **_FP4,
            values="weight",
            whole="weight_scale_2",
            ignored=_names(ignored),
        )
    raise ValueError(_refusal(f"ModelOpt quant_algo={method!r}", "use FP8 or NVFP4"))


def _gptq(said: Mapping[str, Any]) -> Scheme:
    form = said.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(_refusal(f"GPTQ with checkpoint_format={form!r}", "use gptq or gptq_v2"))
    other = [key for key in json_object(said.get("dynamic")) if not key.startswith("-:")]
    if other:
        what = f"GPTQ with dynamic={', '.join(map(str, other))}"
        raise ValueError(_refusal(what, "all matrices must be stored alike, or in 16 bits"))
    return Scheme(
        name="GPTQ" if form == "gptq" else "GPTQ v2",
        kind="gptq",
        bits=_bits(said.get("bits"), (4, 8)),
        group=_group(said.get("group_size"), lambda n: n > 0 or n == -1),
        **_WORDS,
    )


def _awq(said: Mapping[str, Any]) -> Scheme:
    form = str(said.get("version", "gemm")).lower()
    if form != "gemm" or said.get("zero_point", True) is not True:
        raise ValueError(_refusal(f"AWQ with version={form!r}", 'use "gemm" with zero points'))
    bits = said.get("bits", said.get("w_bit"))
    return Scheme(
        name="AWQ",
        kind="awq",
        bits=_bits(bits, (4,)),
        group=_group(said.get("group_size", said.get("q_group_size")), lambda n: n > 0 or n == -1),
        **_WORDS,
        ignored=_names(said.get("modules_to_not_convert")),
    )
