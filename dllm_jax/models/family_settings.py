"""Decoding settings of a checkpoint: from the table, then the config, then its "dllm_jax" entry."""

import dataclasses
import math
import re
import sys
from collections.abc import Iterable
from typing import Any, get_args

from dllm_jax.convert.config.fields import Fields
from dllm_jax.models.family import Decoding, Family
from dllm_jax.models.family_table import BLOCK_ROUTED

_FIELDS = {field.name: field.type for field in dataclasses.fields(Decoding)}
_NOT_OURS = ("family", "remasking", "block_length", "append", "attention", "alternatives")
# Settings that a config.json of ours may carry under "dllm_jax", with their types.
OURS: dict[str, Any] = {
    name: (*get_args(kind), kind)[0] for name, kind in _FIELDS.items() if name not in _NOT_OURS
}


def settings_of(
    fields: Fields, family: Family, network: dict[str, Any], name: str, has_edits: bool
) -> dict[str, Any]:
    """The fields of `Decoding` for a checkpoint.

    Args:
        network: Fields of the network's config class.
        name: Name of the folder or repository.
        has_edits: The config has ids that delete and insert.
    """
    settings: dict[str, Any] = {key: getattr(family, key) for key in _FIELDS}
    routing_block = network.get("routing_block") or 1
    if network.get("expert_capacity"):
        settings |= BLOCK_ROUTED
        if not has_edits:
            settings["strategy"] = "edit"
    own = _own(fields)
    hinted = _hinted(fields, family, settings["strategy"], name, own.get("strategy"))
    usual = hinted.pop("block_size", family.block_size)
    if family.mask_tokens:
        settings["block_size"] = _native_block(fields, usual, routing_block, name)
    if network.get("canvas_length"):  # 0 if it was refused
        settings["block_size"] = network["canvas_length"]
    if "block_size" in network:  # a drafter's config has it
        settings["block_size"] = network["block_size"]
    trained_len = hinted.pop("trained_len", family.trained_len)
    settings |= hinted
    if trained_len is not None and network["max_position"] > trained_len:
        fields.notes.append(
            f"max_position_embeddings={network['max_position']} is inherited: {family.name} was "
            f"trained on texts of {trained_len} tokens, and longer ones suffer"
        )
    settings |= own
    for key in ("block_size", "buffer_size"):
        size = settings[key]
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            fields.problems.append(f"{key}={size!r} must be a positive whole number")
        elif key == "block_size" and size % routing_block:
            fields.problems.append(
                f"block_size={size} must be a multiple of the routing block of {routing_block} "
                "tokens (block_size beside expert_capacity in config.json)"
            )
    return settings


def _native_block(fields: Fields, usual: int, routing_block: int, name: str) -> Any:
    """Tokens of a block, from the config, else the name, else the family."""
    config = fields.config
    suffix = re.search(r"-b(\d+)(?=-|$)", name)
    keys: Iterable[str] = ("bd_size", "block_size")
    if routing_block > 1:  # LLaDA2.2's block_size is that of routing, not of denoising
        keys = ("bd_size",)
    native = next((config[key] for key in keys if config.get(key) is not None), None)
    if native is None and suffix:
        native = int(suffix[1])
    elif native is None:
        return math.ceil(usual / routing_block) * routing_block
    elif suffix and int(suffix[1]) != native:
        fields.notes.append(
            f"{name} names blocks of {suffix[1]} but config.json says {native}; using that"
        )
    return native


def _hinted(
    fields: Fields, family: Family, strategy: str, name: str, own: str | None
) -> dict[str, Any]:
    """Settings implied by the name; an implied strategy is only noted.

    Args:
        own: The strategy of the config's "dllm_jax" entry, which wins over the name.
    """
    changes: dict[str, Any] = {}
    for hint in family.hints:
        implied = hint.settings.get("strategy")
        is_meant = re.search(hint.pattern, name, re.IGNORECASE)
        if not (implied == own if implied and own else is_meant):
            continue
        changes |= hint.settings
        if hint.refusal:
            fields.problems.append(f"{name} is by its name {hint.refusal}")
        if hint.strategy not in (None, strategy):
            fields.notes.append(
                f"{name} is by its name made for the strategy {hint.strategy!r}, which its files "
                f"do not tell; {strategy!r} is used unless you name another"
            )
    return changes


def _own(fields: Fields) -> dict[str, Any]:
    """The entry "dllm_jax" of a config that dllm_jax wrote."""
    settings: dict[str, Any] = {}
    for key, value in fields.object("dllm_jax").items():
        kind = OURS.get(key)
        if kind is None:
            fields.problems.append(f'"dllm_jax": unknown key {key!r}; known are {", ".join(OURS)}')
        elif isinstance(value, bool) or not isinstance(
            value, int | float if kind is float else kind
        ):
            fields.problems.append(f'"dllm_jax": {key}={value!r} must be of type {kind.__name__}')
        elif key == "strategy" and not re.fullmatch(r"\w+", value):
            fields.problems.append(
                f'"dllm_jax": strategy={value!r} must be a name, for a checkpoint brings no code'
            )
        elif kind is float and not 0 <= value <= (1 if key == "top_p" else sys.float_info.max):
            rule = "in [0, 1]" if key == "top_p" else "a number of at least 0"
            fields.problems.append(f'"dllm_jax": {key}={value!r} must be {rule}')
        else:
            settings[key] = kind(value)
    return settings
