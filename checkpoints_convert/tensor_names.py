"""The tensor names of every family, and the part of a parameter leaf that each tensor fills.

Leaves have their input axis first and are fused as the forward pass reads them (see
`dllm_jax.models.dense` and `moe`); files hold torch's `[out, in]` matrices. `TABLES` at the end has
the table of each family.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

import numpy as np

from .rules import EXPERT, Part, Rule, listed, numbered

Rules = tuple[Rule, ...]
Forms = tuple[Rules, ...]


@dataclasses.dataclass(frozen=True)
class ConfigKeys:
    """Keys in `config.json` of facts that tensors may contradict."""

    layers: str = "num_hidden_layers"
    tied: str = "tie_word_embeddings"
    vocab: str = "vocab_size"


@dataclasses.dataclass(frozen=True)
class Table:
    """The rules by which the tensors of a family fill the tree.

    Attributes:
        rules: The rules that every checkpoint follows.
        choices: Sets of alternatives, the usual one first; a checkpoint follows one of each set.
        ignored: Names of tensors that are skipped with a note.
        kept: Modules of the published class that stay in 16 bits although they have no tensor, as
            compressed-tensors spells them.
        embed: Name of the embedding.
        lm_head: Name of the head. A tied model may hold it as a copy of the embedding.
        has_own_head: A head that differs from the embedding is used, whatever the config says.
    """

    rules: Rules
    choices: tuple[Forms, ...] = ()
    ignored: re.Pattern[str] | None = None
    kept: tuple[str, ...] = ()
    embed: str = "model.embed_tokens.weight"
    lm_head: str = "lm_head.weight"
    has_own_head: bool = False
    keys: ConfigKeys = ConfigKeys()

    def rules_for(self, names: Iterable[str] = (), *, single: bool = False) -> Rules:
        """The rules of files with tensors of these names; without names, the usual rules.

        Args:
            single: Use the forms with a tensor for each expert, regardless of `names`.
        """
        held = tuple(names)
        chosen: list[Rules] = []
        for forms in self.choices:
            each = [form for form in forms if any(EXPERT in rule.pattern for rule in form)]
            forms = each if single and each else forms
            chosen.append(max(forms, key=lambda form: _known(form, held)))
        return self.rules + tuple(rule for form in chosen for rule in form)

    def renamed(self, names: Mapping[str, str], keys: ConfigKeys | None = None) -> "Table":
        """The table of a family that gives the same tensors other names.

        Args:
            names: Old name -> new name; `{i}` is the layer in both.
            keys: Keys of the other `config.json`; None: those of this table.

        Raises:
            ValueError: A name is not in this table.
        """
        known = {rule.pattern for rule in self.every_rule()}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{listed(unknown)}: no such name to change; it has {listed(known)}")

        def changed(rules: Rules) -> Rules:
            return tuple(
                dataclasses.replace(rule, pattern=names.get(rule.pattern, rule.pattern))
                for rule in rules
            )

        return dataclasses.replace(
            self,
            rules=changed(self.rules),
            choices=tuple(tuple(map(changed, forms)) for forms in self.choices),
            embed=names.get(self.embed, self.embed),
            lm_head=names.get(self.lm_head, self.lm_head),
            keys=keys or self.keys,
        )

    def every_rule(self) -> Rules:
        """The rules of all forms."""
        return self.rules + tuple(r for forms in self.choices for form in forms for r in form)


def _known(rules: Rules, names: tuple[str, ...]) -> int:
    """The number of names that match a rule."""
    return sum(numbered(rules, name) is not None for name in names)


# Silently ignored tensors: rotary tables of old versions, averaged copies of weights.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq|.*\.rope\.freqs|(.*[._])?ema([._].*)?")

# Parts of leaves.

VECTOR = Part((0,))
ROWS = Part((0, 1))  # [V, D] on both sides
MATRIX = Part((1, 0))  # [in, out] of ours, [out, in] in the file

# wqkv [D, G, n + 2, H]: for each KV group its n query heads, its key, its value.
QUERIES = Part((1, 2, 3, 0), (3, 1), np.s_[:, :, :-2])  # [D, G, n, H] -> [G n H, D]
KEY = Part((1, 2, 0), (2, 1), np.s_[:, :, -2])  # [D, G, H] -> [G H, D]
VALUE = Part((1, 2, 0), (2, 1), np.s_[:, :, -1])
# bqkv [G, n + 2, H]
QUERY_BIAS = Part((0, 1, 2), (3,), np.s_[:, :-2])
KEY_BIAS = Part((0, 1), (2,), np.s_[:, -2])
VALUE_BIAS = Part((0, 1), (2,), np.s_[:, -1])
OUTPUT = Part((2, 0, 1), (1, 2))  # [N, H, D] -> [D, N H]

# w_gate_up [D, C, 2, W], F = C W
GATE = Part((1, 2, 0), (2, 1), np.s_[:, :, 0])  # [D, C, W] -> [F, D]
UP = Part((1, 2, 0), (2, 1), np.s_[:, :, 1])
# the same of one expert, [D, 2, F]
EXPERT_GATE = Part((1, 0), index=np.s_[:, 0])  # [D, F] -> [F, D]
EXPERT_UP = Part((1, 0), index=np.s_[:, 1])

# experts_gate_up [E, D, 2, F] and experts_down [E, F, D], all experts in one tensor
ALL_GATES = Part((0, 2, 1), index=np.s_[:, :, 0])  # [E, D, F] -> [E, F, D]
ALL_UPS = Part((0, 2, 1), index=np.s_[:, :, 1])
ALL_GATES_AND_UPS = Part((0, 2, 3, 1), (1, 2, 1))  # [E, D, 2, F] -> [E, 2 F, D]
ALL_DOWNS = Part((0, 2, 1))  # [E, F, D] -> [E, D, F]

# Llama, Qwen2, Qwen3 and their descendants. A rule without a leaf in the tree (a bias, the norms of
# queries and keys) is skipped.

_FROM = "model.layers.{i}."
_TO = "layers.{i}."

_ENDS = (
    Rule("model.embed_tokens.weight", "embed", ROWS),
    Rule("model.norm.weight", "final_norm", VECTOR),
    Rule("lm_head.weight", "lm_head", ROWS),
)
_NORMS = (
    Rule(_FROM + "input_layernorm.weight", _TO + "attn_norm", VECTOR),
    Rule(_FROM + "post_attention_layernorm.weight", _TO + "mlp_norm", VECTOR),
)
_ATTENTION = (
    Rule(_FROM + "self_attn.q_proj.weight", _TO + "wqkv", QUERIES),
    Rule(_FROM + "self_attn.k_proj.weight", _TO + "wqkv", KEY),
    Rule(_FROM + "self_attn.v_proj.weight", _TO + "wqkv", VALUE),
    Rule(_FROM + "self_attn.q_proj.bias", _TO + "bqkv", QUERY_BIAS),
    Rule(_FROM + "self_attn.k_proj.bias", _TO + "bqkv", KEY_BIAS),
    Rule(_FROM + "self_attn.v_proj.bias", _TO + "bqkv", VALUE_BIAS),
    Rule(_FROM + "self_attn.q_norm.weight", _TO + "q_norm", VECTOR),
    Rule(_FROM + "self_attn.k_norm.weight", _TO + "k_norm", VECTOR),
    Rule(_FROM + "self_attn.o_proj.weight", _TO + "wo", OUTPUT),
    Rule(_FROM + "self_attn.o_proj.bias", _TO + "bo", VECTOR),
)
_MLP = (
    Rule(_FROM + "mlp.gate_proj.weight", _TO + "w_gate_up", GATE),
    Rule(_FROM + "mlp.up_proj.weight", _TO + "w_gate_up", UP),
    Rule(_FROM + "mlp.down_proj.weight", _TO + "w_down", MATRIX),
)

LLAMA = Table((*_ENDS, *_NORMS, *_ATTENTION, *_MLP))
_A2D = dataclasses.replace(LLAMA, has_own_head=True)  # fine-tunes break ties

# SDAR-MoE and Qwen3-MoE: the dense names, and experts in one of three forms. Files on the hub have
# a tensor for each expert, training frameworks merge them, and transformers 5 packs gate and up.

_EXPERTS = "model.layers.{i}.mlp.experts."
_GATE_UP = "layers.{i}.experts_gate_up"
_DOWN = "layers.{i}.experts_down"
_ALL_DOWNS = Rule(_EXPERTS + "down_proj", _DOWN, ALL_DOWNS)

_SPLIT = (
    Rule(_EXPERTS + "{e}.gate_proj.weight", _GATE_UP, EXPERT_GATE),
    Rule(_EXPERTS + "{e}.up_proj.weight", _GATE_UP, EXPERT_UP),
    Rule(_EXPERTS + "{e}.down_proj.weight", _DOWN, MATRIX),
)
_MERGED = (
    Rule(_EXPERTS + "gate_proj", _GATE_UP, ALL_GATES),
    Rule(_EXPERTS + "up_proj", _GATE_UP, ALL_UPS),
    _ALL_DOWNS,
)
_PACKED = (
    Rule(_EXPERTS + "gate_up_proj", _GATE_UP, ALL_GATES_AND_UPS),
    _ALL_DOWNS,
)
_FORMS = (_SPLIT, _MERGED, _PACKED)
_ROUTER = Rule("model.layers.{i}.mlp.gate.weight", "layers.{i}.router", MATRIX)

_MOE = Table((*LLAMA.rules, _ROUTER), choices=(_FORMS,))


def _shared(at: str) -> Rules:
    """The expert that every row goes through."""
    return (
        Rule(at + "gate_proj.weight", _TO + "shared_gate_up", GATE),
        Rule(at + "up_proj.weight", _TO + "shared_gate_up", UP),
        Rule(at + "down_proj.weight", _TO + "shared_down", MATRIX),
    )


_LLADA_MOE = Table((*_MOE.rules, *_shared(_FROM + "shared_expert.")), choices=(_FORMS,))

# LLaDA-8B has OLMo's names. In a block `ff_proj` is the gate, `up_proj` is up and `ff_out` is down;
# the `ff_out` outside the blocks is the head.

_ROOT = "model.transformer."
_BLOCK = _ROOT + "blocks.{i}."

_LLADA = Table(
    (
        Rule(_ROOT + "wte.weight", "embed", ROWS),
        Rule(_ROOT + "ln_f.weight", "final_norm", VECTOR),
        Rule(_ROOT + "ff_out.weight", "lm_head", ROWS),
        Rule(_BLOCK + "attn_norm.weight", _TO + "attn_norm", VECTOR),
        Rule(_BLOCK + "q_proj.weight", _TO + "wqkv", QUERIES),
        Rule(_BLOCK + "k_proj.weight", _TO + "wqkv", KEY),
        Rule(_BLOCK + "v_proj.weight", _TO + "wqkv", VALUE),
        Rule(_BLOCK + "q_proj.bias", _TO + "bqkv", QUERY_BIAS),
        Rule(_BLOCK + "k_proj.bias", _TO + "bqkv", KEY_BIAS),
        Rule(_BLOCK + "v_proj.bias", _TO + "bqkv", VALUE_BIAS),
        Rule(_BLOCK + "attn_out.weight", _TO + "wo", OUTPUT),
        Rule(_BLOCK + "ff_norm.weight", _TO + "mlp_norm", VECTOR),
        Rule(_BLOCK + "ff_proj.weight", _TO + "w_gate_up", GATE),
        Rule(_BLOCK + "up_proj.weight", _TO + "w_gate_up", UP),
        Rule(_BLOCK + "ff_out.weight", _TO + "w_down", MATRIX),
    ),
    embed=_ROOT + "wte.weight",
    lm_head=_ROOT + "ff_out.weight",
    keys=ConfigKeys(layers="n_layers", tied="weight_tying", vocab="embedding_size"),
)

# LLaDA2 (2.0 to 2.2, DMax): Ling's attention names, and the expert forms of Qwen3-MoE. One tensor
# holds all queries, then all keys, then all values.

_FUSED = _FROM + "attention.query_key_value."
_BIAS = _TO + "router_bias"

_LLADA2_RULES = (
    Rule("model.word_embeddings.weight", "embed", ROWS),
    Rule("model.norm.weight", "final_norm", VECTOR),
    Rule("lm_head.weight", "lm_head", ROWS),
    *_NORMS,
    Rule(_FUSED + "weight", _TO + "wqkv", QUERIES),
    Rule(_FUSED + "weight", _TO + "wqkv", KEY),
    Rule(_FUSED + "weight", _TO + "wqkv", VALUE),
    Rule(_FUSED + "bias", _TO + "bqkv", QUERY_BIAS),
    Rule(_FUSED + "bias", _TO + "bqkv", KEY_BIAS),
    Rule(_FUSED + "bias", _TO + "bqkv", VALUE_BIAS),
    Rule(_FROM + "attention.query_layernorm.weight", _TO + "q_norm", VECTOR),
    Rule(_FROM + "attention.key_layernorm.weight", _TO + "k_norm", VECTOR),
    Rule(_FROM + "attention.dense.weight", _TO + "wo", OUTPUT),
    Rule(_FROM + "attention.dense.bias", _TO + "bo", VECTOR),
    *_MLP,
    _ROUTER,
    *_shared(_FROM + "mlp.shared_experts."),
)
_BIAS_NAMES = (
    (Rule(_FROM + "mlp.gate.expert_bias", _BIAS, VECTOR),),
    (Rule(_FROM + "mlp.gate.e_score_correction_bias", _BIAS, VECTOR),),
)

_LLADA2 = Table(
    _LLADA2_RULES,
    choices=(_FORMS, _BIAS_NAMES),
    embed="model.word_embeddings.weight",
)

# DFlash drafters: Qwen3's layers, a projection of the target's states, no embedding. Names of
# z-lab have no prefix, those of NeMo Automodel have `model.`; transformers calls the projection
# an encoder.

_BARE = tuple(
    Rule(rule.pattern.removeprefix("model."), rule.path, rule.part)
    for rule in (*_NORMS, *_ATTENTION, *_MLP)
)
_FINAL = Rule("norm.weight", "final_norm", VECTOR)


def _ends(projection: str, norm: str) -> Rules:
    return (
        Rule(f"{projection}.weight", "fc", MATRIX),
        Rule(f"{norm}.weight", "context_norm", VECTOR),
    )


def _prefixed(rules: Rules) -> Rules:
    return tuple(Rule(f"model.{rule.pattern}", rule.path, rule.part) for rule in rules)


_Z_LAB = (*_ends("fc", "hidden_norm"), _FINAL, *_BARE)
_MUSE = (*_ends("encoder.fc", "encoder.output_norm_enc"), _FINAL, *_BARE)

_DFLASH = Table((), choices=((_Z_LAB, _prefixed(_Z_LAB), _MUSE, _prefixed(_MUSE)),))

# DiffusionGemma: Gemma 4's names under `model.decoder`. The encoder shares these weights, and only
# its factor of each layer is stored. Global layers have no `v_proj`: keys also serve as values.
# Files on the hub pack the experts; some exports have a tensor for each expert.

_DECODER = "model.decoder."
_GEMMA_LAYER = _DECODER + "layers.{i}."
_GEMMA_ATTENTION = _GEMMA_LAYER + "self_attn."
_CONDITION = _DECODER + "self_conditioning."
# wqk [D, G, n + 1, H]: for each KV group its n query heads and its key.
_QK_QUERIES = Part(QUERIES.axes, QUERIES.groups, np.s_[:, :, :-1])
_QK_KEY = Part(KEY.axes, KEY.groups, np.s_[:, :, -1])


def _factor(mode: int) -> Part:
    return Part((0,), index=(np.s_[mode : mode + 1],))


def _gemma_experts(rules: Rules) -> Rules:
    return tuple(
        Rule(rule.pattern.replace(_EXPERTS, _GEMMA_LAYER + "experts."), rule.path, rule.part)
        for rule in rules
    )


_GEMMA = Table(
    (
        Rule(_DECODER + "embed_tokens.weight", "embed", ROWS),
        Rule(_DECODER + "norm.weight", "final_norm", VECTOR),
        Rule(_CONDITION + "pre_norm.weight", "condition_norm", VECTOR),
        Rule(_CONDITION + "gate_proj.weight", "condition_gate_up", GATE),
        Rule(_CONDITION + "up_proj.weight", "condition_gate_up", UP),
        Rule(_CONDITION + "down_proj.weight", "condition_down", MATRIX),
        Rule(_GEMMA_LAYER + "input_layernorm.weight", _TO + "attn_norm", VECTOR),
        Rule(_GEMMA_ATTENTION + "q_proj.weight", _TO + "wqkv", QUERIES),
        Rule(_GEMMA_ATTENTION + "k_proj.weight", _TO + "wqkv", KEY),
        Rule(_GEMMA_ATTENTION + "v_proj.weight", _TO + "wqkv", VALUE),
        Rule(_GEMMA_ATTENTION + "q_proj.weight", _TO + "wqk", _QK_QUERIES),
        Rule(_GEMMA_ATTENTION + "k_proj.weight", _TO + "wqk", _QK_KEY),
        Rule(_GEMMA_ATTENTION + "q_norm.weight", _TO + "q_norm", VECTOR),
        Rule(_GEMMA_ATTENTION + "k_norm.weight", _TO + "k_norm", VECTOR),
        Rule(_GEMMA_ATTENTION + "o_proj.weight", _TO + "wo", OUTPUT),
        Rule(_GEMMA_LAYER + "post_attention_layernorm.weight", _TO + "post_attn_norm", VECTOR),
        Rule(_GEMMA_LAYER + "pre_feedforward_layernorm.weight", _TO + "mlp_norm", VECTOR),
        Rule(_GEMMA_LAYER + "mlp.gate_proj.weight", _TO + "w_gate_up", GATE),
        Rule(_GEMMA_LAYER + "mlp.up_proj.weight", _TO + "w_gate_up", UP),
        Rule(_GEMMA_LAYER + "mlp.down_proj.weight", _TO + "w_down", MATRIX),
        Rule(_GEMMA_LAYER + "post_feedforward_layernorm_1.weight", _TO + "post_mlp_norm", VECTOR),
        Rule(_GEMMA_LAYER + "router.scale", _TO + "router_scale", VECTOR),
        Rule(_GEMMA_LAYER + "router.proj.weight", _TO + "router", MATRIX),
        Rule(_GEMMA_LAYER + "router.per_expert_scale", _TO + "expert_scale", VECTOR),
        Rule(_GEMMA_LAYER + "pre_feedforward_layernorm_2.weight", _TO + "pre_experts_norm", VECTOR),
        Rule(
            _GEMMA_LAYER + "post_feedforward_layernorm_2.weight", _TO + "post_experts_norm", VECTOR
        ),
        Rule(_GEMMA_LAYER + "post_feedforward_layernorm.weight", _TO + "post_ffn_norm", VECTOR),
        Rule(
            "model.encoder.language_model.layers.{i}.layer_scalar", _TO + "mode_scale", _factor(0)
        ),
        Rule(_GEMMA_LAYER + "layer_scalar", _TO + "mode_scale", _factor(1)),
    ),
    choices=(tuple(map(_gemma_experts, (_PACKED, _SPLIT, _MERGED))),),
    ignored=re.compile(
        r"model\.encoder\.(vision_tower|embed_vision)\..*|.*embed_vision\.embedding\..*"
    ),
    kept=(r"re:model\.encoder\..*\.router\.proj", r"re:model\.encoder\..*vision.*"),
    embed=_DECODER + "embed_tokens.weight",
)

TABLES = {
    **dict.fromkeys(("sdar", "qwen3", "dream", "dream_reasoner"), LLAMA),
    **dict.fromkeys(("stable_diffcoder", "fast_dllm_v2", "llama"), LLAMA),
    **dict.fromkeys(("illada", "open_dcoder"), LLAMA),
    **dict.fromkeys(("a2d_qwen3", "a2d_qwen2", "a2d_llama"), _A2D),
    "llada_moe": _LLADA_MOE,
    **dict.fromkeys(("sdar_moe", "qwen3_moe"), _MOE),
    "llada": _LLADA,
    "llada2": _LLADA2,
    "dflash": _DFLASH,
    "diffusion_gemma": _GEMMA,
}


def table_of(family: str) -> Table:
    """The table of a family.

    Raises:
        ValueError: The family has no table.
    """
    if family not in TABLES:
        raise ValueError(f"{family=} has no table of weights; known are {', '.join(TABLES)}")
    return TABLES[family]
