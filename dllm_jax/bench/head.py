"""Checks whether a compiled program computes logits of the whole vocabulary in every branch."""

import re
from typing import Any

from dllm_jax.bench.profile import computations

_KERNEL = re.compile("token_readout_mosaic_gpu")


def ids_of_device(model: Any) -> int:
    """Number of ids whose logits one device computes, if several share a model."""
    return (
        model.config.vocab_size
        if model.split is None
        else len(model.params["embed"]) // model.split.num_parts
    )


def has_head(program: str, vocab_size: int) -> bool:
    """Whether every run of an optimised program computes logits of all ids.

    Logits are a float32 product with a column for each id, or are computed by the readout kernel,
    which takes the weights of the head. Weights of that shape do not count. For a conditional all
    branches must compute logits, since a run takes only one of them.
    """
    bodies, _ = computations(program)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", program, re.MULTILINE)
    logits = re.compile(rf"\(?f32\[(?:\d+,{vocab_size}|{vocab_size},\d+)\]")
    weights = re.compile(rf"operand_layout_constraints=[^=]*\b(?:bf16|f16)\[{vocab_size},\d+\]")
    known: dict[str, bool] = {}

    def holds(name: str) -> bool:
        if name not in known:
            known[name] = any(computes(*line[1:]) for line in bodies.get(name, []))
        return known[name]

    def computes(shape: str, opcode: str, rest: str) -> bool:
        if opcode == "custom-call" and _KERNEL.search(rest):
            return weights.search(rest) is not None
        if opcode in ("dot", "custom-call"):
            return logits.match(shape) is not None
        if opcode == "conditional":
            branches = _called(rest, "branch_computations|true_computation|false_computation")
            return bool(branches) and all(map(holds, branches))
        return any(map(holds, _called(rest, "body|calls|to_apply|called_computations")))

    return entry is not None and holds(entry[1])


def _called(rest: str, attributes: str) -> list[str]:
    """Computations that an instruction names in one of the attributes."""
    found = re.findall(rf"\b(?:{attributes})=(\{{[^}}]*\}}|%?[\w.\-]+)", rest)
    return [name for group in found for name in re.findall(r"[\w.\-]+", group)]
