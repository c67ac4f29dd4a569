"""What the dispatcher asks of a subscription type."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import ClassVar, Protocol

from magnetar.proto.entry import Entry
from magnetar.proto.ranges import Range, RangeSet

from ....cursors.core.acks import EntryKey
from ....cursors.core.redeliveries import DeliveredRanges
from ..consumer import Consumer
from ..redelivery_tracker import Observer

# What one consumer gets of an entry: who; which messages, sorted, all delivered equally often before; how many of them at
# most, plus the rest of one batch; that redelivery count. A plain tuple, since one is made for every delivery.
Share = tuple[Consumer, list[Range], int, int]
# Shares; messages that go to the replay queue, with their redelivery count; the index after what was looked at.
SharedOut = tuple[Sequence[Share], Sequence[tuple[int, RangeSet]], int]
# Messages of an entry that were not delivered equally often before; None: they were.
Mixed = DeliveredRanges | None
# Of what is delivered again: entries before it in the replay queue that wait for a time; None: the entry is new.
Older = Iterable[EntryKey] | None


class Selector(Protocol):
    """Knows the consumers of one subscription. Sees every change of a consumer: permits, caps, writability."""

    # Pending acknowledgements are tracked by consumer, and given back when it leaves. Else everything that was delivered
    # and is not acknowledged is delivered again by moving the read position back.
    individual_acks: ClassVar[bool]
    # More than one consumer may be attached.
    several: ClassVar[bool]
    # Consumers may ask for slots of the keys' hash (`check_hash_ranges`).
    hash_ranges: ClassVar[bool] = False
    # The one consumer that gets everything, if it is for one; where others wait for its place each change is reported.
    active: Consumer | None = None
    # When `timer_due` has something to do.
    next_due_ms: int | None = None
    # Dispatch goes past messages that nobody can have now, until so many of them wait in the replay queue.
    look_ahead_messages: int = 1 << 62
    # True: so much was done that the loop is to have its turn. The dispatcher sets it back.
    turn_over: bool = False
    # Of the entry that was shared out last: what nobody is to have. The dispatcher has it acknowledged, and sets it back.
    passed: Sequence[Range] = ()

    @property
    def observer(self) -> Observer | None:
        """Of a type that decides by keys: learns where the messages are."""
        return None

    def added(self, consumer: Consumer, now_ms: int) -> bool:
        """A consumer joined; True if it takes over, so that the read position must go back."""
        ...

    def left(self, consumer: Consumer) -> bool:
        """A consumer left; True if the read position must go back."""
        ...

    def timer_due(self, now_ms: int) -> bool:
        """The time `next_due_ms` has come; True if the read position must go back."""
        return False

    def changed(self, consumer: Consumer) -> None:
        """The consumer may be ready now, after something had stopped it."""
        ...

    @property
    def ready(self) -> bool:
        """True if `share_out` may be called. O(1) over many calls, however many consumers are not ready."""
        ...

    def share_out(
        self, key: EntryKey, entry: Entry, wanted: list[Range], count: int, mixed: Mixed, older: Older
    ) -> SharedOut:
        """Who gets what of an entry, out of `wanted` (sorted, not empty), which was delivered `count` times before.

        `mixed`: all that is wanted, if others were not delivered equally often; `wanted` has the lowest message then. What
        was looked at of a new entry is either in the shares or left over. Of another one (`older`) everything is in the
        replay queue, and stays there unless it is delivered.
        """
        ...

    @property
    def sets_aside(self) -> bool:
        """True if what it cannot deliver now may be set aside."""
        return False

    def waits_still(self, key: EntryKey) -> bool:
        """True: nothing of an entry that was set aside can be delivered yet, and it is set aside again."""
        return False

    def set_aside(self, key: EntryKey, cut_short: Iterable[Consumer]) -> bool:
        """True: what is left over of the entry that was shared out last waits until `released` names it; else for its turn.

        `cut_short`: those who got less than their share.
        """
        return False

    def released(self) -> Iterable[EntryKey]:
        """Entries that were set aside and may have something to deliver now."""
        return ()

    def left_queue(self, replay: Container[EntryKey]) -> None:
        """Entries have left the replay queue undelivered: of those that were set aside the ones in `replay` still wait."""
        return

    @property
    def draining(self) -> dict[str, int]:
        """Key hash slots by the consumer that others wait for, for the stats."""
        return {}
