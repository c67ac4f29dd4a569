"""A bookie that failed and is back: neither a backoff nor a suspicion outlives its return."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest_asyncio

from magnetar.ledger import (
    BookieFacts,
    BookieInfoReader,
    LedgerClient,
    LedgerSettings,
    RegisteredBookies,
    StaticBookies,
    TcpTransport,
)
from magnetar.ledger.directory import encode_registration
from magnetar.ledger.health import BookieHealth
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import BookieUnavailable, LedgerFenced, TooManyRequests
from magnetar.runtime.connection import ConnectionOptions
from support.bookies import Bookies, Confirmations, StillClock
from support.memory_metadata import MemoryMetadataStore
from unit.ledger.test_tcp_transport import FAST, Adds, Cluster, send

UNAVAILABLE = BookieUnavailable.code
# Nobody is tried again by chance.
LONG = replace(FAST, reconnect_backoff_s=600.0, reconnect_backoff_max_s=600.0)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


async def fail_once(cluster: Cluster, transport: TcpTransport, adds: Adds) -> None:
    """Not reached: the backoff begins."""
    await cluster.servers["b1"].stop()
    for entry_id in range(2):
        send(transport, 1, entry_id, adds)
        assert await adds.count(entry_id + 1) == [UNAVAILABLE] * (entry_id + 1)
    await cluster.servers["b1"].start()
    send(transport, 1, 2, adds)
    assert await adds.count(3) == [UNAVAILABLE] * 3, "still in its backoff"


async def test_the_backoff_ends_when_the_bookie_is_back(cluster: Cluster) -> None:
    await cluster.start("b1")
    directory, adds = cluster.directory(), Adds()
    transport = TcpTransport(directory, LONG, ConnectionOptions("test"))
    cluster.transports.append(transport)
    await fail_once(cluster, transport, adds)
    directory.answered("b1", BookieFacts())
    send(transport, 1, 3, adds)
    assert (await adds.count(4))[3] == UNAVAILABLE, "an answer of one that was not lost is no return"
    directory.lost("b1")
    directory.answered("b1", BookieFacts(), hung=True)
    send(transport, 1, 4, adds)
    assert (await adds.count(5))[4] == UNAVAILABLE, "nor is that of one whose journal hangs"
    directory.answered("b1", BookieFacts())
    send(transport, 1, 5, adds)
    send(transport, 1, 6, adds, recovery=True)
    assert (await adds.count(7))[5:] == [0, 0]


async def test_a_bookie_that_is_needed_is_tried_at_once(cluster: Cluster) -> None:
    """It is the only one: a ledger that is made now must not fail because the last one did."""
    await cluster.start("b1")
    transport, adds = cluster.transport(LONG), Adds()
    await fail_once(cluster, transport, adds)
    client = LedgerClient(
        StoredLedgers(cluster.metadata), transport, cluster.directory(), LONG, random.Random(1), StillClock()
    )
    writer = await client.create()
    confirmed = Confirmations()
    writer.append(b"x", confirmed)
    await confirmed.count(1)
    assert confirmed.ids == [0]
    await client.close()


async def test_a_replacement_that_is_needed_is_tried_at_once(cluster: Cluster) -> None:
    await cluster.start("b1", "b2")
    transport, adds = cluster.transport(LONG), Adds()
    await fail_once(cluster, transport, adds)
    directory = cluster.directory()
    directory.lost("b1")
    client = LedgerClient(
        StoredLedgers(cluster.metadata), transport, directory, LONG, random.Random(1), StillClock()
    )
    writer = await client.create()
    assert writer.metadata.last_ensemble.bookies == ("b2",)
    directory.answered("b1", BookieFacts())
    await cluster.servers["b2"].stop()
    confirmed = Confirmations()
    writer.append(b"x", confirmed)
    await confirmed.count(1)
    assert confirmed.ids == [0]
    assert writer.metadata.last_ensemble.bookies == ("b1",)
    await client.close()


async def test_the_first_ledger_after_a_return_goes_to_the_bookie_that_is_back(cluster: Cluster) -> None:
    """All three are needed: within a moment of being writable again it takes adds, whatever the backoff was."""
    await cluster.start("b1", "b2", "b3")
    settings = replace(
        LONG, ensemble_size=3, write_quorum=3, ack_quorum=2, bookie_info_interval_s=0.05, read_timeout_s=1.0
    )
    directory = cluster.directory()
    transport = TcpTransport(directory, settings, ConnectionOptions("test"))
    cluster.transports.append(transport)
    info_reader = BookieInfoReader(directory, transport, settings, random.Random(1))
    await info_reader.start()
    client = LedgerClient(
        StoredLedgers(cluster.metadata), transport, directory, settings, random.Random(1), StillClock()
    )
    for _ in range(3):
        writer = await client.create()
        lost, confirmed = Confirmations(), Confirmations()
        await cluster.servers["b1"].stop()
        writer.append(b"x", lost)
        await lost.count(1)
        async with asyncio.timeout(10):
            while "b1" in directory.writable():
                await asyncio.sleep(0.001)
        await cluster.servers["b1"].start()
        async with asyncio.timeout(10):
            while "b1" not in directory.writable():
                await asyncio.sleep(0.001)
        writer = await client.create()
        for _ in range(10):
            writer.append(b"x", confirmed)
        await confirmed.count(10)
        assert confirmed.errors == []
        assert len(writer.metadata.ensembles) == 1
        await writer.close()
    await info_reader.close()
    await client.close()


async def test_placement_takes_one_that_failed_just_now_last() -> None:
    bookies = Bookies("a", "b", "c")
    directory = bookies.directory()
    settings = LedgerSettings(1, 1, 1, quarantine_errors=0)
    client = bookies.client(settings, seed=1, directory=directory)

    async def chosen() -> set[str]:
        return {(await client.create()).metadata.last_ensemble.bookies[0] for _ in range(40)}

    assert await chosen() == {"a", "b", "c"}
    client.health.failed("a", LedgerFenced.code)
    client.health.failed("b", TooManyRequests.code)
    assert await chosen() == {"a", "b", "c"}, "these say that a bookie works"
    client.health.failed("a", UNAVAILABLE)
    assert await chosen() == {"b", "c"}
    directory.lost("b")
    directory.lost("c")
    assert await chosen() == {"a"}, "never so that a ledger cannot be made"
    directory.answered("c", BookieFacts())
    directory.lost("a")
    directory.answered("a", BookieFacts())
    assert await chosen() == {"a", "c"}, "what was before its return is void"
    await client.close()


async def test_a_suspicion_ends_by_itself() -> None:
    directory = StaticBookies({"a": ("127.0.0.1", 1), "b": ("127.0.0.1", 2)})
    health = BookieHealth(LedgerSettings(suspect_bookie_s=0.02, quarantine_errors=0), directory)
    health.failed("a", UNAVAILABLE)
    assert list(health.offers(directory.writable())) == [("b",), ("a", "b")]
    async with asyncio.timeout(10):
        while len(list(health.offers(directory.writable()))) > 1:
            await asyncio.sleep(0.005)
    assert health.suspects() == ()


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_bookie_that_registers_anew_is_back() -> None:
    store = MemoryMetadataStore()
    session = await store.open_session(4)
    await store.create("/bookies/a", encode_registration("h:1", incarnation=7), session=session)
    await store.create("/bookies/b", encode_registration("h:2"))
    directory = await RegisteredBookies.open(store)
    first = directory.return_count("a")
    await store.put("/bookies/a", encode_registration("h:1", incarnation=7, free_bytes=5), version=0)
    await settle()
    assert directory.free_bytes("a") == 5
    assert directory.return_count("a") == first, "it only told something"
    await session.close()
    await settle()
    assert directory.writable() == ("b",)
    await store.create("/bookies/a", encode_registration("h:1", incarnation=7))
    await settle()
    assert directory.return_count("a") == first + 1
    # So fast that nobody saw it gone: another process, another address, or a version that begins again.
    await store.put("/bookies/a", encode_registration("h:1", incarnation=8), version=0)
    await settle()
    assert directory.return_count("a") == first + 2
    await store.put("/bookies/a", encode_registration("h:9", incarnation=8), version=1)
    await settle()
    assert directory.return_count("a") == first + 3
    await store.delete("/bookies/a", version=2)
    await store.create("/bookies/a", encode_registration("h:9", incarnation=8))
    await settle()
    assert directory.return_count("a") == first + 4
    await store.put("/bookies/a", encode_registration("h:9", incarnation=8, journal_stalled_s=9.0), version=0)
    await settle()
    assert directory.writable() == ("b",), "its journal hangs"
    await store.put("/bookies/a", encode_registration("h:9", incarnation=8), version=1)
    await settle()
    assert directory.writable() == ("a", "b")
    assert directory.return_count("a") == first + 5
    assert directory.return_count("b") == 1
    await directory.close()
