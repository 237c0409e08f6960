"""`dllm-jax bench step`: one decode step by shape, next to its floor, as a table, JSON and a plot.

Data flow: command line -> the model, loaded once -> `dllm_jax.bench.step` for each shape -> lines.
"""

import argparse
import json
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.files import check_output, write_json
from dllm_jax.cli.flags import Group, flag, whole

SUMMARY = "one decode step of given shapes beside its floor, and the kernels it consists of"
KERNELS_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench step`."""
    parser.epilog = (
        "Greedy, fixed work: each step takes the one token it is surest of, in a window of blocks "
        "that are all being decoded. With --draft a step is a round of drafts, and S the cells "
        "that are judged. bare: the compiled step in a loop on the device. generate: "
        "wall time of LLM.generate over its steps. docs/benchmarks.md says how each is counted."
    )
    flags.add(
        parser,
        Group("", flags.DEBUG),
        flags.MODEL,
        flags.DRAFT,
        Group(
            "step",
            flag(
                "--shapes BxK[xS],...",
                "slots x blocks x tokens of a block (default: 1x1,1x4, the model's blocks; 1x1 "
                "where nothing is masked)",
                shapes,
            ),
            flag(
                "--context N",
                "tokens of each prompt (default: 512, or what the model has positions for)",
                whole(1),
            ),
            flag(
                "--steps N",
                "forwards of a run (default: 64, or what the model has positions for)",
                whole(8),
            ),
            flag("--repeats N", "runs; the median counts", whole(1), 5),
            flags.ATTENTION,
            flags.INVARIANT,
            flags.DEVICES,
        ),
        Group(
            "output",
            flag("--profile", "say how much of the step each kernel takes", bool),
            flag(
                "--plot PNG", "draw the steps under the device's roofline to PNG (default: no plot)"
            ),
            flags.AS_JSON,
            flag(
                "--output --out FILE",
                "write the JSON object to FILE as well, after each shape (default: no file)",
            ),
        ),
    )


def shapes(text: str) -> Any:
    """An argparse type: `1x1,8x4x32`."""
    from dllm_jax.bench.step import Shape

    try:
        return tuple(Shape.parse(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Measure each shape, print as it goes, write."""
    check_output(args.output)
    check_output(args.plot, "--plot")

    from dllm_jax.bench.numbers import environment
    from dllm_jax.bench.step import measure_step
    from dllm_jax.cli.sources import load_model

    model = load_model(args)
    draft = _draft(args, model)
    every, context, steps = _work(args, model, draft)
    beside = {} if draft is None else {"draft_model": draft.source}
    facts: dict[str, Any] = heading(model) | beside | environment()
    facts |= {"batch_invariant": args.batch_invariant, "rows": []}
    if not args.json:
        print("\n".join(first_lines(facts)), flush=True)
    for shape in every:
        row = measure_step(
            model,
            shape,
            context,
            steps=steps,
            repeats=args.repeats,
            attention_implementation=args.attention_implementation,
            with_profile=args.profile,
            draft=draft,
            batch_invariant=args.batch_invariant,
        )
        facts["rows"].append(row)
        if not args.json:
            print("\n".join(row_lines(row)), flush=True)
        if args.output is not None:
            write_json(args.output, facts)
    if args.plot is not None:
        from dllm_jax.bench.plot import draw_roofline

        draw_roofline(facts["rows"], facts["device"], args.plot)
    if args.json:
        print(json.dumps(facts), flush=True)
    return 0


def _draft(args: argparse.Namespace, model: Any) -> Any:
    """The drafter of a target, None without one."""
    from dllm_jax.api.drafts import bind_draft
    from dllm_jax.strategies import DFlash

    if args.draft is None:
        return None
    return bind_draft(DFlash(), args.draft, model).draft


def _work(args: argparse.Namespace, model: Any, draft: Any) -> tuple[tuple[Any, ...], int, int]:
    """Shapes, tokens of each prompt, and forwards of a run.

    Raises:
        UsageError: Some shape does not fit; nothing is measured or printed before.
    """
    from dllm_jax.api.strategy import check_fit
    from dllm_jax.bench.roofline import step_parts
    from dllm_jax.bench.step import context_len, step_strategy, usual_sizes

    has_window = draft is None and model.config.mask_token_id >= 0
    every = args.shapes or shapes("1x1,1x4" if has_window else "1x1")
    try:
        strategies = [step_strategy(model, shape, draft) for shape in every]
        for strategy in strategies:
            check_fit(model, strategy)
        context, steps = usual_sizes(model, strategies, args.context, args.steps, draft)
        for strategy in strategies:
            context_len(model, strategy, context, steps, draft)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.plot is not None and (draft is not None or step_parts(model, 1, 1, 1, 0) is None):
        what = "a round of drafts" if draft is not None else model.source
        raise UsageError(f"--plot: the work of {what} is not known by parts; leave --plot out")
    return every, context, steps


def heading(model: Any) -> dict[str, Any]:
    """The facts that all rows share."""
    import dataclasses

    import jax

    return {
        "command": "bench step",
        "model": model.source,
        "config": dataclasses.asdict(model.config),
        "dtype": str(jax.tree.leaves(model.params)[0].dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": model.kv_cache_dtype,
        "quantized_head": model.has_quantized_head,
        "mode": "fixed",
    }


def first_lines(facts: dict[str, Any]) -> list[str]:
    """The device, and the head of the table."""
    return [
        f"{facts['model']} {facts['quantization'] or facts['dtype']}, cache "
        f"{facts['kv_cache_dtype'] or facts['dtype']}, "
        f"{'batch invariant, ' * facts['batch_invariant']}on {facts['device']}, "
        f"jax {facts['jax']}, commit {facts['commit']}",
        f"{'shape':>10} {'context':>7} {'bare ms':>18} {'generate ms':>20} {'floor ms':>8} "
        f"{'in turn':>8}  bare, generate over the floor in turn",
    ]


def row_lines(row: dict[str, Any]) -> list[str]:
    """One shape as lines."""

    def spread(name: str) -> str:
        low, high = row[f"{name}_range"]
        return f"{row[name]:.3f} [{low:.2f} {high:.2f}]"

    floors, ratios = f"{'-':>8} {'-':>8}", "no floor known for this device"
    if row.get("draft_ms") is not None and row["floor_ms"] is not None:
        floors = f"{row['floor_ms']:>8.3f} {'-':>8}"
        ratios = f"of both passes: x{row['bare_over_floor']:.2f}, x{row['step_over_floor']:.2f}"
    elif row["floor_ms"] is not None and row["floor_in_turn_ms"] is not None:
        floors = f"{row['floor_ms']:>8.3f} {row['floor_in_turn_ms']:>8.3f}"
        ratios = f"x{row['bare_over_floor_in_turn']:.2f}, x{row['step_over_floor_in_turn']:.2f}"
    lines = [
        f"{row['shape']:>10} {row['context']:>7} {spread('bare_step_ms'):>18} "
        f"{spread('step_ms'):>20} {floors}  {ratios}"
    ]
    if row.get("draft_ms") is not None:
        lines.append(
            f"{'':>10} round: draft {row['draft_ms']:.3f} ms, verify {row['verify_ms']:.3f} ms, "
            f"host {row['host_ms']:.3f} ms"
        )
    lines.append(f"{'':>10} in the long run: bare {spread('long_run_step_ms')} ms")
    if row["floor_parts_ms"]:
        parts = (f"{name} {ms:.3f}" for name, ms in row["floor_parts_ms"].items())
        lines.append(f"{'':>10} floor in turn: {', '.join(parts)} ms")
    if row.get("experts_read") is not None:
        lines.append(
            f"{'':>10} experts of a layer read: {row['experts_read']:.1f}, as random routing has it"
        )
    if reductions := row.get("reductions"):
        floor = "" if reductions["ms"] is None else f", at least {reductions['ms']:.3f} ms"
        lines.append(
            f"{'':>10} {row['num_devices']} devices add {reductions['sums']} times "
            f"{reductions['bytes']:,} bytes{floor}; {reductions['in_program']} reductions in the "
            "program"
        )
    profile = row.get("profile")
    if profile is None:
        return lines
    lines.append(
        f"{'':>10} profile ({profile['what']}): {profile['busy_ms']:.3f} ms busy in "
        f"{profile['launches']:.0f} launches, {profile['span_ms']:.3f} ms from end to end"
    )
    for name, kind in profile["kinds"].items():
        lines.append(
            f"{'':>12} {name:<10} {kind['share']:>6.1%} {kind['ms'] * 1e3:>10.1f} us "
            f"{kind['launches']:>7.1f} x"
        )
    for kernel in profile["kernels"][:KERNELS_SHOWN]:
        lines.append(
            f"{'':>12} {kernel['kind']:<10} {kernel['share']:>6.1%} {kernel['ms'] * 1e3:>10.1f} us "
            f"{kernel['launches']:>7.1f} x  {kernel['name'][:80]}"
        )
    return lines
