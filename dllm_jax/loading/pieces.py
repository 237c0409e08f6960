"""Single tokens as text, with spaces, line ends and half characters made visible."""

import unicodedata
from typing import Any, NamedTuple

from dllm_jax.structured.tokens import of_byte_level

VISIBLE = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}
_BROKEN = "\ufffd"
# Categories of characters that are invisible, or change the direction of the text after them.
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")
_JOINERS = "\u200c\u200d"  # within words and emoji


class Piece(NamedTuple):
    """A token as text.

    Attributes:
        text: Never empty, without invisible characters.
        is_special: The tokenizer does not treat it as text: a mask, an end, a role.
    """

    text: str
    is_special: bool


def piece(tokenizer: Any, token: int) -> Piece:
    """A token as text; `[id]` without a tokenizer, or if it does not have the id."""
    if tokenizer is None:
        return Piece(f"[{token}]", False)
    name = _name(tokenizer, token)
    if name is None:
        return Piece(f"[{token}]", False)
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(token)
    if added is not None and added.special:
        return Piece(visible(name), True)
    # Decode it after another token, since some tokenizers drop the space of a first one.
    text = _after_another(tokenizer, token)
    if _BROKEN in text:
        return Piece(_bytes(name), False)
    return Piece(visible(text) or f"[{token}]", False)


def plain_text(tokenizer: Any, token: int) -> str:
    """The token as it appears in a text; like `piece` if it alone is not text."""
    found = piece(tokenizer, token)
    if found.is_special or tokenizer is None or found.text.startswith(("⟨", "[")):
        return found.text
    text = _after_another(tokenizer, token)
    return found.text if _BROKEN in text or not text else text


def visible(text: str) -> str:
    """The text with a symbol or `U+....` in place of each invisible character."""
    return "".join(map(_shown, text))


def _shown(char: str) -> str:
    if char in VISIBLE:
        return VISIBLE[char]
    if char in _JOINERS or unicodedata.category(char) not in _UNSEEN:
        return char
    return f"⟨U+{ord(char):04X}⟩"


def _name(tokenizer: Any, token: int) -> str | None:
    try:
        return tokenizer.convert_ids_to_tokens(token)
    except (IndexError, OverflowError, TypeError, ValueError):
        return None


def _after_another(tokenizer: Any, token: int) -> str:
    for first in range(1000):
        before = tokenizer.decode([first])
        if before.strip() and _BROKEN not in before and before.isascii():
            both = tokenizer.decode([first, token])
            return both[len(before) :] if both.startswith(before) else tokenizer.decode([token])
    return tokenizer.decode([token])


def _bytes(name: str) -> str:
    """The bytes of a partial character, from `<0xE2>` or a byte-level name such as `âĤ`."""
    if name.startswith("<0x"):
        return f"⟨{name[3:-1]}⟩"
    data = of_byte_level(name)
    return visible(name) if data is None else f"⟨{data.hex(' ').upper()}⟩"
