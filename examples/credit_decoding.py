"""Credit decoding: a token that stays the likeliest is taken before the model is sure of it.

    dllm-jax generate --strategy examples/credit_decoding.py:CreditDecoding --seed 1 --watch
    python examples/credit_decoding.py

A model often names the right token several forwards before its probability passes the threshold.
So each hole keeps accounts of the tokens that were its likeliest. In every forward

    C[v] <- decay * C[v] + (p[v] ** power if v is the likeliest token now, else 0)
    p'[v] = p[v] * (1 + C[v]) ** weight / (their sum over the vocabulary)

and p' decides instead of p, which token and whether it is sure enough. All else is `multi_bd`.

Source: CreditDecoding (arXiv 2510.06133), trace credit and credit fusion, with the numbers of
dInfer's `CreditThresholdParallelDecoder`. Differences from that program:

* It keeps C for the whole vocabulary; here a hole has `num_accounts`, the poorest is given up for a
  new token, and a credit of a token that is not among the `num_accounts` likeliest now does not
  count. With as many accounts as the vocabulary has ids that is the same.
* It runs one block at a time: `buffer_size=1`. Several are opened and forced as by `multi_bd`.
* It forces all tokens within 1e-5 of the surest; here one is forced, of equals the leftmost.
* At a temperature it draws from p'; here from p, and p' only says how sure the drawn token is.
* The paper's variant whose decay and weight follow the share of holes is left out.
"""

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax.strategies import Carry, Knob, Strategy, knob
from dllm_jax.strategies.core import blocks, random, sampling
from dllm_jax.strategies.core.state import NO_TOKEN


class CreditDecoding(Strategy):
    """Pipelined blocks whose holes remember what they were about to be.

    Attributes:
        accept_threshold: A token is accepted when its p' is at least this.
        credit_decay: What is left of a credit after one more forward (beta).
        credit_power: Below 1 it pays unsure tokens nearly as much as sure ones (gamma).
        credit_weight: How much a credit counts; at 0 p' is p (alpha).
        add_block_threshold: Progress of the last block (>=) at which the next one opens.
        semi_complete_threshold: Progress of the block before (>=) that allows a forced token.
        num_accounts: Tokens that a hole remembers.
    """

    accept_threshold: Knob = knob(0.9)
    credit_decay: Knob = knob(0.8, 0.0, 1.0)
    credit_power: Knob = knob(0.2)
    credit_weight: Knob = knob(0.7)
    add_block_threshold: Knob = knob(0.1)
    semi_complete_threshold: Knob = knob(0.9)
    num_accounts: int = struct.field(pytree_node=False, default=4)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=4)

    def __post_init__(self):
        super().__post_init__()
        if self.num_accounts < 1:
            raise ValueError(f"num_accounts={self.num_accounts} must be at least 1; 4 is usual")

    def init(self, spec):
        """No hole has an account: one value for every cell, [B W M] once the engine spread it."""
        del spec
        none = (1, 1, self.num_accounts)
        return Carry(tokens={"ids": jnp.full(none, -1, jnp.int32), "credits": jnp.zeros(none)})

    def step(self, forward, state):
        """One forward of the whole window: pay, fuse, accept."""
        state = blocks.open_next(state, self.add_block_threshold)
        out = forward(state)
        state = out.store(state, blocks.to_cache(state))
        holes = blocks.holes(state)
        stats = out.predict(
            where=holes,
            sampling=state.sampling,
            keys=random.step_keys(state),
            confidence="raw",
            num_top=self.num_accounts,
        )
        flat, cells = state.carry.tokens["ids"].shape, (*holes.shape, self.num_accounts)
        ids, credits = (state.carry.tokens[k].reshape(cells) for k in ("ids", "credits"))
        ids, credits = self._pay(ids, credits, stats, holes)
        kept = {"ids": ids.reshape(flat), "credits": credits.reshape(flat)}
        state = state.replace(carry=Carry(tokens=kept))
        stats = self._fuse(ids, credits, stats, state.sampling)
        sure = stats.confidence >= self.accept_threshold.at_token
        forced = sampling.forced_top1(stats, state, self.semi_complete_threshold)
        accept = (sure & holes) | forced
        return blocks.finish_step(blocks.write(state, stats.token, accept), accept)

    def _pay(self, ids, credits, stats, holes):
        """All credits decay; the likeliest token of each hole is paid. [B K S M] in and out."""
        likeliest, prob = stats.top_ids[..., :1], stats.top_probs[..., :1]
        credits = credits * self.credit_decay.at_token[..., None]
        held = ids == likeliest
        poorest = jax.nn.one_hot(jnp.argmin(credits, axis=-1), self.num_accounts, dtype=bool)
        place = jnp.where(jnp.any(held, axis=-1, keepdims=True), held, poorest)
        place &= holes[..., None]  # what is said of other cells means nothing
        paid = jnp.where(held, credits, 0.0) + prob ** self.credit_power.at_token[..., None]
        return jnp.where(place, likeliest, ids), jnp.where(place, paid, credits)

    def _fuse(self, ids, credits, stats, drawing):
        """The statistics of p': its token and that token's probability, [B K S]."""
        weight = self.credit_weight.at_token[..., None]

        def gain(tokens):
            own = jnp.where(tokens[..., None] == ids[..., None, :], credits[..., None, :], 0.0)
            return (1.0 + jnp.sum(own, axis=-1)) ** weight

        boosted = stats.top_probs * gain(stats.top_ids)
        total = 1.0 + jnp.sum(boosted - stats.top_probs, axis=-1)
        best = jnp.argmax(boosted, axis=-1, keepdims=True)
        drawn = stats.token[..., None]  # at a temperature any token, among the likeliest or not
        greedy = (drawing.temperature == 0)[:, None, None]
        token = jnp.where(greedy, jnp.take_along_axis(stats.top_ids, best, -1)[..., 0], stats.token)
        share = jnp.where(greedy, jnp.max(boosted, axis=-1), stats.confidence * gain(drawn)[..., 0])
        # A readout that is not finite stays what it is: the engine ends the request.
        has_answer = (stats.confidence > -jnp.inf) & (stats.token != NO_TOKEN)
        return stats.replace(
            token=jnp.where(has_answer, token, stats.token),
            confidence=jnp.where(has_answer, share / total, stats.confidence),
        )


if __name__ == "__main__":
    import dllm_jax as dj
    from dllm_jax.strategies import MultiBD

    llm = dj.load("builtin:tiny-sdar")
    question = "A shop has 365 plates. People bring 132 back. A truck brings 64 more."
    question += " How many plates are left in the end?"
    prompt = llm.tokenizer(f"<|user|>{question}<|assistant|>")["input_ids"]
    for strategy in (MultiBD(), CreditDecoding()):
        out = dj.generate(llm, [prompt], strategy=strategy, max_tokens=96)
        print(f"{type(strategy).__name__}: {out.length[0]} tokens in {out.nfe[0]} forwards")
        print(llm.tokenizer.decode(out.tokens[0, : out.length[0]]))
