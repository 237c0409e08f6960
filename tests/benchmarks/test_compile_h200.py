"""Proves that `benchmarks/compile_h200.py` asks for the engine's own programs, without an array,
and counts what a compiled program launches. To compile for the GPU wants a plugin that is not here.
"""

import compile_h200
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dllm_jax.bench.step import Shape
from dllm_jax.compile import warmup

pytestmark = pytest.mark.long


def test_programs_are_those_of_an_engine_and_hold_no_weights():
    sharding = SingleDeviceSharding(jax.devices()[0])
    shape = Shape.parse("3x2x32")
    device = compile_h200.shaped_device("JetLM/SDAR-8B-Chat", shape, 512, 64, sharding)
    names = [work.name for work in warmup.every_program(device.layout, device.num_words)]
    # Room for two windows of 64 tokens, twice, after the context.
    assert names[:2] == ["decode 3 slots, 12 pages", "prefill 64 tokens, 12 pages, blocks"]
    (begin,) = [
        work
        for work in warmup.every_program(device.layout, device.num_words)
        if work.name == "begin"
    ]
    assert "bf16" in device.device.lower(begin.call(device)).as_text()


def test_launches_are_counted_by_computation():
    def loop(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.sort(jnp.sin(x)) @ x, x)

    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    text = jax.jit(loop).lower(shape).compile().as_text()
    counts = dict(compile_h200.launches(text))
    assert counts["ENTRY"]["while"] == 1
    inside = [count for name, count in counts.items() if name != "ENTRY" and "sort" in count]
    assert [count["sort"] for count in inside] == [1]


def test_loops_within_command_buffers_are_counted():
    thunks = """
000: kCommandBuffer [source]
    001: kCopy [source]
    014: kWhile [source]
      body:
        016: kConditional [source]
            017: kWhile [source]
018: kWhile [source]
    019: kCommandBuffer [source]
        020: kCustomKernel [source] kWhile
"""
    assert compile_h200.loops(thunks) == (3, 2)
