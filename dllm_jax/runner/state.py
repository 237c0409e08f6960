"""The state on the device, and everything that changes it.

One thread runs all changes of it, in order (`worker`). Programs are lowered and compiled from its
shapes alone, so other threads may do that.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, SingleDeviceSharding

from dllm_jax.engine.layout import CompileFailure, DeviceFailure, EngineLayout
from dllm_jax.kernels import grammar_path
from dllm_jax.runner import decode as decoding
from dllm_jax.runner import grammars, programs
from dllm_jax.runner.calls import Call, Programs
from dllm_jax.scoring import labels
from dllm_jax.strategies.core.constraint import Constraint
from dllm_jax.strategies.core.errors import described
from dllm_jax.strategies.core.state import DecodeState

PINNED = "pinned_host"  # memory of the host that a GPU writes
# Acts that read no weights, and no pools: a call inspects each of its arrays.
WEIGHTLESS, POOLLESS = ("admit", "restore", "copy"), ("admit", "restore")


class DeviceState:
    """The slots and the pool on the device, with the compiled programs over them.

    Args:
        made_from: Models and strategy.
        layout: Sizes.

    Attributes:
        state: None before `reset`, and after a program that failed.
        compiled: Programs by `Call.name`.
        compile_s: Seconds spent on compiling them, or on reading them from the cache.
        home: The device that everything is committed to; None where several share the model.
        is_shared: Several processes share the model.
        is_stuck: One of them is gone: what was dispatched may never end.
    """

    is_shared = False
    is_stuck = False

    def __init__(self, made_from: Programs, layout: EngineLayout):
        self.state: DecodeState | None = None
        self.compiled: dict[tuple[str, ...], jax.stages.Compiled] = {}
        self.compile_s = 0.0
        self.home = _device_of(made_from)
        self.take(made_from)
        self._split = made_from.model.split
        self._sizes = {"num_pages": layout.num_pages, "page_size": layout.page_size}
        self._make = programs.make_state(self.home)
        self._lost: BaseException | None = None  # the failure that took the state, until `reset`
        self._grammars: Constraint | None = None  # None until a slot has one
        self._binds: dict[grammars.Sizes, jax.stages.Compiled] = {}

    # --- in any thread ------------------------------------------------------------------------

    def resize(self, num_pages: int) -> None:
        """Set the pages of the pool; there is no state yet."""
        self._sizes["num_pages"] = num_pages
        self.compiled.clear()  # the pools' shapes are part of every program

    def shapes(
        self, num_pages: int | None = None, sizes: grammars.Sizes | None = None
    ) -> DecodeState:
        """Shapes of the state.

        Args:
            num_pages: Of the pools; None: the layout's.
            sizes: Of the slots' grammars; None: they have none.
        """
        given = self._sizes | ({"num_pages": num_pages} if num_pages else {})
        shapes = self._make.eval_shape(self._programs, **given)
        if sizes is not None:
            blank = jax.eval_shape(lambda: self._blank_grammars(sizes))
            shapes = shapes.replace(constraint=blank)
        if self._split is not None:
            return self._split.laid(shapes, decoding.state_specs(self._split))
        if self.home is None:
            return shapes
        return jax.tree.map(lambda leaf: leaf.update(sharding=self.home), shapes)

    def lower(self, call: Call) -> jax.stages.Lowered:
        """A call's program, lowered from the shapes of the state; nothing runs."""
        if self._split is not None:
            call = dataclasses.replace(call, args=self._split.laid(call.args, PartitionSpec()))
        weights, of_programs = self._weights(call)
        slots, of_state = jax.tree.flatten(_taken(call, self.shapes(sizes=call.sizes)))
        static = call.static | {"trees": (of_programs, of_state)}
        return call.program.lower(weights, slots, *call.args, **static)

    def _weights(self, call: Call) -> tuple[list[Any], Any]:
        """Leaves and tree of what a call's program is made from."""
        return self._flat_weightless if call.key[0] in WEIGHTLESS else self._flat

    def compile_program(self, call: Call) -> jax.stages.Compiled:
        """Compile a call's program."""
        self.compiled[call.name] = self.lower(call).compile(call.options)
        return self.compiled[call.name]

    def compile_bind(self, sizes: grammars.Sizes) -> None:
        """Compile the program of `bind`."""
        now = self.shapes(num_pages=1, sizes=sizes).constraint
        kernels, num_ids = now.grammar.kernels, self._programs.spec.vocab_size
        own = grammars.blank(sizes, num_ids, kernels=kernels)
        self._binds[sizes] = grammars.bind.lower(now, np.int32(0), own, np.int32(0)).compile()

    def compile_reset(self) -> None:
        """Compile the program of `reset`."""
        self._make.lower(self._programs, **self._sizes).compile()

    def note_compiling(self, seconds: float) -> None:
        """Count time that was spent on compiling."""
        self.compile_s += seconds

    def wait(self, future: Future) -> Any:
        """Wait for a future of the worker and return its result."""
        return future.result()

    def read(self, function: Callable[[], Any]) -> Any:
        """The result of a function that waits for the device."""
        return function()

    # --- in the worker's thread ---------------------------------------------------------------

    def reset(self) -> None:
        """Every slot empty, and a new pool."""
        self.state = self._lost = self._grammars = None  # the old pools go before new ones come
        self.state = self._make(self._programs, **self._sizes)

    def take(self, made_from: Programs) -> None:
        """Read the weights of `made_from`, of which the programs are compiled."""
        self._programs, self._flat = made_from, jax.tree.flatten(made_from)
        bare = made_from.model.replace(params={}, exchange=None)
        self._flat_weightless = jax.tree.flatten(made_from.replace(model=bare, aux={}))

    def close(self) -> None:
        """Free the state."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()
        self.state = None

    def args_of(self, call: Call) -> tuple[Any, ...]:
        """The computed arguments of a call.

        Raises:
            DeviceFailure: There is no state, or another failure that took it.
        """
        if self.state is None:  # dispatched before a failure was seen
            raise self._lost or DeviceFailure("the device has no state yet; call reset()")
        args = [arg.result() if isinstance(arg, Future) else arg for arg in call.args]
        if self._split is not None:
            # Arrays of the host and arrays of the devices would be two programs.
            args = self._split.everywhere(args)
        return tuple(args)

    def compile(self, call: Call, slots: Sequence[int]) -> None:
        """Compile a program that requests in these slots wait for."""
        call = dataclasses.replace(call, args=self.args_of(call))
        began = time.perf_counter()
        try:
            self.compile_program(call)
        except (DeviceFailure, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            what = f"{' '.join(map(str, call.key))} cannot be compiled"
            raise CompileFailure(f"{what}: {described(error)}", slots) from error
        self.compile_s += time.perf_counter() - began

    def run(self, call: Call) -> Any:
        """Run a compiled program; the state that it returns replaces the donated one."""
        args, state = self.args_of(call), self.state
        assert state is not None
        if call.sizes is not None:
            state = state.replace(constraint=self._grammars)
        self.state = None
        try:
            new, rest = self._launch(call, args, _taken(call, state))
            if new.pools is None:
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
        return rest

    def _launch(
        self, call: Call, args: tuple[Any, ...], part: DecodeState
    ) -> tuple[DecodeState, Any]:
        slots, tree = jax.tree.flatten(part)
        weights, _ = self._weights(call)
        new, rest = self.compiled[call.name](weights, slots, *args)
        return jax.tree.unflatten(tree, new), rest

    def bind(self, slot: int, sizes: grammars.Sizes, row: Sequence[np.ndarray], at: int) -> None:
        """Give a slot a grammar of these sizes, in this state of its automaton."""
        now = self._grammars
        now = self._blank_grammars(sizes) if now is None else grammars.grown(now, sizes)
        if self.home is not None:
            now = jax.device_put(now, self.home)
        if self._split is not None:
            now = self._split.everywhere(now)
        own = jax.tree.unflatten(jax.tree.structure(now.grammar), row)
        bind = self._binds.get(sizes, grammars.bind)
        self._grammars = bind(now, np.int32(slot), own, np.int32(at))

    def move(self, slot: int, at: int) -> None:
        """Set the state of a slot's automaton."""
        self._grammars = grammars.move(self._grammars, np.int32(slot), np.int32(at))

    def read_labels(self, *arrays: np.ndarray) -> jax.Array:
        """`labels.forward` of the model; where it `is_shared`, as any other program."""
        return labels.forward(self._programs.model, *arrays)

    def _blank_grammars(self, sizes: grammars.Sizes) -> Constraint:
        kernels = grammar_path.choose() if self._split is None else None  # of one device alone
        spec = self._programs.spec
        return grammars.empty(spec.num_slots, sizes, spec.vocab_size, kernels)


def _taken(call: Call, state: DecodeState) -> DecodeState:
    """The state that a program takes."""
    return state.replace(pools=None) if call.key[0] in POOLLESS else state


def _device_of(made_from: Programs) -> Any:
    """The device that everything is committed to; None where several share the model.

    JAX compiles a program again for arguments that are committed where those it was lowered from
    were not. A program with exported kernels returns committed ones, whatever it was given.
    """
    if made_from.model.split is not None:
        return None
    leaves = jax.tree.leaves((made_from.model, made_from.aux))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    arrays.sort(key=lambda leaf: not leaf.committed)
    places = (leaf.sharding for leaf in arrays)
    return next((one for one in places if isinstance(one, SingleDeviceSharding)), None)


def pinned_of(home: Any) -> Any:
    """Memory of the host into which a GPU copies a result once it is computed.

    None where there is none, or where several devices share the model.
    """
    if home is None:
        return None
    (device,) = home.device_set
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform != "gpu" or PINNED not in kinds:
        return None
    return SingleDeviceSharding(device, memory_kind=PINNED)
