"""What the routes of other providers share: a conversation as the chat route's, and its refusals.

Data flow: fields of a body -> those of `wire.Chat` -> the same request as of the chat route, whose
refusals name the fields of the body that was sent.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dllm_jax.serve import wire
from dllm_jax.serve.refusals import Refusal, not_valid, shown, unsupported

DRAWN = ("temperature", "top_p")
SAME = ("model", "stream", *DRAWN)  # fields that the chat route calls alike
# In the place of a picture in a result: a refusal would end the agent, whose history keeps it.
NO_TEXT = "[not shown: this model reads text alone]"
_ID_NAMES = {"input": ".call_id", "messages": ".tool_use_id"}


def check_known(
    fields: Mapping[str, Any],
    known: Collection[str],
    neutral: Mapping[str, Any] | None = None,
    why: str = "",
) -> None:
    """Refuse fields that are not read, unless they are empty or have a value that asks for nothing.

    Args:
        neutral: Such a value of each field that has one.
    """
    for name, value in fields.items():
        if name in known or value in (None, [], {}):
            continue
        if name not in (neutral or {}) or value != (neutral or {})[name]:
            raise unsupported(name, f"{name}={shown(value)} is not supported{why}; leave it out")


def objects_of(fields: Mapping[str, Any], *names: str) -> Iterator[dict[str, Any]]:
    """Fields that are objects; empty where they are not there."""
    for name in names:
        value = fields.get(name) or {}
        if not isinstance(value, dict):
            raise Refusal(f"{name}={shown(value)} is no object; give one", param=name)
        yield value


def chat_from(fields: Mapping[str, Any], **made: Any) -> wire.Chat:
    """The body of the chat route: the fields that it calls alike, and others that were made of it.

    Raises:
        Refusal: A value is of a wrong type or out of its range.
    """
    given = {name: fields.get(name) for name in SAME} | made
    try:
        kept = {name: value for name, value in given.items() if value is not None}
        return msgspec.convert(kept, wire.Chat, strict=True)
    except msgspec.ValidationError as error:
        raise not_valid(error) from None


@contextlib.contextmanager
def own_names(origins: Sequence[int], first: str, others: str) -> Iterator[None]:
    """Refusals inside name the fields of the route's own body; arguments as of `placed`."""
    try:
        yield
    except Refusal as error:
        raise placed(error, origins, first, others) from None


def placed(error: Refusal, origins: Sequence[int], first: str, others: str) -> Refusal:
    """A refusal that names fields of the route's own body.

    Args:
        origins: For each turn the number of the entry that it comes from; -1: the `first` field.
        others: The field that has the entries.
    """

    def one(match: re.Match[str]) -> str:
        place = origins[min(int(match[1]), len(origins) - 1)]
        own = first if place < 0 else f"{others}[{place}]"
        return own + (_ID_NAMES[others] if match[2] else "")

    pattern = r"messages\[(\d+)\](?:\.tool_calls\[\d+\])?(\.tool_call_id)?"
    message = re.sub(pattern, one, error.message)
    param = error.param and re.sub(pattern, one, error.param)
    param = others if param == "messages" else param
    if param and param.startswith("tool"):
        own = param.replace(".function", "", 1)
        own = own.replace(".parameters", ".input_schema", others == "messages")
        message, param = message.replace(param, own, 1), own
    more = {"code": error.code, "status": error.status, "headers": error.headers}
    return Refusal(message, param=param, **more)
