"""Proves what a user installs: the wheel's content, the public names, and the pinned versions.

The wheel is really built, and installed into a folder of its own that works far from the checkout.
Importing the package must load no JAX; each public name must resolve
to the object of the module that defines it.
"""

import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dllm_jax

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"dllm_jax", "strategies", "pallas_kernels", "checkpoints_convert"}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "-w", str(target), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def test_wheel_holds_the_four_packages_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert len(info) == 1
    assert tops - info == PACKAGES


def test_wheel_holds_every_source_and_data_file(wheel):
    names = set(wheel.namelist())
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix() in names
    for name in ("tiny-sdar", "tiny-qwen3", "tiny-qwen3-dflash"):
        assert f"dllm_jax/builtin/{name}/model.safetensors" in names


def test_wheel_names_the_command_and_the_licence(wheel):
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(entry).decode())
    assert parser["console_scripts"]["dllm-jax"] == "dllm_jax.cli:main"
    (licence,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    assert "Apache License" in wheel.read(licence).decode()


INSTALLED = """
import importlib, json, sys
target, *packages = sys.argv[1:]
sys.path.insert(0, target)
files = {name: importlib.import_module(name).__file__ for name in packages}
import dllm_jax
model = dllm_jax.load("builtin:tiny-sdar")
files |= {name: m.__file__ for name, m in sys.modules.items() if name.split(".")[0] in packages}
text = model.tokenizer.decode(model.tokenizer.encode("17+25=42"))
print(json.dumps({"files": files, "vocab_size": model.config.vocab_size, "text": text}))
"""


def test_wheel_works_where_there_is_no_checkout(wheel, tmp_path):
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    options = ["--no-compile", "--disable-pip-version-check", "--target", str(target)]
    subprocess.run([*command, *options, wheel.filename], check=True, cwd=tmp_path)
    installed = {path.name for path in target.iterdir()}
    assert installed >= PACKAGES
    assert not installed & {"tests", "docs", "benchmarks", "examples"}
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED, str(target), *sorted(PACKAGES)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["vocab_size"], found["text"]) == (768, "17+25=42")
    assert len(found["files"]) > 30
    for name, file in found["files"].items():
        assert Path(file).is_relative_to(target), name


def test_import_loads_no_jax():
    code = "import sys, dllm_jax; assert 'jax' not in sys.modules; print(dllm_jax.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == dllm_jax.__version__


def test_version_is_stated_once_in_effect(project):
    assert project["version"] == dllm_jax.__version__
    assert f"## {dllm_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_public_names_resolve_to_their_definitions():
    import dllm_jax.api.generate
    import dllm_jax.loading.load
    import dllm_jax.loading.model
    from dllm_jax import strategies

    assert dllm_jax.generate is dllm_jax.api.generate.generate
    assert dllm_jax.load is dllm_jax.loading.load.load
    assert dllm_jax.Model is dllm_jax.loading.model.Model
    assert dllm_jax.strategies is strategies
    assert set(dllm_jax.__all__) <= set(dir(dllm_jax))
    for name in dllm_jax.__all__:
        assert getattr(dllm_jax, name) is not None


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
    assert set(project["optional-dependencies"]) == {"cuda", "server", "dev", "oracle"}
