"""The cluster on this machine: what `make cluster` and its Procfile run.

    check            nothing is in the way: Java, ports, no other cluster on these data; else one line, exit code 78
    run              a daemon, named by honcho (bookie.2); it waits for the cluster's metadata, and its successors stop first
    table            makes the cluster's metadata, prints who serves where when all of it serves, and stays
    stop, start, restart NAME   one daemon of a cluster that runs

    ZooKeeper <── bookies <── brokers        what stands to the left stops only when all to its right has stopped: a broker
                                             closes its ledgers on bookies that still run

A daemon that is killed, or that ends with code 70, is started again after a second, as a supervisor does it; any other end
ends the cluster, and so does Ctrl-C. Each daemon holds a shared lock on DATA/KIND.running while it runs: what it stands on
waits for that.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from members import Cluster, Member, WrongState, zookeeper_class_path

EXIT_CONFIG = 78
EXIT_FAILED = 70
RESTART_S = 1.0
POLL_S = 0.05
START_S = 60.0
STOP_S = 30.0
# Whose daemons must have stopped before this kind does.
_AFTER = {"zookeeper": ("bookie", "broker"), "bookie": ("broker",), "broker": ()}
_PR_SET_PDEATHSIG = 1
_NUMBERS = "numbers.json"


def check(cluster: Cluster) -> None:
    """Raises WrongState when the cluster cannot be started."""
    zookeeper_class_path()
    try:
        cluster.data.mkdir(parents=True, exist_ok=True)
        with _locked(cluster.data / "cluster.running", fcntl.LOCK_EX, wait=False):
            pass
    except BlockingIOError:
        raise WrongState(
            f"a cluster runs on the data in {cluster.data} already; stop it with Ctrl-C first"
        ) from None
    except OSError as error:
        raise WrongState(
            f"the data directory {cluster.data} cannot be used: {error}; see CLUSTER_DATA"
        ) from None
    taken = [
        f"{port} of {member.name}" for member in cluster.members() for port in member.ports if _in_use(port)
    ]
    if taken:
        raise WrongState(
            f"these ports on 127.0.0.1 are in use: {', '.join(taken)}; stop what listens there, or move all ports of the "
            "cluster with CLUSTER_PORTS=1000"
        )
    _marker(cluster).unlink(missing_ok=True)
    numbers = {"CLUSTER_BROKERS": str(cluster.brokers), "CLUSTER_PORTS": str(cluster.offset)}
    (cluster.data / _NUMBERS).write_text(json.dumps(numbers))


def _started_with(data: Path) -> dict[str, str]:
    """The variables that the cluster on these data was checked with: `stop` is called from another shell."""
    try:
        return dict(json.loads((data / _NUMBERS).read_text()))
    except FileNotFoundError:
        return {}


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _marker(cluster: Cluster) -> Path:
    """There since the metadata of the cluster were made, or found, in this run."""
    return cluster.data / "metadata.made"


@contextlib.contextmanager
def _locked(path: Path, how: int, *, wait: bool = True) -> Iterator[None]:
    """Raises BlockingIOError without `wait`."""
    with open(path, "a") as file:
        fcntl.flock(file, how | (0 if wait else fcntl.LOCK_NB))
        yield


class Supervisor:
    """Runs one daemon until it is to stop."""

    def __init__(self, cluster: Cluster, member: Member) -> None:
        self._cluster = cluster
        self._member = member
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._wanted = True  # False after `stop NAME`, until `start NAME`
        self._end_expected = False  # the process that runs was told to end, by `stop NAME`
        self._running: IO[str] = open(cluster.data / f"{member.kind}.running", "a")  # noqa: SIM115 - until the process ends
        self._held = open(cluster.data / "cluster.running", "a")  # noqa: SIM115 - the same

    def run(self) -> int:
        """Returns the exit code."""
        fcntl.flock(self._running, fcntl.LOCK_SH)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGUSR1, lambda *_: self._want(False))
        signal.signal(signal.SIGUSR2, lambda *_: self._want(True))
        self._path.write_text(str(os.getpid()))
        try:
            return self._run()
        finally:
            self._path.unlink(missing_ok=True)
            fcntl.flock(self._running, fcntl.LOCK_UN)

    @property
    def _path(self) -> Path:
        return self._cluster.data / f"{self._member.name}.pid"

    def _run(self) -> int:
        if self._member.kind != "zookeeper" and not self._wait_for_metadata():
            return 0
        command = self._cluster.command(self._member)
        errors = self._errors()
        while True:
            if self._stopping:
                return 0
            if not self._wanted:
                time.sleep(POLL_S)
                continue
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=self._environment(),
                preexec_fn=_end_with_parent,
                start_new_session=True,
            )
            if self._told_to_end():  # meanwhile
                self._process.terminate()
            if (code := self._verdict(self._process.wait())) is not None:
                return code

    def _verdict(self, code: int) -> int | None:
        """What the end of the daemon means: an exit code, or None: it is to run again."""
        if self._stopping:
            return 0 if code in (0, 128 + signal.SIGTERM, -signal.SIGTERM) else code
        if self._end_expected:
            self._end_expected = False
            return None
        if code >= 0 and code != EXIT_FAILED:
            return code or 1
        print(f"{self._member.name} ended with code {code}; it is started again", flush=True)
        time.sleep(RESTART_S)
        return None

    def _environment(self) -> dict[str, str]:
        """Where DATA/sources names a source tree, the daemon runs that one: `make upgrade-test`."""
        path = self._cluster.data / "sources"
        if not path.exists():
            return dict(os.environ)
        tree = Path(path.read_text().strip())
        roots = [str(tree / root) for root in ("proto", "bookie", "broker", "client")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}

    def _told_to_end(self) -> bool:
        return self._stopping or not self._wanted

    def _errors(self) -> IO[str] | None:
        """Of ZooKeeper, which talks much: a file of its own; of the others what this process has."""
        if self._member.kind != "zookeeper":
            return None
        return open(self._cluster.directory(self._member) / "log", "w")

    def _wait_for_metadata(self) -> bool:
        deadline = time.monotonic() + START_S
        while not self._stopping and not _marker(self._cluster).exists():
            if time.monotonic() > deadline:
                raise WrongState(f"{self._member.name}: no metadata of the cluster after {START_S:g} s")
            time.sleep(POLL_S)
        return not self._stopping

    def _want(self, wanted: bool) -> None:
        self._wanted = wanted
        if not wanted and self._process is not None:
            self._end_expected = True
            self._process.terminate()

    def _stop(self, *_: object) -> None:
        if self._stopping:
            return
        self._stopping = True
        for kind in _AFTER[self._member.kind]:
            with _locked(self._cluster.data / f"{kind}.running", fcntl.LOCK_EX):
                pass
        if self._process is not None:
            self._process.terminate()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def control(cluster: Cluster, name: str, actions: Sequence[str]) -> None:
    """Stops and starts a daemon of a cluster that runs; returns when that is done. Raises WrongState."""
    member = next((member for member in cluster.members() if member.name == name), None)
    if member is None:
        known = ", ".join(member.name for member in cluster.members())
        raise WrongState(f"there is no daemon {name}; there are {known}")
    try:
        supervisor = int((cluster.data / f"{name}.pid").read_text())
        for action in actions:
            os.kill(supervisor, signal.SIGUSR1 if action == "stop" else signal.SIGUSR2)
            _wait_for(member, listens=action == "start")
    except (OSError, ValueError):
        raise WrongState(f"{name} is not running: start the cluster with `make cluster`") from None


def _wait_for(member: Member, *, listens: bool) -> None:
    deadline = time.monotonic() + STOP_S
    while _connects(member.port) != listens or (not listens and any(map(_in_use, member.ports))):
        if time.monotonic() > deadline:
            raise WrongState(f"{member.name} did not {'start' if listens else 'stop'} within {STOP_S:g} s")
        time.sleep(POLL_S)


def _connects(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def main() -> int:
    """The command line."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("check", "run", "table", "stop", "start", "restart"))
    parser.add_argument("name", nargs="?", default=os.environ.get("HONCHO_PROCESS_NAME", ""))
    given = parser.parse_args()
    try:
        cluster = Cluster.of_environment(os.environ)
        if given.action == "check":
            check(cluster)
        elif given.action == "run":
            kind, _, number = given.name.partition(".")
            return Supervisor(cluster, cluster.of_kind(kind)[int(number) - 1]).run()
        elif given.action == "table":
            from table import show

            return show(cluster, _marker(cluster), began)
        else:
            cluster = Cluster.of_environment({**_started_with(cluster.data), **os.environ})
            actions = ("stop", "start") if given.action == "restart" else (given.action,)
            control(cluster, given.name, actions)
    except WrongState as error:
        print(f"make cluster: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
