"""Matrices and rows in 8 bits (e4m3), and their product in plain XLA.

A matrix has a scale for each output, and each row has one scale. A row's 8-bit values depend on
that row alone, so a text does not depend on its batch. Scales are applied to the float32 sums.
Scales of rows are powers of two: a number is rounded to the same 8 bits whether its row has one
scale or one for each group of columns, unless it is below 2^-13 of the row's largest.

Both operands store the contracted axis last. Hopper's tensor cores take 8-bit types in this order
alone; from any other one XLA would transpose the whole matrix in every call.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

DTYPE = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(DTYPE).max)  # 448
LINE = 128  # bytes of a line of memory
_TRIES = 16  # scales tried for each output of a matrix
_LEAST = 2.0**-100  # lower bound of a row's largest number: no factor over- or underflows


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Fp8Matrix:
    """A matrix [K *N] as `values * scales`, the contracted axis last.

    Attributes:
        depth: K, if zeros fill the last line of the stored axis; None: the whole stored axis.
    """

    values: Float[Array, "*N L"]  # e4m3
    scales: Float[Array, "*N"]  # float32
    depth: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented matrix, [K *N]."""
        *outputs, stored = self.values.shape
        return (self.depth or stored, *outputs)

    @property
    def dtype(self) -> Any:
        """Type of the stored values."""
        return self.values.dtype

    @property
    def flat(self) -> "Fp8Matrix":
        """The same with one axis of outputs: [K N]."""
        values = self.values.reshape(-1, self.values.shape[-1])
        return Fp8Matrix(values, self.scales.reshape(-1), self.depth)

    @property
    def trimmed(self) -> "Fp8Matrix":
        """The same without the zeros that fill its last line."""
        return Fp8Matrix(self.values[..., : self.depth], self.scales)

    def restored(self, dtype: Any) -> Float[Array, "K ..."]:
        """The represented matrix, in `dtype`."""
        whole = self.values[..., : self.depth].astype(jnp.float32) * self.scales[..., None]
        return jnp.moveaxis(whole.astype(dtype), -1, 0)


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Fp8Rows:
    """Rows as `values * scales`."""

    values: Float[Array, "*M K"]  # e4m3
    scales: Float[Array, "*M"]  # float32


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Fp8Groups:
    """Rows as `values * scales`, with a scale for each group of columns of a row."""

    values: Float[Array, "*M K"]  # e4m3
    scales: Float[Array, "C R"]  # float32, [groups, rows]; arbitrary past the last row

    @property
    def whole(self) -> Fp8Rows:
        """The same with one scale a row."""
        K, M = self.values.shape[-1], self.values.size // self.values.shape[-1]
        groups = self.values.astype(jnp.float32).reshape(M, len(self.scales), -1)
        rows = groups * self.scales.T[:M, :, None]
        return quantize_rows(rows.reshape(*self.values.shape[:-1], K))


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Fp8Sums:
    """An 8-bit product as `sums * rows * columns`: the launch that reads it applies the scales.

    A separate launch to scale and round would read and write every sum once more.
    """

    sums: Float[Array, "..."]  # [*M *N]
    rows: Float[Array, "*M"]
    columns: Float[Array, "*N"]

    def rounded(self, dtype: Any) -> Float[Array, "..."]:
        """The product in `dtype`."""
        by_row = self.rows.reshape(*self.rows.shape, *(1,) * self.columns.ndim)
        by_column = self.columns.reshape(*(1,) * self.rows.ndim, *self.columns.shape)
        return (self.sums.astype(jnp.float32) * by_row * by_column).astype(dtype)


def quantize(
    x: Float[Array, "... K"],
    axis: str | None = None,
    is_rows: bool = False,
    is_sought: bool = False,
) -> tuple[Float[Array, "... K"], Float[Array, "..."]]:
    """Values in e4m3 and float32 scales of the last axis; zeros have a scale of one.

    The largest number becomes 448, so that nothing overflows.

    Args:
        axis: Mesh axis whose devices each hold a part of every row; the parts share the row's
            scale. None: rows are whole.
        is_rows: Scales are powers of two; the largest number becomes one above 224 and up to 448.
        is_sought: Also try smaller factors and take the one with the least error.
    """
    given, x = x, x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    largest = largest if axis is None else jax.lax.pmax(largest, axis)
    if is_sought:
        largest = _sought(given, largest, axis)
    if is_rows:
        factors, scales = factors_of(largest)
    else:
        largest = jnp.where(largest > 0, jnp.maximum(largest, _LEAST), LARGEST)
        factors, scales = LARGEST / largest, largest * (1 / LARGEST)
    return (x * factors[..., None]).astype(DTYPE), scales


def _sought(
    x: Float[Array, "... K"], largest: Float[Array, "..."], axis: str | None
) -> Float[Array, "..."]:
    """The bound to map to 448, between the largest number and twice it, with the least error.

    The scale decides how near the values fall to 8-bit numbers. Errors are integers, so that their
    sum, and with it the choice, does not depend on the number of devices.
    """
    steps = jnp.asarray(2 ** (np.arange(_TRIES) / _TRIES), jnp.float32)
    inputs = x.shape[-1] * (1 if axis is None else jax.lax.psum(1, axis))
    unit = 256 if inputs < 2**15 else 1  # an error is at most 16 squared, so a sum is below 2^31

    def tried(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        least, best = found
        scaled = x.astype(jnp.float32) * (LARGEST / (largest * steps[i]))[..., None]
        # reduce_precision, because XLA would remove a cast to 8 bits and back.
        off = jax.lax.reduce_precision(scaled, 8, 3) - scaled
        error = jnp.sum(jnp.round(off * off * unit).astype(jnp.int32), axis=-1)
        error = error if axis is None else jax.lax.psum(error, axis)
        error = error.astype(jnp.float32) * steps[i] ** 2
        return jnp.minimum(error, least), jnp.where(error < least, largest * steps[i], best)

    least = jnp.full_like(largest, jnp.inf)
    return jax.lax.fori_loop(0, _TRIES, tried, (least, largest))[1]


def factors_of(largest: Array) -> tuple[Array, Array]:
    """Factor and scale of a row with this largest number; both are powers of two.

    Every back end multiplies by these two, so that all round a row alike.
    """
    largest = jnp.where(largest > 0, jnp.maximum(largest, _LEAST), LARGEST)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    # Round the exponent up where the fraction (23 bits) exceeds 1.75, the fraction of 448.
    exponent = jax.lax.shift_right_logical(bits + 0x1FFFFF, 23)
    of_factor, of_scale = 2 * 127 + 8 - exponent, exponent - 8  # 448 is 1.75 * 2^8
    return _power_of_two(of_factor), _power_of_two(of_scale)


def factors_of_scalar(largest: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """`factors_of` a scalar: the factor, broadcast to `shape`, and the scale.

    Mosaic casts bits of vectors only; a vector of equal values takes one register.
    """
    factors, scales = factors_of(jnp.broadcast_to(largest, shape))
    return factors, jnp.max(scales)


def _power_of_two(exponent: Array) -> Array:
    bits = jax.lax.shift_left(exponent, 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def quantize_rows(x: Float[Array, "*M K"], axis: str | None = None) -> Fp8Rows:
    """Rows in 8 bits, each with the scale of its largest number; `axis` as in `quantize`."""
    return Fp8Rows(*quantize(x, axis, is_rows=True))


def quantize_matrix(
    w: Float[Array, "..."], num_inputs: int = 1, axis: str | None = None, is_filled: bool = False
) -> Fp8Matrix:
    """A matrix [*K *N] in 8 bits.

    Args:
        num_inputs: Number of leading axes that are contracted; they become one.
        axis: Mesh axis whose devices each hold a part of the inputs; None: one device holds all.
        is_filled: Zeros fill the last line of many inputs. The kernels of experts load whole
            lines, and may take a dense half in the same launch.
    """
    depth = math.prod(w.shape[:num_inputs])
    outputs_first = jnp.moveaxis(w.reshape(depth, *w.shape[num_inputs:]), 0, -1)
    values, scales = quantize(outputs_first, axis, is_sought=True)
    if not is_filled or depth <= LINE or depth % LINE == 0:
        return Fp8Matrix(values, scales)
    return Fp8Matrix(filled(values, -(-depth // LINE) * LINE), scales, depth)


def filled(rows: Float[Array, "... K"], width: int) -> Float[Array, "... L"]:
    """Rows padded with zeros to `width`."""
    if rows.shape[-1] == width:
        return rows
    return jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, width - rows.shape[-1]),))


def product(
    x: Float[Array, "*M K"] | Fp8Rows | Fp8Groups,
    w: Fp8Matrix,
    axis: str | None = None,
    dtype: Any = jnp.float32,
) -> Fp8Sums:
    """`x @ w` of rows in 8 bits, with sums in `dtype`; `axis` as in `quantize`.

    Sums are below 448 * 448 * K, which bfloat16 can represent.
    """
    x = x.whole if isinstance(x, Fp8Groups) else x
    rows, flat = x if isinstance(x, Fp8Rows) else quantize_rows(x, axis), w.flat
    values, stored = rows.values, flat.values.shape[-1]
    values = filled(values, stored) if values.shape[-1] == w.depth else values
    sums = jax.lax.dot_general(  # two axes: the form in which XLA recognises a product of 8 bits
        values.reshape(-1, values.shape[-1]),
        flat.values,
        (((1,), (1,)), ((), ())),
        preferred_element_type=dtype,
    )
    return Fp8Sums(sums.reshape(*rows.scales.shape, *w.shape[1:]), rows.scales, w.scales)


def matmul(
    x: Float[Array, "*M K"] | Fp8Rows | Fp8Groups,
    w: Fp8Matrix,
    dtype: Any,
    axis: str | None = None,
) -> Float[Array, "..."]:
    """`product` in `dtype`."""
    return product(x, w, axis).rounded(dtype)


def rounded(x: Array | Fp8Sums, dtype: Any) -> Array:
    """Rows in `dtype`."""
    return x.rounded(dtype) if isinstance(x, Fp8Sums) else x.astype(dtype)


def values_of(x: Array | Fp8Rows | Fp8Groups) -> Array:
    """Rows without their scales."""
    return x.values if isinstance(x, Fp8Rows | Fp8Groups) else x
