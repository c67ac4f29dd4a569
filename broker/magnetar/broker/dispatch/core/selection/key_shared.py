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

Whose the messages of an entry are is found once (`entry_slots`). A look at the entry is then an intersection of sorted
ranges with what waits of it; only messages of an owner some of whose slots are not free are looked at one by one.

Messages without a key are spread: those of a batch count as having one key, which its producer and sequence id give, so
their order is not kept from batch to batch. A batch whose messages have different keys is shared out all the same: its keys
are decoded here, and each consumer gets the whole batch with the messages of others hidden. That costs per message; a
producer that batches by key avoids it.

A message in chunks can be acknowledged when its last one has come. Until that is delivered its slot stays with who has the
first ones, whoever joins, and begins to drain then. A chunk that is given back without the first one keeps the
slot at who has the rest, or returns it there, until the last one is delivered: it would drain for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar

from magnetar.proto.batch_extensions import MessageKey
from magnetar.proto.entry import Entry
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY
from magnetar.proto.ranges import Range, RangeSet, count_members, intersection, intersects

from ....cursors.core.acks import EntryKey
from ....cursors.core.redeliveries import CountedRange, DeliveredRanges
from ..consumer import Consumer
from ..redelivery_tracker import Observer
from .chunk_owners import MAX_UNFINISHED, put_newest
from .entry_slots import EntrySlots, Group
from .hash_ranges import Owners
from .protocol import Mixed, Older, Selector, Share, SharedOut

LOOK_AHEAD_MESSAGES_PER_CONSUMER = 2_000
MAX_LOOK_AHEAD_MESSAGES = 20_000
MAX_SHARED_OUT = 1_000  # runs of one entry that are shared out in one step
# What a step costs is counted in runs that are examined one by one, 0.5 us each.
COST_OF_A_SHARE = 5  # of a run that is shared out, until it is acknowledged
RANGES_PER_COST = 4  # that are examined as sorted lists
MAX_COST_PER_TURN = 5_000  # of the loop


def _first_message(share: Share) -> int:
    return share[1][0][0]


class InFlight:
    """Messages of one slot that are pending at a consumer."""

    __slots__ = ("consumer", "messages")

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.messages = 0


class KeySharedSelector(Selector):
    """See the module docstring, `Selector` and, for the methods called `on_...`, `redelivery_tracker.Observer`."""

    individual_acks: ClassVar[bool] = True
    several: ClassVar[bool] = True
    hash_ranges: ClassVar[bool] = True
    sets_aside: ClassVar[bool] = True

    def __init__(self) -> None:
        self._consumers: list[Consumer] = []
        self._candidates: dict[Consumer, None] = {}  # every consumer that is ready, and some that are not
        self._owners = Owners()
        self._slots: dict[EntryKey, EntrySlots] = {}
        self._unheld: dict[EntryKey, None] = {}  # of `_slots`: may be dropped, if they are still not held
        self._in_flight: dict[int, InFlight] = {}  # by slot; none without messages
        self._queued: dict[int, int] = {}  # messages in the replay queue by slot; none that is 0
        self._queued_messages = 0  # in all slots
        # Entries that were set aside, by what may release them: an owner that is not ready, a slot that drains. Entries that
        # wait for an owner that nobody is are under None.
        self._waiting: dict[Consumer | int | None, dict[EntryKey, None]] = {}
        self._released: dict[EntryKey, None] = {}
        # Of the entry that was shared out last: what the rest waits for, or that it waits for its turn in the replay queue.
        self._waits_for: dict[Consumer | int | None, None] = {}
        self._wait_in_turn = False
        self._chunked: dict[MessageKey, int] = {}  # slots of messages whose last chunk was not delivered yet
        self._whole: dict[MessageKey, Consumer] = {}  # who has all chunks, and may give back some
        self._cost = 0  # of what was done for this subscription in this turn of the loop
        self.look_ahead_messages = 0

    # --- consumers ---------------------------------------------------------------------------------------------------

    def added(self, consumer: Consumer, now_ms: int) -> bool:
        self._consumers.append(consumer)
        self._owners.add(consumer)
        self._consumers_changed()
        return False

    def left(self, consumer: Consumer) -> bool:
        """See `Selector`: what it held is given back, message by message."""
        self._consumers.remove(consumer)
        self._candidates.pop(consumer, None)
        self._whole = {message: owner for message, owner in self._whole.items() if owner is not consumer}
        self._owners.remove(consumer)
        self._consumers_changed()
        return False

    def _consumers_changed(self) -> None:
        messages = LOOK_AHEAD_MESSAGES_PER_CONSUMER * len(self._consumers)
        self.look_ahead_messages = min(messages, MAX_LOOK_AHEAD_MESSAGES)
        self._owners_changed()

    def _owners_changed(self) -> None:
        for waiting in self._waiting.values():
            self._released.update(waiting)
        self._waiting.clear()

    def changed(self, consumer: Consumer) -> None:
        if consumer.ready and not consumer.closed:
            self._candidates[consumer] = None
            if self._waiting:
                self._release(consumer)

    def _release(self, event: Consumer | int) -> None:
        waiting = self._waiting.pop(event, None)
        if waiting is not None:
            self._released.update(waiting)

    @property
    def observer(self) -> Observer | None:
        """Itself; as an attribute it would keep itself from being freed."""
        return self

    @property
    def ready(self) -> bool:
        candidates = self._candidates
        while candidates:
            first = next(iter(candidates))
            if first.ready:
                return True
            del candidates[first]
        return False

    @property
    def draining(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for slot, flight in self._in_flight.items():
            if flight.consumer is not self._owners[slot]:
                counts[flight.consumer.name] = counts.get(flight.consumer.name, 0) + 1
        return counts

    # --- entries -----------------------------------------------------------------------------------------------------

    def share_out(
        self, key: EntryKey, entry: Entry, wanted: list[Range], count: int, mixed: Mixed, older: Older
    ) -> SharedOut:
        """See `Selector`: to all consumers at once.

        It ends when nobody has permits any more, so many messages are left over that `look_ahead_messages` are in the replay
        queue, or MAX_SHARED_OUT runs were looked at or shared out.
        """
        slots = self._slots_of(key, entry)
        slots.waits_for = None
        self._waits_for.clear()
        self._wait_in_turn = False
        queued = (
            self._queued.keys() if older is None else {s for other in older for s in self._slots[other].slots}
        )
        if mixed is not None:
            return self._share_out_runs(slots, mixed.rows(), queued, older is not None)
        ranges = RangeSet.of(wanted)
        if older is None:
            ranges = slots.first_runs(ranges, MAX_SHARED_OUT)
        found, everybody_full = self._groups_for(slots, ranges, queued)
        left_over: list[tuple[int, RangeSet]] = []
        following = ranges.ends[-1] + 1
        if older is None:
            if everybody_full:
                following = max([mine.ends[-1] for mine in found.values()], default=ranges.starts[0] - 1) + 1
                ranges, _ = ranges.split(following)
            left = ranges
            for mine in found.values():
                left = left.without(mine)
            look_ahead = self.look_ahead_messages - self._queued_messages
            if left.members >= look_ahead:
                left = slots.first_messages(left, look_ahead)
                following = left.ends[-1] + 1
                found = {consumer: mine.split(following)[0] for consumer, mine in found.items()}
            if left:
                left_over.append((count, left))
        else:
            found = self._first_runs(slots, found)
        self._add_cost(len(ranges) // RANGES_PER_COST, sum(map(slots.run_count, found.values())))
        shares = [
            (consumer, list(mine), consumer.available_permits, count)
            for consumer, mine in found.items()
            if mine
        ]
        shares.sort(key=_first_message)
        return shares, left_over, following

    def _add_cost(self, examined: int, shared_out: int) -> None:
        """Of so many runs that were examined one by one, and so many that were shared out."""
        self._cost += examined + COST_OF_A_SHARE * shared_out
        if self._cost >= MAX_COST_PER_TURN:
            self._cost = 0
            self.turn_over = True

    def _groups_for(
        self, slots: EntrySlots, ranges: RangeSet, queued: AbstractSet[int]
    ) -> tuple[dict[Consumer, RangeSet], bool]:
        """What each consumer that is ready can have of the ranges, up to its permits; True if they all have as much as that.

        What the rest waits for is in `_waits_for`.
        """
        groups = slots.groups(self._owners)
        ready = dict.fromkeys([consumer for consumer in self._candidates if consumer.ready])
        found: dict[Consumer, RangeSet] = {}
        everybody_full = True
        for consumer in ready:
            group = groups.get(consumer)
            mine = RangeSet() if group is None else intersection(group.ranges, ranges)
            if group is not None and mine and self._blocked(group, consumer, queued):
                mine = self._unblocked(slots, mine, consumer, queued)
            if mine.members < consumer.available_permits:
                everybody_full = False
            elif mine:
                last = mine.ends[-1]
                mine = slots.first_messages(mine, consumer.available_permits)
                if mine.ends[-1] < last:
                    self._waits_for[consumer] = None
            if mine:
                found[consumer] = mine
        for owner, group in groups.items():
            if owner not in ready and intersects(group.ranges, ranges):
                self._waits_for[owner] = None
        return found, everybody_full

    def _blocked(self, group: Group, consumer: Consumer, queued: AbstractSet[int]) -> bool:
        """True if some of it may have to wait for a slot that drains, or for older messages of it."""
        if queued and not queued.isdisjoint(group.slots):
            return True
        in_flight = self._in_flight
        for slot in group.slots:
            flight = in_flight.get(slot)
            if flight is not None and flight.consumer is not consumer:
                return True
        return False

    def _unblocked(
        self, slots: EntrySlots, mine: RangeSet, consumer: Consumer, queued: AbstractSet[int]
    ) -> RangeSet:
        """What of it need not wait: 0.5 us a run."""
        found, in_flight = RangeSet(), self._in_flight
        for row_first, row_last in mine:
            for first, last, slot in slots.runs(row_first, row_last):
                self._cost += 1
                flight = in_flight.get(slot)
                if flight is not None and flight.consumer is not consumer:
                    self._waits_for[slot] = None
                elif slot in queued:
                    self._wait_in_turn = True
                else:
                    found.add(first, last)
        return found

    def _first_runs(self, slots: EntrySlots, found: dict[Consumer, RangeSet]) -> dict[Consumer, RangeSet]:
        """What of it is shared out in one step; the rest waits for its turn in the replay queue."""
        room = MAX_SHARED_OUT
        taken: dict[Consumer, RangeSet] = {}
        for consumer, mine in found.items():
            if not room:
                self._wait_in_turn = True
                break
            part = taken[consumer] = slots.first_runs(mine, room)
            room -= slots.run_count(part)
            self._wait_in_turn |= part.ends[-1] < mine.ends[-1]
        return taken

    def _share_out_runs(
        self,
        slots: EntrySlots,
        rows: Iterable[CountedRange],
        queued: AbstractSet[int],
        again: bool,
    ) -> SharedOut:
        """`share_out` of messages whose redelivery counts differ, one run after another: 0.5 us each."""
        owners, in_flight = self._owners, self._in_flight
        permits = {consumer: consumer.available_permits for consumer in self._candidates if consumer.ready}
        parts: list[tuple[Consumer, RangeSet, int]] = []
        current: dict[Consumer, tuple[RangeSet, int]] = {}  # the last one of `parts` of each
        left_over = DeliveredRanges()
        examined = 0
        following, room = 0, MAX_SHARED_OUT
        look_ahead = MAX_MESSAGES_PER_ENTRY if again else self.look_ahead_messages - self._queued_messages
        for row_first, row_last, count in rows:
            for first, last, slot in slots.runs(row_first, row_last):
                if not permits or look_ahead <= 0 or not room:
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
                    mine, counted = current.get(owner, (None, 0))
                    if mine is None or counted != count:
                        mine = RangeSet()
                        current[owner] = mine, count
                        parts.append((owner, mine, count))
                    mine.add(first, last)
                    room -= 1
                    permits[owner] -= last - first + 1
                    if permits[owner] <= 0:
                        del permits[owner]
                    continue
                examined += 1
                if not again:
                    left_over.add(first, last, count)
                look_ahead -= last - first + 1
            else:
                continue
            if room:  # whoever has permits next may find something in the rest
                self._waits_for.update(dict.fromkeys(self._consumers))
            elif again:
                self._wait_in_turn = True
            break
        self._add_cost(examined, MAX_SHARED_OUT - room)
        shares = [(owner, list(mine), owner.available_permits, count) for owner, mine, count in parts]
        return shares, list(left_over.by_count.items()), following

    def _slots_of(self, key: EntryKey, entry: Entry) -> EntrySlots:
        self._drop_unheld()
        slots = self._slots.get(key)
        if slots is None:
            slots = self._slots[key] = EntrySlots(entry)
        return slots

    def _drop_unheld(self) -> None:
        for key in self._unheld:
            if key in self._slots and not self._slots[key].held:
                del self._slots[key]
        self._unheld.clear()

    def set_aside(self, key: EntryKey, cut_short: Iterable[Consumer]) -> bool:
        # Who is ready and got less than its share: the subscription is at its cap.
        if self._wait_in_turn or any(consumer.ready for consumer in cut_short):
            return False
        self._waits_for.update(dict.fromkeys(cut_short))
        self._slots[key].waits_for = dict(self._waits_for)
        self._wait(key, self._waits_for)
        return True

    def waits_still(self, key: EntryKey) -> bool:
        """See `Selector`. A consumer that has permits for some of what waits for it releases everything."""
        slots = self._slots[key]
        if slots.waits_for is None or not slots.is_of(self._owners):
            return False
        for event in slots.waits_for:
            if isinstance(event, int):
                flight = self._in_flight.get(event)
                if flight is None or flight.consumer is self._owners[event]:
                    return False
            elif event is not None and event.ready:
                return False
        self._wait(key, slots.waits_for)
        return True

    def _wait(self, key: EntryKey, events: Iterable[Consumer | int | None]) -> None:
        for event in events:
            self._waiting.setdefault(event, {})[key] = None

    def released(self) -> list[EntryKey]:
        # A connection may be writable again before the listener says so.
        for event in [event for event in self._waiting if isinstance(event, Consumer) and event.ready]:
            self._release(event)
        keys = list(self._released)
        self._released.clear()
        return keys

    # --- where the messages are --------------------------------------------------------------------------------------

    def on_delivered(
        self, consumer: Consumer, key: EntryKey, starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        slots, in_flight = self._slots[key], self._in_flight
        slots.held += count_members(starts, ends)
        if slots.chunks:
            self._chunks_delivered(consumer, slots, RangeSet.of(list(zip(starts, ends))))
        for slot, messages in slots.counted(starts, ends):
            flight = in_flight.get(slot)
            if flight is None:
                flight = in_flight[slot] = InFlight(consumer)
            flight.messages += messages

    def on_settled(self, key: EntryKey, starts: Sequence[int], ends: Sequence[int]) -> None:
        slots, in_flight = self._slots[key], self._in_flight
        slots.held -= count_members(starts, ends)
        for slot, messages in slots.counted(starts, ends):
            flight = in_flight[slot]
            flight.messages -= messages
            if not flight.messages:
                del in_flight[slot]
                if slot in self._waiting:
                    self._release(slot)
                if self._chunked:
                    self._unpin(slot)
        if not slots.held:
            self._unheld[key] = None

    def _chunks_delivered(self, consumer: Consumer, slots: EntrySlots, delivered: RangeSet) -> None:
        """The slot of a message stays where its first chunks are until it has the last one: they cannot be acknowledged."""
        for index, (message, chunk) in slots.chunks.items():
            if intersects(delivered, RangeSet.of([(index, index)])):
                ((_, _, slot),) = slots.runs(index, index)
                if chunk.last:
                    self._chunked.pop(message, None)
                    put_newest(self._whole, message, consumer)
                    if slot not in self._chunked.values():
                        self._unpin(slot)
                    continue
                self._chunked[message] = slot
                self._owners.pin(slot, consumer)
                if len(self._chunked) > MAX_UNFINISHED:
                    self._unpin(next(iter(self._chunked.values())))

    def _chunks_given_back(self, slots: EntrySlots, queued: RangeSet) -> None:
        for index, (message, chunk) in slots.chunks.items():
            consumer = self._whole.get(message)
            if consumer is None or not intersects(queued, RangeSet.of([(index, index)])):
                continue
            ((_, _, slot),) = slots.runs(index, index)
            flight = self._in_flight.get(slot)
            if not chunk.index or flight is None or flight.consumer is not consumer:
                del self._whole[message]
                continue
            self._chunked[message] = slot
            if self._owners.return_to(consumer, slot):
                self._owners_changed()

    def _unpin(self, slot: int) -> None:
        self._chunked = {message: other for message, other in self._chunked.items() if other != slot}
        if self._owners.unpin(slot):
            self._owners_changed()

    def on_queued(self, key: EntryKey, starts: Sequence[int], ends: Sequence[int]) -> None:
        slots, queued, members = self._slots[key], self._queued, count_members(starts, ends)
        slots.held += members
        self._queued_messages += members
        slots.waits_for = None
        for slot, messages in slots.counted(starts, ends):
            queued[slot] = queued.get(slot, 0) + messages
        if slots.chunks and self._whole:
            self._chunks_given_back(slots, RangeSet.of(list(zip(starts, ends))))

    def on_unqueued(self, key: EntryKey, starts: Sequence[int], ends: Sequence[int]) -> None:
        slots, queued, members = self._slots[key], self._queued, count_members(starts, ends)
        slots.held -= members
        self._queued_messages -= members
        for slot, messages in slots.counted(starts, ends):
            left = queued[slot] - messages
            if left:
                queued[slot] = left
            else:
                del queued[slot]
        if not slots.held:
            self._unheld[key] = None

    def check_set_aside(self, keys: Iterable[EntryKey]) -> None:
        """Asserts that each entry that is set aside waits for something; tests call it after every event."""
        known = {key for waiting in self._waiting.values() for key in waiting} | set(self._released)
        assert known.issuperset(keys), "set aside for ever"

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        assert all(flight.messages > 0 for flight in self._in_flight.values())
        assert all(messages > 0 for messages in self._queued.values())
        self._drop_unheld()
        assert all(slots.held > 0 for slots in self._slots.values())
        held = sum(slots.held for slots in self._slots.values())
        in_flight = sum(flight.messages for flight in self._in_flight.values())
        assert self._queued_messages == sum(self._queued.values())
        assert held == in_flight + self._queued_messages
        for event, waiting in self._waiting.items():
            assert waiting
            if isinstance(event, int):
                flight = self._in_flight.get(event)
                assert flight is not None
                assert flight.consumer is not self._owners[event], f"slot {event} drains no more"
            elif event is not None:
                assert not event.closed
