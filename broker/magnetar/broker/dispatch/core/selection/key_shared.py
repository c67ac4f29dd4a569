"""Key_Shared: messages with the same key go to the same consumer, in order, while consumers come and go (rule 28).

A key's hash falls into one of 65,536 slots, and each slot has an owner (`hash_ranges`). Of each slot is known who has
messages of it in flight, and how many:

    free      nothing in flight                        --> delivered to the owner
    in flight at the owner                             --> delivered to the owner
    draining  in flight at somebody who was the owner  --> nothing is delivered until all of it is acknowledged or given back
                                                           (Pulsar 4, PIP-379)

What cannot be delivered, because its slot is draining or its owner is not ready, is *set aside*: it waits in the replay
queue, and dispatch goes on past it with the keys of others. A message whose slot has older messages in the replay queue
joins them there, so that a key is never overtaken by itself. An entry that was set aside is looked at again when what it
waits for happens:

    the owner is ready again | the slot has drained | the owners have changed

How far dispatch goes ahead is bounded by `look_ahead_messages`.

Messages without a key count as having the same one. A batch whose messages have different keys is shared out all the same:
its keys are decoded here, and each consumer gets the whole batch with the messages of others hidden. That costs per message;
a producer that batches by key avoids it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from magnetar.proto.batch import entry_key_hashes
from magnetar.proto.entry import Entry

from ....cursors.core.acks import EntryKey
from ....cursors.core.ranges import CountedRange, Range
from ..consumer import Consumer
from .hash_ranges import SLOT_SHIFT, Owners
from .protocol import Choice

LOOK_AHEAD_MESSAGES_PER_CONSUMER = 2_000
MAX_LOOK_AHEAD_MESSAGES = 20_000


class Share(NamedTuple):
    """What one consumer gets of an entry: sorted ranges that were delivered equally often before."""

    consumer: Consumer
    wanted: list[Range]
    redelivery_count: int


class EntrySlots:
    """The slots of an entry's messages, while some of them are in flight or in the replay queue.

    Run i of messages, which ends before index ends[i], is of slots[i]. held: messages in flight or in the replay queue.
    """

    __slots__ = ("_single", "ends", "held", "slots")

    def __init__(self, entry: Entry) -> None:
        self.ends, hashes = entry_key_hashes(entry)
        self.slots = [key_hash >> SLOT_SHIFT for key_hash in hashes]
        self.held = 0
        # Every message is a run: what unbatched producers send.
        self._single = len(self.slots) == entry.message_count

    def runs(self, first: int, last: int) -> Iterable[CountedRange]:
        """First message, last message and slot of each run in first..last."""
        if self._single:
            numbers = range(first, last + 1)
            return zip(numbers, numbers, self.slots[first : last + 1])
        return self._runs(first, last)

    def _runs(self, first: int, last: int) -> Iterable[CountedRange]:
        ends, slots = self.ends, self.slots
        at = bisect_right(ends, first)
        while first <= last:
            end = min(ends[at] - 1, last)
            yield first, end, slots[at]
            first = end + 1
            at += 1


class InFlight:
    """Messages of one slot that are pending at a consumer."""

    __slots__ = ("consumer", "messages")

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.messages = 0


class KeySharedSelector:
    """See the module docstring, `Selector` and, for the methods called `on_...`, `redelivery_tracker.Observer`.

    The dispatcher calls `share_out` instead of `choose`: an entry is shared out to all of its consumers at once.
    """

    individual_acks: ClassVar[bool] = True
    several: ClassVar[bool] = True
    active: Consumer | None = None
    next_due_ms: int | None = None

    __slots__ = (
        "_candidates",
        "_consumers",
        "_in_flight",
        "_owners",
        "_queued",
        "_released",
        "_slots",
        "_unheld",
        "_wait_in_turn",
        "_waiting",
        "_waits_for",
    )

    def __init__(self) -> None:
        self._consumers: list[Consumer] = []
        self._candidates: dict[Consumer, None] = {}  # every consumer that is ready, and some that are not
        self._owners = Owners()
        self._slots: dict[EntryKey, EntrySlots] = {}
        self._unheld: dict[EntryKey, None] = {}  # of `_slots`: may be dropped, if they are still not held
        self._in_flight: dict[int, InFlight] = {}  # by slot; none without messages
        self._queued: dict[int, int] = {}  # messages in the replay queue by slot; none that is 0
        # Entries that were set aside, by what may release them: an owner that is not ready, a slot that drains. Entries that
        # wait for an owner that nobody is are under None.
        self._waiting: dict[Consumer | int | None, dict[EntryKey, None]] = {}
        self._released: dict[EntryKey, None] = {}
        # Of the entry that was shared out last: what the rest waits for, or that it waits for its turn in the replay queue.
        self._waits_for: dict[Consumer | int | None, None] = {}
        self._wait_in_turn = False

    # --- consumers ---------------------------------------------------------------------------------------------------

    def added(self, consumer: Consumer, now_ms: int) -> bool:
        """See `Selector`."""
        self._consumers.append(consumer)
        self._owners.add(consumer)
        self._release_all()
        return False

    def left(self, consumer: Consumer) -> bool:
        """See `Selector`: what it held is given back, message by message."""
        self._consumers.remove(consumer)
        self._candidates.pop(consumer, None)
        self._owners.remove(consumer)
        self._release_all()
        return False

    def _release_all(self) -> None:
        for waiting in self._waiting.values():
            self._released.update(waiting)
        self._waiting.clear()

    def timer_due(self, now_ms: int) -> bool:
        """See `Selector`."""
        return False

    def changed(self, consumer: Consumer) -> None:
        """See `Selector`."""
        if consumer.ready and not consumer.closed:
            self._candidates[consumer] = None
            if self._waiting:
                self._release(consumer)

    def _release(self, event: Consumer | int) -> None:
        waiting = self._waiting.pop(event, None)
        if waiting is not None:
            self._released.update(waiting)

    @property
    def ready(self) -> bool:
        """See `Selector`."""
        candidates = self._candidates
        while candidates:
            first = next(iter(candidates))
            if first.ready:
                return True
            del candidates[first]
        return False

    @property
    def look_ahead_messages(self) -> int:
        """Dispatch goes past messages that nobody can have now, until so many of them wait in the replay queue."""
        return min(LOOK_AHEAD_MESSAGES_PER_CONSUMER * len(self._consumers), MAX_LOOK_AHEAD_MESSAGES)

    @property
    def draining(self) -> dict[str, int]:
        """Slots by the consumer that others wait for, for the stats."""
        counts: dict[str, int] = {}
        for slot, flight in self._in_flight.items():
            if flight.consumer is not self._owners[slot]:
                counts[flight.consumer.name] = counts.get(flight.consumer.name, 0) + 1
        return counts

    # --- entries -----------------------------------------------------------------------------------------------------

    def choose(self, entry: Entry, wanted: list[Range]) -> Choice:
        """See `share_out`."""
        raise NotImplementedError

    def share_out(
        self,
        key: EntryKey,
        entry: Entry,
        rows: Iterable[CountedRange],
        *,
        older: Iterable[EntryKey] | None,
        look_ahead: int,
    ) -> tuple[list[Share], list[CountedRange], int]:
        """Who gets what of an entry, what nobody can have now, and the index after what was looked at.

        It ends when nobody has permits any more, or `look_ahead` messages or more are left over: looking at thousands of
        messages for the sake of a few permits would cost more than it gives. `older`: entries in the replay queue whose keys
        must not be overtaken; None: all of the queue. About 0.5 us for each run of messages with the same slot.
        """
        self._drop_unheld()
        slots = self._slots.get(key)
        if slots is None:
            slots = self._slots[key] = EntrySlots(entry)
        owners, in_flight = self._owners, self._in_flight
        queued = (
            self._queued if older is None else {slot for other in older for slot in self._slots[other].slots}
        )
        permits = {consumer: consumer.available_permits for consumer in self._candidates if consumer.ready}
        self._waits_for.clear()
        self._wait_in_turn = False
        shares: list[Share] = []
        current: dict[Consumer, Share] = {}
        left_over: list[CountedRange] = []
        following = 0
        for row_first, row_last, count in rows:
            for first, last, slot in slots.runs(row_first, row_last):
                if not permits or look_ahead <= 0:
                    break
                following = last + 1
                owner = owners[slot]
                flight = in_flight.get(slot)
                if flight is not None and flight.consumer is not owner:
                    self._waits_for[slot] = None
                elif owner is None or owner not in permits:
                    self._waits_for[owner] = None
                elif slot in queued:
                    self._wait_in_turn = True
                else:
                    share = current.get(owner)
                    if share is None or share.redelivery_count != count:
                        share = current[owner] = Share(owner, [], count)
                        shares.append(share)
                    wanted = share.wanted
                    if wanted and wanted[-1][1] + 1 == first:
                        wanted[-1] = (wanted[-1][0], last)
                    else:
                        wanted.append((first, last))
                    permits[owner] -= last - first + 1
                    if permits[owner] <= 0:
                        del permits[owner]
                    continue
                left_over.append((first, last, count))
                look_ahead -= last - first + 1
            else:
                continue
            # Whoever has permits next may find something in the rest.
            self._waits_for.update(dict.fromkeys(self._consumers))
            break
        return shares, left_over, following

    def _drop_unheld(self) -> None:
        for key in self._unheld:
            if key in self._slots and not self._slots[key].held:
                del self._slots[key]
        self._unheld.clear()

    def set_aside(self, key: EntryKey, cut_short: Iterable[Consumer]) -> bool:
        """True: what is left over of the entry that was shared out last waits until `released` names it; else for its turn.

        `cut_short`: those who got less than their share.
        """
        # Who is ready and got less than its share: the subscription is at its cap.
        if self._wait_in_turn or any(consumer.ready for consumer in cut_short):
            return False
        self._waits_for.update(dict.fromkeys(cut_short))
        for event in self._waits_for:
            self._waiting.setdefault(event, {})[key] = None
        return True

    def released(self) -> list[EntryKey]:
        """Entries that were set aside and may have something to deliver now."""
        # A connection may be writable again before the listener says so.
        for event in [event for event in self._waiting if isinstance(event, Consumer) and event.ready]:
            self._release(event)
        keys = list(self._released)
        self._released.clear()
        return keys

    # --- where the messages are --------------------------------------------------------------------------------------

    def on_delivered(self, consumer: Consumer, key: EntryKey, taken: Sequence[Range]) -> None:
        """See `Observer`."""
        slots, in_flight = self._slots[key], self._in_flight
        for row_first, row_last in taken:
            slots.held += row_last - row_first + 1
            for first, last, slot in slots.runs(row_first, row_last):
                flight = in_flight.get(slot)
                if flight is None:
                    flight = in_flight[slot] = InFlight(consumer)
                flight.messages += last - first + 1

    def on_settled(self, key: EntryKey, taken: Iterable[CountedRange]) -> None:
        """See `Observer`."""
        slots, in_flight = self._slots[key], self._in_flight
        for row_first, row_last, _ in taken:
            slots.held -= row_last - row_first + 1
            for first, last, slot in slots.runs(row_first, row_last):
                flight = in_flight[slot]
                flight.messages -= last - first + 1
                if not flight.messages:
                    del in_flight[slot]
                    if self._waiting:
                        self._release(slot)
        if not slots.held:
            self._unheld[key] = None

    def on_queued(self, key: EntryKey, first: int, last: int) -> None:
        """See `Observer`."""
        slots, queued = self._slots[key], self._queued
        slots.held += last - first + 1
        for start, end, slot in slots.runs(first, last):
            queued[slot] = queued.get(slot, 0) + end - start + 1

    def on_unqueued(self, key: EntryKey, taken: Iterable[CountedRange]) -> None:
        """See `Observer`."""
        slots, queued = self._slots[key], self._queued
        for row_first, row_last, _ in taken:
            slots.held -= row_last - row_first + 1
            for first, last, slot in slots.runs(row_first, row_last):
                queued[slot] -= last - first + 1
                if not queued[slot]:
                    del queued[slot]
        if not slots.held:
            self._unheld[key] = None

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        assert all(flight.messages > 0 for flight in self._in_flight.values())
        assert all(messages > 0 for messages in self._queued.values())
        self._drop_unheld()
        assert all(slots.held > 0 for slots in self._slots.values())
        held = sum(slots.held for slots in self._slots.values())
        in_flight = sum(flight.messages for flight in self._in_flight.values())
        assert held == in_flight + sum(self._queued.values())
        for event, waiting in self._waiting.items():
            assert waiting
            if isinstance(event, int):
                flight = self._in_flight.get(event)
                assert flight is not None
                assert flight.consumer is not self._owners[event], f"slot {event} drains no more"
            elif event is not None:
                assert not event.closed
