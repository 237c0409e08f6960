"""The table of LLaDA2 (2.0 to 2.2, DMax): Ling's attention names, and the experts of `hf_moe`.

One tensor holds all queries, then all keys, then all values. No code, only the table.
"""

from . import hf_dense, hf_moe, parts
from .spec import Rule
from .table import Table

_FROM = "model.layers.{i}."
_TO = "layers.{i}."
_FUSED = _FROM + "attention.query_key_value."
_SHARED = _FROM + "mlp.shared_experts."
_BIAS = _TO + "router_bias"

RULES = (
    Rule("model.word_embeddings.weight", "embed", parts.TABLE),
    Rule("model.norm.weight", "final_norm", parts.VECTOR),
    Rule("lm_head.weight", "lm_head", parts.TABLE),
    *hf_dense.NORMS,
    Rule(_FUSED + "weight", _TO + "wqkv", parts.QUERIES),
    Rule(_FUSED + "weight", _TO + "wqkv", parts.KEY),
    Rule(_FUSED + "weight", _TO + "wqkv", parts.VALUE),
    Rule(_FUSED + "bias", _TO + "bqkv", parts.QUERY_BIAS),
    Rule(_FUSED + "bias", _TO + "bqkv", parts.KEY_BIAS),
    Rule(_FUSED + "bias", _TO + "bqkv", parts.VALUE_BIAS),
    Rule(_FROM + "attention.query_layernorm.weight", _TO + "q_norm", parts.VECTOR),
    Rule(_FROM + "attention.key_layernorm.weight", _TO + "k_norm", parts.VECTOR),
    Rule(_FROM + "attention.dense.weight", _TO + "wo", parts.OUTPUT),
    Rule(_FROM + "attention.dense.bias", _TO + "bo", parts.VECTOR),
    *hf_dense.MLP,
    hf_moe.ROUTER,
    Rule(_SHARED + "gate_proj.weight", _TO + "shared_gate_up", parts.GATE),
    Rule(_SHARED + "up_proj.weight", _TO + "shared_gate_up", parts.UP),
    Rule(_SHARED + "down_proj.weight", _TO + "shared_down", parts.MATRIX),
)
BIAS_NAMES = (
    (Rule(_FROM + "mlp.gate.expert_bias", _BIAS, parts.VECTOR),),
    (Rule(_FROM + "mlp.gate.e_score_correction_bias", _BIAS, parts.VECTOR),),
)

TABLE = Table(
    RULES,
    choices=(hf_moe.FORMS, BIAS_NAMES),
    embed="model.word_embeddings.weight",
)
