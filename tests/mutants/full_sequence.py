"""Wrong versions of `FullSequence` and of the rules of remasking, one broken in each.

`killer` is the check that must notice: the windows of scripted runs under one rule of remasking,
or "passes", what forwards with a dual cache run, see and store.
"""

from tests.mutation import broken

_SURE = "accept |= sampling.above(stats, self.accept_threshold) & holes"
_NUMBER = "number = (first - buffer.prompt_len) // block_length"

MUTANTS = [
    *broken(
        "low_confidence",
        "remasking.py",
        remainder_comes_last=("(step < holes % steps)", "(step >= steps - holes % steps)"),
        remainder_is_lost=("(step < holes % steps)", "(step < 0)"),
        least_sure_first=(
            "            return stats.confidence\n",
            "            return -stats.confidence\n",
        ),
        blocks_on_the_absolute_grid=(
            _NUMBER,
            "number = first // block_length - buffer.prompt_len // block_length",
        ),
        blocks_are_not_cut=(
            "end = jnp.minimum(begin + block_length, buffer.limit)",
            "end = begin + block_length + 1",
        ),
        counts_holes_anew=(
            'jnp.where(is_new, jnp.sum(holes, axis=(1, 2), dtype=jnp.int32), slot["holes"])',
            "jnp.sum(holes, axis=(1, 2), dtype=jnp.int32)",
        ),
        counts_steps_on=(
            'jnp.where(is_new, 0, slot["step"] + 1)',
            'slot["step"] + 1',
        ),
        steps_are_a_blocks=(
            "count = steps // jnp.maximum(-(-length // block_length), 1)",
            "count = 0 * length + steps",
        ),
        last_block_is_not_counted=(
            "jnp.maximum(-(-length // block_length), 1)",
            "jnp.maximum(length // block_length, 1)",
        ),
    ),
    *broken(
        "low_confidence",
        "full_sequence.py",
        takes_no_sure_ones=(_SURE, "accept &= holes"),
        sure_ones_of_any_block=(
            "holes = block.cells & ~state.buffer.filled",
            "holes = remasking.text_cells(state) & ~state.buffer.filled",
        ),
    ),
    *broken(
        "entropy",
        "remasking.py",
        highest_entropy_first=(
            "            return -stats.entropy\n",
            "            return stats.entropy\n",
        ),
        timesteps_end_at_zero=("_THOUSAND, _SPAN = 1000, 999", "_THOUSAND, _SPAN = 1000, 1000"),
        the_last_forward_leaves_some=(
            "return jnp.where(step >= steps - 1, holes, share)",
            "return jnp.where(step >= steps, holes, share)",
        ),
        rounds_up=(
            "share = _SPAN * holes // (",
            "share = 1 + (_SPAN * holes - 1) // (",
        ),
        share_of_what_was_there=(
            "timestep_quota(left, forwards, step)",
            "timestep_quota(at_begin, forwards, step)",
        ),
        never_forces=(
            "jnp.maximum(timestep_quota(left, forwards, step), least)",
            "timestep_quota(left, forwards, step)",
        ),
        always_forces=(
            "jnp.asarray(at_slot(accept_threshold) < 1)",
            "jnp.asarray(at_slot(accept_threshold) < 9)",
        ),
    ),
    *broken(
        "margin",
        "remasking.py",
        margin_is_confidence=("return sampling.margin(stats)", "return stats.confidence"),
    ),
    *broken(
        "origin",
        "remasking.py",
        chance_of_the_rest=(
            "random.uniforms(state, _ORDER_STREAM) < chance",
            "random.uniforms(state, _ORDER_STREAM) >= chance",
        ),
    ),
    *broken(
        "passes",
        "dual_cache.py",
        stores_every_forward=("text & is_new[:, None, None])", "text)"),
        stores_nothing=("text & is_new[:, None, None])", "text & False)"),
        never_runs_everything=("jnp.where(is_new[:, None, None], text, part)", "part"),
        runs_everything=("jnp.where(is_new[:, None, None], text, part)", "text"),
        sees_nothing_behind_the_block=(
            "context_len=jnp.sum(text, axis=(1, 2), dtype=jnp.int32)",
            "context_len=block.end",
        ),
        runs_on_behind_the_block=(
            "if alone:\n        part",
            "if False:\n        part",
        ),
    ),
    *broken(
        "passes",
        "remasking.py",
        limit_is_a_cell=(
            "buffer.filled | (buffer.positions < buffer.limit[:, None, None])",
            "buffer.filled | (buffer.positions <= buffer.limit[:, None, None])",
        ),
    ),
    *broken(
        "passes",
        "dual_cache.py",
        is_always_wide=("jnp.sum(most > jnp", "jnp.sum(most >= 0 * jnp"),
        is_too_narrow=("jnp.sum(most > jnp", "jnp.sum(most > 20 + jnp"),
    ),
]
