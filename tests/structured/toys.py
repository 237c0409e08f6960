"""Small random automata over ids, and what NumPy says of them by trying every text."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.strategies.core.constraint import UNREACHABLE
from dllm_jax.structured import TokenAutomaton


@dataclasses.dataclass(frozen=True, eq=False)
class Toy(TokenAutomaton):
    """A closed automaton: state 0 is dead, class 0 never taken, the last class holds stop ids."""

    def after(self, state: int, tokens) -> int:
        """The state behind some tokens."""
        for token in tokens:
            state = int(self.delta[state, self.class_of[token]])
        return state

    def may_end(self, state: int) -> bool:
        """Whether a text may end in a state."""
        return self.distance[state] == 0


def closed(class_of, delta, accepting, start) -> Toy:
    """Add the end, and the distances, to an automaton whose last class holds the stop ids."""
    end = len(delta)
    delta = np.concatenate([delta, np.full((1, delta.shape[1]), end)])
    delta[:end, -1] = np.where(accepting, end, 0)
    delta[0], delta[:end, 0] = 0, 0
    distance = np.where([*accepting, True], 0, UNREACHABLE)
    distance[0] = UNREACHABLE
    for _ in range(len(delta)):
        nearest = np.where(delta > 0, distance[delta], UNREACHABLE).min(axis=1)
        distance = np.minimum(distance, np.minimum(nearest + 1, UNREACHABLE))
    return Toy(class_of, delta, start, end, distance.astype(np.int32))


def stacked(rows):
    """Grammars of slots, one a row."""
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *rows)


def random_toy(rng, num_ids=7, stop_id=6, never=(0,), states=4, classes=3) -> Toy:
    """An automaton from whose start some text ends."""
    while True:
        class_of = rng.integers(1, classes + 1, num_ids)
        class_of[stop_id], class_of[list(never)] = classes + 1, 0
        shape = (states + 1, classes + 2)
        delta = np.where(rng.random(shape) < 0.5, rng.integers(1, states + 1, shape), 0)
        accepting = rng.random(states + 1) < 0.3
        accepting[0] = False
        toy = closed(class_of.astype(np.int32), delta.astype(np.int32), accepting, 1)
        whole = set(class_of) >= set(range(1, classes + 2))
        if whole and toy.distance[1] < UNREACHABLE:
            return toy


def relative(toy: Toy, score):
    """Scores [cells, ids] less the best of each cell that some state takes."""
    taken = [token for token, c in enumerate(toy.class_of) if c and toy.delta[: toy.end, c].any()]
    return score - score[:, taken].max(axis=1, keepdims=True)


def best_text(toy: Toy, at: int, room: int, cells, score):
    """The value of the best text, by trying all; None where there is none.

    Args:
        cells: "skip", "hole" or a token.
        score: By cell and id.
    """
    asked = [i for i, cell in enumerate(cells) if cell != "skip"]
    choices = [range(score.shape[1]) if cells[i] == "hole" else [cells[i]] for i in asked]
    best = None
    for text in itertools.product(*choices):
        state, value = at, 0.0
        for i, token in zip(asked, text, strict=True):
            if cells[i] == "hole" and state != toy.end:
                value += score[i, token]
            state = toy.after(state, [token])
        if toy.distance[state] <= room and (best is None or value > best):
            best = value
    return best
