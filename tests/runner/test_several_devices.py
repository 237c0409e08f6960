"""Proves that programs over several devices give the texts of one, by the planned reductions alone.

On CPU devices every program here is compiled with JAX's types of what differs between devices, so
each also proves that all devices hold the same state. The compiled text is counted: two reductions
a layer, one of the embedding, one of the readout.
"""

import dataclasses
import functools
import inspect
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import dllm_jax as dj
from dllm_jax.api import generate as api
from dllm_jax.cli import main
from dllm_jax.cluster import peer_memory
from dllm_jax.compile import warmup
from dllm_jax.loading.load import place
from dllm_jax.models import dense, moe
from dllm_jax.models.sharding import Exchange, over_devices, total
from dllm_jax.runner import forward
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.strategies import DFlash, DiffusionGemma, MultiBD
from dllm_jax.strategies.core.draw import Shard
from tests.contract import engine as toy
from tests.contract import models
from tests.contract.cases import case, sweep
from tests.oracles.canvas_files import SHAPES, write_canvas
from tests.runner.test_no_copies import NUM_PAGES, QUICK, pool_sized

PROMPTS: Any = np.random.default_rng(0).integers(0, 37, size=(6, 12))
# Greedy, drawn, and drawn with top-k and the nucleus, in one batch.
DRAWN = {
    "temperature": jnp.asarray([0.0, 0.8, 1.0] * 2),
    "top_k": jnp.asarray([0, 0, 5] * 2),
    "top_p": jnp.asarray([1.0, 1.0, 0.9] * 2),
    "key": jax.random.key(4),
    "max_tokens": 16,
}
CONFIG = dj.EngineConfig(
    max_num_seqs=4,
    max_model_len=64,
    page_size=8,
    num_pages=14,  # less than four texts take
    slot_buckets=(4,),
    prefill_buckets=(16,),
)


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def with_bias():
    """A model with biases everywhere and a tied head."""
    model = models.plain(5, qkv_bias=True, o_bias=True)
    params = {**model.params, "embed": model.params["lm_head"]}
    del params["lm_head"]
    return model.replace(
        params=params, config=dataclasses.replace(model.config, tie_embeddings=True)
    )


KINDS = {
    "plain": models.plain,
    "experts": models.experts,
    "with_bias": with_bias,
    "in_8_bits": lambda: models.in_8_bits(with_bias()),
}


@functools.cache
def alone(kind):
    return dj.generate(KINDS[kind](), PROMPTS, **DRAWN)


@pytest.mark.long
@pytest.mark.slow("4|8")
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        *(("plain", 2), ("plain", 8), ("experts", 4), ("experts", 8)),
        *(("with_bias", 8), ("in_8_bits", 8)),
    ],
)
def test_generate_gives_the_texts_of_one_device(kind, parts):
    model = place(KINDS[kind](), over_devices(parts))
    assert_same(dj.generate(model, PROMPTS, **DRAWN), alone(kind))


SOME = ("d2f_whole_full", "edit", "dmax", "full_sequence")
MORE = (
    "block_diffusion",
    "fast_dllm_v2",
    "full_sequence_dual",
    "d2f_grid_full",
    "ar",
    "edit_indel",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(SOME, SOME + MORE))
def test_every_form_of_strategy_gives_the_texts_of_one_device(name):
    """Full prompts, revisions, mixtures of embeddings, expectations, whole texts."""
    strategy, model = case(name).strategy, case(name).model
    how = {"max_tokens": 12, "temperature": DRAWN["temperature"], "key": DRAWN["key"]}
    wanted = dj.generate(model, PROMPTS, strategy, **how)
    found = dj.generate(place(model, over_devices(2)), PROMPTS, strategy, **how)
    assert_same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "parts"), [("base", 2), pytest.param("groups", 4, marks=pytest.mark.slow)]
)
def test_canvases_over_layers_of_unlike_heads_are_those_of_one_device(shape, parts, tmp_path):
    """Expected embeddings of all ids, sums before their norms, KV heads repeated in some layers.

    Rows that are drawn, also with top-k and the nucleus, and greedy ones.
    """
    model = dj.load(write_canvas(tmp_path, shape, 5, 0.4), dtype="float32")
    assert len({model.config.heads(i) for i in range(model.config.num_layers)}) > 1
    strategy = DiffusionGemma(max_denoising_steps=6, block_size=SHAPES[shape][1], buffer_size=1)
    how: dict[str, Any] = {**DRAWN, "max_tokens": 20}
    wanted = dj.generate(model, PROMPTS, strategy, **how)
    found = dj.generate(place(model, over_devices(parts)), PROMPTS, strategy, **how)
    assert_same(found, wanted)


# Large programs: 20 s each to compile.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-qwen3"])
@pytest.mark.parametrize("parts", [2, 8])
def test_builtin_models_give_the_texts_of_one_device(name, parts):
    """With its drafter, drafts and accepted drafts are those of one device too."""
    model = dj.load(f"builtin:{name}")
    texts = [f"<|user|>What is {a} plus {3 * a}?<|assistant|>" for a in range(2, 8)]
    prompts = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    how = {**DRAWN, "max_tokens": 24}
    if name == "tiny-qwen3":
        how |= {"draft": "builtin:tiny-qwen3-dflash", "strategy": DFlash(width=4)}
        del how["top_k"], how["top_p"]
    split = over_devices(parts)
    assert_same(
        dj.generate(place(model, split), prompts, **how), dj.generate(model, prompts, **how)
    )


@pytest.mark.versions
@pytest.mark.slow
def test_drafts_that_stay_by_chance_are_those_of_one_device():
    model = dj.load("builtin:tiny-qwen3")
    strategy = DFlash(width=4, acceptance="rejection")
    how: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8}
    how["draft"] = "builtin:tiny-qwen3-dflash"
    found = dj.generate(place(model, over_devices(2)), PROMPTS, strategy, **how)
    assert_same(found, dj.generate(model, PROMPTS, strategy, **how))


@pytest.mark.versions
def test_too_many_gathered_logits_are_refused(monkeypatch):
    monkeypatch.setattr(forward, "MOST_GATHERED", 1000)
    split = over_devices(2)
    model = place(models.plain(), split)

    def body(model, logits):
        return forward.ModelForward(model).whole(logits)

    def run(model, logits):
        whole = jax.sharding.PartitionSpec()
        return split.run(body, (model, logits), (split.specs(model), whole), whole)

    with pytest.raises(ValueError, match="8 rows of 40 logits would be gathered from all devices"):
        jax.eval_shape(run, model, jnp.zeros((8, 20)))


# --- the user's own mesh --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batch", [None, "data"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_generate_runs_under_a_users_mesh(kind, batch):
    names = ("data", "model")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), names)
    if kind == "explicit":
        mesh = jax.make_mesh((2, 2), names, devices=jax.devices()[:4])
    model = place(models.plain(), dj.Split(mesh, "model", batch))
    assert_same(dj.generate(model, PROMPTS, **DRAWN), alone("plain"))
    run = jax.jit(lambda model, ids: dj.generate(model, ids, **DRAWN))
    assert_same(run(model, jnp.asarray(PROMPTS)), alone("plain"))
    with jax.set_mesh(mesh):
        assert_same(run(model, jnp.asarray(PROMPTS)), alone("plain"))
    session = api.start(model, PROMPTS, **DRAWN)
    for _ in range(2):
        session = api.advance(model, session, 40)
    np.testing.assert_array_equal(session.state.output, alone("plain").tokens)
    ids = PROMPTS[:, :12]
    np.testing.assert_allclose(model.logits(ids), models.plain().logits(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_vmap_over_thresholds_gives_the_texts_of_one_device():
    thresholds = jnp.asarray([0.3, 0.6, 0.9])

    def texts(model):
        def of(threshold):
            strategy = MultiBD(accept_threshold=threshold, block_size=4, buffer_size=4)
            return dj.generate(model, jnp.asarray(PROMPTS), strategy, max_tokens=16)

        return jax.jit(jax.vmap(of))(thresholds)

    assert_same(texts(place(models.plain(), over_devices(2))), texts(models.plain()))


@pytest.mark.slow
def test_a_trajectory_is_that_of_one_device():
    model, prompt = models.plain(), PROMPTS[0].tolist()
    found = dj.record(place(model, over_devices(2)), prompt, max_tokens=8)
    wanted = dj.record(model, prompt, max_tokens=8)
    assert (found.tokens, found.nfe) == (wanted.tokens, wanted.nfe)


# --- the engine -----------------------------------------------------------------------------------


def texts(llm):
    """Texts, reasons and forwards of ten requests, some of which share a prefix."""
    prompts = [
        row[:size].tolist() for row, size in zip(PROMPTS, (5, 9, 12, 12, 8, 11), strict=True)
    ]
    prompts += [[*prompt, 1, 2, 3] for prompt in prompts[2:4]] * 2
    params = [
        dj.SamplingParams(
            max_tokens=24,
            temperature=(0.0, 0.8, 1.0)[i % 3],
            top_k=(None, None, 5)[i % 3],
            top_p=(None, None, 0.9)[i % 3],
            seed=i,
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [
        (output.outputs[0].token_ids, output.outputs[0].finish_reason, output.metrics.nfe)
        for output in outputs
    ]


def with_kernels(monkeypatch):
    """An engine whose devices have an exchange, and the sums that a kernel would have made.

    On a CPU a double stands for the kernel: it adds what XLA does, if it is told which device it
    is on, as the kernel is told where the inboxes are.
    """
    made = []

    def exchange_of(split):
        numbers = jnp.arange(split.num_parts, dtype=jnp.int32)[:, None]
        where = split.sharding(split.axis)
        return Exchange(jax.device_put(numbers, where), jax.device_put(numbers, where))

    def reduced(x, y, scale, eps, peers, *, is_quantized):
        made.append(x.shape)
        wrong = peers[0, 0] - jax.lax.axis_index("tp")
        y = jnp.where(wrong == 0, y, jnp.nan)
        return dense.add_rms_norm(x, total(y, x, "tp"), scale, eps, is_quantized=is_quantized)

    monkeypatch.setattr(peer_memory, "made", lambda split: split and exchange_of(split))
    monkeypatch.setattr(dense, "reduces", lambda x: x.shape[1] > 1)
    monkeypatch.setattr(dense, "reduced_rms_norm", reduced)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parts", "by_kernel"), [("plain", 2, False), ("experts", 4, True)]
)
def test_an_engine_over_devices_gives_the_texts_of_one(
    kind, parts, by_kernel, monkeypatch, compilations
):
    one = dj.LLM(KINDS[kind](), config=CONFIG)
    sums = with_kernels(monkeypatch) if by_kernel else []
    many = dj.LLM(KINDS[kind](), config=CONFIG, tensor_parallel_size=parts)
    compilations.clear()
    found = texts(many)
    compiled = [*compilations]
    assert bool(sums) == by_kernel
    assert compiled == [], "a program was compiled after warm-up"
    assert found == texts(one)
    stats = many.engine.stats()
    assert stats.num_preemptions
    assert stats.prefix_hits
    assert stats.num_late_compiles == 0
    # A device's share: pages by heads, weights by parts.
    heads = one.engine.runner.programs.model.config.num_kv_heads
    copies = parts // math.gcd(parts, heads)
    assert many.memory.page_bytes == one.memory.page_bytes * copies // parts
    assert many.memory.weights_bytes < one.memory.weights_bytes
    assert many.memory.slot_bytes == one.memory.slot_bytes


@pytest.mark.slow
def test_a_command_line_takes_tp(random_folder, capsys):
    argv = ["generate", "2 plus 3?", "--model", str(random_folder), "--max-tokens", "8"]
    answers = []
    for tp in ("1", "2"):
        assert main([*argv, "--json", "--tp", tp]) == 0
        answers.append(json.loads(capsys.readouterr().out)["text"])
    assert answers[0] == answers[1] != ""


# --- what is compiled -----------------------------------------------------------------------------


def reductions(text):
    """All-reduces of a compiled program outside of searches for thresholds, and those within."""
    assert not re.search(r"all-gather|all-to-all|collective-permute|reduce-scatter", text)
    shapes = re.findall(r"= \(?(\w+\[[\d,]*\])\S* all-reduce(?:-start)?\(", text)
    found = re.findall(r" all-reduce(?:-start)?\(", text)
    assert len(shapes) == len(found)
    return [s for s in shapes if not s.endswith(",15]")], [s for s in shapes if s.endswith(",15]")]


@pytest.mark.long
@pytest.mark.slow("8")
@pytest.mark.versions
@pytest.mark.parametrize(("kind", "parts"), [("plain", 2), ("in_8_bits", 8)])
def test_programs_hold_the_planned_reductions_and_copy_no_pool(kind, parts):
    """In 8 bits two more a layer: the largest numbers of rows whose parts are rounded alike."""
    model = place(KINDS[kind](), over_devices(parts))
    device = toy.make_device("multi_bd", model=model, allocate=False, num_pages=NUM_PAGES)
    assert isinstance(device, ModelRunner)
    shapes = jax.tree.leaves(device.device.shapes().pools)
    cache = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes)
    each = model.config.num_layers * (2 if kind == "plain" else 4)
    seen = set()
    for one in warmup.every_program(device.layout, device.num_words):
        program = device.device.lower(one.call(device)).compile(QUICK)
        text, what = str(program.as_text()), one.name.split()[0]
        plain, search = reductions(text)
        # Of top-k and the nucleus: two searches, and peak and mass between them.
        drawn = 1 if what == "decode" else 0
        wanted = {"decode": each + 2, "prefill": each + 1}.get(what, 0)
        assert (len(plain), len(search)) == (wanted + drawn, 2 * drawn), (one.name, plain)
        if kind == "plain":  # a pool of 8 bits goes through 16 on a CPU, which has no such type
            assert not pool_sized(text), one.name
        memory: Any = program.memory_analysis()
        if what not in ("admit", "restore"):  # they take no pools
            assert memory.alias_size_in_bytes >= cache / parts, one.name
        seen.add(what)
    assert seen >= {"decode", "prefill", "admit", "restore"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["experts", "with_bias"])
def test_programs_of_one_device_are_to_the_letter_those_without_any_sum(kind, monkeypatch):
    device = toy.make_device("multi_bd", model=KINDS[kind](), allocate=False, num_pages=NUM_PAGES)
    assert isinstance(device, ModelRunner)
    works = {
        one.name.split()[0]: one for one in warmup.every_program(device.layout, device.num_words)
    }

    def text(name):
        call = works[name].call(device)
        run, static = call.program.__wrapped__, ("trees", *call.static)
        fresh = jax.jit(lambda *args, **static: run(*args, **static), static_argnames=static)
        return device.device.lower(
            dataclasses.replace(call, program=fresh)
        ).as_text()  # traced anew

    names = ("decode", "prefill")
    found = [text(name) for name in names]
    assert "all_reduce" not in "".join(found)
    # As they would be if nothing had ever been shared: no module has these functions.
    for module in (dense, forward):
        monkeypatch.setattr(module, "total", lambda y, rows, axis: y)
    for module in (moe, forward):
        monkeypatch.setattr(module, "first_of", lambda num_local, axis: 0)
    monkeypatch.setattr(dense, "once", lambda bias, axis: bias)
    for module, name in ((jax, "shard_map"), (jax.lax, "psum"), (jax.lax, "axis_index")):
        monkeypatch.setattr(module, name, None)
    jax.clear_caches()  # of a layer's functions
    assert found == [text(name) for name in names]


@pytest.mark.versions
@pytest.mark.parametrize(
    ("target", "name", "size"),
    [(dense, "total", 5), (forward, "total", 6), (Shard, "of_all", 7)],
    ids=["layer", "embedding", "readout"],
)
def test_a_program_without_a_reduction_does_not_trace(target, name, size, monkeypatch):
    """The size is one of each case's own: programs of other tests are kept."""
    model = place(models.plain(), over_devices(2))
    keep = (lambda self, y: y[None]) if target is Shard else (lambda y, *_: y)
    monkeypatch.setattr(target, name, keep)
    monkeypatch.setattr(dense, "_behind", inspect.unwrap(dense._behind))  # whose trace is kept
    with pytest.raises(TypeError, match="varying"):
        dj.generate(model, PROMPTS, max_tokens=size)
