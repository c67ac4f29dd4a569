"""The TCP transport: multiplexing, failures, backoff, hung bookies."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from magnetar.ledger import LedgerClient, LedgerSettings, StaticBookies, TcpTransport
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    EntryNotFound,
    FrameTooLarge,
    LedgerFenced,
    LedgerNotFound,
    NotEnoughBookies,
    RequestTimeout,
    TooManyRequests,
)
from magnetar.proto.ledger_entry import encode_ledger_entry
from magnetar.runtime.connection import ConnectionOptions
from support.bookies import Confirmations, FakeBookie, StillClock
from support.memory_metadata import MemoryMetadataStore
from support.tcp_bookies import BookieServer

FAST = LedgerSettings(
    ensemble_size=1,
    write_quorum=1,
    ack_quorum=1,
    add_timeout_s=0.2,
    read_timeout_s=0.2,
    connect_timeout_s=0.5,
    reconnect_backoff_s=0.02,
    reconnect_backoff_max_s=0.1,
)


class Cluster:
    """Servers, and transports to them."""

    def __init__(self) -> None:
        self.bookies: dict[str, FakeBookie] = {}
        self.servers: dict[str, BookieServer] = {}
        self.metadata = MemoryMetadataStore()
        self.transports: list[TcpTransport] = []

    async def start(self, *names: str) -> None:
        for name in names:
            self.bookies[name] = FakeBookie(name)
            self.servers[name] = await BookieServer(self.bookies[name]).start()

    def directory(self) -> StaticBookies:
        return StaticBookies({name: ("127.0.0.1", server.port) for name, server in self.servers.items()})

    def transport(self, settings: LedgerSettings = FAST, **options: int) -> TcpTransport:
        transport = TcpTransport(self.directory(), settings, ConnectionOptions("test", **options))  # type: ignore[arg-type]
        self.transports.append(transport)
        return transport

    def client(self, settings: LedgerSettings = FAST) -> LedgerClient:
        return LedgerClient(
            StoredLedgers(self.metadata),
            self.transport(settings),
            self.directory(),
            settings,
            random.Random(1),
            StillClock(),
        )

    async def close(self) -> None:
        for transport in self.transports:
            await transport.close()
        for server in self.servers.values():
            await server.stop()


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


class Adds:
    """Collects add callbacks."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int, int]] = []
        self.event = asyncio.Event()

    def __call__(self, bookie: str, ledger_id: int, entry_id: int, code: int) -> None:
        self.heard.append((bookie, ledger_id, entry_id, code))
        self.event.set()

    async def count(self, number: int) -> list[int]:
        """Codes, once there are so many."""
        while len(self.heard) < number:
            self.event.clear()
            await asyncio.wait_for(self.event.wait(), 5)
        return [code for _, _, _, code in self.heard]


def entry(ledger_id: int, entry_id: int, size: int = 10) -> bytes:
    return encode_ledger_entry(ledger_id, entry_id, entry_id - 1, size * (entry_id + 1), b"x" * size)


def send(
    transport: TcpTransport, ledger_id: int, entry_id: int, done: Adds, *, recovery: bool = False
) -> None:
    transport.add("b1", entry(ledger_id, entry_id), ledger_id, entry_id, recovery=recovery, done=done)


async def test_adds_of_all_ledgers_share_one_connection_and_requests_another(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(), Adds()
    for n in range(50):
        send(transport, n % 2, n // 2, adds)
    assert await adds.count(50) == [0] * 50
    result = await transport.read("b1", 0, 3, 7)
    assert result.entries == [entry(0, n) for n in range(3, 8)]
    assert result.last_add_confirmed == 23
    assert await transport.read_last_confirmed("b1", 1) == (23, 24)
    await transport.write_last_confirmed("b1", 1, 24)
    assert await transport.read_last_confirmed("b1", 1) == (24, 24)
    assert (await transport.info("b1"))["bookie_id"] == "b1"
    with pytest.raises(EntryNotFound):
        await transport.read("b1", 0, 99, 99)
    with pytest.raises(LedgerNotFound):
        await transport.read_last_confirmed("b1", 77)
    assert cluster.servers["b1"].accepted == 2


async def test_recovery_adds_pass_the_fence_and_have_their_own_connection(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, normal, recovery = cluster.transport(), Adds(), Adds()
    with pytest.raises(EntryNotFound):
        await transport.read("b1", 0, 0, 0, fence=True)
    send(transport, 0, 0, normal)
    send(transport, 0, 0, recovery, recovery=True)
    assert await normal.count(1) == [LedgerFenced.code]
    assert await recovery.count(1) == [0]
    assert cluster.servers["b1"].accepted == 3


async def test_the_connection_for_recovery_is_closed_when_idle(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(LedgerSettings(1, 1, 1, add_timeout_s=0.02)), Adds()
    send(transport, 0, 0, adds, recovery=True)
    await adds.count(1)
    while cluster.servers["b1"].open_connections:
        await asyncio.sleep(0.01)
    send(transport, 0, 1, adds, recovery=True)
    assert await adds.count(2) == [0, 0]


async def test_long_polls_lists_and_deletions_cross_the_wire(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(), Adds()
    for number in range(3):
        send(transport, 4, number, adds)
    await adds.count(3)
    news = await transport.wait_last_confirmed("b1", 4, 0, timeout_s=1.0, max_entries=5)
    assert news == (1, False, [entry(4, 1)])
    # Longer than a request may take otherwise: it waits for what it asked for.
    assert FAST.read_timeout_s < 0.3
    news = await transport.wait_last_confirmed("b1", 4, 1, timeout_s=0.3)
    assert news == (1, False, [])
    await transport.write_last_confirmed("b1", 4, 2)
    assert await transport.list_ledgers("b1") == ([(4, False, False, 2, 2)], False)
    assert await transport.list_entries("b1", 4, first=1, count=1) == ([(1, 1)], 2)
    await transport.delete_ledger("b1", 4)
    assert await transport.list_ledgers("b1") == ([], False)


async def test_rule_21_a_bookie_that_says_that_adds_wait_for_room_is_not_silent(cluster: Cluster) -> None:
    await cluster.start("b1")
    server, bookie = cluster.servers["b1"], cluster.bookies["b1"]
    transport, adds = cluster.transport(), Adds()
    bookie.hold()
    loop = asyncio.get_running_loop()
    began = loop.time()
    send(transport, 0, 0, adds)
    while loop.time() < began + 2 * FAST.add_timeout_s:
        await asyncio.sleep(FAST.add_timeout_s / 5)
        server.say_held()
    assert adds.heard == []
    bookie.release()
    assert await adds.count(1) == [0]
    bookie.hold()
    began = loop.time()
    send(transport, 0, 1, adds)
    while len(adds.heard) < 2:  # for ever it cannot say so
        await asyncio.sleep(FAST.add_timeout_s / 5)
        server.say_held()
    assert await adds.count(2) == [0, RequestTimeout.code]
    assert 3.9 * FAST.add_timeout_s < loop.time() - began < 6 * FAST.add_timeout_s
    began = loop.time()
    await asyncio.sleep(FAST.reconnect_backoff_max_s)
    send(transport, 0, 2, adds)  # one who is silent after that is given up as before
    assert (await adds.count(3))[2] == RequestTimeout.code
    assert loop.time() - began < 4 * FAST.add_timeout_s
    bookie.release()


async def test_two_adds_of_one_entry_are_both_answered(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, first, second = cluster.transport(), Adds(), Adds()
    send(transport, 0, 0, first, recovery=True)
    send(transport, 0, 0, second, recovery=True)
    assert await first.count(1) == await second.count(1) == [0]


async def test_a_bookie_that_is_not_there(cluster: Cluster) -> None:
    await cluster.start("b1")
    await cluster.servers["b1"].stop()
    transport, adds = cluster.transport(), Adds()
    send(transport, 0, 0, adds)
    assert adds.heard == [], "never from within add"
    assert await adds.count(1) == [BookieUnavailable.code]
    send(transport, 0, 1, adds)  # during the backoff
    assert len(adds.heard) == 1
    assert await adds.count(2) == [BookieUnavailable.code] * 2
    with pytest.raises(BookieUnavailable, match="b1 cannot be reached"):
        await transport.read("b1", 0, 0, 0)
    unknown = Adds()
    transport.add("b9", entry(0, 0), 0, 0, recovery=False, done=unknown)
    assert await unknown.count(1) == [BookieUnavailable.code]


async def test_a_bookie_that_comes_back_is_used_after_the_backoff(cluster: Cluster) -> None:
    await cluster.start("b1")
    server = cluster.servers["b1"]
    transport, adds = cluster.transport(), Adds()
    send(transport, 0, 0, adds)
    assert await adds.count(1) == [0]
    cluster.bookies["b1"].hold()
    send(transport, 0, 1, adds)
    while cluster.bookies["b1"].adds != 2:
        await asyncio.sleep(0)
    await server.stop()
    assert await adds.count(2) == [0, ConnectionLost.code]
    cluster.bookies["b1"].release()
    await server.start()
    entry_id = 2
    while True:
        send(transport, 0, entry_id, adds)
        if (await adds.count(entry_id + 1))[-1] == 0:
            break
        entry_id += 1
        await asyncio.sleep(0.01)
    assert (await transport.read("b1", 0, entry_id, entry_id)).entries == [entry(0, entry_id)]


async def test_rule_21_a_hung_bookie_fails_after_the_add_timeout(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(), Adds()
    send(transport, 0, 0, adds)
    await adds.count(1)
    cluster.servers["b1"].deaf.set()
    loop = asyncio.get_running_loop()
    start = loop.time()
    send(transport, 0, 1, adds)
    send(transport, 0, 2, adds)
    assert await adds.count(3) == [0, RequestTimeout.code, RequestTimeout.code]
    assert FAST.add_timeout_s <= loop.time() - start < FAST.add_timeout_s + 0.5
    cluster.servers["b1"].deaf.clear()


async def test_rule_21_adds_that_are_answered_keep_a_slow_bookie_alive(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(), Adds()
    loop = asyncio.get_running_loop()
    start, entry_id = loop.time(), 0
    while loop.time() < start + 2 * FAST.add_timeout_s:
        send(transport, 0, entry_id, adds)
        entry_id += 1
        await adds.count(entry_id)
        await asyncio.sleep(0.01)
    assert await adds.count(entry_id) == [0] * entry_id
    assert cluster.servers["b1"].accepted == 1


async def test_a_hung_bookie_fails_reads_after_the_read_timeout(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport = cluster.transport()
    await transport.info("b1")
    cluster.servers["b1"].deaf.set()
    with pytest.raises(RequestTimeout):
        await transport.read("b1", 0, 0, 0)


async def test_what_one_bookie_may_have_outstanding_is_bounded(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(LedgerSettings(1, 1, 1, max_outstanding_bytes=1024 * 1024)), Adds()
    cluster.bookies["b1"].hold()
    for n in range(20):
        transport.add("b1", entry(0, n, 100_000), 0, n, recovery=False, done=adds)
    assert await adds.count(10) == [TooManyRequests.code] * 10
    cluster.bookies["b1"].release()
    assert (await adds.count(20))[10:] == [0] * 10
    send(transport, 0, 20, adds)
    assert (await adds.count(21))[20] == 0


async def test_an_entry_larger_than_the_connection_takes_fails_alone(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(max_message_bytes=100_000), Adds()
    for n in range(2):  # while connecting, and connected
        transport.add("b1", entry(0, 2 * n, 300_000), 0, 2 * n, recovery=False, done=adds)
        send(transport, 0, 2 * n + 1, adds)
        await adds.count(2 * n + 2)
    await adds.count(4)
    codes = {entry_id: code for _, _, entry_id, code in adds.heard}
    assert codes[1] == codes[3] == 0
    assert codes[0] == codes[2] == FrameTooLarge.code
    assert cluster.servers["b1"].accepted == 1


async def test_close_fails_what_is_outstanding_and_refuses_the_rest(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(), Adds()
    cluster.bookies["b1"].hold()
    send(transport, 0, 0, adds)
    await transport.info("b1")
    await transport.close()
    assert await adds.count(1) == [ConnectionLost.code]
    send(transport, 0, 1, adds)
    assert await adds.count(2) == [ConnectionLost.code] * 2
    with pytest.raises(ConnectionLost):
        await transport.info("b1")
    await transport.close()


async def test_close_while_connecting(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(), Adds()
    send(transport, 0, 0, adds)
    await transport.close()
    assert await adds.count(1) == [ConnectionLost.code]


async def test_a_ledger_survives_the_loss_of_a_bookie(cluster: Cluster) -> None:
    await cluster.start("b1", "b2", "b3", "b4")
    client = cluster.client(LedgerSettings(add_timeout_s=0.5, ensemble_size=3, write_quorum=2, ack_quorum=2))
    writer = await client.create()
    confirmed = Confirmations()
    for n in range(100):
        writer.append(b"%d" % n, confirmed)
    await confirmed.count(100)
    lost = writer.metadata.last_ensemble.bookies[0]
    await cluster.servers[lost].stop()
    for n in range(100, 200):
        writer.append(b"%d" % n, confirmed)
    await confirmed.count(200)
    assert confirmed.ids == list(range(200))
    metadata = await writer.close()
    assert len(metadata.ensembles) == 2
    assert lost not in metadata.ensembles[1].bookies
    reader = await cluster.client().open(writer.ledger_id, recover=True)
    assert len(await reader.read(0, 199)) == 200
    await client.close()


async def test_a_ledger_without_a_spare_bookie_fails_its_writer(cluster: Cluster) -> None:
    await cluster.start("b1")
    client = cluster.client()
    writer = await client.create()
    confirmed = Confirmations()
    writer.append(b"x", confirmed)
    await confirmed.count(1)
    await cluster.servers["b1"].stop()
    writer.append(b"y", confirmed)
    await confirmed.count(2)
    assert confirmed.errors == [NotEnoughBookies]
    assert "b1 (" in str(confirmed.heard[1][2])
    await cluster.servers["b1"].start()
    assert (await writer.close()).last_entry == 0
    await client.close()
