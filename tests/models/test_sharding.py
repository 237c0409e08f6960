"""Proves that weights on several devices are the same network, and that nothing lies elsewhere.

Axes that do not divide are repeated or padded (`fitted`): logits stay. A device holds its part of
every leaf that is split. What cannot be shared is refused by name, as is what would be moved in
every call.
"""

import ast
import dataclasses
import functools
import re
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import dllm_jax as dj
from dllm_jax.api.drafts import with_target
from dllm_jax.convert import copying
from dllm_jax.kernels.layer import fp8
from dllm_jax.loading import load as loading
from dllm_jax.loading.checkpoints import convert, load_params
from dllm_jax.loading.load import place
from dllm_jax.models import dense, reference
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import parse_config
from dllm_jax.models.published import PUBLISHED
from dllm_jax.models.quantization import is_quantized
from dllm_jax.models.sharding import as_split, over_devices
from dllm_jax.models.split_axes import AXES, fitted
from dllm_jax.runner.forward import ModelForward
from tests.contract import models as toys
from tests.oracles.checkpoints import write_tiny
from tests.oracles.tiny_configs import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 38, size=(2, 12)))
VISIBLE = jnp.ones((2, 12, 12), bool)


def tiny(family):
    """Random weights of a family's tiny config: 6 query heads, 2 KV heads, 12 experts, 50 ids."""
    cfg = parse_config(CONFIGS[family] | {"mask_token_id": 47}).config
    return cfg, toys.weights(cfg, 3)


@pytest.mark.long
@pytest.mark.slow("dream-8|llada2-4")
@pytest.mark.parametrize("parts", [4, 8])
@pytest.mark.parametrize("family", ["dream", "llada2"])
def test_fitted_weights_have_the_same_logits(family, parts):
    cfg, params = tiny(family)
    whole = fitted(params, cfg, parts)
    shapes = {name: leaf.shape for layer in whole["layers"] for name, leaf in layer.items()}
    assert all(shapes[name][AXES[name]] % parts == 0 for name in shapes.keys() & AXES.keys())
    assert whole["embed"].shape[0] % parts == 0
    logits = jax.jit(lambda p: reference.dense_logits(p, cfg, IDS, VISIBLE, arch_of(cfg)))
    wanted, found = logits(params), logits(whole)
    assert found.shape == wanted.shape == (2, 12, cfg.vocab_size)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


def test_leaves_that_divide_are_left_alone():
    model = toys.plain()
    leaves = zip(
        jax.tree.leaves(fitted(model.params, model.config, 2)),
        jax.tree.leaves(model.params),
        strict=True,
    )
    # Of two layers, gate and up (three turns) and down are padded; heads and 40 ids divide.
    assert sum(a is not b for a, b in leaves) == 4


def test_a_device_holds_its_part_alone():
    model = place(toys.experts(), over_devices(4))
    held = [0] * 4
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        axis = AXES.get(path[-1].key)
        for shard in leaf.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
            assert axis is None or shard.data.shape[axis] * 4 == leaf.shape[axis]
    assert len(set(held)) == 1
    assert held[0] < 0.45 * sum(leaf.nbytes for leaf in jax.tree.leaves(toys.experts().params))
    assert model.split is not None
    assert model.split.misplaced(model.params) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["published", "converted"])
def test_a_folder_is_read_leaf_by_leaf_onto_devices(kind, random_folder, tmp_path, monkeypatch):
    folder = (
        random_folder
        if kind == "published"
        else convert(random_folder, tmp_path / "folder", "float32")
    )
    split, reported, leaves = over_devices(4), [], []
    events, read, wait = [], copying.copy_all, jax.block_until_ready

    def copied(*args):
        events.append("read")
        return read(*args)

    def waited(given):
        events.extend(["wait"] * bool(given))
        return wait(given)

    with monkeypatch.context() as patch:
        patch.setattr(copying, "copy_all", copied)
        patch.setattr(jax, "block_until_ready", waited)
        progress = lambda *sizes: reported.append(sizes)  # noqa: E731
        found = dj.load(folder, "float32", mesh=split, progress=progress)
    # While a leaf, or a device's part of one, is copied, the next is read.
    count = events.count("read")
    assert count > len(jax.tree.leaves(found.params))
    assert events == ["read", *["read", "wait"] * (count - 1)]
    wanted = place(dj.load(folder, "float32"), split)
    assert found.split == wanted.split == split
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(wanted.params), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(dj.load(folder, "float32").params))
    assert reported[-1] == (size, size)  # every byte once
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)

    def keep(path, leaf):
        assert all(before() is None for before in leaves), "an earlier leaf is still in memory"
        leaves.append(weakref.ref(leaf))
        return path

    tree, _ = load_params(folder, "float32", keep=keep)
    assert tree["layers"][1]["wo"] == ("layers", 1, "wo")
    assert len(leaves) == len(jax.tree.leaves(wanted.params))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["published", "packed", "converted"])
def test_experts_and_ids_are_read_device_by_device(kind, tmp_path, monkeypatch):
    """12 experts of 5 devices: no array of the host is larger than a part or another leaf."""
    experts = "packed" if kind == "packed" else "split"
    folder = write_tiny("llada2", tmp_path / "a", experts=experts)
    if kind == "converted":
        folder = convert(folder, tmp_path / "b", "float32")
    split, held, found = over_devices(5), [], []
    read = copying.copy_all

    def copied(copies, progress=None):
        copies = list(copies)
        for copy in copies:
            base = copy.target
            while isinstance(base.base, np.ndarray):
                base = base.base
            left = [before() for before in held]
            assert all(one is None or one is base for one in left), "an earlier one is there yet"
            del left
            if not held or held[-1]() is not base:
                held.append(weakref.ref(base))
                found.append(base.nbytes)
        return read(copies, progress)

    monkeypatch.setattr(copying, "copy_all", copied)
    model = dj.load(folder, "float32", mesh=split)
    monkeypatch.undo()
    wanted = place(dj.load(folder, "float32"), split)
    for a, b in zip(jax.tree.leaves(model.params), jax.tree.leaves(wanted.params), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)
    leaves = jax.tree_util.tree_leaves_with_path(load_params(folder, "float32")[0])
    sizes = {path[-1].key: leaf.nbytes for path, leaf in leaves}
    in_rows = ("embed", "lm_head", "experts_gate_up", "experts_down")
    assert max(found) == max(size for name, size in sizes.items() if name not in in_rows)
    assert sizes["experts_gate_up"] > max(found)


@pytest.mark.slow
def test_random_weights_are_drawn_leaf_by_leaf_onto_devices(monkeypatch):
    monkeypatch.setitem(PUBLISHED, "tiny", CONFIGS["llada2"] | {"mask_token_id": 47})
    split, leaves, draw = over_devices(4), [], loading.random_leaf
    wanted = place(dj.load("random:tiny", quantization="fp8"), split)

    def drawn(*args):
        assert all(before() is None for before in leaves), "an earlier leaf is still in memory"
        leaf = draw(*args)
        leaves.append(weakref.ref(leaf))
        return leaf

    monkeypatch.setattr(loading, "random_leaf", drawn)
    # A leaf that is whole on every device may keep the array that was drawn.
    monkeypatch.setattr(dj.Split, "put", lambda *args, put=dj.Split.put: put(*args) + 0)
    found = dj.load("random:tiny", mesh=split, quantization="fp8")
    assert split.misplaced(found.params) == []
    assert_same_parts(found.params, wanted.params)
    assert len(leaves) == len(jax.tree.leaves(wanted.params, is_leaf=is_quantized))


# --- 8 bits ---------------------------------------------------------------------------------------


def assert_same_parts(found, wanted):
    """Equal leaves in equal places; the scale of an output of zeros may be any."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(found, is_leaf=is_quantized),
        jax.tree.leaves(wanted, is_leaf=is_quantized),
        strict=True,
    )
    for (path, a), b in pairs:
        name = jax.tree_util.keystr(path)
        if is_quantized(a):
            assert a.scales.sharding == b.scales.sharding, name
            is_some = np.any(np.asarray(a.values).astype(np.float32) != 0, axis=-1)
            scales = (np.where(is_some, one.scales, 1) for one in (a, b))
            np.testing.assert_array_equal(*scales, name)
            a, b = a.values, b.values
        assert a.sharding == b.sharding, name
        np.testing.assert_array_equal(a, b, name)


@pytest.mark.long
def test_zeros_behind_the_inputs_of_a_matrix_are_not_shared():
    """160 inputs are stored as 256 on one device, and as 80 on each of two."""
    cfg = dataclasses.replace(toys.CONFIG, ffn_size=160)
    model = toys.plain().replace(params=toys.weights(cfg, 3), config=cfg)
    whole, split = toys.in_8_bits(model), over_devices(2)
    assert whole.params["layers"][0]["w_down"].values.shape[-1] == 256
    assert_same_parts(place(whole, split).params, toys.in_8_bits(place(model, split)).params)


def test_a_row_has_one_scale_on_all_devices():
    split, x = over_devices(4), jax.random.normal(jax.random.key(0), (5, 64))
    parts, whole = PartitionSpec(None, "tp"), PartitionSpec()
    body = functools.partial(fp8.quantize, axis="tp")
    found = jax.jit(lambda x: split.run(body, (x,), (parts,), (parts, whole)))(x)
    for a, b in zip(found, fp8.quantize(x), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 8])
def test_rows_in_8_bits_differ_by_a_last_bit_alone(parts):
    """A sum in another order; where it falls between two numbers of 8 bits, a row shows it."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 38, (32, 24)))

    def rows(model, ids):
        forward = ModelForward(model)
        positions = jnp.broadcast_to(jnp.arange(24), ids.shape)
        visible = jnp.ones((1, 24, 24), bool)
        out, _ = model.arch.trunk(
            model.params,
            model.config,
            forward.embed(ids),
            positions,
            lambda _, q, k, v: reference.attention(q, k, v, visible),
            ops=dataclasses.replace(dense.PLAIN, axis=forward.axis),
        )
        return out

    one = toys.in_8_bits(toys.experts())
    many, whole = place(one, over_devices(parts)), PartitionSpec()
    wanted = jax.jit(rows)(one, ids)
    given = many.split.specs(many), whole
    found = jax.jit(lambda *args: many.split.run(rows, args, given, whole))(many, ids)
    differ = jnp.max(jnp.abs(found - wanted), axis=-1) / jnp.max(jnp.abs(wanted))
    assert float(jnp.median(differ)) < 1e-6
    assert float(jnp.mean(differ > 1e-4)) < 0.02


@pytest.mark.long
@pytest.mark.slow("with experts")
@pytest.mark.parametrize(
    "kind", ["published", "with experts", "converted", "in 8 bits", "all in 8"]
)
def test_a_folder_is_rounded_as_it_is_read_onto_devices(kind, random_folder, tmp_path):
    folder, how = random_folder, {"quantization": "fp8"}
    if kind in ("with experts", "all in 8"):
        folder = write_tiny("llada2", tmp_path / "experts")
    if kind == "converted":
        folder = convert(random_folder, tmp_path / "folder", "float32")
    if kind in ("in 8 bits", "all in 8"):
        both = {"quantize": "fp8", "quantize_head": kind == "all in 8"}
        folder, how = convert(folder, tmp_path / "folder", **both), {}
    split = over_devices(4 if kind == "in 8 bits" else 2)  # four: KV heads are repeated
    how = {"dtype": "float32", "quantize_head": True, "kv_cache_dtype": "fp8", **how}
    found, wanted = dj.load(folder, mesh=split, **how), dj.load(folder, **how)
    assert (found.quantization, found.has_quantized_head) == ("fp8", True)
    assert_same_parts(found, place(wanted, split))


def test_reductions_stand_in_few_functions():
    """Three functions add over devices, one takes the largest; others call them."""
    found = set()
    for folder in ("dllm_jax", "strategies", "pallas_kernels", "checkpoints_convert"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text("utf-8")
            assert "all_gather" not in text, path
            tree = ast.parse(text if "psum" in text or "pmax" in text else "")
            for node in ast.walk(tree):
                is_function = isinstance(node, ast.FunctionDef)
                if is_function and re.search(r"jax\.lax\.p(sum|max)", ast.unparse(node)):
                    found.add((path.name, node.name))
    sums = {("sharding.py", "total"), ("draw.py", "total")}
    assert found == {*sums, ("fp8.py", "quantize"), ("fp8.py", "_sought"), ("fp8.py", "tried")}


# --- refusals -------------------------------------------------------------------------------------


def test_more_devices_than_there_are_are_refused():
    with pytest.raises(ValueError, match=r"tensor_parallel_size=9 needs 9 devices.*sees 8 \(cpu\)"):
        over_devices(9)


def test_a_mesh_of_two_axes_must_say_which_splits_the_weights():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    with pytest.raises(ValueError, match=r"axes \('data', 'model'\).*axis='model', batch='data'"):
        as_split(mesh)
    with pytest.raises(ValueError, match=r"axis='tp' is no axis of the mesh"):
        dj.Split(mesh)
    with pytest.raises(ValueError, match=r"batch='data' is the axis that splits the weights"):
        dj.Split(mesh, "data", "data")


def test_networks_that_do_not_add_up_parts_are_refused():
    with pytest.raises(ValueError, match="a toy model cannot be split over devices"):
        place(toys.conditioned(), over_devices(2))


def test_a_split_model_is_not_split_again():
    model = place(toys.plain(), over_devices(2))
    assert place(model, over_devices(2)) is model
    with pytest.raises(ValueError, match="load it with one mesh"):
        place(model, over_devices(4))


@pytest.mark.long
def test_a_drafter_on_other_devices_is_refused():
    """Its weights would be cut and its sums not: drafts would be garbage, texts right."""
    target, draft = dj.load("builtin:tiny-qwen3"), dj.load("builtin:tiny-qwen3-dflash")
    split = over_devices(2)
    with pytest.raises(ValueError, match=r"does not lie on the devices of its target, 2 devices"):
        with_target(place(target, split), draft)
    with pytest.raises(ValueError, match=r"does not lie on the devices of its target, one device"):
        with_target(target, place(draft, split))
    joined = with_target(place(target, split), place(draft, split))
    assert split.misplaced(joined.params) == []


def test_a_misplaced_leaf_is_refused_by_name():
    split = over_devices(2)
    model = place(toys.plain(), split)
    moved = model.params | {"lm_head": jax.device_put(model.params["lm_head"], split.sharding())}
    with pytest.raises(ValueError, match=r"1 leaves of .* the first is \['lm_head'\]"):
        dj.LLM(model.replace(params=moved), max_num_seqs=2, num_pages=8, warm_up=False)


def test_an_engine_splits_no_rows():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    model = place(toys.plain(), dj.Split(mesh, "model", "data"))
    with pytest.raises(ValueError, match="the model's mesh splits rows along 'data'"):
        dj.LLM(model)
    with pytest.raises(ValueError, match="3 prompts cannot be split over the 2 groups"):
        dj.generate(model, [[1], [2], [3]], max_tokens=4)
