"""Where compiled programs are kept between runs, so that a second run starts in seconds.

`LLM` and the command line turn it on; importing the library changes no global setting.

JAX writes an entry in place. Without a lock a process that starts beside another can read half of
one, and one that was killed over its write leaves half for good, for JAX replaces no entry: a
warning and a compilation at every start. JAX locks the folder where its size is bounded, and then
writes each entry's time after the entry, so an entry without one was cut off and is removed here.
"""

import contextlib
import os
from pathlib import Path

import filelock

MOST_BYTES = 2 * 2**30  # some thousand programs; the least recently used go first
LOCK_TIMEOUT_S = 10.0  # JAX's own
# Programs that compile in less are not kept. Every one of an engine takes longer, and one operation
# does not: JAX looks at each entry there is whenever it writes one, 0.05 ms each.
LEAST_S = 0.03


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/dllm-jax/jax`, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dllm-jax" / "jax"


def enable_compile_cache() -> None:
    """Turn JAX's persistent compilation cache on, unless the user has set one up.

    Where the folder cannot be written it stays off: JAX would warn of each program.
    """
    import jax

    # By name: the stubs of jax 0.10 do not list it.
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    folder = cache_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        return
    if getattr(jax.config, "jax_compilation_cache_max_size", -1) == -1 and _mend(folder):
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_S)


def _mend(folder: Path) -> bool:
    """Remove entries that were cut off; whether JAX can lock and bound the folder.

    Some file systems have no locks, and jax 0.10 asks for the owner's name, which not every
    container has: the cache is then as JAX has it by default.
    """
    try:
        folder.owner()
        with filelock.FileLock(folder / ".lockfile", timeout=LOCK_TIMEOUT_S):
            for entry in folder.glob("*-cache"):
                if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
                    entry.unlink()
    except (OSError, KeyError, NotImplementedError):
        return False
    return True
