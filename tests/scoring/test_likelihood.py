"""Proves that log-likelihoods are the model's: by enumeration, and by logits without a cache.

A small model's chain sums to one over all completions and its ELBO equals the mean over all orders.
Each family's chain equals the log-softmax of whole sequences. The stated error of a sampled ELBO
covers 95 % of 1,000 repetitions, and sizes of hidden sets are uniform where LLaDA's are not.
"""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.models import reference
from dllm_jax.scoring import forwards, likelihood, mask_strata
from tests.contract import models
from tests.oracles.checkpoints import write_tiny

VOCAB, MASK = 5, 4  # ids 0 to 3 are text


@pytest.fixture(scope="module")
def small():
    """A model of four words, blocks of 3."""
    model = models.plain(11, vocab_size=VOCAB, mask_token_id=MASK)
    defaults = dataclasses.replace(model.defaults, block_size=3, vocab_limit=MASK)
    return model.replace(defaults=defaults)


def by_hand(model, prompt, completion, hidden=None):
    """Nats of each token with the cells from it on hidden, or a set of `hidden` of its block."""
    kind, size = model.defaults.attention, model.defaults.block_size
    ids, mask = [*prompt, *completion], model.config.mask_token_id
    first, length = len(prompt), len(ids)
    if "block" in kind or kind == "d2f":
        length += -length % size
    texts = []
    for i in range(first, len(ids)):
        shown = [*ids[:i], *[mask] * (length - i)]
        if kind == "causal":
            shown = ids
        elif hidden is not None:
            shown = [mask if j in hidden else token for j, token in enumerate(ids)]
            shown += [mask] * (length - len(ids))
        texts.append(shown)
    rows = np.arange(first, len(ids)) - int(model.config.shift or kind == "causal")
    if kind == "d2f":
        logits, rows = d2f_logits(model, texts, first, rows)
    else:
        logits = jax.jit(lambda model, ids: model.logits(ids, kind, size))(model, np.array(texts))
    found = np.asarray(logits, np.float64)[np.arange(len(texts)), rows]
    found[:, np.asarray(model.forbidden(np.arange(found.shape[1])))] = -np.inf
    top = found.max(axis=1, keepdims=True)
    found = found - top - np.log(np.exp(found - top).sum(axis=1, keepdims=True))
    return found[np.arange(len(texts)), completion]


def d2f_logits(model, texts, prompt_len, rows):
    """Logits where the prompt's rest stands twice: as prefilled, and in its block."""
    size, arch, cfg = model.defaults.block_size, model.arch, model.config
    cached = prompt_len // size * size
    twice = np.array([[*ids[:prompt_len], *ids[cached:]] for ids in texts])
    position = np.array([*range(prompt_len), *range(cached, len(texts[0]))])
    at, block = np.arange(len(position)), position // size
    in_prompt = at < prompt_len
    behind = np.where(in_prompt[None], at[None] < cached, block[None] <= block[:, None])
    visible = np.where(in_prompt[:, None], in_prompt[None], behind)
    visible = np.broadcast_to(visible, (len(texts), *visible.shape))

    @jax.jit
    def logits(params, ids):
        def attend(_, q, k, v):
            return reference.attention(q, k, v, visible)

        positions = np.broadcast_to(position, ids.shape)
        hidden, _ = arch.trunk(params, cfg, arch.embed(params, cfg, ids), positions, attend)
        return arch.unembed(params, cfg, hidden)

    return logits(model.params, twice), np.where(rows < cached, rows, rows - cached + prompt_len)


@pytest.mark.slow
def test_the_chain_sums_to_one_over_all_completions(small):
    """Of two blocks, the first shared with the prompt."""
    every = [list(ids) for ids in itertools.product(range(MASK), repeat=4)]
    found = small.log_likelihood([1, 2, 0, 3], every)
    assert math.fsum(math.exp(one.value) for one in found) == pytest.approx(1, abs=1e-5)
    assert {one.error for one in found} == {0.0}
    greedy = [ids for ids, one in zip(every, found, strict=True) if one.is_greedy]
    assert len(greedy) == 1
    written = dj.generate(
        small,
        [[1, 2, 0, 3]],
        strategy=dj.strategies.BlockDiffusion(remasking="sequential", block_size=3),
        max_tokens=4,
        stop_token_ids=(),
    )
    assert written.tokens[0].tolist() == greedy[0]


@pytest.mark.slow
def test_the_elbo_is_the_mean_over_all_orders(small):
    prompt, completion = [1, 2, 0], [3, 1, 2]
    total = 0.0
    orders = list(itertools.permutations(range(3)))
    for order in orders:
        for n, cell in enumerate(order):
            hidden = {3 + one for one in order[n:]}
            total += by_hand(small, prompt, completion, hidden)[cell]
    exact = small.log_likelihood(prompt, tuple(completion), method="elbo")
    assert exact.value == pytest.approx(total / len(orders), abs=1e-4)
    assert exact.error == 0.0
    assert exact.rows == 7
    # It bounds the law that draws an order, whose probabilities sum to one.
    every = [list(ids) for ids in itertools.product(range(MASK), repeat=3)]
    bounds = small.log_likelihood(prompt, every, method="elbo")
    assert math.fsum(math.exp(one.value) for one in bounds) < 1


def test_one_token_has_one_value(small):
    prompts = [[1, 2, 0, 3], [1, 2, 0, 3]]
    chain, elbo = (
        small.log_likelihood(prompts, [[0], [2]], method=method) for method in ("chain", "elbo")
    )
    for one, other in zip(chain, elbo, strict=True):
        assert one.value == pytest.approx(other.value, abs=1e-6)


def estimate(value, length, budget, seed):
    """Value, error and half of the interval of one run."""
    found = mask_strata.strata(length, budget, np.random.default_rng(seed))
    assert sum(len(one.hidden) for one in found) <= budget
    return mask_strata.combined(
        one.total(np.array([value(hidden) for hidden in one.hidden])) for one in found
    )


def read_once(model, prompt, completion):
    """v of every hidden set of a block, by the model."""
    group = likelihood._Group(
        model, len(completion), [likelihood._Text(tuple(prompt), tuple(completion))]
    )
    ids = np.array(completion, np.int32)
    every = itertools.product((False, True), repeat=len(completion))
    sets = [np.array(hidden) for hidden in every if any(hidden)]
    rows = [likelihood._Row(0, len(prompt), ids, one, np.flatnonzero(one)) for one in sets]
    (read,) = group._read([rows])
    values = {tuple(h): one[0].mean() for h, one in zip(sets, read, strict=True)}
    return lambda hidden: values[tuple(hidden)]


def smooth(length):
    """v of a made-up law in which every shown cell helps a little, and some much more."""
    help_ = np.random.default_rng(length).gamma(2.0, 0.25, (length, length))

    def value(hidden):
        cells = np.flatnonzero(hidden)
        return -np.logaddexp(0, 3 - help_[cells] @ ~hidden).mean()

    return value


@pytest.mark.slow
@pytest.mark.parametrize(("length", "budget"), [(8, 128), (12, 128), (32, 128)])
def test_the_stated_error_covers_as_often_as_it_says(length, budget, small):
    """A block of 8 by the model; made-up laws of more, whose exact value needs over 4,000 sets."""
    if length == 8:
        sized = small.replace(defaults=dataclasses.replace(small.defaults, block_size=8))
        value = read_once(sized, [1, 2, 0, 3, 1, 1, 2, 0], [3, 1, 2, 0, 0, 1, 3, 2])
        exact, error, _ = estimate(value, 8, 255, 0)
        assert error == 0
        whole = sized.log_likelihood(
            [1, 2, 0, 3, 1, 1, 2, 0], (3, 1, 2, 0, 0, 1, 3, 2), method="elbo", budget=255
        )
        assert whole.value == pytest.approx(exact, abs=1e-4)
    else:
        value = smooth(length)
        exact, *_ = estimate(value, length, 2**length if length == 12 else 40_000, 5)
    runs = [estimate(value, length, budget, seed) for seed in range(1000)]
    inside = sum(abs(one - exact) <= half for one, _, half in runs)
    assert 930 <= inside <= 970
    found = np.array([one for one, *_ in runs])
    assert found.mean() == pytest.approx(exact, abs=4 * found.std() / 1000**0.5)


@pytest.mark.parametrize("length", [1, 2, 5, 7])
def test_few_tokens_are_enumerated(length):
    found = mask_strata.strata(length, 128, np.random.default_rng(0))
    assert sum(len(one.hidden) for one in found) == 2**length - 1
    assert mask_strata.combined(one.total(np.ones(len(one.hidden))) for one in found)[1:] == (0, 0)
    for one in found:
        assert len({tuple(h) for h in one.hidden.tolist()}) == len(one.hidden)


def test_sizes_are_uniform_where_a_rounded_grid_is_not():
    """LLaDA's grid: batch 16, L = 8; some sizes come up 1.5 times too often, some half as often."""
    theirs = np.zeros(9)
    for start in range(1, 9):
        sizes = np.round(np.linspace(start, start + 15 * (8 / 16), 16)).astype(int)
        theirs += np.bincount((sizes - 1) % 8 + 1, minlength=9)
    share = theirs[1:] / theirs.sum() * 8
    assert share.min() < 0.8
    assert share.max() > 1.2
    found = mask_strata.strata(8, 64, np.random.default_rng(0))
    assert [one.sizes for one in found] == [1] * 8
    assert [len(one.hidden) for one in found[:1] + found[-2:]] == [8, 8, 1]  # all there are
    assert {len(one.hidden) for one in found[1:-2]} == {9, 10}
    assert sum(one.sizes for one in mask_strata.strata(8, 16, np.random.default_rng(0))) == 8


# One of each kind: block-causal, shifted or not, with experts that a block chooses together; full,
# shifted or not; causal.
@pytest.mark.long
@pytest.mark.slow("^(?!.*sdar)")
@pytest.mark.parametrize(
    "family", ["sdar", "fast_dllm_v2", "llada2_2", "llada", "dream", "dream+d2f", "qwen3"]
)
def test_a_family_by_logits_without_a_cache(family, tmp_path):
    name, _, adapter = family.partition("+")
    stated = {} if name in ("fast_dllm_v2", "llada2_2") else {"mask_token_id": 47}
    model = dj.load(write_tiny(name, tmp_path, seed=7, **stated), dtype="float32")
    if adapter:
        changed = dataclasses.replace(model.defaults, attention="d2f", block_size=8)
        model = model.replace(defaults=changed)
    draw = np.random.default_rng(3)
    size = model.defaults.block_size
    prompt = draw.integers(0, 40, size + 3).tolist()
    pairs = [(prompt, draw.integers(0, 40, n).tolist()) for n in (1, size + 2)]
    pairs.append((prompt[:size], draw.integers(0, 40, 3).tolist()))
    found = model.log_likelihood(*map(list, zip(*pairs, strict=True)))
    for (before, after), one in zip(pairs, found, strict=True):
        np.testing.assert_allclose(one.tokens, by_hand(model, before, after), rtol=0, atol=2e-4)
    (alone,) = model.log_likelihood(prompt, [pairs[0][1]])
    assert alone.value == pytest.approx(found[0].value, abs=1e-4)


def test_a_shared_prompt_is_computed_once(small, monkeypatch):
    prompts, kept = [], forwards.keys

    def counted(model, prompt, ids, *rest, **how):
        if prompt is None and ids.size:
            prompts.append(ids.shape)
        return kept(model, prompt, ids, *rest, **how)

    monkeypatch.setattr(forwards, "keys", counted)
    small.log_likelihood([1, 2, 0, 3], [[0], [1], [2, 3, 1, 0]])
    assert prompts == [(1, 64)]
    small.log_likelihood([[1, 2], [2, 1], [1, 2]], [[0], [1], [2]])
    assert len(prompts) == 3


def test_new_texts_compile_nothing(small):
    def ask(seed):
        draw = np.random.default_rng(seed)
        prompt = draw.integers(0, MASK, 10).tolist()
        small.log_likelihood(prompt, draw.integers(0, MASK, (4, 6)).tolist())

    ask(0)
    sizes = [fn._cache_size() for fn in (forwards.keys, forwards.forward)]
    ask(1)
    assert [fn._cache_size() for fn in (forwards.keys, forwards.forward)] == sizes


@pytest.mark.long
def test_texts_are_tokenised_apart_from_their_prompts():
    model = dj.load("builtin:tiny-sdar", dtype="float32")
    tokenizer = model.tokenizer
    prompt, after = "Tom has 3 apples.", " The answer is 3."
    ids = tokenizer(after, add_special_tokens=False).input_ids
    one = model.log_likelihood(prompt, after)
    assert one.value == model.log_likelihood(prompt, tuple(ids)).value
    assert len(one.tokens) == len(ids)
    estimate = model.log_likelihood(prompt, after, method="elbo", budget=8)
    assert estimate.error > 0
    assert estimate == model.log_likelihood(prompt, after, method="elbo", budget=8)
    assert estimate != model.log_likelihood(prompt, after, method="elbo", budget=8, seed=1)


@pytest.mark.parametrize(
    ("prompt", "completion", "how", "said"),
    [
        ([1], [[]], {}, "completion 0 is empty"),
        ([1], [[MASK]], {}, f"completion 0 holds the id {MASK}, which the model never writes"),
        ([9], [[1]], {}, "prompt 0 holds the id 9"),
        ([1], [[1] * 600], {}, "pair 0 has 601 tokens, the model takes 512"),
        ([[1], [2]], [[1]], {}, "2 prompts and 1 completions"),
        ("a", ["b"], {}, "has no tokenizer; give prompts as token ids"),
        ([1], [[1]], {"method": "exact"}, 'use "chain" or "elbo"'),
        ([1], [[1]], {"budget": 1}, "budget=1 must be a whole number of at least 2"),
        ([1], [[1]], {"block_size": 0}, "block_size=0 must be a positive multiple of 1"),
    ],
)
def test_what_cannot_be_scored_is_refused(small, prompt, completion, how, said):
    with pytest.raises(ValueError, match=said):
        small.log_likelihood(prompt, completion, **how)


def test_an_autoregressive_model_has_one_likelihood():
    model = models.causal()
    model = model.replace(defaults=dataclasses.replace(model.defaults, attention="causal"))
    with pytest.raises(ValueError, match='"chain" is its exact likelihood'):
        model.log_likelihood([1], [[2]], method="elbo")
    with pytest.raises(ValueError, match="predicts a token from the one before it"):
        model.log_likelihood([], [[2]])
