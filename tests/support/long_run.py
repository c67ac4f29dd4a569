"""`make long`: goals of the Makefile one after another, and a table of how each of them ended.

    make long                     # all long forms: some hours, before a change of the protocols is called done
    make long ONLY='sim crash'    # these goals

A goal that fails stops none behind it. What each prints is in build/long/GOAL.log. Exit code 0: all have passed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

REPOSITORY = Path(__file__).parents[2]


def main(
    goals: Sequence[str], make: Sequence[str] = ("make",), folder: Path = REPOSITORY / "build/long"
) -> int:
    """Runs `make GOAL` for each; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, str, str]] = []
    for goal in goals:
        began, log = time.monotonic(), folder / f"{goal}.log"
        print(f"make {goal}: output in {log}", flush=True)
        with log.open("w") as out:
            done = subprocess.run(
                [*make, goal], cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        minutes, seconds = divmod(round(time.monotonic() - began), 60)
        last = (log.read_text(errors="replace").strip().splitlines() or ["nothing was printed"])[-1]
        rows.append((goal, "passed" if done.returncode == 0 else "FAILED", f"{minutes}:{seconds:02}", last))
    print(f"\n{'goal':10} {'result':7} {'min:s':>7}  last line")
    for goal, result, took, last in rows:
        print(f"{goal:10} {result:7} {took:>7}  {last.strip('= ')[:100]}")
    return 0 if all(result == "passed" for _, result, _, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
