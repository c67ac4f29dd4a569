"""Scorecard 17 at its short size, and leftovers: repairs over real bookies, with journals and entry logs on disk."""

from __future__ import annotations

import asyncio
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.server.server import InProcessBookie
from magnetar.bookie.status import bookie_figures
from magnetar.ledger import LedgerClient, LedgerMetadata, LedgerSettings, LocalTransport, RegisteredBookies
from magnetar.ledger.directory import encode_registration
from magnetar.ledger.replication.auto_recovery import AutoRecovery
from magnetar.ledger.replication.leftovers import StoredAssignments
from magnetar.ledger.replication.settings import RepairSettings
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.paths import cookie_path
from magnetar.metadata.store import Session
from magnetar.proto.errors import EntryNotFound, LedgerNotFound
from magnetar.proto.ledger_entry import verify_ledger_entry
from support.bookie_kit import KIB, MIB, crash, model_components, small_settings, until
from support.bookies import Confirmations, StillClock
from support.index_model import ModelStorage
from support.memory_metadata import MemoryMetadataStore
from support.repair_kit import FAST, payload


class RealBookies:
    """Bookies in the loop of the test, each with a directory; `lose` takes it away."""

    def __init__(self, directory: Path) -> None:
        self.store = MemoryMetadataStore()
        self.bookies: dict[str, Bookie] = {}
        self.reached: dict[str, InProcessBookie] = {}
        self.settings = LedgerSettings()
        self._directory = directory
        self._storages: dict[str, ModelStorage] = {}
        self._sessions: dict[str, Session] = {}

    async def start(self, *names: str) -> None:
        """New ones, or those that were stopped, with what they had."""
        for name in names:
            settings = replace(
                small_settings(
                    str(self._directory / name),
                    write_cache_bytes=2 * MIB,
                    entry_log_bytes=64 * KIB,
                    gc_interval_s=0.0,
                    compaction_bytes_per_s=0,
                ),
                bookie_id=name,
            )
            components = replace(
                model_components(self._storages.setdefault(name, ModelStorage())),
                assignments=StoredAssignments(StoredLedgers(self.store), name),
            )
            self.bookies[name] = await open_bookie(settings, components)
            self.reached[name] = InProcessBookie(self.bookies[name])
            if await self.store.get(cookie_path(name)) is None:
                await self.store.create(cookie_path(name), b"")
            session = self._sessions[name] = await self.store.open_session(10.0)
            value = encode_registration("127.0.0.1:1")
            await self.store.create(f"/bookies/{name}", value, session=session)

    async def stop(self, name: str, *, wipe: bool = False) -> None:
        """kill -9; with `wipe` its disk is gone."""
        del self.reached[name]
        crash(self.bookies.pop(name))
        await self._sessions.pop(name).close()
        if wipe:
            shutil.rmtree(self._directory / name)
            del self._storages[name]

    async def client(self) -> LedgerClient:
        """Of a process of its own."""
        directory = await RegisteredBookies.open(self.store)
        transport = LocalTransport(self.reached)
        ledgers = StoredLedgers(self.store)
        return LedgerClient(ledgers, transport, directory, self.settings, random.Random(1), StillClock())

    async def autorecovery(self, **changes: Any) -> AutoRecovery:
        """A process that repairs."""
        repair = AutoRecovery(
            self.store,
            LocalTransport(self.reached),
            await RegisteredBookies.open(self.store),
            self.settings,
            RepairSettings(**(FAST | changes)),
            random.Random(2),
            StillClock(),
            owner="repair",
        )
        await repair.start()
        return repair

    async def lacking(self, ledgers: list[int]) -> list[tuple[int, str, int]]:
        """Entries that a bookie should have by the record, and cannot give with a good digest."""
        found = []
        for ledger_id in ledgers:
            node = await StoredLedgers(self.store).get(ledger_id)
            assert node is not None
            metadata = LedgerMetadata.decode(node.value, ledger_id)
            for fragment in metadata.fragments():
                assert fragment.last is not None
                for entry_id in range(fragment.first, fragment.last + 1):
                    for position in metadata.striping.write_set(entry_id):
                        name = fragment.bookies[position]
                        if not await self.has(name, ledger_id, entry_id):
                            found.append((ledger_id, name, entry_id))
        return found

    async def has(self, name: str, ledger_id: int, entry_id: int) -> bool:
        """Whether a bookie answers it."""
        if name not in self.bookies:
            return False
        try:
            entries, _ = await self.bookies[name].read(ledger_id, entry_id, entry_id)
        except (EntryNotFound, LedgerNotFound):
            return False
        return verify_ledger_entry(entries[0]).entry_id == entry_id

    async def close(self) -> None:
        """All of them, cleanly."""
        for bookie in self.bookies.values():
            await bookie.close()
        await self.store.close()


async def write(client: LedgerClient, count: int, ledgers: int, **quorums: Any) -> list[int]:
    """Closed ledgers with so many entries in all."""
    made = []
    for _ in range(ledgers):
        writer = await client.create(**quorums)
        confirmed = Confirmations()
        for number in range(count // ledgers):
            writer.append(payload(number), confirmed)
        await confirmed.count(count // ledgers)
        assert not confirmed.errors
        await writer.close()
        made.append(writer.ledger_id)
    return made


async def test_scorecard_17_one_bookie_is_wiped_and_every_entry_is_back_at_its_write_quorum(
    tmp_path: Path,
) -> None:
    cluster = RealBookies(tmp_path)
    await cluster.start("b1", "b2", "b3", "b4", "b5")
    client = await cluster.client()
    ledgers = await write(client, 5000, 5, ensemble_size=3, write_quorum=2)
    ledgers += await write(client, 5000, 5, ensemble_size=3, write_quorum=3)
    repair = await cluster.autorecovery()
    await cluster.stop("b1", wipe=True)

    async def named() -> bool:
        nodes = [await StoredLedgers(cluster.store).get(ledger_id) for ledger_id in ledgers]
        return any(node is not None and b"b1" in node.value for node in nodes)

    while await named():  # bounded by the test's timeout
        await asyncio.sleep(0.01)
    assert await cluster.lacking(ledgers) == []
    assert repair.figures()["lost_entries_total"] == 0
    await repair.close()
    await client.close()
    await cluster.close()


async def test_what_a_bookie_had_before_it_came_back_too_late_is_dropped(tmp_path: Path) -> None:
    cluster = RealBookies(tmp_path)
    await cluster.start("b1", "b2", "b3", "b4")
    client = await cluster.client()
    ledgers = await write(client, 1000, 2, ensemble_size=3, write_quorum=3)
    had = [ledger_id for ledger_id in ledgers if await cluster.has("b1", ledger_id, 0)]
    repair = await cluster.autorecovery()
    await cluster.bookies["b1"].checkpoint()
    await cluster.stop("b1")
    await until(lambda: repair.figures()["repaired_ledgers_total"] == len(had))
    await cluster.start("b1")
    await until(lambda: "b1" in client.components.bookies.writable())
    newer = await write(
        client, 2000, 1, ensemble_size=4, write_quorum=4
    )  # fills logs: the older ones are closed
    await cluster.bookies["b1"].checkpoint()
    await cluster.bookies["b1"].collector.collect()
    assert had
    for ledger_id in had:
        assert not await cluster.has("b1", ledger_id, 0)
    assert bookie_figures(cluster.bookies["b1"])["gc_dropped_leftovers"] >= 400 * len(had)
    assert await cluster.lacking([*ledgers, *newer]) == []
    await repair.close()
    await client.close()
    await cluster.close()
