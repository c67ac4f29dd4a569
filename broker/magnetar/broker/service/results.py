"""What operations return. Those of administration are named as their answer on the wire (WIRE.md), which they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from magnetar.proto.policies import Policies, PolicyInForce

from ..compaction.topic_compaction import CompactionStats
from ..dispatch.core.consumer import Consumer
from ..dispatch.subscription import Subscription
from ..ownership.ownership import BrokerRow, BundleRow
from ..topics.backlog import PeekedEntry
from ..topics.core.producers import ProducerSession
from ..topics.topic import Topic


class ProducerOpened(NamedTuple):
    """A producer: publish with `topic.publish(session, ...)`, end it with `topic.producer_left(session, ...)`."""

    topic: Topic
    session: ProducerSession
    schema_version: int | None  # None: it has no schema


class ConsumerOpened(NamedTuple):
    """A consumer: its permits and acknowledgements go to the subscription, which also removes it."""

    topic: Topic
    subscription: Subscription
    consumer: Consumer
    trimmed: bool  # see Subscribed


class BrokersFound(msgspec.Struct, frozen=True):
    """The brokers of the cluster, by name."""

    brokers: list[BrokerRow]
    balancer: str  # name of the one that balances; "": none


class BundlesFound(msgspec.Struct, frozen=True):
    """The bundles of a namespace, in the order of their hashes."""

    bundles: list[BundleRow]


class BookieRow(msgspec.Struct, frozen=True):
    """A bookie, as far as this broker knows."""

    name: str
    address: str  # host:port; "": not known
    writable: bool
    reason: str  # why it takes no new entries; "" if it does
    free_bytes: int  # 0: not known
    rack: str
    zone: str
    group: str


class BookiesFound(msgspec.Struct, frozen=True):
    """The bookies that this broker writes to, or would, by name."""

    bookies: list[BookieRow]


class TopicPage(msgspec.Struct, frozen=True):
    """Full names, sorted."""

    topics: list[str]
    more: bool  # there are names after the last one


class ProducerStats(msgspec.Struct, frozen=True):
    """A connected producer."""

    name: str
    epoch: int
    access_mode: str
    topic_epoch: int  # under which it has the topic for itself; -1: it is one of several
    address: str  # host:port
    client: str  # what it calls itself, with its version
    messages_in: int  # these two since it was opened here
    bytes_in: int
    message_rate_in: float  # these two a second, of the last ten seconds or a little more
    byte_rate_in: float
    opened_ms: int  # when
    metadata: Mapping[str, str]  # that its program noted; only Pulsar's clients can


class LedgerStats(msgspec.Struct, frozen=True):
    """A ledger that the topic holds."""

    ledger: int
    stored_ledger: int
    entries: int
    messages: int
    bytes: int
    first_index: int
    closed: bool


class OpenLedgerStats(msgspec.Struct, frozen=True):
    """The ledger that a topic is written to."""

    ledger: int
    bookies: list[str]  # now
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    degraded: bool  # fewer bookies or copies than the policies asked for
    flush: str
    unflushed_bytes: int  # acknowledged and not durable yet


class UnreadableEntry(msgspec.Struct, frozen=True):
    """Delivery waits for it, or goes on without it until it can be read."""

    ledger: int
    entry: int
    error: str
    attempts: int


class ConsumerStats(msgspec.Struct, frozen=True):
    """A connected consumer."""

    name: str
    address: str  # host:port
    client: str  # what it calls itself, with its version
    active: bool  # false: a failover consumer that waits for its place
    priority_level: int
    draining_slots: int  # key_shared: owned by others now, and wait for what this one has unacknowledged
    permits: int
    unacked_messages: int
    blocked_on_unacked_messages: bool
    delivered_messages: int
    delivered_bytes: int
    message_rate_out: float  # these four a second, as those of the subscription
    byte_rate_out: float
    redelivery_rate: float
    acknowledge_rate: float
    opened_ms: int  # when
    metadata: Mapping[str, str]  # as of producers


class SubscriptionStats(msgspec.Struct, frozen=True):
    """A subscription."""

    type: str
    durable: bool
    epoch: int
    mark_delete: list[int]  # [ledger, entry, index]
    # Where it went on when a part of its cursor was lost; None: nothing was.
    recovered_from: list[int] | None
    # Not acknowledged. An upper bound where more than 100 entries would have to be read to count what was acknowledged.
    backlog_messages: int
    backlog_bytes: int  # of all that lies behind the mark-delete position
    backlog_age_ms: int  # since the first message of that was stored, or about as long; 0: there is none
    acknowledged_ranges: int
    acknowledged_messages: int
    messages_out: int  # these two since the topic was loaded
    bytes_out: int
    message_rate_out: float  # these four a second, of the last ten seconds or a little more
    byte_rate_out: float
    redelivery_rate: float
    acknowledge_rate: float
    redelivery_messages: int
    # Wait for their delivery time; some may be acknowledged. 0 for types that do not wait.
    delayed_messages: int
    unacked_messages: int
    blocked_on_unacked_messages: bool
    unreadable_entries: list[UnreadableEntry]
    skipped_entries: int
    dropped_messages: int  # of a non-persistent topic
    properties: dict[str, str]  # that users noted of it
    consumers: list[ConsumerStats]


class TopicStats(msgspec.Struct, frozen=True):
    """Figures of a topic. Archived ledgers are in none of the other figures."""

    topic: str
    state: str
    messages_in: int  # these four since it was loaded
    bytes_in: int
    messages_out: int  # to all subscriptions together
    bytes_out: int
    message_rate_in: float  # these five a second, of the last ten seconds or a little more
    byte_rate_in: float
    message_rate_out: float
    byte_rate_out: float
    drop_rate: float  # messages of a non-persistent topic
    duplicate_messages: int  # since it was loaded: sent again, and not stored again
    dropped_messages: (
        int  # of a non-persistent topic: they left before a subscription had them, summed over subscriptions
    )
    stored_messages: int
    stored_bytes: int
    next_index: int
    archived_ledgers: int
    archived_messages: int
    archived_bytes: int
    archive_locations: list[str]
    trimmed_until: list[int]  # the position from which on ledgers are not trimmed
    retained_by: str  # who needs what stands there, in words; empty: nobody
    open_ledger: OpenLedgerStats | None  # None: the next message opens one
    degraded: bool  # the open ledger is
    queued_bytes: int
    staged_ledgers: int
    leases: int
    producers: list[ProducerStats]
    topic_epoch: int  # of the exclusive producer that was let in last; -1: none was
    waiting_producers: int  # for exclusive access
    held_times: int  # that a producer was ahead of the publish rate, since it was loaded
    terminated: bool
    ledgers: list[LedgerStats]
    subscriptions: dict[str, SubscriptionStats]
    unavailable_subscriptions: dict[str, str]  # those whose cursor could not be read, and why
    compaction: CompactionStats


class PartitionsLeft(msgspec.Struct, frozen=True):
    """Of a partitioned topic that is being deleted: the numbers of those that are to be deleted first; none: it is gone."""

    partitions: list[int]


class PoliciesFound(msgspec.Struct, frozen=True):
    """Policies that are set at one level, their version, and what is in force there."""

    policies: Policies
    version: int
    in_force: list[PolicyInForce]


class Expired(msgspec.Struct, frozen=True):
    """What an expiry did to a subscription. `messages` lie between the old and the new mark-delete position."""

    moved: bool
    messages: int
    mark_delete: list[int]  # [ledger, entry, index]


class Skipped(msgspec.Struct, frozen=True):
    """What an operator skipped, and where the subscription is now."""

    skipped: int
    mark_delete: list[int]


class Peeked(msgspec.Struct, frozen=True):
    """The next messages of a subscription."""

    entries: list[PeekedEntry]
