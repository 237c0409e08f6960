"""The loop over one engine: messages in, steps, deltas out.

Data flow: socket -> `Add`, `Abort` -> engine -> outputs -> deltas -> `Outbox` -> socket. The loop
alone touches the engine. It waits at the socket when nothing runs, and ends when the other end of
the socket is closed.
"""

import contextlib
import dataclasses
import math
import select
import socket
import time
from collections import deque
from typing import Any

from dllm_jax.api.calls import next_stage
from dllm_jax.api.questions import Read
from dllm_jax.engine.checks import Refused
from dllm_jax.engine.faults import Faults
from dllm_jax.engine.requests import Request, RequestOutput
from dllm_jax.serve import framing, pipe
from dllm_jax.serve.child.outbox import Outbox
from dllm_jax.serve.child.prompts import Live, Parked, Prompt, Stage, params_of, together, usage_of
from dllm_jax.serve.child.served import Asleep, Served
from dllm_jax.serve.child.side_work import SideWork, Work
from dllm_jax.serve.child.tally import COUNTS_PERIOD_S, Tally
from dllm_jax.serve.child.token_texts import TokenTexts
from dllm_jax.serve.framing import READ_BYTES
from dllm_jax.serve.pipe import Counts, Delta, Frame

# Steps in a row that may raise: the engine mends itself after the first, the second ends the
# requests that run, and with the third it is the engine that is broken.
_MOST_FAILED_STEPS = 3
_SOON_S = 1e-3  # left of a deadline that passed while its request waited


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
        self._reader = framing.Reader(pipe.ToEngine)
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._rung.setblocking(False)
        self._making = SideWork("constraints wait to be compiled", "constraints_busy", self._ring)
        self._reading = SideWork("questions wait to be read", "decisions_busy", self._ring)
        self._chores = SideWork("weights wait to be read", "weights_busy", self._ring)
        self._commands: deque[pipe.Command] = deque()  # which wait until no request runs
        self._parked: dict[int, Parked | Stage] = {}
        self._tally = Tally(served, faults)
        self._live: dict[str, Live] = {}
        self._prompts: dict[int, list[str]] = {}
        self._texts = TokenTexts(served.tokenizer)
        self._num_steps = self._num_failed_steps = 0

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
            if deltas or steps or is_idle or now - sent_s > COUNTS_PERIOD_S:
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
            self._rung.recv(READ_BYTES)
        if self._sock not in readable:
            return []
        data = self._sock.recv(READ_BYTES)
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
            elif isinstance(message, framing.Broken):
                self._fail(message.id, message.error)
        except Exception as error:
            self._end(message.id, error)

    def _go_on(self) -> None:
        """Handle the requests whose work is done."""
        for done in self._making.take():
            self._tally.compiled.append((done.client, done.seconds, done.found or 0))
            for request_id in done.request_ids:
                parked = self._parked.pop(request_id, None)
                if parked is None:  # ended with another text of its request
                    continue
                try:
                    if done.error is not None:
                        raise done.error
                    if isinstance(parked, Stage):
                        is_added = self._add_stage(parked)
                        parked.prompt.num_open -= 1  # it was counted while it waited
                        if not is_added:
                            self._cut(parked)
                    else:
                        self._queue(*parked)
                except Exception as error:
                    of = parked.prompt.add.id if isinstance(parked, Stage) else request_id
                    self._end(of, error)
        if self._tally.compiled:
            self._outbox.put([], self._counts(self._engine.stats(), []))
        answers = [(done, lambda i, found: pipe.Told(i, *found)) for done in self._reading.take()]
        for done, answer in [*answers, *((done, pipe.Carried) for done in self._chores.take())]:
            for request_id in done.request_ids:
                if done.error is None:
                    self._outbox.queue(answer(request_id, done.found))
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
            self._tally.look_again()  # the memory has changed
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
        params = params_of(add.params)
        same = ("stream", "denoise", "priority", "client", "cache_salt")
        fields = {"params": params, **{name: getattr(add, name) for name in same}}
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
                self._parked[add.id] = Parked(add, requests, since_s)
                return
        names = self._prompts[add.id] = []
        deadline_s = add.deadline_s
        if deadline_s is not None:
            deadline_s = max(deadline_s - (time.perf_counter() - since_s), _SOON_S)
        for number, request in enumerate(requests):
            name = self._engine.add(dataclasses.replace(request, deadline_s=deadline_s))
            names.append(name)
            n, prompt = request.params.n, Prompt(add)
            if deadline_s is not None:
                prompt.until_s = time.perf_counter() + deadline_s
            walks = [self._served.walk(request, None) for _ in range(n)]
            self._live[name] = Live(prompt, request, number * n, 0, walks)
        if add.stream:
            self._outbox.queue(pipe.Accepted(add.id))

    def _check_awake(self) -> None:
        if self._served.commands is not None and self._served.commands.is_asleep:
            raise Asleep

    def _missing(self, request: Request) -> Work | None:
        work = self._served.missing(request)
        if request.params.constraint is not None:
            self._tally.queries += 1
            self._tally.hits += work is None
        return work

    def _put_stage(self, stage: Stage) -> bool:
        """Let a text go on, once its grammar is compiled; False: it cannot."""
        self._tally.stages += 1
        add, key = stage.prompt.add, -self._tally.stages  # ids of requests are not negative
        work = self._missing(stage.request)
        if work is None:
            return self._add_stage(stage)
        self._making.put(add.client, key, work, bounded=False)
        self._parked[key] = stage
        stage.prompt.num_open += 1
        return True

    def _cut(self, stage: Stage) -> None:
        """End a text that cannot go on."""
        prompt, add = stage.prompt, stage.prompt.add
        delta = Delta(add.id, stage.choice, "", stage.told, finish="length")
        if not prompt.num_open:
            if not self._prompts[add.id]:
                del self._prompts[add.id]
            delta.usage = together(prompt.usages)
        self._outbox.put([delta], self._counts(self._engine.stats(), []))

    def _add_stage(self, stage: Stage) -> bool:
        """Queue it; False: there is no room for it."""
        prompt, request = stage.prompt, stage.request
        left_s = None if prompt.until_s is None else prompt.until_s - time.perf_counter()
        request = dataclasses.replace(
            request,
            request_id=f"{prompt.add.id}.{stage.choice}.stage{self._tally.stages}",
            deadline_s=None if left_s is None else max(left_s, _SOON_S),
        )
        try:
            name = self._engine.add(request)
        except Refused:
            return False
        self._prompts[prompt.add.id].append(name)
        walk = self._served.walk(request, stage.walk)
        self._live[name] = Live(prompt, request, stage.choice, stage.told, [walk])
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
            if request_id in (key, one.prompt.add.id if isinstance(one, Stage) else key):
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

    def _deltas_of(self, live: Live, output: RequestOutput) -> list[Delta]:
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
                    follows = self._put_stage(Stage(live.prompt, stage, choice, told, walk))
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
                logprobs=self._texts.logprobs(event.logprobs or (), live.request.params.logprobs),
                forced=[] if walk is None or finish is None else walk.forced,
            )
            del delta.logprobs[len(ids) :]
            if event.window and not event.finish_reason:
                cells = [None if cell is None else self._texts.piece(cell) for cell in event.window]
                probs = [None if one is None else math.exp(one) for one in event.window_logprobs]
                delta.frame = Frame(delta.num_tokens, output.metrics.nfe, cells, probs)
            deltas.append(delta)
        if output.finished:
            prompt, names = live.prompt, self._prompts[live.id]
            del self._live[output.request_id]
            names.remove(output.request_id)
            prompt.usages.append(usage_of(output))
            prompt.num_open -= 1
            if prompt.num_open:  # a text goes on
                return deltas
            if not names:
                del self._prompts[live.id]
            if not deltas:  # every text had ended before
                last = len(output.outputs) - 1
                deltas = [Delta(live.id, live.first + last, "", live.num_tokens[last])]
            deltas[-1].usage = together(prompt.usages)
        return deltas

    def _counts(self, stats: Any, steps: list[tuple[int, float]]) -> Counts:
        return self._tally.counts(stats, steps, len(self._parked))
