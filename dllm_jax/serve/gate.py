"""The layer before the routes: request ids, keys, errors, the log line. Pure ASGI."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException

from dllm_jax.serve import logs
from dllm_jax.serve.admin import PATHS as ADMIN_PATHS
from dllm_jax.serve.auth import BASIC, Guard
from dllm_jax.serve.exchange import Call, Elsewhere, Endpoint, Json
from dllm_jax.serve.mailbox import EngineGone, RequestFailed
from dllm_jax.serve.pipe import Delta, total
from dllm_jax.serve.refusals import Refusal, anthropic_error
from dllm_jax.serve.service import Service
from dllm_jax.serve.stream import ClientGone, internal_error


class Gate:
    """The outermost application: every answer gets an id, every error is an error object."""

    def __init__(self, inner: Any, service: Service):
        config = service.config
        self._inner, self._service = inner, service
        keys, names = [*config.api_keys], [one.name for one in config.keys]
        keys += [one.key for one in config.keys]
        self._guard = Guard(keys, config.allowed_hosts, config.open_metrics, names)
        self._admin = Guard(config.admin_keys, ()) if config.admin_keys else self._guard

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            return
        if "dllm.connection" not in scope:
            scope["dllm.connection"] = Elsewhere(receive)
        call = Call(scope, receive, self._service.config.limits)
        own_id = (b"x-request-id", call.id.encode())

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                call.status, call.is_started = message["status"], True
                message["headers"] = [*message["headers"], own_id]
            await send(message)

        scope["app"], scope["dllm.call"] = self, call
        try:
            guard = self._admin if scope["path"] in ADMIN_PATHS else self._guard
            call.client = guard.check(scope["path"], call.headers, scope.get("client"))
            await self._inner(scope, receive, sending)
        except (ClientGone, ConnectionError, asyncio.CancelledError) as gone:
            call.is_gone = True
            self._service.metrics.count("dllm_disconnects_total")
            _cut(scope)
            if isinstance(gone, asyncio.CancelledError):
                raise
        except Exception as error:
            answer = self._answer(error, call)
            if call.is_started:
                self._service.log.error(error, call.id)
                _cut(scope)
            else:
                await answer(scope, receive, sending)
        finally:
            self._tell(call)

    def _answer(self, error: Exception, call: Call) -> Json:
        """The error object of an exception, in the form of its route."""
        refusal = self._refusal(error, call)
        body = refusal.body
        if call.scope["path"].startswith("/v1/messages"):
            message, param = refusal.message, refusal.param or ""
            if param not in message:
                message = f"{param}: {message}"
            body = anthropic_error(message, refusal.status, call.id)
        answer = Json(body, refusal.status, headers=refusal.headers)
        if refusal.status == 401:
            answer.headers.append((b"www-authenticate", BASIC.encode()))
        return answer

    def _refusal(self, error: Exception, call: Call) -> Refusal:
        """An exception as it is answered."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, HTTPException):
            if error.status_code == 405:
                said = "the method is not allowed here; GET /openapi.json lists the routes"
                how: Any = {"code": "method_not_allowed", "headers": error.headers}
                return Refusal(said, status=405, **how)
            said = "no such route; GET /openapi.json lists them"
            return Refusal(said, status=404, code="not_found")
        if isinstance(error, EngineGone):
            call.error = str(error)
            is_draining = self._service.engine.state == "draining"
            return Refusal(
                "the engine ended before the answer did; try again",
                code="draining" if is_draining else "engine_failed",
                status=503,
                headers={"retry-after": "5"},
            )
        call.error = str(error) if isinstance(error, RequestFailed) else type(error).__name__
        if not isinstance(error, RequestFailed):
            self._service.log.error(error, call.id)
        return internal_error(call.id)

    def _tell(self, call: Call) -> None:
        """Metrics and the log line."""
        endpoint = call.scope.get("endpoint")
        route = endpoint.path if isinstance(endpoint, Endpoint) else "none"
        status = 499 if call.is_gone and not call.is_started else call.status
        service = self._service
        service.metrics.count("dllm_http_requests_total", route=route, status=str(status))
        if route in ("/health", "/live", "/metrics"):  # probes come every second
            return
        line = logs.RequestLine(
            request_id=call.id,
            traceparent=logs.traceparent(call.header(b"traceparent")),
            route=route,
            status=status,
            prompt_tokens=call.prompt_tokens,
            e2e_ms=_ms(time.monotonic() - call.started_s),
            disconnected=call.is_gone or None,
            error=call.error,
            key=service.quotas.name(call.client),
        )
        if client := call.scope.get("client"):
            line.peer = client[0]
        if texts := call.texts:
            line.completion_tokens = sum([text.num_tokens for text in texts])
            line.finish = ",".join([str(text.finish) for text in texts])
            line.stop_reason = _stop_reasons(texts)
        if call.usages:
            usage = total(call.usages)
            line.cached_tokens, line.nfe = usage.cached_tokens, usage.nfe
            line.tokens_per_forward = round(100 * usage.written / max(usage.nfe, 1)) / 100
            line.queue_ms, line.ttfb_ms = _ms(usage.queue_s or 0.0), _ms(usage.ttfb_s or 0.0)
        service.log.request(line)
        if service.spans is not None:
            service.spans.ended(line)


def _stop_reasons(texts: Sequence[Delta]) -> list[str] | None:
    """Reasons that are ours; a stop string may be the caller's text, so it is not logged."""
    known = [text.finish for text in texts if text.finish in ("nfe", "repetition", "abort")]
    return ["deadline" if reason == "abort" else str(reason) for reason in known] or None


def _ms(seconds: float) -> float:
    return round(1e5 * seconds) / 100


def _cut(scope: Any) -> None:
    """Close the connection of an answer that does not end as it should.

    uvicorn closes only once its buffer is empty, which a client that reads nothing never allows.
    """
    scope["dllm.connection"].transport.abort()
