"""Checks of a family from outside, on a small checkpoint that is drawn here.

config.json -> shapes -> tensors by the family's names -> folder -> `load` -> logits
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from dllm_jax.convert.export import write_folder
from dllm_jax.convert.rules import Placement, find, placements, tensor_shapes
from dllm_jax.loading.load import load, load_family
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import parse_config
from dllm_jax.models.family import Family

Tensors = Mapping[str, np.ndarray]
Reference = Callable[[Tensors, Mapping[str, Any], np.ndarray, np.ndarray], np.ndarray]

_TOKENS, _BLOCK = 10, 4  # a text that ends inside a block
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def check_family(
    family: Family | str,
    config: Mapping[str, Any],
    reference: Reference | None = None,
    *,
    tolerance: float = 5e-5,
    seed: int = 0,
) -> None:
    """Draw a checkpoint of a family, load it, and hold it to a reference.

    The config is one that the family reads; each part of each parameter is filled by one tensor;
    the tensors that are loaded come back bit for bit; logits are the reference's under full,
    causal and block-causal masks.

    Args:
        config: A small `config.json`.
        reference: `(tensors, config, ids [T], visible [T, T]) -> logits [T, V]`, in NumPy: row i is
            the network's output at token i, `visible[i, j]` whether i sees j. None: logits are not
            checked.
        tolerance: Of float32 logits.
        seed: Of tensors and ids.

    Raises:
        AssertionError: With everything that does not hold.
        ConfigError: The config is refused, with every reason.
    """
    row = load_family(family)
    cfg = parse_config(config, family=row).config
    shapes = arch_of(cfg).param_shapes(cfg, np.float32)
    places = placements(row.table.rules_for(), shapes)
    problems = list(_badly_filled(places, shapes))
    if problems:  # then nothing can be loaded
        raise AssertionError(_text(row, problems))
    rng = np.random.default_rng(seed)
    tensors = {name: _drawn(rng, shape) for name, shape in tensor_shapes(places).items()}
    with tempfile.TemporaryDirectory(prefix="dllm-jax-") as made:
        folder, again = Path(made, "given"), Path(made, "again")
        folder.mkdir()
        save_file(tensors, folder / _WEIGHTS)
        (folder / _CONFIG).write_text(json.dumps(config), encoding="utf-8")
        model = load(folder, "float32", family=row)
        write_folder(model.params, shapes, again, row.table, config)
        held = load_file(again / _WEIGHTS)
    lost = [name for name in tensors if not np.array_equal(tensors[name], held[name])]
    problems += [f"{name} does not come back as it was" for name in lost]
    if reference is not None:
        ids = rng.integers(0, cfg.vocab_size, _TOKENS)
        problems += _differences(model, reference, tensors, config, ids, tolerance)
    if problems:
        raise AssertionError(_text(row, problems))


def _text(family: Family, problems: Sequence[str]) -> str:
    return f"family {family.name!r}: {'; '.join(problems)}"


def _badly_filled(places: Sequence[Placement], shapes: Any) -> Iterator[str]:
    """Leaves with elements that no tensor fills, or two."""
    leaves: Any = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.int8), shapes)
    for place in places:
        part = place.part.view(find(leaves, place.path))
        part += 1
    for path, count in jax.tree_util.tree_leaves_with_path(leaves):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        for wrong, what in ((count == 0, "no tensor"), (count > 1, "several tensors")):
            if wrong.any():
                yield f"{int(wrong.sum())} of {count.size} elements of {name} have {what}"


def _drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A matrix that keeps the size of a row; a norm, or a bias, near 1."""
    drawn = rng.normal(size=shape)
    return (1 + 0.2 * drawn if len(shape) == 1 else drawn * shape[-1] ** -0.5).astype(np.float32)


def _differences(
    model: Any,
    reference: Reference,
    tensors: Tensors,
    config: Mapping[str, Any],
    ids: np.ndarray,
    tolerance: float,
) -> Iterator[str]:
    query, key = np.indices((len(ids), len(ids)))
    masks = {
        "full": key >= 0,
        "causal": key <= query,
        "block_causal": key // _BLOCK <= query // _BLOCK,
    }
    for kind, visible in masks.items():
        wanted = np.asarray(reference(tensors, config, ids, visible))
        with jax.default_matmul_precision("highest"):
            found = np.asarray(model.logits(ids[None], kind, block_size=_BLOCK)[0])
        if found.shape != wanted.shape:
            yield f"logits have shape {found.shape}, the reference's {wanted.shape}"
            return
        worst = float(np.abs(found - wanted).max())
        if not worst <= tolerance:  # NaN is none either
            where = int(np.abs(found - wanted).max(axis=1).argmax())
            yield f"logits under a {kind} mask differ by {worst:.1e}, most in row {where}"
