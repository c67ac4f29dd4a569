"""Where the batches of delivered entries end, as Pulsar's consumers have seen them.

An acknowledgement of Pulsar's clients names a batch by its first message and leaves open how many it has. So each
consumer keeps, for each entry of which something was delivered to it, the index behind each batch; a batch that goes out in
slices is a batch for each of them. Entries of unbatched messages, which are the many, cost no list.

An id with which no batch begins means one message where each is acknowledged by itself, and as a cumulative acknowledgement
the place behind the batch that contains it. One that is ALONE means its message, whatever else went out of its batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from magnetar.proto.entry import Entry
from magnetar.proto.pulsar.ids import ALONE, INDEX_BITS, LAST_INDEX

from ...cursors.core.acks import AckRange, EntryKey, Position

# Above, the oldest entries are forgotten, and looked up when somebody acknowledges them. An entry counts 1, and its batches.
MAX_BORDERS = 200_000

UNBATCHED: Sequence[int] = ()  # every message is a batch


def borders_of(entry: Entry) -> Sequence[int]:
    """The index behind each batch of an entry; UNBATCHED."""
    unbatched: bool = entry.batch_count == entry.message_count
    return UNBATCHED if unbatched else entry.end_indexes


def end_of_batch(borders: Sequence[int], index: int) -> int:
    """The index behind the batch with this message; behind the last batch that behind the message."""
    if not borders:
        return index + 1
    at = bisect_right(borders, index)
    return borders[at] if at < len(borders) else index + 1


def start_of_batch(borders: Sequence[int], index: int) -> int:
    """The first message of the batch with this one; behind the last batch where that ends."""
    if not borders:
        return index
    at = bisect_right(borders, index)
    return borders[at - 1] if at else 0


def end_of_id(borders: Sequence[int], packed: int) -> int:
    """Behind what an id means of which each message is acknowledged by itself: its batch, or one message."""
    index = packed & LAST_INDEX
    whole = not packed & ALONE and start_of_batch(borders, index) == index
    return end_of_batch(borders, index) if whole else index + 1


class Borders(dict[EntryKey, Sequence[int]]):
    """Of one consumer, by entry, in the order in which they were delivered first."""

    __slots__ = ("_size",)

    def __init__(self) -> None:
        super().__init__()
        self._size = 0

    def remember(self, key: EntryKey, borders: Sequence[int], cuts: Sequence[int] = ()) -> None:
        """`cuts`: where more batches end than the entry has."""
        known = self.get(key)
        if cuts:
            borders = sorted({*borders, *cuts, *(known or ())})
        if known is not None:
            if len(known) >= len(borders):
                return
            self._forget(key)
        self[key] = borders
        self._size += 1 + len(borders)
        while self._size > MAX_BORDERS and len(self) > 1:
            self._forget(next(iter(self)))

    def rows_of(self, ids: Iterable[EntryKey]) -> tuple[list[AckRange], list[EntryKey]]:
        """What ids mean, of which ledger and packed entry are given, and those that are of no entry known here.

        Unbatched messages that follow one another are one row: 0.1 us for each, and for whoever takes the rows hardly
        anything.
        """
        rows: list[AckRange] = []
        unknown: list[EntryKey] = []
        ledger = entry = first = end = -1
        following = -1  # the id behind the row that is not among `rows` yet
        borders: Sequence[int] | None = None
        for one in ids:
            found, packed = one
            index = packed & LAST_INDEX
            if packed != following or found != ledger or not index:
                if following >= 0:
                    rows.append((ledger, entry, first, end - 1))
                    following = -1
                ledger, entry, first = found, packed >> INDEX_BITS, index
                borders = self.get((ledger, entry))
                if borders is None:
                    unknown.append(one)
                    continue
            end = end_of_id(borders, packed) if borders else index + 1
            following = packed - index + end
        if following >= 0:
            rows.append((ledger, entry, first, end - 1))
        return rows, unknown

    def drop_below(self, mark_delete: Position) -> None:
        """Forgets the oldest ones as far as nobody has to acknowledge them any more."""
        while self and (key := next(iter(self))) < mark_delete[:2]:
            self._forget(key)

    def _forget(self, key: EntryKey) -> None:
        self._size -= 1 + len(self.pop(key))
