"""What waits in the client to be delivered again, against a model that has a row for each message."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.chunked_id import ChunkedMessageId
from magnetar.client.messages import ACKED, UNACKED, Message
from magnetar.client.topic import acks
from magnetar.client.topic.acks import NackTracker, UnackedTracker
from magnetar.proto.commands import AckRow
from magnetar.proto.ids import MessageId

DELIVERIES, MESSAGES = 3, 5
PLACE = st.tuples(st.integers(0, DELIVERIES - 1), st.integers(0, MESSAGES - 1))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hand out"), PLACE),
        st.tuples(st.just("ack"), PLACE),
        st.tuples(st.just("ack through"), PLACE),
        st.tuples(st.just("nack"), PLACE, st.integers(0, 30), st.booleans()),
        st.tuples(st.just("time"), st.integers(1, 12)),
        st.tuples(st.just("seek")),
    ),
    max_size=40,
)
TIMEOUT = 10.0


class OneDelivery:
    """What the trackers look at."""

    def __init__(self, entry: int) -> None:
        self.flags = bytearray([UNACKED]) * MESSAGES
        self.ledger, self.entry_id, self.base_index, self.partition = 5, entry, 100 * entry, -1
        self.first_id = MessageId(5, entry, 100 * entry)


def messages_of(rows: list[AckRow]) -> list[tuple[int, int]]:
    """As places; each row is a range of one delivery."""
    return [
        (entry, index - 100 * entry) for _, entry, first, last in rows for index in range(first, last + 1)
    ]


@given(STEPS)
def test_each_message_comes_when_it_is_due_and_once(steps: list[Any]) -> None:
    nacks, unacked, now = NackTracker(), UnackedTracker(TIMEOUT), 0.0
    deliveries: list[Any] = [OneDelivery(entry) for entry in range(DELIVERIES)]
    nacked: dict[tuple[int, int], tuple[float, bool]] = {}  # place: when it is due, whether it counts
    timeouts: dict[tuple[int, int], float] = {}  # handed out, and not given back since
    handed_out: dict[int, int] = {}  # delivery: how many
    acked: set[tuple[int, int]] = set()
    given_back: set[tuple[int, int]] = set()  # whoever has the next delivery of these decides
    through = (-1, -1)  # everything up to there is acknowledged
    current = 0
    for kind, *step in steps:
        match kind:
            case "hand out":  # in order, as a consumer does it: deliveries one after another
                entry, index = step[0]
                if entry >= current:
                    current = entry
                    unacked.handed_out(deliveries[entry], index + 1, now)
                    for seen in range(handed_out.get(entry, 0), index + 1):
                        if (entry, seen) > through:
                            timeouts[entry, seen] = now + TIMEOUT
                    handed_out[entry] = max(handed_out.get(entry, 0), index + 1)
            case "ack":
                entry, index = step[0]
                deliveries[entry].flags[index] = ACKED
                acked.add((entry, index))
            case "ack through":
                entry, index = step[0]
                through = max(through, step[0])
                unacked.acked_through(MessageId(5, entry, 100 * entry + index))
                for place in [place for place in timeouts if place <= step[0]]:
                    del timeouts[place]
            case "nack":
                place, delay, counted = step
                message = Message(b"", deliveries[place[0]], place[1])
                nacks.add(message, now + delay, counted=counted)
                if place not in given_back or place in acked:
                    nacked[place] = (now + delay, counted)
            case "time":
                now += step[0]
                late = [place for place, due in timeouts.items() if due <= now]
                expected = [place for place in late if place not in acked | given_back | nacked.keys()]
                assert sorted(messages_of(unacked.take_due(now, nacks))) == sorted(expected)
                given_back.update(expected)
                for place in late:
                    del timeouts[place]
                due = {place: counted for place, (due, counted) in nacked.items() if due <= now}
                seen_rows, unseen_rows = nacks.take_due(now)
                for rows, wanted in ((seen_rows, True), (unseen_rows, False)):
                    expected = [p for p, counted in due.items() if counted == wanted and p not in acked]
                    assert sorted(messages_of(rows)) == sorted(expected)
                    given_back.update(expected)
                for place in due:
                    del nacked[place]
            case "seek":
                nacks.clear()
                unacked.clear()
                nacked.clear()
                timeouts.clear()
                handed_out.clear()
                given_back.clear()
                deliveries = [OneDelivery(entry) for entry in range(DELIVERIES)]
                acked.clear()
                through = (-1, -1)
                current = 0
        assert bool(nacks) == bool(nacked)
        for place in [(entry, index) for entry in range(DELIVERIES) for index in range(MESSAGES)]:
            assert (MessageId(5, place[0], 100 * place[0] + place[1]) in nacks) == (place in nacked)
        if nacked:
            assert nacks.next_due <= min(due for due, _ in nacked.values())


def test_a_message_in_front_of_a_chunk_of_the_same_entry_has_a_row_of_its_own() -> None:
    """Regression: nacked at the same time, it was never asked for."""
    rows = [AckRow(5, 7, 0, 0), AckRow(5, 10, 1, 1)]
    chunked = ChunkedMessageId.of(MessageId(5, 7, 0), rows)
    found = acks.rows_of_ids([MessageId(5, 10, 0), chunked, MessageId(5, 10, 2)])
    assert messages_of(found) == [
        *messages_of(rows),
        *messages_of([AckRow(5, 10, 0, 0), AckRow(5, 10, 2, 2)]),
    ]


def test_a_full_tracker_gives_those_back_that_are_due_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acks, "MAX_PENDING_NACKS", 3)
    tracker, delivery = NackTracker(), OneDelivery(0)
    held: Any = delivery
    for index, due in enumerate((50.0, 10.0, 40.0, 20.0, 30.0)):
        tracker.add(Message(b"", held, index), due)
    assert tracker.overfull
    assert messages_of(tracker.take_due(0.0)[0]) == [(0, 1), (0, 3)]
    assert not tracker.overfull
