"""Kernels that are lowered once a process, not once in every program that launches them.

Lowering a Mosaic kernel is Python, takes some tenths of a second and holds the GIL. An engine has
dozens of programs that launch the same kernels: all but attention do not see the number of pages.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

_CALLS = "mosaic_gpu_v2"  # what the lowered text calls; jax.export wants to be told


def lowered_once(*, static_argnames: Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """`jax.jit` of a function that launches kernels on a GPU, whose text is kept.

    Args:
        static_argnames: As of `jax.jit`. Where one is named `interpret` and not None, nothing is
            kept, nor where several devices share the arguments.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        plain = jax.jit(function, static_argnames=tuple(static_argnames))
        signature = inspect.signature(function)
        kept: dict[Any, Any] = {}

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
            kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            key = kinds, tree, *static.values()
            if key not in kept:
                kept[key] = _exported(functools.partial(function, **static), kinds, tree)
            run, tree = kept[key]
            return jax.tree.unflatten(tree, run(*leaves))

        return call

    return decorate


def _exported(function: Callable[..., Any], kinds: Sequence[Any], tree: Any) -> tuple[Any, Any]:
    """A function of the leaves of its arguments, and the tree of what it returns."""
    trees = []

    def flat(*leaves: Any) -> list[Any]:
        out, of_out = jax.tree.flatten(function(**jax.tree.unflatten(tree, leaves)))
        trees.append(of_out)
        return out

    flat.__name__ = function.func.__name__
    allowed = jax.export.DisabledSafetyCheck.custom_call(_CALLS)
    export = jax.export.export(jax.jit(flat), platforms=("cuda",), disabled_checks=[allowed])
    exported = export(*(jax.ShapeDtypeStruct(*kind) for kind in kinds))
    # In jit, so that the layers of a program share its text. It has no batching rule.
    return jax.jit(jax.custom_batching.sequential_vmap(exported.call)), trees[0]
