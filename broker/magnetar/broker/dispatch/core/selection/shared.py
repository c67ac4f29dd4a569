"""Shared: consumers take turns, and a large entry is shared out among them."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from magnetar.proto.entry import Entry

from ....cursors.core.ranges import Range
from ..consumer import Consumer
from .protocol import Choice

# An entry is shared out in chunks of at least this many messages: smaller frames cost more than they balance.
MIN_CHUNK = 64


class SharedSelector:
    """See `Selector`.

    `_queue` holds every consumer that is ready, and some that are not: these leave it when their turn comes, and `changed`
    puts them back. So 1,000 consumers of whom one has permits cost no more than one.
    """

    individual_acks: ClassVar[bool] = True
    several: ClassVar[bool] = True

    __slots__ = ("_count", "_queue")

    def __init__(self) -> None:
        self._queue: deque[Consumer] = deque()
        self._count = 0  # of all consumers

    def added(self, consumer: Consumer) -> bool:
        """See `Selector`."""
        self._count += 1
        return False

    def left(self, consumer: Consumer) -> bool:
        """See `Selector`: what it held is given back, message by message."""
        self._count -= 1
        if consumer.queued:
            consumer.queued = False
            self._queue.remove(consumer)
        return False

    def changed(self, consumer: Consumer) -> None:
        """See `Selector`."""
        if not consumer.queued and not consumer.closed and consumer.ready:
            consumer.queued = True
            self._queue.append(consumer)

    @property
    def ready(self) -> bool:
        """See `Selector`."""
        queue = self._queue
        while queue:
            if queue[0].ready:
                return True
            queue.popleft().queued = False
        return False

    def choose(self, entry: Entry, wanted: list[Range]) -> Choice:
        """See `Selector`: the first in the queue, which goes to its end."""
        queue = self._queue
        consumer = queue[0]
        limit = consumer.available_permits
        if self._count > 1:
            queue.rotate(-1)
            limit = min(limit, max(-(-entry.message_count // self._count), MIN_CHUNK))
        return consumer, wanted, limit
