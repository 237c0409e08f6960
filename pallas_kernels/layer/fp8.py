"""Matrices and rows in 8 bits (e4m3), and their product in plain XLA.

A matrix has a scale for each output, a row one scale of its own: what a row becomes depends on that
row alone, so a text does not depend on its batch. Scales are applied to the float32 sums. Those of
rows are powers of two, so that a number becomes the same 8 bits whether its row has one scale or
one for each group of columns, unless it is below 2^-13 of the row's largest.

Both operands lie with the contracted axis last, the only order that the tensor cores of Hopper take
8-bit types in; from any other order XLA would transpose the whole matrix in every call.
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
LINE = 128  # bytes that memory is read by
_TRIES = 16  # scales of a matrix's output that are tried
_LEAST = 2.0**-100  # of a row's largest number, so that neither factor over- or underflows


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Fp8Matrix:
    """A matrix [K *N] as `values * scales`, the contracted axis last.

    Attributes:
        depth: K where the stored axis is longer: zeros fill its last line. None: the stored axis.
    """

    values: Float[Array, "*N L"]  # e4m3
    scales: Float[Array, "*N"]  # float32
    depth: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix it stands for: [K *N]."""
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
        """The same without zeros in its last line."""
        return Fp8Matrix(self.values[..., : self.depth], self.scales)

    def restored(self, dtype: Any) -> Float[Array, "K ..."]:
        """The matrix it stands for, in `dtype`."""
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
    """Rows as `values * scales`, each group of columns with a scale of its own."""

    values: Float[Array, "*M K"]  # e4m3
    scales: Float[Array, "C R"]  # float32, of groups and rows; rows past the last have any

    @property
    def whole(self) -> Fp8Rows:
        """The same with a scale a row."""
        K, M = self.values.shape[-1], self.values.size // self.values.shape[-1]
        groups = self.values.astype(jnp.float32).reshape(M, len(self.scales), -1)
        rows = groups * self.scales.T[:M, :, None]
        return quantize_rows(rows.reshape(*self.values.shape[:-1], K))


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Fp8Sums:
    """A product of 8 bits as `sums * rows * columns`: the launch that reads it applies the scales.

    Rounding them in a launch of its own would read and write every sum once more.
    """

    sums: Float[Array, "..."]  # of the axes of both scales
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

    The largest number becomes 448, so that nothing overflows; of rows, one above 224 and up to 448.
    With `is_sought` as well, and of those the one that leaves the least error.

    Args:
        axis: The axis of a mesh whose devices each have a part of every row, all of which have the
            row's scale; None: rows are whole.
        is_rows: Scales are powers of two.
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
    """The number that becomes 448, up to twice the largest, with the least error of the others.

    A scale decides how near to numbers of 8 bits they fall. Errors are whole numbers, so that their
    sum, and the choice, are those of one device on any number of them.
    """
    steps = jnp.asarray(2 ** (np.arange(_TRIES) / _TRIES), jnp.float32)
    inputs = x.shape[-1] * (1 if axis is None else jax.lax.psum(1, axis))
    unit = 256 if inputs < 2**15 else 1  # an error is 16 squared at most, a sum below 2^31

    def tried(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        least, best = found
        scaled = x.astype(jnp.float32) * (LARGEST / (largest * steps[i]))[..., None]
        # XLA would drop a cast to 8 bits and back.
        off = jax.lax.reduce_precision(scaled, 8, 3) - scaled
        error = jnp.sum(jnp.round(off * off * unit).astype(jnp.int32), axis=-1)
        error = error if axis is None else jax.lax.psum(error, axis)
        error = error.astype(jnp.float32) * steps[i] ** 2
        return jnp.minimum(error, least), jnp.where(error < least, largest * steps[i], best)

    least = jnp.full_like(largest, jnp.inf)
    return jax.lax.fori_loop(0, _TRIES, tried, (least, largest))[1]


def factors_of(largest: Array) -> tuple[Array, Array]:
    """What a row is multiplied with, and its scale, by its largest number; powers of two.

    Every form multiplies by these two, so that all of them round a row alike.
    """
    largest = jnp.where(largest > 0, jnp.maximum(largest, _LEAST), LARGEST)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    # One more where the fraction is above 448's, 1.75: float32 has 23 bits of it.
    exponent = jax.lax.shift_right_logical(bits + 0x1FFFFF, 23)
    of_factor, of_scale = 2 * 127 + 8 - exponent, exponent - 8  # 448 is 1.75 * 2^8
    return _power_of_two(of_factor), _power_of_two(of_scale)


def factors_of_scalar(largest: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """`factors_of` of one number: the factor in a shape, and the scale.

    Mosaic reads the bits of vectors alone; one of equal values is one register.
    """
    factors, scales = factors_of(jnp.broadcast_to(largest, shape))
    return factors, jnp.max(scales)


def _power_of_two(exponent: Array) -> Array:
    bits = jax.lax.shift_left(exponent, 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def quantize_rows(x: Float[Array, "*M K"], axis: str | None = None) -> Fp8Rows:
    """Rows in 8 bits, each with the scale of its largest number; `axis` as of `quantize`."""
    return Fp8Rows(*quantize(x, axis, is_rows=True))


def quantize_matrix(
    w: Float[Array, "..."], num_inputs: int = 1, axis: str | None = None, is_filled: bool = False
) -> Fp8Matrix:
    """A matrix [*K *N] in 8 bits.

    Args:
        num_inputs: Leading axes that are contracted; they become one.
        axis: The axis of a mesh whose devices each have a part of the inputs; None: all.
        is_filled: Zeros fill the last line of many inputs: the experts' kernels, which may take a
            dense half, load whole lines.
    """
    depth = math.prod(w.shape[:num_inputs])
    outputs_first = jnp.moveaxis(w.reshape(depth, *w.shape[num_inputs:]), 0, -1)
    values, scales = quantize(outputs_first, axis, is_sought=True)
    if not is_filled or depth <= LINE or depth % LINE == 0:
        return Fp8Matrix(values, scales)
    return Fp8Matrix(filled(values, -(-depth // LINE) * LINE), scales, depth)


def filled(rows: Float[Array, "... K"], width: int) -> Float[Array, "... L"]:
    """Rows with zeros behind them."""
    if rows.shape[-1] == width:
        return rows
    return jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, width - rows.shape[-1]),))


def product(
    x: Float[Array, "*M K"] | Fp8Rows | Fp8Groups,
    w: Fp8Matrix,
    axis: str | None = None,
    dtype: Any = jnp.float32,
) -> Fp8Sums:
    """`x @ w`, rows in 8 bits, sums in `dtype`; `axis` as of `quantize`.

    Sums are below 448 * 448 * K, which 16 bits with 8 of exponent hold.
    """
    x = x.whole if isinstance(x, Fp8Groups) else x
    rows, flat = x if isinstance(x, Fp8Rows) else quantize_rows(x, axis), w.flat
    values, stored = rows.values, flat.values.shape[-1]
    values = filled(values, stored) if values.shape[-1] == w.depth else values
    sums = jax.lax.dot_general(  # of two axes: XLA knows the product of 8 bits in this form
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
