"""Messages that expire: by hand, and by a TTL that is looked after in rounds. Also what comes between, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from magnetar.broker import Broker, Topic
from magnetar.broker.cursors.core.acks import Position
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    BookieUnavailable,
    InvalidArgument,
    MagnetarError,
    ServiceNotReady,
    SubscriptionNotFound,
    TopicBusy,
    TopicNotFound,
    TopicNotServed,
)
from support.archives import MemoryArchives
from support.broker_kit import TOPIC, FakeClient, FakeClock, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time


def at(position: Position) -> Callable[[], Awaitable[Position]]:
    async def find() -> Position:
        return position

    return find


async def published(client: FakeClient, clock: FakeClock, times: list[int]) -> None:
    """A message, which is an entry, at each time."""
    for number, now in enumerate(times, len(client.receipts)):
        clock.now = now
        client.publish(b"%d" % number, first=number)
        await client.confirmed(number + 1)


async def subscribed(broker: Broker, *names: str, **named: Any) -> FakeClient:
    """Durable subscriptions without permits."""
    client = FakeClient(broker)
    for number, name in enumerate(names, 1):
        await client.consumer(number, name, permits=0, **named)
    return client


def topic_of(broker: Broker) -> Topic:
    return broker.topics[str(TOPIC)]


def mark(broker: Broker, name: str) -> tuple[int, int, int]:
    ledger, entry, index = topic_of(broker).subscriptions[name].cursor.state.mark_delete
    return ledger, entry, index


async def expire(client: FakeClient, before_ms: int, subscription: str = "s") -> Any:
    return await client.ask(c.ExpireMessages, "orders", subscription, before_ms)


async def one_round(broker: Broker) -> None:
    topic_of(broker).maintenance.expire()
    await topic_of(broker).maintenance.expired()


@pytest.mark.parametrize("entries_per_ledger", [1, 3, 100])
async def test_what_was_stored_before_a_time_is_acknowledged_and_stays_so(entries_per_ledger: int) -> None:
    ledgers, metadata, clock = FakeLedgers(), MemoryMetadataStore(), FakeClock(1_000)
    settings = {"max_ledger_entries": entries_per_ledger, "max_ledger_age_ms": 1 << 40}
    async with running_broker(ledgers, metadata, clock, **settings) as broker:
        client = await subscribed(broker, "s", "other")
        await client.producer()
        await published(client, clock, [1_000, 2_000, 2_000, 4_000, 5_000, 6_000])
        assert await expire(client, 1_000) == {
            "moved": False,
            "messages": 0,
            "mark_delete": [*mark(broker, "s")],
        }
        for before_ms, left in [(1_001, 5), (2_000, 5), (4_000, 3), (2_500, 3), (6_000, 1), (99_999, 0)]:
            answer = await expire(client, before_ms)
            stats = (await client.ask(c.TopicStats, "orders"))["subscriptions"]
            assert stats["s"]["backlog_messages"] == left, before_ms
            assert stats["other"]["backlog_messages"] == 6, "expiry is of one subscription"
            assert answer["mark_delete"] == stats["s"]["mark_delete"]
            if (before_ms, left) == (4_000, 3):
                assert answer["moved"]
                assert answer["messages"] == 2
                durable = topic_of(broker).subscriptions["s"].cursor.durable_mark
                assert durable == mark(broker, "s"), "it is durable when it is answered"
    async with running_broker(ledgers, metadata, clock) as broker:
        client = await subscribed(broker, "s")
        stats = (await client.ask(c.TopicStats, "orders"))["subscriptions"]
        assert (stats["s"]["backlog_messages"], stats["s"]["backlog_bytes"]) == (0, 0)


async def test_what_cannot_expire_is_refused() -> None:
    async with running_broker() as broker:
        client = await subscribed(broker, "s")
        await client.consumer(9, "looking", durable=False)
        with pytest.raises(SubscriptionNotFound, match="has no subscription 'nobody'"):
            await expire(client, 5, "nobody")
        with pytest.raises(InvalidArgument, match="'looking' is not durable"):
            await expire(client, 5, "looking")
        with pytest.raises(InvalidArgument, match="-1 is no time: want milliseconds"):
            await expire(client, -1)
        with pytest.raises(TopicNotFound):
            await client.ask(c.ExpireMessages, "nowhere", "s", 5)
        topic_of(broker).subscriptions.recovery.unavailable["lost"] = ServiceNotReady("its bookies are away")
        with pytest.raises(ServiceNotReady, match="its bookies are away"):
            await expire(client, 5, "lost")


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
async def test_pending_messages_are_settled_and_come_no_more(type: str) -> None:
    """Rule 30: neither at once, nor after a nack, nor when their consumer leaves; and no cap counts them."""
    clock = FakeClock(1_000)
    async with running_broker(clock=clock, max_unacked_messages_per_consumer=4) as broker:
        client = FakeClient(broker)
        await client.producer()
        await published(client, clock, [1_000] * 4 + [5_000] * 3)
        await client.consumer(1, "s", type=type, permits=4)
        await client.received(4)
        # It waits for permits, to come again.
        client.frame(c.Redeliver(0, 1), c.encode_rows(c.ACK_ROW, [client.messages[0].row()]))
        await expire(client, 5_000)
        tracker = topic_of(broker).subscriptions["s"].dispatcher.core.tracker
        assert (tracker.replay_messages, tracker.unacked_messages) == (0, 0)
        client.frame(c.Flow(0, 1, 1_000))
        await client.received(7)
        await settle()
        assert tracker.unacked_messages == (3 if type in ("shared", "key_shared") else 0)
        topic_of(broker).subscriptions["s"].dispatcher.core.check()
        # What was delivered may be acknowledged all the same, and nothing of it comes again.
        await client.ack(client.messages[1].row())
        await client.ask(c.CloseConsumer, 1)
        other = FakeClient(broker)
        await other.consumer(1, "s", type=type)
        assert await other.received(3) == [b"4", b"5", b"6"]


async def test_a_mark_within_an_entry_settles_what_lies_before_it() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer(1, "s", type="shared")
        client.publish_batch([b"0", b"1", b"2", b"3"])
        await client.received(4)
        subscription = topic_of(broker).subscriptions["s"]
        await subscription.skip_to(at((*client.messages[0].id[:2], 3)))
        assert subscription.dispatcher.core.tracker.unacked_messages == 1
        await client.ask(c.CloseConsumer, 1)
        other = FakeClient(broker)
        await other.consumer(1, "s", type="shared")
        assert await other.received(1) == [b"3"]


async def test_acknowledged_ranges_beyond_the_time_are_kept() -> None:
    clock = FakeClock(1_000)
    async with running_broker(clock=clock) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer(1, "s", type="shared")
        await published(client, clock, [1_000, 1_000, 5_000, 5_000, 5_000])
        await client.received(5)
        await client.ack(client.messages[3].row())
        await expire(client, 2_000)
        assert mark(broker, "s")[1:] == (2, 0)
        await client.ack(client.messages[2].row())
        assert mark(broker, "s")[1:] == (4, 0), "the hole is still known"


async def test_during_a_seek_it_is_refused_and_a_mark_never_goes_back() -> None:
    clock = FakeClock(1_000)
    async with running_broker(clock=clock) as broker:
        client = await subscribed(broker, "s")
        await client.producer()
        await published(client, clock, [1_000, 2_000, 3_000])
        subscription = topic_of(broker).subscriptions["s"]
        gate: asyncio.Future[tuple[int, int, int]] = asyncio.get_running_loop().create_future()

        async def position() -> tuple[int, int, int]:
            return await gate

        seeking = asyncio.ensure_future(subscription.seek(position))
        await settle()
        with pytest.raises(TopicBusy, match="'s' is seeking already"):
            await expire(client, 9_000)
        gate.set_result((mark(broker, "s")[0], 2, 0))
        await seeking
        assert not (await expire(client, 2_500))["moved"], "the seek went further"
        assert mark(broker, "s")[1] == 2


async def test_an_unload_on_the_way_is_told_and_the_next_owner_expires() -> None:
    ledgers, metadata, clock = FakeLedgers(), MemoryMetadataStore(), FakeClock(1_000)
    async with running_broker(ledgers, metadata, clock) as broker:
        client = await subscribed(broker, "s")
        await client.producer()
        await published(client, clock, [1_000, 2_000])
        topic = topic_of(broker)
        subscription = topic.subscriptions.existing("s", durable=True)
        closing = asyncio.ensure_future(broker.unload(TOPIC, TopicNotServed("it moves")))
        await settle()
        with pytest.raises(MagnetarError) as refused:
            await topic.maintenance.expire_before(subscription, 9_000)
        assert refused.value.action.name in ("RETRY", "LOOK_UP")
        await closing
    async with running_broker(ledgers, metadata, clock) as broker:
        client = await subscribed(broker, "s")
        assert (await expire(client, 1_500))["messages"] == 1


async def test_an_entry_that_cannot_be_read_moves_nothing() -> None:
    ledgers, clock = FakeLedgers(), FakeClock(1_000)
    async with running_broker(ledgers, clock=clock, max_ledger_entries=4) as broker:
        client = await subscribed(broker, "s")
        await client.producer()
        await published(client, clock, [1_000, 2_000, 3_000, 4_000, 5_000])
        await settle()
        topic_of(broker).cache.clear()
        # The figures do without it, the search does not.
        ledgers.fail_read.extend([BookieUnavailable("away")] * 2)
        with pytest.raises(BookieUnavailable):
            await expire(client, 2_500)
        assert mark(broker, "s")[1] == 0
        assert (await expire(client, 2_500))["messages"] == 2


async def test_an_archived_ledger_expires_as_a_whole_and_is_not_read() -> None:
    archives, clock = MemoryArchives(), FakeClock(1_000)
    async with running_broker(clock=clock, archives=archives, max_ledger_entries=2) as broker:
        client = await subscribed(broker, "s")
        await client.producer()
        await published(client, clock, [1_000, 2_000, 3_000, 4_000, 5_000])
        await settle()
        await archives.archive(broker, 2, with_backlog=True)
        for before_ms, left in [(2_000, 5), (2_001, 3), (3_500, 3), (4_001, 1)]:
            await expire(client, before_ms)
            stats = (await client.ask(c.TopicStats, "orders"))["subscriptions"]["s"]
            assert stats["backlog_messages"] == left, before_ms
        assert archives.reads == []


# --- by TTL --------------------------------------------------------------------------------------------------------------


async def set_ttl(client: FakeClient, ttl_ms: int | None, **by_name: int) -> None:
    topic = client.broker.topics[str(TOPIC)]
    changes = {"message_ttl_ms": ttl_ms, "subscription_ttl_ms": by_name}
    await topic.change_policies(changes)


async def test_each_subscription_has_its_ttl() -> None:
    clock = FakeClock(0)
    async with running_broker(clock=clock) as broker:
        client = await subscribed(broker, "common", "short", "never")
        await client.consumer(9, "", durable=False, permits=0)
        await client.producer()
        await published(client, clock, [10_000, 20_000, 30_000])
        await set_ttl(client, 15_000, short=1_000, never=0)
        clock.now = 36_000
        await one_round(broker)
        left = {name: 3 - mark(broker, name)[1] for name in ("common", "short", "never")}
        assert left == {"common": 1, "short": 0, "never": 3}
        await one_round(broker)
        assert {name: 3 - mark(broker, name)[1] for name in left} == left
        client.frame(c.Flow(0, 9, 1_000))
        assert len(await client.received(3)) == 3, "a reader has no backlog that could expire"


async def test_who_is_further_ahead_holds_up_nobody_and_costs_nothing() -> None:
    ledgers, clock = FakeLedgers(), FakeClock(0)
    async with running_broker(ledgers, clock=clock, max_ledger_entries=3) as broker:
        client = await subscribed(broker, "ahead", "behind")
        await client.producer()
        await published(client, clock, [10_000, 20_000, 30_000, 40_000])
        ahead = topic_of(broker).subscriptions["ahead"]
        await ahead.skip_to(at(topic_of(broker).ledger.list.end))
        await set_ttl(client, 15_000)
        clock.now = 36_000
        await one_round(broker)
        assert mark(broker, "behind")[1] == 2
        assert mark(broker, "ahead") == topic_of(broker).ledger.list.end
        topic_of(broker).cache.clear()
        reads = ledgers.reads
        await expire(client, 21_000, "ahead")
        assert ledgers.reads == reads


async def test_a_thousand_subscriptions_share_one_look() -> None:
    ledgers, clock = FakeLedgers(), FakeClock(0)
    async with running_broker(ledgers, clock=clock) as broker:
        client = await subscribed(broker, *[f"s{number}" for number in range(1_000)])
        await client.producer()
        await published(client, clock, list(range(1_000, 65_000, 1_000)))
        await set_ttl(client, 10_000)
        topic_of(broker).cache.clear()
        reads = ledgers.reads
        clock.now = 50_000
        await one_round(broker)
        assert {mark(broker, f"s{number}")[1] for number in range(1_000)} == {39}
        assert ledgers.reads - reads <= 8, "the entry at the mark, and a binary search among 64"
        reads = ledgers.reads
        await one_round(broker)
        assert ledgers.reads - reads <= 1, (
            "the entry at the mark, which a read of the last round may have left"
        )


@in_virtual_time
async def test_rounds_come_every_five_minutes_and_not_without_a_ttl() -> None:
    clock = FakeClock(1_000)
    async with running_broker(clock=clock) as broker:
        client = await subscribed(broker, "s")
        await client.producer()
        await published(client, clock, [1_000, 1_000])
        clock.now = 1_000_000
        await asyncio.sleep(1_000)
        assert mark(broker, "s")[1] == 0
        await set_ttl(client, 5_000)
        await asyncio.sleep(301)
        assert mark(broker, "s")[1] == 2


async def test_a_damaged_cursor_or_a_lost_entry_costs_its_own_expiry_only() -> None:
    ledgers, clock = FakeLedgers(), FakeClock(1_000)
    async with running_broker(ledgers, clock=clock) as broker:
        client = await subscribed(broker, "s", "deleted", "slow")
        await client.producer()
        await published(client, clock, [1_000, 2_000, 3_000])
        await set_ttl(client, 1_000, slow=500)
        topic = topic_of(broker)
        topic.subscriptions.recovery.unavailable["lost"] = ServiceNotReady("its bookies are away")
        topic.cache.clear()
        clock.now = 3_500
        ledgers.fail_read.append(BookieUnavailable("away"))  # for the first TTL that is looked at
        await one_round(broker)
        assert sorted(mark(broker, name)[1] for name in ("s", "slow")) in ([0, 2], [0, 3])
        topic.subscriptions["deleted"]._closed = SubscriptionNotFound("deleted just now")
        await one_round(broker)
        assert (mark(broker, "s")[1], mark(broker, "slow")[1]) == (2, 2)
        topic.subscriptions["deleted"]._closed = None


async def test_a_clock_that_goes_back_expires_less_and_nothing_twice() -> None:
    clock = FakeClock(1_000)
    async with running_broker(clock=clock) as broker:
        client = await subscribed(broker, "s")
        await client.producer()
        await published(client, clock, [10_000, 20_000])
        await set_ttl(client, 5_000)
        clock.now = 16_000
        await one_round(broker)
        assert mark(broker, "s")[1] == 1
        await published(client, clock, [3_000])  # counts as of 20,000: append times never fall
        await one_round(broker)
        assert mark(broker, "s")[1] == 1
        clock.now = 26_000
        await one_round(broker)
        assert mark(broker, "s")[1] == 3
