"""The ledger list of a topic: what positions mean in it, and its form in metadata, which is changed by compare-and-set.

A list of 100,000 ledgers has 4.5 MB, so it is stored in parts, and one more ledger writes one part of bounded size:

    head      the topic's node: the last HEAD_LEDGERS ledgers at most, and what else changes often
    segments  nodes below it, of SEGMENT_LEDGERS ledgers at most, which never change

When the head is full, its closed ledgers are sealed: a new segment has them, and those of the last segment unless that was
full. The segment is written first, then the head that names it by compare-and-set, then the node that no head names any
more is deleted (rule 25). The head's version is the fence (rule 23): of two owners only one gets its head stored, and the
numbers of segments are drawn from the store, so that none overwrites the other's. A crash in between leaves a node that no
head names; `sweep` deletes those when the topic was taken over.

What leaves the list is taken out of the head, and never out of a segment:

    trimmed   `trimmed_ranges` says which ledgers of segments count no more; a segment of which all are trimmed is dropped
    archived  `archives` says up to which ledger, and where: archived ledgers are the beginning of the list, and stay in it

For example, after ledgers 0 to 2,047 of one entry each were written, 0 to 9 archived and then 10 to 1,499 trimmed:

    segments [[7, 0, 999], [8, 1000, 1999]]   trimmed_ranges [[10, 1499]]   archives [["file:///a", 9]]   ledgers 2000...2047
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from magnetar.metadata import MetadataStore
from magnetar.metadata.store import Check, Create, Operation
from magnetar.proto.errors import (
    AlreadyExists,
    DataDirectoryError,
    MagnetarError,
    NotFoundInStore,
    TopicNotFound,
    TopicTerminated,
    VersionConflict,
)
from magnetar.proto.ids import TopicName

from ..cursors.core.acks import Position
from .records import (
    ArchivedLedger,
    LedgerInfo,
    Segment,
    SegmentRecord,
    TopicRecord,
    partitioned_path,
    replace,
    segment_path,
    segments_path,
    topic_path,
)

_log = logging.getLogger(__name__)

HEAD_LEDGERS = 100  # 5 KB
SEGMENT_LEDGERS = 1_000  # 50 KB
Make = Callable[[TopicName, Sequence[Operation]], Awaitable[None]]
_id_of = attrgetter("ledger_id")
_last_of = attrgetter("last")
_last_append_of = attrgetter("last_append_ms")  # never falls along a topic


def terminated(ledgers: LedgerList) -> TopicTerminated:
    """For whoever wants to write to a topic of which nothing may follow the last ledger."""
    return TopicTerminated(f"topic {ledgers.name} was terminated, and takes no more messages")


def check_not_terminated(ledgers: LedgerList) -> None:
    """Raises TopicTerminated."""
    if ledgers.record.terminated:
        raise terminated(ledgers)


class LedgerList:
    """Changed by `commit` alone, but for the counts of ledgers, which grow in place until they are closed.

    Positions mean the same in archived ledgers as in those at the bookies: both together are the topic.

    Invariants: position ids rise along `archived_ledgers` and then `ledgers`; all of `ledgers` but the last one are closed;
    `record.ledgers` are the last ones of both together, the same objects; of a non-persistent topic, whose ledgers are in
    memory alone (`ring`), there are none.
    """

    def __init__(self, name: TopicName, metadata: MetadataStore, make: Make | None = None) -> None:
        """`make` commits what makes the topic, if it may be made; without it anybody may."""
        self.name = name
        self._commit_new = make
        self.path = topic_path(name)
        self.record = TopicRecord.new(0)  # the head; `ledgers` is to be looked at for what the topic has
        self.archived_ledgers: list[LedgerInfo] = []
        self.ledgers: list[LedgerInfo] = []  # at the bookies
        self._by_id: dict[int, LedgerInfo] = {}  # of both, by position id
        self._stored: dict[int, LedgerInfo] = {}  # of `ledgers`, by stored id
        self.highest_id = -1  # of all positions that this list had since it was loaded
        self._metadata = metadata
        self._version = -1

    @property
    def version(self) -> int:
        """Of the head."""
        return self._version

    # --- metadata ----------------------------------------------------------------------------------------------------

    async def load(self, *, create_ms: int | None) -> bool:
        """Reads the list, or makes it (`create_ms`: the time). True if it was there.

        Raises TopicNotFound, AlreadyExists for a partitioned topic's name, or DataDirectoryError for what cannot be read.
        """
        made = False
        while True:
            stored = await self._metadata.get(self.path)
            if stored is not None:
                self._begin(TopicRecord.decode(stored.value, self.path), stored.version)
                if await self._load_segments():
                    self._add(self.record.ledgers)
                    return not made
            elif create_ms is None:
                raise TopicNotFound(
                    f"topic {self.name} does not exist; `magnetar topics list` shows what does"
                )
            else:
                made = await self._make(create_ms)

    async def _make(self, create_ms: int) -> bool:
        """Writes the list of a new topic; False: somebody else did. A name is partitioned or not, never both."""
        record = TopicRecord.new(create_ms)
        nodes: list[Operation] = [
            Check(partitioned_path(self.name), None),
            Create(self.path, record.encode()),
        ]
        try:
            if self._commit_new is None:
                await self._metadata.commit(nodes)
            else:
                await self._commit_new(self.name, nodes)
        except AlreadyExists:
            return False
        except VersionConflict:
            raise AlreadyExists(
                f"{self.name} is a partitioned topic: its partitions have names of their own, such as "
                f"{self.name.partition_of(0)}"
            ) from None
        return True

    def _begin(self, record: TopicRecord, version: int) -> None:
        """Forgets all ledgers; those of the record are to be added."""
        self.record, self._version = record, version
        self.archived_ledgers, self.ledgers, self._by_id, self._stored = [], [], {}, {}

    async def _load_segments(self) -> bool:
        """False: a former owner that is still alive changed the list meanwhile."""
        for segment in self.record.segments:
            path = segment_path(self.name, segment.number)
            stored = await self._metadata.get(path)
            if stored is None:
                head = await self._metadata.get(self.path)
                if head is None or head.version != self._version:
                    return False
                raise DataDirectoryError(
                    f"{path} is missing, a part of the ledger list of topic {self.name}: restore the metadata store"
                )
            self._add(SegmentRecord.decode(stored.value, path).ledgers)
            await asyncio.sleep(0)  # a segment takes a millisecond
        return True

    def _add(self, rows: Iterable[LedgerInfo]) -> None:
        """Ledgers behind all that are known; those that are trimmed are left out."""
        found = list(rows)
        for first, last in self.record.trimmed_ranges:
            del found[_from(found, first) : _behind(found, last)]
        archived = _behind(found, self.record.archived_through)
        self.archived_ledgers += found[:archived]
        added = found[archived:]
        self.ledgers += added
        self._by_id.update((info.ledger_id, info) for info in found)
        self._stored.update((info.stored_id, info) for info in added)
        if found:
            self.highest_id = max(self.highest_id, found[-1].ledger_id)

    async def commit(
        self, *, append: Sequence[LedgerInfo] = (), trim: int = 0, delete: Sequence[int] = (), **changed: Any
    ) -> None:
        """One compare-and-set of the list, which nobody sees before it has succeeded.

        `append`: ledgers that follow. `trim`: so many of `ledgers` leave the topic, from the first one on. `delete`: stored
        ids of other ledgers that are to be deleted. `changed`: fields of the record; ledgers up to a new end of `archives`
        leave the bookies. Closed ledgers without entries leave the list. Without arguments: what grew in place is stored.

        Raises VersionConflict, or what the store failed with: then it may have been stored all the same, and the next change
        will meet the conflict.
        """
        assert not (append and trim)
        assert not {"ledgers", "trimmed", "trimmed_ranges"} & changed.keys()
        before = self.record
        head = msgspec.structs.replace(before, **changed)
        empty = [info for info in before.ledgers if info.closed and not info.entries]
        trimmed = {info.ledger_id: info for info in [*self.ledgers[:trim], *empty]}
        archived = [
            info
            for info in self.ledgers[: _behind(self.ledgers, head.archived_through)]
            if info.ledger_id not in trimmed
        ]
        head.trimmed = [
            *head.trimmed, *(info.stored_id for info in trimmed.values()), *(info.stored_id for info in archived), *delete
        ]  # fmt: skip
        head.ledgers = [*(info for info in before.ledgers if info.ledger_id not in trimmed), *append]
        if trim and before.segments:
            self._trim_segments(head, self.ledgers[0].ledger_id, self.ledgers[trim - 1].ledger_id)
        if len(head.ledgers) > HEAD_LEDGERS:
            await self._seal(head)
        self._version = await replace(self._metadata, self.path, head.encode(), self._version)
        self.record = head
        del self.ledgers[:trim]
        for info in trimmed.values():
            del self._by_id[info.ledger_id], self._stored[info.stored_id]
        for info in archived:
            del self._stored[info.stored_id]
        for info in empty:
            del self.ledgers[_from(self.ledgers, info.ledger_id) : _behind(self.ledgers, info.ledger_id)]
        del self.ledgers[: len(archived)]
        self.archived_ledgers += archived
        self._add(append)
        if head.segments is not before.segments:
            for segment in before.segments:
                if segment not in head.segments:
                    await self._delete_segment(segment.number)

    def end_last(self, entries: int) -> None:
        """The last ledger is closed, and has so many entries; the next `commit` says so."""
        info = self.ledgers[-1]
        info.entries, info.closed = entries, True
        self.record.next_index = info.first_index + info.messages

    def hold(self, info: LedgerInfo) -> None:
        """A ledger in memory follows: what is stored never names it."""
        self._add([info])

    def let_go_of_first(self) -> None:
        """The first ledger in memory leaves; the next `commit` stores that it was trimmed, which need not be soon."""
        info = self.ledgers.pop(0)
        self.record.trimmed_end = (info.ledger_id, info.entries, 0)
        del self._by_id[info.ledger_id], self._stored[info.stored_id]

    def _trim_segments(self, head: TopicRecord, first: int, last: int) -> None:
        """Ledgers `first` to `last` are trimmed: they were the first ones at the bookies."""
        ranges = head.trimmed_ranges
        if ranges and ranges[-1][0] > head.archived_through:  # nothing that is still there stands in between
            first, ranges = ranges[-1][0], ranges[:-1]
        archived = self.archived_ledgers
        head.segments = [
            one
            for one in head.segments
            if one.last > last or _from(archived, one.first) < _behind(archived, one.last)
        ]
        head.trimmed_ranges = [
            (begin, end)
            for begin, end in [*ranges, (first, last)]
            if any(one.first <= end and begin <= one.last for one in head.segments)
        ]

    async def _seal(self, head: TopicRecord) -> None:
        """Writes segments with all ledgers of a head but the last one, which may be open, and names them in the head."""
        *rows, last = head.ledgers
        if head.segments:
            _, begin, end = head.segments[-1]
            found = [
                info
                for ledgers in (self.archived_ledgers, self.ledgers)
                for info in ledgers[_from(ledgers, begin) : _behind(ledgers, end)]
            ]
            if len(found) < SEGMENT_LEDGERS:
                rows = found + rows
                head.segments = head.segments[:-1]
        parts = [rows[at : at + SEGMENT_LEDGERS] for at in range(0, len(rows), SEGMENT_LEDGERS)]
        number = await self._metadata.next_id("ledger-list-segments", len(parts))
        segments = []
        for part in parts:
            await self._metadata.create(segment_path(self.name, number), SegmentRecord(part).encode())
            segments.append(Segment(number, part[0].ledger_id, part[-1].ledger_id))
            number += 1
        head.segments = head.segments + segments
        head.ledgers = [last]

    async def sweep(self) -> None:
        """To be called by the owner: deletes segments that a crash left and that the list does not name."""
        named = {segment.number for segment in self.record.segments}
        for name in await self._metadata.children(segments_path(self.name)):
            if name.isdecimal() and int(name) not in named:
                await self._delete_segment(int(name))

    async def _delete_segment(self, number: int) -> None:
        try:
            await self._metadata.delete(segment_path(self.name, number))
        except NotFoundInStore:
            pass
        except MagnetarError as error:  # `sweep` finds it
            _log.warning(
                "topic %s: segment %d of its ledger list is not deleted yet: %s", self.name, number, error
            )

    async def delete(self) -> None:
        """The list is not there any more when this returns; it has no ledgers at the bookies."""
        if self.record.segments:
            self.record.ledgers = []
            await self.commit(segments=[])
        await self.sweep()
        await self._metadata.delete(self.path, version=self._version)

    # --- positions ---------------------------------------------------------------------------------------------------

    @property
    def end(self) -> Position:
        """After the last confirmed message."""
        if not self.ledgers:
            return (self.highest_id + 1, 0, 0)
        info = self.ledgers[-1]
        return (info.ledger_id, info.entries, 0)

    @property
    def start(self) -> Position:
        """The first message that there is."""
        for ledgers in (self.archived_ledgers, self.ledgers):
            if ledgers:
                return (ledgers[0].ledger_id, 0, 0)
        return self.end

    @property
    def message_count(self) -> int:
        """Topic-wide index after the last confirmed message."""
        if not self.ledgers:
            return self.record.next_index
        info = self.ledgers[-1]
        return info.first_index + info.messages

    @property
    def size(self) -> int:
        """Bytes that its ledgers have."""
        return sum(info.size for info in self.ledgers)

    def info(self, ledger_id: int) -> LedgerInfo | None:
        """The ledger at this position, if it belongs to the topic."""
        return self._by_id.get(ledger_id)

    def stored(self, stored_id: int) -> LedgerInfo | None:
        """The ledger that is stored under this id, if it belongs to the topic and is at the bookies."""
        return self._stored.get(stored_id)

    def after(self, ledger_id: int, count: int) -> list[LedgerInfo]:
        """The first `count` ledgers behind a position that are at the bookies."""
        at = _behind(self.ledgers, ledger_id)
        return self.ledgers[at : at + count]

    def archived(self, ledger_id: int) -> ArchivedLedger | None:
        """The archived ledger at this position."""
        found = self.archived_after(ledger_id - 1, 1)
        return found[0] if found and found[0].info.ledger_id == ledger_id else None

    def archived_after(self, ledger_id: int, count: int) -> list[ArchivedLedger]:
        """The first `count` archived ledgers behind a position; those at the bookies come after all of them."""
        at = _behind(self.archived_ledgers, ledger_id)
        archives = self.record.archives
        return [
            ArchivedLedger(info, archives[bisect_left(archives, info.ledger_id, key=_last_of)].location)
            for info in self.archived_ledgers[at : at + count]
        ]

    def last_before(self, ledger_id: int) -> LedgerInfo | None:
        """The last ledger before a position, archived or not."""
        for ledgers in (self.ledgers, self.archived_ledgers):
            at = _from(ledgers, ledger_id)
            if at:
                return ledgers[at - 1]
        return None

    def closed_before(self, limit: Position) -> int:
        """How many of `ledgers`, from the first one on, are closed and lie wholly before `limit`."""
        ledgers = self.ledgers
        count = _from(ledgers, self.normalise(limit)[0])
        if count < len(ledgers) and limit >= (ledgers[count].ledger_id, ledgers[count].entries, 0):
            count += 1
        return count - 1 if count and not ledgers[count - 1].closed else count

    def normalise(self, position: Position) -> Position:
        """See `core.acks.Topology`."""
        info = self._by_id.get(position[0])
        if info is not None and (not info.closed or position[1] < info.entries):
            return position
        for ledgers in (self.archived_ledgers, self.ledgers):
            for at in range(_behind(ledgers, position[0]), len(ledgers)):
                info = ledgers[at]
                if info.entries or not info.closed:
                    return (info.ledger_id, 0, 0)
        return position

    def last_entry(self) -> tuple[int, int] | None:
        """Ledger and entry of the last confirmed entry; None if the topic has none."""
        for ledgers in (self.ledgers, self.archived_ledgers):
            for info in reversed(ledgers):
                if info.entries:
                    return (info.ledger_id, info.entries - 1)
        return None

    def is_confirmed(self, ledger_id: int, entry_id: int) -> bool:
        """True if the entry may be dispatched (rule 25)."""
        info = self._by_id.get(ledger_id)
        return info is not None and entry_id < info.entries


def first_appended_at(ledgers: list[LedgerInfo], time_ms: int) -> int:
    """Index of the first of these ledgers with an entry appended at `time_ms` or later; if none, behind all with entries."""
    filled = len(ledgers)
    while filled and not ledgers[filled - 1].entries:  # the open one
        filled -= 1
    return bisect_left(ledgers, time_ms, hi=filled, key=_last_append_of)


def _from(ledgers: list[LedgerInfo], ledger_id: int) -> int:
    """Index of the first of these ledgers that is at the position or behind it."""
    return bisect_left(ledgers, ledger_id, key=_id_of)


def _behind(ledgers: list[LedgerInfo], ledger_id: int) -> int:
    """Index of the first of these ledgers that is behind the position."""
    return bisect_right(ledgers, ledger_id, key=_id_of)
