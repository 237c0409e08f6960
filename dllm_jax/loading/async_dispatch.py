"""Who launches a GPU's kernels: the thread that calls a program, or one of XLA's own.

A loop on the device asks the host after each step whether to go on, so its caller is kept until the
loop ends. By XLA's default that is whoever called it, and the GPU waits while the next program's
some 300 arrays are made ready. With a thread of XLA's that is done while the loop runs, which took
3 % off a ragged load in one lease and 7 % in another (docs/adr/0015-async-dispatch.md).
"""

import os

import jax

# Read when JAX first looks for devices. The name is older than what it does.
VARIABLE = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
_SINCE = (0, 11, 2)  # earlier ones were not tried


def enable_async_dispatch() -> None:
    """Have XLA launch from a thread of its own, unless the user has chosen.

    Without effect where JAX has already looked for devices. Results do not depend on it.
    """
    if jax.__version_info__ >= _SINCE:
        os.environ.setdefault(VARIABLE, "1")
