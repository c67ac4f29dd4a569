"""Three bookies as processes on loopback with fsync on, with ZooKeeper below them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.service_process import ServiceProcess
from magnetar.cli.wiring.metadata import open_shared_metadata, system_rng
from magnetar.metadata.identity import cluster_instance

SESSION_S = 4.0
SETTINGS = {
    "daemon.session_timeout_s": SESSION_S,
    "broker.ensemble_size": 3,
    "broker.write_quorum": 2,
    "broker.ack_quorum": 2,
    "repair.lost_bookie_delay_s": 2,
    "repair.open_ledger_grace_s": 2,
    "repair.retry_backoff_s": 1,
}


class Cluster:
    """The bookies, and how another daemon of their cluster is made."""

    def __init__(self, ensemble: Any, directory: Path) -> None:
        self.ensemble = ensemble
        self.url = f"{ensemble.url}/bench"
        self._directory = directory
        self.bookies: dict[str, ServiceProcess] = {}

    def daemon(self, command: str, name: str, *arguments: str) -> ServiceProcess:
        """Not started."""
        line = ["--metadata", self.url, "--log-level", "warning"]
        line += [part for item in SETTINGS.items() for part in ("--set", f"{item[0]}={item[1]}")]
        return ServiceProcess(self._directory / name, command=command, arguments=[*line, *arguments])

    async def add_bookie(self, name: str) -> None:
        """Ready when it returns."""
        bookie = self.bookies[name] = self.daemon("bookie", name, "--id", name)
        await asyncio.to_thread(bookie.start)


@contextlib.asynccontextmanager
async def started(ensemble: Any, directory: Path) -> AsyncIterator[Cluster]:
    """Three bookies that are ready."""
    cluster = Cluster(ensemble, directory)
    async with AsyncExitStack() as stops:
        store = await open_shared_metadata(cluster.url, system_rng(), stops, make_root=True)
        await cluster_instance(store, system_rng())
        try:
            for number in range(1, 4):
                await cluster.add_bookie(f"b{number}")
            yield cluster
        finally:
            for bookie in cluster.bookies.values():
                if bookie.running:
                    bookie.kill()
