"""Block diffusion as lists: an unbounded decoder without window, vectors or jax.

The oracle of `MultiBD` and `BlockDiffusion`, written apart from `strategies/`. A request is one
growing list of blocks from position 0. Nothing is ever shifted, so it cannot repeat a mistake of a
sliding window; the window of a trace is only *drawn* from the list. `Asked` is what the oracles of
all strategies share; with its `decode` they differ in what a forward writes and which blocks leave.

A *script* stands for the model: `token[i][p]` and `prob[i][p]` say what forward `i` after prefill
predicts at absolute position `p`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

DUMMY, ACTIVE, TO_CACHE, IN_CACHE = 0, 1, 2, 3


@dataclass(frozen=True)
class Law:
    """What the script says at one hole: the likeliest token, its probability, entropy in nats."""

    token: int
    confidence: np.float32
    entropy: float


@dataclass
class Block:
    """One block of the request; `None` is a hole. A prompt cell is a token like any other."""

    start: int
    cells: list[int | None]
    status: int
    forwards: int = 0  # those it had while ACTIVE

    def holes(self) -> list[int]:
        return [i for i, cell in enumerate(self.cells) if cell is None]

    @property
    def end(self) -> int:
        return self.start + len(self.cells)

    def progress(self) -> np.float32:
        return np.float32((len(self.cells) - len(self.holes())) / len(self.cells))


@dataclass(frozen=True)
class Step:
    """What a step left: the window after the slide (`None` where this step ended the request)."""

    start: int | None
    tokens: list[list[int]] | None
    status: list[int] | None
    new_tokens: int


@dataclass
class Result:
    """What a request became; `undecided` counts comparisons that rounding may turn."""

    steps: list[Step] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    nfe: int = 0
    undecided: int = 0


B = TypeVar("B", bound=Block)
R = TypeVar("R", bound=Result)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request and its window."""

    prompt: Sequence[int]
    block_size: int
    buffer_size: int = 1
    max_tokens: int
    mask_id: int
    vocab_size: int
    eos_ids: Sequence[int] = ()
    max_model_len: int | None = None
    max_nfe: int | None = None
    max_run: int | None = None
    aligned: bool = False  # the grid of blocks begins with the text

    @property
    def limit(self) -> int:
        """The position that the text must not reach."""
        end = len(self.prompt) + self.max_tokens
        return end if self.max_model_len is None else min(end, self.max_model_len)

    def law(self, row: tuple[Any, Any], position: int) -> Law:
        """What one forward of the script says at a position."""
        return law_of(int(row[0][position]), row[1][position], self.mask_id, self.vocab_size)

    def blocks(self, kind: type[B]) -> list[B]:
        """Those of the prompt: whole ones are cached, its rest shares a block with the text."""
        if self.aligned:
            return [kind(0, list(self.prompt), IN_CACHE)]
        size, made = self.block_size, []
        for start in range(0, len(self.prompt), size):
            cells: list[int | None] = list(self.prompt[start : start + size])
            status = IN_CACHE if len(cells) == size else ACTIVE
            made.append(kind(start, cells + [None] * (size - len(cells)), status))
        return made

    def text(self, blocks: Sequence[Block]) -> list[int | None]:
        """The cells after the prompt."""
        return [cell for block in blocks for cell in block.cells][len(self.prompt) :]

    def live(self, blocks: list[B], is_ready: Callable[[B], Any]) -> list[B]:
        """The blocks in the window, after at most one has opened from what the last step left.

        None opens at or past the limit, nor after a stop that stands in the text now.
        """
        live = [block for block in blocks if block.status != IN_CACHE]
        start = blocks[-1].end
        standing = any(cell in self.eos_ids for cell in self.text(blocks) if cell is not None)
        fits = start < self.limit and not standing and len(live) < self.buffer_size
        if fits and (not live or is_ready(live[-1])):
            blocks.append(type(blocks[-1])(start, [None] * self.block_size, ACTIVE))
            live.append(blocks[-1])
        return live

    def ends(self, result: Result, text: Sequence[int | None], new: int) -> bool:
        """Keep what is settled of the text, and say whether the request ends with this step."""
        room = self.limit - len(self.prompt)
        settled = itertools.takewhile(lambda cell: cell is not None, text[:room])
        run = [cell for cell in settled if cell is not None]
        stop = next((i for i, cell in enumerate(run) if cell in self.eos_ids), None)
        if stop is not None:
            run, result.finish_reason = run[:stop], "stop"
        elif len(run) == room:
            result.finish_reason = "length"
        elif self.max_nfe is not None and result.nfe >= self.max_nfe:
            result.finish_reason = "nfe"
        elif self.max_run is not None and _trailing_run(run) >= self.max_run:
            result.finish_reason = "repetition"
        result.output = run
        if result.finish_reason is not None:
            result.steps.append(Step(None, None, None, new))
        return result.finish_reason is not None

    def draw(self, blocks: Sequence[Block], new: int) -> Step:
        """The window that a step leaves."""
        live = [block for block in blocks if block.status != IN_CACHE]
        tokens = [[self.mask_id if cell is None else cell for cell in b.cells] for b in live]
        missing = self.buffer_size - len(live)
        return Step(
            live[0].start if live else blocks[-1].end,
            tokens + [[self.mask_id] * self.block_size] * missing,
            [block.status for block in live] + [DUMMY] * missing,
            new,
        )

    def decode(
        self,
        result: R,
        script: Iterable[tuple[Any, Any]],
        kind: type[B],
        is_ready: Callable[[B], Any],
        forward: Callable[[tuple[Any, Any], list[B]], tuple[int, set[int]]],
        rewrites: bool = False,
    ) -> R:
        """Decode one request greedily.

        Args:
            is_ready: Whether the next block may open after this one.
            forward: Writes the ACTIVE blocks of a window by a row of the script. It takes every
                decision on what was there before, and returns the tokens that are new and the
                starts of the blocks that may leave.
            rewrites: Blocks that have not left may still change, so they are not settled.
        """
        blocks = self.blocks(kind)
        for row in script:
            live = self.live(blocks, is_ready)
            stored = [block for block in live if block.status == TO_CACHE]
            new, ready = forward(row, live)
            for block in live:  # what may leave does so only after what leaves
                if block.status == ACTIVE:
                    if block.start not in ready:
                        break
                    block.status = TO_CACHE
            result.nfe += 1
            settled = [block for block in blocks if not rewrites or block.status != ACTIVE]
            text = self.text(settled)
            assert not rewrites or None not in text[: self.limit - len(self.prompt)]
            if self.ends(result, text, new):
                return result
            for block in stored:
                block.status = IN_CACHE
            result.steps.append(self.draw(blocks, new))
        return result


# A rule: which of a block's holes are written now. `previous` is the block before it in the window,
# as it stood
# before this forward's writes, or None where that block is in the cache or does not exist.
Rule = Callable[[Block, Block | None, list[tuple[int, Law]]], list[int]]


def law_of(token: int, prob: float, mask_id: int, vocab_size: int) -> Law:
    """The law "this token with `prob`, the rest evenly on the others but the mask", in float32."""
    p = np.float32(prob)
    num_others = vocab_size - 2
    other = np.float32((np.float32(1) - p) / np.float32(num_others))
    lowest_other = min(i for i in range(vocab_size) if i not in (token, mask_id))
    if p > other:
        best = token
    elif p < other:
        best = lowest_other
    else:
        best = min(token, lowest_other)

    def surprise(q: float) -> float:
        return -q * math.log(q) if q > 0 else 0.0

    entropy = surprise(float(p)) + num_others * surprise(float(other))
    return Law(best, max(p, other), entropy)


def most_confident(holes: list[tuple[int, Law]], count: int) -> list[int]:
    """The `count` holes with the highest confidence; of equals the lowest position."""
    ranked = sorted(holes, key=lambda hole: (-hole[1].confidence, hole[0]))
    return [offset for offset, _ in ranked[:count]]


def multi_bd_rule(accept_threshold: float, semi_complete_threshold: float) -> Rule:
    """All above the threshold, or one if allowed."""

    def rule(block: Block, previous: Block | None, holes: list[tuple[int, Law]]) -> list[int]:
        above = [offset for offset, law in holes if law.confidence > np.float32(accept_threshold)]
        if above:
            return above
        if previous is None or previous.progress() >= np.float32(semi_complete_threshold):
            return most_confident(holes, 1)
        return []

    return rule


def block_diffusion_rule(
    remasking: str,
    *,
    accept_threshold: float = 0.9,
    entropy_bound: float = 0.0,
    denoising_steps: int | None = None,
    result: Result | None = None,
) -> Rule:
    """The deterministic remasking rules of one-block-at-a-time decoding.

    Entropies are sums of logarithms, which two programs may round apart: `result.undecided`
    counts the comparisons where that could matter.
    """

    def rule(block: Block, previous: Block | None, holes: list[tuple[int, Law]]) -> list[int]:
        size = len(block.cells)
        steps = size if denoising_steps is None else denoising_steps
        quota = size // steps + (1 if block.forwards < size % steps else 0)
        quota = min(max(quota, 1), len(holes))
        if remasking == "sequential":
            return [offset for offset, _ in holes[:quota]]
        if remasking == "static":
            return most_confident(holes, quota)
        if remasking == "dynamic":
            threshold = np.float32(accept_threshold)
            above = [offset for offset, law in holes if law.confidence > threshold]
            return above if len(above) >= quota else most_confident(holes, quota)
        if remasking == "entropy":
            ranked = sorted(holes, key=lambda hole: (hole[1].entropy, hole[0]))
            chosen: list[int] = []
            before = 0.0  # entropies of the holes ranked before this one
            for offset, law in ranked:
                if result is not None and chosen and abs(before - entropy_bound) < 1e-4:
                    result.undecided += before > 0
                if chosen and before > np.float32(entropy_bound):
                    break
                chosen.append(offset)
                before += law.entropy
            return chosen
        raise ValueError(f"{remasking=} has no list form")

    return rule


def list_decode(
    rule: Rule,
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    add_block_threshold: float = math.inf,
    result: Result | None = None,
    **limits: Any,
) -> Result:
    """Decodes one request greedily from a script; see the module's words."""
    asked = Asked(prompt=prompt, **limits)

    def forward(row: tuple[Any, Any], live: list[Block]) -> tuple[int, set[int]]:
        writes: list[tuple[Block, int, int]] = []
        for slot, block in enumerate(live):
            if block.status != ACTIVE:
                continue
            laws = {i: asked.law(row, block.start + i) for i in block.holes()}
            previous = live[slot - 1] if slot else None
            chosen = rule(block, previous, list(laws.items())) if laws else []
            writes += [(block, offset, laws[offset].token) for offset in chosen]
            block.forwards += 1
        return write(writes, live)

    return asked.decode(
        Result() if result is None else result,
        zip(token, prob, strict=True),
        Block,
        lambda last: last.progress() >= np.float32(add_block_threshold),
        forward,
    )


def write(writes: list[tuple[Block, int, int]], live: Sequence[Block]) -> tuple[int, set[int]]:
    """Fill (block, offset) with tokens; how many they are, and the blocks without a hole."""
    for block, offset, token in writes:
        block.cells[offset] = token
    return len(writes), {block.start for block in live if not block.holes()}


def list_ar(prompt: Sequence[int], token: Any, prob: Any, **limits: Any) -> Result:
    """One token after the other: the first is known after prefill, by row 0 as for forward 0.

    Forward `i` runs the last known token (the anchor), which enters the cache, and tells the next.
    Nothing is tested before the first forward has run.
    """
    asked = Asked(prompt=prompt, block_size=1, **limits)
    rows = list(zip(token, prob, strict=True))
    text, result = [*prompt, asked.law(rows[0], len(prompt)).token], Result()
    for row in rows:
        end = len(text)
        text.append(asked.law(row, end).token)
        result.nfe += 1
        if asked.ends(result, text[len(prompt) :], 1):
            break
        result.steps.append(Step(end, [[text[end], asked.mask_id]], [ACTIVE], 1))
    return result


def _trailing_run(tokens: list[int]) -> int:
    return next((n for n, t in enumerate(reversed(tokens)) if t != tokens[-1]), len(tokens))
