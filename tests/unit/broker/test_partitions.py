"""Partitioned topics at the broker: made, grown, watched, deleted, whatever crashes in between; one name for one kind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from magnetar.broker.log.records import PARTITIONED_ROOT, TOPICS_ROOT, partitioned_path, topic_path
from magnetar.metadata.store import Operation
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    AlreadyExists,
    ConnectionLost,
    InvalidArgument,
    InvalidTopicName,
    MagnetarError,
    PartitionNotFound,
    SubscriptionNotFound,
    TooManyRequests,
    TopicBusy,
    TopicInUse,
    TopicNotFound,
)
from magnetar.proto.ids import MessageId, TopicName
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.memory_metadata import CrashingStore, MemoryMetadataStore, ModelKeyValue

FULL = "persistent://public/default/orders"


def told(client: FakeClient) -> list[tuple[int, int]]:
    """Watch id and number of partitions."""
    return [
        (command.watch_id, command.partitions)
        for command, _ in client.frames
        if isinstance(command, c.PartitionsChanged)
    ]


async def partitions(client: FakeClient, topic: str = "orders") -> int:
    answer: dict[str, int] = await client.ask(c.Partitions, topic)
    return answer["partitions"]


async def topics(client: FakeClient) -> list[str]:
    names = (await client.ask(c.ListTopics, "public/default"))["topics"]
    return [TopicName.parse(name).name for name in names]


async def delete(client: FakeClient, topic: str = "orders") -> None:
    """As a client does it."""
    while left := (await client.ask(c.DeleteTopic, topic))["partitions"]:
        for number in left:
            with suppress(TopicNotFound):  # a deletion that was interrupted was completed to answer this
                await client.ask(c.DeleteTopic, f"{topic}-partition-{number}", force=True)


async def test_partitions_are_topics_and_ids_carry_their_numbers() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        assert await partitions(client) == 0
        await client.ask(c.CreateTopic, "orders", 3)
        await client.ask(c.CreateTopic, "orders", 3)  # fine
        assert await partitions(client) == 3
        assert await partitions(client, "orders-partition-1") == 0
        assert await topics(client) == [f"orders-partition-{number}" for number in range(3)]
        await client.producer(topic="orders-partition-2")
        await client.consumer(topic="orders-partition-2")
        client.publish(b"x")
        await client.received(1)
        (delivery,) = [command for command, _ in client.frames if isinstance(command, c.Deliver)]
        assert delivery.partition == 2
        last = MessageId.from_bytes(await client.ask(c.LastMessageId, 1))
        assert last == MessageId(delivery.ledger, delivery.entry, 0, 2)


async def test_a_name_is_partitioned_or_not() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "plain")
        with pytest.raises(AlreadyExists, match="plain exists and is not partitioned"):
            await client.ask(c.CreateTopic, "plain", 3)
        await client.ask(c.CreateTopic, "orders", 3)
        with pytest.raises(AlreadyExists, match=r"is a partitioned topic.*orders-partition-0"):
            await client.ask(c.CreateTopic, "orders")
        with pytest.raises(AlreadyExists, match="is a partitioned topic"):
            await client.producer(topic="orders")
        with pytest.raises(InvalidArgument, match="asked of each of its 3 partitions"):
            await client.ask(c.TopicStats, "orders")
        with pytest.raises(
            AlreadyExists, match="has 3 partitions; `magnetar topics update-partitions orders N`"
        ):
            await client.ask(c.CreateTopic, "orders", 4)
        assert await topics(client) == [*(f"orders-partition-{number}" for number in range(3)), "plain"]


@pytest.mark.parametrize("first", ["partitioned", "plain"])
async def test_of_two_who_make_a_name_at_a_time_one_wins(first: str) -> None:
    """Both look before either writes; the store decides."""

    class Gated(MemoryMetadataStore):
        """Lets commits wait until two of them are there."""

        waiting = 0
        gate = asyncio.Event()

        async def commit(self, operations: Sequence[Operation]) -> None:
            """See MetadataStore."""
            self.waiting += 1
            if self.waiting == 2:
                self.gate.set()
            await self.gate.wait()
            await super().commit(operations)

    async with running_broker(metadata=Gated()) as broker:
        client, other = FakeClient(broker), FakeClient(broker)
        calls = [client.ask(c.CreateTopic, "orders", 2), other.ask(c.CreateTopic, "orders")]
        ended = await asyncio.gather(
            *(calls if first == "partitioned" else calls[::-1]), return_exceptions=True
        )
        assert sorted(type(one).__name__ for one in ended) == ["AlreadyExists", "NoneType"]
        made = await topics(client)
        assert made == (
            [f"orders-partition-{n}" for n in range(2)] if await partitions(client) else ["orders"]
        )


@pytest.mark.parametrize(
    ("number", "match"),
    [
        (3, "partition 3: it has 3 partitions, numbered from 0; .*update-partitions orders N`"),
        (99, "partition 99: it has"),
    ],
)
async def test_a_partition_that_is_not_there(number: int, match: str) -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 3)
        for ask in (
            lambda: client.producer(topic=f"orders-partition-{number}"),
            lambda: client.consumer(topic=f"orders-partition-{number}"),
            lambda: client.ask(c.TopicStats, f"orders-partition-{number}"),
            lambda: client.ask(c.CreateTopic, f"orders-partition-{number}"),
            lambda: client.ask(c.CreateSubscription, f"orders-partition-{number}", "s"),
        ):
            with pytest.raises(PartitionNotFound, match=match):
                await ask()
        with pytest.raises(
            PartitionNotFound, match=r"no partitioned topic; .*create other --partitions N` makes one"
        ):
            await client.producer(topic="other-partition-5")
        assert len(await topics(client)) == 3


async def test_what_cannot_be_made() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        for count in (-1, 10_001, 1 << 40):
            with pytest.raises(InvalidArgument, match="a topic has 1 to 10,000 partitions"):
                await client.ask(c.CreateTopic, "orders", count)
        with pytest.raises(InvalidArgument, match="would be a partition of orders"):
            await client.ask(c.CreateTopic, "orders-partition-1", 4)
        with pytest.raises(InvalidTopicName, match="choose a shorter name"):
            await client.ask(c.CreateTopic, "n" * 243, 11)
        with pytest.raises(TopicNotFound, match=r"create orders --partitions 4` makes one"):
            await client.ask(c.UpdatePartitions, "orders", 4)
        await client.ask(c.CreateTopic, "orders", 3)
        with pytest.raises(InvalidArgument, match="never has fewer than before"):
            await client.ask(c.UpdatePartitions, "orders", 2)
        with pytest.raises(InvalidArgument, match="cannot be deleted alone"):
            await client.ask(c.DeleteTopic, "orders-partition-1")
        assert await client.ask(c.UpdatePartitions, "orders", 3) == {"partitions": 3}
        assert len(await topics(client)) == 3


async def test_growth_brings_the_durable_subscriptions_and_misses_nothing() -> None:
    async with running_broker() as broker:
        client, reader = FakeClient(broker), FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 1)
        await client.ask(c.CreateSubscription, "orders-partition-0", "billing")
        await reader.consumer(2, "", topic="orders-partition-0", durable=False)
        assert await client.ask(c.UpdatePartitions, "orders", 3) == {"partitions": 3}
        await client.producer(topic="orders-partition-2")
        client.publish(b"before anybody subscribed")
        await client.confirmed(1)
        stats = await client.ask(c.TopicStats, "orders-partition-2")
        assert list(stats["subscriptions"]) == ["billing"]
        assert stats["subscriptions"]["billing"]["backlog_messages"] == 1
        await client.consumer(1, "billing", topic="orders-partition-2", start=("latest", None))
        assert await client.received(1) == [b"before anybody subscribed"]


async def test_watches_tell_of_growth_and_of_the_end() -> None:
    async with running_broker() as broker:
        client, other = FakeClient(broker), FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 1)
        assert await client.ask(c.WatchPartitions, 7, "orders") == {"partitions": 1}
        assert await client.ask(c.WatchPartitions, 8, "plain") == {"partitions": 0}
        await client.ask(c.WatchTopics, 9, "public/default")
        with pytest.raises(AlreadyExists, match="choose another id"):
            await client.ask(c.WatchPartitions, 9, "orders")
        with pytest.raises(AlreadyExists, match="choose another id"):
            await client.ask(c.WatchTopics, 7, "public/default")
        await other.ask(c.UpdatePartitions, "orders", 2)
        await client.until(lambda: told(client) == [(7, 2)])
        (changed,) = [payload for command, payload in client.frames if isinstance(command, c.TopicsChanged)]
        assert msgspec.msgpack.decode(changed) == {f"{FULL}-partition-1": True}
        client.writable = False
        await other.ask(c.UpdatePartitions, "orders", 3)
        await other.ask(c.UpdatePartitions, "orders", 4)
        await settle()
        assert told(client) == [(7, 2)]
        client.writable = True
        client.handler.writing_resumed()
        assert told(client) == [(7, 2), (7, 4)]
        await delete(other)
        await client.until(lambda: told(client)[2:] == [(7, 0)])
        await client.ask(c.WatchPartitions, 7, "")
        await client.ask(c.WatchPartitions, 7, "")  # ended already
        assert not broker.partitioned.followed._listeners
        assert not list(broker.partitioned.followed._watched)


async def test_watches_of_partitions_are_bounded_and_end_with_their_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from magnetar.broker.listeners.native import watches

    monkeypatch.setattr(watches, "MAX_PARTITION_WATCHES", 2)
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 1)
        for number in range(2):
            await client.ask(c.WatchPartitions, number, "orders")
        with pytest.raises(TooManyRequests, match="2 watches"):
            await client.ask(c.WatchPartitions, 2, "orders")
        client.close()
        assert not broker.partitioned.followed._listeners


async def test_a_change_while_a_watch_begins_is_told_after_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_broker() as broker:
        client, other = FakeClient(broker), FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 1)
        watch = broker.partitioned.watch

        async def slowly(*args: Any) -> Any:
            found = await watch(*args)
            await other.ask(c.UpdatePartitions, "orders", 5)
            await settle()
            return found

        monkeypatch.setattr(broker.partitioned, "watch", slowly)
        assert await client.ask(c.WatchPartitions, 1, "orders") == {"partitions": 1}
        await client.until(lambda: told(client) == [(1, 5)])
        kinds = [type(command).__name__ for command, _ in client.frames]
        assert kinds[-2:] == ["Ok", "PartitionsChanged"]


async def test_policies_of_a_partitioned_topic_reach_its_loaded_partitions() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 2)
        await client.producer(topic="orders-partition-0")
        topic = broker.topics[f"{FULL}-partition-0"]

        assert await client.change_policies("orders", message_ttl_ms=5) == {"version": 1}
        assert await client.change_policies("orders", message_ttl_ms=5) == {
            "version": 1
        }  # its answer was lost
        await settle()
        in_force = topic.policies.in_force()
        assert in_force is not None
        assert in_force.value("message_ttl_ms") == (5, "topic")
        await client.change_policies("orders-partition-0", message_ttl_ms=7)
        rows = (await client.ask(c.GetPolicies, "orders-partition-0"))["in_force"]
        assert ["message_ttl_ms", "", 7, "partition"] in rows
        found = await client.ask(c.GetPolicies, "orders")
        assert (found["policies"], found["version"]) == ({"message_ttl_ms": 5}, 1)
        assert ["message_ttl_ms", "", 5, "topic"] in found["in_force"]
        assert ["retention_ms", "", 0, "broker"] in found["in_force"]


async def test_deletion_says_first_who_is_there_and_ends_whole() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 3)
        await client.ask(c.CreateTopic, "orders-partition")  # another topic
        await client.producer(topic="orders-partition-1")
        await client.ask(c.DeleteTopic, "orders-partition-0", dry=True)
        with pytest.raises(TopicInUse):
            await client.ask(c.DeleteTopic, "orders-partition-1", dry=True)
        assert await client.ask(c.DeleteTopic, "orders") == {"partitions": [0, 1, 2]}
        assert await partitions(client) == 0
        with pytest.raises(PartitionNotFound, match="it is being deleted"):
            await client.producer(2, topic="orders-partition-2")
        for call in (c.CreateTopic, c.UpdatePartitions):
            with pytest.raises((TopicBusy, TopicNotFound)):
                await client.ask(call, "orders", 3)
        await delete(client)
        assert await topics(client) == ["orders-partition"]
        with pytest.raises(TopicNotFound):
            await client.ask(c.DeleteTopic, "orders")
        await client.ask(c.CreateTopic, "orders", 1)
        assert await partitions(client) == 1


async def test_rule_45_a_topic_that_is_half_made_is_said_to_be() -> None:
    class Stops(MemoryMetadataStore):
        """Fails to make heads."""

        async def commit(self, operations: Sequence[Operation]) -> None:
            """See MetadataStore."""
            if any(
                f"{TOPICS_ROOT}/public/default/persistent/orders-partition" in one.path for one in operations
            ):
                raise ConnectionLost("the store is away")
            await super().commit(operations)

    async with running_broker(metadata=Stops()) as broker:
        client = FakeClient(broker)
        with pytest.raises(ConnectionLost):
            await client.ask(c.CreateTopic, "orders", 3)
        with pytest.raises(TopicBusy, match="create it again or delete it"):
            await client.ask(c.Partitions, "orders")
        with pytest.raises(TopicBusy, match="create it again or delete it"):
            await client.ask(c.WatchPartitions, 1, "orders")
        with pytest.raises(AlreadyExists, match="is a partitioned topic"):
            await client.ask(c.CreateTopic, "orders")
        with pytest.raises(PartitionNotFound, match="it is being made"):
            await client.producer(topic="orders-partition-0")
        assert await client.ask(c.DeleteTopic, "orders") == {"partitions": []}
        assert await partitions(client) == 0


async def create(client: FakeClient) -> None:
    await client.ask(c.CreateTopic, "orders", 250)


async def grow(client: FakeClient) -> None:
    await client.ask(c.UpdatePartitions, "orders", 240)


async def prepare_growth(client: FakeClient) -> None:
    await client.ask(c.CreateTopic, "orders", 2)
    await client.ask(c.CreateSubscription, "orders-partition-0", "billing")


async def prepare_deletion(client: FakeClient) -> None:
    await client.ask(c.CreateTopic, "orders", 3)
    await client.ask(c.CreateSubscription, "orders-partition-1", "billing")


async def nothing(client: FakeClient) -> None:
    pass


async def check_created(client: FakeClient) -> None:
    assert await partitions(client) == 250
    assert len(await topics(client)) == 250
    await client.producer(topic="orders-partition-249")


async def check_grown(client: FakeClient) -> None:
    assert await partitions(client) == 240
    assert len(await topics(client)) == 240
    for number in (0, 2, 99, 239):
        stats = await client.ask(c.TopicStats, f"orders-partition-{number}")
        assert list(stats["subscriptions"]) == ["billing"], number


async def check_deleted(client: FakeClient) -> None:
    assert await partitions(client) == 0
    assert await topics(client) == []
    await client.ask(c.CreateTopic, "orders")


Step = Callable[[FakeClient], Awaitable[None]]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("prepare", "act", "check"),
    [
        (nothing, create, check_created),
        (prepare_growth, grow, check_grown),
        (prepare_deletion, delete, check_deleted),
    ],
    ids=["creation", "growth", "deletion"],
)
async def test_whatever_write_a_crash_meets_the_same_call_again_completes_it(
    prepare: Step, act: Step, check: Step, after: bool
) -> None:
    at, done = 0, False
    while not done:
        disk = ModelKeyValue()
        store = CrashingStore(disk)
        async with running_broker(metadata=store) as broker:
            client = FakeClient(broker)
            await prepare(client)
            store.writes, store.at, store.after = 0, at, after
            try:
                await act(client)
                done = store.writes <= at
            except MagnetarError:
                pass
            store.at = -1
        async with running_broker(metadata=MemoryMetadataStore(disk)) as broker:
            client = FakeClient(broker)
            try:
                await act(client)
            except TopicNotFound:
                assert act is delete, "there is nothing left to delete"
            await check(client)
        at += 1
    assert at > 3


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_subscriptions_that_went_since_a_growth_was_interrupted_come_back_with_no_partition(
    after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.broker.topics.partitions._CREATED_AT_ONCE", 2)
    at, done = 0, False
    while not done:
        disk = ModelKeyValue()
        store = CrashingStore(disk)
        async with running_broker(metadata=store) as broker:
            client = FakeClient(broker)
            await client.ask(c.CreateTopic, "orders", 2)
            for name in ("billing", "audit"):
                await client.ask(c.CreateSubscription, "orders-partition-0", name)
            store.writes, store.at, store.after = 0, at, after
            try:
                await client.ask(c.UpdatePartitions, "orders", 5)
                done = store.writes <= at
            except MagnetarError:
                pass
            store.at = -1
        heir = MemoryMetadataStore(disk)
        async with running_broker(metadata=heir) as broker:
            client = FakeClient(broker)
            for number in range(await partitions(client)):
                partition = f"orders-partition-{number}"
                with suppress(SubscriptionNotFound):
                    await client.ask(c.DeleteSubscription, partition, "billing")
                await client.ask(c.CreateSubscription, partition, "new")
            await client.ask(c.UpdatePartitions, "orders", 5)
            for number in (0, *range(2, 5)):
                stats = await client.ask(c.TopicStats, f"orders-partition-{number}")
                assert sorted(stats["subscriptions"]) == ["audit", "new"], (at, number)
            await delete(client)
            assert await topics(client) == []
            assert await everything(heir, TOPICS_ROOT) == []
        at += 1
    assert at > 5


async def everything(store: MemoryMetadataStore, path: str) -> list[str]:
    found = [f"{path.rstrip('/')}/{name}" for name in await store.children(path)]
    return found + [one for child in found for one in await everything(store, child)]


async def test_growth_and_deletion_at_a_time_leave_nothing_behind() -> None:
    """A head is only made while the record has the version that was read; planted: without that check one stays."""

    class Slow(MemoryMetadataStore):
        """Holds back the commit of heads."""

        gate: asyncio.Event | None = None

        async def commit(self, operations: Sequence[Operation]) -> None:
            """See MetadataStore."""
            if self.gate is not None and len(operations) > 2:
                await self.gate.wait()
            await super().commit(operations)

    store = Slow()
    async with running_broker(metadata=store) as broker:
        client, other = FakeClient(broker), FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 2)
        store.gate = asyncio.Event()
        grows = client.ask(c.UpdatePartitions, "orders", 9)
        await settle()
        await delete(other)
        store.gate.set()
        with pytest.raises(TopicBusy, match="changed by somebody else"):
            await grows
        assert await topics(client) == []
        assert await store.children(PARTITIONED_ROOT) == []


async def test_two_who_grow_a_topic_at_a_time_end_with_the_larger_number() -> None:
    async with running_broker() as broker:
        client, other = FakeClient(broker), FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 2)

        async def until_done(one: FakeClient, count: int) -> None:
            while True:
                try:
                    await one.ask(c.UpdatePartitions, "orders", count)
                    return
                except TopicBusy:
                    await asyncio.sleep(0)
                except InvalidArgument:
                    return

        await asyncio.gather(until_done(client, 5), until_done(other, 8))
        assert await partitions(client) == 8
        assert len(await topics(client)) == 8


async def test_a_record_that_is_read_too_old_refuses_nobody() -> None:
    """Of a store whose servers lag behind each other, a broker may have read the record before it grew."""
    disk: list[Any] = []

    class Stale(MemoryMetadataStore):
        """Answers for the record what it read first, while `disk` has something."""

        async def get(self, path: str) -> Any:
            """See MetadataStore."""
            if disk and path == partitioned_path(TOPIC):
                return disk[0]
            return await super().get(path)

    store = Stale()
    async with running_broker(metadata=store) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 2)
        old = await store.get(partitioned_path(TOPIC))
        await client.ask(c.UpdatePartitions, "orders", 3)
        disk.append(old)
        with pytest.raises(TopicBusy, match="have changed just now; try again"):
            await client.producer(topic="orders-partition-2")
        disk.clear()
        await client.producer(topic="orders-partition-2")


async def test_names_of_non_persistent_topics() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        name = "non-persistent://public/default/orders"
        await client.ask(c.CreateTopic, name, 3)
        assert await partitions(client, name) == 3
        assert await partitions(client) == 0
        assert await client.ask(c.UpdatePartitions, name, 5) == {"partitions": 5}
        await client.producer(topic=f"{name}-partition-4")
        await client.consumer(topic=f"{name}-partition-4", durable=False)
        client.publish(b"x")
        assert await client.received(1) == [b"x"]
        await delete(client, name)
        assert await partitions(client, name) == 0


async def test_a_partition_whose_head_is_missing_is_not_made_again() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders", 2)
        await broker.metadata.delete(topic_path(TOPIC.partition_of(1)))
        with pytest.raises(TopicNotFound):
            await client.producer(topic="orders-partition-1")
