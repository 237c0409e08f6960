"""Outcomes of a full grid of thresholds on held-out problems, to replay races on.

    python benchmarks/race_table.py --problems 2048 --output race_table.npz

Row 0 of each array is the reference, one token a forward. `dllm_jax.tasks.race.race` takes such
arrays through its `play`.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

ACCEPT = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
ADD = (0.1, 0.5)


def main() -> None:
    """Run the grid; write right, tokens and forwards [setting, problem]."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", default="hard")
    parser.add_argument("--problems", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    import jax
    import numpy as np

    import dllm_jax as dj
    from dllm_jax.tasks import evaluate

    model = dj.load("builtin:tiny-sdar")
    problems = evaluate.held_out(args.half, args.problems, 0)
    settings = [
        {"accept_threshold": accept, "add_block_threshold": add}
        for accept, add in itertools.product(ACCEPT, ADD)
    ]
    began = time.perf_counter()
    how = {"batch_size": args.batch_size}
    outcomes = [evaluate.solve(model, evaluate.one_token(32), problems, **how)]
    print("reference", round(time.perf_counter() - began, 1), "s", flush=True)
    outcomes += evaluate.sweep(model, dj.strategies.MultiBD(), settings, problems, **how)
    facts = {
        "half": args.half,
        "seed": 0,
        "device": jax.devices()[0].device_kind,
        "settings": [{"reference": "one token a forward"}, *settings],
        "seconds": round(time.perf_counter() - began, 1),
    }
    np.savez_compressed(
        args.output,
        facts=json.dumps(facts),
        right=np.stack([one.right for one in outcomes]),
        tokens=np.stack([one.tokens for one in outcomes]).astype(np.int16),
        forwards=np.stack([one.forwards for one in outcomes]).astype(np.int16),
    )
    for setting, one in zip(facts["settings"], outcomes, strict=True):
        speed = one.tokens.sum() / one.forwards.sum()
        print(f"{one.right.mean():.4f} {speed:6.3f}  {setting}")


if __name__ == "__main__":
    main()
