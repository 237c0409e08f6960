"""Worked examples of `MultiBD` and `BlockDiffusion`, step by step, as literal tests.

Every trace also runs through the list decoder that the fuzz tests trust. The numbers of the state
machine were traced on Diffulex's own classes, which sample at the end of an unaligned prefill and
count prefill as a forward; we do neither, so its step 2 is our first forward after an aligned
prompt. Where our rule differs (EOS, max_tokens, what is returned), the comments give its numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from dllm_jax import strategies
from dllm_jax.strategies.testing.script import run_script
from tests.oracles.list_decoder import block_diffusion_rule, list_decode, multi_bd_rule

VOCAB, MASK, EOS = 32, 31, 30
FORWARDS, POSITIONS = 12, 48  # one shape: `run_script` compiles once for each (S, K)
LETTER = "DAT"  # DUMMY, ACTIVE, TO_CACHE

Forward = Mapping[int, tuple[int, float]]


def script(forwards: Sequence[Forward]) -> tuple[np.ndarray, np.ndarray]:
    """`{position: (token, p)}` a forward; what is not listed predicts token 1 with p = .2."""
    token = np.full((FORWARDS, POSITIONS), 1, np.int32)
    prob = np.full((FORWARDS, POSITIONS), 0.2, np.float32)
    for i, row in enumerate(forwards):
        for position, (tok, p) in row.items():
            token[i, position], prob[i, position] = tok, p
    return token, prob


def everywhere(value: tuple[int, float]) -> Forward:
    return dict.fromkeys(range(POSITIONS), value)


def draw(tokens: Any, status: Any) -> str:
    """`T[10 11] A[_ 12] D`, as the notes draw the buffer."""
    slots = []
    for cells, letter in zip(np.asarray(tokens).tolist(), np.asarray(status).tolist(), strict=True):
        body = " ".join("_" if cell == MASK else str(cell) for cell in cells)
        slots.append(LETTER[letter] if letter == 0 else f"{LETTER[letter]}[{body}]")
        assert letter != 0 or set(cells) == {MASK}, "a dummy holds masks only"
    return " ".join(slots)


def by_list_decoder(fields: dict[str, Any], *scripted: Any, **limits: Any) -> Any:
    rule = multi_bd_rule(fields["accept_threshold"], fields["semi_complete_threshold"])
    sizes = {name: fields[name] for name in ("block_size", "buffer_size", "add_block_threshold")}
    return list_decode(rule, *scripted, **sizes, **limits)


def by_strategy(fields: dict[str, Any], *scripted: Any, **limits: Any) -> Any:
    return run_script(strategies.MultiBD(**fields), *scripted, **limits)


@pytest.fixture(params=[by_list_decoder, by_strategy], ids=["list_decoder", "run_script"])
def decode(request: pytest.FixtureRequest) -> Callable[..., Any]:
    def run(
        forwards: Sequence[Forward],
        prompt: Sequence[int] = (1, 2, 3, 4),
        *,
        accept: float = 0.9,
        add: float = 0.1,
        semi: float = 0.9,
        block_size: int = 4,
        buffer_size: int = 2,
        **limits: Any,
    ) -> Any:
        fields = {"accept_threshold": accept, "add_block_threshold": add}
        fields |= {"semi_complete_threshold": semi}
        fields |= {"block_size": block_size, "buffer_size": buffer_size}
        limits = {"max_tokens": 32, "mask_id": MASK, "vocab_size": VOCAB} | limits
        return request.param(fields, list(prompt), *script(forwards), **limits)

    return run


def windows(trace: Any) -> list[str]:
    """Every step's buffer but that of a step which finished the request: such a row is not slid."""
    steps = trace.steps if trace.finish_reason is None else trace.steps[:-1]
    return [draw(step.tokens, step.status) for step in steps]


def column(trace: Any, name: str) -> list[int]:
    return [int(getattr(step, name)) for step in trace.steps]


# ---- the state machine ----


def test_aligned_prompt_follows_the_traced_buffer(decode: Callable[..., Any]) -> None:
    forwards = [
        # The notes' step 1 is our prefill. Step 2: only .95 > .9.
        {4: (10, 0.95), 5: (11, 0.4), 6: (12, 0.6), 7: (13, 0.5)},
        # Step 3: block 2 has been opened; it accepts by the threshold only.
        {
            5: (11, 0.5),
            6: (12, 0.92),
            7: (13, 0.8),
            8: (20, 0.3),
            9: (21, 0.93),
            10: (1, 0.2),
            11: (1, 0.1),
        },
        # Step 4: block 1 is forced to its best (13); block 2 is not, block 1 was at .5 < .9.
        {5: (11, 0.7), 7: (13, 0.8), 8: (20, 0.3), 10: (22, 0.5), 11: (1, 0.1)},
        # Step 5: block 1 completes, but the gate of block 2 still reads .75.
        {5: (11, 0.95), 8: (20, 0.3), 10: (22, 0.5)},
        # Step 6, the commit of block 1: it is complete now, so block 2 is forced in the same pass.
        {8: (20, 0.3), 10: (22, 0.5), 11: (23, 0.1)},
        # Step 7: block 3 is opened before the forward.
        {8: (20, 0.91), 11: (23, 0.95)},
        # Step 8, the commit of block 2: block 3 is forced to its lowest position.
        {},
    ]
    trace = decode(forwards)
    assert windows(trace)[:7] == [
        "A[10 _ _ _] D",
        "A[10 _ 12 _] A[_ 21 _ _]",
        "A[10 _ 12 13] A[_ 21 _ _]",
        "T[10 11 12 13] A[_ 21 _ _]",
        "A[_ 21 22 _] D",
        "T[20 21 22 23] A[_ _ _ _]",
        "A[1 _ _ _] D",
    ]
    assert column(trace, "start")[:7] == [4, 4, 4, 4, 8, 8, 12]
    assert column(trace, "new_tokens")[:7] == [1, 2, 1, 1, 1, 2, 1]
    # The script ends before the request does: nothing finished it, the rest of it was token 1.
    assert (trace.finish_reason, trace.nfe) == (None, FORWARDS)
    assert list(trace.output)[:9] == [10, 11, 12, 13, 20, 21, 22, 23, 1]


def test_unaligned_prompt_shares_its_last_block(decode: Callable[..., Any]) -> None:
    forwards = [
        # Progress of [5 6 _ _] is .5 >= .1: block 2 is opened at once. (Traced with sdar's fixed
        # .95.)
        {6: (10, 0.97), 7: (11, 0.5)},
        {7: (11, 0.96), 8: (12, 0.97), 9: (13, 0.3)},
        # Commit of block 1 and promotion of block 2 in one step; none was opened: the buffer was
        # full.
        {9: (13, 0.97), 10: (14, 0.97), 11: (15, 0.97)},
    ]
    trace = decode(forwards, [1, 2, 3, 4, 5, 6], accept=0.95)
    assert windows(trace)[:3] == [
        "A[5 6 10 _] A[_ _ _ _]",
        "T[5 6 10 11] A[12 _ _ _]",
        "T[12 13 14 15] D",
    ]
    assert column(trace, "start")[:3] == [4, 4, 8]
    assert column(trace, "new_tokens")[:3] == [1, 2, 3]
    assert list(trace.output)[:6] == [10, 11, 12, 13, 14, 15]


def test_one_slot_spends_a_forward_on_each_commit(decode: Callable[..., Any]) -> None:
    """N = 1 bubble: prefill, decode(4), commit(0), decode(4), commit(0) ..."""
    trace = decode([everywhere((10, 0.97))] * FORWARDS, buffer_size=1, accept=0.95)
    assert windows(trace) == ["T[10 10 10 10]", "D"] * 6
    assert column(trace, "new_tokens") == [4, 0] * 6
    assert column(trace, "start")[:6] == [4, 8, 8, 12, 12, 16]
    assert list(trace.output) == [10] * 24


# ---- what ends a request ----


def test_eos_ends_at_once_when_nothing_before_it_is_open(decode: Callable[..., Any]) -> None:
    """Reference: same output, but goes on filling active blocks to its forward 7."""
    forwards = [
        {4: (10, 0.95)},
        {5: (11, 0.95), 6: (EOS, 0.96), 8: (12, 0.95)},
        everywhere((13, 0.97)),
    ]
    trace = decode(forwards, eos_ids=(EOS,))
    assert windows(trace) == ["A[10 _ _ _] D"]
    assert column(trace, "new_tokens") == [1, 3]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([10, 11], "stop", 2)


@pytest.mark.parametrize(
    ("filler", "output"), [(11, [10, 11]), (EOS, [10])], ids=["token", "an earlier EOS"]
)
def test_eos_behind_a_hole_waits_for_the_hole(
    decode: Callable[..., Any], filler: int, output: list[int]
) -> None:
    forwards = [
        {4: (10, 0.95), 6: (EOS, 0.95)},
        {5: (7, 0.4), 7: (9, 0.92)},  # 7 is taken; the hole at 5 stays, so the request goes on
        {5: (filler, 0.95)},
        everywhere((13, 0.97)),
    ]
    trace = decode(forwards, eos_ids=(EOS,))
    # No second block is opened next to an EOS, although .5 >= add_block_threshold.
    assert windows(trace) == ["A[10 _ 30 _] D", "A[10 _ 30 9] D"]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == (output, "stop", 3)


def test_eos_in_the_prompt_is_ignored(decode: Callable[..., Any]) -> None:
    trace = decode(
        [everywhere((10, 0.97))] * 4, [1, EOS, 3, 4, 5, EOS], max_tokens=8, eos_ids=(EOS,)
    )
    assert windows(trace) == ["T[5 30 10 10] T[10 10 10 10]", "D D"]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([10] * 8, "length", 3)


def test_max_tokens_are_all_clean_tokens(decode: Callable[..., Any]) -> None:
    """Reference: 7 forwards, 8 clean tokens and 16 positions mostly masks (it counts dummies)."""
    trace = decode([everywhere((10, 0.97))] * 12, buffer_size=4, max_tokens=24)
    # One block is opened a step and filled in it: six steps.
    assert windows(trace) == ["T[10 10 10 10] D D D"] * 5
    assert column(trace, "new_tokens") == [4] * 6
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([10] * 24, "length", 6)


def test_max_tokens_inside_a_block_end_without_its_tail(decode: Callable[..., Any]) -> None:
    """max_tokens = 5: block 2 is terminal, its last three cells are denoised but not waited for."""
    forwards = [
        everywhere((10, 0.97)),
        {9: (20, 0.95), 10: (21, 0.93)},  # 8 (which counts) has .2 and stays: .95 was above
        {8: (22, 0.3)},  # forced
        everywhere((13, 0.97)),
    ]
    trace = decode(forwards, buffer_size=4, max_tokens=5)
    assert windows(trace) == ["T[10 10 10 10] D D D", "A[_ 20 21 _] D D D"]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([10] * 4 + [22], "length", 3)


def test_max_model_len_binds_before_max_tokens(decode: Callable[..., Any]) -> None:
    trace = decode(
        [everywhere((10, 0.97))] * 6, [1, 2, 3, 4, 5], buffer_size=4, max_tokens=24, max_model_len=7
    )
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([10, 10], "length", 1)


def test_eos_past_the_limit_is_not_a_stop(decode: Callable[..., Any]) -> None:
    forwards = [{4: (10, 0.97), 5: (11, 0.97), 6: (EOS, 0.97)}]
    trace = decode(forwards, max_tokens=2, eos_ids=(EOS,))
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([10, 11], "length", 1)


def test_max_nfe_returns_what_has_no_hole(decode: Callable[..., Any]) -> None:
    """Reference: [9 1 1 _ _ _ _]. Its first step sampled, so its three forwards are ours."""
    trace = decode([{5: (9, 0.95)}, {}, {}, {}], [1, 2, 3, 4, 5], max_nfe=3)
    assert windows(trace) == ["A[5 9 _ _] A[_ _ _ _]", "A[5 9 1 _] A[_ _ _ _]"]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([9, 1, 1], "nfe", 3)


def test_max_nfe_cuts_at_the_first_hole(decode: Callable[..., Any]) -> None:
    trace = decode([{4: (10, 0.95), 6: (12, 0.95), 7: (13, 0.95)}, {}], max_nfe=1)
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([10], "nfe", 1)


@pytest.mark.parametrize(
    ("prompt_len", "last", "max_tokens", "reason"),
    [(4, EOS, 4, "stop"), (4, 10, 4, "length"), (4, 10, 5, "nfe")],
)
def test_stop_goes_before_length_before_nfe(
    decode: Callable[..., Any], prompt_len: int, last: int, max_tokens: int, reason: str
) -> None:
    """All of the remaining causes hold in the same forward; the word is the first of them."""
    forwards = [{**everywhere((10, 0.97)), 7: (last, 0.97)}]
    trace = decode(
        forwards, list(range(1, prompt_len + 1)), max_tokens=max_tokens, max_nfe=1, eos_ids=(EOS,)
    )
    assert trace.finish_reason == reason
    assert list(trace.output) == ([10] * 3 if reason == "stop" else [10] * 4)


# ---- ties, strictness, opaque prompts ----


def test_acceptance_is_strict_and_ties_go_to_the_lowest(decode: Callable[..., Any]) -> None:
    """.5 is not above .5; of four equal confidences the first is forced (trap 5)."""
    trace = decode(
        [everywhere((10, 0.5)), {**everywhere((11, 0.5)), 6: (12, 0.75)}, everywhere((13, 0.5))],
        buffer_size=1,
        accept=0.5,
    )
    assert windows(trace)[:3] == ["A[10 _ _ _]", "A[10 _ 12 _]", "A[10 13 12 _]"]


def test_a_weak_script_leaves_the_lowest_other_token(decode: Callable[..., Any]) -> None:
    """Token 0 at 1/64 leaves more on each other id: the argmax is 1, the lowest of them."""
    trace = decode([everywhere((0, 1 / 64))] * 2, buffer_size=1)
    assert windows(trace)[:2] == ["A[1 _ _ _]", "A[1 1 _ _]"]


def test_mask_ids_in_the_prompt_are_tokens(decode: Callable[..., Any]) -> None:
    """Trap 7 (reference: never caches such a block): drawn as `_`, but never holes."""
    trace = decode(
        [everywhere((10, 0.97)), everywhere((11, 0.97))], [MASK, 2, MASK, 4, 5, MASK], buffer_size=1
    )
    assert windows(trace)[:2] == ["T[5 _ 10 10]", "D"]
    assert column(trace, "start")[:2] == [4, 8]
    assert column(trace, "new_tokens")[:2] == [2, 0]


def test_semi_threshold_above_one_cannot_starve_the_first_slot(decode: Callable[..., Any]) -> None:
    """Trap 22. Reference: loops to max_nfe, as slot 0's predecessor has 1.0 < tau_semi."""
    trace = decode([{}] * 10, block_size=2, semi=1.5, max_tokens=4)
    assert windows(trace) == [
        "A[1 _] D",
        "T[1 1] A[_ _]",  # opened at .5, not forced
        "A[_ _] D",  # the commit: a predecessor still in the window (1.0 < 1.5) forces nothing
        "A[1 _] D",
    ]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([1] * 4, "length", 5)


def test_threshold_one_and_certainty_fill_one_token_a_step(decode: Callable[..., Any]) -> None:
    """Trap 23: 1.0 is not above 1.0. At threshold 0 everything is taken."""
    certain = [everywhere((10, 1.0))] * 6
    limits = {"block_size": 4, "buffer_size": 1, "max_tokens": 4}
    assert decode(certain, accept=1.0, **limits).nfe == 4
    assert decode([{}] * 6, accept=0.0, **limits).nfe == 1


# ---- One block at a time: each remasking rule on one block ----

RULES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("sequential", {"denoising_steps": 4}, ["A[10 _ _ _]", "A[10 21 _ _]"]),
    ("static", {"denoising_steps": 4}, ["A[_ _ 12 _]", "A[_ _ 12 23]"]),
    # 3 steps of 4: two in the first, then one each.
    ("static", {"denoising_steps": 3}, ["A[_ 11 12 _]", "A[_ 11 12 23]"]),
    ("sequential", {"denoising_steps": 3}, ["A[10 11 _ _]", "A[10 11 22 _]"]),
    # .75 and .9 are above .5; then none is above, so the quota's most confident.
    ("dynamic", {"denoising_steps": 4, "accept_threshold": 0.5}, ["A[_ 11 12 _]", "A[_ 11 12 23]"]),
    # One above .8 is fewer than the quota of two: the two most confident.
    (
        "dynamic",
        {"denoising_steps": 2, "accept_threshold": 0.8},
        ["A[_ 11 12 _]", "T[20 11 12 23]"],
    ),
    # Entropies: .9 -> .67, .75 -> 1.42, .5 (positions 4 and 7) -> 2.39 nats. Exclusive prefix sums:
    # 0, .67, 2.09.
    ("entropy", {"entropy_bound": 0.5}, ["A[_ _ 12 _]", "A[_ _ 12 23]"]),
    ("entropy", {"entropy_bound": 1.0}, ["A[_ 11 12 _]", "A[_ 11 12 23]"]),
    ("entropy", {"entropy_bound": 2.2}, ["A[10 11 12 _]", "T[10 11 12 23]"]),
]


@pytest.mark.long("^(?!.*(entropy|knobs0|knobs1|knobs4|list_decoder))")
@pytest.mark.parametrize("engine", ["list_decoder", "run_script"])
@pytest.mark.parametrize(("remasking", "knobs", "expected"), RULES)
def test_remasking_rule_on_one_block(
    engine: str, remasking: str, knobs: dict[str, Any], expected: list[str]
) -> None:
    forwards = [
        {4: (10, 0.5), 5: (11, 0.75), 6: (12, 0.9), 7: (13, 0.5)},
        {4: (20, 0.25), 5: (21, 0.25), 6: (22, 0.25), 7: (23, 0.375)},
    ]
    token, prob = script(forwards)
    limits: dict[str, Any] = {"max_tokens": 32, "mask_id": MASK, "vocab_size": VOCAB}
    if engine == "list_decoder":
        rule = block_diffusion_rule(remasking, **knobs)
        trace: Any = list_decode(
            rule, [1, 2, 3, 4], token, prob, block_size=4, buffer_size=1, **limits
        )
    else:
        strategy = strategies.BlockDiffusion(remasking=remasking, block_size=4, **knobs)
        trace = run_script(strategy, [1, 2, 3, 4], token, prob, **limits)
    assert windows(trace)[:2] == expected


def test_block_diffusion_pays_one_commit_a_block() -> None:
    """SDAR: a clean block is forwarded once more to be stored; then the next one begins."""
    token, prob = script([everywhere((10, 0.97))] * 5)
    strategy = strategies.BlockDiffusion(
        remasking="dynamic", denoising_steps=4, accept_threshold=0.9, block_size=4
    )
    trace = run_script(
        strategy, [1, 2, 3, 4], token, prob, max_tokens=12, mask_id=MASK, vocab_size=VOCAB
    )
    assert windows(trace) == ["T[10 10 10 10]", "D"] * 2
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([10] * 12, "length", 5)
