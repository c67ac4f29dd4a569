"""Mistaken calls: the error comes at the call, names what is wrong, and costs nothing but itself (rule 41)."""

import asyncio
from typing import Any

import pytest

from magnetar.client import Client, InvalidArgument, MagnetarError, MessageId, connect
from support.fake_broker import FakeBroker

LONE_SURROGATE = "caf\udce9"  # what os.fsdecode makes of a Latin-1 file name: a str that has no UTF-8 form


async def test_receipts_can_be_gathered_and_waited_for(client: Client) -> None:
    producer = await client.create_producer("t")
    receipts = [producer.send_nowait(b"%d" % i) for i in range(10)]
    ids = await asyncio.gather(*receipts)
    assert ids == sorted(set(ids))
    done, pending = await asyncio.wait(map(asyncio.ensure_future, receipts))
    assert sorted(task.result() for task in done) == ids
    assert not pending
    assert len({*receipts, *receipts}) == 10
    assert [await one for one in asyncio.as_completed(receipts)]


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize(
    "bad",
    [
        {"key": LONE_SURROGATE},
        {"properties": {LONE_SURROGATE: "a"}},
        {"properties": {"a": LONE_SURROGATE}},
        {"key": "k", "event_time": 1 << 63},
    ],
)
async def test_a_message_that_cannot_be_encoded_costs_no_other(
    broker: FakeBroker, client: Client, batching: bool, bad: dict[str, Any]
) -> None:
    producer = await client.create_producer("t", batching=batching)
    receipts = []
    for i in range(100):
        receipts.append(producer.send_nowait(b"%d" % i, key=f"k{i}"))
        if i == 50:
            with pytest.raises(InvalidArgument):
                producer.send_nowait(b"bad", **bad)
            with pytest.raises(InvalidArgument):
                await producer.send(b"bad", **bad)
    await producer.flush()
    assert len({await receipt for receipt in receipts}) == 100
    assert sum(entry.message_count for entry in broker.topic("t").entries) == 100


@pytest.mark.parametrize(
    "columns",
    [
        {"keys": ["a", LONE_SURROGATE, None]},
        {"keys": [b"\xff", LONE_SURROGATE, "b"]},
        {"keys": ["a", 5, "b"]},
        {"properties": [None, {"a": LONE_SURROGATE}, None]},
        {"event_times": [1, -1, None]},
    ],
)
async def test_send_many_names_the_message_that_is_wrong_and_sends_nothing(
    broker: FakeBroker, client: Client, columns: dict[str, Any]
) -> None:
    producer = await client.create_producer("t")
    with pytest.raises(InvalidArgument, match="message 1: "):
        await producer.send_many([b"0", b"1", b"2"], **columns)
    await producer.flush()
    assert not broker.topic("t").entries


async def test_one_time_for_all_of_send_many_is_a_column_of_it(client: Client) -> None:
    producer = await client.create_producer("t")
    with pytest.raises(InvalidArgument, match="deliver_at of send_many is a list"):
        await producer.send_many([b"0", b"1"], deliver_at=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "arguments", "options", "text"),
    [
        ("bundles", (None,), {}, "namespace of ListBundles: Expected `str`, got `None`"),
        ("skip_messages", ("t", "s", "all"), {}, "count of SkipMessages"),
        ("peek_messages", ("t", "s", 1 << 70), {}, "PeekMessages cannot be encoded"),
        ("list_topics", (LONE_SURROGATE,), {}, "ListTopics cannot be encoded"),
        ("delete_topic", ("u",), {"force": "yes"}, "force of DeleteTopic"),
        ("create_producer", ("u",), {"name": 5}, "name of CreateProducer"),
        ("create_reader", ("u",), {"name": b"x"}, "Subscribe"),
        ("subscribe", ("u", "s"), {"durable": None}, "durable of Subscribe"),
        ("subscribe", ("u", "s"), {"hash_ranges": [1], "type": "key_shared"}, "hash_ranges of Subscribe"),
        ("subscribe", ("u", "s"), {"receiver_queue_messages": 1.5}, "receiver_queue_messages must be"),
        ("subscribe", ("u", "s"), {"receiver_queue_bytes": float("inf")}, "receiver_queue_bytes must be"),
        ("subscribe", ("u", "s"), {"nack_delay": "1"}, "nack_delay must be"),
        ("subscribe", ("u", "s"), {"ack_timeout": "1"}, "ack_timeout must be"),
        ("subscribe", ("u", "s"), {"type": "shared", "dead_letter": 3}, "dead_letter must be"),
        ("subscribe", ("u", "s"), {"nack_backoff": 3}, "nack_backoff must be"),
        ("subscribe", (5, "s"), {}, "a topic is named by a str"),
        ("create_producer", ("u",), {"compression": None}, "unknown compression"),
        ("create_producer", ("u",), {"batching_max_delay": float("nan")}, "batching_max_delay must be"),
    ],
)
async def test_an_argument_of_a_wrong_type_disturbs_nobody_else(
    broker: FakeBroker, client: Client, method: str, arguments: Any, options: dict[str, Any], text: str
) -> None:
    """A request whose header cannot be decoded would end the connection that everything shares."""
    producer = await client.create_producer("t")
    (handler,) = broker.handlers
    call = getattr(client, method, None) or getattr(client.admin, method)
    with pytest.raises(InvalidArgument, match=text):
        await call(*arguments, **options)
    await producer.send(b"0")
    assert broker.handlers == [handler]


@pytest.mark.parametrize(
    "bad",
    [MessageId(-1, 0, 0), MessageId(1, 0, 1 << 32), MessageId("1", 0, 0), MessageId(1.5, 0, 0)],  # type: ignore[arg-type]
)
async def test_an_id_that_cannot_be_is_refused_and_costs_no_other_acknowledgement(
    broker: FakeBroker, client: Client, bad: MessageId
) -> None:
    async with client.create_producer("t") as producer:
        await producer.send_many([b"0", b"1"])
    consumer = await client.subscribe("t", "s", start="earliest")
    await consumer.ack(await consumer.receive(5.0))
    with pytest.raises(InvalidArgument, match="not a message id"):
        await consumer.ack(bad)
    other = asyncio.create_task(consumer.ack(await consumer.receive(5.0), receipt=True))
    await asyncio.sleep(0)
    for call in (consumer.ack(bad, receipt=True), consumer.ack_cumulative(bad), consumer.seek(bad)):
        with pytest.raises(InvalidArgument, match="not a message id"):
            await call
    await other
    assert broker.topic("t").acked["s"] == {(0, 0), (0, 1)}


async def test_what_cannot_be_encoded_after_all_fails_its_receipts_and_flush(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await client.create_producer("t", compression="lz4")
    monkeypatch.setitem(__import__("sys").modules, "lz4.block", None)
    receipts = [producer.send_nowait(b"%d" % i) for i in range(3)]
    with pytest.raises(MagnetarError, match="cannot be encoded"):
        await producer.flush()
    for receipt in receipts:
        with pytest.raises(MagnetarError, match="cannot be encoded"):
            await receipt
    assert producer.pending_bytes == 0
    with pytest.raises(MagnetarError, match="cannot be encoded"):
        await producer.send_many([b"0", b"1"])
    monkeypatch.undo()
    await producer.send(b"again")


def test_a_plain_with_names_async_with_and_the_blocking_client() -> None:
    opening: Any = connect("magnetar://localhost")
    with pytest.raises(TypeError, match=r"async with.*magnetar\.client\.blocking"), opening:
        pass
