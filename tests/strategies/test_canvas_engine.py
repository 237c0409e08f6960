"""`DiffusionGemma` in the engine, against a dense run without a cache that knows every step."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api import snapshot
from dllm_jax.api.resume import resume
from dllm_jax.compile import warmup
from dllm_jax.engine.layout import DeviceFailure
from dllm_jax.runner import buckets
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.strategies import DiffusionGemma
from dllm_jax.strategies.core.protocol import split_knobs
from tests.contract import engine as toy
from tests.contract import models
from tests.contract.cases import case
from tests.contract.harness import Request

pytestmark = pytest.mark.long

NAME, SIZE = "diffusion_gemma", 8
REQUEST = case(NAME).requests[0]
FOLDED = dataclasses.replace(REQUEST, fold=(0,))


def make_llm(**sizes):
    return dj.LLM(
        case(NAME).model,
        case(NAME).strategy,
        config=toy.config_of(NAME, **sizes),
        warm_up=False,
        progress=False,
    )


def params_of(request: Request) -> dj.SamplingParams:
    return toy.wish(request).params


def end_of(output):
    return output.outputs[0].token_ids, output.outputs[0].finish_reason, output.metrics.nfe


@pytest.mark.slow
def test_preemption_behind_every_step_of_a_canvas_changes_nothing():
    """One request, given up once, after its first forward, its second, and so on."""
    want = toy.wanted(NAME, REQUEST)
    met, stayed = set(), []
    for forward in range(1, want[2]):
        engine = toy.make_engine(NAME, prefix_caching=forward % 2 == 0)

        def between(engine, forward=forward):
            for sequence in list(engine.scheduler.live):
                if sequence.nfe == forward and not sequence.num_preemptions:
                    got, row = sequence.saved
                    stayed.append(isinstance(got._far, jax.Array))
                    buffer = engine.runner.unpack(got.saved(row))["buffer"]
                    met.add((int(buffer.start), *np.ravel(buffer.block_steps).tolist()))
                    engine.scheduler.preempt(sequence)

        with toy.steps_a_chunk(1):
            (output,) = toy.run(engine, [toy.wish(REQUEST)], between)
        assert toy.ends([output]) == [want], f"preempted behind forward {forward}"
        assert output.metrics.num_preemptions == 1
    assert all(stayed), "a fetch brought the expectations of a canvas to the host"
    log = case(NAME).truth(request=FOLDED).log
    assert len(log) > 1, "a second canvas begins beside a store"
    assert len(met) == want[2] - 1


@pytest.mark.slow
def test_a_request_resumes_from_a_snapshot_within_a_canvas(tmp_path, monkeypatch):
    llm = make_llm()
    llm.engine.save_snapshot = snapshot.snapshot_saver(
        llm.model, case(NAME).strategy, llm.config, tmp_path
    )
    monkeypatch.setattr("dllm_jax.engine.engine.num_steps", lambda *_, **__: 1)
    fetch, left = llm.engine.runner.fetch, [5]

    def failing(chunk):
        if left[0] == 0:
            raise DeviceFailure("RESOURCE_EXHAUSTED")
        left[0] -= 1
        return fetch(chunk)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "fetch", failing)
        (broken,) = llm.generate([list(REQUEST.prompt)], params_of(REQUEST))
    assert broken.outputs[0].finish_reason == "error"
    (path,) = tmp_path.iterdir()
    (text,) = snapshot.load_snapshot(path).texts
    steps = [len(texts) for texts in case(NAME).truth(request=FOLDED).log]
    assert text.nfe not in (0, *np.cumsum(steps)), "it failed between two canvases"
    engine, request_id = resume(snapshot.load_snapshot(path), 0, llm.model)
    output = toy.finish(engine)[request_id]
    assert end_of(output) == toy.wanted(NAME, REQUEST)


def test_another_seed_is_another_text_and_the_same_seed_the_same():
    llm = make_llm()
    params = dataclasses.replace(params_of(REQUEST), temperature=1.5)
    texts = [
        llm.generate([list(REQUEST.prompt)], dataclasses.replace(params, seed=seed))[0]
        for seed in (5, 6, 5)
    ]
    first, other, again = (text.outputs[0].token_ids for text in texts)
    assert first == again != other


def test_denoise_events_show_the_likeliest_text_of_each_step():
    truth = case(NAME).truth(request=FOLDED)
    events = list(make_llm().stream(list(REQUEST.prompt), params_of(REQUEST), events="denoise"))
    assert [event.metrics.nfe for event in events] == list(range(1, truth.nfe + 1))
    before: list[int] = []
    settled: list[int] = []
    steps = iter(events)
    for texts in truth.log:
        for text in texts:
            event = next(steps)
            settled += event.token_ids
            assert [*settled, *event.window] == (before + text)[: REQUEST.max_tokens]
        before += texts[-1]
    assert settled == truth.tokens
    assert any(a != b for texts in truth.log for a, b in itertools.pairwise(texts))


@pytest.mark.slow
def test_infill_keeps_what_stands_behind_the_holes_of_the_first_canvas():
    prompt, suffix, holes = (5, 6, 7, 8, 9), (20, -1, 21), 3
    asked = Request(prompt, holes, seed=4, temperature=0.7, suffix=suffix, fold=(0,))
    truth = case(NAME).truth(request=asked)
    llm = make_llm()
    (output,) = llm.infill(list(prompt), list(suffix), params_of(asked))
    assert end_of(output) == (truth.tokens, truth.reason, truth.nfe)
    assert output.outputs[0].token_ids[holes] == 20
    assert output.prompt_token_ids == list(prompt)
    (free,) = llm.generate([list(prompt)], params_of(asked))
    assert free.outputs[0].token_ids != truth.tokens[:holes]
    with pytest.raises(ValueError, match="at 11, behind the 8 cells of the first block; give it"):
        llm.infill(list(prompt), [20] * 8, params_of(asked))
    with pytest.raises(ValueError, match="the model has no mask token, so give a suffix"):
        llm.infill(list(prompt), params=params_of(asked))
    assert not llm.engine.has_work


def step_temporaries(slots: int, vocab: int, size: int) -> int:
    """Bytes that a compiled step of this many slots takes besides its arguments."""
    model = models.conditioned()
    table = jnp.zeros((vocab, model.config.hidden_size))
    heads = {name: table for name in ("embed", "lm_head") if name in model.params}
    model = model.replace(
        config=dataclasses.replace(model.config, vocab_size=vocab),
        params={**model.params, **heads},
        defaults=dataclasses.replace(model.defaults, vocab_limit=vocab),
    )
    config = dj.EngineConfig(
        max_num_seqs=slots,
        max_model_len=2 * size,
        num_pages=2 * slots,
        slot_buckets=(slots,),
        max_steps_per_chunk=1,
    )
    strategy = DiffusionGemma(block_size=size, early_slots=0, buffer_size=1)
    layout = buckets.make_layout(model, strategy, {}, config)
    device = ModelRunner(model, split_knobs(strategy)[0], {}, layout, allocate=False)
    work = warmup.every_program(layout, device.num_words)
    step = next(one for one in work if one.name.startswith("decode"))
    program = device.device.lower(step.call(device)).compile({"xla_backend_optimization_level": 0})
    memory = program.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.slow
def test_temporaries_of_a_step_do_not_grow_with_slots_times_vocabulary():
    """Rows have all their logits in memory 512 at a time; 128 where they are sorted."""
    vocab, size = 65_536, 128
    four, sixteen = (step_temporaries(slots, vocab, size) for slots in (4, 16))
    assert sixteen - four < 0.02 * 12 * size * vocab * 4
