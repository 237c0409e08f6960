"""The two sides of `host_overhead`: the programs that an engine ran, and their bare cost.

`recording` counts the decode steps and prefill passes of each compiled bucket while an engine
works. `decode_step_ms` and `prefill_pass_ms` time the same compiled programs in a bare device
loop, by the difference of two counts, so that launch and transfer cancel.
"""

import contextlib
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dllm_jax.bench import profile
from dllm_jax.bench.head import has_head, ids_of_device
from dllm_jax.engine.active import accept
from dllm_jax.engine.engine import Engine
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.engine.scheduler import Scheduler
from dllm_jax.engine.sequence import Sequence
from dllm_jax.models import reference
from dllm_jax.runner.decode import PassKind
from dllm_jax.runner.timing import begin

FEW_STEPS = 4  # steps of the shorter of two runs, whose fixed cost cancels
LOGIT_TOLERANCE = 0.1  # bfloat16 rows read out in another order
COARSE_TOLERANCE = 0.5  # 8-bit rows: small bfloat16 differences may round a sixteenth apart

Decode = tuple[int, int]  # rows, columns of the page table
Prefill = tuple[int, int, PassKind, int]  # tokens and columns of a prompt, kind, prompts


class Recording:
    """A runner that counts its work; everything else is delegated to the inner runner.

    Attributes:
        steps: Decode steps that ran, by bucket.
        tokens: Tokens that these steps settled, by bucket.
        firsts: Tokens of each request that arrived at its `ttfb_s`, by its id: a dispatch of
            several steps may return several blocks at once.
    """

    def __init__(self, inner: Any, scheduler: Scheduler):
        self._inner, self._scheduler = inner, scheduler
        self._flying: dict[int, tuple[Any, Decode, list[Sequence | None]]] = {}
        self.firsts: dict[str, int] = {}
        self.steps: Counter[Decode] = Counter()
        self.tokens: Counter[Decode] = Counter()
        self._passes_before = Counter(inner.passes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def decode(self, rows: Any, num_active: int, pages: Any, num_steps: int, early: bool) -> Any:
        """As `ModelRunner.decode`."""
        handle = self._inner.decode(rows, num_active, pages, num_steps, early)
        # Keep the handle alive, so that its id stays unique.
        by_slot = {sequence.slot: sequence for sequence in self._scheduler.live}
        sequences = [by_slot.get(row) for row in rows[:num_active]]
        self._flying[id(handle)] = handle, (pages.shape[0], pages.shape[1]), sequences
        return handle

    def fetch(self, handle: Any) -> Any:
        """As `ModelRunner.fetch`."""
        fetched = self._inner.fetch(handle)
        _, bucket, sequences = self._flying.pop(id(handle), (None, None, []))
        if bucket is not None:
            self.steps[bucket] += fetched.steps
            for sequence, length, before in zip(
                sequences, fetched.length, fetched.before, strict=False
            ):
                self.tokens[bucket] += length - before
                if sequence is not None and sequence.first_s is None:  # set after this fetch
                    self.firsts[sequence.owner.id] = length
        return fetched

    @property
    def passes(self) -> Counter[Prefill]:
        """Prefill passes, by bucket."""
        return Counter(self._inner.passes) - self._passes_before

    def clear(self) -> None:
        """Count from zero."""
        for counter in (self.steps, self.tokens, self.firsts):
            counter.clear()
        self._passes_before = Counter(self._inner.passes)


@contextlib.contextmanager
def recording(engine: Engine) -> Iterator[Recording]:
    """Count what an engine runs inside the block."""
    inner = engine.runner
    engine.runner = Recording(inner, engine.scheduler)
    try:
        yield engine.runner
    finally:
        engine.runner = inner


def decode_step_ms(
    engine: Engine,
    rows: int,
    columns: int,
    context: int,
    steps: int = 32,
    repeats: int = 5,
    overrides: Mapping[str, float] | None = None,
) -> float:
    """Milliseconds of one decode step of a compiled bucket in a bare device loop, the median.

    Every row decodes another text from `context` tokens on (at most half of the bucket's capacity):
    one dispatch of `steps` + 4 steps against one of 4.

    Args:
        engine: An idle engine; its free pages are borrowed, which evicts cached prefixes in them.
        overrides: Of the texts, as `SamplingParams.strategy_overrides`.

    Raises:
        ValueError: The engine is busy, or its pool is too small.
    """
    how = (context, steps, repeats)
    return statistics.median(decode_step_samples(engine, rows, columns, *how, overrides=overrides))


def decode_step_samples(
    engine: Engine,
    rows: int,
    columns: int,
    context: int,
    steps: int = 32,
    repeats: int = 5,
    text_len: int | None = None,
    after_s: float = 0.0,
    overrides: Mapping[str, float] | None = None,
) -> list[float]:
    """As `decode_step_ms`, every repeat.

    Args:
        text_len: Most tokens that `steps` + 4 steps write; None: half of the bucket's capacity.
        after_s: Seconds of warm-up steps before the first that counts.
        overrides: As of `decode_step_ms`.
    """
    with _bare_loop(engine, rows, columns, context, text_len, overrides) as spend:
        spend(FEW_STEPS)  # compiles if necessary
        began = time.perf_counter()
        while time.perf_counter() - began < after_s:
            spend(FEW_STEPS + steps)
        found = []
        for _ in range(repeats):
            (less_s, less), (more_s, more) = spend(FEW_STEPS), spend(FEW_STEPS + steps)
            if more <= less:
                raise ValueError(f"the texts ended after {more} steps; lower {steps=}")
            found.append((more_s - less_s) / (more - less) * 1e3)
    return found


def decode_trace(
    engine: Engine, rows: int, columns: int, context: int, steps: int, text_len: int | None = None
) -> tuple[profile.Trace, int]:
    """A profile of one warm dispatch of the same loop, and its number of steps."""
    with (
        profiled(engine),
        _bare_loop(engine, rows, columns, context, text_len) as spend,
    ):
        spend(FEW_STEPS)
        ran = []
        trace = profile.traced(lambda: ran.append(spend(steps)[1]))
    return trace, ran[0]


@contextlib.contextmanager
def profiled(engine: Engine) -> Iterator[None]:
    """Make a profile record the launches of steps; their programs compile at the first call."""
    engine.runner.is_profiled = True
    try:
        yield
    finally:
        engine.runner.is_profiled = False


@contextlib.contextmanager
def _bare_loop(
    engine: Engine,
    rows: int,
    columns: int,
    context: int,
    text_len: int | None,
    overrides: Mapping[str, float] | None = None,
) -> Iterator[Callable[[int], tuple[float, int]]]:
    """A function from a number of steps to the seconds of their dispatch and the steps that ran."""
    with borrowed(engine, rows, columns, context, text_len, overrides) as (sequences, table):
        slots = np.arange(rows, dtype=np.int32)
        bare = engine.runner

        def spend(count: int) -> tuple[float, int]:
            for slot, sequence in enumerate(sequences):
                bare.admit(slot, sequence.placement)
                begin(bare, slot, sequence.placement.prompt_len, table[slot])
            bare.wait()
            began = time.perf_counter()
            fetched = bare.fetch(bare.decode(slots, rows, table, count, False))
            return time.perf_counter() - began, fetched.steps

        yield spend


def prefill_pass_ms(
    engine: Engine,
    size: int,
    columns: int,
    kind: PassKind,
    prompts: int = 1,
    first: int = 0,
    passes: int = 6,
    repeats: int = 5,
) -> float:
    """Milliseconds of one prefill pass of a compiled bucket, one after another, the median.

    Args:
        prompts: Prompts in the pass: 1, or for the smallest sizes `EngineLayout.prompts_a_pass`.
        first: First position of the pass, moved down until the pass fits in the bucket.
    """
    room = columns * engine.layout.page_size
    first = max(0, min(first, room - size)) // engine.layout.block_size * engine.layout.block_size
    end = min(first + size, room)
    with borrowed(engine, prompts, columns, engine.layout.block_size) as (sequences, table):
        pages = [_stretched(engine, row) for row in table]
        bare = engine.runner
        for slot, sequence in enumerate(sequences):
            bare.admit(slot, sequence.placement)
        tokens = [0] * (end - first)

        def spend(count: int) -> float:
            bare.wait()
            began = time.perf_counter()
            for _ in range(count):
                for slot, row in enumerate(pages):
                    bare.prefill(slot, tokens, first, end, end, False, row, size, kind)
            bare.wait()
            return time.perf_counter() - began

        spend(1)
        found = [(spend(1 + passes) - spend(1)) / passes * 1e3 for _ in range(repeats)]
    return statistics.median(found)


def head_in_program(engine: Engine, rows: int, columns: int) -> bool:
    """Whether every step of the compiled decode program computes the logits of all ids."""
    count = ids_of_device(engine.runner.programs.model)
    return has_head(decode_program(engine, rows, columns), count)


def decode_program(engine: Engine, rows: int, columns: int) -> str:
    """The optimised decode program of a bucket, as XLA prints it."""
    slots = np.arange(rows, dtype=np.int32)
    table = np.full((rows, columns), -1, np.int32)
    (call,) = engine.runner.calls(lambda runner: runner.decode(slots, rows, table, 2, False))
    return engine.runner.device.lower(call).compile(call.options).as_text() or ""


def num_reductions(program: str) -> int:
    """Sums over devices in an optimised program; those in a loop count once."""
    return len(re.findall(r" all-reduce(?:-start)?\(", program))


def first_token_is_the_models(llm: Any) -> bool:
    """Whether a token of the engine is the argmax of logits computed without a cache.

    The prompt leaves one hole in its last block, which is filled first by `FixedWork`, and by
    `MultiBD` with an unreachable threshold. A model without masks continues the prompt.
    """
    model, size = llm.model, llm.engine.layout.block_size
    mask = model.config.mask_token_id
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, model.defaults.vocab_limit, 2 * size - 1).tolist()
    prompt = [token if token != mask else 0 for token in prompt]
    params = SamplingParams(max_tokens=size, max_nfe=1, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    chosen = output.outputs[0].token_ids[0]
    denoises = mask >= 0
    ids = jnp.array([[*prompt, mask] if denoises else prompt], jnp.int32)
    kind = "block_causal" if denoises else "causal"
    visible = reference.visibility(kind, ids.shape[1], size)[None]
    logits = reference.dense_logits(model.params, model.config, ids, visible, model.arch)
    # A shifted model's row predicts the next cell.
    row = np.array(logits[0, -1 - int(denoises and model.config.shift)])
    if denoises:
        row[mask] = -np.inf
    tolerance = LOGIT_TOLERANCE if model.quantization is None else COARSE_TOLERANCE
    return bool(row[chosen] >= row[: model.defaults.vocab_limit].max() - tolerance)


@contextlib.contextmanager
def borrowed(
    engine: Engine,
    rows: int,
    columns: int,
    context: int,
    text_len: int | None = None,
    overrides: Mapping[str, float] | None = None,
) -> Iterator[tuple[list[Sequence], np.ndarray]]:
    """Sequences outside any queue, and a page table for them over borrowed pages.

    Args:
        text_len: Tokens that the texts need after their context; None: half of the room.
        overrides: As of `decode_step_ms`.
    """
    layout, scheduler = engine.layout, engine.scheduler
    if engine.has_work:
        raise ValueError("the engine is at work; measure it before or after")
    pool, size = scheduler.pool, layout.block_size
    each = min(columns, pool.num_available // rows)
    room = min(each * layout.page_size - size, layout.max_model_len)
    if layout.in_window:
        room = layout.window
    if layout.max_model_len < 2 * size:
        raise ValueError(
            f"max_model_len={layout.max_model_len} is less than the two blocks of {size} that are "
            "measured; raise it"
        )
    if room < 2 * size:
        raise ValueError(
            f"{rows} rows have {pool.num_available} pages to share; raise num_pages or "
            "memory_utilization, or lower max_num_seqs"
        )
    # The text fills the rest of the room, in any number of steps.
    most = room // 2 if text_len is None else room - text_len
    context = max(1, min(context, most)) // size * size
    prompt = [0] * max(context, 1)
    params = SamplingParams(
        max_tokens=room - len(prompt), ignore_eos=True, strategy_overrides=overrides or {}
    )
    live = accept(
        Request(prompt_token_ids=prompt, params=params), "bare", 0, 0.0, engine.layout, None, 0
    )
    pages = pool.take(rows * each)
    table = np.full((rows, columns), -1, np.int32)
    table[:, :each] = np.array(pages, np.int32).reshape(rows, each)
    try:
        yield live.sequences * rows, table
        engine.runner.wait()
    finally:
        pool.release(pages)


def _stretched(engine: Engine, row: np.ndarray) -> np.ndarray:
    """A row of a page table whose empty columns repeat its last page."""
    held = row[row >= 0]
    return np.concatenate([held, np.repeat(held[-1:], len(row) - len(held))])
