"""A topic that ends here lets nobody in any more, and its successor begins when nothing of it is left."""

import asyncio
from typing import Any

import pytest

from magnetar.proto import commands as c
from magnetar.proto.errors import TopicNotFound, TopicNotServed
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore, ModelKeyValue
from support.virtual_time import in_virtual_time


async def test_a_closing_topic_does_not_admit_a_producer_that_waited_for_its_predecessor() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        old, new = FakeClient(broker), FakeClient(broker)
        await old.producer(name="p")
        ledgers.hold = True
        old.publish(b"1")
        await settle()
        opening = new.ask(c.CreateProducer, 1, "orders", "p", 1)
        await settle()
        moved = TopicNotServed("the topic moves")
        unloading = asyncio.create_task(broker.unload(TOPIC, moved))
        await settle()
        ledgers.hold = False
        ledgers.confirm()
        with pytest.raises(TopicNotServed):
            await opening
        await unloading
        assert not broker.publish_budget.used


async def test_a_fenced_topic_has_let_go_before_its_successor_is_loaded() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"a")
        await client.confirmed(1)
        fenced = broker.topics[str(TOPIC)]
        gate = ledgers.close_gate = asyncio.Event()
        fenced.fence(TopicNotServed("another owner"))
        successor = asyncio.create_task(broker.topic(TOPIC, create=False))
        await settle()
        assert not broker.topics, "one instance at a time"
        assert broker.has(TOPIC)
        gate.set()
        assert await successor is not fenced
        assert broker.loaded() == [TOPIC]


async def test_who_asks_for_a_topic_while_it_is_being_deleted_waits() -> None:
    async with running_broker() as broker:
        await FakeClient(broker).producer()
        deleted = broker.topics[str(TOPIC)]
        gate = asyncio.Event()
        mark_deleting = deleted.ledger.changes.mark_deleting

        async def gated() -> None:
            await gate.wait()
            await mark_deleting()

        deleted.ledger.changes.mark_deleting = gated  # type: ignore[method-assign]
        deleting = asyncio.create_task(broker.delete_topic(TOPIC, force=True))
        await settle()
        producer = asyncio.create_task(FakeClient(broker).producer())
        known = asyncio.create_task(broker.topic(TOPIC, create=False))
        await settle()
        assert not producer.done()
        assert not known.done()
        gate.set()
        await deleting
        await producer  # the topic is made anew
        if (error := (await asyncio.gather(known, return_exceptions=True))[0]) is not broker.topics[
            str(TOPIC)
        ]:
            assert isinstance(error, TopicNotFound)
        assert broker.topics[str(TOPIC)] is not deleted


async def test_a_topic_that_fences_itself_just_before_it_is_deleted_is_closed_all_the_same() -> None:
    async with running_broker() as broker:
        await FakeClient(broker).producer()
        fenced = broker.topics[str(TOPIC)]
        deleting = asyncio.create_task(broker.delete_topic(TOPIC, force=True))
        while broker.topics:
            await asyncio.sleep(0)
        fenced.fence(TopicNotServed("another owner"))
        with pytest.raises(TopicNotServed):
            await deleting
        assert await broker.topic(TOPIC, create=False) is not fenced


async def test_a_defect_in_one_cursor_leaves_no_consumer_of_an_ending_topic_without_a_word() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer(1, "broken")
        await client.consumer(2, "sound")

        async def broken(**_: object) -> None:
            raise RuntimeError("a defect")

        broker.topics[str(TOPIC)].subscriptions["broken"].cursor.close = broken  # type: ignore[method-assign]
        await broker.unload(TOPIC, TopicNotServed("it moves"))
        await settle()
        closed = [command.consumer_id for command, _ in client.frames if isinstance(command, c.CloseConsumer)]
        assert sorted(closed) == [1, 2]
        assert not broker.loaded()


@pytest.mark.parametrize("fenced", [False, True])
async def test_rule_48_a_client_that_cannot_be_notified_keeps_no_topic_from_ending(fenced: bool) -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        broken, sound = FakeClient(broker), FakeClient(broker)
        for number, client in enumerate((broken, sound)):
            await client.producer(name=f"p{number}")
            await client.consumer(2, f"s{number}")
        ledgers.hold = True
        broken.publish(b"never stored")
        await settle()

        def send(header: bytes, payload: Any = b"") -> None:
            raise RuntimeError("a defect")

        broken.send = send  # type: ignore[method-assign]
        ended = broker.topics[str(TOPIC)]
        if fenced:
            ended.fence(TopicNotServed("another owner"))
        else:
            await broker.delete_topic(TOPIC, force=True)
        await settle()
        closed = [type(one) for one, _ in sound.frames if isinstance(one, c.CloseProducer | c.CloseConsumer)]
        assert closed == [c.CloseProducer, c.CloseConsumer]
        ledgers.hold = False
        assert await broker.topic(TOPIC, create=True) is not ended


class SlowMetadata(MemoryMetadataStore):
    """Each change takes 20 ms, and those of cursors are counted."""

    def __init__(self, disk: ModelKeyValue) -> None:
        super().__init__(disk)
        self.log: list[str] = []

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        await asyncio.sleep(0.02)
        self.log.append(path)
        return await super().put(path, value, version=version)


@pytest.mark.parametrize("fenced", [False, True])
def test_a_topic_with_100_subscriptions_is_handed_over_within_a_second_and_no_ack_is_lost(
    fenced: bool,
) -> None:
    @in_virtual_time
    async def run() -> None:
        ledgers, disk = FakeLedgers(), ModelKeyValue()
        metadata = SlowMetadata(disk)
        async with running_broker(ledgers, metadata, cursor_flush_interval_ms=60_000) as broker:
            client = FakeClient(broker)
            await client.producer()
            for number in range(100):
                await client.consumer(number, f"s{number}")
            client.publish(b"a", b"b")
            await client.received(200)
            for number in range(100):  # without a receipt: none of it is written yet
                client.frame(c.Ack(0, number), c.encode_rows(c.ACK_ROW, [client.messages[2 * number].row()]))
            await settle()
            metadata.log.clear()
            began = asyncio.get_running_loop().time()
            if fenced:
                broker.fence(TopicNotServed("another owner"))
            await broker.unload(TOPIC, TopicNotServed("it moves"))
            seconds = asyncio.get_running_loop().time() - began
            assert seconds < (0.2 if fenced else 1.0), f"{seconds} s"
            cursors = [path for path in metadata.log if "cursors" in path]
            assert len(cursors) == (0 if fenced else 100), "what another owner has is not written"
            assert metadata.log[: len(cursors)] == cursors, (
                "cursors are durable before the ledger list is given up"
            )
        async with running_broker(ledgers, MemoryMetadataStore(disk)) as broker:
            client = FakeClient(broker)
            for number in range(100):
                await client.consumer(number, f"s{number}")
            assert await client.received(200 if fenced else 100) == ([b"a", b"b"] if fenced else [b"b"]) * 100

    run()
