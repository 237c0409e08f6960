"""Prompts and keys as arrays of a few shapes, for `generate`."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PRNGKeyArray

from dllm_jax.api.strategy import check_number
from dllm_jax.engine.checks import listed, short_repr, token_ids
from dllm_jax.engine.rules import check_ids
from dllm_jax.loading.model import Model

MIN_PROMPT_BUCKET = 64


def pad_prompts(model: Model, prompts: Any, prompt_len: Any) -> tuple[Array, Array]:
    """Prompts as [B, bucket] and their lengths; concrete ones are checked."""
    if isinstance(prompts, Tracer) or isinstance(prompt_len, Tracer):
        ids = jnp.asarray(prompts, jnp.int32)
        B, T = ids.shape
        lengths = jnp.asarray(T if prompt_len is None else prompt_len, jnp.int32)
        ids = jnp.pad(ids, ((0, 0), (0, _bucket(T) - T)))
        return ids, jnp.broadcast_to(lengths, (B,))
    if hasattr(prompts, "ndim"):
        if isinstance(prompts, np.generic) or prompts.ndim != 2 or not prompts.size:
            raise ValueError(f"prompts have shape {prompts.shape}; give [batch, tokens], not empty")
        B, T = prompts.shape
        check_number("prompt_len", prompt_len, 0, T, whole=True)
        lengths = np.asarray(T if prompt_len is None else prompt_len, np.int32)
        if lengths.shape not in ((), (1,), (B,)):
            raise ValueError(
                f"prompt_len has shape {lengths.shape}; give one length or {B}, one a row"
            )
        lengths = np.broadcast_to(lengths, (B,))
        prompts = [row[:n].tolist() for row, n in zip(np.asarray(prompts), lengths, strict=True)]
    elif prompt_len is not None:
        raise ValueError("prompt_len goes with an array of prompts; lists have their own lengths")
    return _pad_lists(model, prompts)


def _pad_lists(model: Model, prompts: Any) -> tuple[Array, Array]:
    most, vocab = model.config.max_position, model.config.vocab_size
    is_many = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping)
    prompts = listed("prompts", prompts) if is_many else prompts
    if not is_many or any(isinstance(row, str | int) for row in prompts):
        raise ValueError(
            "prompts are lists of token ids, one list a prompt; "
            "encode text with model.tokenizer, and wrap a single prompt in a list"
        )
    rows = [token_ids(f"prompt {i}", row) for i, row in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts is empty; give at least one prompt")
    for i, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {i} is empty; give at least one token")
        if len(row) >= most:
            raise ValueError(
                f"prompt {i} has {len(row)} tokens; the model takes {most}, prompt and output "
                "together: shorten the prompt"
            )
        check_ids(f"prompt {i}", row, vocab, model.defaults.unread_token_ids)
    ids = np.zeros((len(rows), _bucket(max(map(len, rows)))), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return jnp.asarray(ids), jnp.asarray([len(row) for row in rows], jnp.int32)


def _bucket(length: int) -> int:
    """The compiled length for a prompt: a power of two."""
    return max(MIN_PROMPT_BUCKET, 1 << (length - 1).bit_length())


def row_keys(key: Any, num_rows: int) -> PRNGKeyArray:
    """A key for each row, from one for all or as they are."""
    key = jax.random.key(0) if key is None else key
    if not hasattr(key, "dtype"):
        raise ValueError(f"key={short_repr(key)} is no random key; give jax.random.key(seed)")
    try:
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"key={short_repr(key)} is no data of a random key; give jax.random.key(seed)"
        ) from error
    if key.ndim == 0:
        return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_rows))
    if key.shape != (num_rows,):
        raise ValueError(
            f"key has shape {key.shape}; give one key, or one for each of {num_rows} rows"
        )
    return key
