"""Proves the import direction of the four packages (docs/adr/0002), by reading the source.

Each rule is a table below; the walker is itself tested on sources that break the rules, so an
empty or misspelt table cannot pass for a clean project. No project module is imported here.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    "dllm_jax.engine.requests": 0,
    "dllm_jax.engine.layout": 0,
    "dllm_jax.engine.pages": 0,
    "dllm_jax.engine.detokenize": 0,
    "dllm_jax.loading.async_dispatch": 0,
    "dllm_jax.loading.compile_cache": 0,
    "dllm_jax.runner.memory": 0,
    "dllm_jax.runner.cache": 1,
    "dllm_jax.runner.readout": 1,
    "dllm_jax.loading.tokenizer": 1,
    "dllm_jax.engine.scheduler": 1,
    "dllm_jax.runner.warmup": 1,
    "dllm_jax.runner.cost": 4,
    "dllm_jax.loading.model": 2,
    "dllm_jax.api.drafts": 3,
    "dllm_jax.engine.admission": 2,
    "dllm_jax.runner.pass_time": 3,
    "dllm_jax.engine.rounds": 2,
    "dllm_jax.runner.forward": 3,
    "dllm_jax.loading.hub_errors": 0,
    "dllm_jax.loading.hub_transfer": 0,
    "dllm_jax.loading.hub": 1,
    "dllm_jax.loading.hub_headers": 2,
    "dllm_jax.loading.chat": 3,
    "dllm_jax.api.defaults": 4,
    "dllm_jax.loading.sources": 3,
    "dllm_jax.api.infilling": 3,
    "dllm_jax.loading.load": 4,
    "dllm_jax.engine.outputs": 3,
    "dllm_jax.runner.decode": 4,
    "dllm_jax.engine.engine": 4,
    "dllm_jax.engine.inbox": 5,
    "dllm_jax.runner.buckets": 4,
    "dllm_jax.runner.packing": 4,
    "dllm_jax.runner.programs": 5,
    "dllm_jax.runner.runner": 6,
    "dllm_jax.api.generate": 5,
    "dllm_jax.api.snapshot": 7,
    "dllm_jax.trace.trajectory": 6,
    "dllm_jax.trace": 7,
    "dllm_jax.runner.start": 7,
    "dllm_jax.training": 6,
    "dllm_jax.api.llm": 8,
    "dllm_jax.tasks.evaluate": 7,
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
    "dllm_jax.engine.requests": (),
    "dllm_jax.engine.layout": (),
    "dllm_jax.engine.pages": (),
    "dllm_jax.engine.detokenize": (),
    "dllm_jax.engine.admission": (),
    "dllm_jax.engine.rounds": (),
    "dllm_jax.engine.outputs": (),
    "dllm_jax.engine.scheduler": ("numpy",),
    "dllm_jax.engine.engine": ("numpy",),
    "dllm_jax.engine.inbox": (),
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
        ("dllm_jax.strategies.multi_bd", "from strategies import block_diffusion"),
        ("dllm_jax.strategies.core.blocks", "from dllm_jax.strategies.multi_bd import MultiBD"),
        ("dllm_jax.strategies.core.blocks", "import torch"),
        ("dllm_jax.kernels.kv_write", "from strategies import state"),
        ("checkpoints_convert.sdar", "from dllm_jax import loading"),
        ("checkpoints_convert.sdar", "import dllm_jax"),
        ("dllm_jax.models.dense", "from dllm_jax.runner.cache import PagedCache"),
        ("dllm_jax.models.dense", "from strategies import state"),
        ("dllm_jax.runner.forward", "from dllm_jax.api.generate import generate"),
        ("dllm_jax.api.generate", "from . import cli"),
        ("dllm_jax.runner.decode", "from .cli import main"),
    ],
)
def test_walker_sees_a_breach(module, text):
    assert breaches(module, text)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("dllm_jax.api.generate", "from strategies import blocks"),
        ("dllm_jax.cli.generate", "from dllm_jax.api.generate import generate"),
        ("checkpoints_convert.sdar", "from dllm_jax.models.dense import param_shapes"),
        ("dllm_jax.models.moe", "from dllm_jax.kernels.expert_ffn import expert_ffn"),
        ("dllm_jax.strategies.multi_bd", "from strategies import blocks, sampling"),
        (
            "strategies.mine",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dllm_jax",
        ),
    ],
)
def test_walker_lets_the_rest_pass(module, text):
    assert not breaches(module, text)
