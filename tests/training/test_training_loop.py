"""Proves the loop: the loss falls, the stream is a function of its position, and an exported run
loads like any checkpoint. That a resumed run is the uninterrupted one: test_training_kinds.py.
"""

import dataclasses
import json
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dllm_jax.loading import checkpoints
from dllm_jax.models import dense
from dllm_jax.training import export, loop, optimizer, report, run_folder, run_state, sdar, stream

TINY = sdar.TrainConfig(
    model=dense.DenseConfig(
        vocab_size=768, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        ffn_size=64, rope_theta=1e4, mask_token_id=1,
    ),
    data=stream.StreamConfig(batch_size=8, lengths=(128, 160), hard_share=0.2),
    num_steps=50,
    log_every=5,
    evals=0,
    compute_dtype="float32",
)  # fmt: skip


# A minute an interpreter, and the loop changes seldom.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("promotion")]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, sdar.train(TINY, out, num_workers=0, say=lambda _: None)


def test_fifty_steps_lower_the_loss(whole_run) -> None:
    out, run = whole_run
    steps, _ = report.read_log(out / "metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(5, 51, 5))
    assert steps[0]["loss"] > 6.0  # log 767 is 6.6
    assert steps[-1]["loss"] < 4.5
    assert run["done"]
    assert steps[-1]["lr_factor"] < 0.1
    report.draw_curves(out / "metrics.jsonl", out / "curves.png")
    assert (out / "curves.png").stat().st_size > 5000


def test_a_time_limit_ends_with_a_checkpoint(tmp_path) -> None:
    run = sdar.train(TINY, tmp_path, max_seconds=0.0, num_workers=0, say=lambda _: None)
    assert not run["done"]
    assert list((tmp_path / "checkpoints").iterdir())


def claim(folder, **changes) -> None:
    run_folder.claim(folder, dataclasses.replace(TINY, **changes))


def test_a_run_takes_no_foreign_folder(tmp_path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "sdar"}')
    with pytest.raises(ValueError, match=r"model' holds 'config.json' and no training run; give a"):
        sdar.train(TINY, model, num_workers=0)
    assert [p.name for p in model.iterdir()] == ["config.json"]
    assert (model / "config.json").read_text() == '{"model_type": "sdar"}'
    for path, reason in (
        (model / "config.json", "it is a file"),
        (model / "config.json" / "x", "Not a"),
    ):
        with pytest.raises(ValueError, match=rf"folder of a run \({reason}.*\); give a folder"):
            sdar.train(TINY, path, num_workers=0)


def test_a_run_is_continued_with_its_own_config_only(tmp_path) -> None:
    claim(tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_text()
    changes = {"seed": 1, "data": dataclasses.replace(TINY.data, batch_size=16)}
    words = r"\(data.batch_size is 8 there and 16 here; seed is 0 there and 1 here\); continue it"
    with pytest.raises(ValueError, match=words):
        claim(tmp_path / "run", **changes)
    for shorter in ({"num_steps": 49}, {"budget_seconds": 9.0}):
        with pytest.raises(ValueError, match=f"{next(iter(shorter))} is .* there"):
            claim(tmp_path / "run", **shorter)
    assert (tmp_path / "run" / "config.json").read_text() == before
    claim(tmp_path / "run", num_steps=51, evals=9, log_every=1, head_temperature=1.0)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["num_steps"] == 51


def test_the_stream_is_a_function_of_its_position() -> None:
    tokenizer = stream.make_tokenizer(768)
    cfg = dataclasses.replace(TINY.data, batch_size=4)
    feed = stream.batches(cfg, tokenizer)
    first = [next(feed) for _ in range(19)]
    for start, workers in ((11, 0), (3, 2)):
        other = stream.batches(cfg, tokenizer, start, workers)
        for wanted in first[start : start + 6]:
            got = next(other)
            assert all(np.array_equal(got[name], wanted[name]) for name in wanted)
        other.close()
    shapes = {batch["tokens"].shape for batch in first}
    assert shapes == {(4, 128), (4, 160)}
    for batch in first:
        T = batch["tokens"].shape[1]
        assert (batch["length"] <= (T - cfg.room if T == 128 else T)).all()
        at = np.arange(T)[None] >= batch["length"][:, None] - 1
        assert (batch["tokens"][at] == 2).all()
        opens = np.take_along_axis(batch["tokens"], batch["prompt_len"][:, None] - 1, 1)
        assert (opens == 4).all()  # the prompt ends with <|assistant|>


def test_the_learning_rate_rises_stays_and_falls() -> None:
    factors = [loop.learning_rate_factor(TINY, p) for p in (0.0, 0.015, 0.03, 0.3, 0.65, 1.0)]
    assert factors == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.5, 0.0])


def test_muon_makes_every_matrix_of_a_layer_semi_orthogonal() -> None:
    cfg = dataclasses.replace(TINY.model, num_layers=2, hidden_size=64)
    params = dense.init_params(jax.random.key(0), cfg, jnp.float32)
    updates = {
        "layers": [
            {name: w for name, w in layer.items() if w.ndim > 1} for layer in params["layers"]
        ]
    }
    layer = optimizer.orthogonalize(updates)["layers"][1]
    key = layer["wqkv"][:, :, -2].reshape(64, -1)
    up = layer["w_gate_up"][:, :, 1].reshape(64, -1)
    for matrix in (key, up, layer["wo"].reshape(-1, 64), layer["w_down"]):
        scale = max(1.0, matrix.shape[1] / matrix.shape[0]) ** 0.5
        values = np.linalg.svd(np.asarray(matrix), compute_uv=False) / scale
        assert values.max() < 1.3
        assert np.median(values) > 0.6


def test_an_exported_run_loads_like_any_checkpoint(whole_run, tmp_path) -> None:
    _, run = whole_run
    export.save_folder(run, TINY, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["SDARForCausalLM"]
    assert (config["mask_token_id"], config["block_size"], config["head_dim"]) == (1, 32, 16)
    loaded, _ = checkpoints.load_params(tmp_path)
    want = jax.tree.map(lambda w: np.asarray(jnp.asarray(w, jnp.bfloat16)), run["params"])
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), b), loaded, want)
    assert all(jax.tree.leaves(same))


class _OtherShapes:
    """A checkpoint manager as Orbax behaves where stored arrays have other shapes."""

    directory = "run/checkpoints"

    def latest_step(self) -> int:
        return 3

    def restore(self, *_: object, **__: object) -> None:
        raise ValueError("Requested shape: (8, 2, 2, 32) is not compatible with the stored shape")


def test_a_checkpoint_of_weights_that_lie_otherwise_is_refused() -> None:
    whole = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec())
    weights = {"w_gate_up": jnp.zeros((8, 2, 2, 32))}
    like = run_state.TrainState(weights, {"m": weights}, jnp.asarray(0, jnp.int32))
    with pytest.raises(ValueError, match=r"step 3 in run/checkpoints .* begin a run in another"):
        run_state.restore(cast(Any, _OtherShapes()), like, whole)
