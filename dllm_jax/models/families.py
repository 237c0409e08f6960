"""From a checkpoint's `config.json` to a family, a network config and the family's defaults.

Data flow: `config.json` -> row of `family_table` -> network config (by the dialect's parser) and
`FamilyDefaults`. One `ConfigError` lists every problem of a config.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_type_hints

from dllm_jax.convert.config.canvas import diffusion_gemma, numbers
from dllm_jax.convert.config.drafts import dflash
from dllm_jax.convert.config.fields import ConfigError, Fields, Json, well_formed
from dllm_jax.convert.config.parsers import PARSERS, Parser
from dllm_jax.convert.config.special_tokens import TokenizerFacts, first_id, ids, mask_id, stop_ids
from dllm_jax.convert.config.writers import WRITERS
from dllm_jax.convert.json_fields import check_fields
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.dflash import DFlashConfig
from dllm_jax.models.family import Family, FamilyDefaults
from dllm_jax.models.family_settings import settings_of
from dllm_jax.models.family_table import DRAFTS, DREAMON, FAMILIES, RELATIVES, UNI, family_named
from dllm_jax.models.gemma import GemmaConfig
from dllm_jax.models.layers import Llama3Scaling, YarnScaling
from dllm_jax.models.moe import MoEConfig

MOST_ENDS = 32  # most ids that end a text, the capacity of a slot
_PARSERS: Mapping[str, Parser] = {**PARSERS, "dflash": dflash, "diffusion_gemma": diffusion_gemma}
# Families whose model_type another family uses too.
_MODEL_TYPES = {
    "dream": "Dream",
    "dream_reasoner": "Dream",
    "stable_diffcoder": "llama",
    "open_dcoder": "qwen2",
}
# Entries with ids that make a text longer or shorter while it is written.
_RESIZES = re.compile(r"(expand|delete|insert|split|merge)\w*_token_ids?")


class Parsed(NamedTuple):
    """The result of `parse_config`; `notes` are warnings for the user."""

    family: str
    config: DenseConfig
    defaults: FamilyDefaults
    notes: tuple[str, ...]


def parse_config(
    config: Json,
    generation_config: Json | None = None,
    tokenizer: TokenizerFacts | None = None,
    *,
    name: str = "",
    family: Family | None = None,
) -> Parsed:
    """Read a Hugging Face `config.json`.

    Args:
        config: The parsed file.
        generation_config: The parsed `generation_config.json`, if the folder has one. Only its ids
            and DiffusionGemma's denoising settings are read. A temperature belongs to another
            decoding loop; the table has that of the model card.
        tokenizer: The contents of the folder's tokenizer files.
        name: Name of the folder or repository; `-b32` in it states the native block size, other
            parts change defaults.
        family: A family defined by the caller; None: the built-in one that the config names.

    Raises:
        ConfigError: The config is refused; lists every problem.
    """
    problems: list[str] = []
    notes: list[str] = []
    fields = Fields(well_formed(config, problems), problems, notes)
    generation, facts = generation_config or {}, tokenizer or TokenizerFacts()
    family = family or find_family(fields.config, name, facts)
    parser = _PARSERS[family.dialect] if isinstance(family.dialect, str) else family.dialect
    network = parser(fields, family.layers)
    scaling = network.get("rope_scaling") or {}
    if "beta_fast" in scaling:  # YaRN: a config may state the length before stretching
        longest = int(scaling["factor"] * scaling["original_max_position"])
        network["max_position"] = max(network["max_position"], longest)
    tokens = _tokens(fields, family, network["vocab_size"], generation, facts)
    settings = settings_of(fields, family, network, name, "delete_token_id" in tokens)
    _refuse_resizing(fields, family, generation, facts)
    if family.dialect == "diffusion_gemma":
        settings["numbers"] = numbers(generation, problems)
    cfg = None
    if not problems:
        try:
            mask = {"mask_token_id": tokens.pop("mask_token_id")}
            cfg = config_from_json(family, {"shift": family.shift, **mask, **network})
        except ValueError as error:
            problems.append(str(error))
    if problems or cfg is None:
        raise ConfigError(problems)
    defaults = FamilyDefaults(**settings, **tokens)
    return Parsed(family.name, cfg, defaults, tuple(notes))


def config_json(family: str, cfg: DenseConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` of a network: `parse_config` reads it back to the same `cfg`.

    Raises:
        ValueError: An unknown family.
    """
    row = family_named(family)
    assert isinstance(row.dialect, str)  # true of built-in families
    mask = {} if cfg.mask_token_id < 0 else {"mask_token_id": cfg.mask_token_id}
    return {
        "architectures": [row.architecture],
        "model_type": (*row.model_types, _MODEL_TYPES.get(family))[0],
        **WRITERS[row.dialect](cfg, row.layers),
        "torch_dtype": dtype,
        **mask,
    }


def find_family(config: Json, name: str = "", tokenizer: TokenizerFacts | None = None) -> Family:
    """The family of a config, by its architecture, then `auto_map`, then `model_type`.

    `model_type` counts only where no class is named: a Qwen3 classifier, or a diffusion model of
    type "llama", must not pass for the plain language model.

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
    shown = f"architecture {named[0] if named else None!r} (model_type {model_type!r})"
    if any(re.search(UNI, str(text), re.IGNORECASE) for text in (*named, model_type, name)):
        raise ConfigError([f"{shown} is LLaDA2.0-Uni, which also reads images: not supported"])
    if "speculators_model_type" in config:  # the class name may be z-lab's
        raise ConfigError([_relative(shown, "speculator")])
    for said in named or [model_type]:
        for family in (*FAMILIES, *DRAFTS):
            if said not in (family.architecture, *family.also, *family.model_types):
                continue
            if not family.is_marked or _mask_of(config, family, tokenizer) is not None:
                return family
        if reason := _relative(shown, said):
            raise ConfigError([reason])
    known = ", ".join(f"{f.architecture} ({f.name})" for f in (*FAMILIES, *DRAFTS))
    unknown = f"{shown} is unknown; known are {known}; docs/models.md lists what is planned"
    raise ConfigError([_relative(shown, model_type) or _relative(shown, name) or unknown])


def _mask_of(config: Json, family: Family, tokenizer: TokenizerFacts | None) -> Any:
    """The mask that the config or the tokenizer names."""
    stated = config.get("mask_token_id")
    return tokenizer and tokenizer.mask_id(*family.mask_tokens) if stated is None else stated


def _relative(shown: str, said: Any) -> str:
    """The reason to refuse a class, type or name in `RELATIVES`; empty for others."""
    for pattern, reason in RELATIVES.items():
        if isinstance(said, str) and re.fullmatch(pattern, said, re.IGNORECASE):
            return f"{shown} is not supported: {reason}"
    return ""


def _refuse_resizing(
    fields: Fields, family: Family, generation: Json, facts: TokenizerFacts
) -> None:
    """Refuse a denoising model with ids that resize text and that its family does not know."""
    said = {**generation, **fields.config}
    found = [
        f"{key}={said[key]!r}"
        for key in sorted(said)
        if _RESIZES.fullmatch(key) and key not in family.edits and said[key] not in (None, -1, [])
    ]
    if not family.edits and facts.id_of("<|expand|>") is not None:
        found.append("the token <|expand|>")
    is_named = any(DREAMON in problem for problem in fields.problems)  # one line is enough
    if found and family.mask_tokens and not is_named:
        fields.problems.append(f"{' and '.join(found)}: this is a model such as {DREAMON}")


def config_from_json(family: str | Family, mapping: Mapping[str, Any]) -> DenseConfig:
    """A network config from its fields, as written by `dataclasses.asdict` or read from JSON.

    Raises:
        TypeError: An unknown entry, or one that is missing.
        ValueError: An unknown family, or an entry with an invalid value.
    """
    entries = dict(mapping)
    if (scaling := entries.get("rope_scaling")) is not None:
        kind = YarnScaling if "beta_fast" in scaling else Llama3Scaling
        entries["rope_scaling"] = _made(kind, "rope_scaling", scaling)
    row = family_named(family) if isinstance(family, str) else family
    if row.dialect == "dflash":
        return _made(DFlashConfig, "config", entries)
    if row.dialect == "diffusion_gemma":
        return _made(GemmaConfig, "config", entries)
    return _made(MoEConfig if "num_experts" in entries else DenseConfig, "config", entries)


def defaults_from_json(mapping: Mapping[str, Any], family: Family | None = None) -> FamilyDefaults:
    """Defaults from their fields, as written by `dataclasses.asdict` or read from JSON.

    The family's row fills in entries that older versions did not write.

    Raises:
        TypeError: An unknown entry, or one that is missing.
        ValueError: An unknown family, or an entry with an invalid value.
    """
    row = family or family_named(str(mapping.get("family")))
    usual = {"attention": row.attention, "alternatives": row.alternatives}
    return _made(FamilyDefaults, "defaults", {**usual, **mapping})


def _made(kind: Any, path: str, entries: Mapping[str, Any]) -> Any:
    """A dataclass whose fields have the types that it declares; JSON lists become tuples."""
    hints = get_type_hints(kind)
    check_fields(path, entries, {name: hints[name] for name in entries if name in hints})
    return kind(**{name: _as_tuple(value) for name, value in entries.items()})


def _as_tuple(value: Any) -> Any:
    """A JSON list as a tuple, recursively."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _tokens(
    fields: Fields, family: Family, rows: int, generation: Json, facts: TokenizerFacts
) -> dict[str, Any]:
    """Ids of mask, end and padding tokens, and the end of the vocabulary.

    Args:
        rows: Rows of the embedding.
    """
    config, problems, notes = fields.config, fields.problems, fields.notes
    if facts.num_tokens is not None and facts.num_tokens > rows > 0:
        problems.append(
            f"the tokenizer has {facts.num_tokens} tokens but vocab_size={rows}; "
            "use the tokenizer that belongs to these weights"
        )
    stated = config.get("vocab_size")
    limit = min(rows, facts.num_tokens or rows, stated if isinstance(stated, int) else rows)
    ends = (generation.get("eos_token_id"), config.get("eos_token_id"), facts.eos_token_id)
    usual_ends = dict(family.stop_tokens)
    stated_ends = {i for value in ends for i in ids(value)}
    if len(stated_ends) > MOST_ENDS:
        problems.append(
            f"eos_token_id names {len(stated_ends)} ids; at most {MOST_ENDS} end a text: name fewer"
        )
        ends, stated_ends = (), set()

    def is_own(token: int | None, *texts: str) -> bool:
        """Whether an id of the family means the same in this checkpoint's vocabulary."""
        if token is None:
            return False
        if facts.vocabulary:
            return any(facts.vocabulary.get(text) == token for text in texts)
        return token < limit and not stated_ends.isdisjoint(usual_ends)

    own = {i for i, text in family.stop_tokens if is_own(i, text)}
    stops = stop_ids(ends, own, rows, notes)
    foreign = [i for i in usual_ends if i < limit and i not in own | {*stops}]
    if foreign and (facts.vocabulary or stated_ends):
        notes.append(
            f"the {family.name} family's stop ids {', '.join(map(str, foreign))} are not used: "
            + (
                "the tokenizer has other tokens there"
                if facts.vocabulary
                else "nothing says that this is the family's vocabulary"
            )
        )
    pads = (config.get("pad_token_id"), generation.get("pad_token_id"), facts.pad_token_id)
    mask = -1
    if family.mask_tokens and rows:
        usual = family.mask_token_id
        sources = {
            "config.json": config.get("mask_token_id"),
            "the tokenizer": facts.mask_id(*family.mask_tokens),
            f"the {family.name} family": usual if is_own(usual, *family.mask_tokens) else None,
        }
        said = {i for value in pads for i in ids(value)}
        mask = mask_id(sources, rows, {*stops, *said}, problems, notes)
    unread = {i for key in family.unread for i in ids(config.get(key)) if 0 <= i < rows}
    edits = {key: i for key in family.edits for i in ids(config.get(key)) if 0 <= i < rows}
    forbidden = {*edits.values()}
    return {
        "mask_token_id": mask,
        "stop_token_ids": stops,
        "forbidden_token_ids": tuple(sorted(forbidden)),
        **(edits if len(forbidden) == 2 else {}),
        "unread_token_ids": tuple(sorted(unread)),
        "pad_token_id": first_id(rows, (*pads, family.pad_token_id, *stops)),
        "vocab_limit": limit,
    }
