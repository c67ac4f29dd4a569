"""The broker over the real ledger client and bookies in memory: the fakes of the other tests promise what it keeps."""

import asyncio
import contextlib
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.proto import commands as c
from magnetar.proto.errors import BookieUnavailable, ConnectionLost, MagnetarError, TopicNotServed
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.virtual_time import in_virtual_time


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


def explicit_lacs(bookies: Bookies) -> list[int]:
    """The ledgers of all requests that wrote an explicit LAC."""
    return [
        call[1] for bookie in bookies.values() for call in bookie.calls if call[0] == "write_last_confirmed"
    ]


@in_virtual_time
async def test_a_topic_at_a_low_rate_costs_its_bookies_one_record_a_message() -> None:
    """The broker reads the tail of its own ledgers, so their readers learn nothing from an explicit LAC (rule 19)."""
    bookies = Bookies("b0", "b1", "b2")
    bookies.quorum = (3, 3, 2)  # type: ignore[attr-defined]
    ledgers = bookies.client()
    async with start(bookies, ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer(type="shared")
        for number in range(10):
            client.publish(b"x", first=number)
            await client.received(number + 1)
            await client.ack(client.messages[-1].row())
            await asyncio.sleep(1.0)
        assert explicit_lacs(bookies) == []
        await crash(broker)
    await ledgers.close()
    ledgers = bookies.client()
    async with start(bookies, ledgers) as broker:  # the recovery finds the end by itself (rule 15)
        client = FakeClient(broker)
        reader = FakeClient(broker)
        await reader.consumer(2, "", durable=False)
        assert len(await reader.received(10)) == 10
        await client.consumer(type="shared")
        await settle()
        assert client.values == []
    await ledgers.close()


@pytest.mark.parametrize("kind", ["topic", "cursor"])
async def test_a_ledger_that_could_not_be_named_in_metadata_has_no_writer_any_more(
    bookies: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its outcome is not known, so the ledger stays; whoever finds it named recovers it."""
    ledgers = bookies.client()
    async with start(bookies, ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer(type="shared")
        if kind == "cursor":
            client.publish(b"0")
            await client.received(1)
        before = len(ledgers._writers)
        put, get, lost = bookies.metadata.put, bookies.metadata.get, 0

        async def lose(path: str, *given: Any, **named: Any) -> Any:
            nonlocal lost
            if path.startswith("/topics/") and lost < 2:  # the write, and its being read back
                lost += 1
                raise ConnectionLost("no server answers")
            return await (put if given else get)(path, *given, **named)

        monkeypatch.setattr(bookies.metadata, "put", lose)
        monkeypatch.setattr(bookies.metadata, "get", lose)
        if kind == "topic":
            client.publish(b"0")
            await client.received(1)
        else:
            with contextlib.suppress(MagnetarError):
                await client.ack(client.messages[0].row())
        await settle()
        assert lost == 2
        assert len(ledgers._writers) == before + (kind == "topic"), "the cursor is in its pointer now"
    await ledgers.close()


@pytest.mark.parametrize("fenced", [False, True])
async def test_nothing_is_left_of_the_writers_of_a_topic_that_is_not_served_any_more(
    bookies: Any, fenced: bool
) -> None:
    """The writer of a live cursor outlived its topic, and wrote the LAC of a deleted ledger again and again."""
    ledgers = bookies.client()
    async with start(bookies, ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer(type="shared")
        client.publish(b"0")
        await client.received(1)
        await client.ack(client.messages[0].row())
        assert len(ledgers._writers) == 2, "of the topic and of the cursor"
        if fenced:
            await crash(broker)
        else:
            await broker.delete_topic(TOPIC, force=True)
        assert list(ledgers._writers) == []
    await ledgers.close()
