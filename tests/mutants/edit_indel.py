"""Wrong versions of `EditIndel` and of what it reads of `indel`, one rule broken in each.

The numbers are the steps of docs/llada2_2_edits.md.
"""

from tests.mutation import broken

WAITING = "jnp.where(jnp.any(waiting, axis=2), 0, post)"
MUTANTS = broken(
    "corpus",
    "edit_indel.py",
    step_1_never_counts=(WAITING, "0 * post"),
    step_1_counts_from_the_start=(WAITING, "post"),
    step_1_waits_for_new_holes=("waiting = holes & original & counts", "waiting = holes & counts"),
    step_1_waits_past_the_limit=(
        "waiting = holes & original & counts",
        "waiting = holes & original",
    ),
    step_2_reads_two_ids=("num_top=3", "num_top=2"),
    step_3_forgets_the_remainder=("(step < rest)", "(step < 0)"),
    step_3_the_remainder_is_last=("(step < rest)", "(step >= rest)"),
    step_3_forgets_new_holes=("jnp.sum(holes & ~original, axis=2)", "0"),
    step_3_wants_all_as_new=("jnp.sum(holes & ~original, axis=2)", "jnp.sum(holes, axis=2)"),
    step_3_one_above_is_enough=(">= wanted", ">= jnp.minimum(wanted, 1)"),
    step_3_takes_the_schedule_alone=("enough[:, :, None], sure, surest", "False, sure, surest"),
    step_3_never_forces=("jnp.where(enough[:, :, None], sure, surest)", "sure"),
    step_3_the_schedule_has_no_end=("(step >= self.denoising_steps)", "(step >= 10**6)"),
    step_3_the_schedule_is_one_longer=("(step >= self.d", "(step > self.d"),
    step_4_edits_are_not_strict=(
        "stats.confidence > self.edit_threshold",
        "stats.confidence >= self.edit_threshold",
    ),
    step_4_has_the_threshold_of_holes=("> self.edit_threshold.at", "> self.accept_threshold.at"),
    step_5_the_budget_is_one_more=(
        "post >= self.max_post_edit_steps",
        "post > self.max_post_edit_steps",
    ),
    step_5_no_budget_ends_nothing=("~jnp.any(waiting & ~fill, axis=2)", "False"),
    step_5_no_budget_ends_at_once=(
        "jnp.any(waiting, axis=2) & ~jnp.any(waiting & ~fill, axis=2)",
        "~jnp.any(waiting & ~fill, axis=2)",
    ),
    step_5_the_cap_is_one_more=("self.max_block_steps - 1", "self.max_block_steps"),
    step_5_the_last_forward_leaves_holes=("holes | edit, fill | edit", "fill | edit, fill | edit"),
    step_5_the_last_forward_deletes=("plain, stats.token", "stats.token, stats.token"),
    step_6_never_escapes=("range(_ESCAPES)", "range(0)"),
    step_6_escapes_once=("range(_ESCAPES)", "range(1)"),
    step_6_escapes_in_the_last_forward=(
        'indel.repeats(text, known["written"]) & ~final',
        'indel.repeats(text, known["written"])',
    ),
    step_6_remembers_what_was_consumed=(
        'indel.remember(known["written"], text,',
        'indel.remember(known["written"], before,',
    ),
    step_7_forgets_which_holes_were_first=('"original": original,', '"original": holes,'),
    step_8_leaves_with_a_change=("~jnp.any((after != before) & counts, axis=2)", "active"),
    step_8_waits_for_what_is_past_the_limit=("(after != before) & counts", "after != before"),
    step_8_the_last_forward_does_not_leave=("ready=still | final", "ready=still"),
    step_8_a_finished_block_is_written=('write &= ~known["final"][:, :, None]', "write &= True"),
    filled_cells_count_as_accepted=("full & ~buffer.filled", "full"),
)
MUTANTS += broken(
    "corpus",
    "indel.py",
    step_5_takes_the_second_of_two_edits=("range(3)", "range(2)"),
    step_6_the_surest_escapes=("top_n(-stats.confidence", "top_n(stats.confidence"),
    step_6_an_unchanged_cell_escapes=("one, text != before)", "one, text == before)"),
    step_6_keeps_the_best=("jnp.where(text == first, second, first)", "first"),
    step_6_remembers_one_text=("number == step[:, :, None]", "number == 0 * step[:, :, None]"),
    step_7_a_delete_leaves_a_hole=("delete), 0, jnp", "delete), 1, jnp"),
    step_7_a_split_is_one_cell=("is_split, 2, 1", "is_split, 1, 1"),
    step_7_the_hole_comes_behind=(
        "(moved(end - length) == place)",
        "(moved(end - length) != place)",
    ),
    step_7_a_split_stays=("moved(before), moved(text)", "moved(text), moved(text)"),
    step_7_new_holes_are_first_ones=("moved(marked) & ~is_new", "moved(marked)"),
    step_7_what_moves_is_new=("moved(marked) & ~is_new", "marked & moved(~is_split) & ~is_new"),
    step_7_the_end_repeats_the_last=("(source == S) | ", ""),
)
