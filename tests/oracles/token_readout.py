"""A readout by definition, row by row, in float64."""

import numpy as np


def token_readout(
    hidden,
    head,
    forbidden,
    *,
    scale=1.0,
    cap=None,
    penalty=None,
    num_top=0,
):
    """Logits [R V], then token, confidence, entropy, top ids and their probabilities."""
    rows = []
    for r, row in enumerate(np.asarray(hidden, np.float64)):
        logits = scale * (np.asarray(head, np.float64) @ row)
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        logits[np.asarray(forbidden)] = -np.inf
        if penalty is not None:
            logits[penalty[0][r]] -= penalty[1][r]
        p = np.exp(logits - logits.max())
        p /= p.sum()
        some = p[p > 0]
        token = int(np.argmax(logits))
        top = np.argsort(-logits, kind="stable")[:num_top]
        rows.append((logits, token, p[token], -np.sum(some * np.log(some)), top, p[top]))
    return tuple(np.stack(column) for column in zip(*rows, strict=True))
