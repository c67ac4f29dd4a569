"""The confirmed entries of a topic, in memory or read, as its subscriptions see them.

Those that are `read_compacted` see it through `compaction.view`.
"""

from __future__ import annotations

from typing import Any

from magnetar.proto.entry import Entry
from magnetar.proto.ids import MessageId
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ..cursors.core.acks import EntryKey, Position
from .managed_ledger import ManagedLedger
from .positions import Start, find_position
from .tail_cache import TopicCache


class WholeLog:
    """Of one topic. It is what dispatch, acknowledgement and cursors need of a log."""

    def __init__(self, ledger: ManagedLedger[Any], cache: TopicCache) -> None:
        self.ledger = ledger
        self.cache = cache

    def normalise(self, position: Position) -> Position:
        """See `core.acks.Topology`."""
        return self.ledger.list.normalise(position)

    def is_confirmed(self, ledger_id: int, entry_id: int) -> bool:
        """True if the entry may be dispatched (rule 25)."""
        return self.ledger.list.is_confirmed(ledger_id, entry_id)

    def is_known(self, ledger_id: int) -> bool:
        """False if the ledger was trimmed or is not of this topic."""
        return self.ledger.list.info(ledger_id) is not None

    def cached(self, key: EntryKey) -> Entry | None:
        """The entry if the tail cache has it."""
        return self.cache.get(key)

    async def read(self, ledger_id: int, first: int, *, max_bytes: int) -> list[bytes]:
        """Confirmed ledger entries from `first` on, at least one. Raises MessageLost."""
        return await self.ledger.reading.read(ledger_id, first, max_bytes=max_bytes)

    async def read_entry(self, key: EntryKey) -> Entry:
        """One confirmed entry, from memory or the ledger. Raises MessageLost."""
        entry = self.cache.get(key)
        if entry is not None:
            return entry
        return Entry((await self.ledger.reading.read(*key, max_bytes=1))[0], LEDGER_ENTRY_HEADER_BYTES)

    def message_count(self, key: EntryKey) -> int | None:
        """Messages of an entry that is in memory."""
        entry = self.cache.get(key)
        return None if entry is None else entry.message_count

    async def read_message_count(self, key: EntryKey) -> int:
        """Messages of any confirmed entry. Raises MessageLost."""
        count: int = (await self.read_entry(key)).message_count
        return count

    async def find(self, start: Start) -> Position:
        """The position that "earliest", "latest", an id or a time means now."""
        return await find_position(self.ledger.list, self.read_entry, start)

    async def last_message_id(self) -> MessageId | None:
        """The last confirmed message; None if the topic holds none."""
        last = self.ledger.list.last_entry()
        return None if last is None else MessageId(*last, await self.read_message_count(last) - 1)
