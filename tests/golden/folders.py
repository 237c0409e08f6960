"""Checkpoint folders for tests, taken from the golden ones and then spoilt or rewritten.

Reads and writes files with safetensors and json alone, so that no code under test is used.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent
INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def edit_config(folder: Path, **changes: Any) -> None:
    """Set entries of `config.json`; `...` removes one."""
    config = {**read_config(folder), **changes}
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of every file of a folder."""
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def write_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """All tensors as the folder's one file, without an index."""
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink(missing_ok=True)
    contiguous = {name: np.array(tensor, order="C") for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")


def copy_golden(name: str, to: Path, *, single: bool = False) -> Path:
    """A private copy of a golden folder; `single` puts its shards into one file."""
    shutil.copytree(GOLDEN / name, to)
    if single:
        write_tensors(to, read_tensors(to))
    return to
