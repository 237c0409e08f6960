"""Proves that the README's commands work as printed, pasted into a shell in a fresh clone.

Left out are those that install, run the tests, serve, or need weights from elsewhere. The clone's
`.venv` is new and finds the installed packages of this interpreter, so nothing is installed again.
"""

import os
import re
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.serve.driving import PROGRAMS

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"pip |make test|.*(/models/|--model |--draft )")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone whose environment is as `make generate` leaves it."""
    if not (ROOT / ".git").exists():
        pytest.skip("there is no repository to clone")
    folder = tmp_path_factory.mktemp("clone") / "dllm_jax"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    made = folder / ".venv"
    venv.create(made, with_pip=False)
    packages = sysconfig.get_path("purelib", vars={"base": str(made)})
    (Path(packages) / "here.pth").write_text("\n".join([str(folder), *site.getsitepackages()]))
    command = made / "bin" / "dllm-jax"
    start = "import sys\nfrom dllm_jax.cli import main\nsys.exit(main())\n"
    command.write_text(f"#!{made}/bin/python\n{start}")
    command.chmod(0o755)
    for stamp in (".made", ".runtime"):
        (made / stamp).touch()
    return folder


def commands_of(clone):
    """What a reader would paste, in order; then the commands within sentences."""
    text = (clone / "README.md").read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    lines += re.findall(r"`(dllm-jax [a-z]+ [^`]*)`", text)
    return [line for line in lines if line.strip() and not ELSEWHERE.match(line)]


def test_the_first_command_works_as_printed(clone):
    first = next(line for line in commands_of(clone) if line.startswith("make generate"))
    assert run(clone, [first]).count("right: the answer is") == 1


@pytest.mark.slow
def test_other_commands_work_as_printed(clone):
    lines = commands_of(clone)
    verbs = {"generate", "chat", "eval", "trace"}
    assert {words[1] for line in lines if (words := line.split())[0] == "dllm-jax"} >= verbs
    printed = run(clone, lines)
    assert printed.count("right: the answer is") >= 2
    assert "wrong" not in printed
    assert (clone / "trace.html").stat().st_size > 10_000


def run(clone, lines):
    """What a shell prints that stands in the clone."""
    # `make test-long VENV=…` gives its variables to what it runs, twice: in MAKEFLAGS and each by
    # itself. The clone's own `make` would set up another environment, from the registry.
    dropped = {"PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    dropped |= set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
    env = {name: value for name, value in os.environ.items() if name not in dropped} | PROGRAMS
    done = subprocess.run(
        ["bash", "-ex", "-c", "\n".join(lines)],
        cwd=clone,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_clone_runs_its_own_code(clone):
    """Or the test above would prove nothing."""
    code = "import dllm_jax; print(dllm_jax.__file__)"
    python = clone / ".venv" / "bin" / "python"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    how = {"capture_output": True, "text": True, "cwd": "/", "check": True}
    done = subprocess.run([python, "-c", code], env=env, **how)
    assert Path(done.stdout.strip()).is_relative_to(clone), sys.executable
