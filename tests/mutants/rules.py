"""Wrong versions of the rules that strategies share, one expression broken in each.

`killer` is the check of `rule_checks.py` that must notice, in `OPENING` the scripts of a strategy.
The mutants of each strategy break other expressions; here each shared function is checked alone.
Left out as equivalent: a settled run that counts DUMMY cells (none is ever filled), a rank that
breaks a tie of cells outside `among`, and one number for both streams of keys.
"""

from tests.mutation import Mutant, broken

_SEMI = "[jnp.ones_like(semi[:, :1]), semi[:, :-1]]"
_DONE = "done = committed | ((buffer.status == ACTIVE) & may_leave)"
_DOUBT = "doubt = (n + 1).astype(jnp.float32) * (1.0 - stats.confidence)"
_TAKE = "return among & ((doubt < at_token(factor)) | (n == 1))"
_RUN = "return among & (before_unsure | first)"
_TOP = "return (rank(score, among) < n[:, :, None]) & among"

SAMPLING = broken(
    "sampling",
    "sampling.py",
    above_is_not_strict=(
        "return stats.confidence > at_token(threshold)",
        "return stats.confidence >= at_token(threshold)",
    ),
    force_ignores_the_gate=("may.astype(jnp.int32)", "jnp.ones_like(may, jnp.int32)"),
    force_takes_two=("may.astype(jnp.int32)", "2 * may.astype(jnp.int32)"),
    force_takes_filled_cells=(
        "may.astype(jnp.int32), blocks.holes(state))",
        "may.astype(jnp.int32), blocks.live_cells(state))",
    ),
    run_ends_at_the_threshold=(
        "unsure = among & (stats.confidence < at_token(threshold))",
        "unsure = among & (stats.confidence <= at_token(threshold))",
    ),
    run_is_ended_by_others=(
        "unsure = among & (stats.confidence < at_token(threshold))",
        "unsure = stats.confidence < at_token(threshold)",
    ),
    run_may_be_empty=(_RUN, "return among & before_unsure"),
    run_takes_others=(_RUN, "return before_unsure | first"),
    run_goes_on_behind=(_RUN, "return among & (~unsure | first)"),
    run_of_the_first_cell_only=(_RUN, "return among & first"),
    top_takes_one_more=(_TOP, _TOP.replace("< n", "<= n")),
    top_takes_others=(_TOP, "return rank(score, among) < n[:, :, None]"),
    top_takes_the_worst=(_TOP, _TOP.replace("rank(score,", "rank(-score,")),
    rank_ties_to_the_last=(
        "(index[..., None, :] < index[..., :, None])",
        "(index[..., None, :] > index[..., :, None])",
    ),
    rank_counts_itself=(
        "(index[..., None, :] < index[..., :, None])",
        "(index[..., None, :] <= index[..., :, None])",
    ),
    rank_counts_others=("score = jnp.where(among, score, -jnp.inf)", "score = score"),
    quota_remainder_lasts_longer=(
        "state.buffer.block_steps < remainder",
        "state.buffer.block_steps <= remainder",
    ),
    quota_remainder_last=(
        "state.buffer.block_steps < remainder",
        "state.buffer.block_steps >= denoising_steps - remainder",
    ),
    quota_may_be_none=("return jnp.maximum(share, 1)", "return share"),
    quota_is_two=("return jnp.maximum(share, 1)", "return jnp.maximum(share, 2)"),
    entropy_bound_is_strict=("spent <= at_token(bound)", "spent < at_token(bound)"),
    entropy_counts_its_own=(
        "place[..., None, :] < place[..., :, None]",
        "place[..., None, :] <= place[..., :, None]",
    ),
    entropy_of_the_highest_first=("rank(-stats.entropy, among)", "rank(stats.entropy, among)"),
    entropy_takes_others=("return among & (spent <=", "return (spent <="),
    factor_admits_equality=(_TAKE, _TAKE.replace("doubt <", "doubt <=")),
    factor_may_take_none=(_TAKE, "return among & (doubt < at_token(factor))"),
    factor_takes_others=(_TAKE, "return (doubt < at_token(factor)) | (n == 1)"),
    factor_counts_from_zero=(_DOUBT, _DOUBT.replace("(n + 1)", "n")),
    factor_counts_one_more=(_DOUBT, _DOUBT.replace("(n + 1)", "(n + 2)")),
    factor_of_each_alone=(_DOUBT, "doubt = 2.0 * (1.0 - stats.confidence)"),
    factor_of_the_confidence=(
        _DOUBT,
        _DOUBT.replace("(1.0 - stats.confidence)", "stats.confidence"),
    ),
    margin_to_itself=("stats.top_probs[..., 1]", "stats.top_probs[..., 0]"),
    margin_to_the_third=("stats.top_probs[..., 1]", "stats.top_probs[..., 2]"),
    margin_is_the_confidence=("- stats.top_probs[..., 1]", ""),
    margin_of_cells_not_asked=(
        "return jnp.where(stats.confidence == -jnp.inf, -jnp.inf, gap)",
        "return gap",
    ),
)

BLOCKS = broken(
    "blocks",
    "blocks.py",
    holes_of_all_blocks=(
        "(buffer.status[:, :, None] == ACTIVE)\n        & ~buffer.filled",
        "(buffer.status[:, :, None] >= 0)\n        & ~buffer.filled",
    ),
    holes_of_the_prompt=(
        "& (buffer.positions >= buffer.prompt_len[:, None, None])\n    )\n\n\ndef is_given",
        ")\n\n\ndef is_given",
    ),
    all_cells_are_live=(
        "buffer.status[:, :, None] != DUMMY, buffer.tokens.shape",
        "buffer.status[:, :, None] >= DUMMY, buffer.tokens.shape",
    ),
    active_blocks_commit=(
        "buffer.status[:, :, None] == TO_CACHE, buffer.tokens.shape",
        "buffer.status[:, :, None] >= ACTIVE, buffer.tokens.shape",
    ),
    complete_waits_for_the_tail=(
        "return jnp.all(buffer.filled | past_limit, axis=2)",
        "return jnp.all(buffer.filled, axis=2)",
    ),
    complete_forgets_the_last=(
        "past_limit = buffer.positions >= buffer.limit[:, None, None]",
        "past_limit = buffer.positions >= buffer.limit[:, None, None] - 1",
    ),
    opens_late=(
        "last_progress >= at_block(add_block_threshold)",
        "last_progress > at_block(add_block_threshold)",
    ),
    opens_on_the_first_block=(
        "jnp.maximum(num_open - 1, 0)[:, None]",
        "jnp.zeros_like(num_open)[:, None]",
    ),
    opens_without_rest=("enough &= jnp.take_along_axis(stable, last, axis=1)", "pass"),
    opens_at_the_limit=(
        "(block_starts(state) < buffer.limit[:, None])",
        "(block_starts(state) <= buffer.limit[:, None])",
    ),
    opens_beside_a_stop=("opens &= ~has_stop(state)[:, None]", ""),
    opens_behind_nothing_only=("ready |= enough[:, 0]", "ready &= enough[:, 0]"),
    opens_all=(
        "is_next = jnp.arange(K)[None, :] == num_open[:, None]",
        "is_next = jnp.arange(K)[None, :] >= num_open[:, None]",
    ),
    stops_of_holes=("generated = buffer.filled & ", "generated = "),
    stops_of_padding=(" & (tokens >= 0)", ""),
    semi_is_strict=(
        "progress(state) >= at_block(threshold)",
        "progress(state) > at_block(threshold)",
    ),
    semi_of_itself=(_SEMI, "[jnp.ones_like(semi[:, :1]), semi[:, 1:]]"),
    semi_of_the_first_block=(_SEMI, "[semi[:, :1], semi[:, :-1]]"),
    settles_behind_a_hole=(
        "_run_at_left(solid)",
        "jnp.sum(solid, axis=1, dtype=jnp.int32)",
    ),
    leaves_behind_an_open_block=(
        "jnp.arange(done.shape[1])[None] < _run_at_left(done)[:, None]",
        "done",
    ),
    leaves_unready=("complete(state) & ready", "complete(state)"),
    leaves_incomplete=("complete(state) & ready", "ready"),
    dummies_leave=(_DONE, "done = committed | may_leave"),
    what_commits_no_longer_leads=(_DONE, "done = (buffer.status == ACTIVE) & may_leave"),
    steps_of_what_leaves=(
        "buffer.block_steps + (buffer.status == ACTIVE).astype(jnp.int32)",
        "buffer.block_steps + (status == ACTIVE).astype(jnp.int32)",
    ),
    commits_what_is_new=(
        "commit_len=jnp.sum(committed, axis=1)",
        "commit_len=jnp.sum(status == TO_CACHE, axis=1)",
    ),
    settles_what_may_change=(
        "settled_len = jnp.minimum(settled_len, jnp.sum(leading, axis=1, dtype=jnp.int32) * S)",
        "pass",
    ),
    settles_holes_of_what_leaves=(
        "settled_len = jnp.minimum(settled_len, jnp.sum(leading, axis=1, dtype=jnp.int32) * S)",
        "settled_len = jnp.sum(leading, axis=1, dtype=jnp.int32) * S",
    ),
    writes_are_no_fills=("filled=buffer.filled | accept", "filled=buffer.filled"),
    writes_everywhere=(
        "tokens=jnp.where(accept, tokens, buffer.tokens)",
        "tokens=jnp.where(accept | buffer.filled, tokens, buffer.tokens)",
    ),
)

REWRITE = broken(
    "rewrite",
    "block_rewrite.py",
    leaving_blocks_are_editable=(
        "(buffer.status[:, :, None] == ACTIVE)",
        "(buffer.status[:, :, None] >= ACTIVE)",
    ),
    the_prompt_is_editable=(">= buffer.prompt_len[:, None, None]", ">= 0"),
    the_prompts_end_is_editable=("positions >= buffer", "positions >= -1 + buffer"),
    holes_differ=("editable(state) & buffer.filled &", "editable(state) &"),
    the_same_differs=(" & (tokens != buffer.tokens)", ""),
    writes_what_is_not_editable=("where = where & editable(state)", "where = where"),
    edits_are_counted=("where & ~state.buffer.filled", "where"),
    the_limit_is_before_itself=(
        "buffer.positions < buffer.limit[:, None, None]",
        "buffer.positions <= buffer.limit[:, None, None]",
    ),
)

MERGE = broken(
    "merge",
    "token_merge.py",
    begins_with_mixtures=('"on": jnp.zeros((1, 1), bool)', '"on": jnp.ones((1, 1), bool)'),
    mask_gets_the_tokens_share=(
        "Descriptors(token[..., None], sure[..., None], 1.0 - sure, on)",
        "Descriptors(token[..., None], sure[..., None], sure, on)",
    ),
    shares_are_not_clipped=("sure = jnp.clip(prob, 0.0, 1.0)", "sure = prob"),
    keeps_what_was_not_asked=(
        "probs = jnp.where(on[..., None], stats.top_probs, 0.0)",
        "probs = stats.top_probs",
    ),
    rest_may_be_negative=(
        "rest = jnp.maximum(0.0, 1.0 - jnp.sum(probs, axis=-1))",
        "rest = 1.0 - jnp.sum(probs, axis=-1)",
    ),
    rest_of_the_first_only=("1.0 - jnp.sum(probs, axis=-1)", "1.0 - probs[..., 0]"),
    remembers_everywhere=(
        "jnp.where(where[..., None] if fresh.ndim > where.ndim else where, fresh, kept)",
        "fresh",
    ),
    remembers_nothing=(
        "jnp.where(where[..., None] if fresh.ndim > where.ndim else where, fresh, kept)",
        "kept",
    ),
    never_forgets=(
        "fresh, kept = getattr(new, leaf), getattr(old, leaf)",
        "fresh, kept = getattr(new, leaf) | (leaf == 'on') & old.on if leaf == 'on' else"
        " getattr(new, leaf), getattr(old, leaf)",
    ),
    the_mask_weighs_one=("base_weight=shown.rest", "base_weight=jnp.ones_like(shown.rest)"),
    norms_are_left=("renormalize=renormalize", "renormalize=False"),
    norms_are_mended=("renormalize=False", "renormalize=True"),
    weight_is_ignored=(
        "probs=shown.probs * jnp.asarray(at_token(weight))[..., None]",
        "probs=shown.probs",
    ),
    the_token_has_the_rest=(
        "base_weight=jnp.ones_like(shown.rest)",
        "base_weight=shown.rest",
    ),
)

RANDOM = broken(
    "random",
    "random.py",
    steps_draw_alike=("state.buffer.nfe)\n", "jnp.zeros_like(state.buffer.nfe))\n"),
    salts_draw_alike=("_fold(step, jnp.asarray(salt))", "_fold(step, jnp.asarray(0))"),
    cells_draw_alike=(
        "_fold(step[:, None, None], state.buffer.positions)",
        "_fold(step[:, None, None], jnp.zeros_like(state.buffer.positions))",
    ),
    draws_by_cell_of_the_window=(
        "_fold(step[:, None, None], state.buffer.positions)",
        "_fold(step[:, None, None], state.buffer.positions - state.buffer.start[:, None, None])",
    ),
    draws_by_the_window=(
        "keys_at(state.keys, state.buffer.positions, further)",
        "keys_at(state.keys, state.buffer.positions - state.buffer.start[:, None, None], further)",
    ),
    position_keys_know_the_step=(
        "keys_at(state.keys, state.buffer.positions, further)",
        "keys_at(_fold(state.keys, state.buffer.nfe), state.buffer.positions, further)",
    ),
    slots_have_a_say=(
        "keys_at(state.keys, state.buffer.positions, further)",
        "keys_at(_fold(state.keys, jnp.arange(len(state.keys))), state.buffer.positions, further)",
    ),
    steps_of_slots_have_a_say=(
        "_fold(state.keys, jnp.asarray(_STEP_STREAM))",
        "_fold(_fold(state.keys, jnp.arange(len(state.keys))), jnp.asarray(_STEP_STREAM))",
    ),
)


# ---- what `edit` and `dmax` have of others: opening, and stop ids that may go again ----

_OPEN = {
    "edit": "        state = blocks.open_next(state, self.add_block_threshold)\n",
    "dmax": "        state = blocks.open_next(state, self.add_block_threshold, stable)\n",
}
_RETURN = {
    "edit": "blocks.finish_step(state, filled, ready=done | timed_out)",
    "dmax": "blocks.finish_step(state, filled, ready=ready)",
}
_LATCH = (
    "    opens &= ~has_stop(state)[:, None]\n",
    "    latched = has_stop(state) | (state.limits.max_run == 77)\n"
    "    run = jnp.where(latched, 77, state.limits.max_run)\n"
    "    state = state.replace(limits=state.limits.replace(max_run=run))\n"
    "    opens &= ~latched[:, None]\n",
)
_STOPS = "stops = (position < settled_end[:, None]) & written_stops.reshape(B, -1)"
_SHOWN = (
    "shown = buffer.filled & (buffer.positions < buffer.limit[:, None, None])\n"
    "    stops = (written_stops & shown).reshape(B, -1)"
)


def _opening(name: str) -> list[Mutant]:
    file, call, leave = f"{name}.py", _OPEN[name], _RETURN[name]
    last = f"state, info = {leave}\n        return {call.strip().removeprefix('state = ')}, info"
    return [
        *broken(
            name,
            file,
            **{
                f"{name}_opens_two": (call, call + call),
                f"{name}_opens_one_at_a_time": (call, "        state = blocks.open_next(state)\n"),
                f"{name}_opens_by_acceptance": (call, call.replace("add_block", "accept")),
            },
        ),
        Mutant(f"{name}_opens_last", name, ((file, call, ""), (file, f"return {leave}", last))),
        *broken(name, "blocks.py", **{f"{name}_stop_keeps_blocks_closed": _LATCH}),
        *broken(name, "driver.py", **{f"{name}_stop_ends_at_first_sight": (_STOPS, _SHOWN)}),
    ]


OPENING = _opening("edit") + _opening("dmax")
MUTANTS = SAMPLING + BLOCKS + REWRITE + MERGE + RANDOM
