"""What the dispatcher asks of a subscription type."""

from __future__ import annotations

from typing import ClassVar, Protocol

from magnetar.proto.entry import Entry
from magnetar.proto.ranges import Range

from ..consumer import Consumer

# Who gets some of an entry; what of it: all that is wanted, the same list, or exactly its first messages, a new one; and how
# many messages at most (of all that is wanted the rest of a batch may come on top).
Choice = tuple[Consumer, list[Range], int]


class Selector(Protocol):
    """Knows the consumers of one subscription. Sees every change of a consumer: permits, caps, writability."""

    # Pending acknowledgements are tracked by consumer, and given back when it leaves. Else everything that was delivered
    # and is not acknowledged is delivered again by moving the read position back.
    individual_acks: ClassVar[bool]
    # More than one consumer may be attached.
    several: ClassVar[bool]
    # The one consumer that gets everything, if it is for one; where others wait for its place each change is reported.
    active: Consumer | None = None
    # When `timer_due` has something to do.
    next_due_ms: int | None = None

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
        """True if `choose` may be called. O(1) over many calls, however many consumers are not ready."""
        ...

    def choose(self, entry: Entry, wanted: list[Range]) -> Choice:
        """Who gets the next messages of an entry, out of `wanted` (sorted, not empty)."""
        ...
