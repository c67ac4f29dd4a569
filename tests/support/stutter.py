"""Runs pytest while its workers are stopped again and again, as a busy machine or a garbage collection would stop them.

    python -m support.stutter -n 2 tests/unit      # what follows goes to pytest

Each worker stands still for 0.15 to 0.5 s, some times a second (SIGSTOP, SIGCONT). A test that fails then has a limit on the
wall clock, or has found a defect. Processes that a test starts are left alone. The exit code is that of pytest.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

PAUSE_S = (0.15, 0.5)
BETWEEN_S = (0.1, 0.4)


def workers_of(parent: int) -> list[int]:
    """The workers of pytest-xdist, children of this process; it alone where there are none."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
    return [int(child) for child in children] or [parent]


def main(arguments: Sequence[str]) -> int:
    """Runs pytest with these arguments; its exit code."""
    rng = random.Random(1)
    running = subprocess.Popen([sys.executable, "-m", "pytest", *arguments])
    pauses = 0
    try:
        while running.poll() is None:
            time.sleep(rng.uniform(*BETWEEN_S))
            with contextlib.suppress(OSError):  # it has ended meanwhile
                worker = rng.choice(workers_of(running.pid))
                os.kill(worker, signal.SIGSTOP)
                try:
                    time.sleep(rng.uniform(*PAUSE_S))
                finally:
                    os.kill(worker, signal.SIGCONT)
                pauses += 1
    except KeyboardInterrupt:
        running.wait()  # the terminal has interrupted it as well
    print(f"stopped a worker {pauses} times")
    return running.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
