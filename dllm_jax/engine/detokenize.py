"""Incremental detokenization: final pieces of text, cut at the first stop string.

Data flow: ids -> a window of the last ones, the only part that is decoded again -> settled text ->
shown text, which holds back a possible beginning of a stop string. Decoding a window is exact: the
text of an id depends on few ids before it, the rest of a character, or on being the first (some
tokenizers drop a space there).
"""

import functools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_BROKEN = "\ufffd"  # the text of bytes that are not yet a whole character
_MOST_BROKEN = 3  # bytes of a UTF-8 character before its last
# A window that begins within a character shows up to three broken ones first.
_SYNC_CHARS = _MOST_BROKEN + 1
_SHORT_WINDOW, _LONG_WINDOW = 8, 32  # a window of the longer size is cut, at least to the shorter


class TextStream:
    """Text of a growing list of token ids.

    The pieces join to `tokenizer.decode(ids, skip_special_tokens=True)`, however the ids arrive, or
    to that text up to its first stop string: the one that ends first, and the longest of those.

    Args:
        tokenizer: A transformers tokenizer.
        stops: Strings that end the text.

    Attributes:
        text: Shown text: whole characters, without a stop string or a possible beginning of one.
        stopped: Once a stop string was found, the fewest tokens that make `text`.
        stop: That stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._most_held = max(map(len, self._stops), default=1) - 1
        self._seen = 0
        self._is_over = False
        # The window: ids, and for each the number of ids up to it, special ones included.
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._dropped = 0  # ids before the window
        self._ready = 0  # ids of the window whose text is final, except its last character
        self._window = ""  # their text
        self._settled = 0  # characters of it that are final
        self._held = ""  # the last of these, if they may begin a stop string
        self.text = ""
        self.stopped: int | None = None
        self.stop: str | None = None

    def feed(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text added since the last call.

        Args:
            token_ids: All ids so far; those of the last call are a prefix of them.
            last: These are all: show broken characters and the beginning of a stop string.
        """
        if self._is_over:
            return ""
        self._is_over = last
        if not (self._take(token_ids, last) or last):
            return ""
        self._window = self._decode(0, self._ready)
        end = len(self._window)
        if not (last or self._vocabulary.byte_ids):
            whole = self._window.rstrip(_BROKEN)
            end = max(len(whole), end - _MOST_BROKEN)
        pending = self._held + self._window[self._settled : end]
        self._settled = end
        piece = self._before_stop(pending, last)
        self._shorten()
        self.text += piece
        return piece

    @functools.cached_property
    def _vocabulary(self) -> "_Vocabulary":
        return _read_vocabulary(self._tokenizer)

    @property
    def num_shown(self) -> int:
        """The fewest ids that make `text`, without a possible beginning of a stop string."""
        visible = self._window[: self._settled - len(self._held)]
        return self._count_ids(visible)

    def _take(self, token_ids: Sequence[int], last: bool) -> bool:
        """Add the new ids to the window; True if more of them are ready."""
        before = self._ready
        for place, token in enumerate(token_ids[self._seen :], self._seen + 1):
            if token in self._vocabulary.special_ids:
                continue
            self._ids.append(token)
            self._ends.append(place)
            # A tokenizer decodes a run of bytes as one, so the run can still turn out broken.
            if token not in self._vocabulary.byte_ids:
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

    def _before_stop(self, pending: str, last: bool) -> str:
        """The part of the settled text to show; the rest is held, or follows a stop string."""
        found = [(at + len(s), at) for s in self._stops if (at := pending.find(s)) >= 0]
        if found:
            end, start = min(found)
            visible = self._settled - (len(pending) - start)
            self.stopped = self._count_ids(self._window[:visible])
            self.stop = pending[start:end]
            self._is_over = True
            return pending[:start]
        split = len(pending) - (0 if last else self._beginning(pending))
        self._held = pending[split:]
        return pending[:split]

    def _beginning(self, pending: str) -> int:
        """Length of the longest suffix that begins a stop string."""
        for length in range(min(self._most_held, len(pending)), 0, -1):
            tail = pending[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _count_ids(self, visible: str) -> int:
        """The fewest ids whose text begins with the window's `visible` part."""
        if not visible:
            return self._dropped

        def covers(index: int) -> bool:
            return self._decode(0, index + 1).startswith(visible)

        index = best = bisect_left(range(self._ready), True, key=covers)
        while (
            index and self._ids[index - 1] in self._vocabulary.byte_ids
        ):  # in a run `covers` goes on and off
            index -= 1
            best = index if covers(index) else best
        return self._ends[best]

    # --- the window -------------------------------------------------------------------------------

    def _shorten(self) -> None:
        """Drop ids whose text is shown, so that a call costs only its new ids."""
        if self._is_over or self._ready < _LONG_WINDOW + 2 * len(self._held):
            return
        unsettled = len(self._window) - self._settled
        needed = _SYNC_CHARS + len(self._held) + unsettled
        count = _SHORT_WINDOW
        while count < self._ready:
            first = self._ready - count
            while first and self._ids[first - 1] in self._vocabulary.byte_ids:  # never within a run
                first -= 1
            text = self._decode(first, self._ready)
            if first and len(text) >= needed:
                self._dropped = self._ends[first - 1]
                del self._ids[:first], self._ends[:first]
                self._ready -= first
                self._window, self._settled = text, len(text) - unsettled
                return
            count *= 2


def special_stops(
    tokenizer: Any, stops: Sequence[str], stop_ids: Sequence[int] = ()
) -> dict[int, str]:
    """Stop strings that are a special token, by its id: text without special ones never holds them.

    Args:
        stop_ids: Ids that end the text anyway.

    Raises:
        ValueError: A string holds a special token next to other text.
    """
    special = _read_vocabulary(tokenizer).special_texts if stops else {}
    for stop in stops:
        for text in (text for text in special if text in stop and stop not in special):
            if not (special[text] in stop_ids and stop.startswith(text)):
                raise ValueError(
                    f"stop holds {stop!r:.80}, and {text!r:.80} in it is a special token, which no "
                    f"text shows; give it alone, or stop_token_ids=[{special[text]}]"
                )
    return {special[stop]: stop for stop in stops if stop in special}


class _Vocabulary(NamedTuple):
    """Ids of a vocabulary that need care.

    Attributes:
        special_ids: Have no text.
        special_texts: Their ids by name.
        byte_ids: Single bytes of a tokenizer with byte fallback: a run of them is decoded as
            characters, or each as broken.
    """

    special_ids: frozenset[int]
    special_texts: Mapping[str, int]
    byte_ids: frozenset[int]


@functools.lru_cache(maxsize=8)
def _read_vocabulary(tokenizer: Any) -> _Vocabulary:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(entry): token for token, entry in added.items() if entry.special}
    return _Vocabulary(frozenset(special.values()), special, _byte_ids(tokenizer))


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    if not hasattr(tokenizer, "get_vocab"):
        return frozenset()
    ids = tokenizer.get_vocab()
    half = ids.get("<0xE2>")  # begins a character of three bytes
    if half is None or tokenizer.decode([half]) != _BROKEN:
        return frozenset()
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return frozenset(ids[name] for name in names if name in ids)
