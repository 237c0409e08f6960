"""The routes, and those about the server itself.

Data flow: `Gate` (id, guard, errors, log line) -> router -> `Endpoint` -> handler -> response.
A handler raises `Refusal`; nothing else is answered with 4xx. All middleware is pure ASGI.
"""

import functools
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router

from dllm_jax.serve import admin, decisions, generating, messages, page, reading, responses
from dllm_jax.serve.exchange import JSON, Call, Endpoint, Json
from dllm_jax.serve.gate import Gate
from dllm_jax.serve.metrics import CONTENT_TYPE
from dllm_jax.serve.openapi import document
from dllm_jax.serve.service import Service


async def health(service: Service, call: Call) -> Any:
    """`/health`: the state, and how many programs are compiled while it is starting."""
    engine, body = service.engine, {"status": service.engine.state}
    stalled_s = engine.stalled_s
    is_stalled = engine.state in ("ready", "draining") and stalled_s > service.config.stall_timeout
    if is_stalled:
        body |= {"status": "stalled", "seconds": round(stalled_s)}
    if engine.state == "starting" and engine.progress is not None:
        body |= dict(zip(("done", "of"), engine.progress, strict=True))
    if engine.reason is not None:
        body["reason"] = engine.reason
    return Json(body, status_code=200 if body["status"] == "ready" else 503)


async def live(service: Service, call: Call) -> Any:
    """`/live`: whether the process should go on."""
    is_alive = service.engine.state != "failed"
    return Json({"status": "alive" if is_alive else "failed"}, 200 if is_alive else 503)


async def metrics(service: Service, call: Call) -> Any:
    """`/metrics`."""
    engine, registry = service.engine, service.metrics
    if engine.facts is not None:
        registry.describe(engine.facts)
    for counter, total in (
        ("dllm_engine_failures_total", engine.num_failures),
        ("dllm_engine_restarts_total", engine.num_restarts),
        ("dllm_log_lines_dropped_total", service.log.num_dropped),
    ):
        registry.count(counter, total - registry.counted(counter))
    return Response(registry.text(engine.state), media_type=CONTENT_TYPE)


async def version(service: Service, call: Call) -> Any:
    """`/version`."""
    return Json({"version": service.config.version})


async def openapi(service: Service, call: Call) -> Any:
    """`/openapi.json`."""
    return Response(_document(service.config.version), media_type=JSON)


@functools.cache
def _document(version: str) -> bytes:
    return msgspec.json.encode(document(version))


async def index(service: Service, call: Call) -> Any:
    """`/`: the page for browsers, the list of routes for others."""
    config = service.config
    if page.is_browser(call.header(b"accept")):
        return page.asset("page.html", config.has_keys)
    about = {"name": "dllm_jax", "version": config.version, "model": config.model}
    about |= {"status": service.engine.state, "routes": [f"{m} {path}" for path, m, _ in ROUTES]}
    return Json(about, headers={"vary": "accept"})


async def page_file(service: Service, call: Call) -> Any:
    """A file of the page."""
    name = call.scope["path_params"]["name"]
    if name not in page.FILES:
        raise HTTPException(404)
    return page.asset(name, service.config.has_keys)


ROUTES = (
    ("/v1/completions", "POST", generating.completions),
    ("/v1/chat/completions", "POST", generating.chat),
    ("/v1/messages", "POST", messages.messages),
    ("/v1/messages/count_tokens", "POST", messages.count_tokens),
    ("/v1/responses", "POST", responses.responses),
    ("/health", "GET", health),
    ("/metrics", "GET", metrics),
    ("/live", "GET", live),
    ("/v1/decisions", "POST", decisions.decide),
    ("/v1/models", "GET", reading.models),
    ("/v1/models/{model:path}", "GET", reading.model),
    ("/tokenize", "POST", reading.tokenize),
    ("/detokenize", "POST", reading.detokenize),
    ("/tokenizer_info", "GET", reading.tokenizer_info),
    ("/version", "GET", version),
    ("/openapi.json", "GET", openapi),
    ("/", "GET", index),
    ("/page/{name}", "GET", page_file),
)


class _Routes:
    """Paths without a variable by one look; `Router` has the others, HEAD, 404 and 405."""

    def __init__(self, service: Service):
        config = service.config
        every = (*ROUTES, *admin.routes(config.admin_keys, config.weights_root))
        endpoints = {
            (method, path): Endpoint(path, functools.partial(handler, service))
            for path, method, handler in every
        }
        table = [Route(path, one, methods=[method]) for (method, path), one in endpoints.items()]
        self._endpoints = endpoints
        self._router = Router(table, redirect_slashes=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._router(scope, receive, send)
        else:
            scope["endpoint"] = endpoint
            await endpoint(scope, receive, send)


def application(service: Service) -> Any:
    """The whole ASGI application."""
    gate = Gate(_Routes(service), service)
    origins = service.config.allowed_origins
    if not origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type", "x-request-id"],
        expose_headers=["x-request-id", "retry-after"],
    )
