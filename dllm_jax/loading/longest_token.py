"""How much of a text one token may stand for: long texts are refused before they are tokenized."""

import json
import math
from typing import Any

# Steps that drop nothing but white space, and the most characters of which they make one.
_MELTED = {
    **dict.fromkeys(("NFC", "NFKC"), 4),
    **dict.fromkeys(("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Metaspace"), 1),
    **dict.fromkeys(("Digits", "Whitespace", "WhitespaceSplit"), 1),
}
_SPACES = [chr(i) for i in range(0x3001) if chr(i).isspace()]


def longest_token(tokenizer: Any) -> int | None:
    """The most characters, white space aside, for which one token stands.

    Returns:
        None where nothing is known: a step of the tokenizer may drop text, or make one token of
        any number of characters.
    """
    backend = tokenizer.backend_tokenizer
    melted = math.prod(map(_melted, (backend.normalizer, backend.pre_tokenizer)))
    vocab = backend.get_vocab()
    if not melted or backend.truncation is not None or not _has_every_byte(backend.model, vocab):
        return None
    return melted * max(map(len, vocab))


def num_characters(text: str) -> int:
    """Those that are no white space, which tokens may swallow."""
    return len(text) - sum(map(text.count, _SPACES))


def _has_every_byte(model: Any, vocab: dict[str, int]) -> bool:
    """Whether no character is unknown: unknown ones are dropped, or many are one token."""
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    if not isinstance(model, BPE):
        return False
    names = [f"<0x{i:02X}>" for i in range(256)] if model.byte_fallback else ByteLevel.alphabet()
    return vocab.keys() >= set(names)


def _melted(part: Any) -> int:
    """Of how many characters a step makes one, at most; 0: it may drop some."""
    return 1 if part is None else _of_step(json.loads(part.__getstate__()))


def _of_step(step: dict[str, Any]) -> int:
    kind = step["type"]
    if kind == "Sequence":
        return math.prod(map(_of_step, step.get("normalizers") or step.get("pretokenizers") or ()))
    if kind in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    if kind == "Replace":
        found = step["pattern"].get("String", "")
        return 0 < len(found) <= len(step["content"])
    return _MELTED.get(kind, 0)
