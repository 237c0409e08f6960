"""What the engine has said of one request and its reader has not taken yet.

There is one pending delta a text, which grows until it is taken: a slow reader holds its own text
and nothing else.
"""

import asyncio
from collections.abc import Callable

from dllm_jax.serve.pipe import Delta, Usage
from dllm_jax.serve.refusals import Refusal


class EngineGone(Exception):
    """The engine ended before the request did; the message says how."""


class RequestFailed(Exception):
    """A request ended with an error; the message is for the log alone."""


class Mailbox:
    """Messages of the engine for one request that its reader has not taken yet.

    Args:
        num_choices: Texts of the request.
        num_prompts: Prompts of the request.

    Attributes:
        num_open: Texts that have not ended.
        usages: Counts of the prompts that have ended.
        is_closed: Its reader left.
        client: Whose request it is.
        is_accepted: The engine has queued every prompt; reported for streams only.
        refusal: Why it queued none, or gave up.
        failure: Why it will say nothing more.
        on_text: Takes a delta of nothing but text while the reader waits; False leaves it to it.
    """

    def __init__(self, request_id: int, num_choices: int, num_prompts: int):
        self.id, self.num_choices, self.num_prompts = request_id, num_choices, num_prompts
        self.num_open = num_choices
        self.usages: list[Usage] = []
        self.num_tokens = [0] * num_choices
        self.client = ""
        self.refusal: Refusal | RequestFailed | None = None
        self.failure: str | None = None
        self.is_closed = self.is_accepted = False
        self.on_text: Callable[[Delta], bool] | None = None
        self.merged_frames = 0
        self._pending: dict[int, Delta] = {}
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Nothing further will come."""
        return self.num_open == 0 and len(self.usages) == self.num_prompts

    def put(self, delta: Delta) -> None:
        """Take a delta from the engine."""
        self.num_tokens[delta.choice] = delta.num_tokens
        if delta.finish is not None:
            self.num_open -= 1
        if delta.usage is not None:
            self.usages.append(delta.usage)
        if (
            delta.finish is delta.frame is delta.usage is None
            and self._is_read
            and self.on_text is not None
            and self.on_text(delta)
        ):
            return
        waiting = self._pending.get(delta.choice)
        if waiting is None:
            self._pending[delta.choice] = delta
        else:
            self.merged_frames += waiting.frame is not None and delta.frame is not None
            waiting.merge(delta)
        self.wake()

    def accept(self) -> None:
        """The engine has queued every prompt."""
        self.is_accepted = True
        self.wake()

    def refuse(self, refusal: Refusal | RequestFailed) -> None:
        """The engine has queued none, or gave up."""
        self.refusal = refusal
        self.wake()

    def fail(self, reason: str) -> None:
        """The engine is gone, or the server ends."""
        self.failure = reason
        self.wake()

    def check(self) -> None:
        """Raise what the engine says in the place of the rest.

        Raises:
            Refusal: It refused the request.
            RequestFailed: It could not handle it.
            EngineGone: It ended first.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.failure is not None and not self.is_over:
            raise EngineGone(self.failure)

    async def accepted(self) -> None:
        """Wait until the engine has queued a stream; raises as `check`."""
        while not self.is_accepted:
            await self.wait()
            self._has_news = bool(self._pending)
            self.check()

    def leave(self) -> None:
        """Its reader left."""
        self.is_closed = True
        self.wake()

    def wake(self) -> None:
        """Let its reader look."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def _is_read(self) -> bool:
        """Whether its reader waits, and has taken all there was."""
        return self._waiter is not None and not self._has_news

    async def wait(self, seconds: float | None = None) -> None:
        """Wait for something new, or so long."""
        if self._has_news:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        if seconds is None:
            await self._waiter
        else:
            await asyncio.wait([self._waiter], timeout=seconds)
        self._waiter = None

    def take(self) -> list[Delta]:
        """Pending deltas, in the order of the choices."""
        self._has_news = False
        pending, self._pending = self._pending, {}
        return [pending[choice] for choice in sorted(pending)]
