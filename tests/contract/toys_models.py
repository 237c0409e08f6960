"""Toy strategies that ask more of the model: a drafter next to it, or two modes in one batch.

`Speculate` drafts with a second model that has its own cache and commits any length; `Canvas` runs
commit rows causally in one mode next to bidirectional rows in another. Neither is one of the
project's strategies.
"""

import jax
import jax.numpy as jnp

from dllm_jax.strategies.core import blocks, random, sampling
from dllm_jax.strategies.core.needs import Needs
from dllm_jax.strategies.core.protocol import PerSlot, Soft, Strategy, Taps, knob
from dllm_jax.strategies.core.state import ACTIVE, TO_CACHE, Carry, StepInfo
from tests.contract.toys import static


class Speculate(Strategy):
    """A drafter guesses S - 2 tokens after the anchor, the target judges them in one pass.

    `script` overrides what the drafter says at an absolute position, where it is not negative.
    """

    script: jax.Array | None = None  # [B, positions]
    block_size: int = static(5)
    buffer_size: int = static(1)
    needs: Needs = static(
        Needs("whole_causal", hidden_layers=(1, 2), boundary=True, aux=("draft",))
    )

    def init(self, spec):
        shape = (1, spec.block_size, spec.hidden_size)
        return Carry(slot={"drafted_rows": jnp.zeros(shape, spec.dtype)})

    def absorb(self, chunk, state):
        taps = Taps(jnp.concatenate(chunk.out.taps, axis=-1))
        context = chunk.forward.aux["draft"](chunk.state, inputs=taps)
        state = context.store(state, chunk.valid)
        keys = random.position_keys(state)[:, 0, 0]
        first = chunk.forward.predict(state.boundary, sampling=state.sampling, keys=keys)
        anchor = chunk.last[:, None, None] & (jnp.arange(self.block_size)[None, None] == 0)
        buffer = state.buffer
        return state.replace(
            buffer=buffer.replace(
                tokens=jnp.where(anchor, first.token[:, None, None], buffer.tokens),
                filled=buffer.filled | anchor,
                status=jnp.where(chunk.last[:, None], ACTIVE, buffer.status),
            )
        )

    def step(self, forward, state):
        buffer, draft = state.buffer, forward.aux["draft"]
        cell = jnp.arange(self.block_size)[None, None]
        live = jnp.broadcast_to(cell < self.block_size - 1, buffer.tokens.shape)
        masked = jnp.where(cell == 0, buffer.tokens, draft.mask_id)
        guess = draft(state, inputs=masked, live=live)
        scripted = jnp.take_along_axis(
            self.script,
            jnp.minimum(buffer.positions[:, 0], self.script.shape[1] - 1),
            axis=1,
        )[:, None]
        guesses = jnp.where(scripted >= 0, scripted, guess.predict(where=live).token)
        block = jnp.where(cell == 0, buffer.tokens, guesses)
        out = forward(state, inputs=block, live=live, causal=True, hidden_layers=(1, 2))
        keys = random.position_keys(state)
        truth = out.predict(where=cell > 0, sampling=state.sampling, keys=keys).token
        hit = (block == truth)[:, 0, 1:-1].astype(jnp.int32)
        count = 1 + jnp.sum(jnp.cumprod(hit, axis=1), axis=1, dtype=jnp.int32)
        keep = live & (cell < count[:, None, None])
        state = out.store(state, keep)
        taps = Taps(jnp.concatenate(out.taps, axis=-1))
        state = draft(state, inputs=taps, live=live).store(state, keep)
        state = blocks.write(state, truth, (cell > 0) & (cell <= count[:, None, None]))
        rows = guess.hidden.reshape(guess.hidden.shape[0], self.block_size, -1)
        state = state.replace(carry=Carry(slot={"drafted_rows": rows}))
        return state, StepInfo(count, count + 1, count, jnp.ones_like(count))


class Canvas(Strategy):
    """A whole canvas of random tokens is redrawn until two drafts agree, then encoded causally.

    The canvas is fed back as the expected embedding of its last law besides its tokens.
    """

    entropy_bound: PerSlot = knob(2.0)
    most_steps: PerSlot = knob(4.0)
    block_size: int = static(8)
    buffer_size: int = static(1)
    needs: Needs = static(Needs("whole_causal", prefill_mode=1))

    def init(self, spec):
        return Carry(
            tokens={
                "soft": jnp.zeros((1, 1, spec.hidden_size), spec.dtype),
                "best": jnp.full((1, 1), -1, jnp.int32),
            }
        )

    def step(self, forward, state):
        opened = blocks.open_next(state)
        new = (opened.buffer.status != state.buffer.status)[:, :, None]
        noise = self._random_ids(forward, state, salt=0)
        buffer = opened.buffer
        canvas = jnp.where(new, noise, buffer.tokens)
        state = opened.replace(buffer=buffer.replace(tokens=canvas, filled=buffer.filled | new))
        encode = buffer.status[:, 0] == TO_CACHE
        shape = (*canvas.shape, -1)
        soft = state.carry.tokens["soft"].reshape(shape)
        on = jnp.broadcast_to(~encode[:, None, None], canvas.shape)
        out = forward(
            state,
            inputs=Soft(canvas, forward.embed(canvas) + soft, on),
            causal=encode,
            mode=encode.astype(jnp.int32),
        )
        state = out.store(state, blocks.to_cache(state))
        denoise = blocks.live_cells(state) & ~encode[:, None, None]
        drawn = out.predict(
            where=denoise, sampling=state.sampling, keys=random.step_keys(state, salt=1)
        )
        best = out.predict(where=denoise).token
        accept = sampling.entropy_bounded(drawn, self.entropy_bound, denoise)
        renoised = jnp.where(accept, drawn.token, self._random_ids(forward, state, salt=2))
        before = state.carry.tokens["best"].reshape(canvas.shape)
        steps = buffer.block_steps + 1
        tired = (steps.astype(jnp.float32) >= self.most_steps.at_block)[:, 0]
        agreed = jnp.all(best == before, axis=(1, 2)) | tired
        settles = agreed & (buffer.status[:, 0] == ACTIVE)
        new_canvas = jnp.where(settles[:, None, None], best, renoised)
        state = blocks.write(state, new_canvas, denoise)
        status = jnp.where(settles[:, None], TO_CACHE, buffer.status)
        expected = out.soft(0.8)
        carry = Carry(
            tokens={
                "soft": expected.reshape(state.carry.tokens["soft"].shape),
                "best": best.reshape(state.carry.tokens["best"].shape),
            }
        )
        state = state.replace(
            carry=carry, buffer=state.buffer.replace(status=status, block_steps=steps)
        )
        S = self.block_size
        settled = jnp.where(settles | encode, S, 0).astype(jnp.int32)
        commit = jnp.where(encode, S, 0).astype(jnp.int32)
        accepted = jnp.where(settles, S, 0).astype(jnp.int32)
        return state, StepInfo(commit, settled, accepted, jnp.ones_like(commit))

    def _random_ids(self, forward, state, salt):
        keys = random.step_keys(state, salt)
        draw = jax.vmap(lambda key: jax.random.randint(key, (), 0, forward.mask_id))
        return draw(keys.reshape(-1)).reshape(keys.shape)
