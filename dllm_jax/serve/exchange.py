"""What a handler gets and gives: the call, its record, JSON answers."""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from dllm_jax.serve.limits import Limits, read_body
from dllm_jax.serve.pipe import Delta, Usage

JSON = "application/json"


@dataclasses.dataclass
class Record:
    """What the log line and the metrics say of a request."""

    id: str
    started_s: float
    status: int = 0
    is_started: bool = False
    is_gone: bool = False
    prompt_tokens: int | None = None
    usages: Sequence[Usage] = ()
    texts: Sequence[Delta] = ()
    error: str | None = None


class Json(Response):
    """A JSON answer, encoded by msgspec."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        """The body."""
        return msgspec.json.encode(content)


Handler = Callable[["Call"], Awaitable[Any]]


@dataclasses.dataclass
class Call:
    """What a handler gets."""

    scope: Any
    receive: Any
    headers: dict[str, str]
    record: Record
    limits: Limits

    async def body(self) -> bytes:
        """The request's body."""
        is_there, most = self.scope["dllm.body_is_there"], self.limits.max_body_bytes
        return await read_body(self.receive, self.headers, most, is_there)


class Endpoint:
    """A route's ASGI application."""

    def __init__(self, path: str, handler: Handler, limits: Limits):
        self.path, self._handler, self._limits = path, handler, limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        record: Record = scope["dllm.record"]
        call = Call(scope, receive, scope["dllm.headers"], record, self._limits)
        response = await self._handler(call)
        await response(scope, receive, send)
