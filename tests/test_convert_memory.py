"""Conversion holds the result and little more: anonymous memory is watched from outside.

A child process imports everything, says that it is ready, and then reads a 200 MB checkpoint
(directly, into a converted folder, and from that folder). The parent samples the child's anonymous
memory all the while. Above the idle child it may reach the result plus twice the largest tensor.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import export_hf
from dllm_jax.models.dense import DenseConfig, param_shapes

CFG = DenseConfig(
    vocab_size=32768,
    hidden_size=768,
    num_layers=5,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=4096,
    mask_token_id=5,
)
CHILD = """
import sys
import jax
import orbax.checkpoint
from checkpoints_convert import convert, load_params
print("ready", flush=True)
sys.stdin.readline()
result = {call}
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tile = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    shapes = param_shapes(CFG)
    params = jax.tree.map(lambda leaf: np.resize(tile, leaf.shape), shapes)
    return export_hf(params, CFG, tmp_path_factory.mktemp("large") / "hf")


def anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(s.split()[1]) << 10 for s in status.splitlines() if s.startswith("RssAnon"))


def peak(call: str) -> int:
    """Highest anonymous memory of `call` in a process of its own, above the idle process."""
    command = [sys.executable, "-c", CHILD.format(call=call)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        idle = most = anonymous_bytes(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(child.stdout.readline()))
        reader.start()
        while reader.is_alive():
            most = max(most, anonymous_bytes(child.pid))
            time.sleep(0.001)
        assert said == ["done\n"]
        child.stdin.write("\n")
    return most - idle


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_is_the_result_and_two_tensors(folder, tmp_path):
    leaves = jax.tree.leaves(param_shapes(CFG))
    result = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    largest = CFG.vocab_size * CFG.hidden_size * 2
    assert result > 4 * largest  # else a second copy of the result could pass
    converted = tmp_path / "converted"
    peaks = {
        call: peak(call)
        for call in (
            f"load_params({str(folder)!r})",
            f"convert({str(folder)!r}, {str(converted)!r})",
            f"load_params({str(converted)!r})",
        )
    }
    print({call: f"result + {(most - result) / largest:.2f}" for call, most in peaks.items()})
    for call, most in peaks.items():
        most_allowed = result + 2 * largest
        # The idle process may hold a little freed memory, which is used first.
        assert 0.95 * result <= most <= most_allowed, f"{call}: {most} of {most_allowed}"
