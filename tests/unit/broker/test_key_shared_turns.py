"""Key_shared: how much one turn of the loop does, and what is left for the next."""

import asyncio
from itertools import pairwise

from magnetar.broker.cursors.core.acks import EntryKey
from magnetar.broker.dispatch.core.consumer import Consumer
from magnetar.broker.dispatch.core.selection.entry_slots import EntrySlots
from magnetar.broker.dispatch.core.selection.hash_ranges import Owners
from magnetar.broker.dispatch.core.selection.key_shared import (
    COST_OF_A_SHARE,
    MAX_COST_PER_TURN,
    MAX_SHARED_OUT,
    KeySharedSelector,
)
from magnetar.broker.dispatch.core.selection.protocol import SharedOut
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.frames import encode_frame
from support.broker_kit import FakeClient, running_broker

KEYS = MAX_SHARED_OUT + 50


class Port:
    """A consumer's, whose connection takes everything."""

    writable = True


def entry_of(keys: list[str], sizes: list[int] | None = None) -> Entry:
    """An entry with a batch for each key, of one message or so many."""
    sizes = sizes or [1] * len(keys)
    batches = [
        encode_batch([b"x"] * size, sequence_id=0, publish_time_ms=0, keys=[key] * size)
        for key, size in zip(keys, sizes)
    ]
    data = encode_entry(batches, sizes, [0] * len(keys), ["p"], first_index=0, append_time_ms=0)
    return Entry(data, 0)


def share_out(selector: KeySharedSelector, key: EntryKey, entry: Entry) -> SharedOut:
    """All of a new entry."""
    return selector.share_out(key, entry, [(0, entry.message_count - 1)], 0, None, None)


def test_what_is_left_over_before_a_cut_waits_for_the_older_messages_of_its_key() -> None:
    selector, port = KeySharedSelector(), Port()
    consumer = Consumer("c", 0, port)  # type: ignore[arg-type]
    consumer.grant(10_000, 10_000_000)
    selector.added(consumer, 0)
    selector.changed(consumer)
    older, newer = (1, 0), (1, 1)
    share_out(selector, older, entry_of(["key-0"]))
    selector.on_queued(older, [0], [0])
    entry = entry_of([f"key-{number}" for number in range(KEYS)])
    shares, left_over, following = share_out(selector, newer, entry)
    assert following < KEYS
    assert sum(last - first + 1 for _, wanted, _, _ in shares for first, last in wanted) == MAX_SHARED_OUT - 1
    ((count, left),) = left_over
    assert count == 0
    assert left.covers(0, 0)
    selector.on_queued(newer, [0], [0])
    assert not selector.set_aside(newer, [])  # nothing would ever release it


async def test_an_entry_of_many_keys_takes_several_turns() -> None:
    count = 3 * MAX_COST_PER_TURN // COST_OF_A_SHARE
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer(type="key_shared", permits=0)
        answer = await client.producer(9)
        header = c.Send(0, 9, answer["epoch"]).encode()
        client.bytes_received(
            b"".join(
                encode_frame(
                    header, encode_batch([b"x"], sequence_id=n, publish_time_ms=0, keys=[f"key-{n}"])
                )
                for n in range(count)
            )
        )
        await client.confirmed(count)
        client.frame(c.Flow(0, 1, count))
        delivered = [len(client.messages)]
        while delivered[-1] < count:
            await asyncio.sleep(0)
            delivered.append(len(client.messages))
        turns = [after - before for before, after in pairwise([0, *delivered]) if after > before]
        assert len(turns) >= 3
        assert max(turns) <= MAX_COST_PER_TURN // COST_OF_A_SHARE + MAX_SHARED_OUT


def test_a_key_has_the_slot_that_pulsar_gives_it() -> None:
    """Computed by `Murmur3_32Hash` of Pulsar's client 4.0.6 and the rule of its broker: modulo 65,536, 1 in place of 0."""
    slots = {"": 1, "a": 27058, "k1": 24618, "order-4711": 59864, "ключ": 8258, "key-30884": 1}
    assert EntrySlots(entry_of(list(slots), [1] * len(slots))).slots == list(slots.values())


def test_an_entry_is_grouped_by_owner_and_cut_where_runs_end() -> None:
    owners = Owners()
    for name in ("a", "b", "c"):
        owners.add(Consumer(name, 0, Port()))  # type: ignore[arg-type]
    for sizes in ([1] * 40, [3] * 20):
        entry = entry_of([f"key-{number % 12}" for number in range(len(sizes))], sizes)
        slots = EntrySlots(entry)
        groups = slots.groups(owners)
        found: list[tuple[int, int]] = []
        for owner, group in groups.items():
            group.ranges.check()
            runs = [run for part in group.ranges for run in slots.runs(*part)]
            assert {owners[slot] for _, _, slot in runs} == {owner}
            assert {slot for _, _, slot in runs} == group.slots.keys()
            assert len(runs) == slots.run_count(group.ranges)
            found += [(first, last) for first, last, _ in runs]
            for count in range(1, len(runs) + 2):
                assert slots.run_count(slots.first_runs(group.ranges, count)) == min(count, len(runs))
                some = slots.first_messages(group.ranges, count)
                assert some.members == min(-(-count // sizes[0]) * sizes[0], group.ranges.members)
        ends = list(entry.end_indexes)
        assert sorted(found) == list(zip([0, *ends], [end - 1 for end in ends]))
        owners.remove(next(owner for owner in groups if owner is not None))
        assert not slots.is_of(owners)


def test_an_entry_that_waits_is_not_looked_at_before_what_it_waits_for() -> None:
    selector, key = KeySharedSelector(), (1, 0)
    consumers = {name: Consumer(name, 0, Port()) for name in ("a", "b")}  # type: ignore[arg-type]
    for consumer in consumers.values():
        selector.added(consumer, 0)
    consumers["a"].grant(1_000, 1 << 30)
    selector.changed(consumers["a"])
    entry = entry_of([f"key-{number}" for number in range(20)])
    (share,), left_over, following = share_out(selector, key, entry)
    assert share[0].name == "a"
    assert following == 20
    ((_, left),) = left_over
    starts, ends = [first for first, _ in share[1]], [last for _, last in share[1]]
    selector.on_delivered(consumers["a"], key, starts, ends)
    selector.on_queued(key, left.starts, left.ends)
    assert selector.set_aside(key, [])
    assert not selector.released()
    assert selector.waits_still(key)  # for b alone, whatever a may have
    consumers["b"].grant(1, 1 << 30)
    selector.changed(consumers["b"])
    assert selector.released() == [key]
    assert not selector.waits_still(key)
    # Another message of the entry that comes to wait may wait for something else.
    consumers["b"].available_permits = 0
    assert selector.waits_still(key)
    selector.on_settled(key, starts[:1], starts[:1])
    selector.on_queued(key, starts[:1], starts[:1])
    assert not selector.waits_still(key)
