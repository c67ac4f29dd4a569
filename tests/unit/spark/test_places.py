"""Places in a topic that are found by looking at a few entries: the same as by looking at all of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.ids import MessageId
from magnetar.spark import places
from magnetar.spark.plan import PAST_ALL, Position, Range, TopicLedger
from magnetar.spark.service import TopicPlan


class Row(NamedTuple):
    """A message."""

    position: Position
    offset: int
    append_ms: int
    entry: int


class Topic:
    """Ledgers at random: empty, attached (one time for all), archived, the beginning trimmed, with holes."""

    def __init__(self, rng: random.Random) -> None:
        self.rows: list[Row] = []
        self.entries: dict[int, list[Entry]] = {}
        self.read = 0
        ledgers, offset, now = [], rng.choice((0, 50)), 1000
        archived = rng.randrange(3)
        for number in range(rng.randrange(1, 7)):
            position_id, first_offset = 10 + 3 * number, offset
            attached = rng.random() < 0.4
            entries, begun = [], now
            commit = now + 20
            for entry_id in range(rng.choice((0, 1, 2, 9, 40))):
                now += rng.choice((0, 0, 1, 5)) * (not attached)
                count = rng.choice((1, 3))
                batch = encode_batch([b""] * count, sequence_id=0, publish_time_ms=0)
                payload = encode_entry(
                    [batch], [count], [0], ["p"], first_index=offset - first_offset, append_time_ms=now
                )
                entries.append(Entry(payload))
                time = commit if attached else now
                self.rows += [
                    Row((position_id, entry_id, index), offset + index, time, entry_id)
                    for index in range(count)
                ]
                offset += count
            now = commit if attached else now
            self.entries[position_id] = entries
            ledgers.append(
                TopicLedger(
                    position_id, position_id + attached, first_offset, len(entries), offset - first_offset, 1000,
                    begun, now, True, b"", "file:///archive" if number < archived else "",
                )
            )  # fmt: skip
            if rng.random() < 0.15:
                offset += 7  # a hole
        self.plan = TopicPlan("t", ledgers, (10_000, 0, 0), {}, "", offset, 1)

    def in_range(self, wanted: Range) -> list[Row]:
        return [
            row
            for row in self.rows
            if wanted.from_position <= row.position < wanted.before_position
            and wanted.from_offset <= row.offset < wanted.before_offset
            and wanted.from_append_ms <= row.append_ms < wanted.before_append_ms
        ]

    def some_range(self, rng: random.Random) -> Range:
        if not self.rows:
            return Range()
        low, high = sorted((rng.choice(self.rows), rng.choice(self.rows)))
        wanted = Range()
        for _ in range(rng.choice((1, 1, 2))):
            wanted = wanted.narrowed(
                rng.choice(
                    (
                        Range(from_position=low.position, before_position=high.position),
                        Range(from_offset=low.offset + rng.choice((-1, 0, 1)), before_offset=high.offset),
                        Range(
                            from_append_ms=low.append_ms, before_append_ms=high.append_ms + rng.choice((0, 1))
                        ),
                        Range(from_append_ms=low.append_ms + 1),
                        Range(before_position=PAST_ALL, before_offset=high.offset + 1),
                    )
                )
            )
        return wanted


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Entries, and archives, of the topic that it is called with."""

    def use(topic: Topic) -> None:
        @contextlib.asynccontextmanager
        async def entries(_plan: Any, ledger: TopicLedger, _timeout: float) -> AsyncIterator[Any]:
            async def read(entry_id: int) -> Entry:
                topic.read += 1
                return topic.entries[ledger.position_id][entry_id]

            assert not ledger.archive
            yield read

        def first_archived(_topic: str, ledger: TopicLedger, since: Range) -> Any:
            assert ledger.archive
            found = [row for row in topic.in_range(since) if row.position[0] == ledger.position_id]
            return (MessageId(*found[0].position).to_bytes(), found[0].offset) if found else None

        monkeypatch.setattr(places, "_entries", entries)
        monkeypatch.setattr(places, "first_archived", first_archived)
        monkeypatch.setattr(places, "SMALL_BYTES", 0)

    return use


@pytest.mark.parametrize("seed", range(150))
def test_runs_of_offsets_and_positions_are_those_of_all_rows(seed: int, look: Any) -> None:
    rng = random.Random(seed)
    topic = Topic(rng)
    look(topic)
    for _ in range(10):
        wanted = topic.some_range(rng)
        expected = topic.in_range(wanted)
        runs = asyncio.run(places.offsets_within(wanted, topic.plan, 1))
        assert [offset for first, end in runs for offset in range(first, end)] == [
            row.offset for row in expected
        ]
        located = asyncio.run(places.located(wanted, topic.plan, 1))
        assert topic.in_range(located) == expected
        # By positions alone nothing but archived ledgers has rows outside.
        archived = {ledger.position_id for ledger in topic.plan.ledgers if ledger.archive}
        if not archived and expected:
            alone = Range(from_position=located.from_position, before_position=located.before_position)
            assert topic.in_range(alone) == expected


def test_whole_ledgers_are_counted_without_a_look(look: Any) -> None:
    topic = Topic(random.Random(3))
    look(topic)
    assert sum(
        end - first for first, end in asyncio.run(places.offsets_within(Range(), topic.plan, 1))
    ) == len(topic.rows)
    border = topic.plan.ledgers[-1]
    wanted = Range(from_position=(border.position_id, 0, 0), before_offset=border.end_offset)
    assert asyncio.run(places.offsets_within(wanted, topic.plan, 1)) == (
        [(border.first_offset, border.end_offset)] if border.messages else []
    )
    assert topic.read == 0
