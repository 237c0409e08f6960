"""The scheduler's plans, rule by rule: admission, sharing, growth, preemption.

Proves the rules of `scheduler`, `rounds` and `active` one by one on pools of a few pages, page
and block sizes that do not divide each other among them. test_engine_machine.py proves that they
work together. `host` is the package's own modules; tests/mutants hands broken copies in.
"""

import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.oracles.engine_world import HOST
from tests.oracles.fake_device import Cost


@pytest.fixture
def host() -> ModuleType:
    return HOST


def make_layout(host: ModuleType, **changed: Any) -> Any:
    sizes = {
        "num_slots": 3,
        "num_pages": 12,
        "page_size": 4,
        "max_model_len": 40,
        "max_steps_per_chunk": 4,
        "block_size": 4,
        "window": 8,
        "salt": b"model",
        "vocab_size": 100,
        "stop_token_ids": (1,),
        "knobs": {"accept_threshold": (0.0, 1.0, False, None)},
        "knob_values": {"accept_threshold": 0.9},
        "slot_buckets": (1, 3),
        "page_buckets": (2, 6, 11),
        "prefill_buckets": (4, 8, 16),
    }
    return host.layout.EngineLayout(**{**sizes, **changed})


class Books:
    """A scheduler and sequences for it, made as the engine makes them."""

    def __init__(self, host: ModuleType, **changed: Any):
        self.host = host
        self.scheduler = host.scheduler.Scheduler(make_layout(host, **changed))
        self.pool = self.scheduler.pool
        self.number = 0

    def accept(self, prompt: Any, **wishes: Any) -> Any:
        own = ("priority", "client", "denoise", "suffix_token_ids", "cache_salt")
        fields = {name: wishes.pop(name) for name in own if name in wishes}
        host = self.host
        params = host.requests.SamplingParams(**{"max_tokens": 16, **wishes})
        request = host.requests.Request(prompt_token_ids=list(prompt), params=params, **fields)
        live = host.active.accept(request, "name", self.number, 0.0, self.scheduler.layout, None, 9)
        self.number += params.n
        return live

    def add(self, prompt: Any, **wishes: Any) -> Any:
        """Queue a request; its first sequence."""
        live = self.accept(prompt, **wishes)
        for sequence in live.sequences:
            self.scheduler.add(sequence)
        return live.sequences[0]

    def admit(self) -> list[Any]:
        """Admit who can be; they are as after their prefill."""
        placed = self.scheduler.admit()
        for sequence in placed:
            sequence.done, sequence.stage = sequence.start, self.host.scheduler.DECODE
        return placed

    def run(self, prompt: Any, text: Any = (), **wishes: Any) -> Any:
        """A sequence that was admitted, computed and has settled some text, all committed."""
        sequence = self.add(prompt, **wishes)
        assert sequence in self.admit()
        self.settle(sequence, text)
        return sequence

    def settle(self, sequence: Any, text: Any) -> None:
        """As fetches say: tokens, their blocks committed."""
        if not sequence.is_sound:
            sequence.is_sound = True
            self.scheduler.prefixes.publish(sequence)
        if text:
            self.scheduler.grow([sequence], 4)
        sequence.tokens += list(text)
        S = self.scheduler.layout.block_size
        ids = len(sequence.prompt) + len(sequence.tokens)
        sequence.start = max(sequence.start, ids // S * S if self.scheduler.layout.is_grid else ids)

    def check(self) -> None:
        self.pool.check([sequence.pages for sequence in self.scheduler.live])


# --- limits ---------------------------------------------------------------------------------------


def test_a_text_ends_at_its_tokens_the_model_or_the_pool(host: ModuleType) -> None:
    layout, small = make_layout(host), make_layout(host, num_pages=6)
    limits = host.active.limits
    assert limits(layout, 5, 7, ()) == (12, 16)  # and the rest of the last block is written
    assert limits(layout, 5, 99, ()) == (40, 44)
    assert limits(small, 5, 99, ()) == (20, 24)
    assert limits(small, 19, 99, ()) == (20, 24)


@pytest.mark.parametrize(
    ("prompt_len", "pages", "message"),
    [
        (40, 12, "the prompt has 40 tokens; the engine takes 40, prompt and text together"),
        (20, 6, r"needs 7 pages of 4; the pool has 6: raise num_pages"),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt_len: int, pages: int, message: str) -> None:
    layout = make_layout(HOST, num_pages=pages)
    with pytest.raises(ValueError, match=message):
        HOST.active.limits(layout, prompt_len, 8, ())
    assert HOST.active.limits(layout, prompt_len - 1, 8, ())


def test_a_window_holds_prompt_text_and_suffix(host: ModuleType) -> None:
    rules = {
        "is_grid": False,
        "in_window": True,
        "window": 16,
        "max_model_len": 16,
        "page_buckets": (2, 4),
    }
    layout, suffix = make_layout(host, **rules), (7, 7, 7)
    # Not 13 + 3 + a block: the table has 4 pages.
    assert host.active.limits(layout, 6, 7, suffix) == (13, 16)
    with pytest.raises(ValueError, match=r"6 \+ 8 \+ 3 tokens, the window has 16"):
        host.active.limits(layout, 6, 8, suffix)


def test_a_lone_text_that_fills_the_pool_gets_all_of_it(host: ModuleType) -> None:
    books = Books(host, num_pages=6)
    sequence = books.run(range(2, 19), max_tokens=99)
    assert sequence.placement.limit == 20
    for _ in range(3):
        assert books.scheduler.grow([sequence], 4) == 4
    assert (len(sequence.pages), sequence.num_preemptions) == (6, 0)


# --- the queue ------------------------------------------------------------------------------------


def test_priority_then_arrival_decide(host: ModuleType) -> None:
    books = Books(host, num_pages=30, num_slots=5, slot_buckets=(5,))
    sequences = [books.add([5] * 4, priority=priority) for priority in (0, 1, 0, -1)]
    assert books.admit() == [sequences[3], sequences[0], sequences[2], sequences[1]]
    assert books.scheduler.live == [sequences[3], sequences[0], sequences[2], sequences[1]]


def test_no_request_passes_one_that_does_not_fit(host: ModuleType) -> None:
    books = Books(host, num_pages=8)
    books.run([5] * 16)
    long, short = books.add([6] * 16), books.add([7] * 4)
    assert books.admit() == []
    assert [long.stage, short.stage] == [books.host.scheduler.WAITING] * 2
    assert books.scheduler.num_waiting == 2


def served(books: Books) -> list[str]:
    """Clients in the order in which their texts get a slot, each for a moment."""
    order = []
    while books.scheduler.has_waiting:
        for sequence in books.admit():
            order.append(sequence.client)
            books.scheduler.leave(sequence)
    return order


def test_a3_clients_of_one_priority_take_turns(host: ModuleType) -> None:
    books = Books(host)
    for _ in range(1000):
        books.add([5], client="hog")
    for _ in range(100):
        for sequence in books.admit():
            books.scheduler.leave(sequence)
    books.add([6], client="one")
    for client in ("two", "two", "three", *["many"] * 50):
        books.add([7], client=client)
    order = served(books)
    assert sorted(order[:5]) == ["hog", "many", "one", "three", "two"]
    assert sorted(order[5:8]) == ["hog", "many", "two"]
    assert order[8:48].count("hog") == order[8:48].count("many") == 20
    books.add([5], client="hog", priority=1)
    books.add([5], client="one", priority=2)
    books.add([5], client="two", priority=2)
    books.add([5], client="late", priority=1)
    assert served(books) == ["hog", "late", "one", "two"]


def test_a3_a_client_keeps_the_order_of_its_own(host: ModuleType) -> None:
    """Whatever other clients do, and however many of its own end in the queue."""
    rng = random.Random(3)
    books, order, waiting = Books(host), [], []
    for _ in range(400):
        client = rng.choice("aab")
        waiting.append(books.add([5], client=client, priority=rng.randrange(2)))
        if rng.random() < 0.3:
            gone = waiting.pop(rng.randrange(len(waiting)))
            books.scheduler.leave(gone)
        if rng.random() < 0.2:
            for sequence in books.admit():
                order.append(sequence)
                waiting.remove(sequence)
                books.scheduler.leave(sequence)
        assert len(books.scheduler._turns) <= 4
    for client in "ab":
        for priority in range(2):
            mine = [s.rank[1] for s in order if (s.client, s.rank[0]) == (client, priority)]
            assert mine == sorted(mine)


def test_a3_texts_that_end_in_the_queue_cost_no_turns(host: ModuleType) -> None:
    books = Books(host)
    first = [books.add([5], client="other") for _ in range(10)]
    for sequence in [books.add([5], client="mine") for _ in range(500)]:
        books.scheduler.leave(sequence)
    books.add([5], client="mine")
    assert served(books).index("mine") <= 1
    assert len(first) == 10
    for number in range(5000):
        books.add([5], client=str(number), priority=number)
        served(books)
    assert len(books.scheduler._turns) < 200
    assert len(books.scheduler._rounds) < 200


def test_a_sequence_that_is_not_ready_waits_and_others_pass_it(host: ModuleType) -> None:
    books = Books(host)
    first, second = books.add([5] * 4), books.add([6] * 4)
    asked: list[Any] = []
    placed = books.scheduler.admit(lambda sequence: asked.append(sequence) or sequence is second)
    assert (placed, asked) == ([second], [first, second])
    assert books.scheduler.num_waiting == 1
    assert books.admit() == [first]
    assert books.scheduler.live == [first, second]


def test_each_neighbour_keeps_a_page_to_grow_into(host: ModuleType) -> None:
    """Three pages for the prompt and two for the first window: seven with two neighbours."""
    for free, fits in ((6, False), (7, True)):
        books = Books(host, num_pages=12)
        for token in (5, 6):
            books.run([token], max_tokens=4)
        books.pool.take(books.pool.num_available - free)
        books.add([7] * 12)
        assert bool(books.admit()) == fits, free


def test_ended_requests_in_the_queue_are_skipped(host: ModuleType) -> None:
    books = Books(host)
    gone, there = books.add([5] * 4), books.add([6] * 4)
    books.scheduler.leave(gone)
    assert books.scheduler.num_waiting == 1
    assert books.admit() == [there]
    assert not books.scheduler.has_waiting


def test_sequences_of_a_request_wait_for_the_prompt_of_the_first(host: ModuleType) -> None:
    books = Books(host, num_pages=30, prefix_caching=False)
    first = books.add([5] * 8, n=2)
    other = books.add([5] * 8)
    assert books.admit() == [first, other]
    assert books.admit() == []
    books.settle(first, ())
    (second,) = books.admit()
    assert (second.leader, second.pages, second.done) == (first, first.pages[:2], 8)
    assert other.pages[0] != first.pages[0], "without prefix caching nobody else shares"
    books.check()


def test_without_the_cache_sequences_share_with_their_own_request_only(
    host: ModuleType,
) -> None:
    books = Books(host, num_pages=30, num_slots=5, slot_buckets=(5,), prefix_caching=False)
    for _ in range(2):
        first = books.add([5] * 8, n=2)
        books.admit()
        books.settle(first, ())
        (second,) = books.admit()
        assert second.pages == first.pages


def test_a_sequence_whose_first_one_failed_computes_the_prompt_itself(
    host: ModuleType,
) -> None:
    books = Books(host)
    first = books.add([5] * 8, n=2)
    books.admit()
    books.scheduler.leave(first)
    (second,) = books.scheduler.admit()
    assert (second.done, second.start) == (0, 8)


# --- the prefix cache -----------------------------------------------------------------------------


def test_a_common_prefix_is_shared_by_whole_pages(host: ModuleType) -> None:
    books = Books(host, num_pages=30)
    first = books.run([*range(2, 14), 50])
    second = books.run([*range(2, 12), 60, 61, 62])
    assert second.pages[:2] == first.pages[:2]
    assert not set(second.pages[2:]) & set(first.pages)
    assert second.cached_tokens == 8
    assert books.pool.owners(first.pages[0]) == 2
    books.check()


def test_prefixes_are_found_under_their_own_salt_alone(host: ModuleType) -> None:
    for is_full in (False, True):
        books = Books(host, num_pages=30, is_full=is_full)
        for salt, found in (("", 0), ("a", 0), ("b", 0), ("a", 12), ("", 12)):
            sequence = books.run(range(2, 15), cache_salt=salt)
            assert sequence.cached_tokens == found
            books.scheduler.leave(sequence)


def test_a_second_turn_finds_the_first_ones_text(host: ModuleType) -> None:
    books = Books(host, num_pages=30)
    first = books.run(range(2, 10), text=range(20, 30))
    assert first.start == 16
    pages = first.pages[:4]
    books.scheduler.leave(first)
    second = books.run([*range(2, 10), *range(20, 30), 70, 71])
    assert (second.pages[:4], second.cached_tokens) == (pages, 16)


def test_text_of_soft_commits_is_not_shared_but_the_prompt_is(host: ModuleType) -> None:
    books = Books(host, num_pages=30, soft_commits=True, starts_over=True)
    books.scheduler.leave(books.run(range(2, 10), text=range(20, 30)))
    second = books.run([*range(2, 10), *range(20, 30)])
    assert second.cached_tokens == 8


def test_nothing_is_known_before_a_fetch_says_it_is_sound(host: ModuleType) -> None:
    books = Books(host, num_pages=30)
    first = books.add(range(2, 14))
    books.admit()
    second = books.add(range(2, 14))
    books.admit()
    assert second.cached_tokens == 0
    for sequence in (first, second):
        books.scheduler.leave(sequence)
    assert books.pool._page_of == {}


def test_a_stop_id_in_the_cache_is_not_taken_for_text(host: ModuleType) -> None:
    """The block of a stop id is committed whole; what it holds was never said."""
    books = Books(host, num_pages=30)
    sequence = books.run(range(2, 10), text=range(20, 26))
    sequence.start = 16
    books.scheduler.leave(sequence)
    assert len(books.pool._page_of) == 3


def test_a_hit_leaves_something_to_compute_where_the_strategy_needs_it(
    host: ModuleType,
) -> None:
    for least, found in ((0, 12), (1, 8), (4, 8)):
        books = Books(host, num_pages=30, compute_at_least=least)
        books.run(range(2, 14))
        sequence = books.run(range(2, 14))
        assert (sequence.cached_tokens, sequence.start) == (found, 12), least


def test_pages_and_blocks_that_do_not_divide_each_other_are_shared_together(
    host: ModuleType,
) -> None:
    """Pages of 4, blocks of 6: 12 tokens are shared together or not at all."""
    rules = {"num_pages": 30, "block_size": 6, "window": 6, "prefill_buckets": (6, 12, 42)}
    books = Books(host, **rules)
    assert books.scheduler.layout.unit == 12
    first = books.run(range(2, 28))  # 24 of 26 in the cache
    second = books.run([*range(2, 22), 60, 61, 62, 63, 64, 65])
    assert (second.cached_tokens, second.pages[:3]) == (12, first.pages[:3])
    pages = first.pages[:6]
    for sequence in (first, second):
        books.scheduler.leave(sequence)
    taken = books.pool.take(30 - len(books.pool._page_of) + 2)  # evict two, the last ones first
    books.pool.release(taken)
    third = books.run(range(2, 28))
    assert third.cached_tokens == 12
    assert third.pages[:3] == pages[:3]


def test_a_prompt_that_sees_itself_whole_is_shared_as_a_whole_only(host: ModuleType) -> None:
    rules = {"is_grid": False, "is_full": True, "num_pages": 30, "prefill_buckets": (8, 40)}
    books = Books(host, **rules)
    first = books.add(range(2, 12))
    books.admit()
    first.boundary = "row"
    books.settle(first, ())
    longer = books.run(range(2, 13))
    assert longer.cached_tokens == 0
    same = books.add(range(2, 12))
    (same,) = books.scheduler.admit()
    assert (same.pages[:2], same.done, same.boundary) == (first.pages[:2], 10, "row")
    assert same.copies == [(first.pages[2], same.pages[2])]
    assert same.pages[2] != first.pages[2]
    assert books.pool.owners(first.pages[2]) == 1
    books.check()


def test_a_full_pool_admits_a_known_prompt_that_ends_within_a_page(host: ModuleType) -> None:
    """The page to copy counts twice; a pool that is full with it must not wait for ever."""
    rules = {"is_grid": False, "is_full": True, "num_pages": 5, "prefill_buckets": (16, 40)}
    books = Books(host, **rules)
    books.scheduler.leave(books.run(range(2, 17)))
    again = books.run(range(2, 17))
    assert (again.cached_tokens, len(again.pages)) == (0, 4)


def test_a_causal_prompt_is_shared_at_any_page(host: ModuleType) -> None:
    rules = {
        "is_grid": False,
        "is_token_causal": True,
        "compute_at_least": 1,
        "num_pages": 30,
        "window": 4,
    }
    books = Books(host, **rules)
    assert books.scheduler.layout.unit == 4
    books.run(range(2, 15))
    assert books.run(range(2, 15)).cached_tokens == 12
    assert books.run(range(2, 14)).cached_tokens == 8


# --- prefill --------------------------------------------------------------------------------------


def passes(books: Books, sequence: Any, most: int) -> list[tuple]:
    found = []
    while (piece := books.scheduler.next_pass(sequence, most)) is not None:
        found.append((piece.kind, piece.first, piece.end, piece.live_end, piece.size))
        sequence.done = piece.end
    return found


def test_a_prefix_is_computed_in_pieces_of_compiled_sizes(host: ModuleType) -> None:
    books = Books(host)
    books.add(range(2, 29))  # 24 of 27 are prefilled
    (sequence,) = books.scheduler.admit()
    assert passes(books, sequence, 16) == [("blocks", 0, 16, 16, 16), ("blocks", 16, 24, 24, 8)]
    sequence.done = 0
    assert passes(books, sequence, 15) == [("blocks", i, i + 8, i + 8, 8) for i in (0, 8, 16)]
    sequence.done = 20
    assert passes(books, sequence, 99) == [("blocks", 20, 24, 24, 4)]
    sequence.done = 0
    assert passes(books, sequence, 1)[0] == ("blocks", 0, 4, 4, 4)


def test_a_whole_prompt_is_one_pass_and_text_behind_it_is_blocks(host: ModuleType) -> None:
    books = Books(host, is_full=True, prefill_buckets=(8, 40))
    sequence = books.run(range(2, 13), text=range(20, 30))  # 8 of 11 are stored, all are computed
    sequence.saved = ("fetch", 0)
    books.pool.reset()
    sequence.done = 0
    assert passes(books, sequence, 4) == [
        ("full", 0, 8, 11, 40),
        ("blocks", 8, 16, 16, 8),
        ("blocks", 16, 20, 20, 8),
    ]


def test_a_budget_is_spent_best_first_and_always_gets_on(host: ModuleType) -> None:
    books = Books(host, max_num_batched_tokens=20)
    books.add(range(2, 40))
    (sequence,) = books.scheduler.admit()
    budget = host.rounds.Budget(books.scheduler, [], 1, None)
    piece = budget.take(sequence, forced=True)
    assert piece.size == 16
    sequence.done = piece.end
    piece = budget.take(sequence, forced=False)
    assert piece.size == 4
    sequence.done = piece.end
    assert budget.take(sequence, forced=False) is None
    assert budget.take(sequence, forced=True).size == 4


def test_a_budget_beside_decoding_is_what_its_steps_take(host: ModuleType) -> None:
    books = Books(host, num_pages=30)
    decoding = [books.run([5] * 4, max_tokens=8)]
    books.add(range(2, 36))
    (sequence,) = books.scheduler.admit()
    # Of a step of one row over 2 columns 12 s may be spent; 4 tokens over 2 columns take 24 s, 8
    # take 48 s, and 16 over 6 columns 160 s.
    cost = Cost(12 / (4 + 1) / (4 + 2) / host.rounds.BESIDE, 1.0)
    for steps, size in ((1, 0), (3, 4), (5, 8), (13, 8), (14, 16)):
        budget = host.rounds.Budget(books.scheduler, decoding, steps, cost)
        piece = budget.take(sequence, forced=False)
        assert (piece.size if piece else 0) == size, steps
    spent = host.rounds.Budget(books.scheduler, decoding, 5, cost)
    assert spent.take(sequence, forced=False).size == 8
    assert spent.take(sequence, forced=False) is None


def test_each_waiting_prompt_has_a_budget_where_nobody_watches_or_few_decode(
    host: ModuleType,
) -> None:
    def tokens(cost: Any, watched: bool, num_decoding: int = 1, **layout: Any) -> int:
        """What three prompts get besides decoding rows and two of their steps."""
        sizes = {"num_slots": 5, "slot_buckets": (1, 5), "num_pages": 60}
        books = Books(host, prefill_buckets=(4,), **sizes, **layout)
        decoding = [books.run([5] * 4, max_tokens=8) for _ in range(num_decoding)]
        for first in (2, 3, 4):
            books.add(range(first, first + 36), denoise=watched and first == 4)
        waiting = books.scheduler.admit()
        waiting[0].watched = True  # for a stop string, say, which no delay is noticed by
        budget = host.rounds.Budget(books.scheduler, decoding, 2, cost)
        pieces = [budget.take(sequence, forced=False) for sequence in waiting]
        return sum(piece.size for piece in pieces if piece)

    # One budget is a little more than what 4 tokens over 2 columns take.
    for cost in (Cost(12.1 / (4 + 1) / (4 + 2) / host.rounds.BESIDE, 1.0), None):
        assert tokens(cost, watched=False) == 12
        assert tokens(cost, watched=True) == 12  # one that decodes does not hold three up
        assert tokens(cost, watched=False, max_num_batched_tokens=8) == 8
    assert tokens(None, watched=False, num_decoding=2) == 12
    assert tokens(None, watched=True, num_decoding=2) == 4


# --- growing and giving way -----------------------------------------------------------------------


def test_growth_covers_the_steps_in_flight_and_the_next(host: ModuleType) -> None:
    books = Books(host, num_pages=40, page_buckets=(11,))
    sequence = books.run([5] * 4, max_tokens=36)
    assert sequence.start == 4
    for in_flight, steps, end in ((0, 1, 12), (1, 1, 20), (1, 2, 28), (2, 2, 36), (4, 4, 44)):
        sequence.in_flight = in_flight
        assert min(4 + books.scheduler.ahead(in_flight, steps), sequence.capacity) == end
        books.scheduler.grow([sequence], steps)
        assert len(sequence.pages) * 4 == end
    held = books.scheduler.table[sequence.slot].tolist()
    assert held[: len(sequence.pages)] == sequence.pages
    assert len(sequence.pages) == 11  # never past what it can write


def test_growth_is_bounded_by_what_chunks_may_emit(host: ModuleType) -> None:
    """A chunk ends before it emits more than 32; two windows of 8 may be ahead of that."""
    books = Books(host, num_pages=200, max_model_len=390, page_buckets=(99,))
    assert books.scheduler.layout.most_new == 32
    for in_flight, steps, ahead in ((0, 9, 48), (0, 6, 48), (0, 5, 40), (9, 9, 80), (1, 9, 80)):
        assert books.scheduler.ahead(in_flight, steps) == ahead, (in_flight, steps)


def test_a_narrow_window_ends_no_chunk_before_its_steps(host: ModuleType) -> None:
    """A token a step of plain decoding; drafts may bring two."""
    layout = make_layout(host, window=2, block_size=2, max_steps_per_chunk=64, max_model_len=390)
    assert layout.most_new == 128
    assert make_layout(host, max_model_len=390).most_new == 4 * 8
    assert make_layout(host, window=2, block_size=2, max_steps_per_chunk=64).most_new == 40


def test_fewer_steps_come_before_a_preemption(host: ModuleType) -> None:
    books = Books(host, num_pages=12)
    first, second = books.run([5] * 4), books.run([6] * 4)
    books.pool.take(books.pool.num_available - 5)  # one step needs 4 pages, four steps 10
    assert books.scheduler.grow([first, second], 4) == 1
    assert [sequence.num_preemptions for sequence in (first, second)] == [0, 0]
    assert [len(sequence.pages) for sequence in (first, second)] == [3, 3]


def test_half_the_steps_come_before_one(host: ModuleType) -> None:
    books = Books(host, num_pages=12)
    first, second = books.run([5] * 4), books.run([6] * 4)
    books.pool.take(books.pool.num_available - 9)  # two steps need 8 pages
    assert books.scheduler.grow([first, second], 4) == 2
    assert [len(sequence.pages) for sequence in (first, second)] == [5, 5]


def test_only_the_worst_ranked_request_is_preempted(host: ModuleType) -> None:
    books = Books(host, num_pages=9)
    sequences = [books.run([token] * 4, priority=p) for token, p in ((5, 0), (6, 2), (7, 1))]
    first, worst, second = sequences
    taken = books.pool.take(books.pool.num_available - 3)  # each needs 2 and holds 1
    assert books.scheduler.grow([first, second, worst], 1) == 1
    assert [s.num_preemptions for s in sequences] == [0, 1, 0]
    assert (worst.stage, worst.pages, worst.slot) == (host.scheduler.WAITING, [], -1)
    assert [len(sequence.pages) for sequence in books.scheduler.live] == [3, 3]
    books.pool.check([*(s.pages for s in books.scheduler.live), taken])


def test_a_preempted_request_resumes_from_its_last_fetch(host: ModuleType) -> None:
    books = Books(host, num_pages=30)
    sequence = books.run(range(2, 10), text=range(20, 29))
    sequence.saved = (SimpleNamespace(hold=lambda: True), 0)
    epoch = sequence.epoch
    books.scheduler.preempt(sequence)
    assert (sequence.start, sequence.tokens) == (16, [*range(20, 29)])
    assert books.scheduler.admit() == [sequence]
    assert (sequence.done, sequence.start) == (16, 16)  # its own pages were still there
    assert sequence.epoch > epoch
    assert sequence.in_flight == 0


def test_a_request_that_cannot_be_resumed_starts_over(host: ModuleType) -> None:
    held = SimpleNamespace(hold=lambda: True), 0
    lost = SimpleNamespace(hold=lambda: False), 0
    for rules, saved in (({"starts_over": True}, held), ({}, lost), ({}, None)):
        books = Books(host, num_pages=30, **rules)
        sequence = books.run(range(2, 10), text=range(20, 29))
        sequence.saved = saved
        books.scheduler.preempt(sequence)
        assert (sequence.start, sequence.saved) == (8, None)
        assert sequence.tokens == [*range(20, 29)], "what was said stays said"


def test_losing_everything_frees_all_pages_and_queues_all(host: ModuleType) -> None:
    books = Books(host, num_pages=30)
    sequences = [books.run([token] * 8) for token in (5, 6)]
    books.scheduler.lose_everything()
    assert (books.pool.num_held, books.pool._page_of) == (0, {})
    assert books.scheduler.live == []
    assert books.scheduler.admit() == sequences
    assert [sequence.done for sequence in sequences] == [0, 0]


# --- rows, buckets and rounds ---------------------------------------------------------------------


def test_rows_are_distinct_and_fill_their_bucket(host: ModuleType) -> None:
    books = Books(host, num_pages=30)
    sequences = [books.run([token] * 4) for token in (5, 6, 7)]
    scheduler = books.scheduler
    assert [scheduler.slot_bucket(count) for count in (1, 2, 3)] == [1, 3, 3]
    rows = scheduler.rows(sequences[1:])
    assert rows[:2] == [sequence.slot for sequence in sequences[1:]]
    assert sorted(rows) == [0, 1, 2]
    assert [scheduler.page_bucket(end) for end in (1, 8, 9, 24, 25, 44)] == [2, 2, 6, 6, 11, 11]


def test_rows_are_grouped_by_the_width_of_their_page_tables(host: ModuleType) -> None:
    books = Books(host, num_pages=40)
    short = [books.run([token], max_tokens=4) for token in (5, 6)]
    long = books.run([*range(2, 34)], max_tokens=6)
    every = [*short, long]
    books.scheduler.grow(every, 1)
    groups = host.rounds.groups
    assert groups(books.scheduler, every, 3, None) == [(short, 2, 3), ([long], 11, 3)]
    assert groups(books.scheduler, every, 3, Cost(0.0, 1.0)) == [(every, 11, 3)]
    apart = groups(books.scheduler, short, 3, Cost(1.0, 1.0))
    assert apart == [(short, 2, 3)]
    assert groups(books.scheduler, [], 3, Cost(1.0, 1.0)) == []


def test_chunks_last_a_while_and_less_where_somebody_waits(host: ModuleType) -> None:
    books = Books(host, num_pages=12, max_steps_per_chunk=1000)
    first = books.run([5] * 4)
    planning, scheduler = host.rounds, books.scheduler

    def steps(step_s: float, **how: bool) -> int:
        return planning.num_steps(step_s, scheduler, scheduler.decoding(), None, **how)

    assert steps(0.0) == 1
    assert steps(0.001) == int(planning.CHUNK_S / 0.001)
    assert steps(0.001, is_open=True) == int(planning.CHUNK_S_WATCHED / 0.001)
    others = [books.run([5] * 4) for _ in range(2)]  # no slot is free: whoever comes waits for one
    assert steps(0.001, is_open=True) == int(planning.CHUNK_S / 0.001)
    for other in others:
        scheduler.leave(other)
    assert steps(1.0) == 1
    assert steps(1e-6) == 1000
    first.watched = True
    assert steps(0.001) == int(planning.CHUNK_S_WATCHED / 0.001)
    step_by_step = books.run([5] * 4, denoise=True)
    assert planning.num_steps(0.001, scheduler, [first, step_by_step], None) == 1
    books.scheduler.leave(step_by_step)
    books.add([6] * 30)
    assert steps(0.001) == int(planning.CHUNK_S_WAITING / 0.001)


def test_texts_that_must_end_in_flight_are_not_dispatched_again(host: ModuleType) -> None:
    def ends(steps: int, wishes: tuple[dict, ...], in_flight: int = 9, **rules: Any) -> bool:
        books = Books(host, num_pages=40, **rules)
        rows = [books.run([5] * 4, **{"ignore_eos": True, **wish}) for wish in wishes]
        for sequence in rows:
            sequence.in_flight, sequence.nfe, sequence.tokens = in_flight, 3, [7, 7]
        chunk = SimpleNamespace(sequences=rows, steps=steps)
        return host.rounds.all_end(books.scheduler.layout, [chunk], rows)

    nine = {"max_nfe": 9}
    for steps, is_last in ((5, False), (6, True), (9, True)):
        assert ends(steps, (nine,)) == is_last
        assert ends(steps, (nine, nine)) == is_last
        assert ends(steps, ({"max_tokens": 8},), is_grid=False, token_a_step=True) == is_last
    assert not ends(9, (nine,), in_flight=0)
    assert not ends(9, ({"max_tokens": 8},)), "how many steps a block takes is not known"
    for other in ({}, {"max_nfe": 8}, {**nine, "ignore_eos": False}):
        assert not ends(9, (nine, other)), "a chunk ends with the first of its texts"
    assert not ends(9, (nine, {**nine, "max_repetition_run": 2}))
    assert ends(9, ({**nine, "ignore_eos": False},)), "alone it may end sooner"


# --- intake ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "wishes", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([5, 100], {}, r"holds id 100, outside the vocabulary \[0, 100\)"),
        ([5, -1, 5], {}, r"holds id -1, outside the vocabulary"),
        ([5], {"strategy_overrides": {"accept": 0.5}}, "no threshold 'accept'; it has accept_thr"),
        ([5], {"strategy_overrides": {"accept_threshold": 1.5}}, r"1.5 is outside \[0.0, 1.0\]"),
        ([5], {"stop_token_ids": tuple(range(2, 34))}, "33 stop ids, the model's own included"),
        ([5], {"stop": "end"}, "stop strings need a tokenizer"),
    ],
)
def test_invalid_settings_are_refused(prompt: list, wishes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Books(HOST).accept(prompt, **wishes)


def test_ids_of_the_vocabulary_are_taken(host: ModuleType) -> None:
    (sequence,) = Books(host).accept([0, 99]).sequences
    assert sequence.prompt == [0, 99]


def test_ids_outside_the_vocabulary_are_refused(host: ModuleType) -> None:
    for prompt in ([100, 5], [5, 100, 5], [5, -1, 5]):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            Books(host).accept(prompt)


def test_bounds_belong_to_their_ranges(host: ModuleType) -> None:
    books = Books(host)
    for value in (0.0, 1.0):
        books.accept([5], strategy_overrides={"accept_threshold": value})
    most = tuple(range(2, 2 + host.rules.STOP_WIDTH - 1))
    (sequence,) = books.accept([5], stop_token_ids=most).sequences
    assert len(sequence.placement.stop_ids) == host.rules.STOP_WIDTH


def test_a_threshold_above_another_is_refused(host: ModuleType) -> None:
    """Both of the request, or one besides the strategy's own."""
    values = {"low": 0.4, "high": 0.8}
    rules = {"low": (0.0, 9.0, False, "high"), "high": (0.0, 9.0, False, None)}
    books = Books(host, knobs=rules, knob_values=values)
    for given in ({"low": 0.8}, {"high": 0.4}, {"low": 2.0, "high": 3.0}):
        books.accept([5], strategy_overrides=given)
    for given in ({"low": 0.9}, {"high": 0.3}, {"low": 3.0, "high": 2.0}):
        low, high = (values | given).values()
        with pytest.raises(host.checks.Refused, match=f"low={low} is above high={high}") as error:
            books.accept([5], strategy_overrides=given)
        assert error.value.param == f"strategy_overrides.{next(iter(given))}"


def test_sequences_have_keys_and_ranks_of_their_own(host: ModuleType) -> None:
    books = Books(host)
    books.accept([5])
    live = books.accept([5], n=3, priority=2)
    assert [s.rank for s in live.sequences] == [(2, 1), (2, 2), (2, 3)]
    assert [(s.placement.seed, s.placement.fold) for s in live.sequences] == [
        (9, 1),
        (9, 2),
        (9, 3),
    ]
    live = books.accept([5], n=2, seed=4)
    assert [(s.placement.seed, s.placement.fold) for s in live.sequences] == [(4, 0), (4, 1)]
    assert [s.leader for s in live.sequences] == [None, live.sequences[0]]


WINDOW = {"is_grid": False, "in_window": True, "window": 24, "page_buckets": (2, 11)}


def test_a_suffix_may_hold_cells_to_be_written(host: ModuleType) -> None:
    books = Books(host, **WINDOW)

    def placed(prompt: list, suffix: tuple) -> Any:
        live = books.accept(prompt, max_tokens=2, suffix_token_ids=suffix)
        return live.sequences[0].placement

    inner = placed([5, 6], (7, -1, -1, 8, -1, 9, 9))
    assert (inner.prompt_len, inner.limit) == (2, 9)
    assert inner.given == (-1, -1, 7, -1, -1, 8, -1, 9, 9)
    assert [inner.num_written(length) for length in (0, 2, 3, 5, 7)] == [0, 2, 2, 4, 5]
    assert (placed([5], (7,)).limit, placed([], (-1, 7)).limit) == (3, 3)
    plain = placed([5], ())
    assert (plain.limit, plain.given, plain.num_written(2)) == (3, (), 2)


@pytest.mark.parametrize(
    ("prompt", "suffix", "sizes", "message"),
    [
        (
            [5],
            (7,),
            {"is_grid": True, "in_window": False},
            "takes no text behind a hole; use one that does, such as multi_bd or full_sequence",
        ),
        ([5], (100,), {}, "holds id 100, outside"),
        ([5], (-2,), {}, "holds id -2, outside"),
        ([], (), {}, "the prompt is empty; give at least one token"),
        ([], (7,), {"compute_at_least": 1}, "nothing stands before the text"),
        ([5] * 5, (7,) * 16, {}, r"5 \+ 4 \+ 16 tokens, the window has 24; use buffer_size=7 or"),
        ([5] * 5, (7,) * 8, {"max_model_len": 16}, "are 17 tokens; the engine takes 16"),
        ([5] * 5, (7,) * 4 + (-1,), {"num_pages": 4}, "are 14 tokens; .* and its pool 16"),
    ],
)
def test_a_suffix_that_cannot_be_had_whole_is_refused(
    prompt: list, suffix: tuple, sizes: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Books(HOST, **WINDOW | sizes).accept(prompt, max_tokens=4, suffix_token_ids=suffix)


def test_a_text_with_a_suffix_is_not_cut_short(host: ModuleType) -> None:
    wishes = {"max_tokens": 4, "suffix_token_ids": (7,) * 4 + (-1,)}
    assert Books(host, **WINDOW | {"num_pages": 5}).accept([5] * 5, **wishes)
    for short in ({"num_pages": 4}, {"max_model_len": 13}):
        with pytest.raises(ValueError, match="prompt, max_tokens and suffix are 14 tokens"):
            Books(host, **WINDOW | short).accept([5] * 5, **wishes)
    wishes["suffix_token_ids"] = (7,) * 5  # the text itself fits
    with pytest.raises(ValueError, match="are 14 tokens; the engine takes 13"):
        Books(host, **WINDOW | {"max_model_len": 13}).accept([5] * 5, **wishes)


def test_a_placement_says_what_the_slot_needs(host: ModuleType) -> None:
    books = Books(host)
    wishes = {"stop_token_ids": (3, 1, 3), "strategy_overrides": {"accept_threshold": 0.5}}
    placement = books.accept(range(2, 16), max_nfe=7, top_k=4, **wishes).sequences[0].placement
    assert placement.tail == (14, 15)
    assert (placement.prompt_len, placement.limit, placement.max_nfe) == (14, 30, 7)
    assert (placement.stop_ids, placement.sampling) == ((3, 1), (0.0, 4, 1.0))
    assert placement.knobs == {"accept_threshold": 0.5}
    plain = books.accept([5], stop_token_ids=(3,), ignore_eos=True).sequences[0].placement
    assert (plain.stop_ids, plain.knobs) == ((3,), {"accept_threshold": 0.9})
