"""Topics that end, through the public client against the real broker."""

import asyncio
import contextlib
from typing import Any

import pytest

from magnetar.broker.dispatch.core.dispatcher import DispatchCore
from magnetar.client import (
    Client,
    Consumer,
    DeadLetterPolicy,
    MessageId,
    Reader,
    ReceiveTimeout,
    TopicNotFound,
    TopicTerminated,
)
from magnetar.client.options import SubscriptionType
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore, ModelKeyValue
from support.served_broker import client, connect_to, server, serving, take

__all__ = ["client", "server"]


async def filled(client: Client, topic: str = "t", count: int = 10) -> list[MessageId]:
    """A topic with messages."""
    async with client.create_producer(topic) as producer:
        return await producer.send_many([b"%d" % n for n in range(count)])


async def test_terminate(client: Client) -> None:
    producer = await client.create_producer("t")
    receipts = [producer.send_nowait(b"%d" % n) for n in range(100)]
    ends = await client.admin.terminate_topic("t")
    stored = [
        message_id for receipt in receipts if isinstance(message_id := await settled(receipt), MessageId)
    ]
    assert ends == {"persistent://public/default/t": stored[-1] if stored else None}
    with pytest.raises(TopicTerminated, match="was terminated, and takes no more messages"):
        await producer.send(b"late")
    assert producer.ended
    with pytest.raises(TopicTerminated):
        await client.create_producer("t")
    assert await client.admin.terminate_topic("t") == ends
    assert (await client.admin.topic_stats("t"))["terminated"]
    with pytest.raises(TopicNotFound):
        await client.admin.terminate_topic("unknown")


def at_end(consumer: Consumer | Reader) -> bool:
    """Asked anew each time."""
    return consumer.reached_end


async def settled(receipt: Any) -> MessageId | Exception:
    """What became of a message."""
    try:
        return await receipt  # type: ignore[no-any-return]
    except TopicTerminated as error:
        return error


@pytest.mark.parametrize("kind", ["exclusive", "failover", "shared", "key_shared"])
async def test_iterating_ends(client: Client, kind: SubscriptionType) -> None:
    ids = await filled(client)
    consumer = await client.subscribe("t", "s", type=kind, start="earliest")
    assert not at_end(consumer)
    got = [await consumer.receive(5.0)]  # before it is terminated
    await client.admin.terminate_topic("t")
    async for message in consumer:
        got.append(message)
    assert [message.id for message in got] == ids
    assert at_end(consumer)
    for timeout in (None, 0, 5.0):
        with pytest.raises(TopicTerminated, match="has received everything: its topic was terminated"):
            await consumer.receive(timeout)
    with pytest.raises(TopicTerminated):
        await consumer.receive_batch()
    assert [batch async for batch in consumer.batches()] == []
    await consumer.ack(got, receipt=True)
    await consumer.close()
    async with client.subscribe("t", "s", type=kind) as later:
        assert [message async for message in later] == []
        await later.seek("earliest")
        assert not at_end(later)
        again = [message async for batch in later.batches() for message in batch]
        assert [message.id for message in again] == ids


async def test_readers_and_an_empty_topic(client: Client) -> None:
    await client.admin.create_topic("t")
    reader = await client.create_reader("t", start="earliest")
    waiting = asyncio.ensure_future(reader.receive())
    await asyncio.sleep(0)
    assert list((await client.admin.terminate_topic("t")).values()) == [None]
    with pytest.raises(TopicTerminated):
        await waiting
    ids = await filled(client, "u")
    await client.admin.terminate_topic("u")
    async with client.create_reader("u", start=ids[4]) as reader:
        assert [message.id async for message in reader] == ids[4:]
        assert not await reader.has_message_available()


async def check_nacked_message_comes_before_the_end(client: Client) -> None:
    """It is given back after everything was delivered, and the end was told; the loop goes on until it has come again."""
    ids = await filled(client)
    await client.admin.terminate_topic("t")
    async with client.subscribe("t", "s", type="shared", start="earliest", nack_delay=0.3) as consumer:
        got = []
        async for message in consumer:
            got.append(message.id)
            if len(got) <= len(ids) and message.id in (ids[3], ids[-1]):
                consumer.nack(message)
            else:
                await consumer.ack(message)
        assert sorted(got) == sorted([*ids, ids[3], ids[-1]])


async def test_what_is_nacked_comes_again_before_the_end(client: Client) -> None:
    await check_nacked_message_comes_before_the_end(client)


async def test_what_was_nacked_and_acknowledged_is_not_waited_for_in_vain(client: Client) -> None:
    await filled(client, count=1)
    await client.admin.terminate_topic("t")
    async with client.subscribe("t", "s", type="shared", start="earliest", nack_delay=0.3) as consumer:
        message = await consumer.receive()
        consumer.nack(message)
        waiting = asyncio.ensure_future(consumer.receive())
        await consumer.ack(message)
        with pytest.raises(TopicTerminated):
            await waiting


async def test_an_exclusive_consumer_that_goes_back_is_at_the_end_once_more(client: Client) -> None:
    ids = await filled(client)
    await client.admin.terminate_topic("t")
    async with client.subscribe("t", "s", start="earliest", nack_delay=0.0) as consumer:
        messages = [message async for message in consumer]
        await consumer.redeliver_unacknowledged()
        assert [message.id async for message in consumer] == ids
        consumer.nack(messages[5])
        assert [message.id async for message in consumer] == [ids[5]]
        await client.admin.seek_subscription("t", "s", start=ids[8])  # somebody else moves it
        async with asyncio.timeout(5):
            while at_end(consumer):
                await asyncio.sleep(0.01)
        assert [message.id async for message in consumer] == ids[8:]
        await client.admin.seek_subscription("t", "s", start="latest")
        await consumer.seek("latest")
        assert [message async for message in consumer] == []


async def test_what_another_consumer_holds_is_waited_for(client: Client) -> None:
    ids = await filled(client, count=1)
    await client.admin.terminate_topic("t")
    holder = await client.subscribe("t", "s", type="shared", start="earliest")
    message = await holder.receive()
    async with client.subscribe("t", "s", type="shared") as other:
        waiting = asyncio.ensure_future(other.receive())
        await client.admin.topic_stats("t")
        assert not waiting.done()
        assert not at_end(other)
        holder.abort()  # without acknowledging it
        assert (await waiting).id == message.id == ids[0]
        with pytest.raises(TopicTerminated):
            await other.receive()


async def test_several_topics_end_when_all_have(client: Client) -> None:
    await filled(client, "t")
    await filled(client, "u")
    async with client.subscribe(["t", "u"], "s", start="earliest") as consumer:
        await client.admin.terminate_topic("t")
        await take(consumer, 20)
        assert not at_end(consumer)
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(0)
        waiting = asyncio.ensure_future(consumer.receive())
        await client.admin.terminate_topic("u")
        with pytest.raises(TopicTerminated):
            await waiting
        await consumer.seek("earliest")
        assert len([message async for message in consumer]) == 20


async def test_a_partitioned_topic_ends_as_a_whole(client: Client) -> None:
    await client.admin.create_topic("p", partitions=3)
    async with client.create_producer("p") as producer:
        ids = await producer.send_many([b"%d" % n for n in range(30)], keys=[str(n) for n in range(30)])
    consumer = await client.subscribe("p", "s", start="earliest")
    ends = await client.admin.terminate_topic("p")
    assert len(ends) == 3
    assert {end for end in ends.values() if end} <= set(ids)
    assert sorted([message.id async for message in consumer]) == sorted(ids)
    assert at_end(consumer)
    with pytest.raises(TopicTerminated, match="gets no more partitions"):
        await client.admin.update_partitions("p", 5)
    with pytest.raises(TopicTerminated):
        await client.create_producer("p")
    assert await client.admin.terminate_topic("p") == ends


async def test_a_table_view_is_complete(client: Client) -> None:
    async with client.create_producer("t") as producer:
        await producer.send(b"1", key="a")
    async with client.create_table_view("t") as view:
        changes = view.changes()
        async with client.create_producer("t") as producer:
            await producer.send(b"2", key="b")
        await client.admin.terminate_topic("t")
        assert [change async for change in changes] == [("b", b"2")]
        await view.refresh()
        assert dict(view.items()) == {"a": b"1", "b": b"2"}
    async with client.create_table_view("t") as later:
        assert dict(later.items()) == {"a": b"1", "b": b"2"}
        assert [change async for change in later.changes()] == []


async def test_dead_letters_come_before_the_end(client: Client) -> None:
    ids = await filled(client, count=3)
    await client.admin.terminate_topic("t")
    letters = DeadLetterPolicy(max_redeliver_count=1)
    async with client.subscribe(
        "t", "s", type="shared", start="earliest", dead_letter=letters, nack_delay=0.0
    ) as consumer:
        seen = []
        async for message in consumer:
            seen.append(message.id)
            if message.id == ids[1]:
                consumer.nack(message)
            else:
                await consumer.ack(message)
        assert sorted(seen) == sorted([*ids, ids[1]])
    async with client.create_reader("t-s-DLQ", start="earliest") as reader:
        assert (await reader.receive(5.0)).value == b"1"


async def test_non_persistent_topics_end_as_well(client: Client) -> None:
    topic = "non-persistent://public/default/t"
    async with client.subscribe(topic, "s") as consumer:
        producer = await client.create_producer(topic)
        await producer.send(b"x")
        await client.admin.terminate_topic(topic)
        assert [message.value async for message in consumer] == [b"x"]
        with pytest.raises(TopicTerminated):
            await producer.send(b"y")


async def test_it_stays_so_over_a_restart_and_goes_with_the_topic() -> None:
    disk, ledgers = ModelKeyValue(), FakeLedgers()
    async with serving(MemoryMetadataStore(disk), ledgers) as server:
        port = server.addresses[0][1]
        async with connect_to(server) as client:
            ids = await filled(client)
            ends = await client.admin.terminate_topic("t")
    async with serving(MemoryMetadataStore(disk), ledgers, port) as server, connect_to(server) as client:
        with pytest.raises(TopicTerminated):
            await client.create_producer("t")
        assert await client.admin.terminate_topic("t") == ends
        async with client.subscribe("t", "s", start="earliest") as consumer:
            assert [message.id async for message in consumer] == ids
        await client.admin.delete_topic("t")
        async with client.create_producer("t") as producer:  # it is made anew
            await producer.send(b"x")


async def test_those_at_the_end_are_there_again_after_a_restart() -> None:
    disk, ledgers = ModelKeyValue(), FakeLedgers()
    async with contextlib.AsyncExitStack() as stack:
        async with serving(MemoryMetadataStore(disk), ledgers) as server:
            port = server.addresses[0][1]
            client = await stack.enter_async_context(connect_to(server))
            ids = await filled(client)
            reader = await client.create_reader("t", start="earliest")
            consumer = await client.subscribe("t", "s", start="earliest")
            await client.admin.terminate_topic("t")
            assert [message.id async for message in reader] == ids
            assert [message.id async for message in consumer] == ids
        async with asyncio.timeout(10.0):
            while at_end(consumer) or at_end(reader):  # they learn that their connection is lost
                await asyncio.sleep(0.01)
        async with serving(MemoryMetadataStore(disk), ledgers, port), asyncio.timeout(10.0):
            assert [message.id async for message in consumer] == ids  # nothing was acknowledged
            with pytest.raises(TopicTerminated):
                await reader.receive()
            await client.close()


async def test_what_a_compaction_left_and_who_waits(client: Client) -> None:
    async with client.create_producer("t") as producer:
        for number in range(10):
            await producer.send(b"%d" % number, key=str(number % 2))
        opening = client.create_producer("t", access_mode="wait_for_exclusive")
        waiting = asyncio.ensure_future(opening.__aenter__())
        while not (await client.admin.topic_stats("t"))["waiting_producers"]:
            await asyncio.sleep(0.01)
        await client.admin.terminate_topic("t")
        with pytest.raises(TopicTerminated):
            await waiting
    assert (await client.admin.compact_topic("t", wait=True))["state"] == "done"
    async with client.create_reader("t", start="earliest", read_compacted=True) as reader:
        assert [message.value async for message in reader] == [b"8", b"9"]
    async with client.create_table_view("t") as view:
        assert dict(view.items()) == {"0": b"8", "1": b"9"}


# --- planted defects -------------------------------------------------------------------------------------------------


async def test_planted_an_end_told_although_something_is_to_come_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker does not count what was given back."""
    from magnetar.client.topic.consumer import TopicConsumer

    hasty = property(lambda self: self._end is not None and not self.has_queued)
    monkeypatch.setattr(TopicConsumer, "at_end", hasty)
    with pytest.raises(AssertionError):
        await check_nacked_message_comes_before_the_end(client)


async def test_planted_an_end_told_before_everything_was_delivered(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver_again = DispatchCore._deliver_again

    def telling(self: Any, selector: Any) -> bool:
        if self._log.ended:
            replay, self.tracker.replay = self.tracker.replay, {}
            self._tell_end(self.read_position)
            self.tracker.replay = replay
        return deliver_again(self, selector)

    monkeypatch.setattr(DispatchCore, "_deliver_again", telling)
    with pytest.raises(AssertionError):
        await check_nacked_message_comes_before_the_end(client)
