"""Programs that another process compiles (docs/adr/0030): exported, kept in a folder, loaded.

That they give the tokens of those compiled here is proven by `test_behind`, with such a process.
"""

import jax
import pytest

from dllm_jax.runner import elsewhere
from tests.runner.test_behind import FEW, make_runner


class Here:
    """A helper that is this process, and counts what it is asked for."""

    def __init__(self):
        self.num_asked = 0

    def ask(self, function, *args):
        self.num_asked += 1
        return function(*args)


@pytest.fixture
def folder(tmp_path):
    """JAX keeps none of these: what XLA has read it cannot write again on a CPU."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path), 1e9), strict=True):
        jax.config.update(name, value)
    yield tmp_path / "programs"
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


def test_a_program_is_compiled_once_for_all_processes_and_again_where_its_file_is_damaged(folder):
    made, helper = make_runner(FEW, allocate=True), Here()
    call = made.begin_call(0)

    def begin():
        exported = made.export(call)
        made.compiled[call.key] = exported.compile(helper)
        made.run(call).result(60)

    begin()
    begin()
    assert helper.num_asked == 1
    (file,) = folder.iterdir()
    kept = file.read_bytes()
    file.write_bytes(kept[:-9] + b"\0" + kept[-8:])
    begin()
    assert helper.num_asked == 2
    assert [*folder.iterdir()] == [file]
    assert elsewhere._read(file) is not None
    made.close()


def test_the_donated_state_is_the_new_one(folder):
    """As of a program that is compiled here: no page is copied."""
    made = make_runner(FEW, allocate=True)
    call = made.begin_call(0)
    program = made.export(call).compile(Here())
    given = jax.tree.leaves(made.state.pools)
    before = [leaf.unsafe_buffer_pointer() for leaf in given]
    made.compiled[call.key] = program
    made.run(call).result(60)
    assert all(leaf.is_deleted() for leaf in given)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(made.state.pools)] == before
    made.close()


def test_what_was_not_used_for_long_goes(folder, monkeypatch):
    monkeypatch.setattr(elsewhere, "MOST_BYTES", 120)
    folder.mkdir()
    for i in range(4):
        elsewhere._write(folder / f"{i}", bytes([i]) * 9)
        elsewhere._read(folder / "0")  # its time is now
    assert sorted(file.name for file in folder.iterdir()) == ["0", "3"]
    assert elsewhere._read(folder / "3") == bytes([3]) * 9


def test_a_process_that_cannot_compile_is_none():
    class Fails:
        def ask(self, function, *args):
            return None

    made = make_runner(FEW)
    assert made.export(made.begin_call(0)).compile(Fails()) is None
