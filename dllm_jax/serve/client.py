"""The front's end of the pipe: starts the engine process, hands requests over, fills mailboxes."""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any, Literal

from dllm_jax.serve import framing, pipe
from dllm_jax.serve.engine_process import ended, how_it_ended, spawn
from dllm_jax.serve.mailbox import EngineGone, Mailbox, RequestFailed
from dllm_jax.serve.pipe import Counts, Delta, Facts
from dllm_jax.serve.refusals import Refusal
from dllm_jax.serve.stderr import Copied
from dllm_jax.serve.text import TextSide

END_S, KILLED_S = 0.2, 60.0  # for a process to end on request, and after SIGKILL
_READY = ("family", "strategy", "dtype", "num_slots", "max_model_len", "jax")  # of `Facts`
LAST_LINES_S = 1.0  # for what it wrote before
State = Literal["starting", "ready", "paused", "asleep", "draining", "failed"]


class _End(asyncio.Protocol):
    """The front's end of the socket: messages are taken as they arrive.

    Attributes:
        turns: `Ready` and `Failed`, which have a task to read them, and None at the end.
    """

    def __init__(self, take: Callable[[Any], None]):
        self._take, self._reader = take, framing.Reader(pipe.FromEngine)
        self.turns: asyncio.Queue[pipe.Ready | pipe.Failed | None] = asyncio.Queue()

    def data_received(self, data: bytes) -> None:
        """Messages, or parts of them."""
        try:
            for message in self._reader.feed(data):
                if isinstance(message, framing.Broken):
                    raise message.error
                if isinstance(message, pipe.Ready | pipe.Failed):
                    self.turns.put_nowait(message)
                else:
                    self._take(message)
        except Exception as error:  # a broken frame
            self.turns.put_nowait(pipe.Failed(f"{type(error).__name__}: {error}"))
            self.turns.put_nowait(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine is gone."""
        self.turns.put_nowait(None)


class EngineClient:
    """The engine process as the front sees it.

    Args:
        launch: The first message to the process.
        max_restarts: How often a process that was ready is replaced when it ends.
        on_counts: Called with each new `Counts`.
        tell: Writes a line of the log: an event, its level and fields.

    Attributes:
        facts, text: Of the model, once the engine is ready.
        over: Set when the engine has failed for good; `failure` says why, and `reason` what
            clients may read of it: an exception's text may hold anything.
        is_usage: It failed for what the command line says.
    """

    def __init__(
        self,
        launch: pipe.Launch,
        max_restarts: int = 0,
        on_counts: Callable[[Counts], None] = lambda counts: None,
        tell: Callable[..., None] = lambda event, level="info", **fields: None,
    ):
        self._launch, self._on_counts, self._tell = launch, on_counts, tell
        self._restarts_left = max_restarts
        self._boxes: dict[int, Mailbox] = {}
        self._num_texts = 0  # of the boxes, not ended
        self._asked: dict[int, asyncio.Future[pipe.Told]] = {}
        self._commanded: dict[int, asyncio.Future[pipe.Carried]] = {}
        self._ids = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._lines = Copied()
        self._moved_s = self._spawned_s = 0.0
        self._is_ready = False
        self.is_draining = False
        self.held: Literal["paused", "asleep"] | None = None  # by an administrator
        self.progress: tuple[int, int] | None = None
        self.facts: Facts | None = None
        self.text: TextSide | None = None
        self.counts = Counts()
        self.failure: str | None = None
        self.reason: str | None = None
        self.is_usage = False
        self.num_failures = self.num_restarts = 0
        self.over = asyncio.Event()

    @property
    def state(self) -> State:
        """The state that `/health` reports."""
        if self.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        if not self._is_ready:
            return "starting"
        return self.held or "ready"

    @property
    def num_open(self) -> int:
        """Texts that have not ended."""
        return self._num_texts + len(self._asked)

    @property
    def has_open(self) -> bool:
        """Whether a request has not been released by its reader."""
        return bool(self._boxes or self._asked)

    def num_open_of(self, client: str) -> int:
        """Texts of this client in the engine."""
        return sum(box.num_open for box in self._boxes.values() if box.client == client)

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._process is None else self._process.pid

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine was seen to work, while it has requests."""
        return time.monotonic() - self._moved_s if self.has_open else 0.0

    def start(self) -> None:
        """Spawn the engine; returns at once. Call it from the main thread."""
        self._process, ours, told = spawn()
        self._is_ready, self.progress, self._spawned_s = False, None, time.monotonic()
        self._lines = Copied()
        self._task = asyncio.get_running_loop().create_task(self._serve(ours, told))

    def submit(
        self,
        prompts: list[pipe.Prompt],
        params: dict[str, Any],
        client: str = "",
        **how: Any,
    ) -> Mailbox:
        """Hand prompts to the engine, which queues all or none; `release` the mailbox in the end.

        Args:
            how: Further fields of `pipe.Add`.

        Raises:
            Refusal: They are too much for one message.
            EngineGone: The engine is gone.
        """
        n = params.get("n", 1)
        box = Mailbox(next(self._ids), len(prompts) * n, len(prompts))
        box.client = client
        self._send(pipe.Add(box.id, prompts, params, client=client, **how))
        self._begin()
        self._boxes[box.id] = box
        self._num_texts += box.num_open
        return box

    async def ask(self, texts: list[Any], client: str = "") -> pipe.Told:
        """Have texts (`api.questions.Read`) read in one forward.

        Raises:
            Refusal: They cannot be read.
            EngineGone: The engine ended first.
        """
        number = next(self._ids)
        reads = [(text.ids, text.prompt_len, text.rows, text.labels) for text in texts]
        self._send(pipe.Ask(number, reads, client))
        self._begin()
        return await _answer(self._asked, number)

    def order(self, name: str, **fields: Any) -> int:
        """`command` without its answer; the number by which it comes."""
        number = next(self._ids)
        self._send(pipe.Command(number, name, fields))
        return number

    async def command(self, name: str, **fields: Any) -> dict[str, Any]:
        """Have a command of an administrator carried out.

        Raises:
            Refusal: It cannot be done, and everything is as before.
            EngineGone: The engine ended first.
        """
        return (await _answer(self._commanded, self.order(name, **fields))).fields

    def _begin(self) -> None:
        """A request is handed over."""
        if not self.has_open:
            self._moved_s = time.monotonic()

    def release(self, box: Mailbox) -> None:
        """Forget a request; its running part is aborted."""
        if self._forget(box) and not box.is_over:
            with contextlib.suppress(EngineGone):
                self._send(pipe.Abort(box.id))

    def _forget(self, box: Mailbox) -> bool:
        """Whether it was known."""
        if self._boxes.pop(box.id, None) is None:
            return False
        self._num_texts -= box.num_open
        return True

    def fail_all(self, reason: str) -> None:
        """Tell every reader that its request ends here."""
        for box in list(self._boxes.values()):
            box.fail(reason)
        for answer in self._asked.values():
            _fail(answer, EngineGone(reason))

    async def close(self) -> None:
        """End the engine process: it is not waited for, but for `Launch.grace_s`."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None and self._process.poll() is None:
            if self._launch.grace_s:  # the closed socket ends it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._process.wait, self._launch.grace_s)
            self._process.kill()
            self._process.wait()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lines.ended.wait(), LAST_LINES_S)
        if self.text is not None:
            self.text.close()

    # --- the pipe ---------------------------------------------------------------------------------

    def _send(self, message: pipe.Message) -> None:
        if self._transport is None or self._transport.is_closing():
            raise EngineGone(self.reason or "the engine is not ready")
        try:
            self._unsent.append(framing.frame(message))
        except ValueError as error:
            raise Refusal(str(error), code="request_too_large", status=413) from None
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send the messages of a turn of the event loop in one write."""
        unsent, self._unsent = self._unsent, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))

    async def _serve(self, sock: socket.socket, told: int) -> None:
        """Read until the engine ends, then say so or start another.

        Args:
            told: The end of a pipe from its standard error.
        """
        failed: pipe.Failed | None = None
        end = _End(self._take)
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: self._lines, os.fdopen(told, "rb", 0))
            self._transport, _ = await loop.create_connection(lambda: end, sock=sock)
            self._transport.write(framing.frame(self._launch))
            while (message := await end.turns.get()) is not None:
                if isinstance(message, pipe.Failed):
                    failed = message
                    continue
                if self.text is None:
                    self.text = await asyncio.to_thread(TextSide, message.facts)
                self.facts, self._is_ready = message.facts, True
                self._tell(
                    "ready",
                    model=message.facts.source,
                    **{name: getattr(message.facts, name) for name in _READY},
                    seconds=round(time.monotonic() - self._spawned_s, 1),
                )
        except Exception as error:  # a tokenizer that cannot be read
            failed = pipe.Failed(f"{type(error).__name__}: {error}")
        finally:
            if self._transport is not None:
                self._transport.close()
        await self._end(failed)

    def _take(self, message: Any) -> None:
        if not isinstance(message, pipe.Moved) or message.deltas or message.counts != self.counts:
            self._moved_s = time.monotonic()
        if isinstance(message, pipe.Moved):
            for delta in message.deltas:
                if (box := self._boxes.get(delta.id)) is not None:
                    self._put(box, delta)
            self.counts = message.counts
            self._on_counts(message.counts)
        elif isinstance(message, pipe.Accepted):
            if (box := self._boxes.get(message.id)) is not None:
                box.accept()
        elif isinstance(message, pipe.Refused):
            error = _refusal(message)
            if (box := self._boxes.get(message.id)) is not None:
                self._forget(box)
                box.refuse(error)
            _fail(self._asked.get(message.id), error)
            _fail(self._commanded.get(message.id), error)
        elif isinstance(message, pipe.Carried | pipe.Told):
            asked: Any = self._asked if isinstance(message, pipe.Told) else self._commanded
            if (answer := asked.get(message.id)) is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, pipe.Progress):
            self.progress = message.done, message.of
        elif isinstance(message, pipe.Phase):
            self._tell("start", phase=message.name, seconds=message.seconds, **message.fields)

    def _put(self, box: Mailbox, delta: Delta) -> None:
        """Hand a delta over; whatever its reader raises ends this request alone."""
        self._num_texts -= delta.finish is not None
        try:
            box.put(delta)
        except Exception as error:
            box.refuse(RequestFailed(f"{type(error).__name__}: {error}"))

    async def _end(self, failed: pipe.Failed | None) -> None:
        """The engine is gone."""
        process = self._process
        assert process is not None
        was_ready, self._is_ready, self.held = self._is_ready, False, None
        for answer in self._commanded.values():
            _fail(answer, EngineGone("the engine ended before the command did"))
        self.num_failures += 1
        self.counts = Counts()
        self._on_counts(self.counts)
        status = await ended(process, END_S)  # it closes the socket as it ends
        if status is None:
            process.kill()
        reason = f"the engine process {how_it_ended(status)}" if failed is None else failed.message
        said = reason if failed is None else "the engine has failed; the server's log says why"
        restarts = was_ready and self._restarts_left > 0 and not self.is_draining
        if not restarts:
            self.failure, self.reason = reason, said
            self.is_usage = failed is not None and failed.usage
        self.fail_all(said)
        if restarts:
            self._restarts_left -= 1
            self.num_restarts += 1
            self._tell("restart", "warning", reason=reason, left=self._restarts_left)
            if await ended(process, KILLED_S) is not None:  # else it may still hold the device
                self.start()
                return
            self.failure = f"the engine process {process.pid} does not end after SIGKILL"
            self.reason = "the engine process does not end"
        self.over.set()


async def _answer(waiting: "dict[int, asyncio.Future[Any]]", number: int) -> Any:
    answer = waiting[number] = asyncio.get_running_loop().create_future()
    try:
        return await answer
    finally:
        del waiting[number]


def _fail(answer: "asyncio.Future[Any] | None", error: Exception) -> None:
    """End the wait for an answer, if anybody waits."""
    if answer is not None and not answer.done():
        answer.set_exception(error)


def _refusal(told: pipe.Refused) -> Refusal | RequestFailed:
    if told.status == 500:
        return RequestFailed(told.message)
    headers = {"retry-after": "2"} if told.status == 429 else None
    return Refusal(
        told.message, param=told.param, code=told.code, status=told.status, headers=headers
    )
