"""What an operator lays down for a cluster, a namespace or a topic: how messages are stored, how long they are kept, what
producers and consumers may do.

A policy that is not set at one level is that of the next one: topic, namespace, then the broker, whose settings are overlaid
by what is set for all brokers while they run. One field is a policy, with two exceptions. The two limits of retention belong
together: where one of them is set, the other one is that of the same level, and no limit if it is not set. The three sizes
of a ledger are set together or not at all.

What each may be, its default and how people write it is in `policy_table`. A limit of 0 or less is none, unless it is said
otherwise.

>>> Policies(retention_ms=3_600_000).check().retention
(3600000, -1)
>>> Policies().retention is None
True
>>> Policies(ensemble_size=3, write_quorum=3, ack_quorum=2).check().quorums
(3, 3, 2)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from .errors import InvalidArgument
from .ids import check_subscription_name
from .policy_table import BY_POLICY, UNLIMITED
from .quorums import MAX_ENSEMBLE_SIZE, quorum_problem

PREFERRED = "preferred:"
_MOST_GROUP_LETTERS = 255


class Policies(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: not set at this level."""

    # Of what every durable subscription has acknowledged: a ledger is deleted once it is older, or once the topic has so
    # many bytes without it. UNLIMITED: this limit deletes nothing. Both 0: nothing is kept for its own sake.
    retention_ms: int | None = None
    retention_bytes: int | None = None
    # What waits longer counts as acknowledged. 0: messages wait for ever.
    message_ttl_ms: int | None = None
    subscription_ttl_ms: dict[str, int] = {}  # by name; these come before message_ttl_ms
    # What no subscription may have more of, in bytes behind it and in the age of its oldest message, and what is done then:
    # producers wait ("hold"), producers are refused ("refuse"), the oldest messages count as acknowledged ("drop").
    backlog_quota_bytes: int | None = None
    backlog_quota_action: str | None = None
    backlog_quota_age_ms: int | None = None
    backlog_quota_age_action: str | None = None
    # A second, of a topic's producers together.
    publish_rate_messages: int | None = None
    publish_rate_bytes: int | None = None
    # In each period: to all subscriptions of a topic, to each of them, to another cluster. `relative`: so much more than is
    # published.
    dispatch_rate_messages: int | None = None
    dispatch_rate_bytes: int | None = None
    dispatch_rate_period_ms: int | None = None
    dispatch_rate_relative: bool | None = None
    subscription_dispatch_rate_messages: int | None = None
    subscription_dispatch_rate_bytes: int | None = None
    subscription_dispatch_rate_period_ms: int | None = None
    subscription_dispatch_rate_relative: bool | None = None
    replicator_dispatch_rate_messages: int | None = None
    replicator_dispatch_rate_bytes: int | None = None
    replicator_dispatch_rate_period_ms: int | None = None
    replicator_dispatch_rate_relative: bool | None = None
    # How often one consumer may subscribe in a period.
    subscribe_rate: int | None = None
    subscribe_rate_period_ms: int | None = None
    # A second, of one broker together.
    broker_publish_rate_messages: int | None = None
    broker_publish_rate_bytes: int | None = None
    broker_dispatch_rate_messages: int | None = None
    broker_dispatch_rate_bytes: int | None = None
    # How many there may be. 0: no limit.
    max_producers: int | None = None
    max_consumers: int | None = None
    max_subscriptions: int | None = None
    max_consumers_per_subscription: int | None = None
    max_unacked_messages_per_consumer: int | None = None
    max_unacked_messages_per_subscription: int | None = None
    max_topics_per_namespace: int | None = None
    max_message_bytes: int | None = None  # never more than the broker's setting
    subscription_types: list[str] | None = None  # that are allowed: of SUBSCRIPTION_TYPES
    # Delivery times: whether they are heeded, how exactly, how far ahead one may lie, and how many messages of a topic may
    # wait for theirs. 0: no limit.
    delayed_delivery: bool | None = None
    delayed_delivery_tick_ms: int | None = None
    max_delivery_delay_ms: int | None = None
    max_delayed_messages: int | None = None
    deduplication: bool | None = None  # by producer name and sequence id
    deduplication_snapshot_entries: int | None = None  # what is known of producers is stored after so many
    # Of the topic's next ledger: how many bookies it is on, how many of them get an entry, how many confirm it. All or none.
    ensemble_size: int | None = None
    write_quorum: int | None = None
    ack_quorum: int | None = None
    # With fewer writable bookies than ensemble_size, ledgers have fewer copies, so many at least. 0: they are refused.
    minimum_write_quorum: int | None = None
    max_mark_delete_rate: float | None = None
    flush: str | None = None  # of FLUSHES
    bookie_group: str | None = None  # see `PlacementGroup`; "": any bookie
    # So many bytes behind the last compaction begin the next one. 0: it is begun when somebody asks for it.
    compaction_threshold_bytes: int | None = None
    # Whether what is asked for and does not exist is made, and as what.
    auto_create_topics: bool | None = None
    auto_create_topics_type: str | None = None
    auto_create_topics_partitions: int | None = None
    auto_create_subscriptions: bool | None = None
    # Topics that nobody uses, and subscriptions that nobody consumes, are deleted after a time. 0: subscriptions never are.
    delete_inactive_topics: bool | None = None
    inactive_topic_mode: str | None = None
    inactive_topic_ms: int | None = None
    subscription_expiration_ms: int | None = None
    schema_compatibility: str | None = None
    schema_validation: bool | None = None
    schema_auto_update: bool | None = None
    offload_threshold_bytes: int | None = None
    offload_threshold_ms: int | None = None
    offload_deletion_lag_ms: int | None = None
    replication_clusters: list[str] | None = None
    encryption_required: bool | None = None
    dispatcher_pause_on_ack_state: bool | None = None
    anti_affinity_group: str | None = None
    # Of namespaces alone, whose topics move as bundles: the brokers that serve them. "": any.
    broker_group: str | None = None  # see `PlacementGroup`
    broker_zone: str | None = None  # a preference: brokers of this zone come first

    @property
    def retention(self) -> tuple[int, int] | None:
        """Milliseconds and bytes as they count together; None: not set."""
        if self.retention_ms is None and self.retention_bytes is None:
            return None
        return (
            UNLIMITED if self.retention_ms is None else self.retention_ms,
            UNLIMITED if self.retention_bytes is None else self.retention_bytes,
        )

    @property
    def quorums(self) -> tuple[int, int, int] | None:
        """Ensemble size, write quorum, ack quorum; None: not set."""
        if self.ensemble_size is None or self.write_quorum is None or self.ack_quorum is None:
            return None
        return self.ensemble_size, self.write_quorum, self.ack_quorum

    def value(self, policy: str) -> Any:
        """By the name of the field."""
        return getattr(self, policy)

    def changed(self, changes: Mapping[str, Any]) -> Policies:
        """With these values; what is None is not set here any more. Of `subscription_ttl_ms` what it names changes.

        Raises InvalidArgument, also for a policy that is not known: it would not be heeded.
        """
        if unknown := changes.keys() - BY_POLICY.keys():
            raise InvalidArgument(f"{min(unknown)!r} is no policy; there are {', '.join(BY_POLICY)}")
        fields = msgspec.structs.asdict(self) | dict(changes)
        try:
            if "subscription_ttl_ms" in changes:
                ttls = self.subscription_ttl_ms | (changes["subscription_ttl_ms"] or {})
                fields["subscription_ttl_ms"] = {
                    name: ttl_ms for name, ttl_ms in ttls.items() if ttl_ms is not None
                }
            return msgspec.convert(fields, Policies).check()
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidArgument(f"the policies are not as they should be: {error}") from None

    def check(self) -> Policies:
        """Returns itself, or raises InvalidArgument."""
        for policy, row in BY_POLICY.items():
            value = getattr(self, policy)
            if value is not None and value != {}:
                row.check(policy, value)
        if self.retention is not None:
            check_retention(*self.retention)
        self._check_durability()
        for name in self.subscription_ttl_ms:
            check_subscription_name(name)
        return self

    def _check_durability(self) -> None:
        sizes = {name: getattr(self, name) for name in ("ensemble_size", "write_quorum", "ack_quorum")}
        missing = [name for name, value in sizes.items() if value is None]
        if 0 < len(missing) < len(sizes):
            raise InvalidArgument(
                f"ensemble_size, write_quorum and ack_quorum belong together, and {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing; set all three, as 3, 3 and 2, or none"
            )
        if self.quorums is not None and (problem := quorum_problem(*self.quorums)):
            given = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise InvalidArgument(f"{given} do not fit: {problem}")
        minimum = self.minimum_write_quorum
        if minimum is not None:
            most = MAX_ENSEMBLE_SIZE if self.write_quorum is None else self.write_quorum
            if minimum > most:
                raise InvalidArgument(
                    f"minimum_write_quorum is {minimum}; want a number of copies, at most {most}, or 0: with fewer bookies "
                    "than ensemble_size nothing is written"
                    + (
                        ""
                        if self.write_quorum is None
                        else f" (write_quorum={most} is how many copies there are)"
                    )
                )
        if self.bookie_group is not None:
            PlacementGroup.parse(self.bookie_group)
        if self.broker_group is not None:
            PlacementGroup.parse(self.broker_group, "broker_group")

    def check_level(self, level: str) -> Policies:
        """Returns itself, or raises InvalidArgument where one of these is no policy of such a level."""
        for policy, row in BY_POLICY.items():
            if level not in row.levels and getattr(self, policy) not in (None, {}):
                raise InvalidArgument(
                    f"{policy} is no policy of a {level}; set it for the {' or the '.join(row.levels)}"
                )
        return self


class PlacementGroup(NamedTuple):
    """The bookies that ledgers are placed on, or the brokers that serve topics: those of a group, or these before others.

    A bookie says its group in [bookie] group, a broker in [broker] group.

    >>> [tuple(PlacementGroup.parse(text)) for text in ("fast", "preferred:fast", "")]
    [('fast', True), ('fast', False), ('', False)]
    """

    name: str  # "": any
    strict: bool  # nothing is written, or served, where there are too few of them

    @classmethod
    def parse(cls, text: str, policy: str = "bookie_group") -> PlacementGroup:
        """Raises InvalidArgument."""
        name = text.removeprefix(PREFERRED)
        plain = name.isascii() and all(letter.isalnum() or letter in "-_." for letter in name)
        if not plain or len(name) > _MOST_GROUP_LETTERS or (not name and text):
            raise InvalidArgument(
                f"{policy} is {text!r:.300}; want the group that {policy.partition('_')[0]}s have in their settings, as "
                f"fast, or {PREFERRED}fast where others will do as well, or nothing for any; a name has letters, digits, "
                "'-', '_' and '.'"
            )
        return cls(name, bool(name) and name == text)


def check_retention(retention_ms: int, retention_bytes: int) -> None:
    """Raises InvalidArgument."""
    for name, value in (("retention_ms", retention_ms), ("retention_bytes", retention_bytes)):
        BY_POLICY[name].check(name, value)
    if (retention_ms == 0) != (retention_bytes == 0):
        raise InvalidArgument(
            f"retention_ms={retention_ms} and retention_bytes={retention_bytes} contradict each other: 0 keeps nothing. Set "
            f"both to 0, or the one that shall not limit to {UNLIMITED}"
        )


class PolicyInForce(NamedTuple):
    """What holds for a topic or a namespace in the end, and whose policy that is."""

    policy: str  # a field of Policies
    subscription: str  # that it is for; "": all that have none of their own
    value: Any
    source: str  # "topic", "namespace" or "broker"


def decode_changes(payload: bytes) -> dict[str, Any]:
    """From a msgpack map, of what `Policies.changed` takes. Raises InvalidArgument."""
    try:
        return msgspec.msgpack.decode(payload, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the policies are not as they should be: {error}") from None
