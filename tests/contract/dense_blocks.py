"""Block decoding as a growing list, cache-free: the truth of every strategy with a block grid.

The network runs over the whole text again for every step; a rule says what to write in a block and
whether it may leave. Nothing here imports `strategies`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.contract.dense import Law, Net, Seen, Truth, step_key
from tests.contract.harness import Request


@dataclasses.dataclass
class Block:
    """A block after the cached text; `None` is a hole."""

    start: int
    cells: list[int | None]
    ready: bool = False
    steps: int = 0
    soft: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def holes(self) -> list[int]:
        return [i for i, cell in enumerate(self.cells) if cell is None]

    def progress(self) -> float:
        return 1 - len(self.holes()) / len(self.cells)


# A rule looks at a block, the progress of the one before it and the laws of its cells, writes the
# block, and says whether the block may leave.
Rule = Callable[[Block, float, dict[int, Law], Request, int], bool]


def _complete(block: Block, request: Request) -> bool:
    return all(block.start + i >= request.limit for i in block.holes())


def threshold_rule(accept: float, semi: float) -> Rule:
    """All holes above `accept`, or the surest one after a block with progress `semi`.

    A request may bring an `accept_threshold` of its own.
    """

    def rule(block: Block, before: float, laws: dict[int, Law], request: Request, nfe: int) -> bool:
        drawn = {
            i: laws[i].draw(request.temperature, step_key(request, nfe, block.start + i))
            for i in block.holes()
        }
        least = dict(request.knobs).get("accept_threshold", accept)
        above = [i for i, (_, sure) in drawn.items() if sure > least]
        if not above and drawn and before >= np.float32(semi):
            above = [min(drawn, key=lambda i: (-drawn[i][1], i))]
        for i in above:
            block.cells[i] = drawn[i][0]
        return _complete(block, request)

    return rule


def decode_blocks(
    net: Net,
    request: Request,
    rule: Rule,
    *,
    size: int,
    depth: int,
    add: float = math.inf,
    prompt: str = "grid_causal",
    settles_ready: bool = False,
    soft_commits: dict[int, np.ndarray] | None = None,
) -> Truth:
    """Block decoding; `log` holds how many blocks each step committed.

    Args:
        add: Progress of the last block at which the next one opens.
        prompt: Prompt mode of the contract; the "full" ones keep the prompt's own pass apart.
        settles_ready: Only blocks that may leave are settled, not the hole-free run.
        soft_commits: Takes what each position showed where its block left, and the blocks after
            see that; None: blocks leave as plain tokens.
    """
    truth, length = Truth(), len(request.prompt)
    cached = length if prompt.startswith("whole") else length // size * size
    done, tail = list(request.prompt[:cached]), list(request.prompt[cached:])
    blocks = [Block(cached, tail + [None] * (size - len(tail)))] if tail else []
    first = cached
    while True:
        cells = [cell for block in blocks for cell in block.cells]
        stopped = any(c in request.stops for c in (done + cells)[length:])
        end = blocks[-1].start + size if blocks else len(done)
        ready = not blocks or blocks[-1].progress() >= np.float32(add)
        if ready and len(blocks) < depth and end < request.limit and not stopped:
            blocks.append(Block(end, [None] * size))
        laws = _block_laws(net, request, done, blocks, first, size, prompt, soft_commits)
        leaving = [block for block in blocks if block.ready]
        if soft_commits is not None:
            soft_commits |= {b.start + i: row for b in leaving for i, row in b.soft.items()}
        before = [1.0] + [block.progress() for block in blocks]
        open_blocks = [(b, p) for b, p in zip(blocks, before[:-1], strict=True) if not b.ready]
        done_now = [
            rule(
                block,
                progress,
                {i: laws[block.start + i] for i in range(size) if block.start + i in laws},
                request,
                truth.nfe,
            )
            for block, progress in open_blocks
        ]
        for (block, _), may in zip(open_blocks, done_now, strict=True):
            if not may:
                break
            block.ready = True
        truth.nfe += 1
        truth.log.append(len(leaving))
        kept = [b for b in blocks if b.ready] if settles_ready else blocks
        text = (done + [cell for block in kept for cell in block.cells])[length : request.limit]
        run = text.index(None) if None in text else len(text)
        if truth.see(text[:run], request):
            return truth
        for block in leaving:
            done += block.cells  # type: ignore[arg-type]
        blocks = blocks[len(leaving) :]


def _block_laws(
    net: Net,
    request: Request,
    done: list[int],
    blocks: list[Block],
    first: int,
    size: int,
    prompt: str,
    soft_commits: dict[int, np.ndarray] | None,
) -> dict[int, Law]:
    """The law of every cell after the prefilled prompt that some row speaks about."""
    left = {} if soft_commits is None else soft_commits
    inputs: list[Any] = [left.get(p, done[p]) for p in range(first, len(done))]
    for block in blocks:
        for i, cell in enumerate(block.cells):
            soft = None if block.ready and soft_commits is None else block.soft.get(i)
            inputs.append(soft if soft is not None else net.mask if cell is None else cell)
    logits = block_rows(net, request, inputs, first, size, prompt).logits
    own = len(logits) - len(inputs)

    def row(position: int) -> int:
        return position if position < first else own + position - first

    cells = range(first, first + len(inputs))
    if net.shift:
        return {p: net.law(logits[row(p - 1)]) for p in cells if p}
    return {p: net.law(logits[row(p)]) for p in cells}


def block_rows(
    net: Net, request: Request, inputs: Sequence[Any], first: int, size: int, prompt: str
) -> Seen:
    """Rows of the prompt's own pass, then `inputs` from position `first` on.

    The own pass is all of the prompt where its mode is "full", else what precedes `first`. The
    others see of it what precedes `first`, and each other by block.
    """
    own = len(request.prompt) if prompt.endswith("full") else first
    position = np.concatenate([np.arange(own), first + np.arange(len(inputs))]).astype(int)
    is_own = np.arange(len(position)) < own
    grid = (position - first) // size
    sees = grid[None] <= grid[:, None]
    sees &= ~is_own[None] | (position < first)[None]
    sees &= ~(is_own[:, None] & ~is_own[None])
    within = is_own[:, None] & is_own[None]
    if prompt.endswith("full"):
        sees |= within
    elif prompt == "whole_causal":
        sees &= ~within | (position[None] <= position[:, None])
    return net([*request.prompt[:own], *inputs], position, sees)


def text_kv(
    net: Net, request: Request, text: list[int], size: int, prompt: str = "grid_causal"
) -> list[tuple[Any, Any]]:
    """K and V of each layer that a cache of the final `text` must hold."""
    length = len(request.prompt)
    first = length if prompt.startswith("whole") else length // size * size
    kv = block_rows(net, request, text[first:], first, size, prompt).kv

    def of_text(rows: np.ndarray) -> np.ndarray:
        own = len(rows) - len(text[first:])
        return np.concatenate([rows[:first], rows[own:]])

    return [(of_text(k), of_text(v)) for k, v in kv]
