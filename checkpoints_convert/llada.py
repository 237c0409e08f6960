"""The table of LLaDA-8B, which kept OLMo's names.

Beware: a block's `ff_proj` is the gate, its `up_proj` the factor and its `ff_out` the way down;
the `ff_out` outside of the blocks is the head. No code, only the table.
"""

from . import parts
from .spec import Rule
from .table import ConfigKeys, Table

_ROOT = "model.transformer."
_FROM = _ROOT + "blocks.{i}."
_TO = "layers.{i}."

TABLE = Table(
    (
        Rule(_ROOT + "wte.weight", "embed", parts.TABLE),
        Rule(_ROOT + "ln_f.weight", "final_norm", parts.VECTOR),
        Rule(_ROOT + "ff_out.weight", "lm_head", parts.TABLE),
        Rule(_FROM + "attn_norm.weight", _TO + "attn_norm", parts.VECTOR),
        Rule(_FROM + "q_proj.weight", _TO + "wqkv", parts.QUERIES),
        Rule(_FROM + "k_proj.weight", _TO + "wqkv", parts.KEY),
        Rule(_FROM + "v_proj.weight", _TO + "wqkv", parts.VALUE),
        Rule(_FROM + "q_proj.bias", _TO + "bqkv", parts.QUERY_BIAS),
        Rule(_FROM + "k_proj.bias", _TO + "bqkv", parts.KEY_BIAS),
        Rule(_FROM + "v_proj.bias", _TO + "bqkv", parts.VALUE_BIAS),
        Rule(_FROM + "attn_out.weight", _TO + "wo", parts.OUTPUT),
        Rule(_FROM + "ff_norm.weight", _TO + "mlp_norm", parts.VECTOR),
        Rule(_FROM + "ff_proj.weight", _TO + "w_gate_up", parts.GATE),
        Rule(_FROM + "up_proj.weight", _TO + "w_gate_up", parts.UP),
        Rule(_FROM + "ff_out.weight", _TO + "w_down", parts.MATRIX),
    ),
    embed=_ROOT + "wte.weight",
    lm_head=_ROOT + "ff_out.weight",
    keys=ConfigKeys(layers="n_layers", tied="weight_tying", vocab="embedding_size"),
)
