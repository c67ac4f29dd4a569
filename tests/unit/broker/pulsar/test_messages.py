"""Which batches of a delivery are sent, and with what hidden; where batches end."""

from bisect import bisect_right
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.listeners.pulsar.borders import Borders, end_of_batch, start_of_batch
from magnetar.broker.listeners.pulsar.messages import shown
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.ranges import complement


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data())
def test_batches_are_shown_as_far_as_their_messages_are_not_hidden(
    counts: list[int], data: st.DataObject
) -> None:
    entry = Entry(
        encode_entry([b"x"] * len(counts), counts, [0] * len(counts), ["p"], first_index=0, append_time_ms=0)
    )
    first = data.draw(st.integers(0, len(counts) - 1))
    last = data.draw(st.integers(first + 1, len(counts)))
    ends = list(accumulate(counts, initial=0))
    messages = range(ends[first], ends[last])
    visible = sorted(data.draw(st.sets(st.sampled_from(messages), min_size=1)))
    hidden = complement([(one, one) for one in visible], messages[0], messages[-1])
    runs, partly = shown(entry, first, last, hidden)
    sent = [position for start, stop in runs for position in range(start, stop)]
    assert sent == sorted({bisect_right(ends, one) - 1 for one in visible})
    left = {
        position: [one for one in range(ends[position], ends[position + 1]) if one not in visible]
        for position in sent
    }
    assert {
        position: [one for a, b in ranges for one in range(a, b + 1)]
        for position, ranges in partly.items()
        if position in sent
    } == {position: missing for position, missing in left.items() if missing}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 80))
def test_borders(counts: list[int], index: int) -> None:
    borders = list(accumulate(counts))
    around = next(
        ((end - count, end) for count, end in zip(counts, borders) if index < end), (borders[-1], index + 1)
    )
    assert (start_of_batch(borders, index), end_of_batch(borders, index)) == around
    assert (start_of_batch((), index), end_of_batch((), index)) == (index, index + 1)


def test_cuts_are_added_to_what_is_known() -> None:
    borders = Borders()
    borders.remember((1, 0), [10, 20], [5])
    borders.remember((1, 0), [10, 20])
    borders.remember((1, 0), [10, 20], [15])
    assert list(borders[1, 0]) == [5, 10, 15, 20]
    borders.remember((1, 1), ())
    borders.drop_below((1, 1, 0))
    assert list(borders) == [(1, 1)]
