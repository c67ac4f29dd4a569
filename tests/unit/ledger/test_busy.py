"""Bookies that are busy, slow or hung: what a writer does about them, and what it keeps in memory meanwhile."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from magnetar.ledger import LedgerClient, LedgerSettings, LocalTransport, StaticBookies, TcpTransport
from magnetar.ledger import writer as writer_module
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MagnetarError, NotEnoughBookies, RequestTimeout, TooManyRequests
from magnetar.proto.ledger_entry import encode_ledger_entry
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_kit import until
from support.bookies import Bookies, Confirmations, FakeBookie, StillClock
from support.memory_metadata import MemoryMetadataStore
from support.tcp_bookies import BookieServer

BUSY = TooManyRequests("no room in the write cache")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "RETRY_PAUSE_S", 0.02)


async def test_a_busy_bookie_that_nobody_can_replace_does_not_end_the_ledger() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer = await bookies.client().create(ensemble_size=3, write_quorum=3, ack_quorum=3)
    confirmed = Confirmations()
    bookies["b2"].fail(BUSY)
    for number in range(20):
        writer.append(b"%d" % number, confirmed)
    await asyncio.sleep(0.1)
    assert confirmed.heard == []
    adds = bookies["b2"].adds
    assert adds <= 20 * 7, "a pause between attempts"
    bookies["b2"].fail(None)
    await confirmed.count(20)
    assert confirmed.ids == list(range(20))
    # Long after that it is busy again: its time begins anew.
    bookies["b2"].fail(BUSY)
    writer.append(b"20", confirmed)
    await asyncio.sleep(0.05)
    bookies["b2"].fail(None)
    await confirmed.count(21)
    assert confirmed.errors == []
    assert writer.under_replicated == 0
    metadata = await writer.close()
    assert len(metadata.ensembles) == 1
    assert all((writer.ledger_id, n) in bookies["b2"].entries for n in range(20))


async def test_a_busy_bookie_is_replaced_if_there_is_another_one() -> None:
    bookies = Bookies("b1", "b2", "b3", "b4")
    writer = await bookies.client().create(ensemble_size=3, write_quorum=3, ack_quorum=3)
    confirmed = Confirmations()
    busy = writer.metadata.last_ensemble.bookies[0]
    bookies[busy].fail(BUSY)
    writer.append(b"x", confirmed)
    await confirmed.count(1)
    assert confirmed.errors == []
    assert busy not in writer.metadata.last_ensemble.bookies


async def test_a_bookie_that_is_busy_for_four_add_timeouts_has_failed() -> None:
    bookies = Bookies("b1", "b2")
    client = bookies.client(LedgerSettings(add_timeout_s=0.05))
    writer = await client.create(ensemble_size=2, write_quorum=2, ack_quorum=2)
    confirmed = Confirmations()
    bookies["b2"].fail(BUSY)
    loop = asyncio.get_running_loop()
    began = loop.time()
    writer.append(b"x", confirmed)
    await confirmed.count(1)
    assert confirmed.errors == [NotEnoughBookies]
    assert loop.time() - began > 0.18


async def test_what_is_confirmed_without_a_busy_bookie_is_forgotten_and_counted() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer = await bookies.client().create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    confirmed = Confirmations()
    bookies["b3"].fail(BUSY)
    for number in range(50):
        writer.append(b"%d" % number, confirmed)
    await confirmed.count(50)
    assert (writer.outstanding_bytes, confirmed.errors) == (0, [])
    while writer.under_replicated < 50:
        await asyncio.sleep(0.01)
    adds = bookies["b3"].adds
    await asyncio.sleep(0.06)
    assert bookies["b3"].adds == adds, "not sent again"
    bookies["b3"].fail(None)
    writer.append(b"more", confirmed)
    await confirmed.count(51)
    metadata = await writer.close()
    assert len(metadata.ensembles) == 1
    reader = await bookies.client().open(writer.ledger_id, recover=False)
    assert len(await reader.read(0, 50)) == 51


async def test_a_closed_or_detached_writer_pauses_no_more() -> None:
    for end in ("close", "detach"):
        bookies = Bookies("b1", "b2", "b3")
        writer = await bookies.client().create(ensemble_size=3, write_quorum=3, ack_quorum=2)
        confirmed = Confirmations()
        bookies["b3"].fail(BUSY)
        writer.append(b"x", confirmed)
        await confirmed.count(1)
        await asyncio.sleep(0)
        if end == "close":
            await writer.close()
        else:
            writer.detach()
        assert writer._retry_timer is None


async def test_memory_is_bounded_when_qa_is_below_qw_and_a_bookie_stands_still() -> None:
    """apache/pulsar #14861: a stopped process takes adds into socket buffers, and then nowhere."""
    limit = 1 << 20
    fakes = {name: FakeBookie(name) for name in ("b1", "b2", "b3")}
    servers = {name: await BookieServer(bookie).start() for name, bookie in fakes.items()}
    directory = StaticBookies({name: ("127.0.0.1", server.port) for name, server in servers.items()})
    settings = LedgerSettings(add_timeout_s=60, max_outstanding_bytes=limit, explicit_lac_interval_s=0)
    transport = TcpTransport(directory, settings, ConnectionOptions("test"))
    client = LedgerClient(
        StoredLedgers(MemoryMetadataStore()), transport, directory, settings, random.Random(1), StillClock()
    )
    try:
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
        confirmed = Confirmations()
        writer.append(b"first", confirmed)
        await confirmed.count(1)
        await until(lambda: fakes["b3"].adds == 1)
        servers["b3"].deaf.set()
        highest = number = 0
        # The sockets of a machine take what they like, some of them 10 MB.
        while writer.under_replicated <= 100 and number < 2000:
            writer.append(b"x" * 50_000, confirmed)
            number += 1
            await confirmed.count(number + 1)
            link = transport._add_channels["b3"]._link
            assert link is not None
            assert link._connection is not None
            highest = max(highest, link._adds.outstanding_bytes, link._connection.transport.buffered_bytes)
        assert confirmed.errors == []
        assert limit // 2 < highest <= limit + 1000, "of what was written beyond the sockets"
        assert writer.outstanding_bytes == 0
        assert writer.under_replicated > 100
        assert len((await writer.close()).ensembles) == 1
    finally:
        await client.close()
        await transport.close()
        for server in servers.values():
            await server.stop()


# --- rule 21: a hung bookie of this process, a hung metadata store ---------------------------------------------------------


async def test_rule_21_a_bookie_of_this_process_that_hangs_has_failed_after_the_add_timeout() -> None:
    bookie = FakeBookie("b")
    transport = LocalTransport({"b": bookie}, add_timeout_s=0.3, read_timeout_s=0.02)
    codes: list[int] = []
    loop = asyncio.get_running_loop()
    answered_at = 0.0

    def done(_bookie: str, _ledger_id: int, _entry_id: int, code: int) -> None:
        nonlocal answered_at
        codes.append(code)
        answered_at = loop.time()

    def add(entry_id: int) -> None:
        transport.add(
            "b", encode_ledger_entry(1, entry_id, -1, 1, b"x"), 1, entry_id, recovery=False, done=done
        )

    add(0)
    await asyncio.sleep(0.02)
    assert codes == [0]
    bookie.hold()
    began = loop.time()
    add(1)
    add(2)
    requests: list[Coroutine[Any, Any, Any]] = [
        transport.read("b", 1, 0, 0),
        transport.read_last_confirmed("b", 1, fence=True),
        transport.write_last_confirmed("b", 1, 0),
        transport.wait_last_confirmed("b", 1, 5, timeout_s=0.02),
        transport.delete_ledger("b", 1),
    ]
    for request in requests:
        with pytest.raises(RequestTimeout, match="read_timeout_s"):
            await request
    while len(codes) < 3:
        await asyncio.sleep(0.01)
    assert 0.3 <= answered_at - began < 1, "not the four add timeouts of a slow one"
    assert codes == [0, RequestTimeout.code, RequestTimeout.code]
    bookie.release()  # late answers change nothing
    await asyncio.sleep(0.02)
    assert len(codes) == 3
    add(3)
    await transport.close()
    await asyncio.sleep(0.02)
    assert len(codes) == 4


async def test_a_bookie_of_this_process_without_room_is_not_hung_before_four_add_timeouts() -> None:
    bookie = FakeBookie("b")
    transport = LocalTransport({"b": bookie}, add_timeout_s=0.1)
    heard: list[tuple[float, int]] = []
    loop = asyncio.get_running_loop()
    bookie.hold()
    began = loop.time()
    entry = encode_ledger_entry(1, 0, -1, 1, b"x")
    transport.add("b", entry, 1, 0, recovery=False, done=lambda *a: heard.append((loop.time() - began, a[3])))
    bookie.accepting = False
    while not heard:
        await asyncio.sleep(0.01)
    assert heard[0][1] == RequestTimeout.code
    assert 0.35 < heard[0][0] < 2
    await transport.close()


async def test_rule_21_a_hung_metadata_store_ends_in_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bookies = Bookies("b1", "b2", "b3")
    client = bookies.client(LedgerSettings(metadata_timeout_s=0.05))
    writer = await client.create(ensemble_size=2, write_quorum=2, ack_quorum=2)

    async def hang(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(bookies.metadata, "put", hang)
        patch.setattr(bookies.metadata, "get", hang)
        with pytest.raises(MagnetarError, match=r"metadata_timeout_s=0\.05"):
            await asyncio.wait_for(writer.close(), 5)
        with pytest.raises(RequestTimeout, match="metadata_timeout_s"):
            await asyncio.wait_for(client.open(writer.ledger_id, recover=True), 5)
    assert (await writer.close()).closed, "it can be asked for again"
