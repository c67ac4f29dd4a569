"""The write cache: entries that are in the journal, or on their way there, and not yet in an entry log.

It consists of two memtables. Adds go to the active one. A checkpoint swaps them: the active memtable becomes the flushing
one, and stays readable until its
entries are durable in entry logs and index; then it is dropped. At most one memtable is flushing at any time.
An entry stays the bytes object that it arrived as. The flush sorts the entries of a ledger that arrived out of order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

# What the bookkeeping of one entry takes besides its payload: bytes object, dict slot, key.
ENTRY_OVERHEAD_BYTES = 160
_RELEASED_AT_ONCE = 2000


class MemTable:
    """Entries by ledger and id."""

    __slots__ = ("entries", "ledgers", "size")

    def __init__(self) -> None:
        self.ledgers: dict[int, dict[int, bytes]] = {}
        self.size = 0
        self.entries = 0

    def records(self, wanted: Callable[[int], bool] | None = None) -> Iterator[tuple[int, int, bytes]]:
        """(ledger, entry id, entry) of the ledgers `wanted`, ledger by ledger, ids ascending. 0.1 us each.

        Ledgers come in the order in which they came here. The ids of one are sorted at once: 1.5 ms for 130,000 that came
        in order, as nearly all do.
        """
        for ledger_id, entries in self.ledgers.items():
            if wanted is None or wanted(ledger_id):
                for entry_id in sorted(entries) if len(entries) > 1 else entries:
                    yield ledger_id, entry_id, entries[entry_id]

    async def release(self) -> None:
        """Frees all entries in slices: freeing 100,000 at once would block the event loop for 10 ms."""
        while self.ledgers:
            left = _RELEASED_AT_ONCE
            while self.ledgers and left > 0:
                ledger_id, entries = self.ledgers.popitem()
                while entries and left > 0:
                    entries.popitem()
                    left -= 1
                if entries:
                    self.ledgers[ledger_id] = entries
            await asyncio.sleep(0)


class WriteCache:
    """`capacity_bytes` bounds both memtables together."""

    def __init__(self, capacity_bytes: int) -> None:
        self._memtable_bytes = capacity_bytes // 2
        self.active = MemTable()
        self.flushing: MemTable | None = None
        # Totals of all memtables that were swapped: counting here costs an add nothing.
        self._swapped_entries = 0
        self._swapped_bytes = 0

    @property
    def entries_added(self) -> int:
        """Entries put since the start; one that was replaced in the same memtable counts once."""
        return self._swapped_entries + self.active.entries

    @property
    def bytes_added(self) -> int:
        """Their bytes."""
        active = self.active
        return self._swapped_bytes + active.size - active.entries * ENTRY_OVERHEAD_BYTES

    @property
    def size(self) -> int:
        """Bytes held."""
        return self.active.size + (self.flushing.size if self.flushing is not None else 0)

    def has_room(self, size: int) -> bool:
        """True if the active memtable takes an entry of `size` bytes. One memtable may always take a first entry."""
        return (
            self.active.size + size + ENTRY_OVERHEAD_BYTES <= self._memtable_bytes or not self.active.entries
        )

    def put(self, ledger_id: int, entry_id: int, entry: bytes) -> bool:
        """Adds an entry; one that is there already is replaced (a recovery digests it anew).

        Returns True when the active memtable should be flushed.
        """
        memtable = self.active
        ledger = memtable.ledgers.get(ledger_id)
        if ledger is None:
            ledger = memtable.ledgers[ledger_id] = {}
        old = ledger.get(entry_id)
        ledger[entry_id] = entry
        if old is None:
            memtable.size += len(entry) + ENTRY_OVERHEAD_BYTES
            memtable.entries += 1
        else:
            memtable.size += len(entry) - len(old)
        return memtable.size >= self._memtable_bytes

    def get(self, ledger_id: int, entry_id: int) -> bytes | None:
        """The entry, newest copy first."""
        ledger = self.active.ledgers.get(ledger_id)
        if ledger is not None:
            entry = ledger.get(entry_id)
            if entry is not None:
                return entry
        if self.flushing is not None:
            ledger = self.flushing.ledgers.get(ledger_id)
            if ledger is not None:
                return ledger.get(entry_id)
        return None

    def run(self, ledger_id: int, ids: Sequence[int], max_bytes: int) -> list[bytes]:
        """These entries, up to the first that is not here and, but for the first, `max_bytes`."""
        if len(ids) == 1:
            entry = self.get(ledger_id, ids[0])
            return [] if entry is None else [entry]
        found: list[bytes] = []
        ledger = self.active.ledgers.get(ledger_id)
        other = None if self.flushing is None else self.flushing.ledgers.get(ledger_id)
        if ledger is None and other is None:
            return found
        newest, older = (ledger or {}).get, (other or {}).get
        size = 0
        for number in ids:
            entry = newest(number) or older(number)
            if entry is None:
                break
            size += len(entry)
            if size > max_bytes and found:
                break
            found.append(entry)
        return found

    def entry_ids(self, ledger_id: int) -> list[int]:
        """Entries of a ledger, ascending."""
        ids = dict(self.active.ledgers.get(ledger_id, {}))
        if self.flushing is not None:
            ids |= self.flushing.ledgers.get(ledger_id, {})
        return sorted(ids)

    def holds(self, ledger_id: int) -> bool:
        """Whether any entry of the ledger is here."""
        flushing = self.flushing
        return ledger_id in self.active.ledgers or (flushing is not None and ledger_id in flushing.ledgers)

    def discard_ledger(self, ledger_id: int) -> None:
        """Forgets what waits for the next flush of a ledger that was deleted.

        The memtable that is being flushed stays whole.
        """
        ledger = self.active.ledgers.pop(ledger_id, None)
        if ledger is not None:
            self.active.entries -= len(ledger)
            self.active.size -= sum(map(len, ledger.values())) + len(ledger) * ENTRY_OVERHEAD_BYTES

    def swap(self) -> MemTable:
        """Makes the active memtable the flushing one and returns it."""
        assert self.flushing is None, "one flush at a time"
        self._swapped_entries, self._swapped_bytes = self.entries_added, self.bytes_added
        self.flushing, self.active = self.active, MemTable()
        return self.flushing

    def drop_flushing(self) -> None:
        """Drops the flushing memtable, whose entries are durable in entry logs by now."""
        self.flushing = None
