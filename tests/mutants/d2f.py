"""Wrong versions of `D2F`, one rule broken in each."""

from tests.mutation import Mutant, broken

_OPEN = "        state = blocks.open_next(state, self.add_block_threshold)\n"
_RETURN = "        return blocks.denoise(forward, state, self._accept)\n"
_ABOVE = "sampling.above(stats, self.accept_threshold)"
_FORCED = """ | sampling.forced_top1(
            stats, state, self.semi_complete_threshold
        )
"""
_RULE = f"        return {_ABOVE}{_FORCED}"
_AFTER = f"""\
        above = {_ABOVE}
        written = blocks.write(state, stats.token, above)
        may = blocks.semi_complete_before(written, self.semi_complete_threshold)
        return above | sampling.top_n(stats.confidence, may.astype("int32"), blocks.holes(state))
"""
_BESIDE = f"""\
        above = {_ABOVE}
        may = blocks.semi_complete_before(state, self.semi_complete_threshold)
        others = blocks.holes(state) & ~above
        return above | sampling.top_n(stats.confidence, may.astype("int32"), others)
"""
_LAST = """\
        state, info = blocks.denoise(forward, state, self._accept)
        return blocks.open_next(state, self.add_block_threshold), info
"""
_ALIGN = '"whole_full" if self.align_blocks_to_prompt else "grid_full"'

_CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    "always_on_the_grid": ((_ALIGN, '"grid_full"'),),
    "always_aligned": ((_ALIGN, '"whole_full"'),),
    "aligned_the_wrong_way_round": (
        (_ALIGN, '"grid_full" if self.align_blocks_to_prompt else "whole_full"'),
    ),
    "two_openings": ((_OPEN, _OPEN + _OPEN),),
    "opens_last": ((_OPEN, ""), (_RETURN, _LAST)),
    "opens_one_at_a_time": (("open_next(state, self.add_block_threshold)", "open_next(state)"),),
    "opens_by_the_gate": ((_OPEN, _OPEN.replace("add_block", "semi_complete")),),
    "accepts_by_the_gate": ((_ABOVE, _ABOVE.replace("accept", "semi_complete")),),
    "never_forces": ((_FORCED, "\n"),),
    "forces_only": ((_ABOVE + " | ", ""),),
    "forces_by_the_add_threshold": (
        ("stats, state, self.semi_complete_threshold", "stats, state, self.add_block_threshold"),
    ),
    "gate_after_writes": ((_RULE, _AFTER),),
    "forces_beside_accepted": ((_RULE, _BESIDE),),
    "accepts_all_holes": ((f"return {_ABOVE}", "return blocks.holes(state)"),),
}

# In the step that `d2f` shares.
_SHARED = {
    "fills_dummies_too": ("where = holes(state)", "where = ~state.buffer.filled"),
    "writes_before_it_finishes_are_lost": (
        "finish_step(write(state, stats.token, accept), accept)",
        "finish_step(state, accept)",
    ),
}

MUTANTS = [
    *(
        Mutant(name, "corpus", tuple(("d2f.py", *change) for change in changes))
        for name, changes in _CHANGES.items()
    ),
    *broken("corpus", "blocks.py", **_SHARED),
]
