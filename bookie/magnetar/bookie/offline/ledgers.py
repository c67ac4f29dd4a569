"""What a stopped bookie has of each ledger: index, ledger records, and what only the journals have yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from magnetar.proto.errors import LedgerNotFound

from ..entry_ids import EntryIds
from ..index import LedgerRecord, Location
from ..index.walks import ledgers_of, location_pages, locations_of_ledger
from .journaled import Journaled, JournaledLedger
from .stopped import BookieData

__all__ = ["LedgerSummary", "list_ledgers", "walk_ledgers"]

_PAGE_ROWS = 1000


class LedgerSummary(NamedTuple):
    """One ledger. Ids are -1 for none; bytes are those of the entries with their 40-byte headers."""

    ledger_id: int
    # "open", "fenced" or "deleted" (a tombstone); "unknown": entries are here, but no record of the ledger.
    state: str
    # The disk of a part of it was lost: a missing entry is not said not to exist (rule 8).
    unknown: bool
    deleted_at_ms: int
    last_entry: int
    last_add_confirmed: int
    explicit_lac: int
    # In entry logs, by the index.
    entries: int
    bytes: int
    # Of those that only the journals have: the next start puts them into entry logs.
    journaled_entries: int
    journaled_bytes: int
    # Ids of the entry logs that hold a part of it.
    logs: list[int]
    # (first, last) of what is here, entry logs and journals together.
    ranges: list[tuple[int, int]]


class _Indexed:
    """What the location index says of one ledger."""

    def __init__(self) -> None:
        self.ids = EntryIds()
        self.bytes = 0
        self.logs: dict[int, None] = {}


def list_ledgers(
    bookie: BookieData, journaled: Journaled, ledger_id: int | None = None
) -> Iterator[LedgerSummary]:
    """Every ledger that anything is known of, ascending, or this one. Streams: memory for one ledger.

    Raises LedgerNotFound when nothing is known of `ledger_id`, StorageFailed when the index is damaged.
    """
    return filter(None, walk_ledgers(bookie, journaled, ledger_id))


def walk_ledgers(
    bookie: BookieData, journaled: Journaled, ledger_id: int | None = None
) -> Iterator[LedgerSummary | None]:
    """The same, with None after each page of the index: a loop may do other work then."""
    if ledger_id is None:
        yield from _merge(bookie, journaled)
        return
    indexed = _Indexed()
    for number, (entry_id, location) in enumerate(locations_of_ledger(bookie.index, ledger_id), 1):
        _note(indexed, entry_id, location)
        if not number % _PAGE_ROWS:
            yield None
    record = bookie.index.get_ledger(ledger_id)
    waiting = journaled.ledgers.get(ledger_id)
    if record is None and waiting is None and not len(indexed.ids):
        raise LedgerNotFound(
            f"nothing is known of ledger {ledger_id} in {bookie.layout.root}; `magnetar bookie ledgers` lists what is",
            ledger_id=ledger_id,
        )
    yield _summary(ledger_id, record, indexed, waiting)


def _merge(bookie: BookieData, journaled: Journaled) -> Iterator[LedgerSummary | None]:
    """Three ascending streams: locations by ledger, ledger records, what the journals hold."""
    by_location = _by_ledger(bookie)
    by_record = ledgers_of(bookie.index)
    by_journal = iter(sorted(journaled.ledgers.items()))
    located, recorded, waiting = next(by_location, None), next(by_record, None), next(by_journal, None)
    while True:
        while located is not None and located[1] is None:
            yield None
            located = next(by_location, None)
        heads = [head[0] for head in (located, recorded, waiting) if head is not None]
        if not heads:
            return
        ledger_id = min(heads)
        indexed, record, journal_part = _Indexed(), None, None
        if located is not None and located[0] == ledger_id:
            indexed, located = located[1] or indexed, next(by_location, None)
        if recorded is not None and recorded[0] == ledger_id:
            record, recorded = recorded[1], next(by_record, None)
        if waiting is not None and waiting[0] == ledger_id:
            journal_part, waiting = waiting[1], next(by_journal, None)
        yield _summary(ledger_id, record, indexed, journal_part)


def _by_ledger(bookie: BookieData) -> Iterator[tuple[int, _Indexed | None]]:
    """None after each page."""
    current, indexed = -1, _Indexed()
    for page in location_pages(bookie.index, _PAGE_ROWS):
        for ledger_id, entry_id, location in page:
            if ledger_id != current:
                if current >= 0:
                    yield current, indexed
                current, indexed = ledger_id, _Indexed()
            _note(indexed, entry_id, location)
        yield current, None
    if current >= 0:
        yield current, indexed


def _note(indexed: _Indexed, entry_id: int, location: Location) -> None:
    indexed.ids.add(entry_id)
    indexed.bytes += location.length
    indexed.logs[location.log_id] = None


def _summary(
    ledger_id: int, record: LedgerRecord | None, indexed: _Indexed, waiting: JournaledLedger | None
) -> LedgerSummary:
    known = record or LedgerRecord()
    entries, size = len(indexed.ids), indexed.bytes
    new_entries = 0
    if waiting is not None:
        known = known.merged(waiting.record)
        for first, last in waiting.ids.ranges():
            new_entries += sum(map(indexed.ids.add, range(first, last + 1)))
    if known.deleted_at_ms:
        state = "deleted"
    elif known.fenced:
        state = "fenced"
    else:
        state = "unknown" if record is None and waiting is None else "open"
    return LedgerSummary(
        ledger_id,
        state,
        known.unknown,
        known.deleted_at_ms,
        known.last_entry,
        known.last_add_confirmed,
        known.explicit_lac,
        entries,
        size,
        new_entries,
        waiting.bytes if waiting is not None else 0,
        sorted(indexed.logs),
        indexed.ids.ranges(),
    )
