"""Wrong versions of `DFlash` and `drafting`, one rule broken in each.

`killer` is the check that must notice. "rounds": random batches against the lists; "width": the
same with fewer drafts verified than drawn; "wandering": the same with another width in each step;
"guesses": a dense pass of the drafter; "cache": the contents of the pools, and "cache_off" without
drafts; "choice" and "learning": the lists' switch between drafts and none; "single": a step without
drafts next to the general one. For rejection, "enumerated": rounds of 3 ids; "drawn": rounds of 5
by chi-squared; "network": the distribution of texts.
"""

from tests.mutation import broken

_DRAWN = "where=cell > 0, sampling=state.sampling, keys=keys, width=width, behind=block"
_ROOM = "jnp.minimum(buffer.limit - buffer.start - 1, ends)"

MUTANTS = [
    *broken(
        "rounds",
        "dflash.py",
        anchor_is_a_mask=(
            "masked = jnp.where(cell == 0, tokens, draft.mask_id)",
            "masked = jnp.full_like(tokens, draft.mask_id)",
        ),
        judges_in_no_order=("causal=True", "causal=False"),
        loses_a_right_row=(
            "kept = cell < count[:, None, None]",
            "kept = cell < count[:, None, None] - 1",
        ),
        begins_greedily=(
            "state.boundary, sampling=state.sampling, keys=keys, first_of=opened",
            "state.boundary, first_of=opened",
        ),
        settles_the_drafts_only=("settled_len=count + 1", "settled_len=count"),
    ),
    *broken(
        "width",
        "drafting.py",
        takes_what_it_did_not_run=("((block != truth) | (cell >= width))", "(block != truth)"),
        proposes_a_draft_too_many=("(places < width) &", "(places <= width) &"),
    ),
    *broken(
        "wandering", "dflash.py", judges_what_was_not_drafted=("if width > 1:", "if width > 3:")
    ),
    *broken(
        "guesses",
        "dflash.py",
        drafts_in_order=("live=cell < size,", "live=cell < size, causal=True,"),
        taps_a_layer_early=("layer + 1 for layer", "layer for layer"),
        prompt_is_no_context=("if chunk.out is not None:", "if False:"),
    ),
    *broken(
        "cache",
        "dflash.py",
        context_of_the_anchor_alone=(
            "context.store(out.store(state, kept), kept)",
            "context.store(out.store(state, kept), cell < 1)",
        ),
    ),
    *broken(
        "cache_off",
        "dflash.py",
        no_context_without_drafts=(
            "context.store(out.store(state, kept), kept)",
            "context.store(out.store(state, kept), kept & (jnp.asarray(width) > 1))",
        ),
    ),
    *broken(
        "rounds",
        "drafting.py",
        no_token_of_the_targets_own=("1, 1 + right)", "1, right)"),
        goes_on_behind_a_wrong_draft=("jnp.argmax(is_wrong,", "jnp.sum(~is_wrong,"),
        goes_past_the_limit=(_ROOM, "ends"),
        goes_on_behind_a_run=(_ROOM, "buffer.limit - buffer.start - 1"),
        draws_by_forward=("keys = random.position_keys(state)", "keys = random.step_keys(state)"),
        judges_greedily=(_DRAWN, "where=cell > 0, width=width, behind=block"),
        writes_the_drafts=("return truth, right.astype(", "return block, right.astype("),
        run_is_one_longer=(">= state.limits.max_run", "> state.limits.max_run"),
        counts_past_a_run=("jnp.where(ends <= last, ", "jnp.where(ends < 0, "),
        counts_past_the_limit=("jnp.clip(buffer.limit - buffer.start - 1, 0, first", "(first"),
        counts_past_a_stop=(", 0, first.astype(jnp.int32))", ", 0, None)"),
        counts_the_drafts_alone=("jnp.minimum(right + 1, room)", "jnp.minimum(right, room)"),
        accepts_what_follows_a_wrong_one=(
            "taken = wanted & (places <= right[:, None])",
            "taken = wanted & (places <= right[:, None] + 1)",
        ),
    ),
    *broken(
        "wandering",
        "drafting.py",
        counts_rounds_without_drafts=("((sizes == emitted) & is_round)", "(sizes == emitted)"),
    ),
    *broken(
        "learning",
        "drafting.py",
        learns_of_a_round_that_is_cut_short=("is_round & (right < room)", "is_round"),
        learns_without_drafts=("is_round & (right < room)", "right < room"),
        learns_of_the_drafts_alone=("(right + 1).astype(", "right.astype("),
        idles_while_it_drafts=("jnp.where(is_round, 0, lasting[IDLE] + 1)", "lasting[IDLE] + 1"),
    ),
    *broken(
        "runs",
        "drafting.py",
        run_begins_with_the_round=(
            "anchors = 1 - state.carry.slot[RUN][:, None]",
            "anchors = 0 * state.carry.slot[RUN][:, None]",
        ),
        runs_are_those_of_the_anchor=(
            "jnp.where(before[None], begins,",
            "jnp.where(False, begins,",
        ),
    ),
    *broken(
        "single",
        "drafting.py",
        counts_no_step_without_drafts=(
            "lasting[IDLE] + 1}\n        slot",
            "lasting[IDLE]}\n        slot",
        ),
        breaks_every_run=("slot[RUN] + 1, 1)", "1, 1)"),
        goes_on_with_any_run=("slot[RUN] + 1, 1)", "slot[RUN] + 1, slot[RUN])"),
    ),
    *broken(
        "choice",
        "drafting.py",
        overlooks_the_limit=(
            "jnp.minimum(lasting[LENGTH], room.astype(",
            "(lasting[LENGTH] + 0 * room.astype(",
        ),
        counts_ended_rows=("jnp.where(running, expected - needed, 0.0)", "expected - needed"),
        overlooks_the_slots=("min(1 + running.shape[0] / RAISING_SLOTS, width / 2)", "1.0"),
        needs_more_than_all=(
            "min(1 + running.shape[0] / RAISING_SLOTS, width / 2)",
            "(1 + running.shape[0] / RAISING_SLOTS)",
        ),
        never_looks_again=("(gain >= 0) | is_due", "gain >= 0"),
        looks_all_the_time=("PROBE_SHARE * lasting", "1.0 + lasting"),
        looks_whatever_it_costs=(">= needed - 1)", ">= 0.3)"),
    ),
    *broken(
        "enumerated",
        "rejection.py",
        keeps_by_the_target_alone=("chances * draft_chance < wanted", "chances < wanted"),
        keeps_what_is_likely=("chances * draft_chance < wanted", "draft_chance < wanted"),
        draws_at_the_first_place=("at = right[:, None, None]", "at = 0 * right[:, None, None]"),
        takes_from_the_last_too=("constant_values=True)", "constant_values=False)"),
    ),
    *broken(
        "drawn",
        "rejection.py",
        takes_nothing_off=("left = jnp.maximum(p - q, 0.0)", "left = p"),
        takes_off_the_wrong_law=(
            "left = jnp.maximum(p - q, 0.0)",
            "left = jnp.maximum(q - p, 0.0)",
        ),
    ),
    *broken(
        "network",
        "dflash.py",
        drafts_the_likeliest=("width=width - 1, **how)", "width=width - 1)"),
    ),
    *broken(
        "network",
        "rejection.py",
        chances_of_the_drafts=("DRAFTS, CHANCES = 1, 2", "DRAFTS, CHANCES = 1, 1"),
        drafts_as_the_text_is_drawn=("DRAFTS, CHANCES = 1, 2", "DRAFTS, CHANCES = 0, 2"),
        weighs_another_row=("drafted.hidden[:, 0, 1:width]", "drafted.hidden[:, 0, : width - 1]"),
        draws_without_noise=("jnp.log(left) + noise", "jnp.log(left)"),
    ),
]
