"""`magnetar spark JOB` as a person starts it: a process of its own, whose every descendant can be found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

# A start in half the CPU time: such short runs gain nothing from the optimizing compiler.
QUICK = (
    *("--master", "local[2]"),
    *("--conf", "spark.sql.shuffle.partitions=2"),
    *("--conf", "spark.driver.memory=1g"),
    *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"),
)
_MARK = "MAGNETAR_TEST_COMMAND"


class Ended(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its one line on standard output."""
        return json.loads(self.out)


class SparkCommand:
    """Started when it is made; `end` it."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-m", "magnetar.cli.main", "spark", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, _MARK: self._mark},
        )

    def send(self, number: int) -> None:
        """A signal, as SIGINT for Ctrl-C."""
        self._process.send_signal(number)

    @property
    def running(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    def end(self, timeout_s: float = 150) -> Ended:
        """Waits for it. Nothing that it started is left."""
        try:
            out, err = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self.wait_alone()
        return Ended(self._process.returncode, out, err)

    def descendants(self) -> dict[int, str]:
        """Command lines by process id, of what it started and is there still."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self._process.pid:
                continue
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if f"{_MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def wait_for(self, program: str) -> None:
        """Until it has started something with this in its command line."""
        while not any(program in line for line in self.descendants().values()):
            assert self.running, self._process.communicate()
            time.sleep(0.05)

    def wait_alone(self) -> None:
        """Until nothing that it started is left; Python workers see the end of the JVM a moment later."""
        while self.descendants():
            time.sleep(0.05)

    def kill(self) -> None:
        """With all that it started."""
        self._process.kill()
        self._process.wait()
        for process in self.descendants():
            os.kill(process, signal.SIGKILL)


__all__ = ["QUICK", "Ended", "SparkCommand"]
