"""What goes wrong in dispatch costs one entry or one subscription, visibly, and never its neighbours."""

import asyncio
import logging
from collections import deque
from typing import Any

import pytest

from magnetar.broker import Broker, Topic
from magnetar.broker.dispatch import subscription as subscription_module
from magnetar.broker.dispatch.core import message_counts
from magnetar.broker.dispatch.subscription import LOOKUPS_AT_ONCE
from magnetar.broker.listeners.native.ports import ConsumerPort
from magnetar.broker.log.reading import LedgerReading
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    BookieUnavailable,
    EntryDamaged,
    InvalidSetting,
    MagnetarError,
    TooManyRequests,
)
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers, FakeReader


def topic_of(broker: Broker) -> Topic:
    return broker.topics[str(TOPIC)]


async def stats_of(broker: Broker, name: str = "billing") -> dict[str, Any]:
    found: dict[str, Any] = (await FakeClient(broker).ask(c.TopicStats, "orders"))["subscriptions"][name]
    return found


async def publish(client: FakeClient, count: int, first: int = 0) -> None:
    """One message an entry."""
    answer = await client.producer(9)
    for number in range(first, first + count):
        before = len(client.receipts)
        client.publish(b"%d" % number, first=number, producer_id=9, epoch=answer["epoch"])
        await client.until(lambda before=before: len(client.receipts) > before)
    await client.ask(c.CloseProducer, 9)


class Damage:
    """Entries of topic ledgers that cannot be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: dict[int, MagnetarError] = {}
        read = FakeReader.read

        async def damaged(reader: FakeReader, first: int, last: int, *, max_bytes: int = 0) -> list[bytes]:
            await asyncio.sleep(0)
            if reader.ledger.properties["kind"] == "topic":
                if first in self.entries:
                    raise self.entries[first]
                last = min([last, *(entry - 1 for entry in self.entries if entry > first)])
            return await read(reader, first, last, max_bytes=max_bytes)

        monkeypatch.setattr(FakeReader, "read", damaged)


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch) -> Damage:
    return Damage(monkeypatch)


FAST: dict[str, Any] = {"retry_initial_ms": 1, "retry_max_ms": 2, "max_entry_read_attempts": 3}


# --- entries that cannot be read -------------------------------------------------------------------------------------


async def test_an_unreadable_entry_stops_its_subscription_visibly_and_is_delivered_once_it_can_be_read(
    damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(**FAST) as broker:
        client, tail = FakeClient(broker), FakeClient(broker)
        await publish(client, 4)
        damage.entries[1] = EntryDamaged("bit rot")
        await client.consumer()
        await tail.consumer(2, "other", start=("latest", None))
        async with asyncio.timeout(5):
            while not (await stats_of(broker))["unreadable_entries"]:
                await asyncio.sleep(0.002)
        assert client.values == [b"0"]
        (unreadable,) = (await stats_of(broker))["unreadable_entries"]
        assert (unreadable["entry"], unreadable["error"]) == (1, "bit rot")
        assert broker.figures()["unreadable_entries"] == 1
        assert [record for record in caplog.records if "cannot be read" in record.message]
        await publish(FakeClient(broker), 1, first=4)
        assert await tail.received(1) == [b"4"]
        damage.entries.clear()
        assert await client.received(5) == [b"%d" % number for number in range(5)]
        assert not (await stats_of(broker))["unreadable_entries"]
        assert broker.figures()["unreadable_entries"] == 0


async def test_consumers_are_notified_of_an_entry_that_is_there_and_cannot_be_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notified: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        ConsumerPort,
        "entry_unreadable",
        lambda self, epoch, key, error, *, lost: notified.append((key[1], lost)),
    )

    async def read(self: LedgerReading, ledger_id: int, first: int, *, max_bytes: int) -> list[bytes]:
        return [bytes(100)]

    async with running_broker(**FAST) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        monkeypatch.setattr(LedgerReading, "read", read)
        await client.consumer()
        async with asyncio.timeout(5):
            while not notified:
                await asyncio.sleep(0.002)
        assert notified == [(0, True)]


async def test_by_setting_what_is_lost_is_skipped_and_counted_and_stays_skipped(
    damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, unreadable_entry_policy="skip", **FAST) as broker:
        client = FakeClient(broker)
        await publish(client, 4)
        damage.entries.update({1: EntryDamaged("bit rot"), 2: EntryDamaged("bit rot")})
        await client.consumer()
        assert await client.received(2) == [b"0", b"3"]
        found = await stats_of(broker)
        assert (found["skipped_entries"], found["unreadable_entries"]) == (2, [])
        assert broker.figures()["skipped_entries_total"] == 2
        assert len([record for record in caplog.records if "skips entry" in record.message]) == 2
        await client.ack(*[message.row() for message in client.messages])
        assert topic_of(broker).subscriptions["billing"].cursor.state.mark_delete[1] == 4
        metadata = broker.metadata
    damage.entries.clear()
    async with running_broker(ledgers, metadata, **FAST) as broker:
        client = FakeClient(broker)
        await client.consumer()
        await settle()
        assert not client.messages


async def test_an_error_that_may_pass_is_never_skipped(damage: Damage) -> None:
    async with running_broker(unreadable_entry_policy="skip", **FAST) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        damage.entries[0] = BookieUnavailable("away")
        await client.consumer()
        async with asyncio.timeout(5):
            while not (await stats_of(broker))["unreadable_entries"]:
                await asyncio.sleep(0.002)
        damage.entries.clear()
        assert await client.received(2) == [b"0", b"1"]


async def test_a_damaged_entry_that_was_nacked_holds_up_neither_other_redeliveries_nor_catch_up(
    damage: Damage,
) -> None:
    async with running_broker(**FAST) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await publish(client, 3)
        await client.received(3)
        damage.entries[0] = EntryDamaged("bit rot")
        client.frame(c.Redeliver(0, 1), c.encode_rows(c.ACK_ROW, [m.row() for m in client.messages]))
        await client.received(5)
        assert client.values[3:] == [b"1", b"2"]
        late = FakeClient(broker)
        await publish(late, 1, first=3)
        await client.received(6)
        assert client.values[5] == b"3"


def test_the_policy_is_one_of_two() -> None:
    from magnetar.broker import BrokerSettings

    with pytest.raises(InvalidSetting, match="'stop' or 'skip'"):
        BrokerSettings(unreadable_entry_policy="ignore")


async def test_a_defect_in_a_read_is_a_failed_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, retry_initial_ms=1) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        read = LedgerReading.read
        broken = deque([ZeroDivisionError()])

        async def fails_once(self: LedgerReading, *given: Any, **named: Any) -> Any:
            if broken:
                raise broken.popleft()
            return await read(self, *given, **named)

        monkeypatch.setattr(LedgerReading, "read", fails_once)
        await client.consumer()
        assert await client.received(2) == [b"0", b"1"]


# --- one subscription and its neighbours -----------------------------------------------------------------------------


async def test_an_exception_in_one_dispatch_costs_no_other_subscription_and_no_budget(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(retry_max_ms=20) as broker:
        clients = [FakeClient(broker) for _ in range(3)]
        for number, client in enumerate(clients):
            await client.consumer(1, f"s{number}")
        topic = topic_of(broker)
        core = topic.subscriptions["s1"].dispatcher.core
        poll = core.poll
        broken = deque([ZeroDivisionError()])

        def fails_once() -> Any:
            if broken:
                raise broken.popleft()
            return poll()

        monkeypatch.setattr(core, "poll", fails_once)
        await publish(FakeClient(broker), 1)
        await settle()
        assert clients[0].values == clients[2].values == [b"0"]
        assert topic.publish_budget.used == 0
        assert broker.publish_budget.used == 0
        assert "dispatch failed" in caplog.text
        assert broker.figures()["dispatch_failures_total"] == 1
        assert await clients[1].received(1) == [b"0"]  # it is tried again by itself


async def test_a_port_that_fails_costs_its_consumer_and_the_message_goes_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_broker() as broker:
        broken, sound = FakeClient(broker), FakeClient(broker)
        await broken.consumer(1, type="shared")
        await sound.consumer(1, type="shared", permits=0)

        def fail(delivery: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(ConsumerPort, "deliver", lambda self, d: fail(d))
        await publish(FakeClient(broker), 1)
        await settle()
        monkeypatch.undo()
        assert any(isinstance(frame, c.CloseConsumer) for frame, _ in broken.frames)
        sound.frame(c.Flow(0, 1, 10))
        assert await sound.received(1) == [b"0"]


async def test_nacks_past_the_end_of_an_entry_or_of_what_was_delivered_are_nothing() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        await client.consumer(permits=1)
        await client.received(1)
        ledger, entry, _ = client.messages[0].id
        rows = [
            (ledger, entry, 1, 500),
            (ledger, entry, 70, 80),
            (ledger, entry + 1, 0, 0),
            (ledger, entry, 0, 5),
        ]
        client.frame(c.Redeliver(0, 1), c.encode_rows(c.ACK_ROW, rows))
        client.frame(c.Flow(0, 1, 10))
        await client.received(3)
        assert sorted((m.value, m.redelivered) for m in client.messages) == [(b"0", 0), (b"0", 1), (b"1", 0)]
        await settle()
        assert (await stats_of(broker))["redelivery_messages"] == 0


async def test_readers_know_the_slowest_position_and_the_cache_drops_what_all_have_passed() -> None:
    async with running_broker() as broker:
        fast, slow = FakeClient(broker), FakeClient(broker)
        await fast.consumer(1, "fast")
        await slow.consumer(1, "slow", permits=2)
        await publish(FakeClient(broker), 5)
        topic = topic_of(broker)
        topic.readers.check()
        assert len(broker.cache) == 3
        slow.frame(c.Flow(0, 1, 2))
        await settle()
        topic.readers.check()
        assert len(broker.cache) == 1
        slow.handler.connection_closed(None)
        topic.readers.check()
        assert len(broker.cache) == 0


# --- caps ------------------------------------------------------------------------------------------------------------


async def test_a_consumer_that_never_acknowledges_is_blocked_at_its_cap_and_says_so() -> None:
    async with running_broker(max_unacked_messages_per_consumer=4) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared", permits=1000)
        await publish(FakeClient(broker), 10)
        await settle()
        assert len(client.messages) == 4
        (consumer,) = (await stats_of(broker))["consumers"]
        assert (consumer["unacked_messages"], consumer["blocked_on_unacked_messages"]) == (4, True)
        await client.ack(client.messages[0].row())
        await settle()
        assert len(client.messages) == 4
        await client.ack(client.messages[1].row())
        await client.received(6)


async def test_a_subscription_has_a_cap_of_its_own() -> None:
    async with running_broker(max_unacked_messages_per_subscription=4) as broker:
        clients = [FakeClient(broker) for _ in range(2)]
        for client in clients:
            await client.consumer(type="shared", permits=1000)
        await publish(FakeClient(broker), 10)
        await settle()
        assert sum(len(client.messages) for client in clients) == 4
        assert (await stats_of(broker))["blocked_on_unacked_messages"] is True
        for client in clients:
            await client.ack(client.messages[0].row())
        await settle()
        assert sum(len(client.messages) for client in clients) == 6
        assert (await stats_of(broker))["unacked_messages"] == 4


async def test_an_exclusive_consumer_has_no_cap_but_its_pile_of_nacks_has() -> None:
    async with running_broker(
        max_unacked_messages_per_consumer=2, max_unacked_messages_per_subscription=3
    ) as broker:
        client = FakeClient(broker)
        await publish(client, 8)
        await client.consumer(permits=8)
        await client.received(8)
        core = topic_of(broker).subscriptions["billing"].dispatcher.core
        for message in client.messages[1::2]:
            client.frame(c.Redeliver(0, 1), c.encode_rows(c.ACK_ROW, [message.row()]))
            assert core.tracker.replay_messages <= 3
        client.frame(c.Flow(0, 1, 100))  # it went back to the mark-delete position instead
        await client.received(16)
        assert client.values[8:] == [b"%d" % number for number in range(8)]


# --- reads, lookups, cancellation ------------------------------------------------------------------------------------


async def test_a_read_that_ends_after_its_consumer_left_keeps_no_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()
    read = LedgerReading.read

    async def slow(self: LedgerReading, *given: Any, **named: Any) -> Any:
        found = await read(self, *given, **named)
        await gate.wait()
        return found

    monkeypatch.setattr(LedgerReading, "read", slow)
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, 3)
        await client.consumer()
        await settle()
        client.handler.connection_closed(None)
        gate.set()
        await settle()
        assert broker._read_budget.used == 0


async def test_a_cancelled_close_stays_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """`suppress(CancelledError)` around an awaited task would take the caller's cancellation for the task's."""
    release = asyncio.Event()

    async def stubborn(self: LedgerReading, *_given: Any, **_named: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()

    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, 1)
        monkeypatch.setattr(LedgerReading, "read", stubborn)
        await client.consumer()
        await settle()
        subscription = topic_of(broker).subscriptions["billing"]
        closing = asyncio.get_running_loop().create_task(
            subscription.close(MagnetarError("over"), fenced=True)
        )
        await settle()
        closing.cancel()
        await settle()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await closing


async def test_acknowledgements_that_wait_for_a_lookup_are_bounded_and_what_is_dropped_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(subscription_module, "MAX_LOOKUP_ROWS", 2)
    gate = asyncio.Event()
    count = LedgerReading.read_message_count

    async def slow(self: LedgerReading, key: Any) -> int:
        await gate.wait()
        return await count(self, key)

    monkeypatch.setattr(LedgerReading, "read_message_count", slow)
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, 5)
        await client.consumer(permits=0)
        ledger = topic_of(broker).ledger.list.ledgers[0].ledger_id
        rows = [(ledger, entry, 0, 0) for entry in range(5)]
        kept = client.ack(*rows[:2])
        with pytest.raises(TooManyRequests):
            await client.ack(rows[2])
        for row in rows[3:]:  # without a receipt
            client.frame(c.Ack(0, 1, False), c.encode_rows(c.ACK_ROW, [row]))
        gate.set()
        await kept
        await settle()
        assert len([record for record in caplog.records if "more are dropped" in record.message]) == 1
        assert "2 acknowledgements were dropped" in caplog.text
        client.frame(c.Flow(0, 1, 10))
        assert await client.received(3) == [b"2", b"3", b"4"]


@pytest.mark.parametrize("durable", [False, True])
async def test_what_is_dropped_is_logged_if_it_comes_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, durable: bool
) -> None:
    async def slow(self: LedgerReading, key: Any) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(LedgerReading, "read_message_count", slow)
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, 1)
        await client.consumer(permits=0, durable=durable)
        ledger = topic_of(broker).ledger.list.ledgers[0].ledger_id
        client.frame(c.Ack(0, 1, False), c.encode_rows(c.ACK_ROW, [(ledger, 0, 0, 0)]))
        await settle()
        client.handler.connection_closed(
            None
        )  # a reader's subscription ends with it, the other one with the broker
        await settle()
    assert ("1 acknowledgements were dropped" in caplog.text) == durable


@pytest.mark.parametrize("type", ["exclusive", "shared", "key_shared"])
async def test_rule_48_acknowledgements_of_more_than_is_remembered_stop_nobody(
    monkeypatch: pytest.MonkeyPatch, type: str
) -> None:
    monkeypatch.setattr(message_counts, "MAX_MESSAGE_COUNTS", 2)
    gate, waiting = asyncio.Event(), 0
    count = LedgerReading.read_message_count

    async def slow(self: LedgerReading, key: Any) -> int:
        nonlocal waiting
        waiting += 1
        await gate.wait()
        return await count(self, key)

    monkeypatch.setattr(LedgerReading, "read_message_count", slow)
    async with running_broker() as broker:
        client, other = FakeClient(broker), FakeClient(broker)
        await publish(other, 100)
        await client.consumer(type=type)
        await client.received(100)
        topic = topic_of(broker)
        monkeypatch.setattr(topic.log, "message_count", lambda key: None)  # none is in memory
        client.ack(*[message.row() for message in client.messages])
        await settle()
        assert waiting == LOOKUPS_AT_ONCE
        # The others get theirs meanwhile.
        await publish(other, 1)
        await client.received(101)
        # What is acknowledged is not delivered again, though its consumer leaves.
        client.handler.connection_closed(None)
        again = FakeClient(broker)
        await again.consumer(type=type)
        await settle()
        assert again.values == []
        gate.set()
        await again.received(1)
        await settle()
        assert again.values == [client.values[100]]
        assert topic.subscriptions["billing"].cursor.state.mark_delete[1] == 100
