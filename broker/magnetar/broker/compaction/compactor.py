"""One compaction: two passes over what is new, one over what the last compaction left.

    pass 1   the new range, from the last horizon to the end of the topic as it is now: the last position of each key
    pass 2   what the last compaction left, without messages whose key came again; then the new range, of each key the last
             message. Both go into a new ledger, which is closed and durable when `run` returns

All chunks of a message stand and fall together: once its last one is found the message stands where its first one does. A
compaction ends in front of a message that has begun within UNFINISHED_MS and has no last chunk yet; of an older one nobody
will ever send it, and nothing is left.

Memory is a digest of 128 bits and a position for each key of the new range, and so bounded by `compaction_max_keys`. Work
is done in steps of a thousand messages (about a millisecond), or of one batch that is larger, and after each step the loop
has a pause as long: other topics wait for a step at most, and compactions take half of a processor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import count

from magnetar.proto.batch_extensions import Chunk, MessageKey, entry_chunks
from magnetar.proto.entry import Entry
from magnetar.proto.errors import InvalidSetting, MagnetarError, MessageLost
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ..cursors.core.acks import EntryKey, Position
from ..cursors.snapshot_ledger import is_damage, resolve
from ..log.reading import LedgerReading
from ..log.records import CompactedLedger
from ..resources.stores import Writer
from ..settings import BrokerSettings
from .core.rows import (
    MAX_MESSAGES_AT_ONCE,
    NO_KEY,
    UNDECODABLE,
    Remainder,
    Row,
    TableRow,
    encode_chunk,
    encode_index_page,
    key_digests,
    members,
    parts_of,
)
from .view import CompactedView

_log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
MAX_APPENDS = 4  # outstanding
STEP_PAUSE_S = 0.001
# Taking a batch apart costs as much as so many messages: 5 us.
MESSAGES_PER_BATCH = 4
UNFINISHED_MS = 3_600_000


@dataclass(slots=True)
class Progress:
    """How far a compaction that is under way has come, for people."""

    messages_read: int = 0  # by both passes, and of what the last one left
    messages_left: int = 0


class Pace:
    """Gives the loop its turn; see the module docstring."""

    def __init__(self) -> None:
        self._messages = 0

    async def spent(self, messages: int) -> None:
        """So many messages were worked on."""
        self._messages += messages
        if self._messages >= MAX_MESSAGES_AT_ONCE:
            self._messages = 0
            await asyncio.sleep(STEP_PAUSE_S)


class CompactedWriter:
    """Writes rows to a new ledger, which is made for the first of them."""

    def __init__(self, create: Callable[[], Awaitable[Writer]]) -> None:
        self._create = create
        self._writer: Writer | None = None
        self._rows: list[Row] = []
        self._size = 0  # of `_rows`
        self._tables: list[list[TableRow]] = []  # of chunks that were appended
        self._appended: list[asyncio.Future[None]] = []  # outstanding, in order

    async def add(self, row: Row) -> None:
        """Rows come in the order of the topic. Raises what the ledger failed with."""
        if self._rows and self._size + row.table.size > CHUNK_BYTES:
            await self._end_chunk()
        self._rows.append(row)
        self._size += row.table.size

    async def _end_chunk(self) -> None:
        rows, self._rows, self._size = self._rows, [], 0
        await self._append(encode_chunk(rows))
        self._tables.append([row.table for row in rows])

    async def _append(self, payload: bytes) -> None:
        if self._writer is None:
            self._writer = await self._create()
        while len(self._appended) >= MAX_APPENDS:
            await self._appended.pop(0)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._appended.append(done)
        self._writer.append(payload, lambda _id, _entry, error: resolve(done, error))

    async def finish(self) -> tuple[int, int, int]:
        """The ledger's id (-1: there were no rows), its chunks and its payload bytes. It is closed and durable then."""
        if self._rows:
            await self._end_chunk()
        page: list[list[TableRow]] = []
        rows = 0
        for number, table in enumerate(self._tables, 1):
            page.append(table)
            rows += len(table)
            if rows >= MAX_MESSAGES_AT_ONCE or number == len(self._tables):
                await self._append(encode_index_page(page))
                page, rows = [], 0
        if self._writer is None:
            return -1, 0, 0
        while self._appended:
            await self._appended.pop(0)
        await self._writer.close()
        return self._writer.ledger_id, len(self._tables), self._writer.length

    def abandon(self) -> None:
        """The ledger is not wanted: whoever named it deletes it."""
        for done in self._appended:
            done.cancel()
        if self._writer is not None:
            self._writer.detach()


class ChunkedMessages:
    """Where the messages begin whose chunks are met, in order: `_place` of the first chunk."""

    def __init__(self) -> None:
        self.begun: dict[
            MessageKey, tuple[int, Position, int]
        ] = {}  # and as a position, and when it was stored
        self._ended: MessageKey | None = None

    def first_place(self, message: MessageKey, chunk: Chunk, position: Position, append_ms: int) -> int:
        """-1: where it begins is not known."""
        if self._ended is not None:
            self.begun.pop(self._ended, None)
        self._ended = message if chunk.last else None
        if not chunk.index:
            self.begun[message] = (_place(*position), position, append_ms)
        return self.begun[message][0] if message in self.begun else -1

    def first_unfinished(self, since_ms: int) -> Position | None:
        """The first one that has begun since then and has not ended."""
        rows = [row for message, row in self.begun.items() if message != self._ended and row[2] >= since_ms]
        return min((position for _, position, _ in rows), default=None)


class Compactor:
    """Runs one compaction. `normalise` is that of the topic (`cursors.core.acks.Topology`)."""

    def __init__(
        self,
        source: LedgerReading,
        normalise: Callable[[Position], Position],
        settings: BrokerSettings,
        now_ms: Callable[[], int],
        writer: CompactedWriter,
        what: str,
    ) -> None:
        """`what` names the topic in messages."""
        self._source = source
        self._normalise = normalise
        self._settings = settings
        self._now_ms = now_ms
        self._writer = writer
        self._what = what
        self._pace = Pace()
        self._messages = ChunkedMessages()  # of the pass that is under way
        self._latest: dict[int, int] = {}  # digest of a key -> `_place` of its last message
        self._tombstones_since = now_ms() - settings.compaction_tombstone_retention_ms
        self.progress = Progress()

    async def run(
        self, old: CompactedView | None, start: Position, end: Position, *, salvage: bool = False
    ) -> CompactedLedger:
        """Compacts what lies before `end`: of `old` what lies before `start`, and the topic from there on.

        `salvage`: what cannot be read of `old` is left out. Raises InvalidSetting above compaction_max_keys, and what
        reads and writes failed with.
        """
        while True:
            self._messages = ChunkedMessages()
            async for key, entry in self._entries(start, end):
                await self._remember(key, entry)
            unfinished = self._messages.first_unfinished(self._now_ms() - UNFINISHED_MS)
            if unfinished is None:
                break
            end = (*unfinished[:2], 0)
            self._latest.clear()
        if old is not None:
            await self._go_through_old(old, start[:2], salvage=salvage)
        self._messages = ChunkedMessages()
        async for key, entry in self._entries(start, end):
            await self._keep_latest(key, entry)
        ledger_id, chunks, size = await self._writer.finish()
        return CompactedLedger(ledger_id, end, chunks, self.progress.messages_left, size, self._now_ms())

    async def _entries(self, start: Position, end: Position) -> AsyncIterator[tuple[EntryKey, Entry]]:
        position = self._normalise(start)
        while position < end:
            ledger, first, _ = position
            try:
                found = await self._source.read(ledger, first, max_bytes=self._settings.read_bytes)
            except MessageLost:  # trimmed just now
                if self._normalise(position) == position:
                    raise
                position = self._normalise(position)
                continue
            except MagnetarError as error:
                if self._settings.unreadable_entry_policy != "skip" or not is_damage(error):
                    raise
                _log.warning(
                    "%s: compaction skips entry %d:%d, which is lost: %s", self._what, ledger, first, error
                )
                found = []
                first += 1
            for entry_id, data in enumerate(found, first):
                if (ledger, entry_id, 0) >= end:
                    return
                yield (ledger, entry_id), Entry(data, LEDGER_ENTRY_HEADER_BYTES)
            position = self._normalise((ledger, first + len(found), 0))

    # --- pass 1 ------------------------------------------------------------------------------------------------------

    async def _remember(self, key: EntryKey, entry: Entry) -> None:
        latest, chunks = self._latest, entry_chunks(entry)
        for part in parts_of(entry):
            # Later messages come later, and so does what they overwrite. NO_KEY and UNDECODABLE do no harm in it.
            places = zip(key_digests(part), count(_place(*key, part.base_index)))
            if not chunks:
                latest.update(places)
            for index, (digest, place) in enumerate(places, part.base_index) if chunks else ():
                if index in chunks:
                    message, chunk = chunks[index]
                    place = self._messages.first_place(message, chunk, (*key, index), entry.append_time_ms)
                    if not chunk.last:
                        continue
                if place >= 0:
                    latest[digest] = place
            await self._worked_on(part)
        self._check_bound(len(latest), "keys have changed since the last compaction")

    async def _worked_on(self, part: Entry) -> None:
        self.progress.messages_read += part.message_count
        await self._pace.spent(part.message_count)

    def _check_bound(self, found: int, what: str) -> None:
        most = self._settings.compaction_max_keys
        if found > most:
            raise InvalidSetting(
                f"{self._what} is not compacted: more than {most} {what}; raise the broker's compaction_max_keys, which "
                "takes some 200 bytes of memory for each while a compaction runs, or use `magnetar spark compact`"
            )

    # --- pass 2 ------------------------------------------------------------------------------------------------------

    async def _go_through_old(self, old: CompactedView, start: EntryKey, *, salvage: bool) -> None:
        index = old.index
        for row in range(index.find(start)):
            key = index.key(row)
            try:
                entry = old.cached(row) or await old.read(row)
            except MagnetarError as error:
                if not salvage or not is_damage(error):
                    raise
                _log.warning("%s: what was left of entry %d:%d is lost: %s", self._what, *key, error)
                continue
            left = members([bound for pair in index.left(row) for bound in pair])
            digests: list[int] = []
            for part in parts_of(entry):
                digests += key_digests(part)
                await self._worked_on(part)
            await self._keep(key, entry, [one for one in left if not self._came_again(digests[one])])

    def _came_again(self, digest: int) -> bool:
        return digest in self._latest and digest not in (NO_KEY, UNDECODABLE)

    async def _keep_latest(self, key: EntryKey, entry: Entry) -> None:
        left: list[int] = []
        chunks = entry_chunks(entry)
        latest, place = self._latest, _place(*key, 0)
        keep_keyless = self._settings.compaction_keyless == "keep"
        for part in parts_of(entry):
            for index, digest in enumerate(key_digests(part), part.base_index):
                if index in chunks and digest >= 0:
                    first = self._messages.first_place(*chunks[index], (*key, index), entry.append_time_ms)
                    if latest.get(digest, -2) == first:
                        left.append(index)
                elif digest >= 0:
                    if latest[digest] == place + index:
                        left.append(index)
                elif digest == UNDECODABLE or keep_keyless:
                    left.append(index)
            await self._worked_on(part)
        await self._keep(key, entry, left)

    async def _keep(self, key: EntryKey, entry: Entry, left: list[int]) -> None:
        """Writes what is left of an entry; tombstones that are too old leave it here."""
        remainder = Remainder(entry)
        keep_tombstones = entry.append_time_ms > self._tombstones_since
        at = 0
        while at < len(left):
            position = entry.batch_of(left[at])
            end = entry.end_indexes[position]
            first = at
            while at < len(left) and left[at] < end:
                at += 1
            remainder.add(position, left[first:at], keep_tombstones=keep_tombstones)
            await self._pace.spent(end - entry.batch_start_index(position) + MESSAGES_PER_BATCH)
        row = remainder.row(*key)
        if row is not None:
            self.progress.messages_left += len(members(row.table.messages))
            self._check_bound(self.progress.messages_left, "messages would be left")
            await self._writer.add(row)


def _place(ledger: int, entry: int, index: int) -> int:
    """A position as a number. Ids of entries have 43 bits, indexes 20."""
    return (ledger << 63) | (entry << 20) | index
