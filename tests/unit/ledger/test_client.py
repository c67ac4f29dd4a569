"""LedgerClient over bookies in memory: the whole life of ledgers, without failures."""

import asyncio

import pytest

from magnetar.ledger import LedgerSettings
from magnetar.ledger.core.metadata import LedgerMetadata, LedgerState
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.proto.errors import (
    AlreadyClosed,
    EntryNotFound,
    InvalidArgument,
    InvalidSetting,
    LedgerClosed,
    LedgerFenced,
    LedgerNotFound,
    NotEnoughBookies,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, decode_ledger_entry_header
from support.bookies import Bookies, Confirmations
from support.memory_metadata import MemoryMetadataStore

SHAPES = [(1, 1, 1), (2, 2, 2), (3, 3, 2), (3, 2, 2), (5, 3, 2)]


def payloads(entries: list[bytes]) -> list[bytes]:
    return [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries]


@pytest.mark.parametrize("shape", SHAPES)
async def test_append_close_open_read(shape: tuple[int, int, int]) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    client = bookies.client()
    e, qw, qa = shape
    writer = await client.create(ensemble_size=e, write_quorum=qw, ack_quorum=qa, properties={"topic": "t"})
    confirmed = Confirmations()
    ids = [writer.append(b"payload %d" % n, confirmed) for n in range(100)]
    assert ids == list(range(100))
    assert confirmed.heard == [], "never from within append"
    assert writer.outstanding_bytes > 0
    await confirmed.count(100)
    assert confirmed.ids == ids
    assert (writer.last_add_confirmed, writer.last_add_pushed, writer.outstanding_bytes) == (99, 99, 0)
    assert payloads(await writer.read(98, 99)) == [b"payload 98", b"payload 99"]
    metadata = await writer.close()
    assert (metadata.last_entry, metadata.length) == (99, writer.length)
    assert (await writer.close()) == metadata
    reader = await client.open(writer.ledger_id, recover=False)
    assert reader.closed
    assert await reader.read_last_confirmed() == 99
    entries = await reader.read(0, 99)
    assert payloads(entries) == [b"payload %d" % n for n in range(100)]
    assert [decode_ledger_entry_header(entry).entry_id for entry in entries] == ids
    assert entries == [entry for _, entry, _ in confirmed.heard]
    assert sum(bookie.adds for bookie in bookies.values()) == 100 * qw
    await client.close()


@pytest.mark.parametrize("shape", SHAPES)
async def test_recovery_of_a_ledger_whose_writer_vanished(shape: tuple[int, int, int]) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    e, qw, qa = shape
    first, second = bookies.client(), bookies.client()
    writer = await first.create(ensemble_size=e, write_quorum=qw, ack_quorum=qa)
    confirmed = Confirmations()
    for n in range(150):
        writer.append(b"x%d" % n, confirmed)
    await confirmed.count(150)
    reader = await second.open(writer.ledger_id, recover=True)
    assert reader.closed
    assert reader.last_add_confirmed == 149
    assert reader.metadata.length == writer.length
    assert payloads(await reader.read(0, 149)) == [b"x%d" % n for n in range(150)]
    writer.append(b"late", confirmed)
    await confirmed.count(151)
    assert confirmed.errors == [LedgerFenced]
    assert writer.append(b"later", confirmed) == -1
    await confirmed.count(152)
    assert confirmed.errors == [LedgerFenced] * 2
    assert (await writer.close()).last_entry == 149, "what the other one closed agrees with ours (rule 16)"
    await first.close()
    await second.close()


async def test_an_empty_ledger_closes_and_recovers() -> None:
    bookies = Bookies("b1")
    client = bookies.client(LedgerSettings(1, 1, 1))
    writer = await client.create()
    assert (await writer.close()).last_entry == -1
    other = await client.create()
    reader = await client.open(other.ledger_id, recover=True)
    assert (reader.closed, reader.last_add_confirmed, reader.metadata.length) == (True, -1, 0)
    with pytest.raises(EntryNotFound):
        await reader.read(0, 0)
    await client.close()


async def test_ids_rise_and_metadata_tells_what_was_asked() -> None:
    bookies = Bookies("b1", "b2", "b3")
    client = bookies.client()
    ids = [(await client.create(properties={"a": "b"})).ledger_id for _ in range(3)]
    assert ids == [0, 1, 2]
    node = await bookies.metadata.get(ledger_path(2))
    assert node is not None
    metadata = LedgerMetadata.decode(node.value, 2)
    assert metadata.state is LedgerState.OPEN
    assert (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum) == (3, 2, 2)
    assert metadata.properties == {"a": "b"}
    assert metadata.created_at_ms == bookies.clock.now
    await client.close()


async def test_delete_and_what_is_not_there() -> None:
    client = Bookies("b1").client(LedgerSettings(1, 1, 1))
    writer = await client.create()
    await writer.close()
    await client.delete(writer.ledger_id)
    for call in (client.delete(writer.ledger_id), client.open(writer.ledger_id, recover=True)):
        with pytest.raises(LedgerNotFound):
            await call
    await client.close()


async def test_a_ledger_deleted_under_its_writer() -> None:
    client = Bookies("b1").client(LedgerSettings(1, 1, 1))
    writer = await client.create()
    await client.delete(writer.ledger_id)
    with pytest.raises(LedgerNotFound, match="deleted"):
        await writer.close()
    await client.close()


async def test_wrong_calls_are_told() -> None:
    client = Bookies("b1", "b2").client(LedgerSettings(1, 1, 1))
    with pytest.raises(InvalidSetting, match="ack_quorum <= write_quorum <= ensemble_size"):
        await client.create(ensemble_size=2, write_quorum=1, ack_quorum=2)
    with pytest.raises(NotEnoughBookies, match="ensemble_size=3 writable bookies, 2 are known"):
        await client.create(ensemble_size=3, write_quorum=2, ack_quorum=2)
    writer = await client.create()
    with pytest.raises(EntryNotFound, match="confirmed up to -1"):
        await writer.read(0, 0)
    await writer.close()
    confirmed = Confirmations()
    assert writer.append(b"", confirmed) == -1
    await confirmed.count(1)
    assert confirmed.errors == [LedgerClosed]
    reader = await client.open(writer.ledger_id, recover=False)
    with pytest.raises(InvalidArgument):
        await reader.read(3, 2)
    await client.close()
    with pytest.raises(AlreadyClosed):
        await client.create()


async def test_an_open_ledger_is_read_up_to_what_was_confirmed() -> None:
    bookies = Bookies("b1", "b2", "b3")
    client = bookies.client(LedgerSettings(explicit_lac_interval_s=0.001))
    writer = await client.create()
    confirmed = Confirmations()
    for _ in range(10):
        writer.append(b"x", confirmed)
    await confirmed.count(10)
    reader = await client.open(writer.ledger_id, recover=False)
    assert not reader.closed
    while await reader.read_last_confirmed() < 9:
        pass
    assert len(await reader.read(0, 100)) == 10
    writer.append(b"unconfirmed", confirmed)
    with pytest.raises(EntryNotFound):
        await reader.read(10, 10)
    await writer.close()
    assert await reader.read_last_confirmed() == 10
    assert reader.metadata.state is LedgerState.CLOSED
    await client.close()


async def test_close_waits_for_what_is_outstanding() -> None:
    client = Bookies("b1").client(LedgerSettings(1, 1, 1))
    writer = await client.create()
    confirmed = Confirmations()
    for _ in range(10):
        writer.append(b"x", confirmed)
    metadata = await writer.close()
    assert metadata.last_entry == 9
    assert confirmed.ids == list(range(10))
    await client.close()


async def test_a_client_that_is_closed_leaves_ledgers_open_and_silent() -> None:
    bookies = Bookies("b1", metadata=MemoryMetadataStore())
    client = bookies.client(LedgerSettings(1, 1, 1))
    writer = await client.create()
    confirmed = Confirmations()
    bookies["b1"].hold()
    writer.append(b"x", confirmed)
    await client.close()
    bookies["b1"].release()
    node = await bookies.metadata.get(ledger_path(writer.ledger_id))
    assert node is not None
    assert not LedgerMetadata.decode(node.value, 0).closed
    assert confirmed.heard == []


async def test_deleting_tells_the_bookies_of_all_ensembles_and_waits_for_none() -> None:
    bookies = Bookies("b1", "b2", "b3")
    client = bookies.client()
    writer = await client.create(ensemble_size=3, write_quorum=2, ack_quorum=2)
    confirmed = Confirmations()
    for number in range(4):
        writer.append(b"%d" % number, confirmed)
    await confirmed.count(4)
    await writer.close()
    bookies["b2"].hold()  # hung
    bookies["b3"].fail(LedgerNotFound("not even here"))
    await client.delete(writer.ledger_id)
    assert not await StoredLedgers(bookies.metadata).any()
    while bookies["b1"].entries:
        await asyncio.sleep(0)
    for name in bookies:
        assert ("delete_ledger", writer.ledger_id) in bookies[name].calls
    await client.close()
    assert bookies["b2"].entries, "garbage collection is its safety net"


async def test_a_ledger_whose_metadata_cannot_be_read_can_be_deleted() -> None:
    bookies = Bookies("b1")
    client = bookies.client()
    await bookies.metadata.create(ledger_path(7), b"\xc1 no metadata")
    await client.delete(7)
    assert not await StoredLedgers(bookies.metadata).any()
