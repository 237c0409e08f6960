"""What each family computes, in NumPy float64 on the checkpoint's own tensors, written to be read.

One sequence, no cache, no fused tensors, a Python loop over layers, heads and experts; nothing of
the packages under test is used. `visible[i, j]` says whether position i sees position j.
`test_family_logits` holds it to what transformers says.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tests.oracles.family_files import Weights, layer_weights, merged, read_facts, read_weights

Array = np.ndarray

_QWEN2 = (
    "DreamModel",
    "Fast_dLLM_QwenForCausalLM",
    "A2DQwen2LMHeadModel",
    "Qwen2ForCausalLM",
)
_LLAMA = (
    "LLaDAModelLM",
    "StableDiffcoderForCausalLM",
    "LlamaForCausalLM",
    "ILLaDAForCausalLM",
    "A2DLlamaLMHeadModel",
)


class Routing(NamedTuple):
    """Of one layer: chosen experts [T k], their weights [T k], what the choice was made by [T E].

    `choice` is -inf where groups or the routing block exclude an expert.
    """

    ids: Array
    weights: Array
    choice: Array


class Reference(NamedTuple):
    """Logits [T V]; residual streams, the embedding first; routing of each layer with experts."""

    logits: Array
    hidden: list[Array]
    routing: dict[int, Routing]


def reference_logits(folder: Path, ids: Any, visible: Array, **options: Any) -> Array:
    """Logits [T V] of one sequence; see `run`."""
    return run(folder, ids, visible, **options).logits


def run(
    folder: Path,
    ids: Any,
    visible: Array,
    embeds: Array | None = None,
    adapter: Path | None = None,
    live: Array | None = None,
    start: int = 0,
    positions: Any = None,
) -> Reference:
    """One sequence through a checkpoint.

    Args:
        ids: Tokens [T], at positions `start` to `start + T - 1` unless `positions` says which.
        visible: bool [T T].
        embeds: Rows [T D] in place of the embedding of `ids`.
        adapter: Folder of a LoRA adapter, merged as the weights are read.
        live: bool [T], the rows that take part in what a routing block may use; None: all.
    """
    facts = read_facts(folder)
    weights = read_weights(folder)
    if adapter is not None:
        weights = merged(weights, adapter)
    table = weights[facts.embed]
    x = table[np.asarray(ids)] if embeds is None else np.asarray(embeds, np.float64)
    positions = start + np.arange(len(x)) if positions is None else np.asarray(positions)
    cos, sin = rope_angles(facts, positions)
    hidden, routing = [x], {}
    for i in range(facts.layers):
        layer = layer_weights(facts, weights, i)
        x = x + attention(
            facts, layer, rms(x, layer["input_layernorm.weight"], facts), visible, cos, sin
        )
        rows = rms(x, layer["post_attention_layernorm.weight"], facts)
        if facts.routed[i]:
            routing[i] = route(facts, rows, layer, positions, live)
            x = x + experts(facts, rows, layer, routing[i])
        else:
            x = x + swiglu(rows, layer, "mlp.")
        hidden.append(x)
    head = table if facts.tied else weights[facts.head]
    logits = rms(x, weights[facts.norm], facts) @ head.T * facts.logit_scale
    return Reference(logits, hidden, routing)


def visibility(kind: str, length: int, block: int = 1) -> Array:
    """Who sees whom: "full", "causal", or "block_causal" with blocks on the absolute grid."""
    query, key = np.indices((length, length))
    if kind == "full":
        return np.ones((length, length), bool)
    return key <= query if kind == "causal" else key // block <= query // block


def rms(x: Array, scale: Array, facts: SimpleNamespace) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + facts.eps) * scale


def rope_angles(facts: SimpleNamespace, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine [T R/2]."""
    frequencies = [
        _stretched(facts.theta ** (-2 * j / facts.rotated), facts.scaling)
        for j in range(facts.rotated // 2)
    ]
    angles = np.outer(positions, frequencies)
    return np.cos(angles), np.sin(angles)


def _stretched(frequency: float, scaling: dict[str, Any] | None) -> float:
    """Llama 3's frequencies: fast ones as they are, slow ones divided, a ramp between."""
    if scaling is None:
        return frequency
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    share = (original / wavelength - low) / (high - low)
    return (1 - share) * frequency / factor + share * frequency


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """One head's rows [T H]: component j turned with j + R/2, those past R left alone."""
    half = cos.shape[1]
    out = x.copy()
    out[:, :half] = x[:, :half] * cos - x[:, half : 2 * half] * sin
    out[:, half : 2 * half] = x[:, half : 2 * half] * cos + x[:, :half] * sin
    return out


def projected(x: Array, layer: Weights, name: str) -> Array:
    return x @ layer[name + ".weight"].T + layer.get(name + ".bias", 0.0)


def attention(
    facts: SimpleNamespace, layer: Weights, x: Array, visible: Array, cos: Array, sin: Array
) -> Array:
    """Head by head; a row that sees nothing gets zeros."""
    at, size = "self_attn.", facts.size
    q, k, v = (projected(x, layer, f"{at}{name}_proj") for name in "qkv")
    outs = []
    for head in range(facts.heads):
        shared = head // (facts.heads // facts.kv_heads)
        own, theirs = (slice(n * size, (n + 1) * size) for n in (head, shared))
        query, key = q[:, own], k[:, theirs]
        if facts.kind not in _QWEN2 + _LLAMA:
            query = rms(query, layer[at + "q_norm.weight"], facts)
            key = rms(key, layer[at + "k_norm.weight"], facts)
        scores = rotated(query, cos, sin) @ rotated(key, cos, sin).T / math.sqrt(size)
        odds = np.where(visible, np.exp(scores - scores.max(axis=1, keepdims=True)), 0.0)
        outs.append(odds @ v[:, theirs] / np.maximum(odds.sum(axis=1, keepdims=True), 1e-300))
    return projected(np.concatenate(outs, axis=1), layer, at + "o_proj")


def swiglu(x: Array, layer: Weights, at: str) -> Array:
    return _swiglu(x, *(layer[f"{at}{name}_proj.weight"] for name in ("gate", "up", "down")))


def _swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    inner = x @ gate.T
    return (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T


def route(
    facts: SimpleNamespace,
    x: Array,
    layer: Weights,
    positions: Array,
    live: Array | None = None,
) -> Routing:
    """Experts and weights of each row; of equal scores the lowest expert."""
    logits = x @ layer["mlp.gate.weight"].T
    if facts.kind != "LLaDA2MoeModelLM":
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = odds / odds.sum(axis=1, keepdims=True)
        ids = largest(scores, facts.chosen)
        weights = np.take_along_axis(scores, ids, axis=1)
        if facts.normalise:
            weights = weights / weights.sum(axis=1, keepdims=True)
        return Routing(ids, weights, scores)
    scores = 1 / (1 + np.exp(-logits))
    choice = scores + layer.get("mlp.gate.expert_bias", 0.0)
    if facts.capacity:
        choice = within_blocks(choice, positions // facts.routing_block, facts.capacity, live)
    elif (facts.groups or 0) > 1:
        choice = within_groups(choice, facts.groups, facts.kept_groups)
    ids = largest(choice, facts.chosen)
    weights = np.take_along_axis(scores, ids, axis=1)
    if facts.normalise and facts.chosen > 1:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return Routing(ids, weights * facts.scale, choice)


def largest(x: Array, count: int) -> Array:
    """Indices of the `count` largest of each row, best first, the lowest index of equal ones."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :count]


def within_groups(choice: Array, groups: int, kept: int) -> Array:
    """-inf outside of each row's groups with the largest sums of their two best."""
    grouped = choice.reshape(len(choice), groups, -1)
    sums = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    limited = np.full_like(grouped, -np.inf)
    for row, names in enumerate(largest(sums, kept)):
        limited[row, names] = grouped[row, names]
    return limited.reshape(choice.shape)


def within_blocks(choice: Array, block: Array, capacity: int, live: Array | None) -> Array:
    """-inf outside of the experts that the live rows of each block together score highest."""
    limited = np.full_like(choice, -np.inf)
    live = np.ones(len(choice), bool) if live is None else live
    for number in np.unique(block):
        rows = np.flatnonzero(block == number)
        best = choice[rows[live[rows]]].max(axis=0, initial=-np.inf)
        names = largest(best, capacity)
        limited[np.ix_(rows, names)] = choice[np.ix_(rows, names)]
    return limited


def experts(facts: SimpleNamespace, x: Array, layer: Weights, routing: Routing) -> Array:
    """The weighted sum of each row's experts, and the one every row goes through."""
    out = np.zeros_like(x)
    for row in range(len(x)):
        for expert, weight in zip(routing.ids[row], routing.weights[row], strict=True):
            out[row] += weight * _swiglu(x[row], *expert_weights(layer, int(expert)))
    for shared in ("mlp.shared_experts.", "shared_expert."):
        if shared + "gate_proj.weight" in layer:
            out = out + swiglu(x, layer, shared)
    return out


def expert_weights(layer: Weights, expert: int) -> tuple[Array, Array, Array]:
    """Gate, up and down of an expert, whichever way the file holds them."""
    at = "mlp.experts."
    if at + "gate_up_proj" in layer:
        gate, up = np.split(layer[at + "gate_up_proj"][expert], 2)
        return gate, up, layer[at + "down_proj"][expert]
    if at + "gate_proj" in layer:
        gate, up, down = (layer[f"{at}{name}_proj"][expert] for name in ("gate", "up", "down"))
    else:
        gate, up, down = (layer[f"{at}{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return gate, up, down
