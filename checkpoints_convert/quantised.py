"""Quantised weights, told by what only such checkpoints have: names and types of tensors."""

from collections.abc import Mapping

from .shards import Stored
from .spec import listed

# Pieces of tensor names and the method they betray; the first that fits speaks.
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
_SMALL_TYPES = ("F8_", "F4", "F6_", "I8", "U8")


def quantised(tensors: Mapping[str, Stored]) -> list[str]:
    """A problem for each method of quantisation that names or types betray."""
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        method = next((m for piece, m in _PIECES.items() if piece in name), None)
        if method is None and tensor.dtype.startswith(_SMALL_TYPES):
            method = "fp8" if tensor.dtype.startswith("F8_") else tensor.dtype
        if method is not None:
            found.setdefault(method, []).append(f"{name} ({tensor.dtype})")
    return [
        f"the weights are quantised ({method}), which is not supported; use the bfloat16 "
        f"checkpoint: {listed(names)}"
        for method, names in found.items()
    ]
