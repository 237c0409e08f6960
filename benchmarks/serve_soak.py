"""Load on `dllm-jax serve builtin:tiny-sdar`: many clients, some that leave, one that never reads.

Checks that no request is stuck, that no page is held at the end, that memory stays flat and
`/health` fast, and that tokens a second are near those of `LLM.generate` on such prompts. The
run begins once every program is compiled. In each of its last four sixths one more client asks
for much, and by turns reads it all or nothing: the others must not notice which. The exit
status is 1 where a check fails. Clients, front and engine share this machine's processors, so
times are worth what its `load_average` says. Linux only.

    python benchmarks/serve_soak.py --minutes 10 --clients 200
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STUCK_S = 120.0
HEALTH_MS, LEAST_SHARE, MOST_GROWTH = {"p50": 5.0, "p99": 50.0}, 0.9, 0.05
MAX_TOKENS = 64
FLAGS = ("builtin:tiny-sdar", "--max-num-seqs", "32", "--port", "0", "--log-format", "json")


def prompts(seed: int, count: int) -> list[str]:
    """Word problems as the model knows them."""
    draw = random.Random(seed)
    return [
        f"<|user|>Ben earns {draw.randrange(20, 50)} dollars a day and spends "
        f"{draw.randrange(2, 20)} dollars of it. Ben does this for {draw.randrange(3, 9)} days. "
        "How many dollars does Ben have then?<|assistant|>"
        for _ in range(count)
    ]


def request(body: dict) -> bytes:
    """A completion request."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Load:
    """What the clients saw."""

    def __init__(self, port: int, until: float, leaving: float):
        self.port, self.until, self.leaving = port, until, leaving
        self.whole_s: list[tuple[float, float]] = []  # when it ended, how long it took
        self.health_s: list[float] = []
        self.left = self.stuck = self.errors = self.tokens = 0

    async def client(self, number: int) -> None:
        """Streams and whole answers in turn; some are left in the middle."""
        draw = random.Random(number)
        every = prompts(number, 8)
        await asyncio.sleep(draw.random())
        while time.monotonic() < self.until:
            body = {"prompt": draw.choice(every), "max_tokens": MAX_TOKENS}
            body |= {"stream": draw.random() < 0.7, "stream_options": None}
            leaves = draw.random() * 2 if draw.random() < self.leaving else None
            started = time.monotonic()
            try:
                async with asyncio.timeout(STUCK_S if leaves is None else leaves):
                    answer = await self._ask(body)
            except TimeoutError:
                self.left += leaves is not None
                self.stuck += leaves is None
                continue
            except (ConnectionError, asyncio.IncompleteReadError):
                self.errors += 1
                continue
            is_whole = answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") or b'"usage"' in answer
            if b" 429 " in answer[:16]:
                await asyncio.sleep(1)
            elif b" 200 " not in answer[:16] or not is_whole:
                self.errors += 1
            else:
                now = time.monotonic()
                self.whole_s.append((now, now - started))

    async def _ask(self, body: dict) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request(body))
            return await reader.read(-1)
        finally:
            writer.close()

    async def much(self, begin: float, end: float, reads: bool) -> None:
        """Asks for much at `begin`, and reads it or nothing."""
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 4, "stream": True}
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", self.port))
            sock.sendall(request(body))
            sock.setblocking(False)
            while time.monotonic() < end:
                with contextlib.suppress(BlockingIOError):
                    while reads and sock.recv(1 << 16):
                        pass
                await asyncio.sleep(min(0.02 if reads else 1.0, max(0.0, end - time.monotonic())))

    def answers_ms(self, begin: float, end: float) -> dict[str, float]:
        """Of the answers that ended in between."""
        return _ms([took for at, took in self.whole_s if begin <= at < end])

    async def health(self) -> None:
        """Probes as a router makes them."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while time.monotonic() < self.until:
            started = time.monotonic()
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
            self.health_s.append(time.monotonic() - started)
            await asyncio.sleep(0.1)
        writer.close()


def rss(pid: int) -> float:
    """Resident memory in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


async def run(
    server: object, load: Load, clients: int, seconds: float, turns: list[tuple[float, float]]
) -> list[list[float]]:
    """Memory of front and engine from the middle of the run on."""
    pids = (server.process.pid, server.child())  # type: ignore[attr-defined]
    tasks = [asyncio.create_task(load.client(number)) for number in range(clients)]
    tasks += [
        asyncio.create_task(load.much(*turn, reads=i % 2 == 0)) for i, turn in enumerate(turns)
    ]
    tasks.append(asyncio.create_task(load.health()))
    memory: list[list[float]] = []
    await asyncio.sleep(seconds / 3)
    while time.monotonic() < load.until:
        memory.append([rss(pid) for pid in pids])
        await asyncio.sleep(min(5.0, max(0.1, load.until - time.monotonic())))
    await asyncio.gather(*tasks)
    return memory


def offline(count: int) -> float:
    """Tokens a second of `LLM.generate` on such prompts."""
    import dllm_jax as dj

    llm = dj.LLM("builtin:tiny-sdar", max_num_seqs=32, progress=False)
    params = dj.SamplingParams(max_tokens=MAX_TOKENS)
    llm.generate(prompts(-1, 32), params, use_tqdm=False)
    started = time.monotonic()
    outputs = llm.generate(prompts(0, count), params, use_tqdm=False)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return tokens / (time.monotonic() - started)


def main() -> int:
    """Run, print, and say whether the checks hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--leaving", type=float, default=0.2, help="share that leaves")
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()
    from dllm_jax.bench.numbers import environment
    from tests.serve.driving import Server, within

    measured: dict[str, Any] = {"command": "benchmarks/serve_soak.py", **environment()}
    measured |= vars(args) | {"output": None}
    measured["offline_tokens_per_s"] = offline(512)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(["-m", "dllm_jax.cli", "serve", *FLAGS], Path(folder) / "log")
        try:
            server.wait_ready()
            within(lambda: "done" not in server.get("/health")[1])
            seconds = 60 * args.minutes
            load = Load(server.port, time.monotonic() + seconds, args.leaving)
            began = server.metric("dllm_generation_tokens_total")
            sixths = [load.until - seconds / 6 * left for left in range(4, -1, -1)]
            turns = list(itertools.pairwise(sixths))
            memory = asyncio.run(run(server, load, args.clients, seconds, turns))
            measured["tokens_per_s"] = (
                server.metric("dllm_generation_tokens_total") - began
            ) / seconds
            idle = within(lambda: server.metric("dllm_num_requests_running") == 0)
            held = server.metric("dllm_kv_cache_usage_ratio")
        finally:
            status = server.stop()
    measured |= {"answers": len(load.whole_s), "left": load.left, "stuck": load.stuck}
    measured |= {"errors": load.errors, "idle_at_end": idle, "pages_held": held, "exit": status}
    measured["health_ms"] = health = _ms(load.health_s)
    measured["answer_ms"] = load.answers_ms(0, float("inf"))
    every = [load.answers_ms(*turn) for turn in turns]
    measured["answer_ms_beside_one_that_reads"], beside = every[::2], every[1::2]
    measured["answer_ms_beside_one_that_does_not"] = beside
    by_kind = [[one["p99"] for one in kind] for kind in (every[::2], beside)]
    noise = max(max(kind) - min(kind) for kind in by_kind)
    measured["p99_moves_by_ms"] = moved = statistics.mean(by_kind[1]) - statistics.mean(by_kind[0])
    measured["p99_differs_by_ms_of_itself"] = noise
    measured["share_of_generate"] = share = (
        measured["tokens_per_s"] / measured["offline_tokens_per_s"]
    )
    measured["load_average"] = os.getloadavg()
    # By medians: a reading now and then is some 60 MB off for one sample, in either direction.
    growth = [
        statistics.median(column[-10:]) / statistics.median(column[:10]) - 1
        for column in zip(*memory, strict=True)
    ]
    measured["rss_mb"] = [[round(one) for one in column] for column in zip(*memory, strict=True)]
    measured["rss_growth"] = [round(one, 4) for one in growth]
    missed = [f"health {name}" for name, bar in HEALTH_MS.items() if health[name] >= bar]
    missed += ["p99 beside the one that does not read"] * (moved > noise)
    missed += ["growth"] * (max(growth) >= MOST_GROWTH) + ["share"] * (share < LEAST_SHARE)
    missed += [name for name in ("stuck", "errors", "pages_held", "exit") if measured[name]]
    measured["missed"] = missed + ["idle at the end"] * (not idle)
    print(json.dumps(measured, indent=1))
    if args.output:
        args.output.write_text(json.dumps(measured, indent=1) + "\n")
    return 1 if measured["missed"] else 0


def _ms(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"count": len(seconds), "p50": round(1e3 * cuts[49], 2), "p99": round(1e3 * cuts[98], 2)}


if __name__ == "__main__":
    sys.exit(main())
