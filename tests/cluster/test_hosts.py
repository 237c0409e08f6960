"""Proves that several processes share a model: process 0 decides, the others replay its calls.

Two processes of two CPU devices each give the texts of one device, whatever befalls them.
"""

import functools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api import snapshot as snapshots
from dllm_jax.api.decide import log_probabilities
from dllm_jax.api.questions import Question, Read
from dllm_jax.api.resume import resume
from dllm_jax.cluster import hosts
from dllm_jax.engine.layout import DeviceFailure
from dllm_jax.engine.requests import Request
from dllm_jax.runner.grammars import ready
from dllm_jax.strategies import MultiBD
from tests.contract import models
from tests.project.test_layering import ROOT
from tests.serve.driving import TEXT, Server, text_of
from tests.structured.toys import random_toy

CONFIG = dj.EngineConfig(
    max_num_seqs=4,
    max_model_len=64,
    page_size=8,
    num_pages=8,  # less than four texts take
    slot_buckets=(4,),
    page_buckets=(8,),
    prefill_buckets=(16,),
)
STRATEGY = MultiBD(block_size=4, buffer_size=2)
# Of the processes: programs are kept as those of the tests are.
ENV = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def requests():
    """Greedy and drawn ones, more than there are slots."""
    prompts = np.random.default_rng(0).integers(0, 37, size=(5, 12)).tolist()
    some: Any = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5})
    params = [
        dj.SamplingParams(max_tokens=12, ignore_eos=True, seed=i, **some[i % 3]) for i in range(5)
    ]
    return prompts, params


def texts(llm, with_automata):
    """Ids, reasons and forwards of `requests`, and of two texts that keep to automata."""
    every = [Request(prompt_token_ids=p, params=q) for p, q in zip(*requests(), strict=True)]
    never = (models.MASK, models.PADDED)
    for seed, temperature in ((0, 0.0), (1, 1.0)) if with_automata else ():
        toy = random_toy(np.random.default_rng(seed), models.VOCAB, 5, never, states=6, classes=5)
        room = int(toy.distance[toy.start]) + 4
        params = dj.SamplingParams(
            max_tokens=room, stop_token_ids=(5,), temperature=temperature, seed=seed
        )
        grammar = ready(toy, models.VOCAB)
        every.append(Request(prompt_token_ids=[1, 2, seed], params=params, grammar=grammar))
    with llm.engine.inbox() as inbox:
        ids = [inbox.add(request) for request in every]
        outputs = {output.request_id: output for output in inbox}
    last = [outputs[one] for one in ids]
    assert all(one.outputs[0].constraint_met for one in last[len(requests()[0]) :])
    return [[o.outputs[0].token_ids, o.outputs[0].finish_reason, o.metrics.nfe] for o in last]


def labels(llm):
    """Log-probabilities of labels in two texts."""
    reads = [Read([*range(n), models.MASK], n, [n], [[3, 4, 5]]) for n in (5, 11)]
    return log_probabilities(llm.model, reads, llm.engine.runner.read_labels)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), pytest.param(("all",), marks=pytest.mark.slow)])
def test_two_processes_give_the_texts_of_one_device_and_a_dead_one_is_named(more, tmp_path):
    command = [sys.executable, "-m", "tests.cluster.one_of_several"]
    port = str(free_port())
    how: Any = {"text": True, "cwd": ROOT, "stdout": subprocess.PIPE, "env": ENV}
    with (
        subprocess.Popen(
            [*command, "0", port, tmp_path, *more], stdin=subprocess.PIPE, **how
        ) as leader,
        subprocess.Popen([*command, "1", port, tmp_path, *more], **how) as follower,
    ):
        ends = threading.Timer(500, lambda: (leader.kill(), follower.kill()))
        ends.start()
        try:
            _compared(leader, follower, tmp_path, bool(more))
        finally:
            leader.kill()
            follower.kill()
            ends.cancel()


def _compared(leader: Any, follower: Any, folder: Path, with_all: bool) -> None:
    lines = (json.loads(line) for line in leader.stdout if line.startswith("{"))
    with dj.LLM(models.plain(), STRATEGY, config=CONFIG, warm_up=False, progress=False) as llm:
        wanted, probabilities = texts(llm, with_all), labels(llm) if with_all else None
    found = next(lines)
    assert found["texts"] == wanted
    if with_all:
        np.testing.assert_allclose(found["labels"], probabilities, rtol=1e-5, atol=1e-5)
    second = next(lines)
    _assert_replayed(folder, wanted[1][0])
    assert second["stream"] == wanted[0][0]
    assert second["preemptions"] > 0
    follower.kill()
    leader.stdin.write("\n")
    leader.stdin.flush()
    last = next(lines)
    assert all("process 1 of 2 is gone" in error for error in last["errors"])
    assert leader.wait(120) == 1


def _assert_replayed(folder: Path, wanted: list[int]) -> None:
    """A slot's words hold no weights and no pool: they are the same on every device."""
    (path,) = folder.iterdir()
    snapshot = snapshots.load_snapshot(path)
    assert snapshot.model["tensor_parallel_size"] == 4
    (text,) = snapshot.texts
    assert text.slot is not None
    assert 0 < len(text.tokens) < len(wanted)
    engine, request_id = resume(snapshot, 0, models.plain())
    outputs = []
    while engine.has_work:
        outputs += [output for output in engine.step() if output.request_id == request_id]
    assert outputs[-1].outputs[0].token_ids == wanted


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_the_command_serves_over_two_processes(end, random_folder, tmp_path):
    """Texts, streams, structured output and decisions are those of one.

    A signal ends both; if the second one is killed, the log names it.
    """
    sizes = ("--max-num-seqs", "2", "--no-warm-up", "--nnodes", "2", "--log-format", "json")
    command = ["-m", "dllm_jax.cli", "serve", str(random_folder), *sizes, "--port", "0"]
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--node-rank"]
    env = ENV | {"XLA_FLAGS": ENV["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1"}
    prompt, greedy = "<|user|>2 plus 3<|assistant|>", {"max_tokens": 16, "temperature": 0}
    choice = {"structured_outputs": {"choice": ["dollars", "7 apples"]}, "max_tokens": 12}
    question = Question.choice("Which team?", ["billing", "tech"])
    asked = {"type": "choice", "instructions": "Which team?"}
    asked["choices"] = [{"value": "billing"}, {"value": "tech"}]
    with subprocess.Popen([sys.executable, *command, "1"], cwd=ROOT, env=env) as follower:
        try:
            server = Server([*command, "0"], tmp_path / "log", env).wait_ready(400)
            post = functools.partial(server.request, "POST", timeout=300)  # programs are compiled
            _, plain, _ = post(TEXT, {"prompt": prompt, **greedy})
            events = server.events(TEXT, {"prompt": prompt, **greedy})
            _, chosen, _ = post(TEXT, {"prompt": prompt, **choice})
            _, decided, _ = post("/v1/decisions", {"input": "Help.", "questions": [asked]})
            if end == "stopped":
                assert server.stop() == 0
                assert follower.wait(120) == 0
            else:
                follower.kill()
                status, error, _ = server.complete(prompt, **greedy)
                assert (status, error["error"]["code"]) == (500, "internal_error")
                server.stop()  # the line follows the answer
                assert "process 1 of 2 is gone" in server.log.read_text()
        finally:
            follower.kill()
            server.stop()
    with dj.LLM(random_folder, max_num_seqs=2, warm_up=False) as llm:
        how = dj.SamplingParams(**greedy)
        (wanted,) = llm.generate(prompt, how, use_tqdm=False)
        (answer,) = llm.decide("Help.", [question])
    assert plain["choices"][0]["text"] == wanted.outputs[0].text == text_of(events)
    assert chosen["choices"][0]["text"] in choice["structured_outputs"]["choice"]
    found = [one["probability"] for one in decided["answers"][0]["probabilities"]]
    np.testing.assert_allclose(found, answer.probabilities, rtol=1e-4)


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
        accepting.join(120)
        assert [*found[0]] == [1]
        found[0][1].close()


def test_process_0_is_reached_by_a_name_that_works_or_the_remedy_is_named(monkeypatch):
    """Issue 47: no private name of JAX says where it is."""
    monkeypatch.delenv(hosts.COORDINATOR, raising=False)
    assert hosts._named_host() == ""
    assert "127.0.0.1" in hosts._own_hosts()
    monkeypatch.setenv(hosts.COORDINATOR, "[::1]:1234")
    assert hosts._named_host() == "::1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with hosts._reached(["no.such.host.invalid", "127.0.0.1"], port) as found:
            assert found.getpeername() == ("127.0.0.1", port)
    with pytest.raises(
        DeviceFailure, match=rf"not reached at 127.0.0.1, port {port} \(.*; set JAX"
    ):
        hosts._reached(["127.0.0.1"], port)
