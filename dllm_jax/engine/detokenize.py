"""Token ids to text that grows: pieces that never change again, cut at the first stop string.

Nothing here knows where the ids come from.

Data flow: ids -> a window of the last ones, the only part that is decoded again -> settled text ->
shown text, which stays behind by what may become a stop string. Decoding a window instead of
everything is exact because what a tokenizer makes of an id depends on few ids before it: the rest
of a character, or the first place of all (where some drop a space).
"""

import functools
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

_BROKEN = "\ufffd"  # what a tokenizer shows for bytes that are no whole character yet
_MOST_BROKEN = 3  # bytes of a character of UTF-8 but the last
# A window that begins within a character shows up to three broken ones; the next is right.
_SYNC_CHARS = _MOST_BROKEN + 1
_SHORT_WINDOW, _LONG_WINDOW = 8, 32  # ids that a window is cut to at least, and from


class TextStream:
    """Text of a growing list of token ids.

    The pieces join to `tokenizer.decode(ids, skip_special_tokens=True)`, whatever the ids' portions
    were, or to that text up to its first stop string: the one that is complete first, and of those
    that end at one place the longest.

    Args:
        tokenizer: A transformers tokenizer.
        stops: Strings that end the text.

    Attributes:
        text: What is settled: no half character, nothing of a stop string or what may become one.
        stopped: Tokens to keep (the fewest that make `text`) once a stop string was found.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._most_held = max(map(len, self._stops), default=1) - 1
        self._seen = 0
        self._is_over = False
        # The window: ids, and for each how many ids there are up to it, special ones counted.
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._dropped = 0  # ids before the window
        self._ready = (
            0  # ids of the window whose text depends on no later one, but a last character
        )
        self._window = ""  # their text
        self._settled = 0  # characters of it that will not change
        self._held = ""  # the last ones of these, where they may begin a stop string
        self.text = ""
        self.stopped: int | None = None

    def feed(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text added since the last call.

        Args:
            token_ids: All ids so far; those of the last call are a prefix of them.
            last: No more will come: broken characters and the beginning of a stop string are
                shown as they are.
        """
        if self._is_over:
            return ""
        self._is_over = last
        facts = _facts(self._tokenizer)
        if not (self._take(token_ids, facts, last) or last):
            return ""
        self._window = self._decode(0, self._ready)
        end = len(self._window)
        if not (last or facts.byte_ids):
            whole = self._window.rstrip(_BROKEN)
            end = max(len(whole), end - _MOST_BROKEN)
        pending = self._held + self._window[self._settled : end]
        self._settled = end
        piece = self._before_stop(pending, facts, last)
        self._shorten(facts)
        self.text += piece
        return piece

    @property
    def num_shown(self) -> int:
        """The fewest ids that make `text`: what may become a stop string is not among them."""
        visible = self._window[: self._settled - len(self._held)]
        return self._count_ids(visible, _facts(self._tokenizer))

    def _take(self, token_ids: Sequence[int], facts: "_Facts", last: bool) -> bool:
        """Put the new ids into the window; whether more of them are ready."""
        before = self._ready
        for place, token in enumerate(token_ids[self._seen :], self._seen + 1):
            if token in facts.special_ids:
                continue
            self._ids.append(token)
            self._ends.append(place)
            # The bytes of a run are one whole to a tokenizer: it can still turn out broken.
            if token not in facts.byte_ids:
                self._ready = len(self._ids)
        self._seen = max(self._seen, len(token_ids))
        if last:
            self._ready = len(self._ids)
        return self._ready > before

    def _decode(self, first: int, end: int) -> str:
        if first == end:
            return ""
        return self._tokenizer.decode(self._ids[first:end], skip_special_tokens=True)

    # --- stop strings -----------------------------------------------------------------------------

    def _before_stop(self, pending: str, facts: "_Facts", last: bool) -> str:
        """What of settled text can be shown; the rest is held, or is over."""
        found = [(at + len(s), at) for s in self._stops if (at := pending.find(s)) >= 0]
        if found:
            _, start = min(found)
            visible = self._settled - (len(pending) - start)
            self.stopped = self._count_ids(self._window[:visible], facts)
            self._is_over = True
            return pending[:start]
        split = len(pending) - (0 if last else self._beginning(pending))
        self._held = pending[split:]
        return pending[:split]

    def _beginning(self, pending: str) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        for length in range(min(self._most_held, len(pending)), 0, -1):
            tail = pending[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _count_ids(self, visible: str, facts: "_Facts") -> int:
        """The fewest ids whose text begins with the window's `visible` part."""
        if not visible:
            return self._dropped

        def covers(index: int) -> bool:
            return self._decode(0, index + 1).startswith(visible)

        index = best = bisect_left(range(self._ready), True, key=covers)
        while index and self._ids[index - 1] in facts.byte_ids:  # in a run `covers` goes on and off
            index -= 1
            best = index if covers(index) else best
        return self._ends[best]

    # --- the window -------------------------------------------------------------------------------

    def _shorten(self, facts: "_Facts") -> None:
        """Drop ids whose text is shown, so that a call costs what its new ids cost."""
        if self._is_over or self._ready < _LONG_WINDOW + 2 * len(self._held):
            return
        unsettled = len(self._window) - self._settled
        needed = _SYNC_CHARS + len(self._held) + unsettled
        count = _SHORT_WINDOW
        while count < self._ready:
            first = self._ready - count
            while first and self._ids[first - 1] in facts.byte_ids:  # never within a run
                first -= 1
            text = self._decode(first, self._ready)
            if first and len(text) >= needed:
                self._dropped = self._ends[first - 1]
                del self._ids[:first], self._ends[:first]
                self._ready -= first
                self._window, self._settled = text, len(text) - unsettled
                return
            count *= 2


class _Facts(NamedTuple):
    """What of a vocabulary matters here.

    Attributes:
        special_ids: Shown as nothing.
        byte_ids: Single bytes of a tokenizer that falls back to them: all bytes in a row are shown
            as characters, or if they are none every single one as broken.
    """

    special_ids: frozenset[int]
    byte_ids: frozenset[int]


@functools.lru_cache(maxsize=8)
def _facts(tokenizer: Any) -> _Facts:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special_ids = frozenset(token for token, entry in added.items() if entry.special)
    return _Facts(special_ids, _byte_ids(tokenizer))


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    if not hasattr(tokenizer, "get_vocab"):
        return frozenset()
    vocabulary = tokenizer.get_vocab()
    half = vocabulary.get("<0xE2>")  # begins a character of three bytes
    if half is None or tokenizer.decode([half]) != _BROKEN:
        return frozenset()
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return frozenset(vocabulary[name] for name in names if name in vocabulary)
