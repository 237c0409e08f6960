"""Proves that a GPU's kernels are launched by a thread of XLA's, unless the user has chosen.

What it is set by is read once, when JAX first looks for devices; so it must be set before that by
`dj.load` and by the command line. On a GPU: a program with a loop returns before the loop ends.
"""

import os
import subprocess
import sys
from importlib import metadata

import jax
import pytest

import dllm_jax as dj
from dllm_jax import loading
from dllm_jax.async_dispatch import enable_async_dispatch
from dllm_jax.cli import entry

VARIABLE = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
EXPECTED = "1" if jax.__version_info__ >= (0, 11, 2) else None

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
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)


def test_the_variable_is_set():
    enable_async_dispatch()
    assert os.environ.get(VARIABLE) == EXPECTED


def test_what_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    enable_async_dispatch()
    assert os.environ[VARIABLE] == "0"


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.10.2", None), ("0.11.1", None), ("0.11.2", "1"), ("0.11.2.dev1", "1"), ("1.0.0rc1", "1")],
)
def test_versions_that_were_not_tried_are_left_alone(monkeypatch, version, expected):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    enable_async_dispatch()
    assert os.environ.get(VARIABLE) == expected


def test_load_sets_it_before_it_touches_a_device(monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt(os.environ.get(VARIABLE))

    monkeypatch.setattr(loading, "find_folder", stop)
    with pytest.raises(KeyboardInterrupt, match=str(EXPECTED)):
        dj.load("builtin:tiny-sdar")


def test_the_command_line_sets_it_before_a_verb_runs(monkeypatch):
    from dllm_jax.cli import info

    found = []
    monkeypatch.setattr(info, "run", lambda args: found.append(os.environ.get(VARIABLE)) or 0)
    assert entry.main(["info"]) == 0
    assert found == [EXPECTED]


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", [None, "0"])
def test_a_loop_on_a_gpu_keeps_its_caller_only_where_that_was_chosen(chosen):
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if chosen is not None:
        environment[VARIABLE] = chosen
    run = [sys.executable, "-c", LOOP]
    told = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    called_s, done_s = map(float, told.stdout.split())
    assert (called_s < done_s / 4) == (chosen is None), told.stdout
