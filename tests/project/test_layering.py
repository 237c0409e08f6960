"""Proves that imports go down the floors of the house (docs/adr/0016), by reading the source.

The table below is the whole rule. The walker is itself tested on sources that break the rule, so a
misspelt table cannot pass. No module of the project is imported here.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

# A module imports its own room and rooms on lower floors.
FLOORS = {
    "cli": 12,
    "bench": 11,
    "serve": 11,
    "training": 10,
    "tasks": 9,
    "trace": 9,
    "api": 8,
    "compile": 7,
    "cluster": 6,
    "runner": 5,
    "loading": 4,
    "engine": 4,
    "scoring": 3,
    "models": 2,
    "convert": 1,
    "strategies": 0,
    "structured": 0,
    "kernels": 0,
}
# Rooms that import less than their floor allows.
ONLY = {
    "engine": (),
    "models": ("convert", "kernels"),
    "convert": (),
    "strategies": (),
    "structured": (),
    "kernels": (),
}
# The only third parties of a room.
THIRD_PARTIES = {
    "engine": {"numpy"},
    "strategies": {"jax", "flax", "jaxtyping", "numpy"},
    "structured": {"numpy"},
    "kernels": {"jax", "flax", "jaxtyping", "numpy"},
    "models": {"jax", "jaxtyping", "numpy"},
}
# Rooms whose folder is a top-level package of its own.
FOLDERS = {
    "strategies": "strategies",
    "kernels": "pallas_kernels",
    "convert": "checkpoints_convert",
}


def room_of(module: str) -> str | None:
    """The room in a dotted name, None for the face of the package."""
    parts = module.split(".")
    if parts[0] in FOLDERS.values():
        return next(room for room, folder in FOLDERS.items() if folder == parts[0])
    return parts[1] if parts[0] == "dllm_jax" and len(parts) > 1 else None


def sources() -> dict[str, tuple[Path, str]]:
    """Module name -> (path, text) of every file of ours."""
    found = {}
    for room in FLOORS:
        folder = ROOT / FOLDERS[room] if room in FOLDERS else ROOT / "dllm_jax" / room
        for path in sorted(folder.rglob("*.py")):
            parts = ("dllm_jax", room, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path, path.read_text("utf-8")
    return found


def imports(module: str, text: str, is_package: bool = False) -> Iterator[str]:
    """Dotted names that a module imports when it runs; `from a import b` gives `a.b`."""
    tree = ast.parse(text)
    hidden: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            # Types are no imports; nor is the sharing of modules (docs/adr/0016).
            if test.endswith("TYPE_CHECKING") or test.startswith("__name__ == "):
                hidden.update(child for part in node.body for child in ast.walk(part))
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                anchor = parts[: len(parts) - node.level + is_package]
                base = ".".join([*anchor, base]) if base else ".".join(anchor)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def breaches(module: str, text: str, is_package: bool = False) -> list[str]:
    """Every rule that a module breaks, as sentences."""
    mine = room_of(module)
    assert mine is not None
    problems = []
    for name in imports(module, text, is_package):
        top, room = name.split(".")[0], room_of(name)
        if room in FLOORS:
            allowed = ONLY.get(mine, FLOORS)
            if room != mine and (room not in allowed or FLOORS[room] >= FLOORS[mine]):
                problems.append(f"{module} imports {name}: {room} is not below {mine}")
            if mine == "strategies" and room == mine:
                problems += algorithm_breach(module, name)
        elif top == "dllm_jax":
            if mine in ONLY:
                problems.append(f"{module} imports {name}: the face is above {mine}")
        elif top in ("tests", "torch", "hypothesis", "pytest", "benchmarks"):
            problems.append(f"{module} imports {name}: that is for tests alone")
        elif top not in sys.stdlib_module_names and top not in THIRD_PARTIES.get(mine, {top}):
            problems.append(f"{module} imports {name}: {mine} may import {THIRD_PARTIES[mine]}")
    return problems


def algorithm_breach(module: str, name: str) -> list[str]:
    """An algorithm imports the machinery alone, and the machinery imports no algorithm."""
    of, imported = module.split(".")[2:3], name.split(".")[2:3]
    if not of or of == ["testing"] or imported == ["core"] or (of == imported and of != ["core"]):
        return []
    return [f"{module} imports {name}: only strategies.core may be imported there"]


def project() -> dict[str, list[str]]:
    """Every module with the modules of ours that it imports, scripts of benchmarks/ included."""
    files = sources()
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        files[path.stem] = path, path.read_text("utf-8")
    edges = {}
    for module, (path, text) in files.items():
        found = set()
        for name in imports(module, text, path.name == "__init__.py"):
            target = name if name in files else name.rpartition(".")[0]
            if target in files and target != module:
                found.add(target)
        edges[module] = sorted(found)
    return edges


def test_every_folder_is_a_room():
    here = {path.parent.name for path in (ROOT / "dllm_jax").glob("*/__init__.py")}
    assert here == {*FLOORS}
    assert {path.name for path in (ROOT / "dllm_jax").glob("*.py")} == {
        "__init__.py",
        "lm_eval.py",  # a command of its own, above all rooms
        "short_names.py",
    }
    for room, folder in FOLDERS.items():
        assert (ROOT / "dllm_jax" / room).resolve() == ROOT / folder


@pytest.mark.parametrize("room", FLOORS)
def test_imports_go_down(room):
    problems = [
        problem
        for module, (path, text) in sources().items()
        if room_of(module) == room
        for problem in breaches(module, text, path.name == "__init__.py")
    ]
    assert not problems, "\n".join(problems)


def test_the_front_of_the_server_has_no_jax():
    """Only the engine process, `serve/child`, imports it, and what needs it."""
    heavy = {"jax", "flax", "numpy", "dllm_jax.api", "dllm_jax.runner", "dllm_jax.models"}
    heavy |= {"dllm_jax.serve.child"}
    for path in (ROOT / "dllm_jax" / "serve").glob("*.py"):
        names = imports(f"dllm_jax.serve.{path.stem}", path.read_text("utf-8"))
        # Questions as data, for both sides of the pipe; its own imports are light as well.
        names = [n for n in names if not n.startswith("dllm_jax.api.questions")]
        assert not [n for n in names if any(f"{n}.".startswith(f"{h}.") for h in heavy)], path
    questions = (ROOT / "dllm_jax" / "api" / "questions.py").read_text("utf-8")
    assert not [n for n in imports("dllm_jax.api.questions", questions) if n.split(".")[0] == "jax"]


def test_no_files_import_each_other_in_a_circle():
    graphlib.TopologicalSorter(project()).prepare()


BREACHES = [
    ("strategies.mine", "import dllm_jax"),
    ("strategies.mine", "from dllm_jax.kernels import paged_attention"),
    ("strategies.mine", "def f():\n    import checkpoints_convert.sdar"),
    ("strategies.multi_bd", "from .block_diffusion import BlockDiffusion"),
    ("strategies.core.blocks", "from ..multi_bd import MultiBD"),
    ("strategies.core.blocks", "import torch"),
    ("kernels.kv_write", "from strategies import state"),
    ("convert.sdar", "from dllm_jax.loading import load"),
    ("models.dense", "from dllm_jax.runner.cells import Cells"),
    ("models.dense", "from dllm_jax.strategies import state"),
    ("engine.engine", "import jax"),
    ("engine.engine", "from dllm_jax.models import dense"),
    ("runner.forward", "from dllm_jax.api.generate import generate"),
    ("tasks.evaluate", "from dllm_jax.trace import page"),
    ("api.llm", "from dllm_jax.cli import main"),
    ("serve.app", "from dllm_jax.cli import main"),
    ("api.llm", "from dllm_jax.serve import pipe"),
]
KEPT = [
    ("api.generate", "from dllm_jax.strategies.core import blocks"),
    ("cli.generate", "from dllm_jax.api.generate import generate"),
    ("models.moe", "from dllm_jax.kernels.expert_ffn import expert_ffn"),
    ("strategies.multi_bd", "from .core import blocks, sampling"),
    ("strategies.core.blocks", "from .state import DecodeState"),
    ("engine.engine", "import numpy\nfrom dllm_jax.engine import pages"),
    ("strategies.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dllm_jax"),
]


@pytest.mark.parametrize(("module", "text"), BREACHES)
def test_walker_sees_a_breach(module, text):
    assert breaches(f"dllm_jax.{module}", text)


@pytest.mark.parametrize(("module", "text"), KEPT)
def test_walker_lets_the_rest_pass(module, text):
    assert not breaches(f"dllm_jax.{module}", text)
