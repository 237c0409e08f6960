"""Checks of a user's values: each returns the value as plain Python, or raises ValueError."""

import contextlib
import difflib
import functools
import inspect
import itertools
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

_Kind = TypeVar("_Kind")
MOST = 2**31 - 1  # the largest count that fits the device's int32
MOST_LISTED = 1 << 24  # more than any list of ids or strings that can run


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = 20


def short_repr(value: Any) -> str:
    """A value as an error names it: its `repr` cut short, or its type where that fails."""
    try:
        text = _SHORT.repr(value).replace("\n", " ")
    except Exception:  # a number of too many digits
        return f"of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:98]} ... {text[-97:]}"


class Refused(ValueError):
    """A request that can never run.

    Attributes:
        param: The field at fault, None if it is none of them.
        code: The kind of error in a word, as an HTTP server answers it.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param, self.code = param, code


def whole_number(name: str, value: Any, low: int = 1, high: int = MOST) -> int:
    """An int in [low, high]; NumPy's integers count, truth values do not."""
    number = low - 1
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if not low <= number <= high:
        raise ValueError(
            f"{name}={short_repr(value)} must be a whole number in [{low}, {high}]; choose a "
            "value there"
        )
    return number


def real_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """A float in [low, high]; NaN and truth values are refused."""
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not low <= number <= high:
        raise ValueError(
            f"{name}={short_repr(value)} must be a number in [{low}, {high}]; choose one there"
        )
    return number


def raise_exit(error: BaseException) -> None:
    """Raise an exception that is to end the caller; native code's panics are no `Exception`s."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error


def boolean(name: str, value: Any) -> bool:
    """True or False, Python's or NumPy's."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise ValueError(f"{name}={short_repr(value)} must be True or False; choose one")
    return bool(value)


def listed(name: str, values: Iterable[Any]) -> list[Any]:
    """Values as a list, of which an endless or broken iterator is refused."""
    try:
        found = list(itertools.islice(values, MOST_LISTED + 1))
    except Exception as error:  # whatever the caller's iterator raises
        raise ValueError(
            f"{name} of type {type(values).__name__} cannot be read ({type(error).__name__}); "
            "give a list"
        ) from error
    if len(found) > MOST_LISTED:
        raise ValueError(f"{name} holds more than {MOST_LISTED} values; give fewer")
    return found


def token_ids(name: str, ids: Any, most: int | None = None, what: str = "token ids") -> list[int]:
    """Ids as a list of ints; with `most`, each in [0, most]."""
    try:
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        plain = list(map(operator.index, listed(name, ids) if isinstance(ids, Iterable) else ids))
    except TypeError:
        text = short_repr(ids)
        text = text if len(text) <= 60 else f"of type {type(ids).__name__}"
        raise ValueError(f"{name} is {text}; give one list of whole numbers, {what}") from None
    if most is not None:
        for token in plain:
            whole_number(name, token, 0, most)
    return plain


def stop_strings(stop: Any) -> tuple[str, ...]:
    """One string or several, none of them empty."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Iterable):
        raise ValueError(
            f"stop={short_repr(stop)} must be a string or several; give those that end the text"
        )
    stops = tuple(listed("stop", stops))
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"stop holds {short_repr(text)}; give strings of at least one character"
            )
    return stops


def overrides(values: Any) -> dict[str, float]:
    """Thresholds by name."""
    if not isinstance(values, Mapping):
        raise ValueError(
            f"strategy_overrides={short_repr(values)} must be a mapping; "
            'give thresholds by name, as {"accept_threshold": 0.8}'
        )
    return {
        name: real_number(f"strategy_overrides[{short_repr(name)}]", value)
        for name, value in values.items()
    }


def known_fields(
    *passed_on: inspect.Parameter, **nearest: str
) -> Callable[[type[_Kind]], type[_Kind]]:
    """Make a class refuse unknown keywords by name, with the nearest one that it has.

    Args:
        passed_on: What it takes by `**keywords`; its signature, and `help`, list them.
        nearest: What comes nearest to keywords that are spelled differently.
    """

    def wrap(kind: type[_Kind]) -> type[_Kind]:
        make: Any = kind.__init__
        own = inspect.signature(make)
        kept = [one for one in own.parameters.values() if one.kind != one.VAR_KEYWORD]
        more = [one.replace(kind=one.KEYWORD_ONLY) for one in passed_on]
        signature = own.replace(parameters=[*kept, *more])
        fields = list(signature.parameters)[1:]

        @functools.wraps(make)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            for name in given.keys() - set(fields):
                close = difflib.get_close_matches(name, fields, 1)
                near = nearest.get(name) or next(iter(close), None)
                known = f"the nearest is {near}" if near else f"it has {', '.join(fields)}"
                raise TypeError(f"{kind.__name__} has no field {name!r}; {known}")
            make(self, *args, **given)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        kind.__init__ = checked  # type: ignore[method-assign]
        return kind

    return wrap


def set_fields(frozen: Any, values: Mapping[str, Any]) -> None:
    """Replace fields of a frozen dataclass in its `__post_init__`."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)
