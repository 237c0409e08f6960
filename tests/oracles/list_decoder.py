"""Block diffusion as lists: an unbounded decoder without window, vectors or jax.

The oracle of `MultiBD` and `BlockDiffusion`, written apart from `strategies/`. A request is one
growing Python list of blocks from position 0; a block is a list of cells, `None` where nothing is
written yet. Nothing is ever shifted, so it cannot repeat a mistake of a sliding window; the window
of a trace is only *drawn* from the list.

A *script* stands for the model: `token[i][p]` and `prob[i][p]` say what forward `i` after prefill
predicts at absolute position `p`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    block_size: int,
    buffer_size: int,
    add_block_threshold: float = math.inf,
    max_tokens: int,
    mask_id: int,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    max_model_len: int | None = None,
    max_nfe: int | None = None,
    max_run: int | None = None,
    result: Result | None = None,
) -> Result:
    """Decodes one request greedily from a script; see the module's words."""
    size, prompt_len = block_size, len(prompt)
    limit = prompt_len + max_tokens
    if max_model_len is not None:
        limit = min(limit, max_model_len)
    result = Result() if result is None else result

    # Prefill: the prompt's whole blocks are cached; its rest shares a block with the first
    # generated tokens.
    blocks: list[Block] = []
    for start in range(0, prompt_len, size):
        cells: list[int | None] = list(prompt[start : start + size])
        whole = len(cells) == size
        cells += [None] * (size - len(cells))
        blocks.append(Block(start, cells, IN_CACHE if whole else ACTIVE))

    def generated() -> list[int | None]:
        return [cell for block in blocks for cell in block.cells][prompt_len:]

    def settled() -> list[int]:
        run: list[int] = []
        for cell in generated()[: limit - prompt_len]:
            if cell is None:
                break
            run.append(cell)
        return run

    for forward_token, forward_prob in zip(token, prob, strict=True):
        # Open at most one block, from what the last step left.
        live = [block for block in blocks if block.status != IN_CACHE]
        next_start = len(blocks) * size
        terminal = any(cell in eos_ids for cell in generated() if cell is not None)
        allowed = next_start < limit and not terminal and len(live) < buffer_size
        if allowed and (not live or live[-1].progress() >= np.float32(add_block_threshold)):
            blocks.append(Block(next_start, [None] * size, ACTIVE))
            live.append(blocks[-1])

        # The forward: every decision is taken on the state before any of this step's writes.
        stored = [block for block in live if block.status == TO_CACHE]
        writes: list[tuple[Block, int, int]] = []
        for slot, block in enumerate(live):
            if block.status != ACTIVE:
                continue
            laws = {}
            for offset in block.holes():
                position = block.start + offset
                laws[offset] = law_of(
                    int(forward_token[position]), forward_prob[position], mask_id, vocab_size
                )
            previous = live[slot - 1] if slot else None
            chosen = rule(block, previous, list(laws.items())) if laws else []
            writes += [(block, offset, laws[offset].token) for offset in chosen]
            block.forwards += 1
        for block, offset, written in writes:
            block.cells[offset] = written

        # Complete blocks wait for the cache only behind complete blocks.
        for block in live:
            if block.status == ACTIVE:
                if block.holes():
                    break
                block.status = TO_CACHE

        result.nfe += 1
        run = settled()
        stop = next((i for i, cell in enumerate(run) if cell in eos_ids), None)
        if stop is not None:
            run, result.finish_reason = run[:stop], "stop"
        elif len(run) == limit - prompt_len:
            result.finish_reason = "length"
        elif max_nfe is not None and result.nfe >= max_nfe:
            result.finish_reason = "nfe"
        elif max_run is not None and _trailing_run(run) >= max_run:
            result.finish_reason = "repetition"
        result.output = run
        if result.finish_reason is not None:
            result.steps.append(Step(None, None, None, len(writes)))
            return result

        for block in stored:
            block.status = IN_CACHE
        result.steps.append(_draw(blocks, buffer_size, size, mask_id, len(writes)))
    return result


def list_ar(
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    max_tokens: int,
    mask_id: int,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    max_model_len: int | None = None,
    max_nfe: int | None = None,
) -> Result:
    """One token after the other: the first is known after prefill, by row 0 as for forward 0.

    Forward `i` runs the last known token (the anchor), which enters the cache, and tells the next.
    Nothing is tested before the first forward has run.
    """
    limit = len(prompt) + max_tokens
    if max_model_len is not None:
        limit = min(limit, max_model_len)
    first = law_of(int(token[0][len(prompt)]), prob[0][len(prompt)], mask_id, vocab_size).token
    text, result = [*prompt, first], Result()
    for forward_token, forward_prob in zip(token, prob, strict=True):
        end = len(text)
        text.append(law_of(int(forward_token[end]), forward_prob[end], mask_id, vocab_size).token)
        result.nfe += 1
        run = text[len(prompt) : limit]
        stop = next((i for i, cell in enumerate(run) if cell in eos_ids), None)
        if stop is not None:
            run, result.finish_reason = run[:stop], "stop"
        elif len(text) >= limit:
            result.finish_reason = "length"
        elif max_nfe is not None and result.nfe >= max_nfe:
            result.finish_reason = "nfe"
        result.output = run
        if result.finish_reason is not None:
            result.steps.append(Step(None, None, None, 1))
            break
        result.steps.append(Step(end, [[text[end], mask_id]], [ACTIVE], 1))
    return result


def _trailing_run(tokens: list[int]) -> int:
    return next((n for n, t in enumerate(reversed(tokens)) if t != tokens[-1]), len(tokens))


def _draw(blocks: list[Block], buffer_size: int, size: int, mask_id: int, new: int) -> Step:
    live = [block for block in blocks if block.status != IN_CACHE]
    tokens = [[mask_id if cell is None else cell for cell in block.cells] for block in live]
    status = [block.status for block in live]
    for _ in range(buffer_size - len(live)):
        tokens.append([mask_id] * size)
        status.append(DUMMY)
    cached = sum(block.status == IN_CACHE for block in blocks)
    return Step(cached * size, tokens, status, new)
