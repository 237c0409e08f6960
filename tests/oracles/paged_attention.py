"""NumPy attention over dense keys rebuilt from pages, by definition, in float64."""

import numpy as np


def attention(q, k, v, k_pages, v_pages, page_table, mask, scale=None):
    """One query at a time: list what it sees, softmax, average. Rows that are not live are NaN.

    `mask` is a `WindowMask` of host arrays; see `dllm_jax.kernels.paged_attention.api`.
    """
    B, T, N, H = q.shape
    _, G, Z, _ = k_pages.shape
    out = np.full((B, T, N, H), np.nan)
    for b in range(B):
        first, end = mask.live[b]
        visible = None if mask.visible is None else mask.visible[min(b, len(mask.visible) - 1)]
        fresh_at = {int(c): i for i, c in enumerate(mask.cell[b]) if first <= c < end}
        for i in range(T):
            cell = int(mask.cell[b, i])
            if not first <= cell < end:
                continue
            position = int(mask.start[b]) + cell
            mine = cell // mask.block_size
            causal = mask.causal[b] if np.ndim(mask.causal) == 1 else mask.causal[b][mine]
            by_block = mask.by_block and not causal

            def near(ahead, cell=cell, by_block=by_block):
                if mask.window is None:
                    return True
                if by_block:  # counted from the block's first cell, and nothing ahead is far
                    return ahead + cell % mask.block_size > -mask.window
                return abs(ahead) < mask.window

            keys, values = [], []
            for j in range(int(mask.context_len[b])):
                in_window = j - int(mask.start[b])
                if first <= in_window < end or (causal and j > position):
                    continue
                if not near(j - position):
                    continue
                page = page_table[b, j // Z]
                if page < 0:
                    continue
                keys.append(k_pages[page, :, j % Z])
                values.append(v_pages[page, :, j % Z])
            for other, row in fresh_at.items():
                theirs = other // mask.block_size
                seen = theirs <= mine if visible is None else visible[mine, theirs]
                if seen and near(other - cell) and not (causal and other > cell):
                    keys.append(k[b, row])
                    values.append(v[b, row])
            for h in range(N):
                group = h // (N // G)
                score = np.asarray([key[group] @ q[b, i, h] for key in keys])
                score = score * (H**-0.5 if scale is None else scale)
                weight = np.exp(score - score.max())
                out[b, i, h] = (weight / weight.sum()) @ np.asarray(values)[:, group]
    return out
