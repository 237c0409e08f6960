"""What thresholds see of constrained texts: a token's probability, or its share of what is allowed.

    python benchmarks/constraint_confidence.py --problems 256 --output confidence.json

Held-out word problems are answered in JSON that the built-in model never saw, and in its own style
closed by its own last sentence. Each form is held to by a constraint, under both values of
`SamplingParams.constraint_confidence` and without a constraint: right answers, with what one value
has right and the other not, and written tokens a forward.
"""

import argparse
import json
import time
from pathlib import Path

FORMS = ("free", "own", "json")


def judged(form: str, text: str, problem) -> bool:
    """Whether a text has the right answer."""
    from dllm_jax.tasks.problems import is_correct

    if form != "json":
        return is_correct(text, problem)
    try:
        return str(json.loads(text)["answer"]) == problem.answer
    except (ValueError, KeyError, TypeError):
        return False


def main() -> None:
    """Run every form under both confidences; write and print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=("plain", "hard"), default="plain")
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--strategy", default="multi_bd")
    parser.add_argument("--forms", type=lambda text: text.split(","), default=FORMS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    import jax

    import dllm_jax as dj
    from dllm_jax.tasks.evaluate import held_out

    constraints = {
        "free": None,
        "own": dj.Regex(r"(.|\n)* The answer is -?\d+\."),
        "json": dj.JsonSchema(
            {
                "type": "object",
                "properties": {
                    "steps": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    "answer": {"type": "integer"},
                },
                "required": ["steps", "answer"],
            }
        ),
    }
    problems = held_out(args.half, args.problems, args.seed)
    chats = [[{"role": "user", "content": one.question}] for one in problems]
    facts = {
        "half": args.half,
        "problems": args.problems,
        "seed": args.seed,
        "strategy": args.strategy,
        "device": jax.devices()[0].device_kind,
        "rows": [],
    }
    config = dj.EngineConfig(max_num_seqs=args.slots, max_model_len=512, slot_buckets=(args.slots,))
    with dj.LLM("builtin:tiny-sdar", args.strategy, config=config, warm_up=False) as llm:
        for form in args.forms:
            right = {}
            for confidence in ("raw",) if form == "free" else ("raw", "plan"):
                params = dj.SamplingParams(
                    max_tokens=224,
                    constraint=constraints[form],
                    constraint_confidence=confidence,
                )
                began, spent = time.perf_counter(), time.process_time()
                outputs = llm.chat(chats, params)
                texts = [one.outputs[0] for one in outputs]
                right[confidence] = [
                    judged(form, text.text, problem)
                    for text, problem in zip(texts, problems, strict=True)
                ]
                tokens = sum(len(text.token_ids) for text in texts)
                row = {
                    "form": form,
                    "confidence": confidence,
                    "right": sum(right[confidence]) / len(problems),
                    "whole": sum(text.constraint_met is not False for text in texts),
                    "tokens_per_forward": tokens / sum(one.metrics.nfe for one in outputs),
                    "tokens": tokens,
                    "seconds": round(time.perf_counter() - began, 1),
                    "cpu_seconds": round(time.process_time() - spent, 1),
                }
                if confidence == "plan":
                    pairs = list(zip(right["raw"], right["plan"], strict=True))
                    row["right_raw_alone"] = sum(a and not b for a, b in pairs)
                    row["right_plan_alone"] = sum(b and not a for a, b in pairs)
                facts["rows"].append(row)
                print(json.dumps(row), flush=True)
                if args.output is not None:
                    args.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
