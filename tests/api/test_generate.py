"""What `dj.generate` promises.

A row's tokens do not depend on its batch, jit or vmap; nothing compiles twice; draws follow their
law; bad input is one clear error.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.api.strategy import resolve_strategy
from dllm_jax.loading.model import Model
from dllm_jax.models.architecture import DENSE
from dllm_jax.models.dense import init_params
from dllm_jax.models.family import FamilyDefaults
from dllm_jax.strategies import AR, BlockDiffusion, MultiBD
from dllm_jax.strategies.core.draw import token_stats
from dllm_jax.strategies.core.protocol import Readout
from dllm_jax.strategies.core.state import LENGTH, NFE, STOP, Sampling
from tests.contract import models as toys

VOCAB = 60
PROMPTS = [[1, 2, 3, 4, 5], [7] * 9, [3, 1, 4, 1, 5, 9, 2, 6], [11]]
BUDGET = 13  # no multiple of a block; one for most tests, which so share their programs


def toy(shift: bool = False) -> Model:
    """A random network whose logits are sharp enough for thresholds to bite."""
    mask = -1 if shift else VOCAB - 1
    sizes = {"vocab_size": VOCAB, "max_position": 300}
    cfg = dataclasses.replace(toys.CONFIG, **sizes, mask_token_id=mask, shift=shift)
    params = init_params(jax.random.key(3), cfg, "float32")
    params = jax.tree.map(lambda w: w * 12 if w.ndim > 1 else w, params)
    defaults = FamilyDefaults(
        family="toy",
        strategy="ar" if shift else "multi_bd",
        block_size=4,
        buffer_size=3,
        vocab_limit=VOCAB,
    )
    return Model(params=params, config=cfg, arch=DENSE, defaults=defaults)


@pytest.fixture(scope="module")
def model() -> Model:
    return toy()


def lists(out: dj.GenerateOutput) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(np.asarray(out.tokens), out.length, strict=True)]


REMASKING = ("sequential", "static", "dynamic", "entropy")  # and "random", under both interpreters
STRATEGIES = {
    "multi_bd": MultiBD(accept_threshold=0.2, block_size=4, buffer_size=3),
    **{
        rule: BlockDiffusion(accept_threshold=0.2, remasking=rule, denoising_steps=2, block_size=4)
        for rule in (*REMASKING, "random")
    },
    "ar": AR(),
}


@pytest.mark.long
@pytest.mark.slow("ar|random")
@pytest.mark.parametrize("name", ["multi_bd", "random", "ar"])
def test_generate_gives_a_row_the_same_tokens_alone_and_in_a_batch(name):
    """Batch composition and slot never reach a row's tokens (greedy and sampled rows mixed)."""
    model = toy(shift=name == "ar")
    keys = jax.random.split(jax.random.key(5), len(PROMPTS))
    heat = jnp.asarray([0.0, 1.0, 1.0, 0.0])

    def decode(rows: list[int]) -> list[list[int]]:
        chosen = jnp.asarray(rows)
        return lists(
            dj.generate(
                model,
                [PROMPTS[i] for i in rows],
                STRATEGIES[name],
                max_tokens=BUDGET,
                temperature=heat[chosen],
                key=keys[chosen],
            )
        )

    together = decode([0, 1, 2, 3])
    turned = [2, 0, 3, 1]
    assert decode(turned) == [together[i] for i in turned]
    assert decode([2]) == together[2:3]
    assert len({tuple(row) for row in together}) > 1


@pytest.mark.long
@pytest.mark.slow("^(?!.*(ar|multi_bd))")
@pytest.mark.parametrize("name", STRATEGIES)
def test_generate_emits_exactly_max_tokens_without_stops(name):
    """No hole, no mask, no padding, whatever the rule."""
    model = toy(shift=name == "ar")
    out = dj.generate(model, PROMPTS, STRATEGIES[name], max_tokens=BUDGET)
    assert out.length.tolist() == [BUDGET] * 4
    assert out.finish.tolist() == [LENGTH] * 4
    assert (np.asarray(out.tokens) != model.config.mask_token_id).all()


def test_generate_stops_before_the_first_stop_id(model):
    """Stop ids are a prefix cut of what is emitted without them; a stopped row costs no more."""
    strategy = STRATEGIES["multi_bd"]
    free = dj.generate(model, PROMPTS, strategy, max_tokens=BUDGET)
    stop = lists(free)[0][3]
    cut = dj.generate(model, PROMPTS, strategy, max_tokens=BUDGET, stop_token_ids=[stop])
    for row, whole in zip(lists(cut), lists(free), strict=True):
        assert row == (whole[: whole.index(stop)] if stop in whole else whole)
    assert cut.finish[0] == STOP
    assert cut.nfe[0] < free.nfe[0]
    assert (np.asarray(cut.tokens)[0, int(cut.length[0]) :] == 0).all()


def test_generate_max_nfe_bounds_forwards(model):
    """A row that runs out of forwards keeps its hole-free run, a prefix of the whole."""
    strategy = MultiBD(accept_threshold=2.0, block_size=4, buffer_size=3)
    limits = jnp.asarray([3, 4, 5, 99])
    whole = dj.generate(model, PROMPTS, strategy, max_tokens=BUDGET)
    cut = dj.generate(model, PROMPTS, strategy, max_tokens=BUDGET, max_nfe=limits)
    assert cut.nfe.tolist()[:3] == [3, 4, 5]
    assert cut.finish.tolist() == [NFE, NFE, NFE, LENGTH]
    for row, full in zip(lists(cut), lists(whole), strict=True):
        assert row == full[: len(row)]


@pytest.mark.long
def test_generate_runs_under_jit_and_vmap_over_a_knob(model):
    """Thresholds may be tracers: a sweep is one vmap and equals separate calls."""
    ids = jnp.asarray([[1, 2, 3, 4, 5, 6], [7, 7, 7, 7, 7, 7]])

    def decode(model, threshold):
        strategy = MultiBD(accept_threshold=threshold, block_size=4, buffer_size=3)
        return dj.generate(model, ids, strategy, max_tokens=8)

    thresholds = jnp.asarray([0.05, 0.3, 0.9])
    swept = jax.jit(jax.vmap(decode, in_axes=(None, 0)))(model, thresholds)
    for i, threshold in enumerate(thresholds):
        one = decode(model, float(threshold))
        assert np.array_equal(swept.tokens[i], one.tokens)
        assert np.array_equal(swept.nfe[i], one.nfe)
    assert len(set(np.asarray(swept.nfe).sum(axis=1).tolist())) > 1


@pytest.mark.long
def test_generate_compiles_once_for_all_knobs_and_prompts_of_a_bucket(model):
    """Thresholds, sampling, seeds, stops, budgets and prompt lengths are data."""
    before = generate._generate._cache_size()
    for i, threshold in enumerate((0.1, 0.5, 0.9)):
        dj.generate(
            model,
            [[1] * (i + 1), [2] * (5 * i + 2)],
            MultiBD(accept_threshold=threshold, block_size=4, buffer_size=2),
            max_tokens=8,
            temperature=0.5 * i,
            top_k=i or None,
            top_p=1.0 - 0.1 * i,
            stop_token_ids=[1] * i,
            max_nfe=5 + i,
            key=jax.random.key(i),
        )
    assert generate._generate._cache_size() - before == 1


def test_generate_draws_depend_on_the_seed_and_only_when_sampling(model):
    strategy = STRATEGIES["multi_bd"]
    outs = [
        lists(
            dj.generate(
                model, PROMPTS, strategy, max_tokens=BUDGET, temperature=t, key=jax.random.key(k)
            )
        )
        for t, k in ((1.5, 0), (1.5, 0), (1.5, 1), (0.0, 0), (0.0, 1))
    ]
    assert outs[0] == outs[1] != outs[2]
    assert outs[3] == outs[4]


def test_generate_default_strategy_is_the_familys(model):
    """None takes strategy and sizes of the family; a name takes its sizes as well."""
    default = resolve_strategy(model, None)
    assert (type(default), default.block_size, default.buffer_size) == (MultiBD, 4, 3)
    named = resolve_strategy(model, "block_diffusion")
    assert (named.block_size, named.buffer_size) == (4, 1)
    assert resolve_strategy(model, "ar").block_size == 2


def returns_nothing(forward, state):
    """A step that forgot its return."""


BAD = {
    "max_tokens": ({"max_tokens": 0}, r"max_tokens=0 must be a whole number in \[1, "),
    "fraction": ({"max_tokens": 4.5}, "max_tokens=4.5 must be a whole number"),
    "temperature": ({"temperature": -1.0}, "temperature=-1.0 must be a number in"),
    "nan": ({"temperature": np.float32("nan")}, "temperature=nan must be a number in"),
    "infinite": ({"temperature": float("inf")}, "temperature=inf must be a number in"),
    "rows": ({"temperature": jnp.ones((3,))}, r"temperature has shape \(3,\); give one value or 4"),
    "top_p": ({"top_p": 1.5}, r"top_p=1.5 must be a number in \[0.0, 1.0\]"),
    "top_k": ({"top_k": 10**11}, "top_k=100000000000 must be a whole number in"),
    "stop": ({"stop_token_ids": [-5]}, "stop_token_ids=-5 must be a whole number in"),
    "max_nfe": ({"max_nfe": 0}, r"max_nfe=0 must be a whole number in \[1, "),
    "strategy": ({"strategy": "no_such"}, "strategy='no_such' is unknown; use one of ar, "),
    "step": ({"strategy": returns_nothing}, "the step of returns_nothing returned NoneType, not"),
    "draft": ({"draft": "builtin:tiny-sdar"}, "draft='builtin:tiny-sdar' does not fit MultiBD"),
    "key": ({"key": jax.random.split(jax.random.key(0), 3)}, r"key has shape \(3,\)"),
    "no key": ({"key": 3}, r"key=3 is no random key; give jax.random.key\(seed\)"),
    "window": (
        {"strategy": MultiBD(block_size=32, buffer_size=100)},
        "block_size=32 times buffer_size=100 is 3200 tokens, more than the model's 300 positions",
    ),
    "block": ({"strategy": MultiBD(block_size=0)}, "block_size=0 must be a whole number in"),
    "buffer": ({"strategy": MultiBD(buffer_size=2.5)}, "buffer_size=2.5 must be a whole number"),
    "unshifted": ({"strategy": "ar"}, "AR continues from the row before its window.*toy is none"),
}


@pytest.mark.parametrize("case", BAD)
def test_generate_refuses_bad_arguments(model, case):
    arguments, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        dj.generate(model, PROMPTS, **{"strategy": "multi_bd", **arguments})


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[1] * 300], "prompt 0 has 300 tokens; the model takes 300"),
        ([[VOCAB]], r"prompt 0 holds id 60, outside the vocabulary \[0, 60\)"),
        ([1, 2, 3], "prompts are lists of token ids, one list a prompt"),
        (["hi"], "prompts are lists of token ids, one list a prompt"),
        (None, "prompts are lists of token ids, one list a prompt"),
        ([[[1, 2]]], r"prompt 0 is \[\[1, 2\]\]; give one list of whole numbers"),
        ([[1], [2.5]], r"prompt 1 is \[2.5\]; give one list of whole numbers"),
        (jnp.zeros((3,), jnp.int32), r"prompts have shape \(3,\)"),
        (jnp.full((1, 4), VOCAB), r"prompt 0 holds id 60, outside the vocabulary"),
        (jnp.ones((1, 300), jnp.int32), "prompt 0 has 300 tokens; the model takes 300"),
    ],
)
def test_generate_refuses_bad_prompts(model, prompts, message):
    """Prompts are checked before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        dj.generate(model, prompts)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([2, 0], "prompt 1 is empty"),
        ([-3, 2], r"prompt_len\[0\]=-3 must be a whole number in \[0, 4\]"),
        ([2, 9], r"prompt_len\[1\]=9 must be a whole number in \[0, 4\]"),
    ],
)
def test_generate_refuses_bad_prompt_lengths(model, lengths, message):
    with pytest.raises(ValueError, match=message):
        dj.generate(model, np.ones((2, 4), np.int32), prompt_len=np.asarray(lengths))


def test_generate_refuses_to_denoise_without_a_mask():
    with pytest.raises(ValueError, match="MultiBD denoises masks, and toy has no mask token"):
        dj.generate(toy(shift=True), PROMPTS, "multi_bd")


def test_generate_treats_an_array_as_the_lists_it_holds(model):
    """Right-padded arrays, whatever stands in the padding."""
    lengths = [len(p) for p in PROMPTS]
    array = np.full((4, 11), 13, np.int32)
    for i, prompt in enumerate(PROMPTS):
        array[i, : len(prompt)] = prompt
    strategy = STRATEGIES["multi_bd"]
    a = dj.generate(model, PROMPTS, strategy, max_tokens=BUDGET)
    b = dj.generate(model, array, strategy, max_tokens=BUDGET, prompt_len=np.asarray(lengths))
    assert lists(a) == lists(b)


@pytest.mark.long
def test_generate_stops_at_the_models_last_position(model):
    """A budget past the model's positions is cut there; the output keeps the width asked for."""
    out = dj.generate(model, [[1] * 290], MultiBD(block_size=4, buffer_size=1), max_tokens=1000)
    assert out.tokens.shape == (1, 1000)
    assert out.length.tolist() == [10]
    assert out.finish.tolist() == [LENGTH]


# --- the draw itself ---------------------------------------------------------------------------


def draw(logits, temperature=0.0, top_k=0, top_p=1.0, keys=None, **options):
    """`token_stats` with one setting for all rows."""
    R = len(logits)
    sampling = Sampling(
        temperature=jnp.full((R,), temperature, jnp.float32),
        top_k=jnp.full((R,), top_k, jnp.int32),
        top_p=jnp.full((R,), top_p, jnp.float32),
    )
    ask = Readout(sampling=sampling, keys=keys, **options)
    return token_stats(jnp.asarray(logits, jnp.float32), ask)


def softmax64(logits):
    z = np.asarray(logits, np.float64)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_token_stats_match_float64():
    """Confidence, entropy and top of the plain law; saturated rows stay finite."""
    rng = np.random.default_rng(0)
    logits = np.concatenate([rng.normal(0, 3, (6, 40)), [[500.0] + [-500.0] * 39]])
    stats = draw(logits, num_top=3)
    p = softmax64(logits)
    order = np.argsort(-p, axis=-1, kind="stable")[:, :3]
    assert np.array_equal(stats.token, p.argmax(-1))
    np.testing.assert_allclose(stats.confidence, p.max(-1), rtol=1e-5)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(np.where(p > 0, p * np.log(p), 0), axis=-1)
    np.testing.assert_allclose(stats.entropy, entropy, atol=2e-5)
    assert np.array_equal(stats.top_ids[:6], order[:6])
    np.testing.assert_allclose(
        stats.top_probs, np.take_along_axis(p, order, -1), rtol=1e-4, atol=1e-30
    )


def test_token_stats_ties_go_to_the_lowest_id():
    """At temperature 0."""
    assert draw([[0.0, 2.0, 2.0, 1.0]]).token.tolist() == [1]


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.5}, {1}),
        ({"top_k": 3, "top_p": 0.7}, {1, 3}),
    ],
)
def test_token_stats_restrict_the_law(settings, allowed):
    """Nucleus and top-k keep what they should, and confidence is that of the restricted law."""
    p = np.asarray([0.15, 0.52, 0.05, 0.28])
    keys = jax.random.split(jax.random.key(0), 300)
    stats = draw(np.tile(np.log(p), (300, 1)), temperature=1.0, keys=keys, **settings)
    assert set(np.asarray(stats.token).tolist()) == allowed
    kept = sum(p[i] for i in allowed)
    np.testing.assert_allclose(stats.confidence, p[np.asarray(stats.token)] / kept, rtol=1e-5)
    raw = draw(
        np.tile(np.log(p), (300, 1)), temperature=1.0, keys=keys, confidence="raw", **settings
    )
    np.testing.assert_allclose(raw.confidence, p[np.asarray(raw.token)], rtol=1e-5)


def test_token_stats_never_draw_what_is_forbidden():
    """Also at temperatures that flatten everything else."""
    logits = np.asarray([0.0, -np.inf, 3.0, -np.inf])
    keys = jax.random.split(jax.random.key(2), 400)
    stats = draw(np.tile(logits, (400, 1)), temperature=1e38, keys=keys)
    assert set(np.asarray(stats.token).tolist()) == {0, 2}
    assert np.isfinite(stats.entropy).all()
    np.testing.assert_allclose(stats.confidence, 0.5, rtol=1e-5)


def test_token_stats_draw_from_the_tempered_law():
    """Chi-squared over 6,000 draws at temperature 0.7: 4 degrees of freedom, p = 1e-4."""
    logits = np.asarray([0.3, -0.2, 1.0, 0.0, -1.0])
    n = 6000
    keys = jax.random.split(jax.random.key(1), n)
    stats = draw(np.tile(logits, (n, 1)), temperature=0.7, keys=keys)
    expected = softmax64(logits / 0.7) * n
    seen = np.bincount(np.asarray(stats.token), minlength=5)
    assert ((seen - expected) ** 2 / expected).sum() < 23.5
