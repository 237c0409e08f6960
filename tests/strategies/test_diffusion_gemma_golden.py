"""`DiffusionGemma` answers as transformers does, given its randomness."""

import functools
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import dllm_jax as dj
from dllm_jax.strategies import DiffusionGemma
from dllm_jax.strategies.core.protocol import Knob, knob
from dllm_jax.strategies.core.state import FINISH_REASONS
from tests.oracles import canvas_cases
from tests.oracles.canvas_cases import cases

pytestmark = pytest.mark.long

NAMES = tuple(cases())
RAGGED = [name for name in NAMES if len(cases()[name]["rows"]) > 1]


class Injected(DiffusionGemma):
    """The strategy with the randomness of a golden case; a request says which row's it takes."""

    row: Knob = knob(0.0, whole=True)
    draws: Any = None

    def _noise(self, forward, state, salt):
        canvas, step, row = self._where(state)
        if salt == 1:
            return self.draws.init[canvas, row]
        return self.draws.renoise[canvas, step, row]

    def _read(self, out, state, law, where):
        stats = super()._read(out, state, law, where)
        logits = out.logits() / law.temperature[:, None, None, None]
        if self.draws.uniform is not None:
            below = jnp.cumsum(jnp.exp(logits - logits.max(-1, keepdims=True)), axis=-1)
            share = self.draws.uniform[self._where(state)][..., None]
            token = jnp.sum(below <= share * below[..., -1:], axis=-1)
            token = jnp.minimum(token, logits.shape[-1] - 1)
        else:
            token = jnp.argmax(logits + self.draws.gumbel[self._where(state)], axis=-1)
        return stats.replace(token=token.astype(jnp.int32))

    def _where(self, state):
        """Canvas, its own step and row, [B K] each."""
        buffer = state.buffer
        canvas = (buffer.positions[:, :, 0] - buffer.prompt_len[:, None]) // self.block_size
        row = jnp.broadcast_to(self.row.values.astype(jnp.int32)[:, None], canvas.shape)
        return canvas, buffer.block_steps, row


@functools.cache
def model_of(name: str, folder: Path) -> Any:
    """The case's checkpoint, written to a folder and loaded from there."""
    case = cases()[name]
    path = folder / "".join(filter(str.isalnum, name))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(canvas_cases.config_json(case)))
    save_file(canvas_cases.weights(case), path / "model.safetensors")
    return dj.load(str(path), dtype="float32")


@functools.cache
def strategy_of(name: str, **fields: Any) -> Injected:
    case = cases()[name]
    gen = case["gen"]
    endless = gen["stability_threshold"] is None
    return Injected(
        max_denoising_steps=gen["max_denoising_steps"],
        t_min=gen["t_min"],
        t_max=gen["t_max"],
        entropy_bound=gen["entropy_bound"],
        stability_threshold=1 if endless else gen["stability_threshold"],
        confidence_threshold=0.0 if endless else gen["confidence_threshold"],
        block_size=case["canvas"],
        draws=draws_of((name,)),
        **fields,
    )


def _type(leaf: np.ndarray) -> Any:
    return jnp.int32 if leaf.dtype == np.int32 else jnp.float32


def params_of(name: str) -> dict[str, Any]:
    case = cases()[name]
    stops = case["gen"]["eos_token_id"] or ()
    return {
        "max_tokens": case["gen"]["max_new_tokens"],
        "temperature": 0.0 if case["greedy"] else 1.0,
        "stop_token_ids": tuple(stops),
        "ignore_eos": True,
    }


def wanted(name: str, early: bool) -> list[tuple[list[int], str, int]]:
    """Text, reason and forwards of each row; the last canvas is not stored."""
    return [
        (row["text"], row["finish"], sum(row["steps"]) + (0 if early else len(row["steps"]) - 1))
        for row in cases()[name]["rows"]
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("canvases")


@pytest.mark.slow("^(?!ragged-1)")
@pytest.mark.parametrize(
    ("name", "blocks"),
    [(name, 2) for name in NAMES] + [(name, 1) for name in (*RAGGED, "pattern fixed", "k=2")],
)
def test_generate_answers_as_transformers(name: str, blocks: int, folder: Path) -> None:
    rows = cases()[name]["rows"]
    early = blocks == 2
    strategy = strategy_of(name, buffer_size=blocks, early_slots=8 if early else 0)
    out = dj.generate(
        model_of(name, folder),
        [row["prompt"] for row in rows],
        strategy.replace(row=jnp.arange(len(rows), dtype=jnp.float32)),
        **params_of(name),
    )
    got = [
        (out.tokens[i, : out.length[i]].tolist(), FINISH_REASONS[int(out.finish[i])], int(n))
        for i, n in enumerate(out.nfe)
    ]
    assert got == wanted(name, early)


def network(name: str) -> tuple[Any, ...]:
    """What cases of one engine have in common: weights, canvas, and how tokens are drawn."""
    case = cases()[name]
    text = json.dumps(case["text"], sort_keys=True)
    return text, case["seed"], case["gain"], case["canvas"], case["inverse"]


GROUPS = {
    f"{first}, {len(names)} cases": names
    for first, names in (
        (names[0], names)
        for _, group in itertools.groupby(sorted(NAMES, key=network), network)
        for names in [tuple(group)]
    )
}


def draws_of(names: Iterable[str]) -> canvas_cases.Draws:
    """The randomness of several cases as that of one with all of their rows."""
    every = [canvas_cases.draws(cases()[name]) for name in names]

    def joined(field: str, axis: int) -> Any:
        leaves = [getattr(one, field) for one in every]
        if leaves[0] is None:
            return None
        most = [max(leaf.shape[i] for leaf in leaves) for i in range(axis)]
        wide = [
            np.pad(
                leaf,
                [(0, most[i] - leaf.shape[i]) for i in range(axis)] + [(0, 0)] * (leaf.ndim - axis),
            )
            for leaf in leaves
        ]
        return jnp.asarray(np.concatenate(wide, axis=axis), _type(leaves[0]))

    places = {"init": 1, "renoise": 2, "gumbel": 2, "uniform": 2}  # of the rows
    return canvas_cases.Draws(*(joined(*place) for place in places.items()))


def numbers_of(name: str) -> dict[str, float]:
    """The thresholds of a case, as a request says them."""
    bare = strategy_of(name)
    return {
        knob: getattr(bare, knob)
        for knob in (
            *("max_denoising_steps", "t_min", "t_max", "entropy_bound"),
            *("stability_threshold", "confidence_threshold"),
        )
    }


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_an_engine_answers_as_transformers_alone_together_and_preempted(
    group: str, folder: Path
) -> None:
    """Every row of every case of one network: one by one, then all of them ragged in four slots.

    Thresholds and steps are the requests'. The pool has 15 pages of 8, so not all texts fit at
    once; the batch runs twice, the second time after prefix hits.
    """
    names = GROUPS[group]
    rows = [(name, row) for name in names for row in cases()[name]["rows"]]
    config = dj.EngineConfig(
        max_num_seqs=4,
        max_model_len=64,
        page_size=8,
        num_pages=15,
        slot_buckets=(4,),
        page_buckets=(9,),
        prefill_buckets=(32,),
    )
    llm = dj.LLM(
        model_of(names[0], folder),
        strategy=strategy_of(names[0]).replace(draws=draws_of(names)),
        config=config,
        warm_up=False,
        progress=False,
    )
    prompts = [row["prompt"] for _, row in rows]
    params = [
        dj.SamplingParams(strategy_overrides={"row": i, **numbers_of(name)}, **params_of(name))
        for i, (name, _) in enumerate(rows)
    ]
    want = [end for name in names for end in wanted(name, early=True)]
    every = list(range(len(rows)))
    preempted = cached = 0
    for batch in [*([i] for i in every), every, every[::-1]]:
        outputs = llm.generate([prompts[i] for i in batch], [params[i] for i in batch])
        got = [
            (list(o.outputs[0].token_ids), o.outputs[0].finish_reason, o.metrics.nfe)
            for o in outputs
        ]
        reported = [(rows[i][0], one) for i, one in zip(batch, got, strict=True)]
        assert reported == [(rows[i][0], want[i]) for i in batch]
        preempted += sum(o.metrics.num_preemptions for o in outputs)
        cached += sum(o.metrics.cached_tokens for o in outputs)
    assert preempted or len(rows) < 4
    assert cached


def test_the_golden_file_holds_the_cases_of_the_oracle() -> None:
    assert len(NAMES) == 36
    assert sum(len(case["rows"]) for case in cases().values()) == 48
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(NAMES)
