"""The cases of the gate: each strategy with its toy model, its requests and its dense truth.

Shared by the tests of the contract and of the compiled loops, so that one truth serves both.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from dllm_jax.strategies import (
    AR,
    D2F,
    BlockDiffusion,
    DFlash,
    DiffusionGemma,
    DMax,
    Edit,
    EditIndel,
    FastDLLMV2,
    FullSequence,
    MultiBD,
)
from tests.contract import (
    dense,
    dense_blocks,
    dense_canvas,
    dense_dmax,
    dense_edit,
    dense_full_sequence,
    dense_indel,
    dense_sub_blocks,
    drafters,
    models,
)
from tests.contract.harness import SLOTS, Decoded, Request, decode_paged
from tests.oracles.indel_decoder import Rules

_ids = np.random.default_rng(4).integers(0, models.MASK, 64).tolist()

# Ragged: shorter than a block, on its edge, in the middle of one; longer than a prefill chunk.
REQUESTS = [
    Request(tuple(_ids[:3]), 14, seed=1),
    Request(tuple(_ids[5:26]), 11, seed=2),
    Request(tuple(_ids[30:38]), 18, seed=3),
]
SAMPLED = [dataclasses.replace(r, temperature=0.7) for r in REQUESTS]
MIXED = (REQUESTS[0], SAMPLED[1], REQUESTS[2])


@dataclasses.dataclass(frozen=True)
class Case:
    """A strategy, its models, and two truths of a request.

    `truth(request)` decodes it; `cache(request, text)` says by pool what K and V of each layer its
    cache holds of a final text, whose length is a multiple of `grid`.
    """

    strategy: Any
    model: Any
    truth: Callable[..., dense.Truth]
    requests: tuple[Request, ...]
    cache: Callable[..., dict[str, Any]] | None = None
    grid: int = 1
    aux: tuple[tuple[str, Any], ...] = ()


def _blocks(
    strategy: Any, model: Any, requests: Any, rule: Any, prompt: str = "grid_causal", **loop: Any
) -> Case:
    net, size = dense.Net(model), strategy.block_size
    return Case(
        strategy,
        model,
        functools.partial(
            dense_blocks.decode_blocks,
            net,
            rule=rule,
            size=size,
            depth=strategy.buffer_size,
            prompt=prompt,
            **loop,
        ),
        tuple(requests),
        lambda request, text: {"target": dense_blocks.text_kv(net, request, text, size, prompt)},
        size,
    )


def _own(request: Request, **knobs: float) -> Request:
    return dataclasses.replace(request, knobs=tuple(knobs.items()))


def _multi_bd(model: Any, requests: Any = REQUESTS, accept: float = 0.35) -> Case:
    strategy = MultiBD(accept, 0.25, 0.5, block_size=4, buffer_size=3)
    rule = dense_blocks.threshold_rule(accept, 0.5)
    return _blocks(strategy, model, requests, rule, add=0.25)


def _d2f(model: Any, aligned: bool = False, accept: float = 0.35) -> Case:
    strategy = D2F(accept, 0.25, 0.5, aligned, block_size=4, buffer_size=3)
    rule = dense_blocks.threshold_rule(accept, 0.5)
    prompt = "whole_full" if aligned else "grid_full"
    return _blocks(strategy, model, REQUESTS, rule, prompt, add=0.25)


# Thresholds of their own: B == S == 4, so a knob broadcast along positions would show.
_THRESHOLDS = (
    REQUESTS[0],
    _own(REQUESTS[1], accept_threshold=0.9),
    _own(SAMPLED[2], accept_threshold=0.2),
)


def _block_diffusion() -> Case:
    strategy = BlockDiffusion(accept_threshold=0.35, block_size=8)
    return _blocks(strategy, models.plain(), SAMPLED, dense_blocks.threshold_rule(0.35, 0.0))


def _ar() -> Case:
    target = models.causal()
    net = dense.Net(target)
    return Case(
        AR(),
        target,
        functools.partial(dense.decode_tokens, net),
        MIXED,
        lambda _, text: {"target": dense.causal_rows(net, text).kv},
    )


def _fast_dllm_v2() -> Case:
    """A prompt within a block, one that ends with one, one that a limit cuts in a sub-block."""
    model = models.plain(3, shift=True)
    net = dense.Net(model)
    truth = functools.partial(dense_sub_blocks.decode_sub_blocks, net, size=8, sub=4, accept=0.5)
    return Case(
        FastDLLMV2(accept_threshold=0.5, sub_block_size=4, block_size=8),
        model,
        truth,
        (
            _own(REQUESTS[0], accept_threshold=0.2),
            dataclasses.replace(SAMPLED[1], prompt=tuple(_ids[5:29])),
            REQUESTS[2],
        ),
        lambda request, text: {"target": dense_blocks.text_kv(net, request, text, 8)},
        8,
    )


_HOLED = (*_ids[50:53], -1, -1, _ids[53], -1, 7)  # the stop id stands here, and ends nothing


_WHOLE = (
    Request(tuple(_ids[:3]), 10, seed=1, suffix=tuple(_ids[40:45])),
    Request(tuple(_ids[5:21]), 11, seed=2),
    Request(tuple(_ids[30:38]), 8, seed=3, temperature=0.7, suffix=_HOLED, stops=(_HOLED[0],)),
)


# One that ends canvases early, one whose first canvas holds tokens of its own, one that is fixed.
_CANVASES = (
    _own(SAMPLED[0], confidence_threshold=5.0, max_denoising_steps=12, entropy_bound=8.0),
    Request(
        tuple(_ids[5:22]),
        3,
        seed=2,
        suffix=(_ids[50], _ids[51], *(-1,) * 9),
        temperature=0.5,
        knobs=(("entropy_bound", 0.3), ("max_denoising_steps", 8)),
    ),
    _own(REQUESTS[2], max_denoising_steps=6, stability_threshold=2, entropy_bound=0.5),
)


def _diffusion_gemma(buffer_size: int) -> Case:
    model = models.conditioned()
    net, early = dense.Net(model), buffer_size > 1
    strategy = DiffusionGemma(
        **dense_canvas.NUMBERS, early_slots=SLOTS, block_size=8, buffer_size=buffer_size
    )
    return Case(
        strategy,
        model,
        functools.partial(dense_canvas.decode_canvases, net, size=8, early=early),
        _CANVASES,
        lambda _, text: {"target": dense_canvas.text_rows(net, text).kv},
    )


EDITS = (26, 33)  # DELETE and SPLIT of `edit_indel`: ids that the toy model often says
# One that fills and edits almost anything, one that is never at rest, one that edits late.
_EDITED = (
    _own(REQUESTS[0], accept_threshold=0.2, edit_threshold=0.1),
    SAMPLED[1],
    _own(REQUESTS[2], accept_threshold=0.9),
)


def _edit() -> Case:
    strategy = Edit(0.35, 0.3, 0.25, max_post_edit_steps=2, block_size=4, buffer_size=3)
    rule = dense_edit.edit_rule(0.35, 0.3, 2)
    return _blocks(strategy, models.plain(), _EDITED, rule, add=0.25, settles_ready=True)


def _edit_indel() -> Case:
    """Two ids that the toy model often says delete and insert here."""
    fields = {
        "accept_threshold": 0.3,
        "edit_threshold": 0.15,
        "max_post_edit_steps": 4,
        "denoising_steps": 3,
        "max_block_steps": 12,
        "delete_token_id": EDITS[0],
        "split_token_id": EDITS[1],
    }
    strategy = EditIndel(**fields, add_block_threshold=0.25, block_size=4, buffer_size=3)
    rule = dense_indel.indel_rule(Rules(**fields))
    model = models.plain()
    model = model.replace(defaults=dataclasses.replace(model.defaults, forbidden_token_ids=EDITS))
    return _blocks(strategy, model, _EDITED, rule, add=0.25, settles_ready=True)


def _dmax() -> Case:
    """Thresholds of their own, and one request that draws what is not the likeliest."""
    model = models.plain()
    strategy = DMax(accept_threshold=0.4, add_block_threshold=0.5, block_size=4, buffer_size=3)
    requests = (
        _own(REQUESTS[0], accept_threshold=0.6),
        _own(SAMPLED[1], commit_confidence=0.5),
        REQUESTS[2],
    )
    rule = dense_dmax.dmax_rule(dense.Net(model), 0.4)
    return _blocks(strategy, model, requests, rule, add=0.5, settles_ready=True)


def full_sequence_case(model: Any, accept: float, **how: Any) -> Case:
    """Whole texts, one with a threshold of its own; blocks of the text are cut by limits."""
    net = dense.Net(model)
    return Case(
        FullSequence(accept, **how, block_size=8, buffer_size=4),
        model,
        functools.partial(dense_full_sequence.decode_full_sequence, net, accept=accept, **how),
        (_WHOLE[0], _own(_WHOLE[1], accept_threshold=1.0), _WHOLE[2]),
    )


def _full_sequence_dual() -> Case:
    """Dream's, shifted: a block's first forward runs everything, the others the block alone."""
    how = {"remasking": "entropy", "block_length": 6, "cache": "dual"}
    return full_sequence_case(models.plain(5, shift=True), 0.4, **how)


def _dflash() -> Case:
    """Drafts that are right but for some, in every third round the drafter's own."""
    plain = _ar()
    hints = drafters.no_hints(4)
    for request in plain.requests:
        drafters.hint(hints, [*request.prompt, *plain.truth(request).tokens], len(request.prompt))
    hints[:, ::7, 2] = 0
    hints[::3] = drafters.NO_HINT
    draft = drafters.hinted(plain.model, hints)
    net, draft_net = dense.Net(plain.model), dense.Net(draft)

    def cache(_, text):
        seen = dense.causal_rows(net, text)
        taps = np.concatenate(seen.taps, axis=-1)
        return {"target": seen.kv, "draft": dense.context_kv(draft_net, taps)}

    return dataclasses.replace(
        plain,
        strategy=DFlash(4, (0, 1), 4),
        truth=functools.partial(dense.decode_drafted, net, draft_net, drafted=3),
        cache=cache,
        aux=(("draft", draft),),
    )


CASES: dict[str, Callable[[], Case]] = {
    "multi_bd": lambda: _multi_bd(models.plain(), requests=_THRESHOLDS),
    "multi_bd_shifted": lambda: _multi_bd(models.plain(4, shift=True), accept=0.15),
    "d2f_grid_full": lambda: _d2f(models.plain()),
    "d2f_whole_full": lambda: _d2f(models.plain(), aligned=True),
    "block_diffusion": _block_diffusion,
    "ar": _ar,
    "full_sequence": lambda: full_sequence_case(models.plain(), 0.6, remasking="low_confidence"),
    "multi_bd_experts": lambda: _multi_bd(models.experts()),
    "fast_dllm_v2": _fast_dllm_v2,
    "edit": _edit,
    "dmax": _dmax,
    "full_sequence_dual": _full_sequence_dual,
    "dflash": _dflash,
    "diffusion_gemma": lambda: _diffusion_gemma(2),
    "diffusion_gemma_alone": lambda: _diffusion_gemma(1),
    "edit_indel": _edit_indel,
}
NAMES = tuple(CASES)


def sweep(some: Iterable[str], names: Iterable[str] = NAMES) -> list[Any]:
    """These cases; the others where there is time."""
    return [n if n in some else pytest.param(n, marks=pytest.mark.slow) for n in names]


# Of the engine alone: a row before the window that comes with a shared prompt.
EXTRA: dict[str, Callable[[], Case]] = {
    "d2f_grid_full_shifted": lambda: _d2f(models.plain(4, shift=True), accept=0.15),
    "d2f_whole_full_shifted": lambda: _d2f(models.plain(4, shift=True), True, accept=0.15),
}
# Odd cases run on pages of 16, so that both sizes cost no further compilation.
PAGE_SIZE = {name: 16 if i % 2 else 8 for i, name in enumerate((*NAMES, *EXTRA))}


@functools.cache
def case(name: str) -> Case:
    return (CASES | EXTRA)[name]()


@functools.cache
def truth(name: str) -> list[dense.Truth]:
    """The truth of each request of the case."""
    return [case(name).truth(request=r) for r in case(name).requests]


def paged(name: str, requests: Any = None, strategy: Any = None, **options: Any) -> Decoded:
    """The case on pages; `options` are those of `decode_paged`."""
    c = case(name)
    return decode_paged(
        strategy or c.strategy,
        c.model,
        list(c.requests) if requests is None else requests,
        aux=dict(c.aux),
        page_size=PAGE_SIZE[name],
        **options,
    )


once = functools.cache(paged)
