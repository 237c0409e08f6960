"""The interface of the host loop to the device: acts on slots, and their results.

Programs run in a thread of their own (`worker`), and the host loop blocks in `fetch` alone.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from dllm_jax.engine.layout import CompileFailure, DeviceFailure, EngineLayout, Placement
from dllm_jax.loading.model import Model
from dllm_jax.runner import decode as decoding
from dllm_jax.runner import grammars, memory, packing
from dllm_jax.runner.calls import Call, Programs
from dllm_jax.runner.dispatch import Dispatch
from dllm_jax.runner.state import DeviceState, pinned_of
from dllm_jax.runner.worker import Worker
from dllm_jax.strategies.core.errors import described
from dllm_jax.strategies.core.knobs import split_knobs
from dllm_jax.strategies.core.state import DecodeState


class ModelRunner(Dispatch):
    """Dispatches acts on slots to a state on the device.

    Args:
        model: Weights and network.
        strategy: Its knobs are left out: requests bring them.
        aux: Other models that the strategy needs.
        layout: Sizes; every program is compiled for a bucket of them.
        implementation: Attention back end, None for the best.
        allocate: Make the state now; otherwise `reset` does, before anything is run.

    Attributes:
        device: The state; `cluster.LeadingDevice` wraps it where several processes share the model.
        memory: Of the device, where it was planned.
        cost: Predicted seconds of programs, once they were timed.
        compile_in_background: Compiles the programs for grammars of some sizes; None: each is
            compiled when it is first needed.
        is_warm: Every program was compiled ahead, so a further one is late.
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
            _check_place(network)
        strategy = split_knobs(strategy)[0]
        made_from = Programs(
            model=model,
            aux=dict(aux),
            strategy=strategy,
            spec=decoding.slot_spec(strategy, model, layout.num_slots),
            kept=decoding.boundary_size(strategy, model),
            max_output=layout.max_model_len,
            most_new=layout.most_new,
            implementation=implementation,
            one_rounding=layout.batch_invariant,
            num_kept=layout.num_kept,
        )
        self.device: Any = DeviceState(made_from, layout)
        slot_layout = packing.layout_of(packing.kept_part(self.device.shapes(num_pages=1)))
        super().__init__(made_from, layout, slot_layout, self.device.home)
        self.memory: memory.MemoryPlan | None = None
        self.cost: Any = None
        self.compile_in_background: Callable[[ModelRunner, grammars.Sizes], Future] | None = None
        self.is_warm = False
        self.num_late_compiles = 0
        self._near = pinned_of(self.device.home)
        # Compilation of the programs with grammars, by the grammars' sizes.
        self._preparing: dict[grammars.Sizes, Future] = {}
        self._worker = Worker()
        if allocate:
            self.reset()

    # --- dispatch -----------------------------------------------------------------------------

    def submit(self, task: Callable[..., Any], *args: Any) -> Future:
        """Run a task after all that was dispatched, in the thread that the state belongs to."""
        return self._worker.submit(self.memory, task, *args)

    def run(self, call: Call, slots: Sequence[int] = ()) -> Future:
        """Dispatch a program over the state; the state that it returns replaces the donated one.

        Args:
            slots: The slots that need it.

        Raises:
            CompileFailure: It cannot be traced; nothing was run. Admissions that it was to bring
                along are lost.
        """
        if self._admitted or self._pieces:
            self.flush()
        if call.name not in self.device.compiled:
            self.device.wait(self.submit(self.device.compile, call, slots))
            self.num_late_compiles += self.is_warm and not self.is_profiled
        return self.submit(self._call, call)

    def _call(self, call: Call) -> Any:
        result = self.device.run(call)
        if not isinstance(result, tuple):
            return result
        words, *others = result  # of steps: `fetch` reads the first
        if self._near is None:
            words.copy_to_host_async()
        else:
            words = jax.device_put(words, self._near)
        return (words, *others)

    def admit(self, slot: int, placement: Placement) -> None:
        """See `Dispatch.admit`."""
        super().admit(slot, placement)
        if (grammar := placement.grammar) is not None:
            # In a bucket that holds the grammars of all slots.
            self._bucket = grammars.bucket_of(grammar, self._bucket)
            row = jax.tree.leaves(grammars.padded(grammar, self._bucket))
            self.submit(self.device.bind, slot, self._bucket, row, grammar.start)

    def restore(
        self, slot: int, placement: Placement, saved: np.ndarray, tokens: Sequence[int]
    ) -> None:
        """See `Dispatch.restore`."""
        super().restore(slot, placement, saved, tokens)
        if placement.grammar is not None:
            self.submit(self.device.move, slot, int(saved[self.num_words]))

    # --- results ------------------------------------------------------------------------------

    def fetch(self, words: Future) -> packing.Fetched:
        """Wait for what `decode` returned and read it.

        Raises:
            DeviceFailure: It failed, or one before it did: the state is gone.
        """
        if self._admitted or self._pieces:
            self.flush()  # the device need not wait
        try:
            packed, far = self.device.wait(words)
            # Copied: where `_near` holds it, its memory is another result's once it is let go.
            return packing.Fetched(self.device.read(lambda: np.array(packed)), self, far)
        except jax.errors.JaxRuntimeError as error:  # where it failed after it was launched
            raise self.failure(error) from error

    def join(self, last_pass: Future) -> None:
        """Wait for a prefill pass.

        Raises:
            DeviceFailure: As `fetch`.
        """
        self.flush()
        try:
            row = self.device.wait(last_pass)
            self.device.read(lambda: jax.block_until_ready(row))
        except jax.errors.JaxRuntimeError as error:
            raise self.failure(error) from error

    def wait(self) -> None:
        """Until all that was dispatched is done."""
        self.flush()
        self.device.wait(self.submit(lambda: jax.block_until_ready(self.state)))

    def read_labels(self, *arrays: np.ndarray) -> np.ndarray:
        """`labels.forward` of the model, in any thread.

        Raises:
            DeviceFailure: A process that shares the model is gone, or the device failed.
            RuntimeError: The runner is closed.
        """
        if not self.device.is_shared:
            return np.asarray(self.device.read_labels(*arrays))
        if not self.is_open:
            raise RuntimeError("the engine is closed; make another LLM")
        found = self.device.wait(self.submit(self.device.read_labels, *arrays))
        return self.device.read(lambda: np.asarray(found))

    @property
    def num_words(self) -> int:
        """Words of a saved slot."""
        return self.slot_layout.size

    def unpack(self, saved: np.ndarray) -> dict[str, Any]:
        """A saved slot as named leaves: `buffer` (one row, no slot axis), `finish`, `carry`, ..."""
        return packing.unpack(saved, self.slot_layout)

    # --- the state ----------------------------------------------------------------------------

    @property
    def state(self) -> DecodeState | None:
        """The state; only its shapes matter to other threads than the worker."""
        return self.device.state

    def reset(self) -> None:
        """A state with every slot empty and a new pool, once what was dispatched is over."""
        self._forget()
        self.device.wait(self.submit(self.device.reset))

    def put_weights(self, params: Any, kv_scales: Any) -> None:
        """Read other weights of the same shapes, types and places from the next program on."""
        model = self.programs.model.replace(params=params, kv_scales=kv_scales)
        self.programs = self.programs.replace(model=model)
        self.device.wait(self.submit(self.device.take, self.programs))

    def free_state(self) -> None:
        """Give the pools back, once what was dispatched is over; `reset` makes new ones."""
        self.device.wait(self.submit(self.device.close))

    def resize(self, num_pages: int) -> None:
        """Set the pages of the pool, before there is a state."""
        if num_pages != self.layout.num_pages:
            self.layout = dataclasses.replace(self.layout, num_pages=num_pages)
            self.device.resize(num_pages)

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self._worker.is_alive()

    def close(self) -> None:
        """End the worker and free the state, once what was dispatched is done."""
        self._worker.end()
        if not self.device.is_stuck:
            self._worker.join()
            self.device.close()

    def failure(self, error: Exception) -> DeviceFailure:
        """An error of JAX with what would mend it."""
        return DeviceFailure(memory.explain(str(error), self.memory))

    # --- programs -----------------------------------------------------------------------------

    @property
    def num_programs(self) -> int:
        """Compiled programs, and those that a thread compiles."""
        left = {str(sizes) for sizes, done in self._preparing.items() if not done.done()}
        others = sum(name[-1] not in left for name in list(self.device.compiled))
        each = len(self.layout.slot_buckets) * len(self.layout.page_buckets)
        return others + len(left) * each

    @property
    def num_compiled(self) -> int:
        """Compiled programs."""
        return len(self.device.compiled)

    def has_programs(self, grammar: grammars.Ready) -> bool:
        """Whether the programs of a grammar are compiled; a thread begins to compile them if not.

        Until then the request must wait, and no other one does.

        Raises:
            CompileFailure: They do not compile.
        """
        if self.compile_in_background is None:
            return True
        sizes = grammars.bucket_of(grammar, self._bucket)
        if sizes not in self._preparing:
            self._preparing[sizes] = self.compile_in_background(self, sizes)
        future = self._preparing[sizes]
        if not future.done():
            return False
        if (error := future.exception()) is not None:
            raise CompileFailure(f"structured output cannot be compiled: {described(error)}", ())
        return True

    def expect(self, sizes: grammars.Sizes) -> None:
        """Take grammars of these sizes, whose programs are compiled, for the usual ones.

        No slot has one, but they have their memory, and what puts them there is compiled.
        """
        row = jax.tree.leaves(grammars.blank(sizes, self.programs.spec.vocab_size))
        self.submit(self.device.bind, 0, sizes, row, 0)
        self.submit(self.device.move, 0, 0)  # as `restore` does
        self._bucket = sizes
        self._preparing[sizes] = done = Future()
        done.set_result(None)

    def forget_failed_programs(self) -> None:
        """Compile programs again that did not compile, when the next request needs them."""
        for sizes, future in list(self._preparing.items()):
            if future.done() and future.exception() is not None:
                del self._preparing[sizes]

    def await_programs(self, timeout_s: float) -> None:
        """Wait until the programs of some grammar are compiled, or the time is over."""
        left = [future for future in self._preparing.values() if not future.done()]
        if left:
            concurrent.futures.wait(left, timeout_s, concurrent.futures.FIRST_COMPLETED)


def _check_place(model: Model) -> None:
    """Refuse weights that every call would move to where its programs expect them."""
    wrong = [] if model.split is None else model.split.misplaced(model.params)
    if wrong:
        raise ValueError(
            f"{len(wrong)} leaves of {model.source!r} do not lie as its mesh says, the first is "
            f"{wrong[0]}; place the model again (dj.load(..., mesh=))"
        )
