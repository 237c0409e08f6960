"""Decoding on the device, pure: a fresh state, the prefill of its prompts, and decode steps.

Data flow: `new_state` -> `prefill` -> `run`. Callers jit these and donate the state.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from dllm_jax.engine.layout import PassKind
from dllm_jax.loading.model import Model
from dllm_jax.models.kv_cache import new_pool
from dllm_jax.models.sharding import Split
from dllm_jax.runner.forward import ModelForward
from dllm_jax.runner.window_output import TARGET
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.protocol import PrefillChunk, SlotSpec, bind_knobs
from dllm_jax.strategies.core.state import (
    ACTIVE,
    DUMMY,
    DecodeState,
    Limits,
    Sampling,
)

SETTINGS = ("sampling", "limits", "knobs", "keys")  # leaves of a state that no step changes
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
    spec = slot_spec(strategy, model, batch.prompt.shape[0])
    tail = driver.prompt_tail(strategy.needs, spec, batch.prompt, batch.prompt_len)
    kept = boundary_size(strategy, model)
    buffer = driver.admit_window(strategy.needs, spec, tail, batch.prompt_len, batch.limit)
    settings = {name: getattr(batch, name) for name in SETTINGS}
    slots = driver.new_slots(strategy, spec, settings, buffer, max_output, kept)
    return slots.replace(
        rows=jnp.zeros((*tail.shape, kept), spec.dtype),
        page_table=page_table,
        pools=new_pools(strategy, model, aux, num_pages, page_size),
    )


def boundary_size(strategy: Any, model: Model) -> int:
    """Width of the hidden row kept before the window; 0 where none is."""
    return model.config.hidden_size if strategy.needs.boundary or model.config.shift else 0


def new_pools(
    strategy: Any, model: Model, aux: Mapping[str, Model], num_pages: int, page_size: int
) -> dict[str, Any]:
    """Empty pools of the model and of those the strategy needs besides it."""
    models = {TARGET: model, **{name: aux[name] for name in strategy.needs.aux}}
    return {
        name: new_pool(other.config, num_pages, page_size, other.kv_dtype, other.split)
        for name, other in models.items()
    }


def state_specs(split: Split) -> DecodeState:
    """Of a state on several devices.

    A device has its heads of the pools and, where the batch is split too, its rows of everything.
    """
    rows = row_specs(split)
    fields: dict[str, Any] = {field.name: rows for field in dataclasses.fields(DecodeState)}
    fields["pools"] = PartitionSpec(split.batch, split.axis)
    return DecodeState(**fields)


def row_specs(split: Split) -> PartitionSpec:
    """Of arrays with a row a request."""
    return PartitionSpec(split.batch) if split.batch else PartitionSpec()


def per_device(
    body: Callable[..., Any],
    model: Model,
    strategy: Any,
    aux: Mapping[str, Model],
    args: tuple[Any, ...],
    out_specs: Callable[[Split], Any],
) -> Any:
    """`body(model, strategy, aux, *args)`, on every device of those that share the model.

    Args:
        args: States, batches, and arrays that are whole on every device.
        out_specs: Of the result, as `Split.run` takes them.
    """
    split = model.split
    if split is None:
        return body(model, strategy, aux, *args)
    known = {DecodeState: state_specs(split), Batch: row_specs(split)}
    of_args = (known.get(type(arg), PartitionSpec()) for arg in args)
    specs = split.specs(model), PartitionSpec(), split.specs(aux), *of_args
    return split.run(body, (model, strategy, aux, *args), specs, out_specs(split))


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
    B, T = prompt.shape
    S = strategy.block_size
    if needs.prompt.in_window:
        return absorb_nothing(strategy, forward, state)
    kind: PassKind = "full" if needs.prompt.is_full else "blocks"
    if needs.prompt.is_token_causal:
        kind = "causal"
    size = T if kind == "full" else min(chunk_size, T)
    if needs.prompt.is_grid:
        size = -(-size // S) * S
    chunks = -(-T // size)
    prompt = jnp.pad(prompt, ((0, 0), (0, chunks * size - T)))
    end = needs.prompt.prefill_len(state.buffer.prompt_len, S)
    live_end = state.buffer.prompt_len if kind == "full" else end

    def one(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        index, state = carry
        first = index * size
        tokens = jax.lax.dynamic_slice_in_dim(prompt, first, size, axis=1)
        last = ((end > first) | (index == 0)) & (end <= first + size)
        first = jnp.broadcast_to(first, (B,))
        state = prefill_pass(strategy, forward, state, tokens, first, end, live_end, last, kind)
        return index + 1, state

    needed = jnp.maximum(-(-jnp.max(live_end) // size), 1)
    return jax.lax.while_loop(lambda carry: carry[0] < needed, one, (jnp.int32(0), state))[1]


def prefill_pass(
    strategy: Any,
    forward: ModelForward,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    first: Int[Array, " B"],
    end: Int[Array, " B"],
    live_end: Int[Array, " B"],
    last: Bool[Array, " B"],
    kind: PassKind,
) -> DecodeState:
    """Compute `tokens` from position `first` on, store them and let the strategy absorb them.

    Rows whose values are not finite are not stored, and end their request with ERROR.

    Args:
        end: First position that is not stored.
        live_end: First position that is not computed; at least `end`.
        last: Rows whose prompt is complete after this pass.
    """
    needs, S = strategy.needs, strategy.block_size
    strategy = bind_knobs(strategy, state.knobs)
    B, size = tokens.shape
    in_blocks = kind == "blocks" or needs.prompt.is_grid
    shape = (B, size // S, S) if in_blocks else (B, 1, size)
    position = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    valid = (position < end[:, None]).reshape(shape)
    live = (position < live_end[:, None]).reshape(shape)
    view = state.replace(
        buffer=state.buffer.replace(  # the window of this pass is the chunk itself
            tokens=tokens.reshape(shape),
            filled=live,
            status=jnp.where(jnp.any(live, axis=2), ACTIVE, DUMMY).astype(jnp.int32),
            start=first,
            block_steps=jnp.zeros(shape[:2], jnp.int32),
        ),
        rows=jnp.zeros((B, size, state.boundary.shape[-1]), state.boundary.dtype),
    )
    out = forward(
        view,
        live=live,
        visible=jnp.ones((1, shape[1], shape[1]), bool) if kind == "full" else None,
        causal=kind == "causal",
        mode=needs.prefill_mode or None,
        hidden_layers=needs.hidden_layers,
    )
    view = out.store(view, valid)
    taken = jnp.clip(end - first, 0, size)
    state = state.replace(
        pools=view.pools,
        finish=view.finish,
        boundary=driver.next_boundary(state.boundary, view.rows, taken),
    )
    return strategy.absorb(PrefillChunk(forward, view, out, valid, last), state)


def absorb_nothing(
    strategy: Any, forward: ModelForward, state: DecodeState, last: Bool[Array, " B"] | None = None
) -> DecodeState:
    """Let the strategy absorb a prompt without a prefill pass.

    Args:
        last: Rows whose prompt is complete; None: all.
    """
    strategy = bind_knobs(strategy, state.knobs)
    B = state.finish.shape[0]
    nothing = jnp.zeros((B, 1, 1), bool)
    last = jnp.ones((B,), bool) if last is None else last
    chunk = PrefillChunk(forward, state, None, nothing, last)
    return strategy.absorb(chunk, state)


def run(
    strategy: Any,
    forward: ModelForward,
    state: DecodeState,
    spec: SlotSpec,
    num_steps: int | Int[Array, ""] | None = None,
) -> DecodeState:
    """Decode until every row is done, or for `num_steps` steps."""

    def go_on(step: Array, state: DecodeState) -> Array:
        more = driver.any_running(state)
        return more if num_steps is None else more & (step < num_steps)

    return driver.decode_while(go_on, strategy, forward, state, spec)[1]
