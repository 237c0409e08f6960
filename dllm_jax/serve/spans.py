"""Spans of requests for an OpenTelemetry collector, as OTLP over HTTP: the extra `otel`.

A thread of the SDK sends them. A collector that does not answer costs spans and no request.
"""

import time
from typing import Any

from dllm_jax.serve.logs import RequestLine

FLUSH_MS = 1000  # at the end
_NAMES = {  # fields of the log line -> attributes, by OpenTelemetry's conventions where it has one
    "request_id": "dllm.request_id",
    "route": "http.route",
    "status": "http.response.status_code",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "dllm.cached_tokens",
    "nfe": "dllm.nfe",
    "tokens_per_forward": "dllm.tokens_per_forward",
    "queue_ms": "dllm.queue_ms",
    "ttfb_ms": "dllm.ttfb_ms",
    "finish": "dllm.finish",
    "error": "error.type",
}


class Spans:
    """Where spans go.

    Args:
        endpoint: The collector's address, as http://127.0.0.1:4318/v1/traces.

    Raises:
        ModuleNotFoundError: The extra is not installed.
    """

    def __init__(self, endpoint: str, model: str, version: str):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.name": "dllm_jax", "service.version": version}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("dllm_jax", version)
        self._parent = TraceContextTextMapPropagator().extract
        self._server, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._model = model

    def ended(self, line: RequestLine) -> None:
        """The span of a request that has just ended; its parent is the caller's `traceparent`."""
        values: dict[str, Any] = {
            name: value
            for field, name in _NAMES.items()
            if (value := getattr(line, field)) is not None
        }
        end = time.time_ns()
        span = self._tracer.start_span(
            line.route,
            context=self._parent({"traceparent": line.traceparent} if line.traceparent else {}),
            kind=self._server,
            start_time=end - int(1e6 * line.e2e_ms),
            attributes={"gen_ai.request.model": self._model, **values},
        )
        if line.status >= 500:
            span.set_status(self._failed)
        span.end(end)

    def flush(self) -> None:
        """Send what waits, for `FLUSH_MS` at most."""
        self._provider.force_flush(FLUSH_MS)
