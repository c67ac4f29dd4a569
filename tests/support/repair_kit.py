"""A cluster under repair: bookies in memory that register in a metadata store, ledgers, and processes with AutoRecovery.

cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
ledger = await cluster.closed_ledger(entries=20)
repair = await cluster.autorecovery()
await cluster.lose("b1")
await cluster.until(lambda: cluster.replicated(ledger))
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from magnetar.ledger import LedgerClient, LedgerMetadata, LedgerSettings, LocalTransport, RegisteredBookies
from magnetar.ledger.directory import encode_registration
from magnetar.ledger.replication.auto_recovery import AutoRecovery
from magnetar.ledger.replication.core.request import RepairRequest
from magnetar.ledger.replication.queue import UnderreplicatedLedgers
from magnetar.ledger.replication.settings import RepairSettings
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.metadata.paths import cookie_path
from magnetar.metadata.store import Session
from magnetar.proto.errors import BookieUnavailable
from support.bookies import Bookies, Confirmations, FakeBookie
from support.memory_metadata import MemoryMetadataStore

# Short times, so that a test in real time ends; tests in virtual time give their own.
FAST: dict[str, Any] = {
    "lost_bookie_delay_s": 0.05,
    "open_ledger_grace_s": 0.05,
    "retry_backoff_s": 0.05,
    "retry_backoff_max_s": 0.2,
    "queue_interval_s": 0.1,
    "copy_bytes_per_s": 1 << 30,
}


class RepairCluster:
    """See the module."""

    def __init__(self, settings: LedgerSettings | None = None) -> None:
        self.metadata = MemoryMetadataStore()
        self.bookies = Bookies(metadata=self.metadata)
        self.settings = settings or LedgerSettings()
        self.queue = UnderreplicatedLedgers(self.metadata)
        self.repairs: list[AutoRecovery] = []
        self._sessions: dict[str, Session] = {}
        self._clients: list[LedgerClient] = []
        self._directories: list[RegisteredBookies] = []

    @classmethod
    async def start(cls, *names: str, settings: LedgerSettings | None = None) -> RepairCluster:
        """A cluster of these bookies, all registered."""
        cluster = cls(settings)
        for name in names:
            await cluster.register(name)
        return cluster

    async def register(self, name: str, *, read_only: bool = False, **labels: str) -> None:
        """The bookie starts, or changes its registration. `labels`: rack, zone, group."""
        if name not in self.bookies:
            self.bookies[name] = FakeBookie(name)
            await self.metadata.create(cookie_path(name), b"")
        await self.unregister(name)
        self.bookies[name].fail(None)
        session = self._sessions[name] = await self.metadata.open_session(10.0)
        value = encode_registration("127.0.0.1:1", read_only=read_only, **labels)  # type: ignore[arg-type]
        await self.metadata.create(f"/bookies/{name}", value, session=session)

    async def unregister(self, name: str) -> None:
        """Its registration vanishes; what it stores can be read all the same."""
        if (session := self._sessions.pop(name, None)) is not None:
            await session.close()

    async def lose(self, name: str) -> None:
        """The bookie and its disks are gone."""
        await self.unregister(name)
        self.bookies[name].fail(BookieUnavailable(f"{name} is lost"))

    async def client(self, settings: LedgerSettings | None = None) -> LedgerClient:
        """A ledger client of its own."""
        settings = settings or self.settings
        directory = await RegisteredBookies.open(self.metadata)
        self._directories.append(directory)
        client = LedgerClient(
            StoredLedgers(self.metadata),
            LocalTransport(
                self.bookies, add_timeout_s=settings.add_timeout_s, read_timeout_s=settings.read_timeout_s
            ),
            directory,
            settings,
            random.Random(len(self._clients)),
            self.bookies.clock,
        )
        self._clients.append(client)
        return client

    async def autorecovery(self, *, seed: int = 0, start: bool = True, **changes: Any) -> AutoRecovery:
        """A process with an auditor and workers."""
        directory = await RegisteredBookies.open(self.metadata)
        self._directories.append(directory)
        s = self.settings
        repair = AutoRecovery(
            self.metadata,
            LocalTransport(self.bookies, add_timeout_s=s.add_timeout_s, read_timeout_s=s.read_timeout_s),
            directory,
            s,
            RepairSettings(**(FAST | changes)),
            random.Random(seed),
            self.bookies.clock,
            owner=f"repair-{len(self.repairs)}",
        )
        self.repairs.append(repair)
        if start:
            await repair.start()
        return repair

    async def closed_ledger(self, entries: int = 20, **quorums: Any) -> int:
        """A closed ledger with entries."""
        client = await self.client()
        writer = await client.create(**quorums)
        confirmed = Confirmations()
        for number in range(entries):
            writer.append(payload(number), confirmed)
        await confirmed.count(entries)
        await writer.close()
        return writer.ledger_id

    async def record(self, ledger_id: int) -> LedgerMetadata:
        """Of a ledger, as the store has it."""
        return await self.bookies.stored_metadata(ledger_id)

    async def replicated(self, ledger_id: int) -> bool:
        """Whether every entry of a closed ledger is on the registered bookies that its record names, all Qw of them."""
        metadata = await self.record(ledger_id)
        return metadata.closed and not self.lacking(ledger_id, metadata)

    def lacking(self, ledger_id: int, metadata: LedgerMetadata) -> list[tuple[str, int]]:
        """Bookies and entries that they should have and lack, or cannot serve."""
        found = []
        for fragment in metadata.fragments():
            last = fragment.last if fragment.last is not None else fragment.first - 1
            for entry_id in range(fragment.first, last + 1):
                for position in metadata.striping.write_set(entry_id):
                    bookie = fragment.bookies[position]
                    if (
                        bookie not in self._sessions
                        or (ledger_id, entry_id) not in self.bookies[bookie].entries
                    ):
                        found.append((bookie, entry_id))
        return found

    async def requests(self) -> dict[int, RepairRequest]:
        """The queue."""
        ledgers = [one for page in await self.queue.pages() for one in await self.queue.ledgers(page)]
        found = [(ledger_id, await self.queue.get(ledger_id)) for ledger_id in ledgers]
        return {ledger_id: row[0] for ledger_id, row in found if row is not None}

    async def delete_record(self, ledger_id: int) -> None:
        """Deletes a ledger's record, and says nothing to its bookies."""
        await self.metadata.delete(ledger_path(ledger_id))

    async def until(self, condition: Callable[[], bool | Awaitable[bool]], seconds: float = 20.0) -> None:
        """Waits for it in small steps of the loop's time."""
        async with asyncio.timeout(seconds):
            while True:
                holds = condition()
                if holds if isinstance(holds, bool) else await holds:
                    return
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Everything."""
        for repair in self.repairs:
            await repair.close()
        for client in self._clients:
            await client.close()
        for directory in self._directories:
            await directory.close()
        await self.metadata.close()


def payload(number: int) -> bytes:
    """Of an entry that the kit writes."""
    return b"payload %d " % number * 5
