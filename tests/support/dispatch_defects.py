"""Planted defects of the dispatch core: mistakes that a test or a simulation must notice. PLANTS has them by name.

Each is a patch of the real code by way of pytest's MonkeyPatch, which a test undoes and the worker of a simulation does not.
"""

from typing import Any

import pytest

from magnetar.broker.cursors.core.redeliveries import RedeliveryCounts
from magnetar.broker.dispatch.core import dispatcher, entry_source
from magnetar.broker.dispatch.core.delay_index import DelayIndex
from magnetar.broker.dispatch.core.dispatcher import DispatchCore
from magnetar.broker.dispatch.core.due_queue import DueQueue
from magnetar.broker.dispatch.core.entry_source import EntrySource
from magnetar.broker.dispatch.core.redelivery_tracker import RedeliveryTracker
from magnetar.broker.dispatch.core.selection.chunk_owners import ChunkOwners
from magnetar.broker.dispatch.core.selection.failover import FailoverSelector
from magnetar.broker.dispatch.core.selection.key_shared import KeySharedSelector
from magnetar.broker.dispatch.core.selection.shared import SharedSelector

core: Any = DispatchCore
source: Any = EntrySource
tracker: Any = RedeliveryTracker


def plant_forgotten_waker(patch: pytest.MonkeyPatch) -> None:
    """A consumer that becomes ready again is not put back into the queue."""
    changed = SharedSelector.changed
    patch.setattr(
        SharedSelector, "changed", lambda self, c: None if c.delivered_messages else changed(self, c)
    )


def plant_permit_leaked(patch: pytest.MonkeyPatch) -> None:
    """Hidden messages of a delivery cost permits as well."""
    deliver = core._deliver

    def leaky(self: Any, *given: Any, **named: Any) -> Any:
        taken = deliver(self, *given, **named)
        delivery = self._out[-1]
        delivery.consumer.available_permits -= sum(last - first + 1 for first, last in delivery.hidden)
        return taken

    patch.setattr(core, "_deliver", leaky)


def plant_pending_acks_survive_a_seek(patch: pytest.MonkeyPatch) -> None:
    """Rule 30: what was delivered before a seek is still pending after it."""

    def start_at(self: Any, position: Any) -> None:
        self.source.clear()
        self.read_position = position

    patch.setattr(core, "_start_at", start_at)


def plant_pending_acks_survive_a_skip(patch: pytest.MonkeyPatch) -> None:
    """Rule 30: what a consumer holds of what was skipped counts for the caps."""
    patch.setattr(tracker, "settle_before", lambda self, consumers, position: [])


def plant_replay_survives_a_seek(patch: pytest.MonkeyPatch) -> None:
    """Rule 30: what waited to be delivered again is delivered after the seek, and counted as new too."""
    patch.setattr(tracker, "clear_replay", lambda self: None)


def plant_redelivery_count_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What a consumer leaves behind comes with the count it had."""
    add_replays = tracker.add_replays
    patch.setattr(
        tracker, "add_replays", lambda self, k, a, b, count: add_replays(self, k, a, b, max(count - 1, 0))
    )


def plant_rewind_not_counted(patch: pytest.MonkeyPatch) -> None:
    """What an exclusive consumer gets after it has nacked everything looks new."""
    patch.setattr(RedeliveryCounts, "rewound", lambda self, read_position, mark_delete: None)


def plant_read_survives_its_consumer(patch: pytest.MonkeyPatch) -> None:
    """What a read brings after everybody left stays in the budget."""
    clear = source.clear

    def forgetful(self: Any) -> None:
        reads, catch_up = dict(self._reads), self._catch_up
        clear(self)
        if reads:
            self._out.pop()
        self._reads.update(reads)
        self._catch_up = catch_up

    patch.setattr(source, "clear", forgetful)


def plant_cap_never_unblocked(patch: pytest.MonkeyPatch) -> None:
    """A consumer that reached its cap stays blocked whatever it acknowledges."""
    released = tracker._released

    def stuck(self: Any, consumer: Any, messages: int) -> None:
        before = consumer.blocked_on_unacked_messages
        released(self, consumer, messages)
        consumer.blocked_on_unacked_messages = before

    patch.setattr(tracker, "_released", stuck)


def plant_unblocked_consumer_not_woken(patch: pytest.MonkeyPatch) -> None:
    """An acknowledgement ends the block, and nothing delivers to the consumer."""
    patch.setattr(core, "_changed", lambda self, consumer: None)


def plant_acknowledged_message_delivered(patch: pytest.MonkeyPatch) -> None:
    """What was acknowledged while it waited to be delivered again is delivered."""
    deliver_again = core._deliver_again

    def careless(self: Any, selector: Any) -> Any:
        state = self._state
        self._state = type("All", (), {"unacked": staticmethod(lambda ledger, entry, a, b: [(a, b)])})
        try:
            return deliver_again(self, selector)
        finally:
            self._state = state

    patch.setattr(core, "_deliver_again", careless)


def plant_timer_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A read that failed is never tried again."""
    patch.setattr(core, "_set_timer", lambda self: None)


def plant_failed_replay_not_delayed(patch: pytest.MonkeyPatch) -> None:
    """An entry that cannot be read is read again at once, for ever, and starves those behind it."""
    read_failed = source.read_failed

    def impatient(self: Any, *given: Any) -> Any:
        skipped = read_failed(self, *given)
        for failure in self.failures.values():
            failure.waiting = False
        return skipped

    patch.setattr(source, "read_failed", impatient)


def plant_slots_never_given_up(patch: pytest.MonkeyPatch) -> None:
    """What was read to be delivered again holds every slot; the simulation found an entry before it that was never read."""
    want_replays = source.want_replays

    def polite(self: Any, keys: Any) -> None:
        if self.replay_reads + len(self._replayed) < entry_source.MAX_REPLAY_READS:
            want_replays(self, keys)

    patch.setattr(source, "want_replays", polite)


def plant_nack_past_the_end(patch: pytest.MonkeyPatch) -> None:
    """A nack that names more than the entry has is believed."""
    take_replay = tracker.take_replay
    patch.setattr(dispatcher, "MAX_MESSAGES_PER_ENTRY", 1 << 30)
    patch.setattr(
        tracker, "take_replay", lambda self, k, a, b: 0 if a and b == 1 << 30 else take_replay(self, k, a, b)
    )


def plant_owner_not_settled(patch: pytest.MonkeyPatch) -> None:
    """What somebody else acknowledged stays pending at the consumer that has it."""
    patch.setattr(core, "_settle_elsewhere", lambda self, key, first, last: None)


def plant_hand_over_without_draining(patch: pytest.MonkeyPatch) -> None:
    """Rule 28: a key goes to its new owner while the old one has unacknowledged messages of it."""
    without(patch, "_in_flight")


def plant_key_overtaken(patch: pytest.MonkeyPatch) -> None:
    """Rule 28: what is new goes past older messages of its key that wait in the replay queue."""
    without(patch, "_queued")


def without(patch: pytest.MonkeyPatch, name: str) -> None:
    """Entries are shared out without a look at this."""
    share_out = KeySharedSelector.share_out

    def careless(self: Any, *given: Any, **named: Any) -> Any:
        known = getattr(self, name)
        setattr(self, name, {})
        try:
            return share_out(self, *given, **named)
        finally:
            setattr(self, name, known)

    patch.setattr(KeySharedSelector, "share_out", careless)


def plant_set_aside_for_ever(patch: pytest.MonkeyPatch) -> None:
    """What waits for a consumer's permits or for a key to drain is never looked at again."""
    patch.setattr(KeySharedSelector, "_release", lambda self, event: None)


def plant_released_and_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """What waits for a consumer's permits or for a key to drain is believed to wait still when that has come."""

    def waits_still(self: Any, key: Any) -> bool:
        events = self._slots[key].waits_for
        if events is not None:
            self._wait(key, events)
        return events is not None

    patch.setattr(KeySharedSelector, "waits_still", waits_still)


def plant_chunks_go_to_anybody(patch: pytest.MonkeyPatch) -> None:
    """The chunks of a message go to whoever is next."""
    patch.setattr(SharedSelector, "_owner_of", lambda self, message, chunk, again: self._first[0])


def plant_chunks_of_who_left_are_overtaken(patch: pytest.MonkeyPatch) -> None:
    """Those of a consumer that left come again, and the next chunk of their message does not wait for them."""

    def left(self: Any, consumer: Any) -> None:
        for unfinished in self.unfinished.values():
            if unfinished.owner is consumer:
                unfinished.owner = None

    patch.setattr(ChunkOwners, "left", left)


def plant_slot_moves_between_chunks(patch: pytest.MonkeyPatch) -> None:
    """Key_shared: a slot drains although a message has only its first chunks."""
    patch.setattr(KeySharedSelector, "_chunks_delivered", lambda *_: None)


def plant_two_active_consumers(patch: pytest.MonkeyPatch) -> None:
    """Failover: every consumer that has room gets something."""

    def anybody(self: Any, key: Any, entry: Any, wanted: Any, count: int, *_: Any) -> Any:
        consumer = next((one for one in reversed(self._consumers) if one.ready), self.active)
        return ((consumer, wanted, consumer.available_permits, count),), (), entry.message_count

    patch.setattr(FailoverSelector, "share_out", anybody)


def plant_takeover_does_not_go_back(patch: pytest.MonkeyPatch) -> None:
    """Failover: what the consumer before had not acknowledged is not delivered to the one that takes over."""

    def forgetful(self: Any, now_ms: int) -> bool:
        self.next_due_ms = None
        return False

    patch.setattr(FailoverSelector, "timer_due", forgetful)


def plant_due_nack_forgotten_at_unload(patch: pytest.MonkeyPatch) -> None:
    """What waits to be delivered again when the topic is unloaded counts as new afterwards, and so does what is pending."""

    def close(self: Any) -> None:
        close_without_counting(self)
        self.tracker.counts.clear()

    patch.setattr(core, "close", close)


def plant_held_messages_not_counted_at_unload(patch: pytest.MonkeyPatch) -> None:
    """What consumers had handed out when the topic is unloaded comes again as if they had not."""
    patch.setattr(core, "close", close_without_counting)


def close_without_counting(self: Any) -> None:
    """As the core closes, but for what its consumers hold."""
    self._closed = True
    for consumer in self.consumers:
        consumer.closed = True
        self.tracker.forget(consumer)
    self.consumers.clear()
    self.source.close()


def plant_prefetched_messages_counted(patch: pytest.MonkeyPatch) -> None:
    """Rule 49: a lost connection counts what was only queued, so that a consumer that is killed buries the innocent."""
    give_back = tracker.give_back
    patch.setattr(
        tracker, "give_back", lambda self, consumer, *, nacked: give_back(self, consumer, nacked=True)
    )


def plant_hand_outs_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Rule 49: what was handed out does not count either, so that a message that kills its consumers is never buried."""
    patch.setattr(tracker, "handed_out", lambda self, *given, **named: None)


def plant_rewind_counts_what_waits_twice(patch: pytest.MonkeyPatch) -> None:
    """A nack counts, and going back before it was delivered again counts once more."""
    patch.setattr(tracker, "keep_replay_counts", lambda self: None)


def plant_other_counts_passed_over(patch: pytest.MonkeyPatch) -> None:
    """After a restart, messages between others of another redelivery count are not delivered."""
    of = RedeliveryCounts.of

    def careless(self: Any, key: Any, wanted: Any) -> Any:
        count, part, _ = of(self, key, wanted)
        return count, part, None

    patch.setattr(RedeliveryCounts, "of", careless)


def plant_delayed_message_shown(patch: pytest.MonkeyPatch) -> None:
    """What waits for its time is delivered with the rest of its entry."""
    patch.setattr(DelayIndex, "visible", lambda self, key, wanted: wanted)


def plant_due_survives_going_back(patch: pytest.MonkeyPatch) -> None:
    """What is due is met at the read position after a seek, and delivered from the queue as well."""
    clear = DueQueue.clear
    patch.setattr(DueQueue, "clear", lambda self: None if hasattr(self, "wanted") else clear(self))


def plant_due_without_consumers_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What became due while nobody was there is never delivered."""
    released = core.released
    patch.setattr(core, "released", lambda self, runs: released(self, runs) if self.consumers else None)


def plant_dispatch_before_the_index_is_read(patch: pytest.MonkeyPatch) -> None:
    """After a restart everything is delivered at once."""
    patch.setattr(dispatcher, "ENTRY_DELAYED", 0)


def plant_due_met_twice(patch: pytest.MonkeyPatch) -> None:
    """What the read position has not met yet is queued when it is due, and met later."""
    released = core.released

    def all_of_it(self: Any, runs: Any) -> None:
        position, self.read_position = self.read_position, (1 << 40, 0, 0)
        released(self, runs)
        self.read_position = position

    patch.setattr(core, "released", all_of_it)


def plant_due_in_the_order_of_the_log(patch: pytest.MonkeyPatch) -> None:
    """Of what is due at once the oldest comes first."""
    add = DueQueue.add
    patch.setattr(DueQueue, "add", lambda self, runs: add(self, sorted(runs)))


def plant_parked_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A due entry that could not be read once is not tried again."""
    patch.setattr(DueQueue, "next_due_ms", None)


PLANTS = {
    name.removeprefix("plant_"): plant for name, plant in list(globals().items()) if name.startswith("plant_")
}
