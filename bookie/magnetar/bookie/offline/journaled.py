"""What the next start would replay: entries and states that only the journals have, not yet entry logs and index."""

from __future__ import annotations

from typing import NamedTuple

from ..entry_ids import EntryIds
from ..index import LedgerRecord
from ..journal.records import RecordType
from .journals import JournalFileReport, JournalGap, JournalRecord, Progress, no_progress, walk_journals
from .stopped import BookieData

__all__ = ["JournalPlace", "Journaled", "JournaledLedger"]


class JournalPlace(NamedTuple):
    """The place of an entry in a journal: its record starts at `position` of the file; `length` is that of the entry."""

    path: str
    position: int
    length: int


class JournaledLedger:
    """One ledger. `ids` are all that the journals hold, `bytes` are those of the entries that no entry log has."""

    def __init__(self, deleted_at_ms: int) -> None:
        self.ids = EntryIds()
        self.bytes = 0
        # What a start adds to the ledger's record.
        self.record = LedgerRecord(deleted_at_ms=deleted_at_ms)


class Journaled:
    """By ledger. Memory: some hundred bytes a ledger, and for `places` 150 bytes an entry of one ledger."""

    def __init__(self) -> None:
        self.ledgers: dict[int, JournaledLedger] = {}
        # Of the ledger that was asked for: newest place by entry id.
        self.places: dict[int, JournalPlace] = {}
        # Damage: records behind it in that journal are left out, because no start would replay them.
        self.warnings: list[str] = []

    @classmethod
    def read(
        cls, bookie: BookieData, *, places_of: int | None = None, progress: Progress = no_progress
    ) -> Journaled:
        """Reads all journals from the mark on. DataDirectoryError for a damaged mark, StorageFailed."""
        found = cls()
        stopped_at: int | None = None
        for item in walk_journals(bookie, from_mark=True, progress=progress):
            if isinstance(item, JournalRecord) and item.journal != stopped_at:
                found._note(bookie, item, places_of)
            elif isinstance(item, JournalGap) and item.ends_replay:
                stopped_at = item.journal
                if item.is_damage:
                    found.warnings.append(
                        f"{item.path} is damaged at or after byte {item.position}; what follows it is left out"
                    )
            elif isinstance(item, JournalFileReport) and item.state == "missing":
                found.warnings.append(f"{item.path} is missing although the mark needs it")
        return found

    def _note(self, bookie: BookieData, record: JournalRecord, places_of: int | None) -> None:
        if record.change is None:
            return
        ledger = self.ledgers.get(record.ledger_id)
        if ledger is None:
            known = bookie.index.get_ledger(record.ledger_id)
            ledger = JournaledLedger(known.deleted_at_ms if known is not None else 0)
            self.ledgers[record.ledger_id] = ledger
        if record.type_number == RecordType.ADD:
            if ledger.record.deleted_at_ms:
                return  # rule 7: a start skips it as well
            length = record.payload_bytes
            if (
                ledger.ids.add(record.entry_id)
                and bookie.index.get(record.ledger_id, record.entry_id) is None
            ):
                ledger.bytes += length
            if record.ledger_id == places_of:
                self.places[record.entry_id] = JournalPlace(record.path, record.position, length)
        elif record.type_number == RecordType.DELETED:
            ledger.ids, ledger.bytes = EntryIds(), 0
        ledger.record = ledger.record.merged(record.change)
