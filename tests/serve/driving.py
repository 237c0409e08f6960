"""Starts servers as processes and talks to them with the standard library alone."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The tests' compiled programs: a server reads those of an `LLM` of the test, and the reverse.
PROGRAMS = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATIENCE_S = 120  # what takes 20 ms alone has taken seconds on a machine that had other work


class Server:
    """A server process; its log lines are kept in a file."""

    def __init__(self, command, log: Path, env=None, root=ROOT):
        self.log = log
        paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stderr=out,
                stdout=out,
                cwd=root,
                env={**os.environ, **PROGRAMS, "PYTHONPATH": paths, **(env or {})},
            )
        self.port = int(self._first_line()["url"].rsplit(":", 1)[1])

    def _first_line(self):
        within(lambda: self.lines("listening") or self.process.poll() is not None)
        for line in self.lines("listening"):
            return line
        raise RuntimeError(self.log.read_text())

    def lines(self, event=None):
        """The JSON lines of the log."""
        found = []
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [one for one in found if event in (None, one["event"])]

    def wait_ready(self, seconds=240):
        def settled():
            return self.process.poll() is not None or self.get("/health")[0] == 200

        if within(settled, seconds) and self.process.poll() is None:
            return self
        raise RuntimeError(f"not ready: {self.log.read_text()}")

    def request(self, method, path, body=None, headers=None, timeout=PATIENCE_S):
        """Status, body (JSON where it is), headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            headers.setdefault("content-type", "application/json")
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            reported = dict(answer.getheaders())
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            data = json.loads(data)
        return answer.status, data, {name.lower(): value for name, value in reported.items()}

    def get(self, path, headers=None):
        return self.request("GET", path, headers=headers)

    def post(self, path, body, headers=None):
        return self.request("POST", path, body, headers)

    def chat(self, text="hi", **fields):
        return self.post(CHAT, {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt="hi", **fields):
        return self.post(TEXT, {"prompt": prompt, **fields})

    def open(self, path, body):
        """A raw connection on which a request was sent."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        sock.sendall(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)
        return sock

    def raw(self, *parts, pause=0.05):
        """What comes back for bytes in several writes, until the server closes."""
        data = b""
        where = ("127.0.0.1", self.port), PATIENCE_S
        with contextlib.suppress(ConnectionError), socket.create_connection(*where) as sock:
            for i, part in enumerate(parts):
                time.sleep(pause if i else 0)
                sock.sendall(part)
            while piece := sock.recv(65536):
                data += piece
        return data

    def stream(self, path, body, delay=0.0):
        """The raw body of a stream, read at once or slowly."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        data = json.dumps({**body, "stream": True}).encode()
        connection.request("POST", path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        parts = []
        while part := answer.read1(256 if delay else 65536):
            parts.append(part)
            time.sleep(delay)
        connection.close()
        return answer.status, b"".join(parts)

    def events(self, path, body, delay=0.0):
        """The JSON of a stream's events, `[DONE]` checked and left out."""
        status, data = self.stream(path, body, delay)
        assert status == 200, data
        events = [line for line in data.decode().split("\n\n") if line and line[0] != ":"]
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    def metric(self, name):
        """The sum of a metric over its labels."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)

    def child(self):
        """The engine's process id."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(path.read_text().split()[0])

    def ended(self):
        """The exit status, once it has ended."""
        return self.process.wait(PATIENCE_S)

    def stop(self, number=signal.SIGTERM):
        """Signal it; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.ended()
        finally:
            if self.process.poll() is None:
                self.process.kill()


@contextlib.contextmanager
def scripted(folder, root=ROOT, **fields):
    """A server with the scripted engine, ready unless `settings` say otherwise."""
    server = Server(["-m", "tests.serve.scripted", json.dumps(fields)], folder / "log", root=root)
    try:
        if not {"slow", "broken"} & set(fields.get("settings", {})):
            server.wait_ready()
        yield server
    finally:
        server.stop(signal.SIGKILL)


def text_of(events, choice=0):
    """The concatenated deltas of a choice."""
    pieces = []
    for event in events:
        for one in event.get("choices", ()):
            if one["index"] == choice:
                pieces.append(one["delta"].get("content", "") if "delta" in one else one["text"])
    return "".join(pieces)


def gone(pid):
    """Whether a process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def within(condition, seconds=PATIENCE_S):
    """Whether a condition comes true; ask only for what stays true until the test goes on."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False
