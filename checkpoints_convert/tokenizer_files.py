"""What the tokenizer files of a folder say, read as plain JSON: no transformers, no code.

Knows file names and layouts only; which fact wins over which is decided in
`dllm_jax.models.special_tokens`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from dllm_jax.models.special_tokens import TokenizerFacts

# Every file a tokenizer may consist of; these travel with a converted checkpoint.
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
_VOCABULARIES = ("tokenizer.json", "vocab.json")  # one of them makes a tokenizer


def present(folder: Path) -> tuple[str, ...]:
    """Names of the tokenizer files a folder has."""
    return tuple(name for name in TOKENIZER_FILES if (folder / name).is_file())


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a vocabulary."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a folder's tokenizer files."""
    total = hashlib.sha256()
    for name in present(folder):
        total.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    return total.hexdigest()


def read_facts(folder: Path) -> TokenizerFacts:
    """Size and special tokens of a folder's tokenizer; empty facts where it has none.

    A special token that is named but not in the vocabulary counts as not given: SDAR's files name
    `<|MASK|>` while the vocabulary holds `<MASK>`.

    Raises:
        ValueError: For a file that is not JSON, by name, or not in a form we know.
    """
    if not has_tokenizer(folder):
        return TokenizerFacts()
    try:
        return _facts(folder)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"the tokenizer files are not in a known form ({error}); download them again"
        ) from error


def _facts(folder: Path) -> TokenizerFacts:
    ids = _vocabulary(folder)
    settings = _read(folder / "tokenizer_config.json")
    special = {**_read(folder / "special_tokens_map.json"), **settings}
    for key, token in settings.get("added_tokens_decoder", {}).items():
        ids.setdefault(_text(token), int(key))

    def id_of(name: str) -> int | None:
        return ids.get(_text(special.get(name)))

    return TokenizerFacts(
        num_tokens=max(ids.values(), default=-1) + 1,
        mask_token_id=id_of("mask_token"),
        eos_token_id=id_of("eos_token"),
        pad_token_id=id_of("pad_token"),
    )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Every token's id, added tokens included."""
    whole = _read(folder / "tokenizer.json")
    ids: dict[str, int] = {}
    if whole:
        vocab: Any = json_object(whole.get("model")).get("vocab", {})
        # A unigram model lists [token, score] pairs in the order of their ids.
        ids |= vocab if isinstance(vocab, dict) else {t[0]: i for i, t in enumerate(vocab)}
        ids |= {_text(token): int(token["id"]) for token in whole.get("added_tokens", ())}
    else:
        ids |= _read(folder / "vocab.json")
    return ids | _read(folder / "added_tokens.json")


def _text(token: Any) -> str:
    """A token given as text or as a record with its `content`."""
    return str(json_object(token).get("content", token))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: If the file is not UTF-8, not JSON or no object.
    """
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold a JSON object, not {json.dumps(value)[:20]}")
    return json_object(value)


def json_object(value: Any) -> dict[str, Any]:
    """A JSON value if it is an object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
