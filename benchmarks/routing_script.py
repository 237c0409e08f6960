"""Which experts rows go to, by a script: random weights route to a few, whatever the model.

`uniform`: every row k experts at random. A number: so many experts, that all rows choose from.
`zipf`: the i-th of the experts in proportion to 1 / i. Else the path of a JSON list: how often each
expert is chosen, in proportion.
"""

import contextlib
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.models import moe


def draw_ids(rng, script, rows, experts, k):
    """Experts [rows k] of one layer, all of a row different.

    The first of independent waiting times are a draw without replacement.
    """
    shares = _shares(script, experts)
    if np.count_nonzero(shares) < k:
        raise SystemExit(f"routing {script}: a row needs {k} experts to choose from")
    with np.errstate(divide="ignore"):
        waits = rng.exponential(size=(rows, experts)) / shares
    return rng.permutation(experts)[np.argsort(waits, axis=-1)[:, :k]].astype(np.int32)


def _shares(script, experts):
    if script == "uniform":
        return np.ones(experts)
    if script == "zipf":
        return 1 / np.arange(1, experts + 1)
    if script.isdigit():
        return np.arange(experts) < int(script)
    with open(script) as file:
        shares = np.asarray(json.load(file), float)
    if shares.shape != (experts,):
        raise SystemExit(f"{script}: has {shares.size} numbers; give one for each of {experts}")
    return shares


@contextlib.contextmanager
def scripted(script, reached=None, drawn=None):
    """Networks traced in here route by the script; what the router computes, it still computes.

    Each layer has its own draw, the same in every step. Programs traced before are forgotten.

    Args:
        reached: A list to which each layer of each pass appends its rows and how many experts they
            reach, while it runs; None: no counting, which would disturb a measurement of time.
        drawn: A list to which each layer of each program appends its rows and how many experts they
            are sent to, while it is traced: what they reach where all of them are live.
    """
    route, rngs = moe.route, {}

    def chosen(cfg, x, router, bias, positions, live=None, implementation=None):
        ids, weights = route(cfg, x, router, bias, positions, live, implementation)
        E, rows = cfg.num_experts, positions.size
        rng = rngs.setdefault(rows, np.random.default_rng(rows))  # threads may trace in any order
        mine = draw_ids(rng, script, rows, E, ids.shape[-1]).reshape(ids.shape)
        if drawn is not None:
            drawn.append((rows, len(np.unique(mine))))
        ids = jnp.where(ids < E, mine, E)
        if reached is not None:
            hit = jnp.zeros(E + 1, jnp.int32).at[ids.reshape(-1)].set(1)[:E].sum()
            jax.debug.callback(lambda hit: reached.append((rows, int(hit))), hit)
        return ids, weights

    jax.clear_caches()
    with mock.patch.object(moe, "route", chosen):
        yield
    jax.clear_caches()
