"""Proves that tokens and statistics read from parts of the logits on several devices are right.

The truth is `token_stats` over whole logits. Parts hold what a device may: padding alone, forbidden
ids alone, the first of two equal peaks, values that are no numbers, fewer ids than top-k keeps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dllm_jax.strategies.core.draw import Shard, token_stats
from dllm_jax.strategies.core.protocol import Readout
from dllm_jax.strategies.core.state import NO_TOKEN, Sampling

pytestmark = pytest.mark.long

ROWS = 12
TOP = 3


def over_parts(logits, num_parts, ask):
    """`token_stats` of a vocabulary split over devices, padded after with 7: barred as ids."""
    V = logits.shape[1]
    padded = jnp.pad(logits, ((0, 0), (0, -V % num_parts)), constant_values=7.0)
    mesh = Mesh(np.array(jax.devices()[:num_parts]), ("tp",))
    shard = Shard("tp", V)

    def body(part, ask):
        def restrict(part):
            ids = shard.first(part) + jnp.arange(part.shape[1])
            return jnp.where((ids >= V)[None], -jnp.inf, part)

        return token_stats(part, ask.replace(num_top=min(TOP, V)), restrict, shard)

    specs = PartitionSpec(None, "tp"), PartitionSpec()
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    return jax.jit(run)(padded, ask)


def settings(kind, V):
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(5)))(jnp.arange(ROWS))
    mixed = Sampling(
        temperature=jnp.asarray([0.0, 0.8, 1.3] * 4),
        top_k=jnp.asarray([0, 1, 5, V // 2 + 2, 0, V + 9] * 2, jnp.int32),
        top_p=jnp.asarray([1.0, 1.0, 0.9, 0.5, 0.0, 0.99, 1.0, 0.3] + [0.7] * 4),
    )
    sampling = Sampling.greedy(ROWS) if kind == "greedy" else mixed
    return Readout(sampling=sampling, keys=keys, num_top=TOP)


def hostile(V):
    """Logits with ties across devices, and parts where everything is forbidden."""
    draw = np.random.default_rng(V)
    logits = 3 * draw.normal(size=(ROWS, V)).astype(np.float32)
    logits[1, [2, V - 1]] = logits[2, [V // 2, V - 2]] = 20.0  # equal peaks
    logits[3, : 3 * V // 4] = -np.inf
    logits[4, V // 4 :] = -np.inf
    logits[5] = np.round(logits[5])  # many equals at the edges of top-k and the nucleus
    logits[6, 1:] = -np.inf
    logits[7, ::2] = 0.0
    logits[7, 1::2] = -0.0
    return jnp.asarray(logits)


@pytest.mark.slow("17-8-greedy|2-greedy|773-8-mixed")
@pytest.mark.versions
@pytest.mark.parametrize("kind", ["greedy", "mixed"])
@pytest.mark.parametrize(("V", "num_parts"), [(17, 8), (773, 8), (1000, 2)])
def test_parts_say_what_the_whole_says(V, num_parts, kind):
    logits, ask = hostile(V), settings(kind, V)
    wanted = jax.jit(token_stats)(logits, ask)
    found = over_parts(logits, num_parts, ask)
    np.testing.assert_array_equal(found.token, wanted.token)
    for name in ("confidence", "entropy", "top_probs"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(wanted, name), rtol=2e-5, atol=2e-6, err_msg=name
        )
    # Which of two zeros of different sign comes first is open.
    top = [
        np.take_along_axis(np.asarray(logits), np.asarray(x.top_ids), 1) for x in (found, wanted)
    ]
    sure = np.asarray(wanted.top_probs) > 0
    np.testing.assert_array_equal(np.where(sure, top[0], 0), np.where(sure, top[1], 0))


@pytest.mark.versions
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_seen_from_every_device(bad):
    logits = np.array(hostile(773))
    logits[8, 5] = logits[9, 772] = logits[10, 400] = bad
    logits[11] = -np.inf
    for kind in ("greedy", "mixed"):
        found = over_parts(jnp.asarray(logits), 8, settings(kind, 773))
        assert np.asarray(found.token)[8:].tolist() == [NO_TOKEN] * 4
        assert np.asarray(found.token)[:8].min() >= 0
