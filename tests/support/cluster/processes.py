"""A cluster of real processes: ZooKeeper, bookies, brokers. Who ends unasked is started again, as a supervisor would.

    async with ClusterProcesses(ensemble, directory, shape) as cluster:
        async with cluster.broker(0).down():     # kill -9, or whatever happens in here; started again behind it
            ...

Every daemon listens on 127.0.0.1. With `lines` others reach it, and it reaches ZooKeeper, through a relay of its own
(`support.cluster.lines`): it advertises 127.0.1.N, where the relay listens on the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.service_process import Role, ServiceFailed, ServiceProcess

from support.bookie_fleet import SETTINGS as BOOKIE_SETTINGS
from support.cluster.clocks import WithOwnClock
from support.cluster.lines import Line, Lines
from support.forked_commands import run_magnetar
from support.service import held_port
from support.storage_small_disk import SmallDisk
from support.zookeeper import Ensemble

WATCH_S = 0.05
MIB = 1 << 20
# A bookie on a small disk of its own has no more than this on it, and is read-only when less than this is free.
SMALL_DISK_MINIMUM_FREE = 32 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a cluster is, and how patient."""

    bookies: int = 3
    brokers: int = 1
    quorums: tuple[int, int, int] = (2, 2, 2)  # ensemble, write, ack
    session_s: float = 2.0
    add_timeout_s: float = 2.0
    lines: bool = False
    clocks: bool = False  # that can jump; needs libfaketime
    settings: tuple[str, ...] = ()  # section.name=value, of every daemon


class OnSmallDisk(ServiceProcess):
    """A bookie whose data are on a file system of its own."""

    def __init__(self, disk: SmallDisk, name: str, **options: Any) -> None:
        super().__init__(f"{disk.path}/{name}", **options)
        self._inside = disk.inside

    def _command_line(self) -> list[str]:
        return [*self._inside, *super()._command_line()]


class Restart(NamedTuple):
    """The supervisor started a daemon again that had ended unasked."""

    at: float
    daemon: str
    code: int
    errors: str


class Daemon:
    """One supervised process. `with down()` nobody else starts it."""

    def __init__(self, name: str, process: ServiceProcess, line: Line | None) -> None:
        self.name = name
        self.process = process
        self.line = line
        self.restarts: list[Restart] = []
        self._hand = asyncio.Lock()  # ServiceProcess is for one caller at a time

    @asynccontextmanager
    async def down(self, how: str = "kill") -> AsyncIterator[None]:
        """Ended by kill -9 ("kill") or SIGTERM ("stop"), started again behind the block."""
        async with self._hand:
            if self.process.running:
                if how == "stop":
                    code = await asyncio.to_thread(self.process.stop)
                    assert code == 0, f"{self.name} ended with {code} on SIGTERM: {self.process.errors()}"
                else:
                    await asyncio.to_thread(self.process.kill)
            yield
            if not self.process.running:
                await self._start()

    async def start(self) -> None:
        """For the first time."""
        async with self._hand:
            await self._start()

    async def _start(self) -> None:
        await asyncio.to_thread(self.process.start, timeout_s=60.0)

    @asynccontextmanager
    async def paused(self, role: Role = "daemon") -> AsyncIterator[int]:
        """SIGSTOP, and SIGCONT behind the block; yields the process id. Raises ServiceFailed if it does not run."""
        async with self._hand:
            if not self.process.running:
                raise ServiceFailed(f"{self.name} does not run, so it cannot be paused")
            pid = self.process.processes()[role]
            os.kill(pid, signal.SIGSTOP)
            try:
                yield pid
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def supervise(self) -> None:
        """For ever: starts it again when it ended unasked."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._hand.locked() or self.process.running:
                continue
            async with self._hand:  # free, so that nothing happens in between
                code = self.process.returncode
                await asyncio.to_thread(self.process.wait_ended)
                errors = self.process.errors()
                self.restarts.append(
                    Restart(time.monotonic(), self.name, -1 if code is None else code, errors)
                )
                with contextlib.suppress(
                    ServiceFailed
                ):  # e.g. ZooKeeper cannot be reached yet: again, as systemd would
                    await self._start()


class ClusterProcesses:
    """See the module docstring. Leaves nothing running."""

    def __init__(
        self, zookeeper: Ensemble, directory: Path, shape: Shape, disks: Mapping[str, SmallDisk] | None = None
    ) -> None:
        """`disks`: those of bookies that have one of their own."""
        self.zookeeper = zookeeper
        self.directory = directory
        self.shape = shape
        self.disks = dict(disks or {})
        self.url = f"{zookeeper.url}/{directory.name}"  # of the metadata, for the harness itself
        self.lines = Lines() if shape.lines else None
        self.daemons: dict[str, Daemon] = {}
        self._stack = AsyncExitStack()
        self._supervisors: list[asyncio.Task[None]] = []

    @property
    def brokers(self) -> list[Daemon]:
        """In their order."""
        return [daemon for daemon in self.daemons.values() if daemon.process.command == "broker"]

    @property
    def bookies(self) -> list[Daemon]:
        """In their order."""
        return [daemon for daemon in self.daemons.values() if daemon.process.command == "bookie"]

    @property
    def service_url(self) -> str:
        """For clients: all brokers."""
        return "magnetar://" + ",".join(
            f"{broker.process.host if broker.line is None else broker.line.host}:{broker.process.ports['magnetar']}"
            for broker in self.brokers
        )

    async def __aenter__(self) -> ClusterProcesses:
        try:
            if self.lines is not None:
                await self._stack.enter_async_context(self.lines)
            code, _, errors = await self.command("cluster", "init", "--metadata", self.url)
            assert code == 0, errors
            for number in range(1, self.shape.bookies + 1):
                await self._add("bookie", f"bookie-{number}")
            for number in range(1, self.shape.brokers + 1):
                await self._add("broker", f"broker-{number}")
            await asyncio.gather(*(daemon.start() for daemon in self.bookies))
            await asyncio.gather(*(daemon.start() for daemon in self.brokers))
            self._supervisors = [asyncio.create_task(daemon.supervise()) for daemon in self.daemons.values()]
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(_end, daemon.process) for daemon in self.daemons.values()))
        await self._stack.aclose()

    async def _add(self, command: str, name: str) -> None:
        shape = self.shape
        line = None if self.lines is None else await self.lines.line(name, self.zookeeper)
        root = self.url.rpartition("/")[2]
        metadata = self.url if line is None else f"zk://{line.zookeeper_hosts}/{root}"
        arguments = ["--metadata", metadata, "--log-level", "warning"]
        settings = [f"daemon.session_timeout_s={shape.session_s}"]
        settings += [f"ledger.add_timeout_s={shape.add_timeout_s}", "ledger.reconnect_backoff_max_s=0.2"]
        settings += ["ledger.quarantine_errors=0"]
        if command == "bookie":
            arguments += ["--id", name]
            settings += [f"bookie.{key}={value}" for key, value in BOOKIE_SETTINGS.items()]
        else:
            ensemble, write, ack = shape.quorums
            settings += [f"broker.name={name}"]
            settings += [f"broker.ensemble_size={ensemble}", f"broker.write_quorum={write}"]
            # Everything is read again at the end.
            settings += [f"broker.ack_quorum={ack}", "broker.retention_ms=-1", "broker.retention_bytes=-1"]
        if line is not None:
            settings += [f"daemon.advertised_host={line.host}"]
        for setting in (*settings, *shape.settings):
            arguments += ["--set", setting]
        ports = {"bookie" if command == "bookie" else "magnetar": held_port(self), "http": held_port(self)}
        options: dict[str, Any] = {"command": command, "arguments": arguments, "ports": ports}
        if name in self.disks:
            arguments += ["--set", f"bookie.disk_minimum_free_bytes={SMALL_DISK_MINIMUM_FREE}"]
            process: ServiceProcess = OnSmallDisk(self.disks[name], name, **options)
        elif shape.clocks:
            process = WithOwnClock(self.directory / name, self.directory / f"{name}.clock", **options)
        else:
            process = ServiceProcess(self.directory / name, **options)
        if line is not None:
            await line.open(process)
        self.daemons[name] = Daemon(name, process, line)

    async def command(self, *arguments: str) -> tuple[int, str, str]:
        """A command of `magnetar` that ends: its code, output and errors."""
        done = await asyncio.to_thread(run_magnetar, *arguments)
        return done.returncode, done.stdout, done.stderr

    async def status(self) -> dict[str, Any]:
        """`magnetar cluster status`."""
        code, output, errors = await self.command("cluster", "status", "--metadata", self.url, "--json")
        assert code == 0, errors
        status: dict[str, Any] = json.loads(output)
        return status

    async def healed(self, seconds: float = 60.0) -> dict[str, Any]:
        """Waits until every daemon runs, every broker is ready and every bookie takes entries; the status then."""
        status: dict[str, Any] = {}
        found: dict[str, str] = {}
        try:
            async with asyncio.timeout(seconds):
                while True:
                    status = await self.status()
                    rows = [(row["id"], row["state"]) for row in status["bookies"]]
                    rows += [(row["name"], row["state"]) for row in status["brokers"]]
                    found = dict(rows)
                    for name, daemon in self.daemons.items():
                        if not daemon.process.running:
                            found[name] = "does not run"
                    wanted = {daemon.name: "writable" for daemon in self.bookies}
                    if found == wanted | {daemon.name: "ready" for daemon in self.brokers}:
                        return status
        except TimeoutError:
            said = {name: daemon.process.errors()[-2000:] for name, daemon in self.daemons.items()}
            raise AssertionError(f"the cluster has not healed in {seconds:g} s: {found}; {said}") from None

    @property
    def restarts(self) -> Sequence[Restart]:
        """By the supervisor."""
        return sorted(restart for daemon in self.daemons.values() for restart in daemon.restarts)


def _end(process: ServiceProcess) -> None:
    """Whether it runs or not; what its last start holds is closed."""
    if process.running:
        process.kill()
    elif process.returncode is not None:
        process.wait_ended()
