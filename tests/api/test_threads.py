"""One `LLM` in several threads and processes.

Every thread gets the outputs of its own prompts; a forked child is refused by name. A server's
engine is a fresh process: test_server.py.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import dllm_jax as dj
from dllm_jax.strategies.multi_bd import MultiBD

PROMPTS = [f"Ann has {n} apples." for n in range(8)]
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*is a chat model"),
]
PARAMS = dj.SamplingParams(max_tokens=12)


def make_llm(folder):
    config = dj.EngineConfig(max_num_seqs=4, max_model_len=64, slot_buckets=(4,))
    return dj.LLM(folder, config=config, warm_up=False, progress=False)


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm(random_folder):
    return make_llm(random_folder)


@pytest.fixture(scope="module")
def alone(llm):
    return ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def test_threads_get_the_outputs_of_their_own_prompts(llm, alone):
    def call(i):
        if i % 3 == 2:
            events = list(llm.stream(PROMPTS[i], PARAMS))
            return [[token for event in events for token in event.token_ids]]
        return ids(llm.generate([PROMPTS[i]], PARAMS, use_tqdm=False))

    places = [i % 8 for i in range(24)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, places))
    assert found == [[alone[i]] for i in places]
    assert not llm.engine.has_work


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_forked_child_is_refused_by_name(llm, alone, random_folder):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (lambda: llm.generate(PROMPTS[0]), lambda: make_llm(random_folder)):
            try:
                call()
            except RuntimeError as error:
                os.write(writing, f"{error}\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
    reported = os.read(reading, 4096).decode().splitlines()
    assert len(reported) == 2
    assert all("forked from one that has an engine" in line for line in reported)


def test_a_panic_of_the_tokenizer_ends_its_request_alone(llm, alone, monkeypatch):
    """Pyo3's PanicException is no `Exception`."""

    class Panic(BaseException):
        pass

    call = type(llm.model.tokenizer).__call__

    def panicking(self, text, **settings):
        if text == PROMPTS[1]:
            raise Panic("index out of bounds")
        return call(self, text, **settings)

    monkeypatch.setattr(type(llm.model.tokenizer), "__call__", panicking)
    first, second = llm.generate(PROMPTS[:2], PARAMS, use_tqdm=False)
    assert ids([first]) == alone[:1]
    assert second.error is not None
    assert "cannot encode the text (index out of bounds)" in second.error


class BrokenByFour(MultiBD):
    """A strategy that cannot be traced for four rows."""

    def step(self, forward, state):
        if state.buffer.tokens.shape[0] == 4:
            raise TypeError("four rows are too many")
        return super().step(forward, state)


def test_a_step_that_four_rows_cannot_take_ends_those_requests_only(random_folder):
    strategy = BrokenByFour(block_size=8, buffer_size=2)
    llm = dj.LLM(random_folder, strategy, warm_up=False, max_num_seqs=4, max_model_len=64)
    for output in llm.generate(PROMPTS[:4], PARAMS, use_tqdm=False):
        assert output.outputs[0].finish_reason == "error"
        assert "four rows are too many" in output.error
    (output,) = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
    assert output.error is None
