"""Typed questions answered by one forward of the network, without a cache.

Sizes are fixed: texts are padded to `LENGTHS` and their number to `COUNTS`, so a program is
compiled for each pair at most. Logits are made of the rows that are read alone.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dllm_jax.api.questions import (
    LETTERS,
    MOST_QUESTIONS,
    Answer,
    Question,
    Read,
    Reading,
    answer,
    reads,
)
from dllm_jax.loading.model import Model
from dllm_jax.models import reference
from dllm_jax.models.sharding import partitioned
from dllm_jax.runner.hosts import spans

LENGTHS = (128, 512, 1024, 2048, 4096)  # tokens of a text
COUNTS = (1, 4, 16, 64)  # texts of a forward
TOKENS_A_PASS = 512  # rows of a product; more would hardly be faster on a GPU
MOST_TOKENS = 16384  # of a forward, padding included: scores are [texts, heads, length, length]


def reading_of(model: Model) -> Reading:
    """How answers are read of a model."""
    stops, attention = model.defaults.stop_token_ids, model.defaults.attention
    is_causal = attention == "causal"
    return Reading(
        attention=attention,
        shift=True if is_causal else model.config.shift,
        mask_token_id=-1 if is_causal else model.config.mask_token_id,
        end_token_id=stops[0] if stops else None,
        multiple=model.routing_block,
    )


def decide(
    model: Model, context: str, questions: Sequence[Question], *, joint: bool = False
) -> list[Answer]:
    """Probabilities of the options of questions about a text, in one forward.

    Args:
        joint: All questions on one canvas, where each answer sees that the others are asked; else
            each by itself, in one batch.

    Raises:
        ValueError: The model cannot answer them, or they are too long.
    """
    every = reads(model, reading_of(model), context, questions, joint)
    found = [row for read in log_probabilities(model, every) for row in read]
    return [answer(question, row) for question, row in zip(questions, found, strict=True)]


def padded_size(texts: Sequence[Read]) -> tuple[int, int]:
    """Number and length of the padded texts of a forward.

    Raises:
        ValueError: There are too many tokens.
    """
    longest = max(len(text.ids) for text in texts)
    length = next((size for size in LENGTHS if size >= longest), None)
    if length is None:
        raise ValueError(f"a text has {longest} tokens; at most {LENGTHS[-1]} are read at once")
    least = max(len(texts), TOKENS_A_PASS // length)  # whole passes
    count = next(size for size in COUNTS if size >= least)
    if count * length > MOST_TOKENS:
        raise ValueError(
            f"{count} texts of {length} tokens, padding included, are over {MOST_TOKENS}; ask "
            "fewer questions at once, or jointly"
        )
    return count, length


def log_probabilities(model: Model, texts: Sequence[Read]) -> list[list[list[float]]]:
    """Of each text and row, the log-probability of each label over the vocabulary.

    Raises:
        ValueError: The family has no single forward of a text and its cells, the model is shared by
            several processes, there are too many tokens, or the result is not finite.
    """
    if spans(model.split):
        raise ValueError(
            "questions are read outside of the engine, which alone reaches other processes that "
            "share the model; ask a server of one process"
        )
    if model.arch.condition is not None:
        raise ValueError(
            f"{model.defaults.family} denoises a canvas behind a cached text, so no single forward "
            "reads both; ask a model of another family"
        )
    count, length = padded_size(texts)
    length += -length % model.routing_block
    ids = np.zeros((count, length), np.int32)
    sizes = np.ones((2, count), np.int32)
    rows = np.zeros((2, MOST_QUESTIONS), np.int32)
    labels = np.zeros((MOST_QUESTIONS, len(LETTERS)), np.int32)
    at = 0
    for number, text in enumerate(texts):
        ids[number, : len(text.ids)] = text.ids
        sizes[:, number] = len(text.ids), text.prompt_len
        for row, letters in zip(text.rows, text.labels, strict=True):
            rows[:, at] = number, row
            labels[at, : len(letters)] = letters
            at += 1
    found = np.asarray(forward(model, ids, sizes, rows, labels))
    if not np.isfinite(found[:at]).all():
        raise ValueError("the model produced values that are not finite; check its weights")
    lines = iter(found.tolist())
    return [[next(lines)[: len(letters)] for letters in text.labels] for text in texts]


@jax.jit
def forward(
    model: Model,
    ids: Int[Array, "B T"],
    sizes: Int[Array, "2 B"],
    rows: Int[Array, "2 R"],
    labels: Int[Array, "R L"],
) -> Float[Array, "R L"]:
    """Log-probabilities of labels at rows of right-padded texts.

    Args:
        sizes: Tokens of each text, and of its prompt.
        rows: Text and position of each row.
    """

    def body(params: Any, *args: Array) -> Array:
        return _forward(model.replace(params=params), *args)

    return partitioned(model.split, body, model.params, ids, sizes, rows, labels)


def _forward(model: Model, ids: Array, sizes: Array, rows: Array, labels: Array) -> Array:
    """See `forward`."""
    params, cfg, arch = model.params, model.config, model.arch

    def run(texts: tuple[Array, Array]) -> Array:
        ids, sizes = texts
        at = jnp.arange(ids.shape[1])[None]
        is_text = at < sizes[:, 0, None]
        visible = _visibility(model, sizes[:, 1], ids.shape[1]) & is_text[:, None]
        hidden, _ = arch.trunk(
            params,
            cfg,
            arch.embed(params, cfg, ids),
            jnp.broadcast_to(at, ids.shape),
            lambda _, q, k, v: reference.attention(q, k, v, visible),
        )
        return hidden

    # Products of as many rows whatever the number of texts: a text's bits are its own.
    count, length = ids.shape
    group = min(count, max(1, TOKENS_A_PASS // length))
    hidden = jax.lax.map(
        run, (ids.reshape(-1, group, length), sizes.T.reshape(-1, group, len(sizes)))
    )
    hidden = hidden.reshape(count, length, hidden.shape[-1])
    logits = arch.unembed(params, cfg, hidden[rows[0], rows[1]])
    chosen = jnp.take_along_axis(logits, labels, axis=1)
    return chosen - jax.nn.logsumexp(logits, axis=1, keepdims=True)


def _visibility(model: Model, prompt_len: Int[Array, " B"], length: int) -> Array:
    """What each row sees, [B or 1, T, T]."""
    defaults = model.defaults
    if defaults.attention != "d2f":
        return reference.visibility(defaults.attention, length, defaults.block_size)[None]
    # A prompt sees itself alone; blocks behind it see it and each other causally.
    blocks = reference.visibility("block_causal", length, defaults.block_size)
    is_prompt = jnp.arange(length)[None] < prompt_len[:, None]
    behind = is_prompt[:, None] | blocks[None]
    return jnp.where(is_prompt[:, :, None], is_prompt[:, None], behind)
