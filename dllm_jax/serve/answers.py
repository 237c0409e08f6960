"""Answers in OpenAI's form: chunks of a stream, whole answers, usage and our metrics next to it.

Nothing here waits or sends.
"""

import functools
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dllm_jax.serve.logs import random_id
from dllm_jax.serve.pipe import Delta, Facts, Frame, Usage, total

# How the engine ends a text -> `finish_reason` and `stop_reason`, where it has none of its own.
_ENDS = {
    "stop": ("stop", None),
    "length": ("length", None),
    "nfe": ("length", "nfe"),
    "repetition": ("length", "repetition"),
    "abort": ("length", "deadline"),
}


def fingerprint(version: str, facts: Facts) -> str:
    """`system_fingerprint`: answers under the same one come from the same settings."""
    return _digest(version, facts.jax, facts.source, facts.strategy, facts.dtype)


@functools.lru_cache(maxsize=4)
def _digest(*parts: str) -> str:
    return f"dllm-{hashlib.sha256(repr(parts).encode()).hexdigest()[:10]}"


class Form:
    """The answers of one request.

    Attributes:
        is_chat: Chat completions; else completions.
        id: Of every chunk.
        has_logprobs: Log-probabilities are asked for.
    """

    has_logprobs = False

    def __init__(
        self,
        is_chat: bool,
        model: str,
        system_fingerprint: str,
        num_prompt_tokens: int,
        weight_version: int | None = None,
    ):
        self.is_chat = is_chat
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{random_id()[:24]}"
        self._num_prompt_tokens = num_prompt_tokens
        kind = "chat.completion" if is_chat else "text_completion"
        self._whole = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": system_fingerprint,
        }
        if weight_version is not None:
            self._whole["weight_version"] = weight_version
        self._chunk = self._whole | ({"object": f"{kind}.chunk"} if is_chat else {})
        self._written: dict[int, bytearray] = {}  # of each choice, where offsets are asked for

    def role(self, choice: int) -> dict[str, Any]:
        """A chat stream's first chunk of a choice."""
        delta = {"index": choice, "delta": {"role": "assistant", "content": ""}}
        return self._chunk | {"choices": [delta | {"logprobs": None, "finish_reason": None}]}

    def piece(self, delta: Delta) -> dict[str, Any]:
        """A chunk of text, the last one with its reason."""
        finish, stop = ending(delta)
        content = {"delta": {"content": delta.text}} if self.is_chat else {"text": delta.text}
        said = self.logprobs(delta.choice, delta.logprobs)
        choice = {"index": delta.choice, **content, "logprobs": said, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = stop
        return self._chunk | {"choices": [choice]} | notes_of([delta.usage] if delta.usage else [])

    def logprobs(self, choice: int, said: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        """Log-probabilities of the next tokens of a choice; None where none were asked for."""
        if not self.has_logprobs:
            return None
        entries = [entry for entry in said if entry is not None]
        if self.is_chat:
            return {"content": entries, "refusal": None}
        written, offsets = self._written.setdefault(choice, bytearray()), []
        for entry in entries:
            offsets.append(len(written.decode(errors="ignore")))
            written += bytes(entry["bytes"])
        top = [{one["token"]: one["logprob"] for one in entry["top_logprobs"]} for entry in entries]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }

    def frame(self, choice: int, seq: int, changes: dict[str, Any]) -> dict[str, Any]:
        """A denoise frame."""
        return self._chunk | {"choices": [], "diffusion": {"index": choice, "seq": seq, **changes}}

    def last(self, num_tokens: int, usages: Sequence[Usage]) -> dict[str, Any]:
        """The usage chunk."""
        return self._chunk | {
            "choices": [],
            "usage": self.usage(num_tokens, usages),
            "metrics": metrics(num_tokens, usages),
        }

    def whole(self, texts: Sequence[Delta], usages: Sequence[Usage]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        choices = [self._choice(delta) for delta in texts]
        num_tokens = sum(delta.num_tokens for delta in texts)
        return self._whole | {
            "choices": choices,
            "usage": self.usage(num_tokens, usages),
            "metrics": metrics(num_tokens, usages),
            **notes_of(usages),
        }

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """A text of a whole answer."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        content = {"message": message} if self.is_chat else {"text": delta.text}
        return self._ended(delta, content, delta.logprobs)

    def _ended(self, delta: Delta, content: dict[str, Any], said: Sequence[Any]) -> dict[str, Any]:
        finish, stop = ending(delta)
        ends = {"finish_reason": finish, "stop_reason": stop}
        logprobs = self.logprobs(delta.choice, said)
        return {"index": delta.choice, **content, "logprobs": logprobs, **ends}

    def usage(self, num_tokens: int, usages: Sequence[Usage] = ()) -> dict[str, Any]:
        """Token counts; a prompt counts once, however many texts it has."""
        counts: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self._num_prompt_tokens + num_tokens,
        }
        if usages:
            counts["prompt_tokens_details"] = {"cached_tokens": total(usages).cached_tokens}
        return counts


def notes_of(usages: Sequence[Usage], body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Notes on the request's constraint, if there are any.

    Args:
        body: An answer whose `dllm` it joins.
    """
    notes = usages[0].notes if usages else []
    return {"dllm": {**(body or {}).get("dllm", {}), "notes": notes}} if notes else {}


def metrics(num_tokens: int, usages: Sequence[Usage]) -> dict[str, Any]:
    """Costs of a request: times of its slowest prompt, forwards of all."""
    usage = total(usages)
    queue_s = usage.queue_s or 0.0
    work_s = usage.e2e_s - queue_s
    return {  # rounded to integers: `round` with digits costs ten times as much
        "queue_time_ms": round(1e6 * queue_s) / 1e3,
        "time_to_first_token_ms": round(1e6 * (usage.ttfb_s or 0.0)) / 1e3,
        "generation_time_ms": round(1e6 * work_s) / 1e3,
        "tokens_per_second": round(10 * num_tokens / work_s) / 10 if work_s > 0 else None,
        "nfe": usage.nfe,
        "prefill_nfe": usage.prefill_nfe,
        "tokens_per_forward": round(1e3 * usage.written / max(usage.nfe, 1)) / 1e3,
        "num_preemptions": usage.num_preemptions,
    }


class Window:
    """The provisional window of one choice as its viewer knows it."""

    def __init__(self):
        self._cells: dict[int, tuple[str | float, ...]] = {}
        self.seq = 0

    def change(self, frame: Frame) -> dict[str, Any]:
        """The changes of a frame, cell by cell; indices count output tokens."""
        probs = frame.probs or [None] * len(frame.cells)
        cells: dict[int, tuple[str | float, ...]] = {
            at: (text,) if prob is None else (text, prob)
            for at, (text, prob) in enumerate(zip(frame.cells, probs, strict=False), frame.at)
            if text is not None
        }
        before, self._cells = self._cells, cells
        changed = [[at, *cell] for at, cell in cells.items() if before.get(at) != cell]
        holes = [at for at in before if at >= frame.at and at not in cells]
        self.seq += 1
        size = len(frame.cells)
        return {"nfe": frame.nfe, "at": frame.at, "size": size, "set": changed, "clear": holes}


def ending(delta: Delta) -> tuple[str | None, str | int | None]:
    """`finish_reason` and `stop_reason` of a text; None while it runs."""
    if delta.finish is None:
        return None, None
    finish, stop = _ENDS[delta.finish]
    return finish, delta.stop_reason if delta.stop_reason is not None else stop
