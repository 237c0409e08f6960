"""Comparison of the tensors that a config requires with those in the headers of the files."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .dtypes import STORED
from .rules import Placement, Shape, find, listed, numbered, tensor_shapes
from .shards import Stored
from .tensor_names import IGNORED, Table

_LAYER = re.compile(r"(?:layers|blocks)\.(\d+)\.")
# Multi-token-prediction layers, which block decoding does not use. Some have their own names;
# others are numbered after the last layer and recognised by tensors that only they have.
_NEXT_TOKENS = re.compile(r"(.*\.)?(mtp\w*|nextn\w*)(\..*)?")
_OF_NEXT_TOKENS = re.compile(r".*\.(eh_proj|enorm|hnorm)\..*")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LEAVES_OF_EXPERTS = ("router", "router_bias", "experts_", "shared_")


@dataclasses.dataclass(frozen=True)
class Asked:
    """The tensors that a config requires.

    Attributes:
        shapes: The parameter tree.
        further_layers: Multi-token-prediction layers after the last layer of the config.
    """

    cfg: Any
    table: Table
    shapes: Any
    places: Sequence[Placement]
    further_layers: int = 0


def compare(
    asked: Asked, held: Mapping[str, Stored], *, allow_extra: bool
) -> tuple[list[str], list[str]]:
    """Problems and notes: missing, superfluous and wrong tensors."""
    if not held:  # reported elsewhere
        return [], []
    wanted = tensor_shapes(asked.places)
    problems = _missing(asked, [name for name in wanted if name not in held])
    dropped, extra = _extra(asked, [name for name in held if name not in wanted])
    notes = [f"{len(dropped)} tensor(s) not needed: {_short(dropped)}"] if dropped else []
    known, unknown = _out_of_place(asked, extra)
    problems += known
    if unknown:
        text = f"{len(unknown)} tensor(s) of unknown name: {_short(unknown)}"
        if allow_extra:
            notes.append(f"{text}; not read")
        else:
            problems.append(f"{text}; --allow-extra leaves them out")
    for name, shape in wanted.items():
        if name in held:
            problems += _wrong(asked.table, name, shape, held[name])
    return problems, notes


def _missing(asked: Asked, missing: list[str]) -> list[str]:
    problems: list[str] = []
    keys, head = asked.table.keys, asked.table.lm_head
    if head in missing:
        missing.remove(head)
        problems.append(
            f"{head} is missing although {keys.tied} is false; set it to true "
            "in config.json only if the model was trained with a tied head"
        )
    leaves = {place.name: place.path[-1] for place in asked.places}
    biases = [name for name in missing if leaves[name] == "router_bias"]
    if biases:
        problems.append(
            f"{len(biases)} tensor(s) missing although moe_router_enable_expert_bias is true: "
            f"{listed(biases)}"
        )
    others = [name for name in missing if name not in biases]
    if others:
        problems.append(f"{len(others)} tensor(s) missing: {_short(others)}")
    return problems


def _extra(asked: Asked, names: list[str]) -> tuple[list[str], list[str]]:
    """Split superfluous tensors into those that only need a note, and the others."""
    past = asked.cfg.num_layers
    further = {past + i for i in range(asked.further_layers)}
    further |= {n for name in names if _OF_NEXT_TOKENS.match(name) and (n := _layer(name)) >= past}
    dropped: list[str] = []
    rest: list[str] = []
    for name in names:
        if name == asked.table.lm_head and asked.cfg.tie_embeddings:
            continue  # compared with the embedding when the weights are read
        is_left_out = asked.table.ignored is not None and asked.table.ignored.fullmatch(name)
        if is_left_out or _layer(name) in further or _NEXT_TOKENS.fullmatch(name):
            dropped.append(name)
        elif not IGNORED.fullmatch(name):
            rest.append(name)
    return dropped, rest


def _layer(name: str) -> int:
    """The layer number of a tensor, -1 for none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else -1


def _out_of_place(asked: Asked, extra: list[str]) -> tuple[list[str], list[str]]:
    """Problems of tensors that the family knows, and names that it does not know."""
    rules = asked.table.every_rule()
    found: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name in extra:
        reason = _reason(asked, name) if numbered(rules, name) else None
        if reason is None:
            unknown.append(name)
        else:
            found.setdefault(reason, []).append(name)
    return [f"{reason}: {_short(names)}" for reason, names in found.items()], unknown


def _reason(asked: Asked, name: str) -> str | None:
    """Why the config does not require a tensor that the family knows; None if unclear."""
    parts = numbered(asked.table.every_rule(), name)
    if parts is None:
        return None
    cfg, keys = asked.cfg, asked.table.keys
    if parts.layer is not None and parts.layer >= cfg.num_layers:
        return f"{keys.layers}={cfg.num_layers} but the files go on; correct config.json"
    *above, leaf = (parts.layer if key == "{i}" else key for key in parts.rule.path.split("."))
    layer = find(asked.shapes, [key for key in above if key is not None])
    if leaf in layer:
        experts = layer[leaf].shape[0]
        if parts.expert is not None and parts.expert >= experts:
            return f"num_experts={experts} but the files hold more; correct config.json"
        return "the experts are stored in two forms; keep one of them"
    if str(leaf).startswith(_LEAVES_OF_EXPERTS) and "router" not in layer:
        return f"layer {parts.layer} has no experts by config.json but the files hold some"
    if str(leaf).startswith("w_") and "router" in layer:
        return f"layer {parts.layer} has experts by config.json but the files hold one network"
    return None


def _wrong(table: Table, name: str, shape: Shape, tensor: Stored) -> Iterable[str]:
    if tensor.dtype not in STORED:
        yield f"{name} has type {tensor.dtype}; weights must be {', '.join(STORED)}"
    if tensor.shape == shape:
        return
    if name == table.embed and tensor.shape[1:] == shape[1:]:
        yield (
            f"{name} has {tensor.shape[0]} rows but {table.keys.vocab}={shape[0]}; "
            "correct config.json"
        )
    else:
        yield f"{name} has shape {list(tensor.shape)}, expected {list(shape)}"


def _short(names: Iterable[str]) -> str:
    """Names for a message; names that differ only in the number of the expert are counted."""
    counts: dict[str, int] = {}
    for name in names:
        key = _EXPERT.sub(".experts.*.", name)
        counts[key] = counts.get(key, 0) + 1
    return listed(f"{key} ({n})" if "*" in key else key for key, n in counts.items())
