"""Wrong versions of plans, draws and the engine's half, one rule broken in each.

`killer` is a function of `check_constraint` and what it is called with. Left out as equivalent: a
class that is never taken next to the dead state that it leads to.
"""

from tests.mutation import broken

_LAST = "last = jnp.where(grammar.distance <= room, 0.0, NEVER)"
_LEADS = "leads = grammar.delta[path[:-1]].astype(jnp.int32) == path[1:, None]"
_MASS = "mass = jnp.maximum(jnp.nan_to_num(stats.mass, nan=FLOOR), FLOOR)"
_MINE = "mine = live & (buffer.positions >= first) & (buffer.positions < limit)"
_ROOM = "room = jnp.maximum(buffer.limit - behind, 0)"

MUTANTS = [
    *broken(
        "plans",
        "grammar_paths.py",
        each_cell_alone=(_LEADS, "leads = grammar.delta[path[:-1]].astype(jnp.int32) > 0"),
        no_room=(_LAST, "last = jnp.where(grammar.distance < 1 << 30, 0.0, NEVER)"),
        room_is_one_more=(_LAST, _LAST.replace("<= room", "<= room + 1")),
        filled_cells_are_free=("return (kind == KNOWN) | (", "return (kind != KNOWN) & ("),
        skipped_cells_move_on=(
            "return value, jnp.where(kind == SKIP, jnp.arange(count, dtype=jnp.int32), onto)",
            "return value, onto",
        ),
    ),
    *broken(
        "plans",
        "grammar_plan.py",
        tail_is_scored=(".at[:, FREE].set(0.0)", ".at[:, FREE].set(-1.0)"),
        the_tail_costs_nothing=(
            "score = best - jnp.max(best, axis=1, keepdims=True)",
            "score = best",
        ),
        what_is_forbidden_cannot_be=(_MASS, "mass = jnp.maximum(stats.mass, 10 * NEVER)"),
        cells_not_read_are_scored=("jnp.where(read[:, None], mass, 0.0)", "mass"),
        the_share_is_of_all_tokens=("jnp.where(goes_on, stats.whole, -jnp.inf)", "stats.whole"),
        every_confidence_is_a_share=(
            "return token, jnp.where(grammar.by_mass, share, confidence)",
            "return token, share",
        ),
        ties_to_the_highest_id=(
            "token = jnp.min(jnp.where(fits & (rank == top), stats.token, NO_ID), axis=1)",
            "token = jnp.max(jnp.where(fits & (rank == top), stats.token, -1), axis=1)",
        ),
    ),
    *broken(
        "draws",
        "grammar_paths.py",
        paths_are_not_drawn=("noise = jnp.where(draw.tempered, drawn, noise)", "noise = noise"),
        paths_by_their_best_text=("free = jnp.where(draw.tempered, total, free)", "free = free"),
    ),
    *broken(
        "draws",
        "grammar_plan.py",
        edges_by_their_best_class=(
            "score = jnp.where(draw.tempered, total, score)",
            "score = jnp.where(draw.tempered, best, score)",
        ),
    ),
    *broken(
        "texts vandal",
        "grammar_walk.py",
        nothing_is_put_right=(
            "return jnp.where(off, lowest, -1)",
            "return jnp.full_like(lowest, -1)",
        ),
        edges_of_any_target=("off &= (kind == WRITTEN)", "off &= (kind == KNOWN)"),
    ),
    *broken(
        "texts vandal",
        "constraint.py",
        room_counts_four_more=(_ROOM, _ROOM.replace("- behind", "- behind + 4")),
        cells_past_the_limit_count=(_MINE, _MINE.removesuffix(" & (buffer.positions < limit)")),
        prompt_cells_count=(_MINE, _MINE.replace(" & (buffer.positions >= first)", "")),
    ),
    *broken(
        "texts vandal",
        "driver.py",
        the_state_stays=("at = jnp.where(taken, at, held.at)", "at = held.at"),
        the_state_is_one_ahead=(
            "path, info.commit_len[:, None]",
            "path, info.commit_len[:, None] + 1",
        ),
    ),
]

AUTOMATA = broken(
    "spellings",
    "automaton.py",
    a_text_may_end_anywhere=(
        "delta[:end, stop] = np.where(accepting, end, 0)",
        "delta[:end, stop] = end",
    ),
    forbidden_ids_are_written=(
        "class_of[[i for i in (*map(int, never), *stop_ids)",
        "class_of[[i for i in (*stop_ids,)",
    ),
    ways_without_an_end_stay=(
        "delta[distance[delta] >= UNREACHABLE] = 0",
        "delta[distance[delta] < 0] = 0",
    ),
    tokens_begin_anew_after_each_byte=(
        "row = columns[maps[pair // count], pair % count]",
        "row = columns[maps[1], pair % count]",
    ),
)
