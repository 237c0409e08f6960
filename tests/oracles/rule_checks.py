"""The shared rules of `strategies/` on random windows, against plain loops: one check a module.

Each check takes the package to try, so that `mutants/rules.py` can hand in wrong ones. Numbers lie
on a grid, so that thresholds, ties and sums meet exactly; B == S, so that a knob along the wrong
axis shows. A check raises AssertionError where the package differs from the loops.
"""

import importlib
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B, K, S, VOCAB = 4, 3, 4, 6
DUMMY, ACTIVE, TO_CACHE = 0, 1, 2
GRID = np.array([0.0, 0.25, 0.5, 0.75, 1.0], np.float32)
CELLS = list(np.ndindex(B, K, S))


def part(package: ModuleType, name: str) -> Any:
    return importlib.import_module(f"{package.__name__}.core.{name}")


def draw(package: ModuleType, rng: np.random.Generator) -> Any:
    """A state of which the buffer, the stop ids and the keys mean something."""
    state = part(package, "state")
    start = rng.integers(0, 3, B) * S
    status = np.take([TO_CACHE, ACTIVE, DUMMY], np.sort(rng.integers(0, 3, (B, K)), axis=1))
    filled = rng.random((B, K, S)) < rng.choice([0.3, 0.7, 1.0], (B, K, 1))
    filled = (filled | (status == TO_CACHE)[:, :, None]) & (status != DUMMY)[:, :, None]
    if rng.random() < 0.5:
        status = np.where(rng.random((B, 1)) < 0.5, 0, status)  # nothing is open
        filled &= (status != DUMMY)[:, :, None]

    def ints(x: Any) -> Any:
        return jnp.asarray(np.asarray(x), jnp.int32)

    buffer = state.BlockBuffer(
        tokens=ints(rng.integers(-1, VOCAB, (B, K, S))),  # -1: a readout that was no number
        filled=jnp.asarray(filled),
        status=ints(status),
        start=ints(start),
        prompt_len=ints(start + rng.integers(0, S, B)),
        limit=ints(start + rng.choice([int(rng.integers(1, K * S + 4)), S, 2 * S, 99, 99], B)),
        block_steps=ints(rng.integers(0, 6, (B, K))),
        nfe=ints(rng.integers(0, 9, B)),
        idle=ints(rng.integers(0, 9, B)),
    )
    never = ints(np.full(B, 99))
    none = dict.fromkeys(state.DecodeState.__dataclass_fields__)
    stops = np.where(rng.random((B, 2)) < 0.15, rng.integers(0, VOCAB, (B, 2)), -1)
    more = {
        "buffer": buffer,
        "limits": state.Limits(ints(stops), never, never),
        "keys": jax.random.split(jax.random.key(int(rng.integers(1 << 20))), B),
        "carry": state.Carry(),
    }
    return state.DecodeState(**{**none, **more})


def knob(package: ModuleType, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    values = rng.choice(np.append(GRID, 1.5), B).astype(np.float32)
    return values, part(package, "protocol").PerSlot(jnp.asarray(values))


def stats(package: ModuleType, confidence: np.ndarray, entropy: np.ndarray, top: Any = None) -> Any:
    token = jnp.zeros(confidence.shape, jnp.int32)
    top = np.zeros((*confidence.shape, 0), np.float32) if top is None else top
    ids = np.broadcast_to(np.arange(top.shape[-1], dtype=np.int32), top.shape)
    return part(package, "protocol").TokenStats(
        token, jnp.asarray(confidence), jnp.asarray(entropy), jnp.asarray(ids), jnp.asarray(top)
    )


def same(got: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def by_cell(rule: Any) -> np.ndarray:
    return np.array([rule(*cell) for cell in CELLS]).reshape(B, K, S)


def ordered(score: np.ndarray, among: np.ndarray) -> list[int]:
    """Cells of one block that are `among`, best first, ties by position."""
    return sorted(np.flatnonzero(among).tolist(), key=lambda i: (-score[i], i))


def taken(blocks: Any) -> np.ndarray:
    """One mask of `B * K` lists of cells, in order."""
    out = np.zeros((B * K, S), bool)
    for row, cells in zip(out, blocks, strict=True):
        row[cells] = True
    return out.reshape(B, K, S)


# ---- sampling.py ----


def check_sampling(package: ModuleType, rng: np.random.Generator) -> None:
    sampling = part(package, "sampling")
    state = draw(package, rng)
    confidence = rng.choice(GRID, (B, K, S))
    entropy = rng.choice(np.array([0.0, 0.25, 0.5, 1.0, 1.5], np.float32), (B, K, S))
    among = rng.random((B, K, S)) < 0.7
    reported = stats(package, confidence, entropy)
    value, threshold = knob(package, rng)
    rows = list(np.ndindex(B, K))

    same(
        sampling.above(reported, threshold), by_cell(lambda b, k, s: confidence[b, k, s] > value[b])
    )

    rank = np.asarray(sampling.rank(reported.confidence, jnp.asarray(among)))
    for b, k in rows:
        order = ordered(confidence[b, k], among[b, k])
        assert [int(rank[b, k, i]) for i in order] == list(range(len(order)))
        assert all(rank[b, k, i] >= len(order) for i in range(S) if i not in order)

    count = rng.integers(0, S + 1, (B, K))
    best = sampling.top_n(reported.confidence, jnp.asarray(count), jnp.asarray(among))
    same(best, taken(ordered(confidence[b, k], among[b, k])[: count[b, k]] for b, k in rows))

    forced = sampling.forced_top1(reported, state, threshold)
    filled, status = np.asarray(state.buffer.filled), np.asarray(state.buffer.status)
    prompt = np.asarray(state.buffer.prompt_len - state.buffer.start)
    holes = by_cell(lambda b, k, s: status[b, k] == 1 and not filled[b, k, s])
    holes &= by_cell(lambda b, k, s: k * S + s >= prompt[b])

    def gate(b: int, k: int) -> bool:
        return k == 0 or bool(np.mean(filled[b, k - 1]) >= value[b])

    same(forced, taken(ordered(confidence[b, k], holes[b, k])[: gate(b, k)] for b, k in rows))

    def run(b: int, k: int) -> list[int]:
        cells = np.flatnonzero(among[b, k]).tolist()
        sure = [confidence[b, k, i] >= value[b] for i in cells]
        length = sure.index(False) if False in sure else len(cells)
        return cells[: max(length, 1)]

    same(
        sampling.leftmost_sure(reported, threshold, jnp.asarray(among)),
        taken(run(*row) for row in rows),
    )

    def bounded(b: int, k: int) -> list[int]:
        order = ordered(-entropy[b, k], among[b, k])
        spent = [sum(entropy[b, k, j] for j in order[:i]) for i in range(len(order))]
        return [cell for cell, before in zip(order, spent, strict=True) if before <= value[b]]

    same(
        sampling.entropy_bounded(reported, threshold, jnp.asarray(among)),
        taken(bounded(*row) for row in rows),
    )

    def by_factor(b: int, k: int) -> list[int]:
        order = ordered(confidence[b, k], among[b, k])
        doubt = [(n + 2) * (1 - confidence[b, k, i]) for n, i in enumerate(order)]
        most = max((n + 1 for n, d in enumerate(doubt) if d < value[b]), default=1)
        return order[:most]

    same(
        sampling.factor_bounded(reported, threshold, jnp.asarray(among)),
        taken(by_factor(*row) for row in rows),
    )

    for steps in range(1, 2 * S):
        asked = np.asarray(state.buffer.block_steps)
        share = S // steps + (asked < S % steps)
        same(sampling.quota(state, steps), np.maximum(share, 1))

    top = -np.sort(-rng.choice(GRID, (B, K, S, 3)), axis=-1)
    unasked = rng.random((B, K, S)) < 0.3
    reported = stats(
        package, np.where(unasked, -np.inf, top[..., 0]).astype(np.float32), entropy, top
    )
    gap = np.where(unasked, -np.inf, top[..., 0] - top[..., 1])
    same(sampling.margin(reported), gap)


# ---- blocks.py ----


def check_blocks(package: ModuleType, rng: np.random.Generator) -> None:
    blocks, state = part(package, "blocks"), draw(package, rng)
    old = state.buffer
    filled, status = np.asarray(old.filled), np.asarray(old.status)
    tokens, steps = np.asarray(old.tokens), np.asarray(old.block_steps)
    start, prompt, limit = (np.asarray(x).tolist() for x in (old.start, old.prompt_len, old.limit))
    stops = np.asarray(state.limits.stop_ids).tolist()

    def place(b: int, k: int, s: int) -> int:
        return start[b] + k * S + s

    free = by_cell(lambda b, k, s: place(b, k, s) >= prompt[b])
    same(blocks.live_cells(state), by_cell(lambda b, k, s: status[b, k] != DUMMY))
    same(blocks.to_cache(state), by_cell(lambda b, k, s: status[b, k] == TO_CACHE))
    holes = by_cell(lambda b, k, s: status[b, k] == ACTIVE and not filled[b, k, s]) & free
    same(blocks.holes(state), holes)
    whole = [
        [all(filled[b, k, s] or place(b, k, s) >= limit[b] for s in range(S)) for k in range(K)]
        for b in range(B)
    ]
    same(blocks.complete(state), whole)
    same(blocks.progress(state), filled.mean(axis=2))
    has_stop = [
        any(
            filled[b, k, s] and free[b, k, s] and tokens[b, k, s] in set(stops[b]) - {-1}
            for k, s in np.ndindex(K, S)
        )
        for b in range(B)
    ]
    same(blocks.has_stop(state), has_stop)

    for gated, rests in ((False, False), (True, False), (True, False), (True, True)):
        value, threshold = knob(package, rng)
        before = [
            [k == 0 or filled[b, k - 1].mean() >= value[b] for k in range(K)] for b in range(B)
        ]
        same(blocks.semi_complete_before(state, threshold), before)
        stable = rng.random((B, K)) < 0.5
        gate, rest = threshold if gated else None, jnp.asarray(stable) if rests else None
        wanted = status.copy()
        for b in range(B):
            count = int((status[b] != DUMMY).sum())
            ready = count == 0
            if gate is not None and count:
                ready = filled[b, count - 1].mean() >= value[b]
                ready = ready and (rest is None or stable[b, count - 1])
            elif gate is not None:  # nothing is open: the first one opens in any case
                ready = True
            if ready and count < K and start[b] + count * S < limit[b] and not has_stop[b]:
                wanted[b, count] = ACTIVE
        same(blocks.open_next(state, gate, rest).buffer.status, wanted)

    accept = rng.random((B, K, S)) < 0.5
    new = rng.integers(0, VOCAB, (B, K, S)).astype(np.int32)
    written = blocks.write(state, jnp.asarray(new), jnp.asarray(accept)).buffer
    same(written.tokens, np.where(accept & free, new, tokens))
    same(written.filled, filled | (accept & free))

    run = []
    for b in range(B):
        solid = (filled[b] & (status[b] != DUMMY)[:, None]).ravel().tolist()
        run.append(solid.index(False) if False in solid else K * S)
    same(blocks.settled_run(state), run)

    ready = rng.random((B, K)) < 0.6
    for leaves in (None, jnp.asarray(ready)):
        after, info = blocks.finish_step(state, jnp.asarray(accept), leaves)
        wanted, settled = status.copy(), list(run)
        for b in range(B):
            leading = 0
            for k in range(K):
                may = whole[b][k] and (leaves is None or ready[b, k])
                if status[b, k] != TO_CACHE and not (status[b, k] == ACTIVE and may):
                    break
                wanted[b, k], leading = TO_CACHE, leading + 1
            if leaves is not None:
                settled[b] = min(settled[b], leading * S)
        same(after.buffer.status, wanted)
        same(after.buffer.block_steps, steps + (status == ACTIVE))
        same(info.commit_len, (status == TO_CACHE).sum(axis=1) * S)
        same(info.settled_len, settled)
        same(info.accepted, accept.sum(axis=(1, 2)))
        same(info.nfe, np.ones(B))


# ---- block_rewrite.py ----


def check_rewrite(package: ModuleType, rng: np.random.Generator) -> None:
    rewrite, state = part(package, "block_rewrite"), draw(package, rng)
    old = state.buffer
    filled, status, tokens = (np.asarray(x) for x in (old.filled, old.status, old.tokens))
    start, prompt, limit = (np.asarray(x).tolist() for x in (old.start, old.prompt_len, old.limit))
    position = by_cell(lambda b, k, s: start[b] + k * S + s)
    free = by_cell(lambda b, k, s: status[b, k] == ACTIVE and position[b, k, s] >= prompt[b])
    new = rng.integers(0, VOCAB, (B, K, S)).astype(np.int32)
    where = rng.random((B, K, S)) < 0.5
    same(rewrite.editable(state), free)
    same(rewrite.differs(state, jnp.asarray(new)), free & filled & (new != tokens))
    same(rewrite.before_limit(state), by_cell(lambda b, k, s: position[b, k, s] < limit[b]))
    after, counted = rewrite.rewrite(state, jnp.asarray(new), jnp.asarray(where))
    same(after.buffer.tokens, np.where(where & free, new, tokens))
    same(after.buffer.filled, filled | (where & free))
    same(counted, where & free & ~filled)


# ---- token_merge.py ----


def check_merge(package: ModuleType, rng: np.random.Generator) -> None:
    merge, state = part(package, "token_merge"), draw(package, rng)
    M, mask = 2, VOCAB - 1
    spec = part(package, "protocol").SlotSpec(B, K, S, VOCAB, 0, mask, jnp.float32)
    first = {
        name: jnp.broadcast_to(leaf, (B, K * S, *leaf.shape[2:]))
        for name, leaf in merge.init(spec, M).items()
    }
    state = state.replace(carry=state.carry.replace(tokens=first))
    none = merge.recall(state)
    assert not np.asarray(none.on).any()
    same(none.ids, np.full((B, K, S, M), mask))
    same(none.probs, np.zeros((B, K, S, M)))

    on, where = (rng.random((B, K, S)) < 0.5 for _ in range(2))
    token = rng.integers(0, VOCAB, (B, K, S)).astype(np.int32)
    prob = rng.choice(np.append(GRID, 1.25), (B, K, S)).astype(np.float32)
    prob = np.where(on, prob, -np.inf).astype(np.float32)  # cells that were not asked about
    one = merge.of_token(jnp.asarray(token), jnp.asarray(prob), jnp.asarray(on))
    sure = np.clip(prob, 0, 1)
    same(one.ids[..., 0], token)
    same(one.probs[..., 0], sure)
    same(one.rest, 1 - sure)
    same(one.on, on)

    top = rng.choice(np.array([0.125, 0.25, 0.75], np.float32), (B, K, S, M))
    several = merge.of_top(stats(package, prob, prob, top), jnp.asarray(on))
    held = np.where(on[..., None], top, 0)
    same(several.probs, held)
    same(several.rest, np.maximum(0, 1 - held.sum(axis=-1)))
    same(several.ids, np.broadcast_to(np.arange(M), top.shape))

    kept = merge.remember(state, several, jnp.asarray(np.ones_like(where)))
    later = merge.of_top(stats(package, prob, prob, top[..., ::-1].copy()), jnp.asarray(~on))
    got = merge.recall(merge.remember(kept, later, jnp.asarray(where)))
    for name in ("ids", "probs", "rest", "on"):
        a, b = np.asarray(getattr(later, name)), np.asarray(getattr(several, name))
        same(getattr(got, name), np.where(where[..., None] if a.ndim == 4 else where, a, b))

    for renormalize in (True, False):
        mix = merge.beside_mask(several, mask, renormalize)
        same(mix.base_ids, np.full((B, K, S), mask))
        same(mix.base_weight, several.rest)
        same(mix.ids, several.ids)
        same(mix.probs, several.probs)
        same(mix.on, several.on)
        assert mix.renormalize is renormalize
    value, weight = knob(package, rng)
    mix = merge.beside_token(several, jnp.asarray(token), weight)
    same(mix.base_ids, token)
    same(mix.base_weight, np.ones((B, K, S)))
    same(mix.probs, held * value[:, None, None, None])
    same(mix.on, on)
    assert mix.renormalize is False


# ---- random.py ----


def check_random(package: ModuleType, rng: np.random.Generator) -> None:
    random, state = part(package, "random"), draw(package, rng)

    def bits(keys: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(keys))

    def alike(a: Any, b: Any) -> np.ndarray:
        return (bits(a) == bits(b)).all(axis=-1)

    def at(**fields: Any) -> Any:
        return state.replace(buffer=state.buffer.replace(**fields))

    later = at(nfe=state.buffer.nfe + 1)
    moved = at(start=state.buffer.start + S)
    ahead = (slice(None), slice(1, None)), (slice(None), slice(None, -1))
    for draws in (random.position_keys, random.step_keys):
        keys = draws(state)
        assert len({tuple(key) for key in bits(keys).reshape(-1, 2).tolist()}) == B * K * S
        # A position has its key wherever the window stands.
        assert alike(keys[ahead[0]], draws(moved)[ahead[1]]).all()
        order = rng.permutation(B)
        turned = jax.tree.map(lambda leaf, order=order: leaf[order], state)
        assert alike(draws(turned), keys[order]).all(), "the slot has a say"
    assert alike(random.position_keys(later), random.position_keys(state)).all()
    assert not alike(random.step_keys(later), random.step_keys(state)).any()
    assert not alike(random.step_keys(state, 1), random.step_keys(state)).any()
    plain = {tuple(key) for key in bits(random.position_keys(state)).reshape(-1, 2).tolist()}
    stream = bits(random.step_keys(state)).reshape(-1, 2).tolist()
    assert not plain & {tuple(key) for key in stream}, "the streams meet"
    uniform = getattr(random, "uniforms", None)
    if uniform is not None:
        drawn = np.asarray(uniform(state, salt=1))
        wanted = jax.vmap(jax.random.uniform)(random.step_keys(state, 1).reshape(-1))
        same(drawn, np.asarray(wanted).reshape(B, K, S))
        assert math.isclose(float(drawn.mean()), 0.5, abs_tol=0.25)


CHECKS = {
    "sampling": check_sampling,
    "blocks": check_blocks,
    "rewrite": check_rewrite,
    "merge": check_merge,
    "random": check_random,
}
