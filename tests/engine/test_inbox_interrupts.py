"""Proves that Ctrl-C inside `add`, once or twice, leaves no request without an owner.

Real signals arrive at every line of the engine's sources that `add` runs, over a fake device. A
request that nobody owns would keep `has_work` true, and a loop over `step` would never end.
"""

import random
import signal
import sys
from contextlib import contextmanager, suppress

import pytest

from dllm_jax.engine import inbox
from tests.oracles.engine_world import HOST, World

FOLDER = inbox.__file__.rpartition("/")[0]
MOST_LINES = 600  # of an `add`


CLEAN_UP = {"__exit__", "close", "drop", "abort", "_end", "_abort_dropped", "_abandon"}


@contextmanager
def signalled_at(lines, second=None):
    """SIGINT before each of these lines, counted over the sources of the engine.

    Args:
        second: Also before this line of those after them that clean up.
    """
    count, cleaning = [0], [0]

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            count[0] += 1
            cleaning[0] += count[0] > min(lines, default=0) and frame.f_code.co_name in CLEAN_UP
            if count[0] in lines or cleaning[0] == second:
                cleaning[0] += 1
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def interrupted_add(lines, by_inbox):
    """The lines that an `add` ran until it returned or was interrupted, and what it left."""
    world = World(HOST, random.Random(7))
    engine = inbox.SharedEngine(world.device, world.tokenizer, clock=world.clock)
    request = world._draw_request(random.Random(3))
    box, owned = engine.inbox(), set()
    with signalled_at(lines) as count, suppress(KeyboardInterrupt):
        owned.add(box.add(request) if by_inbox else engine.add(request))
    ran = count[0]
    box.close()
    for request_id in owned:
        engine.abort(request_id)
    for _ in range(3):
        engine.step()
    return ran, engine


@pytest.mark.slow("21|5|8")
@pytest.mark.parametrize("by_inbox", [False, True])
@pytest.mark.parametrize("second", [None, 1, 2, 3, 5, 8, 13, 21])
def test_ctrl_c_inside_add_leaves_no_request_without_an_owner(second, by_inbox):
    """Item 19: a second Ctrl-C acts at once, wherever it arrives."""
    left_over, tried = [], 0
    for first in range(1, MOST_LINES):
        lines = {first} if second is None else {first, first + second}
        ran, engine = interrupted_add(lines, by_inbox)
        if engine.has_work or engine._requests:
            left_over.append(first)
        if ran < first:
            break
        tried += 1
    assert 20 < tried < MOST_LINES - 1
    assert left_over == []


def interrupted_run(lines, second, by_stream):
    """The lines that a run of three requests had, and the engine that it left."""
    world = World(HOST, random.Random(7))
    engine = inbox.SharedEngine(world.device, world.tokenizer, clock=world.clock)
    rng = random.Random(3)
    requests = [world._draw_request(rng) for _ in range(3)]
    with (
        signalled_at(lines, second) as count,
        suppress(KeyboardInterrupt),
        engine.inbox() as box,
    ):
        for request in requests:
            box.add(request)
        for _ in inbox.TextEvents(box, every=True) if by_stream else box:
            pass
    ran, box = count[0], None  # as where `generate` returns to its caller
    for _ in range(3):
        engine.step()
    return ran, engine


# Python reports an interrupt in `Inbox.__del__`, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("by_stream", [False, True])
def test_a6_a_second_ctrl_c_in_a_run_leaves_no_request_without_an_owner(by_stream):
    """The first arrives anywhere, the second while that is handled."""
    num_lines, _ = interrupted_run(set(), None, by_stream)
    handler = signal.getsignal(signal.SIGINT)
    for first in range(300, num_lines, num_lines // 3):
        for second in range(1, 40, 2):
            _, engine = interrupted_run({first}, second, by_stream)
            assert not engine.has_work, (first, second)
            assert not engine._requests, (first, second)
            assert signal.getsignal(signal.SIGINT) is handler
