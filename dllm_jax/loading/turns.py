"""Conversations with calls of tools, their results and thoughts, as templates read them.

Data flow: messages as clients write them -> `plain`: arguments as objects, each result named after
its call, no null content -> `chat.render`. `guarded` keeps the control tokens in callers' strings
from becoming tokens: it wraps them in two characters, at which `encoded` cuts the rendering.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MOST_ARGUMENT_BYTES = 1 << 20  # of the calls of a conversation
MOST_ID_CHARS = 256  # of a call
# Signs of cuneiform: hardly used, and printable, so that `repr` keeps them.
_OPEN, _CLOSE = "\U00012471", "\U00012472"
_PIECES = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_THOUGHTS = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


class Unusable(ValueError):
    """A conversation that no template takes.

    Attributes:
        param: The place at fault, as "messages[2].tool_call_id".
        code: "invalid_value" where a field holds none of its values, else "invalid_conversation".
    """

    def __init__(self, message: str, param: str, code: str = "invalid_conversation"):
        super().__init__(message)
        self.param, self.code = param, code


def has_calls(turns: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a conversation has calls or results."""
    return any(turn.get("tool_calls") or turn.get("role") == "tool" for turn in turns)


def plain(turns: Sequence[Mapping[str, Any]], is_answered: bool = True) -> list[Mapping[str, Any]]:
    """The turns with arguments as objects, results named after their calls, and no null content.

    Args:
        is_answered: An answer follows: each call has its result.

    Raises:
        Unusable: Arguments are no JSON object, or calls and results do not belong together.
    """
    found: list[Mapping[str, Any]] = []
    waiting: dict[str, str] = {}  # names of the calls that have no result yet, by id
    room = MOST_ARGUMENT_BYTES
    for i, turn in enumerate(turns):
        where, role = f"messages[{i}]", turn.get("role")
        if role == "tool":
            name = turn.get("tool_call_id")
            if name not in waiting:
                raise Unusable(
                    f"{where}.tool_call_id={name!a:.60} is no call of the turn before it that "
                    "waits for a result; give the id of one",
                    f"{where}.tool_call_id",
                    "invalid_value",
                )
            turn = {**turn, "name": waiting.pop(name)}
        elif waiting:
            raise Unusable(
                f"{where} comes before the result of call {next(iter(waiting))!a:.60}; give each "
                "call its result, a message of role tool",
                where,
            )
        if calls := turn.get("tool_calls"):
            if role != "assistant":
                raise Unusable(
                    f"{where}.tool_calls stands in a turn of role {role!a:.60}; calls are the "
                    "assistant's",
                    f"{where}.tool_calls",
                )
            made = []
            for j, call in enumerate(calls):
                one = _call(call, f"{where}.tool_calls[{j}]")
                room -= len(json.dumps(one["function"]["arguments"]))
                if one["id"] in waiting:
                    raise Unusable(
                        f"{where}.tool_calls[{j}].id={one['id']!a:.60} is another call's; give "
                        "each its own",
                        f"{where}.tool_calls[{j}].id",
                        "invalid_value",
                    )
                waiting[one["id"]] = one["function"]["name"]
                made.append(one)
            turn = {**turn, "tool_calls": made}
        if room < 0:
            raise Unusable(
                f"the calls have more than {MOST_ARGUMENT_BYTES} bytes of arguments; leave older "
                "turns out",
                f"{where}.tool_calls",
            )
        if turn.get("content") is None and (calls or role == "tool" or _thoughts(turn)):
            turn = {**turn, "content": ""}
        found.append(turn)
    if waiting and is_answered:
        raise Unusable(
            f"call {next(iter(waiting))!a:.60} has no result; give it, a message of role tool",
            f"messages[{len(turns) - 1}].tool_calls",
        )
    return found


def systems_first(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The turns with the texts of all system turns in one, the first; None: they are already so."""
    places = [i for i, turn in enumerate(turns) if turn.get("role") == "system"]
    texts = [turns[i].get("content") for i in places]
    if places in ([], [0]) or not all(isinstance(text, str) for text in texts):
        return None
    others = [turn for turn in turns if turn.get("role") != "system"]
    return [{"role": "system", "content": "\n\n".join(map(str, texts))}, *others]


def _thoughts(turn: Mapping[str, Any]) -> Any:
    return turn.get("reasoning_content") or turn.get("reasoning")


def _call(call: Any, where: str) -> dict[str, Any]:
    given = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise Unusable(
            f'{where} is no call; give {{"id", "type": "function", "function": {{"name", '
            '"arguments"}}',
            where,
        )
    arguments = given.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise Unusable(
            f"{where}.function.arguments={given.get('arguments')!a:.60} is no JSON object; give "
            "one",
            f"{where}.function.arguments",
            "invalid_value",
        )
    name = given["name"]
    call_id = str(call.get("id") or name)
    if len(call_id) > MOST_ID_CHARS or not call_id.isprintable():
        raise Unusable(
            f"{where}.id={call_id!a:.60} is no id; give 1 to {MOST_ID_CHARS} visible characters",
            f"{where}.id",
            "invalid_value",
        )
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def thoughts_apart(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """The turn; thoughts at the beginning of an assistant's content get a field of their own."""
    content = turn.get("content")
    if turn.get("role") != "assistant" or not isinstance(content, str) or _thoughts(turn):
        return turn
    if (match := _THOUGHTS.match(content)) is None:
        return turn
    return {**turn, "content": content[match.end() :], "reasoning_content": match[1].strip("\n")}


# --- control tokens in callers' strings ---------------------------------------------------------


def control_tokens(tokenizer: Any, template: str) -> dict[str, int]:
    """Added tokens that may not come from a caller's string: special ones and the template's."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        str(entry): token
        for token, entry in added.items()
        if str(entry).strip() and (entry.special or str(entry) in template)
    }


def guarded(value: Any, tokens: Mapping[str, int], wrapped: str = rf"{_OPEN}\g<0>{_CLOSE}") -> Any:
    """A value of JSON with each control token in its strings wrapped in two characters.

    Args:
        wrapped: What takes a token's place.
    """
    if not tokens:
        return value
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def one(value: Any) -> Any:
        if isinstance(value, str):
            if pattern.search(value) is None:
                return value
            bare = value.replace(_OPEN, "").replace(_CLOSE, "")
            return pattern.sub(wrapped, bare)
        if isinstance(value, Mapping):
            return {one(key): one(inner) for key, inner in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return [one(inner) for inner in value]
        return value

    return one(value)


def unguarded(text: str) -> str:
    """A rendering as a person reads it."""
    return _PIECES.sub(r"\1", text)


def encoded(text: str, encode: Callable[[str], list[int]], tokens: Mapping[str, int]) -> list[int]:
    """Ids of a rendering; wrapped text is encoded without control tokens.

    Args:
        encode: Function from a text to ids, which turns names of control tokens into their ids.

    Raises:
        Unusable: The tokenizer cannot encode the wrapped text without control tokens.
    """
    ids: list[int] = []
    control = set(tokens.values())
    for i, piece in enumerate(_PIECES.split(text)):
        if i % 2 == 0:
            ids += encode(piece) if piece else []
            continue
        cuts = [*([piece[:cut], piece[cut:]] for cut in range(1, len(piece))), list(piece)]
        ways = ([token for part in parts for token in encode(part)] for parts in cuts)
        spelt = next((made for made in ways if not control & {*made}), None)
        if spelt is None:
            raise Unusable(
                f"a message holds {piece!a:.60}, which this tokenizer reads as a control token; "
                "leave it out",
                "messages",
            )
        ids += spelt
    return ids
