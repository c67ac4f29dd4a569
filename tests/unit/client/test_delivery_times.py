"""Delivery times: one a batch, in steps of 10 ms and never early; limits are the broker's."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client import Client, InvalidArgument, MessageId
from magnetar.client.topic.columns import DELIVERY_STEP_MS, MIN_DELIVER_AT_MS, checked_columns, delivery_time
from magnetar.proto.batch import decode_batch
from magnetar.proto.batch_extensions import EXT_DELIVER_AT_MS
from magnetar.proto.message_rules import MAX_TIME_MS
from support.fake_broker import FakeBroker

NOW_MS = 1_700_000_000_003
Stored = list[tuple[list[bytes | None], int | None]]


def stored(broker: FakeBroker) -> Stored:
    """Of each batch: its values, and when it is due."""
    found: Stored = []
    for entry in broker.topic("t").entries:
        for position in range(entry.batch_count):
            batch = decode_batch(entry.batch(position))
            found.append((batch.values, batch.extensions.get(EXT_DELIVER_AT_MS)))
    return found


@pytest.mark.parametrize(
    ("deliver_at", "deliver_after", "due_ms"),
    [
        (None, None, None),
        (NOW_MS, None, NOW_MS + 7),
        (NOW_MS + 7, None, NOW_MS + 7),
        (datetime.fromtimestamp(NOW_MS / 1000), None, NOW_MS + 7),
        (datetime.fromtimestamp(NOW_MS / 1000, UTC), None, NOW_MS + 7),
        (datetime.fromtimestamp(NOW_MS / 1000, timezone(timedelta(hours=5))), None, NOW_MS + 7),
        (1_000_000_000_005, None, 1_000_000_000_010),  # the broker says what is past
        (datetime(1962, 1, 1), None, None),
        (MAX_TIME_MS, None, MAX_TIME_MS),
        (None, 0.001, NOW_MS + 7),
        (None, 2, NOW_MS + 2007),
        (None, timedelta(minutes=1), NOW_MS + 60_007),
        (None, 0, None),
        (None, -3.5, None),
        (None, timedelta(days=-1), None),
    ],
)
def test_when_a_message_is_due(deliver_at: Any, deliver_after: Any, due_ms: int | None) -> None:
    assert delivery_time(deliver_at, deliver_after, NOW_MS) == due_ms
    if deliver_after is None:
        columns = checked_columns([b""], None, None, None, None, [deliver_at])
        assert columns.deliver_at_ms == [due_ms]


@given(st.integers(MIN_DELIVER_AT_MS, MAX_TIME_MS))
def test_never_early_and_less_than_a_step_late(time_ms: int) -> None:
    due_ms = delivery_time(time_ms, None, 0)
    assert due_ms is not None
    assert 0 <= due_ms - time_ms < DELIVERY_STEP_MS
    assert checked_columns([b""], None, None, None, None, [time_ms]).deliver_at_ms == [due_ms]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        *(
            ({"deliver_at": seconds}, f"deliver_at={seconds} is no time in milliseconds")
            for seconds in (NOW_MS // 1000, 0, -7)
        ),
        ({"deliver_at": NOW_MS, "deliver_after": 1.0}, "deliver_at or deliver_after, not both"),
        ({"deliver_at": MAX_TIME_MS + 1}, "not a time"),
        ({"deliver_at": "noon"}, "not a time: 'noon'"),
        ({"deliver_at": 1.5}, "not a time"),
        ({"deliver_at": True}, "not a time"),
        ({"deliver_after": math.inf}, "deliver_after is a number of seconds"),
        ({"deliver_after": math.nan}, "deliver_after is a number of seconds"),
        ({"deliver_after": "5s"}, "deliver_after is a number of seconds"),
        ({"deliver_after": 1e307}, "not a time"),
        ({"deliver_after": True}, "deliver_after is a number of seconds"),
        ({"deliver_after": timedelta.max}, "not a time"),
    ],
)
async def test_what_is_no_time_is_told_at_the_call(
    client: Client, options: dict[str, Any], text: str
) -> None:
    producer = await client.create_producer("t")
    with pytest.raises(InvalidArgument, match=text):
        producer.send_nowait(b"x", **options)
    with pytest.raises(InvalidArgument, match=text):
        await producer.send(b"x", **options)
    if "deliver_after" not in options:
        with pytest.raises(InvalidArgument, match="message 1: " + text):
            await producer.send_many([b"a", b"b"], deliver_at=[NOW_MS, options["deliver_at"]])


@pytest.mark.parametrize("compression", ["none", "snappy"])
@pytest.mark.parametrize("many", [False, True])
async def test_a_batch_is_due_at_one_time(
    broker: FakeBroker, client: Client, many: bool, compression: Any
) -> None:
    producer = await client.create_producer("t", compression=compression)
    times = [NOW_MS, NOW_MS + 1, NOW_MS + 7, NOW_MS + 8, None, None, NOW_MS, NOW_MS]
    values = [b"%d" % n for n in range(8)]
    if many:
        ids = await producer.send_many(values, deliver_at=times)
    else:
        ids = await asyncio.gather(*(producer.send(v, deliver_at=t) for v, t in zip(values, times)))
    assert stored(broker) == [
        ([b"0", b"1", b"2"], NOW_MS + 7),
        ([b"3"], NOW_MS + 17),
        ([b"4", b"5"], None),
        ([b"6", b"7"], NOW_MS + 7),
    ]
    assert list(ids) == sorted(set(ids))


async def test_with_a_delay_and_by_key_and_with_batching_off(broker: FakeBroker, client: Client) -> None:
    by_key = await client.create_producer("t", batching_by_key=True)
    at = [NOW_MS, NOW_MS + 100]
    sends = [
        by_key.send(b"%d" % n, f"k{n % 2}", deliver_at=at[n // 4], properties={"n": str(n)}) for n in range(8)
    ]
    ids = await asyncio.gather(*sends)
    assert stored(broker) == [
        ([b"0", b"2"], NOW_MS + 7),
        ([b"1", b"3"], NOW_MS + 7),
        ([b"4", b"6"], NOW_MS + 107),
        ([b"5", b"7"], NOW_MS + 107),
    ]
    assert [one.index for one in ids] == [0, 2, 1, 3, 4, 6, 5, 7]
    broker.topic("t").entries.clear()
    singles = await client.create_producer("t", batching=False)
    await asyncio.gather(*(singles.send(b"%d" % n, deliver_at=t) for n, t in enumerate([*at, None])))
    assert stored(broker) == [([b"0"], NOW_MS + 7), ([b"1"], NOW_MS + 107), ([b"2"], None)]


async def test_each_of_many_messages_has_a_time_of_its_own(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", name="p")
    broker.deduplicates = True
    times = [NOW_MS + 10 * ((37 * n) % 2000) for n in range(2000)]
    values = [b"%d" % n for n in range(2000)]
    ids: list[MessageId] = await producer.send_many(
        values, sequence_ids=[3 * n for n in range(2000)], deliver_at=times
    )
    assert ids == sorted(set(ids))
    assert stored(broker) == [([value], time + 7) for value, time in zip(values, times)]
    consumer = await client.subscribe("t", "s", start="earliest")
    messages = [await consumer.receive(2.0) for _ in range(2000)]
    assert [(one.value, one.sequence_id) for one in messages] == [(v, 3 * n) for n, v in enumerate(values)]
