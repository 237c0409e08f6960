"""A device of plain Python for the tests of the host loop: pages hold what was computed for them.

The content of a position is a hash of everything its keys and values depend on under the prompt
mode: of the contents read for the positions before it, and of the tokens of its block (its own
token where the mask is causal; the whole prompt where prompt rows all see each other). A decode
step reads its context through the page table it is given and draws its tokens from a hash of what
it read, of the request's key, of the window and of the step. So a wrong, stale, missing or foreign
page changes tokens, as it does on a real device, and `alone` says what the tokens must be.

Programs take effect when they are dispatched, in order; what a chunk says is seen when it is
fetched. What `runner.runner` requires of its caller (bucket sizes, distinct rows) is checked.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

EMPTY, RUNNING, STOP, LENGTH, NFE, REPETITION, _, ERROR = range(8)
REASONS = {STOP: "stop", LENGTH: "length", NFE: "nfe", REPETITION: "repetition", ERROR: "error"}

VOCAB = 12
HOLE = -1
END_ID = 1  # the model's own stop id
POISON_ID = 11  # a row that holds it is not finite
DRAWN_IDS = 10  # decoding draws from the ids below
BREAKS = 499  # one step in this many meets a value that is not finite
CAUSAL = "whole_causal"
FULL = 1000  # marks contents of a prompt whose rows all see each other


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class Slot:
    """One request on the device."""

    placement: Any
    start: int
    window: list[int | None]
    finish: int = EMPTY
    nfe: int = 0
    output: list[int] = dataclasses.field(default_factory=list)
    boundary: int = 0
    written: int = 0  # first position past what its steps stored, provisionally or for good

    def saved(self) -> tuple[Any, ...]:
        """What changes while it decodes, but for its output."""
        return (
            self.start,
            tuple(self.window),
            self.finish,
            self.nfe,
            len(self.output),
            self.boundary,
        )


class Fetched:
    """What a chunk says, as `device.Fetched`."""

    def __init__(self, slots: Sequence[Slot], before: list[int], steps: int):
        self.start = [slot.start for slot in slots]
        self.finish = [slot.finish for slot in slots]
        self.nfe = [slot.nfe for slot in slots]
        self.length = [len(slot.output) for slot in slots]
        self.before, self.steps = before, steps
        self.emitted = [slot.output[first:] for slot, first in zip(slots, before, strict=True)]
        self._saved = [slot.saved() for slot in slots]
        self._prompts = [slot.placement.prompt_len for slot in slots]
        self.life = 0  # of the device it ran in

    def hold(self) -> bool:
        """Of some chunks the device loses a part with its state."""
        return sum(self.nfe) % 3 != 0

    def saved(self, row: int) -> tuple[Any, ...]:
        return self._saved[row]

    def window(self, row: int, length: int) -> tuple[int | None, ...]:
        return self._saved[row][1]

    def behind(self, row: int) -> int | None:
        start, window = self._saved[row][:2]
        return window[self._prompts[row] + self.length[row] - start]

    def drafted(self, row: int) -> None:
        return None


class FakeDevice:
    """See the module.

    Args:
        failure: What a lost device raises.
        clock: Moved on by fetches.
        cost: Predicted seconds of programs, or None.

    Attributes:
        planned: Programs ("decode", "fetch", "reset", ...) whose next call fails, in order.
        untraceable: Programs whose next call cannot be traced, in order.
    """

    def __init__(self, layout: Any, failure: type[Exception], clock: Clock, cost: Any = None):
        self.layout, self.cost, self.clock = layout, cost, clock
        self.num_late_compiles = self.num_programs = self.num_compiled = 0
        self.failure = failure
        self.planned: list[str] = []
        self.untraceable: list[str] = []
        self.compile_failure: type[Exception] = failure
        self.num_failures = self.life = 0
        self.calls: Counter[str] = Counter()
        self.has_boundary = layout.compute_at_least > 0
        self._start_over()

    def _start_over(self) -> None:
        layout = self.layout
        self.life += 1
        self.pages = [[0] * layout.page_size for _ in range(layout.num_pages)]
        self.slots: list[Slot | None] = [None] * layout.num_slots
        self.is_lost = False

    def _call(self, program: str) -> None:
        if self.planned and self.planned[0] == program:
            del self.planned[0]
            self.is_lost = True
        if self.is_lost:
            self.num_failures += 1
            raise self.failure(f"{program} failed")
        self.calls[program] += 1

    def _trace(self, program: str, slots: list[int]) -> None:
        """Fail as a program that cannot be traced: nothing runs."""
        if self.untraceable[:1] == [program]:
            del self.untraceable[0]
            raise self.compile_failure("TypeError: no such rows", slots)

    def _slot(self, index: int) -> Slot:
        slot = self.slots[index]
        assert slot is not None, f"slot {index} was never admitted"
        return slot

    # --- the programs ---------------------------------------------------------------------------

    def reset(self) -> None:
        if self.planned and self.planned[0] == "reset":
            self._call("reset")
        self._start_over()

    def flush(self) -> None:
        """Nothing waits here."""

    def has_programs(self, grammar: Any) -> bool:
        """All of them."""
        return True

    def forget_failed_programs(self) -> None:
        """None has failed."""

    def await_programs(self, timeout_s: float) -> None:
        """None is compiled."""

    def admit(self, slot: int, placement: Any) -> None:
        self._trace("admit", [slot])
        self._call("admit")
        self.slots[slot] = fresh_slot(self.layout, placement)

    def restore(self, slot: int, placement: Any, saved: Any, tokens: Sequence[int]) -> None:
        self._call("restore")
        start, window, finish, nfe, length, boundary = saved
        was_broken = self._slot(slot).finish == ERROR
        output = (list(tokens) + [0] * length)[:length]
        self.slots[slot] = Slot(
            placement, start, list(window), ERROR if was_broken else finish, nfe, output, boundary
        )

    def begin(self, slot: int, boundary: Any = None) -> None:
        self._call("begin")
        self._slot(slot).finish = RUNNING
        self._slot(slot).boundary = boundary or 0

    def copy_page(self, source: int, target: int) -> None:
        self._call("copy_page")
        self.pages[target] = list(self.pages[source])

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        first: int,
        end: int,
        live_end: int,
        last: bool,
        pages: Any,
        size: int,
        kind: str,
    ) -> int:
        self._trace("prefill", [slot])
        self._call("prefill")
        layout, row = self.layout, self._slot(slot)
        assert size in layout.prefill_buckets
        assert len(pages) in layout.page_buckets
        assert 0 <= first <= end <= live_end == first + len(tokens) <= first + size
        grain = 1 if kind == "causal" else layout.block_size
        if kind != "full":
            origin = 0 if layout.is_grid or kind == "causal" else row.placement.prompt_len
            assert (first - origin) % grain == 0
            assert (end - origin) % grain == 0
        broken = row.finish == ERROR or POISON_ID in tokens
        columns = pages.tolist()
        context = self._read(columns, first)
        if kind == "full":
            whole = hash((FULL, *tokens))
            contents = [hash((whole, position)) for position in range(end)]
        else:
            contents = computed(context, tokens, grain)
        if POISON_ID not in tokens:
            self._write(columns, first, contents)
            row.boundary = contents[-1] if contents else row.boundary
        row.finish = ERROR if broken else RUNNING if last else EMPTY
        return row.boundary

    def decode(
        self, rows: np.ndarray, num_active: int, pages: np.ndarray, num_steps: int, early: bool
    ) -> Fetched:
        self._trace("decode", rows[:num_active].tolist())
        self._call("decode")
        layout = self.layout
        names, table = rows.tolist(), pages.tolist()
        assert len(names) in layout.slot_buckets
        assert len(set(names)) == len(names)
        assert len(table[0]) in layout.page_buckets
        assert 1 <= num_steps <= layout.max_steps_per_chunk
        assert 1 <= num_active <= len(names) == len(table)
        slots = [self._slot(name) for name in names[:num_active]]
        before = [len(slot.output) for slot in slots]
        began = [slot for slot in slots if slot.finish == RUNNING]
        steps = 0
        while steps < num_steps and any(slot.finish == RUNNING for slot in began):
            if early and any(slot.finish != RUNNING for slot in began):
                break
            emitted = [
                len(slot.output) - length for slot, length in zip(slots, before, strict=True)
            ]
            if steps and self._is_full(max(emitted)):
                break
            for slot, columns in zip(slots, table, strict=False):
                if slot.finish == RUNNING:
                    self._step(slot, columns)
            steps += 1
        done = Fetched(slots, before, steps)
        done.life = self.life
        return done

    def _is_full(self, emitted: int) -> bool:
        """Whether a further step could emit more than a chunk brings back."""
        layout = self.layout
        return layout.most_new < layout.max_model_len and emitted + layout.window > layout.most_new

    def join(self, last_pass: Any) -> None:
        self._call("join")

    def fetch(self, chunk: Fetched) -> Fetched:
        self._call("fetch")
        assert chunk.life == self.life, "a chunk of a state that was lost"
        self.clock.now += 0.001 * chunk.steps
        return chunk

    # --- one decode step -------------------------------------------------------------------------

    def _step(self, slot: Slot, columns: list[int]) -> None:
        """Fill some holes, emit what is settled, commit what is complete (`core.driver`)."""
        layout, asked, window = self.layout, slot.placement, slot.window
        context = self._read(columns, slot.start)
        ahead = self._read(columns, max(slot.written, slot.start))[slot.start :]
        style = random_key(asked)
        boundary = slot.boundary if self.has_boundary else 0
        read = hash((*context, *ahead))
        seen = hash((style, slot.nfe, slot.start, read, boundary, tuple_of(window)))
        if POISON_ID in window or seen % BREAKS == 0:
            slot.finish = ERROR
            return
        slot.nfe += 1
        complete = leading(window)
        fill(layout, slot, seen, style)
        filled = leading(window)
        commit, settled = self._progress(slot, complete, filled, seen, style)
        _finish(layout, slot, settled)
        if layout.starts_over and not layout.soft_commits and not layout.in_window:
            # A cache of the window, which the next step reads.
            slot.written = min(slot.start + layout.window, asked.limit + layout.block_size)
            ahead = [hash((seen, i)) for i in range(slot.written - slot.start)]
            self._write(columns, slot.start, ahead)
        self._commit(slot, columns, context, commit, style)

    def _progress(
        self, slot: Slot, complete: int, filled: int, seen: int, style: int
    ) -> tuple[int, int]:
        """How many leading cells leave the window, and how many are settled."""
        layout, S = self.layout, self.layout.block_size
        if layout.in_window:
            return 0, filled
        if layout.is_token_causal:
            return max(filled - (seen >> 20) % 2, 0), filled
        # Either at once, or in the step after a block was completed.
        ready = (filled if style & 1 else complete) // S * S
        # What may still change is not settled, whatever is filled.
        settled = filled // S * S if style & 2 else filled
        return ready, max(ready, settled)

    def _commit(
        self, slot: Slot, columns: list[int], context: list[int], count: int, style: int
    ) -> None:
        if not count:
            return
        layout = self.layout
        grain = 1 if layout.is_token_causal else layout.block_size
        tokens: list[Any] = slot.window[:count]
        salt = hash((style, slot.nfe)) if layout.soft_commits else 0
        contents = computed(context, tokens, grain, salt)
        self._write(columns, slot.start, contents)
        slot.start += count
        slot.window = slot.window[count:] + [None] * count
        slot.boundary = contents[-1]

    # --- pages -----------------------------------------------------------------------------------

    def _read(self, columns: list[int], end: int) -> list[int]:
        """Contents of the positions before `end`; 0 where the table has no page."""
        Z = self.layout.page_size
        context: list[int] = []
        for page in columns[: -(-end // Z)]:
            context += self.pages[page] if page >= 0 else [0] * Z
        del context[end:]
        return context + [0] * (end - len(context))

    def _write(self, columns: list[int], first: int, contents: Sequence[int]) -> None:
        """Put contents from a position on; the table must have its page by now."""
        Z = self.layout.page_size
        for position, content in enumerate(contents, first):
            column = position // Z
            assert column < len(columns), f"position {position} is outside the page bucket"
            assert columns[column] >= 0, f"position {position} has no page"
            self.pages[columns[column]][position % Z] = content


# --- what a decoder of block diffusion does, in plain numbers ------------------------------------


def fresh_slot(layout: Any, placement: Any) -> Slot:
    """A slot before its prefill."""
    start = layout.prefill_len(placement.prompt_len)
    window: list[int | None] = [None] * layout.window
    inside = placement.prompt_len - start
    window[:inside] = placement.tail[:inside]
    for position, token in enumerate(placement.given, placement.prompt_len):
        if token != HOLE:
            window[position - start] = token
    return Slot(placement, start, window)


def random_key(placement: Any) -> int:
    """All of a request its tokens depend on, its prompt apart."""
    return hash(
        (
            placement.seed,
            placement.fold,
            *placement.sampling,
            *(hash(placement.knobs[name]) for name in sorted(placement.knobs)),
        )
    )


def tuple_of(window: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(VOCAB if token is None else token for token in window)


def computed(context: Sequence[int], tokens: Sequence[int], grain: int, salt: int = 0) -> list[int]:
    """Contents of tokens after a context, `grain` of them seeing each other."""
    every = list(context)
    for i in range(0, len(tokens), grain):
        block = tuple(tokens[i : i + grain])
        digest = hash((hash(tuple(every)), *block, salt))
        first = len(every)
        every += [hash((digest, first + j)) for j in range(len(block))]
    return every[len(context) :]


def leading(window: Sequence[int | None]) -> int:
    """Length of the run of filled cells at the front."""
    return window.index(None) if None in window else len(window)


def fill(layout: Any, slot: Slot, seen: int, style: int) -> None:
    """Put tokens into a few holes of blocks that hold a position to emit."""
    asked, window = slot.placement, slot.window
    S = layout.block_size
    open_end = -(-(asked.limit - slot.start) // S) * S
    if layout.in_window:
        open_end = asked.limit - slot.start
    holes = [i for i, token in enumerate(window[:open_end]) if token is None]
    if not holes:
        return
    most = (1, S, len(window), len(window))[style >> 2 & 3]
    count = 1 + (seen >> 8) % most if style & 16 else most
    first = (seen >> 4) % len(holes) if seen & 3 == 0 else 0
    for i in holes[first : first + count]:
        drawn = hash((seen, slot.start + i))
        window[i] = 7 if drawn >> 8 & 7 == 0 else drawn % DRAWN_IDS


def _finish(layout: Any, slot: Slot, settled: int) -> None:
    """Emit the settled tokens and see whether the request ends, as `core.driver.finish`."""
    asked = slot.placement
    written = [token == HOLE for token in asked.given] or [True] * (asked.limit - asked.prompt_len)
    end = min(slot.start + settled, asked.limit)
    first = max(asked.prompt_len - slot.start, 0)
    at = slot.start + first - asked.prompt_len
    new = slot.window[first : max(end - slot.start, first)]
    stops = [i for i, token in enumerate(new) if token in asked.stop_ids and written[at + i]]
    kept = new[: stops[0]] if stops else new
    if at + len(kept) > len(slot.output):
        slot.output[at:] = kept  # type: ignore[assignment]
    if stops:
        slot.finish = STOP
    elif end >= asked.limit:
        slot.finish = LENGTH
    elif slot.nfe >= asked.max_nfe:
        slot.finish = NFE
    elif trailing_run(slot.output) >= asked.max_run:
        slot.finish = REPETITION


def trailing_run(tokens: Sequence[int]) -> int:
    run = 0
    while run < len(tokens) and tokens[-1 - run] == tokens[-1]:
        run += 1
    return run


# --- the truth -----------------------------------------------------------------------------------


def alone(layout: Any, prompt: Sequence[int], placement: Any) -> tuple[list[int], str, int]:
    """Tokens, finish reason and forwards of one text with a device and all pages to itself.

    No engine: admitted, prefilled in as few passes as its mode has, then stepped one at a time.
    """
    size = 4 * (len(prompt) + placement.limit + layout.window)
    size += -size % layout.block_size
    wide = dataclasses.replace(
        layout,
        num_slots=1,
        num_pages=1,
        page_size=size,
        slot_buckets=(1,),
        page_buckets=(1,),
        prefill_buckets=(size,),
    )
    device = FakeDevice(wide, RuntimeError, Clock())
    device.admit(0, placement)
    end = wide.prefill_len(len(prompt))
    pages = np.zeros((1, 1), np.int32)
    if end:
        kind = wide.pass_kind
        live_end = len(prompt) if wide.is_full else end
        device.prefill(0, prompt[:live_end], 0, end, live_end, True, pages[0], size, kind)
    else:
        device.begin(0)
    slot = device._slot(0)
    while slot.finish == RUNNING:
        device.decode(np.zeros((1,), np.int32), 1, pages, 1, False)
    return slot.output, REASONS[slot.finish], slot.nfe


# --- sizes and rules -----------------------------------------------------------------------------

MODES = ("grid_causal", "grid_full", "whole_causal", "whole_full", "in_window")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Predicted seconds, of no particular device."""

    row_s: float
    token_s: float

    def decode_s(self, rows: int, columns: int) -> float:
        return self.row_s * (4 + rows) * (4 + columns)

    def prefill_s(self, size: int, columns: int, kind: str) -> float:
        return self.token_s * size * (4 + columns)


def draw_facts(rng: random.Random, facts_type: Any) -> Any:
    """Sizes of a tiny engine, of any prompt mode."""
    mode = rng.choice(MODES)
    S, K = rng.choice((2, 3, 4)), rng.choice((1, 2, 3))
    if mode == CAUSAL:  # AR: an anchor and a hole; DFlash: a draft block and its anchor
        S, K = rng.choice((2, 4, 5)), 1
    Z = rng.choice((1, 2, 4, 6, 8))
    max_len = rng.randint(16, 48)
    if mode == "in_window":
        K = rng.choice((5, 8))
    W = S * K
    columns = -(-max(max_len + S, W) // Z)
    num_slots = rng.randint(1, 5)
    grain = 1 if mode == CAUSAL else S
    prefill = {-(-size // grain) * grain for size in rng.sample(range(1, 24), rng.randint(1, 3))}
    if mode.endswith("full"):
        prefill.add(-(-max_len // S) * S)
    least = {"grid_causal": rng.choice((0, S)), CAUSAL: 1}.get(mode, rng.choice((0, 1)))
    soft = mode != "in_window" and rng.random() < 0.2
    return facts_type(
        num_slots=num_slots,
        num_pages=max(2, int(columns * rng.choice((0.6, 1.0, 1.0, 1.5, 2.5)))),
        page_size=Z,
        max_model_len=max_len,
        max_steps_per_chunk=rng.choice((1, 2, 4, 9)),
        block_size=S,
        window=W,
        is_grid=mode.startswith("grid"),
        is_full=mode.endswith("full"),
        is_token_causal=mode == CAUSAL,
        in_window=mode == "in_window",
        compute_at_least=least,
        soft_commits=soft,
        starts_over=soft or rng.random() < 0.2,
        prefix_caching=rng.random() < 0.75,
        salt=b"fake",
        vocab_size=VOCAB,
        stop_token_ids=(END_ID,),
        knobs={"threshold": (0.0, 1.0, False, None)},
        knob_values={"threshold": 0.5},
        slot_buckets=buckets(rng, num_slots),
        page_buckets=buckets(rng, columns),
        prefill_buckets=tuple(sorted(prefill)),
        max_num_batched_tokens=rng.choice((None, None, 1, 8)),
    )


def buckets(rng: random.Random, most: int) -> tuple[int, ...]:
    """A few sizes, the last of which is `most`."""
    some = rng.sample(range(1, most + 1), min(most, rng.randint(1, 3)))
    return tuple(sorted({*some, most}))
