"""How far a skip goes, and what a peek shows, against a model that counts every message."""

import asyncio
import random
from typing import Any

import pytest

from magnetar.broker.cursors.core.acks import AckState, EntryKey, Position
from magnetar.broker.cursors.core.redeliveries import RedeliveryCounts
from magnetar.broker.log.reading import LedgerReading
from magnetar.broker.settings import BrokerSettings
from magnetar.broker.topics import backlog
from magnetar.broker.topics.backlog import AcknowledgedBeyond, CountingReads, find_skip, peek, skip
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.commands import ACK_SET_ROW, Deliver, encode_rows
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.errors import EntryDamaged, TopicBusy
from support.broker_kit import TOPIC, FakeClient, running_broker
from support.dispatch_kit import DispatchWorld
from support.served_broker import connect_to, serving


class Log:
    """Ledgers 1, 2, ... of entries of some batches; the last one is open. What `find_skip` and `peek` ask of a list."""

    def __init__(self, ledgers: list[list[list[int]]]) -> None:
        self.entries: dict[EntryKey, Entry] = {}
        self.infos: dict[int, Any] = {}
        self.reads = 0
        self.damaged: set[EntryKey] = set()
        for ledger, entries in enumerate(ledgers, 1):
            messages = 0
            for number, counts in enumerate(entries):
                values = [
                    [b"%d:%d:%d" % (ledger, number, batch)] * count for batch, count in enumerate(counts)
                ]
                batches = [encode_batch(one, sequence_id=0, publish_time_ms=0) for one in values]
                data = encode_entry(
                    batches, counts, [0] * len(counts), ["p"], first_index=messages, append_time_ms=0
                )
                self.entries[ledger, number] = Entry(data)
                messages += sum(counts)
            self.infos[ledger] = type("Info", (), {"entries": len(entries), "messages": messages})()

    def info(self, ledger: int) -> Any:
        return self.infos.get(ledger)

    def is_confirmed(self, ledger: int, entry: int) -> bool:
        return (ledger, entry) in self.entries

    def normalise(self, position: Position) -> Position:
        ledger, entry, _ = position
        while ledger < len(self.infos) and entry >= self.infos[ledger].entries:
            ledger, entry, position = ledger + 1, 0, (ledger + 1, 0, 0)
        return position

    async def read_entry(self, key: EntryKey) -> Entry:
        self.reads += 1
        if key in self.damaged:
            raise EntryDamaged(f"{key} is damaged")
        return self.entries[key]

    def messages(self) -> list[Position]:
        return [(*key, index) for key, entry in self.entries.items() for index in range(entry.message_count)]


def acknowledge(log: Log, state: AckState, message: Position) -> None:
    ledger, entry, index = message
    state.ack(ledger, entry, index, index, log.entries[ledger, entry].message_count)


def unacked(log: Log, state: AckState) -> list[Position]:
    """Every message that is not acknowledged, in order."""
    return [one for one in log.messages() if state.unacked(*one[:2], one[2], one[2])]


@pytest.mark.parametrize("seed", range(40))
async def test_a_skip_goes_just_behind_so_many_messages(seed: int) -> None:
    chance = random.Random(seed)
    log: Any = Log(
        [
            [
                [chance.randint(1, 3) for _ in range(chance.randint(1, 3))]
                for _ in range(chance.randint(0, 12))
            ]
            for _ in range(chance.randint(1, 4))
        ]
    )
    state = AckState(log, log.normalise((1, 0, 0)))
    for key, entry in log.entries.items():
        for index in range(entry.message_count):
            if chance.random() < chance.choice([0.1, 0.9]):
                acknowledge(log, state, (*key, index))
        if chance.random() < 0.3:
            state.ack(key[0], key[1], 0, entry.message_count - 1, entry.message_count)
    before = unacked(log, state)
    for count in {1, 2, 3, len(before) // 2, len(before), len(before) + 5} - {0}:
        position, skipped = await find_skip(log, state, log.read_entry, count)
        assert skipped == min(count, len(before))
        moved = AckState(log, state.mark_delete)
        rows = [(ledger, *acked.part(0, acked.count)) for ledger, acked in state.acked.by_ledger.items()]
        moved.merge(state.mark_delete, rows)
        moved.move_to(position)
        moved.check()
        assert unacked(log, moved) == before[count:]


async def test_a_large_skip_reads_few_entries() -> None:
    log: Any = Log([[[2]] * 500, [[2]] * 500, [[2]] * 10])
    state = AckState(log, (1, 3, 1))
    assert await find_skip(log, state, log.read_entry, 1) == ((1, 4, 0), 1)
    log.reads = 0
    assert await find_skip(log, state, log.read_entry, 1500) == ((2, 253, 1), 1500)
    assert log.reads < 20
    log.reads = 0
    assert await find_skip(log, state, log.read_entry, 1_000_000) == ((3, 10, 0), 2013)
    assert log.reads == 1, "ledgers that are skipped as a whole need not be read"


async def test_many_gaps_leave_the_loop_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    log: Any = Log([[[1]] * 1000])
    state = AckState(log, (1, 0, 0))
    for number in range(1, 1000, 2):
        state.ack(1, number, 0, 0, 1)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    assert await find_skip(log, state, log.read_entry, 400) == ((1, 799, 0), 400)
    counting.cancel()
    assert turns >= 400 // backlog._GAPS_PER_TURN
    assert log.reads <= 402, "one a gap: an entry tells where the next one begins"


def shown(log: Log, entries: list[backlog.PeekedEntry]) -> list[tuple[Position, int]]:
    """Message and redelivery count, as a client decodes them."""
    from magnetar.client.messages import Delivery, messages_of

    found = []
    for ledger, entry, count, hidden, part in entries:
        command = Deliver(0, 0, 0, ledger, entry, -1, count, len(hidden))
        for message in messages_of(Delivery(command, encode_rows(ACK_SET_ROW, hidden) + part, "t")):
            position = (message.id.ledger, message.id.entry, message.id.index)
            batch = log.entries[position[:2]].batch_of(position[2])
            assert message.value == b"%d:%d:%d" % (*position[:2], batch)
            found.append((position, message.redelivery_count))
    return found


@pytest.mark.parametrize("seed", range(40))
async def test_a_peek_shows_what_is_next(seed: int) -> None:
    chance = random.Random(seed)
    log: Any = Log([[[chance.randint(1, 3)] * chance.randint(1, 3) for _ in range(8)] for _ in range(2)])
    state, counts = AckState(log, (1, 0, 0)), RedeliveryCounts()
    for message in log.messages():
        if chance.random() < 0.4:
            acknowledge(log, state, message)
        elif chance.random() < 0.3:
            counts.set(message[:2], message[2], message[2], chance.randint(1, 3))
    expected = [(one, counts.at(one)[0]) for one in unacked(log, state)]
    for count in (1, 2, 5, len(expected), len(expected) + 3):
        entries = await peek(log, state, counts, log.read_entry, count)
        assert shown(log, entries) == expected[:count]


async def test_a_peek_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    log: Any = Log([[[3]] * 20])
    state, counts = AckState(log, (1, 0, 0)), RedeliveryCounts()
    monkeypatch.setattr(backlog, "MAX_PEEKED_MESSAGES", 7)
    assert len(shown(log, await peek(log, state, counts, log.read_entry, 1 << 60))) == 7
    one = len((await peek(log, state, counts, log.read_entry, 3))[0].slice)
    monkeypatch.setattr(backlog, "MAX_PEEKED_BYTES", 2 * one)
    assert len(shown(log, await peek(log, state, counts, log.read_entry, 7))) == 6
    monkeypatch.setattr(backlog, "MAX_PEEKED_BYTES", 1)
    assert len(shown(log, await peek(log, state, counts, log.read_entry, 7))) == 3, "one entry at least"
    counts.set((1, 0), 1, 1, 5)  # a part for each count has the whole batch
    assert len(shown(log, await peek(log, state, counts, log.read_entry, 7))) == 1


async def test_a_peek_ends_before_what_cannot_be_read() -> None:
    log: Any = Log([[[1]] * 4])
    state, counts = AckState(log, (1, 0, 0)), RedeliveryCounts()
    log.damaged.add((1, 2))
    assert [one for one, _ in shown(log, await peek(log, state, counts, log.read_entry, 4))] == [
        (1, 0, 0),
        (1, 1, 0),
    ]
    state.move_to((1, 2, 0))
    with pytest.raises(EntryDamaged):
        await peek(log, state, counts, log.read_entry, 4)


@pytest.mark.parametrize("type", ["shared", "key_shared"])
def test_what_is_skipped_leaves_the_replay_queue(type: str) -> None:
    world = DispatchWorld(BrokerSettings())
    world.topic.publish([1, 1], cached=True, keys=["k", "l"])
    world.topic.publish([1, 1], cached=True, keys=["k", "l"])
    world.join("a", type)
    world.grant("a", 4)
    world.nack("a", [(1, 0, 0, 1), (1, 1, 0, 1)])  # and it has no permits any more
    tracker = world.core.tracker
    assert tracker.replay_messages == 4
    world.skip((1, 1, 1))
    assert tracker.replay_messages == 1
    world.skip((1, 2, 0))
    assert not tracker.replay
    assert not world.core.source.held_bytes


# --- the operation on a subscription ---------------------------------------------------------------------------------


async def test_a_skip_is_durable_when_it_is_answered_and_nothing_is_skipped_by_a_seek() -> None:
    async with running_broker(cursor_flush_interval_ms=10**9) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.ask(c.CreateSubscription, "orders", "s", ("earliest", None))
        client.publish(b"0", b"1", b"2")
        await client.confirmed(3)
        topic = broker.topics[str(TOPIC)]
        subscription = topic.subscriptions["s"]
        answer = await client.ask(c.SkipMessages, "orders", "s", 2)
        assert answer["skipped"] == 2
        assert list(subscription.cursor.durable_mark) == answer["mark_delete"]

        async def find() -> Position:
            await topic.subscriptions.seek(subscription, ("earliest", None))
            return topic.ledger.list.end

        with pytest.raises(TopicBusy, match="nothing was skipped"):
            await subscription.skip_to(find)
        assert subscription.cursor.state.mark_delete == topic.ledger.list.start

        async def seek_slowly() -> Position:
            with pytest.raises(TopicBusy, match="is seeking already"):
                await skip(topic.ledger.list, topic.log.read_entry, subscription, 1)
            return topic.ledger.list.start

        await subscription.seek(seek_slowly)
        assert (await client.ask(c.ClearBacklog, "orders", "s"))["skipped"] == 3
        assert subscription.cursor.durable_mark == topic.ledger.list.end


async def test_a_message_of_the_largest_size_can_be_peeked() -> None:
    largest = 5 * 1024 * 1024
    async with serving() as server, connect_to(server) as client:
        await client.admin.create_subscription("t", "s")
        async with client.create_producer("t") as producer:
            await producer.send(b"small")
            await producer.send(bytes(largest))
        assert [message.value for message in await client.admin.peek_messages("t", "s", 2)] == [b"small"]
        await client.admin.skip_messages("t", "s", 1)
        (message,) = await client.admin.peek_messages("t", "s", 2)
        assert message.value == bytes(largest)


async def test_what_is_acknowledged_one_by_one_is_counted_exactly_with_bounded_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(5)
    for _ in range(40):
        shape = [
            [[rng.randint(1, 4) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 8))]
            for _ in range(rng.randint(1, 3))
        ]
        log: Any = Log(shape)
        log.archived = lambda ledger: None
        messages = log.messages()
        state = AckState(log, (1, 0, 0))
        for message in rng.sample(messages, rng.randrange(len(messages))):
            acknowledge(log, state, message)
        wanted = sum(message >= state.mark_delete for message in messages) - len(unacked(log, state))
        assert await AcknowledgedBeyond(log, state, log.read_entry).count() == wanted
        log.reads = 0
        with monkeypatch.context() as patch:
            patch.setattr(backlog, "MAX_COUNTING_READS", 1)
            count = await AcknowledgedBeyond(
                log, state, CountingReads(log, log.read_entry, lambda key: None)
            ).count()
        assert 0 <= count <= wanted
        assert log.reads <= 1
        log.damaged = {key for key in log.entries if rng.random() < 0.2}
        assert (
            0
            <= await AcknowledgedBeyond(
                log, state, CountingReads(log, log.read_entry, lambda key: None)
            ).count()
            <= wanted
        )


async def test_the_backlog_is_without_what_was_acknowledged_one_by_one() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        for _ in range(3):
            await producer.send_many([b"%d" % number for number in range(10)])
        consumer = await client.subscribe("t", "s", type="shared", start="earliest")
        messages = [await consumer.receive(10.0) for _ in range(30)]
        await consumer.ack([messages[3], *messages[10:20], messages[25], messages[29]], receipt=True)
        stats = (await client.admin.topic_stats("t"))["subscriptions"]["s"]
        assert stats["backlog_messages"] == 30 - 13
        await consumer.ack(messages, receipt=True)
        assert (await client.admin.topic_stats("t"))["subscriptions"]["s"]["backlog_messages"] == 0


async def test_rule_54_the_figures_of_a_topic_have_one_budget_of_reads_for_all_subscriptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        for _ in range(6):
            await producer.send_many([b"%d" % number for number in range(10)])
        for name in ("a", "b", "c", "d"):
            consumer = await client.subscribe("t", name, type="shared", start="earliest")
            messages = [await consumer.receive(10.0) for _ in range(60)]
            await consumer.ack([*messages[10:20], *messages[30:40]], receipt=True)
        monkeypatch.setattr(LedgerReading, "cached", lambda topic, key: None)
        monkeypatch.setattr(backlog, "MAX_COUNTING_READS", 3)
        reads, read_entry = [], LedgerReading.read_entry

        async def counted(topic: LedgerReading, key: Any) -> Any:
            reads.append(key)
            return await read_entry(topic, key)

        monkeypatch.setattr(LedgerReading, "read_entry", counted)
        stats = (await client.admin.topic_stats("t"))["subscriptions"]
        assert len(reads) <= 3
        assert all(40 <= stats[name]["backlog_messages"] <= 60 for name in stats)
