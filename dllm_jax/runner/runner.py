"""The engine's programs at work: one state, one thread that runs what the host loop dispatches.

On a GPU a program whose loop asks the device whether to go on keeps its caller until the loop ends.
So programs run in a thread of their own, in the order of dispatch, and the next one is there when
the last one returns; the host loop waits in `fetch` alone. Nothing here schedules.
"""

import atexit
import contextlib
import copy
import dataclasses
import operator
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from dllm_jax.engine.admission import STOP_WIDTH
from dllm_jax.engine.layout import DeviceFailure, EngineLayout, Placement
from dllm_jax.engine.requests import DraftMetrics
from dllm_jax.loading.model import Model
from dllm_jax.runner import decode as decoding
from dllm_jax.runner import memory, programs, timing, warmup
from dllm_jax.runner import packing as words
from dllm_jax.runner.programs import ASKED, HEAD, NUMBERS, PIECE, Programs
from dllm_jax.strategies.core import drafting
from dllm_jax.strategies.core.state import DecodeState

ADMIT_ROWS = 8  # requests that one program puts into their slots
_START, _FINISH, _NFE, _LENGTH, _FROM, _STEPS = range(HEAD)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A dispatched decode: what it returns is still being computed."""

    packed: Future


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A piece of a prefix: what `programs.prefill` reads of it, and what it returns."""

    slot: int
    words: np.ndarray
    size: int
    kind: decoding.PassKind
    boundary: Future


class Fetched:
    """What a decode chunk says of its rows, on the host.

    Attributes:
        start: First position of each window = tokens in the cache.
        finish: Codes of `dllm_jax.strategies.core.state`.
        nfe: Forwards after prefill.
        length: Tokens emitted so far, and before this chunk (`before`).
        emitted: Tokens of the output from `before` on; what lies behind `length` is void.
        steps: Decode steps the chunk ran.
    """

    def __init__(self, packed: np.ndarray, device: "ModelRunner"):
        self._packed, self._device = packed, device
        head = packed[:, :HEAD].T.tolist()
        self.start: list[int] = head[_START]
        self.finish: list[int] = head[_FINISH]
        self.nfe: list[int] = head[_NFE]
        self.length: list[int] = head[_LENGTH]
        self.before: list[int] = head[_FROM]
        self.steps: int = head[_STEPS][0]
        most = max(map(operator.sub, self.length, self.before))
        self.emitted: list[list[int]] = packed[:, HEAD : HEAD + most].tolist()

    def saved(self, row: int) -> np.ndarray:
        """The slot as `ModelRunner.restore` takes it; a copy."""
        return self._packed[row, HEAD + self._device.layout.most_new :].copy()

    def window(self, row: int, length: int) -> tuple[int | None, ...]:
        """Cells behind the first `length` output tokens, None for a hole."""
        slot = self._device.unpack(self._packed[row, HEAD + self._device.layout.most_new :])
        return provisional(slot, length)

    def drafted(self, row: int) -> DraftMetrics | None:
        """How the drafts of a request fared so far; None where the strategy counts none."""
        return self._device.drafted(self._packed[row, HEAD + self._device.layout.most_new :])


def provisional(slot: Mapping[str, Any], length: int) -> tuple[int | None, ...]:
    """The open cells of a fetched slot behind `length` tokens of output."""
    buffer = slot["buffer"]
    tokens, filled = buffer.tokens.reshape(-1), buffer.filled.reshape(-1)
    first = int(buffer.prompt_len) + length - int(buffer.start)
    is_open = np.repeat(buffer.status != 0, buffer.tokens.shape[-1])
    end = min(len(tokens), int(buffer.limit) - int(buffer.start))
    return tuple(
        int(tokens[i]) if filled[i] else None for i in range(max(first, 0), end) if is_open[i]
    )


class ModelRunner:
    """The state on the device and the programs over it.

    Args:
        model: Weights and network.
        strategy: Bare (`split_knobs`).
        aux: Models the strategy needs beside it.
        layout: Sizes; every program is compiled for a bucket of them.
        implementation: Attention back end, None for the best.
        allocate: Make the state now; otherwise `reset` does, before anything is run.
    """

    def __init__(
        self,
        model: Model,
        strategy: Any,
        aux: Mapping[str, Model],
        layout: EngineLayout,
        implementation: str | None = None,
        allocate: bool = True,
    ):
        self.layout = layout
        self.memory: memory.MemoryPlan | None = None  # what it holds, where it was planned
        self._knobs = tuple(sorted(layout.knobs))
        self._programs = Programs(
            model=model,
            aux=dict(aux),
            strategy=strategy,
            spec=decoding.slot_spec(strategy, model, layout.num_slots),
            kept=decoding.boundary_size(strategy, model),
            max_output=layout.max_model_len,
            most_new=layout.most_new,
            implementation=implementation,
        )
        self.cost: Any = None  # predicted seconds of programs, once they were timed
        self._weighs = strategy.weighs_costs
        # By slots, in any unit; by arithmetic until `warm_up` has timed them.
        self.choice_costs: dict[int, Sequence[float]] = {}
        if self._weighs:
            context = min(layout.max_model_len, timing.USUAL_TEXT)
            of = (context, jax.default_backend())
            self.choice_costs = {
                rows: timing.estimate_choices(strategy, model, aux, rows, *of)
                for rows in layout.slot_buckets
            }
        self.compiled: set[tuple[Any, ...]] = set()  # buckets that have run
        self.num_late_compiles = 0
        self.compile_s = 0.0  # seconds spent compiling them, or reading them from the cache
        self._warm = False
        self._slot_layout = words.layout_of(words.kept_part(self.shapes(num_pages=1)))
        self.state: DecodeState | None = None  # the worker's, but for `reset` and `wait`
        self._lost: BaseException | None = None  # what took the state, until `reset`
        self._admitted: list[tuple[int, Placement, bool]] = []  # not dispatched yet
        self._admit_rows = min(ADMIT_ROWS, layout.num_slots)
        self._pieces: list[_Piece] = []  # not dispatched yet, of distinct slots
        # Prefill passes so far, by tokens and pages of a prompt, kind, prompts.
        self.passes: Counter[tuple[int, int, decoding.PassKind, int]] = Counter()
        self._absorbs = strategy.absorbs
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        worker = threading.Thread(
            target=_work, args=(self._tasks,), daemon=True, name="dllm-device"
        )
        worker.start()
        _workers[worker] = self._tasks
        weakref.finalize(self, self._tasks.put, None)
        if allocate:
            self.reset()

    # --- the state ----------------------------------------------------------------------------

    def shapes(self, num_pages: int | None = None) -> DecodeState:
        """Shapes of the state, with so many pages or as many as there are."""
        sizes = self._state_sizes() | ({"num_pages": num_pages} if num_pages else {})
        return programs.make_state.eval_shape(self._programs, **sizes)

    def _state_sizes(self) -> dict[str, Any]:
        num_pages, page_size = self.layout.num_pages, self.layout.page_size
        return {"num_pages": num_pages, "page_size": page_size, "knobs": self._knobs}

    def reset(self) -> None:
        """A state with every slot empty and a new pool, once what was dispatched is over."""
        self._admitted.clear()
        for piece in self._pieces:
            piece.boundary.cancel()
        self._pieces.clear()
        self._submit(self._reset).result()

    def _reset(self) -> None:
        self.state = self._lost = None  # the old pools go before new ones come
        self.state = programs.make_state(self._programs, **self._state_sizes())

    def _compile_reset(self) -> None:
        programs.make_state.lower(self._programs, **self._state_sizes()).compile()

    def _submit(self, task: Callable[..., Any], *args: Any) -> Future:
        future: Future = Future()
        self._tasks.put((future, task, args, self.memory))
        return future

    def _run(
        self,
        key: tuple[Any, ...],
        program: Any,
        *args: Any,
        programs: Programs | None = None,
        **static: Any,
    ) -> Future:
        """Dispatch a program over the state; the state it returns replaces the donated one.

        Args:
            programs: What it is made from; None: the device's own.
        """
        self._flush()
        is_new = key not in self.compiled
        if is_new:
            self.compiled.add(key)
            self.num_late_compiles += self._warm
        of = programs or self._programs
        return self._submit(self._call, program, of, args, static, is_new)

    def _call(
        self, program: Any, programs: Programs, args: tuple[Any, ...], static: dict, is_new: bool
    ) -> Any:
        if self.state is None:  # what is dispatched behind a failure fails like it
            raise self._lost or DeviceFailure("the device has no state yet; call reset()")
        state, self.state = self.state, None
        try:
            args = tuple(arg.result() if isinstance(arg, Future) else arg for arg in args)
            if is_new:  # the call below finds it compiled: jit keeps one cache for both
                began = time.perf_counter()
                program.lower(programs, state, *args, **static).compile()
                self.compile_s += time.perf_counter() - began
            self.state, rest = program(programs, state, *args, **static)
        except BaseException as error:
            # Often nobody waits for the program that failed, but for one behind it.
            self._lost = error
            for leaf in jax.tree.leaves(state):  # the traceback would hold what was not donated
                if not leaf.is_deleted():
                    leaf.delete()
            raise
        if isinstance(rest, jax.Array):
            rest.copy_to_host_async()
        return rest

    # --- requests -----------------------------------------------------------------------------

    def admit(self, slot: int, placement: Placement) -> None:
        """Put a fresh request into a slot; it does not decode until its prefill is done.

        Dispatched with what follows: several at once are one program.
        """
        is_full = len(self._admitted) == self._admit_rows  # no sooner: `begin` may join the last
        # Where a slot's first one left again, two rows of one program would be unordered.
        waiting = [one[0] for one in self._admitted] + [one.slot for one in self._pieces]
        if is_full or slot in waiting:
            self._flush()
        self._admitted.append((slot, placement, False))

    def _flush(self) -> None:
        """Dispatch what waits for more of its kind: requests, then pieces of prompts."""
        admitted, self._admitted = self._admitted, []
        pieces, self._pieces = self._pieces, []
        if admitted:
            self._run_admit(admitted)
        # As many as one pass takes, or each by itself: nothing is computed for nobody.
        count = self.layout.prompts_a_pass if len(pieces) == self.layout.prompts_a_pass else 1
        for i in range(0, len(pieces), count):
            self._run_prefill(pieces[i : i + count])

    def _run_admit(self, admitted: list[tuple[int, Placement, bool]]) -> None:
        rows = []
        for slot, placement, begins in admitted:
            ints, floats = self._numbers(placement)
            rows.append(np.concatenate([(slot, begins), ints, floats.view(np.int32)]))
        rows += [rows[0].copy() for _ in range(self._admit_rows - len(rows))]
        requests = np.stack(rows).astype(np.int32)
        requests[len(admitted) :, 0] = self.layout.num_slots
        self._run(("admit",), programs.admit, requests, knobs=self._knobs)

    def restore(
        self, slot: int, placement: Placement, saved: np.ndarray, tokens: Sequence[int]
    ) -> None:
        """Put a fetched slot back, with what it had emitted; its pages hold its prefix again."""
        ints, floats = self._numbers(placement)
        output = np.zeros((self._programs.max_output,), np.int32)
        output[: len(tokens)] = tokens
        self._run(
            ("restore",),
            programs.restore,
            np.int32(slot),
            ints,
            floats,
            saved[None],
            output,
            knobs=self._knobs,
            slot_layout=self._slot_layout,
        )

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        first: int,
        end: int,
        live_end: int,
        last: bool,
        pages: np.ndarray,
        size: int,
        kind: decoding.PassKind,
    ) -> Future:
        """Compute and store one piece of a prefix.

        Small pieces of short prefixes are dispatched with what follows: several are one program.

        Args:
            tokens: Ids from position `first` on, at most `size`.
            end: First position not stored; `live_end`: first not computed.
            last: Nothing of the prefix is left: the slot decodes from now on.
            pages: The slot's row of the page table, one of the page buckets wide.

        Returns:
            The boundary row after the pass [D], on the device, once it has run; of several
            pieces the first one's, as nobody reads it where a prefix is taken in by pieces.
        """
        piece = np.zeros((PIECE + size + len(pages),), np.int32)
        piece[:PIECE] = slot, first, end, live_end, last
        piece[PIECE : PIECE + len(tokens)] = tokens
        piece[PIECE + size :] = pages  # a copy: the host's page table changes before its turn
        asked, layout = _Piece(slot, piece, size, kind, Future()), self.layout
        is_small = (size, len(pages)) == (layout.prefill_buckets[0], layout.page_buckets[0])
        if layout.prompts_a_pass == 1 or not is_small:
            self._run_prefill([asked])
            return asked.boundary
        if any(slot == one.slot for one in self._pieces):
            self._flush()
        self._pieces.append(asked)
        if len(self._pieces) == layout.prompts_a_pass:
            self._flush()
        return asked.boundary

    def _run_prefill(self, pieces: list["_Piece"]) -> None:
        words = np.stack([one.words for one in pieces])
        size, kind = pieces[0].size, pieces[0].kind
        self.passes[size, words.shape[1] - PIECE - size, kind, len(pieces)] += 1
        key = ("prefill", *words.shape, size, kind)
        done = self._run(key, programs.prefill, words, size=size, kind=kind)
        done.add_done_callback(lambda done: _pass_on(done, [one.boundary for one in pieces]))

    def begin(self, slot: int, boundary: Any = None) -> None:
        """Let a slot decode whose prefix needs no computing.

        Args:
            boundary: The row before its window, from `prefill` of the same prefix.
        """
        last = self._admitted[-1] if self._admitted else None
        if boundary is None and last and last[0] == slot and not self._absorbs:
            self._admitted[-1] = (*last[:2], True)
            return
        if boundary is None:
            boundary = np.zeros((self._programs.kept,), self._programs.spec.dtype)
        self._run(("begin",), programs.begin, np.int32(slot), boundary)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every pool."""
        self._run(("copy",), programs.copy_page, np.int32(source), np.int32(target))

    # --- decoding -----------------------------------------------------------------------------

    def decode(
        self, rows: np.ndarray, num_active: int, pages: np.ndarray, num_steps: int, early: bool
    ) -> Chunk:
        """Dispatch steps of some slots.

        Args:
            rows: Distinct slots, one of the slot buckets wide; the first `num_active` decode.
            pages: Their rows of the page table, one of the page buckets wide.
            num_steps: Steps at most.
            early: Stop as soon as one of them ends.
        """
        asked = np.empty((len(rows), ASKED + pages.shape[1]), np.int32)
        asked[:, 0], asked[:, 1:ASKED] = rows, (num_active, num_steps, early)
        asked[:, ASKED:] = pages
        many = self.layout.many_rows
        program = programs.decode if many is None or len(rows) < many else programs.decode_many
        key, of = ("decode", *pages.shape), self._priced(len(rows))
        return Chunk(self._run(key, program, asked, programs=of))

    def _priced(self, num_slots: int) -> Programs:
        """The programs, whose strategy knows what its choices cost with so many slots.

        As data: what is measured later, or set in `choice_costs`, compiles nothing again.
        """
        strategy = self._programs.strategy
        if not self._weighs:
            return self._programs
        known = [n for n in self.choice_costs if n >= num_slots] or [*self.choice_costs][-1:]
        costs = np.asarray(self.choice_costs[min(known)], np.float32)
        return self._programs.replace(strategy=strategy.replace(costs=costs))

    def fetch(self, chunk: Chunk) -> Fetched:
        """Wait for a chunk and read it.

        Raises:
            DeviceFailure: It failed, or one before it did: the state is gone.
        """
        self._flush()  # the device need not wait
        try:
            return Fetched(np.asarray(chunk.packed.result()), self)
        except jax.errors.JaxRuntimeError as error:  # where it failed after it was launched
            raise self._failure(error) from error

    def join(self, last_pass: Future) -> None:
        """Wait for a prefill pass.

        Raises:
            DeviceFailure: As `fetch`.
        """
        self._flush()
        try:
            jax.block_until_ready(last_pass.result())
        except jax.errors.JaxRuntimeError as error:
            raise self._failure(error) from error

    @property
    def strategy(self) -> Any:
        """Bare, without the costs of its choices."""
        return self._programs.strategy

    @property
    def programs(self) -> Programs:
        """What the programs are made from: models and strategy."""
        return self._programs

    @property
    def num_words(self) -> int:
        """Words of a saved slot."""
        return self._slot_layout.size

    def unpack(self, saved: np.ndarray) -> dict[str, Any]:
        """A saved slot as named leaves: `buffer` (one row, no slot axis), `finish`, `carry`, ..."""
        return words.host_unpack(saved, self._slot_layout)

    def drafted(self, saved: np.ndarray) -> DraftMetrics | None:
        """The counts of `core.drafting` in a saved slot; None where the strategy has none."""
        names = (drafting.ROUNDS, drafting.PROPOSED, drafting.ACCEPTED)
        leaves = [words.slot_leaf(saved, self._slot_layout, name) for name in names]
        found = [tuple(leaf.tolist()) for leaf in leaves if leaf is not None]
        return DraftMetrics(*found) if len(found) == len(names) else None

    # --- before the first request -------------------------------------------------------------

    def lower(self, run: Callable[["ModelRunner"], Any]) -> jax.stages.Lowered:
        """The program that a call of ours would run, lowered; nothing runs, no state is needed."""
        asked: list[tuple[Any, Any, tuple, dict]] = []
        twin = copy.copy(self)
        twin._admitted, twin._pieces, twin.passes = [], [], Counter()

        def ask(key: Any, program: Any, *args: Any, programs: Any = None, **static: Any) -> Future:
            asked.append((program, programs or self._programs, args, static))
            return Future()

        twin._run = ask  # type: ignore[method-assign]
        run(twin)
        twin._flush()
        ((program, of, args, static),) = asked
        return program.lower(of, self.shapes(), *args, **static)

    def warm_up(
        self, progress: Callable[[str, int, int], None] | None = None, calibrate: bool = False
    ) -> None:
        """Compile every bucket, make the state if there is none, run each once on empty slots.

        A strategy whose step is one of several has each of them timed (`weighs_costs`).

        Args:
            progress: Called with what was compiled, how many are done, and of how many.
            calibrate: Time them too, for `cost`; no request may be in a slot.

        Raises:
            DeviceFailure: A program does not compile, or run.
            ValueError: What they need was planned and does not fit.
        """
        work = warmup.every_program(self.layout, self._slot_layout.size)
        began = time.perf_counter()
        if self.state is None:  # by the worker, which has nothing else to do
            self._submit(self._compile_reset)
        temp_bytes = self.compile_ahead(work, progress)
        self.compile_s += time.perf_counter() - began
        if self.memory is not None:
            self.memory = dataclasses.replace(self.memory, temp_bytes=temp_bytes)
            self.memory.check()
        if self.state is None:
            self.reset()
        warmup.run_each(self, work)
        if self._weighs:
            self.choice_costs = timing.time_choices(self)
        if calibrate:
            self.cost = timing.calibrate(self)
        self._warm = True

    def compile_ahead(
        self,
        work: Sequence[warmup.Work],
        progress: Callable[[str, int, int], None] | None = None,
    ) -> int:
        """Compile programs; the most bytes one needs beside what it is given."""
        try:
            return warmup.compile_ahead(self, work, progress)
        except jax.errors.JaxRuntimeError as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Until all that was dispatched is done."""
        self._flush()
        self._submit(lambda: jax.block_until_ready(self.state)).result()

    def _failure(self, error: Exception) -> DeviceFailure:
        return DeviceFailure(memory.explain(str(error), self.memory))

    # --- host numbers -------------------------------------------------------------------------

    def _numbers(self, p: Placement) -> tuple[np.ndarray, np.ndarray]:
        """A placement as two arrays: one transfer each, one program for all."""
        W = self.layout.window
        ints = np.zeros((NUMBERS + STOP_WIDTH + 2 * W,), np.int32)
        seed = np.array([p.seed], np.uint32).view(np.int32)[0]
        ints[:NUMBERS] = (
            p.prompt_len,
            p.limit,
            p.top_k,
            p.max_nfe,
            p.max_run,
            seed,
            p.fold,
        )
        ints[NUMBERS : NUMBERS + STOP_WIDTH] = -1
        ints[NUMBERS : NUMBERS + len(p.stop_ids)] = p.stop_ids
        tail = NUMBERS + STOP_WIDTH
        ints[tail : tail + len(p.tail)] = p.tail
        ints[tail + W :] = -1
        if p.given:  # the window begins with the prompt
            first = tail + W + p.prompt_len
            ints[first : first + len(p.given)] = p.given
        floats = np.array(
            [p.temperature, p.top_p, *(p.knobs[name] for name in self._knobs)], np.float32
        )
        return ints, floats


def _pass_on(done: Future, others: Sequence[Future]) -> None:
    """Give what a future holds to others."""
    error = done.exception()
    for other in others:
        if error is not None:
            other.set_exception(error)
        else:
            other.set_result(done.result())


_workers: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def _end_workers() -> None:
    """The interpreter ends the process with an abort where one is still inside a program."""
    for worker, tasks in list(_workers.items()):
        tasks.put(None)
        worker.join()


def _work(tasks: queue.SimpleQueue) -> None:
    """Run tasks in order until None comes; what they raise goes to whoever waits for them."""
    last = None  # what the last program returned: once it is there, nothing runs any more
    while (task := tasks.get()) is not None:
        future, function, args, plan = task
        try:
            result = function(*args)
            last = result if isinstance(result, jax.Array) else last
            future.set_result(result)
            del result
        except jax.errors.JaxRuntimeError as error:
            failure = DeviceFailure(memory.explain(str(error), plan))
            failure.__cause__ = error
            future.set_exception(failure)
        except BaseException as error:
            future.set_exception(error)
        del task, future, function, args, plan  # they hold the device
    with contextlib.suppress(RuntimeError):  # failed, or deleted by one who was told so
        jax.block_until_ready(last)
