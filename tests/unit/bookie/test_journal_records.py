"""The bytes of journal records, and what a scan makes of good, torn and damaged files."""

import random

import pytest

from magnetar.bookie.journal.records import (
    GROUP_ALIGNMENT,
    RECORD_HEADER_BYTES,
    Gap,
    Record,
    RecordType,
    decode_begin,
    encode_begin,
    encode_record_header,
    holds_records,
    incarnation_of,
    probe_begin,
    scan_journal,
)
from magnetar.bookie.journal.recovery import GapVerdict, judge

INSTANCE = 0x0123456789ABCDEF


class JournalBytes:
    """Builds a file group by group, as a device would."""

    def __init__(self, sequence: int = 1, base: int = 0, size: int = 128 * 1024) -> None:
        self.data = bytearray(size)
        self.incarnation = incarnation_of(INSTANCE, sequence)
        self.offset = self.synced_to = base
        self.position = 0
        self.places: list[tuple[int, int]] = []  # (offset, position) of each record
        self.group((RecordType.BEGIN, encode_begin(INSTANCE, sequence)))

    def group(self, *records: tuple[int, bytes], synced: bool = True) -> None:
        for kind, payload in records:
            header = encode_record_header(self.incarnation, self.offset, self.synced_to, kind, payload)
            self.places.append((self.offset, self.position))
            self.data[self.position : self.position + len(header) + len(payload)] = header + payload
            self.position += len(header) + len(payload)
            self.offset += len(header) + len(payload)
        self.position += -self.position % GROUP_ALIGNMENT
        if synced:
            self.synced_to = self.offset

    def scan(self, base: int = 0) -> list[Record | Gap]:
        data = bytes(self.data)
        return list(scan_journal(lambda at, size: data[at : at + size], len(data), self.incarnation, base))

    def damage(self, position: int) -> None:
        self.data[position] ^= 0x10


def journal_of(groups: int, records: int = 3) -> JournalBytes:
    journal = JournalBytes()
    for group in range(groups):
        journal.group(*[(RecordType.ADD, b"%d-%d" % (group, number) * 40) for number in range(records)])
    return journal


def test_golden_record() -> None:
    header = encode_record_header(
        incarnation_of(INSTANCE, 7), 4096, 1024, RecordType.FENCE, b"\0" * 7 + b"\5"
    )
    assert header.hex() == GOLDEN_FENCE


def test_golden_begin() -> None:
    payload = encode_begin(INSTANCE, 7)
    assert payload.hex() == "4d41474a524e4c0a000000010123456789abcdef0000000000000007"
    assert decode_begin(payload, "f").sequence == 7


def test_a_whole_file_is_scanned_in_order_and_ends_with_a_gap() -> None:
    journal = journal_of(4)
    items = journal.scan()
    assert [item.offset for item in items[:-1]] == [offset for offset, _ in journal.places]
    assert items[-1] == Gap(journal.offset, items[-1].position, None, -1)


def test_a_record_larger_than_a_page_and_one_at_the_end_of_a_page() -> None:
    journal = JournalBytes()
    journal.group((RecordType.ADD, b"x" * 20_000))
    journal.group((RecordType.ADD, b"y" * (GROUP_ALIGNMENT - RECORD_HEADER_BYTES)))
    journal.group((RecordType.ADD, b"z"))
    assert [len(item.payload) for item in journal.scan() if isinstance(item, Record)][1:] == [20_000, 4056, 1]


def test_what_stands_in_the_padding_does_not_matter() -> None:
    journal = journal_of(3)
    journal.damage(GROUP_ALIGNMENT - 10)
    assert len([item for item in journal.scan() if isinstance(item, Gap)]) == 1


def test_records_of_an_earlier_life_of_the_file_are_free_space() -> None:
    old = journal_of(6)
    new = JournalBytes(sequence=2, base=5000)
    new.data[GROUP_ALIGNMENT:] = old.data[GROUP_ALIGNMENT:]
    items = new.scan(5000)
    assert [type(item) for item in items] == [Record, Gap]
    assert items[1].offset == new.offset
    assert items[1].resumes_at is None  # type: ignore[union-attr]


def test_a_gap_tells_where_records_go_on_and_how_far_they_knew_the_file_durable() -> None:
    journal = journal_of(4)
    bad_offset, bad_position = journal.places[4]  # first record of the second group
    journal.damage(bad_position + 20)
    gap = next(item for item in journal.scan() if isinstance(item, Gap))
    assert gap.offset == bad_offset
    assert gap.resumes_at == journal.places[5][0]
    assert gap.later_synced_to == journal.places[-3][0]


def test_every_single_flipped_bit_is_found() -> None:
    journal = journal_of(2, records=2)
    whole = [item for item in journal.scan() if isinstance(item, Record)]
    ends = [
        position + RECORD_HEADER_BYTES + len(r.payload) for (_, position), r in zip(journal.places, whole)
    ]
    rng = random.Random(1)
    for (_, start), end in zip(journal.places, ends):
        for _ in range(20):
            position = rng.randrange(start, end)
            journal.damage(position)
            found = [item for item in journal.scan() if isinstance(item, Record)]
            assert len(found) == len(whole) - 1
            assert all(record in whole for record in found)
            journal.damage(position)


def test_begin_is_probed_without_reading_the_file() -> None:
    journal = journal_of(1)
    data = bytes(journal.data)
    read = lambda at, size: data[at : at + size]  # noqa: E731
    assert probe_begin(read, len(data), journal.incarnation) is not None
    assert probe_begin(read, len(data), incarnation_of(INSTANCE, 9)) is None
    assert holds_records(read, len(data), journal.incarnation)
    assert not holds_records(read, len(data), incarnation_of(INSTANCE, 9))


def gap(offset: int = 100, resumes_at: int | None = None, later_synced_to: int = -1) -> Gap:
    return Gap(offset, 4096, resumes_at, later_synced_to)


@pytest.mark.parametrize(
    ("found", "mark", "later", "verdict"),
    [
        # The clean end, and a group of which nothing or only some pages arrived.
        (gap(), 100, None, GapVerdict.TORN_TAIL),
        (gap(), 40, None, GapVerdict.TORN_TAIL),
        (gap(resumes_at=200, later_synced_to=100), 40, None, GapVerdict.TORN_TAIL),
        (gap(resumes_at=200, later_synced_to=60), 40, None, GapVerdict.TORN_TAIL),
        # Something later knew it durable.
        (gap(resumes_at=200, later_synced_to=101), 40, None, GapVerdict.DAMAGE),
        # Below the mark.
        (gap(), 101, None, GapVerdict.DAMAGE),
        (gap(resumes_at=200, later_synced_to=60), 150, None, GapVerdict.DAMAGE),
        (gap(resumes_at=200, later_synced_to=180), 200, None, GapVerdict.DAMAGE_BELOW_MARK),
        (gap(resumes_at=200, later_synced_to=180), 900, None, GapVerdict.DAMAGE_BELOW_MARK),
        # A later file was begun: this one was synced before that.
        (gap(), 40, 100, GapVerdict.COMPLETE),
        # Or by a start that could not flush what it replayed, and took this for the end.
        (gap(resumes_at=200, later_synced_to=60), 40, 100, GapVerdict.COMPLETE),
        (gap(resumes_at=200, later_synced_to=101), 40, 100, GapVerdict.DAMAGE),
        (gap(), 40, 300, GapVerdict.DAMAGE),
        (gap(resumes_at=200, later_synced_to=60), 40, 300, GapVerdict.DAMAGE),
    ],
)
def test_rule_05_torn_tail_or_damage(found: Gap, mark: int, later: int | None, verdict: GapVerdict) -> None:
    assert judge(found, mark_offset=mark, later_begun=later is not None, later_base=later) is verdict


GOLDEN_FENCE = "457581dbaffa84f1d1d6df84d0d90157000000000000100000000000000004000000000800030000"
