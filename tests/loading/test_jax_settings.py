"""Proves that an entry of the compilation cache that was cut off costs a compilation, nothing else.

JAX itself compiles where it cannot read one, with the warning that pyproject filters (two workers
share a folder). For users each start removes what a killed process left, whole entries stay, and
the folder is locked and bounded, unless they chose otherwise or it cannot be locked.
"""

import os
import re
import tomllib
import warnings
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import dllm_jax as dj
from dllm_jax.loading.jax_settings import MOST_BYTES, cache_folder, enable_compile_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch, tmp_path):
    """No cache is set up, as where users begin; what the tests had comes back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def turn_on():
    """As a process of its own does; every program counts as worth keeping."""
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_compilation_cache_max_size", -1)
    reset_cache()
    enable_compile_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def triple(number):
    """A program that is the same to the disk and new to the memory each time."""
    return int(jax.jit(lambda x: x * jnp.int32(3))(jnp.int32(number)))


def entries():
    return {path.name: path for path in cache_folder().glob("*-cache") if "lambda" in path.name}


class Killed(BaseException):
    """Stands for a signal that no process hears."""


@pytest.mark.versions
def test_half_an_entry_is_compiled_anew_with_the_warning_that_is_filtered(monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    assert triple(4) == 12
    (entry,) = entries().values()
    entry.write_bytes(entry.read_bytes()[:-20])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert triple(5) == 15
    (text,) = (str(warning.message) for warning in caught)
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    kinds = settings["tool"]["pytest"]["ini_options"]["filterwarnings"]
    (kind,) = (kind for kind in kinds if "compilation cache" in kind)
    action, pattern, category = kind.split(":")
    assert (action, category) == ("ignore", "UserWarning")
    assert re.match(pattern, text)
    assert triple(6) == 18  # under that filter


@pytest.mark.versions
def test_what_a_killed_process_left_goes_at_the_next_start_and_the_rest_stays(monkeypatch):
    turn_on()
    assert triple(4) == 12
    (whole,) = entries().values()
    content = whole.read_bytes()

    def cut(path, data):
        with open(path, "wb") as file:
            file.write(data[: len(data) // 2])
        raise Killed

    other = jax.jit(lambda x: x * jnp.int32(5))
    with monkeypatch.context() as patch:
        patch.setattr(type(epath.Path(cache_folder())), "write_bytes", cut)
        with pytest.raises(Killed):
            other(jnp.int32(4))
    assert len(entries()) == 2
    turn_on()
    assert entries() == {whole.name: whole}
    assert whole.read_bytes() == content
    assert other(jnp.int32(4)) == 20  # and is kept now: nothing warns here, for that is an error
    assert len(entries()) == 2


@pytest.mark.versions
@pytest.mark.parametrize("damage", ["cut", "garbled", "foreign", "emptied"])
def test_a_damaged_entry_is_replaced_at_the_next_start(damage):
    """JAX itself would report it at every start, and never write it again."""
    turn_on()
    assert triple(4) == 12
    (entry,) = entries().values()
    whole = entry.read_bytes()
    middle = len(whole) // 2
    garbled = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    content = {"cut": whole[:-20], "garbled": garbled, "foreign": b"x" * 99, "emptied": b""}
    entry.write_bytes(content[damage])
    turn_on()
    assert triple(5) == 15  # nothing warns here, for that is an error
    (again,) = entries().values()
    assert again.name == entry.name
    assert zlib.decompress(again.read_bytes())


@pytest.mark.versions
def test_an_entry_is_unpacked_once(monkeypatch):
    """A start costs the entries that are new, not the whole folder."""
    turn_on()
    assert triple(4) == 12
    (entry,) = entries().values()
    os.utime(entry, (1, 1))
    monkeypatch.setattr("dllm_jax.loading.jax_settings._unpacks", pytest.fail)
    turn_on()
    assert list(entries().values()) == [entry]


@pytest.mark.versions
def test_the_folder_is_locked_and_bounded_unless_the_user_chose(tmp_path):
    turn_on()
    assert getattr(jax.config, SETTINGS[0]) == str(cache_folder())
    assert getattr(jax.config, SETTINGS[1]) == MOST_BYTES
    own, before = str(tmp_path / "mine"), getattr(jax.config, SETTINGS[2])
    jax.config.update("jax_compilation_cache_dir", own)
    enable_compile_cache()
    assert [getattr(jax.config, name) for name in SETTINGS[::2]] == [own, before]
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_compilation_cache_max_size", 1000)
    with pytest.raises(ValueError, match="is no built-in model"):
        dj.LLM("builtin:nobody")  # the cache is set up before anything is loaded
    assert [getattr(jax.config, name) for name in SETTINGS[:2]] == [str(cache_folder()), 1000]


@pytest.mark.versions
@pytest.mark.parametrize("what", ["owner", "lock"])
def test_a_folder_that_cannot_be_locked_is_used_without(monkeypatch, what):
    def fail(*_, **__):
        raise {"owner": KeyError, "lock": NotImplementedError}[what]

    if what == "owner":
        monkeypatch.setattr(Path, "owner", fail)
    else:
        monkeypatch.setattr("filelock.FileLock", fail)
    turn_on()
    assert getattr(jax.config, SETTINGS[0]) == str(cache_folder())
    assert getattr(jax.config, SETTINGS[1]) == -1
    assert triple(4) == 12
    (entry,) = entries().values()
    turn_on()
    assert entry.exists()


@pytest.mark.versions
@pytest.mark.parametrize("is_chosen", [True, False], ids=["chosen", "usual"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702, "another user's"])
def test_item_5_a_folder_that_others_may_write_is_not_used(
    monkeypatch, tmp_path, capfd, mode, is_chosen
):
    folder = tmp_path / "shared" if is_chosen else cache_folder()
    folder.mkdir(parents=True)
    if mode == "another user's":
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    else:
        folder.chmod(mode)
    jax.config.update("jax_compilation_cache_dir", str(folder) if is_chosen else None)
    for _ in range(2):
        enable_compile_cache()
        used = jax.config.jax_compilation_cache_dir
        assert used == (str(cache_folder()) if is_chosen and mode != "another user's" else None)
        if used is not None:
            assert cache_folder().stat().st_mode & 0o77 == 0
    notes = [line for line in capfd.readouterr().err.splitlines() if str(folder) in line]
    assert len(notes) == 1
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "new"))
    enable_compile_cache()  # one that does not exist yet is the user's
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "new")
