"""Figures of topics under Pulsar's names. What Magnetar does not have is there as Pulsar shows it of a topic without it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from ...compaction.topic_compaction import CompactionStats
from ...cursors.core.acks import INDEX_BITS
from ...dispatch.subscription import Subscription
from ...service.admin import TopicFigures
from ...service.results import ConsumerStats, SubscriptionStats
from ...topics.topic import Topic
from .routes import Asked

_TYPES: Final = {
    "exclusive": "Exclusive",
    "failover": "Failover",
    "shared": "Shared",
    "key_shared": "Key_Shared",
    "": "None",
}
_COMPACTIONS: Final = {"never": "NOT_RUN", "running": "RUNNING", "done": "SUCCESS", "failed": "ERROR"}
_STATES: Final = {"writing": "LedgerOpened", "idle": "ClosedLedger", "rolling": "CreatingLedger"}
_EPOCH: Final = "1970-01-01T00:00:00Z"
_MOST_RANGES = 100  # that a cursor shows
_DISPATCH_LIMITS: Final = tuple(
    f"dispatchThrottled{what}EventsBy{level}Limit"
    for level in ("Subscription", "Topic", "Broker")
    for what in ("Msg", "Bytes")
)
# Nothing of the kind is counted, or there is no such thing.
_NOT_OF_TOPICS: Final = dict.fromkeys(
    (
        "systemTopicBytesInCounter", "bytesOutInternalCounter", "publishRateLimitedTimes",
        "earliestMsgPublishTimeInBacklogs", "lastOffloadLedgerId", "lastOffloadSuccessTimeStamp",
        "lastOffloadFailureTimeStamp", "ongoingTxnCount", "abortedTxnCount", "committedTxnCount",
        "nonContiguousDeletedMessagesRangesSerializedSize", "delayedMessageIndexSizeInBytes",
    ),
    0,
)  # fmt: skip
_NOT_OF_SUBSCRIPTIONS: Final = dict.fromkeys(
    (
        "chunkedMessageRate", "earliestMsgPublishTimeInBacklog", "msgRateExpired", "totalMsgExpired",
        "lastExpireTimestamp", "lastConsumedFlowTimestamp", "lastConsumedTimestamp", "lastAckedTimestamp",
        "lastMarkDeleteAdvancedTimestamp", "drainingHashesCount", "drainingHashesClearedTotal",
        "drainingHashesUnackedMessages", "nonContiguousDeletedMessagesRangesSerializedSize",
        "delayedMessageIndexSizeInBytes", "filterProcessedMsgCount", "filterAcceptedMsgCount",
        "filterRejectedMsgCount", "filterRescheduledMsgCount", *_DISPATCH_LIMITS,
    ),
    0,
)  # fmt: skip
_NOT_OF_CONSUMERS: Final = dict.fromkeys(
    (
        "msgRateOut", "msgThroughputOut", "msgRateRedeliver", "messageAckRate", "chunkedMessageRate",
        "avgMessagesPerEntry", "drainingHashesClearedTotal", "drainingHashesUnackedMessages", "lastAckedTimestamp",
        "lastConsumedTimestamp", "lastConsumedFlowTimestamp",
    ),
    0,
)  # fmt: skip


def iso(time_ms: int) -> str:
    """As Java writes an instant."""
    text = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def message_id(place: tuple[int, int, int], partition: int = -1) -> dict[str, int]:
    """An index of 0 is shown as that of a message that is alone in its entry."""
    ledger, entry, index = place
    return {
        "ledgerId": ledger,
        "entryId": entry,
        "partitionIndex": partition,
        "batchSize": 0,
        "batchIndex": index or -1,
    }


# --- stats -----------------------------------------------------------------------------------------------------------


def topic(figures: TopicFigures, asked: Asked) -> dict[str, Any]:
    """`stats`: as the query asks for it."""
    found, stats = figures
    show = {name: asked.query.get(name) == "true" for name in ("excludePublishers", "excludeConsumers")}
    sizes = asked.query.get("subscriptionBacklogSize") != "false"
    subscriptions = {
        name: _subscription(
            one, found, found.subscriptions.get(name), sizes=sizes, consumers=not show["excludeConsumers"]
        )
        for name, one in stats.subscriptions.items()
    }
    in_force = found.policies.in_force()
    deduplicates = in_force is not None and in_force.value("deduplication")[0]
    horizon = stats.compaction
    return {
        **_NOT_OF_TOPICS,
        "msgRateIn": stats.message_rate_in,
        "msgThroughputIn": stats.byte_rate_in,
        "msgRateOut": stats.message_rate_out,
        "msgThroughputOut": stats.byte_rate_out,
        "bytesInCounter": stats.bytes_in,
        "msgInCounter": stats.messages_in,
        "bytesOutCounter": stats.bytes_out,
        "msgOutCounter": stats.messages_out,
        "averageMsgSize": stats.byte_rate_in / stats.message_rate_in if stats.message_rate_in else 0.0,
        "msgChunkPublished": False,
        "storageSize": stats.stored_bytes,
        "backlogSize": max((one.backlog_bytes for one in stats.subscriptions.values()), default=0),
        "backlogQuotaLimitSize": -1,
        "backlogQuotaLimitTime": -1,
        "oldestBacklogMessageAgeSeconds": -1,
        "offloadedStorageSize": stats.archived_bytes,
        "publishers": []
        if show["excludePublishers"]
        else [
            {
                "accessMode": one.access_mode.title(),
                "producerName": one.name,
                "producerId": number,
                "msgRateIn": 0.0,
                "msgThroughputIn": 0.0,
                "averageMsgSize": 0.0,
                "chunkedMessageRate": 0.0,
                "supportsPartialProducer": False,
                "metadata": {},
            }
            for number, one in enumerate(stats.producers)
        ],
        "waitingPublishers": stats.waiting_producers,
        "subscriptions": subscriptions,
        "replication": {},
        "deduplicationStatus": "Enabled" if deduplicates else "Disabled",
        "nonContiguousDeletedMessagesRanges": sum(
            one.acknowledged_ranges for one in stats.subscriptions.values()
        ),
        "compaction": {
            "lastCompactionRemovedEventCount": 0,
            "lastCompactionSucceedTimestamp": horizon.compacted_ms,
            "lastCompactionFailedTimestamp": 0,
            "lastCompactionDurationTimeInMills": 0,
        },
        "ownerBroker": asked.service.settings.http_url.partition("://")[2],
    }


def _subscription(
    stats: SubscriptionStats, of: Topic, found: Subscription | None, *, sizes: bool, consumers: bool
) -> dict[str, Any]:
    return {
        **_NOT_OF_SUBSCRIPTIONS,
        "msgRateOut": stats.message_rate_out,
        "msgThroughputOut": stats.byte_rate_out,
        "bytesOutCounter": stats.bytes_out,
        "msgOutCounter": stats.messages_out,
        "msgRateRedeliver": stats.redelivery_rate,
        "messageAckRate": stats.acknowledge_rate,
        "msgBacklog": stats.backlog_messages,
        "backlogSize": stats.backlog_bytes if sizes else -1,
        "msgBacklogNoDelayed": max(stats.backlog_messages - stats.delayed_messages, 0),
        "blockedSubscriptionOnUnackedMsgs": stats.blocked_on_unacked_messages,
        "msgDelayed": stats.delayed_messages,
        "msgInReplay": stats.redelivery_messages,
        "unackedMessages": stats.unacked_messages,
        "type": _TYPES[stats.type],
        "consumers": [_consumer(one) for one in stats.consumers] if consumers else [],
        "isDurable": stats.durable,
        "isReplicated": False,
        "allowOutOfOrderDelivery": False,
        "consumersAfterMarkDeletePosition": {},
        "nonContiguousDeletedMessagesRanges": stats.acknowledged_ranges,
        "subscriptionProperties": {},
        "durable": stats.durable,
        "replicated": False,
    }


def _consumer(stats: ConsumerStats) -> dict[str, Any]:
    return {
        **_NOT_OF_CONSUMERS,
        "bytesOutCounter": stats.delivered_bytes,
        "msgOutCounter": stats.delivered_messages,
        "consumerName": stats.name,
        "availablePermits": stats.permits,
        "unackedMessages": stats.unacked_messages,
        "blockedConsumerOnUnackedMsgs": stats.blocked_on_unacked_messages,
        "drainingHashesCount": stats.draining_slots,
        "metadata": {},
        "lastAckedTime": _EPOCH,
        "lastConsumedTime": _EPOCH,
    }


# Of these the figure of the whole is the largest of the parts'; all other numbers are summed.
_LARGEST: Final = ("oldestBacklogMessageAgeSeconds", "backlogQuotaLimitSize", "backlogQuotaLimitTime")
_OF_ONE_TOPIC: Final = ("deduplicationStatus", "ownerBroker")


def partitioned(answers: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """`partitioned-stats`, from those of each partition."""
    found: dict[str, Any] = {}
    for answer in answers.values():
        found = _sum(found, {key: value for key, value in answer.items() if key not in _OF_ONE_TOPIC})
    shown = answers if asked.query.get("perPartition") == "true" else {}
    return {
        **found,
        "oldestBacklogMessageAgeSeconds": max(found["oldestBacklogMessageAgeSeconds"], 0),
        **parts(shown, asked, len(answers)),
    }


def parts(answers: Mapping[str, Any], _: Asked, count: int = -1) -> dict[str, Any]:
    """Answers by partition, as the internal figures of a partitioned topic."""
    number = len(answers) if count < 0 else count
    return {"metadata": {"partitions": number, "deleted": False}, "partitions": answers}


def _sum(left: Any, right: Any, key: str = "") -> Any:
    if isinstance(left, dict) and isinstance(right, dict):
        both = {**left, **right}
        return {
            name: _sum(left[name], right[name], name) if name in left and name in right else both[name]
            for name in both
        }
    if isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(left, bool | str) or left is None:
        return left or right
    return max(left, right) if key in _LARGEST else left + right


# --- the ledgers and cursors -----------------------------------------------------------------------------------------


def internal(figures: TopicFigures) -> dict[str, Any]:
    """`internalStats`: the ledgers as they are, the current one included."""
    found, stats = figures
    ledgers, record = found.ledger.list, found.ledger.list.record
    infos = [*ledgers.archived_ledgers, *ledgers.ledgers]
    last, current = ledgers.last_entry(), infos[-1] if infos and not infos[-1].closed else None
    end = ledgers.end
    compacted = record.compaction
    return {
        "entriesAddedCounter": sum(one.entries for one in infos),
        "numberOfEntries": sum(one.entries for one in infos),
        "totalSize": sum(one.size for one in infos),
        "currentLedgerEntries": current.entries if current else 0,
        "currentLedgerSize": current.size if current else 0,
        "lastLedgerCreatedTimestamp": iso((infos[-1].first_append_ms if infos else 0) or record.created_ms),
        "waitingCursorsCount": sum(
            one.durable and not _has_more(found, one) for one in found.subscriptions.values()
        ),
        "pendingAddEntriesCount": sum(1 for _ in found.ledger.appending.unconfirmed()),
        "lastConfirmedEntry": f"{end[0]}:-1" if last is None else f"{last[0]}:{last[1]}",
        "state": "Terminated" if stats.terminated else _STATES.get(stats.state, stats.state),
        "ledgers": [
            {
                "ledgerId": one.ledger_id,
                "entries": one.entries,
                "size": one.size,
                "offloaded": ledgers.archived(one.ledger_id) is not None,
                "underReplicated": one is current and stats.degraded,
            }
            for one in infos
        ],
        "cursors": {name: _cursor(found, one) for name, one in found.subscriptions.items()},
        "schemaLedgers": [],
        "compactedLedger": {
            "ledgerId": -1 if compacted is None else compacted.ledger_id,
            "entries": -1 if compacted is None else compacted.chunks,
            "size": -1 if compacted is None else compacted.size,
            "offloaded": False,
            "underReplicated": False,
        },
    }


def _has_more(of: Topic, subscription: Subscription) -> bool:
    return subscription.dispatcher.read_position < of.ledger.list.end


def _cursor(of: Topic, subscription: Subscription) -> dict[str, Any]:
    ledgers, state = of.ledger.list, subscription.cursor.state
    mark, read = ledgers.normalise(state.mark_delete), subscription.dispatcher.read_position
    ledger, last_entry = subscription.cursor.ledger
    waits = not _has_more(of, subscription)
    return {
        "markDeletePosition": f"{mark[0]}:{mark[1] - 1}",
        "readPosition": f"{read[0]}:{read[1]}",
        "waitingReadOp": waits,
        "pendingReadOps": 0,
        "messagesConsumedCounter": subscription.acked_messages,
        "cursorLedger": ledger,
        "cursorLedgerLastEntry": last_entry,
        "individuallyDeletedMessages": _ranges(subscription),
        "lastLedgerSwitchTimestamp": iso(0),
        "state": "Open" if ledger >= 0 else "NoLedger",
        "active": bool(subscription.consumers),
        "numberOfEntriesSinceFirstNotAckedMessage": max(read[1] - mark[1], 0) if read[0] == mark[0] else 0,
        "totalNonContiguousDeletedMessagesRange": state.range_count,
        "subscriptionHavePendingRead": waits and bool(subscription.consumers),
        "subscriptionHavePendingReplayRead": False,
        "properties": {},
    }


def _ranges(subscription: Subscription) -> str:
    """Entries, as Pulsar writes them: the first end is not included."""
    shown: list[str] = []
    for ledger, ranges in subscription.cursor.state.acked.by_ledger.items():
        for first, last in ranges:
            if len(shown) == _MOST_RANGES:
                break
            shown.append(f"({ledger}:{(first >> INDEX_BITS) - 1}..{ledger}:{last >> INDEX_BITS}]")
    return f"[{','.join(shown)}]"


def info(figures: TopicFigures) -> dict[str, Any]:
    """`internal-info`: what the metadata say."""
    ledgers = figures.topic.ledger.list
    infos = [*ledgers.archived_ledgers, *ledgers.ledgers]
    return {
        "version": ledgers.version,
        "creationDate": iso(ledgers.record.created_ms),
        "modificationDate": iso(
            max((one.last_append_ms for one in infos), default=0) or ledgers.record.created_ms
        ),
        "ledgers": [
            {
                "ledgerId": one.ledger_id,
                "timestamp": one.last_append_ms,
                "isOffloaded": ledgers.archived(one.ledger_id) is not None,
                **({"entries": one.entries, "size": one.size} if one.closed else {}),
            }
            for one in infos
        ],
        "cursors": {
            name: {
                "version": 0,
                "creationDate": iso(ledgers.record.created_ms),
                "modificationDate": iso(0),
                "cursorsLedgerId": one.cursor.ledger[0],
                "markDelete": {"ledgerId": mark[0], "entryId": mark[1] - 1},
            }
            for name, one in figures.topic.subscriptions.items()
            for mark in [ledgers.normalise(one.cursor.state.mark_delete)]
        },
    }


def compaction(stats: CompactionStats) -> dict[str, str]:
    """`compaction`: its status."""
    return {"status": _COMPACTIONS[stats.state], "lastError": stats.error}
