"""`DiffusionGemma` answers as transformers does, given its randomness.

Proves, on tiny checkpoints in float32, that tokens, finish reasons and forwards of every golden
case come out: through `dj.generate` with canvases begun early and alone, and through `LLM` one by
one, in one ragged batch, with a pool that preempts, and a second time behind a prefix hit.
"""

import functools
import json
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
    draws = canvas_cases.Draws(
        *(
            None if leaf is None else jnp.asarray(leaf, _type(leaf))
            for leaf in canvas_cases.draws(case)
        )
    )
    return Injected(
        max_denoising_steps=gen["max_denoising_steps"],
        t_min=gen["t_min"],
        t_max=gen["t_max"],
        entropy_bound=gen["entropy_bound"],
        stability_threshold=1 if endless else gen["stability_threshold"],
        confidence_threshold=0.0 if endless else gen["confidence_threshold"],
        block_size=case["canvas"],
        draws=draws,
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


def test_an_engine_answers_as_transformers_alone_together_and_preempted(folder: Path) -> None:
    """Ragged prompts on 15 pages of 8: not all texts fit at once, and a second run finds pages."""
    name = "ragged"
    rows = cases()[name]["rows"]
    config = dj.EngineConfig(
        max_num_seqs=len(rows),
        max_model_len=64,
        page_size=8,
        num_pages=15,
        slot_buckets=(len(rows),),
        page_buckets=(10,),
        prefill_buckets=(32,),
    )
    llm = dj.LLM(
        model_of(name, folder),
        strategy=strategy_of(name, early_slots=len(rows)),
        config=config,
        warm_up=False,
        progress=False,
    )
    params = [
        dj.SamplingParams(strategy_overrides={"row": i}, **params_of(name))
        for i in range(len(rows))
    ]
    batches = [[i] for i in range(len(rows))] + [list(range(len(rows)))] * 2
    preempted = cached = 0
    for batch in batches:
        outputs = llm.generate([rows[i]["prompt"] for i in batch], [params[i] for i in batch])
        got = [
            (list(o.outputs[0].token_ids), o.outputs[0].finish_reason, o.metrics.nfe)
            for o in outputs
        ]
        assert got == [wanted(name, early=True)[i] for i in batch]
        preempted += sum(o.metrics.num_preemptions for o in outputs)
        cached += sum(o.metrics.cached_tokens for o in outputs)
    assert preempted
    assert cached
