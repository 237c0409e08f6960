"""Proves `bench serve`: figures equal ones worked out by hand from a scripted server, answers that
contradict themselves do not count, and the load is the one that was asked for.

The server below speaks HTTP over asyncio in the test's own loop; each request's prompt names what
it is to send. One test, of the long tier, asks the real server.
"""

import asyncio
import contextlib
import json
import math
import selectors
import statistics
from types import SimpleNamespace

import pytest

from dllm_jax.bench import client as http
from dllm_jax.bench import serving, serving_work
from dllm_jax.bench.serving import CHAT, TEXT, Load, Seen
from dllm_jax.bench.serving_work import Work
from dllm_jax.bench.workload import Lengths
from dllm_jax.cli import main

GAP_S = 0.05
METRICS = {"nfe": 3, "prefill_nfe": 1, "num_preemptions": 0, "queue_time_ms": 2.0}
METRICS |= {"time_to_first_token_ms": 40.0}


class Server:
    """Answers by script; `tells` are what it supports."""

    def __init__(self, chunk_usage=True, metrics=True, ending=b"\n\n"):
        self.chunk_usage, self.metrics, self.ending = chunk_usage, metrics, ending
        self.bodies, self.now, self.most, self.counted = [], 0, 0, 0
        self.num_connections, self._tasks = 0, []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.client = http.Client(f"http://127.0.0.1:{self.port}")
        return self

    async def __aexit__(self, *_):
        self.client.close()
        self._server.close()
        await asyncio.gather(*self._tasks)

    async def _connection(self, reader, writer):
        self.num_connections += 1
        self._tasks.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = [line for line in head.lower().split("\r\n") if "content-length" in line]
                body = await reader.readexactly(int(size[0].split(":")[1])) if size else b""
                self.now, self.most = self.now + 1, max(self.most, self.now + 1)
                try:
                    is_open = await self._answer(head.split()[1], body, writer)
                finally:
                    self.now -= 1
                if not is_open:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(self, path, body, writer):
        def whole(status, content):
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            line = f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n"
            writer.write(line.encode() + data)
            return True

        if path == "/metrics" and not self.metrics:
            return whole(404, b"")
        if path == "/metrics":
            steps = (
                self.counted / 4 * 1.5
            )  # blocks of 4 tokens; half a forward a block, and commits
            lines = [
                "# TYPE x counter",
                f'dllm_generation_tokens_total{{model="a b"}} {self.counted}',
            ]
            lines += [f"vllm:diffusion_num_denoising_steps_total {steps}"]
            lines += [f"vllm:diffusion_num_canvas_positions_total {steps * 4}"]
            lines += [f"vllm:diffusion_num_committed_tokens_total {self.counted}"]
            return whole(200, "\n".join(lines).encode())
        if path == "/v1/models":
            return whole(200, {"data": [{"id": "scripted", "root": "builtin:tiny-sdar"}]})
        fields = json.loads(body)
        self.bodies.append(fields)
        prompt = fields["messages"][0]["content"] if path == CHAT else fields["prompt"]
        script = prompt if isinstance(prompt, str) else "4"
        options = fields["stream_options"]
        if "continuous_usage_stats" in options and self.chunk_usage is None:
            return whole(400, {"error": {"message": "no such option", "code": "x"}})
        if script == "refuse":
            return whole(429, {"error": {"message": "too many", "code": "queue_full"}})
        return await self._stream(path, script, writer, bool(self.chunk_usage))

    async def _stream(self, path, script, writer, chunk_usage):
        """`4 8 close`: chunks of 4 and 8 tokens, then what goes wrong."""

        def send(data):
            data = data + self.ending if isinstance(data, bytes) else data
            if isinstance(data, dict):
                data = b"data: " + json.dumps(data).encode() + self.ending
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
        writer.write(head.encode() + b"\r\n\r\n")
        *sizes, wrong = (
            script.split() if not script.split()[-1].isdigit() else [*script.split(), ""]
        )
        reported = 0
        if path == CHAT:
            send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        send(b": keep-alive")
        for size in map(int, sizes):
            await asyncio.sleep(GAP_S)
            reported += size
            text = "ab " * size
            choice = {"delta": {"content": text}} if path == CHAT else {"text": text}
            usage = {"prompt_tokens": 5, "completion_tokens": reported}
            send({"choices": [choice]} | ({"usage": usage} if chunk_usage else {}))
        self.counted += reported
        if wrong == "close":
            return False
        if wrong == "error":
            send({"error": {"message": "it failed"}})
        send({"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
        claimed = {"less": reported - 1, "more": reported + 99}.get(wrong, reported)
        usage = {"prompt_tokens": 5, "completion_tokens": claimed, "prompt_tokens_details": None}
        if wrong != "uncounted":
            send({"choices": [], "usage": usage, "metrics": METRICS})
        if wrong != "undone":
            send(b"data: [DONE]")
        writer.write(b"0\r\n\r\n")
        return True


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time passes only while every connection is silent."""

    now = 0.0

    def __init__(self):
        super().__init__(selectors.DefaultSelector())
        select = self._selector.select

        def jump(timeout=None):
            events = select(timeout and 0.01)
            self.now += 0.0 if events else timeout or 0.0
            return events

        self._selector.select = jump

    def time(self):
        return self.now


def measured(prompts, load=None, server=None, **fields):
    """Figures of a load, and the server."""

    async def run():
        async with server or Server() as it:
            work = [one if isinstance(one, Work) else Work(one, 64) for one in prompts]
            found = await serving.measure(it.client, work, load or Load(model="m", **fields))
            return found, it

    with asyncio.Runner(loop_factory=Clock) as runner, pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(perf_counter=runner.get_loop().time, process_time=lambda: 0.0)
        patch.setattr(serving, "time", clock)
        patch.setattr(http, "time", clock)
        return runner.run(run())


@pytest.mark.parametrize("endpoint", [CHAT, TEXT])
@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\r\n"])
def test_figures_are_those_of_the_script(endpoint, ending):
    found, server = measured(["4 8 2", "6 6"], endpoint=endpoint, server=Server(ending=ending))
    assert (found["requests"], found["failed"], found["visible_tokens"]) == (2, 0, 26)
    assert (found["prompt_tokens"], found["chunks"], found["untold_tokens"]) == (10, 5, 0)
    assert found["tokens_per_chunk"]["mean"] == pytest.approx(26 / 5)
    assert (found["nfe"], found["prefill_nfe"]) == (6, 2)
    assert found["tokens_per_forward"] == pytest.approx(26 / 6)
    assert found["server_queue_s"]["p50"] == pytest.approx(0.002)
    assert found["tok_s"] * found["wall_s"] == pytest.approx(26)
    assert found["total_tok_s"] * found["wall_s"] == pytest.approx(36)
    assert found["peak_tok_s"] == 26
    for name, low in (("ttfb_s", GAP_S), ("inter_block_s", GAP_S), ("e2e_s", 2.5 * GAP_S)):
        assert found[name]["mean"] == pytest.approx(low), name
    # 10 tokens after the first chunk in two gaps, 6 in one.
    assert found["tpot_s"]["mean"] == pytest.approx((2 / 10 + 1 / 6) / 2 * GAP_S)
    assert found["finish_reasons"] == {"length": 2}
    reported = found["server"]
    assert (reported["visible_tokens"], reported["is_alone"]) == (26, True)
    assert reported["vllm_diffusion"]["committed_per_step"] == pytest.approx(26 / (26 / 4 * 0.5))
    assert reported["vllm_diffusion"]["steps_per_canvas"] == pytest.approx(0.5)
    assert server.bodies[-1]["stream_options"]["include_usage"] is True


WRONG = {
    "refuse": "status 429: queue_full: too many",
    "4 close": "the connection was closed early",
    "4 error": "error event: it failed",
    "4 less": "chunks with 4 tokens, usage of 3",
    "0 more": "usage of 99 tokens, and nothing was received",
    "4 undone": "the stream ends without [DONE]",
    "4 uncounted": "no usage in the stream",
}


@pytest.mark.parametrize("script", WRONG)
def test_an_answer_that_is_not_whole_is_no_throughput(script):
    found, _ = measured(["4 4", script])
    assert (found["requests"], found["failed"], found["visible_tokens"]) == (1, 1, 8)
    ((problem, number),) = found["problems"].items()
    assert problem.startswith(WRONG[script]) or WRONG[script] in problem
    assert number == 1
    assert found["nfe"] == 3


def test_answers_that_claim_more_than_the_server_counted_do_not_count():
    counted = {"dllm_generation_tokens_total": 7.0}
    reported = {"visible_tokens": 8, "wall_s": 1.0}
    with pytest.raises(ValueError, match="answers claim 8 tokens, /metrics counted 7"):
        serving.server_figures(reported, {}, counted)
    assert serving.server_figures(reported, {}, {"dllm_generation_tokens_total": 9.0}) == {
        "visible_tokens": 9,
        "is_alone": False,
    }


@pytest.mark.parametrize("support", [False, None])
def test_servers_without_our_extras_are_measured(support):
    """None: the option is refused, as api.openai.com does."""
    found, server = measured(["4 4", "4 4"], server=Server(chunk_usage=support, metrics=False))
    assert (found["chunk_usage"], found["visible_tokens"], found["server"]) == (False, 16, None)
    assert found["tokens_per_chunk"] is found["peak_tok_s"] is found["untold_tokens"] is None
    assert found["tpot_s"]["mean"] == pytest.approx(GAP_S / 7)
    assert "continuous_usage_stats" not in server.bodies[-1]["stream_options"]


def test_a_server_that_refuses_the_work_is_told_in_one_line():
    with pytest.raises(ValueError, match="refuses the work with status 429: queue_full: too many"):
        measured(["refuse"])
    with pytest.raises(ValueError, match="none of 1 requests succeeded: no usage in the stream"):
        measured(["4 uncounted"])


def test_no_more_than_max_concurrency_are_under_way():
    found, server = measured(["4"] * 9, max_concurrency=3)
    assert (found["most_concurrent"], server.most) == (3, 3)
    assert server.num_connections == 3  # they are used again
    assert found["client_queue_s"]["p99"] == pytest.approx(2 * GAP_S)
    found, server = measured(["4"] * 9)
    assert found["most_concurrent"] == server.most == 9


def test_a_request_that_takes_too_long_has_failed():
    found, _ = measured(["4", "1 1 1 1 1 1 1 1"], timeout_s=4 * GAP_S)
    assert (found["requests"], found["failed"]) == (1, 1)
    assert list(found["problems"]) == ["not whole after 0.2 s"]


def test_a_connection_that_the_server_closed_is_opened_again():
    async def run():
        async with Server() as server:
            assert (await server.client.get("/v1/models"))[0] == 200
            for connection in server.client._idle:
                connection._writer.transport.abort()
            assert (await server.client.get("/v1/models"))[0] == 200
            return server.num_connections

    assert asyncio.run(run()) == 2


def test_goodput_counts_requests_within_every_objective():
    one = Seen(0, 0.0, 1.0, arrivals=[(0.2, 4), (1.0, 4)], visible_tokens=8)
    assert one.tpot_s == pytest.approx(0.2)
    assert serving.is_good(one, {"ttft": 200, "tpot": 200.1, "e2el": 1000})
    for name, most in (("ttft", 199), ("tpot", 199), ("e2el", 999)):
        assert not serving.is_good(one, {"ttft": 9e9, "tpot": 9e9, "e2el": 9e9, name: most})
    found, _ = measured(["4", "4 4 4 4"], objectives={"e2el": 3 * GAP_S * 1e3})
    assert found["good_requests"] == 1
    assert found["goodput_requests_s"] == pytest.approx(1 / found["wall_s"])


def test_peak_rate_is_of_any_one_second():
    whole = [Seen(0, arrivals=[(0.0, 5), (0.9, 7), (1.0, 9)]), Seen(0, arrivals=[(1.85, 3)])]
    assert serving.peak_rate(whole) == 7 + 9 + 3
    assert serving.peak_rate([Seen(0, arrivals=[(0.0, None)])]) is None


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_arrivals_keep_their_rate_and_their_burstiness(burstiness, spread):
    work = serving_work.arriving([Work("x", 1)] * 2000, 50.0, burstiness, seed=3)
    times = [one.arrival_s for one in work]
    gaps = [later - at for at, later in zip([0.0, *times], times, strict=False)]
    assert times[-1] == pytest.approx(40.0)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.15)
    assert work == serving_work.arriving([Work("x", 1)] * 2000, 50.0, burstiness, seed=3)
    even = serving_work.arriving([Work("x", 1)] * 4, 2.0, math.inf, seed=0)
    assert [one.arrival_s for one in even] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_random_prompts_have_their_lengths_and_no_special_ids(builtin_tokenizer):
    args = (builtin_tokenizer, 40, Lengths(3, 9), Lengths(5, 5))
    work = serving_work.random_work(*args, seed=1, as_text=False)
    assert {len(one.prompt) for one in work} == {*range(3, 10)}
    assert {one.max_tokens for one in work} == {5}
    special = {*builtin_tokenizer.all_special_ids, *builtin_tokenizer.added_tokens_decoder}
    assert not special & {token for one in work for token in one.prompt}
    assert work == serving_work.random_work(*args, seed=1, as_text=False)
    assert work != serving_work.random_work(*args, seed=2, as_text=False)
    assert all(isinstance(w.prompt, str) for w in serving_work.random_work(*args, 1, as_text=True))


@pytest.fixture(scope="module")
def builtin_tokenizer():
    from dllm_jax.loading.sources import find_folder
    from dllm_jax.loading.tokenizer import read_tokenizer

    return read_tokenizer(find_folder("builtin:tiny-sdar"))


def test_prompts_of_a_file_are_taken_in_turn():
    lines = '{"prompt": "a", "output_tokens": 7}\n\n{"prompt": "b"}\n'
    work = serving_work.file_work("x.jsonl", lines, 3, Lengths(9, 9), seed=0)
    assert [(one.prompt, one.max_tokens) for one in work] == [("a", 7), ("b", 9), ("a", 7)]
    plain = serving_work.file_work("x", "one\ntwo\n", None, Lengths(2, 2), seed=0)
    assert [one.prompt for one in plain] == ["one", "two"]
    for wrong in ("[1]", '{"prompt": 3}', '{"prompt": "x", "output_tokens": 0}', "{"):
        with pytest.raises(ValueError, match=r"'x.jsonl', line 1: write an object"):
            serving_work.file_work("x.jsonl", wrong, None, Lengths(2, 2), seed=0)
    with pytest.raises(ValueError, match="holds no prompt"):
        serving_work.file_work("x", "\n", None, Lengths(2, 2), seed=0)


def test_problems_are_graded():
    (one,) = serving_work.problem_work(1, 50, seed=0)
    seen = Seen(0.0, 0.0, 1.0, text=one.problem.response, visible_tokens=3)
    assert serving.figures([one], [seen], Load(model="m"))["accuracy"] == 1.0
    seen.text = "The answer is 0.5 or so"
    assert serving.figures([one], [seen], Load(model="m"))["accuracy"] == 0.0


REFUSED = {
    "--base-url nowhere": "'nowhere' is no URL of a server",
    "--port 1": "127.0.0.1:1 does not answer",
    "--port 1 --ready-check-timeout-sec 0.01": "is not answered with 200 after 0.01 s",
    "--request-rate 0": "value=0.0 must be above 0",
    "--goodput fast:3": "'fast:3' is not NAME:MS of ttft, tpot, e2el",
    "--dataset-name custom": "give --dataset-path FILE",
    "--dataset-name problems --input-len 5": "--input-len goes with --dataset-name random",
    "--dataset-name problems --output-len 5:9": "problems take one length",
    "--extra-body [1]": "is no JSON object",
    "--header key": "'key' is not NAME=VALUE",
    "--metric-percentiles 101": "must be a number in [0, 100]",
    "--out /no/such/file": "'/no/such/file' cannot be written",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_meant_is_refused_in_one_line(words, fails):
    assert REFUSED[words] in fails((1, 2), "bench", "serve", *words.split())


@pytest.fixture
def real_server(tmp_path):
    from tests.serve.driving import Server as Process

    command = ["-m", "dllm_jax.cli", "serve", "builtin:tiny-sdar", "--port", "0"]
    command += ["--log-format", "json", "--max-num-seqs", "2"]
    server = Process(command, tmp_path / "log")
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.mark.slow
def test_the_real_server_is_measured_and_its_counts_agree(real_server, tmp_path, capsys):
    path = tmp_path / "facts.json"
    base = ["bench", "serve", "--port", str(real_server.port), "--num-prompts", "6"]
    work = ["--dataset-name", "problems", "--request-rate", "20", "--goodput", "e2el:60000"]
    assert main([*base, *work, "--out", str(path)]) == 0
    reported, facts = capsys.readouterr().out, json.loads(path.read_text())
    assert (facts["requests"], facts["failed"], facts["untold_tokens"]) == (6, 0, 0)
    assert facts["accuracy"] >= 5 / 6
    assert facts["server"]["is_alone"] is True
    assert facts["server"]["nfe"] == facts["nfe"]
    block = facts["server"]["vllm_diffusion"]
    assert block["committed_per_step"] == pytest.approx(facts["tokens_per_forward"], rel=0.01)
    assert facts["good_requests"] == 6
    assert f"{facts['visible_tokens']} visible tokens" in reported
    assert main([*base, "--input-len", "20", "--output-len", "9", "--ignore-eos", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["prompt_tokens"], facts["visible_tokens"]) == (6 * 20, 6 * 9)
