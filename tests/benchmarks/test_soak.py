"""Proves the soak: no page, object or program is left after a few hundred odd requests, and the
verdict of `benchmarks/soak.py` catches each kind of leak.

The long run (20,000 requests) is `python benchmarks/soak.py`; its figures are recorded.
"""

import jax
import jax.numpy as jnp
import pytest
import soak

import dllm_jax as dj

pytestmark = pytest.mark.long


@pytest.mark.slow
def test_some_hundred_requests_leave_nothing_behind(random_folder, monkeypatch):
    monkeypatch.setattr(soak, "LOOKS", 4)
    said = []
    report = soak.soak(
        dj.load(random_folder),
        120,
        say=said.append,
        most_tokens=8,
        slot_buckets=(8,),
        prefill_buckets=(32,),
    )
    assert report["requests"] == 120
    assert report["texts"] > 120  # some ask for several
    assert len(report["looks"]) == len(said) == 4
    assert all(look["pages_held"] == look["running"] == 0 for look in report["looks"])
    assert report["objects_spread"] < 0.01
    assert report["device_arrays_spread"] == 0
    assert (report["compilations"], report["late_compiles"]) == (0, 0)
    # The load is as odd as it should be.
    assert {"length", "abort", "nfe"} <= set(report["finish_reasons"])
    assert report["prefix_hits"] > 0
    assert report["prefix_evictions"] > 0


def looks(**last):
    """Eight looks at a flat run, whose last two differ by some factors."""
    one = {
        "pages_held": 0,
        "pages_held_at_work": 10.0,
        "objects": 1000,
        "device_arrays": 50,
        "rss_bytes": 100_000,
        "requests": 100,
        "wall_s": 2.0,
        "cpu_s": 1.0,
    }
    return [one] * 6 + [{**one, **last}] * 2


@pytest.mark.parametrize(
    ("last", "missed"),
    [
        ({}, set()),
        ({"objects": 1049, "rss_bytes": 104_900, "wall_s": 2.15}, set()),
        ({"objects": 1080}, {"objects"}),
        ({"device_arrays": 54}, {"objects"}),
        ({"rss_bytes": 93_000}, {"rss"}),
        ({"pages_held": 1}, {"pages"}),
        ({"pages_held_at_work": 10.8}, {"pages"}),
        ({"wall_s": 2.4}, {"throughput"}),
        ({"wall_s": 1.6}, {"throughput"}),
        ({"cpu_s": 1.2}, {"throughput_cpu"}),
    ],
)
def test_the_verdict_names_what_is_missed(last, missed):
    passed = soak.verdict(looks(**last), 0, 0)["passed"]
    assert {name for name, met in passed.items() if not met} == missed


def test_a_compilation_in_the_run_is_seen():
    with soak.compilations() as seen:
        jax.jit(lambda x: x * 3 + 5)(jnp.arange(7))
    assert seen
    assert not soak.verdict(looks(), len(seen), 0)["passed"]["compilations"]
    assert not soak.verdict(looks(), 0, 1)["passed"]["compilations"]
    count = len(seen)
    jax.jit(lambda x: x * 5 + 1)(jnp.arange(9))
    assert len(seen) == count  # nothing is heard once the run is over
