"""The engine process: a loop over one engine that sends what it brings.

Data flow: socket -> `Add`, `Abort` -> engine -> outputs -> deltas -> `Outbox`, which merges what it
could not send yet -> socket. The loop alone touches the engine. It waits at the socket when nothing
runs, and the process ends when the other end of the socket is closed.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec

from dllm_jax import structured
from dllm_jax.api.calls import next_stage
from dllm_jax.api.questions import Read
from dllm_jax.engine.checks import Refused
from dllm_jax.engine.faults import Faults
from dllm_jax.engine.inbox import News
from dllm_jax.engine.requests import Request, RequestOutput, SamplingParams
from dllm_jax.serve import pipe
from dllm_jax.serve.pipe import Counts, Delta, Facts, Frame, Message, Usage
from dllm_jax.serve.side_work import SideWork, Work
from dllm_jax.trace.pieces import plain_text

_PR_SET_PDEATHSIG = 1
CPU_NICENESS = 5  # XLA's threads would starve the front
SWITCH_S = 5e-4  # until the loop may run at the same time as a thread that compiles
_READ_BYTES = 1 << 20
_COUNTS_PERIOD_S = 0.5
# Steps in a row that may raise: the engine mends itself after the first, the second ends the
# requests that run, and with the third it is the engine that is broken.
_MOST_FAILED_STEPS = 3
# Not of the engine's `Stats`.
_OWN_COUNTS = ("steps", "devices", "weight_version", "compiled")
_OWN_COUNTS += ("grammar_queries", "grammar_hits", "grammar_stages")
_MOST_NOTES = 32  # of a constraint, in an answer
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
_SOON_S = 1e-3  # left of a deadline that passed while its request waited


class Served(NamedTuple):
    """An engine and what the loop needs besides it.

    Attributes:
        make_request: From prompt ids and fields to the engine's `Request`.
        read: Log-probabilities of the labels in texts, and the forwards that took; ValueError for
            texts that cannot be read. In any thread.
        missing: The work that must be done before a request can be queued, whose result is kept,
            and which returns the states of its automaton; None: none.
        devices: As `Counts.devices`.
        commands: Of an administrator, by name; None: there are none.
        walk: A text of a request with tools along its grammar (`api.calls.Walk`), after the walk
            of an earlier stage; None for other requests.
    """

    engine: Any
    facts: Facts
    tokenizer: Any
    make_request: Callable[[list[int], list[int] | None, dict[str, Any]], Request]
    read: Callable[[list[Read]], tuple[list[list[list[float]]], int]]
    missing: Callable[[Request], Work | None] = lambda request: None
    devices: Callable[[], list[tuple[int, int]]] = list
    commands: "Commands | None" = None
    walk: Callable[[Request, Any], Any] = lambda request, before: None


class Commands(Protocol):
    """Commands of an administrator to the engine.

    Attributes:
        version: Of the weights.
    """

    version: int

    @property
    def is_asleep(self) -> bool:
        """Whether the weights are not on the device."""
        ...

    def aside(self, name: str, fields: dict[str, Any]) -> Callable[[], dict[str, Any]] | None:
        """The work of a command that goes on while requests run; None: one for `between`."""
        ...

    def between(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command while no request runs.

        Raises:
            ValueError: It cannot be done; everything is as before.
        """
        ...


class Asleep(Refused):
    """The weights are not on the device."""

    status = 503

    def __init__(self):
        super().__init__("the model sleeps; an administrator wakes it", code="asleep")


class Start:
    """Takes how far the start is: called with the programs compiled, and their number."""

    def __init__(self, outbox: "Outbox"):
        self._send = outbox.send

    def __call__(self, done: int, of: int) -> None:
        """Report how many programs are compiled."""
        self._send(pipe.Progress(done, of))

    def phase(self, name: str, seconds: float, **fields: Any) -> None:
        """Report that a phase of the start has ended."""
        self._send(pipe.Phase(name, round(seconds, 2), fields))


Factory = Callable[[dict[str, Any], Start], Served]


class UnusableSettings(ValueError):
    """The command line asks for what does not exist."""


class Outbox:
    """Messages to send: written at once as far as the socket takes them.

    What does not fit waits for `push`, and deltas that wait are merged: a slow reader delays
    nothing. There is no thread: the loop would hold the interpreter while it waits for its turn.
    """

    def __init__(self, sock: socket.socket, faults: Faults | None = None):
        self._sock, self._faults = sock, faults or Faults()
        self._rest = memoryview(b"")
        self._messages: deque[Message] = deque()
        self._deltas: dict[tuple[int, int], Delta] = {}
        self._counts: Counts | None = None
        self._steps: list[tuple[int, float]] = []
        self._compiled: list[tuple[str, float, int]] = []

    @property
    def is_full(self) -> bool:
        """Whether something waits until the other end has read."""
        return bool(self._rest)

    def send(self, message: Message) -> None:
        """Send a message, before deltas that are put later."""
        self._messages.append(message)
        self.push()

    def queue(self, message: Message) -> None:
        """Send a message with the next ones."""
        self._messages.append(message)

    def put(self, deltas: list[Delta], counts: Counts) -> None:
        """Send deltas; each is merged with what waits for the same text."""
        for delta in deltas:
            key = delta.id, delta.choice
            waiting = self._deltas.get(key)
            if waiting is None:
                self._deltas[key] = delta
            else:
                waiting.merge(delta)
        self._steps += counts.steps
        self._compiled += counts.compiled
        self._counts = counts
        self.push()

    def drop(self, request_id: int) -> None:
        """Forget the deltas of a request."""
        for key in [key for key in self._deltas if key[0] == request_id]:
            del self._deltas[key]

    def push(self) -> None:
        """Send what waits, as far as there is room."""
        try:
            while self._rest or self._messages or self._counts is not None:
                if not self._rest:
                    self._rest = memoryview(b"".join(self._frames(self._take())))
                self._rest = self._rest[self._sock.send(self._rest, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError:  # the front is gone: the loop sees it where it reads
            self._rest = self._rest[:0]

    def _frames(self, messages: list[Message]) -> Iterator[bytes]:
        """The messages as bytes; what cannot be written ends its request and no other."""
        for message in messages:
            try:
                yield pipe.frame(message)
            except Exception as error:
                if isinstance(message, pipe.Moved):
                    yield from self._apart(message)
                else:
                    request_id = getattr(message, "id", pipe.NO_ID)
                    yield pipe.frame(pipe.Refused(request_id, self._faults.note(error), status=500))

    def _apart(self, moved: pipe.Moved) -> Iterator[bytes]:
        """Each delta in a message of its own."""
        yield pipe.frame(pipe.Moved([], moved.counts))
        counts = msgspec.structs.replace(moved.counts, steps=[], compiled=[])
        for delta in moved.deltas:
            try:
                yield pipe.frame(pipe.Moved([delta], counts))
            except Exception as error:
                yield pipe.frame(pipe.Refused(delta.id, self._faults.note(error), status=500))

    def flush(self, seconds: float) -> None:
        """Wait until everything is sent."""
        until = time.monotonic() + seconds
        while self.is_full and (left := until - time.monotonic()) > 0:
            select.select([], [self._sock], [], left)
            self.push()

    def _take(self) -> list[Message]:
        messages = list(self._messages)
        if self._counts is not None:
            self._counts.steps, self._counts.compiled = self._steps, self._compiled
            messages.append(pipe.Moved(list(self._deltas.values()), self._counts))
        self._messages.clear()
        self._deltas, self._steps, self._compiled, self._counts = {}, [], [], None
        return messages


class _Parked(NamedTuple):
    """Requests that cannot be queued before some work is done."""

    add: pipe.Add
    requests: list[Request]
    since_s: float


class _Prompt:
    """A prompt of a request, and the stages of its texts that run or wait."""

    def __init__(self, add: pipe.Add):
        self.add, self.num_open = add, 0
        self.usages: list[Usage] = []
        self.until_s: float | None = None


class _Live:
    """A prompt in the engine: where its texts go and what was said of them."""

    def __init__(self, prompt: _Prompt, request: Request, first: int, told: int, walks: list[Any]):
        add = prompt.add
        self.id, self.first, self.stream, self.has_ids = add.id, first, add.stream, add.ids
        self.prompt, self.request, self.walks = prompt, request, walks
        self.news = News(every=add.denoise)
        self.num_tokens = [told] * request.params.n
        prompt.num_open += 1


class _Stage(NamedTuple):
    """A further stage of a text, which waits for its grammar."""

    prompt: _Prompt
    request: Request
    choice: int
    told: int
    walk: Any


class Loop:
    """Messages in, steps, deltas out.

    Args:
        sock: The front's socket.
    """

    def __init__(self, served: Served, sock: socket.socket, outbox: Outbox, faults: Faults):
        self._served, self._engine = served, served.engine
        self._engine.is_open, self._engine.faults = True, faults
        self._faults = faults
        self._sock, self._outbox = sock, outbox
        self._reader = pipe.Reader(pipe.ToEngine)
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._rung.setblocking(False)
        self._making = SideWork("constraints wait to be compiled", "constraints_busy", self._ring)
        self._reading = SideWork("questions wait to be read", "decisions_busy", self._ring)
        self._chores = SideWork("weights wait to be read", "weights_busy", self._ring)
        self._commands: deque[pipe.Command] = deque()  # which wait until no request runs
        self._parked: dict[int, _Parked | _Stage] = {}
        self._num_stages = 0
        self._queries = self._hits = 0  # of automata
        self._compiled: list[tuple[str, float, int]] = []
        self._live: dict[str, _Live] = {}
        self._prompts: dict[int, list[str]] = {}
        self._pieces: dict[int, str] = {}
        self._num_steps = self._num_failed_steps = 0
        self._devices: list[tuple[int, int]] = []
        self._looked_s = -_COUNTS_PERIOD_S

    def run(self) -> None:
        """Work until the front closes the socket."""
        with self._bell, self._rung:
            self._outbox.put([], self._counts(self._engine.stats(), []))
            self._run()

    def _ring(self) -> None:
        """Wake the loop, from another thread."""
        with contextlib.suppress(OSError):  # it is awake already, or over
            self._bell.send(b"!")

    def _run(self) -> None:
        sent_s = 0.0
        while True:
            messages = self._receive()
            if messages is None:
                return
            for message in messages:
                self._handle(message)
            self._go_on()
            self._outbox.push()
            if not self._engine.has_work:
                continue
            started = time.perf_counter()
            deltas = [delta for output in self._step() for delta in self._deltas(output)]
            now = time.perf_counter()
            stats = self._engine.stats()
            ran, self._num_steps = stats.num_steps - self._num_steps, stats.num_steps
            steps = [(ran, now - started)] if ran else []
            is_idle = not self._engine.has_work
            if deltas or steps or is_idle or now - sent_s > _COUNTS_PERIOD_S:
                self._outbox.put(deltas, self._counts(stats, steps))
                sent_s = now

    def _receive(self) -> list[Any] | None:
        """Messages that have arrived; waits if the engine is idle. None: the front is gone.

        One read a turn: a front that never ceases to send stops no step.
        """
        wait = 0.0 if self._engine.has_work or self._may_command else None
        waiting = [self._sock] if self._outbox.is_full else []
        readable, writable, _ = select.select([self._sock, self._rung], waiting, [], wait)
        if writable:
            self._outbox.push()
        if self._rung in readable:
            self._rung.recv(_READ_BYTES)
        if self._sock not in readable:
            return []
        data = self._sock.recv(_READ_BYTES)
        return self._reader.feed(data) if data else None

    def _handle(self, message: Any) -> None:
        """Whatever a message raises ends its request and no other."""
        try:
            if isinstance(message, pipe.Add):
                self._add(message)
            elif isinstance(message, pipe.Ask):
                self._ask(message)
            elif isinstance(message, pipe.Command):
                self._command(message)
            elif isinstance(message, pipe.Abort):
                self._abort(message.id)
            elif isinstance(message, pipe.Broken):
                self._fail(message.id, message.error)
        except Exception as error:
            self._end(message.id, error)

    def _go_on(self) -> None:
        """Handle the requests whose work is done."""
        for done in self._making.take():
            self._compiled.append((done.client, done.seconds, done.found or 0))
            for request_id in done.request_ids:
                parked = self._parked.pop(request_id, None)
                if parked is None:  # ended with another text of its request
                    continue
                try:
                    if done.error is not None:
                        raise done.error
                    if isinstance(parked, _Stage):
                        is_added = self._add_stage(parked)
                        parked.prompt.num_open -= 1  # it was counted while it waited
                        if not is_added:
                            self._cut(parked)
                    else:
                        self._queue(*parked)
                except Exception as error:
                    of = parked.prompt.add.id if isinstance(parked, _Stage) else request_id
                    self._end(of, error)
        if self._compiled:
            self._outbox.put([], self._counts(self._engine.stats(), []))
        for done in self._reading.take():
            for request_id in done.request_ids:
                if done.error is None:
                    self._outbox.queue(pipe.Told(request_id, *done.found))
                else:
                    self._end(request_id, done.error)

        for done in self._chores.take():
            for request_id in done.request_ids:
                if done.error is None:
                    self._outbox.queue(pipe.Carried(request_id, done.found))
                else:
                    self._end(request_id, done.error)
        while self._may_command:
            command = self._commands.popleft()
            assert self._served.commands is not None
            try:
                found = self._served.commands.between(command.name, command.fields)
            except Exception as error:
                self._end(command.id, error)
                continue
            self._looked_s = -_COUNTS_PERIOD_S  # the memory has changed
            self._outbox.put([], self._counts(self._engine.stats(), []))
            self._outbox.queue(pipe.Carried(command.id, found))

    @property
    def _may_command(self) -> bool:
        """Whether a command waits, and nothing that it must not meet."""
        is_free = not (self._engine.has_work or self._parked or self._reading.is_busy)
        return bool(self._commands) and is_free

    def _command(self, command: pipe.Command) -> None:
        if self._served.commands is None:
            raise Refused("this engine takes no commands; start another", "name")
        work = self._served.commands.aside(command.name, command.fields)
        if work is None:
            self._commands.append(command)
        else:
            self._chores.put("", command.id, Work(command.id, work))

    def _end(self, request_id: int, error: Exception) -> None:
        """End a request whose handling raised: a refusal, or a failure of ours."""
        if not isinstance(error, ValueError):
            self._fail(request_id, error)
            return
        self._abort(request_id)
        param, code = getattr(error, "param", None), getattr(error, "code", "invalid_value")
        if param == "constraint" and str(error).startswith("tools["):  # a tool's own schema
            param, code = str(error).partition(":")[0], "invalid_tool"
        status = getattr(error, "status", 400)
        self._outbox.queue(pipe.Refused(request_id, str(error), param, code, status))

    def _fail(self, request_id: int, error: Exception) -> None:
        """Our handling of the request raised; nothing of it runs any more."""
        self._abort(request_id)
        self._outbox.queue(pipe.Refused(request_id, self._faults.note(error), status=500))
        self._outbox.put([], self._counts(self._engine.stats(), []))

    def _step(self) -> list[RequestOutput]:
        """A step of the engine, which mends itself after an exception that is of no request."""
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._num_failed_steps += 1
            if self._num_failed_steps >= _MOST_FAILED_STEPS:
                raise
            self._faults.note(error)
            if self._num_failed_steps > 1:
                for request_id in list(self._prompts):
                    self._fail(request_id, error)
            return []
        self._num_failed_steps = 0
        return outputs

    def _add(self, add: pipe.Add) -> None:
        """Make a request of every prompt."""
        params = _params(add.params)
        fields = {
            "params": params,
            "stream": add.stream,
            "denoise": add.denoise,
            "priority": add.priority,
            "client": add.client,
            "cache_salt": add.cache_salt,
        }
        requests = []
        for number, prompt in enumerate(add.prompts):
            named = {**fields, "request_id": f"{add.id}.{number}"}
            requests.append(self._served.make_request(prompt.ids, prompt.suffix, named))
        self._queue(add, requests, time.perf_counter())

    def _queue(self, add: pipe.Add, requests: list[Request], since_s: float) -> None:
        """Queue every prompt or none, once nothing is missing for them."""
        self._check_awake()
        for request in requests[:1]:  # the others have its parameters
            if (work := self._missing(request)) is not None:
                self._making.put(add.client, add.id, work)
                self._parked[add.id] = _Parked(add, requests, since_s)
                return
        names = self._prompts[add.id] = []
        deadline_s = add.deadline_s
        if deadline_s is not None:
            deadline_s = max(deadline_s - (time.perf_counter() - since_s), _SOON_S)
        for number, request in enumerate(requests):
            name = self._engine.add(dataclasses.replace(request, deadline_s=deadline_s))
            names.append(name)
            n, prompt = request.params.n, _Prompt(add)
            if deadline_s is not None:
                prompt.until_s = time.perf_counter() + deadline_s
            walks = [self._served.walk(request, None) for _ in range(n)]
            self._live[name] = _Live(prompt, request, number * n, 0, walks)
        if add.stream:
            self._outbox.queue(pipe.Accepted(add.id))

    def _check_awake(self) -> None:
        if self._served.commands is not None and self._served.commands.is_asleep:
            raise Asleep

    def _missing(self, request: Request) -> Work | None:
        work = self._served.missing(request)
        if request.params.constraint is not None:
            self._queries += 1
            self._hits += work is None
        return work

    def _put_stage(self, stage: _Stage) -> bool:
        """Let a text go on, once its grammar is compiled; False: it cannot."""
        self._num_stages += 1
        add, key = stage.prompt.add, -self._num_stages  # ids of requests are not negative
        work = self._missing(stage.request)
        if work is None:
            return self._add_stage(stage)
        self._making.put(add.client, key, work, bounded=False)
        self._parked[key] = stage
        stage.prompt.num_open += 1
        return True

    def _cut(self, stage: _Stage) -> None:
        """End a text that cannot go on."""
        prompt, add = stage.prompt, stage.prompt.add
        delta = Delta(add.id, stage.choice, "", stage.told, finish="length")
        if not prompt.num_open:
            if not self._prompts[add.id]:
                del self._prompts[add.id]
            delta.usage = _together(prompt.usages)
        self._outbox.put([delta], self._counts(self._engine.stats(), []))

    def _add_stage(self, stage: _Stage) -> bool:
        """Queue it; False: there is no room for it."""
        prompt, request = stage.prompt, stage.request
        left_s = None if prompt.until_s is None else prompt.until_s - time.perf_counter()
        request = dataclasses.replace(
            request,
            request_id=f"{prompt.add.id}.{stage.choice}.stage{self._num_stages}",
            deadline_s=None if left_s is None else max(left_s, _SOON_S),
        )
        try:
            name = self._engine.add(request)
        except Refused:
            return False
        self._prompts[prompt.add.id].append(name)
        walk = self._served.walk(request, stage.walk)
        self._live[name] = _Live(prompt, request, stage.choice, stage.told, [walk])
        return True

    def _ask(self, ask: pipe.Ask) -> None:
        """Read texts in a thread: a forward of them may take as long as hundreds of steps."""
        self._check_awake()

        def read() -> tuple[list[list[list[float]]], int]:
            try:
                return self._served.read([Read(*fields) for fields in ask.reads])
            except ValueError as error:
                raise Refused(str(error), "questions") from error

        self._reading.put(ask.client, ask.id, Work(ask.id, read))

    def _abort(self, request_id: int) -> None:
        for key, one in list(self._parked.items()):
            if request_id in (key, one.prompt.add.id if isinstance(one, _Stage) else key):
                del self._parked[key]
                self._making.drop(key)
        self._reading.drop(request_id)
        for name in self._prompts.pop(request_id, ()):
            if self._live.pop(name, None) is not None:
                self._engine.abort(name)
        self._outbox.drop(request_id)

    def _deltas(self, output: RequestOutput) -> list[Delta]:
        live = self._live.get(output.request_id)
        if live is None:  # aborted: no client waits
            return []
        try:
            return self._deltas_of(live, output)
        except Exception as error:
            self._fail(live.id, error)
            return []

    def _deltas_of(self, live: _Live, output: RequestOutput) -> list[Delta]:
        deltas = []
        for event in live.news.of(output):
            one = output.outputs[event.index]
            ids, finish = event.token_ids, event.finish_reason
            live.num_tokens[event.index] += len(ids)
            if (walk := live.walks[event.index]) is not None:
                ids = walk.take(ids)
                walk.turn.feed(ids)
                stage = next_stage(live.request, one, walk)
                if stage is not None:
                    choice, told = live.first + event.index, live.num_tokens[event.index]
                    follows = self._put_stage(_Stage(live.prompt, stage, choice, told, walk))
                    finish = None if follows else "length"
                else:
                    finish = walk.reason(finish)
            delta = Delta(
                id=live.id,
                choice=live.first + event.index,
                text=event.text,
                num_tokens=live.num_tokens[event.index],
                finish=finish,
                stop_reason=one.stop_reason,
                error=output.error if finish == "error" else None,
                ids=list(ids) if live.has_ids else [],
                logprobs=self._logprobs(event.logprobs or (), live.request.params.logprobs),
            )
            del delta.logprobs[len(ids) :]
            if event.window and not event.finish_reason:
                cells = [None if cell is None else self._piece(cell) for cell in event.window]
                probs = [None if one is None else math.exp(one) for one in event.window_logprobs]
                delta.frame = Frame(delta.num_tokens, output.metrics.nfe, cells, probs)
            deltas.append(delta)
        if output.finished:
            prompt, names = live.prompt, self._prompts[live.id]
            del self._live[output.request_id]
            names.remove(output.request_id)
            prompt.usages.append(_usage(output))
            prompt.num_open -= 1
            if prompt.num_open:  # a text goes on
                return deltas
            if not names:
                del self._prompts[live.id]
            if not deltas:  # every text had ended before
                last = len(output.outputs) - 1
                deltas = [Delta(live.id, live.first + last, "", live.num_tokens[last])]
            deltas[-1].usage = _together(prompt.usages)
        return deltas

    def _counts(self, stats: Any, steps: list[tuple[int, float]]) -> Counts:
        """The engine's `Stats` as they are sent.

        Args:
            steps: Decode steps of this turn of the loop, and the seconds it took.
        """
        names = [name for name in Counts.__struct_fields__ if name not in _OWN_COUNTS]
        named = {name: getattr(stats, name) for name in names}
        named["num_waiting"] += len(self._parked)
        named["num_faults"] = self._faults.count
        if (now := time.monotonic()) - self._looked_s > _COUNTS_PERIOD_S:
            self._devices, self._looked_s = self._served.devices(), now
        commands = self._served.commands
        version = 0 if commands is None else commands.version
        compiled, self._compiled = self._compiled, []
        return Counts(
            **named,
            steps=steps,
            devices=self._devices,
            weight_version=version,
            grammar_queries=self._queries,
            grammar_hits=self._hits,
            grammar_stages=self._num_stages,
            compiled=compiled,
        )

    def _logprobs(
        self, said: Iterable[dict[int, float]], num_top: int | None
    ) -> list[dict[str, Any] | None]:
        """Log-probabilities of tokens, of which the first of each is its own, as clients read them.

        None for a token that is no text.
        """
        found = []
        for values in said:
            token, own = next(iter(values.items()))
            top = sorted(values.items(), key=lambda pair: -pair[1])[:num_top]
            entry = _entry(self._spelt[token], own) if token in self._spelt else None
            if entry is not None:
                entry["top_logprobs"] = [_entry(self._name(one), value) for one, value in top]
            found.append(entry)
        return found

    @functools.cached_property
    def _spelt(self) -> dict[int, bytes]:
        """Bytes of the tokens that are text."""
        spelt = structured.token_bytes(self._served.tokenizer)
        return {token: data for token, data in enumerate(spelt) if data is not None}

    def _name(self, token: int) -> bytes:
        data = self._spelt.get(token)
        return self._piece(token).encode() if data is None else data

    def _piece(self, token: int) -> str:
        text = self._pieces.get(token)
        if text is None:
            text = self._pieces[token] = plain_text(self._served.tokenizer, token)
        return text


def _entry(data: bytes, value: float) -> dict[str, Any]:
    """A token and its log-probability; one that was given has none."""
    number = None if math.isnan(value) else max(value, LEAST_LOGPROB)
    return {"token": data.decode(errors="replace"), "logprob": number, "bytes": list(data)}


def _params(given: dict[str, Any]) -> SamplingParams:
    """Sampling parameters as the front sends them."""
    fields = given.get("constraint")
    constraint = None if fields is None else structured.from_fields(fields)
    return SamplingParams(**{**given, "constraint": constraint})


def _usage(output: RequestOutput) -> Usage:
    metrics = output.metrics
    num_prompt = len(output.prompt_token_ids)
    return Usage(
        prompt_tokens=num_prompt,
        cached_tokens=metrics.prompt_cached_tokens,
        nfe=metrics.nfe,
        prefill_nfe=metrics.prefill_nfe,
        num_preemptions=metrics.num_preemptions,
        written=round(metrics.tokens_per_forward * max(metrics.nfe, 1)),
        queue_s=metrics.queue_s,
        ttfb_s=metrics.ttfb_s,
        e2e_s=metrics.e2e_s,
        notes=list(output.constraint_notes[:_MOST_NOTES]),
    )


def _together(stages: list[Usage]) -> Usage:
    """Of a prompt whose texts came in stages, the first one first."""
    first, *others = stages
    for name in ("nfe", "prefill_nfe", "num_preemptions", "written", "e2e_s"):
        setattr(first, name, getattr(first, name) + sum(getattr(one, name) for one in others))
    return first


def facts_of(llm: Any) -> Facts:
    """The facts on an `LLM` for the front."""
    import jax

    from dllm_jax.api.decide import reading_of
    from dllm_jax.loading.model import Model

    model: Model = llm.model
    strategy, layout, usual = llm.strategy, llm.engine.layout, llm.default_params
    how = reading_of(model)
    folder = None if model.tokenizer_source is None else str(model.tokenizer_source.folder)
    leaves = jax.tree.leaves(model.params)
    return Facts(
        source=model.source,
        family=model.defaults.family,
        strategy=_name(strategy),
        block_size=layout.block_size,
        window=layout.window,
        thresholds={
            name: (float(layout.knob_values[name]), float(low), float(high))
            for name, (low, high) in layout.knobs.items()
        },
        max_model_len=min(layout.max_model_len, layout.window)
        if layout.in_window
        else layout.max_model_len,
        vocab_size=layout.vocab_size,
        mask_token_id=model.config.mask_token_id,
        num_slots=layout.num_slots,
        dtype=str(max(leaves, key=lambda leaf: leaf.size).dtype),
        jax=jax.__version__,
        tokenizer_folder=folder,
        infill=strategy.needs.takes_given,
        causal=_name(strategy) == "ar",
        drafts=_name(strategy) == "dflash",
        sampling=usual.sampling._asdict(),
        attention=how.attention,
        shift=how.shift,
        answer_end=how.end_token_id,
        routing_block=how.multiple,
    )


def _name(strategy: Any) -> str:
    """The strategy's short name, its class's for one of the user's."""
    from dllm_jax.strategies.core.resolve import load_strategy, strategy_names

    for name in strategy_names():
        if type(load_strategy(name)) is type(strategy):
            return name
    return type(strategy).__name__


def yield_processor() -> None:
    """On a CPU, run after the front: every thread of this process is niced."""
    import jax

    if jax.default_backend() != "cpu" or not os.path.isdir("/proc/self/task"):
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            os.setpriority(os.PRIO_PROCESS, int(thread), CPU_NICENESS)
        except OSError:  # it has ended
            continue


def main(fd: int, parent: int) -> int:
    """The process: launched by `client.EngineClient`.

    Args:
        fd: The socket.
        parent: The front's process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with(parent)
    sock = socket.socket(fileno=fd)
    reader, messages = pipe.Reader(pipe.ToEngine), []
    while not messages:
        data = sock.recv(_READ_BYTES)
        if not data:
            return 0
        messages = reader.feed(data)
    launch = messages[0]
    faults = Faults(lambda line: print(f"engine: {line}", file=sys.stderr, flush=True))
    outbox = Outbox(sock, faults)
    # Else a thread that traces a program of structured output holds a step back for 5 ms.
    sys.setswitchinterval(SWITCH_S)
    try:
        module, _, name = launch.factory.partition(":")
        factory: Factory = getattr(importlib.import_module(module), name)
        served = factory(launch.settings, Start(outbox))
        loop = Loop(served, sock, outbox, faults)
        outbox.send(pipe.Ready(served.facts))
        loop.run()
    except BaseException as error:
        if not isinstance(error, ValueError):  # a refused setting is one line
            traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = "; ".join(lines[:3]) or "no message"
        message = said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
        outbox.send(pipe.Failed(message, isinstance(error, UnusableSettings)))
        outbox.flush(1.0)
        return 1
    return 0


def _die_with(parent: int) -> None:
    """End this process when the front's does, even within a long compilation."""
    if sys.platform != "linux":
        return  # the closed socket ends the loop
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
