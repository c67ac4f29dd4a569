"""A stream's subscription is moved whoever consumes it."""

from magnetar.spark.places import Point
from magnetar.spark.stream_source import _move
from support.served_broker import connect_to, serving


async def test_a_subscription_is_made_and_then_moved_while_somebody_consumes_it() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        ids = await producer.send_many([b"0", b"1", b"2"])
        topic = "persistent://public/default/t"
        await _move(client, topic, "s", Point(ids[1], 1))
        async with client.subscribe("t", "s") as consumer:
            await _move(client, topic, "s", Point(ids[2], 2))
            while (await consumer.receive(10.0)).id != ids[2]:
                pass  # it was on its way before the subscription was moved
