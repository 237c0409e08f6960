"""The table of the dense families with Hugging Face names: SDAR and Qwen3 share it.

Leaves have their input axis first and are fused as the forward pass reads them (see
`dllm_jax.models.dense`); files hold torch's `[out, in]` matrices, one a projection. No code, only
the table.
"""

import re

import numpy as np

from checkpoints_convert.spec import Part, Rule

_VECTOR = Part(axes=(0,))
_TABLE = Part(axes=(0, 1))  # [V, D] on both sides
_MATRIX = Part(axes=(1, 0))  # [in, out] of ours, [out, in] in the file
_QUERIES = Part(axes=(1, 2, 3, 0), rows=3, index=np.s_[:, :, :-2])  # [D, G, n, H] -> [G n H, D]
_KEY = Part(axes=(1, 2, 0), rows=2, index=np.s_[:, :, -2])  # [D, G, H] -> [G H, D]
_VALUE = Part(axes=(1, 2, 0), rows=2, index=np.s_[:, :, -1])
_OUTPUT = Part(axes=(2, 0, 1), rows=1)  # [N, H, D] -> [D, N H]
_GATE = Part(axes=(1, 0), index=np.s_[:, 0])  # [D, F] -> [F, D]
_UP = Part(axes=(1, 0), index=np.s_[:, 1])

_FROM = "model.layers.{i}."
_TO = "layers.{i}."

RULES = (
    Rule("model.embed_tokens.weight", "embed", _TABLE),
    Rule("model.norm.weight", "final_norm", _VECTOR),
    Rule("lm_head.weight", "lm_head", _TABLE),
    Rule(_FROM + "input_layernorm.weight", _TO + "attn_norm", _VECTOR),
    Rule(_FROM + "self_attn.q_proj.weight", _TO + "wqkv", _QUERIES),
    Rule(_FROM + "self_attn.k_proj.weight", _TO + "wqkv", _KEY),
    Rule(_FROM + "self_attn.v_proj.weight", _TO + "wqkv", _VALUE),
    Rule(_FROM + "self_attn.q_norm.weight", _TO + "q_norm", _VECTOR),
    Rule(_FROM + "self_attn.k_norm.weight", _TO + "k_norm", _VECTOR),
    Rule(_FROM + "self_attn.o_proj.weight", _TO + "wo", _OUTPUT),
    Rule(_FROM + "post_attention_layernorm.weight", _TO + "mlp_norm", _VECTOR),
    Rule(_FROM + "mlp.gate_proj.weight", _TO + "w_gate_up", _GATE),
    Rule(_FROM + "mlp.up_proj.weight", _TO + "w_gate_up", _UP),
    Rule(_FROM + "mlp.down_proj.weight", _TO + "w_down", _MATRIX),
)

EMBED = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

# Tensors that carry nothing the network needs: rotary tables that old versions stored.
IGNORED = (re.compile(r".*\.rotary_emb\.inv_freq"), re.compile(r".*\.rope\.freqs"))
