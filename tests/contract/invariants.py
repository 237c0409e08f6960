"""The invariants of docs/contract.md, checked for one request step by step."""

from typing import Any

import jax
import numpy as np

from dllm_jax.strategies.core.state import DUMMY, RUNNING, TO_CACHE, DecodeState, StepInfo


class Watcher:
    """Sees a request's slot before and after each step, wherever that slot is.

    `steps` keeps what was seen while the request ran, `last` the slot after the last step.
    """

    def __init__(self, prompt: tuple[int, ...]):
        self.prompt = prompt
        self.steps: list[tuple[DecodeState, StepInfo]] = []
        self.last: Any = None
        self.settled: dict[int, int] = {}
        self.settled_end = 0

    def see(self, old: DecodeState, new: DecodeState, info: StepInfo) -> None:
        if old.finish != RUNNING:
            jax.tree.map(np.testing.assert_array_equal, old, new)
            assert all(int(x) == 0 for x in jax.tree.leaves(info)), "a frozen row reports nothing"
            self.last = new
            return
        old_buffer, buffer = old.buffer, new.buffer
        assert buffer.start == old_buffer.start + info.commit_len >= old_buffer.start
        assert info.nfe >= 1
        assert buffer.nfe == old_buffer.nfe + info.nfe
        assert 0 <= info.commit_len <= info.settled_len
        order = [{TO_CACHE: 0, DUMMY: 2}.get(int(s), 1) for s in buffer.status]
        assert order == sorted(order), f"statuses {buffer.status}"
        assert not buffer.filled[buffer.status == DUMMY].any()
        end = int(old_buffer.start + info.settled_len)
        assert end >= self.settled_end, "settled text shrank"
        window = {
            int(buffer.start) + i: (int(t), bool(f))
            for i, (t, f) in enumerate(
                zip(buffer.tokens.ravel(), buffer.filled.ravel(), strict=True)
            )
        }
        for position, (token, filled) in window.items():
            if position < len(self.prompt):
                assert (token, filled) == (self.prompt[position], True)
            if position in self.settled:
                assert (token, filled) == (self.settled[position], True), f"{position=} changed"
            if position < end:
                assert filled
                self.settled[position] = token
        given = new.limits.given
        if given is not None and (not new.limits.given_behind or buffer.start == len(self.prompt)):
            # Of a window that is where it was when the request came.
            assert buffer.filled.ravel()[given].all()
            assert (buffer.tokens == old_buffer.tokens).ravel()[given].all(), "a given cell changed"
        text = new.output[: new.output_len].tolist()
        kept = old.output[: old.output_len].tolist()
        assert text[: len(kept)] == kept, "emitted text changed"
        for position, token in self.settled.items():
            if 0 <= position - len(self.prompt) < len(text):
                assert text[position - len(self.prompt)] == token, "emitted is not what settled"
        self.settled_end = end
        self.steps.append((old, info))
        self.last = new
