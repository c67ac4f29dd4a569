"""What a topic remembers of the queries that attached or published batches, and what that says of a batch. Pure.

The number of a batch is a sequence id, and the query is its producer: `topics/core/deduplication` decides whether it is a
duplicate. What is stored stands in the list of ledgers, written by the compare-and-set that attaches the batch. One that
repeats the last number is that very batch, and done, if its rows are the same; whoever writes rows that differ by nature
gives no digest of them, and then the number alone decides. Anything else is an error: a name that two writes share, a
checkpoint that was copied or begun anew, a backfill.

A query is remembered for a time that each can choose, in one of `max_attached_queries` places. When all are taken, the one
that was used longest ago gives way, among those that asked for a shorter time than `attached_query_ms`: one-shot writes do,
whose only batch cannot be repeated once its staged ledgers are swept. A stream asks for no time of its own, and stays.
"""

from __future__ import annotations

from typing import NamedTuple

from magnetar.proto.errors import InvalidArgument, TooManyRequests

from ..log.records import AttachedQuery, PublishedBatch, TopicRecord
from ..settings import BrokerSettings
from ..topics.core.deduplication import is_duplicate
from .names import check_text


class Batch(NamedTuple):
    """Which batch of which query; `remember_ms` 0: as the settings say."""

    query: str
    number: int
    remember_ms: int = 0
    content: int = 0  # digest of its rows, whatever their order; 0: the number alone says whether it is done

    def check(self) -> None:
        """Raises InvalidArgument."""
        check_text("query", self.query)
        if not 0 <= self.number < 1 << 63 or self.remember_ms < 0 or not 0 <= self.content < 1 << 64:
            raise InvalidArgument(f"batch {self.number} of query {self.query!r} is not possible")

    def expiry(self, now_ms: int, settings: BrokerSettings) -> int:
        """When a batch of now is forgotten."""
        return now_ms + (self.remember_ms or settings.attached_query_ms)


def done_before(record: TopicRecord, batch: Batch) -> bool:
    """Whether the topic has this very batch. Raises InvalidArgument if it has another one in its place."""
    last = record.last_of(batch.query)
    if last is None or not is_duplicate(last.batch, batch.number, batch.number):
        return False
    if not batch.content or (batch.number, batch.content) == (last.batch, last.content):
        return True
    what = "with other rows" if batch.number == last.batch else "which is later"
    raise InvalidArgument(
        f"batch {batch.number} of query {batch.query!r} is not written: the topic has batch {last.batch} of it, {what}. "
        "Each write of a batch needs a query name of its own, and so does a write whose numbers begin anew; a stream from a "
        "copied checkpoint needs a new one. If it is a repeated batch whose rows come out differently each time (uuid(), "
        "rand()), set the option repeated_batch to 'done'"
    )


class Remembered(NamedTuple):
    """Fields of the record, by query."""

    attached: dict[str, AttachedQuery]
    publishing: dict[str, PublishedBatch]


def remembered(record: TopicRecord, query: str, now_ms: int, settings: BrokerSettings) -> Remembered:
    """What stays once there is a batch of `query`, with room for it. Raises TooManyRequests, which names the setting.

    An earlier batch of `query` itself stands in `attached`, and nothing of it in `publishing`.
    """
    attached = {name: state for name, state in record.attached.items() if state.expires_ms > now_ms}
    publishing = {
        name: state
        for name, state in record.publishing.items()
        if state.expires_ms > now_ms and name != query
    }
    published = record.publishing.get(query)
    if published is not None and published.confirmed:
        attached[query] = AttachedQuery(
            published.batch, published.used_ms, published.expires_ms, published.content
        )
    others = {*attached, *publishing} - {query}
    if len(others) >= settings.max_attached_queries:
        oldest = _oldest(attached, publishing, query, now_ms, settings)
        if oldest is None:
            raise TooManyRequests(
                f"{len(others)} queries attached ledgers to this topic and are remembered; raise the broker's "
                f"max_attached_queries, or lower its attached_query_ms={settings.attached_query_ms}: a query that ends soon "
                "can ask to be remembered for a shorter time"
            )
        attached.pop(oldest, None)
        publishing.pop(oldest, None)
    return Remembered(attached, publishing)


def _oldest(
    attached: dict[str, AttachedQuery],
    publishing: dict[str, PublishedBatch],
    query: str,
    now_ms: int,
    settings: BrokerSettings,
) -> str | None:
    """Whose ledgers are attached or swept by now, so that the same ones cannot come again."""
    states: dict[str, AttachedQuery | PublishedBatch] = {**attached, **publishing}
    may_go = {
        name: state.used_ms
        for name, state in states.items()
        if name != query
        and state.expires_ms - state.used_ms < settings.attached_query_ms
        and state.used_ms + settings.staged_ttl_ms < now_ms
    }
    return min(may_go, key=may_go.__getitem__, default=None)
