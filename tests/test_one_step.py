"""The engine's program of one step without a loop, which accelerators run for many slots.

Proves that it gives the tokens, finish reasons and forward counts of the looped program, that
rows which do not decode stay as they are in it, that it holds no copy of a pool, and that the
host loop asks for one step a dispatch where it is there.
"""

import dataclasses

import jax
import numpy as np
import pytest

from dllm_jax import planning, sizing
from dllm_jax.device import Device
from dllm_jax.engine import Engine
from dllm_jax.facts import EngineConfig
from dllm_jax.requests import Request, SamplingParams
from strategies import MultiBD
from strategies.protocol import split_knobs
from tests.contract import models

STRATEGY = MultiBD(0.35, 0.25, 0.5, block_size=4, buffer_size=3)
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=96,
    page_size=8,
    num_pages=61,
    slot_buckets=(2,),
    page_buckets=(13,),
    prefill_buckets=(16,),
)


def engine(one_step_rows: int | None) -> Engine:
    model = models.plain()
    facts = sizing.make_facts(model, STRATEGY, {}, CONFIG)
    facts = dataclasses.replace(facts, one_step_rows=one_step_rows)
    return Engine(Device(model, split_knobs(STRATEGY)[0], {}, facts))


def texts(made: Engine) -> dict[str, tuple]:
    rng = np.random.default_rng(2)
    for number in range(7):
        made.add(
            Request(
                prompt_token_ids=rng.integers(0, models.MASK, 3 + 5 * number).tolist(),
                params=SamplingParams(max_tokens=5 + 3 * number, temperature=0.5 * (number % 2)),
            )
        )
    ended = {}
    while made.has_work:
        for one in made.step():
            text = one.outputs[0]
            ended[one.request_id] = (text.token_ids, text.finish_reason, one.metrics.nfe)
    return ended


@pytest.fixture(scope="module")
def looped() -> dict[str, tuple]:
    return texts(engine(None))


@pytest.mark.parametrize("rows", [1, 3])
def test_one_step_gives_what_the_loop_gives(looped: dict[str, tuple], rows: int) -> None:
    made = engine(rows)
    assert texts(made) == looped
    kinds = {key[-1] for key in made.device.compiled if key[0] == "decode"}
    assert False in kinds


def test_one_step_holds_no_copy_of_a_pool() -> None:
    device = engine(1).device
    pages = np.full((4, 13), -1, np.int32)
    lowered = device.lower(lambda made: made.decode(np.arange(4), 0, pages, 1, True))
    program = lowered.compile()
    pools = jax.tree.leaves(device.state.pools)
    shape = f"[{','.join(map(str, pools[0].shape))}]"
    made = [line for line in program.as_text().splitlines() if f"= f32{shape}" in line]
    assert made
    assert not [line for line in made if " copy(" in line or " select(" in line]
    assert program.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in pools)


def test_a_dispatch_is_one_step_where_its_program_is_there() -> None:
    made = engine(2)
    for token in (1, 2):
        made.add(Request(prompt_token_ids=[token] * 9, params=SamplingParams(max_tokens=30)))
    made.step()
    decoding = made.scheduler.live
    assert len(decoding) == 2
    assert planning.num_steps(1e-4, made.scheduler, decoding, None) == 1
    assert planning.num_steps(1e-4, made.scheduler, decoding[:1], None) > 1
