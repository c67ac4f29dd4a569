"""The broker over the real ledger client and bookies in memory: the fakes of the other tests promise what it keeps."""

from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.proto import commands as c
from magnetar.proto.errors import BookieUnavailable, TopicNotServed
from support.bookies import Bookies
from support.broker_kit import FakeClient, running_broker, settle


@pytest.fixture(params=[1, 3])
def bookies(request: pytest.FixtureRequest) -> Bookies:
    kit = Bookies(*[f"b{n}" for n in range(request.param + 1)])
    kit.quorum = {1: (1, 1, 1), 3: (3, 3, 2)}[request.param]  # type: ignore[attr-defined]
    return kit


def start(bookies: Any, client: Any, **settings: Any) -> Any:
    ensemble, write, ack = bookies.quorum
    return running_broker(
        client,
        bookies.metadata,
        ensemble_size=ensemble,
        write_quorum=write,
        ack_quorum=ack,
        retry_initial_ms=1,
        **settings,
    )


async def crash(broker: Broker) -> None:
    for topic in list(broker.topics.values()):
        topic.ledger.fence(TopicNotServed("crash"))
    await broker.close()


async def test_publish_tail_ack_crash_and_recover(bookies: Any) -> None:
    sent = [b"%d" % n for n in range(40)]
    ledgers = bookies.client()
    async with start(bookies, ledgers, max_ledger_entries=3) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer(type="shared")
        for first in range(0, 40, 4):
            client.publish(*sent[first : first + 4], first=first)
            await client.received(first + 4)
        await client.confirmed(40)
        await client.ack(*[m.row() for m in client.messages if int(m.value) % 3])
        await crash(broker)
    await ledgers.close()
    ledgers = bookies.client()
    async with start(bookies, ledgers, max_ledger_entries=3) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await client.received(14)
        await settle()
        assert client.values == [value for value in sent if int(value) % 3 == 0]
        reader = FakeClient(broker)
        await reader.consumer(2, "", durable=False)
        answer = await client.producer()
        client.publish(b"new", epoch=answer["epoch"])
        assert (await reader.received(41))[-1] == b"new"
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["next_index"] == 41
    await ledgers.close()


async def test_two_owners(bookies: Any) -> None:
    first, second = bookies.client(), bookies.client()
    async with start(bookies, first) as old, start(bookies, second) as new:
        client = FakeClient(old)
        await client.producer()
        client.publish(b"a")
        await client.confirmed(1)
        reader = FakeClient(new)
        await reader.consumer(2, "", durable=False)
        assert await reader.received(1) == [b"a"]
        client.publish(b"b", first=1)
        await client.until(lambda: client.failures)
        assert client.failures[0].code == TopicNotServed.code
        assert reader.values == [b"a"]
    await first.close()
    await second.close()


async def test_a_bookie_that_fails_every_add(bookies: Any) -> None:
    names = list(bookies)
    ledgers = bookies.client()
    async with start(bookies, ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        for name in names:
            bookies[name].fail(BookieUnavailable("down"))
        client.publish(b"1", first=1)
        client.publish(b"2", first=2)
        await settle(200)
        assert len(client.receipts) == 1
        for name in names:
            bookies[name].fail(None)
        await client.confirmed(3)
        reader = FakeClient(broker)
        await reader.consumer(2, "", durable=False)
        assert await reader.received(3) == [b"0", b"1", b"2"]
    await ledgers.close()
