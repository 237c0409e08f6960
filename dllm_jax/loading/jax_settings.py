"""Settings of JAX that `load`, `LLM` and the command line choose, unless the user has chosen.

Importing the library changes no global setting.
"""

import contextlib
import functools
import os
import stat
import sys
import time
import zlib
from pathlib import Path

import filelock

# Read when JAX first looks for devices; the name is older than what it does.
ASYNC_DISPATCH = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
_ASYNC_SINCE = (0, 11, 2)  # earlier versions were not tried
MOST_BYTES = 2 * 2**30  # some thousand programs; the least recently used are removed first
_ZSTANDARD = b"\x28\xb5\x2f\xfd"  # how such data begin
LOCK_TIMEOUT_S = 10.0  # JAX's own
# Programs that compile faster are not kept. Every program of an engine takes longer, a single
# operation does not; JAX visits every entry whenever it writes one, 0.05 ms each.
LEAST_S = 0.03


def enable_async_dispatch() -> None:
    """Let a thread of XLA launch a GPU's kernels, unless the user has set the variable.

    A loop on the device asks the host after each step whether to go on. By XLA's default that
    blocks the calling thread until the loop ends, and the GPU waits while the next program's
    arguments are prepared (docs/adr/0008-the-host-loop.md). No effect once JAX has looked for
    devices.
    """
    import jax

    if jax.__version_info__ >= _ASYNC_SINCE:
        os.environ.setdefault(ASYNC_DISPATCH, "1")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/dllm-jax/jax`, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dllm-jax" / "jax"


def enable_compile_cache() -> None:
    """Turn JAX's persistent compilation cache on, unless the user has set one up.

    It stays off where the folder cannot be written: JAX would warn about each program. A folder
    that others may write is left unused, the user's choice too: its entries are code.
    """
    import jax

    # By name: the stubs of jax 0.10 do not list it.
    chosen = getattr(jax.config, "jax_compilation_cache_dir", None)
    if chosen is not None:
        if _is_ours(Path(chosen)):
            return
        jax.config.update("jax_compilation_cache_dir", None)
    folder = cache_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK) or not _is_ours(folder):
        return
    if getattr(jax.config, "jax_compilation_cache_max_size", -1) == -1 and _repair(folder):
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_S)


@functools.cache
def _is_ours(folder: Path) -> bool:
    """Whether this user alone may write it, or it does not exist; else one line says so."""
    try:
        facts = folder.stat()
    except OSError:
        return True
    if not hasattr(os, "getuid"):
        return True
    if facts.st_uid != os.getuid():
        why = "it belongs to another user; choose another JAX_COMPILATION_CACHE_DIR"
    elif facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"others may write it; run chmod go-w {folder}"
    else:
        return True
    print(f"note: compiled programs are not kept in {folder}: {why}", file=sys.stderr, flush=True)
    return False


def _unpacks(entry: Path) -> bool:
    """Whether an entry is whole, as far as its packing tells; JAX may have packed it otherwise."""
    unpacking = zlib.decompressobj()
    try:
        with entry.open("rb") as file:
            if file.read(4) == _ZSTANDARD:
                return True
            file.seek(0)
            while piece := file.read(1 << 20):
                unpacking.decompress(piece)
    except zlib.error:
        return False
    return unpacking.eof


def _repair(folder: Path) -> bool:
    """Remove damaged entries; whether JAX can lock the folder and bound its size.

    JAX writes an entry in place and never replaces one, so an entry that cannot be read would fail
    and be reported at every start. With a bounded size JAX locks the folder and writes each entry's
    time last: an entry without a time is truncated. One that was written since the last start is
    unpacked once. Some file systems have no locks, and jax 0.10 needs the owner's name, which some
    containers lack; the size is then not bounded.
    """
    try:
        folder.owner()
        with filelock.FileLock(folder / ".lockfile", timeout=LOCK_TIMEOUT_S):
            began, stamp = time.time(), folder / ".checked"
            since = stamp.stat().st_mtime if stamp.exists() else 0.0
            for entry in folder.glob("*-cache"):
                is_timed = entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists()
                if not is_timed or (entry.stat().st_mtime >= since and not _unpacks(entry)):
                    entry.unlink()
            stamp.touch()
            os.utime(stamp, (began, began))
    except (OSError, KeyError, NotImplementedError):
        return False
    return True
