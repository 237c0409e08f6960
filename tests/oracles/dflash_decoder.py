"""DFlash's rounds as lists: how many tokens each emits, from the target's text and the drafts.

Its input is the text that the target would write alone, up to its limit, and what the drafter
predicts after an anchor. There is no window, no cache and no network.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Rounds:
    """`counts` holds what each round emitted, past a stop id too.

    The rest counts what the user is told, up to the stop id: rounds by what they emitted, drafts
    judged and drafts emitted by place.
    """

    counts: list[int] = field(default_factory=list)
    sizes: Counter[int] = field(default_factory=Counter)
    proposed: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def dflash_rounds(
    text: Sequence[int],
    prompt_len: int,
    stops: Sequence[int],
    drafts: Callable[[int, int], Sequence[int]],
    max_tokens: int,
) -> Rounds:
    """The rounds of one request.

    Args:
        text: Prompt and what the target alone writes, up to the request's limit; before it where
            a run of equal tokens is as long as it may be.
        drafts: Position of an anchor and the anchor, to the drafts that are judged.
    """
    result, anchor = Rounds(), prompt_len
    while result.finish_reason is None:
        reported = list(drafts(anchor, text[anchor]))
        right = 0
        while (
            right < len(reported)
            and anchor + 1 + right < len(text)
            and reported[right] == text[anchor + 1 + right]
        ):
            right += 1
        left = len(text) - anchor - 1
        count = max(min(right + 1, left), 1)
        result.counts.append(count)
        ahead = list(text[anchor : anchor + 1 + count])
        # A run is seen where it ends: before, all that the limit leaves is judged.
        room = left if count == left else prompt_len + max_tokens - anchor - 1
        wanted = next((i for i, token in enumerate(ahead) if token in stops), room)
        if reported and wanted:
            result.sizes[min(right + 1, wanted)] += 1
        for place in range(1, min(len(reported), wanted) + 1):
            result.proposed[place] += 1
            result.accepted[place] += place <= right
        anchor += count
        known = list(text[prompt_len : anchor + 1])
        end = next((i for i, token in enumerate(known) if token in stops), None)
        if end is not None:
            result.output, result.finish_reason = known[:end], "stop"
        elif anchor + 1 >= len(text):
            is_cut = len(known) < max_tokens
            result.output, result.finish_reason = known, "repetition" if is_cut else "length"
    return result
