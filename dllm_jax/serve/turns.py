"""Chat answers in pieces: prose, thoughts and calls, whole and streamed.

Data flow: ids of a text -> `Turn`, which says what they are -> a form of the route -> events, or
one answer. Nothing here waits or sends, but for `TurnStream`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dllm_jax.serve.answers import Form, ending, notes_of
from dllm_jax.serve.logs import random_id
from dllm_jax.serve.pipe import Delta, Usage
from dllm_jax.serve.refusals import Refusal
from dllm_jax.serve.stream import DONE, EventStream, event
from dllm_jax.structured import Piece, Turn
from dllm_jax.structured.turn_reading import contents_of, joined


class Texts:
    """The texts of a request as turns.

    Args:
        make: A new turn; None: the texts are prose.
    """

    def __init__(self, make: Callable[[], Turn] | None):
        self._make = make
        self._turns: dict[int, Turn] = {}
        self._num_calls: dict[int, int] = {}
        self._waiting: dict[int, list[Any]] = {}  # log-probabilities of what is held back
        self._num_begun = 0

    def feed(self, delta: Delta) -> list[Piece]:
        """The parts of a delta."""
        if self._make is None:
            has_text = delta.text or delta.logprobs
            return [Piece("text", delta.text, _texts(delta.logprobs))] if has_text else []
        turn = self._turns.setdefault(delta.choice, self._make())
        if delta.logprobs or self._waiting.get(delta.choice):
            pieces = joined(self._with_logprobs(turn, delta))
        else:
            pieces = turn.feed(delta.ids, last=delta.finish is not None)
        ended = sum(piece.kind == "end" for piece in pieces)
        self._num_begun += sum(piece.kind == "call" for piece in pieces)
        self._num_calls[delta.choice] = self._num_calls.get(delta.choice, 0) + ended
        return pieces

    def _with_logprobs(self, turn: Turn, delta: Delta) -> list[Piece]:
        """What a delta brings, prose with the log-probabilities of its tokens and of no others."""
        waiting, pieces = self._waiting.setdefault(delta.choice, []), []
        pairs = zip(delta.ids, delta.logprobs, strict=False)
        for ids, said in [*(([token], [said]) for token, said in pairs), ([], [])]:
            is_last = not ids and delta.finish is not None
            new = turn.feed(ids, last=is_last)
            waiting += _texts(said)
            if not turn.is_prose:  # they were a part of a mark, of a thought or of a call
                waiting.clear()
            for i in [i for i, piece in enumerate(new) if piece.kind == "text"][-1:]:
                if is_last or not turn.holds_back:
                    new[i] = new[i]._replace(logprobs=(*waiting,))
                    waiting.clear()
            pieces += new
        return pieces

    def num_calls(self, choice: int) -> int:
        """Calls that are whole."""
        return self._num_calls.get(choice, 0)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Calls that are whole, calls that are not, and tokens of thoughts, of all texts."""
        whole = sum(self._num_calls.values())
        return whole, self._num_begun - whole, self.thought_tokens

    @property
    def thought_tokens(self) -> int:
        """Tokens within thoughts, of all texts."""
        return sum(turn.thought_tokens for turn in self._turns.values())


class ChatForm(Form):
    """`/v1/chat/completions` of requests with tools, or of models that think.

    Args:
        args: As of `Form`.
        is_certain: Each text begins with a call.

    Attributes:
        texts: What the texts are.
    """

    def __init__(self, *args: Any, texts: Texts, is_certain: bool, shows_thoughts: bool):
        super().__init__(*args)
        self.texts = texts
        self._is_certain, self._shows_thoughts = is_certain, shows_thoughts
        self._calls: dict[int, int] = {}

    def opened(self, choice: int) -> Iterator[bytes]:
        """A choice begins."""
        chunk = self.role(choice)
        if self._is_certain:
            chunk["choices"][0]["delta"]["content"] = None
        yield event(chunk)

    def said(self, choice: int, piece: Piece) -> Iterator[bytes]:
        """A piece of a choice."""
        delta: dict[str, Any] | None = None
        if piece.kind == "text":
            delta = {"content": piece.text}
        elif piece.kind == "thought" and self._shows_thoughts:
            delta = {"reasoning_content": piece.text, "reasoning": piece.text}
        elif piece.kind == "call":
            number = self._calls[choice] = self._calls.get(choice, -1) + 1
            begun = {"name": piece.text, "arguments": ""}
            call = {"index": number, "id": call_id(), "type": "function", "function": begun}
            delta = {"tool_calls": [call]}
        elif piece.kind == "arguments":
            call = {"index": self._calls[choice], "function": {"arguments": piece.text}}
            delta = {"tool_calls": [call]}
        if delta is not None:
            chunk = self._of(choice, delta, None)
            if piece.logprobs:
                chunk["choices"][0]["logprobs"] = self.logprobs(choice, piece.logprobs)
            yield event(chunk)

    def ended(self, delta: Delta) -> Iterator[bytes]:
        """A choice ends."""
        finish, stop = ending(delta)
        if self.texts.num_calls(delta.choice):
            finish = "tool_calls"
        chunk = self._of(delta.choice, {}, finish)
        chunk["choices"][0]["stop_reason"] = stop
        if delta.forced:
            chunk["dllm"] = {"forced": delta.forced}
        yield event(chunk | notes_of([delta.usage] if delta.usage else [], chunk))

    def closed(self, num_tokens: int, usages: Sequence[Usage], has_usage: bool) -> bytes:
        """The end of the stream."""
        return (event(self.last(num_tokens, usages)) if has_usage else b"") + DONE

    def failed(self, error: Refusal, request_id: str) -> bytes:
        """The end of a stream that fails."""
        return event(error.body) + DONE

    def _of(self, choice: int, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        one = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._chunk | {"choices": [one]}

    def usage(self, num_tokens: int, usages: Sequence[Usage] = ()) -> dict[str, Any]:
        """See `Form`; with the tokens of thoughts."""
        counts = super().usage(num_tokens, usages)
        details = {"reasoning_tokens": self.texts.thought_tokens}
        return counts | {"completion_tokens_details": details}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        pieces = self.texts.feed(delta)
        message = message_of(pieces, self._shows_thoughts)
        said = [entry for piece in pieces for entry in piece.logprobs]
        choice = self._ended(delta, {"message": message}, said)
        return choice | ({"finish_reason": "tool_calls"} if "tool_calls" in message else {})


def _texts(said: Sequence[Any]) -> tuple[Any, ...]:
    """Log-probabilities of tokens that are text."""
    return tuple(entry for entry in said if entry is not None)


def call_id() -> str:
    """A new id of a call."""
    return f"call_{random_id()[:24]}"


def message_of(pieces: Sequence[Piece], shows_thoughts: bool) -> dict[str, Any]:
    """A turn in OpenAI's form; a call that is not whole is left out."""
    content, thoughts, calls = contents_of(pieces)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = [
            {"id": call_id(), "type": "function", "function": {"name": name, "arguments": said}}
            for name, said in calls
        ]
        message["content"] = content or None
    if thoughts and shows_thoughts:
        message |= {"reasoning_content": thoughts, "reasoning": thoughts}
    return message


class TurnStream(EventStream):
    """A stream of turns, in the form of its route."""

    def __init__(self, *args: Any, **fields: Any):
        super().__init__(*args, **fields)
        self.keep_alive = getattr(self._form, "keep_alive", self.keep_alive)

    def _chunks(self, delta: Delta) -> Iterator[bytes]:
        form = self._form
        if delta.choice not in self._roles:
            self._roles.add(delta.choice)
            yield from form.opened(delta.choice)
        for piece in form.texts.feed(delta):
            yield from form.said(delta.choice, piece)
        if delta.finish is not None:
            yield from form.ended(delta)

    def _ending(self) -> bytes:
        if (failure := self._failure()) is not None:
            return self._form.failed(failure, self._request_id)
        box = self._box
        return self._form.closed(sum(box.num_tokens), box.usages, self._usage)
