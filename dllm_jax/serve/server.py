"""The front process: binds the port, starts the engine, serves until a signal or a failure.

Order of things: port bound -> engine spawned -> HTTP answered, `/health` says "starting" -> ready.
The first SIGTERM or Ctrl-C drains: new requests are refused, running ones go on for
`drain_timeout`, then end with an error event. A second signal does not wait.
"""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Generator

import uvicorn
import uvloop

from dllm_jax.serve.app import application
from dllm_jax.serve.client import EngineClient
from dllm_jax.serve.limits import IDLE_SECONDS
from dllm_jax.serve.logs import Log, Printed
from dllm_jax.serve.protocol import close_overdue, limited
from dllm_jax.serve.service import Config, Service
from dllm_jax.serve.stderr import Stderr

DONE, FAILED, BAD_USAGE, SIGNALLED = 0, 1, 2, 128
FLUSH_SECONDS = 1.0  # for error events and a last /health to get out
SWITCH_S = 5e-4  # until the event loop may run next to a thread that reads a large body
_POLL_S = 0.05


class _Server(uvicorn.Server):
    """uvicorn with our own signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """The listening socket.

    Raises:
        OSError: The address is in use, or none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    return sock


def run(config: Config, sock: socket.socket) -> int:
    """Serve on a bound socket; the exit status."""
    sys.setswitchinterval(SWITCH_S)
    stderr = Stderr(_stderr_fd(), Log(config.log_format).dropped)
    log = Log(config.log_format, stderr)
    with contextlib.redirect_stderr(Printed(log) if config.log_format == "json" else stderr):
        try:
            return uvloop.run(_run(Service(config, log), sock))
        finally:
            stderr.drain(FLUSH_SECONDS)


def _stderr_fd() -> int:
    """-1 where standard error is closed: 2 is then the next file that was opened."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # None, or a notebook's
        return -1


async def _run(service: Service, sock: socket.socket) -> int:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # `Gate` answers and logs
    config, began_s = service.config, time.monotonic()
    engine, stop = service.engine, _Stop(service.engine, service.drain)
    engine.start()
    server = _Server(
        uvicorn.Config(
            application(service),
            http=limited(config.limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_SECONDS),
            timeout_graceful_shutdown=2,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    others = [asyncio.create_task(close_overdue(server.server_state.connections))]
    if config.log_stats_every:
        others.append(asyncio.create_task(_tell_stats(service, config.log_stats_every)))
    gc.freeze()
    service.log.line("listening", url=_url(config, sock))
    if is_open(config, sock.getsockname()[0]):
        said = f"no key is set: whoever reaches {config.host} may use the model (--api-key-file)"
        service.log.line("warning", "warning", said=said)
    try:
        status = await _until_over(service, stop)
    finally:
        engine.fail_all("the server is shutting down")
        await _none_open(engine, FLUSH_SECONDS)
        server.should_exit = True
        await serving
        for task in others:
            task.cancel()
        await engine.close()
        service.close()
        service.log.flush()
    service.log.line(
        "exit",
        "error" if engine.failure else "info",
        status=status,
        reason=engine.failure or (signal.Signals(stop.number).name if stop.number else "drain"),
        seconds=round(time.monotonic() - began_s, 1),
        restarts=engine.num_restarts,
    )
    return status


def is_open(config: Config, address: str) -> bool:
    """Whether others than users of this machine may ask without a key."""
    return not (config.has_keys or ipaddress.ip_address(address).is_loopback)


async def _until_over(service: Service, stop: "_Stop") -> int:
    engine, was_ready = service.engine, False
    while not (stop.first.is_set() or engine.over.is_set()):
        if not was_ready and engine.state == "ready":
            was_ready = True
            gc.collect()  # the tokenizer has brought many objects: none of them is ever garbage
            gc.freeze()
        await _either(engine.over, stop.first, None if was_ready else _POLL_S)
    if engine.over.is_set():
        print(f"error: {engine.failure}", file=sys.stderr, flush=True)
        if was_ready:
            await asyncio.sleep(FLUSH_SECONDS)
        return BAD_USAGE if engine.is_usage else FAILED
    engine.is_draining = True
    service.log.line("draining", open=engine.num_open, seconds=service.config.drain_timeout)
    await _none_open(engine, service.config.drain_timeout)
    if engine.failure is not None:
        return FAILED
    return SIGNALLED + signal.SIGINT if stop.number == signal.SIGINT else DONE


async def _tell_stats(service: Service, every_s: float) -> None:
    """A line of throughput after each `every_s` seconds in which there was work."""
    loop = asyncio.get_running_loop()
    while True:
        before, at_s = service.engine.counts, loop.time()
        await asyncio.sleep(every_s)
        now, seconds = service.engine.counts, loop.time() - at_s
        done = {
            f"{name}_per_s": round(max(0, getattr(now, name) - getattr(before, name)) / seconds, 1)
            for name in ("prompt_tokens", "generated_tokens", "nfe")
        }
        if any(done.values()) or now.num_running or now.num_waiting:
            held = round(now.num_pages_held / max(now.num_pages, 1), 3)
            texts = {"running": now.num_running, "waiting": now.num_waiting}
            service.log.line("stats", "info", **texts, **done, cache_usage=held)


async def _either(one: asyncio.Event, other: asyncio.Event, seconds: float | None) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in (one, other)]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _none_open(engine: EngineClient, seconds: float) -> None:
    """Wait until no request is open."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while engine.has_open and loop.time() < until:
        await asyncio.sleep(_POLL_S)


class _Stop:
    """Signals: the first leaves a mark, the second ends the process."""

    def __init__(self, engine: EngineClient, first: asyncio.Event):
        self.number = 0
        self.first = first
        self._engine = engine
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take, number)

    def _take(self, number: int) -> None:
        if self.number:
            if self._engine.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._engine.pid, signal.SIGKILL)
            os._exit(SIGNALLED + number)
        self.number = number
        self.first.set()


def _url(config: Config, sock: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{sock.getsockname()[1]}"
