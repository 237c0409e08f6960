"""Limits of the server: their defaults, and who is refused when one is reached.

Nothing here waits: a request over a limit is answered at once.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from dllm_jax.serve.refusals import Refusal, shown

JSON = "application/json"
BODY_SECONDS = 30.0  # from the headers to the last byte of a body
CLIENT_SECONDS = 60.0  # a client that takes nothing for so long is dropped
KEEP_ALIVE_SECONDS = 15.0  # of silence, before a comment line
IDLE_SECONDS = 75.0  # of a connection between two requests
MAX_HEADER_BYTES = 64 << 10
PROBES = frozenset({b"/health", b"/live", b"/metrics"})
PROBE_PLACES = 16  # connections over the bound, where only probes are answered
DISCARDED_BYTES = 64 << 20  # of a body that is too large: its client reads no answer before its end
_LOW_RETRY_S, _HIGH_RETRY_S = 1, 30
_SMOOTHING = 0.1
_KEPT_SHARE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server.

    Attributes:
        max_body_bytes: Of a request.
        max_texts: Prompts times `n` of a request.
        max_waiting: Texts that wait for a slot; more are answered 429. An eighth of the places is
            kept for clients that have no text in the engine.
        min_priority: A request's own priority counts from here on; lower ones go first.
        max_connections: Open connections; over it one that waits is closed for each new one.
        head_timeout: Seconds from a connection, or the first byte of a head, to the head's end.
        request_timeout: Seconds after which a text ends with "length".
        max_denoise_streams: Streams of frames: one makes every chunk of the batch a step long.
    """

    max_body_bytes: int = 4 << 20
    max_texts: int = 128
    max_waiting: int = 256
    min_priority: int = 0
    max_connections: int = 1024
    head_timeout: float = 10.0
    request_timeout: float = 600.0
    max_denoise_streams: int = 2


class Admission:
    """Decides which requests may queue now."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._mean_s = 1.0  # of a request
        self.num_denoise = 0

    def check(
        self,
        num_open: int,
        num_slots: int,
        num_texts: int,
        denoise: bool,
        has_open: bool = False,
    ) -> None:
        """Refuse a request over a limit.

        Args:
            num_open: Texts in the engine.
            has_open: Some of them are this client's.

        Raises:
            Refusal: 429, with how long to wait.
        """
        limits = self._limits
        waiting = max(0, num_open - num_slots)
        most = limits.max_waiting
        if has_open and waiting:
            most -= most // _KEPT_SHARE + num_texts - 1
        if waiting >= most:
            raise Refusal(
                f"{waiting} texts wait for a slot; at most {limits.max_waiting} may, and some "
                "places are kept for clients without a text: try again later",
                code="queue_full",
                status=429,
                headers={"retry-after": self.retry_after(waiting, num_slots)},
            )
        if denoise and self.num_denoise >= limits.max_denoise_streams:
            raise Refusal(
                f"{self.num_denoise} denoise streams are open, the most there may be; try again "
                'later or use stream_mode="commit"',
                param="stream_mode",
                code="denoise_busy",
                status=429,
                headers={"retry-after": self.retry_after(waiting, num_slots)},
            )

    def priority(self, asked: int | None) -> int:
        """The priority that a request gets for the one it asks for."""
        return max(asked or 0, self._limits.min_priority)

    def retry_after(self, waiting: int, num_slots: int) -> str:
        """Seconds until a slot may be free."""
        seconds = waiting * self._mean_s / max(1, num_slots)
        return str(round(min(max(seconds, _LOW_RETRY_S), _HIGH_RETRY_S)))

    def ended(self, seconds: float) -> None:
        """A request has ended after so long."""
        self._mean_s += _SMOOTHING * (seconds - self._mean_s)


_CLOSE = {"connection": "close"}


def _too_large(most: int) -> Refusal:
    return Refusal(
        f"the body is over {most} bytes; send less at once",
        code="request_too_large",
        status=413,
        headers=_CLOSE,
    )


def check_body(kind: str, coding: str, length: str, most: int) -> None:
    """Refuse a body by its headers: it must be `application/json`, which no form can send.

    Args:
        kind: The content type.
        coding: The content encoding.
        length: The content length; empty: unknown.

    Raises:
        Refusal: It is of another type, or far too large.
    """
    if kind != JSON and kind.partition(";")[0].strip().lower() != JSON:
        raise Refusal(
            "the content type is not application/json; send JSON and say so",
            code="unsupported_media_type",
            status=415,
        )
    if coding and coding.strip().lower() != "identity":
        raise Refusal(
            f"the body is compressed ({shown(coding)}); send it as it is, without Content-Encoding",
            code="unsupported_media_type",
            status=415,
            headers={"accept-encoding": "identity"},
        )
    if length and (not length.isdecimal() or int(length) > DISCARDED_BYTES):
        raise _too_large(most)


async def read_body(receive: Callable[[], Awaitable[Any]], most: int) -> bytes:
    """The body of a request.

    Raises:
        Refusal: It is too large, or does not arrive in time.
        ConnectionError: The client left.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _received(receive, most)
    except TimeoutError:
        raise Refusal(
            f"the body did not arrive within {BODY_SECONDS:g} s; send it again",
            code="request_timeout",
            status=408,
            headers=_CLOSE,
        ) from None


async def _received(receive: Callable[[], Awaitable[Any]], most: int) -> bytes:
    parts, size, is_whole = [], 0, False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left")
        part = message.get("body", b"")
        size += len(part)
        if size > DISCARDED_BYTES:
            raise _too_large(most)
        if size <= most:
            parts.append(part)
        is_whole = not message.get("more_body")
    if size > most:
        raise _too_large(most)
    return b"".join(parts)
