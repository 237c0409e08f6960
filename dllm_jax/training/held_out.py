"""Exact match and tokens per forward on held-out problems, with the dense decoder.

For the trainer's log and the model card; the engine has its own `eval`. Nothing here knows about
optimisers or files.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import tokenizers

from dllm_jax.models import dense
from dllm_jax.tasks import problems as data
from dllm_jax.training import dense_decode, stream
from dllm_jax.training.tokenizer import EOS_ID

_SEED = 2026  # held-out problems are drawn with a seed of their own


def score(
    params: Any,
    cfg: dense.DenseConfig,
    tokenizer: tokenizers.Tokenizer,
    half: str,
    *,
    num_problems: int = 512,
    buffer: int = 1,
    threshold: float = 0.9,
    block_size: int = 32,
    row_len: int = 256,
    batch_size: int = 512,
    sharding: Any = None,
    dtype: Any = jax.numpy.bfloat16,
) -> dict[str, Any]:
    """Decode held-out problems 0, 1, ... of one half.

    Args:
        threshold: A token above it is accepted; 1.0 decodes one token per forward.
        sharding: How rows lie on devices; None leaves them on the default device.

    Returns:
        Means over problems, 95 % half-widths of the first two, and the list of what was right.
    """
    problems = _problems(half, num_problems)
    batch_size = min(batch_size, num_problems)
    prompts = [tokenizer.encode(stream.conversation(p.question)).ids for p in problems]
    right, speed, forwards, commits, blocks = [], [], [], [], []
    for at in range(0, num_problems, batch_size):
        some = prompts[at : at + batch_size]
        tokens = np.full((batch_size, row_len), EOS_ID, np.int32)
        lens = np.full(batch_size, row_len, np.int32)  # rows past the last problem: nothing to do
        for i, ids in enumerate(some):
            tokens[i, : len(ids)], lens[i] = ids, len(ids)
        put = jax.device_put((tokens, lens), sharding)
        out = jax.device_get(
            dense_decode.decode(
                params,
                cfg,
                *put,
                threshold,
                buffer,
                eos_id=EOS_ID,
                block_size=block_size,
                dtype=dtype,
            )
        )
        for i, ids in enumerate(some):
            row = out.tokens[i, len(ids) :]
            ends = np.flatnonzero(row == EOS_ID)
            num = int(ends[0]) if out.ended[i] else len(row)
            text = tokenizer.decode(row[:num].tolist())
            right.append(bool(out.ended[i]) and data.is_correct(text, problems[at + i]))
            speed.append(num / max(1, int(out.forwards[i])))
            forwards.append(int(out.forwards[i]))
            commits.append(int(out.commits[i]))
            last = min(len(ids) + num, row_len - 1) // block_size
            blocks.append(last - len(ids) // block_size + 1)
    families: dict[str, list[int]] = {}
    for i, of in enumerate(problems):
        families.setdefault(of.family, []).append(i)

    def denoise_per_block(some: Iterable[int]) -> float:
        return sum(forwards[i] - commits[i] for i in some) / sum(blocks[i] for i in some)

    half_width = lambda x: float(1.96 * np.std(x) / len(x) ** 0.5)  # noqa: E731
    return {
        "half": half,
        "buffer": buffer,
        "threshold": threshold,
        "block_size": block_size,
        "num_problems": num_problems,
        "exact": float(np.mean(right)),
        "exact_ci": half_width(right),
        "tokens_per_forward": float(np.mean(speed)),
        "tokens_per_forward_ci": half_width(speed),
        "forwards": float(np.mean(forwards)),
        "commit_only": float(np.mean(commits)),
        "denoise_per_block": denoise_per_block(range(num_problems)),
        "right": "".join("01"[r] for r in right),
        "families": {
            name: {
                "num_problems": len(of),
                "exact": float(np.mean([right[i] for i in of])),
                "tokens_per_forward": float(np.mean([speed[i] for i in of])),
                "denoise_per_block": denoise_per_block(of),
            }
            for name, of in sorted(families.items())
        },
    }


@functools.cache
def _problems(half: str, num_problems: int) -> tuple[data.Problem, ...]:
    return tuple(data.problem(half, _SEED, i, heldout=True) for i in range(num_problems))
