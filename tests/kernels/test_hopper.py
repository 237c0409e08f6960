"""Proves that this JAX has every name of Mosaic that we use, all of which stand in one folder.

Names are read from the source of pallas_kernels/hopper, so that none is forgotten: what a file
imports from JAX, and each dotted name that begins with it.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import jax
import pytest

from dllm_jax.kernels import hopper

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "pallas_kernels" / "hopper"
PACKAGES = ("dllm_jax", "strategies", "pallas_kernels", "checkpoints_convert")
PRIVATE = ("jax._src", "jax.experimental.mosaic", "jax.extend.mlir", "jaxlib.mlir")
# What is used of their instances, which no import names.
MEMBERS = {
    "FragmentedArray": "astype is_signed layout mlir_dtype registers shape store_tiled"
    " store_untiled to_layout transfer_tiled",
    "TiledLayout": "registers_shape",
    "WGMMAAccumulator": "zero",
}
FIELDS = {"FragmentedArray": "_registers _layout _is_signed", "WGMMAAccumulator": "_value"}


def imported(tree):
    """Local name -> dotted name of what comes from JAX."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname and a.name[:3] == "jax"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax."):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def dotted(node):
    """`a.b.c` of an expression, or None."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def names(text):
    """Dotted names of JAX that a source uses."""
    tree = ast.parse(text)
    aliases = imported(tree)
    chains = [dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    firsts = [(chain, *chain.partition(".")[::2]) for chain in chains if chain]
    return {*aliases.values()} | {f"{aliases[a]}.{b}" for _, a, b in firsts if a in aliases}


def exists(name):
    """Whether JAX has it: a module, or what a module or its members hold."""
    module, rest = name, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for part in rest:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.skipif(hopper.unsupported_version() is not None, reason="older JAX lacks some")
def test_this_jax_has_every_name_of_mosaic_that_we_use():
    from jax.experimental.mosaic import gpu

    used = {path: names(path.read_text("utf-8")) for path in FOLDER.glob("*.py")}
    assert "jax.experimental.mosaic.gpu.wgmma.wgmma_m64" in used[FOLDER / "products.py"]
    assert "jax.experimental.mosaic.gpu.utils.get_cluster_ref" in used[FOLDER / "cluster.py"]
    lost = [f"{n} of {path.name}" for path, every in used.items() for n in every if not exists(n)]
    for kind, members in MEMBERS.items():
        lost += [f"{kind}.{m}" for m in members.split() if not hasattr(getattr(gpu, kind), m)]
    for kind, fields in FIELDS.items():
        there = inspect.signature(getattr(gpu, kind)).parameters
        lost += [f"{kind}.{field}" for field in fields.split() if field not in there]
    assert not lost, f"jax {jax.__version__} lacks what pallas_kernels/hopper uses: {lost}"


def test_a_name_that_jax_lacks_is_found():
    text = "from jax.experimental.mosaic import gpu as mgpu\nmgpu.utils.gone(mgpu.utils.c(1))\n"
    lost = [name for name in names(text) if not exists(name)]
    assert lost == ["jax.experimental.mosaic.gpu.utils.gone"]


def test_private_names_of_jax_stand_in_one_folder():
    """Of every package; `inline_mgpu` is the way from Pallas into Mosaic."""
    found = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text("utf-8")
        if FOLDER not in path.parents and re.search("_src|mosaic|mlir", text):
            used = sorted(names(text))
            private = [n for n in used if n.startswith(PRIVATE) or n.endswith(".inline_mgpu")]
            found += [f"{path.relative_to(ROOT)}: {name}" for name in private]
    assert found == []
