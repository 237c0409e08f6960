"""The table of SDAR-MoE and Qwen3-MoE: the dense names, and experts in one of three forms.

The hub holds a tensor an expert; training frameworks merge them, and transformers 5 packs gates
and ups together. No code, only the table.
"""

from . import hf_dense, parts
from .spec import Rule
from .table import Table

_EXPERTS = "model.layers.{i}.mlp.experts."
_GATE_UP = "layers.{i}.experts_gate_up"
_DOWN = "layers.{i}.experts_down"
_ALL_DOWNS = Rule(_EXPERTS + "down_proj", _DOWN, parts.ALL_DOWNS)

SPLIT = (
    Rule(_EXPERTS + "{e}.gate_proj.weight", _GATE_UP, parts.EXPERT_GATE),
    Rule(_EXPERTS + "{e}.up_proj.weight", _GATE_UP, parts.EXPERT_UP),
    Rule(_EXPERTS + "{e}.down_proj.weight", _DOWN, parts.MATRIX),
)
MERGED = (
    Rule(_EXPERTS + "gate_proj", _GATE_UP, parts.ALL_GATES),
    Rule(_EXPERTS + "up_proj", _GATE_UP, parts.ALL_UPS),
    _ALL_DOWNS,
)
PACKED = (
    Rule(_EXPERTS + "gate_up_proj", _GATE_UP, parts.ALL_GATES_AND_UPS),
    _ALL_DOWNS,
)
FORMS = (SPLIT, MERGED, PACKED)
ROUTER = Rule("model.layers.{i}.mlp.gate.weight", "layers.{i}.router", parts.MATRIX)

TABLE = Table((*hf_dense.TABLE.rules, ROUTER), choices=(FORMS,))
