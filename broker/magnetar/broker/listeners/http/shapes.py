"""Figures of topics under Pulsar's names. What Magnetar does not have is there as Pulsar shows it of a topic without it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import reduce
from itertools import islice
from typing import Any, Final

from magnetar.proto.policy_table import BY_POLICY
from magnetar.proto.pulsar.ids import pack_entry

from ...compaction.topic_compaction import CompactionStats
from ...cursors.core.acks import INDEX_BITS
from ...dispatch.subscription import Subscription
from ...service.admin import FoundMessage, TopicFigures
from ...service.results import ConsumerStats, ProducerStats, TopicStats
from ...service.stats import MAX_LEDGERS
from ...topics.topic import Topic
from .routes import Asked

_TYPES: Final = BY_POLICY["subscription_types"].pulsar_words
_ONE_ACTIVE: Final = ("exclusive", "failover")  # types of which one consumer gets the messages
_COMPACTIONS: Final = {"never": "NOT_RUN", "running": "RUNNING", "done": "SUCCESS", "failed": "ERROR"}
_STATES: Final = {"writing": "LedgerOpened", "idle": "ClosedLedger", "rolling": "CreatingLedger"}
_EPOCH: Final = "1970-01-01T00:00:00Z"
_MOST_RANGES = 100  # that a cursor shows

# Fields of TopicStats, SubscriptionStats and ConsumerStats; or what is always said.
_TOPIC: Final = {
    "msgRateIn": "message_rate_in", "msgThroughputIn": "byte_rate_in", "msgRateOut": "message_rate_out",
    "msgThroughputOut": "byte_rate_out", "bytesInCounter": "bytes_in", "msgInCounter": "messages_in",
    "bytesOutCounter": "bytes_out", "msgOutCounter": "messages_out", "storageSize": "stored_bytes",
    "offloadedStorageSize": "archived_bytes", "waitingPublishers": "waiting_producers",
    "publishRateLimitedTimes": "held_times",
}  # fmt: skip
_NOT_OF_TOPICS: Final = {
    **dict.fromkeys(
        "systemTopicBytesInCounter bytesOutInternalCounter "
        "lastOffloadLedgerId lastOffloadSuccessTimeStamp lastOffloadFailureTimeStamp ongoingTxnCount abortedTxnCount "
        "committedTxnCount nonContiguousDeletedMessagesRangesSerializedSize delayedMessageIndexSizeInBytes".split(), 0
    ),
    "msgChunkPublished": False, "replication": {},
}  # fmt: skip
_SUBSCRIPTION: Final = {
    "msgRateOut": "message_rate_out", "msgThroughputOut": "byte_rate_out", "bytesOutCounter": "bytes_out",
    "msgOutCounter": "messages_out", "msgRateRedeliver": "redelivery_rate", "messageAckRate": "acknowledge_rate",
    "msgBacklog": "backlog_messages", "backlogSize": "backlog_bytes", "msgDelayed": "delayed_messages",
    "blockedSubscriptionOnUnackedMsgs": "blocked_on_unacked_messages", "msgInReplay": "redelivery_messages",
    "unackedMessages": "unacked_messages", "isDurable": "durable", "durable": "durable",
    "nonContiguousDeletedMessagesRanges": "acknowledged_ranges", "subscriptionProperties": "properties",
}  # fmt: skip
_NOT_OF_SUBSCRIPTIONS: Final = {
    **dict.fromkeys(
        "chunkedMessageRate msgRateExpired totalMsgExpired lastExpireTimestamp "
        "lastConsumedFlowTimestamp lastConsumedTimestamp lastAckedTimestamp lastMarkDeleteAdvancedTimestamp "
        "drainingHashesCount drainingHashesClearedTotal drainingHashesUnackedMessages delayedMessageIndexSizeInBytes "
        "nonContiguousDeletedMessagesRangesSerializedSize filterProcessedMsgCount filterAcceptedMsgCount "
        "filterRejectedMsgCount filterRescheduledMsgCount dispatchThrottledMsgEventsBySubscriptionLimit "
        "dispatchThrottledBytesEventsBySubscriptionLimit dispatchThrottledMsgEventsByTopicLimit "
        "dispatchThrottledBytesEventsByTopicLimit dispatchThrottledMsgEventsByBrokerLimit "
        "dispatchThrottledBytesEventsByBrokerLimit".split(), 0
    ),
    "isReplicated": False, "replicated": False, "allowOutOfOrderDelivery": False,
    "consumersAfterMarkDeletePosition": {},
}  # fmt: skip
_CONSUMER: Final = {
    "bytesOutCounter": "delivered_bytes", "msgOutCounter": "delivered_messages", "consumerName": "name",
    "availablePermits": "permits", "unackedMessages": "unacked_messages", "drainingHashesCount": "draining_slots",
    "blockedConsumerOnUnackedMsgs": "blocked_on_unacked_messages", "msgRateOut": "message_rate_out",
    "msgThroughputOut": "byte_rate_out", "msgRateRedeliver": "redelivery_rate", "messageAckRate": "acknowledge_rate",
}  # fmt: skip
_NOT_OF_CONSUMERS: Final = {
    **dict.fromkeys(
        "chunkedMessageRate avgMessagesPerEntry drainingHashesClearedTotal drainingHashesUnackedMessages "
        "lastAckedTimestamp lastConsumedTimestamp lastConsumedFlowTimestamp".split(), 0
    ),
    "lastAckedTime": _EPOCH, "lastConsumedTime": _EPOCH,
}  # fmt: skip
_PRODUCER: Final = {
    "msgRateIn": "message_rate_in", "msgThroughputIn": "byte_rate_in", "producerName": "name",
}  # fmt: skip
_NOT_OF_PRODUCERS: Final = {"chunkedMessageRate": 0.0, "supportsPartialProducer": False}
_CLIENT: Final = {"address": "address", "clientVersion": "client", "metadata": "metadata"}  # of both
# Of these the figure of a partitioned topic is the largest of its partitions'; all other numbers are summed.
_LARGEST: Final = ("oldestBacklogMessageAgeSeconds", "backlogQuotaLimitSize", "backlogQuotaLimitTime")
_OF_ONE_TOPIC: Final = ("deduplicationStatus", "ownerBroker")


def iso(time_ms: int) -> str:
    """As Java writes an instant."""
    text = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def message_id(ledger: int = -1, packed: int = -1, index: int = -1, partition: int = -1) -> dict[str, int]:
    """As Pulsar's clients know it (`proto.pulsar.ids`). `index`: in its batch, -1: it is alone."""
    return {
        "ledgerId": ledger, "entryId": packed, "partitionIndex": partition, "batchSize": 0, "batchIndex": index,
    }  # fmt: skip


def packed_id(found: FoundMessage) -> tuple[int, int, int]:
    """Of a message that was found: the first three of `message_id`."""
    first, end = found.batch
    index = -1 if end - first == 1 else found.number - first
    return found.ledger_id, pack_entry(found.entry_id, first), index


def compaction(stats: CompactionStats) -> dict[str, str]:
    """Its status."""
    return {"status": _COMPACTIONS[stats.state], "lastError": stats.error}


def _take(names: Mapping[str, str], stats: object) -> dict[str, Any]:
    return {name: getattr(stats, field) for name, field in names.items()}


def topic(figures: TopicFigures, asked: Asked) -> dict[str, Any]:
    """`stats`, without what the query excludes."""
    found, stats = figures
    query, now_ms = asked.query, asked.service.clock.now_ms()
    earliest = {}
    subscriptions = {}
    for name, one in stats.subscriptions.items():
        waits_since = now_ms - one.backlog_age_ms if one.backlog_messages else -1
        earliest[name] = waits_since if query.get("getEarliestTimeInBacklog") == "true" else 0
        subscriptions[name] = {
            **_NOT_OF_SUBSCRIPTIONS,
            **_take(_SUBSCRIPTION, one),
            "type": _TYPES.get(one.type, "None"),
            "msgBacklogNoDelayed": max(one.backlog_messages - one.delayed_messages, 0),
            "earliestMsgPublishTimeInBacklog": earliest[name],
            "consumers": [
                {**_NOT_OF_CONSUMERS, **_take(_CONSUMER, consumer), **_client(consumer)}
                for consumer in one.consumers
            ],
        }
        active = [consumer.name for consumer in one.consumers if consumer.active]
        if active and one.type in _ONE_ACTIVE:
            subscriptions[name]["activeConsumerName"] = active[0]
        if query.get("subscriptionBacklogSize") == "false":
            subscriptions[name]["backlogSize"] = -1
        if query.get("excludeConsumers") == "true":
            subscriptions[name]["consumers"] = []
    ages = [
        one.backlog_age_ms for one in stats.subscriptions.values() if one.durable and one.backlog_messages
    ]
    publishers = [
        {
            **_NOT_OF_PRODUCERS,
            **_take(_PRODUCER, one),
            **_client(one),
            "averageMsgSize": _average(one),
            "accessMode": one.access_mode.title().replace("_", ""),
            "producerId": number,
        }
        for number, one in enumerate(stats.producers)
    ]
    deduplication = "Enabled" if found.deduplication.on else "Disabled"
    return {
        **_NOT_OF_TOPICS,
        **_take(_TOPIC, stats),
        "averageMsgSize": _average(stats),
        "backlogSize": max((one.backlog_bytes for one in stats.subscriptions.values()), default=0),
        "backlogQuotaLimitSize": _limit(found, "backlog_quota_bytes", 1),
        "backlogQuotaLimitTime": _limit(found, "backlog_quota_age_ms", 1000),
        "oldestBacklogMessageAgeSeconds": max(ages, default=-1_000) // 1_000,
        "publishers": [] if query.get("excludePublishers") == "true" else publishers,
        "subscriptions": subscriptions,
        "earliestMsgPublishTimeInBacklogs": reduce(_earliest, earliest.values(), 0),
        **({"deduplicationStatus": deduplication} if found.name.persistent else {"msgDropRate": stats.drop_rate}),
        "nonContiguousDeletedMessagesRanges": sum(one.acknowledged_ranges for one in stats.subscriptions.values()),
        "compaction": {
            "lastCompactionRemovedEventCount": 0, "lastCompactionSucceedTimestamp": stats.compaction.compacted_ms,
            "lastCompactionFailedTimestamp": 0, "lastCompactionDurationTimeInMills": 0,
        },
        "ownerBroker": asked.service.settings.http_url.partition("://")[2],
    }  # fmt: skip


def _client(stats: ProducerStats | ConsumerStats) -> dict[str, Any]:
    return {**_take(_CLIENT, stats), "connectedSince": iso(stats.opened_ms)}


def _earliest(left: int, right: int) -> int:
    """Of two times, either of which may be none: 0 (it was not asked) or -1 (no backlog)."""
    return min((one for one in (left, right) if one > 0), default=left or right)


def _average(stats: TopicStats | ProducerStats) -> float:
    return stats.byte_rate_in / stats.message_rate_in if stats.message_rate_in else 0.0


def _limit(of: Topic, policy: str, scale: int) -> int:
    """-1: none, or it is not known now."""
    in_force = of.policies.in_force()
    value = -1 if in_force is None else int(in_force.value(policy)[0])
    return value // scale if value > 0 else -1


def partitioned(answers: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """`partitioned-stats`, from those of each partition."""
    found: dict[str, Any] = {}
    for answer in answers.values():
        found = _sum(found, {key: value for key, value in answer.items() if key not in _OF_ONE_TOPIC})
    shown = answers if asked.query.get("perPartition") == "true" else {}
    oldest = max(found["oldestBacklogMessageAgeSeconds"], 0)
    return {**found, "oldestBacklogMessageAgeSeconds": oldest, **parts(answers, asked), "partitions": shown}


def parts(answers: Mapping[str, Any], _: Asked) -> dict[str, Any]:
    """Answers by partition."""
    return {"metadata": metadata(len(answers)), "partitions": answers}


def metadata(partitions: int) -> dict[str, Any]:
    """Of a partitioned topic."""
    return {"partitions": partitions, "deleted": False}


def _sum(left: Any, right: Any, key: str = "") -> Any:
    if isinstance(left, dict):
        return {
            **left,
            **{name: _sum(left[name], one, name) if name in left else one for name, one in right.items()},
        }
    if isinstance(left, bool | str):
        return left or right
    if key.startswith("earliestMsg"):
        return _earliest(left, right)
    return max(left, right) if key in _LARGEST else left + right


def internal(figures: TopicFigures) -> dict[str, Any]:
    """`internalStats`: the last ledgers, the one that is written to included, and the cursors."""
    found, stats = figures
    ledgers, record = found.ledger.list, found.ledger.list.record
    infos = [*ledgers.archived_ledgers, *ledgers.ledgers]
    last, current = ledgers.last_entry(), infos[-1] if infos and not infos[-1].closed else None
    done, entries = record.compaction, sum(one.entries for one in infos)
    shown = infos[-MAX_LEDGERS:]
    cursors = {name: _cursor(found, one) for name, one in found.subscriptions.items()}
    return {
        "entriesAddedCounter": entries,
        "numberOfEntries": entries,
        "totalSize": stats.stored_bytes + stats.archived_bytes,
        "currentLedgerEntries": current.entries if current else 0,
        "currentLedgerSize": current.size if current else 0,
        "lastLedgerCreatedTimestamp": iso((infos[-1].first_append_ms if infos else 0) or record.created_ms),
        "waitingCursorsCount": sum(one["waitingReadOp"] for one in cursors.values()),
        "pendingAddEntriesCount": sum(1 for _ in found.ledger.appending.unconfirmed()),
        "lastConfirmedEntry": f"{ledgers.end[0]}:-1" if last is None else f"{last[0]}:{last[1]}",
        "state": "Terminated" if stats.terminated else _STATES.get(stats.state, stats.state),
        "ledgers": [
            {
                "ledgerId": one.ledger_id, "entries": one.entries, "size": one.size,
                "offloaded": ledgers.archived(one.ledger_id) is not None,
                "underReplicated": one is current and stats.degraded,
            }
            for one in shown
        ],
        "cursors": cursors,
        "schemaLedgers": [],
        "compactedLedger": {
            **dict(zip(("ledgerId", "entries", "size"), (done.ledger_id, done.chunks, done.size) if done else (-1,) * 3)),
            "offloaded": False, "underReplicated": False,
        },
    }  # fmt: skip


def _cursor(of: Topic, one: Subscription) -> dict[str, Any]:
    ledgers, state = of.ledger.list, one.cursor.state
    mark, read = ledgers.normalise(state.mark_delete), one.dispatcher.read_position
    ranges = ((ledger, *both) for ledger, found in state.acked.by_ledger.items() for both in found)
    shown = (
        f"({ledger}:{(first >> INDEX_BITS) - 1}..{ledger}:{last >> INDEX_BITS}]"
        for ledger, first, last in islice(ranges, _MOST_RANGES)
    )
    return {
        "markDeletePosition": f"{mark[0]}:{mark[1] - 1}", "readPosition": f"{read[0]}:{read[1]}",
        "waitingReadOp": read >= ledgers.end, "pendingReadOps": 0, "messagesConsumedCounter": one.acked_messages,
        "cursorLedger": one.cursor.ledger[0], "cursorLedgerLastEntry": one.cursor.ledger[1],
        "individuallyDeletedMessages": f"[{','.join(shown)}]", "lastLedgerSwitchTimestamp": _EPOCH,
        "state": "Open" if one.cursor.ledger[0] >= 0 else "NoLedger", "active": bool(one.consumers),
        "numberOfEntriesSinceFirstNotAckedMessage": max(read[1] - mark[1], 0) if read[0] == mark[0] else 0,
        "totalNonContiguousDeletedMessagesRange": state.range_count,
        "subscriptionHavePendingRead": read >= ledgers.end and bool(one.consumers),
        "subscriptionHavePendingReplayRead": False, "properties": {},
    }  # fmt: skip


def info(figures: TopicFigures) -> dict[str, Any]:
    """`internal-info`: what the metadata say."""
    ledgers, topics = figures.topic.ledger.list, figures.topic.subscriptions
    infos, created = [*ledgers.archived_ledgers, *ledgers.ledgers], ledgers.record.created_ms
    marks = {name: ledgers.normalise(one.cursor.state.mark_delete) for name, one in topics.items()}
    return {
        "version": ledgers.version, "creationDate": iso(created),
        "modificationDate": iso((infos[-1].last_append_ms if infos else 0) or created),
        "ledgers": [
            {
                "ledgerId": one.ledger_id, "timestamp": one.last_append_ms,
                "isOffloaded": ledgers.archived(one.ledger_id) is not None,
            }
            for one in infos[-MAX_LEDGERS:]
        ],
        "cursors": {
            name: {
                "version": 0, "creationDate": iso(created), "modificationDate": _EPOCH,
                "cursorsLedgerId": topics[name].cursor.ledger[0],
                "markDelete": {"ledgerId": mark[0], "entryId": mark[1] - 1},
            }
            for name, mark in marks.items()
        },
    }  # fmt: skip
