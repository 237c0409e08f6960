"""The scheduler: slots, pages, preemption, and the next piece of each prefix.

Requests are served by priority; within one, clients take turns, and a client's own requests go in
order of arrival. When the pool is short, the scheduler preempts the worst by rank, (priority,
arrival).
"""

import bisect
import heapq
import operator
from collections import abc
from collections.abc import Callable, Iterable

import numpy as np

from dllm_jax.engine.layout import EngineLayout
from dllm_jax.engine.pages import PagePool, Prefixes
from dllm_jax.engine.sequence import DECODE, DONE, PREFILL, WAITING, Pass, Sequence

_FEW = 64  # turns that are kept anyway


class Scheduler:
    """The queue, the slots and the pages.

    Attributes:
        pool: Ownership of the pages.
        prefixes: Which of them hold what.
        live: Sequences in slots, best rank first.
        table: Pages of each slot in order of position, then -1.
    """

    def __init__(self, layout: EngineLayout):
        self.layout = layout
        self.pool = PagePool(layout.num_pages)
        self.prefixes = Prefixes(layout, self.pool)
        self.live: list[Sequence] = []
        self.table = np.full((layout.num_slots, layout.page_buckets[-1]), -1, np.int32)
        self._free_slots = list(range(layout.num_slots - 1, -1, -1))
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []
        self._rounds: dict[int, int] = {}  # by priority: the last one that got a slot
        self._turns: dict[tuple[int, str], int] = {}  # the last of a client in the queue
        self._left_queue = False
        self.num_preemptions = 0

    # --- the queue ----------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.start = sequence.prefix_len
        if self._left_queue or len(self._turns) > 2 * len(self._waiting) + _FEW:
            self._count_turns()
        place = priority, _ = sequence.rank[0], sequence.client
        sequence.turn = max(self._rounds.get(priority, 0), self._turns.get(place, -1) + 1)
        self._turns[place] = sequence.turn
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        priority, arrival = sequence.rank
        heapq.heappush(self._waiting, ((priority, sequence.turn, arrival), sequence))

    def _count_turns(self) -> None:
        """Take the turns of clients from what waits: texts that ended there take none."""
        waiting = [sequence for _, sequence in self._waiting if sequence.stage == WAITING]
        self._turns, self._left_queue = {}, False
        for one in waiting:
            place = one.rank[0], one.client
            self._turns[place] = max(one.turn, self._turns.get(place, 0))
        used = {one.rank[0] for one in (*waiting, *self.live)}
        self._rounds = {key: turn for key, turn in self._rounds.items() if key in used}

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return sum(sequence.stage == WAITING for _, sequence in self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether some sequence has no slot."""
        while self._waiting and self._waiting[0][1].stage != WAITING:
            heapq.heappop(self._waiting)  # ended while it waited
        return bool(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots)

    def decoding(self) -> list[Sequence]:
        """Sequences in decode, best rank first."""
        return [sequence for sequence in self.live if sequence.stage == DECODE]

    def admit(self, is_ready: Callable[[Sequence], bool] = lambda _: True) -> list[Sequence]:
        """Give waiting sequences slots and the pages of their prefixes, in order of rank.

        Later sequences may pass one that waits for its leader's prompt pages or is not ready, but
        not one that does not fit.
        """
        placed, passed = [], []
        while self._free_slots and self.has_waiting:
            entry = heapq.heappop(self._waiting)
            sequence = entry[1]
            if self._waits_for_leader(sequence) or not is_ready(sequence):
                passed.append(entry)
            elif self._place(sequence):
                placed.append(sequence)
            else:
                passed.append(entry)
                break
        for entry in passed:
            heapq.heappush(self._waiting, entry)
        return placed

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        leader = sequence.leader
        return leader is not None and leader.stage != DONE and not leader.prompt_published

    def _place(self, sequence: Sequence) -> bool:
        layout = self.layout
        hits = self.prefixes.hits(sequence)
        # A prompt shared as a whole may end within a page, which the text then writes: copy it.
        copied = bool(hits) and layout.is_full and sequence.prefix_len % layout.page_size > 0
        if not self._fits(sequence, hits, copied):
            # Source and copy both count: if they do not fit, compute the prompt again.
            if not (copied and self._fits(sequence, [], False)):
                return False
            hits, copied = [], False
        self._take_prefix(sequence, hits, copied)
        self._enter(sequence)
        return True

    def _fits(self, sequence: Sequence, hits: list[int], copied: bool) -> bool:
        pool, pages_for = self.pool, self.layout.pages_for
        first_steps = min(sequence.start + self.layout.window, sequence.capacity)
        wanted = pages_for(max(sequence.start, first_steps)) - len(hits) + copied
        idle = sum(pool.owners(page) == 0 for page in hits)
        # Leave each neighbour a page to grow into, or growth would preempt at once.
        return wanted + idle + len(self.live) <= pool.num_available

    def _take_prefix(self, sequence: Sequence, hits: list[int], copied: bool) -> None:
        layout, pool = self.layout, self.pool
        for page in hits:
            pool.share(page)
        shared = hits[:-1] if copied else hits
        sequence.pages = shared + pool.take(layout.pages_for(sequence.start) - len(shared))
        sequence.copies = []
        if copied:
            sequence.copies = [(hits[-1], sequence.pages[len(shared)])]
            # The copy is dispatched before anything that could overwrite its source.
            pool.release(hits[-1:])
        sequence.done = len(shared) * layout.page_size
        if layout.is_full and hits:
            sequence.done = sequence.prefix_len
            sequence.boundary = pool.payload(hits[-1])
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.done, len(sequence.prompt))

    def _enter(self, sequence: Sequence) -> None:
        sequence.stage = PREFILL
        sequence.slot = self._free_slots.pop()
        sequence.epoch += 1
        sequence.in_flight = sequence.num_published = 0
        sequence.is_sound = False
        priority = sequence.rank[0]
        self._rounds[priority] = max(sequence.turn, self._rounds.get(priority, 0))
        bisect.insort(self.live, sequence, key=operator.attrgetter("rank"))
        row = self.table[sequence.slot]
        row[:] = -1
        row[: len(sequence.pages)] = sequence.pages

    # --- prefill --------------------------------------------------------------------------------

    def next_pass(self, sequence: Sequence, most: int) -> Pass | None:
        """The next piece of a prefix: at most `most` tokens, unless it cannot be split."""
        layout, buckets = self.layout, self.layout.prefill_buckets
        prompt_len, left = len(sequence.prompt), sequence.start - sequence.done
        if layout.is_full and sequence.done < sequence.prefix_len:
            size = buckets[bisect.bisect_left(buckets, prompt_len)]
            return Pass("full", 0, sequence.prefix_len, prompt_len, size)
        if left <= 0:
            return None
        size = buckets[max(bisect.bisect(buckets, most) - 1, 0)]
        if left < size:
            size = buckets[bisect.bisect_left(buckets, left)]
        end = sequence.done + min(size, left)
        kind = "causal" if layout.is_token_causal else "blocks"
        return Pass(kind, sequence.done, end, end, size)

    # --- growth and preemption --------------------------------------------------------------------

    def ahead(self, in_flight: int, steps: int) -> int:
        """Positions after `Sequence.start` that steps in flight and `steps` more can write.

        A step commits and writes a window at most. A chunk of several steps emits at most
        `EngineLayout.most_new` tokens; emitted tokens may be a window ahead of committed ones.
        """
        layout = self.layout
        chunks = 2 if in_flight else 1
        emitted = chunks * max(layout.most_new, layout.window) + 2 * layout.window
        return min((in_flight + steps) * layout.window, emitted)

    def grow(self, sequences: abc.Sequence[Sequence], steps: int) -> int:
        """Cover what the steps in flight and `steps` more can write; preempt the worst-ranked.

        Args:
            sequences: In order of rank.

        Returns:
            The steps covered: halved until the pool suffices. Preempted sequences are WAITING.
        """
        pool, page_size = self.pool, self.layout.page_size
        ahead = {n: self.ahead(n, steps) for n in {s.in_flight for s in sequences}}
        wanted: list[tuple[Sequence, int]] = []
        for sequence in sequences:
            end = sequence.start + ahead[sequence.in_flight]
            if end > sequence.capacity:
                end = sequence.capacity
            if end > len(sequence.pages) * page_size:
                wanted.append((sequence, self.layout.pages_for(end) - len(sequence.pages)))
        if wanted and steps > 1 and sum(count for _, count in wanted) > pool.num_available:
            return self.grow(sequences, steps // 2)
        for sequence, count in wanted:
            while sequence.stage == DECODE and count > pool.num_available:
                self.preempt(self.live[-1])
            if sequence.stage == DECODE:
                held = len(sequence.pages)
                sequence.pages += pool.take(count)
                self.table[sequence.slot, held : held + count] = sequence.pages[held:]
        return steps

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and pages; once admitted again, the sequence resumes from its last fetch.

        With `EngineLayout.starts_over`, or where that fetch is lost, it starts over.
        """
        self._vacate(sequence)
        sequence.stage = WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if self.layout.starts_over or not (sequence.saved and sequence.saved[0].hold()):
            sequence.saved, sequence.start = None, sequence.prefix_len
        self._wait(sequence)

    def leave(self, sequence: Sequence) -> None:
        """End a sequence, whatever its stage."""
        if sequence.slot >= 0:
            self._vacate(sequence)
        self._left_queue |= sequence.stage == WAITING
        sequence.stage = DONE

    def _vacate(self, sequence: Sequence) -> None:
        if sequence.is_sound:
            self.prefixes.publish(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.boundary = None
        self._free_slots.append(sequence.slot)
        self.live.remove(sequence)
        sequence.slot, sequence.in_flight = -1, 0
        sequence.epoch += 1

    def start_over(self, sequences: Iterable[Sequence]) -> None:
        """Empty slots, queue and pool, whatever their state; the sequences wait, not yet begun."""
        self.pool.reset()
        self._free_slots = list(range(self.layout.num_slots - 1, -1, -1))
        self.live, self._waiting, self._rounds, self._turns = [], [], {}, {}
        for sequence in sequences:
            sequence.stage, sequence.slot = WAITING, -1
            sequence.epoch += 1
            sequence.pages, sequence.in_flight = [], 0
            sequence.saved = sequence.boundary = sequence.chain = None
            sequence.prompt_published, sequence.failed_at = False, -1
            self.add(sequence)

    def lose_everything(self) -> None:
        """Free every page and queue every live sequence again: the pools are gone."""
        for sequence in list(self.live):
            self.preempt(sequence)
        self.pool.reset()

    # --- decode groups --------------------------------------------------------------------------

    def slot_bucket(self, count: int) -> int:
        """The smallest compiled bucket of at least `count` slots."""
        buckets = self.layout.slot_buckets
        return buckets[bisect.bisect_left(buckets, count)]

    def page_bucket(self, positions: int) -> int:
        """The smallest compiled page table that covers `positions`."""
        buckets = self.layout.page_buckets
        return buckets[bisect.bisect_left(buckets, self.layout.pages_for(positions))]

    def columns(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """For each sequence the smallest compiled page table that holds its pages."""
        buckets = self.layout.page_buckets
        return [buckets[bisect.bisect_left(buckets, len(one.pages))] for one in sequences]

    def rows(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """Slots of the sequences, padded to their bucket with distinct other slots."""
        slots = [sequence.slot for sequence in sequences]
        taken = set(slots)
        others = [slot for slot in range(self.layout.num_slots) if slot not in taken]
        return (slots + others)[: self.slot_bucket(len(slots))]
