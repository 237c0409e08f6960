"""CPU time of the HTTP front for an event of a stream and for a short request.

The engine is the tests' script, so nothing but the front is measured: `clock_gettime` of its
process over many requests. Beside it stands what uvicorn takes for the same requests and events
when the application is empty: no server on it takes less. They are asked by turns, and so is
another checkout with `--against`: a figure is good beside those of the same run only. Linux only.

A short request of token ids is the one beside tokenising. Its cost falls with the number of
clients, as more requests are found at each waking (`--askers`).

    python benchmarks/serve_front.py --output benchmarks/results/serve_front_cpu.json
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

EVENTS_EACH = 16  # four words an event
EVENT_S = 0.1  # between events of a stream: 200 streams bring 2,000 a second, and none is merged
REQUEST_S = 0.02  # the script's step where each client waits for its answer
CASES = {
    "event": ("/v1/completions", {"prompt": [1], "max_tokens": 4 * EVENTS_EACH, "stream": True}),
    "short request (token ids)": ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4}),
    "short request (text)": ("/v1/completions", {"prompt": "hi there", "max_tokens": 4}),
    "short request (chat)": ("/v1/chat/completions", {"max_tokens": 4}),
    "version": ("/version", None),
}
BARE = ("event", "short request (token ids)")


def serve_empty() -> None:
    """An application on uvicorn that reads nothing of its requests."""
    import uvicorn
    import uvloop

    answer = b'{"choices":[{"index":0,"text":"word0 word1","finish_reason":null}]}' * 5
    event = b"data: " + answer[:250] + b"\n\n"

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        start = {"type": "http.response.start", "status": 200}
        if b"stream" not in body:
            await send(start | {"headers": [(b"content-length", b"%d" % len(answer))]})
            await send({"type": "http.response.body", "body": answer})
            return
        await send(start | {"headers": [(b"content-type", b"text/event-stream")]})
        for left in reversed(range(EVENTS_EACH)):
            await asyncio.sleep(EVENT_S)
            await send({"type": "http.response.body", "body": event, "more_body": left > 0})

    sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    print(json.dumps({"event": "listening", "url": url}), flush=True)
    options = {"http": "httptools", "ws": "none", "lifespan": "off", "log_config": None}
    server = uvicorn.Server(uvicorn.Config(application, access_log=False, **options))
    uvloop.run(server.serve(sockets=[sock]))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads."""
    return time.clock_gettime((~pid << 3) | 2)


async def client(port: int, path: str, body: dict | None, count: int) -> int:
    """Send requests one after another on one connection; the events or answers that came."""
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nuser-agent: bench\r\naccept: */*\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    seen = 0
    for _ in range(count):
        writer.write(head.encode() + data)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in answer[:16]:
            raise RuntimeError(answer.decode())
        if b"chunked" in answer:
            while size := int(await reader.readline(), 16):
                seen += (await reader.readexactly(size + 2)).count(b"data: {")
            await reader.readexactly(2)
        else:
            length = answer.split(b"content-length:")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
            seen += 1
    writer.close()
    return seen


async def measure(pid: int, port: int, name: str, clients: int, count: int) -> float:
    """Microseconds of the front's CPU an event or request."""
    path, body = CASES[name]
    if body is not None and "prompt" not in body:
        body = {**body, "messages": [{"role": "user", "content": "hi there"}]}
    await client(port, path, body, 1 if name == "event" else 10)
    before = cpu_seconds(pid)
    seen = sum(await asyncio.gather(*(client(port, path, body, count) for _ in range(clients))))
    if name == "event" and seen < 0.95 * clients * count * EVENTS_EACH:
        raise RuntimeError(f"{seen} events came: the server was late, and merged some")
    return 1e6 * (cpu_seconds(pid) - before) / seen


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200, help="of the streams")
    parser.add_argument("--askers", type=int, default=16, help="clients of the other cases")
    parser.add_argument("--against", type=Path, help="another checkout, asked by turns")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--empty", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.empty:
        serve_empty()
        return
    from dllm_jax.bench.numbers import commit
    from tests.serve.driving import Server, scripted

    measured: dict[str, object] = {"command": "benchmarks/serve_front.py", "commit": commit()}
    measured |= {"clients": args.clients, "askers": args.askers}
    measured |= {"python": platform.python_version(), "cores": os.cpu_count()}
    found: dict[str, list[float]] = {}
    measured["microseconds"] = found
    roots = {"": ROOT} | ({} if args.against is None else {f"{args.against.name}: ": args.against})
    fields = {"limits": {"max_waiting": 4096}, "log_format": "json"}
    asked = args.case or [*CASES]
    for cases, step_s in (({"event"}, EVENT_S), (set(CASES) - {"event"}, REQUEST_S)):
        cases = [name for name in asked if name in cases]
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            servers: dict[str, Server] = {}
            for i, (label, root) in enumerate(roots.items() if cases else ()):
                (Path(folder) / str(i)).mkdir()
                engine = {**fields, "settings": {"step_s": step_s}}
                server = scripted(Path(folder) / str(i), root, **engine)
                servers[label] = stack.enter_context(server)
            empty = Server([__file__, "--empty"], Path(folder) / "empty")
            stack.callback(empty.process.kill)
            servers["empty application: "] = empty
            for name, _, (label, one) in itertools.product(
                cases, range(args.repeat), servers.items()
            ):
                if one is not empty or name in BARE:
                    clients, count = (args.clients, 4) if name == "event" else (args.askers, 100)
                    value = asyncio.run(measure(one.process.pid, one.port, name, clients, count))
                    found.setdefault(label + name, []).append(value)
    for name, runs in found.items():
        print(f"{name:45} {min(runs):7.1f} us (of {', '.join(f'{one:.0f}' for one in runs)})")
    if args.output:
        measured["load_average"] = os.getloadavg()
        args.output.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        raise SystemExit(str(error)) from error
