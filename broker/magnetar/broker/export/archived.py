"""ARCHIVE_LEDGERS: ledgers whose messages are in files leave the bookies, and the topic goes on naming them.

    kept at the bookies --ARCHIVE_LEDGERS--> archived (the list says where), its stored id among `trimmed` --> ledger deleted

Only the beginning of a topic is archived: a closed ledger may be once all before it are archived, or were trimmed. So
archived ledgers are a list of their own in front of the others. For consumers, readers and cursors they are ledgers like the
others: `log.reading` has their files read.

1. Rows are compared with the list: the ledgers must be closed and be what the asking side says that its files hold.
2. Those that a subscription, a reader or somebody's lease still needs are not archived, nor what follows: files are slower
   to read than bookies, and may be missing. With `with_backlog` subscriptions and readers keep nothing at the bookies, and
   leases alone do: their holders read the bookies themselves.
3. One compare-and-set of the list: the rows move, their stored ids join `trimmed`. A crash before it changed nothing; after
   it the topic's owner deletes the ledgers, when it goes on, at its next change of the list, or when it loads the topic.

Whoever asks again learns that it is done. Nothing here reads an archive: that its files are whole and durable is for the
asking side to know before it asks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from magnetar.proto.errors import InvalidArgument

from ..cursors.core.acks import Position
from ..log.list_changes import MAX_LEDGERS_PER_TRIMMING
from ..log.managed_ledger import ManagedLedger
from ..log.records import Archive, LedgerInfo
from .names import decode_rows

MAX_LEDGERS_PER_ARCHIVING = MAX_LEDGERS_PER_TRIMMING
MAX_LOCATION_CHARS = 1_024
# From which position on somebody needs the ledgers at the bookies, and who, in words; not counting the lease that is given.
# True: those who read through the broker do not need them there.
Needed = Callable[[str, bool], tuple[Position, str]]


class Row(NamedTuple):
    """What the asking side says of a ledger."""

    position_id: int
    stored_id: int
    entries: int
    messages: int


class Wanted(NamedTuple):
    """What is to be archived. `lease`: that of the asking side, which does not stand in its way. `dry`: only looked at.

    `with_backlog`: also what subscriptions and readers have still to read.
    """

    location: str
    rows: list[Row]
    lease: str = ""
    dry: bool = False
    moved: bool = False  # what is archived elsewhere is at this location from now on
    with_backlog: bool = False


class Archived(msgspec.Struct, frozen=True):
    """What became of ledgers that are to be archived."""

    archived: int  # by this call
    known: int  # archived before
    moved: int  # given another location
    gone: list[int]  # trimmed before
    kept: tuple[int, str] | None  # the first that cannot leave yet, and why


def decode_archived(payload: bytes) -> list[Row]:
    """The payload of ArchiveLedgers. Raises InvalidArgument."""
    rows = decode_rows("the ledgers to archive", payload, Row, MAX_LEDGERS_PER_ARCHIVING)
    for before, row in itertools.pairwise(rows):
        if before.position_id >= row.position_id:
            raise InvalidArgument(f"ledger {row.position_id} does not come after ledger {before.position_id}")
    return rows


class Archiving:
    """Lets ledgers of one topic leave the bookies."""

    def __init__(self, ledger: ManagedLedger[Any], needed: Needed) -> None:
        self._ledger = ledger
        self._needed = needed
        self._deciding = asyncio.Lock()  # held from looking at who needs what until the list has changed

    async def archive(self, wanted: Wanted) -> Archived:
        """Raises InvalidArgument for ledgers that are not as is said; then nothing changed."""
        location = wanted.location
        if not 0 < len(location) <= MAX_LOCATION_CHARS or "://" not in location or not location.isprintable():
            raise InvalidArgument(
                f"an archive is not at {location[:80]!r}; want a URI that every reader of the topic can open, as "
                "file:///mnt/archive or s3://bucket/archive"
            )
        if wanted.dry:
            return self._look(wanted)[1]

        async def work() -> Archived:
            async with self._deciding:
                return await self._commit(wanted)

        return await self._ledger.changes.edit(work)

    async def decided(self) -> None:
        """What was under way, and may not heed a new lease, is over."""
        async with self._deciding:
            pass

    # --- looking -----------------------------------------------------------------------------------------------------

    def _look(self, wanted: Wanted) -> tuple[list[LedgerInfo], Archived]:
        """The ledgers that can be archived now, and the answer."""
        known = moved = 0
        gone: list[int] = []
        asked: list[int] = []
        for row in wanted.rows:
            info = self._ledger.list.info(row.position_id)
            archived = self._ledger.list.archived(row.position_id)
            if archived is not None:
                _compare(row, archived.info)
                elsewhere = archived.location != wanted.location
                moved += elsewhere
                known += not elsewhere
                if elsewhere and not wanted.moved:
                    raise InvalidArgument(
                        f"ledger {row.position_id} is archived already, at {archived.location}; leave it out, or say that "
                        "it was moved"
                    )
            elif info is None:
                gone.append(row.position_id)
            else:
                _compare(row, info)
                asked.append(row.position_id)
        ready: list[LedgerInfo] = []
        kept: tuple[int, str] | None = None
        if asked:
            ids = set(asked)
            for info, reason in self._beginning(wanted):
                if info.ledger_id > asked[-1]:
                    break
                if info.ledger_id not in ids:
                    reason = "it is older than those that were asked for, and has to be archived before them"
                if reason:
                    kept = (info.ledger_id, reason)
                    break
                ready.append(info)
        return ready, Archived(len(ready), known, moved, gone, kept)

    def _beginning(self, wanted: Wanted) -> Iterator[tuple[LedgerInfo, str]]:
        """The ledgers at the bookies from the first one on, each with the reason why it cannot leave them ("": it can)."""
        limit, who = self._needed(wanted.lease, wanted.with_backlog)
        free = self._ledger.list.closed_before(limit)
        for at, info in enumerate(self._ledger.list.ledgers):
            if not info.closed:
                yield info, "it is open"
            elif info.entries:  # else it leaves the list by itself
                yield info, "" if at < free else who

    async def _commit(self, wanted: Wanted) -> Archived:
        ready, answer = self._look(wanted)
        if ready or answer.moved:
            archives = list(self._ledger.list.record.archives)
            if answer.moved:
                archives = self._moved(wanted)
            if ready:
                _extend(archives, wanted.location, ready[-1].ledger_id)
            await self._ledger.list.commit(archives=archives)
        return answer

    def _moved(self, wanted: Wanted) -> list[Archive]:
        """Where archived ledgers are once those that are asked for were moved."""
        asked = {row.position_id for row in wanted.rows}
        ledgers, archives = self._ledger.list, list[Archive]()
        for info, location in ledgers.archived_after(-1, len(ledgers.archived_ledgers)):
            _extend(archives, wanted.location if info.ledger_id in asked else location, info.ledger_id)
        return archives


def _extend(archives: list[Archive], location: str, last: int) -> None:
    """Ledgers up to `last` are archived at the location, behind those that are archived."""
    if archives and archives[-1].location == location:
        archives.pop()
    archives.append(Archive(location, last))


def _compare(row: Row, info: LedgerInfo) -> None:
    claimed, known = row[1:], (info.stored_id, info.entries, info.messages)
    if not info.closed:
        raise InvalidArgument(f"ledger {info.ledger_id} is open; only closed ledgers can be archived")
    if claimed != known:
        raise InvalidArgument(
            f"ledger {info.ledger_id} of the topic is not what was archived: stored id, entries and messages are "
            f"{list(known)}, not {list(claimed)}"
        )
