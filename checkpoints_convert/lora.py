"""LoRA adapters in PEFT's form: the changed matrices, their updates, and every problem.

`W' = W + scale * B @ A` applies to the matrix as stored, before it is placed in the tree. The names
in the adapter's file decide which matrices change; `target_modules` is not read.

Source: Hu et al. 2021 (LoRA), eq. 3; Kalajdzievski 2023 (rsLoRA), eq. 8.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import regex

from .dtypes import STORED, all_finite
from .rules import Array, ConversionError, Shape, listed
from .shards import ADAPTER, Shards, Stored, read_header
from .tokenizer_files import json_object, read_json

CONFIG = "adapter_config.json"
MOST_SECONDS = 2.0  # for all patterns of an adapter
_LONGEST_PATTERN = 1000

_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?(?:\.weight)?"
)
# Entries that require more than adding a product to a matrix (unless null, false or empty), and
# the reason to refuse them.
_MORE = {
    "use_dora": "DoRA also scales the columns of the merged matrix",
    "lora_bias": "B has a bias, which ours have not",
    "modules_to_save": "it replaces whole modules; merge it with PEFT",
    "trainable_token_indices": "it replaces rows of the embedding; merge it with PEFT",
    "target_parameters": "it changes parameters that are no matrix of a module",
    "layer_replication": "it doubles layers",
    "alora_invocation_tokens": "it acts behind some tokens only and cannot be merged",
    "use_qalora": "its inputs are pooled by groups",
    "use_bdlora": "its factors are blocks of a diagonal",
    "megatron_config": "its layers are Megatron's",
    "arrow_config": "it chooses among adapters at run time",
}
# Initialisations that do not change the base: A is drawn, and B or the product is zero. All others
# (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract the product from the base.
_STARTS = ("gaussian", "eva", "orthogonal")
# Entries that are read or do not affect the product: the choice of modules (the names in the file
# decide), training, and settings of initialisations.
_KNOWN = frozenset(
    " ".join(
        (
            "peft_type peft_version task_type auto_mapping base_model_name_or_path revision",
            "r lora_alpha rank_pattern alpha_pattern use_rslora fan_in_fan_out bias",
            "target_modules exclude_modules layers_to_transform layers_pattern",
            "inference_mode lora_dropout runtime_config ensure_weight_tying megatron_core",
            "init_lora_weights loftq_config corda_config eva_config lora_ga_config olora_config",
            "qalora_group_size velora_config",
        )
    ).split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """The facts of a merged adapter that `meta.json` keeps."""

    source: str
    rank: int
    alpha: float
    is_rslora: bool = False


@dataclasses.dataclass(frozen=True)
class Factors:
    """The update of one matrix, a `copying.Numbers`.

    Attributes:
        read: Returns a tensor of the adapter in float32.
        width: Columns of the changed matrix.
        is_transposed: The matrix is stored input first.
    """

    read: Callable[[Stored], Array]
    down: Stored
    up: Stored
    scale: float
    width: int
    is_transposed: bool = False

    def __call__(self, start: int, count: int) -> Array:
        """`count` elements of the update from number `start` on, in C order and float32."""
        first, last = start // self.width, -(-(start + count) // self.width)
        down, up = self.read(self.down), self.read(self.up)
        left, right = (down.T, up.T) if self.is_transposed else (up, down)
        rows = np.float32(self.scale) * (left[first:last] @ right)
        return rows.reshape(-1)[start - first * self.width :][:count]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """The result of `read_adapter`; `factors` by the name of the tensor that they change."""

    facts: AdapterFacts | None = None
    factors: Mapping[str, Factors] = dataclasses.field(default_factory=dict[str, Factors])
    base: str = ""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_adapter(folder: Path, shapes: Mapping[str, Shape]) -> Adapter:
    """Inspect an adapter from its headers.

    Args:
        folder: Holds `adapter_config.json` and `adapter_model.safetensors`.
        shapes: Shape of every tensor that the network reads from its checkpoint.
    """
    try:
        config, tensors = _files(folder)
    except ValueError as error:
        return Adapter(problems=(f"adapter {folder}: {error}",))
    problems = list(_refusals(config))
    pairs = _pairs(tensors, problems)
    lost = [module for module in pairs if f"{module}.weight" not in shapes]
    if lost:
        problems.append(
            f"it changes matrices that the checkpoint has not: {listed(lost)}; give the base model "
            "it was trained on"
        )
    read = functools.lru_cache(maxsize=8)(functools.partial(_read, folder / ADAPTER))
    factors: dict[str, Factors] = {}
    until = time.thread_time() + MOST_SECONDS
    for module, (down, up) in pairs.items():
        base = shapes.get(f"{module}.weight")
        try:
            if base is not None:
                scale = _scale(config, module, _rank(module, down.shape, up.shape), until)
                factors[f"{module}.weight"] = made = Factors(
                    read, down, up, scale, base[-1], bool(config.get("fan_in_fan_out"))
                )
                _check_shape(module, made, base)
        except TimeoutError as error:
            problems.append(str(error))
            break
        except ValueError as error:
            problems.append(str(error))
    if not tensors:
        problems.append(f"{ADAPTER} holds no tensor")
    if problems:
        return Adapter(problems=tuple(f"adapter {folder}: {problem}" for problem in problems))
    facts = AdapterFacts(
        source=str(folder),
        rank=config["r"],
        alpha=config["lora_alpha"],
        is_rslora=bool(config.get("use_rslora")),
    )
    unread = ", ".join(_unread(config))
    notes = (f"entries of {CONFIG} that are not read: {unread}",) if unread else ()
    base = str(config.get("base_model_name_or_path"))
    return Adapter(facts=facts, factors=factors, base=base, notes=notes)


def _files(folder: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """The adapter's config and the entries of its header."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"no {CONFIG} there; give the folder of a PEFT adapter")
    if not (folder / ADAPTER).is_file():
        raise ValueError(f"no {ADAPTER} there; other formats are not read")
    shards = Shards()
    read_header(folder / ADAPTER, shards)
    if shards.problems:
        raise ValueError("; ".join(shards.problems))
    return read_json(folder / CONFIG), shards.tensors


def _refusals(config: Mapping[str, Any]) -> Iterator[str]:
    """Unsupported and invalid entries of the config."""
    kind = config.get("peft_type")
    if kind != "LORA":
        yield f'peft_type={kind!r} is not supported; only "LORA" is'
    for key, why in _MORE.items():
        if config.get(key):
            yield f"{key}={config[key]!r} is not supported: {why}"
    if config.get("bias", "none") != "none":
        yield f'bias={config["bias"]!r} is not supported; only "none" is'
    start = config.get("init_lora_weights")
    if not isinstance(start, bool | None) and str(start).lower() not in _STARTS:
        yield (
            f"init_lora_weights={start!r} is not supported: the base was changed as well; let PEFT "
            "save it as a plain LoRA adapter"
        )
    for key in _unread(config):
        if key.startswith("use_") or key.endswith("_config"):
            said = f"{key}={config[key]!r:.80}"
            yield f"{said} is not known and may change the product; merge it with PEFT"
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            yield f"{key}={value!r} must be a positive number"


def _unread(config: Mapping[str, Any]) -> list[str]:
    """Entries with a value that nothing here reads."""
    return sorted(key for key in config if config[key] and key not in _KNOWN and key not in _MORE)


def _pairs(tensors: Mapping[str, Stored], problems: list[str]) -> dict[str, tuple[Stored, Stored]]:
    """A and B of each module with both; every other tensor is a problem."""
    pairs: dict[str, dict[str, Stored]] = {}
    unknown: list[str] = []
    for name, stored in tensors.items():
        match = _NAME.fullmatch(name)
        if stored.dtype not in STORED:
            problems.append(f"{name} has type {stored.dtype}; use {', '.join(STORED)}")
        elif match is None:
            unknown.append(name)
        elif pairs.setdefault(match["module"], {}).setdefault(match["side"], stored) is not stored:
            problems.append(f"{match['module']}.lora_{match['side']} is stored twice")
    embedding = [name for name in unknown if "lora_embedding_" in name]
    if embedding:
        problems.append(f"it changes the embedding, which is not supported: {listed(embedding)}")
    others = [name for name in unknown if name not in embedding]
    if others:
        problems.append(f"tensors that are neither lora_A nor lora_B: {listed(others)}")
    halves = [
        f"{module}.lora_{side}"
        for module, pair in pairs.items()
        for side in "AB"
        if side not in pair
    ]
    if halves:
        problems.append(f"missing: {listed(halves)}")
    return {module: (p["A"], p["B"]) for module, p in pairs.items() if p.keys() == set("AB")}


def _scale(config: Mapping[str, Any], module: str, rank: int, until: float) -> float:
    """The factor of a module's product: alpha / r, or alpha / sqrt(r) for rsLoRA."""
    stated = _of_module(config, "rank_pattern", module, config.get("r"), until)
    alpha = _of_module(config, "alpha_pattern", module, config.get("lora_alpha"), until)
    if stated != rank:
        raise ValueError(f"{module}.lora_A has rank {rank} but {CONFIG} says {stated}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ValueError(f"alpha of {module} is {alpha!r}; it must be a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(config: Mapping[str, Any], key: str, module: str, usual: Any, until: float) -> Any:
    """The value of a module: that of the first pattern that ends its name, as in PEFT."""
    for pattern, value in json_object(config.get(key)).items():
        try:
            left = until - time.thread_time()
            if left <= 0 or len(pattern) > _LONGEST_PATTERN:
                raise TimeoutError
            if regex.fullmatch(rf"(.*\.)?({pattern})", module, timeout=left):
                return value
        except TimeoutError as error:
            raise TimeoutError(
                f"{key}: {pattern[:80]!r} is too long or takes more than {MOST_SECONDS:g} s to "
                "match; name the modules"
            ) from error
        except regex.error as error:
            raise ValueError(f"{key}: {pattern!r} is no regular expression ({error})") from error
    return usual


def _rank(module: str, down: Shape, up: Shape) -> int:
    """The rank that A and B share."""
    if [len(down), len(up)] != [2, 2] or up[1] != down[0]:
        raise ValueError(f"{module}: lora_A {list(down)} and lora_B {list(up)} must share a rank")
    return down[0]


def _check_shape(module: str, factors: Factors, base: Shape) -> None:
    """Require the product to have the shape of its matrix."""
    product = (factors.up.shape[0], factors.down.shape[1])
    if factors.is_transposed:
        product = product[::-1]
    if product != base:
        raise ValueError(
            f"{module}: the product is {list(product)} but the matrix {list(base)}; give the base "
            "model it was trained on"
        )


def _read(path: Path, stored: Stored) -> Array:
    """A tensor of the adapter, in float32."""
    dtype = STORED[stored.dtype]
    flat: Array = np.fromfile(path, dtype, math.prod(stored.shape), offset=stored.offset)
    if not all_finite(flat):
        raise ConversionError(str(path), ["lora_A or lora_B holds NaN or Inf; train it again"])
    return flat.astype(np.float32).reshape(stored.shape)
