"""Leaving and abandoning: at once when something went wrong, in order on the wire, and nothing stays behind (rule 40)."""

import asyncio
from itertools import pairwise

import pytest

from magnetar.client import AlreadyClosed, Client, ConsumerBusy, InvalidArgument, MagnetarError, connect
from magnetar.proto.commands import (
    Ack,
    CloseConsumer,
    CloseProducer,
    CreateProducer,
    Subscribe,
    WatchPartitions,
)
from support.client_kit import until
from support.fake_broker import FakeBroker


class BodyFailed(Exception):
    pass


@pytest.mark.parametrize("gone", ["closed", "silent"])
async def test_an_error_in_the_body_leaves_at_once_and_is_the_error_that_is_raised(
    broker: FakeBroker, gone: str
) -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(BodyFailed):  # noqa: PT012
        async with (
            connect(broker.url, backoff_first=0.01) as client,
            client.create_producer("t") as producer,
            client.subscribe("t", "s"),
            client.create_reader("t"),
        ):
            if gone == "closed":
                await broker.server.close(0.0)
            else:
                broker.lose_sends = True
                broker.unanswered += [CloseProducer, CloseConsumer]
            receipt = producer.send_nowait(b"0")
            began = loop.time()
            raise BodyFailed
    assert loop.time() - began < 0.5
    with pytest.raises(AlreadyClosed, match="before the message was confirmed"):
        await receipt
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_body_and_its_timeout_are_told_as_such(broker: FakeBroker) -> None:
    broker.lose_sends = True

    async def body() -> None:
        async with connect(broker.url) as client, client.create_producer("t") as producer:
            await producer.send(b"0")

    task = asyncio.create_task(body())
    await until(lambda: broker.frames_of_sends)
    task.cancel()
    async with asyncio.timeout(1):
        await asyncio.wait([task])
    assert task.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await body()
    assert len(asyncio.all_tasks()) == 1


async def test_after_an_error_queued_acknowledgements_are_sent_all_the_same(broker: FakeBroker) -> None:
    async with connect(broker.url) as client:
        producer = await client.create_producer("t")
        with pytest.raises(BodyFailed):  # noqa: PT012
            async with client.subscribe("t", "s", start="earliest", ack_group_delay=30.0) as consumer:
                await producer.send(b"0")
                await consumer.ack(await consumer.receive(1.0))
                raise BodyFailed
        await until(lambda: broker.received(CloseConsumer))
        assert broker.topic("t").acked["s"] == {(0, 0)}
        kinds = [type(c) for c in broker.commands if isinstance(c, Ack | CloseConsumer)]
        assert kinds == [Ack, CloseConsumer]


@pytest.mark.parametrize("ending", ["close", "abort"])
async def test_rule_40_who_leaves_after_a_refused_message_holds_no_place(
    broker: FakeBroker, ending: str
) -> None:
    """The broker refused it on a connection that lives on, and holds the producer until it is closed or opened again."""
    async with connect(broker.url, backoff_first=30.0, backoff_max=30.0) as client:
        producer = await client.create_producer("t")
        broker.fail_next_send = InvalidArgument("refused")
        with pytest.raises(InvalidArgument):
            await producer.send(b"0")
        if ending == "close":
            await producer.close()
        else:
            with pytest.raises(BodyFailed):
                async with producer:
                    raise BodyFailed
        await until(lambda: broker.received(CloseProducer))
        assert not broker.handlers[0].producers


@pytest.mark.parametrize("turns", range(12))
async def test_an_opening_that_is_cancelled_holds_no_place(
    broker: FakeBroker, client: Client, turns: int
) -> None:
    consumer = asyncio.ensure_future(client.subscribe("t", "s"))
    producer = asyncio.ensure_future(client.create_producer("t", name="p"))
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0.0005)
    consumer.cancel()
    producer.cancel()
    await asyncio.wait([consumer, producer])
    if consumer.cancelled():
        async with asyncio.timeout(1):
            while True:
                try:
                    await client.subscribe("t", "s")
                    break
                except ConsumerBusy:  # the close is on its way
                    await asyncio.sleep(0.01)
    await until(lambda: all(len(handler.producers) <= 1 for handler in broker.handlers))
    for opened, closed in ((Subscribe, CloseConsumer), (CreateProducer, CloseProducer)):
        kinds = [type(c) for c in broker.commands if isinstance(c, opened | closed)]
        assert all(after is opened for before, after in pairwise(kinds) if before is closed)
    [handler] = broker.handlers
    assert len(handler.producers) == (0 if producer.cancelled() else 1)


async def test_closing_twice_at_once_closes_once(broker: FakeBroker, client: Client) -> None:
    producer, consumer = await client.create_producer("t"), await client.subscribe("t", "s")
    await asyncio.gather(producer.close(), producer.close(), consumer.close(), consumer.close())
    await asyncio.gather(client.close(), client.close())
    assert len(broker.received(CloseProducer)) == len(broker.received(CloseConsumer)) == 1
    await until(lambda: not broker.handlers)


async def test_a_close_that_is_cancelled_can_be_repeated(broker: FakeBroker, client: Client) -> None:
    broker.lose_sends = True
    producer = await client.create_producer("t")
    receipt = producer.send_nowait(b"0")
    closing = asyncio.create_task(producer.close())
    await until(lambda: broker.frames_of_sends)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    async with asyncio.timeout(1):
        await producer.close()
    assert receipt.done
    await until(lambda: broker.received(CloseProducer))
    consumer = await client.subscribe("t", "s")
    broker.unanswered.append(CloseConsumer)
    closing = asyncio.create_task(consumer.close())
    await until(lambda: broker.received(CloseConsumer))
    closing.cancel()
    await asyncio.wait([closing])
    async with asyncio.timeout(1):
        await consumer.close()
        with pytest.raises(AlreadyClosed):
            await consumer.receive()


async def test_closing_while_another_error_is_handled_flushes(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    receipt = producer.send_nowait(b"0")
    try:
        raise BodyFailed
    except BodyFailed:
        await producer.close()
    assert (await receipt).entry == 0


@pytest.mark.parametrize("partitions", [1, 3])
async def test_a_client_that_is_closed_while_something_opens_leaves_no_task(
    broker: FakeBroker, partitions: int
) -> None:
    broker.grow("t", partitions)
    broker.unanswered.append(WatchPartitions)
    client = await connect(broker.url, backoff_first=0.01)
    openings = [
        asyncio.ensure_future(one) for one in (client.create_producer("t"), client.subscribe("t", "s"))
    ]
    await until(lambda: len(broker.received(WatchPartitions)) == 2)
    await client.close()
    for one in openings:
        with pytest.raises(MagnetarError):
            await one
    await until(lambda: len(asyncio.all_tasks()) == 1)
