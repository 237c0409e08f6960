"""The bytes that each id of a tokenizer stands for."""

import functools
import re
from collections.abc import Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """Bytes by id; None for ids that are no text.

    Raises:
        ValueError: The tokenizer's bytes are not known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"the bytes of {type(tokenizer).__name__}'s tokens are not known; use a fast tokenizer"
        )
    is_byte_level = "ByteLevel" in repr(backend.decoder)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    found: list[bytes | None] = [None] * len(tokenizer)
    for text, number in tokenizer.get_vocab().items():
        if number in special or number >= len(found):
            continue
        if is_byte_level:
            found[number] = of_byte_level(text)
        elif match := _BYTE.fullmatch(text):
            found[number] = bytes([int(match[1], 16)])
        else:
            found[number] = text.replace("▁", " ").encode()
    return [one or None for one in found]


def first_bytes(tokenizer: Any, spelt: Sequence[bytes | None]) -> dict[int, bytes]:
    """Bytes of the ids that stand for others where they begin a text, as decoding shows it.

    Decoders of sentencepiece's vocabularies drop a space there, or all that the first id has.
    """
    ids = [i for i, text in enumerate(spelt) if text and text.startswith(b" ")]
    texts = tokenizer.backend_tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=True)
    pairs = zip(ids, texts, strict=True)
    return {
        i: text.encode() for i, text in pairs if text != (spelt[i] or b"").decode(errors="replace")
    }


def of_byte_level(text: str) -> bytes | None:
    """The bytes that byte-level vocabularies write as a text; None for another text."""
    try:
        return text.translate(_bytes_of_chars()).encode("latin-1")
    except UnicodeEncodeError:  # a character that stands for no byte
        return None


@functools.cache
def _bytes_of_chars() -> dict[int, int]:
    """Bytes by the characters that byte-level vocabularies write them with; 256 for no byte."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return dict.fromkeys(others, 256) | {256 + i: byte for i, byte in enumerate(others)}
