"""Rules 23 to 25: taking a topic over, write failures, trimming."""

import asyncio
from itertools import accumulate
from typing import Any

import pytest

from magnetar.broker import Broker, BrokerSettings, Topic
from magnetar.broker.log.appending import State
from magnetar.broker.log.ledger_list import LedgerList
from magnetar.broker.log.records import LedgerInfo, TopicRecord, topic_path
from magnetar.proto import commands as c
from magnetar.proto.entry import Entry
from magnetar.proto.errors import (
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    MessageTooLarge,
    NotEnoughBookies,
    RequestTimeout,
    TopicBusy,
    TopicNotFound,
    TopicNotServed,
)
from magnetar.proto.ids import TopicName
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from support.broker_kit import TOPIC, FakeClient, FakeClock, running_broker, settle
from support.fake_ledger import FakeLedgers, FakeReader, FakeWriter
from support.memory_metadata import MemoryMetadataStore
from support.sim import SimLoop
from support.virtual_time import in_virtual_time

HOUR_MS = 3_600_000


def loaded(broker: Broker, name: str = "orders") -> Topic:
    return broker.topics[str(TopicName.parse(name))]


async def record_of(metadata: Any) -> TopicRecord:
    stored = await metadata.get(topic_path(TOPIC))
    return TopicRecord.decode(stored.value, "")


async def read_all(broker: Broker, count: int) -> list[bytes]:
    reader = FakeClient(broker)
    await reader.consumer(7, "", durable=False, permits=1 << 20)
    return await reader.received(count)


async def crash(broker: Broker) -> None:
    """What a killed broker leaves: nothing written. Its tasks are cancelled so that the test ends clean."""
    for topic in list(broker.topics.values()):
        topic.ledger.fence(TopicNotServed("crash"))
    await broker.close()


async def test_an_idle_topic_has_no_ledger() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        await FakeClient(broker).producer()
        await FakeClient(broker).consumer()
        assert not ledgers.ledgers
        assert loaded(broker).ledger.appending.state is State.IDLE


async def test_rule_23_a_take_over_whose_request_was_lost_has_not_fenced_the_former_owner() -> None:
    """Regression, found by the simulation: the list was to stay as it is, and that it did passed for success."""
    metadata = MemoryMetadataStore()
    async with running_broker(FakeLedgers(), metadata) as old, running_broker(FakeLedgers(), metadata) as new:
        await FakeClient(old).producer()  # makes the topic, which is idle
        before = await metadata.get(topic_path(TOPIC))
        assert before is not None
        put, lost = metadata.put, [topic_path(TOPIC)]

        async def losing(path: str, value: bytes, *, version: int) -> int:
            if path in lost:
                lost.remove(path)
                raise RequestTimeout("the request is lost")
            return await put(path, value, version=version)

        metadata.put = losing  # type: ignore[method-assign]
        with pytest.raises(RequestTimeout):
            await new.topic(TOPIC, create=False)
        assert not lost
        assert await metadata.get(topic_path(TOPIC)) == before


async def test_rule_23_taking_over_recovers_the_last_ledger_and_fences_the_former_owner() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as old, running_broker(ledgers, metadata) as new:
        client = FakeClient(old)
        await client.producer()
        client.publish(b"a", b"b")
        await client.confirmed(2)
        assert await read_all(new, 2) == [b"a", b"b"]
        assert "recover 0" in ledgers.log
        client.publish(b"c", first=2)  # the former owner is fenced by the ledger
        await client.until(lambda: client.failures)
        assert client.failures[0].sequence_id == 2
        assert client.failures[0].code == TopicNotServed.code
        assert not old.topics
        (info,) = (await record_of(metadata)).ledgers
        assert (info.entries, info.messages, info.closed) == (1, 2, True)
        assert info.first_append_ms == info.last_append_ms == 1_000_000


@pytest.mark.parametrize("trimmed", [True, False])
async def test_rule_23_the_last_ledger_is_deleted_while_a_topic_is_taken_over(trimmed: bool) -> None:
    """Regression, found by the simulation: the owner lives, and trims it; nothing is wrong with the topic."""
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as old, running_broker(ledgers, metadata) as new:
        client = FakeClient(old)
        await client.producer()
        client.publish(b"a")
        await client.confirmed(1)
        opened = ledgers.open

        async def late(ledger_id: int, *, recover: bool) -> Any:
            ledgers.open = opened  # type: ignore[method-assign]
            stored = await metadata.get(topic_path(TOPIC))
            assert stored is not None
            record = TopicRecord.decode(stored.value, "")
            if trimmed:
                record.ledgers.clear()
                await metadata.put(topic_path(TOPIC), record.encode(), version=stored.version)
            del ledgers.ledgers[ledger_id]
            return await opened(ledger_id, recover=recover)

        ledgers.open = late  # type: ignore[method-assign]
        with pytest.raises(TopicBusy if trimmed else LedgerNotFound):
            await new.topic(TOPIC, create=False)
        await crash(old)


async def test_rule_23_a_version_conflict_fences_for_good() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as old, running_broker(ledgers, metadata) as new:
        client = FakeClient(old)
        await client.producer()
        topic = loaded(old)
        await new.topic(TOPIC, create=False)  # an idle topic: there is no ledger that could be fenced
        client.publish(b"a")
        await client.until(lambda: client.failures)
        assert topic.ledger.appending.state is State.FENCED
        assert isinstance(client.frames[-1][0], c.CloseProducer)
        assert ledgers.topic_ledgers() == []  # the one that lost the race is deleted
        await settle()
        assert not (await record_of(metadata)).ledgers


async def test_rule_23_two_failovers_keep_everything_in_order() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    for number in range(4):
        async with running_broker(ledgers, metadata) as broker:
            client = FakeClient(broker)
            answer = await client.producer()
            client.publish(b"%d" % number, b"%d'" % number, epoch=answer["epoch"])
            await client.confirmed(2)
            if number % 2:
                await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        assert await read_all(broker, 8) == [b"0", b"0'", b"1", b"1'", b"2", b"2'", b"3", b"3'"]
        topic = loaded(broker)
        assert [info.first_index for info in topic.ledger.list.ledgers] == [0, 2, 4, 6]
        assert topic.ledger.list.message_count == 8


async def test_rule_24_after_a_failure_the_old_ledger_is_closed_before_anything_is_appended_again() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, max_outstanding_entries=3) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        writer = ledgers.writers[0]
        writer.fail_after = 1
        ledgers.hold = True
        ledgers.close_gate = asyncio.Event()
        for number in range(1, 6):
            client.publish(b"%d" % number, first=number)
            await settle(5)
        assert len(writer.waiting) == 3
        ledgers.confirm()
        await settle()
        assert ledgers.log[-1] == "closing 0"  # nothing else is created while it is not closed
        assert list(ledgers.ledgers) == [0]
        ledgers.hold = False
        ledgers.close_gate.set()
        await client.confirmed(6)
        assert ledgers.log.index("closed 0") < ledgers.log.index("create 1")
        assert sum(row[1] for row in client.receipts) == 6
        again = [Entry(data, LEDGER_ENTRY_HEADER_BYTES) for data in ledgers.ledgers[1].entries]
        indexes = [entry.first_index for entry in again]  # numbered anew in the next ledger
        assert indexes == [0, *accumulate(entry.message_count for entry in again)][:-1]
        assert await read_all(broker, 6) == [b"0", b"1", b"2", b"3", b"4", b"5"]
        assert (await client.ask(c.TopicStats, "orders"))["next_index"] == 6


async def test_rule_24_late_callbacks_of_the_old_ledger_are_ignored() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        ledgers.hold = True
        client.publish(b"0")
        await settle()
        client.publish(b"1", first=1)
        await settle()
        writer = ledgers.writers[0]
        late = writer.waiting[1]
        writer.fail_after = 0
        ledgers.confirm(1)
        await settle()
        late[2](late[0], late[1], None)  # the second append of the old ledger claims success
        late[2](late[0], late[1], MagnetarError("or failure"))
        await settle()
        assert not client.receipts
        ledgers.hold = False
        ledgers.confirm()
        await client.confirmed(2)
        assert {row[2] for row in client.receipts} == {1}


async def test_rule_24_what_a_recovered_ledger_holds_is_confirmed_and_not_appended_again() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        writer = ledgers.writers[0]
        writer.fail_after, writer.store_failed = 1, True  # reaches the disk, but nobody says so
        ledgers.fail_close.append(NotEnoughBookies("close fails, so recovery settles the end"))
        client.publish(b"1", first=1)
        await client.confirmed(2)
        assert client.receipts[-1] == (1, 1, 0, 1, 0)
        client.publish(b"2", first=2)
        await client.confirmed(3)
        assert await read_all(broker, 3) == [b"0", b"1", b"2"]
        await settle()
        reader = FakeClient(broker)
        await reader.consumer(permits=100)
        assert await reader.received(3) == [b"0", b"1", b"2"]


async def test_a_ledger_that_cannot_be_created_is_tried_again() -> None:
    ledgers = FakeLedgers()
    ledgers.fail_create.extend([NotEnoughBookies("none"), NotEnoughBookies("none")])
    async with running_broker(ledgers, retry_initial_ms=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"a")
        await client.confirmed(1)


@in_virtual_time
async def test_rollover_by_entries_size_and_age() -> None:
    cases: list[dict[str, Any]] = [
        {"max_ledger_entries": 2},
        {"max_ledger_bytes": 150},
        {"max_ledger_age_ms": 5},
    ]
    for settings in cases:
        ledgers = FakeLedgers()
        async with running_broker(ledgers, **settings) as broker:
            client = FakeClient(broker)
            await client.producer()
            for number in range(6):
                client.publish(b"%d" % number, first=number)
                await client.confirmed(number + 1)
                await asyncio.sleep(0.006)
            assert len(ledgers.topic_ledgers()) >= 3
            assert await read_all(broker, 6) == [b"%d" % number for number in range(6)]
            list_ = loaded(broker).ledger.list
            assert list_.message_count == 6
            assert sum(info.messages for info in list_.ledgers) == 6


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS, 10 * 365 * 24 * HOUR_MS])
async def test_a_wall_clock_that_was_wrong_for_a_moment_rolls_no_ledger_over(jump_ms: int) -> None:
    """Append times stay ahead until the clock has caught up: the age of a ledger is not found from them."""
    ledgers, clock, metadata = FakeLedgers(), FakeClock(10**12), MemoryMetadataStore()
    async with running_broker(ledgers, metadata, clock=clock, max_ledger_age_ms=HOUR_MS // 2) as broker:
        client = FakeClient(broker)
        await client.producer()
        for number in range(4):
            clock.now += {1: jump_ms, 2: -jump_ms}.get(number, 10)
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
            assert not loaded(broker).ledger.appending.roll_if_due()
        assert ledgers.topic_ledgers() == [0]
        times = [Entry(data, LEDGER_ENTRY_HEADER_BYTES).append_time_ms for data in ledgers.ledgers[0].entries]
        assert times == sorted(times)
    async with running_broker(ledgers, metadata, clock=clock, max_ledger_age_ms=HOUR_MS // 2) as broker:
        client = FakeClient(broker)
        await client.producer()
        for number in range(4):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
        assert ledgers.topic_ledgers() == [0, 1], (
            "the next owner goes on with the append times of the one before"
        )


async def test_a_degraded_ledger_is_left_when_there_are_bookies_enough_again() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, ledger_change_spread_ms=0) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        client.publish(b"1", first=1)
        await client.confirmed(2)
        assert ledgers.topic_ledgers() == [0], "while there are not, it goes on"
        ledgers.writers[0].replaceable = True
        client.publish(b"2", first=2)
        await client.confirmed(3)
        await settle()
        assert ledgers.ledgers[0].closed, "the next append is its last"
        client.publish(b"3", first=3)
        await client.confirmed(4)
        assert [len(ledgers.ledgers[number].entries) for number in (0, 1)] == [3, 1]
        assert await read_all(broker, 4) == [b"0", b"1", b"2", b"3"]
        ledgers.writers[1].replaceable = True  # nobody publishes: the maintenance round sees to it
        assert loaded(broker).ledger.appending.roll_if_due()
        await settle()
        assert ledgers.ledgers[1].closed
        assert ledgers.topic_ledgers() == [0, 1]


class LoopClock:
    """A wall clock that runs with the loop's, which is virtual here."""

    def now_ms(self) -> int:
        """The time."""
        return int(asyncio.get_running_loop().time() * 1000)


DAY_S = 86_400


def test_a_trickle_makes_a_ledger_every_four_hours() -> None:
    """A message a minute for a day, with the settings as they are by default; then a day of nothing."""
    loop = SimLoop(seed=1, limit_seconds=3 * DAY_S)
    try:
        loop.run(trickle())
    finally:
        loop.close()


async def trickle() -> None:
    ledgers, defaults = FakeLedgers(), BrokerSettings()
    async with running_broker(
        ledgers, clock=LoopClock(), min_ledger_age_ms=defaults.min_ledger_age_ms
    ) as broker:
        client = FakeClient(broker)
        await client.producer()
        for number in range(DAY_S // 60):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
            await asyncio.sleep(60)
        assert 6 <= len(ledgers.topic_ledgers()) <= 7
        made = len(ledgers.topic_ledgers())
        await asyncio.sleep(DAY_S)
        assert len(ledgers.topic_ledgers()) == made, "an idle topic makes none"
        assert all(ledger.closed for ledger in ledgers.ledgers.values())
        client.publish(b"last", first=DAY_S)
        await client.confirmed(DAY_S // 60 + 1)
        assert len(ledgers.topic_ledgers()) == made + 1


@in_virtual_time
async def test_a_full_ledger_is_left_at_the_minimum_age_or_at_its_hard_limit() -> None:
    ledgers = FakeLedgers()
    async with running_broker(
        ledgers, clock=LoopClock(), max_ledger_entries=10, min_ledger_age_ms=600_000
    ) as broker:
        client = FakeClient(broker)
        await client.producer()

        async def publish(first: int, end: int) -> None:
            for number in range(first, end):
                client.publish(b"%d" % number, first=number)
                await client.confirmed(number + 1)

        await publish(0, 39)
        assert not ledgers.ledgers[0].closed
        await publish(39, 41)
        assert [len(ledgers.ledgers[number].entries) for number in ledgers.topic_ledgers()] == [40, 1]
        await publish(
            41, 51
        )  # full, and nobody publishes any more: the round after the minimum age closes it
        await asyncio.sleep(599 - 120)
        assert not ledgers.ledgers[1].closed
        await asyncio.sleep(241)
        assert ledgers.ledgers[1].closed


async def test_a_topic_that_is_fenced_while_it_rolls_over_stays_fenced() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        ledger = loaded(broker).ledger
        ledgers.close_gate = asyncio.Event()
        editing = asyncio.ensure_future(ledger.appending.edit_closed(ledger.list.commit))
        await settle()
        assert ledger.appending.state is State.ROLLING
        ledger.fence(TopicNotServed("by a cursor"))
        ledgers.close_gate.set()
        with pytest.raises(TopicNotServed):
            await editing
        assert ledger.appending.state in (State.FENCED, State.CLOSED)


async def test_closing_a_ledger_does_not_swallow_the_cancellation_of_its_caller() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, ledger_change_spread_ms=0) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        ledger = loaded(broker).ledger
        ledgers.writers[0].replaceable = True
        ledgers.close_gate = asyncio.Event()
        assert ledger.appending.roll_if_due()
        await settle()
        closing = asyncio.ensure_future(ledger.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        ledgers.close_gate.set()


async def test_a_list_that_cannot_be_stored_lets_go_of_nothing() -> None:
    """Else an empty ledger would be deleted that the stored list still names, and the topic could not be loaded again."""
    metadata = MemoryMetadataStore()
    ledgers = LedgerList(TOPIC, metadata)
    await ledgers.load(create_ms=1)
    empty, filled = LedgerInfo(1, 0), LedgerInfo(2, 0, entries=1, messages=1)
    await ledgers.commit(append=[empty, filled])
    empty.closed = filled.closed = True
    put = metadata.put

    async def refused(*_: Any, **__: Any) -> int:
        raise MagnetarError("not now")

    metadata.put = refused  # type: ignore[method-assign]
    with pytest.raises(MagnetarError, match="not now"):
        await ledgers.commit()
    assert ledgers.record.trimmed == []
    metadata.put = put  # type: ignore[method-assign]
    await ledgers.commit()
    assert (ledgers.ledgers, ledgers.record.trimmed) == ([filled], [1])
    assert (await record_of(metadata)).trimmed == [1]


async def test_an_edit_that_has_begun_is_done_though_its_caller_leaves() -> None:
    async with running_broker() as broker:
        ledger = (await broker.topic(TOPIC, create=True)).ledger
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def change() -> None:
            begun.set()
            await go_on.wait()
            await ledger.list.commit(properties={"edited": "yes"})

        editing = asyncio.ensure_future(ledger.changes.edit(change))
        await begun.wait()
        for _ in range(2):
            editing.cancel()
            await asyncio.sleep(0)
        assert not editing.done()
        go_on.set()
        await asyncio.wait([editing])
        assert editing.cancelled()
        assert ledger.list.record.properties == {"edited": "yes"}


async def test_rule_25_nothing_is_dispatched_before_it_is_confirmed() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        ledgers.hold = True
        client.publish(b"a")
        await settle()
        assert ledgers.ledgers[0].entries
        assert not client.messages
        ledgers.confirm()
        assert await client.received(1) == [b"a"]


async def test_rule_25_trimming_waits_for_the_slowest_durable_cursor_and_spares_the_open_ledger() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata, max_ledger_entries=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer(1, "fast")
        await client.consumer(2, "slow", permits=0)
        for number in range(4):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
        await client.received(4)
        for message in client.messages:
            await client.ask(c.Ack, 1, payload=c.encode_rows(c.ACK_ROW, [message.row()]))
        loaded(broker).maintain()
        await settle()
        assert len(ledgers.topic_ledgers()) >= 4
        topic_ids = [info.ledger_id for info in loaded(broker).ledger.list.ledgers]
        # The slow one is past the first two: exactly these go, from the list before they are deleted.
        row = (topic_ids[1], 0, 0, 0)
        await client.ask(c.Ack, 2, True, payload=c.encode_rows(c.ACK_ROW, [row]))
        loaded(broker).maintain()
        await settle()
        assert [info.ledger_id for info in (await record_of(metadata)).ledgers] == topic_ids[2:]
        assert topic_ids[0] in ledgers.deleted
        assert topic_ids[1] in ledgers.deleted
        assert topic_ids[2] not in ledgers.deleted
        # Both are done with everything: the open ledger stays.
        last = client.messages[-1].id
        await client.ask(c.Ack, 2, True, payload=c.encode_rows(c.ACK_ROW, [(*last, last[2])]))
        client.publish(b"4", first=4)
        await client.confirmed(5)
        await settle()
        assert loaded(broker).ledger.list.ledgers


async def test_rule_25_a_crash_between_list_and_deletion_leaves_no_orphan() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata, max_ledger_entries=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        client.publish(b"a")
        await client.received(1)
        client.publish(b"b", first=1)
        await client.received(2)
        ledgers.fail_delete.extend([MagnetarError("crash")] * 10)
        await client.ack(*[message.row() for message in client.messages])
        loaded(broker).maintain()
        await settle()
        first = client.messages[0].id[0]
        assert first in ledgers.ledgers
        await crash(broker)
    ledgers.fail_delete.clear()
    async with running_broker(ledgers, metadata) as broker:
        await broker.topic(TOPIC, create=False)
        assert first not in ledgers.ledgers


async def test_nobody_subscribed_keeps_everything() -> None:
    async with running_broker(max_ledger_entries=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        for number in range(3):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
        loaded(broker).maintain()
        await settle()
        assert await read_all(broker, 3) == [b"0", b"1", b"2"]


async def test_delete_removes_every_trace_and_is_finished_after_a_crash() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        client.publish(b"a")
        await client.received(1)
        with pytest.raises(MagnetarError, match="force"):
            await client.ask(c.DeleteTopic, "orders")
        await client.ack(client.messages[0].row())
        ledgers.fail_delete.append(MagnetarError("crash"))
        with pytest.raises(MagnetarError):
            await client.ask(c.DeleteTopic, "orders", True)
        assert {type(frame) for frame, _ in client.frames} >= {c.CloseProducer, c.CloseConsumer}
        assert not await broker.exists(TOPIC)
    async with running_broker(ledgers, metadata) as broker:
        with pytest.raises(TopicNotFound):
            await broker.topic(TOPIC, create=False)
        assert not ledgers.ledgers
        assert await metadata.children("/topics/public/default/persistent") == []
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"new")
        assert await read_all(broker, 1) == [b"new"]


async def test_a_fenced_ledger_fences_the_topic() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"a")
        await client.confirmed(1)
        writer = ledgers.writers[0]
        ledgers.hold = True
        client.publish(b"b", first=1)
        await settle()
        entry_id, entry, confirmed = writer.waiting.popleft()
        confirmed(entry_id, entry, LedgerFenced("by another owner"))
        await client.until(lambda: client.failures)
        assert client.failures[0].sequence_id == 1
        client.publish(b"c", first=2)
        await settle()
        assert len(client.receipts) == 1
        ledgers.hold = False
        answer = await client.producer(name=None)  # the topic is loaded again, and recovered
        client.publish(b"d", epoch=answer["epoch"])
        await client.confirmed(2)


class FailingRecovery(FakeLedgers):
    """Recoveries that fence the ledger, and then fail."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.recoveries = 0

    async def open(self, ledger_id: int, *, recover: bool) -> FakeReader:
        if recover:
            self.recoveries += 1
            if self.recoveries <= self.failures:
                self.ledgers[ledger_id].fenced = True
                raise RequestTimeout("in recovery")
        return await super().open(ledger_id, recover=recover)


async def test_rule_24_a_topic_is_not_fenced_by_its_own_recovery_that_failed_at_first() -> None:
    """The next attempt asked the writer again, which the recovery had fenced: the topic gave itself up to nobody."""
    ledgers = FailingRecovery(2)
    async with running_broker(ledgers, retry_initial_ms=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        writer = ledgers.writers[0]
        writer.fail_after = 1
        ledgers.fail_close.append(NotEnoughBookies("too few to close"))
        client.publish(b"1", first=1)
        await client.confirmed(2)
        assert ledgers.recoveries == 3


class Strict(FakeLedgers):
    """Bookies that take no entry of this topic."""

    async def create(self, **named: Any) -> FakeWriter:
        writer = await super().create(**named)
        if named["properties"]["kind"] == "topic":
            writer.failing = MessageTooLarge("raise [bookie] max_entry_bytes")
        return writer


async def test_an_entry_that_no_bookie_takes_does_not_roll_ledgers_for_ever() -> None:
    ledgers = Strict()
    async with running_broker(ledgers, retry_initial_ms=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        topic = loaded(broker)
        client.publish(b"too large for bookies")
        await settle(200)
        assert len([line for line in ledgers.log if line.startswith("create")]) <= 2
        assert topic.ledger.appending.state in (State.FENCED, State.CLOSED)
        assert not client.receipts


class Failing(FakeLedgers):
    """Ledgers that can be made and not written, `times` in a row: bookies that are there, and refuse at once."""

    times = 0

    async def create(self, **named: Any) -> FakeWriter:
        writer = await super().create(**named)
        if named["properties"]["kind"] == "topic" and self.times:
            self.times -= 1
            writer.failing = NotEnoughBookies("refused")
        return writer


async def test_ledgers_that_fail_at_once_are_made_at_a_bounded_rate() -> None:
    ledgers = Failing()
    ledgers.times = 6
    async with running_broker(ledgers, retry_initial_ms=2) as broker:
        client = FakeClient(broker)
        await client.producer()
        loop = asyncio.get_running_loop()
        began = loop.time()
        client.publish(b"0")
        await client.confirmed(1)
        assert loop.time() - began > 0.9 * sum(0.002 * 2**n for n in range(6))
