"""Proves that the scripts of `benchmarks/routing_script.py` route as they say, and are counted."""

import families_gpu
import jax
import numpy as np
import pytest
from routing_script import draw_ids, scripted

from dllm_jax.bench.roofline import floor_ms
from tests.contract import models


@pytest.mark.parametrize(("script", "touched"), [("uniform", (158, 170)), ("48", (46, 48))])
def test_a_script_reaches_as_many_experts_as_it_says(script, touched):
    ids = draw_ids(np.random.default_rng(3), script, 32, 256, 8)
    assert (ids.shape, ids.dtype) == ((32, 8), np.int32)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    least, most = touched
    assert least <= len(np.unique(ids)) <= most


def test_a_histogram_is_followed_or_refused(tmp_path):
    path = tmp_path / "shares.json"
    path.write_text("[8, 0, 1, 0, 1]")
    ids = draw_ids(np.random.default_rng(0), str(path), 4000, 5, 1)
    often = np.sort(np.bincount(ids.reshape(-1), minlength=5))
    np.testing.assert_allclose(often / 4000, [0, 0, 0.1, 0.1, 0.8], atol=0.03)
    with pytest.raises(SystemExit, match="a row needs 4 experts"):
        draw_ids(np.random.default_rng(0), str(path), 4, 5, 4)
    with pytest.raises(SystemExit, match="has 5 numbers; give one for each of 6"):
        draw_ids(np.random.default_rng(0), str(path), 4, 6, 1)


@pytest.mark.slow
def test_experts_are_counted_in_the_step_that_is_timed(monkeypatch):
    monkeypatch.setattr(families_gpu, "BLOCK", 8)
    model = models.experts()
    (few,), (most,) = (
        families_gpu.count_touched(model, [(1, 2)], script) for script in ("3", "uniform")
    )
    assert few == 3
    assert 10 <= most <= 12
    floors = [floor_ms(model, 1, 16, 64, "NVIDIA H200", touched) for touched in (few, most)]
    assert floors[0] < floors[1]


@pytest.mark.long
def test_programs_from_before_a_script_are_forgotten():
    calls = []

    @jax.jit
    def traced(x):
        calls.append(x)
        return x

    traced(1.0)
    with scripted("uniform"):
        traced(1.0)
    traced(1.0)
    assert len(calls) == 3
