"""Where an engine's memory goes: the plan, its pages, what it says when it is short."""

import dataclasses
import re

import jax
import pytest

from dllm_jax.cli import info
from dllm_jax.compile import start
from dllm_jax.engine.layout import DeviceFailure, EngineConfig
from dllm_jax.runner import memory
from dllm_jax.runner.memory import GIB, MemoryPlan
from dllm_jax.strategies import MultiBD
from tests.contract import models

MIB = 2**20
STRATEGY = MultiBD(block_size=4, buffer_size=2)
SMALL = {"max_num_seqs": 3, "max_model_len": 60, "page_size": 16, "slot_buckets": (3,)}


def plan(**given) -> MemoryPlan:
    """An H200's share, 3.4 GiB of weights, SDAR-1.7B's pages of 7 MiB, 32 slots."""
    sizes = {
        "limit_bytes": 100 * GIB,
        "in_use_bytes": int(3.5 * GIB),
        "is_counted": True,
        "weights_bytes": int(3.4 * GIB),
        "slot_bytes": 64 * MIB,
        "page_bytes": 7 * MIB,
        "temp_bytes": 2 * GIB,
        "utilization": 0.9,
        "num_slots": 32,
        "num_pages": 1000,
        "page_size": 64,
        "needed_tokens": 4096,
    }
    return MemoryPlan(**(sizes | given))


def started(**config):
    return start.start(
        models.plain(), STRATEGY, {}, EngineConfig(**(SMALL | config)), warm_up=False
    )


class Accelerator:
    """What `memory.measure` asks of a device."""

    local_hardware_id = 0

    def __init__(self, **stats: int):
        self._stats = stats

    def memory_stats(self):
        return self._stats


# --- the arithmetic ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_pages", [None, 7])
def test_the_plan_has_the_bytes_of_the_arrays_that_are_there(num_pages):
    device = started(num_pages=num_pages)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(device.state))
    pools = sum(leaf.nbytes for leaf in jax.tree.leaves(device.state.pools))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(models.plain().params))
    reported = device.memory
    assert reported.pool_bytes == pools
    assert reported.slot_bytes + reported.pool_bytes == held
    assert reported.weights_bytes == weights
    assert reported.peak_bytes == weights + held, "on the CPU nothing else is counted"
    assert reported.num_pages == device.layout.num_pages == (num_pages or 2 * 3 * 4)


def test_pages_within_a_number_of_bytes_are_the_most_that_fit():
    one = plan()
    for num_bytes in (6 * GIB, 50 * GIB, 90 * GIB + 1):
        pages = one.pages_within(num_bytes)
        assert dataclasses.replace(one, num_pages=pages).peak_bytes <= num_bytes
        assert dataclasses.replace(one, num_pages=pages + 1).peak_bytes > num_bytes
    assert one.pages_within(GIB) == 0


# --- how many pages ---------------------------------------------------------------------------


@pytest.mark.parametrize("temp_bytes", [0, 2 * GIB])
@pytest.mark.parametrize("utilization", [0.3, 0.9, 1.0])
def test_an_accelerators_share_is_filled_and_not_passed(utilization, temp_bytes):
    filled = memory.fill(plan(utilization=utilization, temp_bytes=temp_bytes), 10, 65536)
    share = utilization * filled.limit_bytes
    left = 0 if temp_bytes else memory.RESERVE * filled.limit_bytes
    assert filled.peak_bytes <= share - left
    assert filled.peak_bytes >= 0.97 * (share - left), "pages beyond what is enough keep prefixes"


def test_no_array_of_a_pool_outgrows_32_bits():
    elements = 2**31 // 100
    filled = memory.fill(plan(), 10, elements)
    assert filled.num_pages * elements < 2**31 <= (filled.num_pages + 1) * elements


def test_a_few_bytes_more_in_use_do_not_change_the_number_of_pages():
    """Programs are cached by it: a second start would compile everything anew."""
    base = plan()
    counts = {
        memory.fill(
            dataclasses.replace(base, in_use_bytes=base.in_use_bytes + more * 64 * 1024), 10, 1
        ).num_pages
        for more in range(50)
    }
    assert len(counts) <= 2
    assert [memory.rounded(count) for count in (0, 1, 100, 127, 128, 12345)] == [
        *(0, 1, 100, 127, 128, 12288)
    ]


def test_the_cpu_takes_what_is_enough_and_four_gib_at_most():
    here = plan(is_counted=False)
    assert memory.fill(here, 250, 1).num_pages == 250
    assert memory.fill(here, 10**6, 1).num_pages == 4 * GIB // (7 * MIB)
    # And no more than its share of what the system has.
    short = dataclasses.replace(here, limit_bytes=7 * GIB)
    filled = memory.fill(short, 10**6, 1)
    assert 0 < filled.peak_bytes <= 0.9 * 7 * GIB
    assert filled.num_pages < 4 * GIB // (7 * MIB)


def test_memory_is_measured_with_what_is_in_use_and_what_others_have(monkeypatch):
    arrays = models.plain().params

    def measured(**stats):
        return memory.measure(
            Accelerator(**stats),
            arrays,
            arrays,
            arrays,
            0.9,
            num_slots=1,
            num_pages=1,
            page_size=16,
            needed_tokens=16,
        )

    own = measured(bytes_limit=100 * GIB, bytes_in_use=5 * GIB)
    assert (own.limit_bytes, own.in_use_bytes, own.is_counted) == (100 * GIB, 5 * GIB, True)
    # JAX was told not to hold its share, and somebody else has most of it.
    monkeypatch.setattr(memory, "_driver_free_bytes", lambda ordinal: 20 * GIB)
    shared = measured(bytes_limit=100 * GIB, bytes_in_use=5 * GIB, pool_bytes=8 * GIB)
    assert shared.limit_bytes == 28 * GIB
    monkeypatch.setattr(memory, "_driver_free_bytes", lambda ordinal: None)
    assert measured(
        bytes_limit=100 * GIB, bytes_in_use=5 * GIB, pool_bytes=8 * GIB
    ).limit_bytes == (100 * GIB)
    monkeypatch.setattr(memory, "host_bytes_available", lambda: 10 * GIB)
    host = measured()
    assert not host.is_counted
    assert host.limit_bytes == 10 * GIB + host.weights_bytes


# --- refusals, and whether their remedies are enough --------------------------------------------


def numbers(message: str) -> dict[str, float]:
    """What a message says to change, and to what."""
    found = re.findall(r"(\w+)(?: from [\d.]+)? to ([\d.]*\d)", message)
    return {name: float(number) for name, number in found}


def test_a_share_without_room_for_one_text_says_what_would_be_enough():
    short = plan(limit_bytes=12 * GIB, utilization=0.75, needed_tokens=32768, slot_bytes=2 * GIB)
    with pytest.raises(ValueError, match="one text takes 32768") as caught:
        memory.fill(short, 10, 1)
    reported = numbers(str(caught.value))
    assert set(reported) == {"max_model_len", "max_num_seqs", "memory_utilization"}
    shorter = dataclasses.replace(short, needed_tokens=int(reported["max_model_len"]))
    assert memory.fill(shorter, 10, 1).num_pages
    wider = dataclasses.replace(short, utilization=reported["memory_utilization"])
    assert memory.fill(wider, 10, 1).num_pages
    slots = int(reported["max_num_seqs"])
    fewer = dataclasses.replace(
        short,
        num_slots=slots,
        slot_bytes=short.slot_bytes * slots // 32,
        temp_bytes=short.temp_bytes * slots // 32,
    )
    assert memory.fill(fewer, 10, 1).num_pages


def test_weights_that_leave_nothing_say_so():
    with pytest.raises(ValueError, match=r"tokens for 0|for 0 tokens.*smaller model"):
        memory.fill(plan(limit_bytes=4 * GIB, utilization=1.0), 10, 1)


def test_more_pages_than_memory_are_refused_with_a_number_that_fits():
    plan().check()
    much = plan(num_pages=20000)
    with pytest.raises(ValueError, match=r"num_pages=20000 needs .* of 100.0 GiB") as caught:
        much.check()
    reported = numbers(str(caught.value))
    assert set(reported) == {"num_pages"}, "no number of slots helps"
    dataclasses.replace(much, num_pages=int(reported["num_pages"])).check()
    many = plan(slot_bytes=60 * GIB, num_pages=9000)
    with pytest.raises(ValueError, match="max_num_seqs from 32 to ") as caught:
        many.check()
    slots = int(numbers(str(caught.value))["max_num_seqs"])
    dataclasses.replace(
        many,
        num_slots=slots,
        slot_bytes=many.slot_bytes * slots // 32,
        temp_bytes=many.temp_bytes * slots // 32,
    ).check()


def test_an_engine_refuses_pages_that_the_machine_does_not_have():
    with pytest.raises(ValueError, match=r"num_pages=2000000000 needs .*lower num_pages from"):
        started(num_pages=2 * 10**9)


def test_info_tells_what_memory_there_is():
    (reported,) = set(info.collect()["devices"].values())
    free = re.search(r"([\d.]+) GiB of the host's memory free", reported)
    assert float(free[1]) == pytest.approx(memory.host_bytes_available() / GIB, rel=0.5)


# --- out of memory ----------------------------------------------------------------------------

# jax-ml/jax#13428, google-deepmind/jax_privacy#10, ecmwf-lab/ai-models-graphcast#18,
# jax-ml/jax#2023, flatironinstitute/nemos#345, and the CPU of jaxlib 0.11.
MESSAGES = [
    (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.\n"
        "BufferAssignment OOM Debugging.\nBufferAssignment stats:\n"
        "             parameter allocation:    6.00MiB\n",
        6291456,
    ),
    (
        "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device "
        "ordinal 0",
        184549376,
    ),
    (
        "RESOURCE_EXHAUSTED: Failed to allocate request for 2.99GiB (3206250496B) on device "
        "ordinal 0",
        3206250496,
    ),
    (
        "Execution of replica 0 failed: Resource exhausted: Failed to allocate request for "
        "321.75MiB (337385120B) on device ordinal 0",
        337385120,
    ),
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.37GiB.", int(3.37 * GIB)),
    ("RESOURCE_EXHAUSTED: Out of memory allocating 140737488355328 bytes.", 140737488355328),
    ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", 0),
]


@pytest.mark.parametrize(("text", "asked"), MESSAGES)
def test_a_message_of_xla_becomes_one_line_with_what_to_lower(text, asked):
    assert memory.is_out_of_memory(text)
    assert memory._requested_bytes(text) == asked
    full = plan(num_pages=memory.fill(plan(), 10, 1).num_pages)
    reported = memory.explain(text, full)
    assert "\n" not in reported
    assert reported.startswith("the device ran out of memory")
    if asked > full.limit_bytes:
        assert "smaller model" in reported
        return
    lowered = numbers(reported)
    assert lowered["memory_utilization"] < full.utilization
    fewer = dataclasses.replace(full, num_pages=int(lowered["num_pages"]))
    assert fewer.peak_bytes <= full.peak_bytes - max(asked, 0.05 * full.limit_bytes)
    # What the lower share would give is as small.
    share = dataclasses.replace(full, utilization=lowered["memory_utilization"])
    assert memory.fill(share, 10, 1).peak_bytes <= full.peak_bytes - asked


def test_another_failure_keeps_its_first_line():
    text = "INTERNAL: the stream executor failed\nwith a long\ntable"
    assert memory.explain(text, plan()) == "INTERNAL: the stream executor failed"
    assert not memory.is_out_of_memory(text)
    assert memory.explain("", plan()) == "no message"
    without = memory.explain(MESSAGES[0][0], None)
    assert without.startswith("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456")
    assert "lower num_pages" in without
    assert "\n" not in without


def test_running_out_while_the_state_is_made_says_what_to_lower(monkeypatch):
    """The allocation really fails: the plan was told of memory that is not there."""
    monkeypatch.setattr(memory, "host_bytes_available", lambda: 2**43)
    with pytest.raises(
        ValueError, match=r"ran out of memory, asked for .* lower num_pages"
    ) as caught:
        started(num_pages=2**30)
    assert isinstance(caught.value.__cause__, DeviceFailure)
    assert int(numbers(str(caught.value))["num_pages"]) < 2**30
