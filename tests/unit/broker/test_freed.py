"""What has ended is freed when the last reference to it goes: the garbage collector may never look at it again."""

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.proto import commands as c
from magnetar.proto.errors import TopicNotFound, TopicNotServed
from magnetar.proto.ids import TopicName
from support.broker_kit import FakeClient, running_broker, settle


@pytest.fixture(autouse=True)
def _without_the_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.enable()


async def left() -> Counter[str]:
    """What nothing refers to but itself, of our own classes."""
    await settle()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    types = map(type, gc.garbage)
    found = Counter(one.__qualname__ for one in types if one.__module__.startswith("magnetar."))
    gc.garbage.clear()
    return found


class Use:
    """A client of a topic."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self.broker = broker
        self.topic = topic
        self.client = FakeClient(broker)

    async def work(self, *, type: str = "shared", **named: Any) -> None:
        producer = await self.client.producer(topic=self.topic)
        await self.client.consumer(topic=self.topic, type=type, **named)
        self.client.publish(b"a", b"b", epoch=producer["epoch"])
        await self.client.received(2)
        await self.client.ack(*[message.row() for message in self.client.messages])

    def leave(self) -> None:
        self.client.close()
        del self.client.handler  # the two refer to each other, as no real connection does


async def unloaded(use: Use) -> None:
    use.leave()
    await use.broker.unload(TopicName.parse(use.topic), TopicNotServed("it moves"))


async def unloaded_in_use(use: Use) -> None:
    await use.broker.unload(TopicName.parse(use.topic), TopicNotServed("it moves"))
    await settle()
    use.leave()


async def fenced(use: Use) -> None:
    use.broker.topics[str(TopicName.parse(use.topic))].fence(TopicNotServed("it was taken over"))
    await settle()
    use.leave()


async def deleted(use: Use) -> None:
    use.leave()
    await use.broker.delete_topic(TopicName.parse(use.topic), force=True)


@pytest.mark.parametrize("end", [unloaded, unloaded_in_use, fenced, deleted])
@pytest.mark.parametrize(
    "subscription",
    [
        {"type": "shared"}, {"type": "exclusive"}, {"type": "failover"}, {"type": "key_shared"},
        {"type": "exclusive", "durable": False}, {"type": "exclusive", "read_compacted": True},
    ],
    ids=lambda one: "-".join(map(str, one.values())),
)  # fmt: skip
async def test_a_topic_that_has_ended_is_freed_with_all_its_parts(
    end: Callable[[Use], Awaitable[None]], subscription: dict[str, Any]
) -> None:
    async with running_broker() as broker:
        use = Use(broker, "orders")
        await use.work(**subscription)
        await end(use)
        assert not await left()


@pytest.mark.parametrize(
    "policies",
    [
        {"deduplication": True}, {"publish_rate_messages": 10**6, "dispatch_rate_messages": 10**6},
        {"backlog_quota_bytes": 10**9, "message_ttl_ms": 10**6},
    ],
    ids=lambda one: next(iter(one)),
)  # fmt: skip
async def test_a_topic_with_policies_is_freed(policies: dict[str, Any]) -> None:
    async with running_broker() as broker:
        use = Use(broker, "orders")
        await use.client.change_policies("", "public/default", **policies)
        await use.work()
        await unloaded(use)
        assert not await left()


@pytest.mark.parametrize("topic", ["non-persistent://public/default/news", "many-partition-1"])
async def test_other_kinds_of_topics_are_freed(topic: str) -> None:
    async with running_broker() as broker:
        await broker.partitioned.create(TopicName.parse("many"), 2)
        use = Use(broker, topic)
        await use.work(start=("latest", None))
        await unloaded(use)
        assert not await left()


async def test_a_producer_and_a_consumer_that_leave_are_freed_while_their_connection_and_topic_stay() -> None:
    async with running_broker() as broker:
        use = Use(broker, "orders")
        await use.work()
        await use.client.ask(c.CloseProducer, 1)
        await use.client.ask(c.CloseConsumer, 1)
        assert not await left()


async def test_a_connection_that_is_lost_is_freed_and_so_is_what_was_being_opened_on_it() -> None:
    async with running_broker() as broker:
        use = Use(broker, "orders")
        await use.work()
        for number in (2, 3):
            use.client.ask(c.CreateProducer, number, "other")
            use.client.ask(c.Subscribe, number, "other", "billing", start=("earliest", None))
        await settle(3)
        use.leave()
        assert not await left()
        await settle()
        assert not any(topic.in_use for topic in broker.topics.values())


async def test_a_topic_that_cannot_be_loaded_leaves_nothing() -> None:
    async with running_broker() as broker:
        with pytest.raises(TopicNotFound):
            await broker.topic(TopicName.parse("missing"), create=False)
        assert not await left()
