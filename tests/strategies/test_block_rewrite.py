"""The block rewrite against plain loops, on random windows of several requests.

Proves which cells may be written (open blocks, after the prompt, filled or not), that nothing else
changes, that only a filled hole counts, and the meaning of "another token" and "before the limit".
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from dllm_jax.strategies.core import block_rewrite
from dllm_jax.strategies.core.state import ACTIVE, DUMMY, TO_CACHE, BlockBuffer, DecodeState, Limits

B, K, S, VOCAB = 40, 3, 4, 5


def draw() -> tuple[DecodeState, np.ndarray, np.ndarray]:
    """A state with random windows, and what is to be written where."""
    rng = np.random.default_rng(8)
    start = rng.integers(0, 4, B) * S
    order = [TO_CACHE, ACTIVE, DUMMY]
    status = np.sort(rng.integers(0, 3, (B, K)), axis=1)
    filled = rng.random((B, K, S)) < 0.6
    buffer = BlockBuffer(
        tokens=jnp.asarray(rng.integers(0, VOCAB, (B, K, S)), jnp.int32),
        filled=jnp.asarray(filled),
        status=jnp.asarray(np.take(order, status), jnp.int32),
        start=jnp.asarray(start, jnp.int32),
        prompt_len=jnp.asarray(start + rng.integers(0, S, B), jnp.int32),
        limit=jnp.asarray(start + rng.integers(1, K * S + 3, B), jnp.int32),
        block_steps=jnp.zeros((B, K), jnp.int32),
        nfe=jnp.zeros((B,), jnp.int32),
        idle=jnp.zeros((B,), jnp.int32),
    )
    others: Any = dict.fromkeys(f for f in DecodeState.__dataclass_fields__ if f != "buffer")
    others["limits"] = Limits(**dict.fromkeys(("stop_ids", "max_nfe", "max_run")))
    tokens = rng.integers(0, VOCAB, (B, K, S)).astype(np.int32)
    return DecodeState(buffer=buffer, **others), tokens, rng.random((B, K, S)) < 0.5


def test_every_cell_is_written_or_left_as_loops_say() -> None:
    state, tokens, where = draw()
    old = state.buffer
    new, counted = block_rewrite.rewrite(state, jnp.asarray(tokens), jnp.asarray(where))
    may = np.asarray(block_rewrite.editable(state))
    differs = np.asarray(block_rewrite.differs(state, jnp.asarray(tokens)))
    emitted = np.asarray(block_rewrite.before_limit(state))
    kinds = set()
    for b, k, s in np.ndindex(B, K, S):
        position = int(old.start[b]) + k * S + s
        free = int(old.status[b, k]) == ACTIVE and position >= int(old.prompt_len[b])
        was, held = bool(old.filled[b, k, s]), int(old.tokens[b, k, s])
        writes = free and bool(where[b, k, s])
        assert may[b, k, s] == free
        assert differs[b, k, s] == (free and was and held != tokens[b, k, s])
        assert emitted[b, k, s] == (position < int(old.limit[b]))
        assert int(new.buffer.tokens[b, k, s]) == (tokens[b, k, s] if writes else held)
        assert bool(new.buffer.filled[b, k, s]) == (was or writes)
        assert bool(counted[b, k, s]) == (writes and not was)
        kinds.add((free, was, bool(where[b, k, s]), held == tokens[b, k, s]))
    assert len(kinds) == 16, "the draw has every kind of cell"
    for field in ("status", "start", "prompt_len", "limit", "block_steps", "nfe", "idle"):
        np.testing.assert_array_equal(getattr(new.buffer, field), getattr(old, field))
