"""Routes about the model and its tokens: `/v1/models`, `/tokenize` and their like."""

import time
from typing import Any

from dllm_jax.serve import wire
from dllm_jax.serve.examples import ABOUT, QUESTIONS
from dllm_jax.serve.exchange import Call, Json
from dllm_jax.serve.generating import chat_ids
from dllm_jax.serve.refusals import Refusal, unsupported
from dllm_jax.serve.service import Service
from dllm_jax.serve.text import MOST_CHARS

MOST_IDS = 1 << 16  # that /detokenize takes of a text which no context holds
_KNOWS = {"about": ABOUT, "examples": list(QUESTIONS)}
_CREATED = int(time.time())


async def models(service: Service, call: Call) -> Any:
    """`/v1/models`."""
    return Json({"object": "list", "data": [_entry(service)]})


async def model(service: Service, call: Call) -> Any:
    """`/v1/models/NAME`."""
    service.check_state()
    service.check_model(call.scope["path_params"]["model"])
    return Json(_entry(service))


def _entry(service: Service) -> dict[str, Any]:
    service.check_state()
    facts, text = service.ready()
    thresholds = {
        name: {"value": value, "low": low, "high": high}
        for name, (value, (low, high, *_)) in facts.thresholds.items()
    }
    return {
        "id": service.config.model,
        "object": "model",
        "created": _CREATED,
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
            "tools": text.form.name,
            "infill": facts.infill,
            **(_KNOWS if facts.source.startswith("builtin:") else {}),
        },
    }


async def tokenize(service: Service, call: Call) -> Any:
    """`/tokenize`."""
    service.check_state()
    body = await service.read(call, wire.Tokenize)
    facts, text = service.ready()
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Refusal("give either prompt or messages, not both", param="prompt")
    if body.messages is not None and body.add_special_tokens:
        raise unsupported(
            "add_special_tokens",
            "add_special_tokens=true: the chat template writes them; leave it out",
        )
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        work, given = text.ids, (body.prompt, special, "prompt", MOST_CHARS)
    else:
        work = chat_ids
        given = text, body.messages or [], body.chat_template_kwargs, MOST_CHARS
    ids = await text.run(call.size, work, *given)
    names = None
    if body.return_token_strs:
        names = await text.run(len(ids), text.token_strings, ids)
    answer = {"count": len(ids), "max_model_len": facts.max_model_len, "tokens": ids}
    return Json(answer | {"token_strs": names})


async def detokenize(service: Service, call: Call) -> Any:
    """`/detokenize`."""
    service.check_state()
    body = await service.read(call, wire.Detokenize)
    facts, text = service.ready()
    service.check_model(body.model)
    most = max(facts.max_model_len, MOST_IDS)
    if len(body.tokens) > most:
        raise Refusal(
            f"{len(body.tokens)} tokens are more than {most}, which are taken at once; send parts",
            param="tokens",
            code="context_length_exceeded",
        )
    return Json({"prompt": await text.run(len(body.tokens), text.text, body.tokens)})


async def tokenizer_info(service: Service, call: Call) -> Any:
    """`/tokenizer_info`."""
    service.check_state()
    _, text = service.ready()
    if text.tokenizer is None:
        raise Refusal(
            f"model {text.source!r} has no tokenizer; give token ids as prompts",
            code="not_found",
            status=404,
        )
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special_tokens = {name: getattr(text.tokenizer, name, None) for name in names}
    return Json(
        {
            "tokenizer_class": type(text.tokenizer).__name__,
            **special_tokens,
            "chat_template": text.chat_template,
        }
    )
