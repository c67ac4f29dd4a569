"""Real bookies over TCP that die and come back: smaller ledgers meanwhile, full ones afterwards, quarantine of who fails."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from magnetar.bookie import Bookie
from magnetar.bookie.server import BookieServer
from magnetar.ledger import (
    BookieInfoReader,
    LedgerClient,
    LedgerSettings,
    LedgerWriter,
    StaticBookies,
    TcpTransport,
)
from magnetar.ledger.core.degrade import DEGRADED_PROPERTY, describe
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MagnetarError, NotEnoughBookies
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_kit import crash, open_inline
from support.bookies import Confirmations
from support.index_model import ModelStorage
from support.memory_metadata import MemoryMetadataStore


class Machine:
    """A bookie, its disk and its port."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.storage = ModelStorage()
        self.port = 0
        self.bookie: Bookie | None = None
        self.server: BookieServer | None = None

    async def start(self) -> None:
        self.bookie = await open_inline(str(self.directory), self.storage)
        self.server = await BookieServer.start(
            self.bookie, "127.0.0.1", self.port, ConnectionOptions("bookie", close_timeout_s=0.2)
        )
        self.port = self.server.addresses[0][1]

    async def kill(self) -> None:
        """As kill -9 would."""
        bookie, server = self.bookie, self.server
        self.bookie = self.server = None
        if server is not None:
            await server.close(0)
        if bookie is not None:
            crash(bookie)


class Fleet:
    """Machines, and one ledger client with a survey of them."""

    def __init__(self, directory: Path, count: int) -> None:
        self.machines = {f"b{number}": Machine(directory / f"b{number}") for number in range(1, count + 1)}
        self.metadata = MemoryMetadataStore()
        self.expected: dict[int, list[bytes]] = {}
        self.number = 0

    async def start(self, **settings: Any) -> None:
        for machine in self.machines.values():
            await machine.start()
        self.directory = StaticBookies({name: ("127.0.0.1", m.port) for name, m in self.machines.items()})
        given: dict[str, Any] = {
            "ensemble_size": 3,
            "write_quorum": 3,
            "ack_quorum": 2,
            "add_timeout_s": 5.0,
            "connect_timeout_s": 2.0,
            # Long: who is back must be tried because of that, not because the time is over.
            "reconnect_backoff_s": 60.0,
            "reconnect_backoff_max_s": 60.0,
            "bookie_info_interval_s": 0.05,
        }
        self.settings = LedgerSettings(**(given | settings))
        self.transport = TcpTransport(self.directory, self.settings, ConnectionOptions("ledger client"))
        self.info_reader = BookieInfoReader(self.directory, self.transport, self.settings, random.Random(1))
        await self.info_reader.start()
        self.client = LedgerClient(
            StoredLedgers(self.metadata),
            self.transport,
            self.directory,
            self.settings,
            random.Random(1),
            SystemClock(),
        )

    async def until_writable(self, *names: str) -> None:
        async with asyncio.timeout(20):
            while tuple(self.directory.writable()) != names:
                await asyncio.sleep(0.005)

    async def append(self, writer: LedgerWriter, count: int) -> list[type[MagnetarError]]:
        """Appends; returns the errors. What was confirmed is expected to be found."""
        confirmed = Confirmations()
        payloads = [b"%d " % (self.number + n) * 20 for n in range(count)]
        self.number += count
        for payload in payloads:
            writer.append(payload, confirmed)
        await confirmed.count(count)
        kept = self.expected.setdefault(writer.ledger_id, [])
        kept += [
            payload for payload, (_, _, error) in zip(payloads, confirmed.heard, strict=True) if error is None
        ]
        return confirmed.errors

    async def check_everything(self) -> None:
        """As the next owner would find it."""
        for ledger_id, payloads in self.expected.items():
            reader = await self.client.open(ledger_id, recover=True)
            assert reader.last_add_confirmed + 1 >= len(payloads)
            if payloads:
                entries = await reader.read(0, len(payloads) - 1)
                assert [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries] == payloads

    async def close(self) -> None:
        await self.info_reader.close()
        await self.client.close()
        await self.transport.close()
        for machine in self.machines.values():
            await machine.kill()
        await self.metadata.close()


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path, 3)
    yield fleet
    await fleet.close()
    async with asyncio.timeout(10):
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.005)


async def becomes_replaceable(writer: LedgerWriter) -> None:
    async with asyncio.timeout(20):
        while not writer.replaceable:
            await asyncio.sleep(0.005)


async def test_two_of_three_bookies_die_and_writes_go_on_with_one(fleet: Fleet) -> None:
    await fleet.start(minimum_write_quorum=1)
    writer = await fleet.client.create()
    assert describe(writer.metadata.striping) == "3/3/2"
    assert await fleet.append(writer, 50) == []
    await fleet.machines["b1"].kill()
    await fleet.machines["b3"].kill()
    # The ledger that is written loses what it cannot replace; what it confirmed stays, and it can be closed.
    errors = await fleet.append(writer, 10)
    assert set(errors) == {NotEnoughBookies}
    await writer.close()
    await fleet.until_writable("b2")
    small = await fleet.client.create()
    assert small.degraded
    assert not small.replaceable
    assert describe(small.metadata.striping) == "1/1/1"
    assert small.metadata.properties == {DEGRADED_PROPERTY: "3/3/2"}
    assert await fleet.append(small, 50) == []
    # One is back: two of three.
    await fleet.machines["b3"].start()
    await fleet.until_writable("b2", "b3")
    assert not small.replaceable, "two bookies are no full ensemble"
    middle = await fleet.client.create()
    assert describe(middle.metadata.striping) == "2/2/2"
    assert await fleet.append(middle, 50) == []
    # All are back: whoever owns the ledger goes on in a full one.
    await fleet.machines["b1"].start()
    await becomes_replaceable(middle)
    await becomes_replaceable(small)
    await small.close()
    await middle.close()
    full = await fleet.client.create()
    assert not full.degraded
    assert describe(full.metadata.striping) == "3/3/2"
    assert await fleet.append(full, 50) == []
    assert sorted(full.metadata.last_ensemble.bookies) == ["b1", "b2", "b3"], "nobody had to be replaced"
    assert len(full.metadata.ensembles) == 1
    await full.close()
    assert fleet.client.figures()["degraded_ledgers_total"] == 2
    await fleet.check_everything()
    assert sum(map(len, fleet.expected.values())) == 200


async def test_without_the_setting_nothing_is_written_until_a_bookie_is_back(fleet: Fleet) -> None:
    await fleet.start()
    writer = await fleet.client.create()
    assert await fleet.append(writer, 10) == []
    await fleet.machines["b1"].kill()
    assert set(await fleet.append(writer, 10)) <= {NotEnoughBookies}
    await fleet.until_writable("b2", "b3")
    with pytest.raises(NotEnoughBookies, match=r"ensemble_size=3 writable bookies, 2 are known \(b2, b3\)"):
        await fleet.client.create()
    await fleet.machines["b1"].start()
    await fleet.until_writable("b1", "b2", "b3")
    writer = await fleet.client.create()
    assert await fleet.append(writer, 10) == []
    assert len(writer.metadata.ensembles) == 1
    await writer.close()
    await fleet.check_everything()


async def test_a_bookie_that_failed_is_quarantined_while_others_are_left_and_needed_when_not(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path, 4)
    await fleet.start(quarantine_errors=1, quarantine_s=3600.0)
    try:
        writer = await fleet.client.create()
        assert await fleet.append(writer, 10) == []
        victim = writer.metadata.last_ensemble.bookies[0]
        await fleet.machines[victim].kill()
        assert await fleet.append(writer, 10) == []
        assert victim not in writer.metadata.last_ensemble.bookies
        assert list(fleet.client.health.quarantined()) == [victim]
        await fleet.machines[victim].start()
        await fleet.until_writable("b1", "b2", "b3", "b4")
        well = sorted({"b1", "b2", "b3", "b4"} - {victim})
        for _ in range(5):
            other = await fleet.client.create()
            assert sorted(other.metadata.last_ensemble.bookies) == well, "it is back, and not trusted yet"
            assert await fleet.append(other, 5) == []
            await other.close()
        # Without it there are too few: it is readmitted, takes adds, and the quarantine goes on.
        await fleet.machines[well[0]].kill()
        assert set(await fleet.append(writer, 10)) == {NotEnoughBookies}, "a writer trusts nobody twice"
        await fleet.until_writable(*sorted([*well[1:], victim]))
        needed = await fleet.client.create()
        assert victim in needed.metadata.last_ensemble.bookies
        assert await fleet.append(needed, 10) == []
        assert victim in fleet.client.health.quarantined()
        assert fleet.client.figures()["quarantines_overridden_total"] >= 1
        await needed.close()
        await fleet.machines[well[0]].start()
        await fleet.check_everything()
    finally:
        await fleet.close()
