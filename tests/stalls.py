"""Runs a command while one process of its tree, chosen at random, is stopped for two seconds.

No test's outcome may depend on which process is faster. This shows it (Linux only):

    python -m tests.stalls SEED python -m pytest tests/serve/test_http.py
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

STALL_S = 2.0


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    found = [root]
    for pid in found:
        with contextlib.suppress(OSError):
            for tasks in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (tasks / "children").read_text().split())
    return found


def main() -> int:
    """Run the command; its exit status."""
    draw, count = random.Random(int(sys.argv[1])), 0
    process = subprocess.Popen(sys.argv[2:])
    while process.poll() is None:
        time.sleep(draw.uniform(0.2, 2.5))
        chosen = draw.choice(tree(process.pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(chosen, signal.SIGSTOP)
            count += 1
            time.sleep(STALL_S)
            os.kill(chosen, signal.SIGCONT)
    print(f"{count} stalls of {STALL_S:g} s")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
