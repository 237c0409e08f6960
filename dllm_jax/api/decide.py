"""Typed questions answered by one forward of the network, without a cache.

Sizes are fixed: texts are padded to `LENGTHS` and their number to `COUNTS`, so a program is
compiled for each pair at most.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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
from dllm_jax.scoring.labels import TOKENS_A_PASS, forward

LENGTHS = (128, 512, 1024, 2048, 4096)  # tokens of a text
COUNTS = (1, 4, 16, 64)  # texts of a forward
MOST_TOKENS = 16384  # of a forward, padding included: scores are [texts, heads, length, length]


def reading_of(model: Model) -> Reading:
    """How answers are read from a model's output."""
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
    model: Model,
    context: str,
    questions: Sequence[Question],
    *,
    joint: bool = False,
    run: Callable[..., Any] | None = None,
) -> list[Answer]:
    """Probabilities of the options of questions about a text, in one forward.

    Args:
        joint: Ask all questions in one text, where each answer sees the other questions; else each
            is a text of its own, in one batch.
        run: As of `log_probabilities`.

    Raises:
        ValueError: The model cannot answer them, or they are too long.
    """
    every = reads(model, reading_of(model), context, questions, joint)
    found = [row for read in log_probabilities(model, every, run) for row in read]
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


def passes(texts: Sequence[Read]) -> list[Sequence[Read]]:
    """Texts in groups of one pass each: no forward of one takes long, and all give the same bits.

    Raises:
        ValueError: There are too many tokens.
    """
    _, length = padded_size(texts)
    size = max(1, TOKENS_A_PASS // length)
    return [texts[at : at + size] for at in range(0, len(texts), size)]


def log_probabilities(
    model: Model, texts: Sequence[Read], run: Callable[..., Any] | None = None
) -> list[list[list[float]]]:
    """The log-probability of each label of each row of each text, over the vocabulary.

    Args:
        run: `forward` of the model; None: here. Where several processes share the model, an
            engine's `ModelRunner.read_labels`, which reaches them all.

    Raises:
        ValueError: The family has no single forward of a text and its cells, the model is shared by
            several processes, there are too many tokens, or the result is not finite.
    """
    if run is None and model.split is not None and model.split.spans_processes:
        raise ValueError(
            "several processes share the model, and only an engine reaches them all; ask "
            "LLM.decide, or a server"
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
    run = functools.partial(forward, model) if run is None else run
    found = np.asarray(run(ids, sizes, rows, labels))
    if not np.isfinite(found[:at]).all():
        raise ValueError("the model produced values that are not finite; check its weights")
    lines = iter(found.tolist())
    return [[next(lines)[: len(letters)] for letters in text.labels] for text in texts]
