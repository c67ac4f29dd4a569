"""A topic's confirmed entries, in memory or read, wherever they are: what subscriptions need of a log.

    read_entry(key) --in the tail cache--> given, else read
    read(ledger, first) --the open ledger--> its writer
            |--a closed one at the bookies--> a handle: a few are open, and those who want the same one share its opening
            `--an archived one--> ArchiveReader: somebody else knows its files and makes entries of them again

Of what is at the bookies readers of the same region share the reads (`shared_reads`). Subscriptions that are
`read_compacted` see the same through `compaction.view`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from magnetar.proto.entry import Entry
from magnetar.proto.errors import ArchiveUnavailable, MessageLost
from magnetar.proto.ids import MessageId
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, decode_ledger_entry_header
from magnetar.runtime.tasks import awaited, end_all

from ..cursors.core.acks import EntryKey, Position
from ..resources.stores import Ledgers, Reader, Reads, Writer
from .ledger_list import LedgerList
from .positions import Start, find_position
from .records import ArchivedLedger, LedgerInfo
from .ring import Ring
from .shared_reads import SharedReads
from .tail_cache import TopicCache

MAX_OPEN_HANDLES = 8
MAX_ENTRIES_PER_READ = 1024


class ArchiveReader(Protocol):
    """Implemented by `magnetar.archive.reader` over Parquet files, and in memory for tests."""

    async def read(
        self, topic: str, archived: ArchivedLedger, first: int, last: int, *, max_bytes: int
    ) -> list[bytes]:
        """Ledger entries as the bookies had them, from entry `first` on: at least one, else as many as fit in `max_bytes`.

        Entry ids, indexes of messages and what stands in messages are as before; the ledger entry header (40 bytes) is made
        anew. Raises EntryDamaged for files that are missing or are not what was written, ArchiveUnavailable for what may
        pass. May take seconds: what waits for it must be able to.
        """

    def figures(self) -> Mapping[str, int]:
        """What was read and what failed, for /metrics."""

    async def close(self) -> None:
        """Nothing is read any more; whoever waits gets ArchiveUnavailable."""


class NoArchives:
    """The reader of a broker that was put together without one: it refuses."""

    async def read(
        self, topic: str, archived: ArchivedLedger, first: int, last: int, *, max_bytes: int
    ) -> list[bytes]:
        """Raises ArchiveUnavailable."""
        raise ArchiveUnavailable(
            f"ledger {archived.info.ledger_id} of {topic} is archived at {archived.location}, and this broker has no reader "
            "of archives"
        )

    def figures(self) -> Mapping[str, int]:
        """None."""
        return {}

    async def close(self) -> None:
        """Nothing is open."""


class LedgerReading:
    """Reads the log of one topic. `close` it in the end."""

    def __init__(
        self,
        ledger_list: LedgerList,
        ledgers: Ledgers,
        archives: ArchiveReader,
        cache: TopicCache | Ring[Any],
        shared_reads: SharedReads,
    ) -> None:
        self.list = ledger_list
        self._cache = cache
        self._ledgers = ledgers
        self._archives = archives
        self._shared_reads = shared_reads
        self.writer: Writer | None = None  # of the open ledger: it alone knows what is confirmed there
        self._handles: dict[int, Reader] = {}  # by stored id, in the order of opening
        self._opening: dict[int, asyncio.Task[Reader]] = {}

    # --- what is there -----------------------------------------------------------------------------------------------

    def normalise(self, position: Position) -> Position:
        """See `core.acks.Topology`."""
        return self.list.normalise(position)

    @property
    def ended(self) -> bool:
        """True if the topic is terminated: nothing follows what is confirmed."""
        return self.list.record.terminated

    def is_confirmed(self, ledger_id: int, entry_id: int) -> bool:
        """True if the entry may be dispatched (rule 25)."""
        return self.list.is_confirmed(ledger_id, entry_id)

    def is_known(self, ledger_id: int) -> bool:
        """False if the ledger was trimmed or is not of this topic."""
        return self.list.info(ledger_id) is not None

    def cached(self, key: EntryKey) -> Entry | None:
        """The entry if the tail cache has it."""
        return self._cache.get(key)

    def message_count(self, key: EntryKey) -> int | None:
        """Messages of an entry that is in memory."""
        entry = self._cache.get(key)
        return None if entry is None else entry.message_count

    async def read_message_count(self, key: EntryKey) -> int:
        """Messages of any confirmed entry. Raises MessageLost."""
        count: int = (await self.read_entry(key)).message_count
        return count

    async def find(self, start: Start) -> Position:
        """The position that "earliest", "latest", an id or a time means now."""
        return await find_position(self.list, self.read_entry, start)

    async def last_message_id(self) -> MessageId | None:
        """The last confirmed message; None if the topic holds none."""
        last = self.list.last_entry()
        return None if last is None else MessageId(*last, await self.read_message_count(last) - 1)

    # --- reading -----------------------------------------------------------------------------------------------------

    async def read_entry(self, key: EntryKey) -> Entry:
        """One confirmed entry, from memory or the ledger. Raises MessageLost."""
        entry = self._cache.get(key)
        if entry is not None:
            return entry
        return Entry((await self.read(*key, max_bytes=1))[0], LEDGER_ENTRY_HEADER_BYTES)

    async def read(self, ledger_id: int, first: int, *, max_bytes: int) -> list[bytes]:
        """Confirmed ledger entries from `first` on, at least one. Raises MessageLost if they were trimmed.

        Those of an archived ledger come from its files, and fail as `ArchiveReader.read` says.
        """
        info = self.list.info(ledger_id)
        if info is None or first >= info.entries:
            raise MessageLost(
                f"entry {first} of ledger {ledger_id} does not belong to topic {self.list.name} any more"
            )
        last = min(info.entries, first + MAX_ENTRIES_PER_READ) - 1
        archived = self.list.archived(ledger_id)
        if archived is not None:
            return await self._archives.read(str(self.list.name), archived, first, last, max_bytes=max_bytes)

        async def fetch(first: int, last: int) -> list[bytes]:
            handle = await self._handle(info.stored_id)
            return await handle.read(first, last, max_bytes=max_bytes)

        return await self._shared_reads.read(
            info.stored_id, first, last, fetch, max_bytes=max_bytes, entry_bytes=info.size // info.entries
        )

    async def read_stored(self, stored_id: int, entry: int) -> bytes:
        """One entry of a ledger that belongs to the topic and is not in its list."""
        return (await (await self._handle(stored_id)).read(entry, entry))[0]

    async def _handle(self, stored_id: int) -> Reads:
        if self.writer is not None and self.writer.ledger_id == stored_id:
            return self.writer
        handle = self._handles.get(stored_id)
        if handle is not None:
            return handle
        task = self._opening.get(stored_id)
        if task is None:
            task = self._opening[stored_id] = awaited(self._open(stored_id))
            task.add_done_callback(lambda _: self._opening.pop(stored_id, None))
        handle = await asyncio.shield(task)
        if len(self._handles) >= MAX_OPEN_HANDLES:
            del self._handles[next(iter(self._handles))]
        self._handles[stored_id] = handle
        return handle

    async def _open(self, stored_id: int) -> Reader:
        return await self._ledgers.open(stored_id, recover=False)

    def forget(self, stored_id: int) -> None:
        """The ledger is not read any more."""
        self._handles.pop(stored_id, None)

    async def close(self) -> None:
        """Whoever waits for an opening is cancelled."""
        await end_all(self._opening.values())


async def measure(info: LedgerInfo, reader: Reads, last: int) -> None:
    """What a ledger holds, from its first and last entry."""
    if last >= 0:
        data = (await reader.read(last, last))[0]
        entry = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
        info.size = decode_ledger_entry_header(data).length
        info.messages = entry.first_index + entry.message_count
        info.last_append_ms = entry.append_time_ms
        data = (await reader.read(0, 0))[0]
        info.first_append_ms = Entry(data, LEDGER_ENTRY_HEADER_BYTES).append_time_ms
