"""Conversion holds the result and little more: anonymous memory is watched from outside.

A child process imports everything and then reads a 200 MB checkpoint. Above the idle child it may
reach the result plus twice the largest tensor.
"""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dllm_jax.convert import export_hf
from dllm_jax.convert.rules import placements
from dllm_jax.convert.tensor_names import table_of
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.moe import MoEConfig

pytestmark = pytest.mark.long

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
EXPERTS = MoEConfig(
    vocab_size=32768,
    hidden_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=512,
    num_experts=48,
    experts_per_token=4,
    expert_size=768,
    moe_layers=(True, True, True),
    mask_token_id=5,
)
CHILD = """
import os
import sys
import jax
import orbax.checkpoint
from dllm_jax.convert import convert, load_params
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # scratch memory is by the thread
print("ready", flush=True)
sys.stdin.readline()
result = {call}
print("done", flush=True)
sys.stdin.readline()
"""


def write(cfg, folder, family):
    tile = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    shapes = arch_of(cfg).param_shapes(cfg)
    params = jax.tree.map(lambda leaf: np.resize(tile, leaf.shape), shapes)
    return export_hf(params, cfg, folder, family=family)


def write_adapter(folder):
    """A LoRA adapter of rank 16 for every projection of attention and of the feed-forward half."""
    folder.mkdir()
    factors = {}
    for place in placements(table_of("sdar").rules_for(), arch_of(CFG).param_shapes(CFG)):
        if "_proj" in place.name:
            name, (rows, columns) = place.name.removesuffix(".weight"), place.shape
            factors[f"{name}.lora_A.weight"] = np.full((16, columns), 0.01, np.float32)
            factors[f"{name}.lora_B.weight"] = np.full((rows, 16), 0.01, np.float32)
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 16}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_is_the_result_and_two_tensors(tmp_path):
    dense, routed = (str(tmp_path / name) for name in ("dense", "routed"))
    adapter, converted = str(tmp_path / "adapter"), str(tmp_path / "converted")
    write(CFG, Path(dense), "sdar")
    write(EXPERTS, Path(routed), "sdar_moe")
    write_adapter(Path(adapter))
    for cfg, call in (
        (CFG, f"load_params({dense!r})"),
        (CFG, f"load_params({dense!r}, lora={adapter!r})"),
        (CFG, f"convert({dense!r}, {converted!r})"),
        (CFG, f"load_params({converted!r})"),
        (EXPERTS, f"load_params({routed!r})"),
    ):
        leaves = jax.tree.leaves(arch_of(cfg).param_shapes(cfg))
        result = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        largest = cfg.vocab_size * cfg.hidden_size * 2
        assert result > 4 * largest  # else a second copy of the result could pass
        most = peak(call)
        # The idle process may hold a little freed memory, which is used first.
        assert 0.95 * result <= most <= result + 2 * largest, f"{call}: {most}, result {result}"
        print(f"{call}: result + {(most - result) / largest:.2f} tensors")
