"""One run of a benchmark on one side: `python -m bench ... --json FILE` with the side's interpreter, as a child process.

Both sides run the same benchmark code, which is neither side's installed product: a changed benchmark would compare apples
with pears. That code may need more of the product than the base has; `check` says so before anything is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.compare.errors import CompareFailed
from bench.figures import Run, read_run

STOP_S = 30.0  # a driver stops its services and removes their data
SAID_LINES = 15


class Part(NamedTuple):
    """What is measured by one pair of runs: a workload of a benchmark; `bench` is "" for that of the service."""

    bench: str
    workload: str

    def __str__(self) -> str:
        return f"{self.bench}:{self.workload}" if self.bench else self.workload


class Side(NamedTuple):
    """`label` for people."""

    label: str
    python: Path


class Drivers:
    """Runs benchmarks from a copy of their code."""

    def __init__(self, folder: Path, *, quick: bool, settle_s: float) -> None:
        """`folder` holds `bench/`, and nothing that is imported besides."""
        self._folder = folder
        self._options = ["--rounds", "1", "--settle", str(settle_s), *(["--quick"] if quick else [])]

    def check(self, side: Side, parts: Sequence[Part]) -> None:
        """Raises CompareFailed when the benchmarks of these parts cannot be imported beside this side's product."""
        packages = {f"bench.{part.bench}" if part.bench else "bench" for part in parts}
        imports = [f"{package}.{module}" for package in sorted(packages) for module in ("run", "client")]
        imports.insert(0, "bench.__main__")
        done = subprocess.run(
            [str(side.python), "-c", f"import {', '.join(imports)}"],
            cwd=self._folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CompareFailed(
                f"the benchmarks need what {side.label} does not have: {_last_line(done.stdout)}\n"
                "Compare with a later base, or let the base's own benchmarks measure both sides: --bench BASE (make: "
                "ARGS='--bench BASE')."
            )

    def run(self, side: Side, part: Part) -> Run:
        """One round of the workload. Raises CompareFailed with what the benchmark said."""
        report = self._folder / "run.json"
        report.unlink(missing_ok=True)
        command = [str(side.python), "-m", "bench", *([part.bench] if part.bench else [])]
        command += [*self._options, "--only", part.workload, "--no-limits", "--json", str(report)]
        with (self._folder / "run.txt").open("w+") as output:
            code = run_alone(command, self._folder, output.fileno())
            output.seek(0)
            said = output.read().splitlines()[-SAID_LINES:]
        if code:
            raise CompareFailed(
                f"({part}) of {side.label} ended with {code}:\n" + "\n".join(said) + "\n"
                "If the product lacks what the benchmark uses, compare with a later base, or with --bench BASE."
            )
        try:
            return read_run(json.loads(report.read_text()))
        except (OSError, ValueError) as error:
            raise CompareFailed(f"({part}) of {side.label}: {error}") from None


def run_alone(command: Sequence[str], folder: Path, output: int) -> int:
    """Runs the command in a session of its own, and returns its exit code.

    Ctrl-C then reaches this process alone, which lets the command end in order: SIGINT, STOP_S to stop its services, and
    SIGKILL for whatever is left of its session. Helpers of a service end with the service.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait()
    except BaseException:
        try:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def _environment() -> dict[str, str]:
    """Without what would let one side see the code of another."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1]
