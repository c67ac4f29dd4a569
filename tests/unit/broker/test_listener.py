"""The way of a message through the listener: publish, tail, acknowledge, over fake ledgers."""

from magnetar.proto import commands as c
from support.broker_kit import FakeClient, running_broker, settle


async def test_publish_tail_and_ack() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        answer = await client.producer()
        assert answer["last_sequence_id"] == -1
        await client.consumer()
        client.publish(b"a", b"b", b"c")
        client.publish_batch([b"d", b"e"], first=3)
        assert await client.received(5) == [b"a", b"b", b"c", b"d", b"e"]
        ledger = client.messages[0].id[0]
        assert client.receipts == [(0, 5, ledger, 0, 0)]
        await client.ack(*[message.row() for message in client.messages])
        topic = broker.topics["persistent://public/default/orders"]
        assert topic.subscriptions["billing"].cursor.state.mark_delete == (ledger, 1, 0)
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["subscriptions"]["billing"]["backlog_messages"] == 0
        await settle()
