"""Places in a topic: what a message id, a time or a topic-wide offset means, found by looking at a few entries.

The same tells how many messages of a topic lie in a range: of the ledgers inside of it the plan says so, and those at its
borders are looked at.

Entries of a ledger hold about equally many messages, so a guess by proportion, narrowed as in a binary search, needs two or
three entries where halving needs sixteen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from magnetar.proto.entry import Entry
from magnetar.proto.ids import MessageId
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from .archived import first_archived
from .bookies import ledger_readers
from .options import AtOffset, Place
from .plan import LedgerSlice, Range, TopicLedger
from .service import TopicPlan

# A ledger of this size is read as a whole sooner than looked into.
SMALL_BYTES = 4 << 20

ReadEntry = Callable[[int], Awaitable[Entry]]


class Point(NamedTuple):
    """A place between two messages: the id of the next one (or the end), and how many stand before it in the topic."""

    id: MessageId
    offset: int

    def to_json(self) -> dict[str, str | int]:
        """As a stream's checkpoint keeps it."""
        return {"id": str(self.id), "offset": self.offset}

    @classmethod
    def from_json(cls, stored: dict[str, str | int]) -> Point:
        """Inverse of `to_json`."""
        return cls(MessageId.parse(str(stored["id"])), int(stored["offset"]))


class Span(NamedTuple):
    """How many messages stand before a place: at least, and at most, where what stood there was trimmed."""

    least: int
    most: int

    @classmethod
    def at(cls, offset: int) -> Span:
        """Where it is known."""
        return cls(offset, offset)


def start_of(plan: TopicPlan) -> Point:
    """Before the first message that is kept."""
    if not plan.ledgers:
        return end_of(plan)
    return Point(MessageId(plan.ledgers[0].position_id, 0, 0), plan.ledgers[0].first_offset)


def end_of(plan: TopicPlan) -> Point:
    """After the last confirmed message."""
    return Point(MessageId(*plan.end), plan.end_offset)


async def point_of(place: Place, plan: TopicPlan, timeout_s: float) -> Point:
    """`earliest`, `latest`, an offset, an id or a time (of the broker's clock) as a point."""
    if place == "earliest":
        return start_of(plan)
    if place == "latest":
        return end_of(plan)
    if isinstance(place, AtOffset):
        if place.offset < start_of(plan).offset:
            return Point(MessageId(0, 0, 0), place.offset)  # what was trimmed is found to be lost
        return await point_at(place.offset, plan, timeout_s)
    if isinstance(place, MessageId):
        around = offsets_around(place, plan)
        if around.least < around.most:
            return Point(place, around.least)
        wanted = Range(from_position=place[:3])
    else:
        assert isinstance(place, int)
        wanted = Range(from_append_ms=place)
    return await _first(wanted, plan, timeout_s)


def offsets_around(place: Place, plan: TopicPlan) -> Span:
    """How many messages stand before a place, as far as the ledgers tell: some number within the ledger that has it."""
    if place == "earliest":
        return Span.at(start_of(plan).offset)
    if isinstance(place, AtOffset):
        return Span.at(min(place.offset, plan.end_offset))
    if place == "latest" or (isinstance(place, MessageId) and place[:3] >= plan.end):
        return Span.at(plan.end_offset)
    assert not isinstance(place, str)
    least = 0
    for ledger in plan.ledgers:
        if not ledger.entries:
            continue
        if isinstance(place, MessageId):
            if place[:3] == (ledger.position_id, 0, 0):
                return Span.at(ledger.first_offset)
            begun = place[:3] > (ledger.position_id, 0, 0)
            over = place[:3] >= (ledger.position_id, ledger.entries, 0)
        else:
            begun, over = place > ledger.first_append_ms, place > ledger.last_append_ms
        if not over:
            return Span.at(ledger.first_offset + 1) if begun else Span(least, ledger.first_offset)
        least = ledger.end_offset
    # Nothing behind it is there. When the last message was stored that was trimmed nobody knows.
    return Span(least if isinstance(place, MessageId) else plan.end_offset, plan.end_offset)


async def point_at(offset: int, plan: TopicPlan, timeout_s: float) -> Point:
    """The message that has this many before it in the topic; the next one that is left, or the end."""
    return await _first(Range(from_offset=offset), plan, timeout_s)


async def located(wanted: Range, plan: TopicPlan, timeout_s: float) -> Range:
    """The same range, with the positions where its offsets and times begin and end: entries outside need not be read.

    Small ledgers are not looked into, nor archived ones, whose files have statistics of their own.
    """
    since = Range(from_offset=wanted.from_offset, from_append_ms=wanted.from_append_ms)
    for until in (Range(from_offset=wanted.before_offset), Range(from_append_ms=wanted.before_append_ms)):
        if _looked_into(until, plan):
            end = await _first(until, plan, timeout_s)
            wanted = wanted.narrowed(Range(before_position=end.id[:3]))
    if _looked_into(since, plan):
        first = await _first(since, plan, timeout_s)
        wanted = wanted.narrowed(Range(from_position=first.id[:3]))
    return wanted


def _looked_into(since: Range, plan: TopicPlan) -> bool:
    ledger = next((ledger for ledger in plan.ledgers if since.meets(ledger)), None)
    return ledger is not None and not ledger.archive and ledger.size > SMALL_BYTES


async def offsets_within(wanted: Range, plan: TopicPlan, timeout_s: float) -> list[tuple[int, int]]:
    """Runs [first, end) of offsets that the topic has in a range, in order; holes lie between them."""
    since = (Range(from_position=wanted.from_position), Range(from_append_ms=wanted.from_append_ms))
    until = (Range(from_position=wanted.before_position), Range(from_append_ms=wanted.before_append_ms))
    runs: list[tuple[int, int]] = []
    for ledger in plan.ledgers:
        if not wanted.meets(ledger):
            continue
        firsts = [await _offset_of(one, plan, ledger, timeout_s) for one in since]
        ends = [await _offset_of(one, plan, ledger, timeout_s) for one in until]
        first, end = max(wanted.from_offset, *firsts), min(wanted.before_offset, *ends)
        if first >= end:
            continue
        if runs and runs[-1][1] == first:
            first, _ = runs.pop()
        runs.append((first, end))
    return runs


async def _offset_of(since: Range, plan: TopicPlan, ledger: TopicLedger, timeout_s: float) -> int:
    """Of the ledger's first message in a range that is open at its end; behind its last one if there is none."""
    point = await _first_of(since, plan, ledger, timeout_s)
    return ledger.end_offset if point is None else point.offset


async def _first(since: Range, plan: TopicPlan, timeout_s: float) -> Point:
    """The topic's first message in a range that is open at its end, or the end."""
    for ledger in plan.ledgers:
        point = await _first_of(since, plan, ledger, timeout_s)
        if point is not None:
            return point
    return end_of(plan)


async def _first_of(since: Range, plan: TopicPlan, ledger: TopicLedger, timeout_s: float) -> Point | None:
    """The same of a ledger. Raises MessageLost for a damaged archive."""
    if not ledger.messages or not since.meets(ledger):
        return None
    begin = Point(MessageId(ledger.position_id, 0, 0), ledger.first_offset)
    if (
        since.from_position <= begin.id[:3]
        and since.from_offset <= begin.offset
        and since.from_append_ms <= ledger.first_append_ms
    ):
        return begin
    if ledger.archive:
        found = await asyncio.to_thread(first_archived, plan.topic, ledger, since)
        return None if found is None else Point(MessageId.from_bytes(found[0]), found[1])
    async with _entries(plan, ledger, timeout_s) as read:
        return await _first_in(since, ledger, read)


@contextlib.asynccontextmanager
async def _entries(plan: TopicPlan, ledger: TopicLedger, timeout_s: float) -> AsyncIterator[ReadEntry]:
    piece = LedgerSlice(plan.topic, ledger, 0, ledger.entries - 1, Range(), plan.bookies)
    async with ledger_readers([piece], timeout_s) as reader_of:
        reader = reader_of(ledger)

        async def read(entry_id: int) -> Entry:
            return Entry((await reader.read(entry_id, entry_id))[0], LEDGER_ENTRY_HEADER_BYTES)

        yield read


async def _first_in(wanted: Range, ledger: TopicLedger, read: ReadEntry) -> Point | None:
    """The same at the bookies."""
    low, high = 0, ledger.entries  # the entry is in low..high; high: none
    while low < high:
        middle = _guess(wanted, ledger, low, high)
        if (await _cut(wanted, ledger, middle, read)) is None:
            low = middle + 1
        elif middle == low or (await _cut(wanted, ledger, middle - 1, read)) is None:
            low = high = middle
        else:
            high = middle - 1
    return await _cut(wanted, ledger, low, read) if low < ledger.entries else None


def _guess(wanted: Range, ledger: TopicLedger, low: int, high: int) -> int:
    if wanted.from_position[0] == ledger.position_id:
        guess = wanted.from_position[1]
    elif wanted.from_offset:
        guess = (wanted.from_offset - ledger.first_offset) * ledger.entries // max(1, ledger.messages)
    else:
        guess = (low + high) // 2
    # A guess outside of what is left was wrong before: halve.
    return guess if low <= guess < high else (low + high) // 2


async def _cut(wanted: Range, ledger: TopicLedger, entry_id: int, read: ReadEntry) -> Point | None:
    """The first message of an entry that is in the range."""
    entry = await read(entry_id)
    first_offset = ledger.first_offset + entry.first_index
    low, high = wanted.indexes(
        ledger.position_id,
        entry_id,
        first_offset,
        entry.message_count,
        ledger.append_ms or entry.append_time_ms,
    )
    return Point(MessageId(ledger.position_id, entry_id, low), first_offset + low) if low < high else None
