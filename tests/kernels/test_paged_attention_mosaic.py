"""The Mosaic form of paged attention against NumPy float64, and the rule that chooses it.

Interpreted on a CPU with races looked for, lowered for the published models, and on a Hopper GPU
with every kind of mask. Blocks of a cluster run at once, and the interpreter gives each of their
warpgroups a thread of JAX's CPU client, which has one a core: a separate process is given more
cores.
"""

import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.paged_attention import WindowMask, api, mosaic, mosaic_blocks, paged_attention
from tests.cross_lowering import H200
from tests.kernels.test_paged_attention import in_8_bits, restored
from tests.oracles import fp8 as oracle_8_bits
from tests.oracles import paged_attention as oracle

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11, 2), reason="the Mosaic form needs jax 0.11.2"
    ),
]
TOLERANCE = 2e-2  # absolute, unit-normal data in bfloat16
IN_8_BITS = 8e-2  # where weights are rounded to 4 bits


def case(
    T,
    S,
    *,
    heads=(4, 2, 64),
    Z=64,
    C=3,
    by_blocks=False,
    window=None,
    seed=0,
    rows=5,
    left_out=0,
    canvas=False,
    orders=False,
):
    """Random data for every kind of row: none cached, dead, stale, token order, a missing page.

    Of a window of `T + left_out` cells the T from the first live one on are computed.

    Args:
        canvas: The window counts from a block; nothing is cached from cell 0 on.
        orders: Token order differs from block to block.
    """
    rng = np.random.default_rng(seed)
    N, G, H = heads
    W = T + left_out
    K = W // S
    live = np.asarray([[2, min(W, S + 3)], [1, W], [0, W], [0, S], [0, 0]], np.int32)[:rows]
    start = np.asarray([Z * C // 2 + 5, Z * C - W - 6, 0, Z * 2, 60], np.int32)[:rows]
    cell = np.broadcast_to(np.arange(T, dtype=np.int32), (rows, T))
    if left_out:
        live[:, 1] = np.minimum(live[:, 1], live[:, 0] + T)
        cell = live[:, :1] + np.arange(T, dtype=np.int32)
    mask = WindowMask(
        cell=cell,
        start=start,
        live=live,
        context_len=start + (not canvas) * np.asarray([9, 3, 0, 0, 0], np.int32)[:rows],
        visible=None if by_blocks else (rng.random((rows, K, K)) < 0.5) | np.eye(K, dtype=bool),
        causal=rng.random((rows, K)) < 0.5
        if orders
        else np.asarray([False, True, False, True, False])[:rows],
        block_size=S,
        window=window,
        by_block=canvas,
        context_is_before=canvas,
    )
    draw = lambda *shape: np.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    data = [draw(rows, T, N, H), *(draw(rows, T, G, H) for _ in range(2))]
    data += [draw(rows * C + 2, G, Z, H) for _ in range(2)]
    table = rng.permutation(rows * C + 2)[: rows * C].reshape(rows, C).astype(np.int32)
    table[1, 1] = -1
    return data, table, mask


def assert_right(call, data, table, mask, is_8_bit=False):
    """Live rows equal the oracle's; the others are zeros."""
    more, exact, atol = {}, [np.asarray(x, np.float64) for x in data], TOLERANCE
    if is_8_bit:
        data, scales = in_8_bits(data)
        more, exact = {"kv_scales": jnp.asarray(scales)}, restored(data, scales)
        atol = IN_8_BITS
    mask_here = jax.tree.map(jnp.asarray, mask)
    out = call(*map(jnp.asarray, data), jnp.asarray(table), mask_here, **more)
    got = np.asarray(out.astype(jnp.float32), np.float64)
    want = oracle.attention(*exact, table, mask)
    live = ~np.isnan(want)
    assert live.any()
    assert not live.all()
    np.testing.assert_allclose(got[live], want[live], atol=atol)
    assert (got[~live] == 0).all()


def assert_right_interpreted(tiling, *arguments, is_8_bit=False):
    """The same in the interpreter, without a race."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    interpret = plgpu.InterpretGPUParams(detect_races=True)
    call = functools.partial(mosaic.attention, tiling=tiling, interpret=interpret)
    assert_right(call, *arguments, is_8_bit=is_8_bit)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.slow("None", unless="pallas_kernels")
@pytest.mark.parametrize("window", [None, 3])
def test_the_interpreted_kernel_matches_numpy_without_a_race(window):
    arguments = case(16, 4, heads=(2, 1, 64), C=2, rows=2, window=window)
    assert_right_interpreted(mosaic.Tiling(stages=2), *arguments)


def test_a_row_that_sees_nothing_is_zero_in_8_bits():
    """A head's scale makes scores small, those of hidden keys too."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    data, table, mask = case(16, 8, heads=(2, 1, 64), C=2, rows=2)
    visible = np.asarray([[[False, False], [True, True]]])
    mask = mask.replace(visible=visible, context_len=np.zeros(2, np.int32))
    data, _ = in_8_bits(data)
    out = mosaic.attention(
        *map(jnp.asarray, (*data, table)),
        jax.tree.map(jnp.asarray, mask),
        kv_scales=jnp.full((2, 1), 2.0**-10),
        tiling=mosaic.Tiling(stages=2),
        interpret=plgpu.InterpretGPUParams(),
    )
    assert (np.asarray(out[1, :8]) == 0).all()
    assert (np.asarray(out[1, 8:]) != 0).any()


INTERPRETED = {
    "merged by XLA": (
        mosaic.Tiling(splits=3, stages=2, is_cluster=False),
        {"T": 32, "S": 8, "by_blocks": True},
    ),
    "four rows": (mosaic.Tiling(splits=2, stages=2), {"T": 4, "S": 2, "rows": 5}),
    "one row, merged by XLA": (
        mosaic.Tiling(splits=2, stages=2, is_cluster=False),
        {"T": 1, "S": 4, "heads": (7, 1, 64), "left_out": 7, "by_blocks": True},
    ),
    "17 rows": (
        mosaic.Tiling(consumers=2, stages=2),
        {"T": 17, "S": 3, "heads": (6, 2, 64), "left_out": 1, "window": 40},
    ),
    "8 bits, five rows": (mosaic.Tiling(stages=2), {"T": 5, "S": 5, "heads": (2, 1, 64)}),
    "two consumers": (
        mosaic.Tiling(consumers=2, stages=2),
        {"T": 48, "S": 8, "heads": (6, 2, 64), "by_blocks": True},
    ),
    "wide tiles of small pages": (
        mosaic.Tiling(keys=128, stages=2),
        {"T": 32, "S": 8, "Z": 16, "C": 9},
    ),
    "a cluster": (mosaic.Tiling(splits=2, stages=2), {"T": 16, "S": 4, "by_blocks": True}),
    "a cluster, keys shared": (
        mosaic.Tiling(consumers=2, splits=2, stages=2, shares_keys=True),
        {"T": 16, "S": 4, "heads": (2, 1, 64), "C": 2, "by_blocks": True, "rows": 3},
    ),
    "a cluster, keys shared, a mask of blocks": (
        mosaic.Tiling(consumers=2, splits=2, stages=2, shares_keys=True),
        {"T": 48, "S": 8, "heads": (6, 2, 64), "C": 7},
    ),
    "a cluster, keys shared, a window": (
        mosaic.Tiling(consumers=2, splits=2, stages=4, shares_keys=True),
        {"T": 48, "S": 8, "heads": (6, 2, 64), "C": 6, "window": 150, "left_out": 16},
    ),
    "a cluster, short contexts not split": (
        mosaic.Tiling(splits=2, stages=2, unsplit_keys=110),
        {"T": 32, "S": 8, "heads": (6, 2, 64)},
    ),
    "a cluster of four, tiles of rows for short contexts": (
        mosaic.Tiling(consumers=2, splits=4, stages=2, unsplit_keys=128),
        {"T": 32, "S": 8, "heads": (12, 2, 64), "by_blocks": True, "window": 70},
    ),
    "blocks that stay": (  # a tile of rows without a key is in the middle of others
        mosaic.Tiling(consumers=2, stages=2, ping_pong=True, resident=3),
        {"T": 48, "S": 8, "heads": (6, 2, 64), "by_blocks": True},
    ),
    "blocks that stay, a window": (
        mosaic.Tiling(consumers=2, stages=3, resident=2),
        {"T": 48, "S": 8, "heads": (6, 2, 64), "window": 70, "left_out": 16},
    ),
    "a block that stays, one tile in flight": (
        mosaic.Tiling(stages=1, resident=1),
        {"T": 16, "S": 4, "heads": (2, 1, 64), "C": 2, "by_blocks": True, "rows": 3},
    ),
    "blocks that stay, one consumer": (mosaic.Tiling(stages=3, resident=4), {"T": 32, "S": 8}),
    "blocks that stay, wide tiles in turns": (
        mosaic.Tiling(consumers=2, keys=128, stages=2, ping_pong=True, resident=3),
        {"T": 48, "S": 8, "heads": (6, 2, 64), "C": 6, "by_blocks": True},
    ),
    "blocks that stay, wide tiles of small pages": (
        mosaic.Tiling(keys=128, stages=2, resident=132),
        {"T": 32, "S": 8, "Z": 16, "C": 9},
    ),
    "a block as long as the window, and as a tile of keys": (
        mosaic.Tiling(stages=2),
        {"T": 64, "S": 64, "heads": (2, 1, 64), "by_blocks": True},
    ),
    "blocks as long as a tile of keys": (
        mosaic.Tiling(stages=2),
        {"T": 128, "S": 64, "heads": (2, 1, 64), "by_blocks": True},
    ),
    "a window of more than a tile of keys": (
        mosaic.Tiling(stages=2),
        {"T": 128, "S": 64, "heads": (2, 1, 64), "by_blocks": True, "window": 100},
    ),
    "8 bits": (
        mosaic.Tiling(consumers=2, stages=2),
        {"T": 48, "S": 8, "heads": (6, 2, 64), "by_blocks": True},
    ),
    "8 bits, a cluster, keys shared": (
        mosaic.Tiling(consumers=2, splits=2, stages=2, shares_keys=True),
        {"T": 48, "S": 8, "heads": (6, 2, 128), "C": 7},
    ),
    "8 bits, wide tiles of small pages": (
        mosaic.Tiling(keys=128, stages=2),
        {"T": 32, "S": 8, "heads": (2, 1, 64), "Z": 32, "C": 9, "by_blocks": True, "rows": 3},
    ),
    "8 bits, blocks that stay": (
        mosaic.Tiling(consumers=2, stages=2, ping_pong=True, resident=3),
        {"T": 48, "S": 8, "heads": (6, 2, 128), "by_blocks": True},
    ),
    "a window, narrowed": (
        mosaic.Tiling(consumers=2, stages=2),
        {"T": 48, "S": 8, "heads": (6, 2, 64), "window": 70, "left_out": 16},
    ),
    "a canvas": (  # the first tile that all rows see begins a key after the window's first
        mosaic.Tiling(consumers=2, stages=2),
        {"T": 32, "S": 16, "heads": (6, 2, 64), "C": 6, "canvas": True, "window": 133}
        | {"by_blocks": True, "rows": 4},
    ),
    "a canvas behind one that is stored": (
        mosaic.Tiling(splits=2, stages=2, is_cluster=False),
        {"T": 64, "S": 32, "heads": (2, 1, 64), "C": 3, "canvas": True, "orders": True}
        | {"by_blocks": True, "window": 40, "rows": 3},
    ),
    "heads of 512, halves of the columns": (
        mosaic.Tiling(consumers=2, stages=1, shares_rows=True),
        {"T": 32, "S": 16, "heads": (3, 1, 512), "canvas": True, "by_blocks": True, "rows": 3},
    ),
    "heads of 512, keys in two parts": (
        mosaic.Tiling(consumers=2, stages=1, shares_rows=True, splits=2, is_cluster=False),
        {"T": 32, "S": 16, "heads": (3, 1, 512), "canvas": True, "by_blocks": True, "rows": 3},
    ),
    "a window by blocks, large pages": (
        mosaic.Tiling(splits=3, stages=2, is_cluster=False),
        {"T": 32, "S": 8, "Z": 128, "C": 3, "window": 20, "by_blocks": True, "left_out": 16},
    ),
}


ROUNDED = ("two consumers", "a cluster", "a cluster, keys shared")
QUICK = ("a cluster, keys shared", "a block that stays, one tile in flight", "8 bits", "a canvas")


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in INTERPRETED],
)
def test_interpreted_tilings_match_numpy_without_a_race(name):
    """In a separate process, which is given more cores."""
    code = f"from tests.kernels.test_paged_attention_mosaic import *; interpreted({name!r})"
    environment = os.environ | {"NPROC": "16", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


def interpreted(name):
    """The work of the process that the test above starts."""
    tiling, settings = INTERPRETED[name]
    arguments = case(**settings)
    is_8_bit = name.startswith("8 bits")
    assert_right_interpreted(tiling, *arguments, is_8_bit=is_8_bit)
    if tiling.unsplit_keys:
        assert_splits_long_contexts_only(tiling, *arguments)
    if tiling.resident and not is_8_bit:
        assert_the_same_by_a_block_for_each_tile(tiling, *arguments)
    if name in ROUNDED:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        assert_rounds_to_8_bits(tiling, *arguments, interpret=plgpu.InterpretGPUParams())


def assert_rounds_to_8_bits(tiling, data, table, mask, **how):
    """To what rounding the rows gives, but for numbers far below a head's largest."""
    arguments = *map(jnp.asarray, (*data, table)), jax.tree.map(jnp.asarray, mask)
    plain, got = (
        mosaic.attention(*arguments, tiling=tiling, is_quantized=is_quantized, **how)
        for is_quantized in (False, True)
    )
    scales = np.asarray(got.scales).T[: plain.shape[0] * plain.shape[1]]
    assert (np.frexp(scales)[0] == 0.5).all()  # powers of two
    heads = np.float64(plain).reshape(*scales.shape, -1)
    want, want_scales = oracle_8_bits.quantized_rows(heads)
    assert (scales >= want_scales).all()  # what is above all parts of a cluster may be above more
    assert (scales == want_scales).mean() > 0.5
    shown = np.float64(got.values).reshape(heads.shape) * scales[..., None]
    far = np.abs(heads) < 2.0**-13 * np.abs(heads).max(axis=-1, keepdims=True)
    assert np.array_equal(shown[~far], (want * want_scales[..., None])[~far])
    np.testing.assert_allclose(shown[far], heads[far], atol=2.0**-9 * scales.max())


def assert_the_same_by_a_block_for_each_tile(tiling, data, table, mask):
    """To the bit."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tilings = tiling, dataclasses.replace(tiling, resident=0)
    arguments = *map(jnp.asarray, (*data, table)), jax.tree.map(jnp.asarray, mask)
    how = {"interpret": plgpu.InterpretGPUParams()}
    got, want = (np.asarray(mosaic.attention(*arguments, tiling=one, **how)) for one in tilings)
    assert (got == want).all()


def assert_splits_long_contexts_only(tiling, data, table, mask):
    """To the bit, what a form that splits none, or all, makes of each sequence."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def out(**how):
        run = functools.partial(mosaic.attention, tiling=dataclasses.replace(tiling, **how))
        run = functools.partial(run, interpret=plgpu.InterpretGPUParams())
        return np.asarray(run(*map(jnp.asarray, (*data, table)), jax.tree.map(jnp.asarray, mask)))

    got, whole, split = out(), out(splits=1, unsplit_keys=0), out(unsplit_keys=0)
    is_short = mask.context_len <= tiling.unsplit_keys
    assert (got[is_short] == whole[is_short]).all()
    assert (got[~is_short] == split[~is_short]).all()
    assert (got[is_short] != split[is_short]).any()
    assert (got[~is_short] != whole[~is_short]).any()


FEATURES = {
    "blocks": {"T": 32, "S": 8, "heads": (4, 2, 128), "by_blocks": True},
    "visible": {"T": 128, "S": 32, "heads": (4, 2, 128), "C": 7},
    "group of 7": {"T": 48, "S": 16, "heads": (14, 2, 128), "by_blocks": True},
    "window": {"T": 64, "S": 16, "heads": (8, 2, 128), "by_blocks": True, "window": 70, "C": 5},
    "small pages": {"T": 16, "S": 4, "heads": (8, 2, 128), "Z": 16, "C": 5},
    "large pages": {"T": 320, "S": 32, "heads": (4, 2, 64), "Z": 128, "C": 5, "by_blocks": True},
    "wide heads": {"T": 64, "S": 32, "heads": (4, 2, 256), "C": 5},
    "canvas": {"T": 64, "S": 32, "heads": (4, 2, 128), "C": 5}
    | {"by_blocks": True, "canvas": True, "orders": True, "window": 70},
    "one row": {"T": 1, "S": 4, "heads": (16, 8, 128), "left_out": 7, "by_blocks": True},
    "five rows": {"T": 5, "S": 5, "heads": (28, 4, 128), "C": 9, "by_blocks": True},
    "17 rows, a window": {"T": 17, "S": 3, "heads": (8, 2, 128), "left_out": 1, "window": 40},
    "24 rows": {"T": 24, "S": 8, "heads": (4, 2, 128), "C": 5},
    "canvas of wide heads": {"T": 256, "S": 256, "heads": (4, 2, 256), "C": 5}
    | {"by_blocks": True, "canvas": True, "window": 150},
}
TILINGS = {
    "two consumers": mosaic.Tiling(consumers=2, stages=2),
    "a cluster of eight": mosaic.Tiling(splits=8, stages=2),
    "a cluster of four, two consumers": mosaic.Tiling(consumers=2, splits=4, stages=2),
    "a cluster of four, keys shared": mosaic.Tiling(
        consumers=2, splits=4, stages=2, shares_keys=True
    ),
    "a cluster of two, keys shared": mosaic.Tiling(
        consumers=2, splits=2, stages=4, shares_keys=True
    ),
    "a cluster of two, short contexts not split": mosaic.Tiling(
        consumers=2, splits=2, stages=2, unsplit_keys=128
    ),
    "wide tiles in turns, short contexts not split": mosaic.Tiling(
        consumers=2, keys=128, splits=2, stages=2, ping_pong=True, unsplit_keys=200
    ),
    "wide tiles in turns, merged by XLA": mosaic.Tiling(
        consumers=2, keys=128, stages=2, splits=16, is_cluster=False, ping_pong=True
    ),
    "in turns, blocks that stay": mosaic.Tiling(consumers=2, stages=2, ping_pong=True, resident=3),
    "wide tiles in turns, blocks that stay": mosaic.Tiling(
        consumers=2, keys=128, stages=2, ping_pong=True, resident=3
    ),
    "chosen": None,
}


def checked(tiling, feature):
    """The tiling of a name for the GPU test, as shared memory holds it."""
    chosen = TILINGS[tiling]
    if "wide heads" in feature and chosen is not None:
        # Rows of two warpgroups have 128 KB where they have two buffers.
        consumers = 1 if chosen.resident else chosen.consumers
        return dataclasses.replace(chosen, keys=64, stages=2, consumers=consumers)
    return chosen


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("tiling", TILINGS)
def test_the_kernel_matches_numpy_on_a_gpu(tiling, feature):
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("needs a Hopper GPU")
    call = functools.partial(mosaic.attention, tiling=checked(tiling, feature))
    assert_right(call, *case(**FEATURES[feature]))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2])
def test_heads_of_512_match_numpy_on_a_gpu(splits):
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("needs a Hopper GPU")
    tiling, settings = INTERPRETED["heads of 512, keys in two parts"]
    call = functools.partial(mosaic.attention, tiling=dataclasses.replace(tiling, splits=splits))
    assert_right(call, *case(**settings | {"T": 128, "S": 64, "C": 7}))


@pytest.mark.gpu
@pytest.mark.parametrize("feature", ["blocks", "window", "canvas"])
@pytest.mark.parametrize(
    "tiling", [name for name, one in TILINGS.items() if one and mosaic.gives_groups(one)]
)
def test_rows_are_rounded_to_8_bits_on_a_gpu(tiling, feature):
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("needs a Hopper GPU")
    assert_rounds_to_8_bits(checked(tiling, feature), *case(**FEATURES[feature]))


EIGHT = {
    "one": mosaic.Tiling(stages=2),
    "a cluster of four": mosaic.Tiling(splits=4, stages=2),
    "wide tiles in turns": mosaic.Tiling(consumers=2, keys=128, stages=2, ping_pong=True, splits=2),
    "keys shared": mosaic.Tiling(consumers=2, splits=2, stages=2, shares_keys=True),
    "blocks that stay": mosaic.Tiling(consumers=2, stages=2, ping_pong=True, resident=3),
    "chosen": None,
}


@pytest.mark.gpu
@pytest.mark.parametrize("feature", [name for name in FEATURES if "wide heads" not in name])
@pytest.mark.parametrize("tiling", EIGHT)
def test_keys_of_8_bits_match_numpy_on_a_gpu(tiling, feature):
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("needs a Hopper GPU")
    call = functools.partial(mosaic.attention, tiling=EIGHT[tiling])
    settings = FEATURES[feature]
    settings = settings | {"Z": max(32, settings.get("Z", 64))}
    assert_right(call, *case(**settings), is_8_bit=True)


@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (28, 4, 128), (8, 2, 64)])
def test_shared_memory_holds_what_is_chosen_for_keys_of_8_bits(heads):
    N, G, H = heads
    for B, T, columns in itertools.product((1, 8, 32, 128), (32, 128), (8, 24, 128, 512)):
        q, pool, table = (
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (
                ((B, T, N, H), jnp.bfloat16),
                ((9, G, 64, H), jnp.float8_e4m3fn),
                ((B, columns), jnp.int32),
            )
        )
        tiling = mosaic.choose_tiling(q, pool, table)
        ring = 2 * tiling.stages * tiling.keys * H
        rows = tiling.row_groups * (2 if tiling.resident else 1) * 64 * H * 2
        rows += tiling.consumers * 2 * 64 * H  # a query in two parts
        columns_of_parts = tiling.consumers * 64 * H * 2 if tiling.splits > 1 else 0
        assert ring + rows + columns_of_parts // tiling.parts <= 226 * 1024


@pytest.mark.parametrize("is_8_bit", [False, True])
@pytest.mark.parametrize("consumers", [1, 2])
def test_warpgroups_ask_for_no_more_registers_than_a_block_has(consumers, is_8_bit):
    """One that asks for more waits for ever: the interpreter has no registers, a GPU has."""
    warpgroups = consumers + 1
    launched = min(65536 // (128 * warpgroups), 255) // 8 * 8  # of a thread
    loads, sums = mosaic_blocks._registers(consumers, is_8_bit)
    assert loads % 8 == sums % 8 == 0
    assert loads + sums * consumers <= launched * warpgroups


MANY = {  # tiles of rows: 1,040 of one warpgroup, 260 of two
    1: {"T": 16, "S": 4, "heads": (208, 208, 128), "C": 5},
    2: {"T": 64, "S": 16, "heads": (104, 52, 128), "C": 5},
}


@pytest.mark.gpu
@pytest.mark.parametrize("consumers", MANY)
def test_what_is_chosen_for_many_tiles_of_rows_matches_numpy_on_a_gpu(consumers):
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("needs a Hopper GPU")
    data, table, mask = case(**MANY[consumers])
    tiling = mosaic.choose_tiling(data[0], data[3], table)
    assert (tiling.resident, tiling.keys, tiling.consumers) == (132, 64, consumers)
    assert_right(mosaic.attention, data, table, mask)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_what_is_to_run_on_a_gpu_lowers(on_hopper, feature):
    data, table, mask = case(**FEATURES[feature])
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*data, table, mask))
    for tiling in TILINGS:
        call = functools.partial(mosaic.attention, tiling=checked(tiling, feature))
        assert kernels(call, arguments) == 1


def shapes(B, T, heads, C=16, by_blocks=True, window=None, num_blocks=4, lead=()) -> Any:
    """Arguments of attention as shapes."""
    N, G, H = heads
    number = lambda *shape: jax.ShapeDtypeStruct((*lead, *shape), jnp.int32)  # noqa: E731
    flag = lambda *shape: jax.ShapeDtypeStruct((*lead, *shape), jnp.bool_)  # noqa: E731
    real = lambda *shape: jax.ShapeDtypeStruct((*lead, *shape), jnp.bfloat16)  # noqa: E731
    mask = WindowMask(
        cell=number(B, T),
        start=number(B),
        live=number(B, 2),
        context_len=number(B),
        visible=None if by_blocks else flag(1, num_blocks, num_blocks),
        causal=flag(B),
        block_size=32,
        window=window,
    )
    pool = real(100, G, 64, H)
    return *(real(B, T, n, H) for n in (N, G, G)), pool, pool, number(B, C), mask


def lowered(function, arguments):
    """A function's program for an H200, as text."""
    # A new function: JAX has cached what it traced of `function` for another GPU.
    anew = lambda *arguments: function(*arguments)  # noqa: E731
    with jax.sharding.use_abstract_mesh(H200):
        program = jax.jit(anew).trace(*arguments).lower(lowering_platforms=("cuda",))
    return program.as_text()


def kernels(function, arguments):
    """How many kernels of the Mosaic kind a function is lowered to."""
    return lowered(function, arguments).count("@mosaic_gpu")


MODELS = {  # N G H
    "SDAR-1.7B": (16, 8, 128),
    "SDAR-8B": (32, 8, 128),
    "LLaDA-8B": (32, 32, 128),
    "Dream-7B": (28, 4, 128),
    "LLaDA2-mini": (16, 4, 128),
    "wide heads": (16, 8, 256),
}


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=() if m == "SDAR-1.7B" else pytest.mark.slow) for m in MODELS],
)
def test_mosaic_lowers_for_published_models(on_hopper, model):
    cases = (
        (1, 1, 8, True),
        (1, 32, 8, True),
        (1, 32, 128, False),
        (8, 128, 8, False),
        (32, 128, 8, True),
    )
    for B, T, C, by_blocks in cases:
        assert kernels(paged_attention, shapes(B, T, MODELS[model], C, by_blocks)) == 1


@pytest.mark.slow
def test_mosaic_lowers_with_a_window_and_under_vmap(on_hopper):
    window = shapes(1, 32, (32, 8, 128), window=2048)
    assert kernels(paged_attention, window) == 1
    assert kernels(jax.vmap(paged_attention), shapes(1, 32, (16, 8, 128), lead=(2,))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "T", "consumers", "splits", "stages", "shares_keys", "is_shared"),
    [
        ("SDAR-1.7B", 128, 1, 8, 4, False, True),
        ("SDAR-8B", 128, 2, 2, 3, False, True),
        ("SDAR-8B", 128, 2, 2, 4, False, True),
        ("SDAR-8B", 128, 2, 2, 5, False, False),
        ("wide heads", 128, 1, 2, 2, False, True),
        ("SDAR-8B", 128, 2, 2, 4, True, True),
        ("SDAR-1.7B", 128, 2, 2, 4, True, True),
        ("SDAR-1.7B", 128, 2, 4, 4, True, True),
        ("SDAR-1.7B", 32, 2, 4, 4, True, True),
        ("SDAR-1.7B", 32, 2, 8, 4, True, True),
        ("wide heads", 128, 2, 2, 2, True, False),
    ],
)
def test_a_cluster_merges_in_shared_memory_that_holds_its_parts(
    model, T, consumers, splits, stages, shares_keys, is_shared
):
    tiling = mosaic.Tiling(
        consumers=consumers, splits=splits, stages=stages, shares_keys=shares_keys
    )
    run = functools.partial(mosaic.attention, tiling=tiling)
    text = lowered(run, shapes(1, T, MODELS[model], 8))
    parts = f"tensor<{tiling.parts}x8x" in text.split("@mosaic_gpu", 1)[1].split("->")[-1]
    assert parts is not is_shared


def test_mosaic_is_chosen_on_hopper(on_hopper):
    def chosen(arguments):
        return api.choose(arguments[0], arguments[3], arguments[5], arguments[6])

    heads = MODELS["SDAR-1.7B"]
    of_rows = {T: chosen(shapes(1, T, heads)) for T in (1, 40, 1024, 1025)}
    assert of_rows == {1: "mosaic", 40: "mosaic", 1024: "mosaic", 1025: "cudnn"}
    assert chosen(shapes(1, 32, (16, 8, 32))) == "xla"
    many = shapes(1, 64, heads, by_blocks=False, num_blocks=33)
    assert chosen(many) == "xla"


def tiling_of(consumers, keys, stages, splits, is_cluster):
    return mosaic.Tiling(
        consumers=consumers,
        keys=keys,
        stages=stages,
        splits=splits,
        is_cluster=is_cluster,
        ping_pong=keys == 128 and consumers == 2,
    )


SHARED = mosaic.Tiling(consumers=2, stages=4, splits=2, shares_keys=True)
WIDE = tiling_of(2, 128, 2, 2, True)
STAYS_WIDE = dataclasses.replace(WIDE, splits=1, resident=132)
STAYS = dataclasses.replace(STAYS_WIDE, keys=64, stages=4)
# Shapes whose tiling was timed, and what it took (benchmarks/results/paged_attention_h200.json as
# of 47d5e46, attention_shared_h200.json and attention_stay_h200.json).
MEASURED = {  # sequences, rows, pages of each; us
    ("SDAR-1.7B", 1, 32, 8): tiling_of(1, 64, 4, 8, True),  # less than the loop around it
    ("SDAR-1.7B", 1, 128, 8): tiling_of(1, 64, 4, 2, True),  # 1.2
    ("SDAR-1.7B", 1, 32, 15): tiling_of(1, 64, 4, 8, True),  # sharing keys is 1 us slower there
    ("SDAR-1.7B", 1, 128, 15): SHARED,
    ("SDAR-8B", 1, 128, 15): SHARED,
    ("SDAR-8B", 1, 128, 23): SHARED,
    ("SDAR-8B", 1, 128, 39): SHARED,  # 14.8, by one warpgroup 18.4
    ("SDAR-1.7B", 1, 32, 128): tiling_of(1, 64, 4, 16, False),  # 6.4
    # With the loop around it: blocks that stay, a block for each tile in tiles of 64 keys; the four
    # without a lease in common are of 672fc16 and of 3c81867.
    ("SDAR-1.7B", 32, 128, 8): STAYS_WIDE,  # 93.0, 102.2
    ("LLaDA2-mini", 32, 128, 16): STAYS_WIDE,  # 121.7, 135.6
    ("LLaDA2-mini", 128, 128, 16): STAYS_WIDE,  # 413, 464
    ("LLaDA-8B", 32, 128, 16): STAYS_WIDE,  # 255, 270
    ("LLaDA-8B", 128, 128, 16): STAYS_WIDE,  # 948, 980
    ("LLaDA-8B", 8, 256, 16): STAYS_WIDE,  # 130, 144
    ("LLaDA2-mini", 8, 256, 16): STAYS,  # 75.7, 79.4
    ("SDAR-8B", 32, 32, 16): STAYS,  # 78.7, 86.0
    ("SDAR-1.7B", 16, 128, 16): STAYS,  # 76.4, 80.7
    ("LLaDA-8B", 32, 32, 16): dataclasses.replace(STAYS, consumers=1, ping_pong=False),  # 181, 193
    ("SDAR-8B", 1, 32, 128): tiling_of(2, 64, 4, 16, False),  # 8.2
    ("SDAR-8B", 8, 32, 16): tiling_of(1, 64, 4, 1, True),  # 6.6
    ("SDAR-8B", 1, 256, 512): tiling_of(2, 128, 2, 2, True),  # 228.7
    ("SDAR-8B", 1, 512, 56): tiling_of(2, 128, 2, 1, True),  # 52.1
    ("SDAR-8B", 1, 1024, 48): tiling_of(2, 128, 2, 1, True),  # 113.0
    ("LLaDA2-mini", 1, 32, 512): tiling_of(2, 64, 4, 32, False),  # 24.6
    # Contexts of all lengths; what it took is in layer_many_h200.json.
    ("SDAR-8B", 32, 32, 127): dataclasses.replace(WIDE, unsplit_keys=4926),  # 87.4, all split 111.1
    ("Dream-7B", 32, 32, 127): dataclasses.replace(WIDE, unsplit_keys=4926),  # 77.0, 100.4
    ("wide heads", 32, 32, 127): mosaic.Tiling(stages=2, splits=2, unsplit_keys=4926),  # 134, 151
    # As many tiles of rows that none would be split: the longest are.
    ("SDAR-1.7B", 24, 512, 512): dataclasses.replace(WIDE, splits=1),
    ("SDAR-8B", 24, 96, 512): dataclasses.replace(WIDE, unsplit_keys=24576),
    # One sequence.
    ("SDAR-8B", 1, 768, 128): WIDE,
    ("wide heads", 8, 32, 16): tiling_of(1, 64, 2, 2, True),  # 18.5
    ("wide heads", 8, 128, 128): tiling_of(2, 64, 2, 4, False),  # 278.9
}


@pytest.mark.parametrize("case", MEASURED)
def test_tilings_are_those_that_were_measured(case):
    model, B, T, C = case
    q, _, _, pool, _, table, _ = shapes(B, T, MODELS[model], C)
    assert mosaic.choose_tiling(q, pool, table) == MEASURED[case]


@pytest.mark.parametrize(
    ("heads", "B", "T", "pages", "keys"),
    [
        (MODELS["SDAR-1.7B"], 16, 128, 16, 64),  # 256 blocks
        (MODELS["SDAR-1.7B"], 15, 128, 16, 0),
        (MODELS["SDAR-1.7B"], 31, 128, 16, 64),
        (MODELS["SDAR-1.7B"], 32, 128, 16, 128),
        (MODELS["LLaDA-8B"], 32, 32, 16, 64),  # 1,024 of one warpgroup
        (MODELS["LLaDA-8B"], 31, 32, 16, 0),
        (MODELS["SDAR-1.7B"], 32, 128, 29, 128),
        (MODELS["SDAR-1.7B"], 32, 128, 30, 0),  # long enough for wide tiles without
        ((64, 8, 128), 2, 1024, 8, 128),
        ((64, 8, 128), 1, 1024, 8, 0),  # one sequence: not timed
        (MODELS["wide heads"], 32, 128, 16, 0),
        ((16, 8, 64), 32, 128, 16, 0),
    ],
)
def test_blocks_stay_where_several_short_sequences_are_many_tiles(heads, B, T, pages, keys):
    q, _, _, pool, _, table, _ = shapes(B, T, heads, pages)
    tiling = mosaic.choose_tiling(q, pool, table)
    assert (tiling.resident, tiling.keys) == (132, keys) if keys else tiling.resident == 0


@pytest.mark.parametrize("T", [16, 32, 128, 512])
@pytest.mark.parametrize("B", [1, 8, 32])
def test_tilings_are_what_a_gpu_can_run(B, T):
    for C in (1, 8, 16, 512):
        for heads in MODELS.values():
            q, _, _, pool, _, table, _ = shapes(B, T, heads, C)
            tiling = mosaic.choose_tiling(q, pool, table)
            tiles = C * 64 // tiling.keys + -(-T // tiling.keys)
            assert 1 <= tiling.splits <= tiles
            assert tiling.resident in (0, 132)
            assert not tiling.is_cluster or tiling.splits in (1, 2, 4, 8)
            assert 2 <= tiling.stages <= 6
            assert not tiling.shares_keys or (tiling.stages % 2 == 0 and B == 1)
            # Rings, rows and the columns of a cluster fit into shared memory.
            rows = tiling.consumers * 64 * heads[2] * 2
            rows *= 2 if tiling.resident else 1  # the next tile's come meanwhile
            rows += rows // tiling.splits if tiling.splits > 1 and tiling.is_cluster else 0
            if tiling.is_cluster and tiling.splits > 1 and heads[2] == 128 and tiling.keys == 64:
                assert mosaic.holds_parts(q, tiling)
            assert 4 * tiling.stages * tiling.keys * heads[2] + rows <= 226 * 1024
            if B == 32 and T == 128 and C == 8:
                assert tiling.splits == 1  # there is work enough
            N, G, _ = heads
            items = G * -(-(N // G) * T // (64 * tiling.row_groups))
            assert 0 <= tiling.unsplit_keys < C * 64
            assert not tiling.unsplit_keys or (B * items >= 128 and items % tiling.splits == 0)


def test_mosaic_refuses_what_it_cannot_do(on_hopper):
    def refused(*args, **settings):
        arguments = shapes(*args, **settings)
        return mosaic.unsupported(arguments[0], arguments[3], arguments[6])

    heads = MODELS["SDAR-1.7B"]
    assert refused(1, 32, heads) is None
    assert "head size of 64, 128, 256 or 512, got 96" in refused(1, 32, (4, 2, 96))
    assert refused(1, 0, heads) == "needs at least one row"
    assert "at most 32 blocks, got 33" in refused(1, 64, heads, by_blocks=False, num_blocks=33)
    arguments = shapes(1, 20, (4, 2, 96))
    with pytest.raises(NotImplementedError, match='"mosaic": needs a head size'):
        paged_attention(*arguments, implementation="mosaic")
    q, pool, mask = arguments[0], arguments[3], arguments[6]
    q: Any = jax.ShapeDtypeStruct((1, 32, 16, 128), jnp.float16)
    assert mosaic.unsupported(q, pool, mask) == "needs bfloat16, got float16"
    pool: Any = jax.ShapeDtypeStruct((100, 8, 16, 128), jnp.float8_e4m3fn)
    bfloat16: Any = jax.ShapeDtypeStruct((1, 32, 16, 128), jnp.bfloat16)
    assert "at least 32 for values in 8 bits, got 16" in mosaic.unsupported(bfloat16, pool, mask)
    pool: Any = jax.ShapeDtypeStruct((100, 8, 48, 128), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((1, 32, 16, 128), jnp.bfloat16)
    assert "a power of two from 16 up, got 48" in mosaic.unsupported(q, pool, mask)


def test_mosaic_needs_a_hopper_gpu():
    q, _, _, pool, _, table, mask = shapes(1, 32, MODELS["SDAR-1.7B"])
    if jax.default_backend() == "cpu":
        assert mosaic.unsupported(q, pool, mask) == "needs an NVIDIA GPU of the Hopper kind"
        assert api.choose(q, pool, table, mask) == "xla"
    arguments = shapes(1, 32, MODELS["SDAR-1.7B"])
    run = functools.partial(mosaic.attention, tiling=mosaic.Tiling(splits=3))
    with pytest.raises(ValueError, match="splits=3 is no cluster; use a power of two up to 8"):
        jax.eval_shape(run, *arguments)
    run = functools.partial(mosaic.attention, tiling=mosaic.Tiling(keys=96))
    with pytest.raises(ValueError, match="keys=96 and a page of 64 must divide one another"):
        jax.eval_shape(run, *arguments)
    q, *others = arguments
    narrow = [jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn) for x in others[:4]]
    run = functools.partial(mosaic.attention, tiling=mosaic.Tiling(keys=16))
    with pytest.raises(ValueError, match=r"keys=16.*8 bits want tiles of at least 32 keys"):
        jax.eval_shape(run, q, *narrow, *others[4:])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"is_cluster": False}, "unsplit_keys=64 wants a cluster.*; use unsplit_keys=0"),
        ({"shares_keys": True, "consumers": 2}, "a cluster, of which no block shares keys"),
        ({"splits": 8, "consumers": 2}, r"\(4\) to be a multiple of splits=8; use unsplit_keys=0"),
    ],
)
def test_short_contexts_stay_whole_where_a_cluster_has_rows_for_each_block(settings, match):
    tiling = mosaic.Tiling(**({"splits": 2, "unsplit_keys": 64} | settings))
    run = functools.partial(mosaic.attention, tiling=tiling)
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(run, *shapes(1, 32, MODELS["LLaDA2-mini"]))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"splits": 2}, "splits=2, .*: resident=3 wants keys that no .* share; use splits=1, "),
        ({"consumers": 2, "shares_keys": True}, "shares_keys=True, .*; use .*shares_keys=False"),
        ({"unsplit_keys": 64}, "unsplit_keys=64: .*; use .*unsplit_keys=0"),
        ({"resident": -1}, "resident=-1 wants to be a number of blocks; use resident=0"),
    ],
)
def test_blocks_that_stay_refuse_what_they_cannot_do(settings, match):
    run = functools.partial(mosaic.attention, tiling=mosaic.Tiling(**({"resident": 3} | settings)))
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(run, *shapes(8, 32, MODELS["LLaDA2-mini"]))


def test_halves_of_a_head_refuse_a_second_tile_in_flight():
    tiling = mosaic.Tiling(consumers=2, stages=2, shares_rows=True)
    run = functools.partial(mosaic.attention, tiling=tiling)
    with pytest.raises(ValueError, match="shares_rows wants two warpgroups, no cluster"):
        jax.eval_shape(run, *shapes(8, 32, MODELS["LLaDA2-mini"]))


def test_two_warpgroups_in_turns_want_two_tiles_in_flight():
    tiling = mosaic.Tiling(consumers=2, ping_pong=True, stages=1)
    run = functools.partial(mosaic.attention, tiling=tiling)
    with pytest.raises(ValueError, match=r"stages=1: ping_pong wants 2 tiles.*; use stages=2"):
        jax.eval_shape(run, *shapes(8, 32, MODELS["LLaDA2-mini"]))


@pytest.mark.parametrize(
    ("resident", "blocks"), [(0, 128), (3, 3), (132, 128), (127, 64), (60, 43)]
)
def test_as_few_blocks_stay_as_have_the_turns_of_all_that_may(monkeypatch, resident, blocks):
    grids = []
    real = mosaic.plgpu.kernel
    reported = lambda *a, **k: grids.append(math.prod(k["grid"])) or real(*a, **k)  # noqa: E731
    monkeypatch.setattr(mosaic.plgpu, "kernel", reported)
    q, k, v, *pools, table, mask = shapes(8, 128, MODELS["SDAR-1.7B"])
    numbers = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    tiling = mosaic.Tiling(consumers=2, resident=resident)
    settings = {"rules": mask.rules, "scale": 0.1, "tiling": tiling, "interpret": None}
    run = functools.partial(mosaic._run.__wrapped__, **settings)
    jax.eval_shape(run, (q, k, v), pools, table, numbers, {})
    assert grids == [blocks]


@pytest.mark.parametrize(
    ("tiles", "stay"), [(8, 4), (7, 4), (5, 4), (12, 4), (10, 4), (3, 3), (1, 1)]
)
def test_blocks_that_stay_take_every_tile_once_there_and_back(tiles, stay):
    taken = []
    for first in map(jnp.int32, range(stay)):
        last = stay - 1 - first
        turns = int(mosaic_blocks.num_turns(first, last, tiles, stay))
        taken.append([int(mosaic_blocks.tile_in(i, first, last, stay)) for i in range(turns)])
    assert sorted(itertools.chain(*taken)) == list(range(tiles))
    pairs = {mine[0] + mine[1] for mine in taken if len(mine) > 1}
    assert pairs <= {2 * stay - 1}, "the longest of a turn with the shortest of the next"


@pytest.mark.slow
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("model", ["SDAR-1.7B", "LLaDA-8B", "Dream-7B"])
def test_blocks_that_stay_lower_as_one_kernel(on_hopper, model, consumers, keys):
    stages = 4 if keys == 64 else 2
    shape = {"keys": keys, "stages": stages, "ping_pong": consumers == 2}
    tiling = mosaic.Tiling(consumers=consumers, resident=132, **shape)
    run = functools.partial(mosaic.attention, tiling=tiling)
    assert kernels(run, shapes(32, 128, MODELS[model], 8)) == 1


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"consumers": 1}, "consumers=1: shares_keys wants two warpgroups.*; use consumers=2"),
        ({"splits": 1}, "splits=1 without a cluster: .*; use splits=2, is_cluster=True"),
        ({"is_cluster": False}, "splits=2 without a cluster: .*; use splits=2, is_cluster=True"),
        ({"ping_pong": True}, "ping_pong=True: .*; use ping_pong=False"),
        ({"stages": 3}, "stages=3: shares_keys wants an even number of stages; use stages=4"),
        ({"splits": 16}, "splits=16 of head size 128: .* 8 columns .* 32 warpgroups; use splits=8"),
    ],
)
def test_keys_are_shared_by_the_two_warpgroups_of_a_block_of_a_cluster(settings, match):
    tiling = mosaic.Tiling(**({"consumers": 2, "splits": 2, "shares_keys": True} | settings))
    run = functools.partial(mosaic.attention, tiling=tiling)
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(run, *shapes(1, 32, MODELS["SDAR-1.7B"]))
