"""A real service as a child process: started, waited for, watched, killed and started again on the same ports.

The demo, the benchmarks and the tests start services this way. Ports 0 are chosen by the first start and used again by later
ones, so that clients find the service again.

    with ServiceProcess(data="/tmp/x") as service:
        ...connect(service.url)...
        service.kill("daemon"); service.start()
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Literal, NamedTuple

Role = Literal["daemon", "journal-writer", "storage-helper", "archive-reader"]

_LIMIT_S = 60.0  # of a start and of an end, of about a second, on a loaded machine
_READY = re.compile(r"magnetar \S+ is ready: (?P<addresses>.*)")
_ADDRESS = re.compile(r"(?P<scheme>\w+)://(?P<host>[^\s:/]+|\[[^\]\s]+\]):(?P<port>\d+)")
_POLL_S = 0.002


class ServiceFailed(Exception):
    """The service did not become ready, or did not stop; the text holds what it wrote to standard error."""


class CpuTime(NamedTuple):
    """Seconds of CPU that a process has used."""

    user: float
    system: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.user + self.system


class ServiceProcess:
    """`magnetar standalone` (or another daemon) with its helper processes. Blocking; asyncio callers use a thread."""

    # What starts the process. The tests have one that need not import anything (support.forked_commands).
    spawn: ClassVar[Callable[..., subprocess.Popen[bytes]]] = subprocess.Popen

    def __init__(
        self,
        data: str | os.PathLike[str] | None,
        *,
        command: str = "standalone",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        ports: Mapping[str, int] | None = None,
        module: str = "magnetar.cli.main",
    ) -> None:
        """`ports` maps magnetar, pulsar, bookie and http to numbers; absent ones are free ports, but pulsar none. A pulsar
        of -1 is an older revision, which has no such option.

        `data` None: no such option.
        """
        self._module = module
        self.data = None if data is None else str(data)
        self.command = command
        self.arguments = list(arguments)
        self.environment = dict(environment or {})
        # Scheme of the ready line -> port; filled by the first start.
        self.ports: dict[str, int] = dict(ports or {})
        self.host = "127.0.0.1"
        # Seconds from spawning the process to its ready line, of the last start.
        self.ready_after_s = 0.0
        self.ready_line = ""
        # Helpers of the last start, by role; they outlive a killed daemon for a moment.
        self._helpers: dict[int, Role] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._last_errors = ""  # of a run that has ended

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"magnetar://{self.host}:{self.ports['magnetar']}"

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self._process is not None, "the service was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """True until the daemon has ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit code of the daemon, None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self, *, timeout_s: float = _LIMIT_S) -> None:
        """Returns when the ready line was read. Raises ServiceFailed with the output of the service otherwise."""
        assert not self.running, "the service is running"
        self._close()
        self._last_errors = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would block the daemon
        began = time.perf_counter()
        self._process = self.spawn(
            self._command_line(),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            stdin=subprocess.DEVNULL,
            env=os.environ | self.environment,
        )
        line = self._read_ready_line(began + timeout_s)
        self.ready_after_s = time.perf_counter() - began
        self.ready_line = line
        match = _READY.match(line)
        if match is None:
            self._process.kill()
            self._process.wait()
            raise ServiceFailed(
                f"magnetar {self.command} did not become ready: {line} {self.errors()}".strip()
            )
        for scheme, _, port in _ADDRESS.findall(match["addresses"]):
            self.ports[scheme] = int(port)
        self._helpers = helper_roles(self.pid)

    def errors(self) -> str:
        """What the service of the last start wrote to standard error."""
        if self._errors is None:
            return self._last_errors
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def processes(self) -> dict[Role, int]:
        """Process ids of daemon and helpers by role."""
        if self.running:
            self._helpers = helper_roles(self.pid) or self._helpers
        roles: dict[Role, int] = {"daemon": self.pid}
        return roles | {role: pid for pid, role in self._helpers.items()}

    def kill(self, *roles: Role) -> None:
        """kill -9 of the processes with these roles (default: the daemon); returns when daemon and helpers have ended.

        The daemon ends by itself when its journal writer dies, and helpers when their daemon does.
        """
        found = self.processes()
        for role in roles or ("daemon",):
            if role not in found:
                raise ServiceFailed(f"the service has no {role}; it has {', '.join(found)}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[role], signal.SIGKILL)
        self.wait_ended()

    def stop(self, *, timeout_s: float = _LIMIT_S) -> int:
        """SIGTERM, then waits for daemon and helpers; returns the exit code. Kills and raises after `timeout_s`."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.terminate()
        self.wait_ended(timeout_s=timeout_s)
        return self._process.returncode

    def wait_ended(self, *, timeout_s: float = _LIMIT_S) -> None:
        """Waits until daemon and helpers have ended; after `timeout_s` kills them and raises ServiceFailed."""
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._kill_all()
            raise ServiceFailed(f"magnetar {self.command} did not end: {self.errors()}") from None
        while any(map(_alive, self._helpers)):
            if time.monotonic() > deadline:
                self._kill_all()
                raise ServiceFailed(f"helper processes outlived magnetar {self.command}: {self.errors()}")
            time.sleep(_POLL_S)
        self._close()

    def resident_bytes(self) -> dict[Role, int]:
        """Resident memory by role."""
        return {role: resident_bytes(pid) for role, pid in self.processes().items()}

    def __enter__(self) -> ServiceProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command_line(self) -> list[str]:
        line = [sys.executable, "-m", self._module, self.command]
        if self.data is not None:
            line += ["--data", self.data]
        flags = {
            "standalone": {"magnetar": "--port", "http": "--http-port", "bookie": "--bookie-port"},
            "broker": {"magnetar": "--port", "http": "--http-port"},
            "bookie": {"bookie": "--port", "http": "--http-port"},
            "autorecovery": {"http": "--http-port"},
        }[self.command]
        for scheme, flag in flags.items():
            line += [flag, str(self.ports.get(scheme, 0))]
        if self.command in ("standalone", "broker") and self.ports.get("pulsar") != -1:
            line += ["--pulsar-port", str(self.ports.get("pulsar", 0))]
        return line + self.arguments

    def _read_ready_line(self, deadline: float) -> str:
        """First line of standard output; empty when the service ended or the deadline passed."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.perf_counter()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return "no ready line in time;"
            piece = os.read(descriptor, 4096)
            if not piece:
                return ""
            line += piece
        return line.splitlines()[0].decode()

    def _kill_all(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        for pid in self._helpers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._close()

    def _close(self) -> None:
        """Closes the pipes of a run that has ended; its output stays available."""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        self._last_errors = self.errors()
        if self._errors is not None:
            self._errors.close()
            self._errors = None


_SCRIPTS: dict[bytes, Role] = {
    b"writer_process.py": "journal-writer",
    b"archive/process.py": "archive-reader",
}


def helper_roles(daemon: int) -> dict[int, Role]:
    """Children of the daemon by process id, with the role that their command line shows."""
    roles: dict[int, Role] = {}
    try:
        children = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
    except OSError:
        return roles
    for child in map(int, children):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        scripts = [role for script, role in _SCRIPTS.items() if script in command]
        roles[child] = scripts[0] if scripts else "storage-helper"
    return roles


def cpu_time(pid: int) -> CpuTime:
    """CPU that the process has used, in seconds, to 10 ms. Zeros when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return CpuTime(0.0, 0.0)
    tick = os.sysconf("SC_CLK_TCK")
    return CpuTime(int(fields[11]) / tick, int(fields[12]) / tick)


def resident_bytes(pid: int) -> int:
    """VmRSS of the process; 0 when it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


def io_counters(pid: int) -> dict[str, int]:
    """What /proc/PID/io counts; empty when the process has ended or is not ours."""
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return {}
    return {name: int(value) for name, value in (line.split(": ") for line in text.splitlines())}


def free_port() -> int:
    """Nobody listens there at this moment."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        return port


def _alive(pid: int) -> bool:
    """False for processes that have ended or wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
