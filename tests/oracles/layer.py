"""The small operations of a layer in NumPy float64, written from their definitions."""

import numpy as np


def rms_norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * np.float64(scale)


def add_rms_norm(x, y, scale, eps):
    y = np.float64(y)
    total = np.float64(x) + (y if y.ndim == x.ndim else y.sum(axis=0))
    return total, rms_norm(total, scale, eps)


def gated_matmul(x, w, dtype=np.float64):
    """Gate and up rounded to a type before they meet."""
    of_one = [np.float64(w[:, :, i]).reshape(len(w), -1) for i in range(2)]
    gate, up = (np.float64((np.float64(x) @ matrix).astype(dtype)) for matrix in of_one)
    return gate * np.exp(-np.logaddexp(0, -gate)) * up


def rotate(x, cos, sin):
    """Pairs (j, j + R/2) as complex numbers, times that of their angle."""
    half = cos.shape[-1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (cos + 1j * sin)
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def rotate_qkv(qkv, bias, q_norm, k_norm, cos, sin, eps):
    """Head by head: queries, keys, values."""
    *rows, G, both, H = qkv.shape
    x = np.float64(qkv) + (0 if bias is None else np.float64(bias))
    q, k, v = np.zeros((*rows, G * (both - 2), H)), np.zeros((*rows, G, H)), x[..., both - 1, :]
    for g in range(G):
        for j in range(both - 1):
            head, scale = x[..., g, j, :], q_norm if j < both - 2 else k_norm
            head = head if scale is None else rms_norm(head, scale, eps)
            head = rotate(head, np.float64(cos), np.float64(sin))
            if j < both - 2:
                q[..., g * (both - 2) + j, :] = head
            else:
                k[..., g, :] = head
    return q, k, v


def write_rows(pages, rows, page, offset, token_last):
    """Every row that has a page in the pool, one after another; `token_last` are [P G H Z]."""
    pages = [np.array(mine) for mine in pages]
    by_token = [x.swapaxes(2, 3) if last else x for x, last in zip(pages, token_last, strict=True)]
    for mine, new in zip(by_token, rows, strict=True):
        flat = np.asarray(new).reshape(-1, *np.shape(new)[-2:])
        for row, (p, z) in enumerate(zip(page, offset, strict=True)):
            if p < len(mine):
                mine[p, :, z] = flat[row].astype(mine.dtype)
    return pages
