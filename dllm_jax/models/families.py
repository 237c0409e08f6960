"""From a checkpoint's `config.json` to a family, a network config and the family's defaults.

Data flow: `config.json` -> which family -> facts of the network (`DenseConfig`) and how it is
usually decoded (`FamilyDefaults`). Works on dictionaries only: nothing here reads a file, knows a
tensor name or runs a strategy. Every problem of a config is collected into one `ConfigError`.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from dllm_jax.models.config_fields import Json, network_fields, refusals, well_formed
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.special_tokens import TokenizerFacts, first_id, ids, mask_id, stop_ids


class ConfigError(ValueError):
    """A `config.json` that cannot be used; `problems` lists every reason."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyDefaults:
    """How a model is decoded when the user names no settings. Hashable: static in a `Model`.

    Attributes:
        strategy: Name of the strategy (a module of `strategies`).
        block_size: Tokens of a block; 1 for a model that was trained token by token.
        buffer_size: Blocks in the window.
        stop_token_ids: Ids that end a text, ascending.
        vocab_limit: Rows of the vocabulary at or past this id belong to no token.
    """

    family: str
    strategy: str
    block_size: int
    buffer_size: int = 1
    accept_threshold: float = 0.95
    add_block_threshold: float = 0.1
    semi_complete_threshold: float = 0.9
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    vocab_limit: int


class Parsed(NamedTuple):
    """The outcome of `parse_config`; `notes` are the warnings worth showing to a user."""

    family: str
    config: DenseConfig
    defaults: FamilyDefaults
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table below: how a family is recognised, and its constants."""

    name: str
    architecture: str
    model_type: str
    shift: bool
    strategy: str
    block_size: int
    mask_token_id: int | None  # None: the model has no mask token
    stop_token_ids: tuple[int, ...]


# Source: the published config.json and tokenizer files of JetLM/SDAR-* and Qwen/Qwen3-*.
FAMILIES = (
    Family(
        name="sdar",
        architecture="SDARForCausalLM",
        model_type="sdar",
        shift=False,
        strategy="multi_bd",
        block_size=4,
        mask_token_id=151669,
        stop_token_ids=(151643, 151645),
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        shift=True,
        strategy="ar",
        block_size=1,
        mask_token_id=None,
        stop_token_ids=(151643, 151645),
    ),
)

# Strategy settings a config.json of ours may carry under "dllm_jax", with their types.
_SETTINGS = {
    "strategy": str,
    "block_size": int,
    "buffer_size": int,
    "accept_threshold": float,
    "add_block_threshold": float,
    "semi_complete_threshold": float,
}


def parse_config(
    config: Json,
    generation_config: Json | None = None,
    tokenizer: TokenizerFacts | None = None,
    *,
    name: str = "",
) -> Parsed:
    """Read a Hugging Face `config.json`.

    Args:
        config: The parsed file.
        generation_config: The parsed `generation_config.json`, where the folder has one.
        tokenizer: What the folder's tokenizer files say.
        name: Name of the folder; an ending such as `-b32` states the native block size.

    Raises:
        ConfigError: With every problem found.
    """
    problems: list[str] = []
    config = well_formed(config, problems)
    family = find_family(config)
    generation = generation_config or {}
    facts = tokenizer or TokenizerFacts()
    problems += refusals(config)
    notes: list[str] = []
    network = network_fields(config, problems)
    vocab: int = network["vocab_size"]
    if facts.num_tokens is not None and facts.num_tokens > vocab > 0:
        problems.append(
            f"the tokenizer has {facts.num_tokens} tokens but vocab_size={vocab}; "
            "use the tokenizer that belongs to these weights"
        )
    limit = min(vocab, facts.num_tokens or vocab)
    ends = (generation.get("eos_token_id"), config.get("eos_token_id"), facts.eos_token_id)
    stops = stop_ids(ends, family.stop_token_ids, vocab, limit, notes)
    pads = (config.get("pad_token_id"), generation.get("pad_token_id"), facts.pad_token_id)
    mask = -1
    if family.mask_token_id is not None and vocab:
        usual = family.mask_token_id
        sources = {
            "config.json": config.get("mask_token_id"),
            "the tokenizer": facts.mask_token_id,
            f"the {family.name} family": usual if usual < vocab else None,
        }
        stated = {i for value in pads for i in ids(value)}
        mask = mask_id(sources, vocab, {*stops, *stated}, problems, notes)
    settings = _settings(config, family, name, problems, notes)
    cfg = None
    if not problems:
        try:
            cfg = DenseConfig(**network, shift=family.shift, mask_token_id=mask)
        except ValueError as error:
            problems.append(str(error))
    if problems or cfg is None:
        raise ConfigError(problems)
    defaults = FamilyDefaults(
        family=family.name,
        **settings,
        stop_token_ids=stops,
        pad_token_id=first_id(vocab, (*pads, *stops)),
        vocab_limit=limit,
    )
    return Parsed(family.name, cfg, defaults, tuple(notes))


def config_json(family: str, cfg: DenseConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` of a network: what `parse_config` reads back to the same `cfg`."""
    row = next(f for f in FAMILIES if f.name == family)
    mask = {} if cfg.mask_token_id < 0 else {"mask_token_id": cfg.mask_token_id}
    return {
        "architectures": [row.architecture],
        "model_type": row.model_type,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.ffn_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "max_position_embeddings": cfg.max_position,
        "tie_word_embeddings": cfg.tie_embeddings,
        "torch_dtype": dtype,
        **mask,
    }


def find_family(config: Json) -> Family:
    """Which family a config belongs to: its architecture, then `auto_map`, then `model_type`.

    `model_type` speaks only where no class is named: a Qwen3 classifier or a diffusion model that
    calls itself "llama" must not pass for the plain language model.

    Raises:
        ConfigError: If the family is not known.
    """
    stated = config.get("architectures")
    named = [stated] if isinstance(stated, str) else list(stated or ())[:1]
    named += [
        str(value).rsplit(".", 1)[-1]
        for key, value in (config.get("auto_map") or {}).items()
        if key.startswith("AutoModel")
    ]
    model_type = config.get("model_type")
    for family in FAMILIES:
        if family.architecture in named or (not named and family.model_type == model_type):
            return family
    known = ", ".join(f"{f.architecture} ({f.model_type})" for f in FAMILIES)
    shown = named[0] if named else None
    raise ConfigError(
        [f"architecture {shown!r} (model_type {model_type!r}) is unknown; known are {known}"]
    )


def _settings(
    config: Json, family: Family, name: str, problems: list[str], notes: list[str]
) -> dict[str, Any]:
    """Strategy and sizes: the `dllm_jax` entry over the stated block size over the family's."""
    suffix = re.search(r"-b(\d+)$", name)
    native = next((config[k] for k in ("bd_size", "block_size") if config.get(k)), None)
    if family.mask_token_id is None:
        native = family.block_size
    elif native is None:
        native = int(suffix[1]) if suffix else family.block_size
    elif suffix and int(suffix[1]) != native:
        notes.append(
            f"{name} names blocks of {suffix[1]} but config.json says {native}; using that"
        )
    settings: dict[str, Any] = {"strategy": family.strategy, "block_size": native}
    own = config.get("dllm_jax") or {}
    for key, value in own.items():
        kind = _SETTINGS.get(key)
        if kind is None:
            problems.append(f'"dllm_jax": unknown key {key!r}; known are {", ".join(_SETTINGS)}')
        elif isinstance(value, bool) or not isinstance(
            value, int | float if kind is float else kind
        ):
            problems.append(f'"dllm_jax": {key}={value!r} must be of type {kind.__name__}')
        else:
            settings[key] = kind(value)
    for key in ("block_size", "buffer_size"):
        size = settings.get(key, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            problems.append(f"{key}={settings[key]!r} must be a positive whole number")
    return settings
