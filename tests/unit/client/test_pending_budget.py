"""What all producers of a client have sent and is not confirmed has one bound: fair, and nobody waits for nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from magnetar.client import AlreadyClosed, Client, InvalidArgument, ProducerQueueFull, SendTimeout, connect
from magnetar.client.pending_budget import PendingBudget
from support.client_kit import until
from support.fake_broker import FakeBroker
from support.virtual_time import in_virtual_time


@pytest_asyncio.fixture
async def client(broker: FakeBroker) -> AsyncIterator[Client]:
    async with connect(broker.url, backoff_first=0.01, max_pending_bytes=4000) as client:
        yield client


def budget_of(client: Client) -> PendingBudget:
    return client._pool.pending_budget


async def test_producers_wait_for_one_another_in_turn_and_all_come_to_an_end(
    broker: FakeBroker, client: Client
) -> None:
    rng = random.Random(5)
    producers = [await client.create_producer(f"t{n}") for n in range(7)]
    budget, highest = budget_of(client), 0
    broker.hold_receipts = True

    async def send(number: int) -> None:
        producer = producers[number % 7]
        if rng.random() < 0.3:
            await producer.send_many([b"x" * rng.randrange(300)] * rng.randrange(1, 10))
        else:
            await producer.send(b"x" * rng.randrange(1500))

    sends = [asyncio.create_task(send(n)) for n in range(200)]
    while not all(one.done() for one in sends):
        await asyncio.sleep(0.001)
        highest = max(highest, budget.used)
        if rng.random() < 0.2:
            broker.release_receipts()
            broker.hold_receipts = True
    for producer in producers:
        assert producer.pending_bytes == 0
    await asyncio.gather(*sends)
    assert 3000 < highest <= 4000
    assert budget.used == budget.waiting == 0


async def test_who_does_not_want_to_wait_is_told_which_bound_it_was(
    broker: FakeBroker, client: Client
) -> None:
    broker.hold_receipts = True
    one = await client.create_producer("one")
    other = await client.create_producer("other", block_when_full=False)
    for _ in range(4):
        one.send_nowait(b"x" * 900)
    with pytest.raises(ProducerQueueFull, match=r"by all producers of this client .* of the client is 4000"):
        await other.send(b"x" * 900)
    with pytest.raises(ProducerQueueFull, match="of the client is 4000"):
        await other.send_many([b"x" * 100] * 20)
    small = asyncio.create_task(other.send(b"x" * 20))  # there is room for this
    await until(lambda: broker.topic("other").message_count == 1)
    broker.release_receipts()
    await small
    await one.flush()
    broker.hold_receipts = True
    one.send_nowait(b"x" * 3900)
    waits = asyncio.create_task(one.send(b"x" * 900))
    await until(lambda: budget_of(client).waiting == 1)
    with pytest.raises(ProducerQueueFull, match="of the client is 4000"):
        other.send_nowait(b"")  # nobody overtakes who waits
    broker.release_receipts()
    await waits


async def test_what_is_larger_than_the_bound_goes_alone(broker: FakeBroker, client: Client) -> None:
    one, other = await client.create_producer("one"), await client.create_producer("other")
    broker.hold_receipts = True
    one.send_nowait(b"x" * 900)
    large = asyncio.create_task(other.send(b"x" * 9000))
    behind = asyncio.create_task(one.send(b"y"))
    await until(lambda: budget_of(client).waiting == 2)
    assert len(broker.held) <= 1
    broker.release_receipts()
    await asyncio.gather(large, behind)
    assert broker.topic("other").message_count == 1


async def test_closing_and_failing_give_everything_back(broker: FakeBroker, client: Client) -> None:
    broker.lose_sends = True
    one, other = await client.create_producer("one"), await client.create_producer("other")
    sent = [one.send_nowait(b"x" * 900) for _ in range(4)]
    waiting = [asyncio.create_task(producer.send(b"x" * 900)) for producer in (other, one)]
    await until(lambda: budget_of(client).waiting == 2)
    one.abort()  # as leaving `async with` by an error does
    assert all(isinstance(one, Exception) for one in await asyncio.gather(*sent, return_exceptions=True))
    broker.lose_sends = False
    await waiting[0]
    with pytest.raises(Exception, match="closed"):
        await waiting[1]
    assert budget_of(client).used == budget_of(client).waiting == 0


@in_virtual_time
async def test_a_producer_whose_broker_is_silent_holds_the_others_up_for_its_send_timeout() -> None:
    broker = await FakeBroker.start()
    async with connect(broker.url, max_pending_bytes=4000) as client:
        stuck = await client.create_producer("stuck", send_timeout=5.0)
        free = await client.create_producer("free")
        broker.lose_sends = True
        lost = [stuck.send_nowait(b"x" * 900) for _ in range(4)]
        waits = asyncio.create_task(free.send(b"x" * 900))
        hasty = await client.create_producer("hasty", send_timeout=1.0)
        with pytest.raises(SendTimeout, match=r"no room came free .* by all producers of this client"):
            await hasty.send(b"x" * 900)
        broker.lose_sends = False
        await waits
        for receipt in lost:
            with pytest.raises(SendTimeout):
                await receipt
    await broker.close()


async def test_the_bound_can_be_left_out(broker: FakeBroker) -> None:
    with pytest.raises(InvalidArgument, match="max_pending_bytes must be greater than 0"):
        connect(broker.url, max_pending_bytes=0)
    async with connect(broker.url, max_pending_bytes=None) as client:
        producer = await client.create_producer("t", max_pending_bytes=1 << 40)
        await producer.send_many([b"x" * 1000] * 10)
        assert budget_of(client).used == 0


async def test_who_waits_for_a_turn_learns_that_its_producer_was_closed(broker: FakeBroker) -> None:
    async with connect(broker.url, backoff_first=0.01, max_pending_bytes=4000) as client:
        producers = [await client.create_producer(f"t{n}") for n in range(4)]
        budget = client._pool.pending_budget
        broker.hold_receipts = True
        filling = producers[0].send_nowait(b"x" * 3900)
        waiting = [asyncio.create_task(one.send(b"x" * 1000)) for one in producers[1:]]
        await until(lambda: budget.waiting == 3)
        for one in (2, 1):
            await producers[one + 1].close()
            with pytest.raises(AlreadyClosed):
                await asyncio.wait_for(waiting[one], 1.0)
        broker.release_receipts()
        await asyncio.gather(filling, waiting[0])
        assert (budget.used, budget.waiting) == (0, 0)
