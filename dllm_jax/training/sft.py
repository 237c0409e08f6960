"""Supervised fine-tuning of a masked model on texts of one's own, all weights or by LoRA.

A file of texts -> rows of tokens, and the cells that are learnt -> a loss of `denoising` -> the
loop of `loop` -> a Hugging Face folder, adapters merged.
"""

import dataclasses
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dllm_jax.loading import chat
from dllm_jax.loading.load import load
from dllm_jax.loading.model import Model
from dllm_jax.loading.tokenizer import encode
from dllm_jax.models.quantization import input_axes
from dllm_jax.training import denoising, loop, run_folder

Objective = Literal["block", "full"]

_ADAPTED = ("wqkv", "wo", "w_gate_up", "w_down")  # leaves of a layer that LoRA changes
_SCALE = 2.0  # alpha / rank, as usual


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(loop.RunConfig):
    """A run of fine-tuning.

    Attributes:
        model: What `dj.load` takes.
        family: The model's, where it is from outside (`dj.load(family=)`).
        data: A .jsonl file: `messages`, whose last one is learnt, or `prompt` and `completion`.
        objective: "block" or "full" (`denoising`); None: by the mask of the model's training.
        lora_rank: Rank of the update of each matrix of the dense layers; 0: all weights change.
        batch_size: Texts of a step.
        row_tokens: Longest text, prompt included; longer ones are left out.
    """

    kind: str = "sft"
    model: str = "builtin:tiny-sdar"
    family: str | None = None
    data: str | None = None
    objective: Objective | None = None
    lora_rank: int = 16
    batch_size: int = 8
    row_tokens: int = 512
    num_steps: int = 1000
    adam_lr: float = 1e-4
    evals: int = 0


def train(config: TrainConfig, out_dir: str | os.PathLike[str], **how: Any) -> dict[str, Any]:
    """Train, or continue the run in `out_dir`; `how` is `loop.run`'s keywords.

    Returns:
        What `loop.run` does, and `model`: with the new weights.

    Raises:
        FloatingPointError: If the loss is no number any more.
        ValueError: If model and data do not fit, or `out_dir` holds something else.
    """
    if config.batch_size % jax.device_count():
        raise ValueError(
            f"batch_size={config.batch_size} must be a multiple of the {jax.device_count()} "
            "devices; choose another"
        )
    rank, dtype = config.lora_rank, jnp.dtype(config.compute_dtype)
    loaded = str(dtype) if rank else "float32"
    model = load(config.model, loaded, quantization="none", family=config.family)
    objective = config.objective or ("full" if model.defaults.attention == "full" else "block")
    tokens, learnt = read_texts(model, config.data, config.row_tokens, objective)
    folder = run_folder.claim(out_dir, config)

    def loss(params: Any, frozen: Any, batch: dict, key: Array) -> tuple[Array, dict[str, Array]]:
        if rank:
            weights = with_lora(frozen, params["lora"])
        else:
            weights = jax.tree.map(lambda leaf: leaf.astype(dtype), params["weights"])
        changed = model.replace(params=weights)
        of = denoising.full_loss if objective == "full" else denoising.block_loss
        return of(changed, batch["tokens"], batch["learnt"], key)

    def batches(first: int, workers: int) -> Generator[dict, None, None]:
        del workers  # rows are in memory
        number = first * config.batch_size
        while True:
            places = [
                _place(config.seed, number + i, len(tokens)) for i in range(config.batch_size)
            ]
            number += config.batch_size
            yield {"tokens": tokens[places], "learnt": learnt[places]}

    task = loop.Task(
        init=lambda key: {"lora": init_lora(key, model.params, rank)},
        start=None if rank else {"weights": model.params},
        loss=loss,
        batches=batches,
        score=lambda params, rows: [],
        frozen=model.params if rank else None,
    )
    run = loop.run(config, task, folder, **how)
    if rank:
        weights = with_lora(model.params, run["params"]["lora"])
    else:
        weights = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), run["params"]["weights"])
    return run | {"model": model.replace(params=weights)}


def _place(seed: int, number: int, count: int) -> int:
    """The row of the `number`-th text: every epoch in an order of its own."""
    epoch, place = divmod(number, count)
    return int(np.random.default_rng([seed, epoch]).permutation(count)[place])


# --- data -----------------------------------------------------------------------------------------


def read_texts(
    model: Model, path: str | None, row_tokens: int, objective: Objective
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens [N, T], and the cells of them that are learnt.

    After an answer the rest of its block is learnt as the end of the text, and with "full" the rest
    of the row, as decoders fill it.

    Raises:
        ValueError: The file cannot be read, a line is no text, or none is short enough.
    """
    if model.tokenizer is None or not model.defaults.stop_token_ids:
        raise ValueError(f"{model.source!r} has no tokenizer, or no id that ends a text")
    size = model.defaults.block_size
    length = -(-row_tokens // size) * size
    ends = model.defaults.stop_token_ids
    end = model.tokenizer.eos_token_id if model.tokenizer.eos_token_id in ends else ends[0]
    rows, number = list[tuple[np.ndarray, np.ndarray]](), 0
    for where, line in _lines(path):
        number += 1
        prompt, answer = _ids(model, line, f"{path}, line {where}")
        text = [*prompt, *answer, end]
        if len(text) > length:
            continue
        stop = length if objective == "full" else -(-len(text) // size) * size
        cell = np.arange(length)
        tokens = np.where(cell < len(text), np.resize(text, length), end)
        rows.append((tokens.astype(np.int32), (cell >= len(prompt)) & (cell < stop)))
    if not rows:
        raise ValueError(f"{path}: none of {number} texts has at most {length} tokens; raise it")
    if len(rows) < number:
        print(f"{number - len(rows)} of {number} texts have more than {length} tokens: left out")
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


def _lines(path: str | None) -> list[tuple[int, str]]:
    """The lines that hold something, and their numbers; a string may hold U+2028."""
    if path is None:
        raise ValueError("data=None: give a .jsonl file (--data)")
    try:
        lines = enumerate(Path(path).read_text("utf-8").split("\n"), 1)
        return [(number, line) for number, line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path!r} cannot be read ({error}); give a .jsonl file") from error


def _ids(model: Model, line: str, where: str) -> tuple[list[int], list[int]]:
    """Ids of prompt and answer of a line."""
    try:
        held = json.loads(line)
        if "messages" in held:
            *before, last = held["messages"]
            if last["role"] != "assistant":
                raise KeyError("role")
            prompt, answer = chat.render(model, before), last["content"]
        else:
            prompt, answer = held["prompt"], held["completion"]
        if not (isinstance(prompt, str) and isinstance(answer, str)):
            raise TypeError("prompt and answer must be strings")
        parts = [encode(model.tokenizer, one, special=False) for one in (prompt, answer)]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(
            f'{where} is no text ({error}); write {{"messages": [...]}} whose last one is the '
            'assistant\'s, or {"prompt": ..., "completion": ...}'
        ) from error
    return parts[0], parts[1]


# --- LoRA -----------------------------------------------------------------------------------------


def init_lora(key: Array, params: Any, rank: int) -> list[dict[str, Any]]:
    """An update of each matrix of the dense layers that is 0: `a` [in, rank], `b` [rank, out]."""
    found = []
    for i, layer in enumerate(params["layers"]):
        own = {}
        for j, name in enumerate(name for name in _ADAPTED if name in layer):
            size = int(np.prod([layer[name].shape[axis] for axis in input_axes(name)]))
            drawn = jax.random.normal(jax.random.fold_in(key, 8 * i + j), (size, rank))
            out = layer[name].size // size
            own[name] = {"a": drawn * size**-0.5, "b": jnp.zeros((rank, out))}
        found.append(own)
    return found


def with_lora(params: Any, lora: list[dict[str, Any]]) -> Any:
    """The weights with the updates added, in their own type."""

    def changed(leaf: Array, update: dict[str, Array]) -> Array:
        more = _SCALE * (update["a"] @ update["b"]).reshape(leaf.shape)
        return (leaf.astype(jnp.float32) + more).astype(leaf.dtype)

    layers = [
        layer | {name: changed(layer[name], update) for name, update in own.items()}
        for layer, own in zip(params["layers"], lora, strict=True)
    ]
    return params | {"layers": layers}
