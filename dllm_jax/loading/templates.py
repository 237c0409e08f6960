"""Chat templates, which come with a model and may be hostile, rendered within bounds of time.

Templates see what transformers' `apply_chat_template` shows them: the same globals, filters, tags
and form of the messages. A loop is stopped by the clock; `sandbox` bounds what one operation makes.
"""

import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from dllm_jax.loading.sandbox import compiled, size_of
from dllm_jax.strategies.core.checks import short_repr

MOST_SECONDS = 5.0  # of CPU time for a template
_EVENTS_A_LOOK = 20  # lines of Python code between two looks at the clock
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; the first wins


def fill(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    **variables: Any,
) -> str:
    """Render a template.

    Args:
        tools: JSON schemas, or functions to make one of.
        continue_final_message: End where the last message does, or the field of it of this name.
        variables: What else the template may read.

    Raises:
        Exception: Of any type: what the template raises, or that it takes too long or too much.
    """
    turns = [_named_thinking(_plain(one)) for one in messages]
    field = "content" if continue_final_message is True else continue_final_message
    if field:
        turns[-1] = _tagged(turns[-1], field)
    with _limited():
        text = compiled(template).render(
            messages=turns,
            tools=None if tools is None else _plain([tool_schema(tool) for tool in tools]),
            documents=None if documents is None else _plain(list(documents)),
            add_generation_prompt=add_generation_prompt,
            **_plain(variables),
        )
    return _cut(text) if field else text


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """A limit on the CPU time of Python code inside: a template may loop for ever.

    A trace function can stop a loop; a thread that renders could only be left running.
    """
    until, before = time.thread_time() + MOST_SECONDS, sys.gettrace()
    events = itertools.count(1)

    def traced(frame: FrameType, *_: Any) -> Any:
        if next(events) % _EVENTS_A_LOOK == 0 and time.thread_time() > until:
            raise TimeoutError(f"it takes more than {MOST_SECONDS:g} s")
        # `size_of` is bounded, and slow when it is traced.
        return None if frame.f_code is size_of.__code__ else traced

    sys.settrace(traced)
    try:
        yield
    finally:
        sys.settrace(before)


# --- what a template sees ---------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A copy in JSON's types: methods of other objects may do anything."""
    return json.loads(_ENCODER.encode(value))


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for name in ("model_dump", "item"):  # pydantic's and NumPy's
        if callable(made := getattr(value, name, None)) and not hasattr(value, "__len__"):
            return made()
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


_ENCODER = json.JSONEncoder(default=_as_json)  # `json.dumps` would make one each time


def tool_schema(tool: Any) -> Any:
    """A tool in OpenAI's form, of a function by its types and docstring."""
    if isinstance(tool, Mapping):
        return tool
    if not callable(tool):
        said = short_repr(tool)
        raise ValueError(f"tool {said} is neither a JSON schema nor a function; give one")
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # of its parser; not all are ValueErrors
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"tool {short_repr(tool)} has no schema ({reason}); give it types and a docstring with "
            "Args, or a JSON schema"
        ) from error


def _named_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """A message without nulls, its reasoning under the names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    said = next((message[name] for name in _REASONING if name in message), None)
    if said is None:
        return message
    return {"thinking": said, **message, "reasoning_content": said}


def _tagged(message: dict[str, Any], field: str) -> dict[str, Any]:
    """The last message with a mark where it ends, as transformers marks it."""
    said = message.get(field)
    if said is None:
        raise ValueError(f"the last message has no {field} to continue")
    if isinstance(said, list):
        last = max((i for i, part in enumerate(said) if "text" in part), default=None)
        if last is None:
            raise ValueError("the last message has no text to continue")
        parts = [*said]
        parts[last] = {**said[last], "text": said[last]["text"] + _TAG}
        return {**message, field: parts}
    same = {name for name in _REASONING if field in _REASONING and message.get(name) == said}
    return {**message, **dict.fromkeys((field, *same), said + _TAG)}


def _cut(text: str) -> str:
    """A text up to the mark."""
    place = text.rfind(_TAG.strip())
    if place < 0:
        raise ValueError("it leaves the last message out, so that it cannot be continued")
    # Without its space the template has trimmed the message.
    return text[:place] if text.startswith(_TAG, place) else text[:place].rstrip()
