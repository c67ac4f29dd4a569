"""Small batches: one entry of the topic's open ledger, all of it or nothing, and once, whatever dies when."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.broker.export import staged_entries
from magnetar.broker.log.records import TopicRecord
from magnetar.ledger import LedgerClient
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import encode_entry
from magnetar.proto.errors import (
    InvalidArgument,
    MagnetarError,
    TooManyRequests,
    TopicNotServed,
)
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, FakeClock, settle
from support.export_kit import (
    SMALL,
    Job,
    appended,
    crash,
    loaded,
    open_ledger,
    published,
    read_all,
    record_of,
    small_broker,
    staged_nodes,
    stored_ledgers,
)


async def test_rule_47_a_batch_of_more_messages_than_an_entry_may_have_is_attached(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    """Each key_shared subscription looks at the messages of an entry in one turn of the loop."""
    async with small_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        row = await job.stage(*[[b""] * 10_000] * 4)
        assert (await job.attach(0, row))["attached"]
        assert [info.stored_id for info in (await record_of(bookies)).ledgers if info.entries] == [row[0]]


async def test_a_small_batch_is_one_entry_of_the_open_ledger_in_task_order(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with small_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        late = await job.stage([b"d"], [b"e", b"f"])
        early, nothing = await job.stage([b"b", b"c"]), await job.stage()
        client = await published(broker, b"a")
        tail = FakeClient(broker)
        await tail.consumer()
        opened = await open_ledger(client)
        answer = await job.attach(0, early, nothing, late)
        assert answer == {"attached": True, "first": opened, "end": [opened, 2, 0]}
        client.publish(b"g", first=1)
        everything = [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
        assert await tail.received(7) == everything
        ids = [message.id for message in tail.messages]
        assert ids[1:6] == [(opened, 1, index) for index in range(5)]
        assert await read_all(broker, 7) == everything
        assert await staged_nodes(bookies) == []
        assert await stored_ledgers(bookies) == [opened]
        assert broker.figures()["published_batches_total"] == 1
        topic = broker.topics[str(TOPIC)]
        assert topic.receipted_entries == 2, "the entries of producers, whose times are summed"
        assert 0 <= topic.publish_s < 60
        assert broker.figures()["attached_ledgers_total"] == 0
        assert await job.client.ask(c.QueryState, "orders", "q") == {"batch": 0}
        again = await job.stage([b"b"])
        assert (await job.attach(0, again)) == {"attached": False, "first": None, "end": [opened, 3, 0]}
        assert again[0] not in await stored_ledgers(bookies)
        await job.close()
    async with small_broker(bookies, ledgers) as broker:
        assert await read_all(broker, 7) == everything
        assert await Job(bookies, broker).client.ask(c.QueryState, "orders", "q") == {"batch": 0}


async def test_a_stream_of_small_batches_keeps_the_list_short(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with small_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        for batch in range(20):
            assert (await job.attach(batch, await job.stage([b"%d" % batch]), await job.stage([b"+"])))[
                "attached"
            ]
        assert len((await record_of(bookies)).ledgers) == 1
        assert len((await record_of(bookies)).publishing) == 1
        assert (await read_all(broker, 40))[::2] == [b"%d" % batch for batch in range(20)]
        # One that is not small is attached, and remembered alike.
        large = await job.stage([b"x" * SMALL])
        assert (await job.attach(20, large))["attached"]
        record = await record_of(bookies)
        assert [info.stored_id for info in record.ledgers][1:] == [large[0]]
        assert (record.publishing, record.attached["q"].batch) == ({}, 20)
        assert not (await job.attach(20, await job.stage([b"again"])))["attached"]
        assert (await job.attach(21, await job.stage([b"more"])))["attached"]
        assert (await read_all(broker, 42))[-1] == b"more"


async def test_names_of_tasks_are_no_producers_to_deduplication(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    """Each write has names of its own, and there is room for so many."""
    settings = {"deduplication": True, "deduplication_snapshot_entries": 100}
    async with small_broker(bookies, ledgers, **settings) as broker:
        client = FakeClient(broker)
        await client.producer(name="p")
        client.publish(b"0", first=7)
        await client.confirmed(1)
        job = Job(bookies, broker)
        assert (await job.attach(0, await job.stage([b"1"])))["attached"]
        await crash(broker)
    async with small_broker(bookies, ledgers, **settings) as successor:
        for name, last in (("p", 7), ("task", -1)):
            assert (await FakeClient(successor).producer(name=name))["last_sequence_id"] == last


async def test_the_same_batch_asked_for_many_times_at_once(bookies: Bookies, ledgers: LedgerClient) -> None:
    """By requests with the same ledgers, by a replay with others, small and large, and by one whose asker left."""
    async with small_broker(bookies, ledgers) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        row, replayed, large = (
            await job.stage([b"x"]),
            await job.stage([b"x"]),
            await job.stage([b"x" * SMALL]),
        )
        for bookie in bookies.values():
            bookie.hold_adds()
        gone = Job(bookies, broker)
        gone.attach(0, row)
        await settle(50)
        gone.client.handler.connection_closed(None)
        attempts = [job.attach(0, row), job.attach(0, replayed), job.attach(0, large), job.attach(0, row)]
        await settle(50)
        client.publish(b"b", first=1)
        for bookie in bookies.values():
            bookie.release()
        answers = await asyncio.gather(*attempts)
        assert [answer["attached"] for answer in answers] == [False] * 4
        await client.confirmed(2)
        assert await read_all(broker, 3) == [b"a", b"x", b"b"]
        assert await staged_nodes(bookies) == []
        assert len(await stored_ledgers(bookies)) == 1


async def test_discarding_before_the_batch_is_recorded_wins(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with small_broker(bookies, ledgers) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        async with loaded(broker).ledger.changes.lock:
            discarding = job.client.ask(c.DiscardStaged, "orders", "t")
            await settle(5)
            attaching = job.attach(0, row)
            await settle(50)
        assert await discarding == {"discarded": 1}
        with pytest.raises(InvalidArgument, match="attached or discarded meanwhile"):
            await attaching
        client.publish(b"c", first=1)
        await client.confirmed(2)
        assert await job.client.ask(c.QueryState, "orders", "q") == {"batch": -1}
        assert await read_all(broker, 2) == [b"a", b"c"]


async def test_a_batch_has_its_turn_while_publishers_fill_the_pipeline(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with small_broker(bookies, ledgers, max_outstanding_entries=1, max_entry_bytes=1) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        for bookie in bookies.values():
            bookie.hold_adds()
        for number in range(1, 40):
            client.publish(b"%d" % number, first=number)
        await settle(5)
        attaching = job.attach(0, row)
        await settle(50)  # it waits for room
        for bookie in bookies.values():
            bookie.release()
        assert (await attaching)["attached"]
        await client.confirmed(40)
        found = await read_all(broker, 41)
        assert found.index(b"x") <= 3, "ahead of what publishers queued"


async def test_queries_beside_one_another_and_publishers(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with small_broker(bookies, ledgers, max_ledger_entries=5) as broker:
        client = FakeClient(broker)
        await client.producer()
        jobs = [Job(bookies, broker) for _ in range(3)]

        async def drive(number: int, job: Job) -> None:
            for batch in range(6):
                size = 1 if (number + batch) % 3 else SMALL
                values = [b"%d.%d." % (number, batch) + b"x" * size, b"%d.%d.y" % (number, batch)]
                row = await job.stage(values, transaction=f"{number}")
                attempts = [job.attach(batch, row, query=f"q{number}") for _ in range(2)]
                answers = await asyncio.gather(*attempts)
                assert [answer["attached"] for answer in answers].count(True) == 1

        driving = asyncio.gather(*[drive(number, job) for number, job in enumerate(jobs)])
        for number in range(40):
            client.publish(b"%d" % number, first=number)
            await asyncio.sleep(0)
        await driving
        await client.confirmed(40)
        found = await read_all(broker, 76)
        assert [value for value in found if b"." not in value] == [b"%d" % number for number in range(40)]
        for number in range(3):
            mine = [value[:4] for value in found if value.startswith(b"%d." % number)]
            assert mine == [b"%d.%d." % (number, batch) for batch in range(6) for _ in range(2)]


async def test_a_topic_that_is_closed_or_deleted_meanwhile(bookies: Bookies, ledgers: LedgerClient) -> None:
    for ending in ("close", "delete"):
        async with small_broker(bookies, ledgers) as broker:
            client = await published(broker, b"a")
            job = Job(bookies, broker)
            rows = [await job.stage([b"x"]), await job.stage([b"y"])]
            for bookie in bookies.values():
                bookie.hold_adds()
            client.publish(b"b", first=1)
            await settle(5)
            attempts = [job.attach(0, rows[0]), job.attach(0, rows[1], query="r")]
            await settle(50)
            moved = TopicNotServed("it moves")
            work = (
                broker.unload(TOPIC, moved) if ending == "close" else broker.delete_topic(TOPIC, force=True)
            )
            ended = asyncio.ensure_future(work)
            await settle(5)
            for bookie in bookies.values():
                bookie.release()
            await ended
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
            assert isinstance(outcomes[1], MagnetarError), outcomes
            assert ending == "close" or isinstance(outcomes[0], MagnetarError), outcomes
        if ending == "close":
            async with small_broker(bookies, ledgers) as broker:
                job = Job(bookies, broker)
                for row, query in zip(rows, ("q", "r"), strict=True):
                    await job.attach(0, row, query=query)
                found = await read_all(broker, loaded(broker).ledger.list.message_count)
                assert sorted(value for value in found if value in b"xy") == [b"x", b"y"]
                await broker.delete_topic(TOPIC, force=True)
    await settle()
    assert await stored_ledgers(bookies) == []


async def test_entries_that_do_not_follow_one_another_are_refused(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with small_broker(bookies, ledgers) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        for firsts, message in (((0, 2, 2), "at message 2, not 1"), ((1, 2), "at message 1, not 0")):
            writer = await job.open()
            for first in firsts:
                batch = encode_batch([b"x"], sequence_id=first, publish_time_ms=9)
                names = {"first_index": first, "append_time_ms": 9}
                await appended(writer, encode_entry([batch], [1], [0], ["task"], **names))
            await writer.close()
            with pytest.raises(InvalidArgument, match=message):
                await job.attach(0, [writer.ledger_id, firsts[-1] + 1, 9, 9])
        writer = await job.open()
        await appended(writer, b"not an entry")
        await writer.close()
        with pytest.raises(InvalidArgument, match="does not hold entries of a topic"):
            await job.attach(0, [writer.ledger_id, 1, 9, 9])
        client.publish(b"b", first=1)
        await client.confirmed(2)
        assert await read_all(broker, 2) == [b"a", b"b"]


async def test_producer_names_of_all_tasks_and_what_one_entry_cannot_hold(
    bookies: Bookies, ledgers: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_broker(bookies, ledgers, max_message_bytes=1000) as broker:
        job = Job(bookies, broker)
        rows = []
        for task in range(3):
            writer = await job.open()
            batches = [
                encode_batch([b"%d.%d" % (task, n)], sequence_id=n, publish_time_ms=9) for n in range(2)
            ]
            entry = encode_entry(
                batches, [1, 1], [1, 0], [f"task-{task}", "shared"], first_index=0, append_time_ms=9
            )
            await appended(writer, entry)
            await writer.close()
            rows.append([writer.ledger_id, 2, 9, 9])
        await job.attach(0, *rows)
        info = (await record_of(bookies)).ledgers[0]
        topic = loaded(broker)
        entry = await topic.log.read_entry((info.ledger_id, 0))
        names = entry.producer_names
        assert [names[number] for number in entry.producers] == [
            name for task in range(3) for name in ("shared", f"task-{task}")
        ]
        assert list(entry.end_indexes) == [1, 2, 3, 4, 5, 6]
        # More than an entry can count is attached, however large attach_min_bytes is.
        monkeypatch.setattr(staged_entries, "MAX_BATCHES_PER_ENTRY", 199)
        large = await job.stage(*[[b"x" * 900] for _ in range(200)])
        assert (await job.attach(1, large))["attached"]
        assert (await record_of(bookies)).ledgers[-1].stored_id == large[0]


async def test_one_shot_writes_give_way_when_the_places_are_full_and_streams_never_do(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    settings = {"max_attached_queries": 3, "attached_query_ms": 10_000_000, "staged_ttl_ms": 1000}
    clock = FakeClock()
    async with small_broker(bookies, ledgers, clock=clock, **settings) as broker:
        job = Job(bookies, broker)
        await job.attach(0, await job.stage([b"s"]), query="stream")
        for name in ("first", "second"):
            clock.now += 1
            await job.attach(0, await job.stage([b"w"]), query=name, remember_ms=5_000_000)
        with pytest.raises(TooManyRequests, match="max_attached_queries"):  # the first may be asked for again
            await job.attach(0, await job.stage([b"w"]), query="third", remember_ms=5_000_000)
        clock.now += 1001
        await job.attach(0, await job.stage([b"w"]), query="third", remember_ms=5_000_000)
        await job.attach(1, await job.stage([b"s"]), query="stream")
        assert (await record_of(bookies)).publishing.keys() == {"stream", "second", "third"}
        clock.now += 5000
        large = await job.stage([b"x" * SMALL])
        await job.attach(0, large, query="other stream")
        record = await record_of(bookies)
        assert {*record.publishing, *record.attached} == {"stream", "third", "other stream"}
        clock.now += 5000
        await job.attach(0, await job.stage([b"x"]), query="third stream")
        with pytest.raises(TooManyRequests, match="max_attached_queries"):
            await job.attach(0, await job.stage([b"x"]), query="fourth stream")
        assert await job.client.ask(c.QueryState, "orders", "stream") == {"batch": 1}


async def test_a_ledger_is_trimmed_with_the_batches_in_it_and_they_are_still_known(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with small_broker(bookies, ledgers, max_ledger_entries=2) as broker:
        consumer = FakeClient(broker)
        await consumer.consumer()
        job = Job(bookies, broker)
        await job.attach(0, await job.stage([b"x"]))
        client = await published(broker, b"a", b"b")
        await consumer.received(3)
        await consumer.ack(*[message.row() for message in consumer.messages])
        await settle()
        loaded(broker).maintain()
        await loaded(broker).maintenance.trimmed()
        place = (await record_of(bookies)).publishing["q"]
        assert place.ledger_id not in [info.ledger_id for info in (await record_of(bookies)).ledgers]
        assert client.receipts
        await crash(broker)
    again = bookies.client()
    async with small_broker(bookies, again) as broker:
        job = Job(bookies, broker)
        assert not (await job.attach(0, await job.stage([b"x"])))["attached"]
    await again.close()


def test_the_record_of_published_batches_is_kept_in_every_detail() -> None:
    from magnetar.broker.log.records import AttachedQuery, PublishedBatch

    record = TopicRecord.new(0)
    record.attached = {"q": AttachedQuery(3, 1, 2)}
    record.publishing = {
        "q": PublishedBatch(4, 5, 6, 7, 8, b"0123456789abcdef"),
        "r": PublishedBatch(0, 1, 2, 3, 4, b"fedcba9876543210", True),
    }
    assert TopicRecord.decode(record.encode(), "") == record
    q, r = record.last_of("q"), record.last_of("r")
    assert q is not None and r is not None  # noqa: PT018
    assert (q.batch, r.batch, record.last_of("s")) == (3, 0, None)
