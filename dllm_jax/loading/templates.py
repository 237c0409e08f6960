"""Jinja for chat templates, which come with a model and may be hostile: time and sizes are bounded.

Templates see what transformers' `apply_chat_template` shows them: the same globals, filters, tags
and form of the messages.

A loop is stopped by the clock. One operation of C code cannot be, so operations whose result could
be large (`"a" * 10**9`, `10**10**8`, `"%1000000000d"`, a list of lists of itself) are checked
before they run, and each value that a template makes is counted.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from jinja2 import TemplateError, ext, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dllm_jax.strategies.core.checks import short_repr

MOST_SECONDS = 5.0  # of CPU time for a template
_EVENTS_A_LOOK = 20  # lines of Python code between two looks at the clock
MOST = 10_000_000  # characters and items of a value, and what a number may ask for
_MOST_BITS = 1_000_000  # of a whole number
_MOST_VOLUME = 1_000_000_000  # product of all sizes that go into a method of a text
_ASKS_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")  # format strings that take widths as values
_MOST_INDENT = 100
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; the first wins
# Filters that make something as large as their numbers say.
_SIZING = ("batch", "center", "indent", "join", "replace", "slice")


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
        text = _compiled(template).render(
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

    num_events = 0

    def traced(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal num_events
        del event, value
        num_events += 1
        if num_events % _EVENTS_A_LOOK == 0 and time.thread_time() > until:
            raise TimeoutError(f"it takes more than {MOST_SECONDS:g} s")
        return None if frame.f_code is _size.__code__ else traced  # it is bounded, and slow traced

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


# --- the environment --------------------------------------------------------------------------


class _Generation(ext.Extension):
    """`{% generation %}`: marks what an assistant said; here it is only rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(lineno)

    @pass_eval_context
    def _said(self, context: Any, caller: Callable[[], str]) -> str:
        return caller()


class _Generator(CodeGenerator):
    """Code that counts every text, list and mapping that a template makes."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.joined(")
        super().visit_Tuple(nodes.Tuple(node.nodes, "load"), frame)
        self.write(")")

    def _counted(self, visit: Callable[..., None], node: Any, frame: Any) -> None:
        self.write("environment.counted(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Any) -> None:
        self._counted(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self._counted(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        if node.ctx == "load":
            self._counted(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, with bounded sizes."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, ext.loopcontrols],
            finalize=_counted,
        )
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _now,
            "dict": _Dict(),
            "namespace": _namespace(self.globals["namespace"]),
        }
        self.filters = {name: _bounded(name, one) for name, one in self.filters.items()}

    counted = staticmethod(lambda value: _counted(value))

    @staticmethod
    def joined(parts: tuple[Any, ...]) -> str:
        """The operator `~`."""
        return "".join(map(str, _counted(parts)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator to what is small enough."""
        if operator == "%" and isinstance(left, str):
            _require(_of_format(left, right), MOST)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require(left.bit_length() * abs(right), _MOST_BITS)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _require(left.bit_length() + right.bit_length(), _MOST_BITS)
        elif operator == "*":
            numbers = [abs(one) for one in (left, right) if isinstance(one, int)]
            _require(math.prod(numbers) * max(_size(left), _size(right)), MOST)
        elif operator == "+":
            _require(_size(left) + _size(right), MOST)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` of what is small enough."""
        made = super().wrap_str_format(value)
        if made is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _require(_of_format(value.__self__, (*args, *kwargs.values())), MOST)
            return made(*args, **kwargs)

        return checked

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call with what is small enough; methods of texts and numbers grow by a product."""
        given = (*args, *kwargs.values())
        owner = getattr(__obj, "__self__", None)
        for value in given:
            _counted(value)
        if isinstance(owner, str | bytes | int | float):
            _require_volume((owner, *given))
        return _counted(super().call(__context, __obj, *args, **kwargs))


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    compiled = _Environment().from_string(template)
    # Each rendering copies these, and a ChainMap is slow to copy under the tracer that bounds it.
    compiled.globals = dict(compiled.globals)
    return compiled


class _Dict:
    """`dict` as templates may use it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As Python's."""
        return dict.fromkeys(*args)


def _namespace(kind: Any) -> Any:
    """Jinja's namespaces, without names that begin with an underscore."""

    def checked(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace takes no name {name!r}, which begins with _")

    class Namespace(kind):
        def __init__(*args: Any, **kwargs: Any):
            self, args = args[0], args[1:]
            attributes = dict(*args, **kwargs)
            for name in attributes:
                checked(name)
            kind.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            checked(name)
            kind.__setitem__(self, name, value)

    return Namespace


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    _require(indent if isinstance(indent, int) else 0, _MOST_INDENT)
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    _require(_of_format(format, ()), MOST)
    return datetime.datetime.now().strftime(format)


# --- sizes ------------------------------------------------------------------------------------


def _size(value: Any) -> int:
    """Characters and items of a value, counted to little more than `MOST`."""
    total, waiting = 0, [value]
    while waiting and total <= MOST:
        one = waiting.pop()
        total += 1
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, dict):
            total += len(one)
            if total <= MOST:
                waiting += [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            total += len(one)
            if total <= MOST:
                waiting += one
    return total


def _counted(value: Any) -> Any:
    _require(_size(value), MOST)
    return value


def _require(size: int, most: int) -> None:
    if size > most:
        raise OverflowError(f"it makes a value of more than {most} characters or items")


def _require_volume(values: Sequence[Any]) -> None:
    """Refuse what a method of a text could blow up: `replace`, `ljust`, `join`, `expandtabs`."""
    sizes = (abs(int(v)) if isinstance(v, int | float) else _size(v) for v in values)
    volume = 1
    for size in sizes:
        volume *= max(size, 1)
        _require(volume, _MOST_VOLUME)


def _of_format(text: str, values: Any) -> int:
    """The most that a format string could make of values: its own widths, and those in `values`."""
    widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", text))
    given = values if isinstance(values, tuple | list) else (values,)
    places = text.count("%") + text.count("{")
    if _ASKS_WIDTH.search(text):
        widths += places * sum(abs(one) for one in given if isinstance(one, int))
    return len(text) + widths + places * max(map(_size, given), default=0)


def _bounded(name: str, one: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes and makes only what is small enough."""

    @functools.wraps(one)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, _SIZED)]
        for value in given:
            _counted(value)
        if name == "format" and isinstance(given[0], str):
            _require(_of_format(given[0], given[1:]), MOST)
        elif name in _SIZING:
            _require_volume(given)
        elif name == "round":
            _require_volume(given[1:])  # 10 to the power of that
        return _counted(one(*args, **kwargs))

    return checked


_SIZED = (str, bytes, int, float, list, tuple, dict, set)
