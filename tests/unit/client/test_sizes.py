"""Rule 47: a size is the encoded bytes, and one set of rules holds for all who write; what breaks it costs itself only."""

import asyncio
import random
from typing import Any

import pytest

from magnetar.client import (
    Client,
    DeadLetterPolicy,
    InvalidArgument,
    MessageTooLarge,
    RedeliveryBackoff,
)
from magnetar.client.topic import columns
from magnetar.proto import batch
from magnetar.proto import commands as c
from magnetar.proto.admission import admit_groups
from magnetar.proto.batch import encode_batch
from magnetar.proto.compression import Compression, CompressionName
from magnetar.proto.errors import FrameTooLarge
from support.broker_kit import FakeClient, running_broker, settle
from support.served_broker import connect_to, serving, take

LIMIT = 256 * 1024
CHINESE = "消息" * (LIMIT // 5)  # fewer characters than the limit, more bytes


def small(server: Any, **options: Any) -> Any:
    return connect_to(server, max_message_bytes=LIMIT, **options)


@pytest.mark.parametrize(
    "message",
    [
        {"properties": {"text": CHINESE}},
        {"properties": {f"{n:x}": "" for n in range(LIMIT // 5)}},
        {"key": CHINESE},
    ],
)
async def test_rule_47_a_size_is_the_encoded_bytes(message: dict[str, Any]) -> None:
    async with serving(max_message_bytes=LIMIT) as server, small(server) as client:
        producer = await client.create_producer("t")
        bystander = await client.create_producer("u")
        with pytest.raises(MessageTooLarge):
            producer.send_nowait(b"", **message)
        with pytest.raises(MessageTooLarge):
            await producer.send(b"", **message)
        many = {{"key": "keys"}.get(name, name): [value] for name, value in message.items()}
        with pytest.raises(MessageTooLarge):
            await producer.send_many([b""], **many)
        await asyncio.gather(producer.send(b"after"), bystander.send(b"beside"))
        assert await connections(client) == 1


async def connections(client: Client) -> int:
    """How often the producers attached: each attachment is an epoch."""
    return 1 + max(
        [int(p["epoch"]) for topic in "tu" for p in (await client.admin.topic_stats(topic))["producers"]]
    )


async def test_a_batch_is_never_larger_than_a_message_may_be() -> None:
    async with serving(max_message_bytes=LIMIT) as server, small(server) as client:
        producer = await client.create_producer(
            "t", batching_max_bytes=64 * LIMIT, batching_max_messages=32_768
        )
        receipts = [producer.send_nowait(b"x" * 1000) for _ in range(3 * LIMIT // 1000)]
        for receipt in receipts:
            await receipt
        await producer.send_many([b""] * 1000, keys=[CHINESE[:500]] * 1000)
        assert await connections_of(client, "t") == 1


async def connections_of(client: Client, topic: str) -> int:
    [producer] = (await client.admin.topic_stats(topic))["producers"]
    return 1 + int(producer["epoch"])


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "zlib", "snappy"])
async def test_what_cannot_be_compressed_is_sent_as_it_is(compression: CompressionName) -> None:
    limit = 5 << 20
    value = random.Random(1).randbytes(limit)
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t", compression=compression)
        consumer = await client.subscribe("t", "s", start="earliest")
        await producer.send(value)
        assert (await take(consumer, 1))[0].value == value
        assert await connections_of(client, "t") == 1


async def test_a_group_that_is_too_large_encoded_fails_alone_and_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last line, should a size be counted wrong: the connection is shared by all, and is not put at risk."""
    monkeypatch.setattr("magnetar.client.topic.columns.message_bytes", lambda *_: 1)
    async with serving(max_message_bytes=LIMIT) as server, small(server) as client:
        producer = await client.create_producer("t")
        bystander = await client.create_producer("u")
        receipt = producer.send_nowait(b"", properties={"large": "x" * (4 * LIMIT)})
        beside = bystander.send_nowait(b"beside")
        with pytest.raises(MessageTooLarge):
            await receipt
        await beside
        await producer.send(b"next")
        assert await connections(client) == 1


@pytest.mark.parametrize(
    ("columns_", "name"),
    [
        ({"properties": [{"a": None}]}, "properties"),
        ({"properties": [{"a": 1}]}, "properties"),
        ({"properties": [{1: "a"}]}, "properties"),
        ({"event_times_ms": [1_700_000_000_000_000_000]}, "time"),
        ({"event_times_ms": [-1]}, "time"),
        ({"event_times_ms": ["noon"]}, "time"),
        ({"publish_time_ms": 1_700_000_000_000_000_000}, "time"),
    ],
)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_rule_47_the_broker_checks_what_writers_must_keep(
    columns_: dict[str, Any], name: str, compression: CompressionName
) -> None:
    good = encode_batch(
        [b"v"], sequence_id=0, publish_time_ms=0, properties=[{"a": "b"}], event_times_ms=[None]
    )
    codec = Compression.parse(compression)
    fields = {"sequence_id": 1, "publish_time_ms": 0, "compression": codec, **columns_}
    bad = encode_batch([b"v"], **fields)
    for payload in (bad, good + bad):
        with pytest.raises(InvalidArgument, match=name) as refused:
            admit_groups([good, payload])
        assert refused.value.details["position"] == 1, "what comes before it is taken"


async def test_a_time_in_nanoseconds_is_refused_at_the_call() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        for call in (producer.send_nowait, producer.send):
            with pytest.raises(InvalidArgument, match="milliseconds"):
                await call(b"v", event_time=1_700_000_000_000_000_000)


# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", [0, 1, 150])
@pytest.mark.parametrize("way", ["dead letter", "retry"])
async def test_rule_47_what_was_let_in_can_be_dead_lettered_and_retried(short: int, way: str) -> None:
    properties = {f"p{n}": "v" for n in range(100)}
    value = b"x" * (
        LIMIT + columns.MESSAGE_OVERHEAD_BYTES - columns.message_bytes(b"", None, properties) - short
    )
    policy = DeadLetterPolicy(max_redeliver_count=0 if way == "dead letter" else 1)
    async with serving(max_message_bytes=LIMIT) as server, small(server) as client:
        producer = await client.create_producer("t")
        await producer.send(value, properties=properties)
        with pytest.raises(MessageTooLarge):
            await producer.send(value + b"x" * (short + 1), properties=properties)
        quick = RedeliveryBackoff(min_delay=0.0, max_delay=0.0)
        async with client.subscribe(
            "t",
            "s",
            type="shared",
            start="earliest",
            dead_letter=policy,
            retry=way == "retry",
            nack_backoff=quick,
        ) as consumer:
            [message] = await take(consumer, 1)
            if way == "retry":
                await consumer.reconsume_later(message, delay=0.0)
                [message] = await take(consumer, 1)
                assert (message.topic.rpartition("/")[2], message.value) == ("t-s-RETRY", value)
                await consumer.reconsume_later(message, delay=0.0)
            else:
                consumer.nack(message)
            async with client.create_reader("t-s-DLQ", start="earliest") as reader:
                letter = await reader.receive(20.0)
                assert letter.value == value
                assert properties.items() <= letter.properties.items()


# --- how many messages -----------------------------------------------------------------------------------------------


def tiny_batch(messages: int, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """As a client of somebody else may make it."""
    with monkeypatch.context() as patch:
        patch.setattr(batch, "check_message_count", lambda count: None)
        keys = ["a", "b"] * (messages // 2)
        return encode_batch(
            [None] * messages, sequence_id=0, publish_time_ms=0, keys=keys, compression=Compression.ZSTD
        )


@pytest.mark.parametrize("several", [False, True])
async def test_rule_47_a_batch_of_too_many_messages_is_refused_by_the_broker(
    monkeypatch: pytest.MonkeyPatch, *, several: bool
) -> None:
    tiny = tiny_batch(400_000, monkeypatch)
    assert len(tiny) < 3_000
    async with running_broker() as broker:
        bad, good = FakeClient(broker), FakeClient(broker)
        wrong = (await bad.producer())["epoch"]
        epoch = (await good.producer())["epoch"]
        fitting = encode_batch([b"x"], sequence_id=0, publish_time_ms=0)
        bad.frame(c.Send(0, 1, wrong), fitting + tiny if several else tiny)
        await settle()
        [failed] = bad.failures
        assert failed.code == InvalidArgument.code
        assert "400000 messages are more than the 32768 of a batch; send fewer at once" in failed.message
        good.frame(c.Send(0, 1, epoch), fitting)
        await good.confirmed(1)


async def test_rule_47_what_a_batch_cannot_hold_is_divided_or_refused_by_the_client() -> None:
    async with serving() as server, connect_to(server) as client:
        with pytest.raises(InvalidArgument, match="32769 messages are more than the 32768 of a batch"):
            await client.create_producer("t", batching_max_messages=32_769)
        producer = await client.create_producer("t")
        ids = await producer.send_many([b""] * 100_000, keys=["a", "b"] * 50_000)
        assert len(set(ids)) == 100_000
        assert max(message_id.index for message_id in ids) < 32_768  # entries are bounded as well
    with pytest.raises(InvalidArgument, match="of a batch"):
        encode_batch([b""] * 32_769, sequence_id=0, publish_time_ms=0)


# --- frames ----------------------------------------------------------------------------------------------------------


async def test_rule_42_acknowledgements_fit_a_small_frame() -> None:
    async with serving() as server, connect_to(server, max_message_bytes=1024) as client:
        async with connect_to(server) as writer:
            producer = await writer.create_producer("t")
            await producer.send_many([b""] * 10_000)
        async with client.subscribe("t", "s", type="shared", start="earliest") as consumer:
            messages = await take(consumer, 10_000)
            await consumer.ack(messages[::2], receipt=True)
        subscription = (await client.admin.topic_stats("t"))["subscriptions"]["s"]
        assert subscription["backlog_messages"] == 5_000


async def test_rule_50_a_frame_that_the_broker_refuses_fails_alone_and_is_not_sent_again() -> None:
    """A peer whose limit is smaller than what was negotiated: the connection ends once, and says what it ends for."""
    async with serving(max_message_bytes=LIMIT) as server, connect_to(server) as client:
        producer, bystander = await client.create_producer("t"), await client.create_producer("u")
        [transport] = server.connections
        transport.protocol._parser.max_frame_bytes = 100_000  # type: ignore[attr-defined]
        large = producer.send_nowait(b"x" * 150_000)
        beside = bystander.send_nowait(b"beside")
        with pytest.raises(MessageTooLarge):
            await large
        await asyncio.gather(beside, producer.send(b"after"))
        assert await connections(client) == 2


async def test_rule_50_a_request_that_is_refused_as_too_large_is_not_a_lost_connection() -> None:
    async with serving() as server, connect_to(server) as client:
        await client.admin.create_topic("t")
        [transport] = server.connections
        transport.protocol._parser.max_frame_bytes = 1_000  # type: ignore[attr-defined]
        ranges = tuple((n, n) for n in range(2_000))
        with pytest.raises(FrameTooLarge):
            await client.subscribe("t", "s", type="key_shared", hash_ranges=ranges)
        assert await client.admin.topic_stats("t")
