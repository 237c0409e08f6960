"""Weights in 8 bits: which matrices of a network are stored so, and how they are made.

The embedding, the head, norms, biases and routers keep their type: the head is read once a step and
decides every token, the others are small.
"""

from typing import Any, Literal

import jax

from dllm_jax.kernels.layer.fp8 import Fp8Matrix, quantize_matrix
from dllm_jax.kernels.token_readout.head import Fp8Head, quantize_head
from dllm_jax.models.dflash import DFlashConfig

Quantization = Literal["fp8", "none"]
QUANTIZATIONS: tuple[Quantization, ...] = ("fp8", "none")
# Matrices that are stored in 8 bits, and how many of their leading axes are contracted.
_INPUTS = {
    "wqkv": 1,
    "wqk": 1,
    "wo": 2,
    "w_gate_up": 1,
    "w_down": 1,
    "shared_gate_up": 1,
    "shared_down": 1,
    "condition_gate_up": 1,
    "condition_down": 1,
}


# Leaves whose matrices a folder in 8 bits stores so; experts are held in 16 bits when it is loaded.
STORED = frozenset({*_INPUTS, "experts_gate_up", "experts_down"})


def unsupported(config: Any) -> str | None:
    """Why a network of this config has no form in 8 bits, or None."""
    if isinstance(config, DFlashConfig):
        return "a draft has no form in 8 bits; its target may have one"
    return None


def quantized(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array | Fp8Matrix:
    """A leaf of a parameter tree as a model in 8 bits holds it.

    Args:
        path: Its key path.
    """
    inputs = _INPUTS.get(path[-1].key)
    return leaf if inputs is None else _quantize(leaf, inputs)


def is_quantized(leaf: Any) -> bool:
    """Whether a node of a parameter tree is a matrix, or a head, in 8 bits."""
    return isinstance(leaf, Fp8Matrix | Fp8Head)


def with_quantized_head(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with the head in 8 bits, of a tied one beside the embedding."""
    head = params.get("lm_head", params["embed"])
    return params | {"lm_head": head if is_quantized(head) else quantize_head(head)}


_quantize = jax.jit(quantize_matrix, static_argnames="num_inputs")
