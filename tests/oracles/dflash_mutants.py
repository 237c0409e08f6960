"""Wrong versions of `strategies/dflash.py`, one rule broken in each.

`corpus` says who notices: "rounds", random batches against the lists; "width", the same with fewer
drafts judged than drawn; "guesses", a dense pass of the drafter; "cache", what the pools hold.
"""

from tests.oracles.mutants import Mutant


def _broken(corpus: str, **changes: tuple[str, str]) -> list[Mutant]:
    file = "dflash.py"
    return [Mutant(f"df_{name}", corpus, ((file, *change),)) for name, change in changes.items()]


_DRAWN = "truth = out.predict(where=cell > 0, sampling=state.sampling, keys=keys).token"

MUTANTS = [
    *_broken(
        "rounds",
        anchor_is_a_mask=(
            "masked = jnp.where(cell == 0, buffer.tokens, draft.mask_id)",
            "masked = jnp.full_like(buffer.tokens, draft.mask_id)",
        ),
        no_token_of_the_targets_own=("count = 1 + jnp.sum", "count = jnp.sum"),
        goes_on_behind_a_wrong_draft=("jnp.sum(jnp.cumprod(right, axis=1)", "jnp.sum(right"),
        judges_in_no_order=("causal=True", "causal=False"),
        loses_a_right_row=(
            "kept = cell < count[:, None, None]",
            "kept = cell < count[:, None, None] - 1",
        ),
        goes_past_the_limit=("jnp.clip(buffer.limit - buffer.start - 1, 1, count)", "count"),
        draws_by_forward=(
            "keys = random.position_keys(state)\n        truth",
            "keys = random.step_keys(state)\n        truth",
        ),
        judges_greedily=(_DRAWN, "truth = out.predict(where=cell > 0).token"),
        begins_greedily=(
            "chunk.forward.predict(state.boundary, sampling=state.sampling, keys=keys)",
            "chunk.forward.predict(state.boundary)",
        ),
        writes_the_drafts=("blocks.write(state, truth,", "blocks.write(state, block,"),
        settles_the_drafts_only=("settled_len=count + 1", "settled_len=count"),
    ),
    *_broken(
        "width",
        judges_what_it_did_not_run=("live = cell < width", "live = cell < size"),
        takes_what_it_did_not_run=("((block == truth) & live)", "(block == truth)"),
    ),
    *_broken(
        "guesses",
        drafts_in_order=("width=size).predict()", "width=size, causal=True).predict()"),
        taps_a_layer_early=("layer + 1 for layer", "layer for layer"),
        prompt_is_no_context=("if chunk.out is not None:", "if False:"),
    ),
    *_broken(
        "cache",
        context_of_the_anchor_alone=(
            "self._context(forward, out, state, kept, width, state)",
            "self._context(forward, out, state, cell < 1, width, state)",
        ),
    ),
]
