"""Dispatch: every stop has its waker; redelivery, seek, shared work, bounded memory."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from magnetar.broker import Broker, Topic
from magnetar.broker.dispatch.dispatcher import MAX_INSTRUCTIONS_PER_TURN
from magnetar.proto import commands as c
from magnetar.proto.errors import BookieUnavailable, ConsumerBusy, InvalidArgument, MagnetarError
from magnetar.proto.ids import MessageId
from support.broker_kit import TOPIC, FakeClient, FakeClock, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore


def topic_of(broker: Broker) -> Topic:
    return broker.topics[str(TOPIC)]


async def publish(client: FakeClient, *values: bytes, each: int = 1) -> None:
    """Unbatched; `each` values an entry."""
    answer = await client.producer(9)
    for first in range(0, len(values), each):
        before = sum(row[1] for row in client.receipts)
        client.publish(*values[first : first + each], first=first, producer_id=9, epoch=answer["epoch"])
        await client.confirmed(before + len(values[first : first + each]))
    await client.ask(c.CloseProducer, 9)


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % n for n in range(first, first + count)]


# --- wakers ----------------------------------------------------------------------------------------------------------


async def test_permits_stop_dispatch_and_flow_wakes_it() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, *numbers(10), each=10)
        await client.consumer(permits=3)
        await settle()
        assert client.values == numbers(3)
        client.frame(c.Flow(0, 1, 4))
        await settle()
        assert client.values == numbers(7)


async def test_byte_permits_stop_dispatch() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, *[b"x" * 1000] * 10, each=10)
        await client.consumer(permits=0)
        client.frame(c.Flow(0, 1, 100, 2500))
        await settle()
        assert len(client.messages) == 3
        client.frame(c.Flow(0, 1, 0, 1000))
        await settle()
        assert len(client.messages) == 4


async def test_an_unwritable_connection_stops_dispatch_and_costs_a_bounded_amount() -> None:
    async with running_broker(memory_budget_bytes=1 << 20) as broker:
        client = FakeClient(broker)
        await client.consumer(permits=1 << 20)
        client.writable = False
        producer = FakeClient(broker)
        for _ in range(5):
            await publish(producer, *[b"x" * 10_000] * 40)
        assert not client.messages
        assert broker.cache.used <= broker.cache.limit + 20_000
        assert len(broker.cache) * 10_000 < 1 << 20
        client.writable = True
        client.handler.writing_resumed()
        await client.received(200)
        assert client.values == [b"x" * 10_000] * 200
        await settle()
        assert broker.figures()["read_ahead_bytes"] == 0


async def test_consumers_of_one_connection_take_turns_when_it_is_writable_again() -> None:
    """Else the first one runs ahead of the others as long as the connection is the bottleneck."""

    class Narrow(FakeClient):
        """A connection whose buffer is full after every delivery."""

        def send(self, header: bytes, payload: Any = b"") -> None:
            super().send(header, payload)
            self.writable = False

    async with running_broker() as broker:
        client = Narrow(broker)
        client.writable = False
        for number in range(3):
            await client.consumer(number + 1, f"s-{number}")
        await publish(FakeClient(broker), *numbers(12), each=1)
        await settle()
        assert not client.messages
        for _ in range(12):
            client.writable = True
            client.handler.writing_resumed()
            await settle()
        consumers = [command.consumer_id for command, _ in client.frames if isinstance(command, c.Deliver)]
        assert consumers == [1, 2, 3] * 4


async def test_new_entries_wake_a_tailing_consumer() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer()
        for number in range(5):
            await publish(client, b"%d" % number)
        assert client.values == numbers(5)
        assert broker.dispatched.reads == 0


async def test_completed_reads_wake_dispatch_and_failed_ones_are_tried_again() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, read_bytes=500, read_ahead_bytes=1000, retry_initial_ms=1) as broker:
        client = FakeClient(broker)
        await publish(client, *numbers(50))
        ledgers.fail_read.extend([BookieUnavailable("down"), BookieUnavailable("still down")])
        await client.consumer()
        assert await client.received(50) == numbers(50)
        await settle()
        assert broker.figures()["read_ahead_bytes"] == 0


async def test_long_turns_are_cut() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer(permits=0)  # joins first, so that the entries wait in memory
        count = 2 * MAX_INSTRUCTIONS_PER_TURN + 10
        await publish(client, *numbers(count))
        client.frame(c.Flow(0, 1, count))
        delivered = [len(client.messages)]
        while delivered[-1] < count:
            await asyncio.sleep(0)
            delivered.append(len(client.messages))
        turns = [after - before for before, after in pairwise([0, *delivered]) if after > before]
        assert turns == [MAX_INSTRUCTIONS_PER_TURN, MAX_INSTRUCTIONS_PER_TURN, 10]
        assert client.values == numbers(count)


async def test_too_many_ranges_stop_new_messages_until_gaps_close() -> None:
    async with running_broker(max_cursor_ranges=3) as broker:
        client = FakeClient(broker)
        await publish(client, *numbers(20))
        await client.consumer(type="shared", permits=8)
        await client.received(8)
        await client.ack(*[client.messages[n].row() for n in (1, 3, 5)])
        client.frame(c.Flow(0, 1, 100))
        await settle()
        assert len(client.messages) == 8
        await client.ack(client.messages[2].row())
        await client.received(20)


# --- types -----------------------------------------------------------------------------------------------------------


async def test_shared_consumers_share_the_work_and_nothing_is_lost_or_doubled() -> None:
    async with running_broker() as broker:
        clients = [FakeClient(broker) for _ in range(3)]
        for number, client in enumerate(clients):
            await client.consumer(number, type="shared", permits=10_000)
        await publish(FakeClient(broker), *numbers(900), each=300)
        assert all(len(client.messages) >= 200 for client in clients)
        assert sorted(int(v) for client in clients for v in client.values) == list(range(900))


async def test_a_batch_of_jobs_is_shared_out_to_consumers_that_are_idle() -> None:
    async with running_broker() as broker:
        workers = [FakeClient(broker) for _ in range(3)]
        for number, worker in enumerate(workers):
            await worker.consumer(number, type="shared")
        sender = FakeClient(broker)
        answer = await sender.producer(9)
        sender.publish_batch(numbers(60), first=0, producer_id=9, epoch=answer["epoch"])
        await sender.confirmed(60)
        assert [len(worker.messages) for worker in workers] == [20, 20, 20]
        assert [value for worker in workers for value in worker.values] == numbers(60)
        # Nobody is idle: the next batch is one delivery.
        sender.publish_batch(numbers(60, 60), first=60, producer_id=9, epoch=answer["epoch"])
        await sender.confirmed(120)
        assert sorted(len(worker.messages) for worker in workers) == [20, 20, 80]


async def test_workers_that_want_one_job_at_a_time_get_one_of_a_batch() -> None:
    async with running_broker() as broker:
        workers = [FakeClient(broker) for _ in range(3)]
        for number, worker in enumerate(workers):
            await worker.consumer(number, type="shared", permits=1)
        sender = FakeClient(broker)
        answer = await sender.producer(9)
        sender.publish_batch(numbers(60), first=0, producer_id=9, epoch=answer["epoch"])
        await sender.confirmed(60)
        assert [worker.values for worker in workers] == [[b"0"], [b"1"], [b"2"]]
        for number in range(57):  # one of them is faster than the others
            assert await workers[0].received(number + 1)
            workers[0].frame(c.Flow(0, 0, 1))
        await workers[0].received(58)
        assert [len(worker.messages) for worker in workers] == [58, 1, 1]


async def test_types_that_do_not_fit_are_refused() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer()
        for type, error in (
            ("exclusive", ConsumerBusy),
            ("shared", ConsumerBusy),
            ("failover", ConsumerBusy),
            ("key_shared", ConsumerBusy),
            ("x", InvalidArgument),
        ):
            with pytest.raises(error):
                await client.consumer(2, type=type)
        with pytest.raises(ConsumerBusy, match="durable"):
            await client.consumer(2, durable=False)
        await client.ask(c.CloseConsumer, 1)
        await client.consumer(2, type="shared")
        await client.consumer(3, type="shared")


# --- redelivery ------------------------------------------------------------------------------------------------------


async def test_an_exclusive_consumer_that_leaves_gets_everything_unacknowledged_again_in_order() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, *numbers(10), each=5)
        await client.consumer()
        await client.received(10)
        await client.ack(*[client.messages[n].row() for n in (0, 1, 4, 7)])
        client.handler.connection_closed(None)
        again = FakeClient(broker)
        await again.consumer()
        await settle()
        assert again.values == [b"2", b"3", b"5", b"6", b"8", b"9"]
        assert {message.redelivered for message in again.messages} == {0}


async def test_a_shared_consumer_that_leaves_hands_its_messages_to_the_others() -> None:
    async with running_broker() as broker:
        a, b = FakeClient(broker), FakeClient(broker)
        await a.consumer(type="shared")
        await publish(FakeClient(broker), *numbers(10), each=10)
        await b.consumer(type="shared")
        await a.ack(*[a.messages[n].row() for n in (0, 5)])
        rows = c.encode_rows(c.ACK_ROW, [a.messages[n].row() for n in (0, 1)])
        a.frame(c.HandedOut(0, 1, 7), rows)  # of another epoch: it means nothing
        a.frame(c.HandedOut(0, 1, 0), rows)
        a.handler.connection_closed(None)
        await settle()
        assert b.values == [b"1", b"2", b"3", b"4", b"6", b"7", b"8", b"9"]
        assert [message.redelivered for message in b.messages] == [1, 0, 0, 0, 0, 0, 0, 0]
        await b.ack(*[message.row() for message in b.messages])
        assert topic_of(broker).subscriptions["billing"].consumers[0].pending_acks == {}


@pytest.mark.parametrize("type", ["exclusive", "shared"])
async def test_nacked_messages_come_again_with_their_count(type: str) -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        answer = await client.producer()
        client.publish_batch(numbers(6), epoch=answer["epoch"])
        await client.consumer(type=type)
        await client.received(6)
        rows = [m.row() for m in client.messages if m.value in (b"1", b"4")]
        for count in (1, 2, 3):
            client.frame(c.Redeliver(0, 1), c.encode_rows(c.ACK_ROW, rows))
            await settle()
            assert [(m.value, m.redelivered) for m in client.messages[-2:]] == [(b"1", count), (b"4", count)]
        await client.ack(*[m.row() for m in client.messages[:6]])
        client.frame(c.Redeliver(0, 1), c.encode_rows(c.ACK_ROW, rows))
        await settle()
        assert len(client.messages) == 12


@pytest.mark.parametrize("type", ["exclusive", "shared"])
@pytest.mark.parametrize("kind", ["redeliver", "handed out", "ack"])
async def test_rule_48_a_row_that_ends_before_it_begins_is_refused(kind: str, type: str) -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        answer = await client.producer()
        client.publish_batch(numbers(10), epoch=answer["epoch"])
        await client.consumer(type=type)
        await client.received(10)
        ledger, entry = client.messages[0].id[:2]
        payload = c.encode_rows(c.ACK_ROW, [(ledger, entry, 5, 3)])
        if kind == "handed out":
            client.frame(c.HandedOut(0, 1, 0), payload)  # nobody is answered
        else:
            with pytest.raises(InvalidArgument):
                await client.ask(c.Redeliver if kind == "redeliver" else c.Ack, 1, payload=payload)
        await settle()
        core = topic_of(broker).subscriptions["billing"].dispatcher.core
        core.tracker.check(core.consumers)
        client.frame(c.Redeliver(0, 1))
        await settle()
        assert client.values[10:] == numbers(10)


@pytest.mark.parametrize("type", ["exclusive", "shared"])
async def test_a_nack_of_everything(type: str) -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, *numbers(6), each=2)
        await client.consumer(type=type)
        await client.received(6)
        await client.ack(client.messages[1].row())
        client.frame(c.Redeliver(0, 1))
        await settle()
        assert client.values[6:] == [b"0", b"2", b"3", b"4", b"5"]


async def test_redelivery_reads_what_left_the_cache() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await publish(client, *numbers(20))
        await settle()
        assert len(broker.cache) == 0
        client.frame(c.Redeliver(0, 1))
        await client.received(40)
        assert client.values[20:] == numbers(20)
        assert broker.dispatched.reads


# --- start and seek --------------------------------------------------------------------------------------------------


async def test_start_latest_earliest_and_id() -> None:
    async with running_broker(max_ledger_entries=3) as broker:
        client = FakeClient(broker)
        await client.consumer(1, "first", start=("latest", None))
        await publish(client, *numbers(10), each=2)
        assert await client.received(10) == numbers(10)
        late = FakeClient(broker)
        await late.consumer(1, "late", start=("latest", None))
        for position in (0, 3, 7, 9):
            other = FakeClient(broker)
            wire = MessageId(*client.messages[position].id).to_bytes()
            await other.consumer(1, f"at-{position}", start=("id", wire))
            assert await other.received(10 - position) == numbers(10 - position, position)
        with pytest.raises(InvalidArgument):
            await late.consumer(2, "x", start=("nowhere", None))
        assert not late.messages
        last = await late.ask(c.LastMessageId, 1)
        assert MessageId.from_bytes(last)[:3] == client.messages[-1].id


async def test_start_by_time() -> None:
    clock = FakeClock(1000)
    async with running_broker(clock=clock, max_ledger_entries=3) as broker:
        client = FakeClient(broker)
        answer = await client.producer()
        for number in range(8):
            clock.now = 1000 + 10 * number
            client.publish(
                b"%da" % number,
                b"%db" % number,
                first=2 * number,
                epoch=answer["epoch"],
                time_ms=clock.now - 1,
            )
            await client.confirmed(2 * number + 2)
        for time_ms, expected in ((0, 0), (999, 0), (1000, 1), (1019, 2), (1030, 4), (1069, 7), (2000, 8)):
            reader = FakeClient(broker)
            await reader.consumer(1, f"at-{time_ms}", start=("time", time_ms))
            await settle()
            assert len(reader.messages) == 2 * (8 - expected), time_ms


async def test_rule_30_seek_purges_pending_acks_raises_the_epoch_and_survives_a_restart() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, *numbers(6))
        await client.consumer(type="shared")
        await client.received(6)
        await client.ack(*[m.row() for m in client.messages])
        wire = MessageId(*client.messages[2].id).to_bytes()
        answer = client.ask(c.Seek, 1, ("id", wire))
        await client.received(10)
        assert (await answer)["epoch"] == 1
        assert client.values[6:] == numbers(4, 2)
        assert {m.epoch for m in client.messages[6:]} == {1}
        # The answer comes before anything of the new epoch.
        kinds = [frame for frame, _ in client.frames]
        first_new = next(n for n, f in enumerate(kinds) if isinstance(f, c.Deliver) and f.consumer_epoch == 1)
        assert any(isinstance(f, c.Ok) and f.result and f.result.get("epoch") == 1 for f in kinds[:first_new])
        await client.ask(c.Seek, 1, ("latest", None))
        client.frame(c.Redeliver(0, 1))
        await settle()
        assert len(client.messages) == 10
        for topic in list(broker.topics.values()):
            topic.ledger.fence(MagnetarError("crash"))
        await settle()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.consumer()
        await settle()
        assert not client.messages


async def test_rule_30_seek_purges_what_waits_for_redelivery() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, *numbers(6))
        await client.consumer(type="shared", permits=6)
        await client.received(6)
        client.frame(c.Redeliver(0, 1))  # no permits: they wait
        await client.ask(c.Seek, 1, ("earliest", None))
        client.frame(c.Flow(0, 1, 100))
        await settle()
        assert client.values[6:] == numbers(6)
        assert {message.redelivered for message in client.messages} == {0}


async def test_a_seek_past_the_last_message_of_an_entry_does_not_hold_the_cursor() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, *numbers(6), each=2)
        reader = FakeClient(broker)
        await reader.consumer(2, "", durable=False)
        await reader.received(6)
        ledger, entry, _ = reader.messages[1].id
        await client.consumer(start=("id", MessageId(ledger, entry, 77).to_bytes()))
        assert await client.received(4) == numbers(4, 2)
        await client.ack(*[m.row() for m in client.messages])
        assert topic_of(broker).subscriptions["billing"].cursor.state.mark_delete == (ledger, 3, 0)


async def test_a_reader_leaves_nothing_behind() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await publish(client, *numbers(3))
        await client.consumer(1, "", durable=False)
        await client.received(3)
        await client.ack(client.messages[-1].row(), cumulative=True)
        await client.ask(c.CloseConsumer, 1)
        await settle()
        assert not topic_of(broker).subscriptions
        assert [v.properties["kind"] for v in ledgers.ledgers.values()] == ["topic"]


async def test_cold_reads_ahead_of_a_slow_cache_deliver_each_message_once() -> None:
    async with running_broker(
        memory_budget_bytes=200_000, read_bytes=20_000, read_ahead_bytes=60_000, max_ledger_entries=7
    ) as broker:
        client = FakeClient(broker)
        await publish(client, *[b"%05d" % n + b"x" * 3000 for n in range(100)])
        readers = [FakeClient(broker) for _ in range(3)]
        for number, reader in enumerate(readers):
            await reader.consumer(1, f"r{number}", durable=False, permits=10)

        async def consume(reader: Any) -> None:
            for target in range(10, 101, 10):
                await reader.received(target)
                reader.frame(c.Flow(0, 1, 10))

        await asyncio.gather(*(consume(reader) for reader in readers))
        for reader in readers:
            assert [int(value[:5]) for value in reader.values] == list(range(100))
