"""Real `magnetar bookie` processes by name, on free ports: killed, stopped for a while, started again on the same ports."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from bench.service_process import Role, ServiceProcess

from magnetar.ledger import StaticBookies

MIB = 1 << 20
# Small files and caches, so that a test neither fills the disk nor zero-fills it while it measures.
SETTINGS = {
    "journal_file_bytes": 16 * MIB,
    "journal_spare_bytes": 32 * MIB,
    "journal_ring_bytes": 16 * MIB,
    "write_cache_bytes": 32 * MIB,
    "read_cache_bytes": 16 * MIB,
}
# The helpers of a killed bookie notice its end by themselves.
HELPERS_END_S = 10.0


class BookieFleet:
    """`async with BookieFleet(directory, count) as fleet`. All of them must end cleanly when it closes, and do."""

    def __init__(self, directory: Path, count: int) -> None:
        arguments = ["--log-level", "warning"]
        for name, value in SETTINGS.items():
            arguments += ["--set", f"bookie.{name}={value}"]
        self.processes = {
            f"b{number}": ServiceProcess(directory / f"b{number}", command="bookie", arguments=arguments)
            for number in range(1, count + 1)
        }
        self._stopped: dict[int, None] = {}  # process ids under SIGSTOP
        self._seen: dict[int, None] = {}  # every process that there was

    async def __aenter__(self) -> BookieFleet:
        try:
            await self.start(*self.processes)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, *names: str) -> None:
        """Returns when all of these are ready."""
        await asyncio.gather(*(asyncio.to_thread(self.processes[name].start) for name in names))
        for name in names:
            self._seen |= dict.fromkeys(self.processes[name].processes().values())

    async def kill(self, name: str, role: Role) -> None:
        """kill -9 of one of its processes; returns when none of them is left."""
        await asyncio.to_thread(self.processes[name].kill, role)

    def hang(self, name: str, role: Role) -> None:
        """SIGSTOP: connected, and silent."""
        pid = self.processes[name].processes()[role]
        self._stopped[pid] = None
        os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to all that hang."""
        for pid in self._stopped:
            os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def directory(self) -> StaticBookies:
        """A directory of its own for each ledger client."""
        return StaticBookies(
            {name: (process.host, process.ports["bookie"]) for name, process in self.processes.items()}
        )

    async def close(self) -> None:
        """SIGTERM to all; asserts that they end with 0, and leave no process."""
        self.resume()
        running = {name: process for name, process in self.processes.items() if process.running}
        codes: Sequence[int | BaseException] = await asyncio.gather(
            *(asyncio.to_thread(process.stop) for process in running.values()), return_exceptions=True
        )
        for (name, process), code in zip(running.items(), codes, strict=True):
            assert code == 0, f"bookie {name} ended with {code!r}: {process.errors()}"
        deadline = asyncio.get_running_loop().time() + HELPERS_END_S
        while left := [pid for pid in self._seen if _lives(pid)]:
            assert asyncio.get_running_loop().time() < deadline, f"processes {left} of bookies are left"
            await asyncio.sleep(0.02)


def _lives(pid: int) -> bool:
    """False for a dead process that waits for its burial, which whoever adopted it owes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
