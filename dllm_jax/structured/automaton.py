"""From an automaton over bytes to one over classes of tokens, closed by stop ids."""

import dataclasses
from collections.abc import Sequence

import numpy as np

UNREACHABLE = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A closed automaton; state 0 is dead and class 0 never taken.

    Attributes:
        class_of: Class of each id.
        delta: Next state by state and class.
        start: First state.
        end: The state behind a stop id.
        distance: Fewest tokens from a state to one in which the text may end.
    """

    class_of: np.ndarray
    delta: np.ndarray
    start: int
    end: int
    distance: np.ndarray


def closed(
    table: np.ndarray,
    accepting: np.ndarray,
    spelt: Sequence[bytes | None],
    stop_ids: Sequence[int],
    never: np.ndarray,
) -> TokenAutomaton:
    """The automaton over tokens, with the end behind its stop ids.

    Raises:
        ValueError: No text of it can be spelt.
    """
    forbidden = {*map(int, never), *map(int, stop_ids)}
    ids = [i for i, one in enumerate(spelt) if one is not None and i not in forbidden]
    S = len(table)
    class_of = np.zeros(len(spelt), np.int32)
    maps: list[np.ndarray] = [np.zeros(S, np.int64)]
    known = {maps[0].tobytes(): 0}
    by_length: dict[int, list[int]] = {}
    for i in ids:
        by_length.setdefault(len(spelt[i] or b""), []).append(i)
    for length, group in by_length.items():
        for first in range(0, len(group), 4096):
            part = group[first : first + 4096]
            letters = np.frombuffer(b"".join(spelt[i] or b"" for i in part), np.uint8)
            letters = letters.reshape(len(part), length)
            state = np.broadcast_to(np.arange(S), (len(part), S))
            for place in range(length):
                state = table[state, letters[:, place : place + 1]]
            for i, row in zip(part, state, strict=True):
                if row.any():
                    key = row.tobytes()
                    if key not in known:
                        known[key] = len(maps)
                        maps.append(row.copy())
                    class_of[i] = known[key]
    end, stop = S, len(maps)
    delta = np.zeros((S + 1, stop + 1), np.int32)
    delta[:S, :stop] = np.stack(maps, axis=1)
    delta[:S, stop] = np.where(accepting, end, 0)
    delta[end] = end
    for i in stop_ids:
        if 0 <= i < len(class_of):
            class_of[i] = stop
    distance = np.where([*accepting, True], 0, UNREACHABLE)
    for _ in range(len(delta)):
        nearest = np.where(delta[:, 1:] > 0, distance[delta[:, 1:]], UNREACHABLE).min(axis=1)
        nearer = np.minimum(distance, nearest + 1)
        if (nearer == distance).all():
            break
        distance = nearer
    distance[0] = UNREACHABLE
    if distance[1] >= UNREACHABLE:
        raise ValueError("the model's tokens spell no text of the constraint; give another")
    # What cannot end is as good as dead.
    delta[distance[delta] >= UNREACHABLE] = 0
    return TokenAutomaton(class_of, delta, 1, end, distance.astype(np.int32))
