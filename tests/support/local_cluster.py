"""The cluster of `make cluster` under test: honcho and all daemons, on ports of its own, ended by Ctrl-C.

with LocalCluster(tmp_path) as cluster:      # three ZooKeeper servers, three bookies, `brokers` brokers
    connect(cluster.url)
    cluster.control("restart", "bookie-2")
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from members import Cluster

from support.forked_commands import run_magnetar

__all__ = ["RESTART", "LocalCluster"]

REPOSITORY = Path(__file__).parents[2]
_SCRIPT = str(REPOSITORY / "deploy" / "cluster" / "local.py")
# Of `magnetar cluster rolling-restart`.
RESTART = ("--command", f"{shlex.quote(sys.executable)} {shlex.quote(_SCRIPT)} restart {{name}}")
_TRIES = 20


class LocalCluster:
    """Skips the test where there is no Java. `variables` are of the environment: of `members.py`, settings of daemons."""

    def __init__(self, directory: Path, brokers: int = 2, **variables: str) -> None:
        if shutil.which("java") is None:
            pytest.skip("there is no Java on this machine; ZooKeeper needs one")
        self.directory = directory
        self._environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "CLUSTER_DATA": str(directory / "data"),
            "CLUSTER_BROKERS": str(brokers),
            **variables,
        }
        # Ports that nobody has now. Another worker may take one before they are used: the numbers are drawn at random.
        rng = random.Random()
        refusals: list[str] = []
        while len(refusals) < _TRIES:
            self._environment["CLUSTER_PORTS"] = str(rng.randrange(1000, 24_000))
            checked = self._run("check")
            if checked.returncode == 0:
                break
            refusals.append(checked.stderr)
        else:
            pytest.fail(f"no free ports: {refusals}")
        self.cluster = Cluster.of_environment(self._environment)
        self.url = self.cluster.service_url
        self.metadata = self.cluster.metadata
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """For commands that look for this cluster."""
        return {**self._environment, "MAGNETAR_DAEMON_METADATA": self.metadata}

    def output(self) -> str:
        """Of honcho and the daemons."""
        return (self.directory / "output").read_text()

    def start(self) -> None:
        """Returns when the table is printed."""
        counts = f"zookeeper=3,bookie=3,broker={self.cluster.brokers}"
        line = [
            sys.executable,
            "deploy/cluster/run_all.py",
            "start",
            "--procfile",
            "deploy/cluster/Procfile",
            "--app-root",
            ".",
        ]
        with open(self.directory / "output", "wb") as output:
            self._process = subprocess.Popen(
                [*line, "--concurrency", counts],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                cwd=REPOSITORY, env=self._environment, start_new_session=True,
            )  # fmt: skip
        while "Ctrl-C; the data stay" not in self.output():  # after a minute without it all of it ends
            assert self._process.poll() is None, self.output()
            time.sleep(0.05)

    def control(self, action: str, name: str) -> None:
        """stop, start, restart a daemon; returns when it is done."""
        done = self._run(action, name)
        assert done.returncode == 0, done.stderr

    def rolling_restart(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`magnetar cluster rolling-restart ARGUMENTS`."""
        line = ("cluster", "rolling-restart", *arguments)
        return run_magnetar(*line, environment=self.environment, timeout=200)

    def processes(self) -> list[int]:
        """All that belong to the cluster, by their command lines and environments."""
        wanted = f"CLUSTER_DATA={self._environment['CLUSTER_DATA']}".encode()
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (directory / "environ").read_bytes().split(b"\0"):
                    found.append(int(directory.name))
            except OSError:
                continue
        return found

    def stop(self) -> int:
        """Ctrl-C; returns the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self._process.wait()

    def __enter__(self) -> LocalCluster:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()
        for process in self.processes():
            os.kill(process, signal.SIGKILL)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, _SCRIPT, *arguments]
        return subprocess.run(line, capture_output=True, text=True, env=self._environment, timeout=90)
