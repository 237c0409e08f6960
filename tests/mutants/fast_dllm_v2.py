"""Wrong versions of `FastDLLMV2` and its dual cache, one rule broken in each.

`killer` is the check that must notice: "tokens", the windows of scripted runs, or "passes", what
their forwards run, see and store.
"""

from tests.mutation import broken

_SURER = "sampling.top_n(stats.confidence, jnp.ones_like(state.buffer.status), holes)"


TOKENS = [
    *broken(
        "tokens",
        "fast_dllm_v2.py",
        never_forces=("sampling.above(stats, self.accept_threshold) | surest", "surest & False"),
        forces_only=("sampling.above(stats, self.accept_threshold) | surest", "surest"),
        forces_beside=(
            _SURER,
            _SURER.replace("holes", "holes & ~sampling.above(stats, self.accept_threshold)"),
        ),
        forces_the_least_sure=(_SURER, _SURER.replace("stats.conf", "-stats.conf")),
        looks_past_the_sub_block=("blocks.holes(state) & cells", "blocks.holes(state)"),
        seed_is_no_new_token=("accept | seeded)", "accept)"),
        never_seeds=(
            "state, seeded = dual_cache.seed_block(forward, blocks.open_next(state))",
            "state, seeded = blocks.open_next(state), jnp.zeros((1, 1, 1), bool)",
        ),
        seeds_before_it_opens=(
            "state, seeded = dual_cache.seed_block(forward, blocks.open_next(state))",
            "state, seeded = dual_cache.seed_block(forward, state)\n"
            "        state = blocks.open_next(state)",
        ),
    ),
    *broken(
        "tokens",
        "dual_cache.py",
        fills_past_the_limit=("& has_hole & text_cells(state)", "& has_hole"),
        limit_is_a_cell=(
            "buffer.positions < buffer.limit[:, None, None]",
            "buffer.positions <= buffer.limit[:, None, None]",
        ),
        sub_blocks_from_the_right=(
            "first = jnp.argmax(open_cells, axis=2, keepdims=True)",
            "first = cell.size - 1 - jnp.argmax(open_cells[..., ::-1], axis=2, keepdims=True)",
        ),
        sub_block_starts_at_its_hole=(
            "(cell // size == first // size)",
            "(cell >= first) & (cell < first + size)",
        ),
    ),
]

PASSES = [
    *broken(
        "passes",
        "fast_dllm_v2.py",
        stores_at_the_commit_only=("out.store(state, live)", "out.store(state, live & False)"),
        stores_the_sub_block_only=("out.store(state, live)", "out.store(state, live & cells)"),
    ),
    *broken(
        "passes",
        "dual_cache.py",
        refines_what_was_never_stored=(
            "return has_head & (buffer.block_steps[:, 0] > 0)",
            "return has_head",
        ),
        refines_behind_a_hole=(
            "return has_head & (buffer.block_steps[:, 0] > 0)",
            "return jnp.any(cells, axis=(1, 2)) & (buffer.block_steps[:, 0] > 0)",
        ),
        refines_once_only=("(buffer.block_steps[:, 0] > 0)", "(buffer.block_steps[:, 0] == 1)"),
        refines_without_its_block=("jnp.where(refine, stored, buffer.start)", "buffer.start"),
        reads_a_stale_block=("jnp.where(refine, stored, buffer.start)", "stored"),
        reads_past_the_limit=(
            "buffer.start + jnp.sum(whole, axis=(1, 2), dtype=jnp.int32)",
            "buffer.start + jnp.int32(whole.shape[2])",
        ),
        refines_the_whole_block=("jnp.where(refine[:, None, None], cells, whole)", "whole"),
        is_always_wide=(
            "jnp.all(refine | (state.finish != RUNNING))",
            "jnp.all(refine & (state.finish != RUNNING))",
        ),
        runs_past_the_limit=(
            "whole = text_cells(state)",
            "whole = blocks.live_cells(state)",
        ),
    ),
]

MUTANTS = TOKENS + PASSES
