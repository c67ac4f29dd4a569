"""A consumer attached to a subscription: its permits, what it owes an acknowledgement for, and the port to deliver to."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from magnetar.proto.entry import Entry
from magnetar.proto.errors import MagnetarError

from ..cursors.core.acks import EntryKey
from ..cursors.core.ranges import DeliveredRanges, Range

# What a consumer that grants no bytes may have: as much as its message permits allow.
UNLIMITED_BYTES = 1 << 62


class Delivery(NamedTuple):
    """Batches [first_batch, last_batch) of an entry for one consumer.

    `hidden`: messages of this slice, both ends included, that are acknowledged or not meant for this consumer now.
    """

    epoch: int
    ledger_id: int
    entry_id: int
    entry: Entry
    first_batch: int
    last_batch: int
    redelivery_count: int
    hidden: list[Range]


class ConsumerPort(Protocol):
    """What a listener implements for one consumer."""

    @property
    def writable(self) -> bool:
        """False while the connection's write buffer is full; the listener calls `Subscription.wake` when it drains."""

    def deliver(self, delivery: Delivery) -> None:
        """Sends a delivery; never raises, never calls back into the subscription."""

    def consumer_closed(self, error: MagnetarError) -> None:
        """The broker ended the consumer: look the topic up again."""


class Consumer:
    """One consumer. Permits fall with every delivery and may go below zero by what the last batch overshot."""

    __slots__ = (
        "byte_limited",
        "byte_permits",
        "closed",
        "delivered_bytes",
        "delivered_messages",
        "epoch",
        "name",
        "pending",
        "permits",
        "port",
    )

    def __init__(self, name: str, epoch: int, port: ConsumerPort) -> None:
        self.name = name
        self.epoch = epoch
        self.port = port
        self.permits = 0  # messages
        self.byte_permits = 0
        # A consumer that never grants bytes is limited by messages alone.
        self.byte_limited = False
        self.closed = False
        # Delivered and not acknowledged: of a shared subscription everything, of an exclusive one what was redelivered.
        self.pending: dict[EntryKey, DeliveredRanges] = {}
        self.delivered_messages = 0
        self.delivered_bytes = 0

    @property
    def ready(self) -> bool:
        """True if something may be delivered now."""
        return self.permits > 0 and (not self.byte_limited or self.byte_permits > 0) and self.port.writable

    @property
    def byte_room(self) -> int:
        """Bytes that may be delivered."""
        return self.byte_permits if self.byte_limited else UNLIMITED_BYTES

    def grant(self, messages: int, size: int) -> None:
        """Adds permits; they are bounded so that no peer can make them overflow anything."""
        self.permits = min(self.permits + max(messages, 0), 1 << 40)
        if size > 0:
            self.byte_limited = True
            self.byte_permits = min(self.byte_permits + size, UNLIMITED_BYTES)

    @property
    def unacked(self) -> int:
        """Messages in `pending`."""
        return sum(ranges.members for ranges in self.pending.values())

    def settle(self, key: EntryKey, first: int, last: int) -> list[tuple[int, int, int]]:
        """Takes first..last of an entry out of `pending`; returns what was there, with redelivery counts."""
        ranges = self.pending.get(key)
        if ranges is None:
            return []
        taken = ranges.take(first, last)
        if not ranges:
            del self.pending[key]
        return taken
