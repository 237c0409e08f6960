"""Numbers in 8 bits (e4m3fn), from the definition of the format; NumPy only."""

import numpy as np


def positive_values():
    """The positive numbers of the format, 0 first: 4 bits of exponent with bias 7, 3 of mantissa.

    There is no infinity; the pattern of all ones is NaN and left out.
    """
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array(subnormal + normal[:-1])


def rounded(x):
    """The nearest number of the format, of two the one with an even mantissa; at most 448."""
    values = positive_values()
    size = np.minimum(np.abs(np.float64(x)), values[-1])
    above = np.searchsorted(values, size)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    index = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.copysign(values[index], np.float64(x))


def quantized(x):
    """Values and float32 scales of the last axis, the largest number of a row being 448."""
    x = np.float32(x)
    largest = np.abs(x).max(axis=-1)
    largest = np.where(largest > 0, largest, np.float32(448))
    return rounded(x * (np.float32(448) / largest)[..., None]), largest * np.float32(1 / 448)


def sought(x):
    """The same, the largest one of 16 numbers up to 448: that which leaves the least error."""
    x = np.float64(np.float32(x))
    largest = np.where((peak := np.abs(x).max(axis=-1)) > 0, peak, 448)
    scales = [largest * 2 ** (i / 16) / 448 for i in range(16)]
    values = [rounded(x / each[..., None]) for each in scales]
    pairs = zip(values, scales, strict=True)
    errors = [((v * s[..., None] - x) ** 2).sum(axis=-1) for v, s in pairs]
    best = np.argmin(errors, axis=0)[None]
    scales = np.take_along_axis(np.array(scales), best, axis=0)[0]
    return np.take_along_axis(np.array(values), best[..., None], axis=0)[0], np.float32(scales)


def quantized_rows(x):
    """The same with the least power of two for a scale that keeps the largest number below 449."""
    x = np.float64(np.float32(x))
    largest = np.abs(x).max(axis=-1)
    scales = 2.0 ** np.ceil(np.log2(np.where(largest > 0, largest, 256) / 448))
    return rounded(x / scales[..., None]), np.float32(scales)


def matmul(x, w, of_columns=sought):
    """`x @ w` of rows and columns that are both rounded, in float64."""
    rows, row_scales = quantized_rows(x)
    columns, column_scales = of_columns(np.moveaxis(np.asarray(w), 0, -1).reshape(-1, len(w)))
    sums = rows @ columns.T * np.float64(row_scales)[..., None] * np.float64(column_scales)
    return sums.reshape(*sums.shape[:-1], *np.shape(w)[1:])
