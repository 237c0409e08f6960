"""From a checkpoint's `config.json` to a family, a network config and the family's defaults.

Data flow: `config.json` -> which family -> facts of the network (`DenseConfig`) and how it is
usually decoded (`FamilyDefaults`). Works on dictionaries only: nothing here reads a file, knows a
tensor name or runs a strategy. Every problem of a config is collected into one `ConfigError`.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dllm_jax.models.dense import DenseConfig

Json = Mapping[str, Any]


class ConfigError(ValueError):
    """A `config.json` that cannot be used; `problems` lists every reason."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What a folder's tokenizer files say; None where they say nothing.

    Attributes:
        num_tokens: Ids in use, added tokens counted: the highest id plus one.
    """

    num_tokens: int | None = None
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None


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
_MAX_POSITION = 32768  # where a config names no length
_NORM_EPS = 1e-6  # the default of Qwen3Config


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
    family = find_family(config)
    generation = generation_config or {}
    facts = tokenizer or TokenizerFacts()
    problems: list[str] = list(refusals(config))
    notes: list[str] = []
    network = _network(config, problems)
    vocab = network.get("vocab_size", 0)
    limit = min(vocab, facts.num_tokens or vocab)
    if facts.num_tokens is not None and vocab and facts.num_tokens > vocab:
        problems.append(
            f"the tokenizer has {facts.num_tokens} tokens but vocab_size={vocab}; "
            "use the tokenizer that belongs to these weights"
        )
    stops = _stop_ids(config, generation, facts, family, vocab, notes)
    pad = _first_id(
        vocab,
        config.get("pad_token_id"),
        generation.get("pad_token_id"),
        facts.pad_token_id,
        *stops,
        0,
    )
    mask = _mask_id(config, facts, family, vocab, {pad, *stops}, problems, notes)
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
        pad_token_id=pad,
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
        "rope_scaling": None,
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
    named = list(config.get("architectures") or [])[:1]
    auto_map = config.get("auto_map")
    if isinstance(auto_map, Mapping):
        named += [
            str(value).rsplit(".", 1)[-1]
            for key, value in auto_map.items()
            if str(key).startswith("AutoModel")
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


def refusals(config: Json) -> Iterable[str]:
    """Features of a config that this network does not have; each is a reason to refuse it."""
    act = config.get("hidden_act", "silu")
    if act != "silu":
        yield f'hidden_act={act!r} is not supported; only "silu" is'
    if config.get("use_sliding_window"):
        yield "use_sliding_window=true is not supported; only full attention is"
    kinds = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if kinds:
        yield f'layer_types holds {kinds}; only "full_attention" is supported'
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            yield f"{key}=true is not supported; these families have no bias"
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if any(isinstance(value, Mapping) for value in rope.values()):
            yield f"{key} differs from layer to layer, which is not supported"
        elif kind != "default":
            yield f'{key} type {kind!r} is not supported; only null or "default" is'
    partial = (config.get("rope_parameters") or {}).get(
        "partial_rotary_factor", config.get("partial_rotary_factor", 1.0)
    )
    if partial not in (None, 1, 1.0):
        yield f"partial_rotary_factor={partial} is not supported; only 1.0 is"
    quantised = config.get("quantization_config") or config.get("compression_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        yield (
            f"the weights are quantised (quant_method={method!r}), which is not supported; "
            "use the bfloat16 checkpoint"
        )


def _network(config: Json, problems: list[str]) -> dict[str, Any]:
    """The fields of `DenseConfig` that the file states, problems noted."""

    def whole(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{key}={value!r} must be a positive whole number")
            return 0
        return value

    def number(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            problems.append(f"{key}={value!r} must be a positive number")
            return 0.0
        return float(value)

    heads, hidden = whole("num_attention_heads"), whole("hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None and heads and hidden % heads:
        problems.append(
            f"head_dim is not given and num_attention_heads={heads} does not divide "
            f"hidden_size={hidden}; state head_dim"
        )
    rope = {**config, **(config.get("rope_parameters") or {})}
    return {
        "vocab_size": whole("vocab_size"),
        "hidden_size": hidden,
        "num_layers": whole("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": whole("num_key_value_heads", heads),
        "head_dim": whole("head_dim", max(hidden // max(heads, 1), 1)),
        "ffn_size": whole("intermediate_size"),
        "rope_theta": number("rope_theta", rope.get("rope_theta")),
        "norm_eps": number("rms_norm_eps", config.get("rms_norm_eps", _NORM_EPS)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_position": whole("max_position_embeddings", _MAX_POSITION),
    }


def _ids(value: Any) -> list[int]:
    """An id, a list of ids or nothing, as a list."""
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]


def _first_id(vocab: int, *candidates: Any) -> int:
    return next(i for value in candidates for i in _ids(value) if 0 <= i < max(vocab, 1))


def _stop_ids(
    config: Json,
    generation: Json,
    facts: TokenizerFacts,
    family: Family,
    vocab: int,
    notes: list[str],
) -> tuple[int, ...]:
    """The union of what every file says; the family's own ids where the vocabulary has them."""
    stated = _ids(generation.get("eos_token_id")) + _ids(config.get("eos_token_id"))
    stated += _ids(facts.eos_token_id)
    for token in sorted({i for i in stated if not 0 <= i < vocab}):
        notes.append(f"eos_token_id={token} lies outside the vocabulary of {vocab}; ignored")
    limit = facts.num_tokens or vocab
    return tuple(
        sorted(
            {i for i in stated if 0 <= i < vocab} | {i for i in family.stop_token_ids if i < limit}
        )
    )


def _mask_id(
    config: Json,
    facts: TokenizerFacts,
    family: Family,
    vocab: int,
    ends: set[int],
    problems: list[str],
    notes: list[str],
) -> int:
    """The config's id, then the tokenizer's, then the family's; -1 for a model without one.

    A config whose mask is its pad or eos id is wrong (published SDAR-MoE configs have been): the
    next source is taken and the choice is told.
    """
    if family.mask_token_id is None:
        return -1
    constant = family.mask_token_id if family.mask_token_id < vocab else None
    stated = config.get("mask_token_id")
    sources = {
        "config.json": stated,
        "the tokenizer": facts.mask_token_id,
        f"the {family.name} family": constant,
    }
    given = {where: i for where, i in sources.items() if i is not None}
    if stated in ends and len(given) > 1:
        given = {where: i for where, i in given.items() if where != "config.json"}
    if not given:
        problems.append(
            "no mask token is known; set mask_token_id in config.json or mask_token in "
            "tokenizer_config.json"
        )
        return -1
    where, chosen = next(iter(given.items()))
    told = {w: i for w, i in sources.items() if i is not None}
    if len(set(told.values())) > 1:
        says = ", ".join(f"{w} says {i}" for w, i in told.items())
        notes.append(f"mask token in conflict: {says}; using {chosen} of {where}")
    if not isinstance(chosen, int) or not 0 <= chosen < vocab:
        problems.append(f"mask_token_id={chosen!r} lies outside the vocabulary of {vocab}")
        return -1
    return chosen


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
        elif not isinstance(value, int | float if kind is float else kind):
            problems.append(f'"dllm_jax": {key}={value!r} must be of type {kind.__name__}')
        else:
            settings[key] = kind(value)
    for key in ("block_size", "buffer_size"):
        if not isinstance(settings.get(key, 1), int) or settings.get(key, 1) < 1:
            problems.append(f"{key}={settings[key]!r} must be a positive whole number")
    return settings


def _published(
    family: str, layers: int, width: int, heads: int, ffn: int, *, tied: bool = False
) -> dict[str, Any]:
    """One published config.json; all of these share vocabulary, KV heads and head size."""
    cfg = DenseConfig(
        vocab_size=151936,
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=ffn,
        tie_embeddings=tied,
        max_position=32768 if family == "sdar" else 40960,
        shift=family != "sdar",
        mask_token_id=151669 if family == "sdar" else -1,
    )
    return {**config_json(family, cfg), "eos_token_id": 151645, "pad_token_id": 151643}


# Source: config.json of these repositories on the Hugging Face hub. For `random:NAME`.
PUBLISHED: dict[str, dict[str, Any]] = {
    "JetLM/SDAR-1.7B-Chat": _published("sdar", 28, 2048, 16, 6144),
    "JetLM/SDAR-4B-Chat": _published("sdar", 36, 2560, 32, 9728),
    "JetLM/SDAR-8B-Chat": _published("sdar", 36, 4096, 32, 12288),
    "Qwen/Qwen3-0.6B": _published("qwen3", 28, 1024, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _published("qwen3", 28, 2048, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _published("qwen3", 36, 2560, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _published("qwen3", 36, 4096, 32, 12288),
}
