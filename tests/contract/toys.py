"""Toy strategies on a plain model, written as an outside author would.

`SoftParallel` carries descriptors that shift with the window; `BlockCache` writes and reads a cache
past `start` in passes of two widths; `FullSequence` holds its prompt and a suffix in the window.
None of them is one of the project's strategies.
"""

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax.strategies.core import blocks, random, sampling
from dllm_jax.strategies.core.needs import Needs
from dllm_jax.strategies.core.protocol import PerSlot, Strategy, TokenMix, knob
from dllm_jax.strategies.core.state import ACTIVE, RUNNING, TO_CACHE, Carry, StepInfo


def static(default):
    return struct.field(pytree_node=False, default=default)


class SoftParallel(Strategy):
    """Filled cells stay soft: shown as `p E[token] + (1 - p) E[mask]`, drawn anew each step.

    Accepts from the left up to the first unsure hole of a block; a block leaves when nothing in it
    changed, all of it is sure, or its patience ends; its commit forward shows hard tokens.
    """

    accept_threshold: PerSlot = knob(0.4)
    add_block_threshold: PerSlot = knob(0.5)
    block_size: int = static(4)
    buffer_size: int = static(2)
    needs: Needs = static(Needs("grid_causal"))

    def init(self, spec):
        return Carry(
            tokens={
                "id": jnp.full((1, 1), spec.mask_id, jnp.int32),
                "prob": jnp.zeros((1, 1)),
                "soft": jnp.zeros((1, 1), bool),
            }
        )

    def step(self, forward, state):
        state = blocks.open_next(state, self.add_block_threshold)
        buffer, leaving = state.buffer, blocks.to_cache(state)
        shape = buffer.tokens.shape
        carried = {name: leaf.reshape(shape) for name, leaf in state.carry.tokens.items()}
        mix = TokenMix(
            base_ids=jnp.full(shape, forward.mask_id, jnp.int32),
            base_weight=1 - carried["prob"],
            ids=carried["id"][..., None],
            probs=carried["prob"][..., None],
            on=carried["soft"] & ~leaving,
        )
        out = forward(state, inputs=mix)
        state = out.store(state, leaving)
        mine = (buffer.status[:, :, None] == ACTIVE) & (
            buffer.positions >= buffer.prompt_len[:, None, None]
        )
        stats = out.predict(where=mine, confidence="raw")
        holes = blocks.holes(state)
        unsure = holes & (stats.confidence < self.accept_threshold.at_token)
        leftmost = holes & (jnp.cumsum(holes, axis=2) == 1)
        accept = (holes & (jnp.cumsum(unsure, axis=2) == 0)) | leftmost
        changed = mine & buffer.filled & (stats.token != buffer.tokens)
        soft = mine & (buffer.filled | accept)
        state = blocks.write(state, stats.token, soft)
        # Ready: complete, and unchanged, or sure of everything, or out of patience.
        sure = jnp.all(~mine | (stats.confidence >= 0.9), axis=2)
        tired = buffer.block_steps + 1 >= 2 * self.block_size
        stays = ~jnp.any(changed | accept, axis=2) | sure | tired
        gone = buffer.status == TO_CACHE
        ready = gone | ((buffer.status == ACTIVE) & blocks.complete(state) & stays)
        leading = jnp.cumprod(ready.astype(jnp.int32), axis=1)
        new = {"id": stats.token, "prob": jnp.clip(stats.confidence, 0, 1), "soft": soft}
        kept = {name: jnp.where(soft, new[name], carried[name]) for name in carried}
        state = state.replace(
            buffer=state.buffer.replace(
                status=jnp.where(leading == 1, TO_CACHE, buffer.status),
                block_steps=buffer.block_steps + (buffer.status == ACTIVE).astype(jnp.int32),
            ),
            carry=Carry(tokens={name: leaf.reshape(shape[0], -1) for name, leaf in kept.items()}),
        )
        return state, StepInfo(
            commit_len=jnp.sum(gone, axis=1, dtype=jnp.int32) * self.block_size,
            settled_len=jnp.sum(leading, axis=1, dtype=jnp.int32) * self.block_size,
            accepted=jnp.sum(accept, axis=(1, 2), dtype=jnp.int32),
            nfe=jnp.ones_like(buffer.nfe),
        )


class BlockCache(Strategy):
    """One block, refined piece by piece over a provisional cache of itself.

    A full pass stores the whole block, holes and all, past `start`. While the current piece's first
    cell is filled, passes run that piece alone and see the rest of the block as it was cached. A
    last full pass stores the final block.
    """

    accept_threshold: PerSlot = knob(0.5)
    piece: int = static(4)
    block_size: int = static(12)
    buffer_size: int = static(1)
    needs: Needs = static(Needs("grid_causal", boundary=True, provisional_cache="across_steps"))

    def step(self, forward, state):
        state = blocks.open_next(state)
        buffer, S = state.buffer, self.block_size
        holes = blocks.holes(state)[:, 0]
        first = jnp.argmax(holes, axis=1)[:, None] // self.piece * self.piece
        cell = jnp.arange(S)[None]
        in_piece = (cell >= first) & (cell < first + self.piece)
        head = jnp.take_along_axis(buffer.filled[:, 0], first, axis=1)[:, 0]
        ended = buffer.status[:, 0] == TO_CACHE
        narrow = (buffer.block_steps[:, 0] > 0) & head & ~ended
        live = blocks.live_cells(state) & (in_piece | ~narrow[:, None])[:, None]

        def run(width):
            seen = buffer.start + jnp.where(narrow, S, 0)
            return forward(state, live=live, context_len=seen, width=width)

        # A narrow program when all rows allow it; the store stays outside of the branches.
        all_narrow = jnp.all(narrow | (state.finish != RUNNING))
        out = jax.lax.cond(all_narrow, lambda: run(self.piece), lambda: run(None))
        state = out.store(state, live)
        mine = (holes & in_piece)[:, None]
        keys = random.step_keys(state)
        stats = out.predict(where=mine, sampling=state.sampling, keys=keys)
        best = sampling.top_n(stats.confidence, jnp.ones_like(buffer.status), mine)
        accept = sampling.above(stats, self.accept_threshold) | best
        return blocks.finish_step(blocks.write(state, stats.token, accept), accept)


class FullSequence(Strategy):
    """Prompt, text and suffix in one window, all seeing all; two cells or all the sure ones."""

    accept_threshold: PerSlot = knob(0.6)
    block_size: int = static(8)
    buffer_size: int = static(4)
    needs: Needs = static(Needs("in_window"))

    def step(self, forward, state):
        buffer = state.buffer
        B, K, S = buffer.tokens.shape
        live = buffer.filled | (buffer.positions < buffer.limit[:, None, None])
        out = forward(state, live=live, visible=jnp.ones((1, K, K), bool))
        holes = live & ~buffer.filled
        stats = out.predict(where=holes, sampling=state.sampling, keys=random.step_keys(state))
        flat = holes.reshape(B, 1, K * S)
        two = sampling.top_n(
            stats.confidence.reshape(flat.shape), jnp.full((B, 1), 2), flat
        ).reshape(B, K, S)
        accept = two | sampling.above(stats, self.accept_threshold)
        state = blocks.write(state, stats.token, accept)
        one = jnp.ones_like(buffer.nfe)
        accepted = jnp.sum(accept, axis=(1, 2), dtype=jnp.int32)
        return state, StepInfo(0 * one, blocks.settled_run(state), accepted, one)
