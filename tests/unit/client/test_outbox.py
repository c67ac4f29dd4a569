"""The outbox against a model of a broker, with and without deduplication.

Groups have gaps or none, are one batch or several, are confirmed in parts, by merged rows, or as stored before, are given
up, and are written again after a reconnect.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from magnetar.client.receipts import Group
from magnetar.client.topic.outbox import Outbox
from magnetar.proto.batch import EncodedBatches
from magnetar.proto.errors import MalformedFrame, StorageFailed
from magnetar.proto.ids import DUPLICATE_ID, MessageId

Row = tuple[int, int, int, int, int]


class OutboxAndBroker(RuleBasedStateMachine):
    """`log`: sequence ids by entry. `rows`: receipts of the current epoch that are on their way.

    `borders`: of each group, the numbers of the messages at which a batch ends. `refused`: of each, those refused for good.
    """

    @initialize(deduplicates=st.booleans())
    def begin(self, deduplicates: bool) -> None:
        self.outbox = Outbox()
        self.deduplicates = deduplicates
        self.log: list[list[int]] = []
        self.rows: deque[Row] = deque()
        self.last = -1
        self.next_id = 0
        self.borders: dict[Group, list[int]] = {}
        self.refused: dict[Group, list[int]] = {}
        self.now = 0.0

    @rule(gaps=st.lists(st.sampled_from([1, 1, 1, 2, 9]), min_size=1, max_size=6), batches=st.data())
    def close_group(self, gaps: list[int], batches: st.DataObject) -> None:
        ids = [self.next_id]
        for gap in gaps:
            ids.append(ids[-1] + gap)
        self.next_id = ids.pop()  # often without a gap
        group = Group(ids[0])
        group.message_count = len(ids)
        if ids[-1] - ids[0] >= len(ids):
            group.sequence_ids = ids
        group.bytes = 10 * len(ids)
        self.now += 1
        group.deadline = self.now + 10
        inner = range(1, len(ids))
        cuts = batches.draw(st.sampled_from([[], list(inner)]) | st.lists(st.sampled_from(ids), max_size=2))
        self.borders[group] = sorted({*(cut for cut in cuts if cut in inner), len(ids)})
        group.encoded = EncodedBatches([b""] * len(self.borders[group]), self.borders[group])
        self.refused[group] = []
        self.outbox.add(group)

    @precondition(lambda self: self.outbox.unsent)
    @rule(several=st.integers(1, 3))
    def write(self, several: int) -> None:
        """What is written in one turn comes into one entry."""
        entry: list[int] = []
        rows: list[Row] = []
        for _ in range(min(several, len(self.outbox.unsent))):
            group = self.outbox.next_unsent()
            start = group.confirmed
            ids = group.sequence_ids or range(
                group.first_sequence_id, group.first_sequence_id + group.message_count
            )
            for end in self.borders[group]:
                if end <= start:
                    continue
                assert self.borders[group][0] == end or start in (0, *self.borders[group])
                rows.append(self.store(list(ids[start:end]), entry))
                start = end
        if entry:
            self.log.append(entry)
        merged: list[Row] = []
        for row in rows:
            before = merged[-1] if merged else None
            if before and before[0] + before[1] == row[0] and before[2] == row[2]:
                merged[-1] = (before[0], before[1] + row[1], *before[2:])
            else:
                merged.append(row)
        self.rows += merged

    def store(self, ids: list[int], entry: list[int]) -> Row:
        if self.deduplicates:
            if ids[-1] <= self.last:
                return (ids[0], len(ids), *DUPLICATE_ID[:3])
            assert ids[0] > self.last
            self.last = ids[-1]
        row = (ids[0], len(ids), 7, len(self.log), len(entry))
        entry += ids
        return row

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(1, 4))
    def receive(self, count: int) -> None:
        self.outbox.confirm([self.rows.popleft() for _ in range(min(count, len(self.rows)))])

    @rule()
    def reconnect(self) -> None:
        self.rows.clear()
        self.outbox.rewind()

    @precondition(lambda self: self.outbox)
    @rule(count=st.integers(1, 3))
    def give_up(self, count: int) -> None:
        """The oldest groups reach their deadline."""
        for _ in range(count):
            if (group := self.outbox.first) is not None:
                self.outbox.expire(group.deadline, 10)

    @precondition(lambda self: self.outbox.in_flight)
    @rule(number=st.integers(0, 5), within=st.integers(0, 5))
    def refuse(self, number: int, within: int) -> None:
        """The broker stored nothing from a batch on, which it never will; then comes a new epoch."""
        groups = self.outbox.in_flight
        group = groups[number % len(groups)]
        wanted = min(group.first_sequence_id + within, group.last_sequence_id)
        begin, waits = group.confirmed, group.next_sequence_id < wanted
        end = next(border for border in self.borders[group] if border > begin)
        refused = self.outbox.refuse(wanted, StorageFailed("no"))
        assert refused == (None if waits else (group, end - begin))
        if not waits:
            self.refused[group] += range(begin, end)
        self.reconnect()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "outbox"):
            return
        self.outbox.check()
        for group in self.borders:
            for number in range(group.confirmed):
                if number not in self.refused[group]:
                    self.check_id(group, number)
                    continue
                with pytest.raises(StorageFailed):
                    group.message_id(number)

    def check_id(self, group: Group, number: int) -> None:
        found: MessageId = group.message_id(number)
        wanted = group.sequence_ids[number] if group.sequence_ids else group.first_sequence_id + number
        if found.is_duplicate:
            assert any(wanted in entry for entry in self.log)
        else:
            assert self.log[found.entry][found.index] == wanted

    def teardown(self) -> None:
        if not hasattr(self, "outbox"):
            return
        while self.outbox.unsent:
            self.write(3)
        while self.rows:
            self.receive(4)
        assert not self.outbox
        assert self.outbox.bytes == 0
        stored = [number for entry in self.log for number in entry]
        first = list(dict.fromkeys(stored))
        assert first == sorted(first), "first occurrences are in order"
        if self.deduplicates:
            assert stored == first, "nothing is stored twice"
        for group in self.borders:
            assert group.settled
            if group.confirmed == group.message_count:
                ids = group.stored_ids()
                assert [number for number, one in enumerate(ids) if one is None] == self.refused[group]
                assert {group.sequence_id(number) for number, one in enumerate(ids) if one} <= set(stored)
                known = [one for one in group.stored_ids() if one and not one.is_duplicate]
                assert all(one < other for one, other in pairwise(known))


TestOutbox = OutboxAndBroker.TestCase
TestOutbox.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_receipt_that_skips_a_message_is_no_receipt() -> None:
    outbox = Outbox()
    group = Group(5)
    group.message_count = 2
    group.sequence_ids = [5, 9]
    outbox.add(group)
    outbox.next_unsent()
    outbox.confirm([(5, 1, 7, 0, 0)])
    with pytest.raises(MalformedFrame, match="message 10, but 9 is the next"):
        outbox.confirm([(10, 1, 7, 0, 1)])


def test_a_row_may_begin_in_a_group_that_was_given_up() -> None:
    outbox = Outbox()
    groups = [Group(0), Group(3), Group(9)]
    for number, group in enumerate(groups):
        group.message_count = 3
        group.deadline = number
        outbox.add(group)
        outbox.next_unsent()
    groups[1].sequence_ids = [3, 4, 8]
    outbox.expire(0.0, 10)
    assert outbox.confirm([(0, 6, 7, 0, 0), (9, 3, 7, 0, 6)]) == 11, "the last one that is stored"
    assert groups[1].stored_ids() == [MessageId(7, 0, 3), MessageId(7, 0, 4), MessageId(7, 0, 5)]
    assert groups[0].error is not None
