"""A topic is terminated in whatever state it is: what was queued is stored first, and nothing afterwards."""

import asyncio
from typing import Any

import pytest

from magnetar.broker.log.records import TopicRecord, topic_path
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    BookieUnavailable,
    MagnetarError,
    MessageLost,
    QuorumLost,
    TopicBusy,
    TopicInUse,
    TopicNotServed,
    TopicTerminated,
)
from magnetar.proto.ids import MessageId
from support.broker_kit import TOPIC, FakeClient, FakeClock, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore


def ended(client: FakeClient) -> list[int]:
    """Codes of the errors with which its producers were closed."""
    return [frame.code for frame, _ in client.frames if isinstance(frame, c.CloseProducer)]


def ends(client: FakeClient) -> list[tuple[int, int]]:
    """Epoch and count of what its consumers were told."""
    return [
        (frame.consumer_epoch, frame.redelivers)
        for frame, _ in client.frames
        if isinstance(frame, c.EndOfTopic)
    ]


async def test_what_is_queued_is_confirmed_first_and_what_comes_meanwhile_is_not_stored() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as broker:
        client, other, reader = (FakeClient(broker) for _ in range(3))
        await client.producer()
        await reader.consumer(1, "", durable=False)
        client.publish(b"0")
        await client.confirmed(1)
        ledgers.hold = True
        client.publish(b"1", first=1)
        await settle()
        client.publish(b"2", first=2)  # waits for room
        terminating = client.ask(c.TerminateTopic, "orders")
        await settle()
        client.publish(b"late", first=3)
        with pytest.raises(TopicBusy):
            await other.producer()
        assert ended(client) == []
        ledgers.hold = False
        ledgers.confirm()
        last = MessageId.from_bytes(await terminating)
        assert [row[0] for row in client.receipts] == [0, 1, 2]
        assert ended(client) == [TopicTerminated.code]
        assert last == MessageId(*client.receipts[-1][2:])
        with pytest.raises(TopicTerminated):
            await other.producer()
        assert await reader.received(3) == [b"0", b"1", b"2"]
        assert ends(reader) == [(0, 0)]
        found = await metadata.get(topic_path(TOPIC))
        assert found is not None
        record = TopicRecord.decode(found.value, "")
        assert (record.terminated, record.last_message) == (True, tuple(last)[:3])
        assert all(info.closed for info in record.ledgers), "no ledger is open, nor opened again"
        await settle()
        assert broker.topics[str(TOPIC)].ledger.appending.open_ledger is None


async def test_a_ledger_that_fails_meanwhile_costs_nothing() -> None:
    """What came back from it is stored in the next one, before the end is."""
    ledgers = FakeLedgers()
    async with running_broker(ledgers, max_outstanding_entries=3) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        ledgers.writers[0].fail_after = 1
        ledgers.hold = True
        ledgers.close_gate = asyncio.Event()
        for number in range(1, 6):
            client.publish(b"%d" % number, first=number)
            await settle(5)
        ledgers.confirm()
        await settle()
        terminating = client.ask(c.TerminateTopic, "orders")
        await settle()
        ledgers.hold = False
        ledgers.close_gate.set()
        last = MessageId.from_bytes(await terminating)
        assert sum(row[1] for row in client.receipts) == 6
        _, count, ledger, entry, index = client.receipts[-1]
        assert last == MessageId(ledger, entry, index + count - 1)
        assert ledger > 0


async def test_what_cannot_be_stored_leaves_the_topic_as_it_was() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, producer_drain_timeout_ms=30) as broker:
        client = FakeClient(broker)
        await client.producer(name="p")
        client.publish(b"0")
        await client.confirmed(1)
        ledgers.hold = True
        client.publish(b"1", first=1)
        await settle()
        with pytest.raises(QuorumLost, match="producer_drain_timeout_ms=30"):
            await client.ask(c.TerminateTopic, "orders")
        assert ended(client) == [TopicBusy.code], "they open again, and send again what was dropped"
        opening = client.ask(c.CreateProducer, 1, "orders", "p", 1)
        await settle()
        assert not opening.done(), "rule 33"
        ledgers.hold = False
        ledgers.confirm()
        assert (await opening)["epoch"] == 1
        client.publish(b"1", first=1, epoch=1)
        await client.confirmed(2)


async def test_a_failed_end_leaves_its_place_to_an_exclusive_producer() -> None:
    """Who waits for it may be the first to ask again."""
    async with running_broker() as broker:
        holder, waiting = FakeClient(broker), FakeClient(broker)
        await holder.producer(name="p", access_mode="exclusive")
        topic = broker.topics[str(TOPIC)]
        commit = topic.ledger.list.commit

        async def fails(**changed: Any) -> None:
            raise BookieUnavailable("the store is away")

        topic.ledger.list.commit = fails  # type: ignore[method-assign]
        with pytest.raises(BookieUnavailable):
            await holder.ask(c.TerminateTopic, "orders")
        topic.ledger.list.commit = commit  # type: ignore[method-assign]
        coming = waiting.ask(c.CreateProducer, 1, "orders", access_mode="wait_for_exclusive")
        await settle()
        assert not coming.done()
        answer = await holder.producer(name="p", epoch=1, access_mode="exclusive", topic_epoch=0)
        assert answer["topic_epoch"] == 0
        await holder.ask(c.CloseProducer, 1)
        assert (await coming)["topic_epoch"] == 1


async def test_an_end_that_cannot_be_stored_and_a_caller_that_leaves() -> None:
    async with running_broker() as broker:
        client, impatient = FakeClient(broker), FakeClient(broker)
        await client.producer(name="p")
        topic = broker.topics[str(TOPIC)]
        commit, gate = topic.ledger.list.commit, asyncio.Event()

        async def fails(**changed: Any) -> None:
            raise BookieUnavailable("the store is away")

        topic.ledger.list.commit = fails  # type: ignore[method-assign]
        with pytest.raises(BookieUnavailable):
            await client.ask(c.TerminateTopic, "orders")
        await client.producer(name="p", epoch=1)

        async def slow(**changed: Any) -> None:
            await gate.wait()
            await commit(**changed)

        topic.ledger.list.commit = slow  # type: ignore[method-assign]
        impatient.ask(c.TerminateTopic, "orders")
        await settle()
        impatient.close()  # the change has begun, and is done all the same
        gate.set()
        await settle()
        assert ended(client)[-1] == TopicTerminated.code
        assert await client.ask(c.TerminateTopic, "orders") is None


async def test_terminating_twice_at_once_is_the_same_answer_also_when_all_is_trimmed() -> None:
    clock = FakeClock()
    async with running_broker(clock=clock, retention_ms=0, retention_bytes=0) as broker:
        client, consumer = FakeClient(broker), FakeClient(broker)
        await client.producer()
        await consumer.consumer()
        client.publish(b"0", b"1")
        await client.confirmed(2)
        answers = await asyncio.gather(*[client.ask(c.TerminateTopic, "orders") for _ in range(3)])
        assert len(set(answers)) == 1
        await consumer.received(2)
        await consumer.ack(consumer.messages[-1].row(), cumulative=True)
        topic = broker.topics[str(TOPIC)]
        await topic.ledger.changes.trim(lambda: (1 << 40, 0, 0))
        assert not topic.ledger.list.ledgers
        assert await client.ask(c.TerminateTopic, "orders") == answers[0]
        later = FakeClient(broker)
        await later.consumer(1, "new")
        await later.until(lambda: ends(later))
        await broker.unload(TOPIC, TopicNotServed("the topic moves"))
        assert await client.ask(c.TerminateTopic, "orders") == answers[0]
        await later.consumer(1, "new")
        await later.until(lambda: len(ends(later)) == 2)


async def test_a_crash_before_the_end_is_stored_leaves_a_topic_that_goes_on() -> None:
    """The ledger is closed by then; the successor terminates it when it is asked again."""
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as first:
        client = FakeClient(first)
        await client.producer(name="p")
        client.publish(b"0")
        await client.confirmed(1)
        topic = first.topics[str(TOPIC)]
        ledgers_list, never = topic.ledger.list, asyncio.Event()

        async def hangs(**changed: Any) -> None:
            await never.wait()

        ledgers_list.commit = hangs  # type: ignore[method-assign]
        terminating = client.ask(c.TerminateTopic, "orders")
        await settle()
        assert not terminating.done()
        async with running_broker(ledgers, metadata) as second:
            heir = FakeClient(second)
            await heir.producer(name="p", epoch=1)
            heir.publish(b"1", first=1, epoch=1)
            await heir.confirmed(1)
            last = MessageId.from_bytes(await heir.ask(c.TerminateTopic, "orders"))
            assert last == MessageId(*heir.receipts[-1][2:])
            never.set()
            with pytest.raises(MagnetarError):  # its own end may not count: it is not the owner
                await heir.producer(2)
            del ledgers_list.commit
        terminating.cancel()


async def test_a_hand_over_meanwhile_is_answered_by_the_next_owner() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        ledgers.hold = True
        client.publish(b"1", first=1)
        await settle()
        terminating = client.ask(c.TerminateTopic, "orders")
        await settle()
        unloading = asyncio.create_task(broker.unload(TOPIC, TopicNotServed("the topic moves")))
        await settle()
        ledgers.hold = False
        ledgers.confirm()
        await unloading
        try:  # whichever came first: the end is stored, or the topic has moved
            await terminating
        except TopicNotServed:
            await client.ask(c.TerminateTopic, "orders")
        with pytest.raises(TopicTerminated):
            await client.producer(2)


async def test_a_damaged_last_entry_is_no_reason_to_go_on() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        topic = broker.topics[str(TOPIC)]

        async def lost(key: Any) -> int:
            raise MessageLost("damaged")

        topic.log.read_message_count = lost  # type: ignore[method-assign]
        assert MessageId.from_bytes(await client.ask(c.TerminateTopic, "orders")).index == 0


async def test_spark_writes_nothing_more_and_a_repeated_batch_has_its_answer() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.ask(c.TerminateTopic, "orders")
        with pytest.raises(TopicTerminated, match="was terminated, and takes no more messages"):
            await client.ask(c.CreateStagedLedger, "orders", "job")
        with pytest.raises(TopicTerminated):
            await client.ask(c.AttachLedgers, "orders", "query", 0, payload=b"\x90")
        page = await client.ask(c.TopicLedgers, "orders")
        assert page["ledgers"] == []


async def test_a_terminated_topic_can_be_deleted_while_nobody_uses_it() -> None:
    async with running_broker() as broker:
        client, consumer = FakeClient(broker), FakeClient(broker)
        await client.producer()
        await consumer.consumer()
        await client.ask(c.TerminateTopic, "orders")
        with pytest.raises(TopicInUse, match=r"0 producer\(s\) and 1 consumer"):
            await client.ask(c.DeleteTopic, "orders")
        await consumer.ask(c.CloseConsumer, 1)
        await client.ask(c.DeleteTopic, "orders")
        await client.producer()


async def test_the_end_is_told_once_for_each_epoch_and_after_each_nack() -> None:
    async with running_broker() as broker:
        client, consumer = FakeClient(broker), FakeClient(broker)
        await client.producer()
        await consumer.consumer(type="shared")
        client.publish(b"0", b"1")
        await consumer.received(2)
        await client.ask(c.TerminateTopic, "orders")
        await consumer.until(lambda: ends(consumer) == [(0, 0)])
        consumer.frame(c.Flow(0, 1, 100))
        rows = c.encode_rows(c.ACK_ROW, [consumer.messages[0].row()])
        consumer.frame(c.Redeliver(0, 1), rows)
        await consumer.until(lambda: ends(consumer) == [(0, 0), (0, 1)])
        assert consumer.values == [b"0", b"1", b"0"]
        answer = await consumer.ask(c.Seek, 1, ("earliest", None))
        await consumer.until(lambda: len(ends(consumer)) == 3)
        assert ends(consumer)[-1] == (answer["epoch"], 1)
        assert consumer.values[3:] == [b"0", b"1"]
