"""Text as it grows: token ids in, text that will not change again out.

Nothing here knows where the ids come from.
"""

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"  # what a tokenizer shows for bytes that are no whole character yet


class TextStream:
    """Turns a growing list of token ids into pieces of text that join to the whole.

    A character may be spread over several tokens, so its piece waits until it is whole.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.text = ""

    def feed(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text added since the last call.

        Args:
            token_ids: All ids so far; those of the last call are a prefix of them.
            last: No more will come: broken characters are shown as they are.
        """
        whole = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        if not last:
            whole = whole.rstrip(_BROKEN)
        piece = whole[len(self.text) :]
        self.text += piece
        return piece


def cell_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Each token alone as text, special tokens by name and line ends made visible."""
    return [
        tokenizer.decode([token]).replace("\n", "⏎").replace(_BROKEN, "�") for token in token_ids
    ]
