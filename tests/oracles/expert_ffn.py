"""Routed experts by definition, one pair at a time, in float64."""

import numpy as np

from tests.oracles import fp8


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    """By its tanh approximation."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def expert_ffn(x, expert_ids, expert_weights, w_gate_up, w_down, activation=silu):
    """Sum of each row's weighted experts; an id outside [0, E) adds nothing."""
    out = np.zeros(x.shape)
    for t, row in enumerate(np.asarray(x, np.float64)):
        for e, weight in zip(expert_ids[t], expert_weights[t], strict=True):
            if 0 <= e < len(w_down):
                gate = row @ np.asarray(w_gate_up[e, :, 0], np.float64)
                up = row @ np.asarray(w_gate_up[e, :, 1], np.float64)
                inner = activation(gate) * up
                out[t] += weight * (inner @ np.asarray(w_down[e], np.float64))
    return out


def expert_ffn_fp8(x, expert_ids, expert_weights, w_gate_up, w_down, activation=silu):
    """The same with matrices and rows in 8 bits; rows between the products have the type of `x`."""
    out = np.zeros(x.shape)
    for t, e in np.argwhere((expert_ids >= 0) & (expert_ids < len(w_down))):
        expert = expert_ids[t, e]
        gate, up = fp8.matmul(x[t], w_gate_up[expert], fp8.quantized)
        inner = (activation(gate) * up).astype(x.dtype)
        out[t] += expert_weights[t, e] * fp8.matmul(inner, w_down[expert], fp8.quantized)
    return out
