"""Figures by topic and subscription, for /metrics: from memory alone, in turns of the loop, bounded in number.

Of `max_topic_metrics` topics, and of so many subscriptions that are durable or of non-persistent topics, each has rows
of its own; those beyond, in the order in which they were loaded, are summed in one row with empty labels (of the ages the
highest counts). What Pulsar counts as well is there under its name, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple

from magnetar.proto.ids import TopicName

from ..dispatch.subscription import Subscription
from ..topics.registry import Broker
from ..topics.topic import Topic
from .stats import TopicOffsets

_TOPIC: Final = ("topic",)
_BOTH: Final = ("topic", "subscription")
_AGE: Final = "subscription_oldest_unacknowledged_seconds"
_QUOTA: Final = "quota"
_QUOTA_AGE: Final = "quota_age"
_LARGEST: Final = (_AGE, _QUOTA, _QUOTA_AGE)  # are not summed
_SINCE = "since this broker loaded the topic"
_TOPICS_PER_TURN = 50  # a millisecond or two of the loop

# What each says, its labels, and whether it is a counter.
TOPIC_METRICS: Final[Mapping[str, tuple[str, tuple[str, ...], bool]]] = {
    "topic_messages_in": (f"Messages that producers sent to the topic, {_SINCE}", _TOPIC, True),
    "topic_bytes_in": (f"Bytes of the batches that producers sent to the topic, {_SINCE}", _TOPIC, True),
    "topic_duplicate_messages": (f"Messages that were sent again, and not stored again, {_SINCE}", _TOPIC, True),
    "topic_messages_out": (f"Messages that were delivered, to all subscriptions together, {_SINCE}", _TOPIC, True),
    "topic_bytes_out": (f"Bytes that were delivered, to all subscriptions together, {_SINCE}", _TOPIC, True),
    "topic_publish_seconds": (
        f"Seconds from an entry's append to its receipts, summed over the entries of the topic, {_SINCE}", _TOPIC, True,
    ),
    "topic_published_entries": (f"Entries of the topic whose producers have their receipts, {_SINCE}", _TOPIC, True),
    "subscription_backlog_messages": (
        "Messages behind the mark-delete position, those acknowledged one by one included; estimated within a ledger",
        _BOTH, False,
    ),
    "subscription_backlog_bytes": ("Bytes that are stored behind the mark-delete position; estimated", _BOTH, False),
    _AGE: (
        "Seconds since the oldest message that is not acknowledged was stored, 0 without a backlog; estimated", _BOTH, False,
    ),
    "subscription_unacked_messages": ("Messages that consumers hold and have not acknowledged", _BOTH, False),
    "topic_dropped_messages": (
        f"Messages of a non-persistent topic that left it before a subscription had them, over all subscriptions, {_SINCE}",
        _TOPIC, True,
    ),
    "subscription_dropped_messages": ("The same of one subscription that has consumers", _BOTH, True),
    "subscription_redelivered_messages": (f"Messages that were delivered once more, {_SINCE}", _BOTH, True),
}  # fmt: skip


class PulsarMetric(NamedTuple):
    """A metric that Pulsar has as well, under its name; dashboards made for it work unchanged."""

    help: str
    labels: tuple[str, ...]
    rising: bool
    figure: str  # where it comes from: a name of TOPIC_METRICS, or one that `_of_topic` or `_of_subscription` adds


_P_TOPIC: Final = ("cluster", "namespace", "topic")
_P_BOTH: Final = (*_P_TOPIC, "subscription")
PULSAR_METRICS: Final[Mapping[str, PulsarMetric]] = {
    "pulsar_in_messages": PulsarMetric("Messages published to the topic", _P_TOPIC, True, "topic_messages_in"),
    "pulsar_in_bytes": PulsarMetric("Bytes published to the topic", _P_TOPIC, True, "topic_bytes_in"),
    "pulsar_rate_in": PulsarMetric("Messages published, a second", _P_TOPIC, False, "message_rate_in"),
    "pulsar_rate_out": PulsarMetric("Messages delivered, a second", _P_TOPIC, False, "message_rate_out"),
    "pulsar_throughput_in": PulsarMetric("Bytes published, a second", _P_TOPIC, False, "byte_rate_in"),
    "pulsar_throughput_out": PulsarMetric("Bytes delivered, a second", _P_TOPIC, False, "byte_rate_out"),
    "pulsar_producers_count": PulsarMetric("Connected producers", _P_TOPIC, False, "producers"),
    "pulsar_subscriptions_count": PulsarMetric("Subscriptions", _P_TOPIC, False, "subscriptions"),
    "pulsar_consumers_count": PulsarMetric("Connected consumers", _P_TOPIC, False, "consumers"),
    "pulsar_storage_size": PulsarMetric("Bytes the topic holds, one copy", _P_TOPIC, False, "stored_bytes"),
    "pulsar_storage_backlog_quota_limit": PulsarMetric(
        "Bytes that a subscription may have unacknowledged, -1: any number", _P_TOPIC, False, _QUOTA,
    ),
    "pulsar_storage_backlog_quota_limit_time": PulsarMetric(
        "Seconds for which a message may be unacknowledged, -1: any time", _P_TOPIC, False, _QUOTA_AGE,
    ),
    "pulsar_publish_rate_limit_times": PulsarMetric(
        "Times that a producer was held as it was ahead of the publish rate", _P_TOPIC, True, "held_times",
    ),
    "pulsar_storage_logical_size": PulsarMetric("The same", _P_TOPIC, False, "stored_bytes"),
    "pulsar_subscription_back_log": PulsarMetric(
        "Messages behind the mark-delete position", _P_BOTH, False, "subscription_backlog_messages",
    ),
    "pulsar_subscription_unacked_messages": PulsarMetric(
        "Messages that consumers hold", _P_BOTH, False, "subscription_unacked_messages",
    ),
    "pulsar_subscription_blocked_on_unacked_messages": PulsarMetric(
        "1 where delivery waits for acknowledgements", _P_BOTH, False, "blocked",
    ),
    "pulsar_subscription_delayed": PulsarMetric("Messages that wait for their time", _P_BOTH, False, "delayed"),
    "pulsar_subscription_consumers_count": PulsarMetric("Connected consumers", _P_BOTH, False, "connected"),
    "pulsar_subscription_msg_rate_out": PulsarMetric("Messages delivered, a second", _P_BOTH, False, "rate_out"),
    "pulsar_subscription_msg_throughput_out": PulsarMetric(
        "Bytes delivered, a second", _P_BOTH, False, "throughput_out",
    ),
    "pulsar_subscription_msg_rate_redeliver": PulsarMetric(
        "Messages delivered again, a second", _P_BOTH, False, "rate_redeliver",
    ),
    "pulsar_subscription_msg_ack_rate": PulsarMetric("Messages acknowledged, a second", _P_BOTH, False, "rate_ack"),
    "pulsar_out_messages": PulsarMetric("Messages delivered", _P_BOTH, True, "messages_out"),
    "pulsar_out_bytes": PulsarMetric("Bytes delivered", _P_BOTH, True, "bytes_out"),
}  # fmt: skip

Labels = tuple[str, ...]
Rows = dict[Labels, float]


async def topic_metrics(broker: Broker) -> Mapping[str, list[tuple[Labels, float]]]:
    """Rows of (label values, number) by the names of TOPIC_METRICS and PULSAR_METRICS. Reads nothing from any disk."""
    figures: dict[str, Rows] = {}
    most = broker.settings.max_topic_metrics
    subscriptions = 0
    for number, topic in enumerate(list(broker.topics.values())):
        if number % _TOPICS_PER_TURN == _TOPICS_PER_TURN - 1:
            await asyncio.sleep(0)
        labels = (str(topic.name),) if number < most else ("",)
        _add(figures, labels, _of_topic(topic))
        durable = [one for one in topic.subscriptions.values() if one.durable or not topic.name.persistent]
        offsets = TopicOffsets(topic) if durable else None
        for subscription in durable:
            assert offsets is not None
            both = (str(topic.name), subscription.name) if subscriptions < most else ("", "")
            subscriptions += 1
            _add(figures, both, _of_subscription(topic, subscription, offsets))
    found = {name: list(figures.get(name, {}).items()) for name in TOPIC_METRICS}
    places = _Places(broker.settings.cluster_name)
    for name, metric in PULSAR_METRICS.items():
        await asyncio.sleep(0)
        found[name] = [(places[labels], value) for labels, value in figures.get(metric.figure, {}).items()]
    return found


class _Places(dict[Labels, Labels]):
    """Labels as Pulsar has them, from ours: the cluster and the namespace come first."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster

    def __missing__(self, labels: Labels) -> Labels:
        namespace = TopicName.parse(labels[0]).full_namespace if labels[0] else ""
        self[labels] = found = (self._cluster, namespace, *labels)
        return found


def _add(found: dict[str, Rows], labels: tuple[str, ...], figures: Mapping[str, float]) -> None:
    for name, number in figures.items():
        rows = found.setdefault(name, {})
        before = rows.get(labels, 0.0)
        rows[labels] = max(before, number) if name in _LARGEST and labels in rows else before + number


def _of_topic(topic: Topic) -> Mapping[str, float]:
    rates = topic.rates.per_second
    return {
        "topic_messages_in": topic.messages_in,
        "topic_bytes_in": topic.bytes_in,
        "topic_duplicate_messages": topic.deduplication.duplicates,
        "topic_messages_out": topic.dispatched.messages_out,
        "topic_bytes_out": topic.dispatched.bytes_out,
        "topic_publish_seconds": topic.publish_s,
        "topic_published_entries": topic.receipted_entries,
        "topic_dropped_messages": topic.dispatched.dropped_messages,
        "message_rate_in": rates[0],
        "byte_rate_in": rates[1],
        "message_rate_out": rates[2],
        "byte_rate_out": rates[3],
        "producers": len(topic.producers),
        "subscriptions": len(topic.subscriptions.values()),
        "consumers": len(topic.subscriptions.consumers),
        _QUOTA: _limit(topic, "backlog_quota_bytes", 1),
        _QUOTA_AGE: _limit(topic, "backlog_quota_age_ms", 1000),
        "held_times": topic.limits.held_times,
        "stored_bytes": topic.ledger.list.size,
    }


def _limit(topic: Topic, policy: str, scale: int) -> float:
    value: int = topic.limits.value(policy)
    return value / scale if value > 0 else -1


def _of_subscription(topic: Topic, subscription: Subscription, offsets: TopicOffsets) -> Mapping[str, float]:
    mark, before, age_ms = offsets.of_mark(subscription)
    dispatch = subscription.dispatcher.core
    rates = subscription.rates.per_second
    return {
        "subscription_backlog_messages": max(offsets.end.messages - before.messages, 0),
        "subscription_backlog_bytes": max(offsets.end.size - before.size, 0),
        _AGE: age_ms / 1000,
        "subscription_unacked_messages": dispatch.tracker.unacked_messages,
        "subscription_dropped_messages": subscription.dropped_messages,
        "subscription_redelivered_messages": dispatch.redelivered_messages,
        "blocked": dispatch.tracker.blocked_on_unacked_messages,
        "delayed": topic.delays.messages_from(mark) if dispatch.tracker.individual_acks else 0,
        "connected": len(subscription.consumers),
        "messages_out": dispatch.delivered[0],
        "bytes_out": dispatch.delivered[1],
        "rate_out": rates[0],
        "throughput_out": rates[1],
        "rate_redeliver": rates[2],
        "rate_ack": rates[3],
    }
