"""Typed reading of a `config.json`, and refusal of entries that no family supports.

Two spellings of rotary embedding are supported: top-level `rope_theta` / `rope_scaling`, and
`rope_parameters` of transformers 5.
"""

import math
import reprlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

Json = Mapping[str, Any]
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlist = _SHORT.maxdict = 20

# The JSON type of each entry that is a list or an object.
_KINDS: dict[str, Any] = {
    "architectures": (list, str),
    "auto_map": Mapping,
    "layer_types": list,
    "mlp_only_layers": list,
    "rope_scaling": Mapping,
    "rope_parameters": Mapping,
    "dllm_jax": Mapping,
    "dflash_config": Mapping,
    "text_config": Mapping,
}
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_MOST = 2**31 - 1
_LENGTH = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _LENGTH)


class ConfigError(ValueError):
    """A `config.json` that cannot be used; `problems` lists every reason."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


def well_formed(config: Json, problems: list[str]) -> Json:
    """The config without the entries of a wrong JSON type; each of them becomes a problem."""
    kept = dict(config)
    for key, kind in _KINDS.items():
        if kept.get(key) is not None and not isinstance(kept[key], kind):
            name = "an object" if kind is Mapping else "a list"
            problems.append(f"{key}={kept.pop(key)!r} must be {name} or null")
    return kept


class Fields:
    """The entries of a config by type; an entry that is missing or wrong becomes a problem.

    Attributes:
        problems: Reasons to refuse the config.
        notes: Warnings that do not prevent reading.
    """

    def __init__(self, config: Json, problems: list[str], notes: list[str]):
        self.config, self.problems, self.notes = config, problems, notes

    def renamed(self, names: Mapping[str, str]) -> "Fields":
        """The same entries with keys renamed, old -> new, to those of a known dialect."""
        config = {names.get(key, key): value for key, value in self.config.items()}
        return Fields(config, self.problems, self.notes)

    def whole(self, key: str, default: int | None = None, low: int = 1, most: int = _MOST) -> int:
        """A whole number in [low, most], `low` 0 or 1; 0 and a problem if it is not."""
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            kind = "a positive whole number" if low else "a whole number, 0 or more"
            self.problems.append(f"{key}={value!r} must be {kind}")
            return 0
        if value > most:
            self.problems.append(f"{key}={value} must be at most {most}; correct config.json")
            return 0
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        inside: Json | None = None,
        most: float = sys.float_info.max,
    ) -> Any:
        """A number in (0, most] of the config or of the object `inside`; 0 and a problem if not."""
        value = (self.config if inside is None else inside).get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            limit = "" if most == sys.float_info.max else f", at most {most}"
            self.problems.append(f"{key}={shown(value)} must be a positive number{limit}")
            return 0.0
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; the default if the entry is null or missing."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key}={value!r} must be true or false")
        return value if isinstance(value, bool) else default

    def must_be(self, key: str, *allowed: Any, why: str) -> None:
        """Add a problem unless the entry is null, missing or one of `allowed`."""
        value = self.config.get(key)
        if value is None or any(value is one or (value == one) is True for one in allowed):
            return
        rule = " or ".join(_json(one) for one in allowed)
        self.problems.append(f"{key}={shown(value)} is not supported; only {rule} is ({why})")

    def object(self, key: str) -> Json:
        """A JSON object; empty if the entry is missing."""
        value = self.config.get(key)
        return cast("Json", value) if isinstance(value, Mapping) else {}

    def divided(self, heads_key: str, width_key: str, stated_by: str | None = None) -> int:
        """Width of a head, computed because the config does not state it.

        Args:
            stated_by: The entry of the dialect that could state it, if any.
        """
        heads, width = self.config.get(heads_key), self.config.get(width_key)
        if not (isinstance(heads, int) and isinstance(width, int)) or min(heads, width) < 1:
            return 1  # already reported as a problem
        if width % heads:
            unsaid = f"{stated_by} is not given and " if stated_by else ""
            remedy = f"state {stated_by}" if stated_by else "correct config.json"
            self.problems.append(
                f"{unsaid}{heads_key}={heads} does not divide {width_key}={width}; {remedy}"
            )
        return max(width // heads, 1)


class Rope(NamedTuple):
    """Rotary embedding as a config states it.

    Attributes:
        scaling: Fields of `Llama3Scaling` or `YarnScaling`, None without scaling.
        partial: Share of a head that is rotated; None if the config does not state it.
    """

    theta: float
    scaling: dict[str, Any] | None
    partial: float | None


def rope(fields: Fields) -> Rope:
    """Rotary embedding in either spelling; an unsupported kind becomes a problem."""
    config, scaling = fields.config, None
    said: list[Any] = []
    for key in _ROPE_KEYS:
        entry = fields.object(key)
        if any(isinstance(value, Mapping) for value in entry.values()):
            fields.problems.append(f"{key} differs from layer to layer, which is not supported")
            continue
        kind = entry.get("rope_type", entry.get("type"))
        if kind == "llama3":
            scaling = _llama3(fields, key)
        elif kind == "yarn":
            scaling = _yarn(fields, key)
        elif kind not in (None, "default"):
            fields.problems.append(
                f'{key} type {kind!r} is not supported; only null, "default", "llama3" or "yarn" is'
            )
        said += [entry["rope_theta"]] if "rope_theta" in entry else []
    said += [config["rope_theta"]] if config.get("rope_theta") is not None else []
    if len(said) > 1 and said[0] != said[1]:
        fields.notes.append(f"rope_theta is stated as {said[0]} and as {said[1]}; using {said[0]}")
    theta = fields.number("rope_theta", inside={"rope_theta": said[0] if said else None})
    shares = (*(fields.object(key) for key in reversed(_ROPE_KEYS)), config)
    partial = next((s["partial_rotary_factor"] for s in shares if _has_share(s)), None)
    if partial is not None:
        partial = fields.number(
            "partial_rotary_factor", inside={"partial_rotary_factor": partial}, most=1
        )
    return Rope(theta, scaling, partial)


def common_refusals(fields: Fields, *, windows: bool = False) -> None:
    """Add the problems common to all families: sliding windows, unknown activations.

    Args:
        windows: The caller reads sliding windows, so they are no problem.
    """
    config = fields.config
    fields.must_be("hidden_act", "silu", why="the feed-forward half is SwiGLU")
    if config.get("use_sliding_window") and not windows:
        fields.problems.append("use_sliding_window=true is not supported; only full attention is")
    kinds = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if kinds and not windows:
        fields.problems.append(f'layer_types holds {kinds}; only "full_attention" is supported')
    fields.must_be("use_mrope", False, why="positions are those of one text")


def no_partial_rope(fields: Fields, partial: float | None) -> None:
    """Add a problem if only a part of a head is rotated."""
    if partial not in (None, 1.0):
        fields.problems.append(
            f"partial_rotary_factor={partial} is not supported; only 1.0 is in this family"
        )


def _llama3(fields: Fields, key: str) -> dict[str, Any] | None:
    entry, before = fields.object(key), len(fields.problems)
    factor, low, high, length = (fields.number(name, inside=entry) for name in _LLAMA3)
    if len(fields.problems) > before:
        return None
    if high <= low or length % 1:
        fields.problems.append(
            f"{key}: high_freq_factor={high} must be above low_freq_factor={low}, and "
            f"original_max_position_embeddings={length} whole; correct config.json"
        )
        return None
    return {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position": int(length),
    }


def _yarn(fields: Fields, key: str) -> dict[str, Any] | None:
    """YaRN scaling; missing entries have the defaults of transformers."""
    entry, before = fields.object(key), len(fields.problems)
    config = fields.config
    unsaid = entry.get(_LENGTH, config.get("max_position_embeddings"))
    longest = fields.number(_LENGTH, inside={_LENGTH: config.get(_LENGTH, unsaid)}, most=_MOST)
    factor = fields.number("factor", inside=entry, most=_MOST)
    fast, slow = (
        fields.number(name, usual, inside=entry)
        for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    above, below = (
        None if entry.get(name) is None else fields.number(name, inside=entry)
        for name in ("mscale", "mscale_all_dim")
    )
    usual = 1.0
    if factor > 1:
        growth = 0.1 * math.log(factor)
        usual = 1 + growth
        if above is not None and below is not None:
            usual = (1 + above * growth) / (1 + below * growth)
    attention = fields.number("attention_factor", usual, inside=entry)
    truncate = Fields(entry, fields.problems, fields.notes).flag("truncate", True)
    if len(fields.problems) > before:
        return None
    if factor < 1 or fast <= slow or longest % 1:
        fields.problems.append(
            f"{key}: factor={factor} must be at least 1, beta_fast={fast} above beta_slow={slow}, "
            f"and {_LENGTH}={longest} whole; correct config.json"
        )
        return None
    return {
        "factor": factor,
        "original_max_position": int(longest),
        "attention_factor": attention,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": truncate,
    }


def _has_share(entry: Json) -> bool:
    return entry.get("partial_rotary_factor") is not None


def shown(value: Any) -> str:
    """A value for a message: booleans as in JSON, others as in Python and cut where long."""
    return str(value).lower() if isinstance(value, bool) else _SHORT.repr(value)


def _json(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else shown(value)
