"""The decode loop never copies the cache: read from the compiled program of every strategy.

The pools are aliased, and no instruction makes another array of a pool's size. The pool has a prime
number of pages, so its shape is unique in the program text. float32 everywhere; bfloat16 where
XLA's CPU scatter keeps it (jax >= 0.11; 0.10 widens it to float32).
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.compile import warmup
from dllm_jax.loading.load import with_kv_cache
from dllm_jax.runner import buckets, decode
from dllm_jax.runner.forward import ModelForward
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.strategies import DFlash, DiffusionGemma
from dllm_jax.strategies.core.protocol import split_knobs
from tests.contract import engine as toy
from tests.contract import harness
from tests.contract.cases import NAMES, case
from tests.oracles.canvas_files import write_canvas

NUM_PAGES, PAGE_SIZE = 4099, 8
_NEW_ARRAY = (
    r"(copy|copy-start|select|transpose|convert|broadcast|concatenate|pad|reverse|gather)\("
)


def pool_sized(program: str, shape: str = rf"(\d+,)*{NUM_PAGES}(,\d+)*") -> list[str]:
    """Instructions of a compiled program that write a new array with the pool's page axis."""
    made = re.compile(rf"= \w+\[{shape}\]\S* {_NEW_ARRAY}")
    return [line.strip() for line in program.splitlines() if made.search(line)]


# Level 0 skips LLVM's work only: the program text, and so its copies, are the same.
QUICK = {"xla_backend_optimization_level": 0}


def compiled(name: str, dtype=jnp.float32, options=QUICK, strategy=None, is_8_bit=False):
    """The whole loop of a case, ready to run, and the arguments for it; a cache of its type."""
    c = case(name)

    def cast(tree):
        return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)

    model = c.model.replace(params=cast(c.model.params))
    model = with_kv_cache(model, "fp8") if is_8_bit else model
    aux = {name: other.replace(params=cast(other.params)) for name, other in c.aux}
    requests = [*c.requests, *[None] * (harness.SLOTS - len(c.requests))]
    bare, state, prompt = harness.fresh_state(
        strategy or c.strategy, model, aux, requests, PAGE_SIZE, seed=3, num_pages=NUM_PAGES
    )

    def loop(strategy, model, aux, state, prompt):
        forward = ModelForward(model, aux=aux)
        state = decode.prefill(strategy, forward, state, prompt, chunk_size=8)
        spec = decode.slot_spec(strategy, model, harness.SLOTS)
        return decode.run(strategy, forward, state, spec)

    state = jax.tree.map(jnp.copy, state)  # leaves that share a buffer cannot be donated
    arguments = (bare, model, aux, state, prompt)
    lowered = jax.jit(loop, donate_argnames=("state",)).lower(*arguments)
    return lowered.compile(options), arguments


def check(program, arguments) -> None:
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[3].pools))
    memory = program.memory_analysis()
    assert not pool_sized(program.as_text())
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < 0.1 * cache + ACTIVATIONS


# Gathered context, scores and logits of a few slots; the cache of these tests is above 8 MB.
ACTIVATIONS = 1_000_000


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA's CPU scatter widens bfloat16 before jax 0.11"
)
@pytest.mark.parametrize("name", ["multi_bd", "dflash"])
def test_the_loop_works_in_place_in_bfloat16(name):
    check(*compiled(name, jnp.bfloat16))


CHOOSES = DFlash(4, (0, 1))


@pytest.mark.slow
def test_a_choice_among_widths_works_in_place():
    """Two loops over passes of the target within one, the first of them without a draft."""
    assert CHOOSES.choices == (1, 4)
    program, arguments = compiled("dflash", strategy=CHOOSES)
    assert len(re.findall(r" while\(", program.as_text())) >= 1 + 2
    check(program, arguments)


@pytest.mark.versions
def test_the_loop_of_generate_works_in_place():
    """The product's own program, as `--watch` and streaming run it between two looks."""
    c = case("multi_bd")
    prompts = [[1] * 30, [2] * 5, [3]]
    session = generate.start(c.model, prompts, c.strategy, max_tokens=100)
    pools = jax.tree.leaves(session.state.pools)
    program = generate._advance.lower(
        c.model, session.strategy, session.aux, session.state, jnp.int32(3), None
    ).compile()
    shape = ",".join(map(str, pools[0].shape))
    assert f"[{shape}]" in program.as_text()
    assert not pool_sized(program.as_text(), shape)
    assert program.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in pools)
    generate.advance(c.model, session)
    assert all(pool.is_deleted() for pool in pools)


# Between them: both prefill kinds of a full prompt, a copied page, a boundary, a `cond`, a drafter.
ENGINE = ("d2f_whole_full", "fast_dllm_v2", "dflash")


@pytest.mark.long
@pytest.mark.slow("fast_dllm_v2|dflash")
@pytest.mark.versions("diffusion_gemma_alone|dflash|multi_bd_shifted")
@pytest.mark.parametrize(
    "name", [n if n in ENGINE else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_the_programs_of_the_engine_work_in_place(name):
    device = toy.make_device(name, allocate=False, num_pages=NUM_PAGES)
    if device.layout.pass_kind != "full" and not device.layout.in_window:  # as on accelerators
        device.layout = dataclasses.replace(device.layout, prompts_a_pass=3)
    shapes = jax.tree.leaves(device.device.shapes().pools)
    cache = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes)
    assert all(leaf.shape[0] == NUM_PAGES for leaf in shapes)
    work = warmup.every_program(device.layout, device.num_words)
    for one in work:
        program = device.device.lower(one.call(device)).compile(QUICK)
        memory = program.memory_analysis()
        takes_pools = one.name not in ("admit", "restore")
        assert (str(NUM_PAGES) in program.as_text()) == takes_pools, one.name
        assert not pool_sized(program.as_text()), one.name
        assert memory.alias_size_in_bytes >= cache * takes_pools, one.name
        assert memory.temp_size_in_bytes < 0.1 * cache + ACTIVATIONS, one.name
    words = {one.name.split()[0] for one in work}
    wanted = {"decode", "admit"}
    wanted |= {"restore"} if not device.layout.starts_over else set()
    wanted |= {"prefill"} if not device.layout.in_window else set()
    always_computes = device.layout.is_token_causal and device.layout.compute_at_least
    wanted |= {"begin"} if not always_computes else set()
    wanted |= {"copy"} if device.layout.is_full else set()
    assert words == wanted


@pytest.mark.slow
def test_pools_of_several_shapes_are_written_in_place(tmp_path):
    """DiffusionGemma's: sliding and global layers differ in heads and in their size."""
    model = dj.load(write_canvas(tmp_path / "canvas", "pattern"), dtype="float32")
    strategy = DiffusionGemma(block_size=8)
    config = dj.EngineConfig(
        max_num_seqs=2,
        max_model_len=64,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        slot_buckets=(2,),
        prefill_buckets=(16,),
    )
    layout = buckets.make_layout(model, strategy, {}, config)
    layout = dataclasses.replace(layout, page_buckets=layout.page_buckets[-1:])
    device = ModelRunner(model, split_knobs(strategy)[0], {}, layout, allocate=False)
    pools = jax.tree.leaves(device.device.shapes().pools)
    assert len({leaf.shape for leaf in pools}) == 2
    cache = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in pools)
    every = {one.name.split()[0]: one for one in warmup.every_program(layout, device.num_words)}
    for word in ("decode", "prefill"):
        program = device.device.lower(every[word].call(device)).compile(QUICK)
        assert not pool_sized(program.as_text()), word
        assert program.memory_analysis().alias_size_in_bytes >= cache, word


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["multi_bd", "block_diffusion", "ar", "dflash", "multi_bd in 8 bits"]
)
def test_the_loop_works_in_place_on_a_gpu(name):
    """As above but for scratch memory, which on a GPU holds the libraries' workspaces too.

    A CPU has no scatter of 8 bits: XLA widens the pool there.
    """
    strategy, case_name = CHOOSES if name == "dflash" else None, name.removesuffix(" in 8 bits")
    how = {"options": None, "strategy": strategy, "is_8_bit": name != case_name}
    program, arguments = compiled(case_name, jnp.bfloat16, **how)
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[3].pools))
    assert not pool_sized(program.as_text())
    assert program.memory_analysis().alias_size_in_bytes >= cache


@pytest.mark.versions
@pytest.mark.parametrize("kind", ["select", "read_after_write"])
def test_a_copied_cache_is_seen(kind):
    """The detector itself: two programs that must copy a donated pool."""

    def bad(pool, where, rows, keep):
        new = pool.at[where].set(rows, mode="drop")
        if kind == "select":
            return jnp.where(keep, new, pool)
        return new.at[where].add(pool[where + 1] * new[where + 2])

    pool = jnp.zeros((NUM_PAGES, 2, PAGE_SIZE, 8))
    where = jnp.arange(5) * 7
    arguments = (pool, where, jnp.ones((5, *pool.shape[1:])), jnp.asarray(True))
    program = jax.jit(bad, donate_argnums=0).lower(*arguments).compile()
    assert pool_sized(program.as_text())
