"""Policies as Pulsar's paths and JSON have them, in both directions, made of the table (`policy_table`).

A `Shape` is what one path sets: a bare value, or an object whose keys are policies of ours. Where our unit is finer than
Pulsar's, what Pulsar sees is rounded up.

>>> retention = SHAPES["retention"]
>>> changes = retention.read({"retentionTimeInMinutes": 180, "retentionSizeInMB": -1})
>>> changes
{'retention_ms': 10800000, 'retention_bytes': -1}
>>> retention.show(changes.get)
{'retentionTimeInMinutes': 180, 'retentionSizeInMB': -1}
>>> SHAPES["messageTTL"].show(Policies().value) is None, SHAPES["messageTTL"].read(120)
(True, {'message_ttl_ms': 120000})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import InvalidArgument
from .policies import Policies
from .policy_table import BY_POLICY, DESCRIBED, UNLIMITED

BACKLOG_QUOTA = "backlogQuota"  # has a shape for each type of quota
Values = Callable[[str], Any]  # a policy's value by its name; None: not set


class _Segment(NamedTuple):
    """What is particular of a path."""

    whole: str = ""  # in Pulsar's object of all policies of a namespace; "": not there
    topic: str = ""  # the path of topics, where it is another one
    by_cluster: bool = False  # in the object it stands below the name of the cluster
    put: bool = False  # namespaces change it by PUT; all else is changed by POST
    status: int = 412  # of what it may not be
    unset: Any = None  # what a namespace shows that has none


_SEGMENTS = {
    "retention": _Segment("retention_policies", status=400),
    "messageTTL": _Segment("message_ttl_in_seconds"),
    BACKLOG_QUOTA: _Segment("backlog_quota_map", unset={}),
    "publishRate": _Segment("publishMaxMessageRate", by_cluster=True),
    "dispatchRate": _Segment("topicDispatchRate", by_cluster=True),
    "subscriptionDispatchRate": _Segment("subscriptionDispatchRate", by_cluster=True),
    "replicatorDispatchRate": _Segment("replicatorDispatchRate", by_cluster=True),
    "subscribeRate": _Segment("clusterSubscribeRate", by_cluster=True),
    "maxProducersPerTopic": _Segment("max_producers_per_topic", "maxProducers"),
    "maxConsumersPerTopic": _Segment("max_consumers_per_topic", "maxConsumers"),
    "maxSubscriptionsPerTopic": _Segment("max_subscriptions_per_topic"),
    "maxConsumersPerSubscription": _Segment("max_consumers_per_subscription"),
    "maxUnackedMessagesPerConsumer": _Segment(
        "max_unacked_messages_per_consumer", "maxUnackedMessagesOnConsumer"
    ),
    "maxUnackedMessagesPerSubscription": _Segment(
        "max_unacked_messages_per_subscription", "maxUnackedMessagesOnSubscription"
    ),
    "maxTopicsPerNamespace": _Segment("max_topics_per_namespace"),
    "subscriptionTypesEnabled": _Segment("subscription_types_enabled", unset=[]),
    "delayedDelivery": _Segment("delayed_delivery_policies"),
    "deduplication": _Segment("deduplicationEnabled", "deduplicationEnabled"),
    "deduplicationSnapshotInterval": _Segment("deduplicationSnapshotIntervalSeconds"),
    "persistence": _Segment("persistence", status=400),
    "compactionThreshold": _Segment("compaction_threshold", put=True),
    "autoTopicCreation": _Segment("autoTopicCreationOverride"),
    "autoSubscriptionCreation": _Segment("autoSubscriptionCreationOverride"),
    "inactiveTopicPolicies": _Segment("inactive_topic_policies"),
    "subscriptionExpirationTime": _Segment("subscription_expiration_time_minutes"),
    "schemaCompatibilityStrategy": _Segment("schema_compatibility_strategy", put=True, unset="UNDEFINED"),
    "schemaValidationEnforced": _Segment("schema_validation_enforced", unset=False),
    "isAllowAutoUpdateSchema": _Segment("is_allow_auto_update_schema", unset=True),
    "offloadThreshold": _Segment("offload_threshold", put=True, unset=UNLIMITED),
    "offloadThresholdInSeconds": _Segment("offload_threshold_in_seconds", put=True, unset=UNLIMITED),
    "offloadDeletionLagMs": _Segment("offload_deletion_lag_ms", put=True),
    "replication": _Segment("replication_clusters"),
    "encryptionRequired": _Segment("encryption_required", unset=False),
    "dispatcherPauseOnAckStatePersistent": _Segment("dispatcherPauseOnAckStatePersistentEnabled"),
}
# Keys beside those of policies: what another key says as well, or nothing.
_BESIDE: Mapping[str, Mapping[str, Any]] = {
    "destination_storage": {"limit": "limitSize", "limitTime": UNLIMITED},
    "message_age": {"limit": UNLIMITED, "limitSize": UNLIMITED},
}


class Shape(NamedTuple):
    """What one path sets."""

    segment: str  # of a namespace's path
    variant: str  # "destination_storage" or "message_age" of a backlog quota; else ""
    keys: Mapping[str, str]  # policies by their key in the object; a bare value has the key ""
    particular: _Segment

    @property
    def topic(self) -> str:
        """The segment of a topic's path."""
        return self.particular.topic or self.segment

    @property
    def levels(self) -> tuple[str, ...]:
        """That have it."""
        return BY_POLICY[next(iter(self.keys.values()))].levels

    def show(self, values: Values) -> Any:
        """JSON; None: nothing of it is set."""
        found = {key: values(policy) for key, policy in self.keys.items()}
        if all(value is None for value in found.values()):
            return None
        shown = {
            key: show_one(self.keys[key], _unsaid(self.keys[key]) if value is None else value)
            for key, value in found.items()
        }
        beside = _BESIDE.get(self.variant, {})
        return shown.get("", shown | {key: shown.get(value, value) for key, value in beside.items()})

    def read(self, given: Any) -> dict[str, Any]:
        """Changes of policies by JSON; null takes all of it back. Raises InvalidArgument."""
        if given is None:
            return dict.fromkeys(self.keys.values())
        if "" in self.keys:
            given = {"": given}
        if not isinstance(given, dict):
            raise InvalidArgument(
                f"{self.segment} is {given!r:.100}; want an object of {', '.join(self.keys)}"
            )
        beside = _BESIDE.get(self.variant, {})
        if unknown := given.keys() - self.keys.keys() - beside.keys():
            raise InvalidArgument(
                f"{self.segment} has no {min(unknown)!r:.100}; it has {', '.join(self.keys)}"
            )
        for key, meaning in beside.items():  # older tools give the limit of a quota only
            if key in given and meaning in self.keys:
                given = {meaning: given[key], **given}
        return {policy: read_one(policy, given.get(key)) for key, policy in self.keys.items()}


def _unsaid(policy: str) -> Any:
    """What holds where only others of the same object are set."""
    return UNLIMITED if policy in ("retention_ms", "retention_bytes") else BY_POLICY[policy].default


def show_one(policy: str, value: Any) -> Any:
    """A policy's value as Pulsar writes it."""
    row = BY_POLICY[policy]
    if isinstance(value, list):
        return [row.pulsar_words.get(one, one) for one in value]
    if isinstance(value, str):
        return row.pulsar_words.get(value, value)
    return -(-value // row.scale) if row.scale > 1 and value > 0 else value


def read_one(policy: str, given: Any) -> Any:
    """A policy's value from Pulsar's; not checked."""
    row = BY_POLICY[policy]
    words = {theirs: ours for ours, theirs in row.pulsar_words.items()}
    if isinstance(given, list):
        return [words.get(one, one) if isinstance(one, str) else one for one in given]
    if isinstance(given, str):
        return words.get(given, given)
    return given * row.scale if type(given) is int and given > 0 else given


def _shapes() -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    for row in DESCRIBED:
        for policy, place in zip(row.policies, row.pulsar, strict=bool(row.pulsar)):
            segment, *variant, key = place.split(".") if "." in place else (place, "")
            name = ".".join((segment, *variant))
            shape = Shape(segment, "".join(variant), {}, _SEGMENTS.get(segment, _Segment()))
            found[name] = known = found.get(name, shape)
            found[name] = known._replace(keys={**known.keys, key: policy})
    return found


# By segment, or SEGMENT.VARIANT.
SHAPES = _shapes()


def whole_of(policies: Policies, cluster: str) -> dict[str, Any]:
    """What is set at a namespace as a part of Pulsar's object of all its policies."""
    found: dict[str, Any] = {}
    for shape in SHAPES.values():
        shown, particular = shape.show(policies.value), shape.particular
        if shape.variant or particular.by_cluster:
            part = found.setdefault(particular.whole, {})
            if shown is not None:
                part[shape.variant or cluster] = shown
        elif particular.whole and (shown is not None or particular.unset is not None):
            found[particular.whole] = particular.unset if shown is None else shown
    return found
