"""A trajectory as frames: the changes of each step, in absolute positions.

The page and the pictures both draw these frames. A frame is the state after a step and its slide,
with the events of that step.
"""

import dataclasses
import math

import numpy as np

from dllm_jax.trace.trajectory import Step, Trajectory

HOLE = -1
NO_PROBABILITY = -1


@dataclasses.dataclass(frozen=True)
class Frame:
    """The state after one step.

    Attributes:
        start: Position of the window's first cell; everything before it is in the cache.
        status: State of each block of the window: 0 not open, 1 active, 2 about to enter the cache.
        nfe: Forwards so far.
        num_settled: Tokens of the text that cannot change any more.
        commit_len: Tokens that entered the cache in this step.
        put: (position, token, probability in thousandths) of cells whose token or probability
            changed; HOLE for a removed token, NO_PROBABILITY if the model was not run.
        guesses: The same for holes, with the model's prediction in this step.
        accepted: Positions filled in this step.
        edited: (position, previous token) of replaced tokens.
    """

    start: int
    status: list[int]
    nfe: int
    num_settled: int
    commit_len: int
    put: list[tuple[int, int, int]]
    guesses: list[tuple[int, int, int]]
    accepted: list[int]
    edited: list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Replay:
    """All frames of a text, the first before any step.

    Attributes:
        first: Position of the first cell that is shown; the prompt before it was cached at once.
        end: One past the last cell that is shown.
        block_size: Tokens of a block of the grid; 0 if blocks are too small or off the grid.
    """

    first: int
    end: int
    block_size: int
    frames: list[Frame]


def replay(trajectory: Trajectory) -> Replay:
    """The frames of a trajectory.

    Raises:
        ValueError: The trajectory has no steps.
    """
    steps = trajectory.steps
    if not steps:
        raise ValueError("the trajectory has no steps: nothing was decoded")
    before = steps[0].before
    first, (num_blocks, size) = before.start, before.tokens.shape
    seen: dict[int, tuple[int, int]] = {}
    frames = [_first_frame(steps[0], seen)]
    for step in steps:
        frames.append(_frame(trajectory, step, seen, frames[-1].nfe))
    frames[-1] = dataclasses.replace(frames[-1], num_settled=len(trajectory.tokens))
    on_grid = all((step.before.start - first) % size == 0 for step in steps)
    is_grid = on_grid and size > 2
    # Blocks that were not opened are shown only up to the limit of the text.
    touched = max(seen, default=first) + 1
    opened = max(frame.start + sum(map(bool, frame.status)) * size for frame in frames)
    end = max(min(first + num_blocks * size, trajectory.limit), touched, opened)
    end = first + -(-(end - first) // size) * size if is_grid else max(touched, opened)
    return Replay(first, end, size if is_grid else 0, frames)


def _first_frame(step: Step, seen: dict[int, tuple[int, int]]) -> Frame:
    window = step.before
    for cell in np.flatnonzero(window.tokens.ravel() >= 0).tolist():
        seen[window.start + cell] = (int(window.tokens.ravel()[cell]), NO_PROBABILITY)
    put = [(position, *value) for position, value in seen.items()]
    status = window.status.tolist()
    return Frame(window.start, status, 0, 0, 0, put, [], [], [])


def _frame(trajectory: Trajectory, step: Step, seen: dict[int, tuple[int, int]], nfe: int) -> Frame:
    start = step.before.start
    put, guesses, edited = [], [], []
    predictions = zip(
        step.predicted.ravel().tolist(), step.confidence.ravel().tolist(), strict=True
    )
    for cell, (token, (guess, confidence)) in enumerate(
        zip(step.after.tokens.ravel().tolist(), predictions, strict=True)
    ):
        position, share = start + cell, _thousandths(confidence)
        old = seen.get(position)
        if token < 0:
            if seen.pop(position, None) is not None:
                put.append((position, HOLE, NO_PROBABILITY))
            if guess >= 0:
                guesses.append((position, guess, share))
            continue
        if old is not None and old[0] == token and guess != token:
            continue  # a filled cell keeps its token
        new = (token, share if guess == token else NO_PROBABILITY)
        if new != old:
            seen[position] = new
            put.append((position, *new))
        if old is not None and old[0] != token:
            edited.append((position, old[0]))
    accepted = (start + np.flatnonzero(step.accepted.ravel())).tolist()
    size = step.after.tokens.shape[1]
    gone = step.commit_len // size
    status = step.after.status.tolist()[gone:] + [0] * gone
    settled = min(start + step.settled_len, trajectory.limit) - len(trajectory.prompt)
    return Frame(
        start=start + step.commit_len,
        status=status,
        nfe=nfe + step.nfe,
        num_settled=min(max(0, settled), len(trajectory.tokens)),
        commit_len=step.commit_len,
        put=put,
        guesses=guesses,
        accepted=accepted,
        edited=edited,
    )


def _thousandths(confidence: float) -> int:
    return NO_PROBABILITY if math.isnan(confidence) else round(1000 * confidence)
