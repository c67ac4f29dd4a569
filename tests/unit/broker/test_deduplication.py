"""Deduplication of a topic: what a producer sends again is stored once, whatever became of its connection and its broker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import pytest

from magnetar.broker import Broker
from magnetar.broker.log.records import log_state_path, namespace_path
from magnetar.broker.topics.coalescer import GatheredEntry, ReceiptRun
from magnetar.broker.topics.core.producers import SessionState
from magnetar.broker.topics.log_state import LogStates, StoredLogState
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.batch_extensions import EXT_CHUNK, EXT_DELIVER_AT_MS, EXT_LAST_SEQUENCE_ID
from magnetar.proto.errors import (
    BookieUnavailable,
    MagnetarError,
    SequenceIdError,
    ServiceNotReady,
    TopicBusy,
    TopicNotServed,
)
from magnetar.proto.frames import encode_frame
from support.broker_kit import TOPIC, FakeClient, FakeClock, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time

NOWHERE = (-1, -1, 0)  # in bytes 2**64 - 1: see test_commands


class Stage:
    """What outlives a broker."""

    def __init__(self, **settings: Any) -> None:
        self.ledgers, self.metadata, self.clock = FakeLedgers(), MemoryMetadataStore(), FakeClock()
        self.settings = {"deduplication": True} | settings

    @asynccontextmanager
    async def broker(self, *, crashes: bool = False) -> AsyncIterator[Broker]:
        async with running_broker(self.ledgers, self.metadata, self.clock, **self.settings) as broker:
            yield broker
            if crashes:
                for topic in list(broker.topics.values()):
                    topic.ledger.fence(TopicNotServed("crash"))

    @asynccontextmanager
    async def producer(self, *, crashes: bool = False, epoch: int = 0) -> AsyncIterator[FakeClient]:
        """A broker of its own, and a producer p on it."""
        async with self.broker(crashes=crashes) as broker:
            yield await connected(broker, epoch=epoch)


async def connected(broker: Broker, name: str = "p", **named: Any) -> FakeClient:
    client = FakeClient(broker)
    client.opened = await client.producer(name=name, **named)  # type: ignore[attr-defined]
    return client


async def connected_at_last(broker: Broker, **named: Any) -> FakeClient:
    """Tries again until the broker is ready."""
    while True:
        try:
            return await connected(broker, **named)
        except ServiceNotReady:
            await asyncio.sleep(0.001)


def last_of(client: FakeClient) -> int:
    """What the broker said of the name."""
    last: int = client.opened["last_sequence_id"]  # type: ignore[attr-defined]
    return last


async def stored(broker: Broker, count: int) -> list[bytes]:
    """All that the topic has, which must be `count` messages."""
    reader = FakeClient(broker)
    await reader.consumer(7, "", durable=False, permits=1 << 20)
    await reader.received(count)
    await settle()
    return reader.values


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


async def test_what_is_sent_again_is_stored_once_and_its_receipts_say_so() -> None:
    stage = Stage()
    async with stage.broker() as broker:
        old = await connected(broker)
        assert last_of(old) == -1
        old.publish(*numbered(0, 4))
        await old.confirmed(5)
        old.handler.connection_closed(None)
        new = await connected(broker)
        assert last_of(new) == 4
        new.publish(*numbered(3, 6), first=3)
        await new.confirmed(4)
        assert new.receipts == [(3, 2, *NOWHERE), (5, 2, *new.receipts[1][2:])]
        assert new.receipts[1][2] == 0
        assert await stored(broker, 7) == numbered(0, 6)
        stats = await FakeClient(broker).ask(c.TopicStats, "orders")
        assert stats["duplicate_messages"] == 2


async def test_rule_27_a_duplicate_is_not_acknowledged_before_its_original_is_durable() -> None:
    stage = Stage()
    async with stage.producer() as client:
        stage.ledgers.hold = True
        client.publish(b"0")
        await settle()
        client.publish(b"0", b"1", b"2")  # a duplicate of what is on its way, and two that are new
        client.publish(b"1", first=1)
        await settle()
        assert not client.receipts
        stage.ledgers.confirm(1)
        await settle()
        assert [row[:2] for row in client.receipts] == [(0, 1), (0, 1)]
        stage.ledgers.hold = False
        stage.ledgers.confirm()
        await client.confirmed(5)
        assert [(*row[:2], row[2:] == NOWHERE) for row in client.receipts] == [
            (0, 1, False),
            (0, 1, True),
            (1, 2, False),
            (1, 1, True),
        ]
        assert await stored(client.broker, 3) == numbered(0, 2)


async def test_new_messages_behind_a_duplicate_in_one_entry_keep_the_order_of_receipts() -> None:
    stage = Stage()
    async with stage.producer() as client:
        client.publish(b"0")
        client.publish(b"0", b"1")  # in the same turn: all of it is queued for one entry
        await client.confirmed(3)
        assert [(*row[:2], row[2:] == NOWHERE) for row in client.receipts] == [
            (0, 1, False),
            (0, 1, True),
            (1, 1, False),
        ]
        assert await stored(client.broker, 2) == numbered(0, 1)


async def test_nothing_behind_a_group_that_is_refused_is_stored() -> None:
    stage = Stage(max_delivery_delay_ms=1000)
    late = {EXT_DELIVER_AT_MS: stage.clock.now + 100_000}
    async with stage.producer() as client:
        client.publish(b"0")
        await client.confirmed(1)
        header = c.Send(0, 1, 0).encode()
        batches = [
            encode_batch([b"0"], sequence_id=0, publish_time_ms=0),
            encode_batch([b"late"], sequence_id=1, publish_time_ms=0, extensions=late),
            encode_batch([b"0"], sequence_id=0, publish_time_ms=0),
            encode_batch([b"2"], sequence_id=2, publish_time_ms=0),
        ]
        client.bytes_received(b"".join(encode_frame(header, batch) for batch in batches))
        await client.until(lambda: client.failures)
        await settle()
        assert [failed.sequence_id for failed in client.failures] == [1]
        assert await stored(client.broker, 1) == [b"0"]


async def test_a_session_that_failed_leaves_nothing_pushed_behind() -> None:
    """What was taken behind a group that was refused is not stored, and is sent again."""
    stage = Stage(max_message_bytes=1024)
    async with stage.producer() as client:
        client.publish(b"0", b"1")
        client.publish(b"x" * 100_000, first=2)
        client.publish(b"3", first=3)
        await client.until(lambda: client.failures)
        await client.confirmed(2)
        client.frame(c.CloseProducer(0, 1))
        again = await client.producer(name="p", epoch=1)
        assert again["last_sequence_id"] == 1
        client.publish(b"3", first=3, epoch=again["epoch"])
        await client.confirmed(3)
        assert await stored(client.broker, 3) == [b"0", b"1", b"3"]


async def test_what_failed_with_its_broker_is_not_known_to_the_next_one() -> None:
    stage = Stage()
    async with stage.producer(crashes=True) as client:
        client.publish(*numbered(0, 1))
        await client.confirmed(2)
        topic = client.broker.topics[str(TOPIC)]
        stage.ledgers.writers[0].fail_after = 1
        client.publish(*numbered(2, 3), first=2)
        await settle(2)
        topic.ledger.fence(TopicNotServed("crash"))
    async with stage.producer(epoch=1) as client:
        assert last_of(client) == 1
        client.publish(*numbered(2, 3), first=2, epoch=1)
        await client.confirmed(2)
        assert await stored(client.broker, 4) == numbered(0, 3)


async def test_entries_that_a_failed_ledger_is_found_to_hold_count() -> None:
    """Rule 24: their callbacks never came; they are confirmed when the ledger is closed."""
    stage = Stage(retry_initial_ms=1)
    async with stage.broker() as broker:
        client = await connected(broker)
        client.publish(b"0")
        await client.confirmed(1)
        writer = stage.ledgers.writers[0]
        writer.fail_after, writer.store_failed = 1, True
        stage.ledgers.fail_close.append(BookieUnavailable("it is closed by recovery, which finds the entry"))
        client.publish(b"1", first=1)
        await client.confirmed(2)
        client.handler.connection_closed(None)
        again = await connected(broker)
        assert last_of(again) == 1
        assert len(stage.ledgers.ledgers[0].entries) == 2
        again.publish(b"1", b"2", first=1)
        await again.confirmed(2)
        assert await stored(broker, 3) == numbered(0, 2)


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("entries", [1, 3, 100])
async def test_the_next_broker_knows_what_is_stored(crashes: bool, entries: int) -> None:
    stage = Stage(deduplication_snapshot_entries=entries)
    last = -1
    for round_ in range(4):
        async with stage.producer(crashes=crashes) as client:
            assert last_of(client) == last
            epoch = client.opened["epoch"]  # type: ignore[attr-defined]
            first = max(last - 1, 0)
            for number in range(first, first + 5):
                client.publish(b"%d" % number, first=number, epoch=epoch)
                await client.confirmed(number - first + 1)
            last = first + 4
            await settle()
            if round_ == 3:
                assert await stored(client.broker, last + 1) == numbered(0, last)


async def test_how_often_it_is_stored_is_a_policy() -> None:
    stage = Stage(deduplication_snapshot_interval_ms=1_000_000)
    async with stage.producer() as client:
        topic = client.broker.topics[str(TOPIC)]
        for number, policy, stored_anew in ((0, 1, True), (1, None, False)):
            await topic.change_policies({"deduplication_snapshot_entries": policy})
            ((before, _),) = topic.states.holders()
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
            await settle(200)
            ((after, _),) = topic.states.holders()
            assert (after > before) == stored_anew


async def test_an_entry_that_was_stored_and_never_confirmed_is_found_by_the_next_broker() -> None:
    stage = Stage()
    async with stage.producer(crashes=True) as client:
        client.publish(b"0")
        await client.confirmed(1)
        stage.ledgers.hold = True
        client.publish(b"1", first=1)
        await settle()
        stage.ledgers.hold = False
    async with stage.producer() as client:
        assert last_of(client) == 1


async def test_a_part_of_a_group_that_is_stored_is_an_error_which_names_both() -> None:
    stage = Stage()
    async with stage.producer() as client:
        client.publish(*numbered(0, 4))
        await client.confirmed(5)
        client.publish_batch(numbered(5, 6), first=5)
        client.publish_batch(numbered(6, 8), first=6)
        client.publish(b"9", first=9)
        await client.until(lambda: client.failures)
        (failed,) = client.failures
        assert (failed.sequence_id, failed.code) == (6, SequenceIdError.code)
        assert "up to sequence id 6 are stored, and a group of 6 to 8" in failed.message
        await client.confirmed(7)
        assert await stored(client.broker, 7) == numbered(0, 6)


def chunk(sequence_id: int, chunk_id: bytes, index: int, *, last: bool = False) -> bytes:
    return encode_batch(
        [b"%d" % index],
        sequence_id=sequence_id,
        publish_time_ms=0,
        extensions={EXT_CHUNK: [chunk_id, index, last]},
    )


@pytest.mark.parametrize("crashes", [False, True])
async def test_chunks_are_deduplicated_as_one_message(crashes: bool) -> None:
    stage = Stage()
    async with stage.producer(crashes=crashes) as client:
        client.publish(b"x")
        stage.ledgers.hold = True
        for index in (0, 1, 0):
            client.frame(c.Send(0, 1, 0), chunk(1, b"a" * 8, index))
        await settle()
        client.frame(c.Send(0, 1, 0), chunk(1, b"a" * 8, 1))
        stage.ledgers.hold = False
        stage.ledgers.confirm()
        await client.confirmed(5)
    async with stage.producer(crashes=crashes) as client:
        assert last_of(client) == 0
        for index in range(3):
            client.frame(c.Send(0, 1, 0), chunk(1, b"a" * 8, index, last=index == 2))
        client.publish(b"y", first=2)
        await client.confirmed(4)
        assert [row[2:] == NOWHERE for row in client.receipts] == [True, True, False, False]
    async with stage.producer() as client:
        assert last_of(client) == 2
        for index in range(3):
            client.frame(c.Send(0, 1, 0), chunk(1, b"a" * 8, index, last=index == 2))
        await client.confirmed(3)
        assert all(row[2:] == NOWHERE for row in client.receipts)
        assert await stored(client.broker, 5) == [b"x", b"0", b"1", b"2", b"y"]


@pytest.mark.parametrize("crashes", [False, True])
async def test_ids_may_run_ahead_within_a_batch(crashes: bool) -> None:
    stage = Stage()
    batch = encode_batch(
        [b"a", b"b"],
        sequence_id=3,
        publish_time_ms=0,
        sequence_ids=[3, 9],
        extensions={EXT_LAST_SEQUENCE_ID: 9},
    )
    async with stage.producer(crashes=crashes) as client:
        client.frame(c.Send(0, 1, 0), batch)
        await client.confirmed(2)
    async with stage.producer() as client:
        assert last_of(client) == 9
        client.frame(c.Send(0, 1, 0), batch)
        client.publish(b"c", first=10)
        await client.confirmed(3)
        assert client.receipts[0] == (3, 2, *NOWHERE)
        assert await stored(client.broker, 3) == [b"a", b"b", b"c"]


async def test_a_group_of_several_batches_is_one() -> None:
    """As batching by key makes them."""
    stage = Stage()
    payload = b"".join(encode_batch([b"a"], sequence_id=number, publish_time_ms=0) for number in range(2))
    async with stage.broker() as broker:
        client = await connected(broker)
        client.frame(c.Send(0, 1, 0), payload)
        client.frame(c.Send(0, 1, 0), payload)
        await client.confirmed(4)
        assert [row[:2] for row in client.receipts] == [(0, 2), (0, 2)]
        assert client.receipts[1][2:] == NOWHERE
        assert len(await stored(broker, 2)) == 2


async def set_policy(client: FakeClient, on: bool | None, namespace: str = "") -> None:
    await client.change_policies("" if namespace else "orders", namespace, deduplication=on)
    await settle(200)


async def test_it_is_switched_on_and_off_while_the_topic_runs() -> None:
    stage = Stage(deduplication=False)
    async with stage.broker() as broker:
        client = await connected(broker)
        client.publish(b"0", b"1")
        client.publish(b"1", first=1)  # off: it is stored again
        await client.confirmed(3)
        await set_policy(client, True)
        closed = [command.code for command, _ in client.frames if isinstance(command, c.CloseProducer)]
        assert closed == [TopicBusy.code], "it comes again at once"
        client = await connected(broker)
        client.publish(b"2", first=2)
        client.publish(b"2", first=2)
        await client.confirmed(2)
        client.handler.connection_closed(None)
        client = await connected(broker)
        assert last_of(client) == 2
        client.publish(b"2", b"3", first=2)
        await client.confirmed(2)
        await set_policy(client, False)
        assert await stage.metadata.get(log_state_path(TOPIC, "deduplication")) is None
        client.publish(b"3", first=3)
        await client.confirmed(3)
        assert await stored(broker, 6) == [b"0", b"1", b"1", b"2", b"3", b"3"]
        await set_policy(client, True)
        client.handler.connection_closed(None)
        assert last_of(await connected(broker)) == -1  # nothing that it knew before counts


async def test_the_policy_of_the_namespace_counts_too_and_what_is_left_over_goes() -> None:
    stage = Stage(deduplication=False)
    async with stage.broker() as broker:
        await set_policy(FakeClient(broker), True, "public/default")
        client = await connected(broker)
        client.publish(b"0")
        await client.confirmed(1)
        client.handler.connection_closed(None)
        assert last_of(await connected(broker)) == 0
    async with stage.broker() as broker:
        await set_policy(FakeClient(broker), None, "public/default")
        # Off before the topic was loaded: what was stored of it may not count when it is on again.
        assert await stage.metadata.get(log_state_path(TOPIC, "deduplication")) is not None
        assert last_of(await connected_at_last(broker)) == -1
        assert await stage.metadata.get(log_state_path(TOPIC, "deduplication")) is None


@pytest.mark.parametrize("error", [BookieUnavailable("away"), ValueError("a defect")])
async def test_what_cannot_be_deleted_yet_may_not_count_when_it_is_on_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(retry_initial_ms=1, retry_max_ms=1, deduplication_snapshot_entries=1)
    async with stage.broker() as broker:
        client = await connected(broker)
        client.publish(b"0")
        await client.confirmed(1)
        await settle()
        states = broker.topics[str(TOPIC)].states
        drop, failures = states.drop, 3

        async def failing(kind: str) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise error
            await drop(kind)

        monkeypatch.setattr(states, "drop", failing)
        await set_policy(client, False)
        await set_policy(client, True)
        while failures:
            await asyncio.sleep(0.001)
        client.handler.connection_closed(None)
        assert last_of(await connected_at_last(broker, epoch=3)) == -1


async def test_nobody_begins_anew_while_what_was_known_may_become_the_next_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is switched off, what it knew cannot be deleted, and the next owner finds it switched on again."""
    stage = Stage(retry_initial_ms=1, retry_max_ms=1)
    async with stage.producer() as client:
        client.publish(*numbered(0, 4))
        await client.confirmed(5)
    async with stage.broker(crashes=True) as broker:
        client = FakeClient(broker)
        await client.consumer()
        away = AsyncMock(side_effect=BookieUnavailable("away"))
        monkeypatch.setattr(broker.topics[str(TOPIC)].states, "drop", away)
        await set_policy(client, False)
        with pytest.raises(ServiceNotReady, match="read or deleted first"):
            await connected(broker)  # it would begin with 0, which the next owner takes for a duplicate
        await set_policy(client, True)
    async with stage.broker() as broker:
        assert last_of(await connected(broker)) == 4


async def test_who_waits_for_a_place_is_let_in_once_it_is_known_what_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is switched on while an older session's groups are waited for, and its state cannot be opened at once."""
    stage = Stage(deduplication=False, retry_initial_ms=1, retry_max_ms=1)
    async with stage.broker() as broker:
        old = await connected(broker)
        stage.ledgers.hold = True
        old.publish(b"0")
        await settle()
        old.handler.connection_closed(None)
        opening = asyncio.create_task(connected(broker, epoch=1))
        await settle()
        away = AsyncMock(side_effect=BookieUnavailable("away"))
        with monkeypatch.context() as patched:
            patched.setattr(StoredLogState, "_begin", away)
            await set_policy(FakeClient(broker), True)
            assert away.await_count
            stage.ledgers.hold = False
            stage.ledgers.confirm()
            with pytest.raises(ServiceNotReady, match="away"):
                await opening


async def test_a_defect_while_it_is_switched_on_leaves_nobody_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(deduplication=False, retry_initial_ms=1, retry_max_ms=1)
    async with stage.broker() as broker:
        client = await connected(broker)
        states = broker.topics[str(TOPIC)].states
        with monkeypatch.context() as patch:

            async def failing(*given: Any, **named: Any) -> None:
                raise ValueError("a defect")

            patch.setattr(states, "open", failing)
            await set_policy(client, True)
            assert "deduplication is not switched on yet: a defect" in caplog.text
            client.handler.connection_closed(None)
            with pytest.raises(ServiceNotReady, match="is read or deleted first"):
                await connected(broker)
        while broker.topics[str(TOPIC)].deduplication._opened is None:
            await asyncio.sleep(0.001)
        client = await connected(broker)
        client.publish(b"0")
        client.publish(b"0")
        await client.confirmed(2)
        assert await stored(broker, 1) == [b"0"]


@in_virtual_time
async def test_a_topic_is_loaded_for_consumers_although_a_defect_keeps_its_producers_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    async with stage.producer() as client:
        client.publish(b"0")
        await client.confirmed(1)
    monkeypatch.setattr(LogStates, "open", AsyncMock(side_effect=ValueError("a defect")))
    async with stage.broker() as broker:
        assert await stored(broker, 1) == [b"0"]
        with pytest.raises(ServiceNotReady, match="is read or deleted first"):
            await connected(broker)


async def test_no_producer_is_let_in_while_it_is_not_known_what_it_has_stored() -> None:
    stage = Stage(
        deduplication_snapshot_entries=1, max_inline_cursor_bytes=1, retry_initial_ms=1, retry_max_ms=1
    )
    async with stage.producer(crashes=True) as client:
        for number in range(3):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
        await settle()
    (ledger_id,) = [
        ledger.ledger_id
        for ledger in stage.ledgers.ledgers.values()
        if ledger.properties["kind"] == "deduplication"
    ]
    stage.ledgers.unopened[ledger_id] = BookieUnavailable("away")
    async with stage.broker() as broker:
        client = FakeClient(broker)
        with pytest.raises(
            ServiceNotReady, match=r"deduplication state of topic .* cannot be read yet.*away"
        ):
            await client.producer(name="p")
        consumer = FakeClient(broker)
        await consumer.consumer()
        assert await consumer.received(3) == numbered(0, 2)  # nobody else waits for it
        stage.ledgers.unopened.clear()
        assert last_of(await connected_at_last(broker)) == 2


async def test_off_it_costs_nothing() -> None:
    stage = Stage(deduplication=False)
    async with stage.producer() as client:
        client.publish(b"0")
        await client.confirmed(1)
        topic = client.broker.topics[str(TOPIC)]
        assert not list(topic.states.holders())
        assert all(session.pushed is None for session in topic.producers)
    assert await stage.metadata.get(log_state_path(TOPIC, "deduplication")) is None


async def test_duplicates_with_nothing_outstanding_fail_with_a_topic_that_is_lost() -> None:
    stage = Stage()
    async with stage.broker() as broker:
        client = await connected(broker)
        client.publish(b"0")
        await client.confirmed(1)
        topic = broker.topics[str(TOPIC)]
        (session,) = topic.producers
        client.publish(b"0")
        topic._components.ownership.valid = False  # type: ignore[misc]
        await settle()
        assert len(client.receipts) == 1
        topic.fence(TopicNotServed("lost"))
        assert session.outstanding == 0
        assert session.state is not SessionState.OPEN
        topic._components.ownership.valid = True  # type: ignore[misc]


async def test_a_producer_that_is_not_used_is_forgotten_and_a_connected_one_is_not() -> None:
    stage = Stage(deduplication_producer_ttl_ms=1000)
    async with stage.broker() as broker:
        clients = [await connected(broker, name) for name in "pq"]
        for client in clients:
            client.publish(b"0")
            await client.confirmed(1)
        clients[1].handler.connection_closed(None)
        stage.clock.now += 2000
        topic = broker.topics[str(TOPIC)]
        topic.maintain()
        assert [topic.deduplication.begin(name).last for name in "pq"] == [0, -1]  # type: ignore[union-attr]


async def test_a_former_owner_that_is_still_alive_acknowledges_no_duplicate_of_what_is_not_stored() -> None:
    """What it has on its way is fenced off, and so is its duplicate."""
    stage = Stage()
    async with stage.broker() as old_broker, stage.broker() as new_broker:
        old = await connected(old_broker)
        old.publish(b"0")
        await old.confirmed(1)
        new = await connected(new_broker, epoch=1)
        assert last_of(new) == 0
        old.publish(b"1", first=1)
        old.publish(b"1", first=1)
        await old.until(lambda: old.failures)
        await settle()
        assert len(old.receipts) == 1
        new.publish(b"1", first=1, epoch=1)
        await new.confirmed(1)
        assert await stored(new_broker, 2) == numbered(0, 1)


async def test_the_setting_and_the_policy_are_checked() -> None:
    stage = Stage(deduplication=False)
    async with stage.producer() as client:
        with pytest.raises(MagnetarError, match="deduplication"):
            await client.change_policies("orders", deduplication="yes")


async def test_what_is_acknowledged_and_not_durable_yet_counts_for_the_next_session() -> None:
    """flush=async: nothing of the name is outstanding, and its messages are only in memory."""
    stage = Stage()
    async with stage.broker() as broker:
        client = await connected(broker)
        client.publish(b"0")
        await client.confirmed(1)
        stage.ledgers.hold = True
        client.publish(b"1", first=1)
        await settle()
        topic = broker.topics[str(TOPIC)]
        (entry,) = topic.ledger.appending.unconfirmed()
        topic._accepted(0, 1, entry)
        await client.confirmed(2)
        client.handler.connection_closed(None)
        client = await connected(broker)
        assert last_of(client) == 1
        client.publish(b"1", first=1)
        await client.confirmed(1)
        assert client.receipts == [(1, 1, *NOWHERE)]
        stage.ledgers.hold = False
        stage.ledgers.confirm()
        assert await stored(broker, 2) == numbered(0, 1)


async def test_rule_44_duplicates_that_wait_fill_the_budget_as_other_messages_do() -> None:
    stage = Stage(max_topic_publish_bytes=10_000)
    async with stage.producer() as client:
        topic = client.broker.topics[str(TOPIC)]
        stage.ledgers.hold = True
        client.publish(b"0")
        await settle()
        while not client.paused:
            client.publish(b"0")  # each a run of its own
            assert topic.publish_budget.used < 20_000
        stage.ledgers.hold = False
        stage.ledgers.confirm()
        await client.until(lambda: not client.paused)
        await settle()
        client.publish(b"0")
        await settle()
        assert topic.publish_budget.used == 0
        assert client.receipts[-1] == (0, 1, *NOWHERE)


async def test_policies_that_are_not_known_keep_producers_out() -> None:
    """Also where nothing is stored: what is stored meanwhile would be unknown to deduplication (seed 140 of once)."""
    stage = Stage(deduplication=False, retry_initial_ms=1)
    async with stage.broker() as broker:
        await set_policy(FakeClient(broker), True, "public/default")
        client = await connected(broker)
        client.publish(b"0")
        await client.confirmed(1)
        await FakeClient(broker).consumer(topic="orders")
    get, away = stage.metadata.get, [True]

    async def failing(path: str) -> Any:
        if away and path == namespace_path("public/default"):
            raise BookieUnavailable("the store is away")
        return await get(path)

    stage.metadata.get = failing  # type: ignore[method-assign]
    async with stage.broker() as broker:
        for topic, why in (("orders", "is read or deleted first"), ("another", "are not known, and whether")):
            with pytest.raises(ServiceNotReady, match=why):
                await FakeClient(broker).producer(topic=topic)
        await FakeClient(broker).consumer(topic="orders")
        away.clear()
        assert last_of(await connected_at_last(broker)) == 0


@pytest.mark.parametrize("on", [False, True])
async def test_who_comes_while_changed_policies_are_read_waits_for_them(on: bool) -> None:
    stage = Stage(deduplication=False)
    namespace = "public/default"
    get, gate = stage.metadata.get, asyncio.Event()

    async def slow(path: str) -> Any:
        if path == namespace_path(namespace):
            await gate.wait()
        return await get(path)

    gate.set()
    async with stage.broker() as broker:
        await connected(broker)
        stage.metadata.get = slow  # type: ignore[method-assign]
        await broker.namespaces.change(namespace, {"deduplication": on})
        broker.namespaces.followed.drop(namespace)  # as by the watch
        gate.clear()
        coming = FakeClient(broker).ask(c.CreateProducer, 1, "orders", "q")
        await settle()
        assert not coming.done(), "nobody is let in while they are not known"
        gate.set()
        assert (await coming)["name"] == "q"
        assert (broker.topics[str(TOPIC)].producers._by_name["q"].pushed is not None) == on


async def test_a_policy_that_changes_while_the_topic_ends_is_for_its_next_owner() -> None:
    stage = Stage(deduplication=False)
    async with stage.broker() as broker:
        await connected(broker)
        topic = broker.topics[str(TOPIC)]
        close = topic.subscriptions.close

        async def slow(*given: Any, **named: Any) -> Any:
            other = FakeClient(broker)
            await set_policy(other, True, "public/default")
            await settle(50)
            return await close(*given, **named)

        topic.subscriptions.close = slow  # type: ignore[method-assign]
        await broker.unload(TOPIC, TopicNotServed("it moves"))
        await settle(50)
        assert await stage.metadata.get(log_state_path(TOPIC, "deduplication")) is None
        assert not list(topic.states.holders())


async def test_ids_that_began_anew_while_it_was_off_keep_no_producer_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(deduplication=False)
    async with stage.broker() as broker:
        client = await connected(broker)
        entries = []
        for first, messages in ((0, 3), (0, 5), (7, 1)):
            entry = GatheredEntry()
            entry.runs.append(
                ReceiptRun(broker.topics[str(TOPIC)].producers._by_name["p"], first, messages, 0)
            )
            entries.append(entry)
        await set_policy(client, True)
        client.handler.connection_closed(None)
        appending = broker.topics[str(TOPIC)].ledger.appending
        monkeypatch.setattr(appending, "unconfirmed", lambda: iter(entries))
        assert last_of(await connected(broker)) == 7
