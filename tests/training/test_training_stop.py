"""Proves that a run that is stopped loses no step: Ctrl-C, SIGTERM, a full disk.

In-process, the loop runs a made-up task, so that only its order of steps and checkpoints is tested.
The test with a real process stops `dllm-jax train` by both signals and continues it.
Issue 23, item 11.
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.convert import converted
from dllm_jax.training import loop, run_folder, run_state, stream

pytestmark = pytest.mark.usefixtures("promotion")
CONFIG = loop.RunConfig(num_steps=6, evals=0, log_every=1, compute_dtype="float32")


def a_task(score=lambda params, rows: []) -> loop.Task:
    """The mean of one number, from batches that count."""

    def loss(params, frozen, batch, key):
        return jnp.sum((params["embed"] - batch["x"]) ** 2), {}

    def batches(first, workers):
        while True:
            yield {"x": np.full((jax.device_count(), 1), first, np.float32)}
            first += 1

    return loop.Task(
        init=lambda key: {"embed": jnp.zeros((1,))}, loss=loss, batches=batches, score=score
    )


class Signal:
    """Raises KeyboardInterrupt at the end of the `number`-th held part."""

    def __init__(self, number: int):
        self.left = number

    @contextlib.contextmanager
    def held(self):
        yield
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_signal_leaves_a_checkpoint_of_the_last_whole_step(tmp_path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = loop.run(CONFIG, a_task(), tmp_path / "whole", say=lambda _: None)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        loop.run(CONFIG, a_task(), tmp_path / "cut", held=Signal(4).held, say=said.append)
    assert run_folder.latest_step(tmp_path / "cut") == 4
    run = loop.run(CONFIG, a_task(), tmp_path / "cut", say=said.append)
    assert any("resumed at step 4" in line for line in said)
    assert (run["step"], run["done"]) == (6, True)
    np.testing.assert_array_equal(run["params"]["embed"], whole["params"]["embed"])


def test_a_signal_during_an_evaluation_leaves_a_checkpoint(tmp_path) -> None:
    def score(params, rows):
        raise KeyboardInterrupt

    config = loop.RunConfig(num_steps=6, evals=2, log_every=1, compute_dtype="float32")
    with pytest.raises(KeyboardInterrupt):
        loop.run(config, a_task(score), tmp_path, say=lambda _: None)
    assert run_folder.latest_step(tmp_path) == 3


def test_the_log_is_in_columns(tmp_path) -> None:
    lines: list[str] = []
    config = loop.RunConfig(num_steps=12, evals=0, log_every=1, compute_dtype="float32")
    loop.run(config, a_task(), tmp_path, say=lines.append)
    for word in ("%", "steps/s", "loss", "gradient norm"):
        assert len({line.index(word) for line in lines}) == 1, word
    assert lines[0].startswith("step 1 ")
    assert lines[-1].startswith("step 12 ")


class FullDisk:
    """A checkpoint manager as Orbax behaves where the disk is full."""

    directory = "run/checkpoints"

    def save(self, *_: object, **__: object) -> None:
        print("Traceback (most recent call last): ...", file=sys.stderr)  # of each other write
        raise ValueError(
            "RESOURCE_EXHAUSTED: Error writing local file\n"
            f"{os.strerror(errno.ENOSPC)} [source locations=...]\n" * 40
        )


def test_a_full_disk_is_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(converted, "_SETTLE_S", 0.0)
    state = run_state.TrainState({}, {}, jnp.asarray(7, jnp.int32))
    with pytest.raises(OSError, match=r"step 7 .* run/checkpoints \(the disk is full\)") as caught:
        run_state.save(cast(Any, FullDisk()), state, 1.0)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_one_family_is_all_of_a_stream() -> None:
    tokenizer = stream.make_tokenizer(768)
    config = stream.StreamConfig(
        batch_size=4, lengths=(52, 52), room=1, example_share=0.0, family="sums"
    )
    batch = next(stream.batches(config, tokenizer))
    for row, length in zip(batch["tokens"], batch["length"], strict=True):
        text = tokenizer.decode(row[:length].tolist())
        first, plus, second, equals, total = text.split("?")[1].split()[:5]
        assert (plus, equals) == ("+", "=")
        assert int(first) + int(second) == int(total.rstrip("."))


TRAIN = (
    "train --family sums --steps 100000 --batch-size 8 --row-tokens 52 --layers 1 --hidden-size 32 "
    "--ffn-size 32 --dtype float32 --evals 0 --workers 1 --log-every 1"
)


@pytest.mark.slow
def test_a_real_process_ends_with_a_checkpoint_and_continues(tmp_path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    env |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache"), "TERM": "dumb"}
    env |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    out, before = tmp_path / "run", 0
    command = [sys.executable, "-u", "-m", "dllm_jax.cli", *TRAIN.split(), "--out", str(out)]
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
            start_new_session=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            lines = []
            for line in child.stdout:
                lines.append(line)
                if line.startswith(f"step {before + 20} "):
                    break
            # A terminal's Ctrl-C reaches the workers too; `kill` reaches the command alone.
            if number == signal.SIGINT:
                os.killpg(child.pid, number)
            else:
                child.send_signal(number)
            _, errors = child.communicate(timeout=120)
        step = run_folder.latest_step(out)
        assert child.returncode == 128 + number
        assert step is not None
        assert step >= before + 20
        wanted = (
            f"error: interrupted; {out} holds step {step}; the same command continues from there"
        )
        assert errors.strip().splitlines()[-1:] == [wanted], errors
        assert "Traceback" not in errors
        if before:
            assert f"resumed at step {before}," in "".join(lines)
        before = step
    logged = [json.loads(line) for line in Path(out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == sorted({line["step"] for line in logged})
