"""Topics to which producers of Pulsar's protocol have sent as well: what native consumers, table views and tools see."""

import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import lz4.block
import pytest
import pytest_asyncio

from magnetar.broker import Broker
from magnetar.broker.listeners.http.messages import response
from magnetar.broker.listeners.native.connection import listener
from magnetar.broker.service.admin import FoundMessage
from magnetar.cli.bookie_tools.read import _message_lines, decode_payload
from magnetar.client import Client, MessageId
from magnetar.client.options import SUBSCRIPTION_TYPES, SubscriptionType
from magnetar.client.receipts import Group
from magnetar.client.topic.chunking import ChunkedMessage
from magnetar.client.topic.columns import Row
from magnetar.proto.batch import encode_columns
from magnetar.proto.batch_extensions import WholeMessage
from magnetar.proto.compression import Compression
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.errors import MagnetarError, MalformedFrame, ReceiveTimeout
from magnetar.proto.pulsar.batch import admit_pulsar
from magnetar.proto.pulsar.transcoding import to_pulsar
from magnetar.runtime.connection import ConnectionOptions, start_server
from support.broker_kit import FakeClient, running_broker
from support.pulsar_messages import batch, encrypted, frame, read_frame, single
from support.served_broker import connect_to, take
from support.service import holding_port


class PulsarProducer:
    """Stores what a producer of Pulsar's protocol would have sent."""

    def __init__(self, link: FakeClient, name: str, broker: Broker) -> None:
        self._link = link
        self._name = name
        self._broker = broker

    async def send(self, *frames: bytes) -> None:
        """All of it in one entry."""
        admitted = admit_pulsar(frames)
        stored = sum(row[1] for row in self._link.receipts)
        topic = self._broker.topics["persistent://public/default/t"]
        (session,) = (one for one in topic.producers if one.name == self._name)
        topic.publish(session, admitted, whole=True)
        await self._link.confirmed(stored + sum(admitted.counts))


@pytest_asyncio.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Client, PulsarProducer]]:
    """`request.param`: options of the client."""
    with holding_port() as port:
        url = f"magnetar://127.0.0.1:{port}"
    async with running_broker(service_url=url) as broker:
        server = await start_server("127.0.0.1", port, listener(broker), ConnectionOptions(name="broker"))
        try:
            link = FakeClient(broker)
            name = (await link.producer(topic="t"))["name"]
            async with connect_to(server, **getattr(request, "param", {})) as client:
                yield client, PulsarProducer(link, name, broker)
        finally:
            await server.close(0.0)


Served = tuple[Client, PulsarProducer]


@pytest.mark.parametrize("type", SUBSCRIPTION_TYPES)
async def test_consumers_of_every_type(served: Served, type: SubscriptionType) -> None:
    client, pulsar = served
    consumer = await client.subscribe("t", "s", type=type, start="earliest")
    native = await client.create_producer("t")
    await native.send(b"1", "k")
    await pulsar.send(
        frame(b"2", {"a": "2"}, partition_key="k", event_time=7, sequence_id=4),
        batch(
            [
                single(b"3", {"a": "3"}, partition_key="k", sequence_id=5),
                single(None, partition_key="k", sequence_id=6),
            ],
            partition_key="k",
            sequence_id=5,
        ),
    )
    await native.send(b"5", "k")
    got = await take(consumer, 5)
    assert [one.value for one in got] == [b"1", b"2", b"3", None, b"5"]
    assert [one.key for one in got] == ["k"] * 5
    assert [one.properties.get("a") for one in got] == [None, "2", "3", None, None]
    assert [one.event_time for one in got] == [None, 7, None, None, None]
    assert [one.sequence_id for one in got] == [0, 4, 5, 6, 1]
    assert [one.id for one in got] == sorted(one.id for one in got)
    for one in got:
        one.delivery.let_go_of_values()
    assert [one.key for one in got] == ["k"] * 5
    assert [one.properties.get("a") for one in got] == [None, "2", "3", None, None]
    assert [one.sequence_id for one in got] == [0, 4, 5, 6, 1]
    await consumer.ack(got, receipt=True)
    with pytest.raises(ReceiveTimeout):
        await consumer.receive(0.05)


def _chunks(value: bytes, size: int) -> list[bytes]:
    packed = lz4.block.compress(value, store_size=False)
    pieces = [packed[at : at + size] for at in range(0, len(packed), size)]
    fields: dict[str, Any] = {
        "uuid": "u", "num_chunks_from_msg": len(pieces), "total_chunk_msg_size": len(packed), "compression": 1,
        "uncompressed_size": len(value),
    }  # fmt: skip
    return [frame(piece, {"a": "1"}, chunk_id=number, **fields) for number, piece in enumerate(pieces)]


VALUE = random.Random(1).randbytes(3000) + bytes(100_000)


@pytest.mark.parametrize("queue", [2, 1000])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_compressed_message_in_chunks(served: Served, queue: int, stream: bool) -> None:
    client, pulsar = served
    consumer = await client.subscribe(
        "t", "s", start="earliest", stream_chunks=stream, receiver_queue_messages=queue
    )
    chunks = _chunks(VALUE, 500)
    await pulsar.send(frame(b"before"), *chunks[:3])
    await pulsar.send(*chunks[3:], frame(b"after"))
    assert (await consumer.receive(5.0)).value == b"before"
    message = await consumer.receive(5.0)
    assert message.properties == {"a": "1"}
    if stream:
        assert [piece async for piece in consumer.stream(message)] == [VALUE]
    else:
        assert message.value == VALUE
    assert (await consumer.receive(5.0)).value == b"after"


@pytest.mark.parametrize("served", [{"max_message_bytes": 1000}], indirect=True)
async def test_a_native_producer_says_what_a_message_is_as_a_whole_if_it_knows(served: Served) -> None:
    """Which consumers of Pulsar's protocol have to know with the first chunk."""
    client, _ = served
    consumer = await client.subscribe("t", "s", start="earliest")
    producer = await client.create_producer("t", chunking=True)
    sent = [bytes(2500), bytes(2500), bytes(2500)]
    await producer.send(sent[0])
    await producer.send_nowait(sent[1])
    await producer.send_stream(iter([sent[2]]))
    got = await take(consumer, 3)
    assert [one.value for one in got] == sent
    assert [one.delivery.whole for one in got] == [WholeMessage(3, 2500), WholeMessage(3, 2500), None]


def test_a_message_in_chunks_has_its_metadata_in_the_last_one_for_consumers_of_pulsar_too() -> None:
    row = Row(None, "k", {"a": "1"}, 7, 4, None)
    message = ChunkedMessage(Group(4), bytes(8), row, WholeMessage(3, 3))
    seen = []
    for at in range(3):
        group, columns = message.next_chunk(b"v", last=at == 2)
        encoded = encode_columns(columns, 4, 1, Compression.NONE, group.extensions).batches()
        (one,) = to_pulsar(encoded[0], "p", 1000)
        metadata, _ = read_frame(bytes(one.data))
        properties = {pair.key: pair.value for pair in metadata.properties}
        seen.append((metadata.chunk_id, metadata.partition_key, properties, metadata.event_time))
    assert seen == [(0, "k", {"a": "1"}, 7), (1, "k", {}, 0), (2, "k", {"a": "1"}, 7)]


async def test_a_message_in_chunks_that_inflates_to_more_than_is_allowed(served: Served) -> None:
    client, pulsar = served
    consumer = await client.subscribe("t", "s", start="earliest", max_chunked_message_bytes=10_000)
    await pulsar.send(*_chunks(VALUE, 1000), frame(b"after"))
    with pytest.raises(MalformedFrame, match="inflates to 103000 bytes") as raised:
        await consumer.receive(5.0)
    assert raised.value.details["first_id"].index == 0
    assert (await consumer.receive(5.0)).value == b"after"


async def test_an_encrypted_batch_costs_itself_only(served: Served) -> None:
    client, pulsar = served
    consumer = await client.subscribe("t", "s", type="shared", start="earliest")
    await pulsar.send(frame(b"before"), encrypted(2), frame(b"after"))
    before = await consumer.receive(5.0)
    with pytest.raises(MalformedFrame, match="encrypted") as raised:
        await consumer.receive(5.0)
    after = await consumer.receive(5.0)
    assert (before.value, after.value) == (b"before", b"after")
    ids = raised.value.details
    assert (ids["first_id"].index, ids["last_id"].index) == (1, 2)
    await consumer.ack([before, after, ids["first_id"], ids["last_id"]], receipt=True)
    stats = await client.admin.topic_stats("t")
    assert stats["subscriptions"]["s"]["backlog_messages"] == 0


async def test_a_table_view_and_what_a_compaction_leaves(served: Served) -> None:
    client, pulsar = served
    native = await client.create_producer("t")
    first = await native.send(b"1", "a")
    await pulsar.send(
        batch(
            [
                single(b"2", partition_key="a", sequence_id=1),
                single(b"3", {"x": "y"}, partition_key="b", event_time=5, sequence_id=2),
                single(b"4", partition_key="Yw==", partition_key_b64_encoded=True, sequence_id=3),
                single(None, partition_key="a", sequence_id=4),
                single(b"", sequence_id=5),
                single(b"gone", partition_key="d", sequence_id=6),
            ],
            sequence_id=1,
            highest_sequence_id=6,
        ),
        frame(b"5", partition_key="e", sequence_id=7),
        encrypted(1, sequence_id=8),
    )
    last = await native.send(b"6", "d")
    state = await client.admin.compact_topic("t", wait=True)
    assert state["state"] == "done"
    entry = first.entry + 1
    async with client.create_reader("t", start="earliest", read_compacted=True) as reader:
        got = [await reader.receive(5.0) for _ in range(4)]
        with pytest.raises(MalformedFrame, match="encrypted"):
            await reader.receive(5.0)
        got.append(await reader.receive(5.0))
    assert [(one.value, one.key) for one in got] == [
        (b"3", "b"),
        (b"4", b"c"),
        (b"", None),
        (b"5", "e"),
        (b"6", "d"),
    ]
    assert [one.id for one in got] == [*(MessageId(first.ledger, entry, at) for at in (1, 2, 4, 6)), last]
    assert [one.sequence_id for one in got] == [2, 3, 5, 7, 1]
    assert (dict(got[0].properties), got[0].event_time) == ({"x": "y"}, 5)


async def test_a_table_view_over_both(served: Served) -> None:
    client, pulsar = served
    native = await client.create_producer("t")
    await native.send(b"1", "a")
    two = batch([single(b"2", partition_key="a"), single(b"3", partition_key="b")])
    await pulsar.send(two, frame(b"4", partition_key="c"))
    async with client.create_table_view("t") as view:
        assert view.items() == [("a", b"2"), ("b", b"3"), ("c", b"4")]
        await pulsar.send(frame(b"", partition_key="a", null_value=True))
        await view.refresh()
        assert view.items() == [("b", b"3"), ("c", b"4")]


def _entry(*frames: bytes) -> Entry:
    admitted = admit_pulsar(frames)
    data = encode_entry(
        admitted.batches, admitted.counts, [0] * len(frames), ["p"], first_index=0, append_time_ms=9
    )
    return Entry(data)


def test_over_http() -> None:
    entry = _entry(
        batch(
            [single(b"a", {"x": "y"}, partition_key="k", sequence_id=3), single(None, sequence_id=4)],
            sequence_id=3,
        )
    )
    one = response(FoundMessage(entry, 1, 2, 0))
    assert one.body == b"a"
    assert one.headers["X-Pulsar-PROPERTY"] == '{"x":"y"}'
    assert one.headers["X-Pulsar-partition-key"] == "k"
    assert one.headers["X-Pulsar-sequence-id"] == "3"
    assert one.headers["X-Pulsar-Message-ID"] == f"1:{2 << 20}:0"
    both = response(FoundMessage(entry, 1, 2, 1), whole=True)
    assert both.headers["X-Pulsar-num-batch-message"] == "2"
    assert both.headers["X-Pulsar-Message-ID"] == f"1:{2 << 20}"
    with pytest.raises(MagnetarError, match="encrypted"):
        response(FoundMessage(_entry(encrypted(1)), 1, 2, 0))


def test_bookie_read_names_what_it_cannot_read() -> None:
    entry = _entry(frame(b"a", partition_key="k", sequence_id=7), encrypted(2), frame(b"b"))
    found = decode_payload(entry.data)
    rows: Sequence[dict[str, Any]] = found["messages"]
    assert found["kind"] == "messages"
    assert [row.get("value") for row in rows] == ["a", None, "b"]
    assert (rows[0]["key"], rows[0]["sequence_id"]) == ("k", 7)
    assert (rows[1]["index"], "encrypted" in rows[1]["error"]) == (1, True)
    assert rows[2]["index"] == 3
    _, line, _ = _message_lines(entry.data)
    assert line.startswith("[1] p: a batch was encrypted")
