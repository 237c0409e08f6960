"""Jinja for templates that may be hostile: what they make is bounded in size.

One operation of C code cannot be stopped by a clock, so operations whose result could be large
(`"a" * 10**9`, `10**10**8`, `"%1000000000d"`, a list of lists of itself) are checked before they
run, and each value that a template makes is counted.
"""

import datetime
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError, ext, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST = 10_000_000  # characters and items of a value, and what a number may ask for
_MOST_BITS = 1_000_000  # of a whole number
_MOST_VOLUME = 1_000_000_000  # product of all sizes that go into a method of a text
_ASKS_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")  # format strings that take widths as values
_MOST_INDENT = 100
# Filters that make something as large as their numbers say.
_SIZING = ("batch", "center", "indent", "join", "replace", "slice")
_SIZED = (str, bytes, int, float, list, tuple, dict, set)


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
            _require(math.prod(numbers) * max(size_of(left), size_of(right)), MOST)
        elif operator == "+":
            _require(size_of(left) + size_of(right), MOST)
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
def compiled(template: str) -> Any:
    """A template that is ready to be rendered."""
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


def size_of(value: Any) -> int:
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
    _require(size_of(value), MOST)
    return value


def _require(size: int, most: int) -> None:
    if size > most:
        raise OverflowError(f"it makes a value of more than {most} characters or items")


def _require_volume(values: Sequence[Any]) -> None:
    """Refuse what a method of a text could blow up: `replace`, `ljust`, `join`, `expandtabs`."""
    sizes = (abs(int(v)) if isinstance(v, int | float) else size_of(v) for v in values)
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
    return len(text) + widths + places * max(map(size_of, given), default=0)


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
