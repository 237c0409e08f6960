"""A readout by definition, row by row, in float64."""

import numpy as np


def token_readout(
    hidden,
    head,
    forbidden,
    *,
    scale=1.0,
    cap=None,
    temperature=None,
    noise=None,
    penalty=None,
    confidence="drawn",
    num_top=0,
):
    """Logits that are drawn by [R V], then token, confidence, entropy, top ids and probabilities.

    Args:
        noise: What is added to the tempered logits [R V].
    """
    rows = []
    for r, row in enumerate(np.asarray(hidden, np.float64)):
        logits = scale * (np.asarray(head, np.float64) @ row)
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        logits[np.asarray(forbidden)] = -np.inf
        if penalty is not None:
            logits[penalty[0][r]] -= penalty[1][r]
        tempered = temperature is not None and temperature[r] > 0
        law = logits / float(temperature[r]) if tempered else logits
        drawn = law + noise[r] if tempered and noise is not None else law
        judged = law if confidence == "drawn" else logits
        p = np.exp(judged - judged.max())
        p /= p.sum()
        some = p[p > 0]
        token = int(np.argmax(drawn))
        top = np.argsort(-judged, kind="stable")[:num_top]
        rows.append((drawn, token, p[token], -np.sum(some * np.log(some)), top, p[top]))
    return tuple(np.stack(column) for column in zip(*rows, strict=True))
