"""CPU time of the HTTP front for an event of a stream and for a short request.

The engine is the tests' script, so nothing but the front is measured: `clock_gettime` of its
process over many requests. Linux only.

    python benchmarks/serve_front.py --output benchmarks/results/serve_front_cpu.json
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

EVENTS_EACH = 16  # four words an event
STEP_S = 0.1  # of the script: 200 streams bring 2,000 events a second, which no reader merges
CASES = {
    "event": ("/v1/completions", {"prompt": [1], "max_tokens": 4 * EVENTS_EACH, "stream": True}),
    "short request (token ids)": ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4}),
    "short request (text)": ("/v1/completions", {"prompt": "hi there", "max_tokens": 4}),
    "short request (chat)": ("/v1/chat/completions", {"max_tokens": 4}),
    "version": ("/version", None),
}


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
    await client(port, path, body, 10)
    before = cpu_seconds(pid)
    seen = sum(await asyncio.gather(*(client(port, path, body, count) for _ in range(clients))))
    if name == "event" and seen < 0.95 * clients * count * EVENTS_EACH:
        raise RuntimeError(f"{seen} events came: the front was late, and merged some")
    return 1e6 * (cpu_seconds(pid) - before) / seen


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200, help="of the streams")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()
    from dllm_jax.bench.numbers import commit
    from tests.serve.driving import scripted

    measured: dict[str, object] = {"command": "benchmarks/serve_front.py", "clients": args.clients}
    measured |= {"commit": commit(), "python": platform.python_version(), "cores": os.cpu_count()}
    measured["microseconds"] = found = {}
    settings = {"step_s": STEP_S}
    fields = {"limits": {"max_waiting": 4096}, "log_format": "json", "settings": settings}
    with tempfile.TemporaryDirectory() as folder, scripted(Path(folder), **fields) as server:
        pid, port = server.process.pid, server.port
        for name in args.case or CASES:
            clients, count = (args.clients, 4) if name == "event" else (16, 100)
            runs = [
                asyncio.run(measure(pid, port, name, clients, count)) for _ in range(args.repeat)
            ]
            found[name] = runs
            print(f"{name:28} {min(runs):7.1f} us (of {', '.join(f'{one:.0f}' for one in runs)})")
    measured["load_average"] = os.getloadavg()
    if args.output:
        args.output.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        raise SystemExit(str(error)) from error
