"""The tokenizer files of a folder, read as plain JSON without transformers or remote code.

`config.special_tokens` decides between files that disagree, and `dllm_jax.loading.tokenizer` builds
a tokenizer from the parts.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from .config.special_tokens import TokenizerFacts
from .small_files import read_bytes

# All files that may form a tokenizer; conversion copies them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
VOCABULARIES = ("tokenizer.json", "vocab.json")  # one of them makes a tokenizer
_MOST_LEVELS = 100  # deepest nesting of JSON
_LISTS = ("extra_special_tokens", "additional_special_tokens")  # new and old name of the same list


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer, from all of its files.

    If files disagree on a token or an id, they are trusted in this order: `tokenizer.json` or
    `vocab.json`, `added_tokens_decoder` of `tokenizer_config.json`, `added_tokens.json`.

    Attributes:
        ids: The id of every token by its text; an id may have two texts.
        texts: The text of every id, from the most trusted file.
        added: The added tokens by id: text and flags as `tokenizers.AddedToken` takes them.
        roles: Text by role ("mask_token" or a name that the folder defines), in the vocabulary or
            not.
        extra: Texts of further special tokens.
        settings: `tokenizer_config.json`.
    """

    ids: Mapping[str, int]
    texts: Mapping[int, str]
    added: Mapping[int, dict[str, Any]]
    roles: Mapping[str, str]
    extra: tuple[str, ...]
    settings: Mapping[str, Any]

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are flagged special or have a role."""
        flagged = {i for i, token in self.added.items() if token.get("special")}
        named = {self.ids.get(text) for text in (*self.roles.values(), *self.extra)}
        return frozenset(flagged | {i for i in named if i is not None})


def present(folder: Path) -> tuple[str, ...]:
    """Names of the tokenizer files a folder has."""
    return tuple(name for name in TOKENIZER_FILES if (folder / name).is_file())


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a vocabulary."""
    return any((folder / name).exists() for name in VOCABULARIES)


def digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a folder's tokenizer files."""
    total = hashlib.sha256()
    for name in present(folder):
        total.update(name.encode() + b"\0" + read_bytes(folder / name) + b"\0")
    return total.hexdigest()


def read_facts(folder: Path) -> TokenizerFacts:
    """Size and special tokens of a folder's tokenizer; only added tokens without a vocabulary.

    A special token that is named but not in the vocabulary counts as missing: SDAR's files name
    `<|MASK|>`, while the vocabulary has `<MASK>`. `TokenizerFacts.mask_id` and `id_of` find tokens
    by their text.

    Raises:
        ValueError: A file is not JSON or has an unknown form; the message names it.
    """
    if not has_tokenizer(folder):
        added = _read(folder / "added_tokens.json")
        return TokenizerFacts(vocabulary={text: _whole(text, i) for text, i in added.items()})
    parts = read_parts(folder)

    def id_of(role: str) -> int | None:
        return parts.ids.get(parts.roles.get(role, ""))

    return TokenizerFacts(
        num_tokens=max(parts.texts, default=-1) + 1,
        mask_token_id=id_of("mask_token"),
        mask_token=parts.roles.get("mask_token"),
        bos_token_id=id_of("bos_token"),
        eos_token_id=id_of("eos_token"),
        pad_token_id=id_of("pad_token"),
        special_token_ids=tuple(sorted(parts.special_ids)),
        vocabulary=parts.ids,
    )


def read_parts(folder: Path) -> TokenizerParts:
    """A tokenizer, from all files of a folder.

    Raises:
        ValueError: As `read_facts`.
    """
    try:
        return _parts(folder)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"the tokenizer files are not in a known form ({error}); download them again"
        ) from error


def _parts(folder: Path) -> TokenizerParts:
    whole = _read(folder / "tokenizer.json")
    settings = _read(folder / "tokenizer_config.json")
    ids = _vocabulary(whole) if whole else _read(folder / "vocab.json")
    ids = {text: _whole(text, token) for text, token in ids.items()}
    texts = {token: text for text, token in ids.items()}
    added: dict[int, dict[str, Any]] = {}
    for token, record in _added(folder, whole, settings):
        text = record["content"]
        if ids.setdefault(text, token) != token or texts.setdefault(token, text) != text:
            continue
        known = added.setdefault(token, record)
        if record.get("special"):
            added[token] = known | {"special": True}
    special = {**_read(folder / "special_tokens_map.json"), **_given(settings)}
    return TokenizerParts(
        ids=ids,
        texts=texts,
        added=added,
        roles={
            name: _text(token)
            for name, token in special.items()
            if name.endswith("_token")
            and (isinstance(token, str) or "content" in json_object(token))
        },
        extra=tuple(_listed(special)),
        settings=settings,
    )


def _vocabulary(whole: dict[str, Any]) -> dict[str, int]:
    """The plain tokens of a `tokenizer.json`."""
    vocab: Any = json_object(whole.get("model")).get("vocab", {})
    if isinstance(vocab, dict):
        return json_object(vocab)
    # A unigram model lists [token, score] pairs in the order of their ids.
    return {token[0]: i for i, token in enumerate(vocab)}


def _added(
    folder: Path, whole: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Added tokens of every file, the most trusted first."""
    for token in whole.get("added_tokens") or ():
        yield _whole(_text(token), token["id"]), _record(token)
    decoder: dict[str, Any] = settings.get("added_tokens_decoder") or {}
    for key, token in decoder.items():
        yield _whole(_text(token), key), _record(token)
    for text, key in _read(folder / "added_tokens.json").items():
        yield _whole(text, key), {"content": text}


def _record(token: Any) -> dict[str, Any]:
    """An added token's text and flags."""
    flags = {
        name: value
        for name, value in json_object(token).items()
        if name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        and isinstance(value, bool)
    }
    return {"content": _text(token), **flags}


def _whole(text: str, value: Any) -> int:
    """A token's id, which some files write as text.

    Raises:
        ValueError: The text is no whole number.
    """
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"the id of token {text[:100]!r} is {json.dumps(value)[:20]}, not a whole number; "
            "download the tokenizer files again"
        )
    return value


def _listed(special: Mapping[str, Any]) -> Iterator[str]:
    """Special tokens without a role: a list in most files, a mapping by name in some."""
    for name in _LISTS:
        tokens: Any = special.get(name) or ()
        every: Iterable[Any] = json_object(tokens).values() if isinstance(tokens, dict) else tokens
        yield from (_text(token) for token in every)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without nulls, which would hide the values of another file."""
    return {name: value for name, value in settings.items() if value is not None}


def _text(token: Any) -> str:
    """A token given as text or as a record with its `content`."""
    return str(json_object(token).get("content", token))


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def read_json(path: Path, remedy: str = "download it again") -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        remedy: The error's remedy for an invalid file.

    Raises:
        ValueError: If it is no regular file, too large, not UTF-8, not JSON, nested too deep or
            no object.
    """
    data = read_bytes(path)
    try:
        value: Any = json.loads(data.decode("utf-8"))
        _require_shallow(value)
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path.name} is not valid JSON ({why}); {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold a JSON object, not {json.dumps(value)[:20]}")
    return json_object(value)


def _require_shallow(value: Any) -> None:
    """Raise `RecursionError` for JSON that nests deeper than any file of a model."""
    level: list[Any] = [[value]]
    for _ in range(_MOST_LEVELS):
        parts: Iterable[Iterable[Any]] = (
            json_object(part).values() if isinstance(part, dict) else part for part in level
        )
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError


def json_object(value: Any) -> dict[str, Any]:
    """A JSON value if it is an object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
