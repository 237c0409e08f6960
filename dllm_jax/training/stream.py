"""Endless batches of tokenised problems, made by worker processes, resumable at any batch.

Data flow: problem -> conversation -> ids -> batches of one of two lengths. Chunk `c` of the stream
(a few batches) is a pure function of (config, c) for any number of workers, so resuming at batch
`n` continues the same data. Noise is drawn on the device; this module imports no JAX.
"""

import dataclasses
import functools
import multiprocessing
import os
import random
import signal
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import tokenizers

from dllm_jax.tasks import problems
from dllm_jax.training.tokenizer import ASSISTANT, EOS, EOS_ID, USER, train_tokenizer

BATCHES_PER_CHUNK = 8
_QUEUE_CHUNKS = 3  # chunks a worker may be ahead
_TOKENIZER_PROBLEMS = 10_000  # of each half
_TOKENIZER_SEED = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """The contents of the batches.

    Attributes:
        batch_size: Rows of every batch.
        lengths: Row lengths, short and long; a batch holds rows of one length.
        room: Least end-of-sequence tokens in a row of the short length, so that training covers
            blocks that are opened past the end.
        hard_share: Share of problems of the hard half.
        example_share: Share of samples with a solved problem before the question, if it fits.
        family: The only family of problems; None: all of them, in the shares above.
    """

    seed: int = 0
    batch_size: int = 256
    lengths: tuple[int, int] = (176, 256)
    room: int = 16
    hard_share: float = 0.6
    example_share: float = 0.1
    family: str | None = None


@functools.cache
def make_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """The tokenizer of a run: a function of the generator and the vocabulary size alone."""
    drawn = (
        problems.problem(half, _TOKENIZER_SEED, i)
        for i in range(_TOKENIZER_PROBLEMS)
        for half in problems.HALVES
    )
    return train_tokenizer((p.question + p.response for p in drawn), vocab_size)


def tokenizer_for(vocab_size: int) -> tuple[tokenizers.Tokenizer, np.ndarray]:
    """The tokenizer of a model of exactly `vocab_size` tokens, and which of them are digits.

    Raises:
        ValueError: The generator's text cannot fill a vocabulary of this size.
    """
    tokenizer = make_tokenizer(vocab_size)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"{vocab_size=} differs from the tokenizer's {tokenizer.get_vocab_size()}; use at most "
            "that many"
        )
    is_digit = np.zeros(vocab_size, bool)
    is_digit[[tokenizer.encode(digit).ids[0] for digit in "0123456789"]] = True
    return tokenizer, is_digit


def conversation(question: str, response: str | None = None) -> str:
    """The text of one turn; without a response, the prompt to generate from."""
    end = "" if response is None else f"{response}{EOS}"
    return f"{USER}{question}{ASSISTANT}{end}"


def make_chunk(cfg: StreamConfig, tokenizer: tokenizers.Tokenizer, chunk: int) -> list[dict]:
    """The batches of chunk number `chunk`.

    Returns:
        `BATCHES_PER_CHUNK` dicts of `tokens` (i16, padded with end-of-sequence), `prompt_len` and
        `length` (both i32; the length includes the first end-of-sequence token).
    """
    short, long = cfg.lengths
    rng = random.Random(f"chunk/{cfg.seed}/{chunk}")
    wanted = cfg.batch_size * BATCHES_PER_CHUNK
    rows: list[tuple[list[int], int]] = []
    prefix = 0
    while len(rows) < wanted:
        texts = []
        for i in range(prefix, prefix + wanted - len(rows)):
            half = "hard" if rng.random() < cfg.hard_share else "plain"
            if cfg.family is not None:
                half = problems.half_of(cfg.family)
            drawn = problems.problem(half, cfg.seed, chunk * 2 * wanted + i, family=cfg.family)
            before = ""
            if rng.random() < cfg.example_share:
                shown = problems.problem("plain", cfg.seed + 1, chunk * 2 * wanted + i)
                before = conversation(shown.question, shown.response)
            texts.append((before, conversation(drawn.question), drawn.response + EOS))
        prefix += len(texts)
        encoded = tokenizer.encode_batch([part for text in texts for part in text])
        for j in range(0, len(encoded), 3):
            before, prompt, response = (e.ids for e in encoded[j : j + 3])
            if len(before) + len(prompt) + len(response) > long:
                before = []
            if len(prompt) + len(response) <= long:
                rows.append((before + prompt + response, len(before) + len(prompt)))
    rng.shuffle(rows)
    small = [row for row in rows if len(row[0]) <= short - cfg.room]
    num_short = len(small) // cfg.batch_size
    first = small[: num_short * cfg.batch_size]
    taken = {id(row) for row in first}
    rest = [row for row in rows if id(row) not in taken]
    groups = [
        (short if k < num_short else long, (first + rest)[k * cfg.batch_size :][: cfg.batch_size])
        for k in range(BATCHES_PER_CHUNK)
    ]
    rng.shuffle(groups)
    return [_pack(group, length) for length, group in groups]


def _pack(rows: list[tuple[list[int], int]], length: int) -> dict[str, Any]:
    tokens = np.full((len(rows), length), EOS_ID, np.int16)
    for i, (ids, _) in enumerate(rows):
        tokens[i, : len(ids)] = ids
    return {
        "tokens": tokens,
        "prompt_len": np.array([prompt for _, prompt in rows], np.int32),
        "length": np.array([len(ids) for ids, _ in rows], np.int32),
    }


def batches(
    cfg: StreamConfig, tokenizer: tokenizers.Tokenizer, first: int = 0, num_workers: int = 0
) -> Generator[dict, None, None]:
    """The stream from batch number `first` on.

    Args:
        num_workers: Processes that make chunks ahead of need; 0 makes them in this process.
    """
    chunk, skip = divmod(first, BATCHES_PER_CHUNK)
    for made in _chunks(cfg, tokenizer, chunk, num_workers):
        yield from made[skip:]
        skip = 0


def _chunks(
    cfg: StreamConfig, tokenizer: tokenizers.Tokenizer, first: int, num_workers: int
) -> Iterator[list[dict]]:
    if num_workers == 0:
        while True:
            yield make_chunk(cfg, tokenizer, first)
            first += 1
    context = multiprocessing.get_context("spawn")  # a fork after jax started may hang
    queues = [context.Queue(maxsize=_QUEUE_CHUNKS) for _ in range(num_workers)]
    workers = [
        context.Process(
            target=_work, args=(cfg, tokenizer.to_str(), first + w, num_workers, queue), daemon=True
        )
        for w, queue in enumerate(queues)
    ]
    for worker in workers:
        worker.start()
    try:
        while True:
            for queue in queues:
                yield queue.get()
    finally:
        for worker in workers:
            worker.terminate()


def _work(cfg: StreamConfig, tokenizer_json: str, first: int, stride: int, queue: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its workers
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    chunk = first
    while True:
        queue.put(make_chunk(cfg, tokenizer, chunk))
        chunk += stride
