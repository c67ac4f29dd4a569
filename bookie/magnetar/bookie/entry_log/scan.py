"""Walking through an entry log record by record, past whatever cannot be read.

`LogScan` is the walk itself: it says which bytes it wants next and turns them into `Scanned` (no I/O). Whoever reads a whole
log drives it: `scan_log` (rebuild, offline tools) and `scan_log_in_slices` (garbage collection, scrub). What the disk does
not give as a whole is asked for page by page, and an unreadable page counts as zeros, in which no record is good.

Where a record is expected and none verifies, a range without records begins. It ends at the next record that verifies:
first where the bad record's own length says, then wherever one is found, byte by byte. What the range is:

    below what was synced when the log was closed (good footer), or when a later SYNCED record was written,
    or when the log is the current one of a running bookie                      damage
    else                                                                        torn: nothing there was ever synced

A header that is wrong, and not all zeros, is damage in any case. The second kind is what a power failure leaves of the
last flush: pages of one unsynced flush persist in any order, so good records may follow it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NamedTuple

import xxhash

from magnetar.proto.errors import StorageFailed

from ..settings import MAX_RECORD_BYTES
from .records import (
    FOOTER_END_BYTES,
    LOG_HEADER_BYTES,
    RECORD,
    RECORD_HEADER_BYTES,
    STATE_ENTRY,
    SYNCED_ENTRY,
    Footer,
    Scanned,
    decode_footer,
    footer_bytes,
    footer_claims,
    header_fault,
)

# For `most_unreadable_pages` of a bookie that runs: a dying disk takes seconds for each.
MOST_UNREADABLE_PAGES = 256
_PAGE_BYTES = 4096

_WINDOW_BYTES = 256 << 10
_LEAST_WINDOW_BYTES = 16 << 10
# 300 records take about 0.5 ms of the loop.
_SLICE_RECORDS = 300
# What a record looks like, its checksum aside: an entry begins with the ids that its record's header has.
_LOOKS_LIKE_RECORD = re.compile(rb"(?=.{8}(?:(.{16}).{4}\0{4}\1|.{8}\xff{7}[\xfe\xff].{4}\0{4}))", re.DOTALL)
_LOOK_BYTES = 48
_NOT_ZERO = re.compile(rb"[^\0]")


class _Gap(NamedTuple):
    offset: int
    length: int
    ledger_id: int
    entry_id: int


class LogScan:
    """One walk. `wanted` until it is None; each time `take` those bytes, or `refuse` if the disk does not give them.

    `current`: `size` is how far the log is synced, and more is being appended. `start`: a `position` of an earlier walk of
    the same log; header and footer are looked at again, the records before it are not. After `most_unreadable_pages` the
    rest is one range without records.
    """

    def __init__(
        self,
        log_id: int,
        size: int,
        *,
        current: bool = False,
        start: int = 0,
        most_unreadable_pages: int | None = None,
    ) -> None:
        self.log_id = log_id
        self.size = size
        # What is wrong with the header, known once it was taken; "" if nothing is.
        self.header_fault = ""
        # Likewise. A footer that is found and not good is damaged.
        self.footer_found = False
        self.footer: Footer | None = None
        # Bytes of records, and of ranges without, that were looked through.
        self.walked = 0
        self.unreadable_pages = 0
        self._most_unreadable = most_unreadable_pages
        # Of a span that could not be read as a whole: the pages so far, and where the next one begins.
        self._pages: list[bytes] | None = None
        self._page_at = 0
        self._current = current
        self._start = max(start, LOG_HEADER_BYTES)
        # Where the records end, and the next one is expected.
        self._end = size
        self._at = 0
        self._want = LOG_HEADER_BYTES
        self._window = _LEAST_WINDOW_BYTES
        self._take: Callable[[bytes], list[Scanned]] = self._take_header
        # The range without records that we are in: its start, what it claims to be, and the byte to search from.
        self._gap_at = -1
        self._claims = (-1, -1)
        self._search_from = -1
        # Ranges of which a later record may show that they are damage.
        self._undecided: list[_Gap] = []
        # What the last bytes would be if they were a footer's.
        self._tail = (False, -1, -1)
        self._footer_damaged = False
        # Where a damaged footer begins, right behind good records: that range never held any. -1: there is none.
        self.footer_at = -1
        self._over = False

    @property
    def position(self) -> int:
        """Everything before was taken, and a record is expected here, or a range without records begins."""
        return self._gap_at if self._gap_at >= 0 else self._at

    def wanted(self) -> tuple[int, int] | None:
        """(offset, length) of the bytes to read next; None: the walk is over."""
        if self._over:
            return None
        end = min(self._at + self._want, self.size)
        if self._pages is None:
            return self._at, end - self._at
        return self._page_at, min(_PAGE_BYTES - self._page_at % _PAGE_BYTES, end - self._page_at)

    def take(self, data: bytes) -> list[Scanned]:
        """What `wanted` asked for; shorter only if the file was cut meanwhile."""
        span = self.wanted()
        assert span is not None, "the walk is over"
        data = data.ljust(span[1], b"\0")
        if self._pages is not None:
            self._pages.append(data)
            self._page_at += len(data)
            if self._page_at < min(self._at + self._want, self.size):
                return []
            data = b"".join(self._pages)
            self._pages = None
        return self._take(data)

    def refuse(self) -> list[Scanned]:
        """The disk does not give what `wanted` asked for."""
        if self._pages is None:
            self._pages, self._page_at = [], self._at
            return []
        self.unreadable_pages += 1
        if self._most_unreadable is not None and self.unreadable_pages > self._most_unreadable:
            return self._give_up()
        return self.take(b"")

    def _give_up(self) -> list[Scanned]:
        if self._gap_at < 0:
            self._gap_at, self._claims = self._at, (-1, -1)
        self._at = self._end
        return self._finish([])

    def _take_header(self, data: bytes) -> list[Scanned]:
        found: list[Scanned] = []
        self.header_fault = header_fault(data, self.log_id) if self.size else ""
        if self.header_fault:
            self._undecided.append(_Gap(0, min(LOG_HEADER_BYTES, self.size), -1, -1))
            # A header that was never written is all zeros; one that was written in part, by a bookie that was killed or had
            # no space for it, has nothing behind it.
            if self.size >= LOG_HEADER_BYTES and data.strip(b"\0"):
                self._decide(found)
        if self.size <= LOG_HEADER_BYTES:
            self._at = self._end = self.size
            return self._finish(found)
        if self._current:
            return self._begin_records(found)
        self._at = max(LOG_HEADER_BYTES, self.size - FOOTER_END_BYTES)
        self._want = FOOTER_END_BYTES
        self._take = self._take_footer
        return found

    def _take_footer(self, data: bytes) -> list[Scanned]:
        length = footer_bytes(data)
        if len(data) < length <= self.size - LOG_HEADER_BYTES:
            self._at = self.size - length
            self._want = length
            return []
        self.footer_found = 0 < length <= self.size
        self.footer = decode_footer(data, self.log_id, self.size) if length else None
        if self.footer is not None:
            self._end = self.footer.start
        else:
            self._tail = footer_claims(data, self.size)
        return self._begin_records([])

    def _begin_records(self, found: list[Scanned]) -> list[Scanned]:
        self._at = min(self._start, self._end)
        self._want = self._window
        self._take = self._take_records
        if self._sealed:
            self._decide(found)
        return self._finish(found) if self._at >= self._end else found

    @property
    def _sealed(self) -> bool:
        """Everything that is looked at was synced once."""
        return self._current or self.footer is not None or self._footer_damaged

    def _take_records(self, data: bytes) -> list[Scanned]:
        found: list[Scanned] = []
        start = self._at
        data = data[: self._end - start]
        view = memoryview(data)
        at, limit = 0, len(data)
        self._want = 0
        for _ in range(_SLICE_RECORDS):
            if self._search_from >= 0:
                looks = self._search(data, at)
                if looks < 0:
                    at = limit if start + limit == self._end else max(at, limit - _LOOK_BYTES + 1)
                    break
                at = looks
            step = self._record(found, data, view, at)
            at += step
            if not step or not 0 <= at < limit:  # other bytes are wanted
                break
        self._at = start + at
        self.walked += at
        if self._at >= self._end:
            return self._finish(found)
        self._window = max(_LEAST_WINDOW_BYTES, min(_WINDOW_BYTES, 2 * at))
        self._want = max(self._want, self._window)
        return found

    def _record(self, found: list[Scanned], data: bytes, view: memoryview, at: int) -> int:
        """Takes what is at `at` of the window; returns how many bytes to advance, 0 if a longer window must begin there."""
        offset, left = self._at + at, self._end - self._at - at
        length = -1
        if left >= RECORD_HEADER_BYTES:
            if len(data) - at < RECORD_HEADER_BYTES:
                self._want = RECORD_HEADER_BYTES
                return 0
            fields: tuple[int, int, int, int, int] = RECORD.unpack_from(data, at)
            checksum, ledger_id, entry_id, length, zero = fields
            after = at + RECORD_HEADER_BYTES + length
            plausible = not zero and length <= MAX_RECORD_BYTES and RECORD_HEADER_BYTES + length <= left
            if plausible and after > len(data):
                self._want = RECORD_HEADER_BYTES + length
                return 0
            if plausible and xxhash.xxh3_64_intdigest(view[at + 8 : after], self.log_id) == checksum:
                if self._gap_at >= 0:
                    self._close_gap(found, offset)
                if self._undecided:
                    self._judge_gaps(found, entry_id, offset)
                found.append(
                    Scanned(ledger_id, entry_id, offset, length, data[at + RECORD_HEADER_BYTES : after])
                )
                return after - at
            if self._gap_at < 0:
                self._claims = (ledger_id, entry_id)
                self._gap_at, self._search_from = offset, -1
                if plausible:
                    # Its own length is asked first: what an entry holds may look like a record.
                    return self._claimed(offset, RECORD_HEADER_BYTES + length, found)
        elif self._gap_at < 0:
            self._gap_at, self._claims = offset, (-1, -1)
        return self._go_on_searching(offset, left)

    def _claimed(self, offset: int, length: int, found: list[Scanned]) -> int:
        if offset + length == self._end:
            self._close_gap(found, self._end)
        return length

    def _go_on_searching(self, offset: int, left: int) -> int:
        """The next byte at which a record may begin, seen from `offset`. May lie before it."""
        if self._search_from < 0:
            self._search_from = self._gap_at + 1
        else:
            self._search_from = offset + 1
        if self._search_from > self._end - RECORD_HEADER_BYTES:
            return left
        return self._search_from - offset

    def _search(self, data: bytes, at: int) -> int:
        """Where in the window something looks like a record, from `at` on; -1: nowhere."""
        while (match := _LOOKS_LIKE_RECORD.search(data, at)) is not None:
            at = match.start()
            other = _NOT_ZERO.search(data, at)
            first = other.start() if other is not None else len(data)
            if first < at + _LOOK_BYTES:
                return at
            at = max(at + 1, first - _LOOK_BYTES + 1)  # zeros look like records, and there may be many
        return -1

    def _close_gap(self, found: list[Scanned], offset: int) -> None:
        gap = _Gap(self._gap_at, offset - self._gap_at, *self._claims)
        self._gap_at = self._search_from = -1
        self._undecided.append(gap)
        if self._sealed:
            self._decide(found)

    def _judge_gaps(self, found: list[Scanned], entry_id: int, offset: int) -> None:
        """A good record at `offset` may show that the ranges before it are damage."""
        # The header shares its sector with the first record: the disk has it, so it was written once.
        beside_header = offset == LOG_HEADER_BYTES
        if beside_header or entry_id == SYNCED_ENTRY:
            self._decide(found)

    def _decide(self, found: list[Scanned], *, torn: bool = False) -> None:
        found += [
            Scanned(gap.ledger_id, gap.entry_id, gap.offset, gap.length, None, torn)
            for gap in self._undecided
        ]
        self._undecided.clear()

    def _finish(self, found: list[Scanned]) -> list[Scanned]:
        if self._gap_at >= 0:
            is_footer, *starts = self._tail
            # Two of three say that a footer begins where the records end: it was there, and is damaged.
            self._footer_damaged = is_footer + starts.count(self._gap_at) >= 2
            if self._footer_damaged and self._gap_at in starts:
                self.footer_at = self._gap_at
            self._close_gap(found, self._end)
        self._decide(found, torn=not self._sealed)
        self._over = True
        return found


def scan_log(read: Callable[[int, int], bytes], scan: LogScan) -> Iterator[Scanned]:
    """Yields all that `scan` finds, SYNCED records as well. Blocks. What `read(offset, length)` refuses is StorageFailed."""
    while (span := scan.wanted()) is not None:
        try:
            data = read(*span)
        except StorageFailed:
            yield from scan.refuse()
        else:
            yield from scan.take(data)


async def scan_log_in_slices(
    read: Callable[[int, int], Awaitable[bytes]], scan: LogScan
) -> AsyncIterator[list[Scanned]]:
    """The same for a loop that has other work: one item for each read, which may be empty; 0.5 ms of the loop each."""
    while (span := scan.wanted()) is not None:
        try:
            data = await read(*span)
        except StorageFailed:
            yield scan.refuse()
        else:
            yield scan.take(data)


# The rules above depend on it.
assert STATE_ENTRY > SYNCED_ENTRY
