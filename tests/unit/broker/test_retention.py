"""Who needs a topic's ledgers: trimming, archiving and the figures of a topic give the same answer (rule 25)."""

from __future__ import annotations

from typing import Any

import msgspec

from magnetar.broker import Topic
from magnetar.broker.export.archived import decode_wanted
from magnetar.proto import commands as c
from magnetar.proto.errors import ServiceNotReady
from support.broker_kit import TOPIC, FakeClient, running_broker, settle


async def trimmed(topic: Topic) -> int:
    """How many ledgers a round trims."""
    before = len(topic.ledger.list.ledgers)
    topic.maintain()
    await topic.trimmed()
    return before - len(topic.ledger.list.ledgers)


async def archivable(topic: Topic, lease: str = "") -> tuple[int, Any]:
    """How many ledgers could be archived, and why no more."""
    rows = [
        (one.ledger_id, one.stored_id, one.entries, one.messages)
        for one in topic.ledger.list.ledgers
        if one.closed
    ]
    wanted = decode_wanted("file:///a", msgspec.msgpack.encode(rows), lease=lease, dry=True)
    answer = await topic.export.archiving.archive(wanted)
    return answer["archived"], answer["kept"] and answer["kept"][1]


async def test_trimming_archiving_and_figures_name_the_same_holder() -> None:
    async with running_broker(max_ledger_entries=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        for number in range(5):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
        await settle()
        topic = broker.topics[str(TOPIC)]
        ids = [info.ledger_id for info in topic.ledger.list.ledgers]

        async def figures() -> tuple[list[int], str]:
            found = await client.ask(c.TopicStats, "orders")
            return found["trimmed_until"], found["retained_by"]

        # Nobody subscribed: nothing is trimmed, all may be archived.
        assert await figures() == ([0, 0, 0], "no durable subscription says what is not needed any more")
        assert (await trimmed(topic), (await archivable(topic))[0]) == (0, 5)
        # Two subscriptions, of which one is slow; a cursor that cannot be read; a reader; a lease.
        fast, slow = FakeClient(broker), FakeClient(broker)
        await fast.consumer(subscription="fast")
        await slow.consumer(subscription="slow")
        await fast.received(5)
        await fast.ack(*[message.row() for message in fast.messages])
        await slow.ack(*[message.row() for message in slow.messages[:1]])
        waiting = ([ids[1], 0, 0], "subscription 'slow' has not acknowledged all of it")
        assert await figures() == waiting
        assert await archivable(topic) == (1, waiting[1])
        topic.recovery.unavailable["lost"] = ServiceNotReady("its bookies are away")
        assert await figures() == ([0, 0, 0], "where subscription 'lost' stands cannot be read")
        assert await archivable(topic) == (0, "where subscription 'lost' stands cannot be read")
        assert await trimmed(topic) == 0
        topic.recovery.unavailable.clear()
        await client.consumer(7, "", durable=False, permits=0)
        assert await figures() == ([ids[0], 0, 0], "'reader-1' is reading it")
        assert (await archivable(topic), await trimmed(topic)) == ((0, "'reader-1' is reading it"), 0)
        client.frame(c.Flow(0, 7, 1000))
        await settle()
        assert await figures() == waiting
        topic.export.leases.keep("spark", 60_000, 0)
        assert (await figures())[1].startswith("a lease keeps it")
        assert await archivable(topic, "spark") == (1, waiting[1]), (
            "the asking side's own lease does not count"
        )
        topic.export.leases.release("spark")
        assert await trimmed(topic) == 1
        await slow.ack(*[message.row() for message in slow.messages])
        assert (await figures())[1] == ""
        assert await trimmed(topic) == 4
