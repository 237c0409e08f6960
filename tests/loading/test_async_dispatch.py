"""Proves that a GPU's kernels are launched by a thread of XLA's, unless the user has chosen.

What it is set by is read once, when JAX first looks for devices; so `dj.load` must set it, and
nothing of ours may look before. On a GPU: a program with a loop returns before the loop ends.
"""

import os
import subprocess
import sys

import jax
import pytest

from dllm_jax.loading.jax_settings import ASYNC_DISPATCH, enable_async_dispatch

pytestmark = pytest.mark.long

EXPECTED = "1" if jax.__version_info__ >= (0, 11, 2) else None

# Each verb gets as far as the model's folder.
VERBS = """
import os, sys
from jax._src import xla_bridge
import dllm_jax.loading.load as loading
from dllm_jax.cli import entry
def stop(*args):
    print(xla_bridge.backends_are_initialized(), os.environ.get("VARIABLE"), flush=True)
    raise SystemExit(9)
loading.find_folder = stop
for verb in ("generate", "chat", "eval", "trace", "bench step", "bench latency"):
    entry.main(verb.split())
"""

# The loop takes some tenths of a second: products of 8,192 x 8,192, of 1.4 ms each.
LOOP = """
import time, jax, jax.numpy as jnp, dllm_jax as dj
dj.load("builtin:tiny-sdar")
def body(step):
    count, x = step
    return count + 1, x @ x * 1e-4
go_on = lambda step: (step[0] < 200) & (step[1][0, 0] < 1e6)
loop = jax.jit(lambda x: jax.lax.while_loop(go_on, body, (0, x))[1])
x = jnp.full((8192, 8192), 1e-2, jnp.bfloat16)
loop(x).block_until_ready()
began = time.perf_counter()
result = loop(x)
called = time.perf_counter() - began
result.block_until_ready()
print(called, time.perf_counter() - began)
"""


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    """As where users begin; what the process had comes back."""
    monkeypatch.setenv(ASYNC_DISPATCH, "")
    monkeypatch.delenv(ASYNC_DISPATCH)


def test_the_variable_is_set():
    enable_async_dispatch()
    assert os.environ.get(ASYNC_DISPATCH) == EXPECTED


def test_what_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv(ASYNC_DISPATCH, "0")
    enable_async_dispatch()
    assert os.environ[ASYNC_DISPATCH] == "0"


@pytest.mark.parametrize(
    ("version", "expected"), [((0, 10, 2), None), ((0, 11, 1), None), ((0, 12, 0), "1")]
)
def test_versions_that_were_not_tried_are_left_alone(monkeypatch, version, expected):
    monkeypatch.setattr(jax, "__version_info__", version)
    enable_async_dispatch()
    assert os.environ.get(ASYNC_DISPATCH) == expected


@pytest.mark.slow
def test_a_verb_sets_it_before_it_looks_for_devices():
    run = [sys.executable, "-c", VERBS.replace("VARIABLE", ASYNC_DISPATCH)]
    reported = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert reported.splitlines() == [f"False {EXPECTED}"] * 6


@pytest.mark.gpu
@pytest.mark.skipif(EXPECTED is None, reason="jax before 0.11.2 is left alone")
@pytest.mark.parametrize("chosen", [None, "0"])
def test_a_loop_on_a_gpu_keeps_its_caller_only_where_that_was_chosen(chosen):
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if chosen is not None:
        environment[ASYNC_DISPATCH] = chosen
    run = [sys.executable, "-c", LOOP]
    reported = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    called_s, done_s = map(float, reported.stdout.split())
    assert (called_s < done_s / 4) == (chosen is None), reported.stdout
