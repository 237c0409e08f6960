"""The sizes an engine is built with, from model, strategy and configuration."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.compile import warmup
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.runner.buckets import make_layout
from dllm_jax.strategies import AR, FullSequence, MultiBD, Needs
from tests.contract import models

MODEL = models.plain()  # 512 positions


def layout(strategy=None, model=MODEL, **config):
    return make_layout(model, strategy or MultiBD(), {}, EngineConfig(**config))


def multi_bd(prompt, block_size=8, buffer_size=2, **needs):
    return MultiBD(
        block_size=block_size, buffer_size=buffer_size, needs=Needs(prompt=prompt, **needs)
    )


@pytest.fixture
def on_accelerator(monkeypatch):
    """The sizes of an accelerator, on any machine."""
    monkeypatch.setattr("dllm_jax.runner.buckets.is_on_cpu", lambda model: False)


class WithTables(MultiBD):
    """A strategy with fields that are no settings."""

    tables: Any = None


def test_a_records_law_has_the_plain_fields_of_a_strategy():
    strategy = WithTables(block_size=8, tables=(np.zeros((2, 3)), np.zeros((4,))))
    found = layout(strategy.replace(accept_threshold=jnp.float32(0.5))).law["settings"]
    assert (found["block_size"], found["accept_threshold"]) == (8, 0.5)
    assert "tables" not in found


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 31, 32, 33, 100, 512, 600])
def test_slot_buckets_pad_at_most_twofold_on_an_accelerator(most, on_accelerator):
    buckets = layout(max_num_seqs=most).slot_buckets
    assert buckets[-1] == most, "every slot has a bucket, whatever their number"
    assert list(buckets) == sorted(set(buckets))
    for rows in range(1, most + 1):
        assert next(size for size in buckets if size >= rows) <= 2 * rows


def test_32_slots_of_an_accelerator_need_twelve_programs(on_accelerator):
    """Each is compiled before the engine is ready: six decodes, three passes, three small ones."""
    made = layout(model=models.plain(max_position=2048), max_num_seqs=32)
    assert made.slot_buckets == (1, 4, 8, 16, 24, 32)
    names = [work.name for work in warmup.every_program(made, 5)]
    assert len(names) == 12, names


def test_the_built_in_model_needs_few_programs_on_a_cpu():
    """A count, because seconds depend on the machine: the state and seven more, 23 CPU seconds."""
    names = [
        work.name for work in warmup.every_program(layout(model=dj.load("builtin:tiny-sdar")), 5)
    ]
    assert len(names) <= 7, names


@pytest.mark.parametrize("most", [1, 3, 8, 64, 100])
def test_slot_buckets_on_the_cpu_are_fewer_and_end_with_every_slot(most):
    buckets = layout(max_num_seqs=most).slot_buckets
    assert buckets[0] == 1
    assert buckets[-1] == most
    assert len(buckets) <= 5
    assert list(buckets) == sorted(set(buckets))


def test_given_slot_buckets_are_taken_and_ended_with_every_slot():
    assert layout(max_num_seqs=6, slot_buckets=(4, 2)).slot_buckets == (2, 4, 6)
    assert layout(max_num_seqs=4, slot_buckets=(4,)).slot_buckets == (4,)


# --- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "block_size", "max_len"),
    [(64, 32, 512), (16, 8, 512), (7, 8, 100), (12, 5, 61), (1, 4, 33), (64, 3, 65)],
)
def test_page_buckets_cover_the_longest_text_and_its_last_block(page_size, block_size, max_len):
    made = layout(
        MultiBD(block_size=block_size, buffer_size=2), page_size=page_size, max_model_len=max_len
    )
    room = made.page_buckets[-1] * page_size
    # A text ends before max_len; the block it ends in is computed, and written, to its end.
    assert room >= max_len + block_size
    assert room - page_size < max(max_len + block_size, 2 * block_size)
    assert list(made.page_buckets) == sorted(set(made.page_buckets))


def test_page_buckets_of_long_texts_grow_fourfold_on_the_cpu():
    model = models.plain(max_position=32768)
    made = layout(model=model, page_size=64)
    assert made.page_buckets == (16, 64, 256, 513)
    # None is close below the last one.
    assert layout(model=model, page_size=64, max_model_len=64 * 65).page_buckets == (16, 66)


@pytest.mark.parametrize(
    ("max_len", "buckets"), [(512, (9,)), (2048, (33,)), (2560, (41,)), (2624, (33, 42))]
)
def test_an_accelerator_has_one_page_bucket_and_for_long_texts_two(
    max_len, buckets, on_accelerator
):
    """Attention cuts one slot's context by the width: 2,048 tokens keep the cuts of their own."""
    model = models.plain(max_position=32768)
    assert layout(model=model, max_model_len=max_len).page_buckets == buckets
    every = layout(model=model, max_model_len=max_len, page_size=1).page_buckets
    assert every == tuple(sorted({*(2080,) * (len(buckets) - 1), max_len + 32}))


def test_the_default_page_may_be_longer_than_a_text():
    assert layout(MultiBD(block_size=4, buffer_size=2), max_model_len=20).page_buckets == (1,)


def test_a_short_text_with_a_wide_window_has_pages_for_the_window():
    made = layout(MultiBD(block_size=32, buffer_size=4), page_size=16, max_model_len=20)
    assert made.page_buckets[-1] * 16 >= 128


# --- prefill --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [3, 5, 8, 32, 48])
def test_prefill_buckets_are_whole_blocks_where_passes_see_blocks(block_size):
    made = layout(MultiBD(block_size=block_size, buffer_size=2))
    assert all(size % block_size == 0 for size in made.prefill_buckets)
    assert layout(AR(), model=models.causal(), prefill_buckets=(7, 50)).prefill_buckets == (7, 50)


@pytest.mark.parametrize("prompt", ["grid_full", "whole_full"])
@pytest.mark.parametrize("max_len", [20, 64, 100, 512])
def test_prefill_buckets_of_full_modes_cover_every_prompt(prompt, max_len):
    made = layout(multi_bd(prompt), max_model_len=max_len, page_size=8)
    sizes = made.prefill_buckets
    assert sizes[-1] >= max_len
    assert sizes[-1] < max_len + 8, "and not more than its last block"
    assert all(size % 8 == 0 for size in sizes)
    assert all(later <= 2 * size for size, later in itertools.pairwise(sizes))
    given = layout(multi_bd(prompt), max_model_len=max_len, page_size=8, prefill_buckets=(16,))
    assert given.prefill_buckets[0] == 16
    assert given.prefill_buckets[-1] == sizes[-1]


def test_long_passes_are_for_accelerators(on_accelerator):
    model = models.plain(max_position=4096)
    assert layout(model=model).prefill_buckets == (128, 512)
    assert layout(model=model, max_model_len=64).prefill_buckets == (128,)


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "model", "least"),
    [
        (multi_bd("grid_causal"), MODEL, 0),
        (multi_bd("grid_causal", boundary=True), MODEL, 8),
        (multi_bd("grid_causal"), models.plain(shift=True), 8),
        (multi_bd("whole_full", boundary=True), MODEL, 1),
        (AR(), models.causal(), 1),
        (FullSequence(block_size=8, buffer_size=4), MODEL, 0),
    ],
)
def test_a_prefix_hit_leaves_what_the_strategy_must_compute(strategy, model, least):
    assert layout(strategy, model).compute_at_least == least


def test_a_layout_for_prompts_in_the_window_has_a_window_and_no_prefix():
    made = layout(FullSequence(block_size=8, buffer_size=4), page_size=16, max_model_len=32)
    assert made.in_window
    assert made.window == 32
    assert made.prefill_len(20) == 0


def test_a_provisional_cache_and_soft_commits_start_over():
    assert not layout(multi_bd("grid_causal")).starts_over
    assert layout(multi_bd("grid_causal", soft_commits=True)).starts_over
    assert layout(multi_bd("grid_causal", provisional_cache="across_steps")).starts_over
    assert not layout(multi_bd("grid_causal", provisional_cache="across_steps")).soft_commits


def test_the_salt_tells_models_masks_and_blocks_apart():
    other = dataclasses.replace(MODEL, source="another")
    made = [
        layout(),
        layout(model=other),
        layout(multi_bd("grid_full", 32, 4)),
        layout(multi_bd("grid_causal", 16)),
        layout(multi_bd("grid_causal", 32, prefill_mode=1)),
    ]
    assert len({one.salt for one in made}) == len(made)
    # Thresholds and the number of slots change no key.
    assert layout(MultiBD(accept_threshold=0.5), max_num_seqs=3).salt == made[0].salt


def test_num_pages_is_the_given_one_or_enough_for_every_slot_twice():
    assert layout(num_pages=5).num_pages == 5
    made = layout(max_num_seqs=3)
    assert made.num_pages == 2 * 3 * made.page_buckets[-1]


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"max_model_len": 513}, r"max_model_len=513 is more than the model's 512 positions; low"),
        ({"page_size": 1024}, r"page_size=1024 .* 512 tokens .* use page_size=64"),
        ({"page_size": 65, "max_model_len": 48}, r"page_size=65 .* 48 tokens .* page_size=64"),
        ({"max_num_seqs": 4, "slot_buckets": (2, 8)}, r"slot_buckets=\(2, 8\) holds 8, .*seqs, 4;"),
        ({"page_size": 64, "page_buckets": (99,)}, r"page_buckets=\(99,\) holds 99, .* text, 9;"),
        ({"slot_buckets": (0, 2)}, r"slot_buckets=\(0, 2\) must be whole numbers >= 1"),
        ({"prefill_buckets": ()}, r"prefill_buckets=\(\) must be whole numbers >= 1"),
        ({"prefill_buckets": (64.0,)}, r"prefill_buckets=\(64.0,\) must be whole numbers"),
        ({"max_num_seqs": 0}, r"max_num_seqs=0 must be a whole number in \[1"),
        ({"page_size": True}, r"page_size=True must be a whole number"),
        ({"memory_utilization": 0.0}, r"memory_utilization=0.0 must be in \(0, 1\]"),
        ({"memory_utilization": 1.5}, r"memory_utilization=1.5 must be in \(0, 1\]"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_with_its_remedy(config, said):
    with pytest.raises(ValueError, match=said):
        layout(**config)
