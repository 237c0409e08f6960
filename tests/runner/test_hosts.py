"""Proves that several processes share a model: process 0 decides, the others replay its calls.

Two processes of two CPU devices each give the texts of one device, also after preemptions; a
stream that is left early ends there; a process that is killed is a named error, no hang. Messages
are whole, and whoever lacks the token is turned away.
"""

import json
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.engine.layout import DeviceFailure
from dllm_jax.runner import hosts
from dllm_jax.strategies import MultiBD
from tests.contract import models
from tests.project.test_layering import ROOT

CONFIG = dj.EngineConfig(
    max_num_seqs=4,
    max_model_len=64,
    page_size=8,
    num_pages=12,  # less than four texts take
    slot_buckets=(4,),
    page_buckets=(8,),
    prefill_buckets=(16,),
)
STRATEGY = MultiBD(block_size=4, buffer_size=2)


def requests():
    """Greedy and drawn ones, more than there are slots."""
    prompts = np.random.default_rng(0).integers(0, 37, size=(6, 12)).tolist()
    some: Any = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5})
    params = [
        dj.SamplingParams(max_tokens=20, ignore_eos=True, seed=i, **some[i % 3]) for i in range(6)
    ]
    return prompts, params


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_two_processes_give_the_texts_of_one_device_and_a_dead_one_is_named():
    command = [sys.executable, "-m", "tests.runner.one_of_several"]
    port = str(free_port())
    how: Any = {"text": True, "cwd": ROOT, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen([*command, "0", port], stdin=subprocess.PIPE, **how) as leader,
        subprocess.Popen([*command, "1", port], **how) as follower,
    ):
        ends = threading.Timer(240, lambda: (leader.kill(), follower.kill()))
        ends.start()
        try:
            _compared(leader, follower)
        finally:
            leader.kill()
            follower.kill()
            ends.cancel()


def _compared(leader: Any, follower: Any) -> None:
    lines = (json.loads(line) for line in leader.stdout if line.startswith("{"))
    found = next(lines)["texts"]
    prompts, params = requests()
    with dj.LLM(models.plain(), STRATEGY, config=CONFIG, warm_up=False, progress=False) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    wanted = [[o.outputs[0].token_ids, o.outputs[0].finish_reason] for o in outputs]
    assert [text[:2] for text in found] == wanted
    assert [text[2] for text in found] == [output.metrics.nfe for output in outputs]
    second = next(lines)
    assert second["stream"] == wanted[0][0]
    assert second["preemptions"] > 0
    follower.kill()
    leader.stdin.write("\n")
    leader.stdin.flush()
    last = next(lines)
    assert last["seconds"] < 30
    assert all("process 1 of 2 is gone" in error for error in last["errors"])
    assert leader.wait(30) == 1


# --- messages, without other processes ---------------------------------------------------------


def end_of(connection, cls):
    """A leader or a follower over a socket that is there already."""
    made = object.__new__(cls)
    if cls is hosts.Follower:
        made._connection = connection
        return made
    made.gone, made._is_over, made._lock = Future(), False, threading.Lock()
    made._followers = {1: connection}
    return made


def test_a_message_arrives_as_it_was_sent():
    here, there = socket.socketpair()
    leader, follower = end_of(here, hosts.Leader), end_of(there, hosts.Follower)
    given = (
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.ones(3, ml_dtypes.bfloat16),
        np.int32(7),
    )
    leader.send({"what": "call", "key": ("decode", 4, 8)}, given)
    leader.close()
    head, arrays = follower.receive()
    assert head == {"what": "call", "key": ["decode", 4, 8]}
    for a, b in zip(arrays, given, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert follower.receive()[0] == {"what": "stop"}
    here.close()
    with pytest.raises(DeviceFailure, match="process 0 is gone"):
        follower.receive()
    there.close()


@pytest.mark.parametrize("way", ["closed", "silent"])
def test_a_follower_that_is_gone_ends_every_wait(way, monkeypatch):
    monkeypatch.setattr(hosts, "SILENT_S", 0.2)
    monkeypatch.setattr(hosts.atexit, "register", lambda *_: None)
    here, there = socket.socketpair()
    leader = end_of(here, hosts.Leader)
    threading.Thread(target=leader._watch, args=(1, here), daemon=True).start()
    if way == "closed":
        there.close()
    with pytest.raises(DeviceFailure, match=r"process 1 of 2 is gone .*; start all 2 again"):
        leader.wait(Future())  # of a collective that never ends
    with pytest.raises(DeviceFailure, match="process 1 of 2 is gone"):
        leader.send({"what": "reset"})
    for end in (here, there):
        end.close()


def test_who_lacks_the_token_is_turned_away(monkeypatch):
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    token = bytes(range(32))
    server = socket.create_server(("127.0.0.1", 0))
    found = []
    accepting = threading.Thread(target=lambda: found.append(hosts._accepted(server, token)))
    accepting.start()
    address = server.getsockname()
    with socket.create_connection(address) as stranger, socket.create_connection(address) as friend:
        stranger.sendall(bytes(32) + struct.pack("<I", 1))
        assert stranger.recv(1) == b""
        friend.sendall(token + struct.pack("<I", 1))
        accepting.join(10)
        assert [*found[0]] == [1]
        found[0][1].close()
