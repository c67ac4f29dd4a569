"""The ends of the TCP transport: who is cancelled takes nothing from others, and nothing is left behind."""

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from magnetar.ledger import StaticBookies, TcpTransport, bookie_link
from magnetar.proto.errors import BookieUnavailable, ConnectionLost, LedgerNotFound
from magnetar.runtime.connection import ConnectionOptions
from support.sockets import counts_sockets, open_sockets
from support.virtual_time import in_virtual_time
from unit.ledger.test_tcp_transport import FAST, Adds, Cluster, entry, send

PATIENT = replace(FAST, add_timeout_s=30.0, read_timeout_s=30.0, connect_timeout_s=30.0)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()
    async with asyncio.timeout(10):
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.002)


class Silent:
    """Takes connections, and says nothing: the handshake hangs."""

    async def __aenter__(self) -> "Silent":
        self.peers: list[asyncio.StreamWriter] = []
        self.server = await asyncio.start_server(self._came, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def _came(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.append(writer)

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for peer in self.peers:
            peer.close()
        await asyncio.gather(*(peer.wait_closed() for peer in self.peers), return_exceptions=True)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_who_is_cancelled_while_connecting_takes_the_attempt_from_nobody(cluster: Cluster) -> None:
    await cluster.start("b1")
    for after in range(8):
        transport = cluster.transport(PATIENT)
        first = asyncio.create_task(transport.read_last_confirmed("b1", 9))
        second = asyncio.create_task(transport.read_last_confirmed("b1", 9))
        await turns(after)
        if not first.done():
            await cancelled(first)
        with pytest.raises(LedgerNotFound):
            await asyncio.wait_for(second, 5)
        await transport.close()


async def test_a_close_during_the_handshake_ends_everybody(cluster: Cluster) -> None:
    async with Silent() as silent:
        await cluster.start("b1")
        cluster.servers["b1"].port, port = silent.port, cluster.servers["b1"].port
        transport, adds = cluster.transport(PATIENT), Adds()
        cluster.servers["b1"].port = port
        reads = [asyncio.create_task(transport.read_last_confirmed("b1", 1)) for _ in range(3)]
        send(transport, 1, 0, adds)
        send(transport, 1, 1, adds, recovery=True)
        async with asyncio.timeout(5):
            while len(silent.peers) < 3:
                await asyncio.sleep(0.002)
        await asyncio.wait_for(transport.close(), 5)
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionLost] * 3
        assert await adds.count(2) == [ConnectionLost.code] * 2


@counts_sockets
@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_who_is_cancelled_while_closing_takes_the_end_from_nobody(cluster: Cluster) -> None:
    for after in range(6):
        await cluster.start(f"b{after}")
        before = open_sockets()
        transport = cluster.transport(PATIENT)
        await transport.info(f"b{after}")
        assert len(open_sockets() - before) == 2, "one of the transport, and one of the bookie"
        first = asyncio.create_task(transport.close())
        second = asyncio.create_task(transport.close())
        await turns(after)
        if not first.done():
            await cancelled(first)
        await asyncio.wait_for(second, 5)
        await asyncio.wait_for(transport.close(), 5)
        assert len(open_sockets() - before) <= 1, "the bookie's may still be open"


async def test_calls_after_the_close_say_so_and_open_nothing(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(PATIENT), Adds()
    await transport.close()
    with pytest.raises(ConnectionLost, match="closed"):
        await transport.info("b1")
    transport.reset_backoff("b1")
    send(transport, 1, 0, adds)
    assert await adds.count(1) == [ConnectionLost.code]
    assert cluster.servers["b1"].accepted == 0


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_a_callback_that_fails_leaves_no_other_add_without_an_answer(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport, adds = cluster.transport(PATIENT), Adds()
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    cluster.bookies["b1"].hold()
    for number in range(5):
        done: Any = broken if number == 2 else adds
        send(transport, 1, number, done)
    send(transport, 1, 2, adds)  # a second one who waits for the same entry
    async with asyncio.timeout(5):
        while cluster.bookies["b1"].adds < 5:
            await asyncio.sleep(0.002)
    await cluster.servers["b1"].stop()
    assert await adds.count(5) == [ConnectionLost.code] * 5
    assert [type(failure["exception"]) for failure in failures] == [ZeroDivisionError]


@counts_sockets
async def test_an_unreachable_bookie_leaves_nothing(cluster: Cluster) -> None:
    await cluster.start("b1")
    transport = cluster.transport(PATIENT)
    await cluster.servers["b1"].stop()
    before = open_sockets()
    for _ in range(3):
        with pytest.raises(BookieUnavailable):
            await transport.info("b1")  # never held back by a backoff
    async with asyncio.timeout(5):
        while open_sockets() - before or asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.002)


@in_virtual_time
async def test_nothing_keeps_what_was_answered() -> None:
    """Waiters, timers and bytes go with their answers."""
    cluster = Cluster()
    await cluster.start("b1")
    transport = cluster.transport(replace(PATIENT, add_timeout_s=1.0, max_outstanding_bytes=1 << 20))
    entries = [entry(1, number, 20_000) for number in range(50)]
    references = [sys.getrefcount(data) for data in entries]
    for recovery in (False, True):
        for _ in range(3):  # more than may be outstanding at once
            adds = Adds()
            for number, data in enumerate(entries):
                transport.add("b1", data, 1, number, recovery=recovery, done=adds)
            assert await adds.count(50) == [0] * 50
            waiter = weakref.ref(adds)
            del adds, data
            gc.collect()
            assert waiter() is None
            assert [sys.getrefcount(data) for data in entries] == references
    loop: Any = asyncio.get_running_loop()
    await asyncio.sleep(20)  # the connection for re-adds is closed when nobody used it for a while
    steps = loop.steps
    await asyncio.sleep(25)
    assert loop.steps - steps < 20, "nothing ticks"
    await cluster.close()


async def test_an_address_that_is_none_is_an_unreachable_bookie(cluster: Cluster) -> None:
    directory = StaticBookies({"b1": ("x" * 300, 1)})
    transport, adds = TcpTransport(directory, PATIENT, ConnectionOptions("test")), Adds()
    with pytest.raises(BookieUnavailable, match="bookie b1 cannot be reached"):
        await transport.info("b1")
    send(transport, 1, 0, adds)
    assert await adds.count(1) == [BookieUnavailable.code]
    await transport.close()


class Relay:
    """Passes on what comes, either way, but for the end: a bookie that hangs closes nothing."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Relay":
        self.server = await asyncio.start_server(self._came, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, to_writer]
        for source, target in ((reader, to_writer), (to_reader, writer)):
            self._tasks.append(asyncio.create_task(self._pass(source, target)))

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)
        await asyncio.Event().wait()

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


@counts_sockets
@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_no_socket_is_left_when_a_close_returns(cluster: Cluster) -> None:
    await cluster.start("b1")
    for cut_before in (False, True):
        before = open_sockets()
        transport = cluster.transport(FAST)
        with pytest.raises(LedgerNotFound):
            await transport.read_last_confirmed("b1", 9)
        assert len(open_sockets() - before) == 2, "one of the transport, and one of the bookie"
        if cut_before:
            cluster.servers["b1"].cut()
            await turns(2)
        await transport.close()
        assert len(open_sockets() - before) <= 1, "the bookie's may still be open"
        async with asyncio.timeout(5):
            while cluster.servers["b1"].open_connections:
                await asyncio.sleep(0.002)


@counts_sockets
@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_a_bookie_that_hangs_does_not_hold_up_a_close(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookie_link, "_CLOSE_TIMEOUT_S", 0.05)
    await cluster.start("b1")
    async with Relay(cluster.servers["b1"].port) as relay:
        cluster.servers["b1"].port, port = relay.port, cluster.servers["b1"].port
        transport = cluster.transport(FAST)
        cluster.servers["b1"].port = port
        before = open_sockets()
        with pytest.raises(LedgerNotFound):
            await transport.read_last_confirmed("b1", 9)
        assert len(open_sockets() - before) == 4, "of the transport, of the bookie, and two of the relay"
        async with asyncio.timeout(5):
            await transport.close()
        assert len(open_sockets() - before) <= 3
