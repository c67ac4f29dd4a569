"""What to read of a topic, cut into what one task reads. Pure: ledgers and wanted ranges in, slices out.

Ranges are half open. Three kinds of them may come together: by position (message ids), by offset (topic-wide index) and by
append time; what is read lies in all. Ledgers and entries outside are never asked for; within an entry the rows are cut.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from magnetar.archive.ledgers import TopicLedger as TopicLedger
from magnetar.proto.bookie_identity import NOT_KNOWN, BookieIdentity

T = TypeVar("T")
Position = tuple[int, int, int]  # position id of the ledger, entry, index in the entry
FIRST: Position = (0, 0, 0)
PAST_ALL: Position = (1 << 63, 0, 0)
_PAST_ALL_INT = 1 << 62


@dataclass(frozen=True, slots=True)
class Range:
    """What is wanted: at or past each `from_`, before each `before`."""

    from_position: Position = FIRST
    before_position: Position = PAST_ALL
    from_offset: int = 0
    before_offset: int = _PAST_ALL_INT
    from_append_ms: int = 0
    before_append_ms: int = _PAST_ALL_INT

    def narrowed(self, other: Range) -> Range:
        """What lies in both."""
        return Range(
            max(self.from_position, other.from_position),
            min(self.before_position, other.before_position),
            max(self.from_offset, other.from_offset),
            min(self.before_offset, other.before_offset),
            max(self.from_append_ms, other.from_append_ms),
            min(self.before_append_ms, other.before_append_ms),
        )

    def meets(self, ledger: TopicLedger) -> bool:
        """Whether the ledger may hold something of it."""
        return (
            ledger.entries > 0
            and self.from_position < self.before_position
            and self.from_offset < self.before_offset
            and self.from_append_ms < self.before_append_ms
            and self.from_position < (ledger.position_id, ledger.entries, 0)
            and self.before_position > (ledger.position_id, 0, 0)
            and self.from_offset < ledger.end_offset
            and self.before_offset > ledger.first_offset
            and self.from_append_ms <= ledger.last_append_ms
            and self.before_append_ms > ledger.first_append_ms
        )

    def indexes(
        self, ledger: int, entry: int, first_offset: int, messages: int, append_ms: int
    ) -> tuple[int, int]:
        """The part [low, high) of an entry's messages that lies in it; empty if low >= high."""
        if not self.from_append_ms <= append_ms < self.before_append_ms:
            return 0, 0
        low, high = max(0, self.from_offset - first_offset), min(messages, self.before_offset - first_offset)
        place = (ledger, entry)
        if self.from_position[:2] > place or self.before_position[:2] < place:
            return 0, 0
        if self.from_position[:2] == place:
            low = max(low, self.from_position[2])
        if self.before_position[:2] == place:
            high = min(high, self.before_position[2])
        return low, high


class KnownBookie(NamedTuple):
    """Where a bookie is, and who the broker has verified there: a task believes no other (rule 35)."""

    host: str
    port: int
    identity: BookieIdentity = NOT_KNOWN


class LedgerSlice(NamedTuple):
    """What one task reads: entries first..last of one ledger, at the bookies or, with messages in chunks, in an archive."""

    topic: str
    ledger: TopicLedger
    first: int
    last: int
    wanted: Range
    bookies: Mapping[str, KnownBookie]  # by id

    @property
    def size(self) -> int:
        """Bytes, about."""
        return self.ledger.size * (self.last - self.first + 1) // max(1, self.ledger.entries)


def slices(
    topic: str,
    ledgers: Sequence[TopicLedger],
    wanted: Range,
    partition_bytes: int,
    bookies: Mapping[str, KnownBookie],
) -> list[LedgerSlice]:
    """In topic order, of ledgers at the bookies. A slice has about `partition_bytes`, by its ledger's average entry."""
    found: list[LedgerSlice] = []
    for ledger in ledgers:
        if ledger.archive or not wanted.meets(ledger):
            continue
        whole = LedgerSlice(topic, ledger, 0, ledger.entries - 1, wanted, bookies)
        found += cut(whole, partition_bytes)
    return found


def cut(piece: LedgerSlice, partition_bytes: int) -> list[LedgerSlice]:
    """What the range leaves of a slice, in slices of about so many bytes."""
    ledger = piece.ledger
    first, last = _entries(piece)
    if first > last:
        return []
    step = max(1, partition_bytes * ledger.entries // max(1, ledger.size))
    # Equal pieces, so that no task is left with a crumb.
    pieces = -(-(last - first + 1) // step)
    borders = [first + (last - first + 1) * n // pieces for n in range(pieces + 1)]
    return [piece._replace(first=start, last=end - 1) for start, end in itertools.pairwise(borders)]


def portions(
    items: Iterable[T], size_of: Callable[[T], int], most_bytes: int, most: int = sys.maxsize
) -> Iterator[list[T]]:
    """Runs of items, each of at most so many and, unless it is a single one, of so many bytes."""
    gathered: list[T] = []
    size = 0
    for item in items:
        if gathered and (size + size_of(item) > most_bytes or len(gathered) >= most):
            yield gathered
            gathered, size = [], 0
        gathered.append(item)
        size += size_of(item)
    if gathered:
        yield gathered


def missing(ledgers: Iterable[TopicLedger], from_offset: int, before_offset: int) -> int:
    """How many messages from one offset to another, without it, none of these ledgers (in topic order) has."""
    count, at = 0, from_offset
    for ledger in ledgers:
        if ledger.end_offset > at:
            count += max(0, min(ledger.first_offset, before_offset) - at)
            at = ledger.end_offset
        if at >= before_offset:
            return count
    return count + max(0, before_offset - at)


def _entries(piece: LedgerSlice) -> tuple[int, int]:
    """First and last entry that ids leave; offsets and times are known when entries are read."""
    first, last, wanted, position_id = piece.first, piece.last, piece.wanted, piece.ledger.position_id
    if wanted.from_position[0] == position_id:
        first = max(first, wanted.from_position[1])
    if wanted.before_position[0] == position_id:
        # Before index 0 of an entry means without that entry.
        last = min(last, wanted.before_position[1] - (wanted.before_position[2] == 0))
    return first, last
