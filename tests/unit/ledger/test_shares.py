"""Who is asked for which entries: every entry once, from its write set, from few bookies."""

from hypothesis import given
from hypothesis import strategies as st

from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.shares import preferences, shares

SHAPES = st.integers(1, 9).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e)))


@given(SHAPES, st.data())
def test_shares_have_every_entry_once_from_a_position_that_has_it(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    size, write_quorum = shape
    striping = Striping(size, write_quorum, 1)
    bits = st.integers(0, (1 << size) - 1)
    wanted, suspected = data.draw(bits), data.draw(bits)
    excluded = [data.draw(bits) for _ in range(size)]
    found = shares(striping, wanted, data.draw(st.integers(0, size - 1)), excluded, suspected)
    assert len(dict(found)) == len(found), "one request for each bookie"
    for residue in range(size):
        usable = striping.masks[residue] & ~excluded[residue]
        having = [position for position, residues in found if residues >> residue & 1]
        assert len(having) == (1 if wanted >> residue & 1 and usable else 0)
        for position in having:
            assert usable >> position & 1
            assert not suspected >> position & 1 or not usable & ~suspected, "only where nobody else is left"


@given(SHAPES, st.data())
def test_well_bookies_are_as_few_as_can_be(shape: tuple[int, int], data: st.DataObject) -> None:
    size, write_quorum = shape
    striping = Striping(size, write_quorum, 1)
    found = shares(striping, (1 << size) - 1, data.draw(st.integers(0, size - 1)), [0] * size, 0)
    assert len(found) <= -(-size // write_quorum) + (size % write_quorum > 0)


@given(SHAPES, st.data())
def test_a_recovery_asks_whom_it_trusts_first_and_everybody_where_it_trusts_nobody(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    size, write_quorum = shape
    striping = Striping(size, write_quorum, 1)
    distrusted = data.draw(st.integers(0, (1 << size) - 1))
    rows = preferences(striping, data.draw(st.integers(0, size - 1)), distrusted)
    for entry_id in range(3 * size):
        row, write_set = rows[entry_id % len(rows)], striping.write_set(entry_id)
        trusted = [position for position in write_set if not distrusted >> position & 1]
        if trusted:
            assert len(row) == 1
            assert row[0] in trusted
        else:
            assert sorted(row) == sorted(write_set)
