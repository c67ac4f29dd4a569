"""Bookies behind real sockets, on directories that a test empties, swaps, copies and puts back; and ledger clients."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path

from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.server import BookieServer
from magnetar.ledger import LedgerClient, LedgerSettings, StaticBookies, StoredIdentities, TcpTransport
from magnetar.metadata import MetadataStore
from magnetar.metadata.identity import cluster_instance
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_kit import model_components, small_settings
from support.index_model import ModelStorage
from support.memory_metadata import MemoryMetadataStore
from support.service import held_port


class Disk:
    """What a bookie has stored: its directory, and its index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = ModelStorage()

    def copy_to(self, path: Path) -> Disk:
        """As a backup of a stopped bookie."""
        shutil.copytree(self.path, path)
        made = Disk(path)
        made.index = copy.deepcopy(self.index)
        return made


class Fleet:
    """Bookies by name; each keeps its port, whatever disk it is started with."""

    def __init__(self, path: Path, *names: str) -> None:
        self.path = path
        self.metadata: MetadataStore = MemoryMetadataStore()
        self.disks = {name: Disk(path / name) for name in names}
        self.ports = {name: held_port(self) for name in names}
        self.bookies: dict[str, Bookie] = {}
        self.clients: list[Client] = []
        self.starts = 0
        self._servers: dict[str, BookieServer] = {}

    async def __aenter__(self) -> Fleet:
        for name in self.disks:
            await self.start(name)
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()
        for name in list(self.bookies):
            await self.stop(name)

    async def start(self, name: str) -> Bookie:
        """With the disk that it has now."""
        disk = self.disks[name]
        self.starts += 1
        components = model_components(disk.index, seed=self.starts)
        bookie = self.bookies[name] = await open_bookie(small_settings(str(disk.path)), components)
        self._servers[name] = await BookieServer.start(
            bookie, "127.0.0.1", self.ports[name], ConnectionOptions("bookie")
        )
        return bookie

    async def stop(self, *names: str) -> None:
        """Cleanly: what it has acknowledged is on its disk in any case."""
        for name in names:
            await self._servers.pop(name).close(0.2)
            await self.bookies.pop(name).close()

    async def restart(self, *names: str) -> None:
        """Stops and starts."""
        await self.stop(*names)
        for name in names:
            await self.start(name)

    async def empty(self, name: str) -> None:
        """It comes back with nothing."""
        await self.stop(name)
        shutil.rmtree(self.disks[name].path)
        self.disks[name] = Disk(self.disks[name].path)
        await self.start(name)

    async def swap(self, one: str, other: str) -> None:
        """Each comes back with the other's disk."""
        await self.stop(one, other)
        self.disks[one], self.disks[other] = self.disks[other], self.disks[one]
        await self.start(one)
        await self.start(other)

    async def client(self, *, ensemble_size: int = 3, backoff_s: float = 0.01) -> Client:
        """A ledger client of its own, as a broker is."""
        made = await Client.open(self, ensemble_size, backoff_s)
        self.clients.append(made)
        return made


class Client:
    """Ledger client, transport and directory."""

    def __init__(self, fleet: Fleet, cluster: int, ensemble_size: int, backoff_s: float) -> None:
        self.settings = LedgerSettings(
            ensemble_size,
            2,
            2,
            read_timeout_s=2.0,
            reconnect_backoff_s=backoff_s,
            reconnect_backoff_max_s=2 * backoff_s,
            deletion_retry_s=0.05,
        )
        self.directory = StaticBookies({name: ("127.0.0.1", port) for name, port in fleet.ports.items()})
        self.identities = StoredIdentities(fleet.metadata, cluster)
        self.transport = TcpTransport(
            self.directory, self.settings, ConnectionOptions("broker"), self.identities
        )
        self.ledgers = LedgerClient(
            StoredLedgers(fleet.metadata),
            self.transport,
            self.directory,
            self.settings,
            random.Random(1),
            SystemClock(),
            remember_deletions=True,
        )
        self.ledgers.send_missed_deletions()
        self._closed = False

    @classmethod
    async def open(cls, fleet: Fleet, ensemble_size: int, backoff_s: float) -> Client:
        """The store's instance is made by the first one."""
        cluster = await cluster_instance(fleet.metadata, random.Random(5))
        return cls(fleet, cluster, ensemble_size, backoff_s)

    async def close(self) -> None:
        """May be called again."""
        if not self._closed:
            self._closed = True
            await self.ledgers.close()
            await self.transport.close()
