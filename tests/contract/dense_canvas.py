"""The cache-free truth of DiffusionGemma: every step recomputed as one dense run of the whole text.

Written from transformers' description with lists and NumPy, without `strategies`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.contract.dense import Key, Law, Net, Seen, Truth, random_id
from tests.contract.harness import Request
from tests.contract.models import VOCAB

ENCODER, DECODER = 0, 1
NUMBERS = {  # of the case; a request may bring its own
    "max_denoising_steps": 4,
    "t_min": 0.4,
    "t_max": 0.8,
    "entropy_bound": 2.0,
    "stability_threshold": 1,
    "confidence_threshold": 0.6,
}


def own_key(request: Request, salt: int, step: int, position: int) -> Key:
    """The key of a cell in a step of its own canvas."""
    return request.seed, (*request.fold, 2**31 - 1, salt, step, position)


def text_rows(net: Net, text: list[int]) -> Seen:
    """A text as the encoder sees it: plain embeddings in token order."""
    n = len(text)
    plain = embedded(net, text)
    return net(plain, range(n), np.tril(np.ones((n, n), bool)), modes=[ENCODER] * n)


def embedded(net: Net, ids: list[int]) -> list[np.ndarray]:
    rows = net.model.arch.embed(net.model.params, net.model.config, jnp.asarray(ids, jnp.int32))
    return list(np.asarray(rows))


def decode_canvases(net: Net, request: Request, size: int, early: bool, **numbers: float) -> Truth:
    """Canvases denoised in turn; `log` holds the likeliest text of every step of each.

    Args:
        early: A canvas begins in the pass that stores the one before it.
    """
    n = NUMBERS | numbers | dict(request.knobs)
    truth, length = Truth(), len(request.prompt)
    done = list(request.prompt)
    pins = {i: token for i, token in enumerate(request.given[:size]) if token >= 0}
    while True:
        texts = denoise(net, request, done, size, pins, n)
        truth.log.append(texts)
        truth.nfe += len(texts)
        done, pins = done + texts[-1], {}
        if truth.see(done[length:], request):
            return truth
        truth.nfe += not early


def denoise(
    net: Net, request: Request, done: list[int], size: int, pins: dict[int, int], n: dict
) -> list[list[int]]:
    """The likeliest text of one canvas at each of its steps; the last is the canvas's."""
    begin, total = len(done), len(done) + size
    free = [i for i in range(size) if i not in pins]
    canvas = [pins.get(i, random_id(own_key(request, 1, 0, begin + i), VOCAB)) for i in range(size)]
    expected = np.zeros((size, net.table.shape[1]), np.float32)
    sees = np.tril(np.ones((total, total), bool))
    sees[begin:] = True
    texts: list[list[int]] = []
    run = 0
    for step in range(int(n["max_denoising_steps"])):
        share = (n["max_denoising_steps"] - step) / n["max_denoising_steps"]
        heat = (n["t_min"] + (n["t_max"] - n["t_min"]) * share) * (request.temperature or 1.0)
        arch, params, cfg = net.model.arch, net.model.params, net.model.config
        shown = np.asarray(
            arch.condition(params, cfg, jnp.asarray(np.stack(embedded(net, canvas))), expected)
        )
        modes = [ENCODER] * begin + [DECODER] * size
        seen = net([*embedded(net, done), *shown], range(total), sees, modes=modes)
        laws = [net.law(row) for row in seen.logits[begin:]]
        entropy = [law.entropy(heat) for law in laws]
        spent, kept = 0.0, set()
        for i in sorted(free, key=lambda i: (entropy[i], i)):
            if spent <= n["entropy_bound"]:
                kept.add(i)
            spent += entropy[i]
        best = [pins.get(i, law.draw()[0]) for i, law in enumerate(laws)]
        run = run + 1 if texts and texts[-1] == best else 0
        texts.append(best)
        sure = sum(entropy[i] for i in free) / max(len(free), 1) < n["confidence_threshold"]
        if run >= n["stability_threshold"] and sure:
            return texts
        canvas = [
            pins[i]
            if i in pins
            else drawn(laws[i], heat, request, step, begin + i)
            if i in kept
            else random_id(own_key(request, 2, step, begin + i), VOCAB)
            for i in range(size)
        ]
        every = np.stack(embedded(net, list(range(VOCAB))))
        expected = np.stack([law.probs(heat) for law in laws]).astype(np.float32) @ every
    return texts


def drawn(law: Law, heat: float, request: Request, step: int, position: int) -> int:
    """The token that a kept cell shows next."""
    if not request.temperature:
        return law.draw()[0]
    until = np.cumsum(np.asarray(law.probs(heat), np.float64))
    wanted = float(_uniform(*own_key(request, 0, step, position)))
    return int(np.argmax(until > wanted * until[-1]))


@jax.jit
def _uniform(seed, data):
    key = jax.random.key(seed)
    for one in data:
        key = jax.random.fold_in(key, one)
    return jax.random.uniform(key, (), jnp.float32)
