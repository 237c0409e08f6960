"""lm-evaluation-harness on a local multiple-choice task, and the same scores by brute force.

    python benchmarks/lm_eval_choice.py --problems 24 --output choice.json

The task is written here from held-out word problems: four answers, of which one is right. The
harness asks `dllm_jax.lm_eval` for log-likelihoods. By brute force, each token of an answer costs
one `Model.logits` of the whole text with the cells from it on hidden. Needs `lm-eval>=0.4.9`.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

TASK = """task: word_choice
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{target}}}}"
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1}}
"""


def write_task(folder: Path, count: int) -> None:
    """The task and its data."""
    from dllm_jax.tasks.evaluate import held_out

    lines = []
    for number, one in enumerate(held_out("plain", count, 0)):
        right = int(one.answer)
        found = [right, right + 1, right + 10, 2 * right + 3]
        found = found[number % 4 :] + found[: number % 4]
        choices = [f"The answer is {answer}." for answer in found]
        target = found.index(right)
        lines.append({"question": one.question, "choices": choices, "target": target})
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    (folder / "word_choice.yaml").write_text(TASK.format(data=data), "utf-8")


def by_hand(model, context: list[int], answer: list[int]) -> float:
    """Nats of an answer, one `Model.logits` of whole texts a block of it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    size, mask = model.defaults.block_size, model.config.mask_token_id
    ids = [*context, *answer]
    length = len(ids) + (-len(ids)) % (4 * size)  # few lengths, so few programs
    total = 0.0
    logits = jax.jit(lambda model, ids: model.logits(ids))
    for start in range(len(context), len(ids), 16):
        cells = range(start, min(start + 16, len(ids)))
        rows = np.full((16, length), mask)
        for row, cell in enumerate(cells):
            rows[row, :cell] = ids[:cell]
        out = np.asarray(logits(model, jnp.asarray(rows)), np.float64)
        for row, cell in enumerate(cells):
            law = out[row, cell]
            law[model.forbidden(np.arange(len(law)))] = -np.inf
            total += law[ids[cell]] - law.max() - np.log(np.exp(law - law.max()).sum())
    return total


def main() -> None:
    """Run both and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    import jax
    import lm_eval
    import numpy as np
    from lm_eval.tasks import TaskManager

    from dllm_jax import __version__
    from dllm_jax.lm_eval import DllmLM

    with tempfile.TemporaryDirectory() as name:
        write_task(Path(name), args.problems)
        lm = DllmLM(max_num_seqs=4)
        began = time.perf_counter()
        found = lm_eval.simple_evaluate(
            model=lm,
            tasks=["word_choice"],
            task_manager=TaskManager(include_path=name, include_defaults=False),
            apply_chat_template=True,
            log_samples=True,
        )
        seconds = time.perf_counter() - began
    apart, right, agree = [], 0, 0
    for sample in found["samples"]["word_choice"]:
        scores = [float(one[0][0]) for one in sample["resps"]]
        pairs = [lm._encode_pair(*call) for call in _calls(sample)]
        brute = [by_hand(lm.llm.model, *pair) for pair in pairs]
        apart += [abs(a - b) for a, b in zip(scores, brute, strict=True)]
        agree += int(np.argmax(scores)) == int(np.argmax(brute))
        right += int(np.argmax(brute)) == sample["target"]
    count = len(found["samples"]["word_choice"])
    facts = {
        "task": "word_choice: held-out plain problems, seed 0, four answers each",
        "model": "builtin:tiny-sdar",
        "method": "chain",
        "problems": count,
        "scores": len(apart),
        "harness_acc": found["results"]["word_choice"]["acc,none"],
        "brute_force_acc": right / count,
        "same_choice": agree,
        "largest_difference_nats": max(apart),
        "harness_seconds": round(seconds, 1),
        "versions": {
            "dllm-jax": __version__,
            "lm_eval": lm_eval.__version__,
            "jax": jax.__version__,
        },
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(facts, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


def _calls(sample):
    """Context and continuation of each answer."""
    given = sample["arguments"]
    calls = given.values() if isinstance(given, dict) else given
    return [tuple(one.values()) if isinstance(one, dict) else tuple(one[:2]) for one in calls]


if __name__ == "__main__":
    main()
