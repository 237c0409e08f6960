"""`/openapi.json`: made of the Structs that read the bodies, so it says what is taken."""

from typing import Any

import msgspec

from dllm_jax.serve import wire

_REF = "#/components/schemas/{name}"
_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}
_ERRORS = {
    400: "The body is refused; `param` is the path of the field",
    401: "The API key is missing or wrong",
    403: "The Host header is not allowed without a key",
    404: "No such model",
    405: "The method is not allowed here",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not JSON",
    431: "The headers are over 64 KiB",
    429: "Too many wait; see Retry-After",
    500: "A failure of the server",
    503: "Starting, draining or failed; see Retry-After",
}
_BODIES = {
    "/v1/completions": (wire.Completion, "Continue prompts, or fill in before a suffix"),
    "/v1/chat/completions": (wire.Chat, "Answer a conversation"),
    "/v1/decisions": (wire.Decisions, "Probabilities of the answers to typed questions"),
    "/tokenize": (wire.Tokenize, "Token ids of a prompt or a conversation"),
    "/detokenize": (wire.Detokenize, "The text of token ids"),
}
_READS = {
    "/v1/models": "The model, its strategy and its thresholds with their ranges",
    "/v1/models/{model}": "The model of that name",
    "/tokenizer_info": "Special tokens and chat template",
    "/health": "State of the server: starting, ready, draining or failed",
    "/live": "Whether the process should go on",
    "/metrics": "Prometheus",
    "/version": "Version of dllm_jax",
    "/openapi.json": "This document",
    "/": "The page for browsers, the routes for others",
}
_OPEN = ("/health", "/live")


def document(version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    kinds = [kind for kind, _ in _BODIES.values()]
    refs, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    paths: dict[str, Any] = {}
    for (path, (kind, summary)), ref in zip(_BODIES.items(), refs, strict=True):
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if issubclass(kind, wire.Sampling):
            content["text/event-stream"] = {"schema": {}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": ref}}},
                "responses": {
                    "200": {"description": "The answer", "content": content},
                    **_error_answers(_ERRORS),
                },
            }
        }
    for path, summary in _READS.items():
        kind = "text/plain" if path == "/metrics" else "application/json"
        statuses = (503,) if path in _OPEN else (400, 401, 403, 404, 405, 431, 500, 503)
        answers = {"200": {"description": "The answer", "content": {kind: {"schema": {}}}}}
        answers |= _error_answers(statuses, {} if path in _OPEN else None)
        if path == "/":  # the page for browsers
            answers["200"]["content"]["text/html"] = {"schema": {}}
        paths[path] = {"get": {"summary": summary, "responses": answers}}
        if "{model}" in path:
            name = {"name": "model", "in": "path", "required": True, "schema": _STRING}
            paths[path]["get"]["parameters"] = [name]
    keys = {"Bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dllm_jax", "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR}, "securitySchemes": keys},
        "security": [{}, {"Bearer": []}],
    }


def _error_answers(statuses: Any, schema: Any = None) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name="Error")} if schema is None else schema
    content = {"application/json": {"schema": schema}}
    return {str(one): {"description": _ERRORS[one], "content": content} for one in statuses}
