"""Reading what a compaction left: the compacted ledger, and the topic as a `read_compacted` subscription sees it.

    CompactedView           one compacted ledger: its index in memory, a few chunks of it, reads
    CompactedLog            the topic for one subscription: the view up to its horizon, the topic's ledgers from there on
    CompactedAcks           the cursor for its dispatch: what is not shown counts as acknowledged

Positions mean the same in both parts, so dispatch, redelivery and acknowledgements need to know nothing. When a later
compaction takes the place of this one, the subscription goes on in it, at its position.

**Tombstones.** A message that deletes its key is left in the compacted ledger for `compaction_tombstone_retention_ms`. Who
begins at the beginning of the topic does not need those that are there already, and does not get them. Who was somewhere
behind may know an older value of the key: a subscription that reads while a later compaction takes place, or a reader that
connects again. It gets the tombstones that follow its position.

What is delivered and what the cursor passes is one rule, `_next_shown`: the position of a subscription is always that of a
message that it gets, so whoever acknowledged all that it got stands behind a tombstone that it did not get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import accumulate

from magnetar.proto.entry import Entry
from magnetar.proto.errors import EntryDamaged, MagnetarError, MessageLost
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY, MessageId
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.proto.ranges import Range, RangeSet, complement, intersection

from ..cursors.core.acks import AckState, EntryKey, Position
from ..cursors.snapshot_ledger import is_damage
from ..log.positions import Start, first_appended, first_published
from ..log.reading import LedgerReading
from ..log.records import CompactedLedger
from .core.index import CompactedIndex
from .core.rows import decode_chunk, decode_index_page

ReadStored = Callable[[int, int], Awaitable[bytes]]  # stored id and entry: the ledger entry with its header

MAX_CHUNKS_IN_MEMORY = 4
_NO_HEADER = bytes(LEDGER_ENTRY_HEADER_BYTES)


class CompactedView:
    """One compacted ledger. Made by `open`; `index` must not be changed."""

    def __init__(self, pointer: CompactedLedger, index: CompactedIndex, read: ReadStored) -> None:
        self.pointer = pointer
        self.index = index
        self._read = read
        self._chunks: dict[int, tuple[bytes, list[int]]] = {}  # by entry: payload, where each row begins

    @property
    def horizon(self) -> Position:
        """The first message that was not looked at."""
        return self.pointer.horizon

    @classmethod
    async def open(cls, pointer: CompactedLedger, read: ReadStored) -> CompactedView:
        """Reads the index; where that is damaged, the tables of all chunks. Raises what `read` raises, or of a damage."""
        try:
            return cls(pointer, await _read_index(pointer, read), read)
        except MagnetarError as error:
            if not is_damage(error):
                raise
        view, lost = await cls.salvage(pointer, read)
        if lost:
            raise EntryDamaged(
                f"{lost} of {pointer.chunks} chunks of compacted ledger {pointer.ledger_id} are damaged"
            )
        return view

    @classmethod
    async def salvage(cls, pointer: CompactedLedger, read: ReadStored) -> tuple[CompactedView, int]:
        """What can be read of a damaged ledger, and how many of its chunks cannot. Raises what may pass."""
        index, lost = CompactedIndex(), 0
        for chunk in range(pointer.chunks):
            try:
                table, _ = decode_chunk(_payload(await read(pointer.ledger_id, chunk)))
            except MagnetarError as error:
                if not is_damage(error):
                    raise
                lost += 1
            else:
                index.add_chunk(chunk, table)
                await asyncio.sleep(0)
        return cls(pointer, index, read), lost

    def cached(self, row: int) -> Entry | None:
        """The entry of a row whose chunk is in memory."""
        chunk, first, _ = self.index.chunk(row)
        held = self._chunks.get(chunk)
        if held is None:
            return None
        payload, starts = held
        return Entry(
            _NO_HEADER + payload[starts[row - first] : starts[row - first + 1]], LEDGER_ENTRY_HEADER_BYTES
        )

    async def read(self, row: int) -> Entry:
        """The entry of a row, as `Entry` behind a ledger entry header that says nothing. Raises of a damage."""
        chunk, _, sizes = self.index.chunk(row)
        if chunk not in self._chunks:
            payload = _payload(await self._read(self.pointer.ledger_id, chunk))
            _, body = decode_chunk(payload)
            if len(self._chunks) >= MAX_CHUNKS_IN_MEMORY:
                self._chunks.pop(next(iter(self._chunks)))
            self._chunks[chunk] = (payload, list(accumulate(sizes, initial=body)))
        found = self.cached(row)
        assert found is not None
        return found


async def _read_index(pointer: CompactedLedger, read: ReadStored) -> CompactedIndex:
    index, chunk, page = CompactedIndex(), 0, pointer.chunks
    while chunk < pointer.chunks:
        for table in decode_index_page(_payload(await read(pointer.ledger_id, page))):
            index.add_chunk(chunk, table)
            chunk += 1
            await asyncio.sleep(0)  # a chunk takes a millisecond
        page += 1
    return index


def _payload(entry: bytes) -> bytes:
    return entry[LEDGER_ENTRY_HEADER_BYTES:]


# --- the topic of a subscription -------------------------------------------------------------------------------------


class CompactedLog:
    """The topic as one `read_compacted` subscription sees it: its TopicLog, and the topology of its cursor.

    `view()` is None before the first compaction, and when what it left is damaged: then this is the whole topic.
    """

    def __init__(
        self,
        whole: LedgerReading,
        view: Callable[[], CompactedView | None],
        damaged: Callable[[CompactedView], None],
    ) -> None:
        """`damaged` is called when a read finds damage in a view."""
        self._whole = whole
        self._view = view
        self._damaged = damaged
        self._tombstones_from: Position = (0, 0, 0)

    def begin_at(self, position: Position, *, new: bool) -> None:
        """The subscription goes on here; `new`: it knows nothing of what lies before the horizon, nor of any key there."""
        view = self._view()
        self._tombstones_from = view.horizon if view is not None and new else position

    def _row(self, key: EntryKey) -> tuple[CompactedView, int] | None:
        """The view and its row of an entry before the horizon; None if nothing of it is left, or there is no view."""
        view = self._view()
        row = None if view is None else view.index.row(key)
        return None if view is None or row is None else (view, row)

    def _is_compacted(self, key: EntryKey) -> bool:
        view = self._view()
        return view is not None and key < view.horizon[:2]

    # --- lookups -----------------------------------------------------------------------------------------------------

    def normalise(self, position: Position) -> Position:
        """The position, or the next one whose message is shown, or the tail."""
        view = self._view()
        if view is None or position >= view.horizon:
            return self._whole.normalise(position)
        index, hidden_before = view.index, self._tombstones_from[:2]
        row, first = index.find(position[:2]), position[2]
        while row < len(index):
            key = index.key(row)
            message = self._next_shown(index, row, first if key == position[:2] else 0)
            if message is not None:
                return (*key, message)
            row += 1
            if key < hidden_before:
                row = max(row, min(index.next_value(row), index.find(hidden_before)))
        return self._whole.normalise(view.horizon)

    @property
    def ended(self) -> bool:
        return self._whole.ended

    def is_confirmed(self, ledger_id: int, entry_id: int) -> bool:
        """True if the entry may be dispatched; of the compacted part, if anything of it is left."""
        key = (ledger_id, entry_id)
        return self._row(key) is not None if self._is_compacted(key) else self._whole.is_confirmed(*key)

    def is_known(self, ledger_id: int) -> bool:
        """True if there is anything of the ledger."""
        view = self._view()
        return (view is not None and view.index.has_ledger(ledger_id)) or self._whole.is_known(ledger_id)

    def cached(self, key: EntryKey) -> Entry | None:
        """The entry if it is in memory."""
        if not self._is_compacted(key):
            return self._whole.cached(key)
        found = self._row(key)
        return None if found is None else found[0].cached(found[1])

    def message_count(self, key: EntryKey) -> int | None:
        """Messages of an entry that is in memory, those that are not left among them."""
        if not self._is_compacted(key):
            return self._whole.message_count(key)
        entry = self.cached(key)
        return None if entry is None else entry.message_count

    def unacked(self, key: EntryKey, wanted: list[Range]) -> list[Range]:
        """What of some messages of an entry is to be delivered: what is left, without tombstones that nobody needs."""
        if not wanted or not self._is_compacted(key):
            return wanted
        found = self._row(key)
        return [] if found is None else _in_both(wanted, self._shown(found[0].index, found[1]))

    def _hidden(self, index: CompactedIndex, row: int) -> list[Range]:
        """The tombstones of a row that nobody here needs."""
        ledger, entry, first = self._tombstones_from
        key = index.key(row)
        hidden = index.tombstones_of(row) if key <= (ledger, entry) else []
        if key == (ledger, entry):
            hidden = [(begin, min(end, first - 1)) for begin, end in hidden if begin < first]
        return hidden

    def _shown(self, index: CompactedIndex, row: int) -> list[Range]:
        """The messages of a row that are delivered."""
        left, hidden = index.left(row), self._hidden(index, row)
        return _in_both(left, complement(hidden, 0, MAX_MESSAGES_PER_ENTRY - 1)) if hidden else left

    def _next_shown(self, index: CompactedIndex, row: int, first: int) -> int | None:
        """The first message of a row, from `first` on, that is delivered: a search, if no tombstone is hidden there."""
        if not self._hidden(index, row):
            return index.next_left(row, first)
        return next((max(begin, first) for begin, end in self._shown(index, row) if end >= first), None)

    # --- reads -------------------------------------------------------------------------------------------------------

    async def read(self, ledger_id: int, first: int, *, max_bytes: int) -> list[bytes]:
        """As the topic's; of the compacted part one entry. Raises MessageLost if nothing of it is left."""
        if not self._is_compacted((ledger_id, first)):
            return await self._whole.read(ledger_id, first, max_bytes=max_bytes)
        return [(await self._read_compacted((ledger_id, first))).data]

    async def read_message_count(self, key: EntryKey) -> int:
        """Messages of any entry. Raises MessageLost."""
        if not self._is_compacted(key):
            return await self._whole.read_message_count(key)
        count: int = (await self._read_compacted(key)).message_count
        return count

    async def _read_compacted(self, key: EntryKey) -> Entry:
        while (found := self._row(key)) is not None:
            view, row = found
            try:
                return await view.read(row)
            except MagnetarError as error:
                if self._view() is view:
                    if is_damage(error):
                        self._damaged(view)
                    raise
            # Another compaction was done meanwhile, and this one's ledger deleted.
        raise MessageLost(f"nothing of entry {key[1]} of ledger {key[0]} is left: a compaction was done")

    async def find(self, start: Start) -> Position:
        """The position that "earliest", "latest", an id or a time means now."""
        kind, value = start
        view = self._view()
        if view is not None and len(view.index):
            if kind == "earliest":
                return (*view.index.key(0), 0)
            if kind == "id" and isinstance(value, bytes):
                position = MessageId.from_bytes(value)[:3]
                if position < view.horizon:
                    return position
            if kind == "time" and isinstance(value, int):
                key_of = view.index.key
                row = await first_appended(
                    lambda row: self._read_compacted(key_of(row)), 0, len(view.index), value
                )
                if row < len(view.index):
                    key = key_of(row)
                    return (*key, first_published(await self._read_compacted(key), value))
        position = await self._whole.find(start)
        return max(position, view.horizon) if view is not None else position

    async def last_message_id(self) -> MessageId | None:
        """The last message that this subscription gets; None: there is none."""
        view = self._view()
        tail = await self._whole.last_message_id()
        if view is None or (tail is not None and tail[:2] >= view.horizon[:2]):
            return tail
        for row in reversed(range(len(view.index))):
            if shown := self._shown(view.index, row):
                return MessageId(*view.index.key(row), shown[-1][1])
        return None


class CompactedAcks:
    """What dispatch asks of a cursor (`dispatch.core.entry_source.Acks`)."""

    __slots__ = ("_log", "_state")

    def __init__(self, log: CompactedLog, state: AckState) -> None:
        self._log = log
        self._state = state

    @property
    def mark_delete(self) -> Position:
        return self._state.mark_delete

    @property
    def range_count(self) -> int:
        return self._state.range_count

    def skip_whole(self, ledger: int, entry: int) -> int:
        return self._state.skip_whole(ledger, entry)

    def unacked(self, ledger: int, entry: int, first: int, last: int) -> list[Range]:
        """As `AckState.unacked`, without what is not shown."""
        return self._log.unacked((ledger, entry), self._state.unacked(ledger, entry, first, last))


def _in_both(some: list[Range], others: list[Range]) -> list[Range]:
    return list(intersection(RangeSet.of(some), RangeSet.of(others)))
