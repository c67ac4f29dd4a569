"""Producers: batching, bounds, receipts in parts, failures, re-sending under a new epoch."""

import asyncio
from typing import Any

import pytest

from magnetar.client import (
    AlreadyClosed,
    Client,
    InvalidArgument,
    MessageId,
    MessageTooLarge,
    ProducerFenced,
    ProducerQueueFull,
    SendTimeout,
    TopicNotFound,
    connect,
)
from magnetar.proto.commands import CreateProducer
from magnetar.proto.compression import CompressionName
from magnetar.proto.errors import NotEnoughBookies, ServiceNotReady, StorageFailed
from magnetar.runtime.connection import Connection
from support.client_kit import until
from support.fake_broker import FakeBroker
from support.virtual_time import in_virtual_time


def stored(broker: FakeBroker, name: str = "t") -> list[bytes]:
    from magnetar.proto.batch import decode_batch

    values: list[Any] = []
    for entry in broker.topic(name).entries:
        for position in range(entry.batch_count):
            values += decode_batch(entry.batch(position)).values
    return values


def first_occurrences(values: list[bytes]) -> list[bytes]:
    return list(dict.fromkeys(values))


async def test_messages_of_one_turn_share_a_batch_and_nothing_waits_when_idle(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t", batching_max_delay=30.0)
    ids = await asyncio.gather(*[producer.send(b"%d" % i) for i in range(10)])
    assert ids == [MessageId(1, 0, i) for i in range(10)]
    assert broker.frames_of_sends == 1


async def test_while_something_is_in_flight_messages_gather_until_it_is_confirmed(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t", batching_max_delay=30.0)
    broker.hold_receipts = True
    first = producer.send_nowait(b"0")
    await until(lambda: broker.held)
    later = []
    for value in (b"1", b"2"):
        later.append(producer.send_nowait(value))
        await client.admin.list_topics()  # whose answer comes behind everything that was written before
        assert broker.frames_of_sends == 1
    broker.release_receipts()
    assert await first == MessageId(1, 0, 0)
    assert [await receipt for receipt in later] == [MessageId(1, 1, 0), MessageId(1, 1, 1)]


async def test_few_messages_of_many_calls_share_a_batch(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", batching_max_delay=30.0)
    broker.hold_receipts = True
    first = asyncio.ensure_future(producer.send_many([b"first"]))
    await until(lambda: broker.held)
    calls = [
        producer.send_many([b"1", b"2"]),
        producer.send(b"3", "k"),
        producer.send_many([b"4"], keys=["l"]),
        producer.send_many([b"5", None]),
        producer.send(b"6"),
        producer.send_many([b"7"], properties=[{"a": "b"}]),  # more than values and keys: a batch of its own
    ]
    later = [asyncio.ensure_future(call) for call in calls]
    await client.admin.list_topics()
    assert broker.frames_of_sends == 3
    broker.release_receipts()
    assert await first == [MessageId(1, 0, 0)]
    in_batch = [MessageId(1, 1, number) for number in range(7)]
    found = [await one for one in later]
    assert found == [in_batch[:2], in_batch[2], [in_batch[3]], in_batch[4:6], in_batch[6], [found[5][0]]]
    reader = await client.create_reader("t", start="earliest")
    got = [await reader.receive(2.0) for _ in range(9)]
    assert [message.key for message in got] == [None, None, None, "k", "l", None, None, None, None]
    assert [message.value for message in got] == [b"first", b"1", b"2", b"3", b"4", b"5", None, b"6", b"7"]


@in_virtual_time
async def test_a_batch_waits_for_its_delay_and_no_longer() -> None:
    broker = await FakeBroker.start()
    loop = asyncio.get_running_loop()
    async with connect(broker.url) as client:
        producer = await client.create_producer("t", batching_max_delay=2.0)
        broker.hold_receipts = True
        producer.send_nowait(b"0")
        await until(lambda: broker.held)
        opened = loop.time()
        producer.send_nowait(b"1")
        await asyncio.sleep(1.0)
        producer.send_nowait(b"2")  # joins the batch, and does not put it off
        await until(lambda: len(broker.held) == 2)
        assert 2.0 <= loop.time() - opened < 2.1
        broker.release_receipts()
        await producer.flush()
        assert [entry.message_count for entry in broker.topic("t").entries] == [1, 2]
    await broker.close()


async def test_batches_are_cut_by_count_and_bytes(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", batching_max_messages=3)
    await asyncio.gather(*[producer.send(b"x") for _ in range(7)])
    assert broker.frames_of_sends == 3
    producer = await client.create_producer("u", batching_max_bytes=1000)
    await asyncio.gather(*[producer.send(b"x" * 400) for _ in range(5)])
    assert broker.frames_of_sends == 6


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "zlib", "snappy"])
@pytest.mark.parametrize("batching", [True, False])
async def test_columns_and_compression_survive(
    broker: FakeBroker, client: Client, batching: bool, compression: CompressionName
) -> None:
    producer = await client.create_producer("t", batching=batching, compression=compression)
    consumer = await client.subscribe("t", "s", start="earliest")
    producer.send_nowait(b"plain")
    producer.send_nowait(b"keyed", "k")
    producer.send_nowait(None, b"\x00bytes")
    producer.send_nowait(b"rest", properties={"a": "b"}, event_time=7)
    await producer.flush()
    got = [await consumer.receive(1.0) for _ in range(4)]
    assert [m.value for m in got] == [b"plain", b"keyed", None, b"rest"]
    assert [m.key for m in got] == [None, "k", b"\x00bytes", None]
    assert [m.properties for m in got] == [{}, {}, {}, {"a": "b"}]
    assert [m.event_time for m in got] == [None, None, None, 7]
    assert [m.sequence_id for m in got] == [0, 1, 2, 3]
    assert broker.frames_of_sends == (1 if batching else 4)


async def test_receipts_may_come_in_parts_of_a_group(broker: FakeBroker, client: Client) -> None:
    broker.split_receipts = True
    producer = await client.create_producer("t", batching=False)
    receipts = [producer.send_nowait(b"%d" % i) for i in range(10)]
    ids = [await receipt for receipt in receipts]
    assert ids == sorted(set(ids))
    assert len({i.entry for i in ids}) >= 2


async def test_send_many_cuts_and_returns_every_id(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    values = [b"%d" % i for i in range(25_000)]
    ids = await producer.send_many(values)
    assert len(ids) == 25_000
    assert ids == sorted(set(ids))
    assert broker.frames_of_sends == 3
    assert stored(broker) == values
    assert await producer.send_many([]) == []
    big = await producer.send_many([b"x" * 700_000] * 3)
    assert len(big) == 3
    assert broker.frames_of_sends == 6
    with pytest.raises(InvalidArgument, match="2 values, but 1 keys"):
        await producer.send_many([b"a", b"b"], keys=["k"])


async def test_bad_arguments_are_told_at_once(client: Client) -> None:
    producer = await client.create_producer("t")
    with pytest.raises(InvalidArgument, match="bytes, not str"):
        producer.send_nowait("text")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="key is str or bytes"):
        producer.send_nowait(b"x", 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="properties"):
        producer.send_nowait(b"x", properties={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(MessageTooLarge, match="5242880"):
        producer.send_nowait(b"x" * (5 * 1024 * 1024 + 1))
    with pytest.raises(InvalidArgument, match="whole milliseconds"):
        producer.send_nowait(b"x", event_time=1.5)  # type: ignore[arg-type]
    await producer.send(b"x" * 5 * 1024 * 1024)


async def test_text_that_utf_8_cannot_express_does_not_take_its_batch_with_it(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t")
    sent = producer.send_nowait(b"a", "h\u00e9")
    wrong = "half a pair: \ud800"
    for options in ({"key": wrong}, {"properties": {wrong: "v"}}, {"properties": {"n": wrong}}):
        with pytest.raises(InvalidArgument, match="cannot be written as UTF-8"):
            producer.send_nowait(b"x", **options)
    with pytest.raises(InvalidArgument, match="cannot be written as UTF-8"):
        await producer.send_many([b"x", b"y"], keys=["k", wrong])
    await sent
    await producer.send_many([b"b"], keys=["k"])
    assert stored(broker) == [b"a", b"b"]


async def test_at_the_memory_bound_send_nowait_raises_and_send_waits_in_order(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t", max_pending_bytes=1000)
    broker.hold_receipts = True
    with pytest.raises(ProducerQueueFull, match="max_pending_bytes is 1000") as caught:  # noqa: PT012
        for _taken in range(100):
            producer.send_nowait(b"x" * 100)
    assert caught.value.retryable
    assert _taken == 6
    blocked = [asyncio.create_task(producer.send(b"%d" % i)) for i in range(20)]
    await until(lambda: broker.held)
    assert not any(task.done() for task in blocked)
    broker.release_receipts()
    ids = await asyncio.gather(*blocked)
    assert list(ids) == sorted(ids)
    assert producer.pending_bytes == 0


@pytest.mark.parametrize("many", [False, True])
async def test_a_smaller_message_does_not_overtake_one_that_waits_for_room(
    broker: FakeBroker, client: Client, many: bool
) -> None:
    producer = await client.create_producer("t", max_pending_bytes=1000)
    broker.hold_receipts = True
    first = producer.send_nowait(b"0" * 700)
    large = b"1" * 500
    waiting = asyncio.create_task(producer.send_many([large]) if many else producer.send(large))
    await until(lambda: broker.held)
    with pytest.raises(ProducerQueueFull):
        producer.send_nowait(b"2")
    later = [
        asyncio.create_task(producer.send(b"2")),
        asyncio.create_task(producer.send_many([b"3"])),
        asyncio.create_task(producer.send(b"4", "key")),
    ]
    await client.admin.list_topics()  # a while
    assert broker.frames_of_sends == 1
    broker.release_receipts()
    broker.hold_receipts = False
    await asyncio.gather(first, waiting, *later)
    assert stored(broker) == [b"0" * 700, large, b"2", b"3", b"4"]
    assert await producer.send_nowait(b"5")  # nobody waits any more


async def test_block_when_full_false_raises(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", max_pending_bytes=200, block_when_full=False)
    broker.hold_receipts = True
    producer.send_nowait(b"x" * 100)
    with pytest.raises(ProducerQueueFull):
        await producer.send(b"x" * 100)
    with pytest.raises(ProducerQueueFull):
        await producer.send_many([b"x" * 100])
    broker.release_receipts()
    # Larger than the whole bound, but alone.
    await producer.flush()
    await producer.send(b"x" * 1000)


async def test_one_waiter_cancelled_leaves_the_others(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    broker.hold_receipts = True
    tasks = [asyncio.create_task(producer.send(b"%d" % i)) for i in range(3)]
    await until(lambda: broker.held)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert tasks[1].cancelled()
    broker.release_receipts()
    assert await tasks[0] == MessageId(1, 0, 0)
    assert await tasks[2] == MessageId(1, 0, 2)


@pytest.mark.parametrize("batching", [True, False])
async def test_rule_33_what_is_not_confirmed_is_sent_again_in_order_under_a_new_epoch(
    broker: FakeBroker, client: Client, batching: bool
) -> None:
    producer = await client.create_producer("t", batching=batching, batching_max_messages=10)
    broker.lose_sends = True
    receipts = [producer.send_nowait(b"%d" % i) for i in range(100)]
    await until(lambda: broker.frames_of_sends >= (10 if batching else 100))
    broker.cut()
    broker.lose_sends = False
    receipts += [producer.send_nowait(b"%d" % i) for i in range(100, 150)]
    ids = [await receipt for receipt in receipts]
    assert ids == sorted(set(ids))
    assert stored(broker) == [b"%d" % i for i in range(150)]
    assert [command.epoch for command in broker.received(CreateProducer)] == [0, 1]
    assert [command.name for command in broker.received(CreateProducer)] == [None, producer.name]


async def test_receipts_lost_with_the_connection_make_duplicates_in_order(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t", batching_max_messages=10)
    broker.hold_receipts = True
    receipts = [producer.send_nowait(b"%d" % i) for i in range(100)]
    await until(lambda: len(broker.topic("t").entries) > 0)
    broker.hold_receipts = False
    broker.held.clear()
    broker.cut()
    for receipt in receipts:
        await receipt
    assert len(stored(broker)) > 100, "what was stored, and not known to be, is sent again"
    assert first_occurrences(stored(broker)) == [b"%d" % i for i in range(100)]


async def test_a_broker_that_is_gone_for_a_while(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    await producer.send(b"0")
    port = broker.port
    await broker.close()
    receipt = producer.send_nowait(b"1")
    await asyncio.sleep(0.05)
    assert not receipt.done
    await broker.listen(port)
    await receipt
    assert stored(broker) == [b"0", b"1"]


async def test_a_retryable_failure_sends_again(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", batching_max_messages=10)
    broker.fail_next_send = ServiceNotReady("not yet")
    receipts = [producer.send_nowait(b"%d" % i) for i in range(30)]
    for receipt in receipts:
        await receipt
    assert stored(broker) == [b"%d" % i for i in range(30)]
    assert [command.epoch for command in broker.received(CreateProducer)] == [0, 1]


async def test_a_final_failure_fails_one_group_and_the_rest_goes_on(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t", batching_max_messages=10)
    broker.fail_next_send = StorageFailed("the disk is gone")
    receipts = [producer.send_nowait(b"%d" % i) for i in range(30)]
    for receipt in receipts[:10]:
        with pytest.raises(StorageFailed, match="the disk is gone"):
            await receipt
    for receipt in receipts[10:]:
        await receipt
    assert stored(broker) == [b"%d" % i for i in range(10, 30)]
    await producer.flush()  # somebody was told


async def test_flush_tells_what_nobody_awaited(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    broker.fail_next_send = StorageFailed("the disk is gone")
    producer.send_nowait(b"0")
    with pytest.raises(StorageFailed):
        await producer.flush()
    await producer.flush()


async def test_flush_tells_what_nobody_awaited_though_another_failure_was_seen(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t", send_timeout=0.05, batching_max_messages=1)
    broker.hold_receipts = True
    receipts = [producer.send_nowait(b"%d" % i) for i in range(3)]
    await until(lambda: receipts[2].done)
    with pytest.raises(SendTimeout):
        await receipts[0]
    with pytest.raises(SendTimeout):
        await producer.flush()
    await producer.flush()


async def test_closing_a_fenced_producer_tells_what_nobody_awaited(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t")
    broker.fail_next_send = ProducerFenced("another one took over")
    second = [producer.send_nowait(b"0"), producer.send_nowait(b"1")][1]
    await until(lambda: second.done)
    with pytest.raises(ProducerFenced):
        await producer.close()
    await producer.close()


async def test_a_fenced_producer_is_done(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    broker.fail_next_send = ProducerFenced("another one took over")
    first, second = producer.send_nowait(b"0"), producer.send_nowait(b"1")
    for receipt in (first, second):
        with pytest.raises(ProducerFenced):
            await receipt
    with pytest.raises(ProducerFenced):
        await producer.send(b"2")
    await producer.close()


async def test_send_timeout_fails_in_order_and_late_receipts_do_no_harm(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t", send_timeout=0.05, batching_max_messages=1)
    broker.hold_receipts = True
    failed: list[int] = []

    async def expect_timeout(number: int, receipt: Any) -> None:
        with pytest.raises(SendTimeout, match="not known"):
            await receipt
        failed.append(number)

    receipts = [producer.send_nowait(b"%d" % i) for i in range(3)]
    await asyncio.gather(*[expect_timeout(i, receipt) for i, receipt in enumerate(receipts)])
    assert failed == [0, 1, 2]
    assert producer.pending_bytes == 0
    broker.release_receipts()
    assert await producer.send(b"3") == MessageId(1, len(broker.topic("t").entries) - 1, 0)


async def test_send_timeout_says_why_the_broker_cannot_store(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", send_timeout=0.2)
    broker.hold_receipts = True
    broker.delay_next_send = NotEnoughBookies("bookie b takes no entries: read-only: no space in /data")
    with pytest.raises(
        SendTimeout, match="cannot store messages for now: bookie b takes no entries: read-only"
    ):
        await producer.send(b"0")
    broker.release_receipts()
    broker.hold_receipts = False
    await producer.send(b"1")  # now it can
    broker.hold_receipts = True
    with pytest.raises(SendTimeout, match=r"not known$"):
        await producer.send(b"2")


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_send_timeout_while_nobody_is_there(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", send_timeout=0.05)
    await broker.server.close(0.0)
    with pytest.raises(
        SendTimeout, match=r"could not be sent within send_timeout=0\.05 s; is the service running\?"
    ):
        await producer.send(b"0")


async def test_refusals_on_the_way_back_end_the_producer(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    broker.failures[CreateProducer] = TopicNotFound("deleted")
    broker.lose_sends = True
    receipt = producer.send_nowait(b"0")
    await until(lambda: broker.frames_of_sends)
    broker.cut()
    with pytest.raises(TopicNotFound):
        await receipt
    with pytest.raises(TopicNotFound):
        producer.send_nowait(b"1")


async def test_closing_flushes_and_ends(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    receipt = producer.send_nowait(b"0")
    await producer.close()
    assert await receipt == MessageId(1, 0, 0)
    await producer.close()
    with pytest.raises(AlreadyClosed, match="closed"):
        producer.send_nowait(b"1")
    with pytest.raises(AlreadyClosed):
        await producer.send(b"1")


async def test_writing_stops_above_high_water_and_goes_on(
    broker: FakeBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    send_encoded = Connection.send_encoded

    def counting(connection: Connection, frames: bytes) -> None:
        nonlocal written
        written += len(frames)
        send_encoded(connection, frames)

    monkeypatch.setattr(Connection, "send_encoded", counting)
    producer = await client.create_producer("t", batching_max_bytes=1 << 20)
    [handler] = broker.handlers
    handler.connection.pause_reading("test")
    receipts = [producer.send_nowait(b"%07d" % i + b"x" * 1_000_000) for i in range(60)]
    for _ in range(100):
        await asyncio.sleep(0)
    # What the sockets take, which is at most 10 MB, and one batch beyond the high-water mark.
    assert 1_000_000 < written < 20_000_000
    handler.connection.resume_reading("test")
    for receipt in receipts:
        await receipt
    assert written > 60_000_000
    assert [value[:7] for value in stored(broker)] == [b"%07d" % i for i in range(60)]
