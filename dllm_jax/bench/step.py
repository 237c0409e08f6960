"""The time of one decode step of a given shape: in a bare loop, in `LLM.generate`, and its floor.

Data flow: shape -> an engine of this size -> `LLM.generate` over `steps` forwards (with prompts in
the prefix cache) -> the same compiled program in a bare loop -> floor -> a profile of that loop.
The work is fixed: a step accepts its one surest token, so every forward has the whole window; a
canvas takes all steps of its schedule. The tokens come from the readout.
"""

import dataclasses
import functools
import gc
import statistics
from collections.abc import Sequence
from typing import Any

import jax

from dllm_jax.api.llm import LLM
from dllm_jax.bench import measure, profile, roofline
from dllm_jax.bench.head import has_head, ids_of_device
from dllm_jax.bench.numbers import check_outputs, check_own, device_kind, mean_context, setting
from dllm_jax.bench.rounds import Rounds, pass_ms
from dllm_jax.bench.throughput import run
from dllm_jax.bench.workload import Lengths, Work, random_work
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.strategies import AR, DFlash, DiffusionGemma, MultiBD

NOTHING = 1.0  # an unreachable threshold: no probability is above it
PREFILL = 1024  # tokens of a pass that fills the prefix cache; it is not timed
PROFILE_STEPS = 16
USUAL_CONTEXT, USUAL_STEPS, MIN_STEPS = 512, 64, 8
# A GPU lowers its clocks under sustained power: an H200 took 4 % longer for SDAR-8B.
LONG_RUN_S = 2.0
PAGE = 64
CANVAS_STEPS = 16  # steps of a canvas; the release ends after 12 to 16 of its 48


@dataclasses.dataclass(frozen=True)
class Shape:
    """Slots x blocks x tokens of a block; `1x4` uses the model's block size."""

    slots: int
    blocks: int
    block_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse `1x4` or `1x4x32`.

        Raises:
            ValueError: `text` has neither form.
        """
        parts = text.split("x")
        if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(f"{text!r} is no shape; write slots x blocks, e.g. 1x4 or 1x4x32")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        size = "" if self.block_size is None else f"x{self.block_size}"
        return f"{self.slots}x{self.blocks}{size}"


def step_strategy(model: Any, shape: Shape, draft: Any = None) -> Any:
    """The strategy to measure: `MultiBD`, `AR` for a model without masks, `DFlash` with a drafter.

    A canvas model takes `CANVAS_STEPS` steps a canvas; with two blocks, one pass stores a canvas
    and begins the next. `MultiBD` and `AR` accept one token a step. A round of `DFlash` verifies a
    block of the shape, by default of the size that the drafter was trained for; its time does not
    depend on the number of accepted tokens.

    Raises:
        ValueError: The shape has a window, and the model decodes token by token; or it has more
            than two blocks, and the model decodes canvases.
    """
    if draft is not None:
        if shape.blocks != 1:
            raise ValueError(
                f"shape {shape}: drafts are judged a block at a time; use {shape.slots}x1, or "
                f"{shape.slots}x1xWIDTH"
            )
        width = shape.block_size or draft.config.block_size
        return DFlash(width=width).bind(draft.config)
    if model.config.mask_token_id >= 0:
        size = shape.block_size or model.defaults.block_size
        return MultiBD(
            accept_threshold=NOTHING,
            add_block_threshold=0.0,
            block_size=size,
            buffer_size=shape.blocks,
        )
    if not model.config.shift:
        if shape.blocks > 2:
            raise ValueError(
                f"shape {shape}: {model.defaults.family} denoises one canvas beside one that is "
                f"stored; use {shape.slots}x1 or {shape.slots}x2"
            )
        return DiffusionGemma(
            max_denoising_steps=float(CANVAS_STEPS),
            confidence_threshold=0.0,
            early_slots=shape.slots if shape.blocks > 1 else 0,
            block_size=shape.block_size or model.defaults.block_size,
            buffer_size=shape.blocks,
        )
    if shape.blocks != 1 or shape.block_size not in (None, 1):
        raise ValueError(
            f"shape {shape}: {model.defaults.family} decodes token by token; use {shape.slots}x1"
        )
    return AR()


def text_len(strategy: Any, steps: int, draft: Any = None) -> int:
    """Room that a text needs, in tokens, so that all `steps` forwards do the same work.

    The window must not reach past the end of the text, since dead cells cost nothing.
    """
    if isinstance(strategy, DiffusionGemma):
        canvases = -(-(steps + measure.FEW_STEPS) // CANVAS_STEPS) + 1
        return canvases * strategy.block_size
    # If a block is nearly full, the next one gets a token too: at most two tokens a step.
    each = 2 if draft is None else strategy.block_size
    window = strategy.block_size * strategy.buffer_size
    return each * (steps + measure.FEW_STEPS) + 2 * window


def context_len(model: Any, strategy: Any, context: int, steps: int, draft: Any = None) -> int:
    """Tokens of the prompt: `context` in whole blocks.

    Raises:
        ValueError: Context and text exceed the positions of the model, or no canvas would end.
    """
    if isinstance(strategy, DiffusionGemma) and steps <= CANVAS_STEPS:
        raise ValueError(
            f"{steps=}: a canvas takes {CANVAS_STEPS} and then shows its text; use "
            f"{CANVAS_STEPS + 1} or more"
        )
    size = strategy.block_size
    context = max(size, context // size * size)
    longest = context + text_len(strategy, steps, draft)
    if longest > model.config.max_position:
        raise ValueError(
            f"{context=} and the text behind it need {longest} positions, the model has "
            f"{model.config.max_position}; lower --context, --steps or the blocks"
        )
    return context


def usual_sizes(
    model: Any,
    strategies: Sequence[Any],
    context: int | None = None,
    steps: int | None = None,
    draft: Any = None,
) -> tuple[int, int]:
    """Context and steps; None is the usual number, or less if a strategy has no room for it.

    The usual steps are reduced only if they would leave less than an eighth of the positions for
    context.
    """
    most = model.config.max_position

    def room(steps: int) -> int:
        """The most tokens of context of a text that still takes `steps`."""
        return most - max(text_len(strategy, steps, draft) for strategy in strategies)

    if steps is None:
        left = most // 8 if context is None else context
        tried = range(USUAL_STEPS, MIN_STEPS, -1)
        steps = next((count for count in tried if room(count) >= left), MIN_STEPS)
    return (min(USUAL_CONTEXT, room(steps)) if context is None else context), steps


def measure_step(
    model: Any,
    shape: Shape,
    context: int = USUAL_CONTEXT,
    *,
    steps: int = USUAL_STEPS,
    repeats: int = 5,
    attention_implementation: str | None = None,
    with_profile: bool = False,
    draft: Any = None,
    batch_invariant: bool = False,
) -> dict[str, Any]:
    """Measure one step of `shape`.

    Args:
        context: Tokens of each prompt, rounded down to whole blocks.
        steps: Forwards of a run; the text grows by about one token a forward.
        repeats: Runs whose median counts, after one that fills the prefix cache.
        with_profile: Also report the kernels of the step.
        draft: A drafter for the model; a step is then a round of drafts.
        batch_invariant: As the engine takes it (docs/same_tokens.md).

    Returns:
        The row of docs/benchmarks.md.

    Raises:
        ValueError: The shape does not fit the model, a request failed, steps did other work, or
            the tokens do not come from the readout.
    """
    strategy = step_strategy(model, shape, draft)
    context = context_len(model, strategy, context, steps, draft)
    text = text_len(strategy, steps, draft)
    how = shape.slots, context, text, attention_implementation, draft
    llm = _engine(model, strategy, *how, batch_invariant=batch_invariant)
    cells = strategy.block_size * strategy.buffer_size
    try:
        work = [
            dataclasses.replace(one, params=dataclasses.replace(one.params, max_nfe=steps))
            for one in random_work(
                model, shape.slots, Lengths(context, context), Lengths(text, text), seed=0
            )
        ]
        program = measure.decode_program(llm.engine, *_bucket(llm))
        found = _generated(llm, work, steps, repeats, program)
        found |= _bare(llm, context, steps, repeats, text)
        found["num_devices"] = roofline.num_devices(model)
        found["reductions"] = roofline.reductions_ms(model, shape.slots * cells, device_kind())
        if found["reductions"] is not None:
            found["reductions"]["in_program"] = measure.num_reductions(program)
        if draft is None:
            found |= _floors(model, shape.slots, strategy, found)
        else:
            found |= _round(llm, shape.slots, context, found)
        if with_profile:
            found["profile"] = _profile(llm, context, text, program)
    finally:
        del llm
        gc.collect()  # free the pool before the next shape's is allocated
    stats = jax.devices()[0].memory_stats() or {}
    size = strategy.block_size if draft is None else strategy.width
    return {
        "shape": f"{shape.slots}x{strategy.buffer_size}x{size}",
        "slots": shape.slots,
        "context": context,
        "batch": shape.slots,
        **found,
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def _engine(
    model: Any,
    strategy: Any,
    slots: int,
    context: int,
    text: int,
    implementation: str | None,
    draft: Any,
    warm_up: bool = True,
    batch_invariant: bool = False,
) -> LLM:
    """An engine with one decode and one prefill program, compiled now or at their first run."""
    longest = context + text
    window = strategy.block_size * strategy.buffer_size
    columns = -(-max(longest + strategy.block_size, window) // PAGE)
    return LLM(
        model,
        strategy,
        attention_implementation=implementation,
        draft=draft,
        progress=False,
        calibrate=False,
        warm_up=warm_up,
        config=EngineConfig(
            max_num_seqs=slots,
            max_model_len=longest,
            page_size=PAGE,
            num_pages=slots * columns + slots,
            slot_buckets=(slots,),
            page_buckets=(columns,),
            prefill_buckets=(PREFILL if batch_invariant else min(PREFILL, context),),
            batch_invariant=batch_invariant,
        ),
    )


def _generated(
    llm: LLM, work: list[Work], steps: int, repeats: int, program: str
) -> dict[str, Any]:
    """Wall time of a step in `LLM.generate`, and evidence that the steps did the work."""
    run(llm, [work], use_tqdm=False)  # leaves the prompts in the prefix cache
    runs = []
    for _ in range(repeats):
        ran = run(llm, [work], use_tqdm=False)
        check_outputs(ran.outputs)
        runs.append(ran)
    runs.sort(key=lambda one: one.walls_s[0])
    ran = runs[len(runs) // 2]
    context = mean_context(ran)
    pass_ms = {
        bucket: measure.prefill_pass_ms(llm.engine, *bucket, first=int(context))
        for bucket in ran.passes
    }
    prefill_s = sum(count * pass_ms[bucket] for bucket, count in ran.passes.items()) / 1e3
    ran_steps = ran.counts["num_steps"]
    nfe = sum(output.metrics.nfe for output in ran.outputs)
    tokens = [token for o in ran.outputs for token in o.outputs[0].token_ids]
    occupancy = nfe / (ran_steps * len(work))
    if any(output.metrics.nfe != steps for output in ran.outputs) or occupancy < 0.5:
        raise ValueError(
            f"{nfe} forwards of {len(work)} requests in {ran_steps} steps instead of {steps} each "
            "at once; the steps did not do the requested work"
        )
    readout = {
        "distinct_tokens": len(set(tokens)),
        "head_in_program": has_head(program, ids_of_device(llm.model)),
    }
    if not isinstance(llm.strategy, DiffusionGemma):  # a canvas starts from noise
        readout["first_token_matches_dense"] = measure.first_token_is_the_models(llm)
    check_own(readout)
    settings = setting(llm)
    names = ("strategy", "thresholds", "block_size", "buffer_size", "num_pages", "page_size")
    walls = [(one.walls_s[0] - prefill_s) / ran_steps * 1e3 for one in runs]
    return {
        **{name: settings[name] for name in (*names, "max_model_len")},
        "mode": "fixed",
        "steps": ran_steps,
        "nfe": nfe,
        "prefill_nfe": sum(output.metrics.prefill_nfe for output in ran.outputs),
        "visible_tokens": len(tokens),
        "tokens_per_forward": len(tokens) / nfe,
        "mean_context": context,
        "occupancy": occupancy,
        "wall_s": ran.walls_s[0],
        "prefill_s": prefill_s,
        "tok_s": len(tokens) / ran.walls_s[0],
        "step_ms": statistics.median(walls),
        "step_ms_range": [min(walls), max(walls)],
        "late_compiles": sum(one.counts["num_late_compiles"] for one in runs),
        "readout": readout,
        "tokens": tokens[:8],
    }


def _bare(llm: LLM, context: int, steps: int, repeats: int, text: int) -> dict[str, Any]:
    run = functools.partial(
        measure.decode_step_samples, llm.engine, *_bucket(llm), context, steps, repeats, text
    )
    after_s = 0.0 if jax.default_backend() == "cpu" else LONG_RUN_S
    found = {}
    for name, samples in (("bare_step_ms", run()), ("long_run_step_ms", run(after_s=after_s))):
        found[name] = statistics.median(samples)
        found[f"{name}_range"] = [min(samples), max(samples)]
    return found


def _bucket(llm: LLM) -> measure.Decode:
    """Rows and columns of the one decode program."""
    layout = llm.engine.layout
    return layout.slot_buckets[-1], layout.page_buckets[-1]


def _floors(model: Any, slots: int, strategy: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Two floors, the ratios to them, and the bytes and operations of the step."""
    size, blocks, context = strategy.block_size, strategy.buffer_size, found["mean_context"]
    expects = isinstance(strategy, DiffusionGemma)
    blocks = 1 if expects else blocks  # the other block is only stored
    kind = device_kind()
    floor = roofline.floor_ms(model, slots, size * blocks, context, kind)
    parts = roofline.step_parts(model, slots, blocks, size, context, expects)
    each = None if parts is None else roofline.parts_ms(parts, kind)
    in_turn = None if each is None else sum(each.values())
    step_ms, bare_ms = found["step_ms"], found["bare_step_ms"]
    return {
        "host_overhead": 1 - bare_ms / step_ms,
        "experts_read": roofline.experts_read(model, slots * size * blocks),
        "floor_ms": floor,
        "step_over_floor": floor and step_ms / floor,
        "bare_over_floor": floor and bare_ms / floor,
        "floor_parts_ms": each,
        "floor_in_turn_ms": in_turn,
        "step_over_floor_in_turn": in_turn and step_ms / in_turn,
        "bare_over_floor_in_turn": in_turn and bare_ms / in_turn,
        "bytes": parts and sum(moved for moved, _ in parts.values()),
        "operations": parts and sum(ops for _, ops in parts.values()),
    }


def _round(llm: LLM, slots: int, context: int, found: dict[str, Any]) -> dict[str, Any]:
    """The times of the parts of a round, and the floor of both passes."""
    width = llm.strategy.width
    draft_ms = pass_ms(llm.engine, *_bucket(llm), context)
    rounds = Rounds(slots, (width,), (1.0,), (found["bare_step_ms"],), draft_ms)
    floor = rounds.floor_ms(llm.engine, found["mean_context"])
    step_ms, bare_ms = found["step_ms"], found["bare_step_ms"]
    unknown = ("floor_parts_ms", "floor_in_turn_ms", "step_over_floor_in_turn")
    unknown += ("bare_over_floor_in_turn", "bytes", "operations")
    return {
        "width": width,
        "draft_ms": draft_ms,
        "verify_ms": bare_ms - draft_ms,
        "host_ms": step_ms - bare_ms,
        "host_overhead": 1 - bare_ms / step_ms,
        "floor_ms": floor,
        "step_over_floor": floor and step_ms / floor,
        "bare_over_floor": floor and bare_ms / floor,
        **dict.fromkeys(unknown),
    }


def _profile(llm: LLM, context: int, text: int, program: str) -> dict[str, Any]:
    ids, layers = ids_of_device(llm.model), llm.model.config.num_layers
    trace, ran = measure.decode_trace(llm.engine, *_bucket(llm), context, PROFILE_STEPS, text)
    return profile.shares(trace, profile.origins(program, ids), ran, layers)
