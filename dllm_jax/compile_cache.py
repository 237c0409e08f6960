"""Where compiled programs are kept between runs, so that a second run starts in seconds.

`LLM` and the command line turn it on; importing the library changes no global setting.
"""

import contextlib
import os
from pathlib import Path


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
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
