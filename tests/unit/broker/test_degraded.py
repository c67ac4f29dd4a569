"""A topic over three bookies of which one goes and comes back: 3/3/2, then 2/2/2, then 3/3/2 again, and nothing is lost."""

import random
from typing import Any

from magnetar.ledger import BookieFacts, LedgerClient, LedgerSettings, LocalTransport, StaticBookies
from magnetar.ledger.core.degrade import describe
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.proto.errors import BookieUnavailable
from support.bookies import Bookies
from support.broker_kit import FakeClient, running_broker, settle


async def striping_of(bookies: Bookies, ledger_id: int) -> str:
    node = await bookies.metadata.get(ledger_path(ledger_id))
    assert node is not None
    return describe(LedgerMetadata.decode(node.value, ledger_id).striping)


async def test_a_topic_goes_on_with_the_bookies_that_are_left_and_returns_to_full_ledgers() -> None:
    bookies = Bookies("a", "b", "c")
    directory = StaticBookies(dict.fromkeys(bookies, ("127.0.0.1", 1)))
    directory.on_suspected = lambda _: None  # as with a survey, whose answers come from this test
    ledgers = LedgerClient(
        StoredLedgers(bookies.metadata),
        LocalTransport(bookies),
        directory,
        LedgerSettings(ensemble_size=3, write_quorum=3, ack_quorum=2, minimum_write_quorum=2),
        random.Random(1),
        bookies.clock,
    )
    sizes: dict[str, Any] = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2, "retry_initial_ms": 1}
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
        await client.consumer()
        await client.received(6)
        assert client.values == [b"%d" % number for number in range(6)]
    await ledgers.close()
