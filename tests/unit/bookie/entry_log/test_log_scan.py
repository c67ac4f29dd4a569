"""The walk through an entry log: every damaged byte is noticed, nothing else is lost, a torn tail is told from damage."""

import asyncio
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.bookie.entry_log.records import (
    LOG_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    STATE_ENTRY,
    SYNCED_ENTRY,
    Scanned,
    encode_footer,
    encode_log_header,
    encode_record_header,
)
from magnetar.bookie.entry_log.scan import LogScan, scan_log, scan_log_in_slices
from magnetar.proto.errors import StorageFailed
from support.bookie_kit import entry

LOG = 7


class Log:
    """A log in memory."""

    def __init__(self) -> None:
        self.data = encode_log_header(LOG)
        self.records: list[Scanned] = []
        self.ledgers: dict[int, int] = {}

    def record(self, ledger_id: int, entry_id: int, data: bytes) -> None:
        self.records.append(Scanned(ledger_id, entry_id, len(self.data), len(data), data))
        self.data += encode_record_header(LOG, ledger_id, entry_id, data) + data
        if entry_id != SYNCED_ENTRY:
            size = RECORD_HEADER_BYTES + len(data)
            self.ledgers[ledger_id] = self.ledgers.get(ledger_id, 0) + size

    def entry(self, ledger_id: int, entry_id: int, size: int = 20) -> None:
        self.record(ledger_id, entry_id, entry(ledger_id, entry_id, bytes(range(256)) * (size // 256 + 1)))

    def synced(self) -> None:
        self.record(0, SYNCED_ENTRY, b"")

    def footer(self) -> None:
        self.data += encode_footer(LOG, self.ledgers, len(self.data))


def scan(data: bytes) -> list[Scanned]:
    return list(scan_log(lambda at, length: data[at : at + length], LogScan(LOG, len(data))))


def some_log(*, footer: bool, markers: bool = True) -> Log:
    log = Log()
    for flush in range(2):
        for number in range(3):
            log.entry(1 + number % 2, 10 * flush + number, 300 * number)
        log.record(3, STATE_ENTRY, b"\x01" + b"state" * 6)
        if markers:
            log.synced()
    if footer:
        log.footer()
    return log


@pytest.mark.parametrize("footer", [True, False])
@pytest.mark.parametrize("markers", [True, False])
def test_a_good_log_is_read_whole(markers: bool, footer: bool) -> None:
    log = some_log(footer=footer, markers=markers)
    assert scan(log.data) == log.records


def test_an_empty_log_has_nothing_and_is_not_damaged() -> None:
    assert scan(b"") == []
    assert scan(encode_log_header(LOG)) == []
    empty = Log()
    empty.footer()
    assert scan(empty.data) == []


@pytest.mark.parametrize(
    "log",
    [some_log(footer=True), some_log(footer=True, markers=False), some_log(footer=False)],
    ids=["closed", "closed without markers", "not closed"],
)
def test_rule_08_a_bit_in_every_byte_is_found_and_costs_one_record(log: Log) -> None:
    rng = random.Random(1)
    for position in range(len(log.data)):
        data = bytearray(log.data)
        data[position] ^= 1 << rng.randrange(8)
        found = scan(bytes(data))
        bad = [one for one in found if one.data is None]
        good = [one for one in found if one.data is not None]
        assert len(bad) == 1, position
        assert not bad[0].torn or position >= log.records[-1].offset
        assert bad[0].offset <= position < bad[0].offset + bad[0].length
        lost = [one for one in log.records if one not in good]
        assert good == [one for one in log.records if one not in lost]
        if position >= LOG_HEADER_BYTES and position < log.records[-1].offset:
            assert [one.offset for one in lost] == [bad[0].offset]
            assert bad[0].length == RECORD_HEADER_BYTES + lost[0].length
            in_ids = 8 <= position - bad[0].offset < 24
            assert in_ids or bad[0][:2] == lost[0][:2]


def test_what_was_not_synced_is_torn_even_with_good_records_behind_it() -> None:
    log = some_log(footer=False)
    after = len(log.data)
    for number in range(4):
        log.entry(5, number, 600)
    second = log.records[-3]
    torn = log.data[: second.offset] + bytes(second.length + RECORD_HEADER_BYTES)
    torn += log.data[second.offset + second.length + RECORD_HEADER_BYTES :]
    found = scan(torn)
    assert [one for one in found if one.data is None] == [
        Scanned(0, 0, second.offset, second.length + RECORD_HEADER_BYTES, None, True)
    ]
    assert [one for one in found if one.data is not None] == [r for r in log.records if r != second]
    # The same with a later SYNCED record, or a footer, is damage.
    log.synced()
    assert not next(one for one in scan(torn + log.data[len(torn) :]) if one.data is None).torn
    closed = Log()
    closed.data, closed.ledgers = log.data, log.ledgers
    closed.footer()
    assert not next(one for one in scan(torn + closed.data[len(torn) :]) if one.data is None).torn
    # A tail that is cut short.
    cuts = 0
    for cut in range(after + 1, len(log.data) - 40, 97):
        for bad in [one for one in scan(log.data[:cut]) if one.data is None]:
            assert bad.torn
            assert bad.offset + bad.length == cut
            cuts += 1
    assert cuts > 10


@pytest.mark.parametrize("size", [1, 15, LOG_HEADER_BYTES - 1])
def test_a_log_whose_header_was_written_in_part_is_no_damage(size: int) -> None:
    """Its bookie was killed, or had no space for more: nothing was ever stored in it."""
    assert [one.torn for one in scan(Log().data[:size])] == [True]


def test_a_record_within_an_entry_is_not_taken_for_one() -> None:
    """What is inside a damaged entry is not believed, as long as its length leads on."""
    log = Log()
    forged = entry(99, 99, b"forged")
    log.entry(1, 0)
    inner = encode_record_header(LOG, 99, 99, forged) + forged
    log.record(1, 1, entry(1, 1, inner))
    log.entry(1, 2)
    log.footer()
    data = bytearray(log.data)
    data[log.records[1].offset + 45] ^= 1
    assert [(one.ledger_id, one.entry_id, one.data is None) for one in scan(bytes(data))] == [
        (1, 0, False),
        (1, 1, True),
        (1, 2, False),
    ]


def test_a_large_hole_of_zeros_or_noise_is_passed_quickly() -> None:
    for filler in (bytes(3_000_000), random.Random(3).randbytes(300_000), b"\0\0\0\0\1\2\3\4" * 40_000):
        log = Log()
        for number in range(5):
            log.entry(1, number, 5000)
        log.footer()
        first, last = log.records[1], log.records[3]
        data = log.data[: first.offset] + filler + log.data[last.offset :]
        walk = LogScan(LOG, len(data))
        steps = 0
        found: list[Scanned] = []
        while (span := walk.wanted()) is not None:
            steps += 1
            assert span[1] <= 6 << 20
            found += walk.take(data[span[0] : span[0] + span[1]])
        good = [one.entry_id for one in found if one.data is not None]
        assert good == [0, 3, 4]
        assert steps < len(filler) / 1000


PAGE = 4096


@pytest.mark.parametrize("page", range(5))
async def test_an_unreadable_page_costs_the_records_in_it_alone(page: int) -> None:
    log = Log()
    for number in range(40):
        log.entry(1, number, 500)
    log.footer()
    bad = range(page * PAGE, (page + 1) * PAGE)

    def read(offset: int, length: int) -> bytes:
        if offset < bad.stop and offset + length > bad.start:
            raise StorageFailed("the disk refuses it")
        return log.data[offset : offset + length]

    async def read_later(offset: int, length: int) -> bytes:
        await asyncio.sleep(0)
        return read(offset, length)

    walk = LogScan(LOG, len(log.data))
    found = list(scan_log(read, walk))
    untouched = [
        one
        for one in log.records
        if one.offset >= bad.stop or one.offset + RECORD_HEADER_BYTES + one.length <= bad.start
    ]
    assert untouched
    assert [one for one in found if one.data is not None] == untouched
    assert all(not one.torn for one in found)
    assert bool(walk.header_fault) == (page == 0)
    assert walk.unreadable_pages == 2 if page == 0 else walk.unreadable_pages >= 1
    slices = scan_log_in_slices(read_later, LogScan(LOG, len(log.data)))
    assert [one async for some in slices for one in some] == found


def test_a_log_with_too_many_unreadable_pages_is_given_up() -> None:
    log = Log()
    for number in range(40):
        log.entry(1, number, 500)
    log.footer()
    asked = 0

    def read(offset: int, length: int) -> bytes:
        nonlocal asked
        if offset < LOG_HEADER_BYTES or offset >= len(log.data) - 100:
            return log.data[offset : offset + length]
        asked += 1
        raise StorageFailed("the disk refuses it")

    (bad,) = scan_log(read, LogScan(LOG, len(log.data), most_unreadable_pages=2))
    assert (bad.offset, bad.data, bad.torn) == (LOG_HEADER_BYTES, None, False)
    assert bad.offset + bad.length == log.records[-1].offset + RECORD_HEADER_BYTES + log.records[-1].length
    assert asked == 4


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3000)), max_size=12),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 700), st.booleans()), max_size=4),
    st.booleans(),
)
def test_whatever_is_overwritten_no_wrong_record_comes_out(
    records: list[tuple[int, int]], holes: list[tuple[float, int, bool]], footer: bool
) -> None:
    log = Log()
    for number, (ledger_id, size) in enumerate(records):
        log.entry(ledger_id, number, size)
        if number % 4 == 3:
            log.synced()
    if footer:
        log.footer()
    data = bytearray(log.data)
    touched: list[tuple[int, int]] = []
    for where, length, zeros in holes:
        start = int(where * len(data))
        length = min(length, len(data) - start)
        data[start : start + length] = bytes(length) if zeros else random.Random(start).randbytes(length)
        touched.append((start, start + length))
    found = scan(bytes(data))
    good = [one for one in found if one.data is not None]
    assert all(one in log.records for one in good)
    # A record that nobody touched is found.
    for one in log.records:
        end = one.offset + RECORD_HEADER_BYTES + one.length
        if all(b <= one.offset or a >= end for a, b in touched):
            assert one in good
    # Every byte is in a record, in a range without one, in the header or in the footer.
    spans = sorted(
        (one.offset, one.offset + one.length + (RECORD_HEADER_BYTES if one.data is not None else 0))
        for one in found
    )
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
