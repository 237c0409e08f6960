"""How much of a text one token may stand for: long texts are refused before they are tokenized."""

import json
import math
from typing import Any, NamedTuple

# Steps that drop nothing, but for white space, and the most characters of which they make one.
_MELTED = {
    **dict.fromkeys(("NFC", "NFKC"), 4),
    **dict.fromkeys(("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Metaspace"), 1),
    **dict.fromkeys(("Digits", "Whitespace", "WhitespaceSplit"), 1),
}
_SPACES = [chr(i) for i in range(0x3001) if chr(i).isspace()]


class Reach(NamedTuple):
    """For how much text one token stands at most.

    Attributes:
        longest: Characters.
        takes_space: Any amount of white space more: a special token may swallow what is around it.
    """

    longest: int
    takes_space: bool

    def size(self, text: str) -> int:
        """Characters of a text that count."""
        return len(text) - (sum(map(text.count, _SPACES)) if self.takes_space else 0)


def reach(tokenizer: Any) -> Reach | None:
    """For how much text one token of a tokenizer stands at most.

    Returns:
        None where nothing is known: a step of the tokenizer may drop text, or make one token of
        any number of characters.
    """
    backend = tokenizer.backend_tokenizer
    melted = math.prod(map(_melted, (backend.normalizer, backend.pre_tokenizer)))
    vocab = backend.get_vocab()
    if not melted or backend.truncation is not None or not _has_every_byte(backend.model, vocab):
        return None
    added = backend.get_added_tokens_decoder().values()
    takes_space = any(token.lstrip or token.rstrip for token in added)
    takes_space |= "Whitespace" in str(backend.pre_tokenizer)
    return Reach(melted * max(map(len, vocab)), takes_space)


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
