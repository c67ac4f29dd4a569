"""Figures by topic and subscription, for /metrics: from memory alone, in turns of the loop, bounded in number.

Of `max_topic_metrics` topics, and of so many subscriptions that are durable or of non-persistent topics, each has rows
of its own; those beyond, in the order in which they were loaded, are summed in one row with empty labels (of the ages the
highest counts).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from ..dispatch.subscription import Subscription
from ..topics.registry import Broker
from ..topics.topic import Topic
from .stats import TopicOffsets

_TOPIC: Final = ("topic",)
_BOTH: Final = ("topic", "subscription")
_AGE: Final = "subscription_oldest_unacknowledged_seconds"
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

Rows = dict[tuple[str, ...], float]


async def topic_metrics(broker: Broker) -> Mapping[str, list[tuple[tuple[str, ...], float]]]:
    """Rows of (label values, number) by the names of TOPIC_METRICS. Reads nothing from any disk."""
    found: dict[str, Rows] = {name: {} for name in TOPIC_METRICS}
    most = broker.settings.max_topic_metrics
    subscriptions = 0
    for number, topic in enumerate(list(broker.topics.values())):
        if number % _TOPICS_PER_TURN == _TOPICS_PER_TURN - 1:
            await asyncio.sleep(0)
        labels = (str(topic.name),) if number < most else ("",)
        _add(found, labels, _of_topic(topic))
        durable = [one for one in topic.subscriptions.values() if one.durable or not topic.name.persistent]
        offsets = TopicOffsets(topic) if durable else None
        for subscription in durable:
            assert offsets is not None
            both = (str(topic.name), subscription.name) if subscriptions < most else ("", "")
            subscriptions += 1
            _add(found, both, _of_subscription(topic, subscription, offsets))
    return {name: list(rows.items()) for name, rows in found.items()}


def _add(found: dict[str, Rows], labels: tuple[str, ...], figures: Mapping[str, float]) -> None:
    for name, number in figures.items():
        rows = found[name]
        before = rows.get(labels, 0.0)
        rows[labels] = max(before, number) if name == _AGE else before + number


def _of_topic(topic: Topic) -> Mapping[str, float]:
    return {
        "topic_messages_in": topic.messages_in,
        "topic_bytes_in": topic.bytes_in,
        "topic_duplicate_messages": topic.deduplication.duplicates,
        "topic_messages_out": topic.dispatched.messages_out,
        "topic_bytes_out": topic.dispatched.bytes_out,
        "topic_publish_seconds": topic.publish_s,
        "topic_published_entries": topic.receipted_entries,
        "topic_dropped_messages": topic.dispatched.dropped_messages,
    }


def _of_subscription(topic: Topic, subscription: Subscription, offsets: TopicOffsets) -> Mapping[str, float]:
    mark = topic.ledger.list.normalise(subscription.cursor.state.mark_delete)
    dispatch = subscription.dispatcher.core
    entry = topic.log.cached(mark[:2]) or dispatch.source.get(mark[:2])
    before = offsets.estimate(mark, entry)
    return {
        "subscription_backlog_messages": max(offsets.end.messages - before.messages, 0),
        "subscription_backlog_bytes": max(offsets.end.size - before.size, 0),
        _AGE: offsets.age_ms(mark, entry) / 1000,
        "subscription_unacked_messages": dispatch.tracker.unacked_messages,
        "subscription_dropped_messages": subscription.dropped_messages,
        "subscription_redelivered_messages": dispatch.redelivered_messages,
    }
