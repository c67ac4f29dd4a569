"""Where a consumer has come to, for a subscription that is not durable: a reader's, or one with durable=False.

Such a subscription ends at the broker with its last connection. The consumer then asks for a new one behind the last message
that it handed out: nothing comes twice, nothing is left out. The place in a durable subscription is the broker's: there this
says only where it begins if it does not exist yet, and what is handed out costs nothing (1 us a message else).
"""

from __future__ import annotations

from magnetar.proto.ids import MessageId

from ..messages import ACKED, Delivery, Message
from ..options import ConsumerOptions, WireStart, behind, start_on_wire


class ResumePoint:
    """Where the subscription of one consumer is made again after a lost connection."""

    def __init__(self, options: ConsumerOptions) -> None:
        self._durable = options.durable
        self._start = start_on_wire(options.start)  # as asked for, or by the last seek
        # It gets this next: behind all that was handed out, or where the broker says that it begins. None: at `_start`.
        self._next: MessageId | None = None
        # A message in chunks begins here that was not handed out: it goes on there, and passes over what was.
        self.again: MessageId | None = None
        self._last_time_ms: int | None = None  # when the last message that was handed out was stored

    def start(self) -> WireStart:
        """Where the subscription begins if the broker has none of this name (any more)."""
        if self._durable or self._next is None:
            return self._start
        return ("id", min(self.again or self._next, self._next).to_bytes())

    def goes_back_to(self, first: MessageId | None) -> None:
        """Of a message that begins here not all chunks have come, or nobody has seen it. None: there is none."""
        if not self._durable and first is not None and self._next is not None and first < self._next:
            self.again = first if self.again is None else min(self.again, first)

    def was_handed_out(self, last: MessageId) -> bool:
        """True of what comes once more because of `goes_back_to`."""
        if self.again is not None and self._next is not None and last >= self._next:
            self.again = None
        return self.again is not None

    def hide_handed_out(self, delivery: Delivery) -> None:
        """Marks what was handed out before as acknowledged; of messages in chunks their consumer knows."""
        if self.again is None or self._next is None or delivery.message_type is not Message:
            return
        if self.was_handed_out(delivery.first_id):
            seen = delivery.count
            if delivery.last_id >= self._next:
                seen = self._next.index - delivery.base_index
            delivery.flags[:seen] = bytes([ACKED]) * seen

    def begins_at(self, position: MessageId) -> None:
        """The broker's answer to `start`. Whoever wants the earliest message wants it later, too."""
        if self._next is None and self._start[0] != "earliest":
            self._next = position

    def handed_out(self, last: Message) -> None:
        """`last` and everything before it was given to the user. One that was delivered again lies before others."""
        if not self._durable:
            self._last_time_ms = last.delivery.entry.append_time_ms
            self._pass(behind(last.id))

    def skipped(self, entry: MessageId) -> None:
        """This entry, whose first message this is, was passed."""
        self._pass(entry._replace(entry=entry.entry + 1))

    def _pass(self, following: MessageId) -> None:
        if self._next is None or following > self._next:
            self._next = following

    def moved_to(self, position: MessageId) -> None:
        """The subscription was moved to this message, by somebody else perhaps."""
        self._next, self.again = position, None

    def sought_to(self, start: WireStart, position: MessageId) -> None:
        """A seek succeeded."""
        if not self._durable:
            self._start, self._next, self.again = start, None, None
            self.begins_at(position)

    def cluster_switched(self) -> None:
        """An id means another message now: it goes on at the time of the last one, or begins where it was to begin."""
        if self._last_time_ms is not None and not self._durable:
            self._start = ("time", self._last_time_ms)
        elif self._start[0] == "id":
            self._start = ("earliest", None)
        self._next = self.again = None

    def is_behind(self, last: MessageId) -> bool:
        """True if a message up to `last`, the topic's last one, was not handed out."""
        return self._next is None or last >= self._next
