"""The text side of a model without JAX: its tokenizer and its chat template.

Long texts are read in two threads. A transformers tokenizer releases the GIL while it encodes (it
calls `encode_batch`); `encode` of a `tokenizers.Tokenizer` does not, so nothing here calls that.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dllm_jax.serve.pipe import Facts
from dllm_jax.serve.refusals import Refusal, shown
from dllm_jax.serve.wire import Turn, text_of

INLINE_CHARS = 1024  # shorter texts cost less than a change of threads
Result = TypeVar("Result")


class _Family(NamedTuple):
    family: str


class TextSide:
    """Texts to ids and back.

    Attributes:
        tokenizer: None for a model without one (`random:NAME`).
        source, defaults: What `loading.chat` reads of a model.
        chats: The model has a chat template.
    """

    def __init__(self, facts: Facts):
        self.source, self.defaults = facts.source, _Family(facts.family)
        self.vocab_size = facts.vocab_size
        self.tokenizer: Any = None
        if facts.tokenizer_folder is not None:
            from dllm_jax.loading.tokenizer import read_tokenizer

            mask = facts.mask_token_id if facts.mask_token_id >= 0 else None
            self.tokenizer = read_tokenizer(Path(facts.tokenizer_folder), mask)
        self.chats = self.chat_template is not None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

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
        """`work(*args)`, in a thread where the text is long."""
        if size <= INLINE_CHARS:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def ids(self, text: str, special: bool, param: str) -> list[int]:
        """Token ids of a text.

        Raises:
            Refusal: The model has no tokenizer.
        """
        from dllm_jax.loading.tokenizer import encode

        return encode(self._reader(param), text, special)

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

    def render(self, turns: list[Turn], template_fields: dict[str, Any] | None) -> str:
        """A conversation as the text the model reads.

        Raises:
            Refusal: The model has no chat template, or it does not take this conversation.
        """
        from dllm_jax.loading.chat import render

        for name in template_fields or ():
            if name in ("chat_template", "tools", "documents", "continue_final_message"):
                param = f"chat_template_kwargs.{name}"
                raise Refusal(
                    f"{param} is not supported; leave it out",
                    param=param,
                    code="unsupported_parameter",
                )
        if not self.chats:
            raise Refusal(
                f"model {self.source!r} has no chat template; use /v1/completions with a prompt",
                param="messages",
                code="invalid_conversation",
            )
        conversation = []
        for turn in turns:
            role = "system" if turn.role == "developer" else turn.role
            message = {"role": role, "content": text_of(turn.content)}
            conversation.append(message | ({} if turn.name is None else {"name": turn.name}))
        try:
            return render(self, conversation, **(template_fields or {}))
        except (ValueError, TypeError) as error:
            param = "chat_template_kwargs" if "does not read" in str(error) else "messages"
            raise Refusal(str(error), param=param, code="invalid_conversation") from None

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _reader(self, param: str) -> Any:
        if self.tokenizer is None:
            raise Refusal(
                f"model {self.source!r} has no tokenizer; give token ids as the prompt",
                param=param,
            )
        return self.tokenizer
