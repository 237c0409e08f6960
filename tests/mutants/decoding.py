"""Wrong versions of the decoding contract: opening, accepting, committing, finishing, remasking.

`killer` is the corpus of scripts that must notice. Left out as equivalent: waiting for cells past
the limit, since a request whose leading blocks are complete up to the limit finishes in that step.
"""

from tests.mutation import Mutant, broken

_ACCEPT = """\
        return sampling.above(stats, self.accept_threshold) | sampling.forced_top1(
            stats, state, self.semi_complete_threshold
        )
"""
_GATE_AFTER_WRITES = """\
        sure = sampling.above(stats, self.accept_threshold)
        written = blocks.write(state, stats.token, sure)
        may = blocks.semi_complete_before(written, self.semi_complete_threshold)
        return sure | sampling.top_n(stats.confidence, may.astype("int32"), blocks.holes(state))
"""
_FORCE_BESIDE = """\
        sure = sampling.above(stats, self.accept_threshold)
        may = blocks.semi_complete_before(state, self.semi_complete_threshold)
        holes = blocks.holes(state) & ~sure
        return sure | sampling.top_n(stats.confidence, may.astype("int32"), holes)
"""
_OPEN = "        state = blocks.open_next(state, self.add_block_threshold)\n"
_RETURN = "        return blocks.denoise(forward, state, self._accept)\n"
_OPEN_LAST = """\
        state, info = blocks.denoise(forward, state, self._accept)
        return blocks.open_next(state, self.add_block_threshold), info
"""
_PROMPT_CELLS = (
    "state.buffer.filled & (state.buffer.positions >= state.buffer.prompt_len[:, None, None])"
)

OPENING = [
    *broken(
        "multi_bd",
        "blocks.py",
        opens_past_the_limit=(
            "(block_starts(state) < buffer.limit[:, None])",
            "(block_starts(state) >= 0)",
        ),
        prompt_stop_is_terminal=(
            "generated = buffer.filled & ~is_given(state)",
            "generated = buffer.filled",
        ),
        empty_window_waits_for_progress=("ready = num_open == 0", "ready = num_open < 0"),
        always_opens_the_second=("ready = num_open == 0", "ready = num_open <= 1"),
        prompt_is_no_progress=(
            "jnp.mean(state.buffer.filled.astype(jnp.float32), axis=2)",
            f"jnp.mean(({_PROMPT_CELLS}).astype(jnp.float32), axis=2)",
        ),
    ),
    *broken(
        "multi_bd",
        "multi_bd.py",
        two_openings=(_OPEN, _OPEN + _OPEN),
    ),
    Mutant(
        "opens_last", "multi_bd", (("multi_bd.py", _OPEN, ""), ("multi_bd.py", _RETURN, _OPEN_LAST))
    ),
]

ACCEPTING = [
    *broken(
        "multi_bd",
        "blocks.py",
        first_block_needs_a_gate=(
            "[jnp.ones_like(semi[:, :1]), semi[:, :-1]]",
            "[jnp.zeros_like(semi[:, :1]), semi[:, :-1]]",
        ),
    ),
    *broken(
        "multi_bd",
        "multi_bd.py",
        gate_after_writes=(_ACCEPT, _GATE_AFTER_WRITES),
        forces_beside_accepted=(_ACCEPT, _FORCE_BESIDE),
    ),
    *broken(
        "multi_bd",
        "sampling.py",
        never_forces=("may.astype(jnp.int32)", "jnp.zeros_like(may, jnp.int32)"),
    ),
]

COMMITTING = [
    *broken(
        "multi_bd",
        "blocks.py",
        commits_one_at_a_time=(
            "commit_len=jnp.sum(committed, axis=1)",
            "commit_len=jnp.any(committed, axis=1)",
        ),
        promotes_only_the_first=(
            "jnp.arange(done.shape[1])[None] < _run_at_left(done)[:, None]",
            "done & (jnp.arange(done.shape[1]) < 1)[None]",
        ),
        no_promotion_behind_a_commit=(
            "(buffer.status == ACTIVE) & may_leave",
            "(buffer.status == ACTIVE) & may_leave & ~jnp.any(committed, axis=1)[:, None]",
        ),
    ),
    *broken(
        "multi_bd",
        "driver.py",
        new_cells_keep_old_tokens=(
            "jnp.where((index < size).reshape(B, size, *tail), moved, fill)",
            "moved",
        ),
    ),
    *broken(
        "multi_bd",
        "needs.py",
        aligned_prompt_stays_in_the_window=(
            "return prompt_len // block_size * block_size",
            "return (prompt_len - 1) // block_size * block_size",
        ),
    ),
]

FINISHING = [
    *broken(
        "multi_bd",
        "driver.py",
        prompt_stop_finishes=(
            "blocks.is_stop(state, buffer.tokens) & ~blocks.is_given(state)",
            "blocks.is_stop(state, buffer.tokens)",
        ),
        tail_past_the_limit_counts=(
            "jnp.minimum(buffer.start + info.settled_len, buffer.limit)",
            "buffer.start + info.settled_len",
        ),
        length_waits_for_one_more=(
            "(settled_end >= buffer.limit, LENGTH)",
            "(settled_end > buffer.limit, LENGTH)",
        ),
        length_waits_for_the_tail=(
            "(settled_end >= buffer.limit, LENGTH)",
            "((settled_end >= buffer.limit) & jnp.all(state.buffer.filled[:, 0], axis=1), LENGTH)",
        ),
        nfe_waits_for_one_more=("buffer.nfe >= limits.max_nfe", "buffer.nfe > limits.max_nfe"),
        prefill_is_a_forward=("nfe=jnp.zeros((B,), jnp.int32)", "nfe=jnp.ones((B,), jnp.int32)"),
        length_before_stop=(
            "        (stopped, STOP),\n        (settled_end >= buffer.limit, LENGTH),\n",
            "        (settled_end >= buffer.limit, LENGTH),\n        (stopped, STOP),\n",
        ),
        emits_the_stop=(
            "jnp.minimum(settled_end, first_stop)",
            "jnp.minimum(settled_end, first_stop + 1)",
        ),
    ),
    *broken(
        "repetition",
        "driver.py",
        repetition_waits_for_one_more=(
            ">= limits.max_run, REPETITION)",
            "> limits.max_run, REPETITION)",
        ),
        repetition_anywhere=(
            "return length - 1 - jnp.max(jnp.where(differs, index, -1), axis=1)",
            "return length - jnp.sum(differs, axis=1)",
        ),
    ),
    Mutant(
        "nfe_before_length",
        "multi_bd",
        (
            ("driver.py", "        (buffer.nfe >= limits.max_nfe, NFE),\n", ""),
            (
                "driver.py",
                "        (settled_end >= buffer.limit, LENGTH),\n",
                "        (buffer.nfe >= limits.max_nfe, NFE),\n"
                "        (settled_end >= buffer.limit, LENGTH),\n",
            ),
        ),
    ),
    Mutant(
        "cuts_at_the_last_stop",
        "multi_bd",
        (
            (
                "driver.py",
                "jnp.min(jnp.where(stops, position, far), axis=1)",
                "jnp.max(jnp.where(stops, position, -1), axis=1)",
            ),
            ("driver.py", "stopped = first_stop < far", "stopped = first_stop >= 0"),
            (
                "driver.py",
                "jnp.minimum(settled_end, first_stop)",
                "jnp.where(stopped, first_stop, settled_end)",
            ),
        ),
    ),
]

REMASKING = [
    *broken(
        "dynamic",
        "block_diffusion.py",
        dynamic_ignores_the_quota=("keepdims=True) >= quota[:, :, None]", "keepdims=True) >= 1"),
    ),
    *broken(
        "entropy",
        "sampling.py",
        entropy_bounds_each_cell=(
            "among & (spent <= at_token(bound))",
            "among & ((stats.entropy <= at_token(bound)) | (place == 0))",
        ),
    ),
    *broken(
        "sequential",
        "block_diffusion.py",
        sequential_from_the_right=("-state.buffer.positions", "state.buffer.positions"),
    ),
    *broken(
        "static",
        "block_diffusion.py",
        static_takes_the_least_sure=(
            "sampling.top_n(stats.confidence, quota, holes)",
            "sampling.top_n(-stats.confidence, quota, holes)",
        ),
    ),
    *broken(
        "static",
        "driver.py",
        block_steps_do_not_slide=(
            "block_steps=along(buffer.block_steps, by_block, jnp.int32(0))",
            "block_steps=buffer.block_steps",
        ),
    ),
]

AR = [
    *broken(
        "ar",
        "ar.py",
        ar_settles_the_anchor_only=("settled_len=2 * one", "settled_len=one"),
        ar_moves_by_two=("commit_len=one", "commit_len=2 * one"),
    ),
    *broken(
        "ar",
        "blocks.py",
        ar_forgets_the_first_token=(
            "tokens=jnp.where(anchor, first[:, None, None], buffer.tokens)",
            "tokens=buffer.tokens",
        ),
        ar_window_is_a_dummy=(
            "status=jnp.where(where[:, None], ACTIVE, buffer.status)",
            "status=buffer.status",
        ),
    ),
]

MUTANTS = OPENING + ACCEPTING + COMMITTING + FINISHING + REMASKING + AR
