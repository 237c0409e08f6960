"""Routes and what stands before them: request ids, keys, the state of the engine, errors, logs.

Data flow: `Gate` (id, guard, errors, log line) -> router -> `Endpoint` -> handler -> response.
A handler raises `Refusal`; nothing else is answered with 4xx. All middleware is pure ASGI.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router

from dllm_jax.serve import logs, page, wire
from dllm_jax.serve.answers import Form, fingerprint
from dllm_jax.serve.auth import Guard
from dllm_jax.serve.client import EngineClient, EngineGone, Mailbox
from dllm_jax.serve.limits import Admission, Limits, read_body
from dllm_jax.serve.logs import Log
from dllm_jax.serve.metrics import CONTENT_TYPE, Metrics
from dllm_jax.serve.openapi import document
from dllm_jax.serve.pipe import Delta, Facts, Launch, Prompt, Usage
from dllm_jax.serve.refusals import Refusal, error_object, shown
from dllm_jax.serve.stream import (
    ClientGone,
    EventStream,
    RequestFailed,
    internal_error,
    whole,
)
from dllm_jax.serve.text import TextSide

SEED_MODULUS = 2**32  # a random key is made from 32 bits
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_JSON = "application/json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A server.

    Attributes:
        model: What `GET /v1/models` calls the model, and requests name.
        launch: How the engine process is made.
        api_keys: Any of them opens every route but /health and /live; none: loopback names only.
        allowed_hosts: Names the Host header may hold without a key.
        allowed_origins: Web origins whose pages may call (CORS).
        open_metrics: /metrics needs no key.
        restart_engine: How often an engine that was ready is replaced when it ends.
        drain_timeout: Seconds that running requests get after the first signal.
    """

    model: str
    launch: Launch
    version: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    open_metrics: bool = False
    vllm_metrics: bool = True
    restart_engine: int = 0
    drain_timeout: float = 30.0
    log_format: str = "text"
    limits: Limits = dataclasses.field(default_factory=Limits)


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

    media_type = _JSON

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
        return await read_body(self.receive, self.headers, self.limits.max_body_bytes)


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


class Service:
    """The handlers, and what they share.

    Attributes:
        engine: The engine process.
        app: The whole ASGI application.
    """

    def __init__(self, config: Config, log: Log | None = None):
        self.config = config
        self.log = log or Log(config.log_format)
        self.metrics = Metrics(config.model, config.version, config.vllm_metrics)
        self.engine = EngineClient(config.launch, config.restart_engine, self.metrics.update)
        self.admission = Admission(config.limits)
        self._document = msgspec.json.encode(document(config.version))
        routes = [
            ("/v1/completions", "POST", self._completions),
            ("/v1/chat/completions", "POST", self._chat),
            ("/v1/models", "GET", self._models),
            ("/v1/models/{model:path}", "GET", self._model),
            ("/tokenize", "POST", self._tokenize),
            ("/detokenize", "POST", self._detokenize),
            ("/tokenizer_info", "GET", self._tokenizer_info),
            ("/health", "GET", self._health),
            ("/live", "GET", self._live),
            ("/metrics", "GET", self._metrics),
            ("/version", "GET", self._version),
            ("/openapi.json", "GET", self._openapi),
            ("/", "GET", self._index),
            ("/page/{name}", "GET", self._page),
        ]
        self._routes = [f"{method} {path}" for path, method, _ in routes]
        table = [
            Route(path, Endpoint(path, handler, config.limits), methods=[method])
            for path, method, handler in routes
        ]
        gate = Gate(Router(table, redirect_slashes=False), self)
        self.app: Any = gate
        if config.allowed_origins:
            self.app = CORSMiddleware(
                gate,
                allow_origins=config.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=["x-request-id", "retry-after"],
            )

    # --- generating -------------------------------------------------------------------------------

    async def _completions(self, call: Call) -> Any:
        self._check_state()
        body = wire.read(await call.body(), wire.Completion)
        facts, text = self._ready()
        self._check_model(body.model)
        suffix = None
        if body.suffix is not None:
            if not facts.infill:
                raise Refusal(
                    f"suffix: the strategy {facts.strategy!r} does not see what follows a hole; "
                    "start the server with --strategy full_sequence",
                    param="suffix",
                    code="unsupported_parameter",
                )
            suffix = await text.run(len(body.suffix), text.ids, body.suffix, False, "suffix")
        given: list[Any] = [body.prompt] if isinstance(body.prompt, str) else [*body.prompt]
        if all(isinstance(one, int) for one in given):
            given = [given]
        self._check_texts(len(given) * (body.n or 1))
        prompts = []
        for i, one in enumerate(given):
            param = f"prompt[{i}]" if len(given) > 1 else "prompt"
            if isinstance(one, str):
                ids = await text.run(len(one), text.ids, one, True, param)
            elif isinstance(one, list):
                ids = one
                text.check_ids(ids, param)
            else:
                raise Refusal(
                    f"{param}={shown(one)} stands beside texts or lists; give all as lists of ids",
                    param=param,
                )
            prompts.append(Prompt(ids, suffix))
        return await self._generate(call, body, prompts, body.max_tokens or COMPLETION_TOKENS)

    async def _chat(self, call: Call) -> Any:
        self._check_state()
        body = wire.read(await call.body(), wire.Chat)
        facts, text = self._ready()
        self._check_model(body.model)
        size = sum(len(wire.text_of(turn.content)) for turn in body.messages)
        ids = await text.run(size, self._chat_ids, text, body.messages, body.chat_template_kwargs)
        if (
            body.max_tokens is not None
            and body.max_completion_tokens is not None
            and body.max_tokens != body.max_completion_tokens
        ):
            raise Refusal(
                f"max_tokens={body.max_tokens} and max_completion_tokens="
                f"{body.max_completion_tokens} differ; give one",
                param="max_completion_tokens",
            )
        room = max(1, facts.max_model_len - len(ids))
        return await self._generate(
            call, body, [Prompt(ids)], body.max_completion_tokens or body.max_tokens or room
        )

    @staticmethod
    def _chat_ids(text: TextSide, turns: list[wire.Turn], told: dict[str, Any] | None) -> list[int]:
        return text.ids(text.render(turns, told), False, "messages")

    async def _generate(
        self, call: Call, body: wire.Sampling, prompts: list[Prompt], max_tokens: int
    ) -> Any:
        """Queue the prompts; the answer once they are accepted."""
        facts, _ = self._ready()
        is_chat = isinstance(body, wire.Chat)
        for i, prompt in enumerate(prompts):
            if len(prompt.ids) >= facts.max_model_len:
                param = "messages" if is_chat else "prompt"
                param = f"prompt[{i}]" if len(prompts) > 1 else param
                raise Refusal(
                    f"{param} has {len(prompt.ids)} tokens; the context takes "
                    f"{facts.max_model_len}, prompt and text together: shorten it",
                    param=param,
                    code="context_length_exceeded",
                )
        denoise = body.stream_mode == "denoise"
        for name, is_given in (("stream_mode", denoise), ("stream_options", body.stream_options)):
            if is_given and not body.stream:
                raise Refusal(f"{name} needs stream: true; set it or leave this out", param=name)
        params = self._params(body, facts, max_tokens)
        num_texts = len(prompts) * params["n"]
        self._check_texts(num_texts)
        self.admission.check(self.engine.num_open, facts.num_slots, num_texts, denoise)
        call.record.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        box = await self.engine.submit(
            prompts,
            params,
            stream=bool(body.stream),
            denoise=denoise,
            deadline_s=self.config.limits.request_timeout,
            priority=body.priority or 0,
        )
        system = fingerprint(self.config.version, facts)
        form = Form(is_chat, self.config.model, system, call.record.prompt_tokens)
        if body.stream:
            options = body.stream_options or wire.StreamOptions()
            running = bool(options.continuous_usage_stats)
            stream = EventStream(
                box,
                form,
                self.metrics,
                call.record.id,
                usage=bool(options.include_usage),
                running_usage=running,
            )
            return _Tracked(self, stream, box, call.record, denoise)
        try:
            texts = await whole(box, call.receive)
            call.record.texts, call.record.usages = texts, box.usages
        finally:
            self._ended(box, call.record)
        return Json(form.whole(texts, box.usages))

    def _params(self, body: wire.Sampling, facts: Facts, max_tokens: int) -> dict[str, Any]:
        """Fields of `SamplingParams`."""
        top_p = facts.top_p if body.top_p is None else body.top_p
        params = {
            "max_tokens": max_tokens,
            "temperature": facts.temperature if body.temperature is None else body.temperature,
            "top_p": top_p,
            "top_k": body.top_k if body.top_k is not None and body.top_k > 0 else None,
            "seed": None if body.seed is None else body.seed % SEED_MODULUS,
            "stop": wire.stop_strings(body),
            "stop_token_ids": body.stop_token_ids or (),
            "ignore_eos": bool(body.ignore_eos),
            "max_nfe": body.max_nfe,
            "max_repetition_run": body.max_repetition_run,
            "n": body.n or 1,
            "strategy_overrides": body.strategy_overrides or {},
        }
        for name, value in params["strategy_overrides"].items():
            param = f"strategy_overrides.{name}"
            if name not in facts.thresholds:
                known = ", ".join(sorted(facts.thresholds)) or "none"
                raise Refusal(
                    f"the strategy has no threshold {shown(name)}; it has {known}", param=param
                )
            _, low, high = facts.thresholds[name]
            if not low <= value <= high:
                raise Refusal(
                    f"{param}={shown(value)} is outside [{low:g}, {high:g}]; choose one inside",
                    param=param,
                )
        return params

    def _ended(self, box: Mailbox, record: Record) -> None:
        """A request has ended, however it did."""
        self.engine.release(box)
        self.admission.ended(time.monotonic() - record.started_s)
        for usage in box.usages:
            self.metrics.ended(usage)
        for text in record.texts:
            if text.finish is not None:
                self.metrics.count("dllm_request_success_total", finish_reason=text.finish)

    # --- the model ----------------------------------------------------------------------------

    async def _models(self, call: Call) -> Any:
        return Json({"object": "list", "data": [self._entry()]})

    async def _model(self, call: Call) -> Any:
        self._check_state()
        self._check_model(call.scope["path_params"]["model"])
        return Json(self._entry())

    def _entry(self) -> dict[str, Any]:
        self._check_state()
        facts, text = self._ready()
        thresholds = {
            name: {"value": value, "low": low, "high": high}
            for name, (value, low, high) in facts.thresholds.items()
        }
        return {
            "id": self.config.model,
            "object": "model",
            "created": self._created,
            "owned_by": "dllm_jax",
            "root": facts.source,
            "parent": None,
            "max_model_len": facts.max_model_len,
            "dllm": {
                "strategy": facts.strategy,
                "block_size": facts.block_size,
                "window": facts.window,
                "thresholds": thresholds,
                "chat": text.chats,
                "infill": facts.infill,
            },
        }

    _created = int(time.time())

    async def _tokenize(self, call: Call) -> Any:
        self._check_state()
        body = wire.read(await call.body(), wire.Tokenize)
        facts, text = self._ready()
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal("give either prompt or messages, not both", param="prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await text.run(len(body.prompt), text.ids, body.prompt, special, "prompt")
        else:
            turns = body.messages or []
            size = sum(len(wire.text_of(turn.content)) for turn in turns)
            told = body.chat_template_kwargs
            ids = await text.run(size, self._chat_ids, text, turns, told)
        names = None
        if body.return_token_strs:
            names = await text.run(len(ids), text.token_strings, ids)
        answer = {"count": len(ids), "max_model_len": facts.max_model_len, "tokens": ids}
        return Json(answer | {"token_strs": names})

    async def _detokenize(self, call: Call) -> Any:
        self._check_state()
        body = wire.read(await call.body(), wire.Detokenize)
        _, text = self._ready()
        self._check_model(body.model)
        return Json({"prompt": await text.run(len(body.tokens), text.text, body.tokens)})

    async def _tokenizer_info(self, call: Call) -> Any:
        self._check_state()
        _, text = self._ready()
        if text.tokenizer is None:
            raise Refusal(
                f"model {text.source!r} has no tokenizer; give token ids as prompts",
                code="not_found",
                status=404,
            )
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        told = {name: getattr(text.tokenizer, name, None) for name in names}
        return Json({"tokenizer_class": type(text.tokenizer).__name__, **told} | self._template())

    def _template(self) -> dict[str, Any]:
        text = self.engine.text
        return {"chat_template": None if text is None else text.chat_template}

    # --- the server -------------------------------------------------------------------------------

    async def _health(self, call: Call) -> Any:
        engine, told = self.engine, {"status": self.engine.state}
        if engine.state == "starting" and engine.progress is not None:
            told |= {"done": engine.progress[0], "of": engine.progress[1]}
        if engine.failure is not None:
            told["reason"] = engine.failure
        return Json(told, status_code=200 if engine.state == "ready" else 503)

    async def _live(self, call: Call) -> Any:
        is_alive = self.engine.state != "failed"
        return Json({"status": "alive" if is_alive else "failed"}, 200 if is_alive else 503)

    async def _metrics(self, call: Call) -> Any:
        if self.engine.facts is not None:
            self.metrics.describe(self.engine.facts)
        for name in ("failures", "restarts"):
            counter = f"dllm_engine_{name}_total"
            told = getattr(self.engine, f"num_{name}")
            self.metrics.count(counter, told - self.metrics.counted(counter))
        return Response(self.metrics.text(self.engine.state), media_type=CONTENT_TYPE)

    async def _version(self, call: Call) -> Any:
        return Json({"version": self.config.version})

    async def _openapi(self, call: Call) -> Any:
        return Response(self._document, media_type=_JSON)

    async def _index(self, call: Call) -> Any:
        if page.is_browser(call.headers.get("accept", "")):
            return page.asset("page.html", bool(self.config.api_keys))
        told = {"name": "dllm_jax", "version": self.config.version, "model": self.config.model}
        told |= {"status": self.engine.state, "routes": self._routes}
        return Json(told, headers={"vary": "accept"})

    async def _page(self, call: Call) -> Any:
        name = call.scope["path_params"]["name"]
        if name not in page.FILES:
            raise HTTPException(404)
        return page.asset(name, bool(self.config.api_keys))

    # --- checks -----------------------------------------------------------------------------------

    def _check_state(self) -> None:
        state = self.engine.state
        if state == "ready":
            return
        said = {
            "starting": "the engine is starting; try again in a moment (GET /health tells)",
            "draining": "the server is shutting down; ask another one",
            "failed": "the engine has failed; the log says why",
        }
        code = "engine_failed" if state == "failed" else state
        retry = {"retry-after": "5" if state == "starting" else "30"}
        raise Refusal(said[state], code=code, status=503, headers=retry)

    def _ready(self) -> tuple[Facts, TextSide]:
        self._check_state()
        assert self.engine.facts is not None
        assert self.engine.text is not None
        return self.engine.facts, self.engine.text

    def _check_model(self, name: str | None) -> None:
        if name in (None, self.config.model):
            return
        raise Refusal(
            f"the model {shown(name)} is not served here; use {self.config.model!r}",
            param="model",
            code="model_not_found",
            status=404,
        )

    def _check_texts(self, num_texts: int) -> None:
        most = self.config.limits.max_texts
        if num_texts > most:
            raise Refusal(
                f"prompts times n are {num_texts}; at most {most} are taken in one request: send "
                "several",
                param="n",
            )


class _Tracked:
    """A stream that is counted while it is open."""

    def __init__(
        self, service: Service, stream: EventStream, box: Mailbox, record: Record, denoise: bool
    ):
        self._service, self._stream, self._box = service, stream, box
        self._record, self._denoise = record, denoise

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        service, stream, record = self._service, self._stream, self._record
        service.metrics.streams_open += 1
        service.admission.num_denoise += self._denoise
        try:
            await stream(scope, receive, send)
        finally:
            service.metrics.streams_open -= 1
            service.admission.num_denoise -= self._denoise
            service.metrics.count(
                "dllm_denoise_frames_total", self._box.merged_frames, fate="merged"
            )
            record.texts, record.usages = stream.finishes, self._box.usages
            record.error = stream.error
            service._ended(self._box, record)


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
        try:
            self._guard.check(scope["method"], scope["path"], headers)
            await self._inner(scope, receive, sending)
        except (ClientGone, ConnectionError, asyncio.CancelledError) as gone:
            record.is_gone = True
            self._service.metrics.count("dllm_disconnects_total")
            _cut(send)
            if isinstance(gone, asyncio.CancelledError):
                raise
        except Exception as error:
            answer = self._answer(error, record)
            if record.is_started:
                self._service.log.error(error, record.id)
                _cut(send)
            else:
                await answer(scope, receive, sending)
        finally:
            self._tell(scope, headers, record)

    def _answer(self, error: Exception, record: Record) -> Response:
        """The error object of an exception."""
        if isinstance(error, Refusal):
            return Json(error.body, error.status, headers=error.headers)
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
        usages, client = record.usages, scope.get("client")
        nfe = sum(usage.nfe for usage in usages)
        written = sum(usage.written for usage in usages)
        service.log.line(
            "request",
            request_id=record.id,
            traceparent=logs.traceparent(headers),
            route=route,
            status=int(status),
            prompt_tokens=record.prompt_tokens,
            completion_tokens=sum(t.num_tokens for t in record.texts) if record.texts else None,
            cached_tokens=sum(usage.cached_tokens for usage in usages) if usages else None,
            nfe=nfe if usages else None,
            tokens_per_forward=round(written / max(nfe, 1), 2) if usages else None,
            queue_ms=_ms(max((usage.queue_s or 0.0 for usage in usages), default=None)),
            ttfb_ms=_ms(max((usage.ttfb_s or 0.0 for usage in usages), default=None)),
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
    return None if seconds is None else round(1e3 * seconds, 2)


def _cut(send: Any) -> None:
    """Close the connection of an answer that does not end as it should.

    uvicorn closes only once its buffer is empty, which a client that reads nothing never allows.
    """
    cycle = getattr(send, "__self__", None)
    transport = getattr(cycle, "transport", None)
    if transport is not None:
        transport.abort()
