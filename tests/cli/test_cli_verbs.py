"""Proves the quiet verbs: `inspect`, `convert`, `info`, `train` do what they say and report it."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.cli import info, main
from dllm_jax.models.dense import param_shapes
from tests.cross_lowering import needs_mosaic

pytestmark = pytest.mark.usefixtures("no_compile_cache")


def test_inspect_reports_shapes_and_sizes(random_folder, capsys):
    assert main(["inspect", str(random_folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    leaves = jax.tree.leaves(param_shapes(dj.load(random_folder).config, "float32"))
    assert facts["num_params"] == sum(leaf.size for leaf in leaves)
    assert (facts["family"], facts["kind"], facts["dtype"]) == ("sdar", "hf", "float32")
    assert facts["defaults"]["block_size"] == 8
    assert facts["shapes"]["model.embed_tokens.weight"] == [512, 64]
    assert facts["problems"] == []
    assert main(["inspect", str(random_folder)]) == 0
    assert "no problems" in capsys.readouterr().out


def test_convert_keeps_every_bit(random_folder, capsys, tmp_path):
    target = tmp_path / "converted"
    assert main(["convert", str(random_folder), str(target), "--dtype", "float32"]) == 0
    reported = capsys.readouterr().out
    assert reported.startswith(f"{target}: ")
    assert " MB in " in reported
    first, again = dj.load(random_folder), dj.load(target)
    assert jax.tree.all(jax.tree.map(np.array_equal, first.params, again.params))
    assert main(["convert", str(random_folder), str(target), "--dtype", "bfloat16", "--force"]) == 0
    assert dj.load(target, dtype="auto").config == first.config


@needs_mosaic
def test_info_names_the_kernels_of_hopper(on_hopper):
    layer = info._layer()
    assert layer.startswith("mosaic here for 16-bit models: products of up to 1,024 rows, gate and")
    assert "norms, rotations; else xla" in layer
    assert "where nothing is sampled mosaic, 4,096 rows at a time, else xla" in info._readout()


def test_info_tells_what_runs_here(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["jax"] == jax.__version__
    assert set(facts["devices"]) == {str(d) for d in jax.devices()}
    for d in jax.devices():
        assert facts["devices"][str(d)].startswith(f"{d.device_kind} ({d.platform}), ")
    if jax.default_backend() == "cpu":
        assert (
            facts["kernels"]["paged_attention"]
            == "xla here (cudnn and mosaic: needs an NVIDIA GPU)"
        )
        assert "else grouped (mosaic needs an NVIDIA GPU" in facts["kernels"]["expert_ffn"]
        readout = facts["kernels"]["token_readout"]
        assert readout.endswith("(mosaic: needs an NVIDIA GPU of the Hopper kind)")
        assert facts["kernels"]["layer"].startswith("xla here (mosaic: needs an NVIDIA GPU")
    assert facts["models"]["builtin:tiny-sdar"].endswith("multi_bd, block 32, buffer 4")
    assert facts["models"]["builtin:tiny-qwen3"].endswith("ar, block 1, buffer 1")
    drafter = facts["models"]["builtin:tiny-qwen3-dflash"]
    assert drafter.endswith("a drafter (--draft) of blocks of 16")
    assert {"ar", "block_diffusion", "multi_bd"} <= set(facts["strategies"])
    assert main(["info"]) == 0
    assert "versions    python" in capsys.readouterr().out


def test_info_describes_a_strategy_field_by_field(capsys, tmp_path):
    """What it does, its source, and each field with range and default."""
    assert main(["info", "multi_bd", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["does"].startswith("Multi-block diffusion: ")
    assert facts["source"].startswith("MBD-LMs, algorithm 5")
    field = facts["fields"]["accept_threshold"]
    assert (field["default"], field["range"]) == (0.9, "a number from 0 up")
    assert field["about"].startswith("A token is accepted when its probability is above it")
    for name in info.collect()["strategies"]:
        assert main(["info", name]) == 0
        assert f"\n{name}\n" in f"\n{capsys.readouterr().out}"
    own = tmp_path / "my.py"
    own.write_text('def my_step(forward, state):\n    """Accept all."""\n')
    assert main(["info", f"{own}:my_step"]) == 0
    shown = capsys.readouterr().out
    assert "Accept all." in shown
    assert f"File:   {own}" in shown
    assert "block_size = none" in shown


def test_train_hands_on_only_what_was_given(monkeypatch):
    seen = []
    monkeypatch.setattr("dllm_jax.training.command.main", lambda *call, held: seen.append(call))
    assert main(["train", "--out", "run", "--steps", "50", "--muon-lr", "0.01"]) == 0
    argv = ["train", "dflash", "--out", "run", "--target", "t", "--target-layer-ids", "1,4"]
    assert main(argv) == 0
    assert seen == [
        ("sdar", "run", {"steps": 50, "muon_lr": 0.01}),
        ("dflash", "run", {"target": "t", "target_layer_ids": (1, 4)}),
    ]


def test_every_flag_of_train_changes_the_run_it_is_of(monkeypatch, tmp_path):
    """Its config, or what is done with it: none is ignored, and none is of no kind."""
    from dllm_jax.cli.train import KINDS, OPTIONS
    from dllm_jax.training import command

    seen = []

    def train(config, folder, *, held, **how):
        seen.append((config, how))
        return {"done": True}

    def asked(kind, *words):
        needed = {"dflash": ["--target", "t"], "sft": ["--data", "d"]}.get(kind, [])
        target = [] if {*needed[:1]} & {*words} else needed
        seen.clear()
        assert main(["train", kind, "--out", str(tmp_path), *target, *words]) == 0
        return tuple(seen)

    for kind in KINDS:
        monkeypatch.setattr(getattr(command, kind), "train", train)
        finish = lambda run, config, out, count: seen.append(count)  # noqa: E731
        monkeypatch.setattr(command, f"_finish_{kind}", finish)
    assert tuple(command.KINDS) == KINDS
    for kind in KINDS:
        usual = asked(kind)
        for flag, _, kinds, _ in OPTIONS:
            if kind in kinds:
                words = {"--greedy-share": "0.25", "--problem-family": "ages", "--family": "ages"}
                words |= {"--objective": "full", "--dtype": "float32"}
                if command.KINDS[kind].compute_dtype == "float32":
                    words["--dtype"] = "bfloat16"
                value = words.get(flag, "7")
                assert asked(kind, flag, value) != usual, flag
    assert asked("ar", "--family", "ages") == asked("ar", "--problem-family", "ages")
    assert asked("sft", "--family", "a.py:B")[0][0].family == "a.py:B"
    assert main(["train", "--out", str(tmp_path), "--family", "a.py:B"]) == 2
    assert command.make_config("ar", {}) == command.KINDS["ar"]
    rows = {"seed": 7, "batch_size": 8}
    config = dataclasses.asdict(command.make_config("ar", rows))
    assert {name: config["data"][name] for name in rows} == rows
    assert config["seed"] == 7


@pytest.mark.slow
def test_the_command_decodes_as_here_with_users_settings(random_folder, tmp_path, capsys):
    """XLA's own flags, not conftest's; the programs are kept for the next start."""
    env = {name: os.environ[name] for name in ("PATH", "JAX_PLATFORMS")}
    env["XDG_CACHE_HOME"] = str(tmp_path)
    argv = ["generate", "Ann has 3 pens.", "--max-tokens", "20", "--model", str(random_folder)]
    command = [sys.executable, "-m", "dllm_jax.cli", *argv, "--json"]
    done = subprocess.run(command, check=True, env=env, text=True, capture_output=True)
    assert any((tmp_path / "dllm-jax" / "jax").glob("*-cache"))
    assert main([*argv, "--json"]) == 0
    here, there = json.loads(capsys.readouterr().out), json.loads(done.stdout)
    assert len(here["token_ids"]) > 10
    assert there["token_ids"] == here["token_ids"]


def test_bar_of_bytes_for_large_folders_only(random_folder, monkeypatch):
    from argparse import Namespace

    from dllm_jax.cli import sources

    bars = []

    class Bar:
        def __init__(self, total, **_):
            self.total, self.n, self.closed = total, 0, False
            bars.append(self)

        def update(self, more):
            self.n += more

        def close(self):
            self.closed = True

    monkeypatch.setattr("tqdm.tqdm", Bar)
    unset = ("revision", "lora", "quantization", "kv_cache_dtype", "tokenizer", "family")
    args = Namespace(model=str(random_folder), dtype="auto", quantize_head=False)
    vars(args).update(dict.fromkeys(unset))
    sources.load_model(args)
    assert bars == []
    monkeypatch.setattr(sources, "BAR_FROM", 1000)
    model = sources.load_model(args)
    (bar,) = bars
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert (bar.n, bar.total, bar.closed) == (size, size, True)


@pytest.mark.long
def test_output_to_a_closed_pipe_is_no_traceback(tmp_path):
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = f"{sys.executable} -m dllm_jax.cli inspect builtin:tiny-sdar | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.startswith("source ")
    assert done.stderr == ""
