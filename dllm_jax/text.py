"""Token ids to text that grows: pieces that never change again, cut at the first stop string.

Nothing here knows where the ids come from.
"""

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"  # what a tokenizer shows for bytes that are no whole character yet


class TextStream:
    """Text of a growing list of token ids.

    Attributes:
        text: What is settled: no half character, nothing of a stop string or what may become one.
        stopped: Tokens to keep (those that make `text`) once a stop string was found.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self.text = ""
        self.stopped: int | None = None

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
