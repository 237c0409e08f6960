"""The invariants of docs/contract.md over every strategy, and over strategies that break one.

The wrong steps are one program; a number in the strategy selects one.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import struct

from dllm_jax import strategies
from dllm_jax.strategies import as_strategy, load_strategy
from dllm_jax.strategies.core import blocks, random, sampling
from dllm_jax.strategies.core.needs import Needs
from dllm_jax.strategies.core.protocol import Knob, Strategy, TokenMix, knob
from dllm_jax.strategies.core.state import ACTIVE, DUMMY, STOP, TO_CACHE
from dllm_jax.strategies.testing.invariants import check_invariants

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def surest(forward, state):
    """A step as a user writes it: the surest hole of one block, drawn from the tempered law."""
    state = blocks.open_next(state)
    out = forward(state)
    state = out.store(state, blocks.to_cache(state))
    holes = blocks.holes(state)
    stats = out.predict(where=holes, sampling=state.sampling, keys=random.step_keys(state))
    accept = sampling.top_n(stats.confidence, jnp.ones_like(state.buffer.status), holes)
    return blocks.finish_step(blocks.write(state, stats.token, accept), accept)


# Strategy, and the forwards in which its first open block leaves: one a cell, and one while the
# block before it commits.
CASES: dict[str, tuple[Any, int]] = {
    "ar": (strategies.AR(), 1),
    "multi_bd": (strategies.MultiBD(block_size=4, buffer_size=3), 5),
    "multi_bd_one": (strategies.MultiBD(block_size=4, buffer_size=1), 5),
    "d2f": (strategies.D2F(block_size=4, buffer_size=3), 5),
    "d2f_aligned": (strategies.D2F(align_blocks_to_prompt=True, block_size=4, buffer_size=2), 5),
    "edit": (strategies.Edit(max_post_edit_steps=2, block_size=4, buffer_size=3), 8),
    "edit_penalty": (
        strategies.Edit(max_post_edit_steps=0, penalty_lambda=1.0, block_size=4, buffer_size=2),
        6,
    ),
    "edit_indel": (
        strategies.EditIndel(
            max_post_edit_steps=3,
            denoising_steps=4,
            max_block_steps=7,
            delete_token_id=3,
            split_token_id=5,
            block_size=4,
            buffer_size=3,
        ),
        8,
    ),
    "dmax": (strategies.DMax(block_size=4, buffer_size=3), 5),
    "dmax_top": (
        strategies.DMax(merge="iter_smooth_topk", token_merge_top_k=2, block_size=4),
        5,
    ),
    "dmax_diffulex": (strategies.DMax(compat="diffulex", block_size=4, buffer_size=3), 6),
    "fast_dllm_v2": (strategies.FastDLLMV2(sub_block_size=4, block_size=8), 8),
    "fast_dllm_v2_whole": (
        strategies.FastDLLMV2(sub_block_size=2, use_block_cache=False, block_size=4),
        4,
    ),
    "function": (as_strategy(surest, block_size=4, buffer_size=1), 5),
    "my_strategy": (load_strategy(f"{EXAMPLES}/my_strategy.py:my_step", block_size=8), 6),
    "credit_decoding": (
        load_strategy(f"{EXAMPLES}/credit_decoding.py:CreditDecoding", block_size=4, buffer_size=2),
        5,
    ),
    "diffusion_gemma": (strategies.DiffusionGemma(block_size=4, buffer_size=1), 7),
    "diffusion_gemma_early": (strategies.DiffusionGemma(early_slots=99, block_size=4), 7),
}
CASES |= {
    f"block_diffusion_{rule}": (strategies.BlockDiffusion(remasking=rule, block_size=4), 5)
    for rule in ("sequential", "static", "dynamic", "entropy", "random")
}
CASES |= {
    f"full_sequence_{name}": (strategies.FullSequence(block_size=4, buffer_size=4, **fields), 4)
    for name, fields in {
        "plain": {},
        "blocks": {"block_length": 4, "steps": 8},
        "guided": {"cfg_scale": 1.5},
        "prefix": {"block_length": 4, "cache": "prefix"},
        "dual": {"block_length": 4, "cache": "dual"},
        **{rule: {"remasking": rule} for rule in ("random", "margin", "entropy", "origin")},
    }.items()
}
# Without a cap on a block's steps a confidence that nothing reaches keeps it for good.
KNOBS = {"dmax_diffulex": {"commit_confidence": (0.5, 0.9, 1.0)}}
# A canvas takes what its schedule says.
_STEPS = {"max_denoising_steps": (1, 2, 3, 6), "stability_threshold": (0, 1, 2)}
KNOBS |= dict.fromkeys(("diffusion_gemma", "diffusion_gemma_early"), _STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_strategy_keeps_the_contract(name: str) -> None:
    strategy, most = CASES[name]
    for seed in range(12):
        check_invariants(strategy, max_block_steps=most, knobs=KNOBS.get(name), seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["multi_bd", "d2f", "edit", "dmax", "fast_dllm_v2", "diffusion_gemma"]
)
def test_the_bounds_are_the_fewest(name: str) -> None:
    """So a block that waits one forward too long would show."""
    strategy, most = CASES[name]

    def all_seeds() -> None:
        for seed in range(30):
            check_invariants(strategy, max_block_steps=most - 1, seed=seed)

    with pytest.raises(AssertionError, match=f"leaves within {most - 1} of its steps"):
        all_seeds()


# ---- steps that break a rule ----


class Wrong(Strategy):
    """`multi_bd` without its gate, and what `which` does to it."""

    which: Any = 0
    accept_threshold: Knob = knob(0.9)
    block_size: int = struct.field(pytree_node=False, default=4)
    buffer_size: int = struct.field(pytree_node=False, default=3)
    needs: Needs = struct.field(pytree_node=False, default=Needs("grid_causal"))

    def step(self, forward, state):
        def broken(name):
            return self.which == list(WRONG).index(name)

        def one_of(name, wrong, right):
            return jnp.where(broken(name), wrong, right)

        state = blocks.open_next(state)
        buffer, shape = state.buffer, state.buffer.tokens.shape
        cell = jnp.arange(shape[1] * shape[2]).reshape(1, *shape[1:])
        leaving = blocks.to_cache(state)
        mixture = TokenMix(
            base_ids=buffer.tokens,
            base_weight=jnp.ones(shape),
            ids=buffer.tokens[..., None],
            probs=jnp.ones((*shape, 1)),
            on=leaving & broken("commits a mixture"),
        )
        live = blocks.live_cells(state)
        live = one_of("runs a dummy", jnp.ones(shape, bool), live)
        live &= ~broken("runs with a gap") | (cell != 2)
        ahead = one_of("reads what nobody stored", 1, 0)
        out = forward(state, inputs=mixture, live=live, context_len=buffer.start + ahead * 99)
        stored = one_of("commits what had holes", live & ~leaving, leaving)
        state = out.store(state, stored & ~broken("stores nothing"))
        holes = blocks.holes(state)
        stats = out.predict(where=holes, sampling=state.sampling, keys=random.step_keys(state))
        accept = sampling.above(stats, self.accept_threshold)
        accept |= sampling.top_n(stats.confidence, jnp.ones_like(buffer.status), holes)
        slot = jnp.arange(shape[0])[:, None, None]
        accept |= holes & broken("looks at its place") & (slot % 2 == 0)
        accept |= holes & broken("looks at other slots") & (jnp.sum(buffer.filled) % 2 == 0)
        accept |= holes & broken("looks under holes") & (buffer.tokens % 2 == 0)
        accept &= ~broken("starves") | (cell > 0)
        state, info = blocks.finish_step(blocks.write(state, stats.token, accept), accept)

        after = state.buffer
        behind = (after.status == ACTIVE) & blocks.complete(state)
        again = (after.status == ACTIVE)[:, :, None] & after.filled & (cell == 0)
        in_prompt = buffer.positions < buffer.prompt_len[:, None, None]
        other = after.tokens % 7 + 1
        state = state.replace(
            buffer=after.replace(
                tokens=jnp.where(
                    (broken("writes the prompt") & in_prompt)
                    | (broken("rewrites what is settled") & again & ~in_prompt),
                    other,
                    after.tokens,
                ),
                filled=(after.filled & ~(broken("empties the prompt") & in_prompt))
                | (broken("fills a dummy") & (after.status == DUMMY)[:, :, None]),
                status=jnp.where(
                    broken("leaves behind an open block") & behind, TO_CACHE, after.status
                ),
                start=after.start + one_of("moves the start", 4, 0),
                nfe=after.nfe + one_of("counts itself", 1, 0),
            ),
            finish=one_of("ends a request", STOP, state.finish),
            keys=jax.random.wrap_key_data(
                jax.random.key_data(state.keys) + one_of("draws keys", 1, 0).astype(jnp.uint32)
            ),
        )
        at_once = jnp.sum(state.buffer.status == TO_CACHE, axis=1, dtype=jnp.int32) * shape[2]
        hesitant = jnp.where(buffer.nfe % 2 == 0, info.settled_len, info.commit_len)
        return state, info.replace(
            commit_len=one_of("commits at once", at_once, info.commit_len),
            settled_len=jnp.select(
                [broken("settles nothing"), broken("takes back"), broken("settles a hole")],
                [0 * hesitant, hesitant, jnp.minimum(info.settled_len + 1, cell.size)],
                info.settled_len,
            ),
            nfe=info.nfe - one_of("costs nothing", 1, 0),
        )


IN_CACHE = "what leaves the window is in the cache as it leaves"
WRONG = {
    "nothing": None,
    "writes the prompt": "what the request brought never changes",
    "empties the prompt": "what the request brought never changes",
    "rewrites what is settled": "settled tokens never change",
    "takes back": "the settled end never moves back",
    "settles a hole": "what is settled is filled",
    "settles nothing": "what leaves the window is settled",
    "commits at once": IN_CACHE,
    "stores nothing": IN_CACHE,
    "commits what had holes": IN_CACHE,
    "commits a mixture": IN_CACHE,
    "moves the start": "buffer.start is the engine's",
    "counts itself": "buffer.nfe is the engine's",
    "ends a request": "finish is the engine's",
    "draws keys": "keys is the engine's",
    "fills a dummy": "DUMMY cells are not filled",
    "runs a dummy": "DUMMY cells are never attended",
    "runs with a gap": "the live cells of a row are one contiguous range",
    "reads what nobody stored": "what a forward reads of the cache was stored before",
    "leaves behind an open block": r"statuses are TO_CACHE\* ACTIVE\* DUMMY\*",
    "costs nothing": "a step costs at least one forward",
    "starves": "the first open block leaves within 32 of its steps",
    "looks at its place": "depends on its place or on other slots",
    "looks at other slots": "depends on its place or on other slots",
    "looks under holes": "depends on ids where no cell is filled",
}


@pytest.mark.long
@pytest.mark.parametrize("which", WRONG)
def test_a_broken_rule_is_named(which: str) -> None:
    strategy = Wrong(which=jnp.int32(list(WRONG).index(which)))
    for seed in range(2):
        if WRONG[which] is None:
            check_invariants(strategy, seed=seed)
            continue
        with pytest.raises(AssertionError, match=rf"^Wrong: step \d+, slot \d+: .*{WRONG[which]}"):
            check_invariants(strategy, seed=seed)


@pytest.mark.slow
def test_soft_commits_may_be_mixtures() -> None:
    strategy = Wrong(which=jnp.int32(list(WRONG).index("commits a mixture")))
    check_invariants(strategy.replace(needs=Needs("grid_causal", soft_commits=True)))


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ValueError, match="surest has no block_size"):
        check_invariants(surest)
    with pytest.raises(ValueError, match=r"DFlash needs the models \('draft',\)"):
        check_invariants(strategies.DFlash(4, (0, 1)))
    for wrong, reported in (
        (
            {"knobs": {"threshold": [1.0]}},
            "no knob 'threshold'; it has accept_threshold, add_block",
        ),
        ({"knobs": {"add_block_threshold": [0.5, -1]}}, r"add_block_threshold=\[0.5, -1\] must be"),
        ({"knobs": {"add_block_threshold": []}}, r"add_block_threshold=\[\] must be values in"),
        ({"num_slots": 1}, "num_slots=1 must be at least 2"),
        ({"seed": -1}, "seed=-1 at least 0"),
    ):
        with pytest.raises(ValueError, match=reported):
            check_invariants("multi_bd", **wrong)
