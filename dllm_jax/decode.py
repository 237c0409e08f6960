"""Decoding on the device, pure: a fresh state, the prefill of its prompts, and decode steps.

Data flow: `new_state` -> `prefill` -> `run`. Callers jit these and donate the state. Nothing here
checks input or touches the host; requests come in as arrays.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, PRNGKeyArray

from dllm_jax.cache import new_pool
from dllm_jax.forward import TARGET, ModelForward
from dllm_jax.model import Model
from strategies import driver
from strategies.protocol import PrefillChunk, SlotSpec, absorb, bind_knobs, initial_carry
from strategies.state import (
    ACTIVE,
    DUMMY,
    RUNNING,
    BlockBuffer,
    DecodeState,
    Limits,
    Sampling,
)

PREFILL_CHUNK = 512  # prompt tokens of one prefill pass, rounded up to whole blocks


class Batch(struct.PyTreeNode):
    """A fixed batch of requests, one a slot.

    Attributes:
        prompt: Token ids, right-padded; T is a bucket.
        limit: First absolute position that may not be emitted.
        knobs: The strategy's thresholds, one value a slot.
        keys: One random key a request.
    """

    prompt: Int[Array, "B T"]
    prompt_len: Int[Array, " B"]
    limit: Int[Array, " B"]
    sampling: Sampling
    limits: Limits
    knobs: dict[str, Array]
    keys: PRNGKeyArray


def slot_spec(strategy: Any, model: Model, num_slots: int) -> SlotSpec:
    """Static sizes of a batch."""
    return SlotSpec(
        num_slots=num_slots,
        num_blocks=strategy.buffer_size,
        block_size=strategy.block_size,
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        mask_id=model.config.mask_token_id,
        dtype=model.params["embed"].dtype,
    )


def new_state(
    strategy: Any,
    model: Model,
    aux: Mapping[str, Model],
    batch: Batch,
    page_table: Int[Array, "B C"],
    num_pages: int,
    page_size: int,
    max_output: int,
) -> DecodeState:
    """Requests in their slots, nothing prefilled yet."""
    B = batch.prompt.shape[0]
    spec = slot_spec(strategy, model, B)
    K, S, dtype = spec.num_blocks, spec.block_size, spec.dtype
    kept = spec.hidden_size if strategy.needs.boundary or model.config.shift else 0
    models = {TARGET: model, **{name: aux[name] for name in strategy.needs.aux}}
    return DecodeState(
        buffer=driver.admit_window(
            strategy.needs, batch.prompt, batch.prompt_len, batch.limit, K, S
        ),
        sampling=batch.sampling,
        limits=batch.limits,
        finish=jnp.full((B,), RUNNING, jnp.int32),
        carry=driver.broadcast_carry(initial_carry(strategy, spec), B, K, S),
        knobs=batch.knobs,
        keys=batch.keys,
        boundary=jnp.zeros((B, kept), dtype),
        rows=jnp.zeros((B, K * S, kept), dtype),
        page_table=page_table,
        pools={
            name: new_pool(other.config, num_pages, page_size, other.params["embed"].dtype)
            for name, other in models.items()
        },
        output=jnp.zeros((B, max_output), jnp.int32),
        output_len=jnp.zeros((B,), jnp.int32),
    )


def prefill(
    strategy: Any,
    forward: ModelForward,
    state: DecodeState,
    prompt: Int[Array, "B T"],
    chunk_size: int = PREFILL_CHUNK,
) -> DecodeState:
    """Compute and store the prompts, chunk by chunk, and let the strategy absorb them.

    Block-causal and causal prompts run in chunks; a prompt whose rows all see each other runs
    in one pass. Chunks start on block edges, so chunked equals whole.
    """
    needs = strategy.needs
    strategy = bind_knobs(strategy, state.knobs)
    B, T = prompt.shape
    S = strategy.block_size
    if needs.prompt == "in_window":
        nothing = jnp.zeros((B, 1, 1), bool)
        everyone = jnp.ones((B,), bool)
        return absorb(strategy, PrefillChunk(forward, state, None, nothing, everyone), state)
    one_pass = needs.prompt in ("grid_full", "whole_full")
    size = T if one_pass else min(chunk_size, T)
    if needs.prompt.startswith("grid"):
        size = -(-size // S) * S
        shape = (B, size // S, S)
    else:
        shape = (B, 1, size)
    chunks = -(-T // size)
    prompt = jnp.pad(prompt, ((0, 0), (0, chunks * size - T)))
    end = driver.prefill_len(needs, state.buffer.prompt_len, S)
    live_end = state.buffer.prompt_len if one_pass else end

    def one(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        index, state = carry
        first = index * size
        position = first + jnp.arange(size, dtype=jnp.int32)[None]
        valid = (position < end[:, None]).reshape(shape)
        live = (position < live_end[:, None]).reshape(shape)
        view = state.replace(
            buffer=_chunk_buffer(state.buffer, prompt, first, live),
            rows=jnp.zeros((B, size, state.rows.shape[-1]), state.rows.dtype),
        )
        out = forward(
            view,
            live=live,
            visible=jnp.ones((1, shape[1], shape[1]), bool) if one_pass else None,
            causal=needs.prompt == "whole_causal",
            mode=needs.prefill_mode or None,
            hidden_layers=needs.hidden_layers,
        )
        view = out.store(view, valid)
        taken = jnp.clip(end - first, 0, size)
        state = state.replace(
            pools=view.pools, boundary=driver.next_boundary(state.boundary, view.rows, taken)
        )
        last = ((end > first) | (index == 0)) & (end <= first + size)
        return index + 1, absorb(strategy, PrefillChunk(forward, view, out, valid, last), state)

    needed = jnp.maximum(-(-jnp.max(live_end) // size), 1)
    return jax.lax.while_loop(lambda carry: carry[0] < needed, one, (jnp.int32(0), state))[1]


def _chunk_buffer(buffer: BlockBuffer, prompt: Array, first: Array, live: Array) -> BlockBuffer:
    """The window of a prefill pass: the chunk itself."""
    B, K, S = live.shape
    tokens = jax.lax.dynamic_slice_in_dim(prompt, first, K * S, axis=1).reshape(live.shape)
    return buffer.replace(
        tokens=tokens,
        filled=live,
        status=jnp.where(jnp.any(live, axis=2), ACTIVE, DUMMY).astype(jnp.int32),
        start=jnp.broadcast_to(first, (B,)),
        block_steps=jnp.zeros((B, K), jnp.int32),
    )


def run(
    strategy: Any,
    forward: ModelForward,
    state: DecodeState,
    spec: SlotSpec,
    num_steps: int | Int[Array, ""] | None = None,
) -> DecodeState:
    """Decode until every row is done, or for `num_steps` steps."""

    def go_on(carry: tuple[Array, DecodeState]) -> Array:
        step, state = carry
        more = driver.any_running(state)
        return more if num_steps is None else more & (step < num_steps)

    def one(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        step, state = carry
        return step + 1, driver.decode_step(strategy, forward, state, spec)[0]

    return jax.lax.while_loop(go_on, one, (jnp.int32(0), state))[1]
