"""The launch of a Pallas Triton kernel for paths of grammars, and loads in it.

The work of a cell is small and needs the result of the next cell. In XLA it takes several launches
a cell, which took more than a third of a step. Here one program handles a slot and loops over its
cells (`triton_paths.py`); scores of ids do not depend on other cells, so there a program handles
one cell (`triton_ids.py`). Tables are padded to a bucket, but loops end with the grammar. Arrays
are flat, so that indices are sums.

Loads are issued in program order, and the first use of a load waits for it. So independent loads
come together, before any use.

JAX has deprecated Pallas Triton. No public type names it, so deleting the files `triton_*.py`
removes it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array


def launch(body, named, out, sizes, grid, num_warps, *, interpret=False, **constants):
    """One launch over flat arrays; returns results by name."""

    def kernel(*refs):
        given = dict(zip(named, refs, strict=False))
        made = dict(zip(out, refs[len(named) :], strict=True))
        # Threads of a program read what its other threads have written.
        barrier = (lambda: None) if interpret else pltriton.debug_barrier
        body(given, made, sizes, barrier=barrier, **constants)

    flat = [jax.ShapeDtypeStruct((math.prod(shape),), dtype) for shape, dtype in out.values()]
    found = pl.pallas_call(
        kernel,
        out_shape=flat,
        grid=grid,
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=f"grammar{body.__name__}",
    )(*(leaf.reshape(-1) for leaf in named.values()))
    shapes = (shape for shape, _ in out.values())
    return {name: leaf.reshape(shape) for name, leaf, shape in zip(out, found, shapes, strict=True)}


def fields(grammar: Any, *names: str) -> dict[str, Array]:
    """Tables of a grammar by name."""
    return {name: getattr(grammar, name) for name in names}


def load(ref, index, mask, other):
    """Load the parts of a flat array where the mask is true; integers as int32."""
    value = pltriton.load(ref.at[index], mask=mask, other=other)
    return value.astype(jnp.int32) if jnp.issubdtype(value.dtype, jnp.integer) else value


def sound(value):
    """Replace NaN by the score of a forbidden id."""
    return jnp.where(value == value, value, -jnp.inf)
