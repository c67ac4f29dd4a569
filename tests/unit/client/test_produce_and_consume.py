"""The whole way through the client, against a fake broker, on both loops."""

import pytest

from magnetar.client import Client, MessageId, ReceiveTimeout, connect
from support.fake_broker import FakeBroker

both_loops = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])


@both_loops
async def test_what_is_sent_arrives_with_everything(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("orders", name="p")
    sent = await producer.send(b"one", key="k", properties={"a": "1"}, event_time=1234)
    consumer = await client.subscribe("orders", "billing", start="earliest")
    message = await consumer.receive(timeout=1.0)
    assert (message.value, message.key, message.properties) == (b"one", "k", {"a": "1"})
    assert message.id == sent == MessageId(1, 0, 0)
    assert (message.event_time, message.sequence_id, message.producer_name) == (1234, 0, "p")
    assert message.topic == "persistent://public/default/orders"
    assert message.redelivery_count == 0
    assert message.publish_time > 1_600_000_000_000
    await consumer.ack(message, receipt=True)
    assert broker.topic("orders").acked["billing"] == {(0, 0)}
    with pytest.raises(ReceiveTimeout, match="no message within"):
        await consumer.receive(timeout=0.01)


@both_loops
@pytest.mark.parametrize("batching", [True, False])
async def test_a_stream_keeps_its_order(broker: FakeBroker, client: Client, batching: bool) -> None:
    values = [b"%d" % i for i in range(5000)]
    async with (
        client.create_producer("t", batching=batching) as producer,
        client.subscribe("t", "s", start="earliest") as consumer,
    ):
        receipts = [producer.send_nowait(value) for value in values]
        ids = [await receipt for receipt in receipts]
        assert ids == sorted(set(ids))
        received = []
        async for message in consumer:
            received.append(message)
            await consumer.ack(message)
            if len(received) == len(values):
                break
        assert [message.value for message in received] == values
        assert [message.id for message in received] == ids
        assert [message.sequence_id for message in received] == list(range(5000))
    assert broker.frames_of_sends == (5000 if not batching else broker.frames_of_sends)
    assert broker.frames_of_sends >= 5
    assert len(broker.topic("t").acked["s"]) == 5000


async def test_connect_awaited_and_everything_closes(broker: FakeBroker) -> None:
    client = await connect(broker.url)
    consumer = await client.subscribe("t", "s")
    producer = await client.create_producer("t")
    ids = await producer.send_many([b"a", b"b"], keys=["x", None], properties=[None, {"p": "q"}])
    assert ids == [MessageId(1, 0, 0), MessageId(1, 0, 1)]
    async for batch in consumer.batches():
        assert [(m.value, m.key, m.properties) for m in batch] == [(b"a", "x", {}), (b"b", None, {"p": "q"})]
        await consumer.ack_cumulative(batch[-1])
        break
    await client.close()
    assert broker.topic("t").acked["s"] == {(0, 0), (0, 1)}
