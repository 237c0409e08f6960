"""The two forms of a message's content, a text or a list of parts, and which one a template reads.

A template that reads the other form leaves the message out without a word. So each rendering is
made twice: once as it is, and once with a mark at the end of each message's text. A template may
trim a text, move it, escape it or drop the thoughts in it; only one that loses it loses the mark.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Turns = Sequence[Mapping[str, Any]]

_MARK = "qzmark{}zq"  # no template changes letters and digits but their case


class Lost(ValueError):
    """A template leaves the text of a message out; `place` is the message's."""

    def __init__(self, place: int):
        self.place = place
        super().__init__(f"it leaves out the text of message {place}")


def rendered(fill: Callable[[Turns], str], turns: Turns) -> str:
    """The conversation in the first form of content in which the template shows every text.

    Args:
        fill: The template: messages to text; may raise anything.

    Raises:
        Lost: In no form does it show the text of some message.
        Exception: What the template raises for the messages as they are given.
    """
    lost: list[int] = []
    problem: Exception | None = None
    tried: list[Turns] = []
    for form in _forms(turns, lost):
        if form in tried:
            continue
        tried.append(form)
        try:
            text = fill(form)
            missing = _missing(fill, form, text)
        except (TimeoutError, OverflowError):  # another form would take as long
            raise
        except Exception as error:  # a template may raise anything
            problem = problem or error
            continue
        if not missing:
            return text
        lost += missing if len(tried) == 1 else []
    raise problem if not lost and problem else Lost(lost[0])


def as_text(content: Any) -> str | None:
    """A content as one text; None where it is not text alone."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not all(map(_is_text, content)):
        return None
    return "\n".join(part["text"] for part in content)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _forms(turns: Turns, lost: list[int]) -> Iterator[Turns]:
    """The messages as given, then in other forms; `lost` is filled in after the first one."""
    yield list(turns)
    texts = [as_text(turn.get("content")) for turn in turns]

    def changed(place: int, whole: bool) -> Mapping[str, Any]:
        """A message whose content is text, or one part."""
        text, turn = texts[place], turns[place]
        if text is None:
            return turn
        return {**turn, "content": text if whole else [{"type": "text", "text": text}]}

    places = range(len(turns))
    if lost:
        given = [isinstance(turn.get("content"), str) for turn in turns]
        yield [changed(i, not given[i]) if i in lost else turns[i] for i in places]
    yield [changed(i, True) for i in places]
    yield [changed(i, False) for i in places]


def _missing(fill: Callable[[Turns], str], turns: Turns, text: str) -> list[int]:
    """Messages whose text a rendering leaves out, or shows as a list of Python's."""
    marks: dict[int, list[str]] = {}
    marked: list[Mapping[str, Any]] = []
    for place, turn in enumerate(turns):
        content = turn.get("content")
        if isinstance(content, str) and content.strip():
            marks[place] = [_MARK.format(f"{place}")]
            turn = {**turn, "content": f"{content} {marks[place][0]}"}
        elif isinstance(content, Sequence) and not isinstance(content, str):
            parts: list[Any] = []
            for part in content:
                if _is_text(part) and part["text"].strip():
                    mark = _MARK.format(f"{place}x{len(parts)}")
                    marks.setdefault(place, []).append(mark)
                    part = {**part, "text": f"{part['text']} {mark}"}
                parts.append(part)
            turn = {**turn, "content": parts}
        marked.append(turn)
    try:
        found = fill(marked).lower()
    except Exception:  # the template refuses the mark as content
        return []

    def shows(place: int, mark: str) -> bool:
        content = turns[place].get("content")
        if isinstance(content, str):
            return mark in found or (len(content.strip()) > _SHORT and content.strip() in text)
        return mark in found and not any(mark + end in found for end in _ENDS)

    return [place for place, own in marks.items() if not all(shows(place, one) for one in own)]


_SHORT = 16  # characters that a template may hold by chance
_ENDS = ("'}", '"}', "',", '",')  # of a part that is written as Python or JSON writes it
