"""The ledger list of a topic: its record in metadata, changed by compare-and-set, and what positions mean in it."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from typing import Any

from magnetar.proto.errors import TopicNotFound
from magnetar.proto.ids import TopicName

from ..cursors.core.acks import Position
from ..resources.stores import Metadata
from .records import ArchivedLedger, LedgerInfo, TopicRecord, replace, topic_path


class LedgerList:
    """`record` is changed by `commit` alone, but for the counts of ledgers, which grow in place until they are closed."""

    def __init__(self, name: TopicName, metadata: Metadata) -> None:
        self.name = name
        self.path = topic_path(name)
        self.record = TopicRecord()
        self._metadata = metadata
        self._version = -1
        self._by_id: dict[int, LedgerInfo] = {}
        self._ids: list[int] = []  # sorted, which is the order of the list
        self._stored: dict[int, LedgerInfo] = {}
        self._archived_ids: list[int] = []  # sorted; all of them below those of `_ids`
        self.highest_id = -1  # of all positions that this list had since it was loaded

    # --- metadata ----------------------------------------------------------------------------------------------------

    async def load(self, *, create_ms: int | None) -> bool:
        """Reads the record, or makes it (`create_ms`: the time). True if it was there. Raises TopicNotFound."""
        stored = await self._metadata.get(self.path)
        if stored is not None:
            self._version = stored.version
            self.record = TopicRecord.decode(stored.value, self.path)
            self.index()
            return True
        if create_ms is None:
            raise TopicNotFound(f"topic {self.name} does not exist; `magnetar topics list` shows what does")
        self.record = TopicRecord(created_ms=create_ms)
        self._version = await self._metadata.create(self.path, self.record.encode())
        return False

    async def delete(self) -> None:
        """The record is gone when this returns."""
        await self._metadata.delete(self.path, version=self._version)

    def index(self) -> None:
        """To be called when ledgers came or went."""
        self._by_id = {info.ledger_id: info for info in self.record.ledgers}
        self._stored = {info.stored_id: info for info in self.record.ledgers}
        self._ids = sorted(self._by_id)
        self._archived_ids = [one.info.ledger_id for one in self.record.archived]
        for ids in (self._archived_ids, self._ids):
            if ids:
                self.highest_id = max(self.highest_id, ids[-1])

    async def commit(self, **changed: Any) -> None:
        """Compare-and-set of some fields of the record, which nobody sees before it has succeeded.

        Closed ledgers without entries leave the list. Without arguments: what grew in place is stored. Raises
        VersionConflict, or what the store failed with: then it may have been stored all the same, and the next change will
        meet the conflict.
        """
        record = dataclasses.replace(self.record, **changed)
        empty = [info.stored_id for info in record.ledgers if info.closed and not info.entries]
        if empty:
            record.trimmed = record.trimmed + empty
            record.ledgers = [info for info in record.ledgers if info.entries or not info.closed]
        self._version = await replace(self._metadata, self.path, record.encode(), self._version)
        self.record = record
        self.index()

    # --- positions ---------------------------------------------------------------------------------------------------

    @property
    def end(self) -> Position:
        """After the last confirmed message."""
        if not self.record.ledgers:
            return (self.highest_id + 1, 0, 0)
        info = self.record.ledgers[-1]
        return (info.ledger_id, info.entries, 0)

    @property
    def start(self) -> Position:
        """The first message that is still kept at the bookies."""
        return (self._ids[0], 0, 0) if self._ids else self.end

    @property
    def message_count(self) -> int:
        """Topic-wide index after the last confirmed message."""
        if not self.record.ledgers:
            return self.record.next_index
        info = self.record.ledgers[-1]
        return info.first_index + info.messages

    def info(self, ledger_id: int) -> LedgerInfo | None:
        """The ledger at this position, if it belongs to the topic."""
        return self._by_id.get(ledger_id)

    def stored(self, stored_id: int) -> LedgerInfo | None:
        """The ledger that is stored under this id, if it belongs to the topic."""
        return self._stored.get(stored_id)

    def after(self, ledger_id: int, count: int) -> list[LedgerInfo]:
        """The first `count` ledgers behind a position that are at the bookies."""
        at = bisect_right(self._ids, ledger_id)
        return [self._by_id[found] for found in self._ids[at : at + count]]

    def archived(self, ledger_id: int) -> ArchivedLedger | None:
        """The archived ledger at this position."""
        at = bisect_left(self._archived_ids, ledger_id)
        found = self.record.archived[at : at + 1]
        return found[0] if found and found[0].info.ledger_id == ledger_id else None

    def archived_after(self, ledger_id: int, count: int) -> list[ArchivedLedger]:
        """The first `count` archived ledgers behind a position; those at the bookies come after all of them."""
        at = bisect_right(self._archived_ids, ledger_id)
        return self.record.archived[at : at + count]

    def below(self, limit: Position | None) -> list[LedgerInfo]:
        """Closed ledgers that lie wholly before `limit`; None: none of them."""
        if limit is None:
            return []
        first_kept = self.normalise(limit)[0]
        return [
            info
            for info in self.record.ledgers
            if info.closed and (info.ledger_id < first_kept or limit >= (info.ledger_id, info.entries, 0))
        ]

    def normalise(self, position: Position) -> Position:
        """See `core.acks.Topology`."""
        info = self._by_id.get(position[0])
        if info is not None and (not info.closed or position[1] < info.entries):
            return position
        at = bisect_right(self._ids, position[0])
        while at < len(self._ids):
            info = self._by_id[self._ids[at]]
            if info.entries or not info.closed:
                return (info.ledger_id, 0, 0)
            at += 1
        return position

    def is_confirmed(self, ledger_id: int, entry_id: int) -> bool:
        """True if the entry may be dispatched (rule 25)."""
        info = self._by_id.get(ledger_id)
        return info is not None and entry_id < info.entries
