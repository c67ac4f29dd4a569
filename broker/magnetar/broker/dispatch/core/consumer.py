"""A consumer attached to a subscription: its permits, its pending acknowledgements, and the port to deliver to."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from magnetar.proto.entry import Entry
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ids import NO_PARTITION
from magnetar.proto.ranges import Range

from ...cursors.core.acks import EntryKey
from ...cursors.core.redeliveries import DeliveredRanges
from ...resources.moving_rates import MovingRates

# What a consumer that grants no bytes may have: as much as its message permits allow.
UNLIMITED_BYTES = 1 << 62
MAX_PERMITS = 1 << 40  # so that no peer can make them overflow anything


class Delivery(NamedTuple):
    """Batches [first_batch, last_batch) of an entry for one consumer; a tuple, since one is made per delivery.

    `hidden`: messages of this slice, both ends included, that are acknowledged or not meant for this consumer now.
    """

    consumer: Consumer
    epoch: int
    ledger_id: int
    entry_id: int
    entry: Entry
    first_batch: int
    last_batch: int
    redelivery_count: int
    hidden: list[Range]


class Peer(Protocol):
    """The connection of a producer or a consumer."""

    @property
    def address(self) -> str:
        """`host:port` of who is there."""

    @property
    def client_version(self) -> str:
        """What the client calls itself, for example "Pulsar-CPP-v3.7.2" or "Pulsar-Java-v4.0.6"."""

    def probe(self) -> Awaitable[None]:
        """Done when somebody has answered there, or when it is closed, with all that it held, since nobody did."""


class ConsumerPort(Protocol):
    """What a listener implements for one consumer. The core looks at `writable` only; its shell calls the others."""

    @property
    def peer(self) -> Peer:
        """Whose consumer it is."""

    @property
    def writable(self) -> bool:
        """False while the connection's write buffer is full; then the listener calls `Subscription.writable` later."""

    def deliver(self, delivery: Delivery) -> None:
        """Sends a delivery; never raises."""

    def active_changed(self, active: bool) -> None:
        """Failover: the consumer is the one that gets everything from now on, or is not any more."""

    def entry_unreadable(self, epoch: int, key: EntryKey, error: MagnetarError, *, lost: bool) -> None:
        """The consumer waits for an entry that could not be read so far. `lost`: no later attempt will find it."""

    def sought(self) -> None:
        """The subscription was moved, by whomever, and that is durable: what was delivered means nothing any more.

        A consumer that cannot learn its new epoch leaves here, to come again (`Subscription.remove_consumer`, `returns`).
        """

    def end_of_topic(self, epoch: int, redelivers: int) -> None:
        """The topic is terminated, and nothing is left for the consumer but what it gives back after `redelivers` times."""

    def consumer_closed(self, error: MagnetarError) -> None:
        """The broker ended the consumer: look the topic up again."""


@dataclass(slots=True, eq=False)
class Consumer:
    """One consumer. Changed by the dispatch core alone, through its selector and its redelivery tracker."""

    name: str
    epoch: int
    port: ConsumerPort
    priority_level: int = 0  # the highest
    partition: int = NO_PARTITION  # of the topic: failover consumers of equal priority are spread by it
    hash_ranges: Sequence[Range] = ()  # those that a key_shared or exclusive consumer wants, sorted
    # Messages; falls with every delivery, and may go below zero by what the last batch overshot.
    available_permits: int = 0
    byte_permits: int = 0
    byte_limited: bool = False  # a consumer that never grants bytes is limited by messages alone
    closed: bool = False
    queued: bool = False  # stands in its selector's queue of those that may be ready
    # Delivered and not acknowledged, with redelivery counts. Where acknowledgements are individual: everything;
    # of an exclusive subscription: what was delivered again after a nack.
    pending_acks: dict[EntryKey, DeliveredRanges] = field(default_factory=dict)
    unacked_messages: int = 0  # the members of `pending_acks`
    blocked_on_unacked_messages: bool = False  # reached its cap, and has not come down to half of it since
    redelivers: int = 0  # how often it has given messages back
    told_end: tuple[int, int] | None = None  # epoch, and redelivers, when it was told of the topic's end last
    delivered_messages: int = 0
    delivered_bytes: int = 0
    redelivered_messages: int = 0
    acked_messages: int = 0  # one by one
    rates: MovingRates = field(default_factory=lambda: MovingRates(4))  # of these four
    opened_ms: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)  # that its program noted, for people

    @property
    def ready(self) -> bool:
        """True if something may be delivered now."""
        return (
            self.available_permits > 0
            and (self.byte_permits > 0 or not self.byte_limited)
            and not self.blocked_on_unacked_messages
            and self.port.writable
        )

    @property
    def idle(self) -> bool:
        """True if it is ready and has nothing to do."""
        return not self.unacked_messages and self.ready

    def count_rates(self, now: float) -> None:
        """Called every few seconds; `now` in seconds of the loop."""
        if self.rates.due(now):
            counters = (
                self.delivered_messages,
                self.delivered_bytes,
                self.redelivered_messages,
                self.acked_messages,
            )
            self.rates.look(now, counters)

    def grant(self, messages: int, size: int) -> None:
        """Adds permits."""
        self.available_permits = min(self.available_permits + max(messages, 0), MAX_PERMITS)
        if size > 0:
            self.byte_limited = True
            self.byte_permits = min(self.byte_permits + size, UNLIMITED_BYTES)
