"""The table of DFlash drafters: Qwen3's layers, a projection of the target's states, no embedding.

z-lab's files have no `model.` before a name, exports of NeMo Automodel have one, and transformers
calls the projection an encoder. No code, only the table.
"""

from . import hf_dense, parts
from .spec import Rule
from .table import Rules, Table

_BARE = tuple(
    Rule(rule.pattern.removeprefix("model."), rule.path, rule.part)
    for rule in (*hf_dense.NORMS, *hf_dense.ATTENTION, *hf_dense.MLP)
)
_FINAL = Rule("norm.weight", "final_norm", parts.VECTOR)


def _ends(projection: str, norm: str) -> Rules:
    return (
        Rule(f"{projection}.weight", "fc", parts.MATRIX),
        Rule(f"{norm}.weight", "context_norm", parts.VECTOR),
    )


def _prefixed(rules: Rules) -> Rules:
    return tuple(Rule(f"model.{rule.pattern}", rule.path, rule.part) for rule in rules)


_Z_LAB = (*_ends("fc", "hidden_norm"), _FINAL, *_BARE)
_MUSE = (*_ends("encoder.fc", "encoder.output_norm_enc"), _FINAL, *_BARE)

TABLE = Table((), choices=((_Z_LAB, _prefixed(_Z_LAB), _MUSE, _prefixed(_MUSE)),))
