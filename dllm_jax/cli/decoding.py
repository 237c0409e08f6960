"""One batch decoded step by step, with its clock: what `generate` shows and counts.

Compilation is kept out of the times: the first step of each shape runs once beforehand.
Nothing here prints.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import decode, generation
from dllm_jax.cli.watch import END_MARK, Frame
from strategies import driver
from strategies.state import DUMMY, FINISH_REASONS, RUNNING


@dataclasses.dataclass
class Row:
    """One request so far. Times are seconds since its batch was started."""

    token_ids: list[int]
    nfe: int = 0
    finish_reason: str | None = None
    ttfb_s: float | None = None
    e2e_s: float = 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Visible tokens a forward after prefill."""
        return len(self.token_ids) / max(self.nfe, 1)


@dataclasses.dataclass
class Progress:
    """A batch so far; `decode_s` and `prefill_s` are without compilation and without pauses."""

    rows: list[Row]
    prefill_nfe: int
    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


def decode_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    strategy: Any,
    options: dict[str, Any],
    warmed: set[tuple[int, int]] | None = None,
) -> Iterator[tuple[Progress, Any]]:
    """Decode a batch, yielding after prefill and after each step.

    Args:
        options: Keywords of `dj.generate`.
        warmed: Shapes that have been compiled already under the same options; grows.

    Yields:
        The progress, the same object each time, and the state on the device, valid until the
        next step.
    """
    progress = Progress([Row([]) for _ in prompts], _prefill_nfe(strategy, prompts))
    # `start` pads prompts to powers of two from a smallest one on, so this tells shapes apart.
    longest = max(generation.MIN_PROMPT_BUCKET, *map(len, prompts))
    shape = len(prompts), (longest - 1).bit_length()
    if warmed is None or shape not in warmed:
        began = time.perf_counter()
        session = generation.start(model, prompts, strategy, **{**options, "max_nfe": 1})
        jax.block_until_ready(generation.advance(model, session).state.finish)
        progress.compile_s = time.perf_counter() - began
    if warmed is not None:
        warmed.add(shape)

    began = time.perf_counter()
    session = generation.start(model, prompts, strategy, **options)
    first = np.asarray(session.state.buffer.start)
    progress.prefill_s = time.perf_counter() - began
    yield progress, session.state
    while any(row.finish_reason is None for row in progress.rows):
        began = time.perf_counter()
        session = generation.advance(model, session)
        state = session.state
        fetched = jax.device_get(
            (state.finish, state.output_len, state.output, state.buffer.nfe, state.buffer.start)
        )
        progress.decode_s += time.perf_counter() - began
        _update(progress, first, *fetched)
        yield progress, state


def _update(
    progress: Progress, first: Any, finish: Any, length: Any, output: Any, nfe: Any, start: Any
) -> None:
    now = progress.prefill_s + progress.decode_s
    for i, row in enumerate(progress.rows):
        if row.finish_reason is not None:
            continue
        row.token_ids = output[i, : length[i]].tolist()
        row.nfe, row.e2e_s = int(nfe[i]), now
        if finish[i] != RUNNING:
            row.finish_reason = FINISH_REASONS[int(finish[i])]
        if row.ttfb_s is None and (start[i] > first[i] or row.finish_reason):
            row.ttfb_s = now


def _prefill_nfe(strategy: Any, prompts: Sequence[Sequence[int]]) -> int:
    """Forwards of prefill: one pass a chunk, of the longest prompt."""
    if strategy.needs.prompt == "in_window":
        return 0
    longest = jnp.int32(max(map(len, prompts)))
    length = int(driver.prefill_len(strategy.needs, longest, strategy.block_size))
    return max(1, -(-length // decode.PREFILL_CHUNK))


def frame(state: Any, model: Any) -> Frame:
    """The window of row 0 as text; end marks are small squares."""
    from dllm_jax.cli.text import cell_texts

    tokenizer = model.tokenizer
    buffer = jax.device_get(jax.tree.map(lambda leaf: leaf[0], state.buffer))
    length = int(state.output_len[0])
    output = np.asarray(state.output[0])[:length].tolist()
    committed = max(0, int(buffer.start) - int(buffer.prompt_len))
    position = int(buffer.start) + np.arange(buffer.tokens.size)
    shown = np.repeat(buffer.status != DUMMY, buffer.tokens.shape[1])
    shown &= (position >= buffer.prompt_len) & (position < buffer.limit)
    tokens, filled = buffer.tokens.reshape(-1)[shown], buffer.filled.reshape(-1)[shown]
    texts = [
        END_MARK if token in model.defaults.stop_token_ids else text
        for token, text in zip(tokens, cell_texts(tokenizer, tokens.tolist()), strict=True)
    ]
    return Frame(
        nfe=int(buffer.nfe),
        committed=tokenizer.decode(output[:committed], skip_special_tokens=True),
        cells=tuple(text if full else None for text, full in zip(texts, filled, strict=True)),
        num_settled=length - min(committed, length),
    )
