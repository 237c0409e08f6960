"""Weights in 8 bits: the choice of matrices, and their conversion.

The embedding, norms, biases and routers keep their type. So does the head, unless requested
otherwise: it is read once a step and decides every token.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
from jaxtyping import Array

from dllm_jax.kernels.expert_ffn.fp8 import Fp8Experts, quantize_experts
from dllm_jax.kernels.layer.fp8 import LINE, Fp8Matrix, quantize_matrix
from dllm_jax.kernels.token_readout.head import Fp8Head, quantize_head
from dllm_jax.models.dflash import DFlashConfig
from dllm_jax.models.sharding import Split
from dllm_jax.models.split_axes import split_axis

Quantization = Literal["fp8", "none"]
QUANTIZATIONS: tuple[Quantization, ...] = ("fp8", "none")
# Matrices that are stored in 8 bits, with the number of their leading axes that are contracted.
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
STORED = frozenset({*_INPUTS, "experts_gate_up", "experts_down"})  # all that are
HEAD = "lm_head"


def stays_small(path: tuple[Any, ...], is_by_output: bool) -> bool:
    """Whether a leaf that a folder stores in few bits is held in 8 bits.

    Args:
        path: Key path of the leaf.
        is_by_output: It is stored in e4m3 with a scale for each output. A head in another form is
            held in 16 bits.
    """
    return path[-1] in STORED or (path == (HEAD,) and is_by_output)


def input_axes(name: str) -> tuple[int, ...]:
    """Axes that a product contracts, for a head or a leaf with a name in `STORED`."""
    return tuple(range(_INPUTS[name])) if name in _INPUTS else (1,)


def stored_width(name: str, depth: int, split: Split | None = None) -> int:
    """Stored numbers of an output: its inputs and the zeros that fill their last line."""
    is_filled = name.startswith("experts") or _is_filled(name, split)
    return -(-depth // LINE) * LINE if is_filled and depth > LINE else depth


def as_stored(
    name: str, values: Array, scales: Array, depth: int, split: Split | None = None
) -> Fp8Matrix | Fp8Experts | Fp8Head:
    """The leaf of this name, from stored 8-bit numbers.

    Args:
        values: Contracted axis last, with length `stored_width`.
    """
    if name == HEAD:
        return Fp8Head(values, scales)
    if name not in _INPUTS:
        return Fp8Experts(values, scales, depth)
    is_longer = stored_width(name, depth, split) > depth
    return Fp8Matrix(values, scales, depth if is_longer else None)


def unsupported(config: Any) -> str | None:
    """Why a network of this config has no form in 8 bits, or None."""
    if isinstance(config, DFlashConfig):
        return "a draft has no form in 8 bits; its target may have one"
    return None


def quantized(
    path: tuple[Any, ...], leaf: jax.Array, split: Split | None = None
) -> jax.Array | Fp8Matrix | Fp8Experts:
    """A leaf of a parameter tree in the form of an 8-bit model.

    Args:
        path: Key path of the leaf.
        split: The devices that share the leaf; each rounds its part.
    """
    name = getattr(path[-1], "key", path[-1])
    return _quantize(leaf, name, split) if name in STORED else leaf


def shapes_like(params: Any, shapes: Any) -> Any:
    """Shapes of weights, with the same 8-bit leaves as `params`."""

    def shape(path: Any, leaf: Any, shape: Any) -> Any:
        if isinstance(leaf, Fp8Head):
            return jax.eval_shape(quantize_head, shape)
        return jax.eval_shape(lambda w: quantized(path, w), shape) if is_quantized(leaf) else shape

    return jax.tree_util.tree_map_with_path(shape, params, shapes, is_leaf=is_quantized)


def is_quantized(leaf: Any) -> bool:
    """Whether a node of a parameter tree is a matrix, experts or a head in 8 bits."""
    return isinstance(leaf, Fp8Matrix | Fp8Experts | Fp8Head)


def trimmed(params: Any) -> Any:
    """Parameters without the zeros after a matrix's inputs, which devices would split as inputs."""
    return jax.tree.map(
        lambda leaf: leaf.trimmed if isinstance(leaf, Fp8Matrix) else leaf,
        params,
        is_leaf=is_quantized,
    )


def with_quantized_head(params: dict[str, Any], split: Split | None = None) -> dict[str, Any]:
    """Parameters with the head in 8 bits; a tied embedding is kept as well."""
    head = params.get(HEAD, params["embed"])
    return params | {HEAD: head if is_quantized(head) else quantized_head(head, split)}


@functools.partial(jax.jit, static_argnames=("name", "split"))
def _quantize(w: Array, name: str, split: Split | None) -> Fp8Matrix | Fp8Experts:
    body = quantize_experts
    if name in _INPUTS:
        how = {"num_inputs": _INPUTS[name], "is_filled": _is_filled(name, split)}
        body = functools.partial(quantize_matrix, **how)
    if split is None:
        return body(w)
    result = jax.eval_shape(body, w)
    # If inputs are split, the largest number of an output is taken over all devices.
    if _shares_inputs(name, split):
        body = functools.partial(body, axis=split.axis)
    return _in_parts(body, w, name, split, result)


def _is_filled(name: str, split: Split | None) -> bool:
    """Whether zeros fill the last line of a matrix's outputs."""
    return name == "w_down" and not _shares_inputs(name, split)


def _shares_inputs(name: str, split: Split | None) -> bool:
    """Whether devices share the inputs of a matrix."""
    return split is not None and name in _INPUTS and split_axis((name,)) == 0


@functools.partial(jax.jit, static_argnames="split")
def quantized_head(head: Array, split: Split | None = None) -> Fp8Head:
    """A head in 8 bits, a scale for each id."""
    if split is None:
        return quantize_head(head)
    return _in_parts(quantize_head, head, HEAD, split, jax.eval_shape(quantize_head, head))


def _in_parts(body: Callable[..., Any], w: Array, name: str, split: Split, result: Any) -> Any:
    """`body(w)` on each device for its part; `result` has the form of the whole."""
    own, rounded = split.specs({name: w}), split.specs({name: result})
    return split.run(body, (w,), (own[name],), rounded[name])
