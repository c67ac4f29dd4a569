"""Ledgers with deferred sync, in one process and over TCP: what is answered, what is confirmed, and what a restart takes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from magnetar.ledger import (
    BookieTransport,
    LedgerClient,
    LedgerSettings,
    LedgerWriter,
    LocalTransport,
    StaticBookies,
    TcpTransport,
)
from magnetar.ledger.bookie_link import BookieLink
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import (
    AlreadyClosed,
    EntriesNotForced,
    InvalidSetting,
    LedgerFenced,
    NotEnoughBookies,
    StorageFailed,
)
from magnetar.proto.ledger_entry import decode_ledger_entry_header
from magnetar.runtime.connection import ConnectionOptions
from support.bookies import Confirmations, FakeBookie, StillClock
from support.memory_metadata import MemoryMetadataStore
from support.tcp_bookies import BookieServer, within

ADD_TIMEOUT_S = 0.3


class Party:
    """Four bookies, reached in one way or the other, and any number of clients."""

    def __init__(self, over_tcp: bool) -> None:
        self.over_tcp = over_tcp
        self.bookies = {name: FakeBookie(name) for name in ("b1", "b2", "b3", "b4")}
        self.servers: dict[str, BookieServer] = {}
        self.metadata = MemoryMetadataStore()
        self.clients: list[LedgerClient] = []
        self.transports: list[BookieTransport] = []

    async def start(self) -> None:
        if self.over_tcp:
            for name, bookie in self.bookies.items():
                self.servers[name] = await BookieServer(bookie).start()

    def client(
        self,
        ensemble_size: int = 3,
        write_quorum: int = 3,
        ack_quorum: int = 2,
        *,
        max_unforced_bytes: int = 1 << 20,
    ) -> LedgerClient:
        settings = LedgerSettings(
            ensemble_size,
            write_quorum,
            ack_quorum,
            add_timeout_s=ADD_TIMEOUT_S,
            reconnect_backoff_s=0.01,
            explicit_lac_interval_s=0.02,
            max_unforced_bytes=max_unforced_bytes,
        )
        ports = {name: ("127.0.0.1", server.port) for name, server in self.servers.items()}
        directory = StaticBookies(ports or dict.fromkeys(self.bookies, ("127.0.0.1", 1)))
        transport: BookieTransport = LocalTransport(self.bookies, add_timeout_s=ADD_TIMEOUT_S)
        if self.over_tcp:
            transport = TcpTransport(directory, settings, ConnectionOptions("test"))
        client = LedgerClient(
            StoredLedgers(self.metadata), transport, directory, settings, random.Random(3), StillClock()
        )
        self.clients.append(client)
        self.transports.append(transport)
        return client

    async def restart(self, name: str) -> None:
        """The power of one bookie fails: what it had accepted and not synced is gone, its connections are too."""
        bookie = self.bookies[name]
        if self.over_tcp:
            await self.servers[name].stop()
        bookie.restart()
        if self.over_tcp:
            await self.servers[name].start()

    def holders(self, ledger_id: int, entry_id: int) -> list[str]:
        return [name for name, bookie in self.bookies.items() if (ledger_id, entry_id) in bookie.entries]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for transport in self.transports:
            await transport.close()
        for server in self.servers.values():
            await server.stop()


@pytest_asyncio.fixture(params=[False, True], ids=["local", "tcp"])
async def party(request: pytest.FixtureRequest) -> AsyncIterator[Party]:
    party = Party(request.param)
    await party.start()
    yield party
    await party.close()


async def writing(client: LedgerClient, count: int = 0) -> tuple[LedgerWriter, Confirmations]:
    """A writer with `count` entries that were answered."""
    writer = await client.create(deferred_sync=True)
    assert writer.deferred_sync
    answered = Confirmations()
    for number in range(count):
        assert writer.append(b"entry %d" % number, answered) == number
    await answered.count(count)
    return writer, answered


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_appends_are_answered_when_accepted_and_confirmed_by_a_force(party: Party) -> None:
    client = party.client()
    writer, answered = await writing(client, 10)
    assert answered.ids == list(range(10))
    assert (writer.last_add_accepted, writer.last_add_confirmed) == (9, -1)
    assert writer.unforced_bytes == writer.outstanding_bytes > 0
    reader = await party.client().open(writer.ledger_id, recover=False)
    assert reader.last_add_confirmed == -1, "readers are told of nothing that may be lost"
    await within(5, writer.force())
    assert (writer.last_add_accepted, writer.last_add_confirmed, writer.unforced_bytes) == (9, 9, 0)
    assert len(answered.heard) == 10, "each is told once"
    writer.append(b"later", answered)
    await answered.count(11)
    headers = [
        decode_ledger_entry_header(party.bookies[name].entries[writer.ledger_id, 10])
        for name in party.holders(writer.ledger_id, 10)
    ]
    assert [header.last_add_confirmed for header in headers] == [9, 9, 9], "the header says what was forced"
    assert await within(5, reader.wait(timeout_s=4)) == 9
    metadata = await within(5, writer.close())
    assert metadata.last_entry == 10, "a close forces"


async def test_a_force_covers_what_is_not_answered_yet_and_nothing_costs_nothing(party: Party) -> None:
    writer, answered = await writing(party.client())
    await writer.force()
    assert sum(bookie.forces for bookie in party.bookies.values()) == 0
    for number in range(5):
        writer.append(b"%d" % number, answered)
    first, second = asyncio.ensure_future(writer.force()), asyncio.ensure_future(writer.force())
    first_only = asyncio.ensure_future(writer.force())
    await asyncio.sleep(0)
    first_only.cancel()
    await asyncio.wait_for(asyncio.gather(first, second), 5)
    assert writer.last_add_confirmed == 4
    assert answered.ids == list(range(5))


async def test_with_striping_every_write_set_is_forced(party: Party) -> None:
    writer, _ = await writing(party.client(4, 2, 2), 8)
    deaf = writer.metadata.last_ensemble.bookies[2]
    force = asyncio.ensure_future(writer.force())
    party.bookies[deaf].hold()
    await asyncio.sleep(0.05)
    assert not force.done()
    # Entries 0, 4 are on positions 0 and 1; 1, 2 need the bookie that does not answer.
    assert writer.last_add_confirmed == 0
    party.bookies[deaf].release()
    await asyncio.wait_for(force, 5)
    assert writer.last_add_confirmed == 7


async def test_a_restarted_bookie_does_not_vouch_for_what_it_accepted_before(party: Party) -> None:
    writer, _ = await writing(party.client(3, 2, 2), 6)
    lost = writer.metadata.last_ensemble.bookies[0]
    await party.restart(lost)
    await within(10, writer.force())
    assert writer.last_add_confirmed == 5
    ensemble = writer.metadata.last_ensemble
    assert ensemble.first_entry == 0, "the change begins with the first entry that was not forced"
    assert lost not in ensemble.bookies
    striping = writer.metadata.striping
    for entry_id in range(6):
        wanted = {ensemble.bookies[position] for position in striping.write_set(entry_id)}
        assert wanted <= set(party.holders(writer.ledger_id, entry_id)), entry_id


async def test_it_is_noticed_when_a_restarted_bookie_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect that the test above is for, planted: the link forgets what it owes when it ends."""

    def forget(self: BookieLink, payloads: list[bytes]) -> None:
        accepted(self, payloads)
        for ledger_id, ledger in self._adds._deferred.items():
            for entry_id, done in ledger.accepted.items():
                self._loop.call_soon(done, self._bookie, ledger_id, entry_id, 0)
            ledger.accepted.clear()

    accepted = BookieLink._accepted
    monkeypatch.setattr(BookieLink, "_accepted", forget)
    party = Party(over_tcp=True)
    await party.start()
    writer, _ = await writing(party.client(3, 2, 2), 6)
    await party.restart(writer.metadata.last_ensemble.bookies[0])
    await within(10, writer.force())
    holders = [len(party.holders(writer.ledger_id, entry_id)) for entry_id in range(6)]
    assert min(holders) < 2, "confirmed, and lost"
    await party.close()


async def test_rule_21_a_bookie_that_hangs_after_a_force_is_replaced(party: Party) -> None:
    writer, answered = await writing(party.client(3, 3, 3), 4)
    hung = writer.metadata.last_ensemble.bookies[1]
    party.bookies[hung].hold()
    await asyncio.sleep(1.5 * ADD_TIMEOUT_S)
    assert hung in writer.metadata.last_ensemble.bookies, "nobody asked it for anything: no clock runs"
    writer.append(b"not answered before the force", answered)
    await within(10, writer.force())
    assert writer.last_add_confirmed == 4
    assert hung not in writer.metadata.last_ensemble.bookies
    assert answered.ids == list(range(5))


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_the_writer_forces_by_itself_before_its_memory_is_full(party: Party) -> None:
    writer, answered = await writing(party.client(max_unforced_bytes=64 * 1024))
    for _ in range(400):
        writer.append(bytes(1000), answered)
    await within(10, answered.count(400))
    assert writer.unforced_bytes <= 64 * 1024 + 1040
    assert writer.last_add_confirmed > 300
    assert sum(bookie.forces for bookie in party.bookies.values()) >= 3


async def test_beyond_the_bound_answers_wait_for_what_is_durable(party: Party) -> None:
    writer, answered = await writing(party.client(3, 3, 3, max_unforced_bytes=64 * 1024))
    slow = party.bookies[writer.metadata.last_ensemble.bookies[0]]
    slow.hold_durable = True
    for _ in range(100):
        writer.append(bytes(1000), answered)
    await asyncio.sleep(0.1)
    assert len(answered.heard) == 64, "64 of 1,040 bytes, the last one on the bound"
    slow.hold_durable = False
    slow.request_force(0)
    await within(10, answered.count(100))


async def test_a_close_after_a_failure_tells_what_is_lost(party: Party) -> None:
    writer, _ = await writing(party.client(4, 4, 3), 5)
    for bookie in list(party.bookies.values())[:2]:
        bookie.restart()
        bookie.fail(StorageFailed("its disk is gone"))
    answered = Confirmations()
    writer.append(b"more", answered)
    await answered.count(1)
    assert answered.errors == [NotEnoughBookies]
    with pytest.raises(NotEnoughBookies):
        await writer.force()
    for _ in range(2):
        with pytest.raises(EntriesNotForced, match="5 entries"):
            await within(5, writer.close())
    assert writer.metadata.closed
    assert writer.metadata.last_entry == -1


async def test_a_fence_ends_forces_and_recovery_decides(party: Party) -> None:
    writer, _ = await writing(party.client(), 3)
    await writer.force()
    answered = Confirmations()
    for number in range(3, 6):
        writer.append(b"entry %d" % number, answered)
    await answered.count(3)
    for bookie in party.bookies.values():
        bookie.restart()  # all that was only accepted is gone, everywhere
    successor = await party.client().open(writer.ledger_id, recover=True)
    assert successor.last_add_confirmed == 2, "lost, and not taken for acknowledged"
    writer.append(b"stale", answered)
    with pytest.raises(LedgerFenced):
        await within(5, writer.force())
    with pytest.raises((EntriesNotForced, LedgerFenced)):
        await within(5, writer.close())


async def test_what_a_recovery_finds_of_accepted_entries_is_kept_for_all(party: Party) -> None:
    writer, _ = await writing(party.client(), 4)
    successor = await party.client().open(writer.ledger_id, recover=True)
    assert successor.last_add_confirmed == 3
    for bookie in party.bookies.values():
        bookie.restart()
    assert len(await successor.read(0, 3)) == 4, "it was added again, durably, before the ledger was closed"


async def test_a_detached_writer_ends_its_forces(party: Party) -> None:
    writer, _ = await writing(party.client(), 2)
    for bookie in party.bookies.values():
        bookie.hold()
    force = asyncio.ensure_future(writer.force())
    await asyncio.sleep(0)
    writer.detach()
    with pytest.raises(AlreadyClosed):
        await asyncio.wait_for(force, 5)
    for bookie in party.bookies.values():
        bookie.release()


async def test_an_ordinary_writer_can_be_forced_too(party: Party) -> None:
    writer = await party.client().create()
    confirmed = Confirmations()
    for _ in range(3):
        writer.append(b"x", confirmed)
    await within(5, writer.force())
    assert writer.last_add_confirmed == 2
    assert sum(bookie.forces for bookie in party.bookies.values()) == 0


async def test_readers_that_follow_are_told_after_a_force_although_more_is_outstanding(party: Party) -> None:
    writer, answered = await writing(party.client(), 2)
    force = asyncio.ensure_future(writer.force())
    writer.append(b"its header says that nothing is confirmed", answered)
    await asyncio.wait_for(force, 5)
    writer.append(b"behind the force, and not forced", answered)
    await answered.count(4)
    reader = await party.client().open(writer.ledger_id, recover=False)
    async with asyncio.timeout(5):
        while reader.last_add_confirmed < 1:
            await reader.wait(timeout_s=1)


def test_a_bound_that_holds_nothing_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="max_unforced_bytes"):
        LedgerSettings(max_unforced_bytes=1000)


async def test_a_link_forgets_ledgers_of_which_nothing_is_outstanding() -> None:
    party = Party(over_tcp=True)
    await party.start()
    client = party.client(1, 1, 1)
    for _ in range(5):
        writer, _ = await writing(client, 3)
        await writer.force()
        await writer.close()
    transport = party.transports[0]
    assert isinstance(transport, TcpTransport)
    links = [channel._link for channel in transport._add_channels.values()]
    assert all(links)
    async with asyncio.timeout(5):
        while any(link._adds._deferred for link in links if link is not None):
            await asyncio.sleep(ADD_TIMEOUT_S / 10)
    await party.close()
