"""A DFlash drafter for any target the engine loads: config, data, run.

Data flow: the frozen target -> its answers to many prompts (`responses`) -> blocks after random
anchors in them (`draft_objective`) -> a drafter.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import NamedSharding
from jaxtyping import Array

from dllm_jax.loading.load import load
from dllm_jax.loading.model import Model
from dllm_jax.models import dense, dflash
from dllm_jax.training import draft_objective, loop, responses, run_folder, scoring
from dllm_jax.training.export import rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(loop.RunConfig):
    """A run that trains a drafter.

    Attributes:
        target: Source of the target, as for `dllm_jax.load`.
        family: The target's, where it is from outside (`dllm_jax.load(family=)`).
        prompts: File of prompts; None: the built-in word problems.
        num_layers: Layers of the drafter.
        target_layer_ids: Layers of the target that it reads, counted from 0; None: `num_taps`
            layers, evenly spaced from the second to the last but one.
        block_size: Cells of a block, including its anchor.
        mask_token_id: A row of the target's embedding that no text uses; None: the mask of the
            tokenizer, else the first row past its tokens.
        anchors: Blocks of each text and step.
        gamma: Decay of the loss weights along a block; None: the published one for its size.
        ffn_size: Width of the feed-forward part; None: the target's.
        row_tokens: Texts are cut to this many tokens.
        num_responses: Answers of the target to learn from, rounded up to whole batches.
        response_batch: Prompts that the target answers at a time.
        response_tokens: Tokens of the longest answer.
        response_seconds: Stop answering after this time in a call, and use the answers so far.
        greedy_share: Share of the answers at temperature 0; the rest are drawn at 1.
    """

    kind: str = "dflash"
    target: str = "builtin:tiny-qwen3"
    family: str | None = None
    prompts: str | None = None
    num_layers: int = 2
    num_taps: int = 3
    target_layer_ids: tuple[int, ...] | None = None
    block_size: int = 16
    mask_token_id: int | None = None
    anchors: int = 16
    gamma: float | None = None
    ffn_size: int | None = None
    batch_size: int = 64
    row_tokens: int = 208
    num_responses: int = 32_768
    response_batch: int = 1024
    response_tokens: int = 160
    response_seconds: float | None = None
    greedy_share: float = 0.5
    num_steps: int = 5_000
    evals: int = 2


def spread(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """`num_taps` layers of a target, evenly spaced from its second to its last but one."""
    ids = np.linspace(1, num_layers - 2, num_taps).round().astype(int)
    return tuple(sorted({int(i) for i in np.clip(ids, 0, num_layers - 1)}))


def draft_config(config: TrainConfig, target: Model) -> dflash.DFlashConfig:
    """Config of the drafter that a run trains, with the heads and width of the target.

    Raises:
        ValueError: The target is not causal, has no row for the mask, or lacks a layer of
            `target_layer_ids`; or a layer is listed twice.
    """
    of = target.config
    if not of.shift:
        raise ValueError(
            f"target {config.target!r} is no autoregressive model; DFlash drafts for those"
        )
    mask = config.mask_token_id
    if mask is None and target.tokenizer is not None:
        mask = target.tokenizer.mask_token_id
    if mask is None:
        mask = target.defaults.vocab_limit
    if not 0 <= mask < of.vocab_size:
        raise ValueError(
            f"mask_token_id={mask} must be a row of the target's embedding of {of.vocab_size}; "
            "give --mask-token-id a token that no text uses"
        )
    layers = config.target_layer_ids or spread(of.num_layers, config.num_taps)
    if not all(0 <= i < of.num_layers for i in layers):
        raise ValueError(
            f"target_layer_ids={list(layers)} must be below the target's {of.num_layers} layers"
        )
    if len(set(layers)) < len(layers):
        raise ValueError(f"target_layer_ids={list(layers)} must differ; name each layer once")
    return dflash.DFlashConfig(
        vocab_size=of.vocab_size,
        hidden_size=of.hidden_size,
        num_layers=config.num_layers,
        num_heads=of.num_heads,
        num_kv_heads=of.num_kv_heads,
        head_dim=of.head_dim,
        ffn_size=config.ffn_size or of.ffn_size,
        rope_theta=of.rope_theta,
        norm_eps=of.norm_eps,
        max_position=of.max_position,
        tie_embeddings=of.tie_embeddings,
        logit_scale=of.logit_scale,
        mask_token_id=mask,
        target_layer_ids=layers,
        block_size=config.block_size,
        windows=(None,) * config.num_layers,
        causal=(False,) * config.num_layers,
    )


def train(config: TrainConfig, out_dir: str | os.PathLike[str], **how: Any) -> dict[str, Any]:
    """Train, or continue the run in `out_dir`; `how` are keywords of `loop.run`.

    The folder is claimed only after the target, the layers and the prompts were checked.

    Returns:
        The result of `loop.run`, and `target`, its `answers`, `model_config` (of the drafter) and
        the `tokenizer` of a target that reads the built-in problems, else None. If `max_seconds`
        passed before all answers were decoded: only `done` (False) and `step` (0).

    Raises:
        FloatingPointError: If the loss is not finite.
        ValueError: If `out_dir` holds something else or a run of another config (`run_folder`),
            the target does not support a drafter, or the prompts cannot be read.
    """
    folder = run_folder.check(out_dir, config)
    target = load(config.target, family=config.family)
    if target.tokenizer is None:
        raise ValueError(
            f"target {config.target!r} has no tokenizer to read prompts with; give a folder that "
            "holds its tokenizer.json"
        )
    cfg = draft_config(config, target)
    prompts = _prompts(config, target, folder, how.get("num_workers", 2))
    run_folder.claim(out_dir, config)
    # Remove name and files, so that drafters under training share the compiled programs.
    bare = target.replace(source="", tokenizer_source=None)
    began, limit = time.monotonic(), how.pop("max_seconds", None)
    with contextlib.closing(prompts):
        answers = responses.regenerate(
            bare,
            prompts,
            folder,
            config,
            max_seconds=limit,
            say=how.get("say", print),
        )
    if answers is None:
        return {"done": False, "step": 0}
    if limit is not None:
        how["max_seconds"] = limit - (time.monotonic() - began)
    tokenizer = None if config.prompts else responses.problem_tokenizer(target)
    run = loop.run(config, make_task(config, cfg, bare, answers, tokenizer), folder, **how)
    return run | {
        "target": bare,
        "answers": answers,
        "model_config": cfg,
        "tokenizer": tokenizer,
    }


def make_task(
    config: TrainConfig,
    cfg: dflash.DFlashConfig,
    target: Model,
    answers: dict[str, np.ndarray],
    tokenizer: tokenizers.Tokenizer | None,
) -> loop.Task:
    """The task of a drafter that learns from the target's `answers`."""
    dtype = jnp.dtype(config.compute_dtype)
    gamma = config.gamma or draft_objective.gamma_of(config.block_size)

    def init(key: Array) -> Any:
        return dense.random_params(key, dflash.param_shapes(cfg, jnp.float32))

    def loss(params: Any, frozen: Model, batch: dict, key: Array) -> tuple[Array, dict]:
        rounded = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        anchors, valid = draft_objective.draw_anchors(
            key, batch["prompt_len"], batch["length"], config.anchors
        )
        return draft_objective.loss(
            rounded, cfg, frozen, batch["tokens"], batch["length"], anchors, valid, gamma
        )

    def score(params: Any, rows: NamedSharding) -> list[dict]:
        del rows  # decodes on one device, in seconds
        if tokenizer is None:
            return []
        draft = draft_of(params, cfg, target)
        return scoring.score_tokens(target, tokenizer, draft, num_problems=config.eval_problems)

    return loop.Task(
        init=init,
        loss=loss,
        batches=lambda first, _: epochs(answers, config.batch_size, config.seed, first),
        score=score,
        frozen=target,
    )


def draft_of(params: Any, cfg: dflash.DFlashConfig, target: Model) -> Model:
    """Weights under training as a drafter, in the type of the target."""
    return rounded(params, cfg, str(target.params["embed"].dtype), "dflash")


def epochs(
    answers: dict[str, np.ndarray], batch_size: int, seed: int, first: int
) -> Generator[dict, None, None]:
    """Batches from number `first` on; each epoch has every answer once, in a new order."""
    size = len(answers["length"])
    batch_size = min(batch_size, size)
    per_epoch = size // batch_size
    while True:
        epoch, skip = divmod(first, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(size)
        for i in range(skip, per_epoch):
            rows = order[i * batch_size : (i + 1) * batch_size]
            yield {name: values[rows] for name, values in answers.items()}
            first += 1


def _prompts(
    config: TrainConfig, target: Model, folder: pathlib.Path, num_workers: int
) -> Generator[list[list[int]], None, None]:
    first = len(list(folder.glob("responses-*.npz")))
    is_stored = (folder / responses.STORED).exists()  # then no prompts are needed
    if config.prompts is not None and not is_stored:
        most = config.row_tokens - 2
        given = responses.read_prompts(target, config.prompts, most)
        return responses.in_turn(given, config.response_batch, first)
    return responses.problem_prompts(target, config.response_batch, config.seed, first, num_workers)
