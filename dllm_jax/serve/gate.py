"""What stands before the routes: request ids, keys, errors, the log line. Pure ASGI."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException

from dllm_jax.serve import logs
from dllm_jax.serve.auth import BASIC, Guard
from dllm_jax.serve.client import EngineGone
from dllm_jax.serve.exchange import Elsewhere, Endpoint, Json, Record
from dllm_jax.serve.pipe import Delta, total
from dllm_jax.serve.refusals import Refusal, error_object
from dllm_jax.serve.service import Service
from dllm_jax.serve.stream import ClientGone, RequestFailed, internal_error


class Gate:
    """The outermost application: every answer gets an id, every error is an error object."""

    def __init__(self, inner: Any, service: Service):
        config = service.config
        self._inner, self._service = inner, service
        self._guard = Guard(config.api_keys, config.allowed_hosts, config.open_metrics)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        record = Record(logs.request_id(headers), time.monotonic())
        own_id = record.id.encode()

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status, record.is_started = message["status"], True
                message["headers"] = [*message["headers"], (b"x-request-id", own_id)]
            await send(message)

        scope["app"], scope["dllm.record"], scope["dllm.headers"] = self, record, headers
        if "dllm.connection" not in scope:
            scope |= {"dllm.connection": Elsewhere(receive), "dllm.body_is_there": False}
        try:
            self._guard.check(scope["path"], headers)
            await self._inner(scope, receive, sending)
        except (ClientGone, ConnectionError, asyncio.CancelledError) as gone:
            record.is_gone = True
            self._service.metrics.count("dllm_disconnects_total")
            _cut(scope)
            if isinstance(gone, asyncio.CancelledError):
                raise
        except Exception as error:
            answer = self._answer(error, record)
            if record.is_started:
                self._service.log.error(error, record.id)
                _cut(scope)
            else:
                await answer(scope, receive, sending)
        finally:
            self._tell(scope, headers, record)

    def _answer(self, error: Exception, record: Record) -> Json:
        """The error object of an exception."""
        if isinstance(error, Refusal):
            answer = Json(error.body, error.status, headers=error.headers)
            if error.status == 401:
                answer.headers.append((b"www-authenticate", BASIC.encode()))
            return answer
        if isinstance(error, HTTPException):
            if error.status_code == 405:
                said = error_object(
                    "the method is not allowed here; GET /openapi.json lists the routes",
                    405,
                    None,
                    "method_not_allowed",
                )
                return Json(said, 405, headers=dict(error.headers or {}))
            said = error_object(
                "no such route; GET /openapi.json lists them", 404, None, "not_found"
            )
            return Json(said, 404)
        if isinstance(error, EngineGone):
            record.error = str(error)
            engine = self._service.engine
            code = "draining" if engine.state == "draining" else "engine_failed"
            said = error_object(
                "the engine ended before the answer did; try again", 503, None, code
            )
            return Json(said, 503, headers={"retry-after": "5"})
        record.error = str(error) if isinstance(error, RequestFailed) else type(error).__name__
        if not isinstance(error, RequestFailed):
            self._service.log.error(error, record.id)
        return Json(internal_error(record.id), 500)

    def _tell(self, scope: Any, headers: dict[str, str], record: Record) -> None:
        """Metrics and the log line."""
        endpoint = scope.get("endpoint")
        route = endpoint.path if isinstance(endpoint, Endpoint) else "none"
        status = "499" if record.is_gone and not record.is_started else str(record.status)
        service = self._service
        service.metrics.count("dllm_http_requests_total", route=route, status=status)
        if route in ("/health", "/live", "/metrics"):  # probes come every second
            return
        client = scope.get("client")
        usage = total(record.usages) if record.usages else None
        service.log.line(
            "request",
            request_id=record.id,
            traceparent=logs.traceparent(headers),
            route=route,
            status=int(status),
            prompt_tokens=record.prompt_tokens,
            completion_tokens=sum(t.num_tokens for t in record.texts) if record.texts else None,
            cached_tokens=usage and usage.cached_tokens,
            nfe=usage and usage.nfe,
            tokens_per_forward=usage and round(100 * usage.written / max(usage.nfe, 1)) / 100,
            queue_ms=usage and _ms(usage.queue_s or 0.0),
            ttfb_ms=usage and _ms(usage.ttfb_s or 0.0),
            e2e_ms=_ms(time.monotonic() - record.started_s),
            finish=",".join(str(text.finish) for text in record.texts) or None,
            stop_reason=_stop_reasons(record.texts),
            disconnected=record.is_gone or None,
            error=record.error,
            peer=client[0] if client else None,
        )


def _stop_reasons(texts: Sequence[Delta]) -> list[str] | None:
    """Reasons that are ours; a stop string may be the caller's text, so it is not logged."""
    known = [text.finish for text in texts if text.finish in ("nfe", "repetition", "abort")]
    return ["deadline" if reason == "abort" else str(reason) for reason in known] or None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e5 * seconds) / 100


def _cut(scope: Any) -> None:
    """Close the connection of an answer that does not end as it should.

    uvicorn closes only once its buffer is empty, which a client that reads nothing never allows.
    """
    scope["dllm.connection"].transport.abort()
