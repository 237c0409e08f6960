"""A DFlash drafter computes what transformers and its equations say, on pages, next to its target.

`golden/draft.npz` is transformers' word on the published layout; `oracles/draft_model.py` says it
in NumPy for every kind of layer and is itself held to the golden file.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax.api.drafts import with_target
from dllm_jax.models import dense, dflash, reference
from dllm_jax.runner import decode
from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies.core.needs import Needs
from dllm_jax.strategies.core.protocol import Strategy, Taps
from dllm_jax.strategies.core.state import ACTIVE, DecodeState, Limits, Sampling
from dllm_jax.strategies.dflash import DFlash
from tests.oracles.draft_files import CONFIG, VARIANTS, write_draft, write_pair
from tests.oracles.draft_model import draft_hidden

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("highest_precision")]

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "draft.npz")
TOLERANCE = 1e-4
BLOCK, MASK, PAGE = CONFIG["dflash_config"]["block_size"], 47, 4
LENGTHS = (1, BLOCK - 1, BLOCK, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE + 2)


class Drafting(Strategy):
    """A strategy that is never stepped; it only gives the state a draft's pool."""

    block_size: int = struct.field(pytree_node=False, default=BLOCK)
    buffer_size: int = struct.field(pytree_node=False, default=1)
    needs: Needs = struct.field(pytree_node=False, default=Needs("whole_causal", aux=("draft",)))

    def step(self, forward, state):
        raise NotImplementedError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the target and every variant of its draft."""
    return write_pair(tmp_path_factory.mktemp("drafts"), *VARIANTS)


@pytest.fixture(scope="module")
def target(folder):
    return dj.load(folder / "target", dtype="float32")


def pair(folder, target, variant="full"):
    """The forward of the target, with a variant of the draft next to it."""
    draft = with_target(target, dj.load(folder / variant, dtype="float32"))
    return ModelForward(target, aux={"draft": draft})


@functools.partial(jax.jit, static_argnames="hidden_layers")
def features_of(model, ids, hidden_layers):
    """Joined hidden states [T F] of one text, without a cache."""
    ids = jnp.asarray(ids)[None]
    positions = jnp.arange(ids.shape[1])[None]
    visible = jnp.tril(jnp.ones((1, *2 * (ids.shape[1],)), bool))

    def attend(_, q, k, v):
        return reference.attention(q, k, v, visible)

    x = dense.embed(model.params, model.config, ids)
    _, taps = dense.trunk(model.params, model.config, x, positions, attend, hidden_layers)
    return jnp.concatenate(taps, axis=-1)[0]


def fresh(forward, num_rows: int, seed: int = 0) -> DecodeState:
    """Empty windows over pages in random order that hold large numbers."""
    rng = np.random.default_rng(seed)
    C = -(-(max(LENGTHS) + BLOCK) // PAGE)
    table = rng.permutation(num_rows * C + 3)[: num_rows * C].reshape(num_rows, C)
    full = lambda value, dtype: jnp.full((num_rows,), value, dtype)  # noqa: E731
    batch = decode.Batch(
        prompt=jnp.zeros((num_rows, 1), jnp.int32),
        prompt_len=full(1, jnp.int32),
        limit=full(200, jnp.int32),
        sampling=Sampling(full(0, jnp.float32), full(0, jnp.int32), full(1, jnp.float32)),
        limits=Limits(
            jnp.full((num_rows, 1), -1, jnp.int32), full(99, jnp.int32), full(99, jnp.int32)
        ),
        knobs={},
        keys=jax.random.split(jax.random.key(0), num_rows),
    )
    draft = forward.aux["draft"].model
    table = jnp.asarray(table, jnp.int32)
    state = decode.new_state(
        Drafting(), forward.model, {"draft": draft}, batch, table, num_rows * C + 3, PAGE, 8
    )
    poisoned = jax.tree.map(lambda pool: jnp.full_like(pool, 1e3), state.pools)
    return state.replace(pools=poisoned)


def at(state: DecodeState, start, width: int) -> DecodeState:
    """The state with a window of one block of `width` cells at `start`."""
    rows = state.finish.shape[0]
    buffer = state.buffer.replace(
        tokens=jnp.zeros((rows, 1, width), jnp.int32),
        filled=jnp.ones((rows, 1, width), bool),
        status=jnp.full((rows, 1), ACTIVE, jnp.int32),
        start=jnp.asarray(start, jnp.int32),
    )
    return state.replace(buffer=buffer)


def inject(forward, state: DecodeState, features, start, lengths) -> DecodeState:
    """Store features [B T F] from `start` on, up to `lengths`."""
    width = features.shape[1]
    view = at(state, start, width)
    where = view.buffer.positions < jnp.asarray(lengths)[:, None, None]
    out = forward.aux["draft"](view, inputs=Taps(features[:, None]), live=where)
    return out.store(view, where)


@jax.jit
def drafted(draft_model, target_model, state, features, lengths, anchors):
    """Hidden rows and logits of the block after contexts of `lengths`."""
    forward = ModelForward(target_model, aux={"draft": draft_model})
    state = inject(forward, state, features, jnp.zeros_like(lengths), lengths)
    state = at(state, lengths, BLOCK)
    cell = jnp.arange(BLOCK)[None, None]
    inputs = jnp.where(cell == 0, anchors[:, None, None], forward.aux["draft"].mask_id)
    out = forward.aux["draft"](state, inputs=inputs)
    return out.hidden[:, 0], out.logits()[:, 0]


@pytest.fixture(scope="module")
def texts():
    """Features [R T F] of no text at all, and anchors: the draft does not know the difference."""
    rng = np.random.default_rng(8)
    features = rng.standard_normal((len(LENGTHS), max(LENGTHS), 80)).astype(np.float32)
    return features, rng.integers(0, 44, len(LENGTHS)).astype(np.int32)


# What the truth itself is held to.


def test_target_features_are_transformers_hidden_states(folder, target):
    """T15: the layers named, in the order named, the last one before the final norm."""
    draft = dj.load(folder / "full", dtype="float32")
    assert draft.config.hidden_layers == (3, 1)
    got = features_of(target, GOLDEN["ids"], draft.config.hidden_layers)
    assert np.std(GOLDEN["features"]) > 0.5
    np.testing.assert_allclose(got, GOLDEN["features"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", ["full", "inclusive"])
def test_equations_agree_with_transformers(folder, target, variant):
    ids, features = GOLDEN["ids"], GOLDEN["features"].astype(np.float64)
    table = np.asarray(target.params["embed"], np.float64)
    rows = table[[ids[-1], *[MASK] * (BLOCK - 1)]]
    got = draft_hidden(folder / variant, features[:-1], rows)
    np.testing.assert_allclose(got, GOLDEN[f"{variant}/hidden"], rtol=0, atol=TOLERANCE)


def test_variants_of_the_oracle_differ(folder, target, texts):
    rows = np.asarray(target.params["embed"], np.float64)[[3, *[MASK] * (BLOCK - 1)]]
    outs = [draft_hidden(folder / one, texts[0][-1].astype(float), rows) for one in VARIANTS]
    for i, one in enumerate(outs):
        assert all(np.abs(one - other).max() > 100 * TOLERANCE for other in outs[:i])


# The draft on pages.


@pytest.mark.parametrize("variant", ["full", "inclusive"])
def test_draft_agrees_with_transformers(folder, target, variant):
    forward = pair(folder, target, variant)
    state, ids = fresh(forward, 1), GOLDEN["ids"]
    features = jnp.asarray(GOLDEN["features"][None, :-1])
    lengths, anchors = jnp.asarray([len(ids) - 1], jnp.int32), jnp.asarray(ids[-1:])
    draft = forward.aux["draft"].model
    hidden, logits = drafted(draft, target, state, features, lengths, anchors)
    np.testing.assert_allclose(hidden[0], GOLDEN[f"{variant}/hidden"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits[0], GOLDEN[f"{variant}/logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_draft_agrees_with_its_equations(folder, target, texts, variant):
    """T2: ragged contexts, on both sides of the edges of pages and of the block."""
    hold_to_equations(folder / variant, pair(folder, target, variant), target, *texts)


def hold_to_equations(folder, forward, target, features, anchors):
    """The draft's rows after contexts of all `LENGTHS` are those of the NumPy reference."""
    hidden, _ = drafted(
        forward.aux["draft"].model,
        target,
        fresh(forward, len(LENGTHS)),
        jnp.asarray(features),
        jnp.asarray(LENGTHS, jnp.int32),
        jnp.asarray(anchors),
    )
    table = np.asarray(target.params["embed"], np.float64)
    for row, length in enumerate(LENGTHS):
        block = table[[anchors[row], *[MASK] * (BLOCK - 1)]]
        want = draft_hidden(folder, features[row, :length].astype(np.float64), block)
        np.testing.assert_allclose(hidden[row], want, rtol=0, atol=TOLERANCE, err_msg=str(length))


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
def test_any_draft_agrees_with_its_equations(target, texts, data):
    """Drawn layers, heads, windows, biases and block; ragged contexts over random pages."""
    draw = data.draw
    layers, kv_heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3]))
    kinds = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    own = {"causal": draw(st.booleans())} if draw(st.booleans()) else {}
    own |= {"window_inclusive": draw(st.booleans())}
    changes = {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([8, 16])),
        "attention_bias": draw(st.booleans()),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in kinds],
        "sliding_window": draw(st.integers(1, 12)),
        "dflash_config": {**CONFIG["dflash_config"], **own},
    }
    features, anchors = texts
    with tempfile.TemporaryDirectory() as name:
        folder = write_draft(Path(name) / "drawn", seed=draw(st.integers(0, 9)), **changes)
        forward = ModelForward(
            target, aux={"draft": with_target(target, dj.load(folder, dtype="float32"))}
        )
        hold_to_equations(folder, forward, target, features, anchors)


def test_bfloat16_is_close(folder):
    """Weights, states and pages in 16 bits; norms, angles, softmax and logits are float32."""
    target = dj.load(folder / "target", dtype="bfloat16")
    draft = with_target(target, dj.load(folder / "full", dtype="bfloat16"))
    forward = ModelForward(target, aux={"draft": draft})
    state, ids = fresh(forward, 1), GOLDEN["ids"]
    features = jnp.asarray(GOLDEN["features"][None, :-1], jnp.bfloat16)
    lengths, anchors = jnp.asarray([len(ids) - 1], jnp.int32), jnp.asarray(ids[-1:])
    hidden, logits = drafted(draft, target, state, features, lengths, anchors)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    for got, kind in ((hidden, "hidden"), (logits, "logits")):
        wanted = GOLDEN[f"full/{kind}"]
        error = np.abs(np.asarray(got[0], np.float32) - wanted)
        assert error.max() < 0.1 * wanted.std() < error.max() * 100  # and not float32 in disguise


def test_context_is_the_same_in_pieces(folder, target, texts):
    """T3: at once, a few positions at a time, one at a time; and nothing else is written."""
    features, _ = texts
    forward, lengths = pair(folder, target), np.asarray(LENGTHS)
    state = fresh(forward, len(LENGTHS))
    store = jax.jit(lambda *call: inject(forward, *call).pools["draft"])
    padded = np.pad(features, ((0, 0), (0, max(LENGTHS)), (0, 0)))
    pools = []
    for size in (max(LENGTHS), 4, 1):
        done, pool = 0, state.pools["draft"]
        while done < max(LENGTHS):
            there = state.replace(pools={**state.pools, "draft": pool})
            piece = jnp.asarray(padded[:, done : done + max(LENGTHS)])
            end = jnp.asarray(np.minimum(lengths, done + size), jnp.int32)
            pool = store(there, piece, jnp.full(len(LENGTHS), done, jnp.int32), end)
            done += size
        pools.append(jax.tree.map(np.asarray, pool))
    written = sum(LENGTHS) * pools[0][0][0].shape[1] * pools[0][0][0].shape[3]
    for pool in jax.tree.leaves(pools[0]):
        assert int((pool != 1e3).sum()) == written
    for other in pools[1:]:
        assert all(map(np.array_equal, *map(jax.tree.leaves, (pools[0], other))))


# Traps: each gives a draft that still runs, and whose rows are others.


TRAPS = ("features shifted", "order", "input norm", "no norm", "theta", "positions", "no anchor")


@pytest.mark.parametrize("trap", TRAPS)
def test_golden_file_notices_a_wrong_turn(folder, target, trap):
    ids, draft = GOLDEN["ids"], dj.load(folder / "full", dtype="float32")
    features, anchors = GOLDEN["features"][None, :-1], jnp.asarray(ids[-1:])
    cfg, params, positions = draft.config, dict(draft.params), len(ids) - 1
    if trap == "features shifted":
        features = features_of(target, ids, tuple(cfg.target_layer_ids))[None, :-1]
    elif trap == "order":
        features = np.concatenate([features[..., 40:], features[..., :40]], axis=-1)
    elif trap == "input norm":
        norm = params["context_norm"] * params["layers"][0]["attn_norm"]
        params["context_norm"] = norm
    elif trap == "no norm":
        params["context_norm"] = jnp.ones_like(params["context_norm"])
    elif trap == "theta":
        cfg = dataclasses.replace(cfg, rope_theta=target.config.rope_theta)
    elif trap == "positions":  # the context a position off where the block stands
        features, positions = np.pad(features, ((0, 0), (1, 0), (0, 0))), len(ids)
    else:
        anchors = jnp.full_like(anchors, MASK)
    draft = with_target(target, draft.replace(config=cfg, params=params))
    forward = ModelForward(target, aux={"draft": draft})
    lengths = jnp.asarray([positions], jnp.int32)
    state = fresh(forward, 1)
    hidden, _ = drafted(draft, target, state, jnp.asarray(features), lengths, anchors)
    assert np.abs(hidden[0] - GOLDEN["full/hidden"]).max() > 1000 * TOLERANCE


def test_draft_shares_the_targets_embedding_and_head(folder, target):
    draft = pair(folder, target).aux["draft"].model
    assert draft.params["embed"] is target.params["embed"]
    assert draft.params["lm_head"] is target.params["lm_head"]
    tied = target.replace(config=dataclasses.replace(target.config, tie_embeddings=True))
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((3, 40)), jnp.float32)
    unbound = dj.load(folder / "full", dtype="float32")
    draft = with_target(tied, unbound)
    assert "lm_head" not in draft.params
    want = np.asarray(rows, np.float64) @ np.asarray(target.params["embed"], np.float64).T
    got = draft.arch.unembed(draft.params, draft.config, rows)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_what_a_draft_shares_is_counted_once(folder, target):
    """In the plan of the memory, which says how many pages there may be."""
    draft = dj.load(folder / "full", dtype="float32")
    strategy = DFlash().bind(draft.config)
    llm = dj.LLM(target, strategy, draft=draft, max_num_seqs=1, max_model_len=64, warm_up=False)
    leaves = jax.tree.leaves((target.params, draft.params))
    again = with_target(target, draft).params["context_wkv"].nbytes
    assert llm.memory.weights_bytes == sum(leaf.nbytes for leaf in leaves) + again


def test_one_product_makes_the_keys_and_values_of_all_layers(folder, target):
    """With the weights that stand ready; nothing is cut out of `wqkv` in a pass."""
    draft = with_target(target, dj.load(folder / "full", dtype="float32"))
    features, positions = GOLDEN["features"][None], jnp.arange(len(GOLDEN["features"]))[None]
    cfg, args = draft.config, (jnp.asarray(features, jnp.float32), positions)
    made = jax.jit(dflash.context_kv, static_argnums=1)
    bare = {k: v for k, v in draft.params.items() if k != "context_wkv"}
    cut = f"(tensor<{cfg.hidden_size}x{cfg.num_kv_heads}x"
    for params, cuts in ((draft.params, 0), (bare, cfg.num_layers)):
        lines = made.lower(params, cfg, *args).as_text().splitlines()
        assert sum("stablehlo.dot_general" in line for line in lines) == 2
        assert sum("stablehlo.slice" in line and cut in line for line in lines) == cuts
    for got, want in zip(
        jax.tree.leaves(made(draft.params, cfg, *args)),
        jax.tree.leaves(made(bare, cfg, *args)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_scales_and_cap_are_applied(folder, target, tmp_path):
    """The embedding is scaled, logits are multiplied and then bent to lie within the cap."""
    own = {
        **CONFIG["dflash_config"],
        "input_embedding_scale": 2.5,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 1.5,
    }
    folder = write_draft(tmp_path / "scaled", dflash_config=own)
    draft = with_target(target, dj.load(folder, dtype="float32"))
    ids = jnp.asarray([1, 5, MASK])
    rows = draft.arch.embed(draft.params, draft.config, ids)
    np.testing.assert_allclose(rows, 2.5 * target.params["embed"][ids], rtol=1e-6)
    logits = draft.arch.unembed(draft.params, draft.config, rows)
    plain = np.asarray(rows, np.float64) @ np.asarray(target.params["lm_head"], np.float64).T
    np.testing.assert_allclose(logits, 1.5 * np.tanh(0.5 * plain / 1.5), rtol=0, atol=TOLERANCE)


def test_a_draft_rotates_whole_heads(folder):
    """Or the context's keys would be turned otherwise than the block's."""
    cfg = dj.load(folder / "full", dtype="float32").config
    assert dataclasses.replace(cfg, rotary_dim=cfg.head_dim).rotary_dim == cfg.head_dim
    with pytest.raises(ValueError, match=r"rotary_dim=8 must be head_dim=.* leave it None"):
        dataclasses.replace(cfg, rotary_dim=8)
    with pytest.raises(ValueError, match=r"causal has .* one for each of the"):
        dataclasses.replace(cfg, causal=(True,) * (cfg.num_layers + 1))
