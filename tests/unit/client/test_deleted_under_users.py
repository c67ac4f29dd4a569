"""What was deleted is gone for those who use it: they learn it, and do not make it again."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from magnetar.client import Client, SubscriptionNotFound, TopicNotFound
from support.served_broker import connect_to, serving


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as server, connect_to(server) as client:
        yield client


async def test_rule_50_consumers_of_a_deleted_subscription_end_with_subscription_not_found(
    client: Client,
) -> None:
    producer = await client.create_producer("t")
    consumers = [await client.subscribe("t", "s", type="shared", start="earliest") for _ in range(2)]
    waiting = [asyncio.ensure_future(consumer.receive(10.0)) for consumer in consumers]
    await asyncio.sleep(0)
    await client.admin.delete_subscription("t", "s", force=True)
    for receiving in waiting:
        with pytest.raises(SubscriptionNotFound):
            await receiving
    with pytest.raises(SubscriptionNotFound):
        await consumers[0].unsubscribe()
    await producer.send(b"0")
    assert not (await client.admin.topic_stats("t"))["subscriptions"], "nobody makes it again"


async def test_rule_50_users_of_a_deleted_topic_end_with_topic_not_found(client: Client) -> None:
    producer = await client.create_producer("t")
    consumer = await client.subscribe("t", "s")
    reader = await client.create_reader("t")
    waiting = [asyncio.ensure_future(user.receive(10.0)) for user in (consumer, reader)]
    await asyncio.sleep(0)
    await client.admin.delete_topic("t", force=True)
    for receiving in waiting:
        with pytest.raises(TopicNotFound):
            await receiving
    with pytest.raises(TopicNotFound):
        await producer.send(b"0")
    assert not await client.admin.list_topics(), "nobody makes it again"


async def test_messages_under_way_to_a_topic_that_is_deleted_fail_and_do_not_make_it_again(
    client: Client,
) -> None:
    producer = await client.create_producer("t")
    receipts = [producer.send_nowait(b"%d" % n) for n in range(10)]
    await client.admin.delete_topic("t", force=True)
    results = await asyncio.gather(*[_result(receipt) for receipt in receipts], return_exceptions=True)
    for error in results:
        assert not isinstance(error, BaseException) or isinstance(error, TopicNotFound)
    with pytest.raises(TopicNotFound):
        await producer.send(b"more")
    assert not await client.admin.list_topics()


async def _result(receipt: object) -> object:
    return await receipt  # type: ignore[misc]
