"""What a non-persistent topic has: its newest entries, in the memory of the broker, bounded in bytes.

    append --> the open segment --full--> closed, and the next one is open --> ... --> the oldest segment leaves

A segment is a ledger that nobody stores. It is in the topic's ledger list as others are, so positions, starts, dispatch and
acknowledgements mean the same as in a persistent topic, but the list in the metadata store never names it. An entry is
confirmed by being appended. When the ring is full, or those of all topics together are, the oldest segment leaves, whoever
has not read it: a slow consumer neither slows a producer nor takes memory. For example, a ring of 16 MiB has 16 segments:

    segments        | 1 MiB | 1 MiB | ... | 1 MiB | 0.3 MiB, open |
    slow reader             ^ when one more segment is needed, the first one leaves: nothing is lost
    slower one        ^ loses what is left of the first one: these messages are counted

Ids of segments are drawn from the clock, and are above that at which the topic ended when it was unloaded. So they rise from
one load of a topic to the next, wherever it is loaded, unless its broker was lost and clocks differ by seconds; and are far
above those of stored ledgers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from magnetar.proto.entry import Entry
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, encode_ledger_entry

from ..cursors.core.acks import EntryKey, Position
from .ledger_list import LedgerList
from .records import LedgerInfo
from .tail_cache import entry_size

T = TypeVar("T")

_SEGMENTS = 16  # of a full ring
_ID_BITS = 8  # ids for each millisecond: as exact in JSON as any other number


class Rings:
    """Those of a broker. When they hold more than `limit` bytes, the oldest closed segment of all of them leaves.

    If none is closed, that topic loses its open one to which nothing was appended for longest.
    """

    __slots__ = ("_closed", "_last_id", "_open", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._last_id = -1
        self._closed: dict[int, Ring[Any]] = {}  # whose each is, by id: oldest first
        self._open: dict[
            Ring[Any], None
        ] = {}  # with something in their open segments; the last append comes last

    def next_id(self, now_ms: int, above: int) -> int:
        """The id of a new segment; ids rise over all rings."""
        self._last_id = max(self._last_id + 1, above + 1, now_ms << _ID_BITS)
        return self._last_id

    def charge(self, ring: Ring[Any], size: int) -> None:
        """So much was appended to the open segment of a ring."""
        self._open.pop(ring, None)
        self._open[ring] = None
        self.used += size
        while self.used > self.limit and (self._closed or len(self._open) > 1):
            next(iter(self._closed.values() or self._open)).drop_oldest()

    def closed(self, segment: int, ring: Ring[Any]) -> None:
        """The open segment of a ring is closed."""
        self._open.pop(ring, None)
        self._closed[segment] = ring

    def release(self, segment: int, ring: Ring[Any], size: int) -> None:
        """A segment has left; the open one leaves only with its ring."""
        if self._closed.pop(segment, None) is None:
            self._open.pop(ring, None)
        self.used -= size


class Ring(Generic[T]):
    """Of one topic: see the module docstring. `begin` when its list is loaded, `close` in the end."""

    accepting = True  # as of `Appending`; there is always room

    def __init__(
        self,
        ledgers: LedgerList,
        rings: Rings,
        limit: int,
        confirmed: Callable[[int, int, bytes | None, T], None],
        leaving: Callable[[LedgerInfo, Position], None],
    ) -> None:
        """`confirmed`: see `LedgerEvents`. `leaving` is called before a segment leaves; the position is behind it."""
        self._ledgers = ledgers
        self._rings = rings
        self._limit = limit
        self._confirmed = confirmed
        self._leaving = leaving
        self._entries: dict[EntryKey, Entry] = {}
        self._sizes: dict[int, int] = {}  # of the segments, in memory; the last one is open
        self._payload = 0  # bytes, of the open one
        self.used = 0

    def begin(self, now_ms: int) -> None:
        """The next segment is open, the last one closed."""
        ledgers = self._ledgers
        if ledgers.ledgers:
            ledgers.ledgers[-1].closed = True
            self._rings.closed(ledgers.ledgers[-1].ledger_id, self)
        segment = self._rings.next_id(now_ms, ledgers.record.trimmed_end[0])
        ledgers.hold(LedgerInfo(segment, ledgers.message_count))
        self._sizes[segment] = self._payload = 0

    def get(self, key: EntryKey) -> Entry | None:
        """The entry, if it is still here."""
        return self._entries.get(key)

    def wake(self) -> None:
        """Nothing has to be opened."""

    @property
    def next_message(self) -> int:
        """Index in its segment of the next message."""
        return self._ledgers.ledgers[-1].messages

    def append(self, payload: bytes, messages: int, append_time_ms: int, context: T) -> None:
        """As `Appending.append`; the entry is confirmed when this returns."""
        info = self._ledgers.ledgers[-1]
        segment, entry_id = info.ledger_id, info.entries
        self._payload += len(payload)
        data = encode_ledger_entry(segment, entry_id, entry_id - 1, self._payload, payload)
        entry = self._entries[(segment, entry_id)] = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
        info.entries += 1
        info.messages += messages
        info.size = self._payload
        info.last_append_ms = append_time_ms
        info.first_append_ms = info.first_append_ms or append_time_ms
        size = entry_size(entry)
        self._sizes[segment] += size
        self.used += size
        self._rings.charge(self, size)
        if self._sizes[segment] >= self._limit // _SEGMENTS:
            self.begin(append_time_ms)
        while self.used > self._limit and self._ledgers.ledgers[0].ledger_id < segment:
            self.drop_oldest()
        self._confirmed(segment, entry_id, None, context)

    def drop_oldest(self) -> None:
        """The oldest segment leaves. If it is the open one, the next one is open then."""
        info = self._ledgers.ledgers[0]
        if not info.closed:
            self.begin(info.last_append_ms)
        self._leaving(info, (self._ledgers.ledgers[1].ledger_id, 0, 0))
        self._forget(info)

    def _forget(self, info: LedgerInfo) -> None:
        self._ledgers.let_go_of_first()
        for entry_id in range(info.entries):
            del self._entries[(info.ledger_id, entry_id)]
        size = self._sizes.pop(info.ledger_id)
        self.used -= size
        self._rings.release(info.ledger_id, self, size)

    def close(self) -> None:
        """Nothing of it is in memory any more."""
        while self._ledgers.ledgers:
            self._forget(self._ledgers.ledgers[0])

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        infos = self._ledgers.ledgers
        assert [info.ledger_id for info in infos] == list(self._sizes)
        assert [info.closed for info in infos] == [True] * (len(infos) - 1) + [False]
        keys = [(info.ledger_id, entry_id) for info in infos for entry_id in range(info.entries)]
        assert keys == list(self._entries)
        assert self.used == sum(self._sizes.values()) == sum(map(entry_size, self._entries.values()))
        assert self.used <= self._limit or len({segment for segment, _ in keys}) == 1
        assert not self._ledgers.record.ledgers
