"""Entries and slices of them."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.batch import decode_batch, encode_batch
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.errors import EntryDamaged, MagnetarError, MalformedFrame
from magnetar.proto.ledger_entry import (
    LEDGER_ENTRY_HEADER_BYTES,
    encode_ledger_entry,
    ledger_entry_is_intact,
    verify_ledger_entry,
)


def make(counts: list[int]) -> tuple[list[bytes], bytes]:
    batches = [
        encode_batch([b"%d" % (i + start) for i in range(count)], sequence_id=start, publish_time_ms=0)
        for count, start in zip(counts, [sum(counts[:n]) for n in range(len(counts))], strict=True)
    ]
    producers = [n % 2 for n in range(len(counts))]
    return batches, encode_entry(batches, counts, producers, ["p", "q"], first_index=100, append_time_ms=7)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.data())
def test_slices_of_slices_keep_index_and_bytes(counts: list[int], data: st.DataObject) -> None:
    batches, stored = make(counts)
    entry = Entry(b"prefix" + stored, offset=6)
    first, last = 0, len(batches)
    for _ in range(2):
        a = data.draw(st.integers(0, entry.batch_count - 1))
        b = data.draw(st.integers(a + 1, entry.batch_count))
        entry = Entry(b"".join(entry.slice(a, b)))
        first, last = first + a, first + b
    assert [bytes(entry.batch(n)) for n in range(entry.batch_count)] == batches[first:last]
    assert entry.base_index == sum(counts[:first])
    assert entry.message_count == sum(counts[first:last])
    assert (entry.first_index, entry.append_time_ms, entry.producer_names) == (100, 7, ["p", "q"])
    assert list(entry.producers) == [n % 2 for n in range(first, last)]
    for position in range(entry.batch_count):
        start = entry.batch_start_index(position)
        assert decode_batch(entry.batch(position)).header.sequence_id == start
        assert entry.batch_of(start) == position
        assert entry.batch_of(entry.end_indexes[position] - 1) == position
    assert entry.batch_of(entry.end_indexes[-1]) == entry.batch_count


def test_a_table_that_contradicts_the_length_is_refused() -> None:
    _, stored = make([1, 2, 3])
    for damaged in (stored[:-1], stored + b"x", stored[:30], b"\x02" + stored[1:], b""):
        with pytest.raises(MalformedFrame):
            Entry(damaged)


def test_damaged_entries_raise_nothing_but_our_errors() -> None:
    rng = random.Random(2)
    _, stored = make([1, 2, 3])
    for _ in range(3000):
        data = bytearray(stored)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(MagnetarError):
            entry = Entry(bytes(data))
            assert entry.producer_names is not None
            for position in range(entry.batch_count):
                decode_batch(entry.batch(position))


@pytest.mark.parametrize("size", [0, 1, 4056, 4057, 70_000])  # around the size above which a hasher is used
def test_rule_20_an_entry_of_any_size_is_intact_until_a_byte_changes(size: int) -> None:
    data = encode_ledger_entry(3, 4, 2, 500, random.Random(size).randbytes(size))
    assert ledger_entry_is_intact(data)
    assert verify_ledger_entry(data) == (3, 4, 2, 500)
    for place in {0, 31, 32, 39, len(data) // 2, len(data) - 1}:
        damaged = bytearray(data)
        damaged[place] ^= 1
        assert not ledger_entry_is_intact(bytes(damaged))
    assert not ledger_entry_is_intact(data[:39])


def test_rule_20_digest_covers_ledger_entry_lac_and_length() -> None:
    data = encode_ledger_entry(3, 4, 2, 500, b"payload")
    assert verify_ledger_entry(data) == (3, 4, 2, 500)
    assert data[LEDGER_ENTRY_HEADER_BYTES:] == b"payload"
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EntryDamaged):
            verify_ledger_entry(bytes(damaged))
    with pytest.raises(EntryDamaged):
        verify_ledger_entry(b"short")
