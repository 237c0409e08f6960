"""The text side of a model without JAX: its tokenizer and its chat template.

Longer texts are read in two threads, and texts of many KiB in one of their own, so that they keep
nobody waiting. A transformers tokenizer releases the GIL while it encodes (it calls
`encode_batch`); `encode` of a `tokenizers.Tokenizer` does not, so nothing here calls that.
"""

import asyncio
import contextlib
import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dllm_jax import structured
from dllm_jax.loading.reach import Reach, reach
from dllm_jax.loading.tool_forms import ToolForm
from dllm_jax.serve.pipe import Facts
from dllm_jax.serve.refusals import Refusal, shown, unsupported
from dllm_jax.serve.wire import Turn, text_of
from dllm_jax.structured import Tools
from dllm_jax.structured.offers import Offer

INLINE_CHARS = 1024  # shorter texts cost less than a change of threads
SHORT_CHARS = 64 << 10  # longer texts wait for each other alone
MOST_LONG = 16  # of them that wait
MOST_CHARS = 1 << 20  # that /tokenize takes of a text which no context holds
Result = TypeVar("Result")


class _Family(NamedTuple):
    family: str


class TextSide:
    """Texts to ids and back.

    Attributes:
        tokenizer: None for a model without one (`random:NAME`).
        source, defaults: What `loading.chat` reads of a model.
        chats: The model has a chat template.
        tool_format: Of a template without tools (`loading.tool_forms`).
    """

    def __init__(self, facts: Facts):
        self.source, self.defaults = facts.source, _Family(facts.family)
        self.vocab_size, self.tool_format = facts.vocab_size, facts.tool_format
        self.tokenizer: Any = None
        if facts.tokenizer_folder is not None:
            from dllm_jax.loading.tokenizer import read_tokenizer

            mask = facts.mask_token_id if facts.mask_token_id >= 0 else None
            self.tokenizer = read_tokenizer(Path(facts.tokenizer_folder), mask)
            if facts.chat_template is not None:
                self.tokenizer.chat_template = facts.chat_template
        self.chats = self.chat_template is not None
        self._reach = None if self.tokenizer is None else reach(self.tokenizer)
        self._max_model_len = facts.max_model_len
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._waiting: set[Future[Any]] = set()  # in it

    @functools.cached_property
    def chat_template(self) -> str | None:
        """The template's text; None for a model without one."""
        from dllm_jax.loading.chat import template_of

        try:
            template = template_of(self)
        except ValueError:  # several, none of them named "default"
            return None
        return None if template is None else template.text

    async def run(self, size: int, work: Callable[..., Result], *args: Any) -> Result:
        """`work(*args)`, in a thread where the text is long.

        Raises:
            Refusal: Too many long texts wait.
        """
        if size <= INLINE_CHARS:
            return work(*args)
        if size <= SHORT_CHARS:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, work, *args)
        if len(self._waiting) >= MOST_LONG:
            raise Refusal(
                f"{MOST_LONG} long texts wait to be tokenized, the most that may; try again later",
                code="queue_full",
                status=429,
                headers={"retry-after": "5"},
            )
        job = self._long.submit(_and_give_back, work, *args)
        self._waiting.add(job)
        job.add_done_callback(self._waiting.discard)
        return await asyncio.wrap_future(job)

    def check_length(self, text: str, param: str, least: int = 0) -> None:
        """Refuse a text that has certainly more tokens than the context takes.

        Args:
            least: Characters that are taken anyway; 0: all that may fit.
        """
        known = self._reach or Reach(0 if least else len(text), False)
        most = max(known.longest * self._max_model_len, least)
        if len(text) > most and (found := known.size(text)) > most:
            raise Refusal(
                f"{param} has {found} characters; the context takes {self._max_model_len} tokens, "
                f"and {most} characters are the most: shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def ids(self, text: str, special: bool, param: str, least: int = 0) -> list[int]:
        """Token ids of a text.

        Args:
            least: Characters that are taken, however few tokens the context takes.

        Raises:
            Refusal: The model has no tokenizer, or the text is certainly too long.
        """
        from dllm_jax.loading.tokenizer import encode

        reader = self._reader(param)
        self.check_length(text, param, least)
        return encode(reader, text, special)

    def text(self, ids: list[int]) -> str:
        """The text of token ids, special ones by name.

        Raises:
            Refusal: The model has no tokenizer, or an id is outside its vocabulary.
        """
        self.check_ids(ids, "tokens")
        return self._reader("tokens").decode(ids, skip_special_tokens=False)

    def token_strings(self, ids: list[int]) -> list[str]:
        """The tokens by name."""
        return [str(name) for name in self._reader("tokens").convert_ids_to_tokens(ids)]

    def check_ids(self, ids: list[int], param: str) -> None:
        """Refuse ids outside the vocabulary."""
        if min(ids, default=0) >= 0 and max(ids, default=0) < self.vocab_size:
            return
        for i, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise Refusal(
                    f"{param}[{i}]={shown(token)} is outside the vocabulary [0, {self.vocab_size});"
                    " was it tokenized for another model?",
                    param=f"{param}[{i}]",
                )

    @functools.cached_property
    def form(self) -> ToolForm:
        """How the template has calls and thoughts.

        Raises:
            ValueError: There is no form of the name that was given.
        """
        from dllm_jax.loading.tool_forms import NO_FORM, tool_form

        return tool_form(self, self.tool_format) if self.chats else NO_FORM

    def turn(self, tools: Tools) -> structured.Turn:
        """A turn that is to be read."""
        return structured.Turn(tools, *self._spelt)

    def end_ids(self, tools: Tools) -> list[int]:
        """See `tool_forms.end_ids`."""
        from dllm_jax.loading.tool_forms import end_ids

        return end_ids(tools.form, self._reader("tools")) if tools.tools else []

    @functools.cached_property
    def _spelt(self) -> tuple[list[bytes | None], dict[str, int]]:
        reader = self._reader("tools")
        return structured.token_bytes(reader), structured.mark_ids(reader.get_added_vocab())

    def prompt(
        self,
        turns: list[Turn],
        template_fields: dict[str, Any] | None,
        least: int = 0,
        offer: Offer | None = None,
    ) -> tuple[list[int], Tools | None]:
        """Ids of a conversation as the model reads it, and what its answer is held to or read by.

        Args:
            least: As of `ids`.
            offer: The tools.

        Raises:
            Refusal: The model has no chat template, or it does not take this conversation.
        """
        from dllm_jax.loading import chat, tool_forms
        from dllm_jax.loading.turns import Unusable

        for name in template_fields or ():
            if name in ("chat_template", "tools", "documents", "continue_final_message"):
                param = f"chat_template_kwargs.{name}"
                raise unsupported(param, f"{param} is not supported; leave it out")
        if not self.chats:
            raise Refusal(
                f"model {self.source!r} has no chat template; use /v1/completions with a prompt",
                param="messages",
                code="invalid_conversation",
            )
        form, fields = self.form, dict(template_fields or {})
        if offer is not None and form.name is None:
            raise Refusal(
                "tools: this model's template has none, or writes calls in a form that is not "
                "known; start the server with --tool-format hermes, or leave tools out",
                param="tools",
                code="tools_unsupported",
            )

        def encode(text: str) -> list[int]:
            return self.ids(text, False, "messages", least)

        try:
            said, more = tool_forms.laid_out([_message(turn) for turn in turns], offer, form)
            text, ids = chat.prompt(self, said, encode, **fields, **more)
        except Unusable as error:
            raise Refusal(str(error), param=error.param, code=error.code) from None
        except (ValueError, TypeError) as error:
            param = "chat_template_kwargs" if "does not read" in str(error) else "messages"
            raise Refusal(str(error), param=param, code="invalid_conversation") from None
        inside = tool_forms.is_inside(text, form)
        if offer is not None:
            held = (offer.tools, offer.choice, offer.several, form.reads, form.thinks, inside)
            return ids, Tools(*held)
        return ids, Tools((), "none", False, form.reads, True, inside) if form.thinks else None

    def close(self) -> None:
        """End the threads."""
        for threads in (self._threads, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    def _reader(self, param: str) -> Any:
        if self.tokenizer is None:
            raise Refusal(
                f"model {self.source!r} has no tokenizer; give token ids as the prompt",
                param=param,
            )
        return self.tokenizer


def _message(turn: Turn) -> dict[str, Any]:
    """A message as templates read it."""
    message: dict[str, Any] = {
        "role": "system" if turn.role == "developer" else turn.role,
        "content": text_of(turn.content),
        "name": turn.name,
        "tool_calls": turn.tool_calls,
        "tool_call_id": turn.tool_call_id,
        "reasoning_content": turn.reasoning_content or turn.reasoning,
    }
    return {name: value for name, value in message.items() if value is not None}


def _and_give_back(work: Callable[..., Result], *args: Any) -> Result:
    """`work(*args)`; what it freed goes back to the system, which the C library would keep."""
    try:
        return work(*args)
    finally:
        with contextlib.suppress(AttributeError, OSError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
