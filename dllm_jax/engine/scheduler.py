"""Who gets a slot and pages, who gives way, and what of which prefix is computed next.

First come first served: a sample's rank is (priority, arrival), and the worst-ranked one gives its
slot and pages up when the pool is short. Plain Python over ints, no JAX: nothing here dispatches
or knows about time.
"""

import bisect
import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from dllm_jax.engine.layout import Facts, Placement
from dllm_jax.engine.pages import Chain, OutOfPages, PagePool, digest

WAITING, PREFILL, DECODE, DONE = range(4)


@dataclasses.dataclass(eq=False, slots=True)
class Sample:
    """One text being made: what the host knows of it.

    Attributes:
        owner: The request it belongs to; opaque here.
        rank: (priority, arrival): lower goes first, no two are equal.
        placement: Its slot when fresh.
        leader: The first sample of its request, whose prompt pages it waits for and shares.
        capacity: Positions it can ever write.
        epoch: Counts its stays in a slot: what a dispatch of an earlier stay says is void.
        done, goal: Prefix positions computed (or found), and to compute, in this stay.
        prefix_len: Tokens of the prompt that prefill stores.
        start: Tokens in the cache at its last harvest; on a fresh sample what prefill will store.
        tokens: Settled output as harvested.
        saved: The last harvest and its row there; None: it starts over.
        in_flight: Decode steps dispatched and not harvested.
        covered: Positions its pages hold.
        publishes: Others may share its pages.
        is_sound: A harvest of this stay has found what it computed finite.
        num_published: Pages that were found or published in this stay.
        failed_at: Forwards it had made when the device last failed, -1 if it never did.
        watched: Somebody wants to hear of each move: a stream, a stop string.
        drafted: How its drafts fared, once it has ended (`requests.DraftMetrics`).
    """

    owner: Any
    index: int
    rank: tuple[int, int]
    prompt: list[int]
    placement: Placement
    capacity: int
    leader: "Sample | None" = None
    stage: int = WAITING
    slot: int = -1
    epoch: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    covered: int = 0
    done: int = 0
    goal: int = 0
    prefix_len: int = 0
    start: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    saved: tuple[Any, int] | None = None
    in_flight: int = 0
    chain: Chain | None = None
    publishes: bool = True
    is_sound: bool = False
    num_published: int = 0
    prompt_published: bool = False
    boundary: Any = None
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    nfe: int = 0
    prefill_nfe: int = 0
    cached_tokens: int | None = None
    num_preemptions: int = 0
    failed_at: int = -1
    first_s: float | None = None
    end_s: float | None = None
    watched: bool = False
    stream: Any = None
    finish_reason: str | None = None
    drafted: Any = None

    def text_ids(self, first: int, end: int) -> list[int]:
        """Ids of positions [first, end) of prompt and settled output."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[first:end]
        return self.prompt[first:end] + self.tokens[max(first - split, 0) : max(end - split, 0)]


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One prefill dispatch: positions [first, end) are stored, [first, live_end) computed."""

    kind: Literal["blocks", "causal", "full"]
    first: int
    end: int
    live_end: int
    size: int


class Scheduler:
    """The queue, the slots and the pages.

    Attributes:
        pool: The page books.
        slots: Which sample is in each slot.
        live: Samples in slots, best rank first.
        table: Pages of each slot in order of position, -1 behind them.
    """

    def __init__(self, facts: Facts):
        self.facts = facts
        self.pool = PagePool(facts.num_pages)
        self.slots: list[Sample | None] = [None] * facts.num_slots
        self.live: list[Sample] = []
        self.table = np.full((facts.num_slots, facts.page_buckets[-1]), -1, np.int32)
        self._free_slots = list(range(facts.num_slots - 1, -1, -1))
        self._unit_pages = facts.unit // facts.page_size
        # The bucket for each number of pages.
        self._buckets = [
            next(size for size in facts.page_buckets if size >= count)
            for count in range(facts.page_buckets[-1] + 1)
        ]
        self._waiting: list[tuple[tuple[int, int], Sample]] = []
        self.num_preemptions = 0

    # --- the queue ----------------------------------------------------------------------------

    def limits(self, prompt_len: int, text_len: int, suffix_len: int) -> tuple[int, int]:
        """First position that may not be emitted, and positions ever written.

        The pool bounds both: a text alone in it ends with "length" where the pool does.

        Raises:
            ValueError: The request can never run.
        """
        facts = self.facts
        beyond = facts.block_size + suffix_len
        if prompt_len >= facts.max_model_len:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; the engine takes {facts.max_model_len}, "
                "prompt and text together: shorten it or raise max_model_len"
            )
        total = prompt_len + text_len + suffix_len
        if facts.prompt_mode == "in_window" and total > facts.window:
            raise ValueError(
                f"prompt, text and suffix are {prompt_len} + {text_len} + {suffix_len} tokens, the "
                f"window has {facts.window}; use buffer_size={-(-total // facts.block_size)} or "
                "lower max_tokens"
            )
        room = facts.num_pages * facts.page_size - beyond
        limit = min(prompt_len + text_len, facts.max_model_len, room)
        if limit <= prompt_len:
            raise ValueError(
                f"the prompt has {prompt_len} tokens and needs "
                f"{facts.pages_for(prompt_len + 1 + beyond)} pages of {facts.page_size}; the pool "
                f"has {facts.num_pages}: raise num_pages or shorten the prompt"
            )
        in_table = facts.page_buckets[-1] * facts.page_size  # the device drops what lies behind it
        return limit, min(limit + beyond, in_table)

    def add(self, sample: Sample) -> None:
        """Queue a sample."""
        sample.start = sample.prefix_len = self.facts.prefill_len(len(sample.prompt))
        heapq.heappush(self._waiting, (sample.rank, sample))

    @property
    def num_waiting(self) -> int:
        """Samples without a slot."""
        return sum(sample.stage == WAITING for _, sample in self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether some sample has no slot."""
        while self._waiting and self._waiting[0][1].stage != WAITING:
            heapq.heappop(self._waiting)  # ended while it waited
        return bool(self._waiting)

    def admit(self) -> list[Sample]:
        """Give slots and the pages of their prefixes to waiting samples, in order of rank.

        A sample that waits for the prompt pages of its request's first one lets others pass;
        one that does not fit does not.
        """
        placed, passed = [], []
        while self._free_slots and self.has_waiting:
            entry = heapq.heappop(self._waiting)
            sample = entry[1]
            if self._waits_for_leader(sample):
                passed.append(entry)
            elif self._place(sample):
                placed.append(sample)
            else:
                passed.append(entry)
                break
        for entry in passed:
            heapq.heappush(self._waiting, entry)
        return placed

    def _waits_for_leader(self, sample: Sample) -> bool:
        leader = sample.leader
        return leader is not None and leader.stage != DONE and not leader.prompt_published

    def _place(self, sample: Sample) -> bool:
        facts = self.facts
        hits = self._hits(sample)
        # A prompt shared as a whole may end within a page, which its text then needs for itself.
        copied = bool(hits) and facts.is_full and sample.prefix_len % facts.page_size > 0
        if not self._fits(sample, hits, copied):
            # The copied page counts twice: where that is too much, the prompt is computed again.
            if not (copied and self._fits(sample, [], False)):
                return False
            hits, copied = [], False
        self._take_prefix(sample, hits, copied)
        self._enter(sample)
        return True

    def _fits(self, sample: Sample, hits: list[int], copied: bool) -> bool:
        pool, pages_for = self.pool, self.facts.pages_for
        first_steps = min(sample.start + self.facts.window, sample.capacity)
        wanted = pages_for(max(sample.start, first_steps)) - len(hits) + copied
        idle = sum(pool.owners(page) == 0 for page in hits)
        # A page for each neighbour to grow into, or it would have to give way at once.
        return wanted + idle + len(self.live) <= pool.num_available

    def _take_prefix(self, sample: Sample, hits: list[int], copied: bool) -> None:
        facts, pool = self.facts, self.pool
        for page in hits:
            pool.share(page)
        shared = hits[:-1] if copied else hits
        sample.pages = shared + pool.take(facts.pages_for(sample.start) - len(shared))
        sample.copies = []
        if copied:
            sample.copies = [(hits[-1], sample.pages[len(shared)])]
            # Device order: the copy is dispatched before anything that could overwrite its source.
            pool.release(hits[-1:])
        sample.done, sample.goal = len(shared) * facts.page_size, sample.start
        if facts.is_full and hits:
            sample.done = sample.prefix_len
            sample.boundary = pool.payload(hits[-1])
        if sample.cached_tokens is None:
            sample.cached_tokens = min(sample.done, len(sample.prompt))

    def _enter(self, sample: Sample) -> None:
        sample.stage = PREFILL
        sample.slot = self._free_slots.pop()
        sample.epoch += 1
        sample.in_flight = sample.num_published = 0
        sample.is_sound = False
        sample.covered = len(sample.pages) * self.facts.page_size
        self.slots[sample.slot] = sample
        bisect.insort(self.live, sample, key=_rank)
        row = self.table[sample.slot]
        row[:] = -1
        row[: len(sample.pages)] = sample.pages

    # --- the prefix cache -----------------------------------------------------------------------

    def _salt(self, sample: Sample) -> bytes:
        """Without prefix caching only the samples of one request share."""
        if self.facts.prefix_caching:
            return self.facts.salt
        leader = sample.leader or sample
        return b"%s|%d" % (self.facts.salt, leader.rank[1])

    def _chain(self, sample: Sample) -> Chain:
        if sample.chain is None:
            sample.chain = Chain(self._salt(sample), self.facts.unit, self.facts.page_size)
        return sample.chain

    def _prompt_keys(self, sample: Sample) -> list[Any]:
        """Keys of a prompt that is reusable only as a whole; the last page may be partly filled."""
        count = self.facts.pages_for(sample.prefix_len)
        whole = digest(b"whole|" + self._salt(sample), sample.prompt)
        return [(whole, page) for page in range(count)]

    def _hits(self, sample: Sample) -> list[int]:
        """Pages of the sample's prefix that are in the pool."""
        facts, goal = self.facts, sample.start
        if goal == 0 or not (facts.prefix_caching or sample.leader or sample.saved):
            return []
        if facts.is_full:
            keys = self._prompt_keys(sample)
            hits = self.pool.find(keys)
            return hits if len(hits) == len(keys) else []
        # A harvested slot brings its boundary row along: all of its prefix may be found.
        reusable = goal if sample.saved else goal - facts.compute_at_least
        chain = self._chain(sample)
        if chain.length + facts.unit <= reusable:
            chain.extend(sample.text_ids(chain.length, reusable))
        hits = self.pool.find(chain.keys[: max(reusable, 0) // facts.unit * self._unit_pages])
        # Eviction takes single pages: what is left of a unit may end within a block.
        return hits[: len(hits) // self._unit_pages * self._unit_pages]

    def publish(self, sample: Sample) -> None:
        """Make the pages known that are full, final and written.

        Call it after the first harvest of a stay, for those who wait for the prompt; what follows
        the prompt is published when the sample leaves its slot.
        """
        if not sample.publishes:
            return
        if self.facts.is_full:
            self._publish_prompt(sample)
        else:
            # A text that ended may have committed more than it said: a stop id, cells past a limit.
            end = min(sample.start, len(sample.prompt) + len(sample.tokens))
            if self.facts.soft_commits or self.facts.prompt_mode == "in_window":
                end = min(end, sample.prefix_len)
            self._publish_up_to(sample, end)
        sample.prompt_published = True

    def _publish_prompt(self, sample: Sample) -> None:
        if sample.num_published:
            return
        keys = self._prompt_keys(sample)
        for i, key in enumerate(keys, 1):
            self.pool.publish(key, sample.pages[i - 1], sample.boundary if i == len(keys) else None)
        sample.num_published = len(keys)

    def _publish_up_to(self, sample: Sample, end: int) -> None:
        chain = self._chain(sample)
        if chain.length + self.facts.unit <= end:
            chain.extend(sample.text_ids(chain.length, end))
        count = end // self.facts.unit * self._unit_pages
        for i in range(sample.num_published, count):
            self.pool.publish(chain.keys[i], sample.pages[i])
        sample.num_published = count

    # --- prefill --------------------------------------------------------------------------------

    def next_pass(self, sample: Sample, most: int) -> Pass | None:
        """The next piece of a sample's prefix, at most `most` tokens unless it cannot be split."""
        facts = self.facts
        prompt_len = len(sample.prompt)
        if facts.is_full and sample.done < sample.prefix_len:
            size = next(size for size in facts.prefill_buckets if size >= prompt_len)
            return Pass("full", 0, sample.prefix_len, prompt_len, size)
        left = sample.goal - sample.done
        if left <= 0:
            return None
        buckets = facts.prefill_buckets
        size = buckets[max(bisect.bisect(buckets, most) - 1, 0)]
        if left < size:
            size = buckets[bisect.bisect_left(buckets, left)]
        end = sample.done + min(size, left)
        kind = "causal" if facts.prompt_mode == "whole_causal" else "blocks"
        return Pass(kind, sample.done, end, end, size)

    # --- growing and giving way -----------------------------------------------------------------

    def reach(self, sample: Sample, steps: int) -> int:
        """Positions that must be covered before `steps` more steps are dispatched.

        A step commits and writes a window at most. Chunks of several steps end before they emit
        more than `Facts.most_new`; what is emitted may be a window ahead of what is committed.
        """
        return min(sample.start + self._ahead(sample.in_flight, steps), sample.capacity)

    def _ahead(self, in_flight: int, steps: int) -> int:
        facts = self.facts
        chunks = 2 if in_flight else 1
        emitted = chunks * max(facts.most_new, facts.window) + 2 * facts.window
        return min((in_flight + steps) * facts.window, emitted)

    def grow(self, samples: Sequence[Sample], steps: int) -> int:
        """Cover what the dispatched steps and `steps` more can write; the worst-ranked give way.

        Args:
            samples: In order of rank.

        Returns:
            The steps covered: fewer, by halves, where the pool is short for more. Samples that
            lost their slot are WAITING.
        """
        facts, pool = self.facts, self.pool
        ahead = {n: self._ahead(n, steps) for n in {s.in_flight for s in samples}}
        short = [
            s
            for s in samples
            if s.start + ahead[s.in_flight] > s.covered and s.covered < s.capacity
        ]
        wanted = [(s, facts.pages_for(self.reach(s, steps)) - len(s.pages)) for s in short]
        if sum(max(count, 0) for _, count in wanted) > pool.num_available and steps > 1:
            return self.grow(samples, steps // 2)
        for sample, count in wanted:
            while count > 0 and sample.stage == DECODE:
                try:
                    pages = pool.take(count)
                except OutOfPages:
                    self.preempt(self.live[-1])
                    continue
                self.table[sample.slot, len(sample.pages) : len(sample.pages) + count] = pages
                sample.pages += pages
                sample.covered = len(sample.pages) * facts.page_size
                break
        return steps

    def preempt(self, sample: Sample) -> None:
        """Take slot and pages; the sample goes on from its last harvest once it is admitted.

        One whose slot does not say all of it (`Facts.starts_over`) starts over.
        """
        self._vacate(sample)
        sample.stage = WAITING
        sample.num_preemptions += 1
        self.num_preemptions += 1
        if self.facts.starts_over:
            sample.saved = None
        if sample.saved is None:
            sample.start = sample.prefix_len
        heapq.heappush(self._waiting, (sample.rank, sample))

    def leave(self, sample: Sample) -> None:
        """A sample has ended, wherever it was."""
        if sample.slot >= 0:
            self._vacate(sample)
        sample.stage = DONE

    def _vacate(self, sample: Sample) -> None:
        if sample.is_sound:
            self.publish(sample)
        self.pool.release(sample.pages)
        sample.pages, sample.covered = [], 0
        sample.boundary = None
        self.slots[sample.slot] = None
        self._free_slots.append(sample.slot)
        self.live.remove(sample)
        sample.slot, sample.in_flight = -1, 0
        sample.epoch += 1

    def lose_everything(self) -> list[Sample]:
        """The pools are gone: every page is free, every live sample waits again."""
        lost = list(self.live)
        for sample in lost:
            self.preempt(sample)
        self.pool.reset()
        return lost

    # --- decode groups --------------------------------------------------------------------------

    def slot_bucket(self, count: int) -> int:
        """The smallest compiled bucket that holds so many slots."""
        return next(size for size in self.facts.slot_buckets if size >= count)

    def page_bucket(self, positions: int) -> int:
        """The smallest compiled page table that covers so many positions."""
        return self._buckets[self.facts.pages_for(positions)]

    def columns(self, samples: Sequence[Sample]) -> list[int]:
        """For each sample the smallest compiled page table that holds its pages."""
        buckets = self._buckets
        return [buckets[len(sample.pages)] for sample in samples]

    def rows(self, samples: Iterable[Sample], bucket: int) -> list[int]:
        """Slots of the samples, filled up to the bucket with others, all distinct."""
        slots = [sample.slot for sample in samples]
        taken = set(slots)
        others = (slot for slot in range(self.facts.num_slots) if slot not in taken)
        while len(slots) < bucket:
            slots.append(next(others))
        return slots


def _rank(sample: Sample) -> tuple[int, int]:
    return sample.rank
