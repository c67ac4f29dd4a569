"""What is read of a topic: slices cover exactly the wanted entries, in order, and nothing that lies outside is asked for."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from magnetar.spark.batch_source import lost_of
from magnetar.spark.options import AtOffset, ReadOptions
from magnetar.spark.places import point_of
from magnetar.spark.plan import (
    FIRST,
    PAST_ALL,
    KnownBookie,
    LedgerSlice,
    Position,
    Range,
    TopicLedger,
    missing,
    slices,
)
from magnetar.spark.service import TopicPlan
from magnetar.spark.stream_source import shares

BOOKIES = {"b": KnownBookie("127.0.0.1", 3181)}


def ledgers_of(rng: random.Random) -> list[TopicLedger]:
    found, offset, time = [], 0, 1000
    for number in range(rng.randrange(1, 6)):
        entries = rng.choice((0, 1, 3, 50))
        messages = entries * rng.choice((1, 7)) if entries else 0
        ledger = TopicLedger(
            10 + 3 * number, 10, offset, entries, messages, entries * 1000, time, time + 10, True, b""
        )
        offset += messages
        time += rng.choice((5, 20))
        found.append(ledger)
    return found


def ledger(
    position_id: int, first_offset: int, messages: int, first_ms: int = 0, last_ms: int = 0
) -> TopicLedger:
    """An entry a message."""
    return TopicLedger(position_id, 1, first_offset, messages, messages, 1000, first_ms, last_ms, True, b"")


def entries_of(found: list[LedgerSlice]) -> list[tuple[int, int]]:
    return [(s.ledger.position_id, entry) for s in found for entry in range(s.first, s.last + 1)]


def cut(ledgers: list[TopicLedger], wanted: Range, partition_bytes: int = 5000) -> list[LedgerSlice]:
    return slices("t", ledgers, wanted, partition_bytes, BOOKIES)


@pytest.mark.parametrize("seed", range(50))
def test_slices_cover_what_ids_leave_and_no_more(seed: int) -> None:
    rng = random.Random(seed)
    ledgers = ledgers_of(rng)
    places: list[Position] = [FIRST, PAST_ALL] + [
        (ledger.position_id, rng.randrange(ledger.entries + 1), rng.choice((0, 0, 2))) for ledger in ledgers
    ]
    low, high = sorted(rng.choices(places, k=2))
    found = cut(ledgers, Range(low, high))
    # An entry is asked for if it has an index in [low, high); an index beyond its messages cannot be known from outside.
    expected = [
        (ledger.position_id, entry)
        for ledger in ledgers
        for entry in range(ledger.entries)
        if (ledger.position_id, entry, 1 << 20) >= low
        and (ledger.position_id, entry, 0) < high
        and low < high
    ]
    assert entries_of(found) == expected


def test_slices_are_equal_pieces_of_about_the_wanted_size() -> None:
    ledger = TopicLedger(1, 1, 0, 1001, 1001, 1001 * 1000, 0, 1, True, b"")
    found = cut([ledger], Range(), partition_bytes=100_000)
    assert entries_of(found) == [(1, entry) for entry in range(1001)]
    assert {piece.last - piece.first + 1 for piece in found} == {91}
    assert len(cut([ledger], Range(), partition_bytes=1)) == 1001


def test_offsets_and_times_skip_whole_ledgers() -> None:
    ledgers = [TopicLedger(n, n, n * 10, 10, 10, 100, n * 100, n * 100 + 50, True, b"") for n in range(1, 6)]
    assert {s.ledger.position_id for s in cut(ledgers, Range(from_offset=20, before_offset=31))} == {2, 3}
    assert {s.ledger.position_id for s in cut(ledgers, Range(from_append_ms=251, before_append_ms=400))} == {
        3
    }
    assert cut(ledgers, Range(from_offset=60)) == []
    assert cut(ledgers, Range(from_position=(3, 5, 0), before_position=(3, 2, 0))) == []


def test_ranges_narrow_each_other() -> None:
    both = Range(from_offset=5).narrowed(Range(before_offset=9, from_position=(2, 0, 0)))
    assert both == Range(from_position=(2, 0, 0), from_offset=5, before_offset=9)
    assert both.indexes(2, 0, 4, 100, 7) == (1, 5)
    assert both.indexes(1, 9, 4, 100, 7) == (0, 0)


@pytest.mark.parametrize(
    "nothing",
    [
        Range(from_offset=11, before_offset=5),
        Range(from_append_ms=1008, before_append_ms=1003),
        Range(from_position=(10, 2, 0), before_position=(10, 1, 0)),
    ],
)
def test_a_range_that_ends_before_it_begins_asks_for_nothing(nothing: Range) -> None:
    """As `offset < 5 AND offset > 10`, which Spark hands down as it was written."""
    ledger = TopicLedger(10, 10, 0, 50, 350, 50_000, 1000, 1010, True, b"")
    assert cut([ledger], nothing) == []


@pytest.mark.parametrize(
    ("start", "end", "lost"),
    [
        (10, 30, 0),
        (0, 30, 10),
        (0, 5, 5),
        (10, 45, 10),  # a hole: trimmed behind what was archived
        (35, 45, 5),
        (30, 40, 10),
        (12, 12, 0),
        (45, 60, 10),  # and behind the end
        (55, 60, 5),
    ],
)
def test_messages_that_no_ledger_has(start: int, end: int, lost: int) -> None:
    ledgers = [ledger(7, 10, 10), ledger(8, 20, 10), ledger(12, 40, 10)]
    assert missing(ledgers, start, end) == lost


def options(start: str | int, end: str | int = "latest") -> ReadOptions:
    return ReadOptions.parse(
        {
            "service_url": "magnetar://h:1",
            "topic": "orders",
            "start": json.dumps({"": start}),
            "end": json.dumps({"": end}),
        }
    )


TOPIC = "persistent://public/default/orders"


@pytest.mark.parametrize(
    ("start", "end", "lost"),
    [
        ("earliest", "latest", 10),  # what is before the first ledger was never asked for, the hole was
        ("7:0:0", "latest", 10),
        ("8:3:0", "latest", 10),
        ("8:10:0", "latest", 10),
        ("10:0:0", "latest", 10),
        ("12:0:0", "latest", 0),
        ("3:4:0", "latest", 20),
        ("7:0:0", "8:1:0", 0),
        ("13:0:0", "latest", 0),
        # No place is taken for none.
        ("0:0:0", "latest", 20),
        ("offset:0", "latest", 20),
        ("offset:0", "offset:10", 10),
        # All of it was trimmed.
        ("3:4:0", "3:9:0", 10),
        ("offset:2", "offset:5", 3),
        ("9:0:0", "11:0:0", 10),
        ("offset:30", "offset:40", 10),
        (150, 190, 10),
        (1050, 1090, 10),
        ("offset:0", 190, 10),
        ("3:4:0", 190, 10),
        # Whether messages were within these times nobody knows.
        (150, 350, 0),
        (150, "latest", 10),
        (1050, "latest", 0),
        (350, 1050, 0),
        ("8:3:0", 1050, 0),
        # Of these it is known that there were none.
        ("earliest", 190, 0),
        (50, 90, 0),
        (1500, 1900, 0),
        (190, 150, 0),
        ("3:9:0", "3:4:0", 0),
        ("offset:45", "offset:2", 0),
        ("offset:60", "offset:70", 0),
        ("latest", "latest", 0),
    ],
)
def test_what_a_batch_read_has_lost(start: str | int, end: str | int, lost: int) -> None:
    ledgers = [
        ledger(7, 10, 10, 200, 300), ledger(8, 20, 10, 400, 1000), ledger(11, 40, 0), ledger(12, 40, 10, 1100, 1200),
    ]  # fmt: skip
    plan = TopicPlan(TOPIC, ledgers, (12, 10, 0), {}, "", 50, 100)
    assert lost_of(options(start, end), plan) == lost


@pytest.mark.parametrize(
    ("start", "end", "lost"),
    [("earliest", "latest", 0), ("offset:0", "latest", 50), ("0:0:0", "latest", 50), ("12:10:0", "latest", 0),
     ("offset:50", "latest", 0), (150, "latest", 0), (150, 160, 0)],
)  # fmt: skip
@pytest.mark.parametrize("ledgers", [[], [(12, 50, 0)]])
def test_what_a_batch_read_has_lost_of_a_topic_that_has_nothing_left(
    ledgers: list[tuple[int, int, int]], start: str | int, end: str | int, lost: int
) -> None:
    plan = TopicPlan(TOPIC, [ledger(*one) for one in ledgers], (12, 10, 0), {}, "", 50, 100)
    assert lost_of(options(start, end), plan) == lost


@pytest.mark.parametrize(
    ("start", "offset"),
    [("earliest", 10), ("0:0:0", 0), ("3:4:0", 0), ("9:0:0", 30), ("offset:0", 0), ("offset:3", 3), ("7:0:0", 10),
     ("12:0:0", 40), ("latest", 50)],
)  # fmt: skip
def test_a_stream_begins_where_it_was_told_to(start: str, offset: int) -> None:
    """Also where all is trimmed: the first batch finds what is lost."""
    ledgers = [ledger(7, 10, 10), ledger(8, 20, 10), ledger(12, 40, 10)]
    plan = TopicPlan(TOPIC, ledgers, (12, 10, 0), {}, "", 50, 1)
    assert asyncio.run(point_of(options(start).start_of(TOPIC), plan, 1)).offset == offset
    assert asyncio.run(point_of(AtOffset(0), plan._replace(ledgers=[]), 1)).offset == 0


def test_topics_take_turns_where_there_are_more_of_them_than_rows() -> None:
    waiting = {"a": 1000, "b": 1, "c": 30, "d": 0, "e": 7}
    seen = dict.fromkeys(waiting, 0)
    done = 0
    for _ in range(4):
        for topic, rows in shares(waiting, 1, done).items():
            seen[topic] += rows
            done += rows
    assert seen == {"a": 1, "b": 1, "c": 1, "d": 0, "e": 1}
    for most in range(1, 1100):
        found = shares(waiting, most, done)
        assert sum(found.values()) == min(most, 1038)
        assert all(0 <= rows <= waiting[topic] for topic, rows in found.items())
    assert shares(waiting, 100, 0)["a"] > 80
    assert shares(waiting, None, 0) == waiting
    assert shares({"a": 0}, 5, 3) == {"a": 0}
