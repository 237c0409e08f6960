"""Accuracy against tokens per forward: every strategy that `builtin:tiny-sdar` can be decoded with.

    python benchmarks/strategies_accuracy.py --raw raw --out strategies_accuracy_h200.json

A *section* is one compiled program: a strategy and its sizes. Its settings are values of its knobs
(thresholds), which are data; each is judged on the same held-out problems of both halves, greedy.
The result of each problem is written to `--raw` section by section. Sections that are there already
are skipped, so a run that was cut short goes on. The figures are then made from the whole folder
(`--sections none` measures nothing and runs on any machine): share of right answers, tokens per
forward with and without commit passes, 95 % intervals, and the paired difference to plain block
diffusion at its default threshold. `--problems 16` is quick enough for a CPU.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
import traceback
from pathlib import Path

import numpy as np

import dllm_jax as dj
from dllm_jax.api.strategy import check_fit
from dllm_jax.bench.numbers import environment
from dllm_jax.strategies import (
    AR,
    D2F,
    BlockDiffusion,
    DMax,
    Edit,
    FastDLLMV2,
    FullSequence,
    MultiBD,
    load_strategy,
)
from dllm_jax.tasks import evaluate, summary
from dllm_jax.tasks.problems import problem

HALVES = ("plain", "hard")
BASE = ("block_diffusion", {"accept_threshold": 0.9})
ACCEPT = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
ROOT = Path(__file__).resolve().parents[1]
CREDIT = f"{ROOT / 'examples' / 'credit_decoding.py'}:CreditDecoding"


@dataclasses.dataclass(frozen=True)
class Section:
    """One program and its settings.

    Attributes:
        untrained: What the strategy does that the model never saw in training; None: nothing.
    """

    strategy: object
    settings: list
    untrained: str | None = None


def grid(**values):
    """All combinations, as settings."""
    return [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]


def sections():
    """Everything that is measured, by name; the first ones matter most."""
    accept = {"accept_threshold": ACCEPT}
    several = grid(**accept, add_block_threshold=(0.1,))
    several += grid(accept_threshold=(0.7, 0.9, 0.95), add_block_threshold=(0.5, 0.9))
    merging = grid(accept_threshold=(0.5, 0.9), token_merge_weight=(1.0,))
    # An edit_threshold of 1 is no edits.
    edits = grid(**accept, edit_threshold=(1.0,)) + grid(
        accept_threshold=(0.7, 0.9), edit_threshold=(0.5, 0.9)
    )
    revising = "the model never saw a wrong token to mend"
    mixing = "the model never saw a mixture of embeddings, nor a wrong token to mend"
    unseen = "no row ever saw the ones behind its block"
    full = "no row of a prompt ever saw the ones behind its block"
    return {
        "block_diffusion": Section(BlockDiffusion(), grid(**accept)),
        "one token a forward": Section(evaluate.one_token(32), grid(accept_threshold=(0.9,))),
        "multi_bd, 4 blocks": Section(MultiBD(buffer_size=4), several),
        "multi_bd, 2 blocks": Section(MultiBD(buffer_size=2), several),
        "block_diffusion, entropy": Section(
            BlockDiffusion(remasking="entropy"),
            grid(entropy_bound=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
        ),
        "credit_decoding, 1 block": Section(load_strategy(CREDIT, buffer_size=1), grid(**accept)),
        "credit_decoding, 4 blocks": Section(load_strategy(CREDIT, buffer_size=4), grid(**accept)),
        "edit, 1 block": Section(Edit(buffer_size=1), edits, revising),
        "edit, 4 blocks": Section(Edit(buffer_size=4), edits, revising),
        "d2f, 4 blocks": Section(D2F(buffer_size=4), grid(**accept), full),
        "dmax, 1 block": Section(DMax(buffer_size=1), merging, mixing),
        "dmax, 2 blocks": Section(DMax(buffer_size=2), merging, mixing),
        # A window for the longest prompt of the problems and its text.
        "full_sequence, blocks of 32": Section(
            FullSequence(block_length=32, buffer_size=10), grid(accept_threshold=(0.9,)), unseen
        ),
    }


REFUSED = {"ar": AR(), "fast_dllm_v2": FastDLLMV2()}  # what the model cannot be decoded with at all


def measure(model, section, problems, prompts, args):
    """Every problem under every setting of a section: arrays [setting, problem]."""
    began = time.perf_counter()
    outcomes = evaluate.sweep(
        model,
        section.strategy,
        section.settings,
        evaluate.ProblemSet(problems, prompts=prompts, max_tokens=args.max_tokens),
        batch_size=args.batch_size,
    )
    arrays = {
        name: np.stack([getattr(one, name) for one in outcomes])
        for name in ("right", "tokens", "forwards", "denoise", "blocks")
    }
    arrays["stopped"] = np.array([[r == "stop" for r in one.finish] for one in outcomes])
    facts = {
        "strategy": repr(section.strategy),
        "settings": section.settings,
        "untrained": section.untrained,
        "wall_s": time.perf_counter() - began,
        "decode_s": sum(one.seconds for one in outcomes),
    }
    return arrays, facts


def figures(raw):
    """The report's sections, from the folder of what was measured."""
    base = _outcomes(raw, BASE[0], BASE[1])
    measured = {}
    for path in sorted(raw.glob("*.json")):
        name = path.stem
        facts = json.loads(path.read_text(encoding="utf-8"))
        rows = []
        for setting in facts["settings"]:
            mine = _outcomes(raw, name, setting)
            halves = {half: _figures(base[half], mine[half]) for half in HALVES}
            rows.append({"knobs": setting, "halves": halves})
        measured[name] = facts | {"settings": rows}
    return measured


def _outcomes(raw, name, setting):
    """Outcomes of one setting by half."""
    facts = json.loads((raw / f"{name}.json").read_text(encoding="utf-8"))
    index = facts["settings"].index(setting)
    with np.load(raw / f"{name}.npz") as arrays:
        mine = {key: np.split(arrays[key][index].astype(int), len(HALVES)) for key in arrays}
    return {
        half: evaluate.Outcome(
            right=mine["right"][i].astype(bool),
            tokens=mine["tokens"][i],
            forwards=mine["forwards"][i],
            denoise=mine["denoise"][i],
            blocks=mine["blocks"][i],
            texts=(),
            finish=tuple("stop" if stopped else None for stopped in mine["stopped"][i]),
            seconds=0.0,  # settings share batches: no setting has seconds of its own
        )
        for i, half in enumerate(HALVES)
    }


def _figures(base, mine):
    """One setting on one half, and beside the base on the same problems."""
    found = summary.summarise(mine) | summary.compare(base, mine)
    for name in ("seconds", "tok_s", "tokens_per_forward_per_request"):
        del found[name]
    found["won"] = int((mine.right & ~base.right).sum())
    found["lost"] = int((base.right & ~mine.right).sum())
    return found


def refusals(model):
    """What the model says to the strategies it cannot be decoded with."""
    said = {}
    for name, strategy in REFUSED.items():
        try:
            check_fit(model, strategy)
        except ValueError as error:
            said[name] = str(error)
    return said


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:tiny-sdar")
    parser.add_argument("--problems", type=int, default=2048, help="of each half")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=evaluate.MAX_TOKENS)
    parser.add_argument("--sections", help="names, separated by semicolons; or none")
    parser.add_argument("--raw", type=Path, required=True, help="folder of what was measured")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    every = sections()
    wanted = list(every) if args.sections is None else args.sections.split(";")
    if args.sections == "none":
        wanted = []
    args.raw.mkdir(parents=True, exist_ok=True)
    about = args.raw / "about"
    failed = []
    if wanted:
        model = dj.load(args.model, dtype="float32")
        facts = {
            "command": "benchmarks/strategies_accuracy.py",
            "model": args.model,
            "dtype": str(model.params["embed"].dtype),
            **environment(),
            "problems": args.problems,
            "seed": args.seed,
            "batch_size": args.batch_size,
            "max_tokens": args.max_tokens,
            "greedy": True,
            "base": {"section": BASE[0], "knobs": BASE[1]},
            "refused": refusals(model),
        }
        facts["commit"] = args.commit or facts["commit"]
        if about.exists():
            same = ("model", "problems", "seed", "max_tokens")
            before = json.loads(about.read_text(encoding="utf-8"))
            if any(before[key] != facts[key] for key in same):
                parser.error(f"--raw {args.raw} holds another measurement; give another folder")
        about.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        problems = [
            problem(half, args.seed, index, heldout=True)
            for half in HALVES
            for index in range(args.problems)
        ]
        prompts = evaluate.encode(model, problems)
    for name in wanted:
        if (args.raw / f"{name}.json").exists():
            print(f"{name}: measured before", flush=True)
            continue
        try:
            arrays, facts = measure(model, every[name], problems, prompts, args)
        except Exception:  # the others are worth their time
            traceback.print_exc()
            failed.append(name)
            continue
        small = {key: leaf.astype(np.int16) for key, leaf in arrays.items()}
        np.savez_compressed(args.raw / f"{name}.npz", **small)
        (args.raw / f"{name}.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        print(
            f"{name}: {len(facts['settings'])} settings in {facts['wall_s']:.1f} s, decoding "
            f"{facts['decode_s']:.1f} s",
            flush=True,
        )
    report = json.loads(about.read_text(encoding="utf-8")) | {"sections": figures(args.raw)}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))
    print(f"failed: {', '.join(failed)}" if failed else "all there", flush=True)
    return 1 if failed else 0


def table(report):
    """The figures for people."""
    lines = [f"{report['model']}, {report['device']}, {report['problems']} problems of each half"]
    for name, section in report["sections"].items():
        lines.append(
            name + (f" (untrained: {section['untrained']})" if section["untrained"] else "")
        )
        for row in section["settings"]:
            knobs = ", ".join(
                f"{k.removesuffix('_threshold')} {v}" for k, v in row["knobs"].items()
            )
            measured = [
                f"{100 * one['exact']['value']:6.2f} % ({one['exact_points']['value']:+6.2f} "
                f"[{one['exact_points']['ci95'][0]:+.2f}, {one['exact_points']['ci95'][1]:+.2f}]) "
                f"{one['tokens_per_forward']['value']:6.2f} "
                f"{one['tokens_per_forward_without_commits']['value']:6.2f}"
                for one in row["halves"].values()
            ]
            lines.append(f"  {knobs:<34} {'  |  '.join(measured)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
