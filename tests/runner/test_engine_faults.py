"""A fault ends what it concerns, with a reason, and nothing else.

On the real device programs over the gate's cases: values that are not finite, tokenizers that
raise, programs that fail once or for good, memory that runs out.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.engine.layout import DeviceFailure
from dllm_jax.engine.requests import SamplingParams
from dllm_jax.loading.model import Model
from dllm_jax.runner import programs
from dllm_jax.runner.state import DeviceState
from tests.contract import engine as toy
from tests.contract.cases import NAMES, case, sweep
from tests.contract.engine import ends, make_engine, run, steps_a_chunk, wanted, wish
from tests.contract.models import PADDED

pytestmark = pytest.mark.long

BROKEN_ID = PADDED  # never predicted: only a prompt brings it


def with_params(name, **changed):
    """The case's model under other weights; its programs stay compiled."""
    model = case(name).model
    return model.replace(params=model.params | changed)


def poisoned(name, token=BROKEN_ID):
    """A device whose model has no number for one id."""
    embed = case(name).model.params["embed"]
    return toy.make_device(name, with_params(name, embed=embed.at[token].set(jnp.nan)))


def is_finite(device):
    device.wait()
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(device.state.pools))


# --- values that are not finite -------------------------------------------------------------------


SOME = ("multi_bd", "d2f_whole_full", "fast_dllm_v2", "ar", "dflash", "full_sequence")


# These feed back expected embeddings: one broken row is in all of them.
EXPECTING = {"diffusion_gemma", "diffusion_gemma_alone"}


@pytest.mark.slow("fast_dllm_v2|dflash|full_sequence")
@pytest.mark.parametrize("name", sweep(SOME, [name for name in NAMES if name not in EXPECTING]))
def test_a_nan_in_the_prompt_ends_that_request_alone(name):
    """At its start (prefill, or the window at once), in a later page, in the last cell."""
    device = poisoned(name)
    healthy = case(name).requests
    for place in (0, 12, len(healthy[1].prompt) - 1):
        prompt = list(healthy[1].prompt)
        prompt[place] = BROKEN_ID
        broken = dataclasses.replace(healthy[1], prompt=tuple(prompt))
        engine = make_engine(name, device)
        alone = run(engine, [wish(broken)])[0]
        assert not engine.scheduler.pool._key_of, "something of it can be found"
        first, bad, last = run(engine, [wish(healthy[0]), wish(broken), wish(healthy[2])])
        assert ends([first, last]) == [wanted(name, healthy[0]), wanted(name, healthy[2])]
        for output in (alone, bad):
            assert output.outputs[0].finish_reason == "error"
            assert output.outputs[0].token_ids == []
            assert "not finite" in output.error
            assert output.metrics.cached_tokens == 0
    assert is_finite(device)


@pytest.mark.parametrize("name", ["multi_bd", "d2f_whole_full", "fast_dllm_v2", "ar"])
def test_a_nan_while_decoding_keeps_what_was_settled_before(name):
    """The id whose embedding is broken is one that a request writes itself."""
    request = dataclasses.replace(case(name).requests[1], max_tokens=28, temperature=3.0)
    tokens, _, nfe = wanted(name, request)
    others = [case(name).requests[0]]
    theirs = {*request.prompt, *others[0].prompt, *wanted(name, others[0])[0]}
    # The one it comes to last.
    *_, own = (t for t in sorted(set(tokens), key=tokens.index) if t not in theirs)
    device = poisoned(name, own)
    engine = make_engine(name, device)
    with steps_a_chunk(1):
        bad, *rest = run(engine, [wish(request), *map(wish, others)])
    assert bad.outputs[0].finish_reason == "error"
    assert 0 < bad.metrics.nfe < nfe
    assert bad.outputs[0].token_ids == tokens[: len(bad.outputs[0].token_ids)]
    assert ends(rest) == [wanted(name, r) for r in others]
    assert is_finite(device)
    (again,) = run(engine, [wish(request)])
    assert ends([again]) == ends([bad]), "what it left in the prefix cache is sound"


@pytest.mark.slow("diffusion_gemma|dflash")
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 4}])
@pytest.mark.parametrize(
    "name", ["multi_bd", "ar", "dflash", "diffusion_gemma_alone", "full_sequence"]
)
def test_a_broken_head_ends_everything_with_error(name, sampling):
    """Hidden rows are sound, so prefill is; the readout is not."""
    own = "embed" if name == "diffusion_gemma_alone" else "lm_head"
    head = case(name).model.params[own]
    device = toy.make_device(name, with_params(name, **{own: head.at[3].set(jnp.nan)}))
    engine = make_engine(name, device)
    for output in run(engine, [wish(r, **sampling) for r in case(name).requests]):
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].token_ids == []
    assert not engine.scheduler.pool._key_of
    assert is_finite(device)


def test_a_prefix_that_breaks_when_it_is_computed_again_stays_broken():
    """What is put back after it says RUNNING."""
    name = "multi_bd"
    request = dataclasses.replace(case(name).requests[1], max_tokens=20)
    engine = make_engine(name, poisoned(name), prefix_caching=False)
    saves = []

    def between(engine):
        for sequence in list(engine.scheduler.live):
            if not saves and sequence.saved is not None:
                saves.append(sequence.saved)
                sequence.prompt[0] = BROKEN_ID  # as memory would that forgot a bit
                engine.scheduler.preempt(sequence)

    with steps_a_chunk(1):
        (got,) = run(engine, [wish(request)], between)
    assert saves
    assert got.outputs[0].finish_reason == "error"


# --- what a request brings itself -----------------------------------------------------------------


class Tokenizer:
    """Ids as letters; it cannot bear one id."""

    def __init__(self, unbearable):
        self._unbearable = unbearable

    def decode(self, ids, **_):
        if self._unbearable in ids:
            raise KeyError(f"no piece for id {self._unbearable}")
        return "".join(chr(ord("A") + token) for token in ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizer_that_raises_ends_its_request_alone(stream):
    name = "multi_bd"
    requests = case(name).requests
    texts = [wanted(name, r)[0] for r in requests]
    own = next(t for t in texts[1] if t not in {*texts[0], *texts[2]})
    engine = make_engine(name, engine={"tokenizer": Tokenizer(own)})
    asked = [dataclasses.replace(wish(r), stream=stream) for r in requests]
    first, bad, last = run(engine, asked)
    assert ends([first, last]) == [wanted(name, requests[0]), wanted(name, requests[2])]
    assert first.outputs[0].text == "".join(chr(ord("A") + t) for t in texts[0])
    assert bad.outputs[0].finish_reason == "error"
    assert "KeyError" in bad.error


def test_a_prompt_the_tokenizer_cannot_read_fails_alone():
    name = "multi_bd"
    requests = case(name).requests

    class Reader(Tokenizer):
        chat_template, get_added_vocab = None, dict

        def __call__(self, text, **_):
            if not text.isdecimal():
                raise LookupError(f"no ids for {text!r}")
            return {"input_ids": list(requests[int(text)].prompt)}

    config = toy.config_of(name, page_buckets=toy.device(name).layout.page_buckets)
    with mock.patch.object(Model, "tokenizer", Reader(-1)):
        llm = dj.LLM(case(name).model, case(name).strategy, config=config, warm_up=False)
        got = llm.generate(["0", "one", "0"], SamplingParams(max_tokens=14))
    assert ends([got[0]]) == ends([got[2]])
    assert (got[0].outputs[0].finish_reason, got[0].prompt) == ("length", "0")
    assert (got[1].outputs[0].finish_reason, got[1].prompt) == ("error", "one")
    assert "cannot encode the text (no ids for 'one')" in got[1].error


def test_an_override_that_does_not_exist_or_fit_is_refused_and_changes_nothing():
    name = "multi_bd"
    engine = make_engine(name)
    requests = case(name).requests
    kept = engine.add(wish(requests[0]))
    before = engine.stats()
    with pytest.raises(ValueError, match=r"no threshold 'acept'.*accept_threshold"):
        engine.add(wish(requests[1], strategy_overrides={"acept": 0.5}))
    with pytest.raises(ValueError, match=r"accept_threshold=-0\.5 is outside"):
        engine.add(wish(requests[1], strategy_overrides={"accept_threshold": -0.5}))
    assert engine.stats() == before
    assert ends([toy.finish(engine)[kept]]) == [wanted(name, requests[0])]


# --- programs that fail ---------------------------------------------------------------------------


LAUNCH = DeviceState._launch


class Failing:
    """A program that fails at some of its calls.

    Args:
        at: Which calls, from 0.
        when: "before" it ran, "after" (the donated state is deleted), or in the "fetch" of what
            it returned.
    """

    def __init__(self, program, at, when, message="INTERNAL: injected"):
        self._program = getattr(programs, program)
        self._at, self._when, self._message = at, when, message
        self.calls = self.failed = 0
        self.lost = []  # leaves of the states it failed with

    def launch(self, device, one, args, part):
        """As `DeviceState._launch`."""
        if one.program is not self._program:
            return LAUNCH(device, one, args, part)
        call, self.calls = self.calls, self.calls + 1
        if call not in self._at:
            return LAUNCH(device, one, args, part)
        self.failed += 1
        self.lost += jax.tree.leaves(part)
        error = jax.errors.JaxRuntimeError(self._message)
        if self._when == "before":
            raise error
        state, rest = LAUNCH(device, one, args, part)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(part.pools))
        if self._when == "after":
            raise error
        lost = Unreadable(error)
        return state, (lost, lost) if isinstance(rest, tuple) else lost


class Unreadable:
    """A result whose computation failed after it was launched."""

    def __init__(self, error):
        self._error = error

    def copy_to_host_async(self):
        """Asked for ahead, which says nothing yet."""

    def __array__(self, *_, **__):
        raise self._error


def failing(program, at, when, message="INTERNAL: injected"):
    """The program of that name fails; use as a context."""
    wrapped = Failing(program, at, when, message)
    # A function, which is bound to the device.
    return mock.patch.object(DeviceState, "_launch", lambda *args: wrapped.launch(*args)), wrapped


PLACES = [
    ("prefill", {0}, "after"),
    ("prefill", {1}, "before"),
    ("decode", {0}, "before"),
    ("decode", {1}, "fetch"),
    ("decode", {3}, "before"),
    ("decode", {3}, "fetch"),
    ("restore", {0}, "after"),
]


@pytest.mark.slow("fast_dllm_v2")
@pytest.mark.parametrize(("program", "at", "when"), PLACES)
@pytest.mark.parametrize("name", ["multi_bd", "d2f_whole_full", "dflash", "fast_dllm_v2"])
def test_one_failure_costs_no_token(name, program, at, when):
    context, wrapped = failing(program, at, when)
    engine = make_engine(name, engine={"save_snapshot": lambda sequences: pytest.fail("gave up")})
    between = None
    if program == "restore":
        if engine.layout.starts_over:
            pytest.skip("it starts over: nothing is restored")
        between = toy.preempting()
    with context, steps_a_chunk(1):
        got = run(engine, [wish(r) for r in case(name).requests], between)
    assert wrapped.failed == engine.stats().num_failures == 1
    assert wrapped.lost
    assert all(leaf.is_deleted() for leaf in wrapped.lost), "two pools at once may not fit"
    assert ends(got) == [wanted(name, r) for r in case(name).requests]
    assert all(one.error is None for one in got)


@pytest.mark.parametrize("name", ["multi_bd", "ar"])
def test_two_failures_far_apart_cost_no_token(name):
    context, wrapped = failing("decode", {2, 6}, "after")
    engine = make_engine(name)
    with context, steps_a_chunk(1):
        got = run(engine, [wish(r) for r in case(name).requests])
    assert wrapped.failed == engine.stats().num_failures == 2
    assert ends(got) == [wanted(name, r) for r in case(name).requests]


@pytest.mark.parametrize("when", ["before", "after", "fetch"])
@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_a_second_failure_in_a_row_ends_the_live_ones_and_saves_them(program, when):
    """Four slots, six requests: two wait, and complete."""
    name = "multi_bd"
    if program == "prefill" and when == "fetch":
        pytest.skip("nobody reads what prefill returns")
    requests = [case(name).requests[1]] * 4 + [case(name).requests[0], case(name).requests[2]]
    saved = []

    def save(sequences):
        saved.append([sequence.owner.id for sequence in sequences])
        return "/tmp/where"

    engine = make_engine(name, engine={"save_snapshot": save}, prefix_caching=False)
    context, wrapped = failing(program, Until(engine, 2), when)
    with context, steps_a_chunk(1):
        got = run(engine, [wish(r) for r in requests])
    assert wrapped.failed >= 2
    assert engine.stats().num_failures == 2
    for output in got[:4]:
        assert output.outputs[0].finish_reason == "error"
        assert output.error.startswith("the device failed twice (INTERNAL: injected)")
        assert "dllm-jax replay /tmp/where" in output.error
    assert saved == [["0", "1", "2", "3"]]
    assert ends(got[4:]) == [wanted(name, r) for r in requests[4:]]


class Until:
    """Every call fails until the engine has counted this many failures."""

    def __init__(self, engine, count):
        self._engine, self._count = engine, count

    def __contains__(self, call):
        return self._engine.stats().num_failures < self._count


def test_an_error_of_the_code_is_told_as_it_is():
    """Raised in `prefill`, which nobody waits for; what stands after it says the same."""
    engine = make_engine("multi_bd")

    def wrong(device, one, args, part):
        if one.program is programs.prefill:
            raise TypeError("no such leaf")
        return LAUNCH(device, one, args, part)

    for request in case("multi_bd").requests:
        engine.add(wish(request))
    with (
        mock.patch.object(DeviceState, "_launch", wrong),
        pytest.raises(TypeError, match="no such leaf"),
    ):
        toy.finish(engine)
    engine.runner.reset()


# --- memory ---------------------------------------------------------------------------------------

OUT = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.\nmore lines"


def test_a_pool_that_cannot_be_made_says_what_to_lower():
    no_room = mock.Mock(side_effect=jax.errors.JaxRuntimeError(OUT))
    no_room.eval_shape = programs.make_state(None).eval_shape
    with (
        mock.patch.object(programs, "make_state", return_value=no_room),
        pytest.raises(DeviceFailure, match=r"^[^\n]*memory[^\n]*lower [^\n]*$"),
    ):
        toy.make_device("multi_bd")


def test_memory_that_runs_out_in_the_middle_says_what_to_lower():
    name = "multi_bd"
    engine = make_engine(name)
    context, _ = failing("decode", Until(engine, 2), "before", OUT)
    with context, steps_a_chunk(1):
        (got,) = run(engine, [wish(case(name).requests[0])])
    assert got.outputs[0].finish_reason == "error"
    assert "memory" in got.error
    assert "lower " in got.error
    assert "\n" not in got.error
    (again,) = run(engine, [wish(case(name).requests[0])])
    assert ends([again]) == [wanted(name, case(name).requests[0])]


def test_a_pool_that_cannot_be_made_again_ends_everyone_and_later_ones_get_their_chance():
    name = "multi_bd"
    engine = make_engine(name)
    context, _ = failing("decode", {1}, "after")
    no_room = mock.Mock(side_effect=jax.errors.JaxRuntimeError(OUT))
    requests = [wish(case(name).requests[i]) for i in (0, 1, 2, 0, 1, 2)]
    runner = toy.device(name)
    with context, mock.patch.object(runner.device, "_make", no_room), steps_a_chunk(1):
        got = run(engine, requests)
    assert [one.outputs[0].finish_reason for one in got] == ["error"] * 6
    assert all("lower " in one.error for one in got)
    after = run(engine, requests[:3])
    assert ends(after) == [wanted(name, r) for r in case(name).requests]
