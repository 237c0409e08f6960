"""A decoding strategy of your own: fill the surest half of the holes in every forward.

    dllm-jax generate --strategy examples/my_strategy.py:my_step --seed 1
    python examples/my_strategy.py

`step(forward, state)` is pure and sees arrays [B, K, S]: requests, blocks in the window, cells of
a block. It opens a block, runs the model, writes tokens and reports; the engine does the rest.
"""

import jax.numpy as jnp

from dllm_jax.strategies.core import blocks, random, sampling


def my_step(forward, state):
    """One decode step: a block of 32 takes 16, 8, 4, 2, 1 and 1 tokens, then is committed."""
    state = blocks.open_next(state)  # a new block once the last one is done
    out = forward(state)  # the model over the window; holes are shown as the mask
    state = out.store(state, blocks.to_cache(state))  # finished blocks enter the cache
    holes = blocks.holes(state)
    stats = out.predict(where=holes, sampling=state.sampling, keys=random.step_keys(state))
    half = (jnp.sum(holes, axis=2) + 1) // 2
    accept = sampling.top_n(stats.confidence, half, holes)
    return blocks.finish_step(blocks.write(state, stats.token, accept), accept)


if __name__ == "__main__":
    import jax

    import dllm_jax as dj

    model = dj.load("builtin:tiny-sdar")
    question = "A shop has 365 plates. People bring 132 back. A truck brings 64 more."
    question += " How many plates are left in the end?"
    prompt = model.tokenizer(f"<|user|>{question}<|assistant|>")["input_ids"]
    out = dj.generate(model, [prompt], strategy=my_step, max_tokens=96, key=jax.random.key(0))
    print(model.tokenizer.decode(out.tokens[0, : out.length[0]]))
    print(f"{out.length[0]} tokens in {out.nfe[0]} forwards")
