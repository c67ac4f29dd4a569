"""Who needs a topic's ledgers: trimming, archiving and the figures of a topic give the same answer (rule 25)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from magnetar.broker import Broker, Topic
from magnetar.broker.export.archived import Wanted, decode_archived
from magnetar.broker.log.records import cursors_path
from magnetar.metadata import Versioned
from magnetar.proto import commands as c
from magnetar.proto.errors import ConnectionLost, MagnetarError, ServiceNotReady, TopicNotServed
from magnetar.proto.ids import MessageId
from support.archives import MemoryArchives
from support.broker_kit import TOPIC, FakeClient, FakeClock, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time


async def trimmed(topic: Topic) -> int:
    """How many ledgers a round trims."""
    before = len(topic.ledger.list.ledgers)
    topic.maintain()
    await topic.maintenance.trimmed()
    return before - len(topic.ledger.list.ledgers)


async def archivable(topic: Topic, lease: str = "") -> tuple[int, Any]:
    """How many ledgers could be archived, and why no more."""
    rows = [
        (one.ledger_id, one.stored_id, one.entries, one.messages)
        for one in topic.ledger.list.ledgers
        if one.closed
    ]
    wanted = Wanted("file:///a", decode_archived(msgspec.msgpack.encode(rows)), lease=lease, dry=True)
    answer = await topic.export.archiving.archive(wanted)
    return answer.archived, answer.kept and answer.kept[1]


async def test_trimming_archiving_and_figures_name_the_same_holder() -> None:
    async with running_broker(max_ledger_entries=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        for number in range(5):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
        await settle()
        topic = broker.topics[str(TOPIC)]
        ids = [info.ledger_id for info in topic.ledger.list.ledgers]

        async def figures() -> tuple[list[int], str]:
            found = await client.ask(c.TopicStats, "orders")
            return found["trimmed_until"], found["retained_by"]

        # Nobody subscribed: nothing is trimmed, all may be archived.
        assert await figures() == ([0, 0, 0], "no durable subscription says what is not needed any more")
        assert (await trimmed(topic), (await archivable(topic))[0]) == (0, 5)
        # Two subscriptions, of which one is slow; a cursor that cannot be read; a reader; a lease.
        fast, slow = FakeClient(broker), FakeClient(broker)
        await fast.consumer(subscription="fast")
        await slow.consumer(subscription="slow")
        await fast.received(5)
        await fast.ack(*[message.row() for message in fast.messages])
        await slow.ack(*[message.row() for message in slow.messages[:1]])
        waiting = ([ids[1], 0, 0], "subscription 'slow' has not acknowledged all of it")
        assert await figures() == waiting
        assert await archivable(topic) == (1, waiting[1])
        topic.subscriptions.recovery.unavailable["lost"] = ServiceNotReady("its bookies are away")
        assert await figures() == ([0, 0, 0], "where subscription 'lost' stands cannot be read")
        assert await archivable(topic) == (0, "where subscription 'lost' stands cannot be read")
        assert await trimmed(topic) == 0
        topic.subscriptions.recovery.unavailable.clear()
        await client.consumer(7, "", durable=False, permits=0)
        assert await figures() == ([ids[0], 0, 0], "'reader-1' is reading it")
        assert (await archivable(topic), await trimmed(topic)) == ((0, "'reader-1' is reading it"), 0)
        client.frame(c.Flow(0, 7, 1000))
        await settle()
        assert await figures() == waiting
        topic.export.leases.keep("spark", 60_000, 0)
        assert (await figures())[1].startswith("a lease keeps it")
        assert await archivable(topic, "spark") == (1, waiting[1]), (
            "the asking side's own lease does not count"
        )
        topic.export.leases.release("spark")
        assert await trimmed(topic) == 1
        await slow.ack(*[message.row() for message in slow.messages])
        assert (await figures())[1] == ""
        assert await trimmed(topic) == 4


# --- retention policies --------------------------------------------------------------------------------------------------


async def of_one_entry_each(broker: Broker, clock: FakeClock, times: list[int], *, size: int = 1) -> Topic:
    """A topic with a ledger for each time, all of them closed."""
    client = FakeClient(broker)
    await client.producer()
    for number, now in enumerate(times):
        clock.now = now
        client.publish(b"x" * size, first=number)
        await client.confirmed(number + 1)
    await settle()
    topic = broker.topics[str(TOPIC)]
    assert [info.closed for info in topic.ledger.list.ledgers] == [True] * len(times)
    return topic


async def acknowledge_all(broker: Broker, name: str = "s") -> None:
    client = FakeClient(broker)
    await client.consumer(1, name)
    await client.received(sum(info.entries for info in broker.topics[str(TOPIC)].ledger.list.ledgers))
    await client.ack(*[message.row() for message in client.messages])


@pytest.mark.parametrize("subscribed", [True, False])
@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ({"retention_ms": -1}, 5),
        ({"retention_bytes": -1}, 5),
        ({"retention_ms": 100}, 5),
        ({"retention_ms": 30}, 4),  # that of 20 is just as old: it stays
        ({"retention_ms": 29}, 3),
        ({"retention_ms": 1}, 1),  # that of this very moment is not older
        ({"retention_bytes": 10**9}, 5),
        ({"retention_bytes": 1}, 1),
        ({"retention_bytes": 1_000}, 1),
        ({"retention_bytes": 1_500}, 2),
        ({"retention_bytes": 3_500}, 4),
        ({"retention_ms": 29, "retention_bytes": 10**9}, 3),  # one of the limits is enough
        ({"retention_ms": 100, "retention_bytes": 1_500}, 2),
        ({"retention_ms": 29, "retention_bytes": 1_500}, 2),
        ({"retention_ms": 0, "retention_bytes": 0}, 0),
    ],
)
async def test_what_is_acknowledged_stays_by_time_and_size(
    policy: dict[str, Any], left: int, subscribed: bool
) -> None:
    clock = FakeClock()
    async with running_broker(clock=clock, max_ledger_entries=1) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20, 30, 40, 50], size=1_000)
        await topic.change_policies(policy)
        if subscribed:
            await acknowledge_all(broker)
        elif left == 0:
            left = 5  # a topic that nobody subscribed to keeps all it has unless it is told otherwise
        await trimmed(topic)
        assert len(topic.ledger.list.ledgers) == left
        assert await trimmed(topic) == 0


async def test_whoever_needs_more_than_retention_keeps_gets_it() -> None:
    """A backlog, a connected reader, a lease, a cursor that cannot be read, the open ledger; then retention names itself."""
    clock = FakeClock()
    async with running_broker(clock=clock, max_ledger_entries=1) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20, 30])
        await topic.change_policies({"retention_ms": 5})
        clock.now = 1_000
        reader = FakeClient(broker)
        await reader.consumer(1, "", durable=False, permits=0)
        assert await trimmed(topic) == 0
        topic.export.leases.keep("spark", 60_000, 0)
        reader.frame(c.Flow(0, 1, 1_000))
        await reader.received(3)
        assert await trimmed(topic) == 0
        topic.export.leases.release("spark")
        topic.subscriptions.recovery.unavailable["lost"] = ServiceNotReady("its bookies are away")
        assert await trimmed(topic) == 0
        topic.subscriptions.recovery.unavailable.clear()
        slow = FakeClient(broker)
        await slow.consumer(1, "slow", permits=0)
        assert await trimmed(topic) == 0
        await slow.ask(c.Unsubscribe, 1)
        assert await trimmed(topic) == 3
        await topic.change_policies({"retention_ms": 50})
        topic.ledger.list.record.next_index = 3
        client = FakeClient(broker)
        await client.producer(2)
        client.publish(b"new", producer_id=2)
        await client.confirmed(1)
        await settle()
        assert topic.retention.trimmed_until().reason == "retention keeps it, a policy of the topic"
        clock.now = 1_051
        assert await trimmed(topic) == 1


async def test_an_attached_or_archived_ledger_is_kept_and_trimmed_as_such() -> None:
    archives, clock = MemoryArchives(), FakeClock()
    async with running_broker(clock=clock, archives=archives, max_ledger_entries=1) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20, 30, 40])
        await archives.archive(broker, 2)
        await topic.change_policies({"retention_ms": 5})
        clock.now = 1_000
        assert await trimmed(topic) == 2
        assert len(topic.ledger.list.archived_ledgers) == 2, "what is archived is never trimmed"
        reader = FakeClient(broker)
        await reader.consumer(1, "", durable=False)
        assert len(await reader.received(2)) == 2


@in_virtual_time
async def test_a_crash_between_the_list_and_the_deletion_leaves_no_orphan_and_no_gap() -> None:
    ledgers, metadata, clock = FakeLedgers(), MemoryMetadataStore(), FakeClock()
    async with running_broker(ledgers, metadata, clock, max_ledger_entries=1) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20, 30])
        await topic.change_policies({"retention_ms": 15})
        clock.now = 40
        ledgers.fail_delete.extend([MagnetarError("crash")] * 10)
        assert await trimmed(topic) == 2
        stored = topic.ledger.list.record.trimmed
        assert len(stored) == 2
        assert set(stored) <= set(ledgers.topic_ledgers()), "metadata first"
        topic.ledger.fence(TopicNotServed("crash"))
        ledgers.fail_delete.clear()
    async with running_broker(ledgers, metadata, clock, max_ledger_entries=1) as broker:
        client = FakeClient(broker)
        await client.consumer(1, "", durable=False)
        assert len(await client.received(1)) == 1
        assert not set(stored) & set(ledgers.topic_ledgers())


@in_virtual_time
async def test_a_topic_that_waits_for_its_retention_stays_loaded_until_it_is_over() -> None:
    clock = FakeClock()
    settings: dict[str, Any] = {"topic_idle_unload_ms": 60_000, "maintenance_interval_s": 10.0}
    async with running_broker(clock=clock, max_ledger_entries=1, **settings) as broker:
        topic = await of_one_entry_each(broker, clock, [10])
        await topic.change_policies({"retention_ms": 1_000_000})
        client = FakeClient(broker)
        await client.ask(c.Lookup, "orders")
        for session in list(topic.producers):
            topic.producers.forget(session)
        await asyncio.sleep(200)
        assert str(TOPIC) in broker.topics
        clock.now = 2_000_000
        await asyncio.sleep(200)
        assert str(TOPIC) not in broker.topics
        assert topic.ledger.list.ledgers == []


async def test_a_clock_that_goes_back_keeps_more() -> None:
    clock = FakeClock()
    async with running_broker(clock=clock, max_ledger_entries=1) as broker:
        topic = await of_one_entry_each(broker, clock, [1_000, 2_000, 500])  # the last one counts as of 2,000
        await topic.change_policies({"retention_ms": 100})
        assert await trimmed(topic) == 0
        clock.now = 2_050
        assert await trimmed(topic) == 1
        clock.now = 2_101
        assert await trimmed(topic) == 2


# --- who asks for what was trimmed ---------------------------------------------------------------------------------------


def at(ledger: int, entry: int, index: int) -> tuple[str, bytes]:
    return ("id", MessageId(ledger, entry, index).to_bytes())


@pytest.mark.parametrize("reloaded", [False, True])
async def test_a_start_at_what_was_trimmed_says_so_and_only_that(reloaded: bool) -> None:
    ledgers, metadata, clock = FakeLedgers(), MemoryMetadataStore(), FakeClock()
    async with running_broker(ledgers, metadata, clock, max_ledger_entries=2) as broker:
        client = FakeClient(broker)
        await client.producer()
        for number in range(5):  # ledgers of 2, 2 and 1 entries of 3 messages
            clock.now = number
            client.publish_batch([b"a", b"b", b"c"], first=3 * number)
            await client.confirmed(3 * number + 3)
        await settle()
        topic = broker.topics[str(TOPIC)]
        ids = [info.ledger_id for info in topic.ledger.list.ledgers]
        await topic.change_policies({"retention_ms": 1})
        clock.now = 4
        assert await trimmed(topic) == 1
        if reloaded:
            await broker.unload(TOPIC, TopicNotServed("loaded anew"))
        gone, there = ids[0], [ids[1], 0, 0]
        cases = [
            (at(gone, 0, 0), there),
            (at(gone, 1, 2), there),
            (at(gone, 1, 3), None),  # behind the last message that was trimmed
            (at(gone, 2, 0), None),
            (at(ids[1], 0, 0), None),
            (at(ids[1], 1, 3), None),
            (at(ids[2], 9, 0), None),  # does not exist yet
            (("earliest", None), None),
            (("time", 0), None),
        ]
        for number, (start, expected) in enumerate(cases, 1):
            answer = await client.ask(c.Subscribe, number, "orders", "", start=start, durable=False)
            assert answer["trimmed"] == (expected is not None), start
            assert expected in (None, list(answer["position"]))
            answer = await client.ask(c.Seek, number, start)
            assert answer["trimmed"] == (expected is not None), start
            assert expected in (None, list(answer["position"]))
        # A durable subscription: where it was made, and not to whoever comes later.
        answer = await client.ask(c.Subscribe, 50, "orders", "s", start=at(gone, 0, 0), type="shared")
        assert (answer["trimmed"], list(answer["position"])) == (True, there)
        answer = await client.ask(c.Subscribe, 51, "orders", "s", start=at(gone, 0, 0), type="shared")
        assert not answer["trimmed"]


class HeldStore(MemoryMetadataStore):
    """Writes of a path that ends so wait until `held` is another one."""

    held = "none"

    async def commit(self, operations: Any) -> None:
        while any(operation.path.endswith(self.held) for operation in operations):
            await asyncio.sleep(0)
        await super().commit(operations)


@pytest.mark.parametrize("way", ["subscribe", "create", "seek", "read"])
@pytest.mark.parametrize("decided", [True, False])
async def test_where_a_subscription_begins_is_kept_or_it_learns_that_it_is_trimmed(
    way: str, decided: bool
) -> None:
    """`decided`: the trimming that does not heed it began before; else it begins while the cursor is being stored."""
    metadata, clock = HeldStore(), FakeClock()
    async with running_broker(metadata=metadata, clock=clock, max_ledger_entries=1) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20, 30])
        first = topic.ledger.list.ledgers[0].ledger_id
        client = FakeClient(broker)
        if way == "seek":
            await client.consumer(1, "s", start=("latest", None), permits=0)
        await topic.change_policies({"retention_ms": 1})
        clock.now = 30
        ways = {
            "subscribe": lambda: client.ask(c.Subscribe, 1, "orders", "s", start=at(first, 0, 0)),
            "create": lambda: client.ask(c.CreateSubscription, "orders", "s", start=at(first, 0, 0)),
            "seek": lambda: client.ask(c.Seek, 1, at(first, 0, 0)),
            "read": lambda: client.ask(c.Subscribe, 1, "orders", "", start=at(first, 0, 0), durable=False),
        }
        works = [lambda: trimmed(topic), ways[way]]
        metadata.held = "/orders" if decided else "/cursors/s"
        begun = []
        for work in works if decided else reversed(works):
            begun.append(asyncio.ensure_future(work()))
            await settle()
        metadata.held = "none"
        count, answer = [await one for one in (begun if decided else reversed(begun))]
        assert count == (2 if decided else 0)
        assert topic.ledger.list.start == topic.retention.lowest().position
        if way != "create":
            assert answer["trimmed"] is decided


class AwayStore(MemoryMetadataStore):
    """No answer comes about a path that ends with `away`; what is written there is `done` all the same, or not."""

    away = "none"
    done = True

    async def get(self, path: str) -> Versioned | None:
        if path.endswith(self.away):
            raise ConnectionLost("no answer")
        return await super().get(path)

    async def commit(self, operations: Any) -> None:
        away = any(operation.path.endswith(self.away) for operation in operations)
        if self.done or not away:
            await super().commit(operations)
        if away:
            raise ConnectionLost("no answer")


@pytest.mark.parametrize("way", ["subscribe", "create"])
@pytest.mark.parametrize("done", [True, False])
async def test_a_subscription_that_may_have_been_made_is_looked_for_before_anything_is_trimmed(
    way: str, done: bool
) -> None:
    metadata, clock = AwayStore(), FakeClock()
    async with running_broker(
        metadata=metadata, clock=clock, max_ledger_entries=1, retry_initial_ms=1, retry_max_ms=2
    ) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20, 30])
        first = topic.ledger.list.ledgers[0].ledger_id
        await topic.change_policies({"retention_ms": 1})
        clock.now = 30
        client = FakeClient(broker)

        async def ask() -> Any:
            if way == "subscribe":
                return await client.ask(c.Subscribe, 1, "orders", "s", start=("earliest", None))
            return await client.ask(c.CreateSubscription, "orders", "s", start=("earliest", None))

        metadata.away, metadata.done = "/cursors/s", done
        with pytest.raises(ConnectionLost):
            await ask()
        assert await trimmed(topic) == 0
        with pytest.raises(ServiceNotReady, match=r"'s' of topic .* tr(y|ied) again"):
            await ask()
        metadata.away = "none"
        recovery = topic.subscriptions.recovery
        await asyncio.wait(list(recovery._tasks.values()))
        assert not recovery.unavailable
        assert list(topic.subscriptions) == ["s"] * done
        assert await trimmed(topic) == (0 if done else 2)
        answer = await client.ask(c.Subscribe, 2, "orders", "s", start=("latest", None))
        assert list(answer["position"]) == ([first, 0, 0] if done else list(topic.ledger.list.end))


@pytest.mark.parametrize("done", [True, False])
async def test_a_subscription_that_may_have_been_made_can_be_deleted(done: bool) -> None:
    metadata, clock = AwayStore(), FakeClock()
    async with running_broker(metadata=metadata, clock=clock, max_ledger_entries=1) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20])
        client = FakeClient(broker)
        metadata.away, metadata.done = "/cursors/s", done
        with pytest.raises(ConnectionLost):
            await client.ask(c.CreateSubscription, "orders", "s")
        with pytest.raises(ConnectionLost):
            await client.ask(c.DeleteSubscription, "orders", "s")
        assert list(topic.subscriptions.recovery.unavailable) == ["s"]
        metadata.away = "none"
        await client.ask(c.DeleteSubscription, "orders", "s")
        assert not topic.subscriptions.recovery.unavailable
        assert await metadata.children(cursors_path(TOPIC)) == []
        await client.ask(c.CreateSubscription, "orders", "s")
        assert list(topic.subscriptions) == ["s"]


@pytest.mark.parametrize("done", [True, False])
async def test_a_subscription_whose_deletion_failed_is_deleted_or_there(done: bool) -> None:
    metadata, clock = AwayStore(), FakeClock()
    async with running_broker(
        metadata=metadata, clock=clock, max_ledger_entries=1, retry_initial_ms=1
    ) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20])
        client = FakeClient(broker)
        await client.ask(c.CreateSubscription, "orders", "other")
        await client.ask(c.CreateSubscription, "orders", "s", start=("earliest", None))
        metadata.away, metadata.done = "/cursors/s", done
        with pytest.raises(ConnectionLost):
            await client.ask(c.DeleteSubscription, "orders", "s")
        assert await trimmed(topic) == 0
        metadata.away = "none"
        await asyncio.wait(list(topic.subscriptions.recovery._tasks.values()))
        assert sorted(topic.subscriptions) == ["other"] + ["s"] * (not done)
        assert await metadata.children(cursors_path(TOPIC)) == sorted(topic.subscriptions)
        assert await trimmed(topic) == (2 if done else 0)


async def test_a_subscription_whose_deletion_failed_before_it_was_found_can_be_used() -> None:
    metadata, clock = AwayStore(), FakeClock()
    async with running_broker(
        metadata=metadata, clock=clock, max_ledger_entries=1, retry_initial_ms=1
    ) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20])
        client = FakeClient(broker)
        metadata.away = "/cursors/s"
        with pytest.raises(ConnectionLost):
            await client.ask(c.CreateSubscription, "orders", "s", start=("earliest", None))
        with pytest.raises(ConnectionLost):
            await client.ask(c.DeleteSubscription, "orders", "s")
        metadata.away = "none"
        await asyncio.wait(list(topic.subscriptions.recovery._tasks.values()))
        await acknowledge_all(broker)
        assert topic.subscriptions["s"].cursor.durable_mark == topic.ledger.list.end


async def test_an_id_of_before_the_first_message_of_all_misses_nothing() -> None:
    ledgers, clock = FakeLedgers(), FakeClock()
    ledgers.next_ledger_id = 7
    async with running_broker(ledgers, clock=clock, max_ledger_entries=1) as broker:
        await of_one_entry_each(broker, clock, [10, 20])
        answer = await FakeClient(broker).ask(c.Subscribe, 1, "orders", "", start=at(0, 0, 0), durable=False)
        assert not answer["trimmed"]


async def test_a_hole_behind_archived_ledgers_is_told_where_an_id_lies_in_it() -> None:
    archives, clock = MemoryArchives(), FakeClock()
    async with running_broker(clock=clock, archives=archives, max_ledger_entries=1) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20, 30])
        ids = [info.ledger_id for info in topic.ledger.list.ledgers]
        await archives.archive(broker, 1)
        await topic.change_policies({"retention_ms": 5})
        clock.now = 30
        assert await trimmed(topic) == 1
        client = FakeClient(broker)
        for number, (start, told) in enumerate(
            [
                (at(ids[0], 0, 0), False),
                (at(ids[0], 1, 0), True),
                (at(ids[1], 0, 0), True),
                (at(ids[1], 0, 1), False),
            ]
        ):
            answer = await client.ask(c.Subscribe, number, "orders", "", start=start, durable=False)
            assert answer["trimmed"] is told, start


async def test_an_empty_ledger_that_is_not_gone_yet_has_no_last_message() -> None:
    clock = FakeClock()
    async with running_broker(clock=clock, max_ledger_entries=1) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20])
        last = topic.ledger.list.ledgers[-1]
        last.entries = last.messages = 0
        assert await topic.ledger.changes._end_of_last(2) == (last.ledger_id, 0, 0)


async def test_where_the_end_of_what_is_trimmed_cannot_be_read_it_is_trimmed_all_the_same() -> None:
    ledgers, clock = FakeLedgers(), FakeClock()
    async with running_broker(ledgers, clock=clock, max_ledger_entries=1) as broker:
        topic = await of_one_entry_each(broker, clock, [10, 20])
        first = topic.ledger.list.ledgers[0].ledger_id
        await topic.change_policies({"retention_ms": 1})
        topic.cache.clear()
        clock.now = 20
        ledgers.damaged.add((first, 0))
        assert await trimmed(topic) == 1
        client = FakeClient(broker)
        answer = await client.ask(c.Subscribe, 1, "orders", "", start=at(first, 0, 1), durable=False)
        assert "trimmed" in answer, "rather once too often"
