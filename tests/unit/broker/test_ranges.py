"""Range sets and acknowledgement state, against sets of numbers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.cursors.core.acks import AckState, Position
from magnetar.broker.cursors.core.range_blocks import LedgerRanges, RangeBlocks, RangesOfLedger
from magnetar.broker.cursors.core.redeliveries import DeliveredRanges, RedeliveryCounts
from magnetar.proto.ranges import RangeSet, complement, intersection, intersects
from support.dispatch_kit import read_back

small = st.integers(0, 40)
spans = st.tuples(small, small).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(st.tuples(st.booleans(), spans), max_size=30), spans)
def test_ranges_behave_like_sets(steps: list[tuple[bool, tuple[int, int]]], probe: tuple[int, int]) -> None:
    ranges, model = RangeSet(), set[int]()
    for adding, (first, last) in steps:
        touched = set(range(first, last + 1))
        if adding:
            assert ranges.add(first, last) == len(touched - model)
            model |= touched
        else:
            assert ranges.remove(first, last) == len(touched & model)
            model -= touched
        ranges.check()
    assert {n for first, last in ranges for n in range(first, last + 1)} == model
    assert ranges.members == len(model)
    first, last = probe
    wanted = set(range(first, last + 1))
    assert {n for a, b in ranges.within(first, last) for n in range(a, b + 1)} == wanted & model
    assert {n for a, b in ranges.gaps(first, last) for n in range(a, b + 1)} == wanted - model
    assert ranges.covers(first, last) == (wanted <= model)
    assert (ranges.end_of(first) is not None) == (first in model)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "add", "add", "below", "update"]), spans), max_size=30), spans
)
def test_blocks_of_ranges_behave_like_one(
    steps: list[tuple[str, tuple[int, int]]], probe: tuple[int, int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("magnetar.broker.cursors.core.range_blocks.BLOCK_RANGES", 2)
        blocks, model = RangeBlocks(), RangeSet()
        for what, (first, last) in steps:
            if what == "add":
                assert blocks.add(first, last) == model.add(first, last)
            elif what == "below":
                blocks.remove_below(first)
                model.remove(0, first - 1)
            else:
                starts = list(range(first, last + 1, 3))
                blocks.update(starts, [start + 1 for start in starts])
                for start in starts:
                    model.add(start, start + 1)
            blocks.check()
        assert list(blocks) == list(model)
        first, last = probe
        assert blocks.gaps(first, last) == model.gaps(first, last)
        assert blocks.end_of(first) == model.end_of(first)
        starts, ends = blocks.part(first, last)
        assert list(zip(starts, ends)) == [found for found in model if found[1] >= first][:last]


def disjoint(numbers: set[int]) -> tuple[list[int], list[int]]:
    """Ranges of one and two numbers, some of which touch."""
    firsts = sorted(number for number in numbers if number - 1 not in numbers or number % 3 == 0)
    lasts = [first + 1 if first + 1 in numbers and (first + 1) % 3 else first for first in firsts]
    return firsts, lasts


@given(st.lists(st.tuples(st.booleans(), st.sets(small, min_size=1)), max_size=12))
def test_many_ranges_at_once_are_as_one_after_the_other(steps: list[tuple[bool, set[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("magnetar.broker.cursors.core.range_blocks.BLOCK_RANGES", 2)
        patch.setattr("magnetar.proto.ranges.BULK_RANGES", 2)
        ranges, model = RangeSet(), set[int]()
        blocks, grown = LedgerRanges(), set[int]()
        delivered = DeliveredRanges()
        for adding, numbers in steps:
            firsts, lasts = disjoint(numbers)
            touched = {n for first, last in zip(firsts, lasts) for n in range(first, last + 1)}
            if adding:
                assert blocks.add_all(7, firsts, lasts) == len(touched - grown)
                grown |= touched
                assert list(blocks.by_ledger[7]) == list(RangeSet((n, n) for n in grown))
                blocks.check()
                if not touched & model:
                    delivered.add_all(firsts, lasts, 0)
                else:
                    for first, last in zip(firsts, lasts):
                        delivered.add(first, last, 1)
                assert ranges.add_all(firsts, lasts) == len(touched - model)
                model |= touched
            else:
                starts, ends = delivered.take_all(firsts, lasts)
                found = [n for first, last in zip(starts, ends) for n in range(first, last + 1)]
                assert sorted(found) == sorted(touched & model)
                if ranges.remove_if_there(firsts, lasts):
                    assert touched <= model
                else:
                    for first, last in zip(firsts, lasts):
                        ranges.remove(first, last)
                model -= touched
            ranges.check()
            assert ranges == RangeSet((n, n) for n in model)
            assert delivered.members == len(model)


def members(ranges: RangeSet) -> set[int]:
    """Its numbers."""
    ranges.check()
    return {number for first, last in ranges for number in range(first, last + 1)}


@given(st.sets(small), st.sets(small), small)
def test_what_two_sets_of_ranges_share(one: set[int], other: set[int], number: int) -> None:
    left, right = RangeSet((n, n) for n in one), RangeSet((n, n) for n in other)
    both = intersection(left, right)
    assert members(both) == one & other
    assert intersects(left, right) == bool(one & other)
    assert members(left.without(both)) == one - other
    low, high = left.split(number)
    assert members(low) == {n for n in one if n < number}
    assert members(high) == {n for n in one if n >= number}
    assert members(left) == one


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 11), min_size=1)), max_size=12))
def test_many_ranges_of_an_entry_are_acknowledged_at_once(steps: list[tuple[int, set[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("magnetar.proto.ranges.BULK_RANGES", 2)
        state, model = AckState(Ledgers(), (4, 0, 0)), AckState(Ledgers(), (4, 0, 0))
        for entry, numbers in steps:
            firsts, lasts = disjoint(numbers)
            added = [model.ack(4, entry, first, last, 10) for first, last in zip(firsts, lasts)]
            assert state.ack_all(4, entry, firsts, lasts, 10) == sum(added)
            assert state.mark_delete == model.mark_delete
            assert rows_of(state.acked) == rows_of(model.acked)
            state.check()


def rows_of(ranges: LedgerRanges) -> list[RangesOfLedger]:
    """In one piece."""
    (rows,) = ranges.pieces(1 << 30)
    return rows


@given(st.lists(st.tuples(st.integers(0, 2), spans), max_size=20), st.data())
def test_pieces_have_what_is_there_all_the_while(
    there: list[tuple[int, tuple[int, int]]], data: st.DataObject
) -> None:
    """While a snapshot is taken, ranges grow together, and those before the mark-delete position go."""
    ranges = LedgerRanges()
    for ledger, span in there:
        ranges.add(ledger, *span)
    before = {(ledger, number) for ledger, *found in rows_of(ranges) for first, last in zip(*found)
              for number in range(first, last + 1)}  # fmt: skip
    mark = (0, 0)
    taken: set[tuple[int, int]] = set()
    for rows in ranges.pieces(data.draw(st.integers(1, 3))):
        assert sum(len(starts) for _, starts, _ in rows) <= 3
        taken |= {(ledger, number) for ledger, starts, ends in rows for first, last in zip(starts, ends)
                  for number in range(first, last + 1)}  # fmt: skip
        ledger, (first, last) = data.draw(st.integers(0, 2)), data.draw(spans)
        ranges.add(ledger, first, last)
        mark = max(mark, (ledger, first))
        if data.draw(st.booleans()):
            ranges.remove_ledgers_below(mark[0])
            ranges.remove_below(*mark)
        ranges.check()
    assert {place for place in before if place >= mark} <= taken


def test_complement_of_nothing_is_everything() -> None:
    assert complement([], 3, 5) == [(3, 5)]
    assert complement([(3, 5)], 3, 5) == []


def test_a_delivered_message_is_owed_once() -> None:
    ranges = DeliveredRanges()
    ranges.add(0, 9, 0)
    ranges.add(4, 5, 1)
    assert ranges.members == 10
    assert sorted(ranges.take(3, 6)) == [(3, 3, 0), (4, 5, 1), (6, 6, 0)]
    assert ranges.lowest()[0] == 0
    ranges.take(0, 9)
    assert not ranges


class Ledgers:
    """Ledgers 1, 3 and 4 with three entries each; 4 is open."""

    def normalise(self, position: Position) -> Position:
        ledger, entry, _ = position
        if ledger in (1, 3) and entry < 3:
            return position
        if ledger < 1:
            return (1, 0, 0)
        if ledger < 3:
            return (3, 0, 0)
        return (4, 0, 0) if ledger == 3 else position


MESSAGES = 4  # in every entry
ALL = [(ledger, entry, index) for ledger in (1, 3, 4) for entry in range(3) for index in range(MESSAGES)]


@given(st.integers(0, 10_000))
def test_ack_state_behaves_like_a_set_of_messages(seed: int) -> None:
    rng = random.Random(seed)
    state, acked = AckState(Ledgers(), (1, 0, 0)), set[Position]()
    for _ in range(rng.randrange(40)):
        ledger, entry, index = rng.choice(ALL)
        before = state.mark_delete
        if rng.random() < 0.1:
            state.ack_through(ledger, entry, index, rng.choice((0, MESSAGES)))
            acked |= {message for message in ALL if message <= (ledger, entry, index)}
        else:
            last = rng.randrange(index, MESSAGES)
            added = state.ack(ledger, entry, index, last, MESSAGES)
            new = {(ledger, entry, number) for number in range(index, last + 1)}
            assert added == len(new - acked)
            acked |= new
        state.check()
        assert state.mark_delete >= before  # rule 26: it never goes back by itself
        if rng.random() < 0.2:
            stored = state
            state, _ = read_back(Ledgers(), stored, RedeliveryCounts(), rng.randrange(1, 4))
            assert state.mark_delete == stored.mark_delete
            assert rows_of(state.acked) == rows_of(stored.acked)
    for ledger, entry in {message[:2] for message in ALL}:
        missing = {
            (ledger, entry, n)
            for first, last in state.unacked(ledger, entry, 0, MESSAGES - 1)
            for n in range(first, last + 1)
        }
        assert missing == {message for message in ALL if message[:2] == (ledger, entry)} - acked
    # The mark-delete position is the first message that is missing, as far as counts are known.
    lost = [message for message in ALL if message not in acked]
    if lost:
        ledger, entry, index = state.mark_delete
        assert state.mark_delete <= lost[0]
        assert index in (0, MESSAGES) or (ledger, entry, index) == lost[0]


def test_messages_beyond_the_entry_are_cut_off() -> None:
    state = AckState(Ledgers(), (1, 0, 0))
    assert state.ack(1, 0, 0, 1000, MESSAGES) == MESSAGES
    assert state.mark_delete == (1, 1, 0)
    assert state.ack(1, 0, 0, 3, MESSAGES) == 0
