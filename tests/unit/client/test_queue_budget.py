"""Receiver queues of one client share its bytes: none starves, and all of them together hold what the setting says."""

import asyncio
import random
from typing import Any

import pytest

from magnetar.client import InvalidArgument
from magnetar.client.queue_budget import GUARANTEED_BYTES, QueueBudget
from magnetar.client.topic.window import Window
from support.served_broker import connect_to, serving, take
from support.virtual_time import in_virtual_time

BATCH = 10_000


class Queue:
    """A window, the broker that sends as it is granted, and the user."""

    def __init__(self, budget: QueueBudget) -> None:
        self.window = Window(None, 1 << 20, budget)
        self.queued: list[int] = []  # bytes of the deliveries that wait
        self.granted = 0  # at the broker

    def ask(self) -> None:
        permits = self.window.grant(len(self.queued), sum(self.queued))
        self.granted += 0 if permits is None else permits[1]

    def send(self, size: int) -> None:
        if self.granted > 0:
            self.granted -= size
            self.window.received(1, size)
            self.queued.append(size)
            self.window.charge(sum(self.queued))

    def take(self) -> None:
        if self.queued:
            self.queued.pop(0)
        else:
            self.window.found_empty()
        self.ask()


@pytest.mark.parametrize("seed", range(10))
def test_the_budget_is_what_the_queues_have_and_bounds_it(seed: int) -> None:
    chance = random.Random(seed)
    budget = QueueBudget(4 << 20)
    queues = [Queue(budget) for _ in range(20)]
    for _ in range(3000):
        queue = chance.choice(queues[: chance.choice([3, 20])])
        if chance.random() < 0.6:
            queue.send(chance.choice([100, BATCH]))
        else:
            queue.take()
        held = [max(one.granted, 0) + sum(one.queued) for one in queues]
        assert budget.used == sum(held)
        assert budget.used <= budget.limit + len(queues) * (GUARANTEED_BYTES + BATCH)
    for queue in queues:
        queue.queued.clear()
        queue.ask()
        assert queue.granted > 0, "a queue that is empty can get something"
        queue.window.reset()
        queue.window.charge(0)
    assert budget.used == 0


@in_virtual_time
async def test_consumers_that_nobody_reads_hold_what_the_client_may_hold() -> None:
    async with (
        serving() as server,
        connect_to(server) as producing,
        connect_to(server, max_queued_bytes=1 << 20) as client,
    ):
        names = [f"t{number}" for number in range(10)]
        for name in names:
            async with producing.create_producer(name) as producer:
                for _ in range(50):
                    await producer.send_many([b"x" * 1000] * 10)
        consumers = [await client.subscribe(name, "s", start="earliest") for name in names[:5]]
        consumers.append(await client.subscribe(names[5:], "s", start="earliest"))
        members: Any = [one for consumer in consumers for one in consumer._consumer.consumers.values()]

        def queued() -> int:
            return sum(member._queued_bytes for member in members)

        await asyncio.sleep(10.0)
        assert queued() > 900_000
        assert queued() <= client._pool.queue_budget.limit + 10 * (GUARANTEED_BYTES + 11_000)
        for consumer, count in zip(consumers, [500] * 5 + [2500], strict=True):
            assert len(await take(consumer, count)) == count, "whatever the others hold"
            await consumer.close()
        assert client._pool.queue_budget.used == 0


@in_virtual_time
@pytest.mark.parametrize("acked", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_rule_44_a_message_that_is_kept_does_not_keep_its_entry(acked: bool, at_once: bool) -> None:
    async with serving() as server, connect_to(server) as client:
        async with client.create_producer("t") as producer:
            for number in range(40):
                await producer.send_many(
                    [b"x" * 10_000] * 10,
                    keys=[f"k{number}"] * 10,
                    properties=[{"n": str(n)} for n in range(10)],
                    event_times=list(range(10)),
                )
        consumer = await client.subscribe("t", "s", start="earliest")
        kept: list[Any] = []
        looked_at: list[Any] = []
        for _ in range(20 if at_once else 400):
            batch = await consumer.receive_batch() if at_once else [await consumer.receive(10.0)]
            assert batch
            looked_at.append(batch[0].properties)
            if acked:
                await consumer.ack(batch)
            await asyncio.sleep(0.02)  # acknowledgements are sent after 0.1 s
            kept += [message for message in batch if message.sequence_id % 10 == 3]
        deliveries = list({id(one.delivery): one.delivery for one in kept}.values())
        assert len(deliveries) >= 20
        assert sum(len(one.entry.data) for one in deliveries[:-8]) < 1_000 * len(deliveries)
        for message in kept:
            n = message.sequence_id % 10
            assert message.value == b"x" * 10_000
            assert (message.key, message.properties) == (f"k{message.sequence_id // 10}", {"n": str(n)})
            assert (message.event_time, message.producer_name != "") == (n, True)
            assert message.publish_time > 0
        await consumer.ack(kept, receipt=True)


@in_virtual_time
async def test_what_is_lost_with_a_connection_is_given_back() -> None:
    async with serving() as server, connect_to(server) as client:
        async with client.create_producer("t") as producer:
            await producer.send_many([b"x" * 1000] * 10)
        consumer = await client.subscribe("t", "s", start="earliest")
        await asyncio.sleep(1.0)
        budget = client._pool.queue_budget
        before = budget.used
        assert before == 16 << 20, "receiver_queue_bytes"
        (await client._pool.to_service()).connection.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert budget.used == 0
        await take(consumer, 10)
        assert budget.used <= before
        await consumer.close()
        assert budget.used == 0


def test_the_setting_is_checked() -> None:
    from magnetar.client import connect

    with pytest.raises(InvalidArgument, match="max_queued_bytes must be greater than 0"):
        connect("magnetar://127.0.0.1:1", max_queued_bytes=0)
