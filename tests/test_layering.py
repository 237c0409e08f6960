"""Proves the import direction of the four packages (docs/adr/0002), by reading the source.

Each rule is a table below; the walker is itself tested on sources that break the rules, so an
empty or misspelt table cannot pass for a clean project. No project module is imported here.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("dllm_jax", "strategies", "pallas_kernels", "checkpoints_convert")

# package -> what of ours it may import, by dotted prefix
PACKAGE_MAY = {
    "dllm_jax": OURS,
    "strategies": ("strategies",),
    "pallas_kernels": ("pallas_kernels",),
    "checkpoints_convert": ("checkpoints_convert", "dllm_jax.models"),
}

# inside dllm_jax: the lower a layer, the smaller its number; a module imports its own package and
# layers below, never one beside it or above. Every module must be named here.
LAYERS = {
    "dllm_jax.models": 0,
    "dllm_jax.requests": 0,
    "dllm_jax.facts": 0,
    "dllm_jax.pages": 0,
    "dllm_jax.text": 0,
    "dllm_jax.async_dispatch": 0,
    "dllm_jax.compile_cache": 0,
    "dllm_jax.memory": 0,
    "dllm_jax.cache": 1,
    "dllm_jax.readout": 1,
    "dllm_jax.tokenization": 1,
    "dllm_jax.scheduler": 1,
    "dllm_jax.warming": 1,
    "dllm_jax.cost": 4,
    "dllm_jax.model": 2,
    "dllm_jax.drafts": 3,
    "dllm_jax.intake": 2,
    "dllm_jax.pass_time": 3,
    "dllm_jax.planning": 2,
    "dllm_jax.forward": 3,
    "dllm_jax.hub_errors": 0,
    "dllm_jax.hub_transfer": 0,
    "dllm_jax.hub": 1,
    "dllm_jax.hub_headers": 2,
    "dllm_jax.chat": 3,
    "dllm_jax.defaults": 4,
    "dllm_jax.sources": 3,
    "dllm_jax.infilling": 3,
    "dllm_jax.loading": 4,
    "dllm_jax.reporting": 3,
    "dllm_jax.decode": 4,
    "dllm_jax.engine": 4,
    "dllm_jax.sharing": 5,
    "dllm_jax.sizing": 4,
    "dllm_jax.words": 4,
    "dllm_jax.programs": 5,
    "dllm_jax.device": 6,
    "dllm_jax.generation": 5,
    "dllm_jax.snapshot": 7,
    "dllm_jax.trajectory": 6,
    "dllm_jax.trace": 7,
    "dllm_jax.startup": 7,
    "dllm_jax.training": 6,
    "dllm_jax.llm": 8,
    "dllm_jax.evaluate": 7,
    "dllm_jax.bench": 9,
    "dllm_jax.cli": 10,
}

# inside strategies: the machinery, which imports no algorithm, then algorithms, which import
# nothing but the machinery.
STRATEGY_MACHINERY = (
    "state",
    "protocol",
    "resolve",
    "driver",
    "random",
    "random_world",
    "random_requests",
    "blocks",
    "block_rewrite",
    "sampling",
    "token_merge",
    "drafting",
    "dual_cache",
    "remasking",
    "recording",
)

# third parties a package may import; the rest of its imports is the standard library or ours
THIRD_PARTIES = {
    "strategies": ("jax", "flax", "jaxtyping", "numpy"),
    "pallas_kernels": ("jax", "flax", "jaxtyping", "numpy"),
    "checkpoints_convert": (
        "jax",
        "numpy",
        "ml_dtypes",
        "safetensors",
        "orbax",
        "tensorstore",
        "tqdm",
    ),
    "dllm_jax.models": ("jax", "jaxtyping", "numpy"),
    # The host loop is plain Python over ints.
    "dllm_jax.requests": (),
    "dllm_jax.facts": (),
    "dllm_jax.pages": (),
    "dllm_jax.text": (),
    "dllm_jax.intake": (),
    "dllm_jax.planning": (),
    "dllm_jax.reporting": (),
    "dllm_jax.scheduler": ("numpy",),
    "dllm_jax.engine": ("numpy",),
    "dllm_jax.sharing": (),
}


def sources() -> dict[str, tuple[Path, str]]:
    """Module name -> (path, text) of every file of ours."""
    found = {}
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = (path, path.read_text(encoding="utf-8"))
    return found


def type_checking_only(tree: ast.AST) -> set[ast.AST]:
    """Nodes under `if TYPE_CHECKING:`, which never run."""
    hidden: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                hidden.update(ast.walk(child))
    return hidden


def imports(module: str, text: str, is_package: bool) -> Iterator[str]:
    """Dotted names a module imports, wherever in it; `from a import b` gives `a.b`."""
    tree = ast.parse(text)
    hidden = type_checking_only(tree)
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                anchor = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*anchor, base]) if base else ".".join(anchor)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def layer(module: str) -> int | None:
    return next((rank for prefix, rank in LAYERS.items() if under(module, prefix)), None)


def breaches(module: str, text: str, is_package: bool = False) -> list[str]:
    """Every rule a module breaks, as sentences."""
    package = module.split(".")[0]
    problems = []
    for name in imports(module, text, is_package):
        top = name.split(".")[0]
        where = f"{module} imports {name}"
        if top in OURS:
            if not any(under(name, allowed) for allowed in PACKAGE_MAY[package]):
                problems.append(f"{where}: {package} may import {PACKAGE_MAY[package]}")
            leaf = ("dllm_jax.models", "pallas_kernels")  # operations know no model
            if under(module, leaf[0]) and not any(under(name, prefix) for prefix in leaf):
                problems.append(f"{where}: {leaf[0]} is a leaf")
            low, high = layer(name), layer(module)
            same = module.split(".")[:2] == name.split(".")[:2]
            if low is not None and high is not None and not same and low >= high:
                problems.append(f"{where}: layer {low} from layer {high}")
            if package == top == "strategies":
                problems += strategy_breach(module, name, where)
        else:
            for prefix, allowed in THIRD_PARTIES.items():
                if under(module, prefix) and is_third_party(top) and top not in allowed:
                    problems.append(f"{where}: {prefix} may import {allowed}")
    return problems


def strategy_breach(module: str, name: str, where: str) -> list[str]:
    me, other = module.split(".")[1:2], name.split(".")[1:2]
    if not me or me == ["testing"] or me == other:
        return []
    if not other or not (ROOT / "strategies" / f"{other[0]}.py").exists():
        return [f"{where}: inside strategies import the module, not the package"]
    if other[0] in STRATEGY_MACHINERY:
        return []
    return [f"{where}: {me[0]} may import {STRATEGY_MACHINERY}"]


def is_third_party(top: str) -> bool:
    import sys

    return bool(top) and top not in sys.stdlib_module_names and top not in OURS


def test_sources_are_found():
    names = sources()
    assert {name.split(".")[0] for name in names} == set(OURS)
    assert "dllm_jax.models.dense" in names


def test_every_module_has_a_layer():
    without = {name for name in sources() if under(name, "dllm_jax") and layer(name) is None}
    assert without <= {"dllm_jax"}


@pytest.mark.parametrize("package", OURS)
def test_imports_only_what_its_layer_may(package):
    problems = [
        problem
        for name, (path, text) in sources().items()
        if name.split(".")[0] == package
        for problem in breaches(name, text, path.name == "__init__.py")
    ]
    assert not problems, "\n".join(problems)


def test_no_module_names_tests_or_oracles():
    for name, (path, text) in sources().items():
        for imported in imports(name, text, path.name == "__init__.py"):
            assert imported.split(".")[0] not in ("tests", "torch", "hypothesis", "pytest"), name


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("strategies.mine", "import dllm_jax"),
        ("strategies.mine", "from pallas_kernels import paged_attention"),
        ("strategies.mine", "def f():\n    import checkpoints_convert.sdar"),
        ("strategies.multi_bd", "from strategies import block_diffusion"),
        ("strategies.blocks", "from strategies.multi_bd import MultiBD"),
        ("strategies.blocks", "import torch"),
        ("pallas_kernels.kv_write", "from strategies import state"),
        ("checkpoints_convert.sdar", "from dllm_jax import loading"),
        ("checkpoints_convert.sdar", "import dllm_jax"),
        ("dllm_jax.models.dense", "from dllm_jax.cache import PagedCache"),
        ("dllm_jax.models.dense", "from strategies import state"),
        ("dllm_jax.forward", "from dllm_jax.generation import generate"),
        ("dllm_jax.generation", "from . import cli"),
        ("dllm_jax.decode", "from .cli import main"),
    ],
)
def test_walker_sees_a_breach(module, text):
    assert breaches(module, text)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("dllm_jax.generation", "from strategies import blocks"),
        ("dllm_jax.cli.generate", "from dllm_jax.generation import generate"),
        ("checkpoints_convert.sdar", "from dllm_jax.models.dense import param_shapes"),
        ("dllm_jax.models.moe", "from pallas_kernels.expert_ffn import expert_ffn"),
        ("strategies.multi_bd", "from strategies import blocks, sampling"),
        (
            "strategies.mine",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dllm_jax",
        ),
    ],
)
def test_walker_lets_the_rest_pass(module, text):
    assert not breaches(module, text)
