"""Held-out problems solved by a causal model, alone or with a drafter, in batches of one shape.

For logs, model cards and the texts that drafters learn from. Nothing here knows about optimisers or
files.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from dllm_jax.api import generate
from dllm_jax.loading.model import Model
from dllm_jax.strategies.dflash import DFlash
from dllm_jax.tasks import problems as data
from dllm_jax.training import stream

_SEED = 2026  # held-out problems are drawn with a seed of their own
MAX_TOKENS = 160  # tokens of the longest worked solution, its end included
BATCH_SIZE = 2048


@functools.partial(jax.jit, static_argnames="max_tokens")
def decode(
    model: Model,
    draft: Model | None,
    prompts: Any,
    prompt_len: Any,
    temperature: Any,
    key: Any,
    *,
    max_tokens: int,
) -> generate.GenerateOutput:
    """`generate` as one program, for many batches of one shape; prompts are not checked.

    Args:
        draft: With one the strategy is `dflash`, which judges whole blocks; else `ar`.
        prompts: Ids [B T], right-padded.
        temperature: Of each row.
    """
    return generate.generate(
        model,
        prompts,
        "ar" if draft is None else DFlash(width=getattr(draft.config, "block_size", None)),
        draft=draft,
        max_tokens=max_tokens,
        prompt_len=prompt_len,
        temperature=temperature,
        key=key,
    )


def pad(prompts: Sequence[Sequence[int]], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [num_rows T], T a multiple of 64, and lengths; rows to spare hold the first again."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    padded = np.zeros((num_rows, -(-int(lengths.max()) // 64) * 64), np.int32)
    for i, ids in enumerate(prompts):
        padded[i, : len(ids)] = ids
    padded[len(prompts) :] = padded[0]
    spare = np.full(num_rows - len(prompts), lengths[0], np.int32)
    return padded, np.concatenate([lengths, spare])


def score(
    model: Model,
    tokenizer: tokenizers.Tokenizer,
    draft: Model | None = None,
    *,
    num_problems: int = 512,
    batch_size: int = BATCH_SIZE,
    temperature: float = 0.0,
    seed: int = _SEED,
) -> list[dict[str, Any]]:
    """Solve the first held-out problems of both halves, by `ar` or, with a draft, by `dflash`.

    Returns:
        A half each: the share solved (`exact`), visible tokens a problem, and with a draft the
        mean accepted length (`accepted`): tokens a round of the real strategy, the target's own
        token counted, the end of sequence not.
    """
    halves = [(half, i) for half in data.HALVES for i in range(num_problems)]
    problems = [data.problem(half, seed, i, heldout=True) for half, i in halves]
    prompts = [tokenizer.encode(stream.conversation(p.question)).ids for p in problems]
    batch_size = min(batch_size, len(problems))
    right, tokens, rounds = [], [], []
    for at in range(0, len(problems), batch_size):
        some = prompts[at : at + batch_size]
        padded, lengths = pad(some, batch_size)
        out = jax.device_get(
            decode(
                model, draft, padded, lengths, jnp.full(batch_size, temperature, jnp.float32),
                jax.random.fold_in(jax.random.key(seed), at),
                max_tokens=MAX_TOKENS,
            )
        )  # fmt: skip
        for i in range(len(some)):
            text = tokenizer.decode(out.tokens[i, : out.length[i]].tolist())
            right.append(data.is_correct(text, problems[at + i]))
        tokens += out.length[: len(some)].tolist()
        rounds += out.nfe[: len(some)].tolist()
    results = []
    for k, half in enumerate(data.HALVES):
        part = slice(k * num_problems, (k + 1) * num_problems)
        results.append(
            {
                "half": half,
                "temperature": temperature,
                "num_problems": num_problems,
                "exact": float(np.mean(right[part])),
                "tokens": float(np.mean(tokens[part])),
            }
        )
        if draft is not None:
            results[-1]["accepted"] = sum(tokens[part]) / max(1, sum(rounds[part]))
    return results
