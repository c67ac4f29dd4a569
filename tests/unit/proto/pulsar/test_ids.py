"""Ids and ack sets of Pulsar's protocol."""

from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.ids import MAX_ENTRY_ID, MAX_MESSAGES_PER_ENTRY
from magnetar.proto.pulsar.ids import (
    ALONE,
    ack_set_bits,
    decode_ack_set,
    encode_ack_set,
    pack_entry,
    signed,
    unpack_entry,
    unsigned,
)
from magnetar.proto.ranges import RangeSet


@given(st.integers(0, MAX_ENTRY_ID), st.integers(0, MAX_MESSAGES_PER_ENTRY - 1))
def test_packed_entries_have_63_bits_and_come_back(entry: int, index: int) -> None:
    packed = pack_entry(entry, index)
    assert 0 <= packed < 1 << 63
    assert unpack_entry(packed) == unpack_entry(packed | ALONE) == (entry, index)


def test_64_bits_without_a_sign() -> None:
    assert signed((1 << 64) - 1) == -1
    assert unsigned(-1) == (1 << 64) - 1
    assert signed((1 << 63) - 1) == (1 << 63) - 1
    assert unpack_entry((1 << 64) - 1) == unpack_entry(-1) == (-1, MAX_MESSAGES_PER_ENTRY - 1)


@given(st.integers(1, 300), st.data())
def test_ack_sets_come_back_and_are_what_javas_bit_sets_are(count: int, data: st.DataObject) -> None:
    acknowledged = data.draw(st.sets(st.integers(0, count - 1)))
    ranges = RangeSet((one, one) for one in acknowledged)
    words = encode_ack_set(ranges, count)
    assert not words or words[-1]  # trailing words of zero are left out
    assert all(-(1 << 63) <= word < 1 << 63 for word in words)
    bits = ack_set_bits(words)
    assert {one for one in range(count) if not bits >> one & 1} == acknowledged
    assert decode_ack_set(words, count) == list(ranges)


def test_an_ack_set_of_a_hostile_client_is_as_long_as_a_batch_can_be() -> None:
    assert ack_set_bits([-1] * 100_000).bit_length() == 1 << 15
    assert decode_ack_set([], 10) == [(0, 9)]
    assert decode_ack_set([-1, -1], 10) == []
