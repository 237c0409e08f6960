"""Folders whose matrices are stored in 4 or 8 bits, written tensor by tensor."""

import json
from pathlib import Path

import numpy as np

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "packed.npz")
CASES = sorted({key.split("/")[0] for key in GOLDEN})


def write_safetensors(path, tensors):
    """Tensors by name, each its type in safetensors' words, its shape and its bytes."""
    header, start = {}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [start, start + len(data)],
        }
        start += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            file.write(data)


def tensors_of(case, stem):
    """The stored tensors of a golden case, under a module's name."""
    found = {}
    for key in GOLDEN:
        name, _, end = key.partition("/")
        if name == case and f"{key}:dtype" in GOLDEN and end != "want":
            data = GOLDEN[key]
            found[f"{stem}.{end}"] = (str(GOLDEN[f"{key}:dtype"]), data.shape[:-1], data.tobytes())
    return found


def config_of(case):
    return json.loads(str(GOLDEN[f"{case}/config"]))
