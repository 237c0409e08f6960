"""Kernels that are lowered once, not once in every program that launches them.

Lowering a Mosaic kernel runs in Python, takes some tenths of a second and holds the GIL. Programs
with the same number of rows launch the same kernels. If JAX has a folder for its compilation cache,
the lowered text is also stored there for the next process.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_CALLS = "mosaic_gpu_v2"  # custom call in the lowered text; jax.export must be asked to allow it
_DIGEST = 32  # bytes, in front of a stored text


Bound = functools.partial[Any]  # a function with its static arguments


def lowered_once(*, static_argnames: Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """`jax.jit` of a function that launches kernels on a GPU, whose text is kept.

    Args:
        static_argnames: As in `jax.jit`. Nothing is kept if one is named `interpret` and is not
            None, or if several devices share the arguments.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        plain = jax.jit(function, static_argnames=tuple(static_argnames))
        signature = inspect.signature(function)
        kept: dict[Any, Future[tuple[Any, Any]]] = {}
        one_at_a_time = threading.Lock()

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            is_one = jax.default_backend() == "gpu" and jax.sharding.get_abstract_mesh().empty
            if not is_one or options.get("interpret") is not None:
                return plain(*args, **options)
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            given = dict(bound.arguments)
            static = {name: given.pop(name) for name in static_argnames}
            leaves, tree = jax.tree.flatten(given)
            kinds = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
            key = kinds, tree, jax.config.jax_enable_x64, *static.values()
            with one_at_a_time:
                is_mine, future = key not in kept, kept.setdefault(key, Future())
            if is_mine:
                try:
                    future.set_result(_exported(functools.partial(function, **static), given))
                except BaseException as error:
                    del kept[key]
                    future.set_exception(error)
                    raise
            run, tree = future.result()
            return jax.tree.unflatten(tree, run(*leaves))

        return call

    return decorate


class Text(NamedTuple):
    """A kernel as MLIR's bytes, and the shapes of its results."""

    text: bytes
    out: Any


def _exported(function: Bound, given: Any) -> tuple[Any, Any]:
    """A function of the leaves of its arguments, and the tree of what it returns."""
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), given)
    place = _place(function, *jax.tree.flatten(given))
    made = None if place is None else _read(place)
    if made is None:
        made = lower(function, given)
        if place is not None:
            _write(place, made)
    leaves, tree = jax.tree.flatten(made.out)
    # Exports with these shapes differ only in their text, so export a blank function, then swap it.
    blank = _export(function, lambda *_: [jnp.zeros(x.shape, x.dtype) for x in leaves], given)
    exported = dataclasses.replace(blank, mlir_module_serialized=made.text)
    # jit: the layers of a program share the text. sequential_vmap: an export has no batching rule.
    return jax.jit(jax.custom_batching.sequential_vmap(exported.call)), tree


def lower(function: Bound, given: Any) -> Text:
    """The text of a kernel for arguments of these shapes."""
    made, tree = [], jax.tree.structure(given)

    def flat(*leaves: Any) -> list[Any]:
        out = function(**jax.tree.unflatten(tree, leaves))
        made.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out))
        return jax.tree.leaves(out)

    exported = _export(function, flat, given)
    return Text(exported.mlir_module_serialized, made[-1])


def _export(function: Bound, flat: Callable[..., list[Any]], given: Any) -> Any:
    flat.__name__ = function.func.__name__
    jitted = jax.jit(flat, keep_unused=True)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(_CALLS)]
    exporting = jax.export.export(jitted, platforms=("cuda",), disabled_checks=allowed)
    return exporting(*jax.tree.leaves(given))


def _place(function: Bound, given: Sequence[Any], tree: Any) -> Path | None:
    """The file of a text; the name is a digest of everything that the text depends on."""
    # By name: the stubs of jax 0.10 do not list it.
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder or not Path(folder).is_dir():
        return None
    inner = function.func
    facts = inner.__module__, inner.__qualname__, sorted(function.keywords.items()), given, tree
    facts = _version(), jax.config.jax_enable_x64, *facts
    return Path(folder) / "kernels" / hashlib.sha256(repr(facts).encode()).hexdigest()


@functools.cache
def _version() -> str:
    """JAX's version and a digest of the source of the kernels."""
    every = sorted(Path(__file__).parent.rglob("*.py"))
    source = hashlib.sha256(b"".join(path.read_bytes() for path in every))
    return f"{jax.__version__} {source.hexdigest()}"


def _read(place: Path) -> Text | None:
    """The stored text, or None if it is missing or damaged."""
    try:
        kept = place.read_bytes()
    except OSError:
        return None
    text = kept[_DIGEST:]
    return pickle.loads(text) if hashlib.sha256(text).digest() == kept[:_DIGEST] else None


def _write(place: Path, made: Text) -> None:
    text = pickle.dumps(made)
    with contextlib.suppress(OSError):  # a full disk, say: the next process lowers it again
        place.parent.mkdir(exist_ok=True)
        half = place.with_name(f"{place.name}.{os.getpid()}")
        half.write_bytes(hashlib.sha256(text).digest() + text)
        half.replace(place)
