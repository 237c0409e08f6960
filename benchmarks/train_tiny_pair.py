"""Train `builtin:tiny-qwen3` and `builtin:tiny-qwen3-dflash` in one go, within a budget of seconds.

    python benchmarks/train_tiny_pair.py --out OUT

The two commands of `dllm-jax train` in one process, which shares their programs, and what says how
good the pair is. The target's folder is packed as soon as it is there; `--target FOLDER` goes on
from one that came back. Checkpoints stay under `--work`. OUT gets `tiny-qwen3.tar`,
`tiny-qwen3-dflash.tar`, two logs (`*.jsonl`) and `train_tiny_pair.json`.
"""

import argparse
import json
import pathlib
import shutil
import tarfile
import time
from typing import Any

NAMES = {"ar": "tiny-qwen3", "dflash": "tiny-qwen3-dflash"}


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True)
    add("--work", type=pathlib.Path, default=pathlib.Path("/tmp/train_tiny_pair"))
    add("--target", type=pathlib.Path, help="a trained target: its training is left out")
    add("--target-args", default="", help="options of `train ar`, as one word")
    add("--draft-args", default="", help="options of `train dflash`, as one word")
    return parser.parse_args()


def pack(run: pathlib.Path, kind: str, out: pathlib.Path) -> None:
    """The model's folder as one file, and the log."""
    partial = out / f".{NAMES[kind]}.partial"
    with tarfile.open(partial, "w") as tar:
        tar.add(run / "model", arcname=NAMES[kind])
    partial.rename(out / f"{NAMES[kind]}.tar")
    shutil.copyfile(run / "metrics.jsonl", out / f"{NAMES[kind]}.jsonl")


def entropies(target: pathlib.Path, run: pathlib.Path, num_rows: int = 512) -> dict[str, Any]:
    """Mean entropy of the target's laws, in nats a token, over answers the drafter learnt from."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import dllm_jax as dj

    model = dj.load(target)
    with np.load(run / "responses.npz") as stored:
        tokens, prompt_len, length = (
            stored[name][:num_rows] for name in ("tokens", "prompt_len", "length")
        )
        num_responses = len(stored["length"])

    @jax.jit
    def entropy(model: Any, tokens: Any) -> Any:
        log_p = jax.nn.log_softmax(model.logits(tokens, attention="causal"), axis=-1)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

    each = np.asarray(entropy(model, tokens))
    at = np.arange(tokens.shape[1])
    own = (at >= prompt_len[:, None] - 1) & (at < length[:, None] - 1)  # rows that predict answers
    return {"nats": float(each[own].mean()), "rows": len(tokens), "responses": num_responses}


def main() -> None:
    """Train both, pack both, write the figures as they come."""
    import jax

    from dllm_jax.cli import main as dllm_jax

    args, began = parse(), time.monotonic()
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
    }

    def note(**more: Any) -> None:
        figures.update(more, seconds=round(time.monotonic() - began, 1))
        (args.out / "train_tiny_pair.json").write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps(more), f"{figures['seconds']} s", flush=True)

    def train(*words: str) -> None:
        if status := dllm_jax(["train", *words]):
            raise SystemExit(status)

    target = args.target
    if target is None:
        run = args.work / "ar"
        train("ar", "--out", str(run), *args.target_args.split())
        pack(run, "ar", args.out)
        note(target=json.loads((run / "results.json").read_text()))
        target = run / "model"
    run = args.work / "dflash"
    train("dflash", "--target", str(target), "--out", str(run), *args.draft_args.split())
    pack(run, "dflash", args.out)
    note(draft=json.loads((run / "results.json").read_text()))
    note(entropy_per_token=entropies(target, run))


if __name__ == "__main__":  # data workers import this module again, without jax
    main()
