"""Consumers of Pulsar's protocol on the real dispatch: what they are sent, and what comes of what they send."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.listeners.pulsar import transcoded as transcoded_module
from magnetar.broker.listeners.pulsar.borders import UNBATCHED, Borders
from magnetar.broker.listeners.pulsar.consumers import Consumer
from magnetar.broker.listeners.pulsar.transcoded import Transcoded
from magnetar.broker.listeners.requests import Requests
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch, key_hash_of
from magnetar.proto.errors import ConsumerBusy, InvalidArgument, MalformedFrame, TopicNotFound
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.ids import (
    ALONE,
    EARLIEST,
    INDEX_BITS,
    LAST_INDEX,
    LATEST,
    encode_ack_set,
    pack_entry,
)
from magnetar.proto.pulsar.transcoding import to_pulsar
from support.broker_kit import TOPIC, FakeClient, FakeClock, running_broker, settle
from support.compaction_kit import compact
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.pulsar_kit import Producer, PulsarClient, message_id

SLICE_BYTES = 800  # of which a few hundred are for metadata


def mark_delete(broker: Broker, subscription: str = "s") -> tuple[int, int]:
    """Entry and index."""
    return broker.topics[str(TOPIC)].subscriptions[subscription].cursor.state.mark_delete[1:]


def values(client: PulsarClient) -> list[bytes]:
    """Of all messages since the last call."""
    return [value for one in client.link.take() for value in one.values]


async def native(broker: Broker, *batches: list[bytes]) -> None:
    """A native producer publishes them, all in one entry."""
    client = FakeClient(broker)
    answer = await client.producer(9)
    first = 0
    for batch in batches:
        client.publish_batch(batch, first=first, producer_id=9, epoch=answer["epoch"])
        first += len(batch)
    await client.confirmed(first)


# --- messages --------------------------------------------------------------------------------------------------------


async def test_each_batch_is_a_message_and_a_delivery_one_write() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0", b"1", [b"2", b"3"], [b"4"], b"5")
        client = PulsarClient(broker)
        await client.subscribe()
        found = client.link.take()
        assert [(one.place(), one.values, one.batched) for one in found] == [
            ((0, 0), [b"0"], False),
            ((0, 1), [b"1"], False),
            ((0, 2), [b"2", b"3"], True),
            ((0, 4), [b"4"], True),
            ((0, 5), [b"5"], False),
        ]
        assert client.link.writes == 1


async def test_a_native_batch_is_transcoded_once_for_all_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(data: memoryview, producer: str, max_bytes: int) -> Any:
        calls.append(producer)
        return to_pulsar(data, producer, max_bytes)

    monkeypatch.setattr(transcoded_module, "to_pulsar", counted)
    async with running_broker() as broker:
        await native(broker, [b"a", b"b"], [b"c"])
        await Producer(broker).publish(b"d")
        transcoded = Transcoded()
        clients = [PulsarClient(broker, transcoded) for _ in range(3)]
        for number, client in enumerate(clients):
            await client.subscribe(subscription=f"s{number}")
            found = client.link.take()
            assert [(one.values, one.batched) for one in found] == [
                ([b"a", b"b"], True), ([b"c"], False), ([b"d"], False),
            ]  # fmt: skip
        assert len(calls) == 2


async def test_what_is_kept_of_transcoded_batches_is_bounded() -> None:
    async with running_broker() as broker:
        await native(broker, *[[b"x" * 1000] * 2 for _ in range(20)])
        client = PulsarClient(broker, transcoded := Transcoded(limit=10_000))
        await client.subscribe()
        assert len(values(client)) == 40
        assert 5_000 < transcoded.used <= 10_000


async def test_a_native_batch_that_cannot_be_transcoded_costs_nobody_else_anything(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(data: memoryview, producer: str, max_bytes: int) -> Any:
        raise InvalidArgument("damaged")

    monkeypatch.setattr(transcoded_module, "to_pulsar", broken)
    async with running_broker() as broker:
        await native(broker, [b"a", b"b"])
        await Producer(broker).publish(b"c", b"d")
        owner, client = FakeClient(broker), PulsarClient(broker)
        await owner.consumer(1, "s", type="shared", permits=1)
        await owner.received(2)
        await owner.ack(owner.messages[0].row())
        consumer = await client.subscribe(type="shared", permits=0)
        await owner.ask(c.CloseConsumer, 1)
        client.flow(3)
        await settle()
        assert values(client) == [b"c", b"d"]
        assert consumer.opened.consumer.available_permits == 1
        assert "is not delivered to Pulsar's consumers: damaged" in caplog.text
        assert mark_delete(broker) == (0, 1)  # it may be read by others


@pytest.mark.parametrize("type", ["shared", "key_shared", "exclusive"])
async def test_rule_41_native_batches_that_nobody_can_read_do_not_count_as_held(
    type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(data: memoryview, producer: str, max_bytes: int) -> Any:
        raise MalformedFrame("its columns are shorter than they say")

    monkeypatch.setattr(transcoded_module, "to_pulsar", broken)
    async with running_broker() as broker:
        await native(broker, *[[b"a"] * 30_000] * 2)
        await Producer(broker).publish([b"b"], [b"c", b"d"])
        client = PulsarClient(broker)
        consumer = await client.subscribe(type=type)
        first, second = client.link.take()
        assert first.values + second.values == [b"b", b"c", b"d"]
        assert not consumer.opened.consumer.blocked_on_unacked_messages
        assert mark_delete(broker) == (2, 0)
        client.lose()
        # An acknowledgement that has to be looked up may name such an entry, too.
        client = PulsarClient(broker)
        await client.subscribe(type=type, permits=0)
        response = await client.ack((second.ledger, 0), second.id)
        assert response is not None
        assert not response.HasField("error")


async def test_a_batch_beyond_the_frame_limit_goes_out_in_slices_that_are_acknowledged_one_by_one() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    batch = [b"%02d" % number * 50 for number in range(10)]
    async with running_broker(ledgers, metadata) as broker:
        await native(broker, [b"x"], batch)
        client = PulsarClient(broker, Transcoded(SLICE_BYTES))
        await client.subscribe(type="shared")
        single, *slices = client.link.take()
        assert [(one.place(), len(one.values)) for one in slices] == [((0, 1), 4), ((0, 5), 4), ((0, 9), 2)]
        await client.ack(slices[1])
        await client.redeliver(*slices[1:])
        assert [one.place() for one in client.link.take()] == [(0, 9)]
        await client.ack(single, slices[2])
        assert mark_delete(broker) == (0, 1)
        client.lose()
        again = PulsarClient(broker, Transcoded(SLICE_BYTES))
        await again.subscribe(type="shared", permits=0)
        await again.ack(slices[0])  # delivered on the earlier connection
        assert mark_delete(broker) == (1, 0)


async def test_rule_42_a_message_beyond_the_frame_limit_costs_itself_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A native one may inflate to any size: a client would close its connection for it, again and again."""
    async with running_broker() as broker:
        await native(broker, [b"a", bytes(20_000), b"b"], [bytes(20_000)])
        await Producer(broker).publish([b"c", bytes(20_000)], b"d")  # when more was taken
        client = PulsarClient(broker, Transcoded(5_000))
        consumer = await client.subscribe(type="shared", permits=10)
        assert values(client) == [b"a", b"b", b"d"]
        assert consumer.opened.consumer.available_permits == 7
        assert caplog.text.count("is not delivered to Pulsar's consumers: it has 20") == 3


async def test_permits_stop_at_a_batch_and_go_on() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0", [b"1", b"2", b"3"], b"4", b"5")
        client = PulsarClient(broker)
        consumer = await client.subscribe(permits=2)
        assert values(client) == [b"0", b"1", b"2", b"3"]
        assert consumer.opened.consumer.available_permits == -2
        client.flow(3)
        await settle()
        assert values(client) == [b"4"]


async def test_a_full_write_buffer_stops_delivery() -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        consumer = await client.subscribe()
        client.link.writable = False
        await Producer(broker).publish(b"0")
        assert not client.link.messages
        client.link.writable = True
        consumer.opened.subscription.writable(consumer.opened.consumer)
        assert values(client) == [b"0"]


async def test_messages_of_a_partition_and_of_an_epoch_say_so() -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        await client.service.create_topic(client.link, "orders", partitions=4)
        await client.subscribe(topic="orders-partition-3", consumer_epoch=5)
        await Producer(broker).publish(b"0", topic="orders-partition-3")
        (command,) = client.link.names("message")
        assert (command.message_id.partition, command.consumer_epoch) == (3, 5)


async def test_key_shared_hides_what_others_have_and_sends_none_of_it() -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        half = wire.KeySharedMeta.STICKY
        for number, (start, end) in enumerate(((0, 32767), (32768, 65535)), 1):
            meta = wire.KeySharedMeta(key_shared_mode=half, hash_ranges=[wire.IntRange(start=start, end=end)])
            await client.subscribe(number, type="key_shared", key_shared_meta=meta)
        sent = [b"%d" % number for number in range(100)]
        await Producer(broker).publish(*sent, [b"x", b"y"], keys=[f"k{number}" for number in range(101)])
        found = client.link.take()
        assert {one.consumer_id for one in found} == {1, 2}
        assert sorted(value for one in found for value in one.values) == sorted([*sent, b"x", b"y"])
        assert not any(one.ack_set for one in found)
        assert client.link.writes == 2


def sticky(*ranges: tuple[int, int]) -> wire.KeySharedMeta:
    """A consumer wants these."""
    found = [wire.IntRange(start=start, end=end) for start, end in ranges]
    return wire.KeySharedMeta(key_shared_mode=wire.KeySharedMeta.STICKY, hash_ranges=found)


HALVES = ((0, 32_767), (32_768, 65_535))


async def test_a_reader_of_a_range_of_hashes_gets_what_is_in_it_whoever_wrote_it() -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        for number, half in enumerate(HALVES, 1):
            await client.subscribe(number, f"r{number}", durable=False, key_shared_meta=sticky(half))
        sent = [b"%d" % number for number in range(100)]
        await Producer(broker).publish(*sent, [b"x", b"y"], keys=[f"k{number}" for number in range(101)])
        mixed = encode_batch(
            [b"a", b"b", b"c", b"d"], sequence_id=0, publish_time_ms=0, keys=["k", "l", "m", "n"]
        )
        writer = FakeClient(broker)
        answer = await writer.producer(9)
        writer.frame(c.Send(0, 9, answer["epoch"]), mixed)
        await writer.confirmed(4)
        found = client.link.take()
        for number, (first, last) in enumerate(HALVES, 1):
            assert [value for one in found if one.consumer_id == number for value in one.values] == [
                value
                for value, key in [
                    *((b"%d" % at, f"k{at}") for at in range(100)),
                    *((value, "k100") for value in (b"x", b"y")),
                    *zip((b"a", b"b", b"c", b"d"), "klmn", strict=True),
                ]
                if first <= (key_hash_of(key) % 65_536 or 1) <= last
            ]


async def test_what_is_not_in_its_ranges_costs_an_exclusive_consumer_nothing() -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        consumer = await client.subscribe(permits=2, key_shared_meta=sticky((7, 7)))
        await Producer(broker).publish(
            *[b"%d" % at for at in range(1_000)], keys=[f"k{at}" for at in range(1_000)]
        )
        await settle()
        assert not client.link.take()
        topic = broker.topics[str(TOPIC)]
        assert (
            topic.ledger.list.normalise(topic.subscriptions["s"].cursor.state.mark_delete)
            == topic.ledger.list.end
        )
        assert consumer.opened.consumer.available_permits == 2
        assert not topic.subscriptions["s"].dispatcher.core.delivered[0]


async def test_a_reader_of_a_range_of_hashes_reads_what_a_compaction_left() -> None:
    async with running_broker() as broker:
        keys = [f"k{at % 10}" for at in range(30)]
        await Producer(broker).publish(*[b"%d" % at for at in range(30)], keys=keys)
        await compact(broker)
        client = PulsarClient(broker)
        for number, half in enumerate(HALVES, 1):
            await client.subscribe(number, f"r{number}", read_compacted=True, key_shared_meta=sticky(half))
        await settle()
        assert sorted(values(client)) == [b"%d" % at for at in range(20, 30)]


@pytest.mark.parametrize("type", ["exclusive", "key_shared"])
@pytest.mark.parametrize(
    "ranges",
    [[], [(10, 0)], [(0, 65_537)], [(65_536, 65_536)], [(-1, 5)], [(0, 10), (5, 20)], [(0, 10), (10, 20)]],
)
async def test_ranges_of_hashes_that_are_none_are_refused(type: str, ranges: list[tuple[int, int]]) -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        with pytest.raises(InvalidArgument, match="hash range"):
            await client.subscribe(type=type, key_shared_meta=sticky(*ranges))
        await client.subscribe(type=type, key_shared_meta=sticky((0, 65_536)))  # Java lets it be the end


# --- subscriptions ---------------------------------------------------------------------------------------------------


async def test_a_subscription_has_the_properties_that_it_was_made_with() -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        for number, texts in enumerate((["1", "2"], ["3"], []), 1):
            given = [wire.KeyValue(key="x", value=text) for text in texts]
            await client.subscribe(number, type="shared", subscription_properties=given)
            assert broker.topics[str(TOPIC)].subscriptions["s"].cursor.properties == {"x": "2"}
        await client.subscribe(
            4, "r", durable=False, subscription_properties=[wire.KeyValue(key="x", value="")]
        )
        assert broker.topics[str(TOPIC)].subscriptions["r"].cursor.properties == {}
        many = [wire.KeyValue(key=f"{number}", value="x") for number in range(10_000)]
        with pytest.raises(InvalidArgument, match="48890 letters; at most 10000"):
            await client.subscribe(5, "many", subscription_properties=many)
        assert "many" not in broker.topics[str(TOPIC)].subscriptions


# --- acknowledgements ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
async def test_an_acknowledgement_without_ack_set_covers_its_batch(type: str) -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0", [b"1", b"2"], [b"3", b"4"], b"5")
        client = PulsarClient(broker)
        await client.subscribe(type=type)
        found = client.link.take()
        await client.ack(found[1])
        assert mark_delete(broker) == (0, 0)
        await client.ack(found[0])
        assert mark_delete(broker) == (0, 3)
        await client.ack(*found)
        assert mark_delete(broker) == (1, 0)


async def test_plain_acknowledgements_of_one_read_go_together() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0", [b"1", b"2"], b"3")
        client = PulsarClient(broker)
        consumer = await client.subscribe(type="shared")
        found = client.link.take()
        consumer.acknowledge_ids([found[2].id, found[1].id, found[0].id])
        assert mark_delete(broker) == (1, 0)
        assert consumer.opened.consumer.unacked_messages == 0


def test_acknowledged_batches_that_follow_one_another_are_one_row() -> None:
    known = Borders()
    known.remember((5, 0), UNBATCHED)
    known.remember((5, 1), [2, 3, LAST_INDEX + 1])
    known.remember((5, 2), UNBATCHED)

    def packed(*places: tuple[int, int]) -> list[tuple[int, int]]:
        return [(5, entry << INDEX_BITS | index) for entry, index in places]

    places = [
        (0, 3),
        (0, 4),
        (0, 5),
        (0, 7),
        (0, 7),
        (0, 6),
        (1, 0),
        (1, 2),
        (1, 3),
        (1, ALONE),
        (1, ALONE | 1),
    ]
    rows, unknown = known.rows_of(packed(*places, (2, 0), (2, ALONE)))
    assert rows == [
        (5, 0, 3, 5), (5, 0, 7, 7), (5, 0, 7, 7), (5, 0, 6, 6), (5, 1, 0, LAST_INDEX), (5, 1, 0, 1), (5, 2, 0, 0),
        (5, 2, 0, 0),
    ]  # fmt: skip
    assert not unknown
    elsewhere = [(4, 1), *packed((3, 1), (3, 2))]
    assert known.rows_of([*packed((0, 0)), *elsewhere, *packed((0, 1))]) == (
        [(5, 0, 0, 0), (5, 0, 1, 1)],
        elsewhere,
    )
    assert known.rows_of([]) == ([], [])


async def test_ack_sets_acknowledge_single_messages_and_come_back_with_the_rest() -> None:
    async with running_broker() as broker:
        batch = [b"%d" % number for number in range(100)]
        await Producer(broker).publish(b"x", batch)
        client = PulsarClient(broker, transcoded := Transcoded())
        await client.subscribe(type="shared")
        single, message = client.link.take()
        await client.ack(single)
        await client.ack(message, ack_set=encode_ack_set([(0, 9), (50, 99)], 100))
        assert mark_delete(broker) == (0, 11)
        await client.redeliver(message)
        (again,) = client.link.take()
        assert (again.id, again.values, again.redelivered) == (message.id, batch[10:50], 1)
        client.lose()
        client = PulsarClient(broker, transcoded)
        await client.subscribe(type="shared")  # whether this one sends ack sets is not known
        singles = client.link.take()
        assert [value for one in singles for value in one.values] == batch[10:50]
        await client.ack(*singles)
        assert mark_delete(broker) == (1, 0)


async def test_of_a_batch_that_is_hidden_in_part_clients_without_ack_sets_get_single_messages() -> None:
    """They acknowledge a batch once they have all of it, and never where some of it is skipped."""
    async with running_broker() as broker:
        await Producer(broker).publish([b"0", b"1", b"2"])
        await native(broker, [b"3", b"4", b"5"])
        owner, client = FakeClient(broker), PulsarClient(broker)
        await owner.consumer(1, "s", type="shared")
        await owner.received(6)
        await owner.ack(owner.messages[0].row(), owner.messages[4].row())
        await client.subscribe(type="shared", permits=100)
        await owner.ask(c.CloseConsumer, 1)
        await settle()
        found = client.link.take()
        assert [(one.values, one.batched, one.ack_set, one.place()) for one in found] == [
            ([b"1"], False, (), (0, ALONE | 1)), ([b"2"], False, (), (0, ALONE | 2)),
            ([b"3"], False, (), (1, ALONE)), ([b"5"], False, (), (1, ALONE | 2)),
        ]  # fmt: skip
        await client.ack(found[2])  # not the whole batch, though it is its first message
        await client.redeliver(found[3])
        (again,) = client.link.take()
        assert again.values == [b"5"]
        await client.ack(found[0], found[1], again)
        assert mark_delete(broker) == (2, 0)


async def test_what_another_connection_acknowledged_of_a_batch_is_no_more_waited_for() -> None:
    """Seed 700081 of the simulation `mixed_once`: of a batch that is held here whole."""
    async with running_broker() as broker:
        await native(broker, [b"0", b"1", b"2"])
        owner, client = FakeClient(broker), PulsarClient(broker)
        await owner.consumer(1, "s", type="shared")
        await owner.received(3)
        await client.subscribe(type="shared", permits=100)
        await owner.ask(c.CloseConsumer, 1)
        await settle()
        (message,) = client.link.take()
        await owner.consumer(2, "s", type="shared", permits=0)
        owner.frame(c.Ack(0, 2), c.encode_rows(c.ACK_ROW, [owner.messages[0].row()]))
        await client.ack(message)
        assert mark_delete(broker) == (1, 0)


async def test_the_first_message_of_a_batch_in_parts_is_not_the_batch_on_another_connection() -> None:
    async with running_broker() as broker:
        await native(broker, [b"0", b"1", b"2"])
        owner, client, again = FakeClient(broker), PulsarClient(broker), PulsarClient(broker)
        await owner.consumer(1, "s", type="shared")
        await owner.received(3)
        await owner.ack(owner.messages[1].row())
        await client.subscribe(type="shared", permits=100)
        await owner.ask(c.CloseConsumer, 1)
        await settle()
        first, third = client.link.take()
        client.lose()
        await again.subscribe(type="shared", permits=0)
        await again.ack(first)
        again.flow(10)
        await settle()
        assert values(again) == third.values == [b"2"]


@pytest.mark.parametrize("permits", [0, 10])
async def test_nor_is_it_at_the_next_owner_which_does_not_know_what_others_had(permits: int) -> None:
    """Seeds 130 and 172 of the simulation `mixed_once`: whether or not the consumer has the whole batch there."""
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with running_broker(ledgers, metadata) as broker:
        await native(broker, [b"0", b"1"])
        clients = [PulsarClient(broker) for _ in range(2)]
        for client in clients:
            await client.subscribe(type="shared", permits=0)
        for client in clients:
            client.flow(1)
        await settle()
        (first,), (second,) = [client.link.take() for client in clients]
    async with running_broker(ledgers, metadata) as broker:
        again = PulsarClient(broker)
        await again.subscribe(type="shared", permits=permits)
        await again.ack(first)
        assert mark_delete(broker) == (0, 1)
        again.flow(10)
        await settle()
        if permits:
            (whole,) = again.link.take()
            assert whole.values == [b"0", b"1"]
            await again.ack(whole)
        else:
            assert values(again) == second.values == [b"1"]
            await again.ack(second)
        assert mark_delete(broker) == (1, 0)


@pytest.mark.parametrize("given_back", [False, True])
async def test_nor_is_it_beside_what_came_of_the_batch_later_with_an_ack_set(*, given_back: bool) -> None:
    """Seed 71113 of the simulation `mixed`, and a batch that comes whole because its parts were asked for again."""
    async with running_broker() as broker:
        await native(broker, [b"0", b"1", b"2"], [b"3", b"4"])
        client, other = PulsarClient(broker), PulsarClient(broker)
        for one in (client, other):
            await one.subscribe(type="shared", permits=0)
        for one, permits in ((client, 1), (other, 1), (client, 3)):
            one.flow(permits)
            await settle()
        first, third, batch = client.link.take()
        (second,) = other.link.take()
        await client.ack(batch, ack_set=[0b10])
        if given_back:
            await client.redeliver(first, third)
            await other.redeliver(second)
        client.flow(10)
        other.lose()
        await settle()
        (rest,) = client.link.take()
        assert rest.values == ([b"0", b"1", b"2"] if given_back else [b"1"])
        assert rest.batched
        await client.ack(first)
        client.lose()
        again = PulsarClient(broker)
        await again.subscribe(type="shared")
        assert values(again) == [b"1", b"2", b"4"]


async def test_a_message_within_a_batch_is_not_the_rest_of_it_on_another_connection() -> None:
    """Seed 6 of the simulation `mixed`: of the entry that connection has had another batch only."""
    async with running_broker() as broker:
        await native(broker, [b"0", b"1"], [b"2", b"3", b"4"])
        client = PulsarClient(broker)
        await client.subscribe(type="shared", permits=1)
        (first,) = client.link.take()
        await client.ack(first._replace(entry=first.entry + 3))
        client.flow(10)
        await settle()
        assert values(client) == [b"2", b"4"]


async def test_what_is_held_of_another_batch_says_nothing_of_one_that_went_out_in_parts() -> None:
    async with running_broker() as broker:
        await native(broker, [b"0", b"1"], [b"2", b"3", b"4"])
        owner, client = FakeClient(broker), PulsarClient(broker)
        await owner.consumer(1, "s", type="shared")
        await owner.received(5)
        await owner.ack(owner.messages[3].row())
        await owner.ask(c.CloseConsumer, 1)
        await client.subscribe(type="shared", permits=1)
        (first,) = client.link.take()
        await client.ack(
            first._replace(entry=first.entry + 2 | ALONE)
        )  # of an earlier connection, which had 2 and 4
        client.flow(10)
        await settle()
        assert values(client) == [b"4"]


async def test_an_id_within_a_batch_that_is_held_means_that_message_alone() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish([b"0", b"1", b"2"])
        client = PulsarClient(broker)
        await client.subscribe(type="shared")
        (message,) = client.link.take()
        await client.ack((message.ledger, message.entry + 1))
        state = broker.topics[str(TOPIC)].subscriptions["s"].cursor.state
        assert state.unacked(message.ledger, 0, 0, 2) == [(0, 0), (2, 2)]


async def test_what_is_left_of_a_batch_keeps_its_place_among_others() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0", [b"1", b"2"], b"3")
        client = PulsarClient(broker)
        await client.subscribe(type="shared")
        await client.ack(client.link.take()[1], ack_set=[0b10])
        await client.redeliver()
        assert values(client) == [b"0", b"2", b"3"]


async def test_cumulative_acknowledgements_end_with_their_batch_or_before_what_their_ack_set_keeps() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0", [b"1", b"2", b"3"], b"4")
        client = PulsarClient(broker)
        await client.subscribe()
        found = client.link.take()
        await client.ack(found[1], ack_set=[0b110], cumulative=True)
        assert mark_delete(broker) == (0, 2)
        await client.ack(found[1], cumulative=True)
        assert mark_delete(broker) == (0, 4)
        await client.ack(found[2], cumulative=True, receipt=False)
        assert mark_delete(broker) == (1, 0)


async def test_a_computed_predecessor_means_behind_the_batch_that_contains_it() -> None:
    async with running_broker() as broker:
        producer = Producer(broker)
        await producer.publish([b"0", b"1", b"2"], [b"3", b"4"])
        await producer.publish([b"5", b"6"])
        client = PulsarClient(broker)
        await client.subscribe()
        _, second, third = client.link.take()
        await client.ack((second.ledger, second.entry - 1), cumulative=True)
        assert mark_delete(broker) == (0, 3)
        await client.ack((third.ledger, third.entry - 1), cumulative=True)
        assert mark_delete(broker) == (1, 0)
        # In its first batch the client keeps the first message, too: the first of a ledger has no entry before it.
        await client.ack(third, ack_set=[0b11], cumulative=True)
        assert mark_delete(broker) == (1, 0)
        # A start there includes that message, which clients drop: of a batch in parts it is the id of one.
        reader = PulsarClient(broker)
        await reader.subscribe(
            subscription="r", durable=False, start_message_id=message_id(second.ledger, second.entry - 1)
        )
        assert values(reader) == [b"2", b"3", b"4", b"5", b"6"]
        await reader.seek(message_id=message_id(third.ledger, third.entry - 1))
        await reader.subscribe(subscription="r", durable=False)
        assert values(reader) == [b"5", b"6"]


async def test_before_the_first_entry_of_a_ledger_ends_the_one_before() -> None:
    async with running_broker(max_ledger_entries=1) as broker:
        producer = Producer(broker)
        await producer.publish(b"0")
        await settle()
        await producer.publish(b"1")
        client = PulsarClient(broker)
        await client.subscribe()
        first, second = client.link.take()
        assert first.ledger < second.ledger
        # Before the first one of all nothing is, whether it is named by an entry or by an ack set.
        await client.ack((first.ledger, (1 << 64) - 1), cumulative=True)
        await client.ack(first, ack_set=[1], cumulative=True)
        await client.ack((second.ledger + 1, (1 << 64) - 1), cumulative=True)
        assert mark_delete(broker) == (0, 0)
        await client.ack((second.ledger, (1 << 64) - 1), cumulative=True)
        cursor = broker.topics[str(TOPIC)].subscriptions["s"].cursor
        assert cursor.state.mark_delete == (second.ledger, 0, 0)
        await client.ack((first.ledger, (1 << 64) - 1), cumulative=True)


async def test_rule_47_before_the_first_entry_of_a_ledger_there_is_no_message_but_a_place() -> None:
    async with running_broker(max_ledger_entries=1) as broker:
        producer = Producer(broker)
        for number in range(3):
            await producer.publish(b"%d" % number)
            await settle()
        client = PulsarClient(broker)
        await client.subscribe(type="shared")
        first, second, third = client.link.take()
        before = (third.ledger, (1 << 64) - 1)
        answer = await client.ack(before)
        assert answer is not None
        assert not answer.HasField("error")
        state = broker.topics[str(TOPIC)].subscriptions["s"].cursor.state
        await client.ack(second)
        assert state.unacked(first.ledger, 0, 0, 0) == [(0, 0)]
        assert state.range_count == 1
        await client.seek(message_id=message_id(*before))
        await client.subscribe(type="shared")
        assert values(client) == [b"2"]


async def test_acknowledgements_of_an_earlier_connection_are_looked_up() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with running_broker(ledgers, metadata) as broker:
        await Producer(broker).publish(b"0", [b"1", b"2", b"3"], b"4")
        client = PulsarClient(broker)
        await client.subscribe(type="shared")
        found = client.link.take()
        client.lose()
    async with running_broker(ledgers, metadata) as broker:  # and its cache is empty
        client = PulsarClient(broker)
        consumer = await client.subscribe(type="shared", permits=0)
        await client.ack(found[1])
        assert broker.topics[str(TOPIC)].subscriptions["s"].cursor.state.unacked(found[1].ledger, 0, 0, 4) == [
            (0, 0), (4, 4),
        ]  # fmt: skip
        consumer.acknowledge_ids([found[0].id, found[2].id])
        await asyncio.sleep(1)
        assert mark_delete(broker) == (1, 0)
        # What there never was is refused, and what is gone is not owed any more.
        answer = await client.ack((found[0].ledger, pack_entry(99, 0)))
        assert answer is not None
        assert "never delivered" in answer.message
        answer = await client.ack((found[0].ledger + 1000, 0))
        assert answer is not None
        assert not answer.HasField("error")


async def test_what_waits_to_be_looked_up_is_dropped_by_a_seek() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish([b"0", b"1"])
        client = PulsarClient(broker)
        await client.subscribe()
        (message,) = client.link.take()
        client.lose()
        consumer = await client.subscribe(permits=0)
        command = wire.CommandAck(consumer_id=1, ack_type=wire.CommandAck.INDIVIDUAL, request_id=5)
        command.message_id.add(ledger_id=message.ledger, entry_id=message.entry)
        consumer.acknowledge(command)
        consumer.sought()
        await settle()
        (answer,) = client.link.names("ack_response")
        assert (answer.request_id, "closed" in answer.message) == (5, True)
        assert mark_delete(broker) == (0, 0)


async def test_a_cumulative_acknowledgement_of_a_shared_subscription_is_ignored_and_answered() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0")
        client = PulsarClient(broker)
        await client.subscribe(type="shared")
        answer = await client.ack(*client.link.take(), cumulative=True)
        assert answer is not None
        assert not answer.HasField("error")
        assert mark_delete(broker) == (0, 0)


async def test_acknowledgements_in_a_transaction_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0")
        client = PulsarClient(broker)
        consumer = await client.subscribe()
        command = wire.CommandAck(
            consumer_id=1, ack_type=wire.CommandAck.INDIVIDUAL, request_id=5, txnid_most_bits=1
        )
        command.message_id.add(ledger_id=1, entry_id=0)
        consumer.acknowledge(command)
        (answer,) = client.link.names("ack_response")
        assert (answer.txnid_most_bits, "no transactions" in answer.message) == (1, True)
        command.ClearField("request_id")  # rule 54: if nobody is there to be answered, people are told
        with caplog.at_level("INFO"):
            consumer.acknowledge(command)
        assert "an acknowledgement is refused: there are no transactions" in caplog.text
        assert len(client.link.names("ack_response")) == 1


async def test_the_borders_of_batches_are_forgotten_with_what_is_acknowledged_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("magnetar.broker.listeners.pulsar.borders.MAX_BORDERS", 10)
    async with running_broker() as broker:
        producer, client = Producer(broker), PulsarClient(broker)
        consumer = await client.subscribe(type="shared")
        for _ in range(9):
            await producer.publish([b"0", b"1"])
        assert len(consumer._borders) == 5
        found = client.link.take()
        await client.ack(*found)  # most are looked up
        assert mark_delete(broker) == (9, 0)
        await producer.publish(b"2")
        assert len(consumer._borders) == 1


# --- again -----------------------------------------------------------------------------------------------------------


async def test_redelivery_by_id_counts_and_a_lost_connection_does_not() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0", [b"1", b"2"])
        client = PulsarClient(broker)
        await client.subscribe(type="shared")
        found = client.link.take()
        await client.redeliver(found[1])
        assert [(one.values, one.redelivered) for one in client.link.take()] == [([b"1", b"2"], 1)]
        client.lose()
        await client.subscribe(type="shared")
        assert [(one.values, one.redelivered) for one in client.link.take()] == [
            ([b"0"], 0),
            ([b"1", b"2"], 1),
        ]
        await client.redeliver()
        assert [one.redelivered for one in client.link.take()] == [1, 2]


@pytest.mark.parametrize("named", [False, True])
async def test_exclusive_rewinds_uncounted_whatever_is_named_and_keeps_the_clients_epoch(named: bool) -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0", b"1")
        client = PulsarClient(broker)
        await client.subscribe(consumer_epoch=0)
        first, second = client.link.take()
        assert first.epoch == 0
        await client.ack(first)
        await client.redeliver(*([second] if named else []), epoch=1)
        assert [(one.values, one.redelivered, one.epoch) for one in client.link.take()] == [([b"1"], 0, 1)]
        await client.redeliver(epoch=0)  # rule 43: what it sent before that
        assert [one.epoch for one in client.link.take()] == [1]


# --- seek ------------------------------------------------------------------------------------------------------------


async def test_a_seek_closes_all_consumers_of_pulsar_before_it_succeeds() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(*[b"%d" % number for number in range(5)])
        client, other = PulsarClient(broker), PulsarClient(broker)
        await client.subscribe(1, type="shared")
        await other.subscribe(2, type="shared")
        await client.subscribe(3, "another")
        found = client.link.take()
        client.link.sent.clear()
        await client.seek(message_id=message_id(*found[2].id))
        assert [name for name, _ in client.link.sent] == ["close_consumer", "success"]
        (closed,) = client.link.names("close_consumer")
        assert (closed.consumer_id, closed.request_id) == (1, (1 << 64) - 1)
        assert [one.consumer_id for one in other.link.names("close_consumer")] == [2]
        assert (list(client.consumers), list(other.consumers)) == ([3], [])
        await settle()
        assert not client.link.messages  # nothing stale, and nobody has permits
        await client.subscribe(1, type="shared", permits=2)
        assert values(client) == [b"2", b"3"]


async def test_consumers_are_closed_by_a_seek_only_when_it_is_durable() -> None:
    """A client that comes again before SUCCESS takes a seek that is slow for one that goes on for ever (client 3.7)."""
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        await Producer(broker).publish(b"0", b"1")
        client = PulsarClient(broker)
        await client.subscribe()
        client.link.sent.clear()
        ledgers.hold = True
        seeking = asyncio.ensure_future(client.seek(message_publish_time=0))
        await settle()
        assert not client.link.sent
        ledgers.hold = False
        ledgers.confirm()
        await seeking
        assert [name for name, _ in client.link.sent] == ["close_consumer", "success"]


async def test_a_seek_by_an_administrator_closes_them_too_and_native_ones_go_on() -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0", b"1")
        client, owner = PulsarClient(broker), FakeClient(broker)
        await owner.consumer(1, "s", type="shared")
        await client.subscribe(type="shared")
        await owner.ask(c.SeekSubscription, "orders", "s", start=("earliest", None))
        assert client.link.names("close_consumer")
        assert not client.consumers
        owner.messages.clear()
        owner.frame(c.Flow(0, 1, 100))
        await settle()
        assert len(owner.messages) == 2 or client.link.messages


@pytest.mark.parametrize("durable", [True, False])
async def test_a_reader_finds_its_place_when_it_comes_again_and_is_forgotten_when_it_does_not(
    durable: bool,
) -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0", b"1", b"2")
        client = PulsarClient(broker)
        await client.subscribe(durable=durable)
        third = client.link.take()[2]
        await client.seek(message_id=message_id(*third.id))
        await asyncio.sleep(30)
        await client.subscribe(durable=durable, start_message_id=message_id(EARLIEST, EARLIEST))
        assert values(client) == [b"2"]
        await asyncio.sleep(40)
        assert "s" in broker.topics[str(TOPIC)].subscriptions
        await client.seek(message_publish_time=0)
        await asyncio.sleep(61)
        assert ("s" in broker.topics[str(TOPIC)].subscriptions) == durable


async def test_seeks_by_ack_set_by_time_and_to_the_ends() -> None:
    async with running_broker(clock=FakeClock(2_000_000_000_000)) as broker:
        producer = Producer(broker)
        await producer.publish([b"0", b"1", b"2"], publish_time=1_000)
        await producer.publish(b"3", publish_time=2_000)
        client = PulsarClient(broker)
        await client.subscribe(type="shared")
        batch, last = client.link.take()

        async def after(**seek: Any) -> list[bytes]:
            await client.seek(**seek)
            await client.subscribe(type="shared")
            return values(client)

        assert await after(message_id=message_id(*batch.id, ack_set=[0b110])) == [b"1", b"2", b"3"]
        assert await after(message_id=message_id(*batch.id)) == [b"0", b"1", b"2", b"3"]
        assert await after(message_publish_time=1_500) == [b"3"]
        assert await after(message_id=message_id(LATEST, LATEST)) == []
        assert await after(message_id=message_id(EARLIEST, EARLIEST)) == [b"0", b"1", b"2", b"3"]
        assert await after(message_id=message_id(last.ledger, last.entry)) == [b"3"]


# --- subscribing -----------------------------------------------------------------------------------------------------


async def test_where_a_subscription_begins() -> None:
    async with running_broker(clock=FakeClock(1_000_000)) as broker:
        producer = Producer(broker)
        await producer.publish([b"0", b"1"], publish_time=500_000)
        await producer.publish([b"2", b"3"], publish_time=990_000)
        client = PulsarClient(broker)
        await client.subscribe(1, "a")
        second = client.link.take()[1]

        async def begin(**fields: Any) -> list[bytes]:
            client.consumers.pop(2, None)
            await client.subscribe(2, f"s{len(client.link.sent)}", **fields)
            return values(client)

        start = message_id(second.ledger, second.entry)
        start.batch_index = 0
        assert await begin(initial_position=wire.CommandSubscribe.LATEST) == []
        assert await begin(start_message_id=start) == [
            b"0",
            b"1",
            b"2",
            b"3",
        ]  # durable: it has its own place
        assert await begin(durable=False, start_message_id=start) == [b"2", b"3"]  # inclusive, as a batch
        assert await begin(durable=False, start_message_id=message_id(LATEST, LATEST)) == []
        assert await begin(durable=False, start_message_rollback_duration_sec=60) == [b"2", b"3"]
        assert await begin(durable=False, start_message_rollback_duration_sec=2_000) == [
            b"0",
            b"1",
            b"2",
            b"3",
        ]
        missing = message_id(second.ledger, pack_entry(77, 3))
        assert await begin(durable=False, start_message_id=missing) == []


async def test_what_was_published_to_a_non_persistent_topic_before_is_not_delivered() -> None:
    async with running_broker() as broker:
        producer, client, topic = Producer(broker), PulsarClient(broker), "non-persistent://public/default/t"
        await client.subscribe(1, "a", topic=topic)
        await producer.publish(b"0", topic=topic)
        await client.subscribe(2, "b", topic=topic)
        await producer.publish(b"1", topic=topic)
        await settle()
        assert [(one.consumer_id, one.values) for one in client.link.take()] == [
            (1, [b"0"]), (1, [b"1"]), (2, [b"1"]),
        ]  # fmt: skip


async def test_what_a_subscribe_refuses() -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        with pytest.raises(TopicNotFound):
            await client.subscribe(force_topic_creation=False)
        sticky = wire.KeySharedMeta(key_shared_mode=wire.KeySharedMeta.STICKY)
        with pytest.raises(InvalidArgument, match="hash ranges"):
            await client.subscribe(type="key_shared", key_shared_meta=sticky)
        with pytest.raises(InvalidArgument, match="read_compacted"):
            await client.subscribe(type="shared", read_compacted=True)
        with pytest.raises(InvalidArgument, match="consumer name"):
            await client.subscribe(consumer_name="x" * 256)
        await client.subscribe(type="failover", read_compacted=True, priority_level=3)
        with pytest.raises(ConsumerBusy):
            await client.subscribe(2, type="shared")


async def test_unsubscribe_waits_for_others_unless_forced() -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        first = await client.subscribe(1, type="shared")
        await client.subscribe(2, type="shared")
        with pytest.raises(ConsumerBusy):
            await first.unsubscribe(wire.CommandUnsubscribe(consumer_id=1, request_id=1))
        await first.unsubscribe(wire.CommandUnsubscribe(consumer_id=1, request_id=1, force=True))
        assert not client.consumers
        assert [one.consumer_id for one in client.link.names("close_consumer")] == [2]
        assert "s" not in broker.topics[str(TOPIC)].subscriptions


# --- what consumers learn --------------------------------------------------------------------------------------------


def actives(*clients: PulsarClient) -> list[tuple[int, bool]]:
    """ACTIVE_CONSUMER_CHANGEs since the last call."""
    found = []
    for client in clients:
        found += [(one.consumer_id, one.is_active) for one in client.link.names("active_consumer_change")]
        client.link.sent.clear()
    return found


async def test_all_failover_consumers_learn_of_a_change_and_each_newcomer_of_its_place() -> None:
    async with running_broker(failover_delay_ms=1) as broker:
        client, old = PulsarClient(broker), PulsarClient(broker, protocol_version=11)
        await client.subscribe(1, type="failover", priority_level=1)
        assert [name for name, _ in client.link.sent] == ["success", "active_consumer_change"]
        assert actives(client) == [(1, True)]
        await client.subscribe(2, type="failover", priority_level=2)
        assert actives(client) == [(2, False)]
        await old.subscribe(3, type="failover", priority_level=3)
        assert actives(client, old) == []
        await client.subscribe(4, type="failover", priority_level=0)
        await asyncio.sleep(1)
        assert actives(client, old) == [(1, False), (2, False), (4, True)]
        client.consumers.pop(4).release(lost=False)
        await asyncio.sleep(1)
        assert actives(client, old) == [(1, True), (2, False)]
        exclusive = PulsarClient(broker)
        await exclusive.subscribe(subscription="x")
        assert actives(exclusive) == []


async def test_nothing_is_sent_to_a_consumer_before_it_is_told_that_it_is_open() -> None:
    async with running_broker(failover_delay_ms=1) as broker:
        client = PulsarClient(broker)
        first = await client.subscribe(1, type="failover", priority_level=1)
        command = wire.CommandSubscribe(
            topic="orders",
            subscription="s",
            sub_type="FAILOVER",
            consumer_id=2,
            request_id=2,
            consumer_name="2",
        )
        second = Consumer(
            client.link,
            client.service,
            Requests(client.service),
            Transcoded(),
            command,
            lambda consumer: None,
        )
        await second.open()
        actives(client)
        first._tell_all()
        assert actives(client) == [(1, True)]
        second.begin()
        assert [one for one in actives(client) if one[0] == 2]
        second.release(lost=False)


async def test_a_native_consumer_that_takes_over_is_learned_of_too() -> None:
    async with running_broker(failover_delay_ms=1) as broker:
        client, owner = PulsarClient(broker), FakeClient(broker)
        await client.subscribe(type="failover", priority_level=1)
        actives(client)
        await owner.consumer(1, "s", type="failover", priority_level=0)
        await asyncio.sleep(1)
        assert actives(client) == [(1, False)]


@pytest.mark.parametrize(
    ("version", "learns"),
    [
        ("Pulsar-Java-v4.0.6", True),
        ("DotPulsar", True),
        ("Pulsar-CPP-v3.7.2", False),
        ("Pulsar Go 0.14.0", False),
    ],
)
async def test_only_clients_that_know_the_end_of_a_topic_learn_of_it(version: str, learns: bool) -> None:
    async with running_broker() as broker:
        await Producer(broker).publish(b"0")
        client = PulsarClient(broker, client_version=version)
        await client.subscribe()
        await broker.topics[str(TOPIC)].terminate()
        await settle()
        await client.redeliver()
        assert len(client.link.names("reached_end_of_topic")) == learns


async def test_an_unload_closes_consumers() -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        await client.subscribe()
        await broker.close()
        assert client.link.names("close_consumer")
        assert not client.consumers


async def test_last_message_ids() -> None:
    async with running_broker() as broker:
        producer, client = Producer(broker), PulsarClient(broker)
        await client.subscribe(type="shared")
        none = (1 << 64) - 1
        found = await client.last_id()
        assert (found.last_message_id.ledger_id, found.last_message_id.entry_id) == (none, none)
        expected: list[tuple[list[bytes] | bytes, int]]
        expected = [([b"1"], 0), (b"2", -1), ([b"3", b"4", b"5"], 2)]
        for batch, batch_index in expected:
            await producer.publish(b"x", batch)
            found = await client.last_id()
            last = client.link.messages[-1]
            of = found.last_message_id
            assert ((of.ledger_id, of.entry_id), of.HasField("batch_index")) == (last.id, True)
            assert (of.batch_index, of.partition) == (batch_index, -1)
        # The mark is the last batch up to which all is acknowledged, as a whole; clients compare it with the last one.
        first, *between, before, last = client.link.take()

        async def mark() -> tuple[int, int]:
            found = (await client.last_id()).consumer_mark_delete_position
            return found.ledger_id, found.entry_id

        assert await mark() == (first.ledger, none)
        await client.ack(first, *between)
        assert await mark() == between[-1].id
        await client.ack(before)
        assert await mark() == before.id
        await client.ack(last, ack_set=[0b110])
        assert await mark() == before.id
        await client.ack(last)
        assert await mark() == last.id


async def test_the_mark_of_a_subscription_at_the_end_of_a_ledger_is_the_last_message() -> None:
    """A reader that begins at the latest message, included, finds it by that."""
    async with running_broker(max_ledger_entries=1) as broker:
        await Producer(broker).publish(b"0", [b"1", b"2"])
        await settle()
        client = PulsarClient(broker)
        await client.subscribe(durable=False, start_message_id=message_id(LATEST, LATEST))
        found = await client.last_id()
        last, mark = found.last_message_id, found.consumer_mark_delete_position
        assert (mark.ledger_id, mark.entry_id) == (last.ledger_id, last.entry_id)


async def test_the_last_id_of_a_native_batch_in_slices() -> None:
    async with running_broker() as broker:
        await native(broker, [b"%02d" % number * 50 for number in range(10)])
        client = PulsarClient(broker, Transcoded(SLICE_BYTES))
        await client.subscribe()
        found = (await client.last_id()).last_message_id
        assert (found.entry_id & 0xFFFFF, found.batch_index) == (8, 1)


async def test_all_chunks_of_a_message_go_to_one_consumer() -> None:
    async with running_broker() as broker:
        client = PulsarClient(broker)
        for number in range(1, 4):
            await client.subscribe(number, type="shared", permits=2)
        producer = Producer(broker)
        for chunk in range(6):
            fields: dict[str, Any] = {
                "uuid": "u",
                "num_chunks_from_msg": 6,
                "total_chunk_msg_size": 6,
                "chunk_id": chunk,
            }
            await producer.publish(b"c", sequence_id=0, **fields)
            await producer.publish(b"other", sequence_id=chunk + 1)
            for number in range(1, 4):
                client.flow(1, number)
            await settle()
        found = [one for one in client.link.take() if one.values == [b"c"]]
        assert (len(found), len({one.consumer_id for one in found})) == (6, 1)


async def test_what_a_compaction_left_nothing_of_costs_no_permits() -> None:
    async with running_broker() as broker:
        owner = FakeClient(broker)
        answer = await owner.producer(9)
        for first, keys in ((0, ["a", "b"]), (2, ["a", "a"]), (4, ["c", "b"])):
            values_ = [b"%d" % (first + number) for number in range(2)]
            batch = encode_batch(values_, sequence_id=first, publish_time_ms=0, keys=keys)
            owner.frame(c.Send(0, 9, answer["epoch"]), batch)
        await owner.confirmed(6)
        await compact(broker)
        client = PulsarClient(broker, transcoded := Transcoded())
        await client.subscribe(subscription="all")
        assert values(client) == [b"%d" % number for number in range(6)]
        client = PulsarClient(broker, transcoded)
        consumer = await client.subscribe(read_compacted=True, permits=10)
        found = client.link.take()
        assert [(one.place(), one.values) for one in found] == [((0, 2), [b"3"]), ((0, 4), [b"4", b"5"])]
        assert len(transcoded._slices) == 4  # a batch of which something is left is another one
        assert consumer.opened.consumer.available_permits == 7
        await client.ack(found[-1], cumulative=True)
        assert mark_delete(broker) == (1, 0)
        client.lose()
        again = PulsarClient(broker)
        await again.subscribe(read_compacted=True, permits=0)
        await again.seek(message_id=message_id(found[1].ledger, found[1].entry - 1))
        await again.subscribe(read_compacted=True)
        assert values(again) == [b"3", b"4", b"5"]
