"""Dispatch of one subscription: entries from the cache, or read from the ledger, to consumers with permits.

`dispatch` delivers until something stops it. Every stop has a waker that calls `dispatch` again, and a test:

    no consumer has permits               --> `Subscription.flow`
    no consumer's connection is writable  --> `Subscription.wake`, from the listener's writing_resumed
    nothing more is confirmed             --> the topic, when entries are confirmed
    the entry is not in memory            --> completion of the read (or the retry timer, if it failed)
    too many acknowledged ranges          --> an acknowledgement that closes gaps
    a seek is being made durable          --> `resume`
    an acknowledgement is being looked up --> `resume`: what it names must not be delivered after it
    the turn was long enough              --> call_soon

What is delivered again (a consumer left, or a nack) goes first. An exclusive subscription rewinds when its consumer leaves;
a shared one redelivers what that consumer had not acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from heapq import heapify, heappop, heappush
from typing import Protocol

from magnetar.proto.entry import Entry
from magnetar.proto.errors import MagnetarError, MessageLost
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ..cursors.core.acks import EntryKey, Position
from ..cursors.core.ranges import DeliveredRanges, Range, complement
from ..cursors.cursor import Cursor
from ..resources.budget import ByteBudget
from ..settings import BrokerSettings
from .consumer import Consumer, Delivery
from .core.slices import cut

_log = logging.getLogger(__name__)

MAX_DELIVERIES_PER_TURN = 256
# With several consumers an entry is shared out in chunks, of at least this many messages: smaller frames cost more.
MIN_SHARED_CHUNK = 64
MAX_MESSAGE_COUNTS = 65_536
SMALL_READ_BYTES = 64 * 1024


class TopicLog(Protocol):
    """What dispatch needs of the topic."""

    def normalise(self, position: Position) -> Position:
        """See `core.acks.Topology`."""

    def is_confirmed(self, ledger_id: int, entry_id: int) -> bool:
        """True if the entry may be dispatched (rule 25)."""

    def cached(self, key: EntryKey) -> Entry | None:
        """The entry if the tail cache has it."""

    async def read(self, ledger_id: int, first: int, *, max_bytes: int) -> list[bytes]:
        """Confirmed ledger entries from `first` on, at least one."""

    def passed(self) -> None:
        """A reader moved on: the cache may drop what is behind all of them."""


class DispatchCounters:
    """Sums over the broker, counted per delivery."""

    __slots__ = ("bytes_out", "deliveries", "messages_out", "read_bytes", "reads")

    def __init__(self) -> None:
        self.deliveries = 0
        self.messages_out = 0
        self.bytes_out = 0
        self.reads = 0
        self.read_bytes = 0


class Dispatcher:
    """See the module docstring."""

    def __init__(
        self,
        log: TopicLog,
        cursor: Cursor,
        settings: BrokerSettings,
        read_budget: ByteBudget,
        counters: DispatchCounters,
    ) -> None:
        self._log = log
        self._cursor = cursor
        self._settings = settings
        self._read_budget = read_budget
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self.consumers: list[Consumer] = []
        self.shared = False
        self.read_position: Position = log.normalise(cursor.state.mark_delete)
        # Messages per entry that was delivered and is not known to be acknowledged: acknowledgements need it.
        self.message_counts: dict[EntryKey, int] = {}
        self._turn = 0
        self._dispatching = False
        self._again = False
        self._pauses = 0  # reasons to deliver nothing: a seek, acknowledgements that are looked up
        self._closed = False
        self._blocked_by_ranges = False
        # What is to be delivered again, with how often it was; the heap has its keys in order (and some that are gone).
        self._replay: dict[EntryKey, DeliveredRanges] = {}
        self._replay_order: list[EntryKey] = []
        # How often an exclusive subscription went back, and how far it had come: for redelivery counts.
        self._rewinds = 0
        self._rewound_from: Position = (0, 0, 0)
        # Entries read from the ledger and not passed yet; at most read_ahead_bytes and one read.
        self._fetched: dict[EntryKey, Entry] = {}
        self._fetched_bytes = 0
        self._fetch_next: EntryKey | None = None
        self._read_task: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._retry_ms = settings.retry_initial_ms

    @property
    def active(self) -> bool:
        """True if there is a consumer to deliver to."""
        return bool(self.consumers)

    @property
    def pending_replays(self) -> int:
        """Messages that wait to be delivered again."""
        return sum(ranges.members for ranges in self._replay.values())

    # --- the loop ----------------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Delivers until something stops it; called by every waker."""
        if self._dispatching or self._pauses or self._closed:
            return
        self._dispatching = True
        turns = MAX_DELIVERIES_PER_TURN
        try:
            while (consumer := self._next_consumer()) is not None:
                if not turns:
                    self._call_again()
                    break
                turns -= 1
                if not (self._replay and self._dispatch_replay(consumer)) and not self._dispatch_new(
                    consumer
                ):
                    break
        finally:
            self._dispatching = False
        if turns < MAX_DELIVERIES_PER_TURN:
            self._log.passed()

    def _call_again(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self._dispatch_again)

    def _dispatch_again(self) -> None:
        self._again = False
        self.dispatch()

    def _next_consumer(self) -> Consumer | None:
        consumers = self.consumers
        if len(consumers) == 1:
            return consumers[0] if consumers[0].ready else None
        for _ in range(len(consumers)):
            self._turn = (self._turn + 1) % len(consumers)
            if consumers[self._turn].ready:
                return consumers[self._turn]
        return None

    def _dispatch_new(self, consumer: Consumer) -> bool:
        """One step at the read position; False if it cannot go on."""
        state = self._cursor.state
        position = self._log.normalise(max(self.read_position, state.mark_delete))
        ledger, entry_id, index = position
        if not index:
            skipped = state.skip_whole(ledger, entry_id)
            if skipped != entry_id:
                self._move_to((ledger, skipped, 0))
                return True
        self._move_to(position)
        if not self._log.is_confirmed(ledger, entry_id):
            return False
        if state.range_count >= self._settings.max_cursor_ranges:
            self._blocked_by_ranges = True
            return False
        key = (ledger, entry_id)
        entry = self._entry(key)
        if entry is None:
            self._start_read(key)
            return False
        count = entry.message_count
        wanted = state.unacked(ledger, entry_id, index, count - 1)
        if not wanted:
            if index >= count:
                # The cursor was put past the last message of an entry whose size was not known then.
                self._cursor.pass_entry(ledger, entry_id)
            self._move_to((ledger, entry_id + 1, 0))
            return True
        redelivered = self._rewinds if position < self._rewound_from else 0
        following = self._deliver(consumer, key, entry, wanted, redelivered)
        self._move_to((ledger, entry_id + 1, 0) if following >= count else (ledger, entry_id, following))
        self._read_ahead()
        return True

    def _move_to(self, position: Position) -> None:
        """Moves the read position; entries that were fetched and are passed are let go."""
        self.read_position = position
        fetched = self._fetched
        while fetched:
            key = next(iter(fetched))
            if key >= position[:2]:
                break
            self._release(fetched.pop(key))

    def _dispatch_replay(self, consumer: Consumer) -> bool:
        order = self._replay_order
        while order and order[0] not in self._replay:
            heappop(order)
        if not order:
            return False
        key = order[0]
        ledger, entry_id = key
        ranges = self._replay[key]
        count, members = ranges.lowest()
        wanted = [part for start, end in members for part in self._cursor.state.unacked(*key, start, end)]
        if not wanted or not self._log.is_confirmed(ledger, entry_id):
            del ranges.by_count[count]  # acknowledged or trimmed meanwhile
            if not ranges:
                del self._replay[key]
            return True
        entry = self._entry(key)
        if entry is None:
            self._start_read(key, single=True)
            return False
        following = self._deliver(consumer, key, entry, wanted, count)
        members.remove(0, following - 1)
        if not members:
            del ranges.by_count[count]
            if not ranges:
                del self._replay[key]
                if key < self.read_position[:2]:
                    self._drop_fetched(key)
        return True

    def _deliver(
        self, consumer: Consumer, key: EntryKey, entry: Entry, wanted: list[Range], redelivered: int
    ) -> int:
        """Delivers as much of `wanted` as permits allow; returns the index after it."""
        permits = consumer.permits
        if self.shared and len(self.consumers) > 1:
            share = -(-entry.message_count // len(self.consumers))
            permits = min(permits, max(share, MIN_SHARED_CHUNK))
        piece = cut(entry, wanted, permits, consumer.byte_room)
        first = entry.batch_start_index(piece.first_batch)
        last = piece.next_index - 1
        taken = piece.wanted
        hidden = [] if taken[0] == (first, last) else complement(taken, first, last)
        consumer.permits -= piece.messages
        consumer.byte_permits -= piece.size
        consumer.delivered_messages += piece.messages
        consumer.delivered_bytes += piece.size
        counters = self._counters
        counters.deliveries += 1
        counters.messages_out += piece.messages
        counters.bytes_out += piece.size
        if self.shared or redelivered:
            pending = consumer.pending.setdefault(key, DeliveredRanges())
            for start, end in taken:
                pending.add(start, end, redelivered)
        if self._cursor.durable or self.shared:
            self._remember_count(key, entry.message_count)
        consumer.port.deliver(
            Delivery(consumer.epoch, *key, entry, piece.first_batch, piece.last_batch, redelivered, hidden)
        )
        return piece.next_index

    def _remember_count(self, key: EntryKey, message_count: int) -> None:
        counts = self.message_counts
        if key not in counts:
            if len(counts) >= MAX_MESSAGE_COUNTS:
                del counts[next(iter(counts))]
            counts[key] = message_count

    # --- reading -----------------------------------------------------------------------------------------------------

    def _entry(self, key: EntryKey) -> Entry | None:
        entry = self._log.cached(key)
        return entry if entry is not None else self._fetched.get(key)

    def _read_ahead(self) -> None:
        """Starts the next read while there is still something to dispatch from the last one."""
        key = self._fetch_next
        if key is None or self._read_task is not None:
            return
        if self._fetched_bytes > self._settings.read_ahead_bytes // 2 or self._read_budget.full:
            return
        if key <= self.read_position[:2] or not self._log.is_confirmed(*key) or self._entry(key) is not None:
            self._fetch_next = None
            return
        self._start_read(key)

    def _start_read(self, key: EntryKey, *, single: bool = False) -> None:
        if self._read_task is None and self._retry is None:
            self._read_task = self._loop.create_task(self._read(key, single))

    async def _read(self, key: EntryKey, single: bool) -> None:
        max_bytes = 1 if single else SMALL_READ_BYTES if self._read_budget.full else self._settings.read_bytes
        ledger, first = key
        try:
            found = await self._log.read(ledger, first, max_bytes=max_bytes)
            for number, data in enumerate(found):
                self._keep((ledger, first + number), Entry(data, LEDGER_ENTRY_HEADER_BYTES))
            if not single:
                self._fetch_next = (ledger, first + len(found))
            self._retry_ms = self._settings.retry_initial_ms
        except MessageLost:
            self._skip_lost(key)
        except MagnetarError as error:
            _log.warning("entry %d:%d cannot be read, trying again: %s", ledger, first, error)
            self._retry = self._loop.call_later(self._retry_ms / 1000, self._retry_read)
            self._retry_ms = min(self._retry_ms * 2, self._settings.retry_max_ms)
        finally:
            self._read_task = None
        self.dispatch()

    def _retry_read(self) -> None:
        self._retry = None
        self.dispatch()

    def _skip_lost(self, key: EntryKey) -> None:
        """The entry was trimmed while it was wanted: the positions move on by themselves, redelivery forgets it."""
        self._replay.pop(key, None)

    def _keep(self, key: EntryKey, entry: Entry) -> None:
        if key not in self._fetched:
            size = len(entry.data)
            self._fetched[key] = entry
            self._fetched_bytes += size
            self._read_budget.charge(size)
            self._counters.reads += 1
            self._counters.read_bytes += size

    def _drop_fetched(self, key: EntryKey) -> None:
        entry = self._fetched.pop(key, None)
        if entry is not None:
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        self._fetched_bytes -= len(entry.data)
        self._read_budget.release(len(entry.data))

    def _drop_all_fetched(self) -> None:
        for key in list(self._fetched):
            self._drop_fetched(key)
        self._fetch_next = None

    # --- consumers, redelivery, seek ---------------------------------------------------------------------------------

    def add(self, consumer: Consumer) -> None:
        """A consumer joined; it has no permits yet."""
        self.consumers.append(consumer)

    def remove(self, consumer: Consumer) -> None:
        """A consumer left: what it had not acknowledged is delivered again."""
        self.consumers.remove(consumer)
        consumer.closed = True
        if self.shared:
            self._return(consumer)
        else:
            self.rewind()
        consumer.pending.clear()
        if not self.consumers:
            self._drop_all_fetched()
        self._log.passed()
        self.dispatch()

    def rewind(self) -> None:
        """Goes back to the mark-delete position: what is not acknowledged is delivered again, in order."""
        back = self._log.normalise(self._cursor.state.mark_delete)
        if back < self.read_position:
            self._rewinds += 1
            self._rewound_from = max(self._rewound_from, self.read_position)
        self._clear_replay()
        self._drop_all_fetched()
        self.read_position = back

    def set_shared(self, shared: bool) -> None:
        """The type, chosen by the first consumer."""
        if shared != self.shared:
            self.rewind()
            self.shared = shared

    def _return(self, consumer: Consumer) -> None:
        for key, ranges in consumer.pending.items():
            for count, members in ranges.by_count.items():
                for first, last in members:
                    self._add_replay(key, first, last, count + 1)

    def redeliver_all(self, consumer: Consumer) -> None:
        """A nack of everything that this consumer holds."""
        if self.shared:
            self._return(consumer)
            consumer.pending.clear()
        else:
            consumer.pending.clear()
            self.rewind()
        self.dispatch()

    def redeliver(self, consumer: Consumer, key: EntryKey, first: int, last: int) -> None:
        """A nack of some messages; `dispatch` afterwards, once for many."""
        taken = consumer.settle(key, first, last)
        if not self.shared:
            counted = {(start, end): count for start, end, count in taken}
            held = [(start, end) for start, end, _ in sorted(taken)]
            for start, end in complement(held, first, last):
                counted[start, end] = 0
            taken = [(start, end, count) for (start, end), count in counted.items()]
        for start, end, count in taken:
            self._add_replay(key, start, end, count + 1)

    def _add_replay(self, key: EntryKey, first: int, last: int, count: int) -> None:
        ranges = self._replay.get(key)
        if ranges is None:
            ranges = self._replay[key] = DeliveredRanges()
            heappush(self._replay_order, key)
            if len(self._replay_order) > 64 + 2 * len(self._replay):
                self._replay_order = list(self._replay)
                heapify(self._replay_order)
        ranges.add(first, last, count)

    def _clear_replay(self) -> None:
        self._replay.clear()
        self._replay_order.clear()

    def acknowledged(self) -> None:
        """The cursor moved: forget counts behind it, and go on if too many ranges had stopped dispatch."""
        counts = self.message_counts
        mark = self._cursor.state.mark_delete[:2]
        while counts:
            key = next(iter(counts))
            if key >= mark:
                break
            del counts[key]
        if self._blocked_by_ranges:
            self._blocked_by_ranges = False
            self.dispatch()

    def pause(self) -> None:
        """Nothing is delivered until each `pause` had its `resume`."""
        self._pauses += 1

    def resume(self) -> None:
        """Ends one `pause`."""
        self._pauses -= 1
        self.dispatch()

    def restart(self) -> None:
        """After a seek (rule 30: pending acknowledgements are gone with what they were for).

        Permits stay: the consumer grants again what it drops, delivered before or under way.
        """
        self._clear_replay()
        self._drop_all_fetched()
        self.message_counts.clear()
        for consumer in self.consumers:
            consumer.pending.clear()
        self._rewinds = 0
        self._rewound_from = (0, 0, 0)
        self.read_position = self._log.normalise(self._cursor.state.mark_delete)

    async def close(self) -> None:
        """Ends reads; nothing is delivered any more."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._read_task is not None:
            self._read_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._read_task
        self._drop_all_fetched()
