"""A stand-in for the Hugging Face hub on this machine: the routes that huggingface_hub uses.

Repositories are dictionaries of files by commit; every request is recorded. What is refused, and
by which headers, is how the hub answers (X-Error-Code); nothing of ours is imported.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_PIECE = 1 << 16
COMMITS = ("1" * 40, "2" * 40)


class Repository:
    """Files by commit; `main` is the last commit.

    Args:
        token: Who may see it; None: everybody.
        gated: Whether its files are refused to everybody although it can be seen.
    """

    def __init__(
        self,
        *commits: dict[str, bytes],
        tags: dict[str, int] | None = None,
        token: str | None = None,
        gated: bool = False,
    ):
        self.commits = dict(zip(COMMITS, commits, strict=False))
        self.refs = {"main": COMMITS[len(commits) - 1]}
        self.refs |= {tag: COMMITS[i] for tag, i in (tags or {}).items()}
        self.token, self.gated = token, gated

    def commit(self, revision: str) -> str | None:
        """The commit of a branch, tag or commit; None where there is none."""
        known = self.refs.get(revision, revision)
        return known if known in self.commits else None


class Hub:
    """Repositories at `url`, and what was asked of them.

    Attributes:
        requests: (method, path, Authorization, Range) of each request.
        status: Answered to everything, where set, with `message`.
        slow: Files that come in drops and never end.
        cut: Files whose connection breaks half way, once.
        sent: Bytes of files that were sent.
    """

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str | None, str | None]] = []
        self.status: int | None = None
        self.message = ""
        self.slow: set[str] = set()
        self.cut: set[str] = set()
        self.sent = 0
        self.is_dripping = threading.Event()
        self.is_closed = False  # connections that were kept end then
        self.url = ""

    def files(self, method: str = "GET") -> list[str]:
        """Names of the files asked for, in order of name."""
        found = (re.fullmatch(r"/.+/resolve/[^/]+/(.+)", path) for _, path, *_ in self.of(method))
        return sorted(match[1] for match in found if match)

    def of(self, method: str) -> list[tuple[str, str, str | None, str | None]]:
        """Requests of one method."""
        return [request for request in self.requests if request[0] == method]


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers until the end."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.is_closed = True
        hub.slow.clear()  # ends what still drips
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = (self.command, path, self.headers["Authorization"], self.headers["Range"])
        self.hub.requests.append(asked)
        if self.hub.is_closed:
            self.close_connection = True
        elif self.hub.status is not None:
            self._refuse(self.hub.status, None)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", path):
            self._about(match[1], match[2] or "main", self._info)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._about(match[1], match[2], self._tree)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._about(match[1], match[2], self._file, match[3])
        else:
            self._refuse(404, None)

    def _about(self, name: str, revision: str, answer: Any, *rest: str) -> None:
        repository = self.hub.repositories.get(name)
        may_see = repository is not None and (
            repository.token is None
            or self.headers["Authorization"] == f"Bearer {repository.token}"
        )
        if repository is None or not may_see:
            self._refuse(401 if self.headers["Authorization"] is None else 404, "RepoNotFound")
        elif (commit := repository.commit(revision)) is None:
            self._refuse(404, "RevisionNotFound")
        elif repository.gated and rest:
            self._refuse(403, "GatedRepo")
        else:
            answer(repository.commits[commit], name, commit, *rest)

    def _info(self, files: dict[str, bytes], name: str, commit: str) -> None:
        siblings = [{"rfilename": path} for path in files]
        self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})

    def _tree(self, files: dict[str, bytes], name: str, commit: str) -> None:
        self._json(
            [
                {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                for path, data in files.items()
            ]
        )

    def _file(self, files: dict[str, bytes], name: str, commit: str, path: str) -> None:
        if path not in files:
            self._refuse(404, "EntryNotFound")
            return
        data = files[path]
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, start, stop = 200, 0, len(data)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or ""):
            status, start = 206, int(match[1])
            stop = min(len(data), int(match[2]) + 1) if match[2] else len(data)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._send(status, headers, data[start:stop], path)

    def _json(self, value: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _refuse(self, status: int, code: str | None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": self.hub.message}
        self._send(status, {key: value for key, value in headers.items() if value}, b"")

    def _send(self, status: int, headers: dict[str, str], data: bytes, path: str = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if path in self.hub.slow:
            self._drip(data, path)
            return
        if path in self.hub.cut:
            self.hub.cut.discard(path)
            self.close_connection = True
            data = data[: len(data) // 2]
        try:
            for start in range(0, len(data), _PIECE):
                self.wfile.write(data[start : start + _PIECE])
                self.hub.sent += min(_PIECE, len(data) - start)
        except OSError:  # whoever asked has read enough
            self.close_connection = True

    def _drip(self, data: bytes, path: str) -> None:
        """A few bytes at a time, so that the file takes for ever."""
        for i in range(len(data)):
            if path not in self.hub.slow:
                break
            try:
                self.wfile.write(data[i : i + 1])
                self.wfile.flush()
            except OSError:
                break
            self.hub.is_dripping.set()
            time.sleep(0.02)
        self.close_connection = True


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
