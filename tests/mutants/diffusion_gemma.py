"""Wrong versions of `DiffusionGemma` and of its keys, one rule broken in each.

`killer` is the gate's case that must notice. What equality would show is in
`strategies/test_diffusion_gemma.py`.
"""

from tests.mutation import broken

_BEGINS = 'expected = jnp.where(begins[:, None, None], none, slot["expected"])[:, None]'
_STILL = "_as_float(unchanged) >= self.stability_threshold.values"
_LAST = "_as_float(steps + 1) >= self.max_denoising_steps.values"
_NEXT = "shown = jnp.where(kept, jnp.where(draws, stats.token, likeliest), renewed)"
_WRITE = "blocks.write(state.replace(carry=carry), likeliest, active)"
_FREE = "free = active & ~blocks.is_given(state)"
_SHARE = "((count - _as_float(steps)) / count)"
_ON = "on = (state.buffer.status == ACTIVE)[:, :, None]"
_OLD = 'slot["canvas"][:, None]'

MUTANTS = [
    *broken(
        "diffusion_gemma",
        "diffusion_gemma.py",
        expected_is_not_reset=(_BEGINS, 'expected = slot["expected"][:, None]'),
        k_is_off_by_one=(_STILL, _STILL.replace(">=", ">")),
        one_step_more=(_LAST, _LAST.replace("steps + 1", "steps")),
        never_sure=("done = (is_still & is_sure) | is_last", "done = is_last"),
        confidence_is_not_strict=(
            "is_sure = entropy < self",
            "is_sure = entropy <= self",
        ),
        first_step_is_not_conditioned=(_ON, f"{_ON} & ~begins[:, None, None]"),
        nothing_is_expected=(
            "expected=jnp.broadcast_to(expected,",
            "expected=jnp.broadcast_to(0 * expected,",
        ),
        any_entropy_is_sure=("(is_still & is_sure)", "is_still"),
        commits_the_canvas=(_WRITE, _WRITE.replace("likeliest", "shown")),
        nothing_is_renewed=(_NEXT, _NEXT.replace("renewed)", f"{_OLD})")),
        acceptance_is_sticky=(
            _NEXT,
            _NEXT.replace("renewed)", f"jnp.where({_OLD} == buffer.tokens, {_OLD}, renewed))"),
        ),
        everything_is_kept=(_NEXT, _NEXT.replace("kept,", "free,")),
        draws_are_greedy=(_NEXT, _NEXT.replace("stats.token", "likeliest")),
        pins_have_a_say=(_FREE, "free = active"),
        law_does_not_cool=(_SHARE, "1.0"),
        schedule_one_step_ahead=(_SHARE, "((count - _as_float(steps + 1)) / count)"),
        text_runs_go_on=(
            'unchanged = jnp.where(same, slot["unchanged"] + 1, 0)',
            'unchanged = slot["unchanged"] + same.astype(jnp.int32)',
        ),
        counts_a_first_step=("axis=(1, 2)) & (steps > 0)", "axis=(1, 2)) | (steps == 0)"),
    ),
    *broken(
        "diffusion_gemma",
        "canvas.py",
        wide_pass_is_all_decoder=(
            "causal=final, mode=_mode(modes, final))",
            "causal=final, mode=jnp.full_like(state.buffer.status, modes[0]))",
        ),
        wide_commit_sees_all=("causal=final, mode=", "causal=False, mode="),
    ),
    *broken(
        "diffusion_gemma",
        "random.py",
        noise_of_one_step=("keys = block_keys(state, salt)", "keys = position_keys(state, salt)"),
    ),
    *broken(
        "diffusion_gemma_alone",
        "diffusion_gemma.py",
        commit_is_conditioned=(_ON, _ON.replace("==", ">=")),
    ),
    *broken(
        "diffusion_gemma_alone",
        "canvas.py",
        narrow_commit_sees_all=("causal=final,\n", "causal=False,\n"),
        narrow_commit_is_decoded=(
            "mode=_mode(modes, final),\n",
            "mode=jnp.full_like(state.buffer.nfe, modes[0]),\n",
        ),
    ),
    *broken(
        "diffusion_gemma_alone",
        "random.py",
        keys_of_the_forward_count=(
            "own = _fold(rows[:, None], state.buffer.block_steps)",
            "own = _fold(rows[:, None], state.buffer.nfe[:, None] + 0 * state.buffer.block_steps)",
        ),
    ),
]
