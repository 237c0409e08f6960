"""Times of passes and programs: estimated from sizes, or measured on made-up requests at start.

The estimate comes from bytes and operations; it orders a strategy's choices until they are timed.
`calibrate` and `time_choices` measure compiled programs. Each time is the difference of a longer
and a shorter run, so that the fixed cost of a dispatch cancels. Made-up requests have page ids of
-1: reading them costs as much as reading real pages, and nothing is written.

Source of the constants: fitted to Qwen3-8B and the built-in pair on an H200, and to that pair on
two CPU cores (benchmarks/results/dflash_*.json); ratios are within a third of those measured.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dllm_jax.engine.layout import EngineLayout
from dllm_jax.kernels.token_readout.head import Fp8Head
from dllm_jax.loading.model import Model
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.moe import MoEConfig
from dllm_jax.models.quantization import is_quantized
from dllm_jax.runner.warmup import made_up, pass_kinds

# Bytes a second (copy) and bfloat16 operations a second, measured on the device.
RATES = {"NVIDIA H200": (4.3e12, 790e12)}
USUAL_TEXT = 1024  # tokens; most texts end well before max_model_len
SLOW_S = 0.1  # slower programs are timed once: the spread of one run does not matter there
REPEATS = 3
BUDGET_S = 10.0  # for all timing
CHOICE_STEP = 4  # ratio between the numbers of slots for which choices are timed
SHORT, LONG = 2, 4  # decode steps, or prefill passes, of the two runs
FEW, MANY = 2, 8  # decode steps of the two runs by which choices are compared
_DECODER = ("embed", "lm_head", "final_norm", "layers")


# --- the estimate -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a device runs passes.

    Attributes:
        bytes_s, ops_s: Bytes and operations a second. Half of the lesser hides behind the other.
        layer_s: Seconds of a layer's launches.
        step_s: Seconds of a step outside its passes: the loop's condition, the host's share.
        further_s: Seconds that each further pass of a step adds: inputs, readout, acceptance.
        reads: How often the context goes through memory.
    """

    bytes_s: float
    ops_s: float
    layer_s: float
    step_s: float
    further_s: float
    reads: float


# Other GPUs have a similar ratio of operations to bytes. A CPU gathers the pages, transposes them
# by head and joins them with the fresh keys before it reads them.
ACCELERATOR = Speed(*RATES["NVIDIA H200"], 23e-6, 50e-6, 200e-6, 1.0)
CPU = Speed(20e9, 80e9, 100e-6, 500e-6, 1e-3, 5.0)


def estimate_choices(
    strategy: Any,
    model: Model,
    aux: Mapping[str, Model],
    num_slots: int,
    context: int,
    platform: str,
) -> tuple[float, ...]:
    """Estimated seconds of a step for each of a strategy's choices.

    Devices that share the model make the same choices as one, so its text takes as many forwards.

    Args:
        strategy: One that `weighs_costs`: its `cells` give the sizes of each choice's passes.
        model, aux: The networks; only shapes and types of their weights are read.
        context: Cached tokens a slot.
        platform: Of the device, in JAX's words.
    """
    speed = CPU if platform == "cpu" else ACCELERATOR
    sizes = num_slots, context, speed

    def step_s(target_cells: int, draft_cells: int) -> float:
        spent = speed.step_s + _estimate_pass_s(model, target_cells, *sizes)
        for draft in aux.values():
            spent += _feed_s(draft, num_slots * target_cells, speed)
            if draft_cells:
                spent += speed.further_s + _estimate_pass_s(draft, draft_cells, *sizes)
        return spent

    return tuple(step_s(*cells) for cells in strategy.cells)


def _estimate_pass_s(network: Model, cells: int, rows: int, context: int, speed: Speed) -> float:
    params = {name: leaf for name, leaf in network.shapes.items() if name in _DECODER}
    sizes = rows, cells, context, speed.reads, network.kv_dtype
    work = pass_work(params, network.config, *sizes)
    return _both_s(*work, speed) + speed.layer_s * network.config.num_layers


def _feed_s(draft: Model, rows: int, speed: Speed) -> float:
    """Seconds to store so many rows in a draft's cache: products with its own projections."""
    leaves = jax.tree.leaves([leaf for name, leaf in draft.shapes.items() if name not in _DECODER])
    moved = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return _both_s(moved, 2 * rows * sum(leaf.size for leaf in leaves), speed)


def _both_s(moved: float, operations: float, speed: Speed) -> float:
    parts = moved / speed.bytes_s, operations / speed.ops_s
    return max(parts) + min(parts) / 2


def pass_work(
    params: Any,
    cfg: DenseConfig,
    rows: int,
    cells: int,
    context: float,
    reads: float = 1.0,
    kv_dtype: Any = None,
    touched: float | None = None,
) -> tuple[float, float]:
    """Bytes and operations of a pass over `cells` positions of each row.

    Weights but the embedding are read once, the context of each row `reads` times. Every cell gets
    logits, which are never written.

    Args:
        kv_dtype: Of the cache; None: the embedding's.
        touched: As in `weights`.
    """
    read, used = weights(params, cfg, rows * cells, touched)
    cached = attention = 0.0
    for (heads, size), seen in layer_reads(cfg, context):
        cached += 2 * heads * size * seen * rows
        attention += 4 * size * cfg.num_heads * (seen + cells) * rows * cells
    size = params["embed"].dtype.itemsize
    kv_size = size if kv_dtype is None else kv_dtype.itemsize
    return read * size + reads * cached * kv_size, 2 * used * rows * cells + attention


def layer_reads(cfg: DenseConfig, context: float) -> Iterator[tuple[tuple[int, int], float]]:
    """For each layer its KV heads and their size, and how much of a context it reads."""
    for i in range(cfg.num_layers):
        reach = cfg.reach(i)
        yield cfg.heads(i), context if reach is None else min(context, reach)


def weights(
    params: Any, cfg: DenseConfig, cells: int, touched: float | None = None
) -> tuple[float, float]:
    """Weights that a step of so many cells reads, and those that one cell is multiplied with.

    Of the experts so many a layer are `touched`, or as many as random routing hits. Both are in
    weights of the type of the embedding, taken for 16 bits where there are matrices in 8 bits.
    """
    read = used = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        name = path[-1].key
        if name == "embed" and "lm_head" in params:
            continue
        hit = share = 1.0
        if isinstance(cfg, MoEConfig) and name.startswith("experts"):
            share = cfg.experts_per_token / cfg.num_experts
            hit = 1 - (1 - share) ** cells if touched is None else touched / cfg.num_experts
        size = leaf.values.size / 2 if is_quantized(leaf) else leaf.size
        read += size * hit
        # Half the bytes; a head is multiplied at the rate of 16 bits (but see
        # `bench.roofline.step_parts`), all else at twice that.
        used += size * (2 if isinstance(leaf, Fp8Head) else share)
    return read, used


# --- what the scheduler reads -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MeasuredCost:
    """Seconds of programs by their sizes.

    Attributes:
        decode: One decode step, by slots and pages.
        prefill: One pass, by kind, then by tokens and pages.
    """

    decode: Mapping[tuple[int, int], float]
    prefill: Mapping[str, Mapping[tuple[int, int], float]]

    def decode_s(self, rows: int, columns: int) -> float:
        """One decode step of a slot bucket over a page bucket."""
        return self.decode[rows, columns]

    def prefill_s(self, size: int, columns: int, kind: str) -> float:
        """One prefill pass."""
        return self.prefill[kind][size, columns]


# --- measured programs --------------------------------------------------------------------------


def calibrate(
    runner: Any,
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = BUDGET_S,
) -> MeasuredCost:
    """Time the programs of a runner that holds no request, and reset it.

    Args:
        runner: A `ModelRunner`.
        clock: Seconds.
        budget_s: Once so much time has passed, a program is timed once, not three times.
    """
    layout: EngineLayout = runner.layout
    until = clock() + budget_s

    def timed(measure: Callable[..., float], sizes: Sequence[int], kind: str | None):
        return {
            (size, columns): _typical(
                functools.partial(measure, runner, clock, size, columns, kind), clock() < until
            )
            for size, columns in itertools.product(sizes, layout.page_buckets)
        }

    decode = timed(_step_s, layout.slot_buckets, None)
    kinds = pass_kinds(layout)
    cost = MeasuredCost(
        decode, {kind: timed(_pass_s, layout.prefill_buckets, kind) for kind in kinds}
    )
    runner.reset()
    return cost


def _typical(measure: Callable[[], float], repeats: bool) -> float:
    first = measure()
    if first > SLOW_S or not repeats:
        return first
    more = [measure() for _ in range(REPEATS - 1)]
    return statistics.median([first, *more])


def _step_s(runner: Any, clock: Callable[[], float], rows: int, columns: int, kind: None) -> float:
    """One decode step of so many slots."""
    slots = _Slots(runner, clock, rows, columns, SHORT + LONG)
    (short_s, short), (long_s, long) = slots.run(SHORT), slots.run(LONG)
    return _each_s((short_s, long_s), (short, long))


def _pass_s(runner: Any, clock: Callable[[], float], size: int, columns: int, kind: str) -> float:
    """One prefill pass over the last tokens that the pages hold."""
    layout: EngineLayout = runner.layout
    first = max(0, columns * layout.page_size - size) // layout.block_size * layout.block_size
    first = 0 if kind == "full" else first
    end = first + size
    pages = np.full((columns,), -1, np.int32)
    runner.admit(0, made_up(layout, columns, SHORT + LONG))
    times = []
    for passes in (SHORT, LONG):
        runner.wait()
        began = clock()
        for _ in range(passes):
            runner.prefill(0, (0,) * size, first, end, end, False, pages, size, kind)
        runner.wait()
        times.append(clock() - began)
    return _each_s(times, (SHORT, LONG))


def _each_s(times: Sequence[float], counts: Sequence[int]) -> float:
    """Seconds of one step, from a short and a long run.

    The long run alone decides where the texts ended early or the clock does not separate the runs:
    a step with no cost would leave no time for prefill.
    """
    if counts[1] > counts[0] and times[1] > times[0]:
        return (times[1] - times[0]) / (counts[1] - counts[0])
    return times[1] / max(1, counts[1])


def time_choices(
    runner: Any, clock: Callable[[], float] = time.perf_counter
) -> dict[int, Sequence[float]]:
    """Seconds of one step for each of a strategy's choices, cheap ones first, by slots.

    Some numbers of slots stand in for those below them. The runner is reset at the end.

    Args:
        runner: As of `calibrate`; its strategy `weighs_costs`. Its `choice_costs` are lost.
    """
    layout: EngineLayout = runner.layout
    columns = next((n for n in layout.page_buckets if n * layout.page_size >= USUAL_TEXT), None)
    columns = layout.page_buckets[-1] if columns is None else columns
    times = {}
    for rows in _spread(layout.slot_buckets):
        count = len(runner.strategy.choices)
        slots = _Slots(runner, clock, rows, columns, count * REPEATS * (FEW + MANY))
        each = [_choice_s(runner, slots, choice, count) for choice in range(count)]
        times[rows] = tuple(itertools.accumulate(each, max))  # a wider choice costs no less
    runner.reset()
    return times


def _spread(sizes: Sequence[int]) -> list[int]:
    """The first, the last, and between them each that is `CHOICE_STEP` times the one before."""
    found: list[int] = []
    for size in sizes:
        if not found or size >= CHOICE_STEP * found[-1] or size == sizes[-1]:
            found.append(size)
    return found


def _choice_s(runner: Any, slots: "_Slots", choice: int, num_choices: int) -> float:
    """Seconds of a step with this choice forced: the others have an infinite cost."""
    costs = [1.0 if other == choice else float("inf") for other in range(num_choices)]
    runner.choice_costs = {slots.count: costs}
    slots.run(FEW)

    def once_s() -> float:
        times, counts = zip(*(slots.run(steps) for steps in (FEW, MANY)), strict=True)
        if counts != (FEW, MANY):  # the texts ended
            slots.begin()
            times, counts = zip(*(slots.run(steps) for steps in (FEW, MANY)), strict=True)
        return _each_s(times, counts)

    return statistics.median(once_s() for _ in range(REPEATS))


class _Slots:
    """Slots that decode made-up requests with room for so many steps."""

    def __init__(
        self, runner: Any, clock: Callable[[], float], count: int, columns: int, room: int
    ):
        self.count, self._runner, self._clock = count, runner, clock
        self._rows = np.arange(count, dtype=np.int32)
        self._pages = np.full((count, columns), -1, np.int32)
        self._placement = made_up(runner.layout, columns, room)
        self.begin()

    def begin(self) -> None:
        """Start the requests over."""
        for slot in range(self.count):
            self._runner.admit(slot, self._placement)
            begin(self._runner, slot, self._placement.prompt_len, self._pages[slot])

    def run(self, steps: int) -> tuple[float, int]:
        """Seconds of one dispatch of so many steps, and the steps that ran."""
        self._runner.wait()
        began = self._clock()
        chunk = self._runner.decode(self._rows, self.count, self._pages, steps, False)
        fetched = self._runner.fetch(chunk)
        return self._clock() - began, fetched.steps


def begin(runner: Any, slot: int, prompt_len: int, pages: np.ndarray) -> None:
    """Let a slot decode; a causal prompt needs a pass over its last token."""
    layout: EngineLayout = runner.layout
    if not layout.is_token_causal:
        runner.begin(slot)
        return
    size = layout.prefill_buckets[0]
    runner.prefill(slot, (0,), prompt_len - 1, prompt_len, prompt_len, True, pages, size, "causal")
