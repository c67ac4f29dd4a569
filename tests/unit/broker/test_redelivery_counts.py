"""Redelivery counts: against a dictionary, in the cursor ledger, and over restarts of the broker."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker import Broker
from magnetar.broker.cursors.core import redeliveries
from magnetar.broker.cursors.core.acks import AckState, Position
from magnetar.broker.cursors.core.redeliveries import RedeliveryCounts
from magnetar.broker.cursors.entries import describe, encode_acks, encode_redeliveries, encode_rewinds, replay
from magnetar.broker.dispatch.core.lost_consumers import WINDOW_MS, LostConsumers
from magnetar.broker.dispatch.subscription import POISON_REDELIVERIES, Subscription
from magnetar.proto import commands as c
from magnetar.proto.errors import DataDirectoryError
from support.broker_kit import FakeClient, Message, running_broker, settle
from support.dispatch_kit import FakeTopic, read_back
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from unit.broker.test_cursor import crash, publish, subscription

# --- the core --------------------------------------------------------------------------------------------------------

ENTRIES, MESSAGES = 3, 6
PLACES = [(1, entry, index) for entry in range(ENTRIES) for index in range(MESSAGES)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, ENTRIES - 1), st.integers(0, 5), st.integers(0, 5), st.integers(0, 4)),
        st.tuples(st.just("rewound"), st.sampled_from(PLACES)),
        st.tuples(st.just("forget"), st.integers(0, ENTRIES - 1), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.just("restart"), st.booleans()),
    ),
    max_size=20,
)  # fmt: skip


def stored(counts: RedeliveryCounts, before: RedeliveryCounts, *, snapshot: bool) -> RedeliveryCounts:
    """What is read back: from a snapshot, or from the changes since `before`."""
    state = AckState(FakeTopic(), (1, 0, 0))
    if snapshot:
        return read_back(FakeTopic(), state, counts)[1]
    replay(state, before, encode_redeliveries(counts.changed_rows))
    if counts.rewinds_changed:
        replay(state, before, encode_rewinds(counts.rewinds))
    return before


@given(STEPS)
def test_counts_are_as_in_a_dictionary_also_after_restarts(steps: list[Any]) -> None:
    counts, before = RedeliveryCounts(), RedeliveryCounts()
    model: dict[Position, int] = dict.fromkeys(PLACES, 0)
    unknown: set[Position] = set()  # acknowledged: nobody asks for their counts
    for kind, *step in steps:
        match kind:
            case "set":
                entry, a, b, count = step
                first, last = min(a, b), max(a, b)
                # A count never falls below what the rewinds say.
                rewound = [counts._rewound_at((1, entry, index))[0] for index in range(first, last + 1)]
                count = max(count, *rewound, 0)
                counts.set((1, entry), first, last, count)
                model |= {(1, entry, index): count for index in range(first, last + 1)}
            case "rewound":
                counts.rewound(step[0], (1, 0, 0))
                model |= {place: count + 1 for place, count in model.items() if place < step[0]}
            case "forget":
                entry, a, b = step
                counts.forget((1, entry), min(a, b), max(a, b))
                unknown |= {(1, entry, index) for index in range(min(a, b), max(a, b) + 1)}
            case "restart":
                counts = stored(counts, before, snapshot=step[0])
                _, before = read_back(FakeTopic(), AckState(FakeTopic(), (1, 0, 0)), counts)
        counts.check()
        for place in PLACES:
            if place not in unknown:
                count, last = counts.at(place)
                assert count == model[place]
                assert all(model[1, place[1], index] == count for index in range(place[2], min(last + 1, MESSAGES))
                           if (1, place[1], index) not in unknown)  # fmt: skip
        for entry in range(ENTRIES):
            rows = list(counts.split((1, entry), [(0, MESSAGES - 1)]))
            assert [index for first, last, _ in rows for index in range(first, last + 1)] == list(
                range(MESSAGES)
            )


def test_what_is_remembered_is_bounded_and_the_highest_counts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redeliveries, "MAX_ROWS", 100)
    counts = RedeliveryCounts()
    for entry in range(50):
        counts.set((1, entry), 0, 0, 5)
    for index in range(0, 1000, 2):
        counts.set((2, 0), index, index, 1)
        counts.check()
    assert all(counts.at((1, entry, 0))[0] == 5 for entry in range(50))
    for number in range(2 * redeliveries.MAX_REWINDS):
        counts.rewound((1, number, 0), (0, 0, 0))
        assert len(counts.rewinds) <= redeliveries.MAX_REWINDS


def test_entries_of_the_cursor_ledger_as_people_see_them() -> None:
    assert describe(encode_redeliveries([(1, 2, 3, 4, 5)])) == {
        "kind": "cursor redeliveries",
        "content": {"rows": [[1, 2, 3, 4, 5]]},
    }
    assert describe(encode_rewinds([(1, 1, 1), (1, 2, 0)])) == {
        "kind": "cursor rewinds",
        "content": {"rewinds": [[1, 1, 1], [1, 2, 0]]},
    }


@pytest.mark.parametrize("rows", [1, 1000], ids=["plain", "compressed"])
def test_a_damaged_entry_of_the_cursor_ledger_is_damage(rows: int) -> None:
    starts = list(range(0, 10 * rows, 10))
    for entry in (
        encode_redeliveries([(1, number, 3, 4, 5) for number in range(rows)]),
        encode_rewinds([(1, number, 3) for number in range(rows)]),
        encode_acks((1, 2, 3), [(1, starts, [start + 1 for start in starts])]),
    ):
        assert (entry[1] != 0) == (rows > 1)
        damaged_ones = [entry[:1], entry[:3], entry[:-1], entry[:2] + b"\xff" * 4, b"", b"\x09" + entry[1:],
                        entry[:1] + b"\x07" + entry[2:]]  # fmt: skip
        for damaged in damaged_ones:
            with pytest.raises(DataDirectoryError, match="an entry of a cursor ledger is"):
                replay(AckState(FakeTopic(), (1, 0, 0)), RedeliveryCounts(), damaged)
            with pytest.raises(DataDirectoryError, match="an entry of a cursor ledger is"):
                describe(damaged)


def test_a_change_is_as_large_as_what_changed() -> None:
    """Rewinds that did not change are not written again with every count that rises."""
    assert len(encode_redeliveries([(1, 50_000, 3, 3, 1)])) < 20
    assert len(encode_acks((1, 50_000, 0), [(1, [50_001 << 20], [(50_001 << 20) + 3])])) < 30
    alternating = [number << 20 for number in range(0, 8_000, 2)]
    assert len(encode_acks((1, 0, 0), [(1, alternating, [start + 3 for start in alternating])])) < 2_000


# --- a whole broker --------------------------------------------------------------------------------------------------


def counts_of(client: FakeClient) -> list[tuple[bytes, int]]:
    """What it got, with redelivery counts."""
    return sorted((message.value, message.redelivered) for message in client.messages)


async def nack(client: FakeClient, *rows: c.AckRow | tuple[int, int, int, int], counted: bool = True) -> None:
    """REDELIVER."""
    client.frame(c.Redeliver(0, 1, counted), c.encode_rows(c.ACK_ROW, rows))
    await settle()


@pytest.mark.parametrize("type", ["shared", "exclusive", "key_shared", "failover"])
@pytest.mark.parametrize("inline", [True, False])
async def test_redelivery_counts_survive_an_unload(type: str, inline: bool) -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    settings: dict[str, Any] = {"max_inline_cursor_bytes": 1 << 16 if inline else 1}
    for restart in range(3):
        async with running_broker(ledgers, metadata, **settings) as broker:
            client = FakeClient(broker)
            if not restart:
                await publish(client, 2, batch=3)
            await client.consumer(type=type)
            await client.received(5 if restart else 6)
            expected = [(b"0.0", 0), (b"0.1", 0), (b"0.2", 0)]
            expected += [(b"1.0", restart), (b"1.1", 0), (b"1.2", 0)]
            assert counts_of(client) == expected[1 if restart else 0 :]
            if not restart:
                await client.ack(client.messages[0].row())
            (twice,) = [message for message in client.messages if message.value == b"1.0"]
            await nack(client, twice.row())
            assert client.messages[-1].redelivered == restart + 1


async def test_counts_survive_a_broker_that_was_killed_but_for_its_last_deliveries() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        await client.consumer(type="shared")
        await client.received(2)
        for _ in range(3):
            await nack(client, client.messages[0].row())
        await subscription(broker).cursor.flush()
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await client.received(2)
        assert counts_of(client) == [(b"0.0", 3), (b"1.0", 0)]


async def test_a_nack_of_what_nobody_has_seen_leaves_the_count_as_it_is() -> None:
    for type in ("shared", "exclusive"):
        async with running_broker() as broker:
            client = FakeClient(broker)
            await publish(client, 1, batch=4)
            await client.consumer(type=type)
            await client.received(4)
            row = client.messages[1].row()
            await nack(client, row, counted=False)
            await nack(client, row)
            await nack(client, row, counted=False)
            assert [message.redelivered for message in client.messages] == [0, 0, 0, 0, 0, 1, 1]


async def test_a_seek_begins_all_counts_anew_also_after_a_restart() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        await client.consumer(type="shared")
        await client.received(2)
        await nack(client, client.messages[0].row())
        await subscription(broker).cursor.flush()
        await client.ask(c.Seek, 1, ("earliest", None))
        await settle()
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await client.received(2)
        assert counts_of(client) == [(b"0.0", 0), (b"1.0", 0)]


async def test_counts_of_many_scattered_messages_survive_a_restart_compactly() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 2, batch=1000)
        await client.consumer(type="shared", permits=10_000)
        await client.received(2000)
        await nack(client, *[message.row() for message in client.messages[::2]])
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared", permits=10_000)
        await client.received(2000)
        assert sorted(message.redelivered for message in client.messages) == [0] * 1000 + [1] * 1000
        deliveries = [command for command, _ in client.frames if isinstance(command, c.Deliver)]
        assert len(deliveries) == 4  # each entry for each count, not one for each message


async def problems(broker: Broker) -> dict[str, str]:
    await broker.look_for_problems()
    return broker.problems()


async def test_rule_54_a_message_that_comes_back_all_the_time_is_named_by_the_broker() -> None:
    for type in ("shared", "exclusive"):
        async with running_broker() as broker:
            client = FakeClient(broker)
            await publish(client, 3)
            await client.consumer(type=type)
            await client.received(3)
            await client.ack(client.messages[0].row())
            poison = client.messages[1]
            for _ in range(POISON_REDELIVERIES - 1):
                await nack(client, poison.row())
            assert await problems(broker) == {}
            await nack(client, poison.row())
            ((subject, reason),) = (await problems(broker)).items()
            assert subject == "subscription billing of persistent://public/default/orders"
            ledger, entry, index = poison.id
            assert reason.startswith(
                f"message {ledger}:{entry}:{index} came back {POISON_REDELIVERIES} times"
            )
            await client.ack(poison.row())
            await settle()
            assert await problems(broker) == {}


async def test_a_message_that_an_operator_skipped_does_not_come_back_any_more() -> None:
    for skipped in (2, 3):  # within the entry, and all of it
        async with running_broker() as broker:
            client = FakeClient(broker)
            await publish(client, 1, batch=3)
            await client.consumer(type="shared")
            await client.received(3)
            for _ in range(POISON_REDELIVERIES):
                await nack(client, client.messages[1].row())
            assert len(await problems(broker)) == 1
            await client.ask(c.SkipMessages, "orders", "billing", skipped)
            assert await problems(broker) == {}


async def lost_consumer(broker: Broker, type: str, *acked: int, close: bool = False) -> list[Message]:
    """A consumer that gets what is there, acknowledges these of it, and ends."""
    client = FakeClient(broker)
    await client.consumer(type=type)
    await settle()
    for number in acked:
        await client.ack(client.messages[number].row())
    if close:
        await client.ask(c.CloseConsumer, 1)
    client.close()
    await settle()
    return client.messages


@pytest.mark.parametrize("type", ["shared", "exclusive"])
async def test_rule_54_a_message_that_ends_its_consumers_is_named_without_a_dead_letter_policy(
    type: str,
) -> None:
    async with running_broker() as broker:
        await publish(FakeClient(broker), 4)
        poison = (await lost_consumer(broker, type, 0))[1]
        for number in range(POISON_REDELIVERIES - 2):
            assert (await lost_consumer(broker, type, *[2] * (number == 0)))[0].id == poison.id
        assert await problems(broker) == {}
        await lost_consumer(broker, type)
        ((subject, reason),) = (await problems(broker)).items()
        assert subject == "subscription billing of persistent://public/default/orders"
        assert reason.startswith(f"the connections of {POISON_REDELIVERIES} consumers were lost")
        assert "message {}:{}:{} first".format(*poison.id) in reason
        await lost_consumer(broker, type, 0)
        assert await problems(broker) == {}


async def test_consumers_that_close_or_have_nothing_are_not_ended_by_a_message() -> None:
    async with running_broker() as broker:
        for _ in range(POISON_REDELIVERIES):
            await lost_consumer(broker, "exclusive")
        await publish(FakeClient(broker), 2)
        for _ in range(POISON_REDELIVERIES):
            await lost_consumer(broker, "exclusive", close=True)
        assert await problems(broker) == {}


def test_losses_are_forgotten_after_a_while_and_bounded() -> None:
    state, lost = AckState(FakeTopic(), (1, 0, 0)), LostConsumers()
    for number in range(4):
        lost.lost((1, 0, 0), number * WINDOW_MS)
    assert lost.worst(state, 4 * WINDOW_MS) == (4, (1, 0, 0))
    lost.lost((1, 0, 0), 5 * WINDOW_MS)
    assert lost.worst(state, 5 * WINDOW_MS) == (1, (1, 0, 0))
    assert lost.worst(state, 6 * WINDOW_MS + 1) == (0, (0, 0, 0))
    for entry in range(1000):
        lost.lost((1, entry, 0), 0)
    assert len(lost._losses) <= 100


async def test_rule_41_a_defect_of_one_topic_costs_neither_the_problems_of_others_nor_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_broker() as broker:
        await FakeClient(broker).consumer(topic="orders")
        await FakeClient(broker).consumer(topic="bills")
        names = iter(["it is stuck"])
        monkeypatch.setattr(Subscription, "trouble", lambda _: next(names))  # the second look raises
        assert list((await problems(broker)).values()) == ["it is stuck"]
        assert list(broker.problems().values()) == ["it is stuck"]


def test_rule_54_the_highest_count_is_that_of_a_message_that_still_waits() -> None:
    counts = RedeliveryCounts()
    counts.set((1, 0), 0, 9, 3)
    assert counts.most((1, 0, 5)) == (3, (1, 0), 5)
    counts = RedeliveryCounts()
    counts.set((1, 0), 0, 1, 3)
    counts.set((1, 0), 8, 9, 3)
    assert counts.most((1, 0, 5)) == (3, (1, 0), 8)
    assert counts.most((1, 1, 0)) == (0, (1, 1), 0)
