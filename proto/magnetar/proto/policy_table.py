"""The table of policies. A row says how a policy is written, what it may be, what it is if nobody sets it, at which levels
it is set, and where and as what Pulsar has it.

A policy is added here and as a field of `Policies` (`policies`). Where the broker has a setting of the same name, it has the
default of the row, and what the operator writes there counts. Checks, the command line, HTTP and the page of policies are
made of this table.

>>> BY_POLICY["publish_rate_messages"].option, BY_POLICY["publish_rate_messages"].pulsar
('publish-rate', ('publishRate.publishThrottlingRateInMsg',))
>>> BY_POLICY["flush"].check("flush", "never")
Traceback (most recent call last):
magnetar.proto.errors.InvalidArgument: flush is 'never'; want sync or async
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from .errors import InvalidArgument
from .frames import DEFAULT_MAX_MESSAGE_BYTES

UNLIMITED = -1
# A topic stores them beside its list of ledgers, which is written with every ledger.
MAX_SUBSCRIPTION_TTLS = 200
_MOST = 1 << 53  # what every client can count to
# When a message is acknowledged to its producer: once ack_quorum bookies have it on disk, or in memory.
FLUSHES = ("sync", "async")
ALL, NAMESPACE, BROKER = ("topic", "namespace", "broker"), ("namespace", "broker"), ("broker",)
SUBSCRIPTION_TYPES = ("exclusive", "shared", "failover", "key_shared")
_NO_LIMIT = {"infinite": 0}
_INFINITE = {"infinite": UNLIMITED}
_SWITCH: Mapping[str, Any] = {"on": True, "off": False}
_ACTIONS = {
    "hold": "producer_request_hold",
    "refuse": "producer_exception",
    "drop": "consumer_backlog_eviction",
}
_TYPES = {name: "_".join(part.capitalize() for part in name.split("_")) for name in SUBSCRIPTION_TYPES}
_STRATEGIES = (
    "UNDEFINED ALWAYS_INCOMPATIBLE ALWAYS_COMPATIBLE BACKWARD FORWARD FULL BACKWARD_TRANSITIVE FORWARD_TRANSITIVE "
    "FULL_TRANSITIVE"
).split()


def _words(*words: str) -> dict[str, str]:
    return {word: word for word in words}


class Described(NamedTuple):
    """A row of the table: policies that are written together, most often one."""

    policies: tuple[str, ...]  # fields of Policies; several are written A/B/C
    option: str  # of the command line, without dashes
    # Of texts that are none of `words`, which are all that there are of a "word" and of "words".
    unit: Literal["time", "size", "count", "real", "word", "words", "name", "names"]
    metavar: str
    help: str
    words: Mapping[str, Any] = {}  # texts with a value of their own
    by_subscription: bool = False  # the field holds a value for each name of a subscription
    # SEGMENT or SEGMENT.KEY of Pulsar's paths and JSON, for each of `policies`; none: Pulsar has no such policy.
    pulsar: tuple[str, ...] = ()
    scale: int = 1  # so many of ours are one of Pulsar's
    pulsar_words: Mapping[str, str] = {}  # Pulsar's, by ours
    dynamic: str = ""  # Pulsar's name in the dynamic configuration of brokers
    levels: tuple[str, ...] = ALL
    least: int = 0
    default: Any = (
        None  # if the broker has no setting of that name, and of what an object of Pulsar does not say
    )
    stored: bool = False  # kept and shown, not heeded yet

    def check(self, policy: str, value: Any) -> None:
        """Of the value of a field. Raises InvalidArgument."""
        if self.by_subscription:
            if len(value) > MAX_SUBSCRIPTION_TTLS:
                raise InvalidArgument(
                    f"{len(value)} subscriptions have a {policy}; at most {MAX_SUBSCRIPTION_TTLS} may"
                )
            for name, one in value.items():
                self.check_one(f"{policy} of {name!r:.300}", one)
        elif isinstance(value, list):
            for one in value:
                self.check_one(policy, one)
        else:
            self.check_one(policy, value)

    def check_one(self, what: str, value: Any) -> None:
        """Raises InvalidArgument."""
        if self.unit in ("word", "words"):
            if value not in self.words.values():
                raise InvalidArgument(f"{what} is {value!r:.300}; want {' or '.join(self.words)}")
        elif isinstance(value, int | float) and not self.least <= value < _MOST:
            wanted = f"{max(self.least, 0)} or more"
            if self.least < 0:
                wanted += f", or {UNLIMITED} for no limit"
            elif 0 in self.words.values():
                wanted = f"0 ({next(word for word, known in self.words.items() if known == 0)}) or more"
            raise InvalidArgument(f"{what} is {value}; want {wanted}")


def _maximum(
    policy: str,
    option: str,
    pulsar: str,
    help: str,
    levels: tuple[str, ...] = ALL,
    default: int = 0,
    **more: Any,
) -> Described:
    return Described(
        (policy,), option, "count", "COUNT", help, _NO_LIMIT,
        pulsar=(pulsar,), levels=levels, default=default, **more,
    )  # fmt: skip


def _rate(
    policy: str,
    option: str,
    what: str,
    pulsar: str = "",
    dynamic: str = "",
    each: str = "second",
    **more: Any,
) -> Described:
    """A limit of messages or, if the policy says so, of bytes in each second or period."""
    size = policy.endswith("_bytes")
    units, example = ("bytes", "10MB") if size else ("messages", "1000")
    return Described(
        (policy,), option + "-size" * size, "size" if size else "count", "SIZE" if size else "MESSAGES",
        f"How many {units} {what} in each {each}: {example}, infinite, inherit.",
        _INFINITE, pulsar=(pulsar,) if pulsar else (), dynamic=dynamic, least=UNLIMITED, default=UNLIMITED, **more,
    )  # fmt: skip


def _dispatch_rate(
    name: str, pulsar: str, what: str, dynamic: str, stored: bool = False
) -> tuple[Described, ...]:
    """How much is dispatched in a period."""
    option, throttling = name.replace("_", "-"), f"{pulsar}.dispatchThrottlingRateIn"
    return (
        _rate(f"{name}_messages", option, what, f"{throttling}Msg", f"{dynamic}InMsg", "period", stored=stored),
        _rate(f"{name}_bytes", option, what, f"{throttling}Byte", f"{dynamic}InByte", "period", stored=stored),
        Described(
            (f"{name}_period_ms",), f"{option}-period", "time", "TIME", f"The period of --{option}: 1s, inherit.",
            pulsar=(f"{pulsar}.ratePeriodInSecond",), scale=1_000, least=1, default=1_000, stored=stored,
        ),
        Described(
            (f"{name}_relative",), f"{option}-relative", "word", "WHETHER",
            f"Whether --{option} comes on top of what is published: on, off, inherit.", _SWITCH,
            pulsar=(f"{pulsar}.relativeToPublishRate",), default=False, stored=True,
        ),
    )  # fmt: skip


DESCRIBED = (
    Described(
        ("retention_ms",), "retention", "time", "TIME",
        "How long acknowledged messages are kept: 12h, 3d, infinite; 0 keeps none. inherit: as on the next level.",
        _INFINITE, pulsar=("retention.retentionTimeInMinutes",), scale=60_000, least=UNLIMITED, default=0,
    ),
    Described(
        ("retention_bytes",), "retention-size", "size", "SIZE",
        "Up to which size of a topic they are kept: 500MB, 10GB, infinite, inherit.",
        _INFINITE, pulsar=("retention.retentionSizeInMB",), scale=1 << 20, least=UNLIMITED, default=0,
    ),
    Described(
        ("message_ttl_ms",), "ttl", "time", "TIME",
        "How long messages wait to be acknowledged; then they count as acknowledged: 1h, 7d, infinite, inherit.",
        _NO_LIMIT, pulsar=("messageTTL",), scale=1_000, default=0,
    ),
    Described(
        ("subscription_ttl_ms",), "subscription-ttl", "time", "NAME=TIME",
        "The same for one subscription; may be repeated.",
        _NO_LIMIT, by_subscription=True, levels=("topic", "namespace"), default={},
    ),
    Described(
        ("backlog_quota_bytes",), "backlog-quota", "size", "SIZE",
        "How much of a topic a subscription may have unacknowledged: 10GB, infinite, inherit.",
        _INFINITE, pulsar=("backlogQuota.destination_storage.limitSize",), least=UNLIMITED, default=UNLIMITED,
    ),
    Described(
        ("backlog_quota_action",), "backlog-quota-action", "word", "ACTION",
        "With more, producers wait (hold) or are refused (refuse), or the oldest messages are given up (drop).",
        _words(*_ACTIONS), pulsar=("backlogQuota.destination_storage.policy",), pulsar_words=_ACTIONS, default="hold",
    ),
    Described(
        ("backlog_quota_age_ms",), "backlog-quota-age", "time", "TIME",
        "How old the oldest message may be that a subscription has not acknowledged: 1d, infinite, inherit.",
        _INFINITE, pulsar=("backlogQuota.message_age.limitTime",), scale=1_000, least=UNLIMITED, default=UNLIMITED,
    ),
    Described(
        ("backlog_quota_age_action",), "backlog-quota-age-action", "word", "ACTION",
        "With an older one, producers wait (hold) or are refused (refuse), or the oldest messages are given up (drop).",
        _words(*_ACTIONS), pulsar=("backlogQuota.message_age.policy",), pulsar_words=_ACTIONS, default="hold",
    ),
    _rate(
        "publish_rate_messages", "publish-rate", "a topic takes", "publishRate.publishThrottlingRateInMsg",
        "maxPublishRatePerTopicInMessages",
    ),
    _rate(
        "publish_rate_bytes", "publish-rate", "a topic takes", "publishRate.publishThrottlingRateInByte",
        "maxPublishRatePerTopicInBytes",
    ),
    *_dispatch_rate(
        "dispatch_rate", "dispatchRate", "go to all subscriptions of a topic", "dispatchThrottlingRatePerTopic"
    ),
    *_dispatch_rate(
        "subscription_dispatch_rate", "subscriptionDispatchRate", "go to each subscription",
        "dispatchThrottlingRatePerSubscription",
    ),
    *_dispatch_rate(
        "replicator_dispatch_rate", "replicatorDispatchRate", "go to another cluster", "dispatchThrottlingRatePerReplicator",
        stored=True,
    ),
    Described(
        ("subscribe_rate",), "subscribe-rate", "count", "TIMES",
        "How often one consumer may subscribe in each period: 10, infinite, inherit.",
        _INFINITE, pulsar=("subscribeRate.subscribeThrottlingRatePerConsumer",),
        dynamic="subscribeThrottlingRatePerConsumer", least=UNLIMITED, default=UNLIMITED,
    ),
    Described(
        ("subscribe_rate_period_ms",), "subscribe-rate-period", "time", "TIME",
        "The period of --subscribe-rate: 30s, inherit.",
        pulsar=("subscribeRate.ratePeriodInSecond",), dynamic="subscribeRatePeriodPerConsumerInSecond",
        scale=1_000, least=1, default=30_000,
    ),
    _rate(
        "broker_publish_rate_messages", "broker-publish-rate", "one broker takes",
        dynamic="brokerPublisherThrottlingMaxMessageRate", levels=BROKER,
    ),
    _rate(
        "broker_publish_rate_bytes", "broker-publish-rate", "one broker takes",
        dynamic="brokerPublisherThrottlingMaxByteRate", levels=BROKER,
    ),
    _rate(
        "broker_dispatch_rate_messages", "broker-dispatch-rate", "one broker sends",
        dynamic="dispatchThrottlingRateInMsg", levels=BROKER,
    ),
    _rate(
        "broker_dispatch_rate_bytes", "broker-dispatch-rate", "one broker sends",
        dynamic="dispatchThrottlingRateInByte", levels=BROKER,
    ),
    _maximum("max_producers", "max-producers", "maxProducersPerTopic", "How many producers a topic may have."),
    _maximum("max_consumers", "max-consumers", "maxConsumersPerTopic", "How many consumers a topic may have."),
    _maximum(
        "max_subscriptions", "max-subscriptions", "maxSubscriptionsPerTopic", "How many subscriptions a topic may have."
    ),
    _maximum(
        "max_consumers_per_subscription", "max-consumers-per-subscription", "maxConsumersPerSubscription",
        "How many consumers a subscription may have.",
    ),
    _maximum(
        "max_unacked_messages_per_consumer", "max-unacked-per-consumer", "maxUnackedMessagesPerConsumer",
        "How many messages a consumer may have and not acknowledge; then it gets none.", default=50_000,
    ),
    _maximum(
        "max_unacked_messages_per_subscription", "max-unacked-per-subscription", "maxUnackedMessagesPerSubscription",
        "How many messages a subscription may have delivered and not acknowledged; then it delivers none.",
        default=200_000,
    ),
    _maximum(
        "max_topics_per_namespace", "max-topics", "maxTopicsPerNamespace", "How many topics a namespace may have.",
        NAMESPACE, dynamic="maxTopicsPerNamespace",
    ),
    Described(
        ("max_message_bytes",), "max-message-size", "size", "SIZE",
        "How large a message may be, if that is less than the broker's setting: 1MB, infinite, inherit.",
        _NO_LIMIT, pulsar=("maxMessageSize",), default=DEFAULT_MAX_MESSAGE_BYTES,
    ),
    Described(
        ("subscription_types",), "subscription-types", "words", "TYPES",
        "Which types of subscriptions are allowed: exclusive,failover, inherit.",
        _words(*SUBSCRIPTION_TYPES), pulsar=("subscriptionTypesEnabled",), pulsar_words=_TYPES,
        dynamic="subscriptionTypesEnabled", default=[*SUBSCRIPTION_TYPES],
    ),
    Described(
        ("delayed_delivery",), "delayed-delivery", "word", "WHETHER",
        "Whether messages wait for their delivery time: on, off (they are delivered at once), inherit.",
        _SWITCH, pulsar=("delayedDelivery.active",), default=True,
    ),
    Described(
        ("delayed_delivery_tick_ms",), "delayed-delivery-tick", "time", "TIME",
        "How much later than their time they may be delivered: 1s, inherit.",
        pulsar=("delayedDelivery.tickTime",), least=1, default=10,
    ),
    Described(
        ("max_delivery_delay_ms",), "max-delivery-delay", "time", "TIME",
        "How far ahead a delivery time may lie: 7d, infinite, inherit.",
        _NO_LIMIT, pulsar=("delayedDelivery.maxDeliveryDelayInMillis",), default=0,
    ),
    Described(
        ("max_delayed_messages",), "max-delayed-messages", "count", "MESSAGES",
        "How many messages of a topic may wait for their delivery time: 1000000, infinite, inherit.",
        _NO_LIMIT, default=0,
    ),
    Described(
        ("deduplication",), "deduplication", "word", "WHETHER",
        "Store what producers send again once, by their name and sequence ids: on, off, inherit.",
        _SWITCH, pulsar=("deduplication",), default=False,
    ),
    Described(
        ("deduplication_snapshot_entries",), "deduplication-snapshot-entries", "count", "ENTRIES",
        "What is known of producers is stored after so many entries: 1000, inherit.",
        pulsar=("deduplicationSnapshotInterval",), least=1, default=1_000,
    ),
    Described(
        ("ensemble_size", "write_quorum", "ack_quorum"), "durability", "count", "E/QW/QA",
        "Ensemble size, write quorum and ack quorum of new ledgers: 3/3/2, or inherit.",
        pulsar=("persistence.bookkeeperEnsemble", "persistence.bookkeeperWriteQuorum", "persistence.bookkeeperAckQuorum"),
        default=1,
    ),
    Described(
        ("minimum_write_quorum",), "minimum-write-quorum", "count", "COPIES",
        "With too few bookies write fewer copies, so many at least: 2, off, inherit.",
        {"off": 0}, default=0,
    ),
    Described(
        ("max_mark_delete_rate",), "max-mark-delete-rate", "real", "RATE",
        "How often in a second an acknowledgement is stored: 0.1, inherit.",
        pulsar=("persistence.managedLedgerMaxMarkDeleteRate",), default=0.0, stored=True,
    ),
    Described(
        ("flush",), "flush", "word", "WHEN",
        "Acknowledge what is on disk (sync) or in the memory of ack-quorum bookies (async): sync, async, inherit.",
        _words(*FLUSHES), default="sync",
    ),
    Described(
        ("bookie_group",), "bookie-group", "name", "GROUP",
        "Write to the bookies of a group only (fast), or before others (preferred:fast): also any, inherit.",
        {"any": ""}, pulsar=("persistence/bookieAffinity.bookkeeperAffinityGroupPrimary",),
        pulsar_words={"": "default"}, default="",
    ),
    Described(
        ("compaction_threshold_bytes",), "compaction-threshold", "size", "SIZE",
        "So many bytes behind the last compaction begin the next one: 100MB, off, inherit.",
        {"off": 0}, pulsar=("compactionThreshold",), default=0,
    ),
    Described(
        ("auto_create_topics",), "auto-create-topics", "word", "WHETHER",
        "Whether a topic is made by its first producer or consumer: on, off, inherit.",
        _SWITCH, pulsar=("autoTopicCreation.allowAutoTopicCreation",), dynamic="allowAutoTopicCreation", levels=NAMESPACE,
        default=True,
    ),
    Described(
        ("auto_create_topics_type",), "auto-create-topics-type", "word", "TYPE",
        "As what it is made: non-partitioned, partitioned, inherit.",
        _words("non-partitioned", "partitioned"), pulsar=("autoTopicCreation.topicType",),
        dynamic="allowAutoTopicCreationType", levels=NAMESPACE, default="non-partitioned",
    ),
    Described(
        ("auto_create_topics_partitions",), "auto-create-topics-partitions", "count", "COUNT",
        "With how many partitions, if it is partitioned: 4, inherit.",
        pulsar=("autoTopicCreation.defaultNumPartitions",), dynamic="defaultNumPartitions", levels=NAMESPACE,
        least=1, default=1,
    ),
    Described(
        ("auto_create_subscriptions",), "auto-create-subscriptions", "word", "WHETHER",
        "Whether a subscription is made by its first consumer: on, off, inherit.",
        _SWITCH, pulsar=("autoSubscriptionCreation.allowAutoSubscriptionCreation",), dynamic="allowAutoSubscriptionCreation",
        default=True,
    ),
    Described(
        ("delete_inactive_topics",), "delete-inactive-topics", "word", "WHETHER",
        "Whether topics that nobody uses are deleted: on, off, inherit.",
        _SWITCH, pulsar=("inactiveTopicPolicies.deleteWhileInactive",), dynamic="brokerDeleteInactiveTopicsEnabled",
        default=False,
    ),
    Described(
        ("inactive_topic_mode",), "inactive-topic-mode", "word", "MODE",
        "Delete them when they have no subscriptions, or also when these have acknowledged everything.",
        _words("delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"),
        pulsar=("inactiveTopicPolicies.inactiveTopicDeleteMode",), dynamic="brokerDeleteInactiveTopicsMode",
        default="delete_when_no_subscriptions",
    ),
    Described(
        ("inactive_topic_ms",), "inactive-topic-after", "time", "TIME",
        "After how long without producers and consumers they are deleted: 1h, inherit.",
        pulsar=("inactiveTopicPolicies.maxInactiveDurationSeconds",),
        dynamic="brokerDeleteInactiveTopicsMaxInactiveDurationSeconds", scale=1_000, least=1, default=60_000,
    ),
    Described(
        ("subscription_expiration_ms",), "subscription-expiration", "time", "TIME",
        "After how long without consumers a subscription is deleted: 30d, infinite, inherit.",
        _NO_LIMIT, pulsar=("subscriptionExpirationTime",), levels=NAMESPACE, scale=60_000, default=0,
    ),
    Described(
        ("schema_compatibility",), "schema-compatibility", "word", "STRATEGY",
        "What a new version of a schema must be compatible with: BACKWARD, FULL (as UNDEFINED), inherit.",
        _words(*_STRATEGIES), pulsar=("schemaCompatibilityStrategy",), default="UNDEFINED",
    ),
    Described(
        ("schema_validation",), "schema-validation", "word", "WHETHER",
        "Whether producers of topics with a schema need one: on, off, inherit.",
        _SWITCH, pulsar=("schemaValidationEnforced",), default=False,
    ),
    Described(
        ("schema_auto_update",), "schema-auto-update", "word", "WHETHER",
        "Whether producers may bring new versions of a schema: on, off, inherit.",
        _SWITCH, pulsar=("isAllowAutoUpdateSchema",), dynamic="isAllowAutoUpdateSchemaEnabled", levels=NAMESPACE,
        default=True,
    ),
    Described(
        ("offload_threshold_bytes",), "offload-threshold", "size", "SIZE",
        "What a topic has above this size is moved to cheaper storage: 10GB, infinite (nothing), inherit.",
        _INFINITE, pulsar=("offloadThreshold",), levels=NAMESPACE, least=UNLIMITED, default=UNLIMITED, stored=True,
    ),
    Described(
        ("offload_threshold_ms",), "offload-threshold-age", "time", "TIME",
        "What is older is moved to cheaper storage: 7d, infinite (nothing), inherit.",
        _INFINITE, pulsar=("offloadThresholdInSeconds",), levels=NAMESPACE, scale=1_000, least=UNLIMITED, default=UNLIMITED,
        stored=True,
    ),
    Described(
        ("offload_deletion_lag_ms",), "offload-deletion-lag", "time", "TIME",
        "How long bookies keep what was moved: 4h, inherit.",
        pulsar=("offloadDeletionLagMs",), levels=NAMESPACE, default=14_400_000, stored=True,
    ),
    Described(
        ("replication_clusters",), "replication-clusters", "names", "CLUSTERS",
        "Which clusters have the messages: east,west, inherit.",
        pulsar=("replication",), default=[], stored=True,
    ),
    Described(
        ("encryption_required",), "encryption-required", "word", "WHETHER",
        "Whether producers have to encrypt: on, off, inherit.",
        _SWITCH, pulsar=("encryptionRequired",), levels=NAMESPACE, default=False, stored=True,
    ),
    Described(
        ("dispatcher_pause_on_ack_state",), "dispatcher-pause-on-ack-state", "word", "WHETHER",
        "Whether dispatch waits when the state of acknowledgements is too large to be stored: on, off, inherit.",
        _SWITCH, pulsar=("dispatcherPauseOnAckStatePersistent",), dynamic="dispatcherPauseOnAckStatePersistentEnabled",
        default=False, stored=True,
    ),
    Described(
        ("anti_affinity_group",), "anti-affinity-group", "name", "GROUP",
        "Namespaces of the same group are served by different brokers if possible: also none, inherit.",
        {"none": ""}, pulsar=("antiAffinity",), levels=("namespace",), default="", stored=True,
    ),
    Described(
        ("broker_group",), "broker-group", "name", "GROUP",
        "Serve topics by the brokers of a group only (fast), or before others (preferred:fast): also any, inherit.",
        {"any": ""}, levels=("namespace",), default="",
    ),
    Described(
        ("broker_zone",), "broker-zone", "name", "ZONE",
        "Serve topics by brokers of this zone before others: also any, inherit.",
        {"any": ""}, levels=("namespace",), default="",
    ),
)  # fmt: skip
BY_POLICY = {policy: row for row in DESCRIBED for policy in row.policies}
