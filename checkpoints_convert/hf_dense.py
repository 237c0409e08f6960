"""The table of the dense families with Hugging Face's names: those of Llama, Qwen2 and Qwen3.

A rule whose leaf a model lacks (a bias, the norms of queries and keys) asks for nothing. No code,
only the table.
"""

from . import parts
from .spec import Rule
from .table import Table

_FROM = "model.layers.{i}."
_TO = "layers.{i}."

ENDS = (
    Rule("model.embed_tokens.weight", "embed", parts.TABLE),
    Rule("model.norm.weight", "final_norm", parts.VECTOR),
    Rule("lm_head.weight", "lm_head", parts.TABLE),
)
NORMS = (
    Rule(_FROM + "input_layernorm.weight", _TO + "attn_norm", parts.VECTOR),
    Rule(_FROM + "post_attention_layernorm.weight", _TO + "mlp_norm", parts.VECTOR),
)
ATTENTION = (
    Rule(_FROM + "self_attn.q_proj.weight", _TO + "wqkv", parts.QUERIES),
    Rule(_FROM + "self_attn.k_proj.weight", _TO + "wqkv", parts.KEY),
    Rule(_FROM + "self_attn.v_proj.weight", _TO + "wqkv", parts.VALUE),
    Rule(_FROM + "self_attn.q_proj.bias", _TO + "bqkv", parts.QUERY_BIAS),
    Rule(_FROM + "self_attn.k_proj.bias", _TO + "bqkv", parts.KEY_BIAS),
    Rule(_FROM + "self_attn.v_proj.bias", _TO + "bqkv", parts.VALUE_BIAS),
    Rule(_FROM + "self_attn.q_norm.weight", _TO + "q_norm", parts.VECTOR),
    Rule(_FROM + "self_attn.k_norm.weight", _TO + "k_norm", parts.VECTOR),
    Rule(_FROM + "self_attn.o_proj.weight", _TO + "wo", parts.OUTPUT),
    Rule(_FROM + "self_attn.o_proj.bias", _TO + "bo", parts.VECTOR),
)
MLP = (
    Rule(_FROM + "mlp.gate_proj.weight", _TO + "w_gate_up", parts.GATE),
    Rule(_FROM + "mlp.up_proj.weight", _TO + "w_gate_up", parts.UP),
    Rule(_FROM + "mlp.down_proj.weight", _TO + "w_down", parts.MATRIX),
)

TABLE = Table((*ENDS, *NORMS, *ATTENTION, *MLP))
