"""Stripes: which entries of a range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.commands import ReadEntries, decode_command
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.stripe import EVERY_ENTRY, MAX_CYCLE, Stripe


@given(st.data())
def test_the_ids_of_a_stripe_are_those_that_it_holds(data: st.DataObject) -> None:
    cycle = data.draw(st.integers(1, MAX_CYCLE))
    stripe = Stripe(cycle, data.draw(st.integers(1, (1 << cycle) - 1)))
    first = data.draw(st.integers(0, 300) | st.integers(2**62, 2**62 + 300))
    last = first + data.draw(st.integers(-1, 300))
    most = data.draw(st.integers(1, 200))
    expected = [entry_id for entry_id in range(first, last + 1) if stripe.holds(entry_id)]
    assert list(stripe.ids(first, last, most)) == expected[:most]
    assert list(stripe.ids(first, last)) == expected
    assert len(stripe.ids(first, 2**63 - 1, most)) == most


@pytest.mark.parametrize("stripe", [(0, 1), (-1, 1), (65, 1), (3, 0), (3, 8), (3, -1), (1 << 40, 1)])
def test_what_is_no_stripe_is_refused(stripe: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument, match="no stripe"):
        Stripe(*stripe).check(0, 10)


def test_a_stripe_is_read_from_an_entry_of_it() -> None:
    Stripe(3, 0b110).check(4, 4)
    EVERY_ENTRY.check(0, 0)
    for first, last in ((3, 9), (4, 3)):
        with pytest.raises(InvalidArgument, match="no range"):
            Stripe(3, 0b110).check(first, last)


def test_older_peers_know_neither_field_and_do_without() -> None:
    now = ReadEntries(7, 1, 2, 3, 4, True, 5, 0b10110)
    assert decode_command(now.encode()) == now
    # As the first release wrote it.
    assert decode_command(b"\x97\x62\x07\x01\x02\x03\x04\xc3") == ReadEntries(7, 1, 2, 3, 4, True)
    every = decode_command(b"\x95\x62\x07\x01\x02\x03")
    assert isinstance(every, ReadEntries)
    assert Stripe(every.cycle, every.residues) == EVERY_ENTRY
