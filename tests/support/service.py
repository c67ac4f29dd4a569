"""A real standalone service for tests: started on free ports, killed by role, restarted on the same ports.

service = Service(tmp_path / "data")
service.start()                      # blocks until it is ready; in an async test: await asyncio.to_thread(...)
service.kill("writer")               # "daemon", "writer", "helper" or "both" (daemon and writer)
service.start()
service.stop()                       # asserts a clean exit
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from bench.service_process import Role, ServiceProcess, resident_bytes

__all__ = ["Service", "resident_bytes"]

Victim = Literal["daemon", "writer", "helper", "both"]
_ROLES: dict[str, tuple[Role, ...]] = {
    "daemon": ("daemon",),
    "writer": ("journal-writer",),
    "helper": ("storage-helper",),
    "both": ("daemon", "journal-writer"),
}
_TESTS = {"PYTHONPATH": str(Path(__file__).parents[1])}


def held_port(owner: object) -> int:
    """A free port that nobody else is given as long as `owner` lives, also while its daemon is down.

    Tests in other workers ask the kernel for ports all the time. It gives none of a socket that is bound; the daemon gets it
    by its number, since both sides say SO_REUSEADDR and this one does not listen.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    weakref.finalize(owner, os.close, holder.detach())
    return port


@contextlib.contextmanager
def holding_port() -> Iterator[int]:
    """`held_port` as long as the body runs."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


class Service:
    """One service on one data directory. `journal_disk="lossy"`: the writer drops what was not synced when it dies."""

    def __init__(
        self,
        data: Path,
        *,
        journal_disk: str = "real",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        pulsar: bool = False,
    ) -> None:
        """`pulsar`: it has a port for Pulsar's protocol, too."""
        schemes = ("magnetar", "bookie", "http", *(("pulsar",) if pulsar else ()))
        self.data = data
        self._process = ServiceProcess(
            data,
            arguments=arguments,
            environment=_TESTS | dict(environment or {}),
            module="support.lossy.service" if journal_disk == "lossy" else "magnetar.cli.main",
            ports={scheme: held_port(self) for scheme in schemes},
        )

    def start(self) -> None:
        """Returns when the service is ready."""
        self._process.start()

    def stop(self) -> None:
        """SIGTERM; the service must end cleanly. Does nothing when it is not running."""
        if self._process.running:
            code = self._process.stop()
            assert code == 0, f"the service ended with {code}"

    def kill(self, victim: str = "daemon") -> None:
        """kill -9; returns when the daemon and its helpers have ended."""
        self._process.kill(*_ROLES[victim])

    @property
    def url(self) -> str:
        """For magnetar.client.connect."""
        return self._process.url

    @property
    def port(self) -> int:
        """Of the broker's listener."""
        return self._process.ports["magnetar"]

    @property
    def pulsar_port(self) -> int:
        """Of the listener for Pulsar's protocol."""
        return self._process.ports["pulsar"]

    @property
    def bookie_port(self) -> int:
        """Of the bookie's TCP server."""
        return self._process.ports["bookie"]

    @property
    def http_port(self) -> int:
        """Of metrics and health."""
        return self._process.ports["http"]

    @property
    def daemon_pid(self) -> int:
        """Process id of the daemon."""
        return self._process.pid

    @property
    def writer_pid(self) -> int:
        """Process id of the journal writer."""
        return self._process.processes()["journal-writer"]

    @property
    def helper_pid(self) -> int:
        """Process id of the storage helper."""
        return self._process.processes()["storage-helper"]

    @property
    def ready_line(self) -> str:
        """What the last start printed."""
        return self._process.ready_line

    @property
    def ready_after_s(self) -> float:
        """Seconds that the last start took."""
        return self._process.ready_after_s

    @property
    def running(self) -> bool:
        """False once the daemon has ended."""
        return self._process.running

    @property
    def returncode(self) -> int | None:
        """Exit code of the daemon, None while it runs."""
        return self._process.returncode

    def errors(self) -> str:
        """Standard error of the last start."""
        return self._process.errors()

    def wait_ended(self) -> None:
        """Waits until the daemon and its helpers have ended by themselves."""
        self._process.wait_ended()
