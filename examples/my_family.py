"""A model family of your own: a masked model with Llama's layers and names of its own.

    dllm-jax inspect FOLDER --family examples/my_family.py:FAMILY
    dllm-jax generate --model FOLDER --family examples/my_family.py:FAMILY
    python examples/my_family.py

A family is how its config is read, how its tensors are named, and how it is decoded. `main` writes
a small checkpoint and holds its logits to `reference`, which says in NumPy what the network is.
"""

import numpy as np

from dllm_jax.convert.config.parsers import hf
from dllm_jax.convert.tensor_names import LLAMA, ConfigKeys
from dllm_jax.models.family_table import Family

_ENTRIES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_width": "intermediate_size",
    "theta": "rope_theta",
    "eps": "rms_norm_eps",
    "context": "max_position_embeddings",
}
_TENSORS = {
    "model.embed_tokens.weight": "tok.weight",
    "model.norm.weight": "out_norm.weight",
    "lm_head.weight": "out.weight",
    "model.layers.{i}.input_layernorm.weight": "blocks.{i}.norm1.weight",
    "model.layers.{i}.post_attention_layernorm.weight": "blocks.{i}.norm2.weight",
    **{f"model.layers.{{i}}.self_attn.{x}_proj.weight": f"blocks.{{i}}.{x}.weight" for x in "qkvo"},
    **{
        f"model.layers.{{i}}.mlp.{x}_proj.weight": f"blocks.{{i}}.{x}.weight"
        for x in ("gate", "up", "down")
    },
}

FAMILY = Family(
    family="pebble",
    architecture="PebbleForMaskedLM",
    dialect=lambda fields, layers: hf(fields.renamed(_ENTRIES), layers),
    tensors=LLAMA.renamed(_TENSORS, ConfigKeys(layers="depth")),
    shift=False,  # row i of the output is about token i
    attention="full",
    strategy="full_sequence",
    block_size=32,
    buffer_size=8,
    block_length=32,
    accept_threshold=0.9,
    mask_token_id=None,  # config.json or the tokenizer states it
    mask_tokens=("<mask>",),
    stop_tokens=(),
)

CONFIG = {  # of a checkpoint that is small enough for a test
    "architectures": ["PebbleForMaskedLM"],
    "width": 32,
    "depth": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_width": 48,
    "theta": 10000.0,
    "eps": 1e-6,
    "context": 256,
    "vocab_size": 64,
    "mask_token_id": 63,
    "eos_token_id": 0,
}


def reference(tensors, config, ids, visible):
    """Logits [T, V] of ids [T]; `visible[i, j]`: token i sees token j."""
    t = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    heads, groups = config["heads"], config["kv_heads"]
    size = config["width"] // heads
    angles = np.outer(np.arange(len(ids)), config["theta"] ** (-np.arange(0, size, 2) / size))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["eps"]) * scale

    def rotated(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = t["tok.weight"][ids]
    for i in range(config["depth"]):
        of = {name: t[f"blocks.{i}.{name}.weight"] for name in ("q", "k", "v", "o")}
        y = norm(x, t[f"blocks.{i}.norm1.weight"])
        q, k, v = ((y @ of[name].T).reshape(len(ids), -1, size) for name in "qkv")
        k, v = (np.repeat(one, heads // groups, axis=1) for one in (rotated(k), v))
        scores = np.einsum("ihd,jhd->hij", rotated(q), k) / np.sqrt(size)
        weights = np.exp(np.where(visible, scores, -np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", weights, v).reshape(len(ids), -1) @ of["o"].T
        y = norm(x, t[f"blocks.{i}.norm2.weight"])
        gate, up = (y @ t[f"blocks.{i}.{name}.weight"].T for name in ("gate", "up"))
        x = x + gate / (1 + np.exp(-gate)) * up @ t[f"blocks.{i}.down.weight"].T
    return norm(x, t["out_norm.weight"]) @ t["out.weight"].T


if __name__ == "__main__":
    from dllm_jax.convert.testing import check_family

    check_family(FAMILY, CONFIG, reference)
    print("every tensor has its place, and the logits are the reference's")
