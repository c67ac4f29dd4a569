"""Negative acknowledgement, back-off, acknowledgement timeout, redelivery counts: the public client and a real broker."""

import asyncio
import logging
import math
from typing import Any

import pytest

from magnetar.client import (
    AlreadyClosed,
    Consumer,
    DeadLetterPolicy,
    InvalidArgument,
    Message,
    MessageId,
    ReceiveTimeout,
    RedeliveryBackoff,
)
from magnetar.client.messages import ACKED, QUEUED, UNACKED
from magnetar.client.options import SubscriptionType
from magnetar.client.topic import acks
from magnetar.client.topic.acks import UnackedTracker
from magnetar.proto.commands import AckRow
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import connect_to, serving, take
from support.virtual_time import in_virtual_time


async def pause_before(consumer: Consumer, value: bytes) -> tuple[float, int]:
    """Seconds until the next message comes, which must have this value, and its redelivery count. It is nacked."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    message = await consumer.receive(1000.0)
    assert message.value == value
    consumer.nack(message)
    return loop.time() - began, message.redelivery_count


# --- negative acknowledgement ----------------------------------------------------------------------------------------


@in_virtual_time
async def test_pauses_grow_with_the_redelivery_count() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        backoff = RedeliveryBackoff(min_delay=1.0, max_delay=10.0, multiplier=3.0)
        consumer = await client.subscribe("t", "s", type="shared", start="earliest", nack_backoff=backoff)
        await producer.send(b"poison")
        assert (await pause_before(consumer, b"poison"))[1] == 0
        for count, wanted in ((1, 1.0), (2, 3.0), (3, 9.0), (4, 10.0), (5, 10.0)):
            waited, found = await pause_before(consumer, b"poison")
            assert found == count
            assert waited == pytest.approx(wanted, abs=0.1)


@in_virtual_time
async def test_a_message_can_have_a_delay_of_its_own_and_the_last_nack_counts() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", type="shared", start="earliest", nack_delay=30.0)
        await producer.send_many([b"default", b"soon", b"later", b"twice", b"acked"])
        default, soon, later, twice, acked = await take(consumer, 5)
        loop = asyncio.get_running_loop()
        began = loop.time()
        consumer.nack(default)
        consumer.nack([later, acked], delay=40)
        consumer.nack(twice, delay=100)
        consumer.nack(soon, delay=2.5)
        consumer.nack(twice, delay=5)
        await consumer.ack(acked)
        came = [
            (round(loop.time() - began), m.value) for m in [await consumer.receive(200.0) for _ in range(4)]
        ]
        assert [value for _, value in came] == [b"soon", b"twice", b"default", b"later"]
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(200.0)


@in_virtual_time
async def test_a_delay_of_0_comes_at_once_on_every_type() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        for type in ("exclusive", "failover", "shared", "key_shared"):
            consumer = await client.subscribe("t", type, type=type)
            await producer.send(b"m", key="k")
            consumer.nack(await consumer.receive(10.0), delay=0)
            again = await consumer.receive(1.0)
            assert (again.value, again.redelivery_count) == (b"m", 1)
            await consumer.close()


@pytest.mark.parametrize("delay", [-1, math.inf, math.nan])
async def test_delays_that_are_no_times_are_refused(delay: float) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", start="earliest", type="shared")
        await producer.send(b"m")
        message = await consumer.receive(5.0)
        with pytest.raises(InvalidArgument, match="delay must be a number of seconds"):
            consumer.nack(message, delay=delay)
        refused: list[dict[str, Any]] = [{"nack_delay": delay}, {"ack_timeout": delay}, {"ack_timeout": 0.5}]
        for options in refused:
            with pytest.raises(InvalidArgument, match=r"nack_delay|ack_timeout must be at least 1 s"):
                client.subscribe("t", "s", **options)
        with pytest.raises(InvalidArgument, match="backoff"):
            RedeliveryBackoff(min_delay=delay)


def test_a_backoff_never_overflows() -> None:
    backoff = RedeliveryBackoff(min_delay=0.1, max_delay=3600.0, multiplier=10.0)
    assert [backoff.delay(count) for count in (0, 1, 2, 10**6, 10**400)] == [0.1, 1.0, 10.0, 3600.0, 3600.0]
    assert RedeliveryBackoff(min_delay=5.0, max_delay=5.0).delay(10**400) == 5.0
    assert RedeliveryBackoff(min_delay=0.0).delay(10**400) == 0.0
    for wrong in ({"multiplier": 0.5}, {"min_delay": 2.0, "max_delay": 1.0}, {"multiplier": math.inf}):
        with pytest.raises(InvalidArgument, match="backoff"):
            RedeliveryBackoff(**wrong)


async def test_nacks_of_messages_that_are_nacked_over_and_over_take_bounded_memory() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", start="earliest", type="shared")
        await producer.send(b"m")
        message = await consumer.receive(5.0)
        for _ in range(1000):
            consumer.nack(message)
        acknowledger: Any = consumer._acknowledger
        assert len(acknowledger._nacks._heap) < 100


# --- redelivery counts -----------------------------------------------------------------------------------------------


async def test_counts_survive_a_restart_of_the_broker() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    for start in range(3):
        async with serving(metadata, ledgers) as server, connect_to(server) as client:
            if not start:
                producer = await client.create_producer("t")
                await producer.send_many([b"good", b"poison"])
            consumer = await client.subscribe("t", "s", start="earliest", type="shared", nack_delay=0)
            messages = await take(consumer, 1 if start else 2)
            if not start:
                await consumer.ack(messages.pop(0), receipt=True)
            # Once in each life of the broker: a nack, and not the end of the connection.
            (message,) = messages
            assert (message.value, message.redelivery_count) == (b"poison", start)
            consumer.nack(message)
            assert (await consumer.receive(5.0)).redelivery_count == start + 1


# --- what a lost connection counts: rule 49 --------------------------------------------------------------------------

POLICY = DeadLetterPolicy(max_redeliver_count=5)


def cut(consumer: Consumer) -> None:
    """The connection breaks, as it does when the process is killed: what the kernel has not got does not leave any more."""
    for one in consumer._consumer.consumers.values():
        connection = one._attachment.connection
        assert connection is not None
        connection.connection.abort()


async def counts_of(consumer: Consumer, messages: int) -> dict[bytes, int]:
    """Redelivery counts by value, of so many messages that come."""
    return {m.value or b"": m.redelivery_count for m in await take(consumer, messages)}


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
@in_virtual_time
async def test_rule_49_without_a_policy_a_lost_connection_counts_nothing(type: SubscriptionType) -> None:
    async with serving() as server, connect_to(server) as client:
        await (await client.create_producer("t")).send_many([b"%d" % n for n in range(100)])
        for _ in range(3):
            consumer = await client.subscribe("t", "s", start="earliest", type=type)
            assert set((await counts_of(consumer, 10)).values()) == {0}
            cut(consumer)
            assert set((await counts_of(consumer, 100)).values()) == {0}
            await consumer.close()


async def take_by(way: str, consumer: Consumer, count: int) -> None:
    """Takes so many messages."""
    if way == "receive":
        await take(consumer, count)
    elif way == "several":
        await asyncio.gather(*[consumer.receive(5.0) for _ in range(count)])
    else:
        taken = 0
        async for _ in consumer:
            taken += 1
            if taken == count:
                break
            if way == "slow iteration":
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # its turn ends


@pytest.mark.parametrize("type", ["shared", "key_shared"])
@pytest.mark.parametrize("topics", ["t", ["t", "u"]], ids=["one topic", "two topics"])
@pytest.mark.parametrize("way", ["receive", "several", "iteration", "slow iteration"])
@in_virtual_time
async def test_rule_49_with_a_policy_what_was_handed_out_counts(
    way: str, topics: Any, type: SubscriptionType
) -> None:
    async with serving() as server, connect_to(server) as client:
        for topic in topics:
            async with client.create_producer(topic) as producer:
                await producer.send_many([b"%s%d" % (topic.encode(), n) for n in range(100)])
        total = 100 * len(topics)
        consumer = await client.subscribe(topics, "s", start="earliest", type=type, dead_letter=POLICY)
        await take_by(way, consumer, 130 if len(topics) > 1 else 30)
        cut(consumer)
        counts = await counts_of(consumer, total)
        assert sum(counts.values()) == total - 70
        assert set(counts.values()) == {0, 1}
        # Now all are, and closing counts them as well.
        await consumer.close()
        consumer = await client.subscribe(topics, "s", start="earliest", type=type, dead_letter=POLICY)
        assert sum((await counts_of(consumer, total)).values()) == 2 * total - 70


@pytest.mark.parametrize("topics", ["t", ["t", "u"]], ids=["one topic", "two topics"])
@in_virtual_time
async def test_rule_49_a_batch_counts_as_a_whole_once_it_is_handed_out(topics: Any) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        for first in (0, 100, 200):
            await producer.send_many([b"%d" % n for n in range(first, first + 100)])
        consumer = await client.subscribe(topics, "s", start="earliest", type="shared", dead_letter=POLICY)
        await consumer.receive()
        batch = await consumer.receive_batch()
        assert batch is not None
        assert len(batch) == 99  # what is left of the delivery
        async for batch in consumer.batches():
            assert len(batch) == 100
            break
        await asyncio.sleep(
            0.1
        )  # for the simulated network, which forgets what is on its way when a connection ends
        cut(consumer)
        counts = await counts_of(consumer, 300)
        assert counts == {b"%d" % n: int(n < 200) for n in range(300)}


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_rule_49_a_loop_that_is_cut_off_in_its_turn_counts_little_more_and_only_once() -> None:
    async with serving() as server, connect_to(server) as client:
        await (await client.create_producer("t")).send_many([b"%d" % n for n in range(500)])
        consumer = await client.subscribe("t", "s", start="earliest", type="shared", dead_letter=POLICY)
        for life in (1, 2, 3):
            taken = 0
            async for message in consumer:
                taken += 1
                assert message.redelivery_count <= life
                if taken == 200:
                    cut(consumer)  # in the turn in which it takes them
                    break
            await asyncio.sleep(0)
        counts = list((await counts_of(consumer, 500)).values())
        assert counts[:200] == [3] * 200
        assert set(counts[200:]) <= {0, 1}
        assert counts.count(1) <= 200
        assert counts[-1] == 0


@in_virtual_time
async def test_rule_49_what_was_handed_out_and_nacked_counts_once() -> None:
    async with serving() as server, connect_to(server) as client:
        await (await client.create_producer("t")).send_many([b"a", b"b", b"c"])
        consumer = await client.subscribe(
            "t", "s", start="earliest", type="shared", dead_letter=POLICY, nack_delay=0, ack_timeout=10.0
        )
        consumer.nack((await take(consumer, 2))[0])
        await asyncio.sleep(1.0)
        cut(consumer)
        assert await counts_of(consumer, 3) == {b"a": 1, b"b": 1, b"c": 0}
        await asyncio.sleep(11.0)  # the timeout of all three
        assert await counts_of(consumer, 3) == {b"a": 2, b"b": 2, b"c": 1}


@in_virtual_time
async def test_rule_49_all_that_is_unacknowledged_comes_again_and_what_was_handed_out_counts() -> None:
    async with serving() as server, connect_to(server) as client:
        await (await client.create_producer("t")).send_many([b"%d" % n for n in range(100)])
        consumer = await client.subscribe("t", "s", start="earliest", type="shared", dead_letter=POLICY)
        await take(consumer, 10)
        await consumer.redeliver_unacknowledged()
        assert sum((await counts_of(consumer, 100)).values()) == 10


@pytest.mark.parametrize("topics", ["t", ["t", "u"]], ids=["one topic", "two topics"])
@in_virtual_time
async def test_rule_49_what_a_loop_may_take_and_has_not_is_no_hand_out_when_all_is_asked_for_again(
    topics: Any,
) -> None:
    async with serving() as server, connect_to(server) as client:
        await (await client.create_producer("t")).send_many([b"%d" % n for n in range(100)])
        consumer = await client.subscribe(topics, "s", start="earliest", type="shared", dead_letter=POLICY)
        taken = 0
        async for _ in consumer:
            taken += 1
            if taken == 40:
                break
        await consumer.redeliver_unacknowledged()  # in the turn of the loop, which may take 63
        assert sum((await counts_of(consumer, 100)).values()) == 40


@pytest.mark.parametrize("end", ["cancelled", "closed", "asked for"])
@in_virtual_time
async def test_rule_49_what_is_reported_and_never_handed_out_does_not_count(end: str) -> None:
    async with serving() as server, connect_to(server) as client:
        await (await client.create_producer("t")).send_many([b"%d" % n for n in range(100)])
        consumer = await client.subscribe("t", "s", start="earliest", type="shared", dead_letter=POLICY)
        await take(consumer, 1)
        taking = asyncio.ensure_future(consumer.receive_batch())
        asking = asyncio.ensure_future(consumer.redeliver_unacknowledged()) if end == "asked for" else None
        await asyncio.sleep(0)  # the report has left
        if asking is not None:
            await asking
            batch = await taking
            messages = [*batch, *await take(consumer, 100 - len(batch))]
            assert sum(message.redelivery_count for message in messages) == 1
            return
        if end == "cancelled":
            taking.cancel()
        await consumer.close()
        with pytest.raises((AlreadyClosed, asyncio.CancelledError)):
            await taking
        consumer = await client.subscribe("t", "s", type="shared", dead_letter=POLICY)
        assert sum((await counts_of(consumer, 100)).values()) == 1


@in_virtual_time
async def test_rule_49_a_consumer_that_closes_counts_what_it_handed_out() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        await producer.send_many([b"%d" % n for n in range(100)])
        await producer.send_many([b"%d" % n for n in range(100, 200)])
        for life in range(3):
            consumer = await client.subscribe("t", "s", start="earliest", type="shared", dead_letter=POLICY)
            assert set((await counts_of(consumer, 10)).values()) <= set(range(life + 1))
            await consumer.close()
        consumer = await client.subscribe("t", "s", type="shared")
        assert sum((await counts_of(consumer, 200)).values()) == 30


# --- acknowledgement timeout -----------------------------------------------------------------------------------------


@in_virtual_time
async def test_what_is_not_acknowledged_in_time_is_delivered_again() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", type="shared", start="earliest", ack_timeout=10.0)
        await producer.send_many([b"%d" % n for n in range(10)])
        loop = asyncio.get_running_loop()
        first = await take(consumer, 4)  # 4 to 9 wait in the client, and have time
        handed_out = loop.time()
        await consumer.ack(first[1])
        await consumer.ack([first[3].id])  # by id, of which no delivery knows
        await asyncio.sleep(5.0)
        later = await take(consumer, 6)
        handed_out_later = loop.time()
        await consumer.ack(later[:5])
        consumer.nack(later[5], delay=60.0)  # comes at the time that was asked for
        again = await take(consumer, 2)
        assert [(m.value, m.redelivery_count) for m in again] == [(b"0", 1), (b"2", 1)]
        assert 10.0 <= loop.time() - handed_out <= 11.1
        await consumer.ack(again)
        assert (await consumer.receive(100.0)).value == b"9"
        assert 60.0 <= loop.time() - handed_out_later <= 61.1


@in_virtual_time
async def test_a_timeout_does_not_fire_for_what_is_acknowledged_cumulatively_or_dropped_by_a_seek() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", start="earliest", ack_timeout=1.0)
        await producer.send_many([b"%d" % n for n in range(10)])
        await producer.send(b"10")
        messages = await take(consumer, 11)
        await consumer.ack_cumulative(messages[7])
        assert [m.value for m in await take(consumer, 3)] == [b"8", b"9", b"10"]
        await consumer.seek("latest")
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(30.0)


@in_virtual_time
async def test_a_timeout_does_not_fire_for_what_is_acknowledged_cumulatively_with_a_receipt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "magnetar.client")
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", start="earliest", ack_timeout=10.0)
        await producer.send_many([b"%d" % n for n in range(10)])
        messages = await take(consumer, 10)
        await consumer.ack_cumulative(
            messages[3], receipt=True
        )  # before anybody looked at what was handed out
        await asyncio.sleep(3.0)
        await consumer.ack_cumulative(messages[7], receipt=True)
        assert [m.value for m in await take(consumer, 2)] == [b"8", b"9"]
    said = [record.getMessage() for record in caplog.records if "not acknowledged" in record.getMessage()]
    assert len(said) == 1
    assert " 2 messages were not acknowledged" in said[0]


@in_virtual_time
@pytest.mark.parametrize("delay", [0.2, 8.0, 15.0])
async def test_a_message_that_was_nacked_has_a_whole_timeout_from_its_next_delivery_on(delay: float) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", type="shared", start="earliest", ack_timeout=10.0)
        await producer.send_many([b"0", b"1"])
        messages = await take(consumer, 2)
        await consumer.ack(messages[1])
        consumer.nack(messages[0], delay=delay)
        again = await consumer.receive(100.0)
        assert (again.value, again.redelivery_count) == (b"0", 1)
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(9.5)  # it is being processed
        await consumer.ack(messages[0] if delay == 8.0 else again)  # either names it
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(30.0)


@in_virtual_time
@pytest.mark.parametrize("kind", ["shared", "exclusive"])
@pytest.mark.parametrize("given_back_by", ["timeout", "nack"])
async def test_a_nack_of_what_was_given_back_already_does_not_give_it_out_again_while_it_is_processed(
    kind: SubscriptionType, given_back_by: str
) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", type=kind, start="earliest", ack_timeout=10.0)
        await producer.send(b"0")
        slow = await consumer.receive(1.0)
        if given_back_by == "nack":
            consumer.nack(slow, delay=0)
        again = await consumer.receive(12.0)
        consumer.nack(slow, delay=5.0)  # whoever had it failed in the end
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(9.0)  # it is being processed
        await consumer.ack(again)
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(30.0)


async def test_a_timeout_holds_no_payloads_and_forgets_what_is_acknowledged() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", start="earliest", type="shared", ack_timeout=60.0)
        for number in range(50):
            await producer.send_many([b"%d" % number] * 10)
        acknowledger: Any = consumer._acknowledger
        unacked = acknowledger._unacked
        for _ in range(50):
            batch = await consumer.receive_batch()
            assert batch is not None
            await consumer.ack(batch)
        assert len(unacked._rows) <= 2
        assert not [row for row in unacked._rows if any(isinstance(field, Message) for field in row)]


class OneDelivery:
    """What the tracker looks at."""

    def __init__(self, messages: int, entry: int = 0) -> None:
        self.flags = bytearray([UNACKED]) * messages
        self.ledger, self.entry_id, self.base_index, self.partition = 5, entry, 100, -1
        self.first_id = MessageId(5, entry, 100)


def test_rows_of_a_timeout_are_ranges_of_what_was_handed_out() -> None:
    tracker, nacks = UnackedTracker(10.0), acks.NackTracker()
    delivery: Any = OneDelivery(10)
    tracker.handed_out(delivery, 3, 1.0)
    tracker.handed_out(delivery, 3, 2.0)  # nothing new: its time began at 1
    tracker.handed_out(delivery, 8, 3.0)
    delivery.flags[1], delivery.flags[5] = QUEUED, ACKED
    other: Any = OneDelivery(2, entry=1)
    tracker.handed_out(other, 2, 4.0)
    assert tracker.take_due(10.9, nacks) == []
    assert tracker.take_due(11.0, nacks) == [AckRow(5, 0, 100, 100), AckRow(5, 0, 102, 102)]
    tracker.acked_through(MessageId(5, 0, 103))
    assert tracker.take_due(13.0, nacks) == [AckRow(5, 0, 104, 104), AckRow(5, 0, 106, 107)]
    tracker.acked_through(MessageId(5, 1, 100))
    assert tracker.take_due(14.0, nacks) == [AckRow(5, 1, 101, 101)]
    tracker.handed_out(other, 2, 20.0)
    assert tracker.take_due(99.0, nacks) == []  # noted before
