"""From what a user names to a strategy value: a name, an import path, a file, a function, a value.

A name is the module of that name in this package; there is no registry.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from typing import Any, cast

from flax import struct

from .checks import short_repr
from .errors import described
from .knobs import check_knob, knob_rules
from .needs import Needs
from .protocol import InitFunction, SlotSpec, StepFunction, Strategy
from .state import Carry

_PACKAGE = __name__.rpartition(".core.")[0]


_OUR_FOLDERS = {
    "strategies": "dllm_jax.strategies",
    "pallas_kernels": "dllm_jax.kernels",
    "checkpoints_convert": "dllm_jax.convert",
}
_DEFINING = {"needs", "fn", "init_fn"}  # fields that define an algorithm
_DEFAULT_NEEDS = Needs("grid_causal")


class FunctionStrategy(Strategy):
    """A plain function `step(forward, state)` as a strategy."""

    fn: StepFunction = struct.field(pytree_node=False)
    init_fn: InitFunction | None = struct.field(pytree_node=False, default=None)
    block_size: int | None = struct.field(pytree_node=False, default=None)
    buffer_size: int | None = struct.field(pytree_node=False, default=None)
    needs: Needs = struct.field(pytree_node=False, default=_DEFAULT_NEEDS)

    def step(self, forward, state):
        """Call the function."""
        return self.fn(forward, state)

    def init(self, spec: SlotSpec) -> Carry:
        """The function's own leaves, if it has any."""
        return self.init_fn(spec) if self.init_fn else Carry()

    @property
    def made_of(self) -> StepFunction:
        """The function."""
        return self.fn


def as_strategy(
    fn: StepFunction,
    block_size: int | None = None,
    buffer_size: int | None = None,
    needs: Needs = _DEFAULT_NEEDS,
    init: InitFunction | None = None,
) -> FunctionStrategy:
    """Make a strategy of a step function; sizes of None become the model family's default.

    Keep the function at module level: a fresh closure is a new algorithm and compiles again.
    """
    return FunctionStrategy(fn, init, block_size, buffer_size, needs)


def strategy_names() -> tuple[str, ...]:
    """Names that `load_strategy` takes: the algorithms of this package, files or folders."""
    package = importlib.import_module(_PACKAGE)
    names = {module.name for module in pkgutil.iter_modules(package.__path__)}
    return tuple(sorted(names - {"core", "testing"}))


def settings(strategy: Any) -> tuple[str, ...]:
    """Names of the fields that a user may set; the others define the algorithm."""
    return tuple(f.name for f in dataclasses.fields(strategy) if f.name not in _DEFINING)


def load_strategy(spec: Any, **overrides: Any) -> Any:
    """Resolve `spec` to a strategy value.

    Args:
        spec: A strategy, a dataclass with a `step`, a step function, a class, a name such as
            "multi_bd", or "pkg.mod:Name" / "path/to/file.py:name".
        **overrides: Fields to set (`block_size=`, `accept_threshold=`, ...); None leaves a field.

    Raises:
        ValueError: Unknown name, missing attribute, a file that cannot be run, unknown field, or a
            value out of range.
    """
    found: Any = _find(spec) if isinstance(spec, str) else spec
    if isinstance(found, type):
        found = found()
    if not isinstance(found, Strategy):
        found = _adopt(found, spec)
    return _override(found, {k: v for k, v in overrides.items() if v is not None})


def _adopt(found: Any, spec: Any) -> Strategy:
    """A strategy with the step of something that is not a `Strategy`."""
    if not hasattr(found, "step"):
        if not callable(found):
            raise ValueError(
                f"strategy={short_repr(spec)} has no step(forward, state) and is not a function; "
                f"use one of {', '.join(strategy_names())} or a value with a step"
            )
        return FunctionStrategy(cast(StepFunction, found))
    kind = type(found)
    if not dataclasses.is_dataclass(found):
        raise ValueError(
            f"strategy={short_repr(spec)} has type {kind.__name__}, which is not a dataclass; "
            f"write class {kind.__name__}(dllm_jax.strategies.Strategy)"
        )
    return _with_defaults(kind)(
        **{f.name: getattr(found, f.name) for f in dataclasses.fields(kind)}
    )


@functools.cache
def _with_defaults(kind: type) -> type[Strategy]:
    """The class `kind` with `Strategy` as a further base; cached, so that it compiles once."""
    names = {key: getattr(kind, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, Strategy), {**names, "made_of": kind})


def _find(spec: str) -> Any:
    if ":" in spec:
        return load_object(spec, "strategy")
    if spec not in strategy_names():
        raise ValueError(
            f"strategy={short_repr(spec)} is unknown; use one of {', '.join(strategy_names())}, "
            "'package.module:Name' or 'path/to/file.py:name'"
        )
    return importlib.import_module(f"{_PACKAGE}.{spec}").STRATEGY


def load_object(spec: str, what: str) -> Any:
    """Load an object from a user's module or file: "pkg.mod:Name" or "path/to/file.py:name".

    Args:
        what: The argument that names it, for messages.

    Raises:
        ValueError: A missing module, file or attribute, or a file that cannot be run.
    """
    location, _, name = spec.rpartition(":")
    is_file = location.endswith(".py")
    module = _load_file(location, what) if is_file else _import(location, spec, what)
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, vars(module), 1)
        hint = f"did you mean {close[0]!r}?" if close else "check the name"
        raise ValueError(f"{what}={short_repr(spec)}: {location} has no {short_repr(name)}; {hint}")
    return getattr(module, name)


def _import(location: str, spec: str, what: str) -> Any:
    try:
        return importlib.import_module(location)
    except (ImportError, AttributeError) as error:
        if not isinstance(error, ModuleNotFoundError) and not _foreign(error):
            raise
        remedy = _foreign(error) or "check the path and PYTHONPATH"
        raise ValueError(
            f"{what}={short_repr(spec)}: cannot import {location} ({error}); {remedy}"
        ) from error


def _load_file(location: str, what: str) -> Any:
    path = Path(location)
    if not path.is_file():
        raise ValueError(f"{what} file {short_repr(location)} does not exist; check the path")
    found = importlib.util.spec_from_file_location(f"{what}_file_{path.stem}", path)
    if found is None or found.loader is None:
        raise ValueError(f"{what} file {short_repr(location)} is no Python source; check the path")
    module = importlib.util.module_from_spec(found)
    # Dataclasses look their module up by name while the file runs.
    sys.modules[module.__name__] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module.__name__]
        raise ValueError(
            f"{what} file {short_repr(location)} cannot be run "
            f"({described(error)}); {_foreign(error) or 'mend the file'}"
        ) from error
    return module


def _foreign(error: Exception) -> str | None:
    """The remedy where a user's import met another package with the name of one of our folders."""
    name = getattr(error, "name", None) if isinstance(error, ImportError) else None
    if isinstance(error, AttributeError):
        name = getattr(error.obj, "__name__", None)
    top = str(name).partition(".")[0]
    module = sys.modules.get(top)
    if top not in _OUR_FOLDERS or module is None or module.__name__ != top:
        return None
    folder = next(iter(getattr(module, "__path__", ())), None) or module.__file__
    return f"{top!r} is the foreign {folder}; import from {_OUR_FOLDERS[top]}"


def _override(strategy: Any, overrides: dict[str, Any]) -> Any:
    names = settings(strategy)
    rules = knob_rules(strategy)
    for name, value in overrides.items():
        if name not in names:
            raise ValueError(
                f"{name}={short_repr(value)}: {type(strategy).__name__} has no such field to set; "
                f"its fields are {', '.join(names)}"
            )
        if name in rules:
            check_knob(name, value, rules[name])
    return strategy.replace(**overrides) if overrides else strategy
