"""The state on the device and the programs over it, which the host loop dispatches.

They run in a thread of their own (`worker`), and the host loop blocks in `fetch` alone.
"""

import concurrent.futures
import dataclasses
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dllm_jax.engine.layout import CompileFailure, DeviceFailure, EngineLayout, PassKind, Placement
from dllm_jax.engine.requests import DraftMetrics
from dllm_jax.kernels import grammar_path
from dllm_jax.loading.model import Model
from dllm_jax.runner import (
    background,
    exchange,
    grammars,
    hosts,
    memory,
    packing,
    places,
    programs,
    timing,
    warmup,
)
from dllm_jax.runner import decode as decoding
from dllm_jax.runner.programs import Call, Programs
from dllm_jax.runner.worker import Worker
from dllm_jax.scoring import labels
from dllm_jax.strategies.core import drafting
from dllm_jax.strategies.core.constraint import Constraint
from dllm_jax.strategies.core.errors import described
from dllm_jax.strategies.core.state import DecodeState

# Programs that one process may ask of others, and what each knows of their static arguments.
_REPLAYED = ("admit", "restore", "prefill", "begin", "copy_page", "decode")
_OWN_STATIC = ("knobs", "slot_layout")
_WEIGHTLESS = ("admit", "restore", "copy_page")
ADMIT_ROWS = 8  # requests that one program puts into their slots
WIDE = 256  # cells of a block from which on a step of one slot has many rows


_Admission = tuple[int, Placement, bool]  # slot, request, and whether it decodes at once


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A dispatched decode: the two arrays that it returns are still being computed."""

    words: Future


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A piece of a prefix that is not dispatched yet."""

    slot: int
    words: np.ndarray  # [1 X], `packing.piece_fields`
    size: int
    kind: PassKind
    boundary: Future


class Fetched:
    """The rows of a decode chunk, on the host.

    Attributes:
        start: First position of each window = tokens in the cache.
        finish: Codes of `dllm_jax.strategies.core.state`.
        nfe: Forwards after prefill.
        length: Tokens emitted so far, and before this chunk (`before`).
        emitted: Tokens of the output from `before` on, valid up to `length`.
        steps: Decode steps the chunk ran.
    """

    def __init__(
        self, packed: np.ndarray, runner: "ModelRunner", far: jax.Array | np.ndarray | None = None
    ):
        self._packed, self._runner, self._far = packed, runner, far
        columns = packed[:, : packing.HEAD.size].T.tolist()
        head: dict[str, list[int]] = dict(zip(packing.HEAD, columns, strict=True))
        self.start, self.finish, self.nfe = head["start"], head["finish"], head["nfe"]
        self.length, self.before = head["length"], head["before"]
        self.steps = head["steps"][0]
        most = max(map(operator.sub, self.length, self.before))
        first = packing.HEAD.size
        self.emitted: list[list[int]] = packed[:, first : first + most].tolist()

    def _slot(self, row: int) -> np.ndarray:
        return self._packed[row, packing.fetched_fields(self._runner.layout.most_new).span("slot")]

    def hold(self) -> bool:
        """Bring the rest of the slots to the host; False: the device failed, and they are lost."""
        far = self._far
        try:
            self._far = None if far is None else self._runner.read(lambda: np.asarray(far))
        except (DeviceFailure, jax.errors.JaxRuntimeError):
            return False
        return True

    def saved(self, row: int) -> np.ndarray:
        """The slot as `ModelRunner.restore` takes it; a copy.

        Raises:
            DeviceFailure: It is lost.
        """
        if not self.hold():
            raise DeviceFailure("what a text needs to resume is lost with the device")
        slot, near = self._slot(row), self._runner.num_near_words
        far = () if self._far is None else self._far[row]
        return np.concatenate([slot[:near], far, slot[near:]]).astype(np.int32, copy=False)

    def window(self, row: int, length: int) -> tuple[int | None, ...]:
        """Cells behind the first `length` output tokens, None for a hole."""
        return provisional(self._runner.unpack(self._slot(row)), length)

    def behind(self, row: int) -> int:
        """The cell behind the emitted tokens of a row whose last fetch is this one."""
        buffer = self._runner.unpack(self._slot(row))["buffer"]
        place = int(buffer.prompt_len) + self.length[row] - int(buffer.start)
        return int(buffer.tokens.reshape(-1)[place])

    def drafted(self, row: int) -> DraftMetrics | None:
        """Draft counts of a request so far; None for a strategy without drafts."""
        return self._runner.drafted(self._slot(row))


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

    Attributes:
        is_profiled: Run steps by programs whose launches a profile holds, one by one.
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
        for network in (model, *aux.values()):
            places.check(network)
        shared = exchange.made(model.split)
        model, *others = (one.replace(exchange=shared) for one in (model, *aux.values()))
        aux = dict(zip(aux, others, strict=True))
        self.layout = layout
        self.memory: memory.MemoryPlan | None = None
        self.is_profiled = False
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
            one_rounding=layout.batch_invariant,
        )
        # For programs that read no weights: a call looks at each of its arrays.
        self._weightless = self._programs.replace(
            model=model.replace(params={}, exchange=None), aux={}
        )
        self._leaves = self._programs, jax.tree.leaves(self._programs)
        self._home = places.device_of(self._programs)
        self._near = places.pinned_of(self._home)
        self._make_state = programs.make_state
        if self._home is not None:
            self._make_state = programs.make_state_at(self._home)
        self.cost: Any = None  # predicted seconds of programs, once they were timed
        self._weighs = strategy.weighs_costs
        # By slots, in any unit; estimated until `warm_up` has timed them.
        self.choice_costs: dict[int, Sequence[float]] = {}
        if self._weighs:
            context = min(layout.max_model_len, timing.USUAL_TEXT)
            setting = (context, jax.default_backend())
            self.choice_costs = {
                rows: timing.estimate_choices(strategy, model, aux, rows, *setting)
                for rows in layout.slot_buckets
            }
        self.compiled: dict[tuple[str, ...], jax.stages.Compiled] = {}  # by `Call.name`
        self.num_late_compiles = 0
        self.compile_s = 0.0  # seconds spent compiling them, or reading them from the cache
        self._warm = False
        self._slot_layout = packing.layout_of(packing.kept_part(self.shapes(num_pages=1)))
        names = (drafting.ROUNDS, drafting.PROPOSED, drafting.ACCEPTED)
        self._draft_leaves = packing.slot_leaves(self._slot_layout, names)
        self.state: DecodeState | None = None  # the worker's, but for `reset` and `wait`
        self._lost: BaseException | None = None  # the failure that took the state, until `reset`
        self.leader: hosts.Leader | None = None  # of the processes that share the model
        self._grammars: Constraint | None = None  # the worker's; None until a slot has one
        self._bucket: grammars.Sizes | None = None  # of what the worker has been given
        # Compilation of the programs with grammars, by the grammars' sizes.
        self._preparing: dict[grammars.Sizes, Future] = {}
        self._bound: set[int] = set()  # slots whose request has a grammar
        self._admitted: list[_Admission] = []  # not dispatched yet
        self._admit_rows = min(ADMIT_ROWS, layout.num_slots)
        self._pieces: list[_Piece] = []  # not dispatched yet, of distinct slots
        # Prefill passes so far, by tokens and pages of a prompt, kind, prompts.
        self.passes: Counter[tuple[int, int, PassKind, int]] = Counter()
        self._absorbs = strategy.absorbs
        self._worker = Worker()
        if allocate:
            self.reset()

    # --- the state ----------------------------------------------------------------------------

    def shapes(
        self, num_pages: int | None = None, sizes: grammars.Sizes | None = None
    ) -> DecodeState:
        """Shapes of the state.

        Args:
            num_pages: Of the pools; None: the layout's.
            sizes: Of the slots' grammars; None: they have none.
        """
        given = self._state_sizes() | ({"num_pages": num_pages} if num_pages else {})
        shapes = programs.make_state.eval_shape(self._programs, **given)
        if sizes is not None:
            blank = jax.eval_shape(lambda: self._blank_grammars(sizes))
            shapes = shapes.replace(constraint=blank)
        if (split := self._programs.model.split) is not None:
            return split.laid(shapes, decoding.state_specs(split))
        if self._home is None:
            return shapes
        return jax.tree.map(lambda leaf: leaf.update(sharding=self._home), shapes)

    def _state_sizes(self) -> dict[str, Any]:
        num_pages, page_size = self.layout.num_pages, self.layout.page_size
        return {"num_pages": num_pages, "page_size": page_size, "knobs": self._knobs}

    def reset(self) -> None:
        """A state with every slot empty and a new pool, once what was dispatched is over."""
        self._admitted.clear()
        for piece in self._pieces:
            piece.boundary.cancel()
        self._pieces.clear()
        self._result(self._submit(self._reset))

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self._worker.is_alive()

    def close(self) -> None:
        """End the worker and free the state, once what was dispatched is done."""
        self._worker.end()
        if self.leader is not None:
            if self.leader.gone.done():
                return  # the worker may be inside a program that never ends
            self._worker.join()
            self.leader.close()
        self._worker.join()
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()
        self.state = None

    def _reset(self) -> None:
        self._tell({"what": "reset"})
        self.state = self._lost = self._grammars = None  # the old pools go before new ones come
        self.state = self._make_state(self._programs, **self._state_sizes())

    def _compile_reset(self) -> None:
        self._make_state.lower(self._programs, **self._state_sizes()).compile()

    def _submit(self, task: Callable[..., Any], *args: Any) -> Future:
        return self._worker.submit(self.memory, task, *args)

    def _result(self, future: Future) -> Any:
        """What a future holds; a process that is gone ends the wait with DeviceFailure."""
        return future.result() if self.leader is None else self.leader.wait(future)

    def read(self, function: Callable[[], Any]) -> Any:
        """As `_result`, of a function that waits for the device."""
        return function() if self.leader is None else self.leader.call(function)

    def run(self, call: Call, slots: Sequence[int] = ()) -> Future:
        """Dispatch a program over the state; the state it returns replaces the donated one.

        Args:
            slots: The slots that need it.

        Raises:
            CompileFailure: It cannot be traced; nothing was run. Admissions that it was to bring
                along are lost.
        """
        self.flush()
        if call.name not in self.compiled:
            self._result(self._submit(self._compile, call, slots))
            self.num_late_compiles += self._warm and not self.is_profiled
        return self._submit(self._call, call)

    def lower(self, call: Call) -> jax.stages.Lowered:
        """A call's program, lowered from the shapes of the state; nothing runs."""
        if (split := self._programs.model.split) is not None:
            call = dataclasses.replace(call, args=split.laid(call.args, PartitionSpec()))
        return call.lower(self.shapes(sizes=call.sizes))

    def _here(self, call: Call) -> tuple[DecodeState, Call]:
        """The state, and a call whose arguments were computed."""
        if self.state is None:  # dispatched behind a failure
            raise self._lost or DeviceFailure("the device has no state yet; call reset()")
        args = [arg.result() if isinstance(arg, Future) else arg for arg in call.args]
        if (split := self._programs.model.split) is not None:
            # Arrays of the host and arrays of the devices would be two programs.
            args = split.everywhere(args)
        of, leaves = self._leaves
        weights = leaves if call.programs is of else None
        return self.state, dataclasses.replace(call, args=tuple(args), weights=weights)

    def _compile(self, call: Call, slots: Sequence[int]) -> None:
        """Compile a program, for `_call`."""
        _, call = self._here(call)
        self._tell_call("compile", call)
        began = time.perf_counter()
        try:
            self.compile_program(call)
        except (DeviceFailure, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            what = f"{' '.join(map(str, call.key))} cannot be compiled"
            raise CompileFailure(f"{what}: {described(error)}", slots) from error
        self.compile_s += time.perf_counter() - began

    def compile_program(self, call: Call) -> None:
        """Compile a call's program, in any thread."""
        self.compiled[call.name] = self.lower(call).compile(call.options)

    def _call(self, call: Call) -> Any:
        state, call = self._here(call)
        self._tell_call("call", call)
        if call.sizes is not None:
            state = state.replace(constraint=self._grammars)
        self.state = None
        try:
            given = call.part(state)
            new, rest = call.run(self.compiled[call.name], given)
            if given.pools is None:
                new = new.replace(pools=state.pools)
            if call.sizes is not None:
                self._grammars = new.constraint
            self.state = new.replace(constraint=None)
        except BaseException as error:
            # Often the caller waits for a later program, which must report this error.
            self._lost = error
            for leaf in jax.tree.leaves(state):  # the traceback would keep what was not donated
                if not leaf.is_deleted():
                    leaf.delete()
            raise
        if isinstance(rest, tuple):  # of steps: `fetch` reads the first
            words, *others = rest
            if self._near is None:
                words.copy_to_host_async()
            else:
                words = jax.device_put(words, self._near)
            rest = (words, *others)
        return rest

    # --- several processes --------------------------------------------------------------------

    def _tell(self, head: dict[str, Any], arrays: Sequence[Any] = ()) -> None:
        """Let the other processes do what this one is about to do; see `replay`."""
        if self.leader is not None:
            self.leader.send(head, tuple(arrays))

    def _tell_call(self, what: str, call: Call) -> None:
        if self.leader is None:
            return
        options = {name: value for name, value in call.static.items() if name not in _OWN_STATIC}
        costs = () if not self._weighs else (call.programs.strategy.costs,)
        sizes = call.sizes and dataclasses.astuple(call.sizes)
        head = {"what": what, "key": call.name, "sizes": sizes}
        head |= {"static": options, "own": [*call.static], "options": call.options}
        head["program"] = next(n for n in _REPLAYED if getattr(programs, n) is call.program)
        self._tell(head, (*call.args, *costs))

    def replay(self, head: Mapping[str, Any], arrays: list[np.ndarray]) -> Future:
        """Do what process 0 sent, see `hosts.follow`."""
        match head["what"]:
            case "reset":
                return self._submit(self._reset)
            case "labels":
                return self._submit(self._read_labels, *arrays)
            case "grammar":
                sizes = grammars.Sizes(*head["sizes"])
                return self._submit(self._put_grammar, head["slot"], sizes, arrays, head["at"])
            case "move":
                return self._submit(self._put_state, head["slot"], head["at"])
        made = self._weightless if head["program"] in _WEIGHTLESS else self._programs
        if self._weighs:
            *arrays, costs = arrays
            made = made.replace(strategy=made.strategy.replace(costs=costs))
        own = {"knobs": self._knobs, "slot_layout": self._slot_layout}
        static = {name: head["static"].get(name, own.get(name)) for name in head["own"]}
        program = getattr(programs, head["program"])
        sizes = head["sizes"] and grammars.Sizes(*head["sizes"])
        call = Call(
            tuple(head["key"]), program, made, tuple(arrays), static, sizes, head["options"]
        )
        if head["what"] == "call":
            return self._submit(self._call, call)
        return self._submit(self._compile, call, ())

    def prepare(self) -> None:
        """Compile every bucket, as process 0 does in `warm_up`."""
        self._submit(self._compile_reset)
        self.compile_ahead(warmup.every_program(self.layout, self._slot_layout.size))

    # --- grammars -----------------------------------------------------------------------------

    def has_programs(self, grammar: grammars.Ready) -> bool:
        """Whether the programs of a grammar are compiled; a thread begins to compile them if not.

        Until then the request must wait, and no other one does. Without warm-up each program is
        compiled when it is first needed, and so it is where several processes share the model.

        Raises:
            CompileFailure: They do not compile.
        """
        if not self._warm or self.leader is not None:
            return True
        future = self.prepare_grammars(grammars.bucket_of(grammar, self._bucket))
        if not future.done():
            return False
        if (error := future.exception()) is not None:
            raise CompileFailure(f"structured output cannot be compiled: {described(error)}", ())
        return True

    def prepare_grammars(self, sizes: grammars.Sizes) -> Future:
        """Compile the programs of grammars of these sizes in a thread; the future ends with it."""
        if sizes not in self._preparing:
            work = warmup.programs_with_grammars(self.layout, sizes)
            self._preparing[sizes] = background.compile_in_background(self, work)
        return self._preparing[sizes]

    def await_programs(self, timeout_s: float) -> None:
        """Wait until the programs of some grammar are compiled, or the time is over."""
        left = [future for future in self._preparing.values() if not future.done()]
        if left:
            concurrent.futures.wait(left, timeout_s, concurrent.futures.FIRST_COMPLETED)

    def _blank_grammars(self, sizes: grammars.Sizes) -> Constraint:
        split = self._programs.model.split
        kernels = grammar_path.choose() if split is None else None  # of one device alone
        size = self._programs.spec.vocab_size
        return grammars.empty(self.layout.num_slots, sizes, size, kernels)

    def _bind(self, slot: int, grammar: grammars.Ready) -> None:
        """Give a slot a grammar, in a bucket that holds all of them."""
        self._bucket = grammars.bucket_of(grammar, self._bucket)
        row = jax.tree.leaves(grammars.padded(grammar, self._bucket))
        self._submit(self._put_grammar, slot, self._bucket, row, grammar.start)

    def _put_grammar(
        self, slot: int, sizes: grammars.Sizes, row: Sequence[np.ndarray], at: int
    ) -> None:
        self._tell(
            {"what": "grammar", "slot": slot, "sizes": dataclasses.astuple(sizes), "at": at}, row
        )
        now = self._grammars
        split = self._programs.model.split
        if now is None:
            now = self._blank_grammars(sizes)
            if self._home is not None:
                now = jax.device_put(now, self._home)
        now = grammars.grown(now, sizes)
        if split is not None:
            now = split.everywhere(now)
        own = jax.tree.unflatten(jax.tree.structure(now.grammar), row)
        self._grammars = programs.bind(now, np.int32(slot), own, np.int32(at))

    def _put_state(self, slot: int, at: int) -> None:
        self._tell({"what": "move", "slot": slot, "at": at})
        self._grammars = programs.move(self._grammars, np.int32(slot), np.int32(at))

    # --- texts without a slot -----------------------------------------------------------------

    def read_labels(self, *arrays: np.ndarray) -> np.ndarray:
        """`labels.forward` of the model, in any thread.

        Raises:
            DeviceFailure: A process that shares the model is gone, or the device failed.
            RuntimeError: The runner is closed.
        """
        if self.leader is None:
            return np.asarray(labels.forward(self._programs.model, *arrays))
        if not self._worker.is_alive():
            raise RuntimeError("the engine is closed; make another LLM")
        found = self._result(self._submit(self._read_labels, *arrays))
        return self.read(lambda: np.asarray(found))

    def _read_labels(self, *arrays: np.ndarray) -> jax.Array:
        self._tell({"what": "labels"}, arrays)
        return labels.forward(self._programs.model, *arrays)

    # --- requests -----------------------------------------------------------------------------

    def admit(self, slot: int, placement: Placement) -> None:
        """Put a fresh request into a slot; it does not decode until its prefill is done.

        A pass or steps that are dispatched next bring it along, or several are one program.
        """
        is_full = len(self._admitted) == self._admit_rows  # no sooner: `begin` may join the last
        # Two rows of one program for the same slot would have no order.
        waiting = [slot for slot, _, _ in self._admitted] + [piece.slot for piece in self._pieces]
        if is_full or slot in waiting:
            self.flush()
        self._admitted.append((slot, placement, False))
        self._bound.discard(slot)
        if placement.grammar is not None:
            self._bound.add(slot)
            self._bind(slot, placement.grammar)

    def flush(self) -> None:
        """Dispatch the admissions, then the pieces of prompts, that wait for more of their kind."""
        pieces, self._pieces = self._pieces, []
        if not pieces and (admitted := self._take_admitted()):
            self.run(self.admit_call(admitted), [slot for slot, _, _ in admitted])
        # Full batches or single pieces: a padding row would cost a prompt's computation.
        count = self.layout.prompts_a_pass if len(pieces) == self.layout.prompts_a_pass else 1
        for i in range(0, len(pieces), count):
            self._run_prefill(pieces[i : i + count])

    def admit_call(self, admitted: Sequence[_Admission]) -> Call:
        """Fresh requests: slot, placement, and whether it decodes at once."""
        args, static = (self._fresh(admitted),), {"knobs": self._knobs}
        return Call(("admit",), programs.admit, self._weightless, args, static)

    def _fresh(self, admitted: Sequence[_Admission]) -> np.ndarray:
        """Fresh requests as [A X], `packing.admission_fields`."""
        window = self.layout.window
        fields = packing.admission_fields(window, len(self._knobs))
        rows = np.zeros((self._admit_rows, fields.size), np.int32)
        rows[:, fields.at("slot")] = self.layout.num_slots  # ignores the rows that fill up
        for row, (slot, placement, decodes) in zip(rows, admitted, strict=False):
            ints, floats = packing.pack_request(placement, window, self._knobs)
            row[fields.at("slot")], row[fields.at("decodes")] = slot, decodes
            row[fields.span("ints")], row[fields.span("floats")] = ints, floats.view(np.int32)
        return rows

    def _take_admitted(self) -> list[_Admission]:
        """The admissions that the next program brings along."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def _with_fresh(
        self, rows: np.ndarray, admitted: Sequence[_Admission]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """What a program takes that brings fresh requests along, and its keywords."""
        given = np.concatenate([rows, self._fresh(admitted)], axis=None)
        return given, {"knobs": self._knobs, "num_rows": len(rows), "width": rows.shape[1]}

    def restore(
        self, slot: int, placement: Placement, saved: np.ndarray, tokens: Sequence[int]
    ) -> None:
        """Put a fetched slot back, with its output so far; its pages hold its prefix again."""
        size = self._slot_layout.size
        self.run(self.restore_call(slot, placement, saved[:size], tokens), [slot])
        if placement.grammar is not None:
            self._submit(self._put_state, slot, int(saved[size]))

    def restore_call(
        self, slot: int, placement: Placement, saved: np.ndarray, tokens: Sequence[int]
    ) -> Call:
        """See `restore`."""
        ints, floats = packing.pack_request(placement, self.layout.window, self._knobs)
        output = np.zeros((self._programs.max_output,), np.int32)
        output[: len(tokens)] = tokens
        args = np.int32(slot), ints, floats, saved[None], output
        static = {"knobs": self._knobs, "slot_layout": self._slot_layout}
        return Call(("restore",), programs.restore, self._weightless, args, static)

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
        kind: PassKind,
    ) -> Future:
        """Compute and store one piece of a prefix.

        Several small pieces of short prefixes are one program, dispatched with the next call.

        Args:
            tokens: Ids from position `first` on, at most `size`.
            end: First position not stored; `live_end`: first not computed.
            last: This piece completes the prefix: the slot decodes from now on.
            pages: The slot's row of the page table, one of the page buckets wide.

        Returns:
            The boundary row after the pass [D], on the device. A pass over several pieces
            returns that of the first one: prefixes in pieces do not need it.
        """
        layout = self.layout
        columns = len(pages)
        fields = packing.piece_fields(size)
        words = fields.pack(
            1,
            slot=slot,
            first=first,
            end=end,
            live_end=live_end,
            last=last,
            tokens=np.asarray(tokens, np.int32),
            pages=pages,
        )
        piece, several = _Piece(slot, words, size, kind, Future()), layout.prompts_a_pass
        is_small = (size, columns) == (layout.prefill_buckets[0], layout.page_buckets[0])
        if several == 1 or not is_small:
            if self._pieces:
                self.flush()
            self._run_prefill([piece])
            return piece.boundary
        if any(slot == other.slot for other in self._pieces):
            self.flush()
        self._pieces.append(piece)
        if len(self._pieces) == several:
            self.flush()
        return piece.boundary

    def _run_prefill(self, pieces: list[_Piece]) -> None:
        size, kind = pieces[0].size, pieces[0].kind
        words = np.concatenate([piece.words for piece in pieces])
        columns = words.shape[1] - packing.piece_fields(size).size
        self.passes[size, columns, kind, len(pieces)] += 1
        call = self.prefill_call(words, size, kind, self._take_admitted())
        done = self.run(call, [piece.slot for piece in pieces])
        done.add_done_callback(lambda done: _pass_on(done, [piece.boundary for piece in pieces]))

    def prefill_call(
        self,
        words: np.ndarray,
        size: int,
        kind: PassKind,
        admitted: Sequence[_Admission] = (),
    ) -> Call:
        """One pass over pieces of prefixes [A X], `packing.piece_fields`, behind admissions."""
        key = ("prefill", *words.shape, size, kind)
        given, static = self._with_fresh(words, admitted)
        static |= {"size": size, "kind": kind}
        options = programs.MANY_ROWS | (programs.NOTHING_RECORDED if self._is_wide else {})
        return Call(key, programs.prefill, self._programs, (given,), static, options=options)

    def begin(self, slot: int, boundary: Any = None) -> None:
        """Let a slot decode whose prefix needs no computing.

        Args:
            boundary: The row before its window, from `prefill` of the same prefix.
        """
        last = self._admitted[-1] if self._admitted else None
        if boundary is None and last and last[0] == slot and not self._absorbs:
            self._admitted[-1] = (*last[:2], True)
            return
        self.run(self.begin_call(slot, boundary), [slot])

    def begin_call(self, slot: int, boundary: Any = None) -> Call:
        """See `begin`."""
        if boundary is None:
            boundary = np.zeros((self._programs.kept,), self._programs.spec.dtype)
            if self._home is not None:  # where `prefill` leaves one
                boundary = jax.device_put(boundary, self._home)
        return Call(("begin",), programs.begin, self._programs, (np.int32(slot), boundary))

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every pool."""
        self.run(self.copy_call(source, target))

    def copy_call(self, source: int, target: int) -> Call:
        """See `copy_page`."""
        args = np.int32(source), np.int32(target)
        return Call(("copy",), programs.copy_page, self._weightless, args)

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
        bound = [row in self._bound for row in rows[:num_active].tolist()]
        if self._pieces:
            self.flush()
        fresh = self._take_admitted()
        call = self.decode_call(rows, num_active, pages, num_steps, early, bound, fresh)
        return Chunk(self.run(call, rows[:num_active].tolist()))

    def decode_call(
        self,
        rows: np.ndarray,
        num_active: int,
        pages: np.ndarray,
        num_steps: int,
        early: bool,
        bound: Sequence[bool] = (),
        admitted: Sequence[_Admission] = (),
        sizes: grammars.Sizes | None = None,
    ) -> Call:
        """See `decode`.

        Args:
            bound: Which of the active slots have a grammar.
            sizes: Of these grammars; None: as they were given.
            admitted: Fresh requests, as of `admit_call`, that the program puts into slots first.
        """
        requests = packing.DECODE.pack(
            len(rows),
            slot=rows[:, None],
            num_active=num_active,
            num_steps=num_steps,
            early=early,
            pages=pages,
        )
        given, static = self._with_fresh(requests, admitted)
        sizes = (sizes or self._bucket) if any(bound) else None
        options = self._options(len(rows), sizes is not None)
        if sizes is not None:
            which = np.zeros((len(rows),), bool)
            which[: len(bound)] = bound
            key = ("decode with grammars", *pages.shape, sizes)
            args = given, which
        else:
            key, args = ("decode seen" if self.is_profiled else "decode", *pages.shape), (given,)
        made = self._priced(len(rows))
        return Call(key, programs.decode, made, args, static, sizes, options)

    def _options(self, count: int, is_bound: bool) -> dict[str, Any]:
        """Options of XLA for a decode program of `count` slots."""
        many = self.layout.many_rows
        if many is None:
            return {}
        if count >= many:
            return programs.MANY_ROWS | programs.NOTHING_RECORDED
        options = programs.MANY_ROWS if self._is_wide else {}
        # A profile holds no launch of a recorded loop. With several slots, grammars or devices a
        # recorded loop is not faster, or XLA does not record it.
        is_one = count == 1 and not is_bound and self._programs.model.split is None
        if (self._is_wide or is_one) and not (self.is_profiled and not is_bound):
            options = options | programs.RECORDED_LOOP
        return options

    @property
    def _is_wide(self) -> bool:
        """Whether a step of one slot has many rows, and runs on an accelerator."""
        return self.layout.many_rows is not None and self.layout.block_size >= WIDE

    def _priced(self, num_slots: int) -> Programs:
        """The programs, with the costs of the strategy's choices for so many slots.

        Costs are data: a later measurement, or a new `choice_costs`, compiles nothing again.
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
        self.flush()  # the device need not wait
        try:
            packed, far = self._result(chunk.words)
            # Copied: where `_near` holds it, its memory is another result's once it is let go.
            return Fetched(self.read(lambda: np.array(packed)), self, far)
        except jax.errors.JaxRuntimeError as error:  # where it failed after it was launched
            raise self._failure(error) from error

    def join(self, last_pass: Future) -> None:
        """Wait for a prefill pass.

        Raises:
            DeviceFailure: As `fetch`.
        """
        self.flush()
        try:
            row = self._result(last_pass)
            self.read(lambda: jax.block_until_ready(row))
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

    @property
    def num_near_words(self) -> int:
        """Words of a saved slot that every fetch brings; they are its first ones."""
        return self._slot_layout.near

    def unpack(self, saved: np.ndarray) -> dict[str, Any]:
        """A saved slot as named leaves: `buffer` (one row, no slot axis), `finish`, `carry`, ..."""
        return packing.host_unpack(saved, self._slot_layout)

    def drafted(self, saved: np.ndarray) -> DraftMetrics | None:
        """The counts of `core.drafting` in a saved slot; None where the strategy has none."""
        if self._draft_leaves is None:
            return None
        leaves = [packing.host_leaf(saved, self._slot_layout, one) for one in self._draft_leaves]
        return DraftMetrics(*(tuple(leaf.tolist()) for leaf in leaves))

    # --- before the first request -------------------------------------------------------------

    def warm_up(
        self,
        progress: warmup.Progress | None = None,
        calibrate: bool = False,
        with_constraints: bool = False,
    ) -> None:
        """Compile every program, make the state if there is none, run each once on empty slots.

        A strategy whose step is one of several has each of them timed (`weighs_costs`).

        Args:
            progress: Called with what was compiled, how many are done, and of how many.
            calibrate: Time them too, for `cost`; no request may be in a slot.
            with_constraints: Compile the programs of structured output too, which other requests do
                not need; else a thread does when the first such request comes.

        Raises:
            DeviceFailure: A program does not compile, or run.
            ValueError: What they need was planned and does not fit.
        """
        work = warmup.every_program(self.layout, self._slot_layout.size)
        bound = []
        if with_constraints and self.leader is None:
            self._bucket = grammars.USUAL
            bound = warmup.programs_with_grammars(self.layout, grammars.USUAL)
        began = time.perf_counter()
        if self.state is None:  # by the worker, which has nothing else to do
            self._submit(self._compile_reset)
        temp_bytes = self.compile_ahead([*work, *bound], progress)
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
        if bound:
            self._preparing[grammars.USUAL] = done = Future()
            done.set_result(None)
        self._warm = True

    @property
    def num_programs(self) -> int:
        """Compiled programs, and those that a thread compiles."""
        left = {str(sizes) for sizes, done in self._preparing.items() if not done.done()}
        others = sum(name[-1] not in left for name in list(self.compiled))
        each = len(self.layout.slot_buckets) * len(self.layout.page_buckets)
        return others + len(left) * each

    @property
    def num_compiled(self) -> int:
        """Compiled programs."""
        return len(self.compiled)

    def compile_ahead(
        self,
        work: Sequence[warmup.Work],
        progress: warmup.Progress | None = None,
        most_bytes: float = math.inf,
    ) -> int:
        """`warmup.compile_ahead` of this runner."""
        try:
            return warmup.compile_ahead(self, work, progress, most_bytes)
        except jax.errors.JaxRuntimeError as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Until all that was dispatched is done."""
        self.flush()
        self._result(self._submit(lambda: jax.block_until_ready(self.state)))

    def _failure(self, error: Exception) -> DeviceFailure:
        return DeviceFailure(memory.explain(str(error), self.memory))


def _pass_on(done: Future, others: Sequence[Future]) -> None:
    """Give what a future holds to others."""
    error = done.exception()
    for other in others:
        if error is not None:
            other.set_exception(error)
        else:
            other.set_result(done.result())
