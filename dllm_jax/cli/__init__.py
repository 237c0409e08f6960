"""The command line: one file a verb, `main` is the console script `dllm-jax`."""

import os
import signal
from types import FrameType

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status; see `entry.main`.

    The imports take tenths of a second, in which a signal would print a traceback.
    """
    if argv is not None:
        from dllm_jax.cli import entry

        return entry.main(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    from dllm_jax.cli import entry

    status = entry.main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is done, and its status stands
    return status


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted; nothing was finished\n")
    os._exit(128 + number)
