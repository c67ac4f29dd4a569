"""Figures of a topic for people and tools, as the answer to TopicStats carries them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from magnetar.proto.errors import MagnetarError

from ..cursors.core.acks import Position
from .producers import SessionState

if TYPE_CHECKING:
    from ..dispatch.subscription import Subscription
    from ..log.ledger_list import LedgerList
    from .topic import Topic

MAX_UNREADABLE_ENTRIES = 100  # that the figures of a subscription name; the metrics count all of them


async def topic_stats(topic: Topic, ledger: LedgerList, state: str) -> dict[str, Any]:
    """A map of plain values. Reads at most one entry per subscription, to tell its backlog."""
    total = ledger.message_count
    kept, archived = ledger.record.ledgers, ledger.record.archived
    return {
        "topic": str(topic.name),
        "state": state,
        "messages_in": topic.messages_in,
        "bytes_in": topic.bytes_in,
        "stored_messages": total - (kept[0].first_index if kept else total),
        "stored_bytes": sum(info.size for info in kept),
        "next_index": total,
        # In none of the other figures.
        "archived_ledgers": len(archived),
        "archived_messages": sum(one.info.messages for one in archived),
        "archived_bytes": sum(one.info.size for one in archived),
        "archive_locations": list(dict.fromkeys(one.location for one in archived)),
        "queued_bytes": topic.publish_budget.used,
        "staged_ledgers": len(topic.export.staging),
        "leases": topic.export.leases.count(),
        "producers": [
            {"name": session.name, "epoch": session.epoch}
            for session in topic.producers
            if session.state is not SessionState.CLOSED
        ],
        "ledgers": [
            {
                "ledger": info.ledger_id,
                "stored_ledger": info.stored_id,
                "entries": info.entries,
                "messages": info.messages,
                "bytes": info.size,
                "first_index": info.first_index,
                "closed": info.closed,
            }
            for info in kept
        ],
        "subscriptions": {
            name: await _subscription_stats(topic, ledger, subscription, total)
            for name, subscription in list(topic.subscriptions.items())
        },
        # Those whose cursor could not be read, and why.
        "unavailable_subscriptions": {
            name: error.message for name, error in topic.recovery.unavailable.items()
        },
    }


async def _subscription_stats(
    topic: Topic, ledger: LedgerList, subscription: Subscription, total: int
) -> dict[str, Any]:
    mark = ledger.normalise(subscription.cursor.state.mark_delete)
    recovered_from = subscription.cursor.recovered_from
    backlog = total - await topic_index(topic, ledger, mark)
    dispatch = subscription.dispatcher.core
    return {
        "type": subscription.type,
        "durable": subscription.durable,
        "epoch": subscription.epoch,
        "mark_delete": list(mark),
        # Where it went on when a part of its cursor was lost; None: nothing was.
        "recovered_from": None if recovered_from is None else list(recovered_from),
        # An upper bound: what was acknowledged out of order beyond the mark-delete position is still in it.
        "backlog_messages": max(backlog, 0),
        "acknowledged_ranges": subscription.cursor.state.range_count,
        "acknowledged_messages": subscription.acked_messages,
        "redelivery_messages": dispatch.tracker.replay_messages,
        "unacked_messages": dispatch.tracker.unacked_messages,
        "blocked_on_unacked_messages": dispatch.tracker.blocked_on_unacked_messages,
        # Delivery waits for them, or goes on without them until they can be read.
        "unreadable_entries": [
            {"ledger": key[0], "entry": key[1], "error": str(failure.error), "attempts": failure.attempts}
            for key, failure in sorted(dispatch.source.unreadable.items())[:MAX_UNREADABLE_ENTRIES]
        ],
        "skipped_entries": subscription.dispatcher.skipped_entries,
        "consumers": [
            {
                "name": consumer.name,
                "permits": consumer.available_permits,
                "unacked_messages": consumer.unacked_messages,
                "blocked_on_unacked_messages": consumer.blocked_on_unacked_messages,
                "delivered_messages": consumer.delivered_messages,
                "delivered_bytes": consumer.delivered_bytes,
            }
            for consumer in subscription.consumers
        ],
    }


async def topic_index(topic: Topic, ledger: LedgerList, position: Position) -> int:
    """Topic-wide index of the message at `position`, of its ledger's first one if its entry cannot be read."""
    ledger_id, entry_id, index = position
    info = ledger.info(ledger_id)
    if info is None:
        return ledger.message_count
    if not ledger.is_confirmed(ledger_id, entry_id):
        return info.first_index + info.messages
    try:
        entry = await topic.read_entry((ledger_id, entry_id))
    except MagnetarError:  # it may be the very entry that the figures tell of as unreadable
        return info.first_index
    first_index: int = entry.first_index
    return info.first_index + first_index + index
