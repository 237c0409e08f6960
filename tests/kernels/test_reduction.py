"""Proves the protocol of sums over devices by stores to their memory, and where it is used.

The kernel itself runs on GPUs alone (benchmarks/several_gpu.py, part `sums`); here its turns are
played by devices that go on in random order, and its launches are lowered for a GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.cluster import peer_memory
from dllm_jax.kernels.hopper import peers
from dllm_jax.kernels.layer import mosaic_reduce as reduce
from dllm_jax.models.sharding import over_devices

BLANK = None


def received(num_devices, turns, launches, seed):
    """What each launch of each device reads of each other one: the launch in which it was sent."""
    inbox = np.full((num_devices, turns, num_devices), BLANK, object)
    found = {}

    def device(me):
        for launch in range(launches):
            for other in range(num_devices):
                inbox[other, launch % turns, me] = launch
                yield
            inbox[me, (launch + turns - 1) % turns] = BLANK
            yield
            for other in range(num_devices):
                while (sent := inbox[me, launch % turns, other]) is BLANK:
                    yield
                found[me, launch, other] = sent

    draw, running = np.random.default_rng(seed), [device(i) for i in range(num_devices)]
    steps = 0
    while running:
        # One device may be far quicker than the others.
        one = running[int(len(running) * draw.random() ** 2)]
        if next(one, running) is running:
            running.remove(one)
        steps += 1
        assert steps < 10_000, "the devices wait for each other"
    return found


@pytest.mark.parametrize("num_devices", [2, 4])
def test_every_launch_reads_what_was_sent_to_it(num_devices):
    for seed in range(40):
        found = received(num_devices, peers.TURNS, 12, seed)
        assert all(sent == launch for (_, launch, _), sent in found.items())


def test_two_turns_would_not_do():
    def goes_wrong(seed):
        try:
            found = received(2, 2, 12, seed)
        except AssertionError:
            return True
        return any(sent != launch for (_, launch, _), sent in found.items())

    assert any(goes_wrong(seed) for seed in range(40))


def test_inboxes_have_room_for_every_device_and_turn():
    words = reduce.buffer_words(4)
    assert 4 * words == peers.HEADER_BYTES + 3 * 4 * peers.BLOCKS * peers.SLICE_BYTES
    blank = np.asarray(reduce.blank(2))
    assert len(blank) == reduce.buffer_words(2)
    header = peers.HEADER_BYTES // 4
    assert not blank[:header].any()
    assert (blank[header:].view(np.uint32) == peers.NOTHING).all()


def test_devices_are_told_every_address_and_their_own_number():
    addresses = [0x7F12_3456_7800, 0xFFFF_FFFF_0000]
    rows = reduce.peers(addresses).view(np.uint32).astype(np.uint64)
    for rank, row in enumerate(rows):
        assert [int(row[2 * i] + (row[2 * i + 1] << np.uint64(32))) for i in range(2)] == addresses
        assert row[-1] == rank


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (32, 32), (128, 128), (160, 80), (256, 128)])
def test_blocks_have_as_many_rows_each(rows, blocks):
    assert reduce.num_blocks(rows) == blocks


def test_the_kernel_is_for_few_rows_on_devices_that_reach_each_other(monkeypatch):
    assert "GPU" in (reduce.unsupported(jnp.zeros((8, 1024), jnp.bfloat16)) or "")
    assert peer_memory.made(None) is None
    assert peer_memory.made(over_devices(2)) is None
    monkeypatch.setattr(reduce.hopper, "unsupported", lambda: None)
    monkeypatch.setattr(reduce.hopper, "unsupported_version", lambda: None)

    def reason(rows, width, kind: Any = jnp.bfloat16):
        rows_of: Any = jax.ShapeDtypeStruct((1, rows, width), kind)
        return reduce.unsupported(rows_of)

    assert reason(128, 4096) is None
    assert reason(256, 4096) is None
    assert reason(128, 4096, jnp.float32) is None
    assert "bytes" in (reason(512, 4096) or "")
    assert "multiple" in (reason(128, 4000) or "")
    assert "multiple" in (reason(128, 4096, jnp.int32) or "")
