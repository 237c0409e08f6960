"""Proves what a user installs: the wheel's content, its imports, and the pinned versions.

The wheel is built and installed into a folder of its own, where it works far from the checkout;
the checkout works next to foreign packages called `strategies`. Importing the package must load no
JAX. That each public name leads to its definition is in test_docs.py.
"""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dllm_jax

ROOT = Path(__file__).resolve().parents[2]
# A top-level folder and its import path (docs/adr/0016).
LINKS = {
    "strategies": "dllm_jax/strategies",
    "pallas_kernels": "dllm_jax/kernels",
    "checkpoints_convert": "dllm_jax/convert",
}
PACKAGES = {"dllm_jax", *LINKS}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*command, **how):
    """What a command prints that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build_wheel(source, target):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*command, "--disable-pip-version-check", "-w", str(target), str(source))
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of a plain install of the wheel."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    options = ["--no-compile", "--disable-pip-version-check", "--target", str(target)]
    run(*command, *options, wheel.filename, cwd=target.parent)
    return target


def run_installed(target, folder, *arguments):
    """Run Python in `folder`, which comes first on its path, before the installed package."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(target)])}
    return run(sys.executable, *arguments, cwd=folder, env=env)


@pytest.mark.long
def test_wheel_holds_the_four_packages_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert len(info) == 1
    assert tops - info == PACKAGES


def source_files(folder):
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.long
def test_wheel_holds_every_source_and_data_file_once(wheel):
    expected = {f"dllm_jax/{name}" for name in source_files("dllm_jax")}
    for folder, path in LINKS.items():
        expected |= {f"{path}/{name}" for name in source_files(folder)} | {f"{folder}/__init__.py"}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    for name in ("tiny-sdar", "tiny-qwen3", "tiny-qwen3-dflash"):
        assert f"dllm_jax/builtin/{name}/model.safetensors" in expected


@pytest.mark.slow
def test_a_wheel_of_the_source_distribution_is_the_same(wheel, tmp_path):
    """It is what pip builds where there is no wheel; a tar has no links."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path), cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (tmp_path / "wheel").mkdir()
    built = build_wheel(archive.with_name(archive.name.removesuffix(".tar.gz")), tmp_path / "wheel")
    with zipfile.ZipFile(built) as other:
        assert sorted(other.namelist()) == sorted(wheel.namelist())


@pytest.mark.long
def test_wheel_names_the_command_and_the_licence(wheel):
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(entry).decode())
    assert parser["console_scripts"]["dllm-jax"] == "dllm_jax.cli:main"
    (licence,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    assert "Apache License" in wheel.read(licence).decode()


INSTALLED = """
import importlib, json, sys
packages = sys.argv[1:]
files = {name: importlib.import_module(name).__file__ for name in packages}
import dllm_jax
model = dllm_jax.load("builtin:tiny-sdar")
files |= {name: m.__file__ for name, m in sys.modules.items() if name.split(".")[0] in packages}
text = model.tokenizer.decode(model.tokenizer.encode("17+25=42"))
print(json.dumps({"files": files, "vocab_size": model.config.vocab_size, "text": text}))
"""


@pytest.mark.long
def test_wheel_works_where_there_is_no_checkout(installed, tmp_path):
    there = {path.name for path in installed.iterdir()}
    assert there >= PACKAGES
    assert not there & {"tests", "docs", "benchmarks", "examples"}
    out = run_installed(installed, tmp_path, "-c", INSTALLED, *sorted(PACKAGES))
    found = json.loads(out)
    assert (found["vocab_size"], found["text"]) == (768, "17+25=42")
    assert len(found["files"]) > 30
    for name, file in found["files"].items():
        assert Path(file).is_relative_to(installed), name


SAME_MODULES = """
import bdb, importlib, inspect, os, pickle, sys
root, *order = sys.argv[1:]
for name in order:
    importlib.import_module(name)
import strategies.core.driver, pallas_kernels, checkpoints_convert.rules
import dllm_jax.kernels.layer.api, dllm_jax.strategies.multi_bd
from dllm_jax import convert, kernels
assert strategies is dllm_jax.strategies
assert strategies.multi_bd is dllm_jax.strategies.multi_bd
assert strategies.core.driver is sys.modules["dllm_jax.strategies.core.driver"]
assert pallas_kernels is kernels
assert sys.modules["pallas_kernels.layer.api"] is kernels.layer.api
assert checkpoints_convert is convert
made = strategies.MultiBD
assert made.__module__ == "dllm_jax.strategies.multi_bd"
assert pickle.loads(pickle.dumps(made)) is made
for module in (strategies.multi_bd, kernels.layer.api, checkpoints_convert.rules):
    assert inspect.getfile(module) == os.path.realpath(module.__file__)
    assert inspect.getfile(module).startswith(root), module
names = [name for name in sys.modules if name.startswith(("strategies.", "pallas_kernels."))]
assert len(names) > 30 and all(sys.modules[name].__name__ != name for name in names)

class Stops(bdb.Bdb):
    def user_line(self, frame):
        stopped.append(frame.f_code.co_name)

stopped, at = [], inspect.getsourcelines(made.step)[1] + 1
debugger = Stops()
debugger.set_break(os.path.join(root, os.path.relpath(inspect.getfile(made), root)), at)
try:
    debugger.runcall(made().step, None, None)
except AttributeError:
    pass
assert "step" in stopped, stopped
"""
ORDERS = (["strategies.multi_bd"], ["dllm_jax.strategies.multi_bd", "dllm_jax.convert"])


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
def test_each_module_exists_once_in_either_order(order, tmp_path):
    """Each module exists once and names its real file, where a breakpoint is hit."""
    run_installed(ROOT, tmp_path, "-c", SAME_MODULES, str(ROOT), *order)


def git(folder, *words):
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    run("git", *identity, *words, cwd=folder)


@pytest.mark.long
def test_wheel_and_import_of_a_clone_without_links_name_the_remedy(tmp_path):
    """Links are text files after `git clone -c core.symlinks=false`."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    caches = shutil.ignore_patterns("__pycache__", "builtin")
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, origin / folder, symlinks=True, ignore=caches)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, origin)
    git(origin, "init", "-q")
    git(origin, "add", ".")
    git(origin, "commit", "-q", "-m", "all")
    git(tmp_path, "clone", "-q", "-c", "core.symlinks=false", str(origin), str(clone))
    imports = [sys.executable, "-c", "import dllm_jax.strategies, dllm_jax.convert"]
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    for command in (imports, wheel):
        env = os.environ | {"PYTHONPATH": str(clone)}
        done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)
        assert done.returncode != 0
        (said,) = re.findall("ImportError: (.*)", done.stderr)
        assert said.startswith("dllm_jax/convert is a link in git and no folder here; ")
    (remedy,) = re.findall("`(.*?)`", said)
    run("bash", "-c", remedy, cwd=clone)
    run_installed(clone, tmp_path, *imports[1:])


@pytest.mark.long
def test_an_editable_wheel_exposes_the_packages_alone(tmp_path, project):
    """`pip install -e .` put the whole checkout on the path, `tests` as well.

    What it imports must be a dependency: uv installs no others, and the package was not found.
    """
    code = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    run(sys.executable, "-c", code, str(tmp_path), cwd=ROOT)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        tops = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" not in name}
        (finder,) = (name for name in tops if name.endswith(".py"))
        (path,) = (name for name in tops if name.endswith(".pth"))
        source = archive.read(finder).decode()
        mapped = re.findall(r"map_module\('(\w+)'", source)
        imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    assert mapped == ["dllm_jax"]
    assert tops == {*LINKS, finder, path}
    assert imported <= {Requirement(line).name for line in project["dependencies"]}


GENERATE_SHADOWED = """
import sys
sys.path.insert(0, sys.argv[1])
import dllm_jax as dj, strategies
import dllm_jax.strategies.testing
assert strategies.NAME == "foreign"
assert dj.generate("builtin:tiny-sdar", [[3, 5, 6]], max_tokens=1).length[0] <= 1
for line in ("from strategies import AR", "import strategies.core", "import strategies as s; s.AR"):
    with open("mine.py", "w") as file:
        file.write(line)
    for name in ("mine.py:step", "mine:step"):
        try:
            dj.strategies.load_strategy(name)
        except ValueError as error:
            sys.modules.pop("mine", None)
            print(error)
"""


@pytest.mark.slow
def test_foreign_packages_first_on_the_path_break_nothing(tmp_path):
    """The checkout's own modules, and the error of a user's file that met a foreign one."""
    for folder in LINKS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text('NAME = "foreign"\n', encoding="utf-8")
    said = run_installed(ROOT, tmp_path, "-B", "-c", GENERATE_SHADOWED, str(tmp_path))
    lines = said.splitlines()
    assert len(lines) == 6
    said = f"'strategies' is the foreign {tmp_path / 'strategies'}; import from dllm_jax.strategies"
    assert all(line.endswith(said) for line in lines), lines


SHORT_NAMES = re.compile(
    r"^\s*(?:from|import) (?:strategies|pallas_kernels|checkpoints_convert)\b", re.MULTILINE
)


def test_project_and_documents_import_through_dllm_jax():
    """Only the programs of this file may use the short names."""
    pages = [page for kind in ("*.md", "*.py") for page in ROOT.glob(kind)]
    for folder in ("dllm_jax", *LINKS, "tests", "benchmarks", "examples", "docs"):
        pages += [page for kind in ("*.md", "*.py") for page in (ROOT / folder).rglob(kind)]
    found = [page for page in pages if SHORT_NAMES.search(page.read_text(encoding="utf-8"))]
    assert {page.name for page in found} <= {"test_packaging.py"}


@pytest.mark.parametrize(
    "modules",
    [
        "dllm_jax",
        "dllm_jax.bench.serving, dllm_jax.cli.bench_serve",
        "dllm_jax.serve.app, dllm_jax.serve.server, dllm_jax.cli.serve, "
        "dllm_jax.loading.tokenizer, dllm_jax.loading.chat",
    ],
    ids=["package", "client", "server"],
)
def test_import_loads_no_jax(modules):
    run(sys.executable, "-c", f"import sys, {modules}; assert 'jax' not in sys.modules")


def test_version_is_stated_once_in_effect(project):
    assert project["version"] == dllm_jax.__version__
    assert f"## {dllm_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"no public name .Server.; it has .*generate"):
        _ = dllm_jax.Server


def pins():
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), line
            found.setdefault(normal(requirement.name), []).append(requirement)
    return found


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_each_dependency_is_pinned_within_its_range(project, python):
    wanted = [*project["dependencies"]]
    for extra, entries in project["optional-dependencies"].items():
        wanted += entries if extra != "cuda" else []  # jax pins its own plugin
    for text in wanted:
        requirement = Requirement(text)
        chosen = [
            pin
            for pin in pins()[normal(requirement.name)]
            if pin.marker is None or pin.marker.evaluate({"python_version": python})
        ]
        assert len(chosen) == 1, text
        (version,) = (spec.version for spec in chosen[0].specifier)
        assert requirement.specifier.contains(version), text


def test_runtime_needs_no_torch(project):
    names = {normal(Requirement(text).name) for text in project["dependencies"]}
    assert {"jax", "jaxlib", "flax", "transformers", "orbax-checkpoint", "optax"} <= names
    assert not names & {"torch", "pytest", "hypothesis", "ruff", "pyright"}
    assert set(project["optional-dependencies"]) == {
        "cuda",
        "server",
        "dev",
        "docs",
        "judges",
        "oracle",
        "otel",
    }
