"""The readers of a mailbox: a stream of server-sent events, or one whole answer.

A stream is `data: {json}` and an empty line, again and again, then `data: [DONE]`. There is no
`event:`, `id:` or `retry:` line and no CRLF: each of them breaks clients (docs/http.md). After 15 s
of silence a comment line keeps proxies awake. A client that leaves, or takes nothing for 60 s,
aborts its request.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

import msgspec

from dllm_jax.serve import limits
from dllm_jax.serve.answers import Window
from dllm_jax.serve.mailbox import Mailbox, RequestFailed
from dllm_jax.serve.metrics import Metrics
from dllm_jax.serve.pipe import Delta, Frame
from dllm_jax.serve.refusals import Refusal

FRAME_SECONDS = 1 / 60  # between two frames of a choice
DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_ENCODER = msgspec.json.Encoder()

Send = Callable[[Any], Awaitable[None]]


class ClientGone(Exception):
    """The client left, or takes nothing."""


# Line ends of Unicode, at which some clients split a stream: a JSON text may name them.
_LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in "\x85\u2028\u2029"}


def _json(content: Any) -> bytes:
    """JSON in one line."""
    data = _ENCODER.encode(content)
    for end, name in _LINE_ENDS.items():
        if end in data:
            data = data.replace(end, name)
    return data


def event(content: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + _json(content) + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """One event of a stream whose clients read its name, which is the content's type."""
    return b"event: " + content["type"].encode() + b"\ndata: " + _json(content) + b"\n\n"


class EventStream:
    """A stream of one request, as an ASGI response.

    Args:
        usage: `include_usage`.
        running_usage: `continuous_usage_stats`.

    Attributes:
        finishes: How texts ended, for log and metrics.
        error: What was said in an error event.
    """

    keep_alive = _KEEP_ALIVE

    def __init__(
        self,
        box: Mailbox,
        form: Any,
        metrics: Metrics,
        request_id: str,
        *,
        usage: bool = False,
        running_usage: bool = False,
    ):
        self._box, self._form, self._metrics = box, form, metrics
        self._request_id = request_id
        self._usage, self._running_usage = usage, running_usage
        self._roles: set[int] = set()
        self._ended: set[int] = set()
        self._edges: dict[int, list[bytes]] = {}  # of a piece, around its text
        self._windows: dict[int, Window] = {}
        self._held: dict[int, Frame] = {}
        self._frame_at = 0.0
        self._written_at: dict[int, float] = {}
        self._sent_s = time.monotonic()
        self._is_sending = self._is_silent = False
        self.finishes: list[Delta] = []
        self.error: str | None = None

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Send until the texts have ended.

        Raises:
            ClientGone: It left.
        """
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        box, connection = self._box, scope["dllm.connection"]
        listen(connection, box)
        box.on_text = functools.partial(self._write, connection)
        with self._watched(connection):
            is_over = False
            while not is_over:
                await box.wait(self._patience())
                if box.is_closed:
                    raise ClientGone
                data = b"".join(self._events(box.take()))
                if box.refusal is not None:
                    self.error = self.error or str(box.refusal)
                is_over = self.error is not None or box.failure is not None or box.is_over
                if is_over:
                    data += self._ending()
                elif self._is_silent:
                    data = data or self.keep_alive
                if data:
                    self._sent_s, self._is_sending, self._is_silent = time.monotonic(), True, False
                    await send(
                        {"type": "http.response.body", "body": data, "more_body": not is_over}
                    )
                    self._is_sending = False
            if box.is_closed:
                raise ClientGone

    def _write(self, connection: Any, delta: Delta) -> bool:
        """Send a piece at once, which spares two turns of the event loop and half of its cost."""
        if not connection.is_writable:
            return False
        if delta.text and delta.choice in self._edges and not self._held:
            self._sent_s = time.monotonic()
            self._observe_gap(delta.choice, self._sent_s)
            connection.write_chunk(self._text(delta))
        elif data := b"".join(self._events([delta])):
            self._sent_s = time.monotonic()
            connection.write_chunk(data)
        return True

    def _observe_gap(self, choice: int, now: float) -> None:
        if (before := self._written_at.get(choice)) is not None:
            self._metrics.observe("dllm_inter_block_seconds", now - before)
        self._written_at[choice] = now

    def _patience(self) -> float | None:
        """Seconds until a frame is due."""
        if not self._held:
            return None
        return max(0.0, self._frame_at + FRAME_SECONDS - time.monotonic())

    @contextlib.contextmanager
    def _watched(self, connection: Any) -> Generator[None, None, None]:
        """Inside, a comment ends a silence, and a client that takes nothing is dropped.

        One timer a stream, which is late by no more than it was early: a timeout around each send
        and each wait would cost as much as an event.
        """
        loop = asyncio.get_running_loop()

        def look() -> None:
            nonlocal timer
            most = limits.CLIENT_SECONDS if self._is_sending else limits.KEEP_ALIVE_SECONDS
            left = self._sent_s + most - time.monotonic()
            if left <= 0 and self._is_sending:
                connection.transport.abort()
                return
            if left <= 0:
                self._is_silent, left = True, most
                self._box.wake()
            timer = loop.call_later(left, look)

        timer = loop.call_later(limits.KEEP_ALIVE_SECONDS, look)
        try:
            yield
        finally:
            timer.cancel()
            connection.on_lost.discard(self._box.leave)

    def _events(self, deltas: list[Delta]) -> Iterator[bytes]:
        now = time.monotonic()
        for delta in deltas:
            if delta.finish == "error":
                self.finishes.append(delta)
                self.error = delta.error or "no reason given"
                return
            if delta.text or delta.ids or delta.logprobs or delta.finish is not None:
                if delta.text:
                    self._observe_gap(delta.choice, now)
                yield from self._chunks(delta)
            if delta.finish is not None:
                self.finishes.append(delta)
                self._ended.add(delta.choice)
                self._held.pop(delta.choice, None)
            elif delta.frame is not None:
                if self._held.pop(delta.choice, None) is not None:
                    self._metrics.count("dllm_denoise_frames_total", fate="merged")
                self._held[delta.choice] = delta.frame
        if self._held and now >= self._frame_at + FRAME_SECONDS:
            self._frame_at = now
            yield from self._frames()

    def _chunks(self, delta: Delta) -> Iterator[bytes]:
        """The events of new text or of an end."""
        if self._form.is_chat and delta.choice not in self._roles:
            self._roles.add(delta.choice)
            yield event(self._form.role(delta.choice))
        is_plain = not (self._running_usage or self._form.has_logprobs)
        if delta.finish is None and is_plain:
            yield self._text(delta)
        else:
            yield event(self._piece(delta))

    def _text(self, delta: Delta) -> bytes:
        """A piece of which only the text is new."""
        edges = self._edges.get(delta.choice)
        if edges is None:
            piece = event(self._form.piece(Delta(delta.id, delta.choice, "", 0)))
            edges = self._edges[delta.choice] = piece.rsplit(b'""', 1)
        return edges[0] + _json(delta.text) + edges[1]

    def _piece(self, delta: Delta) -> dict[str, Any]:
        chunk = self._form.piece(delta)
        box = self._box
        if self._running_usage:
            chunk["usage"] = self._form.usage(sum(box.num_tokens))
        if box.is_over and not self._usage and len(self.finishes) == box.num_choices - 1:
            last = self._form.last(sum(box.num_tokens), box.usages)
            chunk["metrics"] = last["metrics"]
        return chunk

    def _frames(self) -> Iterator[bytes]:
        held, self._held = self._held, {}
        for choice, frame in held.items():
            window = self._windows.setdefault(choice, Window())
            delta = window.change(frame)
            if delta["set"] or delta["clear"] or window.seq == 1:
                self._metrics.count("dllm_denoise_frames_total", fate="sent")
                yield event(self._form.frame(choice, window.seq, delta))

    def _ending(self) -> bytes:
        """The usage chunk or the error, and the end."""
        if (failure := self._failure()) is not None:
            return event(failure.body) + DONE
        if self._usage:
            last = self._form.last(sum(self._box.num_tokens), self._box.usages)
            return event(last) + DONE
        return DONE

    def _failure(self) -> Refusal | None:
        """Why the stream ends before its texts have; None: it does not."""
        box = self._box
        if box.failure is not None and not box.is_over:
            self.error = self.error or box.failure
            return Refusal(box.failure, code="engine_failed", status=503)
        if self.error is None:
            return None
        return box.refusal if isinstance(box.refusal, Refusal) else internal_error(self._request_id)


async def whole(box: Mailbox, connection: Any) -> list[Delta]:
    """The texts of a request, in the order of its choices, once all have ended.

    Raises:
        ClientGone: The client left.
        RequestFailed: A text ended with an error.
        Refusal: The engine refuses the request.
        EngineGone: The engine ended first.
    """
    texts: dict[int, Delta] = {}
    listen(connection, box)
    try:
        while not (box.is_over and len(texts) == box.num_choices):
            await box.wait()
            if box.is_closed:
                raise ClientGone
            for delta in box.take():
                if delta.choice in texts:
                    texts[delta.choice].merge(delta)
                else:
                    texts[delta.choice] = delta
                if delta.finish == "error":
                    raise RequestFailed(delta.error or "no reason given")
            box.check()
    finally:
        connection.on_lost.discard(box.leave)
    return [texts[choice] for choice in sorted(texts)]


def internal_error(request_id: str) -> Refusal:
    """A failure of ours, as it is answered: the reason is in the log."""
    message = f"the server failed on this request; its id in the log is {request_id}"
    return Refusal(message, code="internal_error", status=500)


def listen(connection: Any, box: Mailbox) -> None:
    """From now on the mailbox learns when the client leaves."""
    connection.on_lost.add(box.leave)
    if connection.transport.is_closing():
        box.leave()
