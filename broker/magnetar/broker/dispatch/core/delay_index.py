"""The messages of a topic that wait for their delivery time: one index for all its subscriptions, without I/O.

A *row* is a run of messages of one entry with one delivery time. Rows come in the order of the log, and are looked for in
two ways:

    by position   blocks of some 4,096 rows of one ledger, in parallel arrays: first message, how many, when
    by time       buckets of references to rows: an hour wide, then a second, then 20 ms; as its time comes near, a bucket
                  is spread over narrower ones, in steps, and the narrowest is sorted when it is due
    far           rows that came together have no references until the hour of the first of them is near: they are one item
                  of a heap, so an index is read back in a third of the time

    row           time in ms    reference: block 3, row 7 of it
    5:120, 3..6   7_205_030     hours[2] --spread in hour 1--> seconds[7205] --spread in second 7204--> ticks[360251]

A message is *withheld* as long as it has a row. `take_due` releases rows in the order of their times: the time of a released
row is 0, a block whose rows are mostly released is written anew, and one without any goes. A row takes 20 bytes and its
reference 8, and no object. References to rows that were dropped stay behind; one counts only if its row is there with its
time.

Times are milliseconds since the epoch by the wall clock: nothing is released before that clock says so, whichever way it
jumps. Times that lie in the past are due at once.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby, repeat
from operator import floordiv

from magnetar.proto.compression import Compression, compress, decompress
from magnetar.proto.errors import DataDirectoryError, MalformedFrame
from magnetar.proto.message_rules import MAX_TIME_MS
from magnetar.proto.ranges import Range, RangeSet

from ...cursors.core.acks import INDEX_BITS, EntryKey

# A run of messages: ledger, number of the first one (`acks.number_of`), how many.
Run = tuple[int, int, int]
# Messages of one entry with a delivery time: first index, how many, when in ms since the epoch.
DelayedRun = tuple[int, int, int]

BLOCK_ROWS = 4_096  # of a block that takes no further entry; the rows of an entry are in one block
_SMALL_BLOCK_ROWS = 64  # of a block that is not worth being written anew
STEP = 1_024  # rows that one step of spreading or of a sweep looks at: a millisecond
FAR_ROWS = 64  # so many come together, at least, to be far
FAR_STEP = 256  # of these, since each may be the first one of its hour
PIECE_ROWS = 512  # that are stored at once, and the rest of an entry; and that one step of `apply` adds
# Widths of buckets in ms. What lies in the current bucket of a width, or in the next one, is in narrower ones.
WIDTHS = (3_600_000, 1_000, 20)
_LAST_OF_ENTRY = 1 << 31  # in the count of a row: its last message is the last one of the entry
_COUNT = _LAST_OF_ENTRY - 1
_NOWHERE = (-1, 0)  # before all rows
_PIECE = struct.Struct("<QI")  # ledger, rows
_PIECE_ROW_BYTES = 8 + 4 + 8
_INDEX_MASK = (1 << INDEX_BITS) - 1
# A reference: time within the hour, number of the block, row in the block. A block number that comes again harms nobody.
_ROW_BITS, _BLOCK_BITS = 17, 25
_TIME_SHIFT = _ROW_BITS + _BLOCK_BITS
_BLOCK_MASK, _ROW_MASK = (1 << _BLOCK_BITS) - 1, (1 << _ROW_BITS) - 1
assert WIDTHS[0] << _TIME_SHIFT < 1 << 64
assert BLOCK_ROWS + 65_535 <= _ROW_MASK  # what an entry can have more
assert MAX_TIME_MS < 1 << 63


def add_run(runs: list[DelayedRun], first: int, count: int, due_ms: int) -> None:
    """Messages behind those of the runs; with the same time, and right behind them, they are of the last run."""
    if runs:
        begin, before, last_due_ms = runs[-1]
        if last_due_ms == due_ms and begin + before == first:
            runs[-1] = begin, before + count, due_ms
            return
    runs.append((first, count, due_ms))


def _little(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _following(number: int, count: int) -> int:
    """The number of the message behind a row."""
    return ((number >> INDEX_BITS) + 1) << INDEX_BITS if count >= _LAST_OF_ENTRY else number + count


class _Block:
    """Rows of one ledger, in order; see the module docstring."""

    __slots__ = ("counts", "dense", "ids", "ledger", "messages", "number", "numbers", "pending", "times")

    def __init__(self, number: int, ledger: int) -> None:
        self.number = number
        self.ledger = ledger
        self.numbers = array("Q")  # of the first message of each row
        self.counts = array("I")  # messages, and _LAST_OF_ENTRY
        self.times = array("Q")  # 0: released
        self.ids: array[int] | None = None  # what references call the rows; None: their places
        self.pending = 0  # rows that are not released
        self.messages = 0  # of these
        self.dense = True  # whole entries, one after another

    @property
    def columns(self) -> tuple[tuple[str, array[int]], ...]:
        """With their type codes, as they are stored."""
        return ("Q", self.numbers), ("I", self.counts), ("Q", self.times)

    def at(self, row: int) -> int:
        """The place of the row that references call so; it may be another row's, or none."""
        return row if self.ids is None else bisect_left(self.ids, row)

    def add(self, numbers: Sequence[int], counts: Sequence[int], times: Sequence[int]) -> None:
        self.dense = self.dense and self._follow(numbers, counts)
        self.numbers.extend(numbers)
        self.counts.extend(counts)
        self.times.extend(times)
        self.pending += len(numbers)
        self.messages += sum(counts) - sum([count >= _LAST_OF_ENTRY for count in counts]) * _LAST_OF_ENTRY

    def _follow(self, numbers: Sequence[int], counts: Sequence[int]) -> bool:
        """True if these rows and those that are there are of whole entries, one after another."""
        following = _following(self.numbers[-1], self.counts[-1]) if self.numbers else numbers[0]
        if numbers[0] != following or not (self.numbers or not numbers[0] & _INDEX_MASK):
            return False
        if (
            numbers[0] >> INDEX_BITS == numbers[-1] >> INDEX_BITS
        ):  # of one entry: only the last one may have the mark
            return numbers[-1] - numbers[0] == sum(counts) - counts[-1]
        return all(
            _following(number, count) == following
            for number, count, following in zip(numbers, counts, numbers[1:])
            if number + count != following or count >= _LAST_OF_ENTRY
        )

    @property
    def withheld(self) -> bool:
        """True if all entries from the first to the last one are withheld as a whole."""
        return self.dense and self.pending == len(self.numbers) and self.counts[-1] >= _LAST_OF_ENTRY

    def cut(self, place: int) -> None:
        """Of a block none of whose rows is released: those from a place on are left out."""
        del self.numbers[place:], self.times[place:]
        self.pending = place
        self.messages -= sum([count & _COUNT for count in self.counts[place:]])
        del self.counts[place:]

    def shrink(self) -> None:
        """Released rows are left out."""
        left = [at for at, due_ms in enumerate(self.times) if due_ms]
        self.ids = array("I", left if self.ids is None else [self.ids[at] for at in left])
        self.numbers = array("Q", [self.numbers[at] for at in left])
        self.counts = array("I", [self.counts[at] for at in left])
        self.times = array("Q", [self.times[at] for at in left])
        self.dense = False


class DelayIndex:
    """See the module docstring. False if nothing is withheld."""

    __slots__ = ("_at", "_blocks", "_current", "_far", "_heaps", "_next_block", "_order", "_spreading", "_stale",
                 "_starts", "_through", "_wheels", "messages", "rows")  # fmt: skip

    def __init__(self) -> None:
        self.rows = 0  # that are not released
        self.messages = 0  # of these
        self._blocks: dict[int, _Block] = {}  # by number
        self._order: list[_Block] = []  # by position
        self._starts: list[tuple[int, int]] = []  # of each of `_order`: ledger, number of its first message
        self._next_block = 0
        # Of each width, by time // width: what lies beyond `_through`, the last bucket that is spread or is being spread.
        self._wheels: tuple[dict[int, array[int]], ...] = ({}, {}, {})
        self._heaps: tuple[list[int], ...] = ([], [], [])  # the keys of these
        self._through = [-1, -1]
        self._far: list[
            tuple[int, int, int, int]
        ] = []  # earliest time, number of the block, rows of it [begin, end)
        # By the place of their width in WIDTHS: a bucket, and what of it is still to be spread over narrower ones.
        self._spreading: dict[int, tuple[int, array[int]]] = {}
        # The narrowest bucket that is due, or was when it was taken: the start of its hour in ms, sorted references.
        self._current: tuple[int, list[int]] = (0, [])
        self._at = 0  # what of them was looked at
        self._stale = 0  # references without a row, at least

    def __bool__(self) -> bool:
        return self.rows > 0

    # --- rows come ---------------------------------------------------------------------------------------------------

    def add(self, key: EntryKey, runs: Sequence[DelayedRun], message_count: int) -> None:
        """Messages of an entry, as `add_run` made them. Times in the past are due at once."""
        base = key[1] << INDEX_BITS
        counts = [count for _, count, _ in runs]
        if runs[-1][0] + counts[-1] == message_count:
            counts[-1] |= _LAST_OF_ENTRY
        self._add(
            key[0], [base + first for first, _, _ in runs], counts, [due_ms or 1 for _, _, due_ms in runs]
        )

    def _add(self, ledger: int, numbers: Sequence[int], counts: Sequence[int], times: Sequence[int]) -> None:
        """Rows without others among them: numbers of the first messages, counts with their mark, times."""
        at = bisect_right(self._starts, (ledger, numbers[0])) if self._order else 0
        block = self._order[at - 1] if at else None
        if block is not None and block.ledger == ledger and block.numbers[-1] >= numbers[0]:
            # What was lost is made of the log again: the rows behind become a block of their own.
            place = bisect_left(block.numbers, numbers[0])
            rest = [column[place:] for column in (block.numbers, block.counts, block.times)]
            self.rows -= block.pending
            self.messages -= block.messages
            block.cut(place)
            self.rows += block.pending
            self.messages += block.messages
            self._new_block(at, ledger, rest[0][0])
            self._add_to(self._order[at], *rest)
        if (
            block is None
            or block.ledger != ledger
            or block.ids is not None
            or (
                len(block.numbers) >= BLOCK_ROWS
                and block.numbers[-1] >> INDEX_BITS != numbers[0] >> INDEX_BITS
            )
        ):
            block = self._new_block(at, ledger, numbers[0])
        self._add_to(block, numbers, counts, times)

    def _new_block(self, at: int, ledger: int, first: int) -> _Block:
        block = self._blocks[self._next_block] = _Block(self._next_block, ledger)
        self._next_block = (self._next_block + 1) & _BLOCK_MASK
        self._order.insert(at, block)
        self._starts.insert(at, (ledger, first))
        return block

    def _add_to(
        self, block: _Block, numbers: Sequence[int], counts: Sequence[int], times: Sequence[int]
    ) -> None:
        before, begin = block.messages, len(block.numbers)
        block.add(numbers, counts, times)
        self.rows += len(numbers)
        self.messages += block.messages - before
        if len(numbers) >= FAR_ROWS and (low := min(times)) // WIDTHS[0] > self._through[0]:
            heappush(self._far, (low, block.number, begin, begin + len(numbers)))
        else:
            reference = block.number << _ROW_BITS | begin
            self._schedule(times, range(reference, reference + len(numbers)))

    def _schedule_rows(self, block: _Block, begin: int, end: int) -> None:
        """Those that references call so, and that are there."""
        first = block.at(begin)
        ids = range(begin, end) if block.ids is None else block.ids[first : block.at(end)]
        rows = [(due_ms, row) for due_ms, row in zip(block.times[first:], ids) if due_ms]
        if rows:
            number = block.number << _ROW_BITS
            self._schedule([due_ms for due_ms, _ in rows], [number | row for _, row in rows])

    def _schedule(self, times: Sequence[int], references: Iterable[int]) -> None:
        """Into the buckets by time: at once if all are in the same, else 0.3 us each."""
        hour, low, high = WIDTHS[0], min(times), max(times)
        items = [due_ms % hour << _TIME_SHIFT | reference for due_ms, reference in zip(times, references)]
        level = self._level(low)
        width, wheel = WIDTHS[level], self._wheels[level]
        if level != self._level(high):
            for due_ms, item in zip(times, items):
                level = self._level(due_ms)
                self._bucket(level, due_ms // WIDTHS[level]).append(item)
        elif low // width == high // width:
            self._bucket(level, low // width).extend(items)
        else:
            for number, item in zip(map(floordiv, times, repeat(width)), items):
                try:
                    wheel[number].append(item)
                except KeyError:
                    self._bucket(level, number).append(item)

    def _level(self, due_ms: int) -> int:
        through = self._through
        if due_ms // WIDTHS[0] > through[0]:
            return 0
        return 1 if due_ms // WIDTHS[1] > through[1] else 2

    def _bucket(self, level: int, number: int) -> array[int]:
        wheel = self._wheels[level]
        bucket = wheel.get(number)
        if bucket is None:
            bucket = wheel[number] = array("Q")
            heappush(self._heaps[level], number)
        return bucket

    # --- time passes -------------------------------------------------------------------------------------------------

    @property
    def next_ms(self) -> int | None:
        """When `take_due` has something to do, at the latest. None: never, if nothing is added."""
        if not self.rows:
            return None
        hour_ms, current = self._current
        # Wide buckets are spread one bucket before their time.
        found = [(number - 1) * WIDTHS[level] for level, (number, _) in self._spreading.items()]
        found += [(low // WIDTHS[0] - 1) * WIDTHS[0] for low, *_ in self._far[:1]]
        found += [(heap[0] - (level < 2)) * WIDTHS[level] for level, heap in enumerate(self._heaps) if heap]
        if self._at < len(current):
            found.append(hour_ms + (current[self._at] >> _TIME_SHIFT))
        return max(min(found), 0)

    def take_due(self, now_ms: int) -> tuple[list[Run], bool]:
        """Releases rows whose time has come, in the order of their times; and whether there is more to do at once.

        A millisecond or two. What lies behind each other in the log and in time is one run.
        """
        found: list[Run] = []
        if not self.rows:
            self._forget_times()
            return found, False
        if self._far and self._far[0][0] // WIDTHS[0] <= now_ms // WIDTHS[0] + 1:
            low, number, begin, end = heappop(self._far)
            if (block := self._blocks.get(number)) is not None:
                step = min(begin + FAR_STEP, end)
                self._schedule_rows(block, begin, step)
                if step < end:
                    heappush(self._far, (low, number, step, end))
            return found, True
        level = self._to_spread(now_ms)
        if level is not None and self._spreading[level][0] * WIDTHS[level] <= now_ms:
            self._spread(level)
            return found, True
        left = STEP
        while left > 0:
            if (self._at >= len(self._current[1]) or self._overtaken()) and not self._next_current(now_ms):
                break
            taken = self._take_current(now_ms, left, found)
            if not taken:
                break
            left -= taken
        if level is not None:
            self._spread(level)
        return found, level is not None or left <= 0

    def _to_spread(self, now_ms: int) -> int | None:
        """The width whose bucket is to be spread next, if there is one whose time is near."""
        for level in (0, 1):
            heap, near = self._heaps[level], now_ms // WIDTHS[level] + 1
            if level not in self._spreading and heap and heap[0] <= near:
                number = heappop(heap)
                self._spreading[level] = number, self._wheels[level].pop(number)
                self._through[level] = max(self._through[level], number)
            elif not heap or heap[0] > near:
                self._through[level] = max(self._through[level], near)
        return min(
            self._spreading,
            key=lambda level: (self._spreading[level][0] * WIDTHS[level], level),
            default=None,
        )

    def _spread(self, level: int) -> None:
        """A step: references that have no row any more are left out."""
        number, bucket = self._spreading[level]
        start_ms = number * WIDTHS[level]
        hour_ms = start_ms - start_ms % WIDTHS[0]
        blocks, times, references = self._blocks, list[int](), list[int]()
        for item in bucket[-STEP:]:
            if item >> _ROW_BITS & _BLOCK_MASK in blocks:
                times.append(hour_ms + (item >> _TIME_SHIFT))
                references.append(item & ((1 << _TIME_SHIFT) - 1))
        del bucket[-STEP:]
        if not bucket:
            del self._spreading[level]
        if times:
            self._schedule(times, references)

    def _overtaken(self) -> bool:
        """Something was added since that belongs into the current bucket, or before it."""
        heap = self._heaps[2]
        hour_ms, current = self._current
        return bool(heap) and heap[0] * WIDTHS[2] <= hour_ms + (current[self._at] >> _TIME_SHIFT)

    def _next_current(self, now_ms: int) -> bool:
        """Sorts the next of the narrowest buckets, and what is left of the current one with it; False if none is due."""
        heap = self._heaps[2]
        if not heap or heap[0] * WIDTHS[2] > now_ms:
            return False
        hour_ms, current = self._current
        if left := current[self._at :]:
            self._bucket(2, (hour_ms + (left[0] >> _TIME_SHIFT)) // WIDTHS[2]).extend(left)
        number = heappop(heap)
        start_ms = number * WIDTHS[2]
        self._current, self._at = (start_ms - start_ms % WIDTHS[0], sorted(self._wheels[2].pop(number))), 0
        return True

    def _take_current(self, now_ms: int, most: int, found: list[Run]) -> int:
        """Releases due rows of the current bucket; how many were looked at, 0 if none is due."""
        hour_ms, current = self._current
        begin = self._at
        end = (
            bisect_right(current, (now_ms - hour_ms + 1 << _TIME_SHIFT) - 1, begin)
            if now_ms >= hour_ms
            else begin
        )
        end = min(end, begin + most)
        blocks = self._blocks
        run_ledger = run_first = run_end = -1
        for item in current[begin:end]:
            block = blocks.get(item >> _ROW_BITS & _BLOCK_MASK)
            if block is None:
                continue
            times, at = block.times, block.at(item & _ROW_MASK)
            if at >= len(times) or times[at] != hour_ms + (item >> _TIME_SHIFT):
                continue
            first, count = block.numbers[at], block.counts[at]
            times[at] = 0
            messages = count & _COUNT
            self.rows -= 1
            self.messages -= messages
            block.pending -= 1
            block.messages -= messages
            if 2 * block.pending < len(times):
                self._thin_out(block)
            if run_end != first or run_ledger != block.ledger:
                if run_end > 0:
                    found.append((run_ledger, run_first, run_end - run_first))
                run_ledger, run_first = block.ledger, first
            run_end = first + messages
        if run_end > 0:
            found.append((run_ledger, run_first, run_end - run_first))
        self._at = end
        return end - begin

    def _thin_out(self, block: _Block) -> None:
        """Of a block most of whose rows are released, the others are left; nothing, if there are none."""
        at = bisect_right(self._starts, (block.ledger, block.numbers[-1])) - 1
        if not block.pending:
            del self._blocks[block.number], self._order[at], self._starts[at]
        elif len(block.numbers) > _SMALL_BLOCK_ROWS:
            block.shrink()
            self._starts[at] = (block.ledger, block.numbers[0])

    # --- positions ---------------------------------------------------------------------------------------------------

    def _find(self, ledger: int, number: int) -> tuple[int, int]:
        """The place of the first row at a message or behind it: of its block, and in the block."""
        at = max(bisect_right(self._starts, (ledger, number)) - 1, 0)
        if at < len(self._order) and self._starts[at] < (ledger, number):
            block = self._order[at]
            place = bisect_left(block.numbers, number) if block.ledger == ledger else len(block.numbers)
            return (at, place) if place < len(block.numbers) else (at + 1, 0)
        return at, 0

    def pass_withheld(self, ledger: int, entry_id: int) -> int:
        """The first entry from `entry_id` on that is not withheld as a whole, if not the ledger's next row is further on."""
        number = entry_id << INDEX_BITS
        at, place = self._find(ledger, number)
        while at < len(self._order):
            block = self._order[at]
            numbers, counts, times = block.numbers, block.counts, block.times
            if block.ledger != ledger or numbers[place] != number:
                break
            if not place and block.withheld:
                number = ((numbers[-1] >> INDEX_BITS) + 1) << INDEX_BITS
                at += 1
                continue
            while place < len(numbers) and numbers[place] == number and times[place]:
                number = _following(number, counts[place])
                place += 1
            if place < len(numbers):
                break
            at, place = at + 1, 0
        return number >> INDEX_BITS

    def withheld(self, key: EntryKey) -> RangeSet:
        """Messages of an entry that are withheld, by their index."""
        found = RangeSet()
        ledger, base = key[0], key[1] << INDEX_BITS
        at, place = self._find(ledger, base)
        if at < len(self._order) and self._order[at].ledger == ledger:
            block = self._order[at]
            for row in range(place, bisect_left(block.numbers, base + (1 << INDEX_BITS))):
                if block.times[row]:
                    first = block.numbers[row] - base
                    found.add(first, first + (block.counts[row] & _COUNT) - 1)
        return found

    def visible(self, key: EntryKey, wanted: list[Range]) -> list[Range]:
        """What of sorted ranges of an entry is not withheld."""
        withheld = self.withheld(key)
        return list(RangeSet.of(wanted).without(withheld)) if withheld else wanted

    def messages_from(self, ledger: int, number: int) -> int:
        """How many messages at a position or behind it are withheld."""
        at, place = self._find(ledger, number)
        messages = sum(block.messages for block in self._order[at + (place > 0) :])
        if place:
            rows = zip(self._order[at].counts[place:], self._order[at].times[place:])
            messages += sum(count & _COUNT for count, due_ms in rows if due_ms)
        # The position may lie within the row before.
        before = self._order[at] if place else self._order[at - 1] if at else None
        if before is not None and before.ledger == ledger and before.times[place - 1]:
            end = before.numbers[place - 1] + (before.counts[place - 1] & _COUNT)
            messages += max(end - number, 0)
        return messages

    def drop_below(self, ledger: int) -> None:
        """Entries of lower ledgers do not exist any more."""
        end = bisect_left(self._starts, (ledger, 0))
        for block in self._order[:end]:
            del self._blocks[block.number]
            self.rows -= block.pending
            self.messages -= block.messages
            self._stale += block.pending
        del self._order[:end], self._starts[:end]
        if self._stale > self.rows + STEP:
            self._reschedule()

    def _reschedule(self) -> None:
        """References without a row are left out: of the others they are made anew, a block at a time."""
        self._forget_times()
        self._far = [
            (
                min(filter(None, one.times)),
                one.number,
                0,
                len(one.times) if one.ids is None else one.ids[-1] + 1,
            )
            for one in self._order
        ]
        heapify(self._far)

    def _forget_times(self) -> None:
        self._stale, self._at, self._current = 0, 0, (0, [])
        self._far.clear()
        self._spreading.clear()
        for wheel, heap in zip(self._wheels, self._heaps):
            wheel.clear()
            heap.clear()

    # --- stored ------------------------------------------------------------------------------------------------------

    @property
    def last(self) -> tuple[int, int]:
        """Ledger and number of the last row."""
        return (self._order[-1].ledger, self._order[-1].numbers[-1]) if self._order else _NOWHERE

    def pieces(self, after: tuple[int, int] = _NOWHERE) -> Iterator[bytes]:
        """Rows behind a place as they are when their piece is asked for, but none behind those that there are at the first.

        FORMATS.md draws them.
        """
        until = self.last
        while after < until:
            at, place = self._find(after[0], after[1] + 1)
            if at == len(self._order):
                return
            block = self._order[at]
            end = min(place + PIECE_ROWS, len(block.numbers))
            while (
                end < len(block.numbers)
                and block.numbers[end] >> INDEX_BITS == block.numbers[end - 1] >> INDEX_BITS
            ):
                end += 1  # an entry is there or not, as a whole
            after = block.ledger, block.numbers[end - 1]
            rows = [row for row in range(place, end) if block.times[row]]
            columns = [(code, [column[row] for row in rows]) for code, column in block.columns]
            if rows:
                data = b"".join([_little(array(code, column)) for code, column in columns])
                yield _PIECE.pack(block.ledger, len(rows)) + compress(Compression.ZSTD, data)

    def apply(self, piece: bytes, now_ms: int) -> Iterator[int]:
        """Adds rows of a piece that are not there and not due, in steps: how many each has. Raises DataDirectoryError."""
        try:
            ledger, rows = _PIECE.unpack_from(piece)
            data = decompress(Compression.ZSTD, memoryview(piece)[_PIECE.size :])
            if len(data) != rows * _PIECE_ROW_BYTES:
                raise MalformedFrame(f"{rows} rows cannot have {len(data)} bytes")
        except (struct.error, MalformedFrame) as error:
            raise DataDirectoryError(
                f"a piece of the index of delayed messages is damaged: {error}"
            ) from error
        columns = list[Sequence[int]]()
        for code, begin, end in (("Q", 0, 8), ("I", 8, 12), ("Q", 12, 20)):
            column = array(code, data[begin * rows : end * rows])
            columns.append(array(code, _little(column)))
        if rows and min(columns[2]) <= now_ms:
            left = [row for row, due_ms in enumerate(columns[2]) if due_ms > now_ms]
            columns = [[column[row] for row in left] for column in columns]
        numbers = columns[0]
        if numbers and (ledger, numbers[0]) > self.last:
            steps = [(begin, begin + PIECE_ROWS) for begin in range(0, len(numbers), PIECE_ROWS)]
        else:  # Something was lost, or comes twice: what is there is left out, an entry after another.
            steps = []
            for entry_id, part in groupby(range(len(numbers)), key=lambda row: numbers[row] >> INDEX_BITS):
                entry_rows = list(part)
                if not self.withheld((ledger, entry_id)):
                    steps.append((entry_rows[0], entry_rows[-1] + 1))
        for begin, end in steps:
            self._add(ledger, *[column[begin:end] for column in columns])
            yield min(end, len(numbers)) - begin

    # --- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        assert [block.number for block in self._order] == sorted(self._blocks, key=lambda one: self._key(one))
        assert self._starts == [(block.ledger, block.numbers[0]) for block in self._order]
        assert self.rows == sum(block.pending for block in self._order)
        assert self.messages == sum(block.messages for block in self._order)
        scheduled = self._scheduled()
        for block in self._order:
            assert 0 < block.pending == sum(map(bool, block.times))
            assert list(block.numbers) == sorted(block.numbers)
            ids = range(len(block.times)) if block.ids is None else block.ids
            for row, due_ms in zip(ids, block.times):
                assert not due_ms or due_ms in scheduled.get(block.number << _ROW_BITS | row, ()), "never due"
        for wheel, heap in zip(self._wheels, self._heaps):
            assert sorted(wheel) == sorted(heap)

    def _key(self, number: int) -> tuple[int, int]:
        return self._blocks[number].ledger, self._blocks[number].numbers[0]

    def _scheduled(self) -> dict[int, list[int]]:
        """The times at which each reference is looked at."""
        found: dict[int, list[int]] = {}
        hour_ms, current = self._current
        parts = [(hour_ms, current[self._at :])]
        buckets = [
            (level, number, one) for level, wheel in enumerate(self._wheels) for number, one in wheel.items()
        ]
        buckets += [(level, number, bucket) for level, (number, bucket) in self._spreading.items()]
        for level, number, bucket in buckets:
            start_ms = number * WIDTHS[level]
            parts.append((start_ms - start_ms % WIDTHS[0], bucket.tolist()))
        for _, number, begin, end in self._far:
            if block := self._blocks.get(number):
                ids = range(len(block.times)) if block.ids is None else block.ids
                for row, due_ms in zip(ids, block.times):
                    if begin <= row < end:
                        found.setdefault(number << _ROW_BITS | row, []).append(due_ms)
        for hour_ms, items in parts:
            for item in items:
                found.setdefault(item & ((1 << _TIME_SHIFT) - 1), []).append(hour_ms + (item >> _TIME_SHIFT))
        return found
