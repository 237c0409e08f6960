"""What clients of `dllm-jax serve builtin:tiny-sdar` see when something ends, timed.

A client that leaves, SIGKILL of the engine process (with and without `--restart-engine`), SIGKILL
of the front, and SIGTERM under load. The exit status is 1 where a bar is missed or a request ended
without being told. Linux only.

    python benchmarks/serve_faults.py --output benchmarks/results/serve_faults_cpu.json
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dllm_jax.bench.client import Client, Disconnected, Exchange  # noqa: E402
from dllm_jax.bench.numbers import environment  # noqa: E402
from tests.serve.driving import CHAT, TEXT, Server, gone  # noqa: E402

BAR_S = 1.0
PROMPT = "<|user|>Ben earns 37 dollars a day. How many in 5 days?<|assistant|>"
FLAGS = ("builtin:tiny-sdar", "--max-num-seqs", "8", "--port", "0", "--log-format", "json")


def body(stream: bool, most: int = 400) -> dict[str, Any]:
    """A text that goes on."""
    return {"prompt": PROMPT, "max_tokens": most, "ignore_eos": True, "stream": stream}


@contextlib.contextmanager
def served(*flags: str) -> Any:
    """A server that is ready."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(["-m", "dllm_jax.cli", "serve", *FLAGS, *flags], Path(folder) / "log")
        try:
            yield server.wait_ready()
        finally:
            server.stop(signal.SIGKILL)


def run(server: Server, work: Any, *args: Any) -> dict[str, Any]:
    """`work` with a client of its own."""

    async def working() -> dict[str, Any]:
        client = Client(f"http://127.0.0.1:{server.port}")
        try:
            return await work(server, client, *args)
        finally:
            client.close()

    return asyncio.run(working())


async def counted(client: Client, name: str) -> float:
    """A metric, summed over its labels."""
    _, data = await client.get("/metrics")
    lines = data.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)


async def leaving(_: Server, client: Client) -> dict[str, Any]:
    """Milliseconds from a client's leaving until slot and pages are free, and between pieces."""
    answer = await client.post(TEXT, body(True))
    times = [at for at, _ in answer.events]
    measured: dict[str, Any] = {
        "between_pieces_ms": _spread([b - a for a, b in itertools.pairwise(times)])
    }
    for name, stream in (("streamed", True), ("whole", False)):
        freed = []
        for _ in range(5):
            task = asyncio.create_task(client.post(TEXT, body(stream)))
            while await counted(client, "dllm_num_requests_running") < 1:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)
            task.cancel()
            left = time.perf_counter()
            await asyncio.gather(task, return_exceptions=True)
            while (
                await counted(client, "dllm_num_requests_running")
                or await counted(client, "dllm_kv_cache_usage_ratio")
            ) and time.perf_counter() < left + 20:
                await asyncio.sleep(0)
            freed.append(time.perf_counter() - left)
        measured[f"{name}_free_after_ms"] = _spread(freed)
    return measured


async def engine_killed(server: Server, client: Client, restarts: bool) -> dict[str, Any]:
    """SIGKILL of the engine under eight streams and four whole answers."""
    asked = [asyncio.create_task(client.post(TEXT, body(n < 8))) for n in range(12)]
    while await counted(client, "dllm_num_requests_running") < 8:
        await asyncio.sleep(0.02)
    os.kill(server.child(), signal.SIGKILL)
    killed = time.perf_counter()
    measured: dict[str, Any] = {}
    while (await client.get("/health"))[0] != 503:
        await asyncio.sleep(0.002)
    measured["health_503_after_ms"] = 1e3 * (time.perf_counter() - killed)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    measured["all_told_after_ms"] = 1e3 * max(
        one.ended_s - killed for one in answers if isinstance(one, Exchange)
    )
    measured["streams_with_an_error_event"] = sum(map(_is_told_of_an_error, answers))
    measured["answers_503"] = sum(
        isinstance(one, Exchange) and one.status == 503 for one in answers
    )
    if restarts:
        while (await client.get("/health"))[0] != 200:
            await asyncio.sleep(0.05)
        measured["ready_again_after_s"] = time.perf_counter() - killed
        measured["next_answer"] = (await client.post(TEXT, body(False, 16))).status
    else:
        measured["exit"] = await asyncio.to_thread(server.process.wait, 20)
        measured["exit_after_s"] = time.perf_counter() - killed
    return measured


def front_killed(server: Server) -> dict[str, Any]:
    """SIGKILL of the front while the engine works."""
    child = server.child()
    with server.open(CHAT, {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}):
        time.sleep(0.3)
        os.kill(server.process.pid, signal.SIGKILL)
        killed = time.perf_counter()
        while not gone(child) and time.perf_counter() < killed + 10:
            time.sleep(0.002)
    return {"engine_gone_after_ms": 1e3 * (time.perf_counter() - killed)}


async def terminated(server: Server, client: Client, clients: int) -> dict[str, Any]:
    """SIGTERM under clients that ask without a pause: how each request ended."""
    seen = dict.fromkeys(("whole", "told", "lost"), 0)
    signalled = asyncio.Event()

    async def one(number: int) -> None:
        while True:
            stream = bool(number % 2)
            try:
                answer = await client.post(TEXT, body(stream, 64))
            except Disconnected:  # it had been sent, and nothing whole came back
                seen["lost"] += 1
                return
            except OSError:  # the port is closed: nothing was accepted
                return
            if answer.status != 200:
                seen["told" if b'"error"' in answer.body else "lost"] += 1
                return
            is_whole = answer.is_done if stream else b'"usage"' in answer.body
            is_error = _is_told_of_an_error(answer)
            seen["told" if is_error else "whole" if is_whole else "lost"] += 1
            if signalled.is_set():
                return

    tasks = [asyncio.create_task(one(number)) for number in range(clients)]
    await asyncio.sleep(3)
    open_then = await counted(client, "dllm_num_requests_running")
    server.process.send_signal(signal.SIGTERM)
    signalled.set()
    began = time.perf_counter()
    await asyncio.gather(*tasks)
    status = await asyncio.to_thread(server.process.wait, 60)
    return seen | {
        "clients": clients,
        "running_at_the_signal": open_then,
        "exit": status,
        "exit_after_s": time.perf_counter() - began,
    }


def _is_told_of_an_error(answer: Any) -> bool:
    is_stream = isinstance(answer, Exchange) and bool(answer.events)
    return is_stream and answer.is_done and b'"error"' in answer.events[-1][1]


def _spread(seconds: list[float]) -> dict[str, float]:
    values = [1e3 * one for one in seconds]
    return {"median": statistics.median(values), "max": max(values)}


def main() -> int:
    """Run each fault, print, and say whether the bars hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32, help="at SIGTERM")
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()
    measured: dict[str, Any] = {"command": "benchmarks/serve_faults.py", **environment()}
    measured["load_average"] = os.getloadavg()
    with served("--restart-engine", "1") as server:
        measured["a_client_leaves"] = run(server, leaving)
        restarted = run(server, engine_killed, True)
        final = run(server, engine_killed, False)
    measured |= {"engine_killed_and_replaced": restarted, "engine_killed": final}
    with served("--no-warm-up") as server:
        measured["front_killed"] = front_killed(server)
    with served() as server:
        measured["sigterm_under_load"] = run(server, terminated, args.clients)
    print(json.dumps(measured, indent=1))
    if args.output:
        args.output.write_text(json.dumps(measured, indent=1) + "\n")
    slow = [one["health_503_after_ms"] for one in (restarted, final)]
    slow += [one["all_told_after_ms"] for one in (restarted, final)]
    slow.append(measured["front_killed"]["engine_gone_after_ms"])
    is_told = all(
        one["streams_with_an_error_event"] == 8 and one["answers_503"] == 4
        for one in (restarted, final)
    )
    ends = measured["sigterm_under_load"]
    holds = max(slow) < 1e3 * BAR_S and is_told and not ends["lost"] and ends["exit"] == 0
    return 0 if holds and final["exit"] == 1 and restarted["next_answer"] == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
