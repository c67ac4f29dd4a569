"""What a subscription has not acknowledged, for operators: how far to go to skip so much of it, and what comes next.

Both look at the cursor's state beside the consumers, which notice nothing. A skip must count messages, and only entries know
how many they have; so it is counted with few reads, however much is skipped. Between the entries that are acknowledged as a
whole lie *gaps*, and each entry stores the ledger-wide index of its first message:

    entries of a ledger   0 1 2 | 3 4 | 5 6 7 8 9      3 and 4 are acknowledged: the gaps are 0...2 and 5...9
    first index           0     | 30    50       100   messages of a gap: the difference of two of them, less what is
                                                       acknowledged in parts of entries; within a gap, bisection
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import accumulate, groupby, islice
from operator import itemgetter
from typing import NamedTuple

from magnetar.proto.entry import Entry
from magnetar.proto.errors import EntryNotFound, MagnetarError
from magnetar.proto.ranges import Range, RangeSet, complement

from ..cursors.core.acks import INDEX_BITS, AckState, EntryKey, Position
from ..cursors.core.range_blocks import RangeBlocks
from ..cursors.core.redeliveries import RedeliveryCounts
from ..dispatch.subscription import Subscription
from ..log.ledger_list import LedgerList

ReadEntry = Callable[[EntryKey], Awaitable[Entry]]
IsCached = Callable[[EntryKey], object]

MAX_PEEKED_MESSAGES = 1_000
# Of slices, of which one may be larger alone: as a delivery, it fits into a frame.
MAX_PEEKED_BYTES = 1024 * 1024
MAX_COUNTING_READS = 100
MAX_COUNTED_RANGES = 10_000
_GAPS_PER_TURN = 64
_RANGES_PER_TURN = 1_000
_LAST_INDEX = (1 << INDEX_BITS) - 1


class PeekedEntry(NamedTuple):
    """A part of an entry, as a delivery would carry it: `hidden` are the messages in it that are not meant."""

    ledger: int
    entry: int
    redelivery_count: int
    hidden: list[Range]
    slice: bytes


class Skip(NamedTuple):
    """Where the mark-delete position has to be so that `messages` more are acknowledged."""

    position: Position
    messages: int


async def skip(ledgers: LedgerList, read_entry: ReadEntry, subscription: Subscription, count: int) -> int:
    """Acknowledges its next messages, whoever holds them; how many, once that is durable. Raises as Subscription.skip_to."""
    skipped = 0

    async def find() -> Position:
        nonlocal skipped
        position, skipped = await find_skip(ledgers, subscription.cursor.state, read_entry, count)
        return position

    await subscription.skip_to(find)
    return skipped


async def find_skip(ledgers: LedgerList, state: AckState, read_entry: ReadEntry, count: int) -> Skip:
    """Behind the first `count` messages that are not acknowledged, or behind the last one. Raises what a read met.

    Of each ledger it goes by what is acknowledged when it comes to it.
    """
    left = count
    position = ledgers.normalise(state.mark_delete)
    while ledgers.is_confirmed(*position[:2]):
        ledger, first, index = position
        info = ledgers.info(ledger)
        assert info is not None
        counter = _GapCounter(state, read_entry, ledger, info.entries, info.messages)
        for number, (start, end) in enumerate(counter.gaps(first)):
            if number % _GAPS_PER_TURN == 0:
                await asyncio.sleep(0)
            taken, place = await counter.take(start, index if start == first else 0, end, left)
            left -= taken
            if place is not None:
                return Skip(place, count)
        end_of_ledger = (ledger, counter.entries, 0)
        position = ledgers.normalise(end_of_ledger)
        if position == end_of_ledger:  # of the last one, whatever was confirmed meanwhile
            break
    return Skip(position, count - left)


async def unacknowledged_runs(ledgers: LedgerList, state: AckState) -> AsyncIterator[tuple[int, int, int]]:
    """Ledger, first and last entry of runs of entries that are not acknowledged as a whole. Reads nothing."""
    position = ledgers.normalise(state.mark_delete)
    while ledgers.is_confirmed(*position[:2]):
        ledger, first, _ = position
        info = ledgers.info(ledger)
        assert info is not None
        for number, (start, end) in enumerate(
            _gaps(state.acked.by_ledger.get(ledger), first, info.entries - 1)
        ):
            if number % _RANGES_PER_TURN == 0:
                await asyncio.sleep(0)
            yield ledger, start, end
        end_of_ledger = (ledger, info.entries, 0)
        position = ledgers.normalise(end_of_ledger)
        if position == end_of_ledger:
            break


def _gaps(acked: RangeBlocks | None, first: int, last: int) -> list[Range]:
    """Runs of entries that are not acknowledged as a whole, both ends included."""
    whole = RangeSet()
    for start, end in acked or ():
        first_whole, behind = (start + _LAST_INDEX) >> INDEX_BITS, (end + 1) >> INDEX_BITS
        if first_whole < behind:
            whole.add(first_whole, behind - 1)
    return whole.gaps(first, last)


class CountingReads:
    """Reads entries to count messages: those in memory, and MAX_COUNTING_READS others in all, none of an archived ledger."""

    def __init__(self, ledgers: LedgerList, read_entry: ReadEntry, cached: IsCached) -> None:
        self._ledgers = ledgers
        self._read_entry = read_entry
        self._cached = cached
        self._reads = 0

    async def __call__(self, key: EntryKey) -> Entry:
        """EntryNotFound also for one that is not worth the read."""
        if not self._cached(key):
            if self._reads == MAX_COUNTING_READS or self._ledgers.archived(key[0]) is not None:
                raise EntryNotFound(f"{key} is not read to count")
            self._reads += 1
        return await self._read_entry(key)


class AcknowledgedBeyond:
    """What is acknowledged beyond the mark-delete position when this is made; `count` says how many messages it is.

    Exact within entries and where `read_entry` finds the entries. MAX_COUNTED_RANGES of a ledger are looked at; what is
    unknown counts as not acknowledged.
    """

    def __init__(self, ledgers: LedgerList, state: AckState, read_entry: ReadEntry) -> None:
        self._rows = [
            (
                _GapCounter(state, read_entry, ledger, info.entries, info.messages),
                list(islice(ranges, MAX_COUNTED_RANGES)),
            )
            for ledger, ranges in state.acked.by_ledger.items()
            if (info := ledgers.info(ledger)) is not None
        ]

    async def count(self) -> int:
        """In messages."""
        found = 0
        for counter, ranges in self._rows:
            for number, (first, last) in enumerate(ranges, 1):
                with contextlib.suppress(MagnetarError):
                    found += await counter.members(first, last)
                if number % _RANGES_PER_TURN == 0:
                    await asyncio.sleep(0)
        return found


class _GapCounter:
    """Counts unacknowledged messages of one ledger, as it was when this was made."""

    def __init__(
        self, state: AckState, read_entry: ReadEntry, ledger: int, entries: int, messages: int
    ) -> None:
        self.entries = entries
        self._state = state
        self._read_entry = read_entry
        self._ledger = ledger
        self._first_indexes = {0: 0, entries: messages}
        self._acked = state.acked.by_ledger.get(ledger) or RangeBlocks()
        # Of the gap that is counted: entries that are acknowledged in part, and how many messages of those before each.
        self._partial: list[int] = []
        self._acknowledged = [0]

    def gaps(self, first: int) -> list[Range]:
        """Runs of entries from `first` on that are not acknowledged as a whole, both ends included."""
        return _gaps(self._acked, first, self.entries - 1)

    async def _look_at(self, first: int, last: int) -> None:
        """Counts what is acknowledged in part of a gap's entries; reads those whose end is."""
        low, high = first << INDEX_BITS, (last << INDEX_BITS) + _LAST_INDEX
        members: dict[int, int] = {}
        for start, end in complement(self._acked.gaps(low, high), low, high):
            for entry in range(start >> INDEX_BITS, (end >> INDEX_BITS) + 1):
                base = entry << INDEX_BITS
                after = end - base + 1
                if after > _LAST_INDEX:  # to its end, whatever number of messages it has
                    after = await self._first_index(entry + 1) - await self._first_index(entry)
                members[entry] = members.get(entry, 0) + after - max(start - base, 0)
        self._partial = list(members)
        self._acknowledged = [0, *accumulate(members.values())]

    async def take(self, start: int, index: int, end: int, count: int) -> tuple[int, Position | None]:
        """Of the gap start...end, from an index of its first entry on: how many messages, `count` at most, and their end.

        None: the gap has not so many.
        """
        await self._look_at(start, end)
        found = await self._messages(start, index, end + 1)
        if found < count:
            return found, None
        low, high = start, end + 1  # less than `count` messages lie before `low`, and not less before `high`
        while high - low > 1:
            middle = (low + high) // 2
            if await self._messages(start, index, middle) < count:
                low = middle
            else:
                high = middle
        left = count - await self._messages(start, index, low)
        entry = await self._read_entry((self._ledger, low))
        first_index = index if low == start else 0
        for first, last in self._state.unacked(self._ledger, low, first_index, entry.message_count - 1):
            if left <= last - first + 1 and first + left < entry.message_count:
                return count, (self._ledger, low, first + left)
            left -= last - first + 1
        return count, (self._ledger, low + 1, 0)

    async def _messages(self, start: int, index: int, end: int) -> int:
        """Unacknowledged ones from an index of entry `start` on, which is not below the mark-delete index, before `end`."""
        if end == start:
            return 0
        first, last = (bisect_left(self._partial, entry) for entry in (start, end))
        acknowledged = self._acknowledged[last] - self._acknowledged[first]
        return await self._first_index(end) - await self._first_index(start) - index - acknowledged

    async def members(self, first: int, last: int) -> int:
        """Messages of a range of numbers that are acknowledged."""
        entry, behind = first >> INDEX_BITS, last + 1  # that of the next entry, if it ends with an entry
        if behind >> INDEX_BITS == entry:
            return behind - first
        before = await self._first_index(entry) + (first & _LAST_INDEX)
        return await self._first_index(behind >> INDEX_BITS) + (behind & _LAST_INDEX) - before

    async def _first_index(self, entry: int) -> int:
        known = self._first_indexes.get(entry)
        if known is None:
            read = await self._read_entry((self._ledger, entry))
            known = self._first_indexes[entry] = int(read.first_index)
            self._first_indexes[entry + 1] = read.first_index + read.message_count
        return known


async def peek(
    ledgers: LedgerList,
    state: AckState,
    counts: RedeliveryCounts,
    read_entry: ReadEntry,
    count: int,
) -> list[PeekedEntry]:
    """The first `count` messages that are not acknowledged, within the bounds of this module.

    An entry that cannot be read ends it; raises if that is the first one.
    """
    left, size = min(count, MAX_PEEKED_MESSAGES), 0
    found: list[PeekedEntry] = []
    position = ledgers.normalise(state.mark_delete)
    while left and ledgers.is_confirmed(*position[:2]):
        ledger, number, index = position
        following = state.skip_whole(ledger, number)
        if following == number:
            try:
                entry = await read_entry((ledger, number))
            except MagnetarError:
                if not found:
                    raise
                break
            for messages, part in _parts(entry, (ledger, number), index, state, counts, left):
                size += len(part.slice)
                if found and size > MAX_PEEKED_BYTES:
                    return found
                found.append(part)
                left -= messages
            following += 1
        position = ledgers.normalise((ledger, following, 0))
    return found


def _parts(
    entry: Entry, key: EntryKey, index: int, state: AckState, counts: RedeliveryCounts, most: int
) -> Iterator[tuple[int, PeekedEntry]]:
    """At most so many messages of an entry, from an index on, cut where the redelivery count changes; how many in each."""
    rows = list(counts.split(key, state.unacked(*key, index, entry.message_count - 1)))
    for redeliveries, group in groupby(rows, key=itemgetter(2)):
        wanted: list[Range] = []
        messages = 0
        for first, last, _ in group:
            if messages < most:
                last = min(last, first + most - messages - 1)
                messages += last - first + 1
                wanted.append((first, last))
        if not wanted:
            return
        most -= messages
        begin, end = entry.batch_of(wanted[0][0]), entry.batch_of(wanted[-1][1]) + 1
        hidden = complement(wanted, entry.batch_start_index(begin), entry.end_indexes[end - 1] - 1)
        yield messages, PeekedEntry(*key, redeliveries, hidden, b"".join(entry.gather(begin, end, hidden)))
