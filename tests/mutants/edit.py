"""Wrong versions of `Edit` and its shared pieces, one rule broken in each."""

from tests.mutation import broken

SURE = "sure = stats.confidence > self.edit_threshold.at_token"
MUTANTS = broken(
    "corpus",
    "edit.py",
    edit_is_not_strict=(SURE, SURE.replace(">", ">=")),
    edit_has_no_threshold=(SURE, "sure = stats.confidence > 0.0"),
    edit_has_the_threshold_of_holes=(SURE, SURE.replace("edit_", "accept_")),
    never_forces=("one = jnp.ones_like(", "one = jnp.zeros_like("),
    forces_two=("one = jnp.ones_like(state.buffer.status)", "one = 2 + 0 * state.buffer.status"),
    forces_behind_a_gate=(
        "sampling.top_n(\n            stats.confidence, one, holes\n        )",
        "sampling.forced_top1(stats, state, self.accept_threshold)",
    ),
    leaves_with_an_edit_to_do=("still = ~jnp.any(", "still = full | ~jnp.any("),
    leaves_only_when_spent=("done = full & (still | (", "done = full & ((still & False) | ("),
    leaves_before_the_last_fill=("done = full & (still", "done = (still"),
    budget_of_edits_is_one_less=("(post_edit_steps > budget)", "(post_edit_steps >= budget)"),
    budget_of_edits_is_one_more=("(post_edit_steps > budget)", "(post_edit_steps > budget + 1)"),
    edits_without_end=("(still | (post_edit_steps > budget))", "still"),
    time_is_one_more=("block_steps >= self", "block_steps > self"),
    time_has_no_end=("block_steps >= self", "block_steps >= 99 + self"),
    time_forgets_the_edits=("everything = blocks.holes(state) | edit", "everything = fill & ~edit"),
    spent_blocks_are_edited_on=("(fill | edit) & ~done[:, :, None]", "fill | edit"),
    waits_for_what_is_past_the_limit=(
        "edit & block_rewrite.before_limit(state)",
        "edit",
    ),
    counter_starts_late=("jnp.zeros((1, 1), jnp.int32)", "jnp.full((1, 1), -1, jnp.int32)"),
)
MUTANTS += broken(
    "corpus",
    "blocks.py",
    what_is_full_is_settled=("if ready is not None:  # h", "if False:  # h"),
    what_is_full_may_leave=(
        "complete(state) if ready is None else complete(state) & ready",
        "complete(state)",
    ),
)
MUTANTS += broken(
    "corpus",
    "driver.py",
    counters_do_not_slide=(
        "blocks={k: along(v, by_block, fresh.blocks[k]) for k, v in state.carry.blocks.items()}",
        "blocks=state.carry.blocks",
    ),
)
