"""Proves that nothing of an `Interrupt` outlives it and that no signal is lost.

The watching thread ends with its block: one that outlived it could free the engine's arrays while
the interpreter ended, which aborts the process. A signal during an import or a garbage collection
is raised later.
"""

import gc
import importlib
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from dllm_jax.cli import main
from dllm_jax.cli.interrupt import ALL, Interrupt, Interrupted

pytestmark = pytest.mark.long


class Held:
    """Stands for the engine that a verb's `tell` reads."""

    def said(self):
        return "nothing"


def test_nothing_of_the_block_outlives_it():
    before = set(threading.enumerate())
    held = Held()
    seen = weakref.ref(held)
    with Interrupt() as stop:
        stop.tell = held.said
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) <= before
    del stop, held
    gc.collect()
    assert seen() is None


def test_a_signal_in_an_import_is_not_a_failure_of_the_module(tmp_path, monkeypatch):
    code = "import signal\nsignal.raise_signal(signal.SIGINT)\nimported = True\n"
    (tmp_path / "signalled.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with Interrupt(forced=()) as stop:
        assert importlib.import_module("signalled").imported
        with pytest.raises(Interrupted):
            stop.check()


def test_a_signal_in_a_collection_is_not_dropped():
    def reported(phase, info):
        if phase == "start" and not seen:
            seen.append(phase)
            signal.raise_signal(signal.SIGINT)
            seen.append("went on")

    seen = []
    with Interrupt(forced=()) as stop:
        gc.callbacks.append(reported)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(reported)
        assert seen == ["start", "went on"]
        with pytest.raises(Interrupted):
            stop.check()


def test_a_signal_elsewhere_is_raised_at_once():
    with Interrupt(forced=()), pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_in_a_collection_is_sent_again():
    """A verb that never checks is interrupted too."""
    raised = []

    def collect_and_wait():
        gc.collect()  # an exception in the callback would be dropped
        time.sleep(60)

    def interrupted(*_):
        if not raised:
            raised.append(True)
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(interrupted)
    try:
        with Interrupt(forced=()), pytest.raises(Interrupted):
            collect_and_wait()
    finally:
        gc.callbacks.remove(interrupted)
    assert raised


FIRST = "import sys; from dllm_jax.cli import main; print(flush=True); sys.exit(main())"


@pytest.mark.slow(r"0\.5|0\.8")
@pytest.mark.parametrize("wait", [0.01, 0.03, 0.06, 0.1, 0.14, 0.2, 0.3, 0.5, 0.8])
def test_a_signal_while_the_command_starts_is_a_line_and_a_status(wait):
    """Also in the imports, and when the signal has to be sent again."""
    # However fast it starts, it waits after its first forward.
    watch = ["--watch", "--watch-delay", "60"]
    command = [sys.executable, "-c", FIRST, "generate", "--seed", "7", *watch]
    with subprocess.Popen(command, text=True, stdin=-3, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=300)[1]
    (line,) = err.splitlines()
    assert line.startswith("error: interrupted")
    assert process.returncode == 130


def test_a_signal_before_the_verb_begins_is_a_line_and_a_status(monkeypatch, capsys):
    """While the thread that watches for signals starts."""

    def start(self):
        signal.raise_signal(signal.SIGTERM)

    old = {number: signal.getsignal(number) for number in ALL}
    monkeypatch.setattr(threading.Thread, "start", start)
    try:
        assert main(["info"]) == 143
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in old.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err == "error: interrupted; nothing was finished\n"


def test_little_is_imported_before_signals_are_caught():
    """What is imported before prints a traceback; `importlib.abc` alone takes 30 ms."""
    code = "import dllm_jax.cli, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"argparse", "importlib.abc", "inspect", "pathlib", "dllm_jax.cli.entry"}
    assert not heavy & set(done.stdout.split()) - site_modules()


def site_modules():
    """What a bare interpreter of this environment imports."""
    code = "import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("argv", "work", "says"),
    [
        (["info"], "dllm_jax.cli.info.collect", "nothing was finished"),
        (
            ["train", "--out", "runs/a"],
            "dllm_jax.training.command.main",
            "runs/a holds no checkpoint yet; the same command begins anew",
        ),
    ],
)
def test_an_interrupted_verb_is_one_line_and_a_status(monkeypatch, capsys, argv, work, says):
    for number in (signal.SIGINT, signal.SIGTERM):
        monkeypatch.setattr(work, lambda *_, number=number, **__: signal.raise_signal(number))
        assert main(argv) == 128 + number
        assert capsys.readouterr().err == f"error: interrupted; {says}\n"
