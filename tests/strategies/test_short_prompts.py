"""Several short prompts in one prefill pass, as accelerators take them: the tokens are the same."""

import dataclasses
from concurrent.futures import CancelledError, Future
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from dllm_jax.bench import measure
from dllm_jax.compile import warmup
from dllm_jax.engine.layout import EngineConfig, Placement
from dllm_jax.runner import buckets, programs
from dllm_jax.runner.calls import Call
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.runner.state import DeviceState
from dllm_jax.strategies import AR, MultiBD
from tests.contract import engine as toy
from tests.contract import models
from tests.contract.cases import case
from tests.contract.engine import ends, run, wanted, wish

pytestmark = pytest.mark.long

COUNT = 3
AT_ONCE = Placement(
    tail=(),
    prompt_len=8,
    limit=12,
    stop_ids=(),
    max_nfe=9,
    max_run=9,
    knobs={},
    seed=0,
    fold=0,
)


def make_device(name: str, **how: Any) -> ModelRunner:
    made = toy.make_device(name, **how)
    made.layout = dataclasses.replace(made.layout, prompts_a_pass=COUNT)
    return made


class Dispatched:
    """A device whose programs are noted, not run: name and slots of each."""

    def __init__(self):
        self.device = make_device("ar", allocate=False)
        self.names: list[tuple[str, list[int]]] = []
        self.futures: list[Future] = []
        self.device.run = self.note

    def note(self, call: Any, slots: Any = ()) -> Future:
        self.device.flush()
        rows = call.args[0]
        if call.key[0] == "prefill":
            _, count, width, *_ = call.key
            rows = rows[: count * width].reshape(count, width)
        some = call.key[0] in ("admit", "prefill")
        self.names.append((call.key[0], rows[:, 0].tolist() if some else []))
        self.futures.append(Future())
        return self.futures[-1]

    def admit(self, *slots: int) -> None:
        for slot in slots:
            self.device.admit(slot, AT_ONCE)

    def prefill(self, *slots: int, size: int | None = None) -> list[Future]:
        layout = self.device.layout
        size, columns = size or layout.prefill_buckets[0], layout.page_buckets[0]
        pages = np.zeros((columns,), np.int32)
        ask = self.device.prefill
        return [ask(slot, (5,), 0, 1, 1, True, pages, size, "causal") for slot in slots]

    def new(self) -> list[tuple[str, list[int]]]:
        names, self.names = self.names, []
        return names


def test_small_pieces_wait_for_more_and_nothing_passes_them():
    ran = Dispatched()
    device, num_slots = ran.device, ran.device.layout.num_slots
    ran.admit(0, 1, 2)
    handles = ran.prefill(0, 1)
    assert ran.new() == []
    handles += ran.prefill(2)
    assert ran.new() == [("prefill", [0, 1, 2])]
    ran.futures[-1].set_result("row")
    assert [handle.result(0) for handle in handles] == ["row"] * 3

    pages = np.zeros((num_slots, device.layout.page_buckets[0]), np.int32)
    for behind, name in (
        (lambda: device.decode(np.arange(num_slots), 1, pages, 1, True), "decode"),
        (lambda: device.copy_page(0, 1), "copy"),
        (lambda: device.begin(2, np.zeros((1,))), "begin"),
        (lambda: ran.prefill(2, size=2 * device.layout.prefill_buckets[0]), "prefill"),
    ):
        first, second = ran.prefill(0, 1)
        behind()
        assert [one for one, _ in ran.new()] == ["prefill", "prefill", name]
        assert not first.done()
        ran.futures[-3].set_result("first")
        ran.futures[-2].set_exception(ValueError("broken"))
        assert first.result(0) == "first"
        with pytest.raises(ValueError, match="broken"):
            second.result(0)

    ran.prefill(0, 1, 0)
    assert ran.new() == [("prefill", [0]), ("prefill", [1])]
    ran.admit(2)  # another slot: the order does not matter
    assert ran.new() == []
    ran.admit(0)  # its piece of before goes first, and brings the other one along
    assert ran.new() == [("prefill", [0])]
    device.flush()
    assert ran.new() == [("admit", [0, *[num_slots] * (len(device._no_fresh) - 1)])]
    for count in (0, 1):
        ran.admit(0)
        ran.prefill(*[0] * count)
        device.decode(np.arange(num_slots), 1, pages, 1, True)
        assert [one for one, _ in ran.new()] == ["prefill"] * count + ["decode"]


def test_who_waits_does_not_wait_for_more():
    ran = Dispatched()
    for wait in (ran.device.join, ran.device.fetch):
        (handle,) = ran.prefill(0)
        waits = mock.patch.object(Future, "result", side_effect=ZeroDivisionError)
        with waits, pytest.raises(ZeroDivisionError):
            wait(handle)
        assert ran.new() == [("prefill", [0])]
    (handle,) = ran.prefill(0)
    with mock.patch.object(ran.device, "submit"), mock.patch.object(ran.device.device, "wait"):
        ran.device.reset()
    with pytest.raises(CancelledError):
        handle.result(0)
    ran.device.flush()
    assert ran.new() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "ar",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("multi_bd_shifted", "block_diffusion", "fast_dllm_v2", "dflash")
        ),
    ],
)
def test_tokens_are_those_of_each_alone(name):
    made = make_device(name, prefill_buckets=(24,))  # most prompts are one piece
    long = [one for one in case(name).requests if made.layout.prefill_len(len(one.prompt))]
    requests = [*long, *long, *long, *case(name).requests]
    truths = [wanted(name, request) for request in requests]
    for between in (None, toy.preempting()):
        engine = toy.make_engine(name, on=made, prefix_caching=False)
        with measure.recording(engine) as ran:
            got = run(engine, [wish(request) for request in requests], between)
        assert ends(got) == truths
        passes = [(prompts, count) for (*_, prompts), count in ran.passes.items()]
        taken = sum(prompts * count for prompts, count in passes)
        assert taken == sum(one.metrics.prefill_nfe for one in got)
        assert between or {COUNT, 1} == {prompts for prompts, _ in passes}
    several = next(bucket for bucket in made.passes if bucket[-1] == COUNT)
    with measure.recording(engine) as ran:
        assert measure.prefill_pass_ms(engine, *several, passes=2, repeats=1) != 0.0
    assert ran.passes == {several: 1 + 3 + 1}

    # A pass that fails takes all of its prompts along, and they start over.
    launch, failed = DeviceState._launch, []

    def fails_once(device: DeviceState, one: Call, *rest: Any) -> Any:
        if one.program is programs.prefill and one.static["num_rows"] == COUNT and not failed:
            failed.append(one)
            raise jax.errors.JaxRuntimeError("no more")
        return launch(device, one, *rest)

    engine = toy.make_engine(name, on=made, prefix_caching=False)
    with mock.patch.object(DeviceState, "_launch", fails_once):
        got = run(engine, [wish(request) for request in requests])
    assert ends(got) == truths
    assert (len(failed), engine.stats().num_failures) == (1, 1)


def test_accelerators_take_short_prompts_in_together(monkeypatch):
    monkeypatch.setattr(buckets, "is_on_cpu", lambda model: False)

    def layout(strategy: Any, model: Any, **sizes: Any) -> Any:
        return buckets.make_layout(model, strategy, {}, EngineConfig(max_model_len=64, **sizes))

    for sizes, count in (
        ({}, 4),  # 4 x 128 tokens
        ({"prefill_buckets": (64,)}, 8),
        ({"prefill_buckets": (16, 64), "max_num_seqs": 64}, 8),
        ({"prefill_buckets": (16,), "max_num_seqs": 3}, 3),
        ({"max_num_seqs": 1}, 1),
        ({"prefill_buckets": (300,)}, 1),
    ):
        found = layout(AR(), models.causal(), **sizes)
        assert found.prompts_a_pass == count
        names = [work.name for work in warmup.every_program(found, 5)]
        size = found.prefill_buckets[0]
        several = f"prefill {count} prompts of {size} tokens, {found.page_buckets[0]} pages, causal"
        assert names.count(several) == (count > 1)
    ran = Dispatched()
    found = dataclasses.replace(ran.device.layout, prompts_a_pass=COUNT)
    short = next(work for work in warmup.every_program(found, 5) if "prompts" in work.name)
    ran.device.run(short.call(ran.device))
    assert ran.new() == [("prefill", [*range(COUNT)])]
    whole = MultiBD(block_size=4, buffer_size=3).needs
    assert whole.prompt == "grid_causal"
    monkeypatch.setattr(buckets, "is_on_cpu", lambda model: True)
    assert layout(AR(), models.causal()).prompts_a_pass == 1
