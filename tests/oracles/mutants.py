"""Wrong versions of `strategies/`, one rule broken in each, for the tests of the tests.

A mutant is the package copied under another name with a few expressions of its source replaced,
so it is really traced and compiled anew, and no cache of jax can hand back the right answer. Each
expression must occur exactly once: a mutant that no longer applies is an error, not a pass.
Mutants known to be equivalent are left out, e.g. waiting for cells past the limit (a request
whose leading blocks are complete up to the limit finishes in that very step).
"""

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import strategies

SOURCE = Path(strategies.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One broken rule.

    Attributes:
        name: What is wrong, as a module name.
        corpus: Which scripts should notice (`test_mutants.py`).
        changes: (file, expression, what replaces it).
    """

    name: str
    corpus: str
    changes: tuple[tuple[str, str, str], ...]


def load_mutant(name: str, changes: tuple[tuple[str, str, str], ...], folder: Path) -> ModuleType:
    """Writes the mutated copy into `folder`, imports it and returns it with its `testing`."""
    sources = {path.name: path.read_text() for path in SOURCE.glob("*.py")}
    for file, old, new in changes:
        if sources[file].count(old) != 1:
            raise ValueError(
                f"{old!r} occurs {sources[file].count(old)} times in strategies/{file}, "
                f"not once; rewrite mutant {name!r} for the new source"
            )
        sources[file] = sources[file].replace(old, new)
    package = f"mutant_{name}"
    target = folder / package
    target.mkdir()
    for file, text in sources.items():
        renamed = re.sub(
            r"^(\s*(?:from|import) )strategies\b", rf"\g<1>{package}", text, flags=re.MULTILINE
        )
        (target / file).write_text(renamed)
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(package)
        importlib.import_module(f"{package}.testing")
    finally:
        sys.path.remove(str(folder))
    return module


def _one(name: str, corpus: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, corpus, ((file, old, new),))


_ACCEPT = """\
        accept = sampling.above(stats, self.accept_threshold) | sampling.forced_top1(
            stats, state, self.semi_complete_threshold
        )
"""
_GATE_AFTER_WRITES = """\
        sure = sampling.above(stats, self.accept_threshold)
        written = blocks.write(state, stats.token, sure)
        may = blocks.semi_complete_before(written, self.semi_complete_threshold)
        accept = sure | sampling.top_n(stats.confidence, may.astype("int32"), holes)
"""
_FORCE_BESIDE = """\
        sure = sampling.above(stats, self.accept_threshold)
        may = blocks.semi_complete_before(state, self.semi_complete_threshold)
        accept = sure | sampling.top_n(stats.confidence, may.astype("int32"), holes & ~sure)
"""
_OPEN = "        state = blocks.open_next(state, self.add_block_threshold)\n"
_RETURN = "        return blocks.finish_step(blocks.write(state, stats.token, accept), accept)\n"
_OPEN_LAST = """\
        state, info = blocks.finish_step(blocks.write(state, stats.token, accept), accept)
        return blocks.open_next(state, self.add_block_threshold), info
"""
_PROMPT_CELLS = (
    "state.buffer.filled & (state.buffer.positions >= state.buffer.prompt_len[:, None, None])"
)

OPENING = [
    _one("two_openings", "multi_bd", "multi_bd.py", _OPEN, _OPEN + _OPEN),
    Mutant(
        "opens_last", "multi_bd", (("multi_bd.py", _OPEN, ""), ("multi_bd.py", _RETURN, _OPEN_LAST))
    ),
    _one(
        "opens_past_the_limit",
        "multi_bd",
        "blocks.py",
        "(block_starts(state) < buffer.limit[:, None])",
        "(block_starts(state) >= 0)",
    ),
    _one(
        "opens_at_the_limit",
        "multi_bd",
        "blocks.py",
        "(block_starts(state) < buffer.limit[:, None])",
        "(block_starts(state) <= buffer.limit[:, None])",
    ),
    _one("opens_beside_a_stop", "multi_bd", "blocks.py", "opens &= ~has_stop(state)[:, None]", ""),
    _one(
        "prompt_stop_is_terminal",
        "multi_bd",
        "blocks.py",
        "generated = buffer.filled & (buffer.positions >= buffer.prompt_len[:, None, None])",
        "generated = buffer.filled",
    ),
    _one(
        "add_is_strict",
        "multi_bd",
        "blocks.py",
        "last_progress >= add_block_threshold.at_block",
        "last_progress > add_block_threshold.at_block",
    ),
    _one(
        "add_reads_the_first_block",
        "multi_bd",
        "blocks.py",
        "jnp.maximum(num_open - 1, 0)[:, None]",
        "jnp.zeros_like(num_open)[:, None]",
    ),
    _one(
        "empty_window_waits_for_progress",
        "multi_bd",
        "blocks.py",
        "ready = num_open == 0",
        "ready = num_open < 0",
    ),
    _one(
        "always_opens_the_second",
        "multi_bd",
        "blocks.py",
        "ready = num_open == 0",
        "ready = num_open <= 1",
    ),
    _one(
        "prompt_is_no_progress",
        "multi_bd",
        "blocks.py",
        "jnp.mean(state.buffer.filled.astype(jnp.float32), axis=2)",
        f"jnp.mean(({_PROMPT_CELLS}).astype(jnp.float32), axis=2)",
    ),
]

ACCEPTING = [
    _one(
        "accept_is_not_strict",
        "multi_bd",
        "sampling.py",
        "stats.confidence > threshold.at_token",
        "stats.confidence >= threshold.at_token",
    ),
    _one("gate_after_writes", "multi_bd", "multi_bd.py", _ACCEPT, _GATE_AFTER_WRITES),
    _one("forces_beside_accepted", "multi_bd", "multi_bd.py", _ACCEPT, _FORCE_BESIDE),
    _one(
        "forces_without_a_gate",
        "multi_bd",
        "sampling.py",
        "may.astype(jnp.int32)",
        "jnp.ones_like(may, jnp.int32)",
    ),
    _one(
        "never_forces",
        "multi_bd",
        "sampling.py",
        "may.astype(jnp.int32)",
        "jnp.zeros_like(may, jnp.int32)",
    ),
    _one(
        "forced_ties_to_the_last",
        "multi_bd",
        "sampling.py",
        "(index[..., None, :] < index[..., :, None])",
        "(index[..., None, :] > index[..., :, None])",
    ),
    _one(
        "semi_is_strict",
        "multi_bd",
        "blocks.py",
        "progress(state) >= threshold.at_block",
        "progress(state) > threshold.at_block",
    ),
    _one(
        "first_block_needs_a_gate",
        "multi_bd",
        "blocks.py",
        "[jnp.ones_like(semi[:, :1]), semi[:, :-1]]",
        "[jnp.zeros_like(semi[:, :1]), semi[:, :-1]]",
    ),
    _one(
        "gate_reads_its_own_block",
        "multi_bd",
        "blocks.py",
        "[jnp.ones_like(semi[:, :1]), semi[:, :-1]]",
        "[jnp.ones_like(semi[:, :1]), semi[:, 1:]]",
    ),
]

COMMITTING = [
    _one(
        "commits_behind_a_hole",
        "multi_bd",
        "blocks.py",
        "jnp.cumprod(done.astype(jnp.int32), axis=1).astype(bool)",
        "done",
    ),
    _one(
        "commits_at_once",
        "multi_bd",
        "blocks.py",
        "commit_len=jnp.sum(committed, axis=1)",
        "commit_len=jnp.sum(status == TO_CACHE, axis=1)",
    ),
    _one(
        "commits_one_at_a_time",
        "multi_bd",
        "blocks.py",
        "commit_len=jnp.sum(committed, axis=1)",
        "commit_len=jnp.any(committed, axis=1)",
    ),
    _one(
        "promotes_only_the_first",
        "multi_bd",
        "blocks.py",
        "jnp.cumprod(done.astype(jnp.int32), axis=1).astype(bool)",
        "done & (jnp.arange(done.shape[1]) < 1)[None]",
    ),
    _one(
        "no_promotion_behind_a_commit",
        "multi_bd",
        "blocks.py",
        "(buffer.status == ACTIVE) & complete(state)",
        "(buffer.status == ACTIVE) & complete(state) & ~jnp.any(committed, axis=1)[:, None]",
    ),
    _one(
        "new_cells_keep_old_tokens",
        "multi_bd",
        "driver.py",
        "jnp.where((index < size).reshape(B, size, *tail), moved, fill)",
        "moved",
    ),
    _one(
        "aligned_prompt_stays_in_the_window",
        "multi_bd",
        "driver.py",
        "return prompt_len // block_size * block_size",
        "return (prompt_len - 1) // block_size * block_size",
    ),
]

FINISHING = [
    _one(
        "holes_are_settled",
        "multi_bd",
        "blocks.py",
        "jnp.cumprod(solid.astype(jnp.int32), axis=1)",
        "solid.astype(jnp.int32)",
    ),
    _one(
        "prompt_stop_finishes",
        "multi_bd",
        "driver.py",
        "stops = emitted & blocks",
        "stops = (position < settled_end[:, None]) & blocks",
    ),
    _one(
        "tail_past_the_limit_counts",
        "multi_bd",
        "driver.py",
        "jnp.minimum(buffer.start + info.settled_len, buffer.limit)",
        "buffer.start + info.settled_len",
    ),
    _one(
        "length_waits_for_one_more",
        "multi_bd",
        "driver.py",
        "(settled_end >= buffer.limit, LENGTH)",
        "(settled_end > buffer.limit, LENGTH)",
    ),
    _one(
        "length_waits_for_the_tail",
        "multi_bd",
        "driver.py",
        "(settled_end >= buffer.limit, LENGTH)",
        "((settled_end >= buffer.limit) & jnp.all(state.buffer.filled[:, 0], axis=1), LENGTH)",
    ),
    _one(
        "nfe_waits_for_one_more",
        "multi_bd",
        "driver.py",
        "buffer.nfe >= limits.max_nfe",
        "buffer.nfe > limits.max_nfe",
    ),
    _one(
        "prefill_is_a_forward",
        "multi_bd",
        "driver.py",
        "nfe=jnp.zeros((B,), jnp.int32)",
        "nfe=jnp.ones((B,), jnp.int32)",
    ),
    _one(
        "length_before_stop",
        "multi_bd",
        "driver.py",
        "        (stopped, STOP),\n        (settled_end >= buffer.limit, LENGTH),\n",
        "        (settled_end >= buffer.limit, LENGTH),\n        (stopped, STOP),\n",
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
    _one(
        "emits_the_stop",
        "multi_bd",
        "driver.py",
        "jnp.minimum(settled_end, first_stop)",
        "jnp.minimum(settled_end, first_stop + 1)",
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
    _one(
        "repetition_waits_for_one_more",
        "repetition",
        "driver.py",
        ">= limits.max_run, REPETITION)",
        "> limits.max_run, REPETITION)",
    ),
    _one(
        "repetition_anywhere",
        "repetition",
        "driver.py",
        "return length - 1 - jnp.max(jnp.where(differs, index, -1), axis=1)",
        "return length - jnp.sum(differs, axis=1)",
    ),
]

REMASKING = [
    _one(
        "quota_remainder_lasts_longer",
        "static",
        "sampling.py",
        "state.buffer.block_steps < remainder",
        "state.buffer.block_steps <= remainder",
    ),
    _one(
        "quota_remainder_last",
        "static",
        "sampling.py",
        "state.buffer.block_steps < remainder",
        "state.buffer.block_steps >= denoising_steps - remainder",
    ),
    _one(
        "block_steps_do_not_slide",
        "static",
        "driver.py",
        "block_steps=along(buffer.block_steps, by_block, jnp.int32(0))",
        "block_steps=buffer.block_steps",
    ),
    _one(
        "static_takes_the_least_sure",
        "static",
        "block_diffusion.py",
        "sampling.top_n(stats.confidence, quota, holes)",
        "sampling.top_n(-stats.confidence, quota, holes)",
    ),
    _one(
        "static_ties_to_the_last",
        "static",
        "sampling.py",
        "(index[..., None, :] < index[..., :, None])",
        "(index[..., None, :] > index[..., :, None])",
    ),
    _one(
        "sequential_from_the_right",
        "sequential",
        "block_diffusion.py",
        "-state.buffer.positions",
        "state.buffer.positions",
    ),
    _one(
        "sequential_skips_holes",
        "sequential",
        "sampling.py",
        "score = jnp.where(among, score, -jnp.inf)",
        "score = score",
    ),
    _one(
        "dynamic_is_not_strict",
        "dynamic",
        "sampling.py",
        "stats.confidence > threshold.at_token",
        "stats.confidence >= threshold.at_token",
    ),
    _one(
        "dynamic_ignores_the_quota",
        "dynamic",
        "block_diffusion.py",
        "keepdims=True) >= quota[:, :, None]",
        "keepdims=True) >= 1",
    ),
    _one(
        "entropy_prefix_is_inclusive",
        "entropy",
        "sampling.py",
        "place[..., None, :] < place[..., :, None]",
        "place[..., None, :] <= place[..., :, None]",
    ),
    _one(
        "entropy_bound_is_strict",
        "entropy",
        "sampling.py",
        "spent <= bound.at_token",
        "spent < bound.at_token",
    ),
    _one(
        "entropy_of_the_highest_first",
        "entropy",
        "sampling.py",
        "rank(-stats.entropy, among)",
        "rank(stats.entropy, among)",
    ),
    _one(
        "entropy_bounds_each_cell",
        "entropy",
        "sampling.py",
        "among & (spent <= bound.at_token)",
        "among & ((stats.entropy <= bound.at_token) | (place == 0))",
    ),
]

MUTANTS = OPENING + ACCEPTING + COMMITTING + FINISHING + REMASKING
