"""Proves the parts of the front one by one: pipe, mailboxes, frames, metrics, keys, admission."""

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import uvicorn
from uvicorn.server import ServerState

from dllm_jax.serve import client, framing, limits, pipe
from dllm_jax.serve.answers import Form, Window
from dllm_jax.serve.app import application
from dllm_jax.serve.auth import Guard
from dllm_jax.serve.child.outbox import Outbox
from dllm_jax.serve.client import EngineClient
from dllm_jax.serve.limits import Admission, Limits
from dllm_jax.serve.logs import Log
from dllm_jax.serve.mailbox import EngineGone, Mailbox
from dllm_jax.serve.metrics import BUCKETS, HELP, Metrics
from dllm_jax.serve.pipe import Counts, Delta, Facts, Frame, Usage
from dllm_jax.serve.protocol import limited
from dllm_jax.serve.refusals import Refusal
from dllm_jax.serve.server import is_open
from dllm_jax.serve.service import Config, Service
from dllm_jax.serve.stderr import Stderr
from dllm_jax.serve.stream import ClientGone, EventStream
from tests.serve.scripted import HANGS

_NAME = re.compile(r"dllm_[a-z0-9_]+(?=[{])")
CONFIG = Config(model="m", launch=pipe.Launch("a:b", {}), version="0")
FACTS = Facts("m", "sdar", "multi_bd", 4, 8, {}, 64, 10, -1, 2, "float32", "0")
USAGE = Usage(3, 0, 2, 1, 0, 8, 0.01, 0.02, 0.05)


def test_messages_survive_the_pipe_in_any_portions():
    messages = [
        pipe.Add(1, [pipe.Prompt([1, 2], [3])], {"n": 2, "stop": ("a",)}, True, False, 1.5, -1),
        pipe.Abort(7),
        pipe.Launch("a:b", {"x": [1, "y", None]}),
    ]
    data = b"".join(map(framing.frame, messages))
    for size in (1, 3, len(data)):
        reader, found = framing.Reader(pipe.ToEngine), []
        for at in range(0, len(data), size):
            found += reader.feed(data[at : at + size])
        assert [type(one) for one in found] == [type(one) for one in messages]
        assert found[0].prompts == messages[0].prompts
    with pytest.raises(ValueError, match="at most"):
        framing.Reader(pipe.ToEngine).feed(b"\xff\xff\xff\xff")


def test_deltas_that_wait_together_are_one():
    async def run():
        box = Mailbox(1, 2, 1)
        box.put(Delta(1, 0, "a", 1, frame=Frame(1, 1, ["x"])))
        box.put(Delta(1, 1, "z", 1, finish="stop", stop_reason="q"))
        box.put(Delta(1, 0, "b", 2, frame=Frame(2, 2, [None])))
        await asyncio.wait_for(box.wait(), 60)
        first, second = box.take()
        assert (first.text, first.num_tokens, first.frame) == ("ab", 2, Frame(2, 2, [None]))
        assert (second.text, second.stop_reason, box.merged_frames) == ("z", "q", 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.wait(), 0.01)
        box.put(Delta(1, 0, "", 2, finish="length", usage=USAGE))
        assert box.is_over
        assert [delta.finish for delta in box.take()] == ["length"]
        assert (box.num_tokens, box.num_open) == ([2, 1], 0)

    asyncio.run(run())


def test_a_mailbox_tells_of_the_engines_end():
    async def run():
        box = Mailbox(1, 1, 1)
        box.fail("gone")
        await asyncio.wait_for(box.wait(), 60)
        with pytest.raises(EngineGone, match="gone"):
            await box.accepted()

    asyncio.run(run())


def test_item_3_clients_read_no_text_of_an_exception():
    async def run():
        service = Service(CONFIG, Log("none"))
        box = Mailbox(1, 1, 1)
        service.engine._boxes[1] = box
        service.engine._process = subprocess.Popen(["true"])
        await service.engine._end(pipe.Failed("KeyError: 'a prompt'"))
        one, headers = Connection(), [(b"host", b"localhost")]
        for path in ("/health", "/"):
            scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
            await application(service)(scope | {"dllm.connection": one}, None, one.send)
        await streamed(box, one)
        assert b'"status":"failed"' in one.sent
        assert service.engine.failure == "KeyError: 'a prompt'"  # for the log
        assert one.sent.count(b"log says why") == 2
        assert b"prompt" not in one.sent.replace(b"prompt_tokens", b"")

    asyncio.run(run())


def test_item_5_a_failed_engine_has_ended_before_another_starts(monkeypatch, capsys):
    monkeypatch.setattr(client, "END_S", 0.05)

    async def run(process, killed_s):
        monkeypatch.setattr(client, "KILLED_S", killed_s)
        engine, started = EngineClient(pipe.Launch("a:b", {}), 1), []
        engine._process, engine._is_ready = process, True
        monkeypatch.setattr(engine, "start", lambda: started.append(process.returncode))
        await engine._end(pipe.Failed("it says so"))
        return engine, started

    engine, started = asyncio.run(run(subprocess.Popen(["sleep", "60"]), 20.0))
    assert (started, engine.state, engine.over.is_set()) == ([-9], "starting", False)
    held = SimpleNamespace(poll=lambda: None, kill=lambda: None, pid=7)  # in a driver, say
    engine, started = asyncio.run(run(held, 0.05))
    assert (started, engine.state, engine.over.is_set()) == ([], "failed", True)
    assert "7 does not end" in engine.failure


def test_item_5_an_unread_pipe_drops_lines_and_stops_nothing():
    read, write = os.pipe()
    stderr = Stderr(write, Log("json").dropped)
    log = Log("json", stderr)
    num = 30_000
    for i in range(num):
        log.line("request", number=i)
    assert 0 < log.num_dropped < num
    found = b""
    while found.count(b"\n") < num - log.num_dropped + 1:
        found += os.read(read, 1 << 20)
    *lines, last = map(json.loads, found.splitlines())
    assert [line["number"] for line in lines] == list(range(len(lines)))
    assert (last["event"], last["lines"]) == ("dropped", log.num_dropped)
    assert len(lines) + log.num_dropped == num
    os.close(read)  # the reader has gone
    before = log.num_dropped
    log.line("request")
    stderr.drain(60)
    assert log.num_dropped == before + 1
    os.close(write)


def test_item_5_a_full_disk_drops_lines_and_stops_nothing():
    with open("/dev/full", "w") as full:
        stderr = Stderr(full.fileno(), Log("text").dropped)
        log = Log("text", stderr)
        for i in range(5):
            log.line("request", number=i)
        stderr.drain(60)
        assert log.num_dropped == 5
    registry = Service(CONFIG, log)
    one, scope = Connection(), {"type": "http", "method": "GET", "path": "/metrics"}
    scope |= {"headers": [(b"host", b"localhost")], "dllm.connection": one}
    asyncio.run(application(registry)(scope, None, one.send))
    assert b'dllm_log_lines_dropped_total{model="m"} 5' in one.sent


def test_item_3_a_server_for_others_without_a_key_is_warned_of():
    for address in ("0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0"):
        assert is_open(CONFIG, address)
        assert not is_open(dataclasses.replace(CONFIG, api_keys=("k",)), address)
    for address in ("127.0.0.1", "::1"):
        assert not is_open(CONFIG, address)


def test_item_14_no_event_has_a_line_end_of_unicode():
    text = "a\u2028b\u2029c\x85d\ne\u202a"
    box, one = Mailbox(1, 1, 1), Connection()

    async def run():
        one.is_writable = True
        task = asyncio.create_task(streamed(box, one))
        for part in (text, text):
            await asyncio.sleep(0.01)
            box.put(Delta(1, 0, part, 1))
        box.put(Delta(1, 0, text, 2, finish="stop", stop_reason=text, usage=USAGE))
        await task

    asyncio.run(run())
    lines = [line for line in one.sent.decode().splitlines() if line]
    *pieces, last, done = [line.removeprefix("data: ") for line in lines]
    assert done == "[DONE]"
    deltas = [json.loads(piece)["choices"][0] for piece in (*pieces, last)]
    assert "".join(one["delta"]["content"] for one in deltas) == text * 3
    assert deltas[-1]["stop_reason"] == text


class Connection:
    """A connection whose client takes what it is sent until it is `stuck`; its own transport."""

    def __init__(self):
        self.on_lost, self.sent, self.stuck, self.is_writable = set(), b"", None, False
        self.num_sends = 0

    def write_chunk(self, data):
        self.sent += data

    def is_closing(self):
        return False

    def abort(self):
        self.stuck.set()
        for call in list(self.on_lost):
            call()

    @property
    def transport(self):
        return self

    async def send(self, message):
        self.num_sends += 1
        self.sent += message.get("body", b"")
        if self.stuck is not None:
            await self.stuck.wait()


async def streamed(box, one, is_chat=True):
    """Send a mailbox's texts to a connection until they end."""
    stream = EventStream(box, Form(is_chat, "m", "f", 3), Metrics("m", "0"), "id")
    await stream({"dllm.connection": one}, None, one.send)


def test_a_silence_has_comments_and_a_client_that_takes_nothing_is_dropped(monkeypatch):
    monkeypatch.setattr(limits, "KEEP_ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(limits, "CLIENT_SECONDS", 0.05)

    async def until(condition):
        while not condition():
            await asyncio.sleep(0.001)

    async def run():
        box, one = Mailbox(1, 1, 1), Connection()
        task = asyncio.create_task(streamed(box, one, is_chat=False))
        await until(lambda: one.sent == b": keep-alive\n\n" * 2)
        box.put(Delta(1, 0, 'a"b', 1))
        await until(lambda: b"data: " in one.sent)
        piece = json.loads(one.sent.split(b"data: ")[1].split(b"\n\n")[0])["choices"]
        wanted = {"index": 0, "text": 'a"b', "logprobs": None, "finish_reason": None}
        assert piece == [wanted]
        one.stuck = asyncio.Event()
        box.put(Delta(1, 0, "c", 2))
        with pytest.raises(ClientGone):
            await task
        assert one.stuck.is_set()
        assert not one.on_lost

    asyncio.run(asyncio.wait_for(run(), 60))


def test_pieces_are_written_at_once_where_the_client_takes_them():
    async def run():
        box, one = Mailbox(1, 2, 1), Connection()
        task = asyncio.create_task(streamed(box, one, is_chat=False))
        text = ["", ""]
        for i in range(40):
            if i % 4:  # else two pieces come together
                await asyncio.sleep(0)
            one.is_writable = i % 10 < 6
            text[i % 2] += (word := f"{i} ")
            box.put(Delta(1, i % 2, word, i))
        one.is_writable = True
        for choice in range(2):
            box.put(Delta(1, choice, "", 40, finish="length"))
        await asyncio.sleep(0)
        box.put(Delta(1, 1, "", 40, usage=USAGE))
        await task
        events = [json.loads(part[6:]) for part in one.sent.decode().split("\n\n")[:-2]]
        found = ["", ""]
        for event in events:
            found[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert found == text
        assert 2 < one.num_sends < 30  # the others were written at once

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.long
def test_another_asgi_server_runs_the_application():
    """As Ray Serve does: nothing is known of the connection but `receive` and `send`."""
    launch = pipe.Launch("tests.serve.scripted:make", {})

    async def run():
        service = Service(dataclasses.replace(CONFIG, launch=launch), Log("none"))
        service.engine.start()
        while service.engine.state != "ready":
            await asyncio.sleep(0.01)
        app = application(service)

        async def ask(left, **fields):
            body = json.dumps({"prompt": "hi", "max_tokens": 64, **fields}).encode()
            requests, sent = [{"type": "http.request", "body": body}], []

            async def receive():
                if not requests:
                    await left.wait()
                return requests.pop() if requests else {"type": "http.disconnect"}

            async def send(message):
                sent.append(message)

            headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
            await app(scope | {"headers": headers}, receive, send)
            return sent

        left = asyncio.Event()
        _, whole = await ask(left)
        (choice,) = json.loads(whole["body"])["choices"]
        events = b"".join(one.get("body", b"") for one in await ask(left, stream=True))
        pieces = [json.loads(one.removeprefix(b"data: ")) for one in events.split(b"\n\n")[:-2]]
        assert "".join(one["choices"][0]["text"] for one in pieces) == choice["text"]
        tasks = [asyncio.create_task(ask(left, seed=HANGS, stream=on)) for on in (True, False)]
        await asyncio.sleep(0.05)
        left.set()
        for sent in await asyncio.gather(*tasks):
            assert all(one.get("more_body", True) for one in sent)  # cut, not ended
        assert not service.engine.has_open
        assert service.metrics.counted("dllm_disconnects_total") == 2
        await service.engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_the_front_does_not_read_is_merged_and_delays_nothing():
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    outbox, num_put = Outbox(ours), 0
    outbox.queue(pipe.Accepted(1))
    while not outbox.is_full or num_put < 2000:
        outbox.put([Delta(1, 0, "word ", num_put + 1)], Counts(steps=[(1, 0.5)]))
        num_put += 1
    reader, found = framing.Reader(pipe.FromEngine), []
    while outbox.is_full:
        found += reader.feed(theirs.recv(1 << 20))
        outbox.push()
    theirs.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            found += reader.feed(theirs.recv(1 << 20))
    accepted, *moved = found
    assert isinstance(accepted, pipe.Accepted)
    deltas = [delta for one in moved for delta in one.deltas]
    assert len(deltas) < num_put
    assert "".join(delta.text for delta in deltas) == "word " * num_put
    assert sum(len(one.counts.steps) for one in moved) == num_put
    theirs.close()
    outbox.put([Delta(1, 0, "x", 1)], Counts())  # it is closed: the loop sees it where it reads
    assert not outbox.is_full
    ours.close()


def connected(application, transport, limits):
    """A connection of uvicorn's within our limits."""
    config = uvicorn.Config(application, ws="none", lifespan="off", log_config=None)
    one = limited(limits)(config, ServerState(), {})
    one.connection_made(transport)
    return one


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_answer_of_known_length_is_one_write(method):
    written = []

    async def application(scope, receive, send):
        known = scope["path"] == "/known"
        head = [(b"content-length", b"9")] if known else []
        if scope["path"] == "/close":
            head = [(b"content-length", b"9"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        assert bool(written) is not known
        await send({"type": "http.response.body", "body": b"HTTP/1.1 "})

    async def run(path):
        is_closed = []
        transport = SimpleNamespace(
            write=written.append,
            get_extra_info=lambda name, default=None: None,
            is_closing=lambda: bool(is_closed),
            close=lambda: is_closed.append(True),
        )
        one = connected(application, transport, Limits(max_connections=1))
        for _ in range(2):  # the second is answered on the same connection
            written.clear()
            one.data_received(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            for _ in range(3):
                await asyncio.sleep(0)
            head, *body = b"".join(written).split(b"HTTP/1.1 ")[1:]
            assert head.startswith(b"200 OK\r\n")
            assert bool(body) == (method == "GET")
            assert is_closed == ([True] if path == "/close" else [])
            if is_closed:
                break
        one._unset_keepalive_if_required()
        return len([data for data in written if data])

    counts = [asyncio.run(run(path)) for path in ("/known", "/unknown", "/close")]
    assert counts == ([1, 2, 2] if method == "GET" else [1, 1, 1])


def test_item_3_connections_that_wait_too_long_are_closed():
    """After an answer; what a client does not take, or sends on and on, holds no place either."""
    closed = []
    transport = SimpleNamespace(
        write=lambda data: None,
        pause_reading=lambda: None,
        get_extra_info=lambda name, default=None: None,
        is_closing=lambda: "close" in closed,
        close=lambda: closed.append("close"),
        abort=lambda: closed.append("abort"),
        get_write_buffer_size=lambda: unsent,
    )

    async def application(scope, receive, send):
        head = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 401, "headers": head})
        await send({"type": "http.response.body", "body": b"no"})

    async def run(sent, *later):
        one = connected(application, transport, Limits())
        one.data_received(b"POST / HTTP/1.1\r\nhost: localhost\r\n" + sent)
        if b"\r\n\r\n" in sent:
            assert one.waits_since is None  # while it is answered
        for _ in range(4):
            await asyncio.sleep(0)
        now, outcomes = time.monotonic(), []
        for seconds in later:
            one.data_received(b"\r\n" if sent is whole else b"x")
            one.end_if_overdue(now + seconds)
            outcomes.append(list(closed))
            closed.clear()
        one._unset_keepalive_if_required()
        return outcomes

    whole, more = b"content-length: 0\r\n\r\n", b"content-length: 999\r\n\r\n"
    unsent = 0
    assert asyncio.run(run(whole, 70, 76)) == [[], ["close"]]
    assert asyncio.run(run(more, 29, 31)) == [[], ["close"]]
    assert asyncio.run(run(b"x: ", 9, 11)) == [[], ["close"]]  # after a 408
    unsent = 1
    assert asyncio.run(run(whole, 70, 76)) == [[], ["abort"]]

    async def stuck():
        one = connected(application, transport, Limits())
        one.waits_since = None
        one.pause_writing()
        for seconds in (59, 61):
            one.end_if_overdue(time.monotonic() + seconds)
            assert closed == (["abort"] if seconds > 60 else [])
        one._unset_keepalive_if_required()

    asyncio.run(stuck())


def test_frames_say_what_changed():
    window = Window()
    assert window.change(Frame(4, 1, [None, "a", "b"])) == {
        **{"nfe": 1, "at": 4, "size": 3},
        **{"set": [[5, "a"], [6, "b"]], "clear": []},
    }
    reported = window.change(Frame(4, 2, ["c", "a", None]))
    assert (reported["set"], reported["clear"]) == ([[4, "c"]], [6])
    reported = window.change(Frame(6, 3, [None, "d"]))
    assert (reported["set"], reported["clear"]) == (
        [[7, "d"]],
        [],
    )  # cells that settled are not cleared
    assert window.seq == 3


def test_answers_have_openais_reasons():
    form = Form(True, "m", "f", 3)
    for ours, finish, stop in (
        ("stop", "stop", None),
        ("length", "length", None),
        ("nfe", "length", "nfe"),
        ("repetition", "length", "repetition"),
        ("abort", "length", "deadline"),
    ):
        (choice,) = form.whole([Delta(1, 0, "x", 2, finish=ours)], [USAGE])["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stop)
    noted = msgspec.structs.replace(USAGE, notes=["$.minLenght"])
    last = Delta(1, 0, "x", 2, finish="stop", usage=noted)
    for answer in (form.piece(last), form.whole([last], [noted, USAGE])):
        assert answer["dllm"] == {"notes": ["$.minLenght"]}
    assert "dllm" not in form.whole([last], [USAGE])
    reported = form.whole([Delta(1, 0, "x", 2, finish="stop")], [USAGE])["metrics"]
    assert (reported["tokens_per_forward"], reported["queue_time_ms"]) == (4.0, 10.0)
    assert reported["generation_time_ms"] == 40.0


def lines(metrics, name):
    return [line for line in metrics.text("ready").splitlines() if line.startswith(name)]


def test_counters_never_fall_and_outlive_an_engine():
    metrics = Metrics('a"b', "0")
    for tokens, total in ((10, 10), (8, 10), (12, 12), (0, 12), (5, 17)):
        metrics.update(Counts(prompt_tokens=tokens and 1, generated_tokens=tokens))
        (line,) = lines(metrics, "dllm_generation_tokens_total")
        assert line == f'dllm_generation_tokens_total{{model="a\\"b"}} {total}'


def test_histograms_are_cumulative():
    metrics = Metrics("m", "0")
    for _ in range(2):
        metrics.ended(USAGE)
    buckets = [int(line.rsplit(" ", 1)[1]) for line in lines(metrics, "dllm_tokens_per_forward_b")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 2
    assert lines(metrics, "dllm_tokens_per_forward_sum") == [
        'dllm_tokens_per_forward_sum{model="m"} 8'
    ]
    metrics.update(Counts(steps=[(4, 0.008)]))
    assert lines(metrics, "dllm_step_seconds_count") == ['dllm_step_seconds_count{model="m"} 4']


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "vllm:diffusion"),
        ({"causal": True}, None),
        ({"drafts": True}, "vllm:spec_decode"),
    ],
)
def test_vllms_names_are_those_that_its_client_divides_by(change, name):
    metrics = Metrics("m", "0")
    metrics.describe(msgspec.structs.replace(FACTS, **change))
    kinds = ("vllm:diffusion", "vllm:spec_decode")
    assert [kind for kind in kinds if lines(metrics, kind)] == ([name] if name else [])
    assert not Metrics("m", "0", vllm_names=False).text("ready").count("vllm:")


def test_every_metric_has_a_type_and_each_line_a_value():
    metrics = Metrics("m", "0")
    metrics.describe(FACTS)
    metrics.count("dllm_http_requests_total", route="/x", status="200")
    for line in metrics.text("ready").splitlines():
        if not line.startswith("#"):
            float(line.rsplit(" ", 1)[1])
            assert '{model="m"' in line


def test_a_guard_without_keys_wants_loopback():
    guard = Guard((), ("Name.example",))
    for host in (b"localhost:1", b"127.0.0.2", b"[::1]:5", b"::1", b"name.example:80"):
        guard.check("/v1/models", {b"host": host})
    for host in (
        b"",
        b"example",
        b"name.example.evil",
        b"0.0.0.0",
        b"[::2]:1",
        b"localhost.evil:1",
    ):
        with pytest.raises(Refusal) as raised:
            guard.check("/v1/models", {b"host": host})
        assert raised.value.status == 403


def test_admission_counts_texts_that_wait():
    admission = Admission(Limits(max_waiting=2, max_denoise_streams=0))
    admission.check(num_open=3, num_slots=2, num_texts=4, denoise=False)
    for reported, status in (
        ((4, 2, 1, False), 429),
        ((0, 2, 1, True), 429),
    ):
        with pytest.raises(Refusal) as raised:
            admission.check(*reported)
        assert raised.value.status == status
    for _ in range(100):
        admission.ended(60.0)
    assert admission.retry_after(100, 1) == "30"
    assert admission.retry_after(0, 1) == "1"


def test_a3_a_request_goes_before_others_only_as_the_operator_allows():
    admission = Admission(Limits())
    assert [admission.priority(asked) for asked in (None, -9, 0, 7)] == [0, 0, 0, 7]
    admission = Admission(Limits(min_priority=-2))
    assert [admission.priority(asked) for asked in (None, -9, 7)] == [0, -2, 7]


def test_a3_places_are_kept_for_clients_without_a_text():
    admission = Admission(Limits(max_waiting=80))
    admission.check(71, 2, 1, False, has_open=True)
    for texts, waiting in ((1, 70), (60, 20)):
        with pytest.raises(Refusal, match="some places are kept") as raised:
            admission.check(waiting + 2, 2, texts, False, has_open=True)
        assert raised.value.status == 429
        admission.check(waiting + 2, 2, texts, False, has_open=False)


def test_a3_a_client_is_a_key_an_address_or_a_local_connection():
    guard = Guard(("one", "two"), ())
    basic = base64.b64encode(b"any name:two").decode()
    said = ["Bearer one", "Bearer two", f"Basic {basic}"]
    names = [
        guard.check("/v1/models", {b"authorization": one.encode()}, ("::1", 1)) for one in said
    ]
    assert names[0] != names[1] == names[2]
    guard = Guard((), ())
    head = {b"host": b"localhost"}
    peers = [("10.0.0.1", 1), ("10.0.0.1", 2), ("127.0.0.1", 1), ("127.0.0.1", 2), None]
    names = [guard.check("/v1/models", head, peer) for peer in peers]
    assert names[0] == names[1]
    assert len(set(names)) == 4


def test_the_dashboard_reads_metrics_that_exist():
    path = Path(__file__).resolve().parents[2] / "deploy" / "grafana.json"
    board = json.loads(path.read_text(encoding="utf-8"))
    asked = {name for panel in board["panels"] for name in _NAME.findall(json.dumps(panel))}
    ours = {name for name in HELP if name.startswith("dllm_")}
    known = (ours - set(BUCKETS)) | {f"{name}_bucket" for name in BUCKETS}
    assert known - asked == {"dllm_build_info"}
    assert asked <= known


def test_metrics_of_tools():
    one = Metrics("m", "0")
    path = "tools[0].function.parameters.properties.note"
    one.relaxed([f"{path}.maxLength 200: at most 64 are written", f"{path}.format 'x'"])
    one.relaxed([f"{path}: held to a part of it"])
    for keyword in ("maxLength", "format", "other"):
        assert one.counted("dllm_tool_relaxed_total", keyword=keyword) == 1
    one.turns("/v1/messages", 2, 1, 5)
    assert one.counted("dllm_tool_calls_total", route="/v1/messages", end="cut") == 1
    assert one.counted("dllm_reasoning_tokens_total") == 5
    one.update(Counts(compiled=[("key ann", 0.2, 30), ("key ann", 9.0, 0)]))
    lines = one.text("ready").splitlines()
    assert 'dllm_grammar_compile_seconds_count{model="m"} 2' in lines
    assert 'dllm_grammar_states_count{model="m"} 1' in lines
