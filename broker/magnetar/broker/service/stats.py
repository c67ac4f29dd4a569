"""Figures of a topic for people and tools."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from magnetar.proto.entry import Entry
from magnetar.proto.errors import EntryNotFound, MagnetarError
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, decode_ledger_entry_header

from ..cursors.core.acks import Position
from ..dispatch.subscription import Subscription
from ..log.appending import Appending
from ..log.records import LedgerInfo
from ..topics.backlog import AcknowledgedBeyond, CountingReads
from ..topics.topic import Topic
from .results import (
    ConsumerStats,
    LedgerStats,
    OpenLedgerStats,
    ProducerStats,
    SubscriptionStats,
    TopicStats,
    UnreadableEntry,
)

_id_of = attrgetter("ledger_id")
MAX_LEDGERS = 1_000  # that the figures of a topic list: the last ones; TopicLedgers has pages of all
MAX_UNREADABLE_ENTRIES = 100  # that the figures of a subscription name; the metrics count all of them


async def topic_stats(topic: Topic) -> TopicStats:
    """Reads few entries, however many subscriptions there are, to count their backlogs (`CountingReads`)."""
    ledger = topic.ledger.list
    total = ledger.message_count
    ledgers, archived = ledger.ledgers, ledger.archived_ledgers
    retained = topic.retention.trimmed_until()
    offsets = TopicOffsets(topic)
    rates = topic.rates.per_second
    return TopicStats(
        topic=str(topic.name),
        state=topic.ledger.appending.state.value,
        messages_in=topic.messages_in,
        bytes_in=topic.bytes_in,
        messages_out=topic.dispatched.messages_out,
        bytes_out=topic.dispatched.bytes_out,
        message_rate_in=rates[0],
        byte_rate_in=rates[1],
        message_rate_out=rates[2],
        byte_rate_out=rates[3],
        drop_rate=rates[4],
        duplicate_messages=topic.deduplication.duplicates,
        dropped_messages=topic.dispatched.dropped_messages,
        stored_messages=total - (ledgers[0].first_index if ledgers else total),
        stored_bytes=ledger.size,
        next_index=total,
        archived_ledgers=len(archived),
        archived_messages=sum(info.messages for info in archived),
        archived_bytes=sum(info.size for info in archived),
        archive_locations=list(dict.fromkeys(one.location for one in ledger.record.archives)),
        trimmed_until=list(retained.position),
        retained_by=retained.reason,
        open_ledger=_open_ledger_stats(topic.ledger.appending),
        degraded=topic.degraded,
        queued_bytes=topic.publish_budget.used,
        staged_ledgers=len(topic.export.staging),
        leases=topic.export.leases.count(),
        producers=[
            ProducerStats(
                session.name,
                session.epoch,
                session.access_mode,
                session.topic_epoch,
                session.port.peer.address,
                session.port.peer.client_version,
                session.messages_in,
                session.bytes_in,
                message_rate_in=session.rates.per_second[0],
                byte_rate_in=session.rates.per_second[1],
                opened_ms=session.opened_ms,
                metadata=session.metadata,
            )
            for session in topic.producers
            if session.active
        ],
        topic_epoch=ledger.record.topic_epoch,
        waiting_producers=topic.producers.waiting,
        held_times=topic.limits.held_times,
        terminated=ledger.record.terminated,
        ledgers=[
            LedgerStats(
                ledger=info.ledger_id,
                stored_ledger=info.stored_id,
                entries=info.entries,
                messages=info.messages,
                bytes=info.size,
                first_index=info.first_index,
                closed=info.closed,
            )
            for info in ledgers[-MAX_LEDGERS:]
        ],
        subscriptions={
            name: await _subscription_stats(topic, subscription, offsets)
            for name, subscription in list(topic.subscriptions.items())
        },
        unavailable_subscriptions={
            name: error.message for name, error in topic.subscriptions.recovery.unavailable.items()
        },
        compaction=topic.compaction.stats(),
    )


def _open_ledger_stats(appending: Appending[Any]) -> OpenLedgerStats | None:
    opened = appending.open_ledger
    if opened is None:
        return None
    metadata = opened.writer.metadata
    return OpenLedgerStats(
        ledger=opened.info.ledger_id,
        bookies=list(metadata.last_ensemble.bookies),
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=metadata.ack_quorum,
        degraded=opened.degraded,
        flush=opened.durability.flush,
        unflushed_bytes=appending.unflushed_bytes,
    )


async def backlog(topic: Topic, subscription: Subscription, offsets: TopicOffsets) -> Offset:
    """What is not acknowledged; `size`: of what lies behind the mark-delete position. Reads few entries."""
    ledgers, state = topic.ledger.list, subscription.cursor.state
    beyond = AcknowledgedBeyond(ledgers, state, offsets.read_entry)
    mark = ledgers.normalise(state.mark_delete)
    before = await offsets.of(mark, subscription.dispatcher.core.source.get(mark[:2]))
    left = offsets.end.messages - before.messages - await beyond.count()
    return Offset(max(left, 0), max(offsets.end.size - before.size, 0))


async def _subscription_stats(
    topic: Topic, subscription: Subscription, offsets: TopicOffsets
) -> SubscriptionStats:
    left = await backlog(topic, subscription, offsets)
    mark = topic.ledger.list.normalise(subscription.cursor.state.mark_delete)
    dispatch = subscription.dispatcher.core
    draining = dispatch.draining_slots
    recovered_from = subscription.cursor.recovered_from
    rates = subscription.rates.per_second
    return SubscriptionStats(
        type=subscription.type,
        durable=subscription.durable,
        epoch=subscription.epoch,
        mark_delete=list(mark),
        recovered_from=None if recovered_from is None else list(recovered_from),
        backlog_messages=left.messages,
        backlog_bytes=left.size,
        backlog_age_ms=offsets.age_ms(mark, dispatch.source.get(mark[:2])),
        acknowledged_ranges=subscription.cursor.state.range_count,
        acknowledged_messages=subscription.acked_messages,
        messages_out=dispatch.delivered[0],
        bytes_out=dispatch.delivered[1],
        message_rate_out=rates[0],
        byte_rate_out=rates[1],
        redelivery_rate=rates[2],
        acknowledge_rate=rates[3],
        delayed_messages=topic.delays.messages_from(mark) if dispatch.tracker.individual_acks else 0,
        redelivery_messages=dispatch.tracker.replay_messages,
        unacked_messages=dispatch.tracker.unacked_messages,
        blocked_on_unacked_messages=dispatch.tracker.blocked_on_unacked_messages,
        unreadable_entries=[
            UnreadableEntry(*key, str(failure.error), failure.attempts)
            for key, failure in sorted(dispatch.source.unreadable.items())[:MAX_UNREADABLE_ENTRIES]
        ],
        skipped_entries=subscription.dispatcher.skipped_entries,
        dropped_messages=subscription.dropped_messages,
        properties=dict(subscription.cursor.properties),
        consumers=[
            ConsumerStats(
                name=consumer.name,
                address=consumer.port.peer.address,
                client=consumer.port.peer.client_version,
                active=dispatch.active in (None, consumer),
                priority_level=consumer.priority_level,
                draining_slots=draining.get(consumer.name, 0),
                permits=consumer.available_permits,
                unacked_messages=consumer.unacked_messages,
                blocked_on_unacked_messages=consumer.blocked_on_unacked_messages,
                delivered_messages=consumer.delivered_messages,
                delivered_bytes=consumer.delivered_bytes,
                message_rate_out=consumer.rates.per_second[0],
                byte_rate_out=consumer.rates.per_second[1],
                redelivery_rate=consumer.rates.per_second[2],
                acknowledge_rate=consumer.rates.per_second[3],
                opened_ms=consumer.opened_ms,
                metadata=consumer.metadata,
            )
            for consumer in subscription.consumers
        ],
    )


class Offset(NamedTuple):
    """What a topic holds before a position."""

    messages: int  # topic-wide index: what was trimmed counts
    size: int  # payload bytes, of the ledgers that it has


class TopicOffsets:
    """Where positions lie in a topic, as of the moment when this was made: one pass over its ledgers serves all.

    So does one budget of reads, `read_entry`.
    """

    def __init__(self, topic: Topic) -> None:
        ledgers = topic.ledger.list
        self._topic = topic
        self._infos = [*ledgers.archived_ledgers, *ledgers.ledgers]
        self._sizes = list(accumulate((info.size for info in self._infos), initial=0))
        self.end = Offset(ledgers.message_count, self._sizes[-1])
        self.read_entry = CountingReads(ledgers, topic.log.read_entry, topic.log.cached)

    async def of(self, position: Position, entry: Entry | None = None) -> Offset:
        """`entry`: the one that the position is in, if that is in memory.

        Else the entry is read, and if it cannot be, the first message of the ledger stands for it. Beyond the budget, and
        within an archived ledger, the offset is estimated: no figure is worth a wait for a distant file.
        """
        key = position[:2]
        if entry is None and self._topic.ledger.list.is_confirmed(*key):
            try:
                entry = await self.read_entry(key)
            except EntryNotFound:
                pass
            except MagnetarError:  # it may be the very entry that the figures name as unreadable
                position = (key[0], 0, 0)
        return self.estimate(position, entry)

    def estimate(self, position: Position, entry: Entry | None) -> Offset:
        """As `of`, from memory alone: without the entry by its number, as if all entries of a ledger were of one size."""
        ledger_id, entry_id, index = position
        at, info = self._find(ledger_id)
        if info is None:
            return self.end
        ledger, before = self._topic.ledger.list, self._sizes[at]
        if not ledger.is_confirmed(ledger_id, entry_id):
            return Offset(info.first_index + info.messages, before + info.size)
        if entry is None:
            messages = min(info.messages * entry_id // info.entries + index, info.messages)
            return Offset(info.first_index + messages, before + info.size * entry_id // info.entries)
        payload = len(entry.data) - LEDGER_ENTRY_HEADER_BYTES
        size = decode_ledger_entry_header(entry.data).length - payload
        return Offset(info.first_index + entry.first_index + index, before + size)

    def of_mark(self, subscription: Subscription) -> tuple[Position, Offset, int]:
        """The mark-delete position, where it lies, and how long ago the message there was stored; estimated."""
        mark = self._topic.ledger.list.normalise(subscription.cursor.state.mark_delete)
        entry = self._topic.log.cached(mark[:2]) or subscription.dispatcher.core.source.get(mark[:2])
        return mark, self.estimate(mark, entry), self.age_ms(mark, entry)

    def age_ms(self, position: Position, entry: Entry | None) -> int:
        """How long ago the message at a position was stored, estimated as in `estimate`; 0 at the end of the topic."""
        ledger_id, entry_id, _ = position
        ledger = self._topic.ledger.list
        _, info = self._find(ledger_id)
        if info is None or not ledger.is_confirmed(ledger_id, entry_id):
            return 0
        if entry is not None:
            stored_ms = entry.append_time_ms
        else:
            took_ms = info.last_append_ms - info.first_append_ms
            stored_ms = info.first_append_ms + took_ms * entry_id // info.entries
        return max(self._topic.ledger.appending.now_ms() - int(stored_ms), 0)

    def _find(self, ledger_id: int) -> tuple[int, LedgerInfo | None]:
        """Its place in the list; None: it is not there."""
        at = bisect_left(self._infos, ledger_id, key=_id_of)
        found = self._infos[at] if at < len(self._infos) else None
        return at, found if found is not None and found.ledger_id == ledger_id else None
