"""What a history says of time: how long clients stood still, and when a topic was served again. Pure.

A topic is *served again* after a moment when it confirms a message that was sent after it: a receipt of the old owner
that is still on its way is not taken for the new one's. Whoever takes a topic over begins a ledger, which tells such
topics from those that stayed where they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from support.cluster.history import AnyEvent, Confirmed, ProducerMade


class Confirmation(NamedTuple):
    """Of messages that were sent together."""

    at: float
    sent_at: float
    ledger: int
    messages: int


class Confirmations:
    """All of them, by topic and in the order of time."""

    def __init__(self, events: Iterable[AnyEvent]) -> None:
        self.by_topic: dict[str, list[Confirmation]] = {}
        topics: dict[str, str] = {}
        for event in events:
            if isinstance(event, ProducerMade):
                topics[event.producer] = event.topic
                self.by_topic.setdefault(event.topic, [])
            elif isinstance(event, Confirmed):
                row = Confirmation(event.at, event.sent_at, event.positions[-1][0], len(event.positions))
                self.by_topic[topics[event.producer]].append(row)
        for rows in self.by_topic.values():
            rows.sort()

    def rate(self, start: float, end: float) -> float:
        """Confirmed messages a second."""
        found = sum(row.messages for rows in self.by_topic.values() for row in rows if start <= row.at < end)
        return found / (end - start)

    def slowest_s(self, start: float, end: float) -> float:
        """The longest that a message waited for its receipt, of those that waited at some moment from `start` to `end`."""
        return max(
            (
                row.at - row.sent_at
                for rows in self.by_topic.values()
                for row in rows
                if row.at >= start and row.sent_at <= end
            ),
            default=0.0,
        )

    def stall_s(self, start: float, end: float) -> float:
        """The longest time from `start` to `end` in which a topic confirmed nothing."""
        longest = 0.0
        for rows in self.by_topic.values():
            times = [start, *(row.at for row in rows if start <= row.at <= end), end]
            longest = max(longest, *(after - before for before, after in pairwise(times)))
        return longest

    def changed_ledger(self, since: float) -> int:
        """Topics that began another ledger after that moment: their owner failed to write to the one before, or changed."""
        found = 0
        for rows in self.by_topic.values():
            before = max((row.ledger for row in rows if row.at < since), default=None)
            found += before is not None and rows[-1].ledger > before
        return found

    def served_again_s(self, since: float) -> list[float]:
        """For each topic that got a new owner, how long after `since` it was served again; inf: never."""
        found: list[float] = []
        for rows in self.by_topic.values():
            before = [row.ledger for row in rows if row.at < since]
            after = [row for row in rows if row.sent_at >= since]
            if before and not after:
                found.append(float("inf"))
            elif before and after[0].ledger > max(before):
                found.append(after[0].at - since)
        return found

    def handed_over_s(self, start: float, end: float) -> list[float]:
        """For each topic that got a new owner from `start` to `end`, the time between the confirmations of both.

        What passes between two messages is part of it: a message may have come at any moment.
        """
        found: list[float] = []
        for rows in self.by_topic.values():
            newest = max((row.ledger for row in rows if row.at < start), default=None)
            changed = next((n for n, row in enumerate(rows) if newest is not None and row.ledger > newest), 0)
            if changed and rows[changed].at < end:
                found.append(rows[changed].at - max(start, rows[changed - 1].at))
        return found


def quantile(values: Sequence[float], share: float) -> float:
    """Of so few values that 0.99 may be the highest; 0 without any."""
    found = sorted(values)
    return found[min(len(found) - 1, int(len(found) * share))] if found else 0.0
