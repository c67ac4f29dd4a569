"""Compaction of a topic, against a model: what is left, with which ids, and what readers see while it goes on."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.broker.compaction.core.index import CompactedIndex
from magnetar.broker.compaction.core.rows import TableRow
from magnetar.proto import commands as c
from magnetar.proto.batch import decode_batch
from magnetar.proto.compression import Compression
from magnetar.proto.errors import (
    BookieUnavailable,
    ConsumerBusy,
    EntryDamaged,
    InvalidArgument,
    MagnetarError,
)
from magnetar.proto.ids import MessageId
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClock, running_broker, settle
from support.compaction_kit import (
    Found,
    KeyedClient,
    Sent,
    Stopping,
    compact,
    compacted,
    compacted_once,
    horizon_of,
    publisher,
    read_all,
    stoppable,
    unowned_ledgers,
)
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.sim import SimLoop
from support.virtual_time import in_virtual_time

MESSAGES = st.tuples(
    st.sampled_from([None, "a", b"a", "b", "c", "d"]), st.sampled_from([None, b"1", b"2", b""])
)
BATCHES = st.lists(st.lists(MESSAGES, min_size=1, max_size=6), min_size=1, max_size=5)
OPTIONS: dict[str, Any] = {"max_ledger_entries": 3}


def a(number: int) -> Sent:
    """A message of key a."""
    return ("a", b"%d" % number)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rounds=st.lists(st.tuples(BATCHES, st.booleans(), st.booleans()), min_size=1, max_size=4),
    keyless=st.sampled_from(["keep", "drop"]),
)
def test_what_is_left_is_what_the_model_says(
    rounds: list[tuple[list[list[Sent]], bool, bool]], keyless: str
) -> None:
    async def run() -> None:
        stores: dict[str, Any] = {"metadata": MemoryMetadataStore(), "ledgers": FakeLedgers()}
        sent: list[Found] = []
        for batches, whole, twice in rounds:
            async with running_broker(**stores, **OPTIONS, compaction_keyless=keyless) as broker:
                client = await publisher(broker)
                ids = await client.send_batches(*batches, whole=whole)
                sent += [
                    (at, *message) for at, message in zip(ids, [one for batch in batches for one in batch])
                ]
                expected = compacted(sent, horizon_of(broker), keyless=keyless == "keep")
                assert await read_all(broker) == expected, "before: the old horizon, and the tail"
                for _ in range(1 + twice):
                    stats = await compact(broker)
                    assert (stats.state, stats.error) == ("done", "")
                assert horizon_of(broker) > ids[-1][:3], "it goes up to the end"
                expected = compacted(sent, horizon_of(broker), keyless=keyless == "keep")
                assert await read_all(broker) == expected
                assert await read_all(broker, read_compacted=False) == sent
                middle = sent[len(sent) // 2][0]
                found = await read_all(broker, start=("id", middle.to_bytes()))
                tombstones = [one for one in found if one[2] is None and one[1] is not None]
                assert [one for one in found if one not in tombstones] == [
                    one for one in expected if one[0] >= middle
                ], "a start within"
                assert unowned_ledgers(broker, stores["ledgers"]) == set()

    loop = SimLoop(seed=1)
    try:
        loop.run(run())
    finally:
        loop.close()


@pytest.mark.parametrize("compression", [0, 1, 2])
@in_virtual_time
async def test_of_a_batch_the_others_are_left_out_and_all_else_stays(compression: int) -> None:
    async with running_broker() as broker:
        client = await publisher(broker)
        large = [(f"k{n}", b"%d" % n * 400) for n in range(50)]
        options: dict[str, Any] = {
            "properties": [{"n": str(n)} for n in range(50)],
            "event_times_ms": list(range(50)),
            "compression": Compression(compression),
        }
        ids = await client.send_batches(large, **options)
        await client.send_batches([(key, b"") for key, _ in large if key != "k7"])
        stats = await compact(broker)
        assert stats.compacted_messages == 50
        assert stats.compacted_bytes < 6_000, "of 20,000 bytes of values 400 are left, and keys"
        found = await read_all(broker)
        assert found[0] == (ids[7], "k7", large[7][1])
        topic = broker.topics[str(TOPIC)]
        view = topic.compaction.view
        assert view is not None
        entry = await view.read(0)
        batch = decode_batch(bytes(entry.batch(0)))
        assert batch.metadata is not None
        assert batch.metadata[1][7] == {"n": "7"}
        assert batch.metadata[2][7] == 7


@in_virtual_time
async def test_unbatched_messages_of_one_entry_leave_no_table_behind() -> None:
    async with running_broker() as broker:
        client = await publisher(broker)
        ids = await client.send_batches(*[[a(n)] for n in range(1000)])
        assert len({at[:2] for at in ids}) == 1, "they are coalesced"
        stats = await compact(broker)
        assert (stats.compacted_messages, stats.compacted_bytes < 400) == (1, True)
        assert await read_all(broker) == [(ids[-1], *a(999))]


@in_virtual_time
async def test_an_empty_topic_and_one_of_which_nothing_is_left() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, compaction_tombstone_retention_ms=0) as broker:
        client = await publisher(broker)
        assert (await compact(broker)).compacted_messages == 0
        assert await read_all(broker) == []
        await client.send_batches([a(1), ("b", b"1")])
        await compact(broker)
        await client.send_batches([("a", None), ("b", None)])
        stats = await compact(broker)
        assert (stats.compacted_messages, stats.state) == (0, "done")
        assert await read_all(broker) == []
        assert [one.properties["kind"] for one in ledgers.ledgers.values()] == ["topic"]
        ids = await client.send_batches([a(2)])
        assert await read_all(broker) == [(ids[0], *a(2))]


@in_virtual_time
async def test_a_reader_that_was_away_learns_of_deletions_and_a_new_one_does_not_see_them() -> None:
    clock = FakeClock()
    async with running_broker(clock=clock, compaction_tombstone_retention_ms=1000) as broker:
        client = await publisher(broker)
        first = await client.send_batches([a(1), ("b", b"1")])
        reader = KeyedClient(broker)
        await reader.ask(
            c.Subscribe, 1, "orders", "r", durable=False, start=("earliest", None), read_compacted=True
        )
        reader.frame(c.Flow(0, 1, 1))
        await reader.until(lambda: reader.found)
        deletion = await client.send_batches([("a", None)])
        await compact(broker)
        reader.frame(c.Flow(0, 1, 100))  # it knows a, and is in the middle of what was compacted now
        await reader.until(lambda: (deletion[0], "a", None) in reader.found)
        again = await read_all(broker, start=("id", first[1].to_bytes()))
        assert again == [(first[1], "b", b"1"), (deletion[0], "a", None)]
        assert await read_all(broker) == [(first[1], "b", b"1")]
        assert (await compact(broker)).compacted_messages == 2, "nothing is new"
        clock.now += 2000
        last = await client.send_batches([("c", b"1")])
        assert (await compact(broker)).compacted_messages == 2, "it is old enough"
        again = await read_all(broker, start=("id", first[1].to_bytes()))
        assert again == [(first[1], "b", b"1"), (last[0], "c", b"1")]


@in_virtual_time
async def test_compacting_while_producing_and_while_reading() -> None:
    async with running_broker(max_ledger_entries=10) as broker:
        client = await publisher(broker)
        sent: list[Found] = []

        async def send(first: int) -> None:
            batch = [(f"k{number % 17}", b"%d" % number) for number in range(first, first + 40)]
            sent.extend((at, *message) for at, message in zip(await client.send_batches(batch), batch))

        await send(0)
        await compact(broker)
        slow = KeyedClient(broker)
        await slow.ask(
            c.Subscribe, 1, "orders", "slow", durable=False, start=("earliest", None), read_compacted=True
        )
        topic = broker.topics[str(TOPIC)]
        for number in range(1, 30):
            slow.frame(c.Flow(0, 1, 3))
            topic.compaction.begin()
            await send(40 * number)
            if number % 3:
                await compacted_once(topic)
        await compacted_once(topic)
        slow.frame(c.Flow(0, 1, 100_000))
        await slow.until(lambda: slow.found and slow.found[-1][0] == sent[-1][0])
        places = [at for at, _, _ in slow.found]
        assert places == sorted(set(places)), "ids rise, nothing comes twice"
        assert set(slow.found) <= set(sent)
        assert {key: value for _, key, value in slow.found} == {key: value for _, key, value in sent}
        await compact(broker)
        assert await read_all(broker) == compacted(sent, horizon_of(broker))


@in_virtual_time
async def test_what_is_compacted_outlives_its_ledgers_and_what_is_not_is_not_trimmed() -> None:
    stores: dict[str, Any] = {"metadata": MemoryMetadataStore(), "ledgers": FakeLedgers()}
    async with running_broker(**stores, max_ledger_entries=1, max_lease_ms=1) as broker:
        client = await publisher(broker)
        sent: list[Found] = []
        for number in range(6):
            batch = [(f"k{number % 3}", b"%d" % number)]
            sent.append(((await client.send_batches(batch))[0], *batch[0]))
        await client.ask(c.Subscribe, 9, "orders", "s", start=("latest", None))
        topic = broker.topics[str(TOPIC)]
        await compact(broker)
        for number in range(2):
            await client.send_batches([("new", b"%d" % number)])
        await client.ask(c.DeleteSubscription, "orders", "s", True)
        await client.ask(c.Subscribe, 9, "orders", "s", start=("latest", None))
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["retained_by"] == "the next compaction goes through it"
        topic.maintain()
        await topic.maintenance.trimmed()
        assert topic.ledger.list.start[:2] > sent[-1][0][:2], "all that was compacted is trimmed"
        found = await read_all(broker)
        assert found[:3] == sent[3:]
        assert [value for _, _, value in found[3:]] == [b"0", b"1"]
    async with running_broker(**stores, max_lease_ms=1) as broker:
        assert await read_all(broker) == found
        await compact(broker)
        assert await read_all(broker) == [*found[:3], found[-1]]
        by_time = await read_all(broker, start=("time", 0))
        assert by_time == [*found[:3], found[-1]]


@in_virtual_time
async def test_a_durable_subscription_passes_over_what_is_not_left() -> None:
    stores: dict[str, Any] = {"metadata": MemoryMetadataStore(), "ledgers": FakeLedgers()}
    async with running_broker(**stores, **OPTIONS) as broker:
        client = await publisher(broker)
        for number in range(10):
            await client.send_batches([a(number), (f"k{number}", b""), a(number)])
        await compact(broker)
        consumer = KeyedClient(broker)
        named: dict[str, Any] = {"start": ("earliest", None), "read_compacted": True}
        await consumer.ask(c.Subscribe, 1, "orders", "s", type="failover", **named)
        consumer.frame(c.Flow(0, 1, 100))
        await consumer.until(lambda: len(consumer.found) == 11)
        rows = [(at[0], at[1], at[2], at[2]) for at, _, _ in consumer.found]
        await consumer.ack(*rows[:8])
        stats = (await client.ask(c.TopicStats, "orders"))["subscriptions"]["s"]
        assert (stats["acknowledged_ranges"], stats["mark_delete"]) == (0, list(rows[8][:3]))
        with pytest.raises(ConsumerBusy, match="read_compacted=True; all of its consumers"):
            await client.ask(c.Subscribe, 5, "orders", "s", type="failover")
        await client.ask(c.Subscribe, 6, "orders", "s", type="failover", **named)
        with pytest.raises(InvalidArgument, match="for exclusive and failover subscriptions and for readers"):
            await client.ask(c.Subscribe, 7, "orders", "t", type="shared", **named)
    async with running_broker(**stores, **OPTIONS) as broker:
        again = KeyedClient(broker)
        await again.ask(c.Subscribe, 1, "orders", "s", type="failover", **named)
        again.frame(c.Flow(0, 1, 100))
        await again.until(lambda: len(again.found) == 3)
        assert again.found == consumer.found[8:]
        await again.ack(rows[-1], cumulative=True)
        again.handler.connection_closed(None)
        await settle()
        # Without read_compacted the same subscription goes on with everything.
        plain = KeyedClient(broker)
        await plain.ask(c.Subscribe, 1, "orders", "s", type="shared")
        client = await publisher(broker)
        await client.send_batches([a(10), a(11)])
        plain.frame(c.Flow(0, 1, 100))
        await plain.until(lambda: len(plain.found) == 2)


@pytest.mark.parametrize("by", ["ack", "cumulative"])
@in_virtual_time
async def test_rule_51_who_acknowledged_all_it_got_stands_behind_tombstones_it_did_not_get(by: str) -> None:
    stores: dict[str, Any] = {"metadata": MemoryMetadataStore(), "ledgers": FakeLedgers()}
    named: dict[str, Any] = {"start": ("earliest", None), "read_compacted": True, "type": "failover"}
    deleted: list[Sent] = [(f"k{number}", None) for number in range(3)]
    async with running_broker(**stores, max_ledger_entries=1) as broker:
        client = await publisher(broker)
        ids: list[MessageId] = []
        for batch in ([deleted[0]], [a(1), deleted[1], a(2), deleted[1]], [deleted[2]]):
            ids += await client.send_batches(batch)
        await compact(broker)
        consumer = KeyedClient(broker)
        await consumer.ask(c.Subscribe, 1, "orders", "s", **named)
        consumer.frame(c.Flow(0, 1, 100))
        await consumer.until(lambda: consumer.found)
        assert consumer.found == [(ids[3], *a(2))]
        await consumer.ack((*ids[3][:3], ids[3].index), cumulative=by == "cumulative")
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["subscriptions"]["s"]["backlog_messages"] == 0
        assert stats["subscriptions"]["s"]["acknowledged_ranges"] == 0
        topic = broker.topics[str(TOPIC)]
        assert topic.retention.lowest().reason != "subscription 's' has not acknowledged all of it"
    async with running_broker(**stores) as broker:
        client = await publisher(broker)
        again = KeyedClient(broker)
        await again.ask(c.Subscribe, 1, "orders", "s", **named)
        again.frame(c.Flow(0, 1, 100))
        await client.send_batches([a(3)])
        await again.until(lambda: again.found)
        assert [found[1:] for found in again.found] == [a(3)]


@in_virtual_time
async def test_a_subscription_that_gets_nothing_holds_nothing() -> None:
    """It stood at a tombstone before the topic was compacted once more, and at one when it was made."""
    stores: dict[str, Any] = {"metadata": MemoryMetadataStore(), "ledgers": FakeLedgers()}
    named: dict[str, Any] = {"start": ("earliest", None), "read_compacted": True, "type": "failover"}
    async with running_broker(**stores, max_ledger_entries=1) as broker:
        client = await publisher(broker)
        await client.send_batches([a(1)])
        await KeyedClient(broker).ask(c.Subscribe, 1, "orders", "before", **named)
        await client.send_batches([("a", None)])
        await client.send_batches([("b", None)])
        await compact(broker)
        for name in ("new", "sought"):
            await KeyedClient(broker).ask(c.Subscribe, 1, "orders", name, **named)
        await client.ask(c.SeekSubscription, "orders", "sought", ("earliest", None))
        await settle()
        await asyncio.sleep(2)  # the interval of what is written without a receipt
    async with running_broker(**stores) as broker:
        client = await publisher(broker)
        found: dict[str, list[Any]] = {}
        again = KeyedClient(broker)
        for name in ("before", "new", "sought"):
            again = KeyedClient(broker)
            await again.ask(c.Subscribe, 1, "orders", name, **named)
            again.frame(c.Flow(0, 1, 100))
            found[name] = again.found
        last = await client.send_batches([a(2)])
        await again.until(lambda: all(ids and ids[-1][0] == last[0] for ids in found.values()))
        assert [one[1:] for one in found["before"]] == [("a", None), ("b", None), a(2)]
        assert found["new"] == found["sought"] == [(last[0], *a(2))]


@in_virtual_time
async def test_what_a_compaction_takes_away_from_a_subscription_is_not_held_for_it() -> None:
    async with running_broker(max_ledger_entries=1, compaction_tombstone_retention_ms=0) as broker:
        client = await publisher(broker)
        named: dict[str, Any] = {"start": ("earliest", None), "read_compacted": True, "type": "failover"}
        await client.send_batches([a(1)])
        await client.ask(c.Subscribe, 1, "orders", "s", **named)
        await client.send_batches([("a", None)])
        topic = broker.topics[str(TOPIC)]
        assert topic.retention.lowest().position[0] == topic.ledger.list.start[0]
        await compact(broker)
        await asyncio.sleep(2)
        assert topic.retention.lowest().position == topic.ledger.list.end


@in_virtual_time
async def test_rule_51_a_seek_back_is_delivered_the_tombstones_behind_it() -> None:
    async with running_broker() as broker:
        client = await publisher(broker)
        ids = await client.send_batches([("b", b"1"), a(1), ("a", None), ("c", b"1")])
        await compact(broker)
        consumer = KeyedClient(broker)
        await consumer.ask(
            c.Subscribe, 1, "orders", "s", type="failover", start=("earliest", None), read_compacted=True
        )
        consumer.frame(c.Flow(0, 1, 100))
        await consumer.until(lambda: len(consumer.found) == 2)
        for start, wanted in ((ids[2], [ids[2], ids[3]]), (ids[1], [ids[2], ids[3]])):
            consumer.found.clear()
            await consumer.ask(c.Seek, 1, ("id", start.to_bytes()))
            await consumer.until(lambda: consumer.found and consumer.found[-1][0] == ids[3])
            assert [at for at, _, _ in consumer.found] == wanted
            consumer.found.clear()
            await consumer.ask(c.Seek, 1, ("earliest", None))
            await consumer.until(lambda: len(consumer.found) == 2)


def test_rows_of_tombstones_alone_are_passed_at_once() -> None:
    index = CompactedIndex()
    index.add_chunk(
        0, [TableRow(1, n, 9, [0, 1, 3, 3], [3, 3] if n % 10 else [0, 1, 3, 3]) for n in range(20, 41)]
    )
    index.add_chunk(1, [TableRow(1, n, 9, [2, 2], [2, 2]) for n in range(50, 90)])
    assert [index.next_value(row) for row in (0, 1, 9, 10, 19, 20, 21, 60, 61)] == [
        1,
        1,
        9,
        11,
        19,
        61,
        61,
        61,
        61,
    ]
    assert [index.next_left(0, first) for first in range(5)] == [0, 1, 3, 3, None]


async def crash_at(stores: Stopping, steps: int) -> tuple[bool, list[Found]]:
    """A second compaction stops at a step. False: it was over before."""
    async with stoppable(stores, **OPTIONS) as broker:
        client = await publisher(broker)
        sent: list[Found] = []
        for number in range(2):
            batches: list[list[Sent]] = [
                [(f"k{n}", b"%d" % number), (None, b"%d" % n), ("gone", None)] for n in range(4)
            ]
            ids = await client.send_batches(*batches)
            sent += [(at, *message) for at, message in zip(ids, [one for batch in batches for one in batch])]
            if not number:
                await compact(broker)
        topic = broker.topics[str(TOPIC)]
        await settle()
        stores.arm(steps)
        topic.compaction.begin()
        while topic.compaction.running and not stores.stopped.is_set():
            await settle(1)
        if stores.stopped.is_set():
            await after_the_crash(stores, sent)
        return stores.stopped.is_set(), sent


async def after_the_crash(stores: Stopping, sent: list[Found]) -> None:
    """The next owner."""
    async with running_broker(stores.ledgers, stores.metadata, **OPTIONS) as broker:
        assert await read_all(broker) == compacted(sent, horizon_of(broker))
        assert await read_all(broker, read_compacted=False) == sent
        assert unowned_ledgers(broker, stores.ledgers) == set()
        assert (await compact(broker)).state == "done"
        assert horizon_of(broker) > sent[-1][0][:3]
        assert await read_all(broker) == compacted(sent, horizon_of(broker))
        assert unowned_ledgers(broker, stores.ledgers) == set()
        client = await publisher(broker)
        await client.ask(c.DeleteTopic, "orders", True)
        assert [one.properties["kind"] for one in stores.ledgers.ledgers.values()] == []


@in_virtual_time
async def test_a_crash_at_every_step_loses_nothing_and_leaves_nothing() -> None:
    for steps in range(1, 100):
        crashed, _ = await crash_at(Stopping(), steps)
        if not crashed:
            assert steps > 8, "the steps of a compaction"
            return
    raise AssertionError("a compaction has fewer steps")


@in_virtual_time
async def test_a_bookie_is_down_before_a_compaction_and_another_while_it_writes() -> None:
    bookies = Bookies("b1", "b2", "b3", "b4")
    quorums: dict[str, Any] = {"ensemble_size": 2, "write_quorum": 2, "ack_quorum": 2}
    async with running_broker(bookies.client(), **quorums) as broker:
        client = await publisher(broker)
        filler = b"x" * 100_000
        sent: list[Found] = []
        for number in range(12):
            message = (f"k{number % 8}", filler + b"%d" % number)
            sent.append(((await client.send_batches([message]))[0], *message))
        bookies["b1"].fail(BookieUnavailable("down"))
        topic = broker.topics[str(TOPIC)]
        topic.compaction.begin()
        while topic.compaction.stats().messages_read < 14:
            await settle(1)
        bookies["b1"].fail(None)
        bookies["b2"].fail(BookieUnavailable("down"))
        await compacted_once(topic)
        assert topic.compaction.stats().error == ""
        assert await read_all(broker) == compacted(sent, horizon_of(broker))


@in_virtual_time
async def test_a_failed_compaction_says_why_and_leaves_the_last_one() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, compaction_max_keys=3) as broker:
        client = await publisher(broker)
        sent = [a(1), ("b", b"1")]
        ids = await client.send_batches(sent)
        await compact(broker)
        ledgers.fail_create.append(MagnetarError("no bookies"))
        ids += await client.send_batches([("c", b"1")])
        stats = await compact(broker)
        assert (stats.state, stats.error) == ("failed", "no bookies")
        found = [(at, *message) for at, message in zip(ids, [*sent, ("c", b"1")])]
        assert await read_all(broker) == found
        assert unowned_ledgers(broker, ledgers) == set()
        stats = await compact(broker)
        assert (stats.state, stats.compacted_messages) == ("done", 3)
        await client.send_batches([("d", b"1")])
        stats = await compact(broker)
        assert stats.state == "failed"
        assert "raise the broker's compaction_max_keys" in stats.error
        assert (await read_all(broker))[:3] == found
        assert unowned_ledgers(broker, ledgers) == set()


@in_virtual_time
async def test_the_topic_is_unloaded_in_the_middle() -> None:
    stores: dict[str, Any] = {"metadata": MemoryMetadataStore(), "ledgers": FakeLedgers()}
    async with running_broker(**stores) as broker:
        client = await publisher(broker)
        ids = await client.send_batches([a(1), a(2)])
        stores["ledgers"].hold = True
        topic = broker.topics[str(TOPIC)]
        topic.compaction.begin()
        while len(stores["ledgers"].ledgers) < 2:
            await settle(1)
        assert topic.in_use
        stores["ledgers"].hold = False
    async with running_broker(**stores) as broker:
        assert await read_all(broker) == [(ids[0], *a(1)), (ids[1], *a(2))]
        assert unowned_ledgers(broker, stores["ledgers"]) == set()
        await compact(broker)
        assert await read_all(broker) == [(ids[1], *a(2))]


@pytest.mark.parametrize("part", ["chunk", "index", "all"])
@in_virtual_time
async def test_a_damaged_compacted_ledger_is_made_anew_and_costs_nothing_else(part: str) -> None:
    stores: dict[str, Any] = {"metadata": MemoryMetadataStore(), "ledgers": FakeLedgers()}
    ledgers = stores["ledgers"]
    async with running_broker(**stores) as broker:
        client = await publisher(broker)
        ids = await client.send_batches([a(1), a(2), ("b", b"3")])
        await compact(broker)
        pointer = broker.topics[str(TOPIC)].ledger.list.record.compaction
        assert pointer is not None
        damaged = {"chunk": [0], "index": [1], "all": [0, 1]}[part]
        ledgers.damaged |= {(pointer.ledger_id, entry) for entry in damaged}
    left = [(ids[1], *a(2)), (ids[2], "b", b"3")]
    async with running_broker(**stores) as broker:
        found = await read_all(broker)
        assert found == ([(ids[0], *a(1)), *left] if part == "all" else left) or part == "chunk"
        topic = broker.topics[str(TOPIC)]
        assert topic.compaction.stats().damaged == (part != "index")
        topic.maintain()
        await compacted_once(topic)
        stats = topic.compaction.stats()
        assert (stats.state, stats.damaged) == ("done", False)
        assert await read_all(broker) == left
        assert unowned_ledgers(broker, ledgers) == set()


@in_virtual_time
async def test_damage_where_the_ledgers_are_trimmed_costs_what_is_damaged() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, max_ledger_entries=1, max_entry_read_attempts=1) as broker:
        client = await publisher(broker)
        filler = b"x" * 200_000
        ids = [(await client.send_batches([(f"k{n}", filler)]))[0] for n in range(3)]
        await compact(broker)
        await client.ask(c.Subscribe, 9, "orders", "s", start=("latest", None))
        topic = broker.topics[str(TOPIC)]
        topic.maintain()
        await topic.maintenance.trimmed()
        pointer = topic.ledger.list.record.compaction
        assert pointer is not None
        assert pointer.chunks == 3
        ledgers.damaged.add((pointer.ledger_id, 1))
        more = await client.send_batches([("k0", b"")])
        stats = await compact(broker)
        assert (stats.state, stats.damaged) == ("done", False)
        assert await read_all(broker) == [(ids[2], "k2", filler), (more[0], "k0", b"")]


@in_virtual_time
async def test_unreadable_entries_of_the_topic_stop_a_compaction_unless_they_are_to_be_skipped() -> None:
    for policy in ("stop", "skip"):
        ledgers = FakeLedgers()
        async with running_broker(ledgers, unreadable_entry_policy=policy) as broker:
            client = await publisher(broker)
            ids = await client.send_batches([a(1)])
            ids += await client.send_batches([("b", b"")])
            ledgers.damaged.add(ids[0][:2])
            stats = await compact(broker)
            assert stats.state == ("failed" if policy == "stop" else "done")
            if policy == "skip":
                assert await read_all(broker) == [(ids[1], "b", b"")]
            else:
                assert isinstance(stats.error, str)
                assert str(EntryDamaged(f"entry 0 of ledger {ids[0].ledger} is damaged")) in stats.error


@in_virtual_time
async def test_the_threshold_compacts_by_itself_and_removing_gives_it_up() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = await publisher(broker)
        await client.change_policies(namespace="public/default", compaction_threshold_bytes=1000)
        await client.send_batches([a(1)])
        topic = broker.topics[str(TOPIC)]
        topic.maintain()
        await compacted_once(topic)
        assert topic.compaction.stats().state == "never"
        assert topic.retention.lowest().reason == "the next compaction goes through it"
        ids = await client.send_batches([("a", b"x" * 1000)])
        topic.maintain()
        await compacted_once(topic)
        assert topic.compaction.stats().backlog_bytes == 0
        assert [at for at, _, _ in await read_all(broker)] == [MessageId(*ids[0][:3])]
        state = await client.ask(c.CompactTopic, "orders", "remove")
        assert (state["state"], state["horizon"]) == ("never", None)
        assert len(await read_all(broker)) == 2
        assert [one.properties["kind"] for one in ledgers.ledgers.values()] == ["topic"]
        assert topic.retention.lowest().reason == "the next compaction goes through it"
        await client.change_policies(namespace="public/default", compaction_threshold_bytes=None)
        topic.maintain()
        await compacted_once(topic)
        assert topic.compaction.stats().state == "never"
        assert topic.retention.lowest().reason != "the next compaction goes through it"
        with pytest.raises(InvalidArgument, match="no action 'stop'"):
            await client.ask(c.CompactTopic, "orders", "stop")
