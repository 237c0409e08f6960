"""Reads a folder of `dllm-jax convert --quantize fp8` with transformers and compressed-tensors.

    dllm-jax convert builtin:tiny-sdar /tmp/tiny-fp8 --quantize fp8
    /tmp/ct/bin/python tests/golden/check_fp8_folder.py dllm_jax/builtin/tiny-sdar /tmp/tiny-fp8

The environment is that of `make_packed_golden.py`. SDAR's network is Qwen3's, so the class is set
to that one. Every matrix that the package makes is compared with the numbers of the file times
their scales, bit for bit, and the logits of a causal text with those of the source.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM


def logits(folder, ids):
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        path = Path(copy) / "config.json"
        config = json.loads(path.read_text())
        config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        config.pop("auto_map", None)
        path.write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
        print(type(model.model.layers[0].mlp.down_proj).__name__, model.config.torch_dtype)
        print(getattr(model.config, "quantization_config", "no quantization_config"))
        found = model(ids).logits.float()  # the package widens matrices when they are first used
        with safe_open(Path(copy) / "model.safetensors", "pt") as file:
            names = [name for name in file.keys() if f"{name}_scale" in file.keys()]  # noqa: SIM118
            for name in names:
                want = file.get_tensor(name).float() * file.get_tensor(f"{name}_scale").float()
                assert torch.equal(model.get_parameter(name).float(), want), name
        print(f"{len(names)} matrices are those of the file")
        return found


def main():
    ids = torch.arange(5, 69)[None]
    with torch.no_grad():
        want, got = (logits(folder, ids) for folder in sys.argv[1:3])
    error = float((got - want).square().mean().sqrt() / want.std())
    same = float((got.argmax(-1) == want.argmax(-1)).float().mean())
    print(f"error {error:.4f} of the logits' spread, first choice the same in {same:.3f}")
    assert 0 < error < 0.25  # rows in 8 bits too: 0.15 of tiny-sdar, 0.16 by our own forms


if __name__ == "__main__":
    main()
