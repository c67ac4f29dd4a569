"""Attaching staged ledgers: all of a batch at once, once, in order, seen by everybody."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from magnetar.broker.log.appending import State
from magnetar.ledger import LedgerClient
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    InvalidArgument,
    MagnetarError,
    RequestTimeout,
    TooManyRequests,
    TopicNotServed,
)
from magnetar.proto.ids import MessageId
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, FakeClock, settle
from support.export_kit import (
    Job,
    crash,
    export_broker,
    open_ledger,
    published,
    read_all,
    record_of,
    small_broker,
    staged_nodes,
    stored_ledgers,
)
from support.virtual_time import in_virtual_time


def loaded(broker: Any) -> Any:
    return broker.topics[str(TOPIC)]


async def test_a_batch_of_two_ledgers_behind_published_messages(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        late = await job.stage([b"d"], [b"e", b"f"])  # staged first, attached last
        early = await job.stage([b"b", b"c"])
        client = await published(broker, b"a")
        assert await read_all(broker, 1) == [b"a"]
        answer = await job.attach(0, early, late)
        record = await record_of(bookies)
        ids = [info.ledger_id for info in record.ledgers]
        assert ids == sorted(ids)
        assert [info.stored_id for info in record.ledgers][1:] == [early[0], late[0]]
        assert [info.first_index for info in record.ledgers] == [0, 1, 3]
        assert [info.messages for info in record.ledgers] == [1, 2, 3]
        assert answer == {"attached": True, "first": ids[1], "end": [ids[2], 2, 0]}
        assert min(ids[1:]) > max(late[0], early[0])
        client.publish(b"g", first=1)
        await client.confirmed(2)
        assert await read_all(broker, 7) == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
        assert await staged_nodes(bookies) == []
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["next_index"] == stats["stored_messages"] == 7
        assert [row["stored_ledger"] for row in stats["ledgers"]][1:3] == [early[0], late[0]]
        assert broker.figures()["attached_messages_total"] == 5
        await job.close()
    # Another owner reads the same.
    async with export_broker(bookies, ledgers) as broker:
        assert await read_all(broker, 7) == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]


async def test_a_batch_is_attached_once(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        row = await job.stage([b"a"])
        assert (await job.attach(4, row))["attached"]
        assert await job.client.ask(c.QueryState, "orders", "q") == {"batch": 4}
        assert await job.client.ask(c.QueryState, "orders", "other") == {"batch": -1}
        again = await job.stage([b"a"])  # the task was replayed
        for batch in (4, 3):
            answer = await job.attach(batch, again)
            assert (answer["attached"], answer["first"]) == (False, None)
        await settle()
        assert again[0] not in await stored_ledgers(bookies)
        assert row[0] in await stored_ledgers(bookies)
        assert not (await job.attach(4, row))["attached"], (
            "a repeated request discards nothing that is attached"
        )
        assert row[0] in await stored_ledgers(bookies)
        assert (await job.attach(4, await job.stage([b"b"]), query="other"))["attached"]
        assert await read_all(broker, 2) == [b"a", b"b"]
        await crash(broker)
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        await broker.topic(TOPIC, create=False)
        assert await job.client.ask(c.QueryState, "orders", "q") == {"batch": 4}
        assert not (await job.attach(4, await job.stage([b"c"])))["attached"]
        assert await read_all(broker, 2) == [b"a", b"b"]


async def test_another_batch_of_a_number_that_is_taken_is_an_error(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    """Rule 43: a checkpoint begun anew, a backfill, or a second write of a batch is not taken for the same batch again."""
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        assert (await job.attach(4, await job.stage([b"a"]), content=11))["attached"]
        assert not (await job.attach(4, await job.stage([b"a"]), content=11))["attached"]
        with pytest.raises(InvalidArgument, match="has batch 4 of it, with other rows"):
            await job.attach(4, await job.stage([b"b"]), content=12)
        with pytest.raises(InvalidArgument, match="has batch 4 of it, which is later"):
            await job.attach(3, await job.stage([b"a"]), content=11)
        assert not (await job.attach(4, await job.stage([b"b"])))["attached"], (
            "without a digest the number decides"
        )
        with pytest.raises(InvalidArgument, match="not possible"):
            await job.attach(5, content=-1)
        assert await read_all(broker, 1) == [b"a"]
        await crash(broker)
    async with small_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        assert not (await job.attach(4, await job.stage([b"a"]), content=11))["attached"]
        assert (await job.attach(5, await job.stage([b"c"]), content=13))["attached"]
        assert not (await job.attach(5, await job.stage([b"c"]), content=13))["attached"]
        with pytest.raises(InvalidArgument, match="has batch 5 of it, with other rows"):
            await job.attach(5, await job.stage([b"d"]), content=14)
        # One after another, of which the second finds the first under way.
        answers = await asyncio.gather(
            job.attach(6, await job.stage([b"e"]), content=15),
            job.attach(6, await job.stage([b"f"]), content=16),
            return_exceptions=True,
        )
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        assert [type(one) for one in refused] == [InvalidArgument]
        await crash(broker)
    async with small_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        await broker.topic(TOPIC, create=False)
        with pytest.raises(InvalidArgument, match="has batch 6 of it, which is later"):
            await job.attach(5, await job.stage([b"c"]), content=13)
        assert (await read_all(broker, 3))[:2] == [b"a", b"c"]


async def test_times_never_fall_along_a_topic(bookies: Bookies, ledgers: LedgerClient) -> None:
    """Whatever the clocks of tasks and brokers do: a reader of a window of time misses nothing that is committed later."""
    clock = FakeClock(1_000)

    async def times() -> list[tuple[int, int]]:
        return [(info.first_append_ms, info.last_append_ms) for info in (await record_of(bookies)).ledgers]

    async with export_broker(bookies, ledgers, clock=clock) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        early, late = await job.stage([b"b"], time_ms=10), await job.stage([b"c"], [b"d"], time_ms=9_999)
        clock.now = 2_000
        await job.attach(0, early, late)
        clock.now = 1_500  # set back
        client.publish(b"e", first=1)
        await client.confirmed(2)
        await job.attach(1, await job.stage([b"f"], time_ms=1))
        assert await times() == [
            (1_000, 1_000),
            (2_000, 2_000),
            (2_000, 2_000),
            (2_000, 2_000),
            (2_000, 2_000),
        ]
        await crash(broker)
    async with small_broker(bookies, ledgers, clock=FakeClock(1_200)) as broker:  # the next owner's is behind
        job = Job(bookies, broker)
        await job.attach(2, await job.stage([b"g"], time_ms=5_000))
        await broker.topic(TOPIC, create=False)
        await loaded(broker).ledger.close()
        assert (await times())[5:] == [(2_000, 2_000)]


async def test_empty_ledgers_leave_and_an_empty_batch_counts(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        empty, full = await job.stage(), await job.stage([b"b"])
        assert (await job.attach(0, empty, full))["attached"]
        assert empty[0] not in await stored_ledgers(bookies)
        client.publish(b"c", first=1)
        await client.confirmed(2)
        writing = await open_ledger(client)
        nothing = await job.stage()
        answer = await job.attach(1, nothing)
        assert (answer["attached"], answer["first"]) == (True, None)
        assert (await job.attach(2))["attached"]
        assert await open_ledger(client) == writing, "nothing to attach closes no ledger"
        assert await job.client.ask(c.QueryState, "orders", "q") == {"batch": 2}
        assert await staged_nodes(bookies) == []
        assert await read_all(broker, 3) == [b"a", b"b", b"c"]


async def test_what_cannot_be_attached_changes_nothing(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        await published(broker, b"a")
        job = Job(bookies, broker)
        good = await job.stage([b"x", b"y"])
        writing = await job.open()
        other = Job(bookies, broker, "other")
        foreign = await other.stage([b"z"])
        bad: list[tuple[list[Any], str]] = [
            ([good, [writing.ledger_id, 0, 0, 0]], "not closed"),
            ([[good[0], 3, *good[2:]]], "has 2 messages"),
            ([[*good[:2], good[2], good[3] + 1]], "appended until"),
            ([[good[0], 2, 9, 8]], "cannot have these figures"),
            ([good, good], "twice"),
            ([good, foreign], "not staged for topic"),
            ([good, [0, 1, 1, 1]], "not staged for topic"),
            ([good, [(1 << 64) - 1, 1, 1, 1]], "msgpack|not staged"),
            ([[-1, 1, 1, 1]], "not staged"),
        ]
        for rows, message in bad:
            with pytest.raises(InvalidArgument, match=message):
                await job.attach(0, *rows)
        for payload in (b"", b"x", msgpack.packb([[1, 2]]), msgpack.packb({}), b"\x93"):
            with pytest.raises(InvalidArgument, match="msgpack"):
                await job.client.ask(c.AttachLedgers, "orders", "q", 0, payload=payload)
        for query, batch in (("", 0), ("q", -1), ("q", 1 << 63), ("q\n", 1), ("q" * 256, 1)):
            with pytest.raises(InvalidArgument):
                await job.attach(batch, good, query=query)
        assert await job.client.ask(c.QueryState, "orders", "q") == {"batch": -1}
        assert await read_all(broker, 1) == [b"a"]
        assert (await job.attach(0, good))["attached"]
        writing.detach()


async def test_publishers_go_on_in_the_next_ledger_and_lose_nothing(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    """Held bookies: what is pending must be confirmed before the open ledger is closed."""
    async with export_broker(bookies, ledgers, max_outstanding_entries=2) as broker:
        client = await published(broker, b"0")
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        for bookie in bookies.values():
            bookie.hold_adds()
        for number in range(1, 6):
            client.publish(b"%d" % number, first=number)
            await settle(3)
        attaching = asyncio.ensure_future(job.attach(0, row))
        await settle(20)
        client.publish(b"6", first=6)
        await settle(20)
        assert not attaching.done()
        for bookie in bookies.values():
            bookie.release()
        assert (await attaching)["attached"]
        await client.confirmed(7)
        values = await read_all(broker, 8)
        assert [value for value in values if value != b"x"] == [b"%d" % number for number in range(7)]
        assert values.index(b"x") in (3, 4), "behind what was pending, before what came later"
        receipts = [row[0] for row in client.receipts]
        assert receipts == sorted(receipts)


async def test_an_idle_topic_gets_no_ledger_of_its_own(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        await job.attach(0, await job.stage([b"a"]))
        assert loaded(broker).ledger.appending.state is State.IDLE
        assert len((await record_of(bookies)).ledgers) == 1
        client = await published(broker, b"b")
        assert await read_all(broker, 2) == [b"a", b"b"]
        await job.attach(1, await job.stage([b"c"]))
        client.publish(b"d", first=1)
        await client.confirmed(2)
        assert await read_all(broker, 4) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("type_", ["exclusive", "shared"])
async def test_consumers_of_every_kind_see_attached_messages(
    bookies: Bookies, ledgers: LedgerClient, type_: str
) -> None:
    async with export_broker(bookies, ledgers, clock=FakeClock(3_000_000)) as broker:
        await published(broker, b"a")
        job = Job(bookies, broker)
        tail, late = FakeClient(broker), FakeClient(broker)
        await tail.consumer(type=type_)
        await tail.received(1)
        await tail.ack(tail.messages[0].row())
        waiting = FakeClient(broker)
        await waiting.consumer(2, "latest", type=type_, start=("latest", None))
        answer = await job.attach(0, await job.stage([b"b", b"c"], [b"d"]), await job.stage([b"e"]))
        first = answer["first"]
        assert await tail.received(5) == [b"a", b"b", b"c", b"d", b"e"]
        assert await waiting.received(4) == [b"b", b"c", b"d", b"e"]
        ids = [message.id for message in tail.messages]
        assert ids == sorted(ids)
        assert ids[1:4] == [(first, 0, 0), (first, 0, 1), (first, 1, 0)]
        stats = await tail.ask(c.TopicStats, "orders")
        assert stats["subscriptions"]["billing"]["backlog_messages"] == 4
        await tail.ack(*[message.row() for message in tail.messages[1:3]])
        stats = await tail.ask(c.TopicStats, "orders")
        assert stats["subscriptions"]["billing"]["backlog_messages"] == 2
        assert stats["subscriptions"]["billing"]["mark_delete"] == [first, 1, 0]
        last = MessageId.from_bytes(await tail.ask(c.LastMessageId, 1))
        assert last[:3] == ids[4]
        # By id and by time, into an attached ledger and behind it.
        await late.consumer(3, "late", start=("id", MessageId(*ids[3]).to_bytes()), type=type_)
        assert await late.received(2) == [b"d", b"e"]
        await late.ask(c.Seek, 3, ("time", 2_000_000))
        await late.received(6)
        assert late.values[2:] == [b"b", b"c", b"d", b"e"]
        await late.ask(c.Seek, 3, ("time", 2_000_001))
        await tail.ack(*[message.row() for message in tail.messages[3:]])
        await job.close()
        await crash(broker)
    async with export_broker(bookies, ledgers) as broker:  # the cursor is found behind all of it
        again = FakeClient(broker)
        await again.consumer(type=type_)
        client = await published(broker, b"f")
        assert await again.received(1) == [b"f"]
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["subscriptions"]["billing"]["backlog_messages"] == 1
        assert stats["subscriptions"]["latest"]["backlog_messages"] == 5


async def test_who_subscribed_to_an_emptied_topic_sees_what_is_attached(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    """The end of a list without ledgers lies below all position ids to come, whatever ids were discarded meanwhile."""
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        row = await job.stage([b"a"])
        spare = [await job.open() for _ in range(3)]
        drawn = await ledgers.next_id()
        await job.client.ask(
            c.DiscardStaged, "orders", "t", payload=msgpack.packb([w.ledger_id for w in spare])
        )
        consumer = FakeClient(broker)
        await consumer.consumer(start=("latest", None))
        assert loaded(broker).ledger.list.end[0] <= drawn
        await job.attach(0, row)
        assert await consumer.received(1) == [b"a"]
        for writer in spare:
            writer.detach()


async def test_attached_ledgers_are_trimmed_by_their_stored_id(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = await published(broker, b"a")
        consumer = FakeClient(broker)
        await consumer.consumer()
        job = Job(bookies, broker)
        row = await job.stage([b"b"])
        await job.attach(0, row)
        client.publish(b"c", first=1)
        await consumer.received(3)
        await consumer.ack(*[message.row() for message in consumer.messages])
        loaded(broker).maintain()
        await loaded(broker).maintenance.trimmed()
        record = await record_of(bookies)
        assert [info.messages for info in record.ledgers] == [1]
        assert row[0] not in await stored_ledgers(bookies)
        with pytest.raises(InvalidArgument, match="not staged"):
            await job.attach(1, row)


async def test_rule_23_a_conflict_while_attaching_fences(bookies: Bookies, ledgers: LedgerClient) -> None:
    other_client = bookies.client()
    async with (
        export_broker(bookies, ledgers) as old,
        export_broker(bookies, other_client) as new,
    ):
        job = Job(bookies, old)
        row = await job.stage([b"a"])
        old_topic = loaded(old)
        topic = await new.topic(TOPIC, create=False)
        with pytest.raises(MagnetarError) as caught:
            await job.attach(0, row)
        assert caught.value.retryable
        assert old_topic.ledger.appending.state in (State.FENCED, State.CLOSED)
        assert topic.ledger.list.ledgers == []
        # The new owner knows the staged ledger, although it was there before it was asked.
        driver = Job(bookies, new)
        assert (await driver.attach(0, row))["attached"]
        assert await read_all(new, 1) == [b"a"]
    await other_client.close()


@in_virtual_time
async def test_rule_23_a_stale_owner_sweeps_nothing() -> None:
    bookies = Bookies("b1", "b2")
    ledgers, other_client = bookies.client(), bookies.client()
    async with (
        export_broker(bookies, ledgers, staged_ttl_ms=60_000) as old,
        export_broker(bookies, other_client) as new,
    ):
        job = Job(bookies, old)
        row = await job.stage([b"a"])
        stale = loaded(old).export.staging
        driver = Job(bookies, new)
        await new.topic(TOPIC, create=False)
        assert (await driver.attach(0, row))["attached"]
        await asyncio.sleep(61)
        assert await stale.sweep() == 0
        assert row[0] in await stored_ledgers(bookies)
        assert await read_all(new, 1) == [b"a"]
    for client in (ledgers, other_client):
        await client.close()


async def test_concurrent_attaches_and_publishers(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        jobs = [Job(bookies, broker) for _ in range(3)]
        rows = [
            [await job.stage([b"%d.%d" % (number, batch)], transaction=f"{number}") for batch in range(4)]
            for number, job in enumerate(jobs)
        ]

        async def drive(number: int, job: Job) -> None:
            for batch, row in enumerate(rows[number]):
                answers = await asyncio.gather(
                    *[job.attach(batch, row, query=f"q{number}") for _ in range(2)]
                )
                assert [answer["attached"] for answer in answers].count(True) == 1

        driving = asyncio.gather(*[drive(number, job) for number, job in enumerate(jobs)])
        for number in range(40):
            client.publish(b"%d" % number, first=number)
            await asyncio.sleep(0)
        await driving
        await client.confirmed(40)
        values = await read_all(broker, 52)
        assert sorted(values) == sorted(
            [b"%d" % number for number in range(40)] + [b"%d.%d" % (n, b) for n in range(3) for b in range(4)]
        )
        assert [value for value in values if b"." not in value] == [b"%d" % number for number in range(40)]
        for number in range(3):
            mine = [value for value in values if value.startswith(b"%d." % number)]
            assert mine == sorted(mine)
        ids = [info.ledger_id for info in (await record_of(bookies)).ledgers]
        assert ids == sorted(ids)


async def test_deleting_the_topic_meanwhile(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        row = await job.stage([b"b"])
        for bookie in bookies.values():
            bookie.hold_adds()
        client.publish(b"pending", first=1)
        await settle(5)
        attaching = asyncio.ensure_future(job.attach(0, row))
        await settle(5)
        deleting = asyncio.ensure_future(job.client.ask(c.DeleteTopic, "orders", True))
        await settle(5)
        for bookie in bookies.values():
            bookie.release()
        await deleting
        with pytest.raises(MagnetarError):
            await attaching
        await settle()
        assert await stored_ledgers(bookies) == []
        assert await bookies.metadata.children("/topics/public/default/persistent") == []


async def test_closing_the_broker_answers_who_waits(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        row = await job.stage([b"b"])
        for bookie in bookies.values():
            bookie.hold_adds()
        client.publish(b"pending", first=1)
        await settle(5)
        attaching = asyncio.ensure_future(job.attach(0, row))
        await settle(5)
        loaded(broker).ledger.fence(TopicNotServed("lost"))
        with pytest.raises(TopicNotServed):
            await attaching
        for bookie in bookies.values():
            bookie.release()
        assert await staged_nodes(bookies) == [row[0]]


async def test_queries_are_remembered_as_long_as_they_ask_and_bounded(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    clock = FakeClock()
    settings = {"max_attached_queries": 2, "attached_query_ms": 1000}
    async with export_broker(bookies, ledgers, clock=clock, **settings) as broker:
        job = Job(bookies, broker)
        await job.attach(0, query="long")
        await job.attach(0, query="short", remember_ms=10)
        with pytest.raises(TooManyRequests, match="max_attached_queries"):
            await job.attach(0, query="third")
        await job.attach(1, query="long")
        clock.now += 10
        await job.attach(0, query="third")
        assert dict((await record_of(bookies)).attached.items()).keys() == {"long", "third"}
        clock.now += 995
        await job.attach(5, query="third")
        await job.attach(0, query="fourth")
        assert await job.client.ask(c.QueryState, "orders", "long") == {"batch": -1}


class Unsure:
    """A metadata store of which one write of the ledger list has no known outcome: stored, and nobody says so."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.lose = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        found: int = await self.store.put(path, value, version=version)
        if self.lose and path.startswith("/topics"):
            raise RequestTimeout("no answer")
        return found

    async def get(self, path: str) -> Any:
        if self.lose and path.startswith("/topics"):
            self.lose = False
            raise RequestTimeout("no answer")
        return await self.store.get(path)


async def test_an_attachment_without_a_known_outcome_is_never_discarded(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    store = Unsure(bookies.metadata)
    async with export_broker(bookies, ledgers, store) as broker:
        job = Job(bookies, broker)
        row = await job.stage([b"a"])
        store.lose = True
        with pytest.raises(RequestTimeout):
            await job.attach(0, row)
        with pytest.raises(
            MagnetarError
        ):  # the driver gives up, but it is attached: the topic is loaded anew
            await job.client.ask(c.DiscardStaged, "orders", "t")
        assert await job.client.ask(c.DiscardStaged, "orders", "t") == {"discarded": 0}
        assert await job.client.ask(c.QueryState, "orders", "q") == {"batch": 0}
        assert await read_all(broker, 1) == [b"a"]
