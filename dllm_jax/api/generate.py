"""`generate`: a batch of prompts to tokens as one jitted program, without a scheduler.

The host side checks and pads the input; the device side is `runner.decode`. `generate` may be
called under jit and vmapped over a strategy's thresholds. `start` and `advance` are its two halves
for callers that read the state between steps.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jaxtyping import Array, Int, PRNGKeyArray

from dllm_jax.api.arguments import loaded
from dllm_jax.api.batches import pad_prompts, row_keys
from dllm_jax.api.drafts import Bound, Source
from dllm_jax.api.strategy import bind_strategy, check_number
from dllm_jax.engine.checks import boolean, set_fields, short_repr, token_ids, whole_number
from dllm_jax.engine.layout import PAGE_SIZE
from dllm_jax.engine.rules import NUMBERS, Range
from dllm_jax.loading.load import with_kv_cache
from dllm_jax.loading.model import Model
from dllm_jax.models.kv_cache import KVCacheDType
from dllm_jax.runner import decode
from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies.core.protocol import Strategy, split_knobs
from dllm_jax.strategies.core.state import NO_LIMIT, DecodeState, Limits, Sampling

STOP_BUCKET = 8
MOST_TOKENS = 1 << 24  # more positions than any model has; the output is an array of that width
_NUMBERS = {name: NUMBERS[name] for name in ("temperature", "top_p", "max_nfe")} | {
    "top_k": Range(0, NO_LIMIT),
}


class GenerateOutput(struct.PyTreeNode):
    """The result of `generate`; a pytree.

    Attributes:
        tokens: Emitted ids, 0 past `length`; neither prompt nor stop id is among them.
        length: Emitted ids of each row.
        nfe: Forwards after prefill, commit passes included.
        finish: Why each row ended: `dllm_jax.strategies.core.state.FINISH_REASONS` has the words.
            ERROR is a value of the model that is not finite, STUCK a strategy that changed nothing
            for too long (`Strategy.patience`).
    """

    tokens: Int[Array, "B O"]
    length: Int[Array, " B"]
    nfe: Int[Array, " B"]
    finish: Int[Array, " B"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """The keywords of `generate` that are of the requests, and `start`'s."""

    max_tokens: int = 256
    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_nfe: Any = None
    prompt_len: Any = None
    draft: Source | None = None
    key: Any = None

    def __post_init__(self):
        most = whole_number("max_tokens", self.max_tokens, 1, MOST_TOKENS)
        ids = token_ids("stop_token_ids", self.stop_token_ids, NO_LIMIT)
        set_fields(self, {"max_tokens": most, "stop_token_ids": ids})
        boolean("ignore_eos", self.ignore_eos)


class Session(struct.PyTreeNode):
    """A batch in the middle of decoding: strategy, auxiliary models, state."""

    strategy: Strategy
    aux: dict[str, Model]
    state: DecodeState


def generate(
    model: Model | str,
    prompts: Sequence[Sequence[int]] | Int[Array, "B T"],
    strategy: Any = None,
    *,
    max_tokens: int = Wishes.max_tokens,
    temperature: float | Array = Wishes.temperature,
    top_k: int | Array | None = Wishes.top_k,
    top_p: float | Array | None = Wishes.top_p,
    stop_token_ids: Sequence[int] = Wishes.stop_token_ids,
    ignore_eos: bool = Wishes.ignore_eos,
    max_nfe: int | Array | None = Wishes.max_nfe,
    prompt_len: Int[Array, " B"] | None = Wishes.prompt_len,
    draft: Source | None = Wishes.draft,
    kv_cache_dtype: KVCacheDType = "auto",
    key: PRNGKeyArray | None = Wishes.key,
    attention_implementation: str | None = None,
) -> GenerateOutput:
    """Decode a fixed batch of prompts.

    Args:
        model: A `Model` or what `load` takes.
        prompts: Lists of token ids, or an array right-padded to one length with `prompt_len`.
        strategy: A value, name, import path or step function; None is the family's default, and
            `dflash` for a model of `ar` with a draft.
        max_tokens: Most tokens a row may emit; static (another value compiles again).
        temperature, top_k, top_p, max_nfe: One value, or one a row.
        stop_token_ids: Ids that end a row, besides the model's own (unless `ignore_eos`).
        prompt_len: Length of each row of an array of prompts; None: all of it.
        draft: The model a speculative strategy drafts with.
        kv_cache_dtype: As in `dj.load`.
        key: One key (row i draws with `fold_in(key, i)`) or one a row; None is `key(0)`.

    Returns:
        Tokens, lengths, forwards and finish reasons, on the device.

    Raises:
        ValueError: An argument outside its range, an empty prompt, or one longer than the model.
    """
    wishes = Wishes(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        max_nfe=max_nfe,
        prompt_len=prompt_len,
        draft=draft,
        key=key,
    )
    model = with_kv_cache(loaded(model), kv_cache_dtype)
    model, bound, batch = _prepare(model, prompts, strategy, wishes)
    _check_attention(attention_implementation)
    return _generate(model, *bound, batch, wishes.max_tokens, attention_implementation)


def start(
    model: Model | str,
    prompts: Sequence[Sequence[int]] | Int[Array, "B T"],
    strategy: Any = None,
    *,
    attention_implementation: str | None = None,
    **request: Any,
) -> Session:
    """Prefill a batch and stop before its first step; `request` is `generate`'s keywords."""
    wishes = Wishes(**request)
    model, bound, batch = _prepare(model, prompts, strategy, wishes)
    _check_attention(attention_implementation)
    state = _start(model, *bound, batch, wishes.max_tokens, attention_implementation)
    return Session(*bound, state)


def advance(
    model: Model, session: Session, num_steps: int = 1, attention_implementation: str | None = None
) -> Session:
    """Run up to `num_steps` decode steps; the state of the old session is donated."""
    state = _advance(
        model,
        session.strategy,
        session.aux,
        session.state,
        jnp.int32(num_steps),
        attention_implementation,
    )
    return session.replace(state=state)


# --- the host side --------------------------------------------------------


def _check_attention(name: Any) -> None:
    if name is not None and not (isinstance(name, str) and len(name) < 100):
        raise ValueError(
            f"attention_implementation={short_repr(name)} is no name; give one, or None for the "
            "best"
        )


def _prepare(
    model: Model | str, prompts: Any, strategy: Any, wishes: Wishes
) -> tuple[Model, Bound, decode.Batch]:
    """Check the arguments of a call and turn them into arrays of bucketed shapes."""
    model = loaded(model)
    strategy, aux = bind_strategy(model, strategy, wishes.draft)
    bare, knobs = split_knobs(strategy)
    for name, allowed in _NUMBERS.items():
        check_number(name, getattr(wishes, name), *allowed[:3])
    ids, lengths = pad_prompts(model, prompts, wishes.prompt_len)
    B = ids.shape[0]
    if model.split is not None and B % model.split.num_batches:
        raise ValueError(
            f"{B} prompts cannot be split over the {model.split.num_batches} groups of devices of "
            f"the mesh's axis {model.split.batch!r}; give a multiple"
        )
    last = model.config.max_position
    if strategy.needs.prompt.in_window:
        last = min(last, strategy.block_size * strategy.buffer_size)
        _check_window(strategy, lengths, wishes.max_tokens)

    def a_row(name: str, value: Any, usual: Any, dtype: Any) -> Array:
        value = usual if value is None else value
        if value is None:
            raise ValueError(f"{name}=None is no number; leave it out, or give one")
        if np.shape(value) not in ((), (1,), (B,)):
            raise ValueError(
                f"{name} has shape {np.shape(value)}; give one value or {B}, one a row"
            )
        return jnp.broadcast_to(jnp.asarray(value, dtype), (B,))

    stops = [*wishes.stop_token_ids, *(() if wishes.ignore_eos else model.defaults.stop_token_ids)]
    width = max(STOP_BUCKET, -(-len(stops) // STOP_BUCKET) * STOP_BUCKET)
    stop_ids = np.full((B, width), -1, np.int32)
    stop_ids[:, : len(stops)] = stops
    batch = decode.Batch(
        prompt=ids,
        prompt_len=lengths,
        limit=jnp.minimum(lengths + wishes.max_tokens, last),
        sampling=Sampling(
            a_row("temperature", wishes.temperature, None, jnp.float32),
            a_row("top_k", wishes.top_k, 0, jnp.int32),
            a_row("top_p", wishes.top_p, 1.0, jnp.float32),
        ),
        limits=Limits(
            jnp.asarray(stop_ids),
            a_row("max_nfe", wishes.max_nfe, NO_LIMIT, jnp.int32),
            a_row("max_run", None, NO_LIMIT, jnp.int32),
        ),
        knobs={name: a_row(name, value, None, jnp.float32) for name, value in knobs.items()},
        keys=row_keys(wishes.key, B),
    )
    return model, Bound(bare, aux), batch


def _check_window(strategy: Any, lengths: Array, max_tokens: int) -> None:
    """Refuse texts longer than the window, where their lengths are concrete."""
    if isinstance(lengths, Tracer):
        return
    S, window = strategy.block_size, strategy.block_size * strategy.buffer_size
    longest = int(np.max(lengths))
    if longest + max_tokens > window:
        raise ValueError(
            f"prompt and max_tokens are {longest} + {max_tokens} tokens, the window has {window}; "
            f"use buffer_size={-(-(longest + max_tokens) // S)} or lower max_tokens"
        )


# --- the device side ---------------------------------------------------------------------------


def _fresh(model, strategy, aux, batch, max_tokens) -> DecodeState:
    """A state in which each row owns the pages for everything it can write."""
    B, T = batch.prompt.shape
    last = min(T + max_tokens, model.config.max_position)
    pages = -(-(last + strategy.buffer_size * strategy.block_size) // PAGE_SIZE)
    table = jnp.arange(B * pages, dtype=jnp.int32).reshape(B, pages)
    emitted = min(max_tokens, model.config.max_position)
    return decode.new_state(strategy, model, aux, batch, table, B * pages, PAGE_SIZE, emitted)


def _prefilled(model, strategy, aux, batch, max_tokens, implementation) -> DecodeState:
    """The same with the prompts in it."""
    state = _fresh(model, strategy, aux, batch, max_tokens)
    forward = ModelForward(model, aux=aux, implementation=implementation)
    return decode.prefill(strategy, forward, state, batch.prompt)


@functools.partial(jax.jit, static_argnames=("max_tokens", "implementation"))
def _start(model, strategy, aux, batch, max_tokens, implementation):
    body = functools.partial(_prefilled, max_tokens=max_tokens, implementation=implementation)
    return decode.per_device(body, model, strategy, aux, (batch,), decode.state_specs)


@functools.partial(jax.jit, static_argnames=("implementation",), donate_argnames=("state",))
def _advance(model, strategy, aux, state, num_steps, implementation):
    def body(model, strategy, aux, state, num_steps):
        forward = ModelForward(model, aux=aux, implementation=implementation)
        spec = decode.slot_spec(strategy, model, state.finish.shape[0])
        return decode.run(strategy, forward, state, spec, num_steps)

    args = state, num_steps
    return decode.per_device(body, model, strategy, aux, args, decode.state_specs)


@functools.partial(jax.jit, static_argnames=("max_tokens", "implementation"))
def _generate(model, strategy, aux, batch, max_tokens, implementation):
    body = functools.partial(_decoded, max_tokens=max_tokens, implementation=implementation)
    return decode.per_device(body, model, strategy, aux, (batch,), decode.row_specs)


def _decoded(model, strategy, aux, batch, max_tokens, implementation) -> GenerateOutput:
    """Prompts to texts on one device."""
    state = _prefilled(model, strategy, aux, batch, max_tokens, implementation)
    forward = ModelForward(model, aux=aux, implementation=implementation)
    spec = decode.slot_spec(strategy, model, batch.prompt.shape[0])
    state = decode.run(strategy, forward, state, spec)
    counts = jnp.arange(state.output.shape[1])[None] < state.output_len[:, None]
    unused = max_tokens - state.output.shape[1]
    return GenerateOutput(
        tokens=jnp.pad(jnp.where(counts, state.output, 0), ((0, 0), (0, unused))),
        length=state.output_len,
        nfe=state.buffer.nfe,
        finish=state.finish,
    )
