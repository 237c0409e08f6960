"""Wrong versions of `DMax` and its shared pieces, one rule broken in each.

`killer` is the mode whose scripts must notice. Left out as equivalent: mixtures kept where a hole
has none, since no cell becomes a hole again.
"""

from tests.mutation import broken

_READY = (
    "ready = ~jnp.any(changes & counts, axis=2) | ~jnp.any(unsure & counts, axis=2)",
    "ready = ~jnp.any({} & counts, axis=2)",
)
_COMPAT_CAP = '        if self.compat == "diffulex":\n            return ready\n'
_COUNTS = "counts = block_rewrite.editable(state) & block_rewrite.before_limit(state)"
_FINISH = "blocks.finish_step(state, filled, ready=ready)"

MUTANTS = [
    *broken(
        "paper",
        "sampling.py",
        run_takes_the_unsure_one=(
            "before_unsure = jnp.cumsum(unsure.astype(jnp.int32), axis=2) == 0",
            "before_unsure = jnp.cumsum(unsure.astype(jnp.int32), axis=2) < 1 + unsure.astype(int)",
        ),
    ),
    *broken(
        "paper",
        "dmax.py",
        commits_softly=("on &= ~blocks.to_cache(state)", "on &= True"),
        weight_of_zero_merges=("at_token > 0", "at_token >= 0"),
        nothing_is_refreshed=(
            "block_rewrite.rewrite(state, stats.token, changes)",
            "block_rewrite.rewrite(state, stats.token, accept)",
        ),
        leaves_only_unchanged=(_READY[0], _READY[1].format("changes")),
        leaves_only_sure=(_READY[0], _READY[1].format("unsure")),
        an_edit_is_no_change=(
            "self._ready(state, judged, changes)",
            "self._ready(state, judged, accept)",
        ),
        commit_confidence_is_strict=(
            "judged.confidence < self.commit_confidence.at_token",
            "judged.confidence <= self.commit_confidence.at_token",
        ),
        no_cap=("return ready | (state.buffer.block_steps + 1 >= self.block_size)", "return ready"),
        cap_one_late=("block_steps + 1 >= self.block_size", "block_steps >= self.block_size"),
        waits_for_cells_past_the_limit=(_COUNTS, "counts = block_rewrite.editable(state)"),
        judges_the_prompt=(_COUNTS, "counts = block_rewrite.before_limit(state)"),
        prompt_is_soft=(
            "soft = block_rewrite.editable(state) & state.buffer.filled",
            "soft = active & state.buffer.filled",
        ),
        counts_edits_as_accepted=(_FINISH, "blocks.finish_step(state, changes, ready=ready)"),
        settles_what_may_change=(_FINISH, "blocks.finish_step(state, filled)"),
        stability_is_strict=(
            'state.carry.blocks["stability"] >= self',
            'state.carry.blocks["stability"] > self',
        ),
        opens_unstable=(
            "(state, self.add_block_threshold, stable)",
            "(state, self.add_block_threshold)",
        ),
        stability_after_the_writes=(
            'blocks={"stability": stability}',
            'blocks={"stability": block_rewrite.stability(state, stats.token)}',
        ),
    ),
    *broken(
        "paper",
        "block_rewrite.py",
        stability_without_the_prompt=(
            "    filled = state.buffer.filled\n",
            "    filled = state.buffer.filled & editable(state)\n",
        ),
        nothing_filled_is_unstable=(
            "/ jnp.maximum(count, 1), 1.0)",
            "/ jnp.maximum(count, 1), 0.0)",
        ),
    ),
    *broken(
        "paper",
        "blocks.py",
        stability_of_the_first_block=(
            "enough &= jnp.take_along_axis(stable, last, axis=1)",
            "enough &= stable[:, :1]",
        ),
    ),
    *broken(
        "paper",
        "driver.py",
        mixtures_do_not_slide=(
            "along(v, by_token, fresh.tokens[k]) for k, v in state.carry.tokens.items()",
            "v for k, v in state.carry.tokens.items()",
        ),
    ),
    *broken(
        "diffulex",
        "dmax.py",
        compat_commits_plainly=('if self.compat != "diffulex":', "if True:"),
        compat_has_a_cap=(_COMPAT_CAP, ""),
        compat_has_no_fast_path=(
            "jnp.where(certain, 1.0, stats.confidence)",
            "stats.confidence",
        ),
        fast_path_is_for_the_new=(
            "certain = active & state.buffer.filled",
            "certain = active & (state.buffer.filled | blocks.holes(state))",
        ),
    ),
]
