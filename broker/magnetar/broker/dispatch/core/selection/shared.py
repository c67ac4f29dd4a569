"""Shared: consumers take turns, and what is large is shared out among them.

A batch is delivered whole as long as nobody else waits for something to do: who gets a part of it gets all its bytes, with
the messages of others hidden. While consumers are idle, a batch of 60 jobs is 20 for each of three of them; and who grants
fewer than MIN_CHUNK permits, as workers do that want one job at a time, gets no more than that.

Those of a higher priority (a lower number) come first: the others get something only while none of them has permits.

All chunks of a message go to one consumer (`chunk_owners`). While that has no permits they are set aside, and dispatch goes
on past them, until MAX_WAITING entries wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import ClassVar

from magnetar.proto.batch_extensions import Chunk, MessageKey
from magnetar.proto.entry import ENTRY_CHUNKED, Entry
from magnetar.proto.ranges import Range, RangeSet, first_members

from ....cursors.core.acks import EntryKey
from ....cursors.core.redeliveries import CountedRange
from ..consumer import Consumer
from .chunk_owners import ChunkOwners, Chunks
from .protocol import Mixed, Older, Selector, SharedOut

# An entry is shared out in chunks of at least this many messages: smaller frames cost more than they balance.
MIN_CHUNK = 64
MAX_WAITING = 1_000  # entries with chunks for consumers that have no permits
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
        self._chunks = ChunkOwners()
        # Entries that were set aside, by the consumer whose chunks they have, and those that are to be looked at again.
        self._waiting: dict[Consumer, dict[EntryKey, None]] = {}
        self._released: dict[EntryKey, None] = {}
        self._waits_for: dict[
            Consumer, None
        ] = {}  # of the entry that was shared out last, if nobody can have anything of it

    def added(self, consumer: Consumer, now_ms: int) -> bool:
        self._count += 1
        if consumer.priority_level not in self._queues:
            self._queues[consumer.priority_level] = deque()
            self._queues = dict(sorted(self._queues.items()))
        return False

    def left(self, consumer: Consumer) -> bool:
        """See `Selector`: what it held is given back, message by message."""
        self._count -= 1
        self._chunks.left(consumer)
        self._released.update(self._waiting.pop(consumer, {}))
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
        self._waits_for.clear()
        if entry.flags & ENTRY_CHUNKED and (chunks := self._chunks.chunks_of(key, entry)):
            return self._share_out_chunks(key, entry, wanted, count, mixed, older, chunks)
        return self._share_out_any(entry, wanted, count, mixed, older)

    def _share_out_any(
        self, entry: Entry, wanted: list[Range], count: int, mixed: Mixed, older: Older
    ) -> SharedOut:
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

    # --- chunks ------------------------------------------------------------------------------------------------------

    def _share_out_chunks(
        self,
        key: EntryKey,
        entry: Entry,
        wanted: list[Range],
        count: int,
        mixed: Mixed,
        older: Older,
        chunks: Chunks,
    ) -> SharedOut:
        """The first part that somebody can have: a chunk, or what lies between chunks.

        An entry with such a part is not set aside: chunks behind it would overtake those that begin their message in it.
        """
        rows = [(first, last, count) for first, last in wanted] if mixed is None else mixed.rows()
        for first, last, count, message in _parts(rows, chunks):
            following = last + 1
            part = [(first, last)]
            if message is None:
                self._waits_for.clear()
                shares, left_over, end = self._share_out_any(entry, part, count, None, older)
                return shares, left_over, min(end, following)
            chunk = chunks[first][1]
            owner = self._owner_of(message, chunk, again=older is not None)
            if owner is not None and owner.ready:
                self._waits_for.clear()
                self._chunks.delivered(
                    message, owner, (*key, first), last=chunk.last, again=older is not None
                )
                return ((owner, part, 1, count),), (), following
            if owner is not None:
                self._waits_for[owner] = None
            if older is None:
                self._chunks.unfinished[message].behind = (*key, first)
                return (), [(count, RangeSet.of(part))], following
        return (), (), entry.message_count

    def _owner_of(self, message: MessageKey, chunk: Chunk, *, again: bool) -> Consumer | None:
        """Who gets this chunk; None if it has to go behind others of its message."""
        unfinished = self._chunks.unfinished.get(message)
        if unfinished is not None:
            if unfinished.behind is not None and not again:
                return None
            if unfinished.owner is not None:
                return unfinished.owner
        elif again and (owner := self._chunks.whole_at(message, chunk)) is not None:
            return owner
        queue = self._first
        queue.rotate(-1)
        return queue[-1]

    @property
    def sets_aside(self) -> bool:
        """See `Selector`: chunks, for their owner."""
        return bool(self._chunks.unfinished or self._waiting or self._waits_for)

    def set_aside(self, key: EntryKey, cut_short: Iterable[Consumer]) -> bool:
        for owner in self._waits_for:
            self._waiting.setdefault(owner, {})[key] = None
        self._bound_look_ahead()
        return bool(self._waits_for)

    def released(self) -> list[EntryKey]:
        for consumer in [consumer for consumer in self._waiting if consumer.ready]:
            self._released.update(self._waiting.pop(consumer))
        keys = list(self._released)
        self._released.clear()
        self._bound_look_ahead()
        return keys

    def left_queue(self, replay: Container[EntryKey]) -> None:
        """See `Selector`: they do not count as waiting any more."""
        for consumer, keys in list(self._waiting.items()):
            self._waiting[consumer] = {key: None for key in keys if key in replay}
        self._bound_look_ahead()

    def _bound_look_ahead(self) -> None:
        waiting = sum(map(len, self._waiting.values()))
        self.look_ahead_messages = 0 if waiting >= MAX_WAITING else Selector.look_ahead_messages


def _parts(rows: list[CountedRange], chunks: Chunks) -> Iterator[tuple[int, int, int, MessageKey | None]]:
    """First and last message of each chunk, and of what lies between them; its count, and of which message it is a chunk."""
    borders = list(chunks)
    for first, last, count in rows:
        while first <= last:
            at = bisect_left(borders, first)
            border = borders[at] if at < len(borders) else last + 1
            end = first if border == first else min(last, border - 1)
            yield first, end, count, chunks[first][0] if border == first else None
            first = end + 1
