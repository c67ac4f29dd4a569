"""Shared: consumers take turns, and what is large is shared out among them.

A batch is delivered whole as long as nobody else waits for something to do: who gets a part of it gets all its bytes, with
the messages of others hidden. While consumers are idle, a batch of 60 jobs is 20 for each of three of them; and who grants
fewer than MIN_CHUNK permits, as workers do that want one job at a time, gets no more than that.

Those of a higher priority (a lower number) come first: the others get something only while none of them has permits.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import ClassVar

from magnetar.proto.entry import Entry
from magnetar.proto.ranges import Range, RangeSet, first_members

from ....cursors.core.acks import EntryKey
from ..consumer import Consumer
from .protocol import Mixed, Older, Selector, SharedOut

# An entry is shared out in chunks of at least this many messages: smaller frames cost more than they balance.
MIN_CHUNK = 64
MAX_SHARES = 32  # of a batch: so many idle consumers are looked for


class SharedSelector(Selector):
    """See `Selector`.

    The queue of a priority holds every consumer of it that is ready, and some that are not: these leave it when their turn
    comes, and `changed` puts them back. So 1,000 consumers of whom one has permits cost no more than one.
    """

    individual_acks: ClassVar[bool] = True
    several: ClassVar[bool] = True

    def __init__(self) -> None:
        self._queues: dict[int, deque[Consumer]] = {}  # by priority level, sorted
        self._first: deque[Consumer] = deque()  # the queue whose head is ready, after `ready` was True
        self._count = 0  # of all consumers

    def added(self, consumer: Consumer, now_ms: int) -> bool:
        self._count += 1
        if consumer.priority_level not in self._queues:
            self._queues[consumer.priority_level] = deque()
            self._queues = dict(sorted(self._queues.items()))
        return False

    def left(self, consumer: Consumer) -> bool:
        """See `Selector`: what it held is given back, message by message."""
        self._count -= 1
        if consumer.queued:
            consumer.queued = False
            self._queues[consumer.priority_level].remove(consumer)
        if not self._count:
            self._queues.clear()
        return False

    def changed(self, consumer: Consumer) -> None:
        if not consumer.queued and not consumer.closed and consumer.ready:
            consumer.queued = True
            self._queues[consumer.priority_level].append(consumer)

    @property
    def ready(self) -> bool:
        for queue in self._queues.values():
            while queue:
                if queue[0].ready:
                    self._first = queue
                    return True
                queue.popleft().queued = False
        return False

    def share_out(
        self, key: EntryKey, entry: Entry, wanted: list[Range], count: int, mixed: Mixed, older: Older
    ) -> SharedOut:
        """See `Selector`: to the first in the queue, which goes to its end; what has another count is for the next."""
        queue = self._first
        consumer = queue[0]
        limit = consumer.available_permits
        following = entry.message_count
        left_over: list[tuple[int, RangeSet]] | tuple[()] = ()
        if mixed is not None and older is None:
            left_over = [row for row in mixed.by_count.items() if row[0] != count]
        if self._count > 1:
            queue.rotate(-1)
            idle = sum([other.idle for other in islice(queue, MAX_SHARES) if other is not consumer])
            if idle or limit < MIN_CHUNK:
                messages = sum([last - first + 1 for first, last in wanted])
                limit = min(limit, -(-messages // (idle + 1)))
                if messages > limit:
                    all_wanted, wanted = wanted, first_members(wanted, limit)
                    end = wanted[-1][1] + 1
                    if left_over:  # which lies behind that as well
                        left_over = [*left_over, (count, RangeSet.of(all_wanted).split(end)[1])]
                    else:
                        following = end
            else:
                limit = min(limit, max(-(-entry.message_count // self._count), MIN_CHUNK))
        return ((consumer, wanted, limit, count),), left_over, following
