"""Acts of the host loop on slots, as calls of programs: each act makes its `Call` and passes it on.

Admissions and small pieces of prompts wait for more of their kind, or for the next act, which
brings them along in its own call.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from dllm_jax.engine.layout import EngineLayout, PassKind, Placement
from dllm_jax.runner import grammars, packing, programs, xla_options
from dllm_jax.runner.calls import Call, Programs


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A piece of a prefix that is not dispatched yet."""

    slot: int
    words: np.ndarray  # [1 X], `packing.piece_fields`
    size: int
    kind: PassKind
    boundary: Future


class Dispatch:
    """Acts on slots; `run` says where their calls go.

    Args:
        made_from: Models and strategy, as the programs take them.
        layout: Sizes; every program is compiled for a bucket of them.
        slot_layout: Of a saved slot.
        home: The device that everything is committed to.

    Attributes:
        programs: What the compiled programs were made from.
        is_profiled: Run steps by programs whose launches a profile holds, one by one.
        passes: Prefill passes, by tokens and pages of a prompt, kind, prompts.
    """

    def __init__(
        self,
        made_from: Programs,
        layout: EngineLayout,
        slot_layout: packing.SlotLayout,
        home: Any,
    ):
        self.layout, self.slot_layout = layout, slot_layout
        self.is_profiled = False
        self.passes: Counter[tuple[int, int, PassKind, int]] = Counter()
        self._home = home
        self.programs = made_from
        # Rows of `packing.request_fields` by slot, not dispatched yet.
        self._admitted: dict[int, np.ndarray] = {}
        fields = made_from.request_fields
        # The slot past the last marks a row to ignore.
        self._no_fresh = fields.pack(made_from.num_fresh, slot=layout.num_slots)
        self._pieces: list[_Piece] = []  # not dispatched yet, of distinct slots
        self._bound: set[int] = set()  # slots whose request has a grammar
        self._bucket: grammars.Sizes | None = None  # of these grammars

    def calls(
        self, act: Callable[["Dispatch"], Any], sizes: grammars.Sizes | None = None
    ) -> list[Call]:
        """The calls that an act on empty slots would dispatch; nothing runs.

        Args:
            sizes: Slot 0 has a grammar of these sizes; None: no slot has one.
        """
        other = _Recorder(self.programs, self.layout, self.slot_layout, self._home)
        other.is_profiled = self.is_profiled
        if sizes is not None:
            other._bound, other._bucket = {0}, sizes
        act(other)
        other.flush()
        return other.found

    def run(self, call: Call, slots: Sequence[int] = ()) -> Future:
        """Dispatch a call that these slots need; its result."""
        raise NotImplementedError

    # --- requests -----------------------------------------------------------------------------

    def admit(self, slot: int, placement: Placement) -> None:
        """Put a fresh request into a slot; it does not decode until its prefill is done.

        A pass or steps that are dispatched next bring it along, or several are one program.
        """
        # No sooner: `begin` may join the last one.
        is_full = len(self._admitted) == len(self._no_fresh)
        # Two rows of one program for the same slot would have no order.
        if is_full or slot in {*self._admitted, *(piece.slot for piece in self._pieces)}:
            self.flush()
        self._admitted[slot] = self._packed(slot, placement)
        self._bound.discard(slot)
        if placement.grammar is not None:
            self._bound.add(slot)

    def flush(self) -> None:
        """Dispatch the admissions, then the pieces of prompts, that wait for more of their kind."""
        pieces, self._pieces = self._pieces, []
        if not pieces and self._admitted:
            slots = [*self._admitted]
            self.run(Call(("admit",), programs.admit, (self._fresh(),)), slots)
        # Full batches or single pieces: a padding row would cost a prompt's computation.
        count = self.layout.prompts_a_pass if len(pieces) == self.layout.prompts_a_pass else 1
        for i in range(0, len(pieces), count):
            self._run_prefill(pieces[i : i + count])

    def _forget(self) -> None:
        """Drop what waits."""
        self._admitted.clear()
        for piece in self._pieces:
            piece.boundary.cancel()
        self._pieces.clear()

    def _fresh(self) -> np.ndarray:
        """The admissions, which wait no more, as [A X], `packing.request_fields`."""
        if not self._admitted:
            return self._no_fresh
        rows = self._no_fresh.copy()
        rows[: len(self._admitted)] = [*self._admitted.values()]
        self._admitted.clear()
        return rows

    def _packed(self, slot: int, placement: Placement) -> np.ndarray:
        return packing.pack_request(slot, placement, self.layout.window, self.programs.knobs)

    def _with_fresh(self, rows: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
        """The arguments of a program that also carries out waiting admissions, and its keywords."""
        return np.concatenate([rows, self._fresh()], axis=None), {"num_rows": len(rows)}

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
        Scripts that measure wrap `decode`, `prefill` and `fetch`, and rely on their arguments.

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
        words = packing.piece_fields(size).pack(
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
        is_small = (size, len(pages)) == (layout.prefill_buckets[0], layout.page_buckets[0])
        if self._pieces and (not is_small or any(slot == other.slot for other in self._pieces)):
            self.flush()
        self._pieces.append(piece)
        if not is_small or len(self._pieces) == several:
            self.flush()
        return piece.boundary

    def _run_prefill(self, pieces: list[_Piece]) -> None:
        size, kind = pieces[0].size, pieces[0].kind
        words = np.concatenate([piece.words for piece in pieces])
        columns = words.shape[1] - packing.piece_fields(size).size
        self.passes[size, columns, kind, len(pieces)] += 1
        given, static = self._with_fresh(words)
        static |= {"size": size, "kind": kind}
        options = xla_options.of_prefill(self.layout)
        key = ("prefill", *words.shape, size, kind)
        call = Call(key, programs.prefill, (given,), static, options=options)
        done = self.run(call, [piece.slot for piece in pieces])
        done.add_done_callback(lambda done: _pass_on(done, [piece.boundary for piece in pieces]))

    def begin(self, slot: int, boundary: Any = None) -> None:
        """Let a slot decode whose prefix needs no computing.

        Args:
            boundary: The row before its window, from `prefill` of the same prefix.
        """
        if boundary is None and slot in self._admitted and not self.programs.strategy.absorbs:
            self._admitted[slot][self.programs.request_fields.at["decodes"]] = True
            return
        if boundary is None:
            boundary = np.zeros((self.programs.kept,), self.programs.spec.dtype)
            if self._home is not None:  # where `prefill` leaves one
                boundary = jax.device_put(boundary, self._home)
        args = np.int32(slot), boundary
        self.run(Call(("begin",), programs.begin, args), [slot])

    def restore(
        self, slot: int, placement: Placement, saved: np.ndarray, tokens: Sequence[int]
    ) -> None:
        """Put a fetched slot back, with its output so far; its pages hold its prefix again."""
        output = np.zeros((self.programs.max_output,), np.int32)
        output[: len(tokens)] = tokens
        args = self._packed(slot, placement), saved[None, : self.slot_layout.size], output
        self.run(Call(("restore",), programs.restore, args), [slot])

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every pool."""
        args = np.int32(source), np.int32(target)
        self.run(Call(("copy",), programs.copy_page, args))

    # --- decoding -----------------------------------------------------------------------------

    def decode(
        self, rows: np.ndarray, num_active: int, pages: np.ndarray, num_steps: int, early: bool
    ) -> Future:
        """Dispatch steps of some slots.

        Args:
            rows: Distinct slots, one of the slot buckets wide; the first `num_active` decode.
            pages: Their rows of the page table, one of the page buckets wide.
            num_steps: Steps at most.
            early: Stop as soon as one of them ends.

        Returns:
            The two arrays of `programs.decode`, which are still being computed.
        """
        if self._pieces:
            self.flush()
        requests = packing.DECODE.pack(
            len(rows),
            slot=rows[:, None],
            num_active=num_active,
            num_steps=num_steps,
            early=early,
            pages=pages,
        )
        given, static = self._with_fresh(requests)
        active = rows[:num_active].tolist()
        bound = np.zeros((len(rows),), bool)
        bound[:num_active] = [row in self._bound for row in active]
        key, args = ("decode seen" if self.is_profiled else "decode", *pages.shape), (given,)
        sizes = self._bucket if bound.any() else None
        if sizes is not None:
            key, args = ("decode with grammars", *pages.shape, sizes), (given, bound)
        how = sizes is not None, self.programs.model.split is not None, self.is_profiled
        options = xla_options.of_decode(self.layout, len(rows), *how)
        call = Call(key, programs.decode, args, static, sizes, options)
        return self.run(call, active)


class _Recorder(Dispatch):
    """Keeps the calls."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.found: list[Call] = []

    def run(self, call: Call, slots: Sequence[int] = ()) -> Future:
        """Keep a call; its result never comes."""
        del slots
        self.found.append(call)
        return Future()


def _pass_on(done: Future, others: Sequence[Future]) -> None:
    """Copy the result or the exception of a future to others."""
    error = done.exception()
    for other in others:
        if error is not None:
            other.set_exception(error)
        else:
            other.set_result(done.result())
