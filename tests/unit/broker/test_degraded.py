"""A topic over three bookies of which one goes and comes back: 3/3/2, then 2/2/2, then 3/3/2 again, and nothing is lost."""

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest

from magnetar.ledger import BookieFacts, LedgerClient, LedgerSettings, LocalTransport, StaticBookies
from magnetar.ledger.core.degrade import describe
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.placement.chooser import BookieChooser, NewEnsemble
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.proto import commands as c
from magnetar.proto.errors import BookieUnavailable
from support.bookies import Bookies
from support.broker_kit import FakeClient, degraded_topics, running_broker, settle
from support.virtual_time import in_virtual_time


async def striping_of(bookies: Bookies, ledger_id: int) -> str:
    node = await bookies.metadata.get(ledger_path(ledger_id))
    assert node is not None
    return describe(LedgerMetadata.decode(node.value, ledger_id).striping)


async def test_a_topic_goes_on_with_the_bookies_that_are_left_and_returns_to_full_ledgers() -> None:
    bookies = Bookies("a", "b", "c")
    directory = bookies.directory()
    directory.on_suspected = lambda _: None  # as with a survey, whose answers come from this test
    ledgers = bookies.client(seed=1, directory=directory)
    sizes: dict[str, Any] = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2, "retry_initial_ms": 1}
    sizes |= {"minimum_write_quorum": 2, "ledger_change_spread_ms": 0}
    async with running_broker(ledgers, bookies.metadata, **sizes) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        (topic,) = broker.topics.values()
        bookies["b"].fail(BookieUnavailable("down"))
        for number in (1, 2, 3):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
        await settle()
        listed = topic.ledger.list.ledgers
        assert [await striping_of(bookies, info.ledger_id) for info in listed] == ["3/3/2", "2/2/2"]
        assert broker.figures()["degraded_ledgers_total"] == 1
        assert await degraded_topics(broker) == 1
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["degraded"] is stats["open_ledger"]["degraded"] is True
        opened = stats["open_ledger"]
        assert [opened[f"{name}"] for name in ("ensemble_size", "write_quorum", "ack_quorum")] == [2, 2, 2]
        assert sorted(opened["bookies"]) == ["a", "c"]
        assert broker.figures()["bookies_writable"] == 2
        bookies["b"].fail(None)
        directory.answered("b", BookieFacts())
        for number in (4, 5):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
            await settle()
        listed = topic.ledger.list.ledgers
        assert [await striping_of(bookies, info.ledger_id) for info in listed][-1] == "3/3/2"
        assert len(listed) == 3, "one ledger more for each change, not one for each entry"
        assert await degraded_topics(broker) == 0
        assert (await client.ask(c.TopicStats, "orders"))["degraded"] is False
        await client.consumer()
        await client.received(6)
        assert client.values == [b"%d" % number for number in range(6)]
    await ledgers.close()


class Party:
    """Bookies that come and go, a ledger client that has no minimum of its own, and a broker that has."""

    def __init__(self, *names: str) -> None:
        self.bookies = Bookies(*names)
        self.directory = StaticBookies(dict.fromkeys(self.bookies, ("127.0.0.1", 1)))
        self.directory.on_suspected = lambda _: None
        self.ledgers = LedgerClient(
            StoredLedgers(self.bookies.metadata),
            LocalTransport(self.bookies),
            self.directory,
            LedgerSettings(),
            random.Random(1),
            self.bookies.clock,
        )

    def down(self, name: str) -> None:
        self.bookies[name].fail(BookieUnavailable("down"))

    def back(self, name: str) -> None:
        self.bookies[name].fail(None)
        self.directory.answered(name, BookieFacts())


TWO: dict[str, Any] = {
    "ensemble_size": 2,
    "write_quorum": 2,
    "ack_quorum": 2,
    "minimum_write_quorum": 1,
    "retry_initial_ms": 1,
}


async def degraded_topic(party: Party, client: FakeClient) -> None:
    await client.producer()
    client.publish(b"0")
    await client.confirmed(1)
    party.down("b")
    client.publish(b"1", first=1)
    await client.confirmed(2)
    await settle()


async def test_an_idle_topic_returns_to_full_ledgers_with_the_rounds_of_maintenance() -> None:
    party = Party("a", "b")
    async with running_broker(
        party.ledgers, party.bookies.metadata, **TWO, ledger_change_spread_ms=0
    ) as broker:
        client = FakeClient(broker)
        await degraded_topic(party, client)
        (topic,) = broker.topics.values()
        topic.maintain()
        await settle()
        assert await degraded_topics(broker) == 1, "as long as there is one bookie"
        party.back("b")
        topic.maintain()
        await settle()
        assert await degraded_topics(broker) == 0
        assert topic.ledger.appending.state.value == "idle", "its next message opens a full ledger"
        client.publish(b"2", first=2)
        await client.confirmed(3)
        last = topic.ledger.list.ledgers[-1]
        assert await striping_of(party.bookies, last.ledger_id) == "2/2/2"
    await party.ledgers.close()


@in_virtual_time
async def test_thousands_of_topics_do_not_return_at_once() -> None:
    """Each waits for its own moment; one whose bookie is lost again by then stays where it is."""
    party = Party("a", "b")
    async with running_broker(
        party.ledgers, party.bookies.metadata, **TWO, ledger_change_spread_ms=30_000
    ) as broker:
        clients = [FakeClient(broker) for _ in range(40)]
        for number, client in enumerate(clients):
            await client.producer(topic=f"topic-{number}")
            client.publish(b"0")
            await client.confirmed(1)
        party.down("b")
        for client in clients:
            client.publish(b"1", first=1)
            await client.confirmed(2)
        assert await degraded_topics(broker) == 40
        party.back("b")
        for topic in broker.topics.values():
            topic.maintain()
        left: list[float] = []
        for _ in range(31):
            await asyncio.sleep(1)
            left.append(await degraded_topics(broker))
        assert left[-1] == 0, "after the spread all are back"
        steps = [before - after for before, after in pairwise([40.0, *left])]
        assert max(steps) <= 8, steps
    await party.ledgers.close()


async def test_a_degraded_ledger_that_does_not_say_so_is_found() -> None:
    """The defect: too few bookies, and nobody is told. The figures go by what the ledger is, not by what it says."""
    party = Party("a", "b")
    ensemble = BookieChooser.ensemble

    def silent(self: BookieChooser, asked: Striping, minimum: int) -> NewEnsemble:
        return ensemble(self, asked, minimum)._replace(degraded=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BookieChooser, "ensemble", silent)
        async with running_broker(
            party.ledgers, party.bookies.metadata, **TWO, ledger_change_spread_ms=0
        ) as broker:
            client = FakeClient(broker)
            await degraded_topic(party, client)
            (topic,) = broker.topics.values()
            assert topic.ledger.appending.open_ledger is not None
            assert (
                topic.ledger.appending.open_ledger.writer.metadata.properties.get("degraded_from") is None
            ), "planted"
            assert topic.degraded
            assert (await client.ask(c.TopicStats, "orders"))["degraded"] is True
            assert await degraded_topics(broker) == 1
    await party.ledgers.close()


async def test_below_the_minimum_nothing_is_written_and_the_producer_learns_why() -> None:
    party = Party("a", "b", "c")
    settings = TWO | {"ensemble_size": 3, "write_quorum": 3, "minimum_write_quorum": 2}
    async with running_broker(party.ledgers, party.bookies.metadata, **settings) as broker:
        client = FakeClient(broker)
        await degraded_topic(party, client)
        party.down("c")
        client.publish(b"2", first=2)
        await client.until(lambda: any("minimum_write_quorum=2" in text for text in reasons(client)))
        assert sum(row[1] for row in client.receipts) == 2
        party.back("c")
        await client.confirmed(3)
    await party.ledgers.close()


def reasons(client: FakeClient) -> list[str]:
    return [frame.message for frame, _ in client.frames if isinstance(frame, c.SendDelayed)]
