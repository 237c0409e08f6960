"""Proves the trainer's decoder: it equals a list-based one written from the rules, row by row.

Tokens up to the end, forwards and commit-only forwards agree on random models with peaked
distributions, for windows of one, two and four blocks and several thresholds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models import dense, reference
from dllm_jax.training import dense_decode

S, T, EOS, MASK = 4, 32, 2, 1
CFG = dense.DenseConfig(
    vocab_size=12, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    ffn_size=16, rope_theta=1e4, mask_token_id=MASK,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> tuple[dict, object]:
    params = dense.init_params(jax.random.key(0), CFG, jnp.float32)
    params["layers"] = jax.tree.map(lambda w: w * 15 if w.ndim > 1 else w, params["layers"])
    params["lm_head"] = params["lm_head"] * 50  # peaked: thresholds decide
    visible = reference.visibility("block_causal", T, S)[None]
    logits = jax.jit(lambda ids: reference.dense_logits(params, CFG, ids, visible))
    return params, logits


def decode_by_lists(logits_of, prompt: list[int], threshold: float, buffer: int):
    """One request, straight from the rules; blocks are lists, None is a hole."""
    text: list[int | None] = [*prompt] + [None] * (T - len(prompt))
    first, last = len(prompt) // S, -(-len(prompt) // S)  # blocks first..last-1 are open
    forwards = commits = 0

    def holes(b: int) -> list[int]:
        return [i for i in range(b * S, b * S + S) if text[i] is None]

    while True:
        if last * S < T:
            begun = last > 0 and 1 - len(holes(last - 1)) / S >= 0.1
            if first == last or (last - first < buffer and begun):
                last += 1
        ids = np.array([[MASK if t is None else t for t in text]])
        z = np.array(logits_of(jnp.asarray(ids)))[0].astype(np.float64)
        z[:, MASK] = -np.inf
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        writes: dict[int, int] = {}
        for b in range(first, last):
            sure = [i for i in holes(b) if p[i].max() > threshold]
            ahead = 0 if b == first else len(holes(b - 1))
            if not sure and holes(b) and 1 - ahead / S >= 0.9:
                sure = [max(holes(b), key=lambda i: p[i].max())]
            writes |= {i: int(p[i].argmax()) for i in sure}
        forwards += 1
        commits += not any(holes(b) for b in range(first, last))
        while first < last and not holes(first):
            first += 1
        for i, token in writes.items():
            text[i] = token
        own = text[len(prompt) :]
        end = own.index(EOS) if EOS in own else None
        if end is not None and None not in own[:end]:
            return own[:end], forwards, commits, True
        if None not in own:
            return own, forwards, commits, False


@pytest.mark.parametrize("buffer", [1, 2, 4])
@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_decoder_equals_a_list_based_one(model, buffer: int, threshold: float) -> None:
    params, logits = model
    rng = np.random.default_rng(buffer)
    prompts = [list(rng.integers(3, 12, n)) for n in (1, 3, 4, 5, 8, 9, 13, 16)]
    tokens = np.full((len(prompts), T), EOS, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
    lens = np.array([len(p) for p in prompts], np.int32)
    with jax.numpy_rank_promotion("allow"):
        out = dense_decode.decode(
            params, CFG, tokens, lens, threshold, buffer,
            eos_id=EOS, block_size=S, dtype=jnp.float32,
        )  # fmt: skip
        wanted = [decode_by_lists(logits, p, threshold, buffer) for p in prompts]
    some_end = False
    for i, (text, forwards, commits, ended) in enumerate(wanted):
        own = np.asarray(out.tokens)[i, lens[i] :][: len(text)]
        assert own.tolist() == text
        assert (int(out.forwards[i]), int(out.commits[i])) == (forwards, commits)
        assert bool(out.ended[i]) == ended
        some_end |= ended
    assert len({tuple(w[0][:3]) for w in wanted}) > 2
    assert max(w[1] for w in wanted) > 5
